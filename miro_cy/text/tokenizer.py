"""The tokenizer of a model file: text to token ids and back, and the chat template.

Decoding works in bytes: a token is a byte string, and only whole texts or `TextStream` turn bytes into characters.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miro_client.checks import shown
from miro_cy.errors import BadField, Unsupported
from miro_cy.formats.gguf import GGUFFile
from miro_cy.text.bytelevel import PRE_TOKENIZERS, ByteLevelBPE
from miro_cy.text.codec import Codec
from miro_cy.text.hf_folder import read_folder
from miro_cy.text.spm import SentencePieceCodec, SentencePieces
from miro_cy.text.stream import TextStream
from miro_cy.text.template import ChatTemplate
from miro_cy.text.vocabulary import Vocabulary, read_merges, read_vocabulary


def load_tokenizer(source: str | os.PathLike[str] | GGUFFile) -> Tokenizer:
    """The tokenizer of a GGUF file, which need not hold weights, or of a Hugging Face folder.

    A tokenizer miro does not support loads too, and so does a model without one; see `Tokenizer.supported`. Raises
    ModelNotFound, ModelFormatError or UnsupportedModel as GGUFFile does, and ModelFormatError when the vocabulary, or a
    file beside it, is inconsistent.
    """
    if isinstance(source, GGUFFile):
        return _from_gguf(source)
    if os.path.isdir(source):
        return _from_folder(Path(source))
    with GGUFFile(source) as file:
        return _from_gguf(file)


def _from_gguf(file: GGUFFile) -> Tokenizer:
    vocabulary = read_vocabulary(file)
    return Tokenizer(
        Identity(
            kind=vocabulary.kind,
            vocab_size=len(vocabulary.tokens),
            bos_id=vocabulary.bos_id,
            add_bos=vocabulary.add_bos,
            eos_ids=vocabulary.eos_ids,
            template=vocabulary.template,
            names=vocabulary.names,
        ),
        _codec(vocabulary, file),
    )


def _codec(vocabulary: Vocabulary, file: GGUFFile) -> Codec | None:
    if not vocabulary.tokens:
        return None
    if vocabulary.model == "gpt2" and vocabulary.pre in PRE_TOKENIZERS:
        return ByteLevelBPE(vocabulary, read_merges(file))
    if vocabulary.model == "llama" and vocabulary.scores is not None:
        pieces = SentencePieces(
            label=vocabulary.label,
            tokens=vocabulary.tokens,
            types=vocabulary.types,
            scores=vocabulary.scores,
            unknown_id=vocabulary.unknown_id,
            prefix="first" if vocabulary.add_space_prefix else "never",
        )
        return SentencePieceCodec(pieces, vocabulary.specials())
    return None


def _from_folder(path: Path) -> Tokenizer:
    folder = read_folder(path)
    return Tokenizer(
        Identity(
            kind=folder.kind,
            vocab_size=folder.vocab_size,
            bos_id=folder.bos_id,
            add_bos=folder.add_bos,
            eos_ids=folder.eos_ids,
            template=folder.template,
            template_names=folder.template_names,
            names=folder.names,
        ),
        folder.codec,
    )


@dataclass(frozen=True, slots=True)
class Identity:
    """What a model's files say besides the vocabulary; see `Tokenizer`.

    names: special tokens by the names that chat templates use (bos_token and so on). template_names: of several
    templates in one file; "default" is the one that is used.
    """

    kind: str
    vocab_size: int
    bos_id: int | None = None
    add_bos: bool = False
    eos_ids: frozenset[int] = frozenset()
    template: str | None = None
    template_names: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """Text to token ids and back. Immutable after construction; any number of threads may use it.

    kind: tokenizer model and pre-tokenizer as the file names them, "gpt2/smollm" say, or the file it is in,
        "tokenizer.json/BPE"; "none" when there is none.
    supported: False when miro cannot read or write this model's text. Then only token ids work: `encode`, `decode`,
        `token_bytes` and `render` raise Unsupported naming `kind`, and a TextStream yields no text.
    vocab_size: entries in the vocabulary (0 if there is none); a model may have more rows of logits.
    bos_id, add_bos: beginning-of-sequence token, and whether `encode` puts it first.
    eos_ids: every token that ends a turn, from all places a model's files can name one.
    """

    def __init__(self, identity: Identity, codec: Codec | None) -> None:
        self._codec = codec
        self.kind = identity.kind
        self.vocab_size = identity.vocab_size
        self.bos_id = identity.bos_id
        self.eos_ids = identity.eos_ids
        self.add_bos = identity.add_bos and identity.bos_id is not None
        self.supported = codec is not None
        self._pieces: list[bytes | None] = [None] * (self.vocab_size if codec else 0)
        self._template: ChatTemplate | None = None
        self._template_names = identity.template_names
        if codec is not None and identity.template is not None:
            self._template = ChatTemplate(identity.template, identity.names)

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
        codec = self._require()
        if not isinstance(text, str):
            raise BadField(f"a text must be a string, not {shown(text)}", field="prompt")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadField("the text is not valid Unicode (a lone surrogate was found)", field="prompt") from None
        ids = codec.encode(text, parse_special=parse_special)
        if add_special and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD. skip_special leaves control tokens out.

        continues: the ids go on with a text instead of being all of it. It matters where a vocabulary puts a space
        before each text: that space comes off again, but not in the middle of one.

        Raises Unsupported without a tokenizer, BadField for an id outside the vocabulary.
        """
        leading = self._require().leading

        def piece(token_id: int) -> bytes:
            return self.token_bytes(token_id, skip_special=skip_special)

        return b"".join(map(piece if continues else leading.strip(piece), ids)).decode(errors="replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The bytes of one token; none for a control token when skip_special. Raises as `decode` does."""
        codec = self._require()
        try:
            index = operator.index(token_id)
        except Exception:  # TypeError, or whatever an __index__ of somebody else's raises
            raise BadField(f"a token id must be an integer, not {shown(token_id)}", field="tokens") from None
        if not 0 <= index < self.vocab_size:
            raise BadField(f"token id {shown(index)} is outside the vocabulary of {self.vocab_size}", field="tokens")
        if skip_special and index in codec.skipped:
            return b""
        piece = self._pieces[index]
        if piece is None:
            piece = self._pieces[index] = codec.piece(index)
        return piece

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation, by the model's chat template.

        messages: {"role": str, "content": str} each, at least one; `messages.check_messages` says what else one may
        hold. add_generation_prompt: end with the words that open the assistant's turn. Raises BadField for messages
        that are malformed or that the template refuses, Unsupported without a usable template.
        """
        self._require()
        if self._template is None:
            names = ", ".join(self._template_names)
            reason = f"has several chat templates and no default ({names:.200})" if names else "has no chat template"
            raise Unsupported(f"this model {reason}; send text or token ids", field="messages")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def stream(self, stops: Sequence[str] = (), skip_special: bool = True, *, continues: bool = False) -> TextStream:
        """A new detokeniser for one generated sequence, which ends at the first of the stop strings.

        skip_special, continues: as for `decode`, which gives the same text for the same ids.
        """
        piece = self._stream_piece(skip_special)
        if self._codec is not None and not continues:
            piece = self._codec.leading.strip(piece)
        return TextStream(piece, stops)

    def _stream_piece(self, skip_special: bool) -> Callable[[int], bytes]:
        def piece(token_id: int) -> bytes:
            # A model may draw an id past the vocabulary (padding rows); it stands for no text.
            if not self.supported or not 0 <= token_id < self.vocab_size:
                return b""
            return self.token_bytes(token_id, skip_special=skip_special)

        return piece

    def _require(self) -> Codec:
        if self._codec is None:
            raise Unsupported(f"this model's tokenizer ({self.kind:.80}) is not supported; send token ids")
        return self._codec
