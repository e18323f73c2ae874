"""SentencePiece models (Kudo and Richardson, 2018), run by the `sentencepiece` library.

The library reads a protobuf, sentencepiece_model.proto. Whether the vocabulary comes from a GGUF file or from a
`tokenizer.model`, what it gets is written here, from fields that were checked: it is C++ and was not made for hostile
files. Special tokens are found before it sees a text, and the space that goes before a text is put there by hand, as a
text after a special token gets none (what Hugging Face calls legacy=false).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from miro_cy.errors import BadField, ModelFormatError
from miro_cy.text.codec import Leading, SplittingCodec
from miro_cy.text.specials import Special
from miro_cy.text.vocabulary import BYTE_PIECE, TokenType

if TYPE_CHECKING:
    import sentencepiece

SPACE = "\u2581"
#: Algorithms, as the protobuf numbers them.
UNIGRAM, BPE = 1, 2
#: The library takes unused pieces apart again, with a function that calls itself once for each merge.
MAX_UNUSED_CHARS = 256
_RESERVED = "\ue000miro:"


@dataclass(frozen=True, slots=True)
class SentencePieces:
    """A vocabulary. types[i] is the TokenType of tokens[i], scores[i] its score.

    prefix: which texts get a space before them: the first in a sequence, all (also those after special tokens), none.
    collapse: runs of spaces count as one, those at the ends not at all.
    """

    label: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: npt.NDArray[np.float32]
    unknown_id: int | None
    algorithm: int = BPE
    prefix: Literal["first", "always", "never"] = "first"
    collapse: bool = False


class SentencePieceCodec(SplittingCodec):
    """The codec of a SentencePiece vocabulary. Raises ModelFormatError when the vocabulary is unusable."""

    def __init__(self, pieces: SentencePieces, specials: Iterable[Special]) -> None:
        # Tokens that begin with a space are the library's to find: the space before the text may be part of one.
        n_own = len(pieces.tokens)
        kept = [item for item in specials if item.control or item.id >= n_own or item.text[:1] not in (" ", SPACE)]
        super().__init__(kept)
        self._pieces = pieces
        # Those beyond the model's own come from files beside it.
        self._added = {special.id: special.text.encode() for special in kept}
        self.vocab_size = max([n_own, *(special.id + 1 for special in kept)])
        self.leading = Leading(spaces=0 if pieces.prefix == "never" else 1)
        self._check()
        self._library = _load(pieces)

    def encode_plain(self, text: str, *, first: bool) -> list[int]:
        prefix = self._pieces.prefix
        if prefix == "always" or (prefix == "first" and first):
            text = SPACE + text
        try:
            ids: list[int] = self._library.encode(text, out_type=int)
        except Exception as error:  # the library raises several kinds
            raise BadField(f"the model's tokenizer cannot read this text: {error!s:.200}", field="prompt") from None
        # The last entry is one that the file does not have: what no piece can express.
        lost = len(self._pieces.tokens)
        if lost in ids:
            if self._pieces.unknown_id is None:
                raise BadField("the model's vocabulary has no tokens for all characters of the text", field="prompt")
            ids = [self._pieces.unknown_id if token_id == lost else token_id for token_id in ids]
        return ids

    def piece(self, index: int) -> bytes:
        if index in self._added:
            return self._added[index]
        if index >= len(self._pieces.tokens):
            return b""
        token, kind = self._pieces.tokens[index], self._pieces.types[index]
        if kind == TokenType.UNUSED:
            return b""
        if kind == TokenType.BYTE and (match := BYTE_PIECE.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.replace(SPACE, " ").encode()

    def _check(self) -> None:
        pieces = self._pieces
        if not np.isfinite(pieces.scores).all():
            raise ModelFormatError(f"{pieces.label}: the vocabulary has scores that are not finite")
        for token, kind in zip(pieces.tokens, pieces.types, strict=True):
            if kind == TokenType.BYTE and not BYTE_PIECE.fullmatch(token):
                raise ModelFormatError(f"{pieces.label}: {token!r:.80} is not the name of a byte")


def _load(pieces: SentencePieces) -> sentencepiece.SentencePieceProcessor:
    from sentencepiece import SentencePieceProcessor

    library = SentencePieceProcessor()
    try:
        library.LoadFromSerializedProto(_model(pieces))
    except Exception as error:  # RuntimeError mostly
        raise ModelFormatError(f"{pieces.label}: the SentencePiece vocabulary is unusable: {error!s:.200}") from None
    return library


def _model(pieces: SentencePieces) -> bytes:
    """The protobuf: every entry at its id, then one that stands for what no entry can express."""
    names = {f"<0x{byte:02X}>" for byte in range(256)}
    found = {token for token, kind in zip(pieces.tokens, pieces.types, strict=True) if kind == TokenType.BYTE}
    fallback = names <= found
    seen: set[str] = set()
    out = bytearray()
    for i, (token, kind) in enumerate(zip(pieces.tokens, pieces.types, strict=True)):
        if kind == TokenType.USER_DEFINED:
            token = token.replace(" ", SPACE)
        # Byte names must be in capitals to be known.
        findable = token in names and fallback if kind == TokenType.BYTE else _findable(token, kind)
        if not findable or token in seen:  # it only keeps its place
            token, kind = f"{_RESERVED}{i}", TokenType.CONTROL
        seen.add(token)
        out += _field(1, _piece(token, float(pieces.scores[i]), kind))
    out += _field(1, _piece(f"{_RESERVED}unknown", 0.0, TokenType.UNKNOWN))
    out += _field(2, _number(3, pieces.algorithm) + _number(35, int(fallback)))
    # No character map; the space before a text is not the library's business (add_dummy_prefix).
    out += _field(3, _field(1, b"identity") + _number(3, 0) + _number(4, int(pieces.collapse)) + _number(5, 1))
    return bytes(out)


def _findable(token: str, kind: int) -> bool:
    """Whether the library may find an entry in a text. Its tables end keys at a NUL."""
    if not token or "\0" in token:
        return False
    if kind == TokenType.UNUSED:
        return len(token) <= MAX_UNUSED_CHARS
    return kind in (TokenType.NORMAL, TokenType.USER_DEFINED)


def _piece(token: str, score: float, kind: int) -> bytes:
    return _field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data
