"""Rotary tables. They depend on the configured context alone, never on a sequence's current length."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from miro_cy._kernels.memory import empty
from miro_cy.model.spec import RopeSpec

F32 = NDArray[np.float32]

#: Positions computed at a time, always whole, so that a row's bits do not depend on when it was needed.
CHUNK = 4096


def base_frequencies(theta: float, dim: int) -> F32:
    """theta ** (-2i / dim) for i < dim / 2, in float32 as the reference implementation computes it.

    The power alone goes through float64: rounded from there it is the same on every machine.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.float32(1) / np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)


def inverse_frequencies(spec: RopeSpec) -> F32:
    """Radians a position turns each pair by, float32 [dim / 2], scaling included."""
    frequencies = base_frequencies(spec.theta, spec.dim)
    if spec.factors:
        frequencies /= np.array(spec.factors, np.float32)
    return frequencies / np.float32(spec.factor)


def llama3_factors(
    theta: float, dim: int, *, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> tuple[float, ...]:
    """What Llama 3.1's scaling divides each pair's frequency by, as float32 values.

    Wavelengths under original_context / high_freq_factor stay, those over original_context / low_freq_factor take the
    whole factor, and between the two the reciprocal is interpolated. Source: Meta's llama-models, `apply_scaling`.
    """
    wavelengths = np.float32(2 * math.pi) / base_frequencies(theta, dim)
    with np.errstate(all="ignore"):  # limits so close together that float32 has nothing between them; ModelSpec checks
        smooth = (np.float32(original_context) / wavelengths - np.float32(low_freq_factor)) / np.float32(
            high_freq_factor - low_freq_factor
        )
        between = np.float32(1) / ((np.float32(1) - smooth) / np.float32(factor) + smooth)
    factors = np.where(
        wavelengths < np.float32(original_context / high_freq_factor),
        np.float32(1),
        np.where(wavelengths > np.float32(original_context / low_freq_factor), np.float32(factor), between),
    )
    return tuple(float(value) for value in factors.astype(np.float32))


class RopeTables:
    """cos and sin of position * inverse frequency, float32 [context, dim / 2], computed up to where they are used.

    The arrays never move; memory is taken as rows are filled, so a file that claims a vast context costs nothing.
    """

    def __init__(self, spec: RopeSpec, context: int) -> None:
        rows = -(-context // CHUNK) * CHUNK
        self.cos: F32 = empty((rows, spec.dim // 2), np.float32)
        self.sin: F32 = empty((rows, spec.dim // 2), np.float32)
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
