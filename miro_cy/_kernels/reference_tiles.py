"""The NumPy twin of matmuls in tile registers (v4_amx): bit for bit, in the order of the instruction.

include/tiles.h says what the instruction does, impl/tile_open.pxi how weights are opened. Shapes as in reference.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from miro_cy._kernels.reference import F32, Bytes, bfloat16, parts

F16 = NDArray[np.float16]

#: What weights are opened times, unless their panel's largest is out of the ordinary; abi.pxd's EXPONENT.
EXPONENT = 12
#: What cutting three bits of a mantissa off leaves of a weight, on average, inverted.
CUT = np.float32(1.00247)
#: (first, second) k of each of the 16 pairs that a block of 32 k lies in.
PAIRS = np.array([(4 * q + j // 2 + 16 * (j % 2) + 2 * h) for q in range(4) for j in range(4) for h in range(2)])


def rounded(x: F32) -> F32:
    """2**(112 - EXPONENT) * CUT * x as bfloat16, to nearest, ties to even."""
    with np.errstate(over="ignore", under="ignore"):
        bits = (x * (np.float32(2.0 ** (112 - EXPONENT)) * CUT)).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def exponents(limit: F32, m: F32 | None) -> NDArray[np.int64]:
    """[n] the power of two that each row's weights are opened times: of its panel of 16 rows.

    limit [n], m [n, k]: as `parts` gives them. What is not finite becomes a factor of infinity afterwards.
    """
    out = np.full(limit.shape[0], EXPONENT, np.int64)
    for p in range(0, limit.shape[0], 16):
        top = np.float32(limit[p : p + 16].max() + (0 if m is None else np.abs(m[p : p + 16]).max()))
        if not top < np.inf:
            out[p : p + 16] = EXPONENT - 128
        elif top > 0 and not np.float32(0.002) <= top <= 15:
            out[p : p + 16] = min(15 - int(np.frexp(top)[1]), 15)
    return out


def opened(raw: Bytes, kind: str, n: int, k: int) -> tuple[F32, NDArray[np.int64]]:
    """Weights [n, k] as the tiles hold them, 2**(exponent - 112) times as large as they are, and exponents [n]."""
    q, d, m, limit = parts(raw, kind, n, k)
    exponent = exponents(limit, m)
    power = 2.0 ** exponent[:, None]
    scale = (d * power).astype(np.float16).astype(np.float64)
    value = q.astype(np.float64) * scale
    if m is not None:
        middle = (8 * scale + (m * power).astype(np.float16).astype(np.float64)).astype(np.float16)
        value = (q.astype(np.float64) - 8) * scale + middle.astype(np.float64)
    bits = value.astype(np.float16).view(np.int16) >> 3 & np.int16(-0x7001)
    normal = np.where((bits & 0x7F80) == 0, np.int16(0), bits)
    return bfloat16(np.ascontiguousarray(normal).view(np.uint8).reshape(-1)).reshape(n, k), exponent


def matmul(x: F32, raw: Bytes, kind: str, n: int) -> F32:
    """x [m, k] times the rounded weights of a file [n, k] -> [m, n], every addition in its order."""
    k = x.shape[1]
    w, exponent = opened(raw, kind, n, k)
    return chain(rounded(x), w) * (2.0 ** (EXPONENT - exponent)).astype(np.float32)


def chain(x: F32, w: F32) -> F32:
    """The tiles' sums of x [m, k] and w [n, k], both bfloat16: blocks of 32 k in ascending order."""
    total = np.zeros((x.shape[0], w.shape[0]), np.float32)
    for b in range(0, x.shape[1], 32):
        halves = []
        for h in (0, 1):
            part = np.zeros_like(total)
            for k in b + PAIRS[h::2]:  # products of bfloat16 are exact in float32: an addition is a fused one
                part = part + x[:, None, k] * w[None, :, k]
            halves.append(part)
        total = total + (halves[0] + halves[1])
    return total
