"""Rotary tables. They depend on the configured context alone, never on a sequence's current length."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from miro_cy.model.spec import RopeSpec

F32 = NDArray[np.float32]

#: Positions computed at a time, always whole, so that a row's bits do not depend on when it was needed.
CHUNK = 4096


def inverse_frequencies(spec: RopeSpec) -> F32:
    """theta ** (-2i / dim) for i < dim / 2, in float32 as the reference implementation computes it."""
    exponents = np.arange(0, spec.dim, 2, dtype=np.float32) / np.float32(spec.dim)
    return (np.float32(1) / np.float32(spec.theta) ** exponents).astype(np.float32)


class RopeTables:
    """cos and sin of position * inverse frequency, float32 [context, dim / 2], computed up to where they are used.

    The arrays never move; memory is taken as rows are filled, so a file that claims a vast context costs nothing.
    """

    def __init__(self, spec: RopeSpec, context: int) -> None:
        rows = -(-context // CHUNK) * CHUNK
        self.cos: F32 = np.empty((rows, spec.dim // 2), np.float32)
        self.sin: F32 = np.empty((rows, spec.dim // 2), np.float32)
        self._frequencies = inverse_frequencies(spec)
        self._filled = 0

    def fill_to(self, positions: int) -> None:
        """Make rows [0, positions) valid."""
        while self._filled < positions:
            rows = slice(self._filled, self._filled + CHUNK)
            angles = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] * self._frequencies[None, :]
            np.cos(angles, out=self.cos[rows])
            np.sin(angles, out=self.sin[rows])
            self._filled = rows.stop
