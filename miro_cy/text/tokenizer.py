"""The tokenizer of a model file: text to token ids and back, and the chat template.

Decoding works in bytes: a token is a byte string, and only whole texts or `TextStream` turn bytes into characters.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from miro_cy.errors import BadField, Unsupported
from miro_cy.formats.gguf import GGUFFile
from miro_cy.text.bytelevel import PRE_TOKENIZERS, ByteLevelBPE, piece_bytes
from miro_cy.text.stream import TextStream
from miro_cy.text.template import ChatTemplate
from miro_cy.text.vocabulary import TokenType, Vocabulary, read_merges, read_vocabulary

#: Longer control tokens are not looked for in a text: no real one comes near, and the search costs their length.
MAX_SPECIAL_CHARS = 256


def load_tokenizer(source: str | os.PathLike[str] | GGUFFile) -> Tokenizer:
    """The tokenizer of a GGUF file, which need not hold weights.

    A tokenizer miro does not support loads too; see `Tokenizer.supported`. Raises ModelNotFound, ModelFormatError or
    UnsupportedModel as GGUFFile does, and ModelFormatError when the vocabulary is inconsistent.
    """
    if isinstance(source, GGUFFile):
        return Tokenizer(read_vocabulary(source), read_merges(source))
    with GGUFFile(source) as file:
        return Tokenizer(read_vocabulary(file), read_merges(file))


def token_ids_only(label: str, *, bos_id: int | None = None, eos_ids: Iterable[int] = ()) -> Tokenizer:
    """The tokenizer of a model that comes without one: not supported, and knowing only which tokens end a text."""
    return Tokenizer(
        Vocabulary(
            label=label,
            model="none",
            pre=None,
            tokens=[],
            types=[],
            bos_id=bos_id,
            eos_ids=frozenset(eos_ids),
            add_bos=False,
            template=None,
            specials={},
        ),
        [],
    )


class Tokenizer:
    """Text to token ids and back. Immutable after construction; any number of threads may use it.

    kind: tokenizer model and pre-tokenizer as the file names them, "gpt2/smollm" say; "none" when it has none.
    supported: False when miro cannot read or write this model's text. Then only token ids work: `encode`, `decode`,
        `token_bytes` and `render` raise Unsupported naming `kind`, and a TextStream yields no text.
    vocab_size: entries in the file's vocabulary (0 if it has none); a model may have more rows of logits.
    bos_id, add_bos: beginning-of-sequence token, and whether `encode` puts it first.
    eos_ids: every token that ends a turn, from all places a file can name one.
    """

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str]) -> None:
        self._vocabulary = vocabulary
        self.kind = vocabulary.kind
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.add_bos = vocabulary.add_bos and vocabulary.bos_id is not None
        self.supported = vocabulary.model == "gpt2" and vocabulary.pre in PRE_TOKENIZERS and self.vocab_size > 0
        self._pieces: list[bytes | None] = [None] * self.vocab_size
        self._template: ChatTemplate | None = None
        if not self.supported:
            return
        self._bpe = ByteLevelBPE(vocabulary.tokens, merges, vocabulary.pre or "", vocabulary.label)
        self._user_ids = self._ids_of(TokenType.USER_DEFINED)
        self._special_ids = self._ids_of(TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN)
        self._user_split = _splitter(self._user_ids)
        self._special_split = _splitter(self._special_ids)
        if vocabulary.template is not None:
            self._template = ChatTemplate(vocabulary.template, vocabulary.specials)

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind!r}, vocab_size={self.vocab_size}, supported={self.supported})"

    @property
    def has_template(self) -> bool:
        """Whether `render` can work: the file has a chat template and its tokenizer is supported."""
        return self._template is not None

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special: put BOS first if the file asks for it and the text does not begin with it. Pass False for rendered
        chat templates, which write their own. parse_special: control tokens spelled out in the text ("<|im_end|>")
        become their one id, otherwise they are text like any other; user-defined tokens are always one id.

        Raises Unsupported without a tokenizer, BadField for text that is not valid Unicode or that the vocabulary
        cannot express.
        """
        self._require()
        if not isinstance(text, str):
            raise BadField(f"a text must be a string, not {text!r:.80}", field="prompt")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadField("the text is not valid Unicode (a lone surrogate was found)", field="prompt") from None
        known = self._special_ids if parse_special else self._user_ids
        split = self._special_split if parse_special else self._user_split
        ids: list[int] = []
        # With one group in the pattern, split gives text, token, text, token, ..., text.
        for i, part in enumerate(split.split(text) if split else (text,)):
            if i % 2:
                ids.append(known[part])
            elif part:
                ids += self._bpe.encode(part, part.encode())
        if add_special and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD. skip_special leaves control tokens out.

        Raises Unsupported without a tokenizer, BadField for an id outside the vocabulary.
        """
        self._require()
        pieces = (self.token_bytes(token_id, skip_special=skip_special) for token_id in ids)
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The bytes of one token; none for a control token when skip_special. Raises as `decode` does."""
        self._require()
        try:
            index = operator.index(token_id)
        except TypeError:
            raise BadField(f"a token id must be an integer, not {token_id!r:.80}", field="tokens") from None
        if not 0 <= index < self.vocab_size:
            raise BadField(f"token id {index} is outside the vocabulary of {self.vocab_size}", field="tokens")
        if skip_special and self._vocabulary.types[index] in (TokenType.CONTROL, TokenType.UNKNOWN):
            return b""
        piece = self._pieces[index]
        if piece is None:
            piece = self._pieces[index] = self._make_piece(index)
        return piece

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation, by the model's chat template.

        messages: {"role": str, "content": str} each, at least one. add_generation_prompt: end with the words that open
        the assistant's turn. Raises BadField for messages that are malformed or that the template refuses, Unsupported
        without a usable template.
        """
        self._require()
        if self._template is None:
            raise Unsupported("this model has no chat template; send text or token ids", field="messages")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def stream(self, stops: Sequence[str] = (), skip_special: bool = True) -> TextStream:
        """A new detokeniser for one generated sequence, which ends at the first of the stop strings."""
        return TextStream(self._stream_piece(skip_special), stops)

    def _stream_piece(self, skip_special: bool) -> Callable[[int], bytes]:
        def piece(token_id: int) -> bytes:
            # A model may draw an id past the vocabulary (padding rows); it stands for no text.
            if not self.supported or not 0 <= token_id < self.vocab_size:
                return b""
            return self.token_bytes(token_id, skip_special=skip_special)

        return piece

    def _make_piece(self, index: int) -> bytes:
        token = self._vocabulary.tokens[index]
        kind = self._vocabulary.types[index]
        if kind == TokenType.UNUSED:
            return b""
        literal = kind in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
        return token.encode() if literal else piece_bytes(token)

    def _ids_of(self, *kinds: TokenType) -> dict[str, int]:
        ids: dict[str, int] = {}
        for token_id, (token, kind) in enumerate(zip(self._vocabulary.tokens, self._vocabulary.types, strict=True)):
            if kind in kinds and token:
                ids.setdefault(token, token_id)
        return ids

    def _require(self) -> None:
        if not self.supported:
            raise Unsupported(f"this model's tokenizer ({self.kind:.80}) is not supported; send token ids")


def _splitter(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds these tokens in a text: the leftmost first, then the longest."""
    longest_first = sorted((t for t in tokens if len(t) <= MAX_SPECIAL_CHARS), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
