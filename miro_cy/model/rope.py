"""Rotary tables. They depend on the configured context alone, never on a sequence's current length."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from miro_cy.model.spec import RopeSpec

F32 = NDArray[np.float32]


def inverse_frequencies(spec: RopeSpec) -> F32:
    """theta ** (-2i / dim) for i < dim / 2, in float32 as the reference implementation computes it."""
    exponents = np.arange(0, spec.dim, 2, dtype=np.float32) / np.float32(spec.dim)
    return (np.float32(1) / np.float32(spec.theta) ** exponents).astype(np.float32)


def rope_tables(spec: RopeSpec, context: int) -> tuple[F32, F32]:
    """cos and sin of position * inverse frequency, float32 [context, dim / 2]."""
    angles = np.arange(context, dtype=np.float32)[:, None] * inverse_frequencies(spec)[None, :]
    sin = np.sin(angles)
    return np.cos(angles, out=angles), sin
