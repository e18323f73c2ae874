"""A layer's weights as the kernels take them, and the sizes of a step's buffers; see step.pxd."""

import numpy as np

from miro_cy._kernels.abi cimport (
    PANEL, KernelTable, PackedMatrix, activation_bytes, attention_scratch_floats, matmul_scratch_floats,
)
from miro_cy._kernels.weights cimport PackedWeights


cdef extern from "vec.h" nogil:
    void mi_prefetch_l2(const void* p)


cdef enum:
    FEW_TOKENS = 32         # of a step that waits for its weights
    AHEAD = 16384           # bytes of the next matrix that such a step calls for before a barrier


cdef const PackedMatrix* matrix_of(PackedWeights w):
    return &w.matrix


cdef const float* vector_of(dict vectors, str role) except? NULL:
    if role not in vectors:
        return NULL
    cdef const float[::1] v = vectors[role]
    return &v[0]


cdef dict set_weights(Layer* layer, dict matrices, dict vectors):
    """Point a layer at its weights, by role. Returns the vectors it points at, to be kept alive as `matrices` is."""
    m, v = matrices, dict(vectors)
    layer.q, layer.k, layer.v, layer.o = matrix_of(m["q"]), matrix_of(m["k"]), matrix_of(m["v"]), matrix_of(m["o"])
    layer.gate, layer.up, layer.down = matrix_of(m["gate"]), matrix_of(m["up"]), matrix_of(m["down"])
    if ("gate_bias" in v) != ("up_bias" in v):      # the SwiGLU kernel takes both or none
        v.setdefault("gate_bias", np.zeros(layer.gate.n, np.float32))
        v.setdefault("up_bias", np.zeros(layer.up.n, np.float32))
    layer.attn_norm, layer.ffn_norm = vector_of(v, "attn_norm"), vector_of(v, "ffn_norm")
    layer.q_norm, layer.k_norm = vector_of(v, "q_norm"), vector_of(v, "k_norm")
    layer.q_bias, layer.k_bias, layer.v_bias = vector_of(v, "q_bias"), vector_of(v, "k_bias"), vector_of(v, "v_bias")
    layer.o_bias, layer.down_bias = vector_of(v, "o_bias"), vector_of(v, "down_bias")
    layer.gate_bias, layer.up_bias = vector_of(v, "gate_bias"), vector_of(v, "up_bias")
    return v


cdef Py_ssize_t padded(Py_ssize_t n):
    return (n + PANEL - 1) // PANEL * PANEL


cdef void set_widths(Buffers* b, spec):
    """Row lengths of a step's buffers, in floats."""
    b.ld_x = spec.hidden_size
    b.ld_h = max(spec.hidden_size, spec.n_heads * spec.head_dim, spec.ffn_size)
    b.ld_q, b.ld_kv = padded(spec.n_heads * spec.head_dim), padded(spec.n_kv_heads * spec.head_dim)
    b.ld_d, b.ld_f, b.ld_v = padded(spec.hidden_size), padded(spec.ffn_size), padded(spec.vocab_size)


cdef inline Py_ssize_t share_of_pairs(const PackedMatrix* w, int th, int nth) noexcept nogil:
    """First panel of about the thread's share, which a matmul may cut off a panel earlier or later."""
    return min(w.n_panels, 2 * ((w.n_panels + 1) // 2 * th // nth))


cdef void call_for(
    const KernelTable* table, const PackedMatrix* w, int th, int nth, Py_ssize_t m,
) noexcept nogil:
    """Have memory busy with the thread's first panels of a matrix while a step of m tokens does something else.

    Measured to pay where opening weights for tiles takes as long as reading them, and nowhere else.
    """
    cdef Py_ssize_t first = share_of_pairs(w, th, nth), last = share_of_pairs(w, th + 1, nth), i
    if table.tiles and m <= FEW_TOKENS:
        for i in range(0, min(AHEAD, (last - first) * w.panel_bytes), 64):
            mi_prefetch_l2(w.data + first * w.panel_bytes + i)


cdef Py_ssize_t scratch_of(int head_dim):
    """Floats of scratch a thread needs."""
    return padded(max(matmul_scratch_floats(), attention_scratch_floats(head_dim)))


def buffer_bytes(spec, *, int threads, Py_ssize_t max_tokens, Py_ssize_t max_logits):
    """Bytes of the buffers that an executor has for steps of so many tokens and logits rows, rotary tables aside."""
    cdef Buffers b
    set_widths(&b, spec)
    row = b.ld_x + b.ld_h + b.ld_d + b.ld_q + 2 * b.ld_kv + 2 * b.ld_f
    floats = max_tokens * row + threads * scratch_of(spec.head_dim) + max_logits * b.ld_v
    return sizeof(float) * floats + activation_bytes(max_tokens, b.ld_h) + activation_bytes(max_tokens, spec.ffn_size)
