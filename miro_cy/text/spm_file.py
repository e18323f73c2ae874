"""Reads `tokenizer.model`, the protobuf that SentencePiece writes (sentencepiece_model.proto)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from miro_cy.errors import ModelFormatError
from miro_cy.text.files import MAX_TOKENS, read_bytes
from miro_cy.text.spm import BPE, UNIGRAM, SentencePieces
from miro_cy.text.vocabulary import TokenType

MAX_BYTES = 64 * 2**20
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class SentencePieceFile:
    """What a file holds. names: bos_token and so on, where they are entries. refused: why it cannot be used, or ""."""

    pieces: SentencePieces
    names: dict[str, str]
    refused: str


def read_model(path: Path) -> SentencePieceFile:
    """Raises ModelFormatError for a damaged file, ModelNotFound for an unreadable one."""
    try:
        return _read(str(path), read_bytes(path, MAX_BYTES))
    except (IndexError, ValueError, struct.error) as error:
        raise ModelFormatError(f"{path} is damaged: {error}") from None


def _read(label: str, data: bytes) -> SentencePieceFile:
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            if len(tokens) >= MAX_TOKENS:
                raise ModelFormatError(f"{label} has more than {MAX_TOKENS} entries")
            piece = dict(_fields(value))
            token, score, kind = piece.get(1, b""), piece.get(2, b"\0\0\0\0"), piece.get(3, TokenType.NORMAL)
            if not isinstance(token, bytes) or not isinstance(score, bytes) or not isinstance(kind, int):
                raise ModelFormatError(f"{label}: entry {len(tokens)} has fields of the wrong type")
            if kind not in list(TokenType):
                raise ModelFormatError(f"{label}: entry {len(tokens)} has the unknown type {kind}")
            tokens.append(token.decode())
            scores.append(struct.unpack("<f", score)[0])
            types.append(kind)
        elif field == 2 and isinstance(value, bytes):
            trainer |= dict(_fields(value))
        elif field == 3 and isinstance(value, bytes):
            normalizer |= dict(_fields(value))
    if not tokens:
        raise ModelFormatError(f"{label} has no entries")
    unknown = next((i for i, kind in enumerate(types) if kind == TokenType.UNKNOWN), None)
    pieces = SentencePieces(
        label=label,
        tokens=tokens,
        types=types,
        scores=np.array(scores, np.float32),
        unknown_id=unknown,
        algorithm=_int(trainer, 3, UNIGRAM),
        prefix="first" if _int(normalizer, 3, 1) else "never",
        collapse=bool(_int(normalizer, 4, 1)),
    )
    # Fields 41 and 42 of the trainer are the ids, with these defaults.
    special_ids = {"bos_token": _int(trainer, 41, 1), "eos_token": _int(trainer, 42, 2), "unk_token": unknown}
    names = {
        name: tokens[i]
        for name, i in special_ids.items()
        if i is not None and i < len(tokens) and types[i] in (TokenType.CONTROL, TokenType.UNKNOWN)
    }
    return SentencePieceFile(pieces, names, _refusal(trainer, normalizer))


def _refusal(trainer: dict[int, int | bytes], normalizer: dict[int, int | bytes]) -> str:
    if _int(trainer, 3, UNIGRAM) not in (UNIGRAM, BPE):
        return "neither unigram nor BPE"
    if _int(trainer, 24, 0):
        return "white space as suffix"
    if normalizer.get(2):
        return "a character map"
    return "" if _int(normalizer, 5, 1) else "white space not escaped"


def _int(message: dict[int, int | bytes], field: int, default: int) -> int:
    value = message.get(field, default)
    if not isinstance(value, int):
        raise ValueError(f"field {field} must be a number")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a message, a value being an int or the bytes of it.

    Raises IndexError or ValueError where it ends too soon or has something else in it.
    """
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            size, position = _varint(data, position)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"unknown wire type {wire} at byte {position}")
        if size > len(data) - position:
            raise ValueError(f"a field of {size} bytes at byte {position} goes beyond the end")
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"a number of more than 10 bytes at byte {position}")
