"""What a step works on: a layer's weights, the activations of all its tokens, and the parts its time is booked to."""

from miro_cy._kernels.abi cimport Activations, AttentionParams, KernelTable, KVCache, PackedMatrix
from miro_cy._kernels.weights cimport PackedWeights


cdef extern from "profile.h" nogil:
    ctypedef struct mi_profile:
        int on
        double seconds[16]
    void mi_profile_begin(mi_profile* p, int thread)
    void mi_profile_mark(mi_profile* p, int thread, int part)


cdef enum:
    # parts of a step
    EMBED
    NORM
    QKV
    ROPE
    ATTENTION
    ATTENTION_OUT
    GATE_UP
    SWIGLU
    DOWN
    OUTPUT
    N_PARTS


cdef enum:
    MAX_LAYERS = 1024

cdef struct Layer:
    # pointers into arrays that the executor's `weights` and `kv` keep alive; a missing bias is NULL
    const PackedMatrix* q
    const PackedMatrix* k
    const PackedMatrix* v
    const PackedMatrix* o
    const PackedMatrix* gate
    const PackedMatrix* up
    const PackedMatrix* down
    const float* attn_norm
    const float* ffn_norm
    const float* q_norm     # of each head, before the rotation; NULL where q and k are not normalised
    const float* k_norm
    const float* q_bias
    const float* k_bias
    const float* v_bias
    const float* o_bias
    const float* gate_bias
    const float* up_bias
    const float* down_bias
    KVCache kv              # that of its place in a group
    int group               # whose block table it reads
    AttentionParams attention


cdef struct Buffers:
    # one step's activations, rows of all tokens; ld_* are row lengths in floats
    float* x                # residual stream [tokens, ld_x]
    float* h                # normalised input, attention output or SwiGLU output [tokens, ld_h]
    float* q                # [tokens, ld_q]
    float* k                # [tokens, ld_kv]
    float* v
    float* delta            # what the layer adds to x [tokens, ld_d]
    float* gate             # [tokens, ld_f]
    float* up
    float* logits           # [rows, ld_v]
    Py_ssize_t ld_x, ld_h, ld_q, ld_kv, ld_d, ld_f, ld_v
    Activations a           # h, rounded
    Activations f           # SwiGLU's output, rounded, where gate, up and down are all multiplied in integers


cdef const PackedMatrix* matrix_of(PackedWeights w)
cdef dict set_weights(Layer* layer, dict matrices, dict vectors)
cdef void set_widths(Buffers* b, spec)
cdef Py_ssize_t scratch_of(int head_dim)
cdef void call_for(
    const KernelTable* table, const PackedMatrix* w, int th, int nth, Py_ssize_t m,
) noexcept nogil
