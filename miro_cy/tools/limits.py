"""The machine's limits, measured with the kernels' own instructions and as many threads, so that shares mean something.

Reading memory, float32 fused multiply-adds, int8 dot products as the fast kernels make them, and products of bfloat16
in tile registers where there are any. Each is the best of all its measurements: whatever disturbs one makes it smaller,
so the best is nearest to the truth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from miro_cy._kernels import probe
from miro_cy._kernels.select import has_tiles
from miro_cy.machine import available_memory

#: What is read to measure bandwidth: far more than any cache holds, but no more than this share of the free memory.
READ_BYTES = 512 << 20
MEMORY_SHARE = 0.25
#: Pieces that one call of `measure` times, and their rounds: some tenths of a millisecond, so that even where other
#: programs run, some piece is left alone.
PIECES = 16
FMA_ROUNDS = 1 << 16
DOT_ROUNDS = 1 << 12
TILE_ROUNDS = 1 << 12


@dataclass(frozen=True, slots=True)
class Limits:
    """read_gb_per_s: 10^9 bytes a second read from a buffer of read_bytes. fma_gflops: 10^9 float32 operations a second
    (a multiply-add is two) in registers. int8_gflops: alike, of int8 multiplications and their int32 additions.
    tile_gflops: alike, of bfloat16 ones and float32 additions in tile registers; 0 without.
    """

    read_gb_per_s: float
    read_bytes: int
    fma_gflops: float
    int8_gflops: float
    tile_gflops: float = 0.0


class LimitProbe:
    """Measures the limits whenever asked and keeps the best.

    Holds READ_BYTES of memory, or MEMORY_SHARE of what is free if that is less, until it is dropped.
    """

    def __init__(self, threads: int) -> None:
        size = min(READ_BYTES, int(available_memory() * MEMORY_SHARE))
        units = max(threads, size // probe.READ_UNIT)
        self._threads = threads
        self._buffer = np.empty(units * probe.READ_UNIT, np.uint8)
        probe.fill(self._buffer, 0x5A, threads)  # not zeros: the system would map one page of them for all
        rng = np.random.default_rng(0)
        self._floats = rng.standard_normal(192).astype(np.float32)
        self._weights = rng.integers(0, 16, 4096).astype(np.uint8)
        self._activations = rng.integers(-127, 128, 32).astype(np.int8)
        self._ones = np.full(512, 0x3F80, np.uint16).view(np.uint8)  # of bfloat16
        self._read = self._fma = self._dot = self._tile = 0.0

    def measure(self) -> None:
        """A few measurements of each limit; some tens of milliseconds in all."""
        n = self._threads
        self._read = max(self._read, probe.read(self._buffer, n)[1])
        self._fma = max(self._fma, probe.fma(self._floats, 0.5, 1.0, FMA_ROUNDS, PIECES, n)[1])
        self._dot = max(self._dot, probe.dot(self._weights, self._activations, DOT_ROUNDS, PIECES, n)[1])
        if has_tiles():
            self._tile = max(self._tile, probe.tile(self._ones, self._ones, TILE_ROUNDS, PIECES, n)[1])

    @property
    def best(self) -> Limits:
        """The best figures so far; measures first if nothing has been measured."""
        if not self._read:
            self.measure()
        return Limits(self._read / 1e9, len(self._buffer), self._fma / 1e9, self._dot / 1e9, self._tile / 1e9)
