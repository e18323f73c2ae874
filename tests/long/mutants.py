"""Damaged GGUF files: mutant(files, seed) is always the same file.

Knows where a sound file keeps its counts, lengths, types, dimensions and offsets, so that edits hit what matters.
"""

from __future__ import annotations

import random
import struct
from typing import NamedTuple

SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
EDGES = [0, 1, 2, 3, 4, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 257, 65535, 65536, 2**20, 2**24]
HUGE = [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33, 2**42 + 1, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


class Span(NamedTuple):
    """An integer (or scalar) of the header: where it is, how wide, and what it means."""

    at: int
    width: int
    what: str


class Layout:
    """The parts of a sound file."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.spans: list[Span] = []
        self._at = 4
        self._number(4, "version")
        n_tensors, n_pairs = self._number(8, "tensors"), self._number(8, "pairs")
        self.texts: list[tuple[int, int]] = []
        for _ in range(n_pairs):
            self._text()
            self._value(self._number(4, "type"))
        for _ in range(n_tensors):
            self._text()
            for _ in range(self._number(4, "dims")):
                self._number(8, "dim")
            self._number(4, "type")
            self._number(8, "offset")
        self.header = self._at
        self.base = -(-self._at // 32) * 32

    def _number(self, width: int, what: str) -> int:
        self.spans.append(Span(self._at, width, what))
        self._at += width
        return int.from_bytes(self.data[self._at - width : self._at], "little")

    def _text(self) -> None:
        length = self._number(8, "length")
        self.texts.append((self._at, length))
        self._at += length

    def _value(self, kind: int) -> None:
        if kind == STRING:
            self._text()
        elif kind == ARRAY:
            inner = self._number(4, "type")
            for _ in range(self._number(8, "count")):
                self._value(inner)
        else:
            self._number(SCALAR_BYTES[kind], "scalar")


def mutant(files: list[Layout], seed: int) -> bytes:
    """One to three mutations of one of the files."""
    draw = random.Random(seed)
    layout = files[seed % len(files)]
    data = bytearray(layout.data)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        draw.choice(MUTATIONS)(draw, layout, data, draw.choice(files).data)
    return bytes(data)


def _flip(draw: random.Random, layout: Layout, data: bytearray, _: bytes) -> None:
    """Bits of the header, of the data, or of anything."""
    low, high = draw.choice([(0, layout.header), (0, layout.header), (layout.base, len(data)), (0, len(data))])
    for _ in range(draw.choice([1, 1, 2, 8, 64])):
        at = draw.randrange(min(low, len(data) - 1), max(min(high, len(data)), 1))
        data[at] ^= 1 << draw.randrange(8)


def _edit(draw: random.Random, layout: Layout, data: bytearray, _: bytes) -> None:
    """A count, length, type, dimension, offset or setting becomes another, near or far."""
    what = draw.choice(sorted({span.what for span in layout.spans}))
    span = draw.choice([span for span in layout.spans if span.what == what])
    old = int.from_bytes(data[span.at : span.at + span.width], "little")
    new = draw.choice(
        [draw.choice(EDGES), draw.choice(HUGE), old + draw.choice([-32, -8, -1, 1, 8, 32]), old * 2, old // 2]
    )
    _write(data, span.at, (new % 2 ** (8 * span.width)).to_bytes(span.width, "little"))


def _swap(draw: random.Random, layout: Layout, data: bytearray, _: bytes) -> None:
    """Two numbers of the same meaning change places: offsets cross, dimensions turn round."""
    what = draw.choice(["length", "type", "dim", "dim", "offset", "offset", "scalar"])
    one, other = draw.choices([span for span in layout.spans if span.what == what], k=2)
    width = min(one.width, other.width)
    a, b = bytes(data[one.at : one.at + width]), bytes(data[other.at : other.at + width])
    _write(data, one.at, b)
    _write(data, other.at, a)


def _rename(draw: random.Random, layout: Layout, data: bytearray, _: bytes) -> None:
    """The beginning of one key, name or string over another."""
    (source, length), (target, room) = draw.choices(layout.texts, k=2)
    _write(data, target, layout.data[source : source + min(length, room)])


def _cut(draw: random.Random, layout: Layout, data: bytearray, _: bytes) -> None:
    """The file ends early: in the header, in the data, or just before its end."""
    size = draw.choice(
        [draw.randrange(layout.header), draw.randrange(len(data)), len(data) - draw.choice([1, 4, 31, 32, 33])]
    )
    del data[max(1, size) :]


def _splice(draw: random.Random, layout: Layout, data: bytearray, other: bytes) -> None:
    """A piece of some file replaces a piece of this one, or is put in, or a piece is left out."""
    places = [draw.randrange(layout.header), draw.randrange(len(data)), draw.choice(layout.spans).at]
    at = min(draw.choice(places), len(data))
    size = draw.choice([1, 4, 8, 32, 200, 4096])
    start = draw.choice([at, draw.randrange(len(other)), draw.randrange(min(len(other), 2000))])
    piece = other[start : start + size]
    data[at : at + draw.choice([0, len(piece), len(piece), size, draw.choice([1, 8, 32])])] = piece


def _poison(draw: random.Random, layout: Layout, data: bytearray, _: bytes) -> None:
    """Numbers in the tensors that no training gives: NaN, infinities, the largest and the smallest."""
    extreme = draw.choice([float("nan"), float("inf"), -float("inf"), 3.4e38, -3.4e38, 1e-45])
    piece = draw.choice([struct.pack("<f", extreme), b"\xff\x7c", b"\x00\x7e", b"\xff\xff", b"\x00\x80"])
    for _ in range(draw.choice([1, 10, 1000])):
        if len(data) > layout.base + 4:
            _write(data, draw.randrange(layout.base, len(data) - 3) & ~1, piece)


def _fill(draw: random.Random, layout: Layout, data: bytearray, _: bytes) -> None:
    """A stretch of one byte."""
    at = draw.choice([draw.randrange(layout.header), draw.randrange(len(data))])
    _write(data, at, bytes([draw.choice([0, 0x7F, 0x80, 0xFF])]) * draw.choice([2, 8, 64, 3000]))


def _write(data: bytearray, at: int, piece: bytes) -> None:
    """Overwrite what is there; the size stays."""
    piece = piece[: max(0, len(data) - at)]
    data[at : at + len(piece)] = piece


MUTATIONS = [_flip, _flip, _edit, _edit, _edit, _edit, _swap, _rename, _cut, _splice, _splice, _poison, _fill]
