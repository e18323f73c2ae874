"""The NumPy twins of what is done in tile registers (v4_amx): matmuls bit for bit, in the order of the instruction, and
attention but for the order of a sum.

include/tiles.h says what the instruction does, impl/tile_open.pxi how weights are opened. Shapes as in reference.py.
"""

from __future__ import annotations

from collections.abc import Callable

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


def nearest(x: F32) -> F32:
    """x, which is finite, as bfloat16, to nearest, ties to even."""
    bits = x.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def rounded(x: F32) -> F32:
    """2**(112 - EXPONENT) * CUT * x as bfloat16."""
    with np.errstate(over="ignore", under="ignore"):
        return nearest(x * (np.float32(2.0 ** (112 - EXPONENT)) * CUT))


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


def chain(x: F32, w: F32, total: F32 | None = None, order: NDArray[np.int64] = PAIRS) -> F32:
    """The tiles' sums of x [m, k] and w [n, k], both bfloat16, added to `total`: blocks of 32 k in ascending order."""
    if total is None:
        total = np.zeros((x.shape[0], w.shape[0]), np.float32)
    for b in range(0, x.shape[1], 32):
        halves = []
        for h in (0, 1):
            part = np.zeros_like(total)
            for k in b + order[h::2]:  # products of bfloat16 are exact in float32: an addition is a fused one
                part = part + x[:, None, k] * w[None, :, k]
            halves.append(part)
        total = total + (halves[0] + halves[1])
    return total


#: Tokens of a tile, and of a range that begins with nothing; abi.pxd's KV_TILE and KV_RANGE.
TILE, RANGE = 64, 512
NEIGHBOURS = np.arange(32)


def padded(x: F32, axis: int, to: int) -> F32:
    """x with zeros behind, up to a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % to)
    return np.ascontiguousarray(np.pad(x, widths))


def attention(
    q: F32, k: F32, v: F32, first: int, scale: float, soft_cap: float, window: int, exp: Callable[[F32], F32]
) -> F32:
    """As reference.attention, k and v being what a cache of bfloat16 holds; exp: the kernel's own.

    The sum of a tile's weights is added in another order than the kernel's, all else has its bits.
    """
    group = q.shape[1] // k.shape[1]
    out = [
        one_head(q[:, h], k[:, h // group], v[:, h // group], first, scale, soft_cap, window, exp)
        for h in range(q.shape[1])
    ]
    return np.stack(out, axis=1)


def one_head(
    q: F32, k: F32, v: F32, first: int, scale: float, soft_cap: float, window: int, exp: Callable[[F32], F32]
) -> F32:
    """q [t, d], k, v [first + t, d] -> [t, d]."""
    t, d = q.shape
    x = padded(nearest(q * np.float32(scale)), 1, 32)
    keys, values = padded(padded(k, 1, 32), 0, TILE), padded(v, 0, TILE)
    rows = first + np.arange(t)[:, None]
    m_all, l_all, o_all = np.full(t, -np.inf, np.float32), np.zeros(t, np.float32), np.zeros((t, d), np.float32)
    for start in range(0, first + t, RANGE):
        m, total, o = np.full(t, -np.inf, np.float32), np.zeros(t, np.float32), np.zeros((t, d), np.float32)
        for at in range(start, min(start + RANGE, first + t), TILE):
            columns = at + np.arange(TILE)[None, :]
            visible = (columns <= rows) & (columns > rows - window if window > 0 else True)
            s = chain(x, keys[at : at + TILE], order=NEIGHBOURS)
            if soft_cap > 0:
                cap, one = np.float32(soft_cap), np.float32(1)
                power = exp(np.float32(2) * (s / cap).ravel()).reshape(s.shape)
                s = cap * (one - np.float32(2) / (power + one))
            s = np.where(visible, s, -np.inf).astype(np.float32)
            top = np.maximum(m, s.max(axis=1))
            seen, safe = visible.any(axis=1), np.where(np.isfinite(top), top, 0)
            shrink = np.where(top > m, exp(m - safe), 1).astype(np.float32)
            p = np.where(visible, exp((s - safe[:, None]).ravel()).reshape(s.shape), 0).astype(np.float32)
            total = np.where(seen, total * shrink + p.sum(axis=1, dtype=np.float32), total)
            m, o = top, o * shrink[:, None]
            o = chain(nearest(p), np.ascontiguousarray(values[at : at + TILE].T), o, NEIGHBOURS)
        top = np.maximum(m, m_all)
        safe = np.where(np.isfinite(top), top, 0)
        a, b = exp(m_all - safe), exp(m - safe)
        m_all, l_all, o_all = top, l_all * a + total * b, o_all * a[:, None] + o * b[:, None]
    return o_all * (np.float32(1) / l_all)[:, None]
