"""`tokenizer.json`: the whole pipeline of a tokenizer, run by Hugging Face's `tokenizers` library.

The library encodes. It decodes whole sequences only, so what its decoders do to one token is done here, in bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from miro_cy.errors import BadField, ModelFormatError, Unsupported
from miro_cy.text.bytelevel import check_bytes, missing_bytes, piece_bytes
from miro_cy.text.codec import Codec, Leading, encode_released
from miro_cy.text.files import MAX_TOKENS, read_bytes
from miro_cy.text.growth import Damaged, Growth, growth, replacing, steps
from miro_cy.text.specials import Special
from miro_cy.text.vocabulary import BYTE_PIECE

if TYPE_CHECKING:
    import tokenizers

MAX_BYTES = 256 * 2**20
#: Of a text once it is normalised and cut; each byte costs the library about twenty.
MAX_TEXT_BYTES = 2**26
#: How many bytes one byte of a text may become (the worst of real tokenizers' steps, multiplied), and how many on top.
MAX_GROWTH, MAX_EXTRA_BYTES = 2**13, 2**16
#: Of what a BPE writes before or after each part of a word.
MAX_AFFIX_CHARS = 256
#: How many times longer than its name the text of a token may be.
MAX_TOKEN_GROWTH = 64
T = TypeVar("T")


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    byte_fallback: bool = False
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class Header(msgspec.Struct):
    """The parts of the file that miro looks at itself; the vocabulary is not among them."""

    model: _Model
    added_tokens: list[_Added] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None


class Unusable(Exception):
    """The file may be fine, but miro cannot decode for it; the text says what is not supported."""


class JsonCodec(Codec):
    """The codec of a `tokenizer.json`.

    added: tokens that files beside it add. named: those that they call special, as far as it has them. Raises
    ModelFormatError for a damaged file, Unusable for one with parts that miro does not know.
    """

    def __init__(self, path: Path, added: Iterable[Special], named: Iterable[str]) -> None:
        data = read_bytes(path, MAX_BYTES)
        self.header = header = _header(path, data)
        for token in header.added_tokens:
            if not 0 <= token.id < MAX_TOKENS:
                raise ModelFormatError(f"{path}: added token {token.content!r:.80} has the id {token.id}")
        added = list(added)
        self._growth = _bounded(path, header, [token.text for token in added])
        self._library = _guard(path, lambda: _load(data))
        self.model_type = type(self._library.model).__name__  # older files do not say
        if self.model_type not in ("BPE", "Unigram"):
            raise Unusable(self.model_type)
        self._decode_token, self.leading, bytelevel = _decoder(header.decoder)
        known = {token.content: token for token in header.added_tokens}
        _guard(path, lambda: _add(self._library, path, [token for token in added if token.text not in known]))
        special = {i for token in named if (i := self.id_of(token)) is not None}
        _guard(path, lambda: self._library.add_special_tokens([self._library.id_to_token(i) for i in sorted(special)]))
        vocab: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        if not 0 < self.vocab_size <= MAX_TOKENS:
            raise ModelFormatError(f"{path}: the vocabulary's ids must lie from 0 to {MAX_TOKENS - 1}")
        decoder = self._library.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in decoder.items()}
        self.skipped = frozenset(token_id for token_id, token in decoder.items() if token.special) | special
        model = header.model
        expressible = self.model_type == "Unigram" or model.byte_fallback or bool(model.unk_token)
        if not bytelevel and not expressible:  # the library would drop what no entry has
            raise Unusable(f"{self.model_type} with neither byte tokens nor an unknown token")
        self._missing = frozenset() if expressible else missing_bytes(vocab)
        # A second one, as the setting is the tokenizer's and not the call's; made when first asked for.
        self._spelling: tokenizers.Tokenizer | None = None

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        check_bytes(text, self._missing)
        if self._growth(len(text.encode())) > MAX_TEXT_BYTES:
            raise BadField(
                f"the model's tokenizer may make more than {MAX_TEXT_BYTES} bytes of the text", field="prompt"
            )
        library = self._library if parse_special else self._spelled()
        try:
            return encode_released(library, text)
        except BaseException as error:
            raise BadField(f"the model's tokenizer cannot read this text: {_reason(error)}", field="prompt") from None

    def piece(self, index: int) -> bytes:
        if index in self._added:
            return self._added[index]
        token = self._library.id_to_token(index)
        return b"" if token is None else self._decode_token(token)

    def id_of(self, token: str) -> int | None:
        """The id of an entry by its name."""
        found: int | None = self._library.token_to_id(token)
        return found

    def first_special(self) -> int | None:
        """The id of the special token that the file's post-processor puts first, if it does."""
        return _first_special(self.header.post_processor, self.id_of)

    def _spelled(self) -> tokenizers.Tokenizer:
        if self._spelling is None:
            try:
                spelling = copy.deepcopy(self._library)
            except BaseException as error:
                raise Unsupported(f"the model's tokenizer cannot spell special tokens: {_reason(error)}") from None
            spelling.encode_special_tokens = True
            self._spelling = spelling
        return self._spelling


def _header(path: Path, data: bytes) -> Header:
    try:
        return msgspec.json.decode(data, type=Header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not a tokenizer: {error!s:.200}") from None


def _bounded(path: Path, header: Header, added: list[str]) -> Growth:
    """How much longer texts become. Raises ModelFormatError beyond what a tokenizer needs."""
    try:
        found = growth(header.normalizer, header.pre_tokenizer)
    except Damaged as error:
        raise ModelFormatError(f"{path} is not a tokenizer: {error}") from None
    if found.factor > MAX_GROWTH or found.extra > MAX_EXTRA_BYTES:
        raise ModelFormatError(
            f"{path} makes each byte of a text up to {found.factor} bytes, and {found.extra} more; "
            f"the limits are {MAX_GROWTH} and {MAX_EXTRA_BYTES}"
        )
    names = [*(token.content for token in header.added_tokens), *added]
    if found(sum(len(name.encode()) for name in names)) > MAX_TEXT_BYTES:  # loading normalises them
        raise ModelFormatError(f"{path}: the added tokens may become more than {MAX_TEXT_BYTES} bytes")
    for affix in (header.model.continuing_subword_prefix, header.model.end_of_word_suffix):
        if affix is not None and len(affix) > MAX_AFFIX_CHARS:
            raise ModelFormatError(f"{path}: a BPE prefix or suffix has more than {MAX_AFFIX_CHARS} characters")
    return found


def _load(data: bytes) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    library = Tokenizer.from_str(data.decode())
    # What these do is not for prompts: cut them, fill them up, and tokenize the same text in several ways.
    library.no_truncation()
    library.no_padding()
    if getattr(library.model, "dropout", None) is not None:
        library.model.dropout = None
    return library


def _add(library: tokenizers.Tokenizer, path: Path, added: Iterable[Special]) -> None:
    from tokenizers import AddedToken

    for token in sorted(added, key=lambda token: token.id):
        item = AddedToken(
            token.text, lstrip=token.lstrip, rstrip=token.rstrip, special=token.control, normalized=not token.control
        )
        (library.add_special_tokens if token.control else library.add_tokens)([item])
        found = library.token_to_id(token.text)
        if found != token.id:
            raise ModelFormatError(f"{path}: {token.text!r:.80} should be token {token.id}, but is {found}")


def _guard(path: Path, action: Callable[[], T]) -> T:
    try:
        return action()
    except ModelFormatError:
        raise
    except BaseException as error:
        raise ModelFormatError(f"{path} is not a tokenizer: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    """What the library says. It raises bare Exceptions, and its panics are not even that; anything else goes on."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return f"{error!s:.200}"


def _decoder(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], Leading, bool]:
    """(bytes of one token, what comes off the beginning of a text, whether tokens are written in bytes)."""
    parts = list(steps(decoder, "decoders"))
    if [part.get("type") for part in parts] == ["ByteLevel"]:
        return piece_bytes, Leading(), True
    replaced: list[tuple[str, str]] = []
    leading = Leading()
    fallback = fused = False
    for step in parts:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old and not fused:
                replaced.append((old, new))
            case {"type": "ByteFallback"} if not fused:
                fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused and start >= 0:
                leading = Leading(spaces=start)
            case {"type": "Metaspace", "replacement": str(old)} if old and not fused:
                replaced.append((old, " "))
                scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
                leading = Leading(first_piece=scheme != "never")
            case _:
                raise Unusable(f"decoder {str(step.get('type'))[:40]}")
    if not parts:
        raise Unusable("no decoder")
    if replacing(replaced) > MAX_TOKEN_GROWTH:
        raise Unusable(f"a decoder that makes tokens more than {MAX_TOKEN_GROWTH} times longer")

    def token_bytes(token: str) -> bytes:
        if fallback and (match := BYTE_PIECE.fullmatch(token)):
            return bytes.fromhex(match[1])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    return token_bytes, leading, False


def _first_special(processor: Any, id_of: Callable[[str], int | None]) -> int | None:
    for step in steps(processor, "processors"):
        match step:
            case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": str(name)}}, *_]}:
                specials = step.get("special_tokens")
                match specials.get(name) if isinstance(specials, dict) else None:
                    case {"ids": [int(token_id), *_]}:
                        return token_id
                return id_of(name)
    return None
