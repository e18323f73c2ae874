"""The NumPy twin of every kernel: what each one means, in the plainest form. Slow on purpose, float64 inside.

Tests compare every instruction-set build with these. Shapes: m rows, k inputs, n outputs, d head dimension.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

MASK32 = 0xFFFFFFFF


def _halves(raw: Bytes) -> F32:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: Bytes) -> F32:
    return np.concatenate([raw & 15, raw >> 4], axis=1).astype(np.float32)


def _q8_0(blocks: Bytes) -> tuple[F32, F32, None]:
    # d f16[1] | q int8[32]
    return blocks[:, 2:].view(np.int8).astype(np.float32), _halves(blocks[:, :2]), None


def _q4_0(blocks: Bytes) -> tuple[F32, F32, None]:
    # d f16 | 16 bytes: low nibbles are elements 0-15, high nibbles 16-31
    return _nibbles(blocks[:, 2:]) - np.float32(8), _halves(blocks[:, :2]), None


def _q4_1(blocks: Bytes) -> tuple[F32, F32, F32]:
    # d f16 | m f16 | nibbles as in Q4_0
    return _nibbles(blocks[:, 4:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4])


def _q6_k(blocks: Bytes) -> tuple[F32, F32, None]:
    # ql[128] | qh[64] | scales int8[16] | d f16, in two halves of 128 elements
    low = blocks[:, :128].reshape(-1, 2, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    values = [
        (low[..., :32] & 15) | ((high & 3) << 4),
        (low[..., 32:] & 15) | ((high >> 2 & 3) << 4),
        (low[..., :32] >> 4) | ((high >> 4 & 3) << 4),
        (low[..., 32:] >> 4) | ((high >> 6) << 4),
    ]
    q = np.stack(values, axis=2).reshape(-1, 256).astype(np.float32) - np.float32(32)
    scales = _halves(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return q, np.repeat(scales, 16, axis=1), None


#: kind -> bytes of a block, elements of one, what takes blocks apart
_QUANTISED = {"Q8_0": (34, 32, _q8_0), "Q4_0": (18, 32, _q4_0), "Q4_1": (20, 32, _q4_1), "Q6_K": (210, 256, _q6_k)}


def bfloat16(raw: Bytes) -> F32:
    """The floats that bfloat16 bytes stand for: their bits are a float's upper half."""
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def dequantise(raw: Bytes, kind: str, n: int, k: int) -> F32:
    """The matrix [n, k] that a file's bytes stand for, as the format's own definition computes it in float32."""
    if kind == "F32":
        return raw.view(np.float32).reshape(n, k)
    if kind == "F16":
        return raw.view(np.float16).reshape(n, k).astype(np.float32)
    if kind == "BF16":
        return bfloat16(raw).reshape(n, k)
    size, _, take_apart = _QUANTISED[kind]
    q, d, m = take_apart(raw.reshape(-1, size))
    return (d * q if m is None else d * q + m).reshape(n, k)


def parts(raw: Bytes, kind: str, n: int, k: int) -> tuple[F32, F32, F32 | None, F32]:
    """Weights are d * q, plus m in formats that have it: q, d, m [n, k], and what no |d * q| of a row exceeds [n].

    d is that of the format's own scale and a sub-scale together; the limit takes the largest sub-scale there can be.
    """
    size, block, take_apart = _QUANTISED[kind]
    blocks = raw.reshape(-1, size)
    q, d, m = take_apart(blocks)
    largest = _halves(blocks[:, 208:210]) * np.float32(128) if kind == "Q6_K" else d
    most = {"Q8_0": 128, "Q4_0": 15, "Q4_1": 15, "Q6_K": 32}[kind]
    limit = np.abs(largest).reshape(n, -1).max(axis=1) * np.float32(most)
    whole = [np.broadcast_to(a, (a.shape[0], block)).reshape(n, k) for a in (q, d) + (() if m is None else (m,))]
    return whole[0], whole[1], None if m is None else whole[2], limit


def to_int8(x: F32) -> tuple[NDArray[np.int8], F32]:
    """Vectors [..., n] -> int8 [..., n] and scales [...]: d = max|x| / 127, q = round(x / d), ties to even.

    This is how an int8 KV cache holds the K and V of a token and KV head.
    """
    big = np.abs(x).max(axis=-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(big > 1e-30, np.float32(127) / big, np.float32(0)).astype(np.float32)
    q = np.rint(x * inverse[..., None].astype(np.float64)).clip(-127, 127).astype(np.int8)
    return q, np.where(big > 1e-30, big / np.float32(127), 0).astype(np.float32)


def quantise(x: F32) -> tuple[NDArray[np.int8], F32]:
    """Rows [m, k] -> int8 [m, k] and scales [m, k/16], `to_int8` of every 16 elements."""
    q, d = to_int8(x.reshape(x.shape[0], -1, 16))
    return q.reshape(x.shape), d


def matmul(x: F32, w: F32) -> NDArray[np.float64]:
    """x [m, k], w [n, k] -> x w^T [m, n]."""
    return x.astype(np.float64) @ w.astype(np.float64).T


def matmul_fast(q: NDArray[np.int8], d: F32, w: F32) -> NDArray[np.float64]:
    """The same over quantised activations: q [m, k], d [m, k/16]."""
    rounded = q.reshape(*d.shape, 16).astype(np.float64) * d[..., None]
    return rounded.reshape(q.shape) @ w.astype(np.float64).T


def rmsnorm(x: F32, weight: F32, eps: float) -> NDArray[np.float64]:
    """x [..., k] / rms(x) * weight [k]."""
    x64 = x.astype(np.float64)
    return x64 / np.sqrt((x64**2).mean(axis=-1, keepdims=True) + eps) * weight


def swiglu(gate: F32, up: F32) -> NDArray[np.float64]:
    g = gate.astype(np.float64)
    return g / (1 + np.exp(-g)) * up


def rope(
    x: F32, positions: NDArray[np.int32], cos: F32, sin: F32, norm: F32 | None = None, eps: float = 0.0
) -> NDArray[np.float64]:
    """x [tokens, heads, d]: neighbouring pairs of the first 2 * cos.shape[1] dimensions rotate.

    norm [d]: each head is normalised by `rmsnorm` before that.
    """
    out = x.astype(np.float64) if norm is None else rmsnorm(x, norm, eps)
    half = cos.shape[1]
    c, s = cos[positions][:, None, :].astype(np.float64), sin[positions][:, None, :].astype(np.float64)
    a, b = out[..., 0 : 2 * half : 2].copy(), out[..., 1 : 2 * half : 2].copy()
    out[..., 0 : 2 * half : 2] = a * c - b * s
    out[..., 1 : 2 * half : 2] = b * c + a * s
    return out


def attention(
    q: F32, k: F32, v: F32, first: int, scale: float, soft_cap: float = 0.0, window: int = 0
) -> NDArray[np.float64]:
    """q [t, heads, d] at positions first..., k, v [first + t, kv_heads, d] -> [t, heads, d], scores materialised."""
    group = q.shape[1] // k.shape[1]
    keys = np.repeat(k.astype(np.float64), group, axis=1)
    values = np.repeat(v.astype(np.float64), group, axis=1)
    scores = np.einsum("thd,shd->hts", q.astype(np.float64) * scale, keys)
    if soft_cap > 0:
        scores = soft_cap * np.tanh(scores / soft_cap)
    rows = first + np.arange(q.shape[0])[:, None]
    columns = np.arange(k.shape[0])[None, :]
    visible = columns <= rows
    if window > 0:
        visible &= columns > rows - window
    scores = np.where(visible, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=2, keepdims=True))
    p /= p.sum(axis=2, keepdims=True)
    return np.einsum("hts,shd->thd", p, values)


def log_softmax(x: F32) -> NDArray[np.float64]:
    x64 = x.astype(np.float64)
    top = x64.max()
    return x64 - (top + np.log(np.exp(x64 - top).sum()))


def top_k(x: F32, k: int) -> list[int]:
    """Ids of the k largest, best first, lowest id first on ties."""
    return np.lexsort((np.arange(x.shape[0]), -x))[:k].tolist()


def draw(x: F32, inv_temperature: float, u: float) -> int:
    """First id at which the cumulative softmax(x * inv_temperature) reaches u."""
    p = np.exp(log_softmax(x * np.float32(inv_temperature)))
    return int(min(np.searchsorted(np.cumsum(p), u), x.shape[0] - 1))


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """The sampler's draw in (0, 1): 53 bits of Philox, keyed by the seed, at (position, choice)."""
    high, low, *_ = philox((seed & MASK32, seed >> 32), (position, choice, 0, 0))
    return ((high << 21) + (low >> 11) + 0.5) * 2.0**-53


def sample(x: F32, temperature: float, k: int, p: float, u: float) -> int:
    """The whole sampler on one row: temperature, then the k best (0: all), then the fewest that reach p of those.

    Filtered candidates are drawn from best to worst, an unfiltered row in order of id.
    """
    n = x.shape[0]
    if temperature == 0:
        return top_k(x, 1)[0]
    if not 0 < k < n:
        k = n
        if p == 1:
            return draw(x, 1 / temperature, u)
    ids = top_k(x, k)
    weights = np.exp((x[ids].astype(np.float64) - float(x[ids[0]])) / temperature)
    count = 1 + int(np.searchsorted(np.cumsum(weights), p * weights.sum()))
    mass = np.cumsum(weights[:count])
    return ids[int(np.searchsorted(mass, u * mass[-1]))]


def random_raw(rng: Any, kind: str, n: int, k: int) -> Bytes:
    """Bytes of a random matrix of a kind, with scales in a sensible range (tests and benchmarks)."""
    if kind == "F32":
        return rng.standard_normal((n, k)).astype(np.float32).view(np.uint8).reshape(-1)
    if kind == "F16":
        return rng.standard_normal((n, k)).astype(np.float16).view(np.uint8).reshape(-1)
    if kind == "BF16":
        upper = rng.standard_normal((n, k)).astype(np.float32).view(np.uint32) >> 16
        return upper.astype(np.uint16).view(np.uint8).reshape(-1)
    size, block, _ = _QUANTISED[kind]
    count = n * k // block
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    at = {"Q6_K": (208,), "Q4_1": (0, 2)}.get(kind, (0,))
    for offset in at:
        scale = rng.uniform(-0.02, 0.02, count).astype(np.float16)
        blocks[:, offset : offset + 2] = scale.view(np.uint8).reshape(count, 2)
    return blocks.reshape(-1)


def probe_read(buffer: Bytes) -> int:
    """XOR of the 32-bit words of a uint8 buffer."""
    return int(np.bitwise_xor.reduce(buffer.view(np.uint32)))


def probe_fma(x: F32, a: float, b: float, rounds: int) -> F32:
    """x * a + b, `rounds` times; exact where the sums need few bits."""
    y = x.astype(np.float64)
    for _ in range(rounds):
        y = y * a + b
    return y.astype(np.float32)


def probe_dot(w: Bytes, x: NDArray[np.int8], rows: int, lanes: int, rounds: int) -> NDArray[np.int32]:
    """int32 [rows, lanes]: `rounds` times the dot products of the quads of w [32, lanes, 4] with x [rows, 4]."""
    quads = w[: 32 * lanes * 4].reshape(32, lanes, 4).astype(np.int64)
    return (rounds * np.einsum("slq,rq->rl", quads, x[: rows * 4].reshape(rows, 4))).astype(np.int32)
