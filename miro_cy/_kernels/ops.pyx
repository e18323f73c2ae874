"""Shape-checked Python wrappers over the active kernels, for tests and benchmarks. The engine never calls these."""

from cython.parallel cimport parallel, prange
from libc.stdint cimport int32_t, uintptr_t

import numpy as np

from miro_cy._kernels.abi cimport (
    PANEL, QBLOCK, TILE_ROWS, Activations, AttentionParams, BatchRows, Candidate, KernelTable, KVCache, PackedMatrix,
    QuantBlock, activation_bytes, attention_scratch_floats, matmul_scratch_floats,
)
from miro_cy._kernels.kv cimport KVLayer
from miro_cy._kernels.rows cimport bind_rows
from miro_cy._kernels.select cimport kernels
from miro_cy._kernels.team cimport Team, mi_join, mi_leave, mi_member, mi_team
from miro_cy._kernels.weights cimport PackedWeights
from miro_cy.batch cimport BatchView

from miro_cy._kernels.memory import empty, zeros
from miro_cy._kernels.reference import bfloat16
from miro_cy._kernels.reference_tiles import PAIRS
from miro_cy._kernels.select import rounds_to

#: abi.pxd's QuantBlock
BLOCK = np.dtype(
    [("q", np.int8, (8, 32)), ("d", np.float32, (2, 8)), ("start", np.int32, (2, 8)), ("dsum", np.float32, 8)]
)


cdef class Rounded:
    """Activations [m, k] as the active kernels' matmuls read them."""
    cdef object data
    cdef Py_ssize_t m, k
    cdef Activations a

    def __init__(self, Py_ssize_t m, Py_ssize_t k):
        self.m, self.k, self.data = m, k, zeros(activation_bytes(m, k), np.uint8)
        self.a.data = <void*><uintptr_t>self.data.ctypes.data

    def parts(self):
        """What `quantise` returns."""
        if rounds_to() == "bfloat16":
            stored = bfloat16(self.data[:2 * self.m * self.k])
            values = np.empty((self.m, self.k // QBLOCK, QBLOCK), np.float32)
            for row in range(0, self.m, 16):
                rows = min(16, self.m - row)
                tile = stored[row * self.k:(row + rows) * self.k].reshape(-1, rows, QBLOCK)
                values[row:row + rows, :, PAIRS] = tile.swapaxes(0, 1)
            return (values.reshape(self.m, self.k),)
        tiles = (self.m + TILE_ROWS - 1) // TILE_ROWS
        blocks = self.data[:tiles * (self.k // QBLOCK) * sizeof(QuantBlock)].view(BLOCK).reshape(tiles, -1)
        q = blocks["q"].swapaxes(1, 2).reshape(-1, self.k)[:self.m]
        d, start = (blocks[name].transpose(0, 3, 1, 2).reshape(-1, self.k // 16)[:self.m] for name in ("d", "start"))
        dsum = blocks["dsum"].swapaxes(1, 2).reshape(-1, self.k // QBLOCK)[:self.m]
        return q, d, start // -128, dsum


cdef Rounded rounded(const float[:, ::1] x, int threads, bint whole=False):
    """x [m, k], rounded."""
    cdef Py_ssize_t m = x.shape[0], k = x.shape[1]
    if m < 1 or k < 1 or k % QBLOCK:
        raise ValueError(f"cannot quantise rows of {k}")
    cdef Rounded out = Rounded(m, k)
    cdef const KernelTable* table = kernels()
    cdef int th
    for th in prange(threads, nogil=True, num_threads=threads, schedule="static"):
        table.quantise(th, threads, &x[0, 0], k, m, k, &out.a, whole)
    return out


def quantise(const float[:, ::1] x not None, int threads=1, bint whole=False):
    """x [m, k], k a multiple of 32 -> (q int8 [m, k], d [m, k/16], sum of q [m, k/16], sum of d * q [m, k/32]).

    Where `select.rounds_to()` is bfloat16: a tuple of those values [m, k] alone, as large as they are stored.
    whole: the threads share out whole tiles of 8 rows, not blocks.
    """
    return rounded(x, threads, whole).parts()


def matmul(PackedWeights w not None, const float[:, ::1] x not None, bint fast, int threads=1):
    """x [m, k] -> y [m, n]; fast: int8 activations (quantised layouts only)."""
    cdef Py_ssize_t m = x.shape[0], k = x.shape[1], ldy = w.matrix.n_panels * PANEL
    if m < 1 or k != w.matrix.k or (fast and w.is_float):
        raise ValueError(f"cannot multiply {w.kind} {w.shape} by rows of {k}")
    y = np.empty((m, ldy), np.float32)
    cdef float[:, ::1] y_ = y
    cdef float[:, ::1] scratch = empty((threads, matmul_scratch_floats()), np.float32)
    cdef Rounded a = rounded(x, threads) if fast else None
    cdef Team team = Team(threads)
    cdef const KernelTable* table = kernels()
    with nogil, parallel(num_threads=threads):
        multiply(table, &team.shared, &w.matrix, &a.a if fast else NULL, &x[0, 0], &y_[0, 0], ldy, m, scratch)
    return y[:, :w.matrix.n]


cdef void multiply(
    const KernelTable* table, mi_team* team, const PackedMatrix* w, const Activations* a, const float* x, float* y,
    Py_ssize_t ldy, Py_ssize_t m, float[:, ::1] scratch,
) noexcept nogil:
    """As one of the team; a: x, rounded, or NULL."""
    cdef mi_member me = mi_join(team)
    if a != NULL:
        table.matmul_i8(&me, w, a, y, ldy, m, &scratch[me.th, 0])
    else:
        table.matmul_f32(&me, w, x, w.k, y, ldy, m, &scratch[me.th, 0])
    mi_leave(&me)


def swiglu_i8(
    PackedWeights gate not None, PackedWeights up not None, const float[:, ::1] x not None, gate_bias=None,
    up_bias=None, int threads=1,
):
    """silu(x gate^T + gate_bias) * (x up^T + up_bias), x and the result in int8, as `quantise` returns it.

    x [m, k]; gate, up [n, k], quantised, n a multiple of 32; both biases float32 [n] or none.
    """
    cdef Py_ssize_t m = x.shape[0]
    if m < 1 or x.shape[1] != gate.matrix.k or gate.shape != up.shape or gate.matrix.n % QBLOCK:
        raise ValueError(f"no SwiGLU of {gate.shape} and {up.shape} for rows of {x.shape[1]}")
    if gate.is_float or up.is_float or (gate_bias is None) != (up_bias is None):
        raise ValueError("SwiGLU in int8 takes quantised matrices, and both biases or none")
    cdef Rounded a = rounded(x, threads)
    cdef Rounded out = Rounded(m, gate.matrix.n)
    cdef const float[::1] bias
    cdef const float* gp = NULL
    cdef const float* upp = NULL
    if gate_bias is not None:
        bias = gate_bias
        gp = &bias[0]
        bias = up_bias
        upp = &bias[0]
    cdef float[:, ::1] scratch = empty((threads, matmul_scratch_floats()), np.float32)
    cdef Team team = Team(threads)
    cdef const KernelTable* table = kernels()
    with nogil, parallel(num_threads=threads):
        activate(table, &team.shared, &gate.matrix, &up.matrix, &a.a, gp, upp, &out.a, m, scratch)
    return out.parts()


cdef void activate(
    const KernelTable* table, mi_team* team, const PackedMatrix* gate, const PackedMatrix* up, const Activations* x,
    const float* gate_bias, const float* up_bias, const Activations* out, Py_ssize_t m, float[:, ::1] scratch,
) noexcept nogil:
    """SwiGLU, as one of the team."""
    cdef mi_member me = mi_join(team)
    table.swiglu_i8(&me, gate, up, x, gate_bias, up_bias, out, m, &scratch[me.th, 0])
    mi_leave(&me)


def embed(PackedWeights w not None, const int32_t[::1] ids not None, int threads=1):
    """Rows of W by id -> float32 [len(ids), k]."""
    cdef Py_ssize_t m = ids.shape[0]
    if m < 1 or min(ids) < 0 or max(ids) >= w.matrix.n:
        raise ValueError("row id out of range")
    x = np.empty((m, w.matrix.k), np.float32)
    cdef float[:, ::1] x_ = x
    cdef float[:, ::1] scratch = empty((threads, matmul_scratch_floats()), np.float32)
    cdef const KernelTable* table = kernels()
    cdef int th
    for th in prange(threads, nogil=True, num_threads=threads, schedule="static"):
        table.embed(th, threads, &w.matrix, &ids[0], m, &x_[0, 0], w.matrix.k, &scratch[th, 0])
    return x


def add_rmsnorm(
    float[:, ::1] x not None, const float[::1] weight not None, float eps, delta=None, bias=None, int threads=1,
):
    """x [m, k] += delta + bias, in place; returns x / rms(x) * weight."""
    cdef Py_ssize_t m = x.shape[0], k = x.shape[1]
    if m < 1 or k != weight.shape[0]:
        raise ValueError("shapes differ")
    cdef const float[:, ::1] delta_
    cdef const float[::1] bias_
    cdef const float* dp = NULL
    cdef const float* bp = NULL
    if delta is not None:
        delta_ = delta
        dp = &delta_[0, 0]
    if bias is not None:
        bias_ = bias
        bp = &bias_[0]
    y = np.empty((m, k), np.float32)
    cdef float[:, ::1] y_ = y
    cdef const KernelTable* table = kernels()
    cdef int th
    for th in prange(threads, nogil=True, num_threads=threads, schedule="static"):
        table.add_rmsnorm(th, threads, &x[0, 0], dp, k, bp, &weight[0], &y_[0, 0], m, k, eps)
    return y


def swiglu(
    const float[:, ::1] gate not None, const float[:, ::1] up not None, gate_bias=None, up_bias=None, int threads=1,
):
    """silu(gate + gate_bias) * (up + up_bias), all [m, k]; both biases or none."""
    cdef Py_ssize_t m = gate.shape[0], k = gate.shape[1]
    if m < 1 or up.shape[0] != m or up.shape[1] != k:
        raise ValueError("shapes differ")
    cdef const float[::1] gb, ub
    cdef const float* gp = NULL
    cdef const float* upp = NULL
    if gate_bias is not None:
        gb, ub = gate_bias, up_bias
        gp, upp = &gb[0], &ub[0]
    y = np.empty((m, k), np.float32)
    cdef float[:, ::1] y_ = y
    cdef const KernelTable* table = kernels()
    cdef int th
    for th in prange(threads, nogil=True, num_threads=threads, schedule="static"):
        table.swiglu(th, threads, &gate[0, 0], &up[0, 0], k, gp, upp, &y_[0, 0], k, m, k)
    return y


def rope(
    BatchView view not None, float[:, :, ::1] x not None, const float[:, ::1] cos not None,
    const float[:, ::1] sin not None, bias=None, int threads=1, norm=None, float eps=0,
):
    """Rotate x [tokens, heads, head_dim] in place by the rows' positions; cos, sin [positions, rope_dim / 2].

    bias [heads * head_dim] is added first; norm [head_dim]: each head is then divided by its rms and multiplied by it.
    """
    cdef const float[::1] bias_, norm_
    cdef const float* bp = NULL
    cdef const float* np_ = NULL
    if bias is not None:
        bias_ = bias
        bp = &bias_[0]
    if norm is not None:
        norm_ = norm
        if norm_.shape[0] != x.shape[2]:
            raise ValueError("shapes differ")
        np_ = &norm_[0]
    if x.shape[0] != view.n_tokens or 2 * cos.shape[1] > x.shape[2]:
        raise ValueError("shapes differ")
    cdef BatchRows rows
    bind_rows(view, &rows)
    cdef const KernelTable* table = kernels()
    cdef int th
    for th in prange(threads, nogil=True, num_threads=threads, schedule="static"):
        table.rope(
            th, threads, &rows, &x[0, 0, 0], x.shape[1] * x.shape[2], <int>x.shape[1], <int>x.shape[2],
            2 * <int>cos.shape[1], &cos[0, 0], &sin[0, 0], bp, np_, eps,
        )


cdef class KVStore:
    """One layer's paged cache, all NaN at first so that a stale read shows (of int8, the scales are).

    Raises ValueError for a cache of bfloat16 where the kernels in use have no tile registers.
    """
    cdef KVLayer layer
    cdef KVCache* kv

    def __init__(self, int blocks, int n_kv_heads, int head_dim, int block_size, str dtype="fp32"):
        if dtype == "bf16" and not kernels().tiles:
            raise ValueError("a KV cache of bf16 is for kernels with tile registers")
        self.layer = KVLayer(blocks, n_kv_heads, head_dim, block_size, dtype)
        self.kv = &self.layer.cache
        fill = (self.layer.k, self.layer.v) if dtype != "int8" else (self.layer.k_scale, self.layer.v_scale)
        for array in fill:
            array.fill(0x7fc0 if dtype == "bf16" else np.nan)

    @property
    def arrays(self):
        """The KVLayer."""
        return self.layer

    def write(
        self, BatchView view not None, const float[:, :, ::1] k not None, const float[:, :, ::1] v not None,
        int threads=1, v_bias=None, share=None,
    ):
        """Store k, v [tokens, kv_heads, head_dim] at the rows' positions.

        v_bias: float32 [kv_heads * head_dim], added to v. share: what that one of the threads stores, and no more.
        """
        if k.shape[0] != view.n_tokens or k.shape[1] != self.kv.n_kv_heads or k.shape[2] != self.kv.head_dim:
            raise ValueError("shapes differ")
        cdef const float[::1] bias
        cdef const float* bp = NULL
        if v_bias is not None:
            bias = v_bias
            if bias.shape[0] != k.shape[1] * k.shape[2]:
                raise ValueError("shapes differ")
            bp = &bias[0]
        cdef BatchRows rows
        bind_rows(view, &rows)
        cdef Py_ssize_t ld = k.shape[1] * k.shape[2]
        cdef const KernelTable* table = kernels()
        cdef int th
        if share is not None:
            table.kv_write(share, threads, &rows, self.kv, &k[0, 0, 0], ld, &v[0, 0, 0], ld, bp)
            return
        for th in prange(threads, nogil=True, num_threads=threads, schedule="static"):
            table.kv_write(th, threads, &rows, self.kv, &k[0, 0, 0], ld, &v[0, 0, 0], ld, bp)

    def rotate_and_write(
        self, BatchView view not None, float[:, :, ::1] k not None, const float[:, :, ::1] v not None,
        const float[:, ::1] cos not None, const float[:, ::1] sin not None, order not None,
    ):
        """`rope` of k in place and `write`, both by one thread after the other; order: which of them when.

        An executor's threads do the one after the other without a meeting, so the result must be the same in any order.
        """
        if k.shape[0] != view.n_tokens or k.shape[1] != self.kv.n_kv_heads or k.shape[2] != self.kv.head_dim:
            raise ValueError("shapes differ")
        if v.shape[0] != k.shape[0] or v.shape[1] != k.shape[1] or v.shape[2] != k.shape[2]:
            raise ValueError("shapes differ")
        if sorted(order) != list(range(len(order))) or 2 * cos.shape[1] > k.shape[2]:
            raise ValueError("shapes differ")
        cdef BatchRows rows
        bind_rows(view, &rows)
        cdef Py_ssize_t ld = k.shape[1] * k.shape[2]
        cdef const KernelTable* table = kernels()
        cdef int th, threads = <int>len(order)
        for th in order:
            table.rope(
                th, threads, &rows, &k[0, 0, 0], ld, self.kv.n_kv_heads, self.kv.head_dim, 2 * <int>cos.shape[1],
                &cos[0, 0], &sin[0, 0], NULL, NULL, 0,
            )
            table.kv_write(th, threads, &rows, self.kv, &k[0, 0, 0], ld, &v[0, 0, 0], ld, NULL)

    def attend(
        self, BatchView view not None, const float[:, :, ::1] q not None, float scale, float soft_cap=0, int window=0,
        int threads=1, bint quantised=False,
    ):
        """q [tokens, heads, head_dim] -> attention output of that shape, with what `quantise` makes of it if asked."""
        if q.shape[0] != view.n_tokens or q.shape[1] % self.kv.n_kv_heads or q.shape[2] != self.kv.head_dim:
            raise ValueError("shapes differ")
        out = np.empty((q.shape[0], q.shape[1], q.shape[2]), np.float32)
        cdef float[:, :, ::1] out_ = out
        cdef float[:, ::1] scratch = empty((threads, attention_scratch_floats(self.kv.head_dim)), np.float32)
        cdef BatchRows rows
        bind_rows(view, &rows)
        cdef AttentionParams p
        p.n_heads, p.scale, p.soft_cap, p.window = <int>q.shape[1], scale, soft_cap, window
        cdef Py_ssize_t ld = q.shape[1] * q.shape[2]
        if quantised and ld // self.kv.n_kv_heads % QBLOCK:
            raise ValueError(f"the heads of a group fill no blocks of {QBLOCK}")
        cdef Rounded a = Rounded(q.shape[0], ld) if quantised else None
        cdef const Activations* ap = &a.a if quantised else NULL
        cdef Team team = Team(threads)
        cdef const KernelTable* table = kernels()
        with nogil, parallel(num_threads=threads):
            attend(table, &team.shared, &rows, self.kv, &p, &q[0, 0, 0], &out_[0, 0, 0], ld, ap, scratch)
        return (out, a.parts()) if quantised else out


cdef void attend(
    const KernelTable* table, mi_team* team, const BatchRows* rows, const KVCache* kv, const AttentionParams* p,
    const float* q, float* out, Py_ssize_t ld, const Activations* quantised, float[:, ::1] scratch,
) noexcept nogil:
    """As one of the team."""
    cdef mi_member me = mi_join(team)
    table.attention(&me, rows, kv, p, q, ld, out, ld, quantised, &scratch[me.th, 0])
    mi_leave(&me)


def argmax(const float[::1] x not None):
    """Index of the largest, lowest on ties; -1 when a value is NaN or +inf, or all are -inf."""
    return kernels().argmax(&x[0], x.shape[0])


def logsumexp(const float[::1] x not None, float inv_temperature=1.0):
    return kernels().logsumexp(&x[0], x.shape[0], inv_temperature)


def log_softmax(const float[::1] x not None):
    y = np.empty(x.shape[0], np.float32)
    cdef float[::1] y_ = y
    kernels().log_softmax(&x[0], x.shape[0], &y_[0])
    return y


def top_k(const float[::1] x not None, Py_ssize_t k):
    """The k largest as [(id, value)], best first, lowest id first on ties."""
    if not 1 <= k <= x.shape[0]:
        raise ValueError("k out of range")
    out = np.empty(k, [("value", np.float32), ("id", np.int32)])
    kernels().top_k(&x[0], x.shape[0], <Candidate*><Py_ssize_t>out.ctypes.data, k)
    return [(int(i), float(v)) for v, i in out]


def draw(const float[::1] x not None, float inv_temperature, double u):
    """The token at which the cumulative softmax(x * inv_temperature) reaches u."""
    cdef float lse = kernels().logsumexp(&x[0], x.shape[0], inv_temperature)
    return kernels().draw(&x[0], x.shape[0], inv_temperature, lse, u)


def exp(const float[::1] x not None):
    y = np.empty(x.shape[0], np.float32)
    cdef float[::1] y_ = y
    cdef Py_ssize_t i
    for i in range(x.shape[0]):
        y_[i] = kernels().exp(x[i])
    return y
