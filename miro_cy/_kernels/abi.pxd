"""The kernels' contract: weight layouts, buffers, and the table of functions that each instruction-set build fills.

Every op is called by all threads of a team, with a barrier between ops (the caller's business). Those that take a
member deal their work out: a thread that is done takes from the others. The rest is light, and thread `th` of `nth`
does its share. Which thread computes an element never changes its bits. Sizes are in elements unless a name says bytes.

Packed weights W [n, k] (y = x W^T): panels of 16 output rows, so that vector lanes run across outputs.

    F32, F16, BF16   [panel][k][16]
    Q8         [panel][block]  block of 32 k:  8 quads [16 rows][4] int8 | d f16[16]
    Q4         [panel][block]  block of 32 k:  4 x [16 rows][4] bytes, low nibbles quads 0-3, high nibbles quads 4-7
                                               | high-bit plane, if any | d f16[16] | m f16[16] if has_min
               with super-scales, a block is 256 k: 8 x (nibbles | high bits), then sub-scales int8 [256/group][16]
                                               | sub-mins uint8 alike, if has_min | d f16[16] | dmin f16[16] if has_min

A quad is 4 neighbouring k of one row: the unit of an int8 dot product. A stored q stands for scale * (q - zero) + min,
or scale * table[q] + min where a 16-entry table is set; the scale of a group of 16 or 32 k is d, or d * sub-scale. No
bit of the file is lost. The high-bit plane makes q 6 or 5 bits wide: 2 bits as [2][16][4] bytes, byte h holding quads
h, h+2, h+4, h+6 from its low bits up; 1 bit as [16][4] bytes, bit p belonging to quad p. Q4_0, Q4_1, Q8_0 and Q6_K map
onto these now, and Q5_*, Q2_K to Q5_K and IQ4_* will.
"""

from libc.stdint cimport int8_t, int16_t, int32_t, uint8_t, uint16_t, uint32_t, uint64_t

from miro_cy._kernels.team cimport mi_member


cdef enum:
    PANEL = 16          # output rows a panel
    TILE_ROWS = 8       # rows of activations that are quantised into one block
    QBLOCK = 32         # k elements of the smallest quantised weight block
    QGROUP = 16         # k elements an activation scale covers
    KV_TILE = 64        # tokens an online-softmax tile covers, at absolute positions
    KV_RANGE = 512      # tokens a fresh (max, sum, acc) partial covers, at absolute positions
    EXPONENT = 12           # of weights in float16, but for panels with very large or small ones
    PROBE_LANES = 192   # most lanes of a probe's accumulators
    PROBE_QUADS = 32    # quads a round of the int8 probe covers

cdef enum Layout:
    LAYOUT_F32 = 0
    LAYOUT_F16 = 1
    LAYOUT_Q8 = 2
    LAYOUT_Q4 = 3
    LAYOUT_BF16 = 4

cdef enum KVType:
    KV_F16 = 0
    KV_F32 = 1
    KV_I8 = 2           # symmetric, one scale for each token's vector of a KV head
    KV_BF16 = 3         # in pairs, as tile registers read them: only where KernelTable.tiles


cdef struct PackedMatrix:
    int layout
    int group               # k elements a scale covers: 16 or 32
    int block               # k elements a packed block covers: 1, 32 or 256
    int high_bits           # 0, 1 or 2 bits a value beside the nibble
    int zero                # taken off each stored value
    int has_min
    Py_ssize_t n            # output rows
    Py_ssize_t k
    Py_ssize_t n_panels
    Py_ssize_t block_bytes
    Py_ssize_t panel_bytes
    const uint8_t* data     # 64-byte aligned
    const int8_t* exponent  # [n_panels] of quantised layouts: weights * 2**exponent fit well into float16


cdef struct QuantBlock:
    # 32 k of a tile of 8 rows, all that a matmul reads of them in one place; rows past the last are left as they are
    int8_t q[8][32]
    float d[2][8]           # of the first and the second 16 k
    int32_t start[2][8]     # -128 times the sum of q: takes off what unsigned weights are too large by
    float dsum[8]           # of d * q over all 32 k

cdef struct Activations:
    # m rows of k rounded activations, k a multiple of 32, as the level's matmuls read them:
    #   int8, one scale per 16 k: x ~ d * q, QuantBlock [(m + 7) / 8, k / 32]. With one per 32, as others have it,
    #   SmolLM2's distance from exact logits scatters between 0.0028 and 0.0039 nats a token; with one per 16, between
    #   0.0014 and 0.0023.
    #   bfloat16 where there are tile registers (v4_amx): [tile of 16 rows][block of 32 k][row][32], the last tile with
    #   as many rows as there are left; the 32 in the order of include/tiles.h
    void* data


cdef struct KVCache:
    # one layer, head-major: K transposed inside a block, V row-major. Of bfloat16, pairs of dimensions by 16 tokens and
    # pairs of tokens by 16 dimensions:
    #   k [blocks][kv_heads][k_dim / 32][block_size / 16][16 pairs][16 tokens][2]
    #   v [blocks][kv_heads][v_dim / 16][block_size / 2 pairs][16][2]
    void* k                 # [blocks][kv_heads][head_dim][block_size]
    void* v                 # [blocks][kv_heads][block_size][v_dim]
    float* k_scale          # [blocks][kv_heads][block_size] beside int8, else NULL
    float* v_scale
    int dtype               # KVType
    int n_kv_heads
    int head_dim
    int k_dim               # head_dim; bfloat16: rounded up to 32, the rest is zero
    int v_dim               # head_dim rounded up to 16; the rest is zero
    int block_size          # 16, 32 or 64
    Py_ssize_t k_block      # elements a block
    Py_ssize_t v_block
    Py_ssize_t scale_block
    Py_ssize_t n_blocks


cdef struct BatchRows:
    # a BatchView as plain pointers; see miro_cy/batch.pxd
    int n_rows
    int n_tokens
    const int32_t* slot
    const int32_t* first_pos
    const int32_t* n_tok
    const int32_t* offset
    const int32_t* table            # [slots, max_blocks] of this layer's group
    Py_ssize_t table_stride
    Py_ssize_t n_slots


cdef struct AttentionParams:
    int n_heads
    float scale
    float soft_cap          # 0: none
    int window              # keys a query sees, itself included; 0: all


cdef struct Candidate:
    # one entry of a sampler's shortlist
    float value
    int32_t id


cdef struct KernelTable:
    # --- weights (load time; thread-free) ---
    # packs panels [p0, p1) of W from a file's rows; row i of W is at src + i * row_bytes
    void (*pack_f32)(
        PackedMatrix* w, uint8_t* dst, const uint8_t* src, Py_ssize_t row_bytes, Py_ssize_t p0, Py_ssize_t p1
    ) noexcept nogil
    void (*pack_16bit)(
        PackedMatrix* w, uint8_t* dst, const uint8_t* src, Py_ssize_t row_bytes, Py_ssize_t p0, Py_ssize_t p1
    ) noexcept nogil
    void (*pack_q8_0)(
        PackedMatrix* w, uint8_t* dst, const uint8_t* src, Py_ssize_t row_bytes, Py_ssize_t p0, Py_ssize_t p1
    ) noexcept nogil
    void (*pack_q4)(
        PackedMatrix* w, uint8_t* dst, const uint8_t* src, Py_ssize_t row_bytes, Py_ssize_t p0, Py_ssize_t p1
    ) noexcept nogil
    void (*pack_q6_k)(
        PackedMatrix* w, uint8_t* dst, const uint8_t* src, Py_ssize_t row_bytes, Py_ssize_t p0, Py_ssize_t p1
    ) noexcept nogil

    # exponents of panels [p0, p1) of a quantised layout, which are packed
    void (*scan)(PackedMatrix* w, const uint8_t* src, int8_t* exponent, Py_ssize_t p0, Py_ssize_t p1) noexcept nogil

    # --- matmul: y[m, :n] = x[m, k] W^T; y rows are ldy apart, ldy >= n_panels * 16, padding columns are written ---
    # float activations, any layout ("exact")
    void (*matmul_f32)(
        mi_member* me, const PackedMatrix* w, const float* x, Py_ssize_t ldx, float* y, Py_ssize_t ldy, Py_ssize_t m,
        float* scratch
    ) noexcept nogil
    # rounded activations, Q layouts ("fast")
    void (*matmul_i8)(
        mi_member* me, const PackedMatrix* w, const Activations* x, float* y, Py_ssize_t ldy, Py_ssize_t m,
        float* scratch
    ) noexcept nogil
    # out = silu(x G^T + gate_bias) * (x U^T + up_bias), rounded, what matmul_i8, swiglu and quantise give one after the
    # other; G and U are [n, k], n a multiple of 32
    void (*swiglu_i8)(
        mi_member* me, const PackedMatrix* gate, const PackedMatrix* up, const Activations* x,
        const float* gate_bias, const float* up_bias, const Activations* out, Py_ssize_t m, float* scratch
    ) noexcept nogil
    # x[i, :k] = W[ids[i], :], float32
    void (*embed)(
        int th, int nth, const PackedMatrix* w, const int32_t* ids, Py_ssize_t m, float* x, Py_ssize_t ldx,
        float* scratch
    ) noexcept nogil

    # --- rows ---
    void (*quantise)(
        int th, int nth, const float* x, Py_ssize_t ldx, Py_ssize_t m, Py_ssize_t k, const Activations* out, bint whole
    ) noexcept nogil
    # x += delta (+ bias) where delta is given; y = x / rms(x) * weight
    void (*add_rmsnorm)(
        int th, int nth, float* x, const float* delta, Py_ssize_t ldd, const float* bias, const float* weight,
        float* y, Py_ssize_t m, Py_ssize_t k, float eps
    ) noexcept nogil
    # y = silu(gate + gate_bias) * (up + up_bias)
    void (*swiglu)(
        int th, int nth, const float* gate, const float* up, Py_ssize_t ld, const float* gate_bias,
        const float* up_bias, float* y, Py_ssize_t ldy, Py_ssize_t m, Py_ssize_t k
    ) noexcept nogil
    # bias and rotation of the heads of one projection, in place, and between the two each head / its rms * norm, where
    # norm [head_dim] is given; cos, sin [positions, rope_dim / 2], interleaved pairs. kv_write, whose shares are the
    # same, may follow without a barrier
    void (*rope)(
        int th, int nth, const BatchRows* batch, float* x, Py_ssize_t ldx, int n_heads, int head_dim, int rope_dim,
        const float* cos, const float* sin, const float* bias, const float* norm, float eps
    ) noexcept nogil
    void (*kv_write)(
        int th, int nth, const BatchRows* batch, const KVCache* kv, const float* k, Py_ssize_t ldk, const float* v,
        Py_ssize_t ldv, const float* v_bias
    ) noexcept nogil
    # quantised: the output rounded as well, or NULL; a KV group's heads must then have a multiple of 32 elements
    void (*attention)(
        mi_member* me, const BatchRows* batch, const KVCache* kv, const AttentionParams* p, const float* q,
        Py_ssize_t ldq, float* out, Py_ssize_t ldo, const Activations* quantised, float* scratch
    ) noexcept nogil

    # --- one row of logits ---
    # index of the largest, lowest id on ties; -1 when a value is NaN or +inf, or all are -inf
    int32_t (*argmax)(const float* x, Py_ssize_t n) noexcept nogil
    # log(sum(exp(x * inv_temperature))), over fixed chunks merged in order
    float (*logsumexp)(const float* x, Py_ssize_t n, float inv_temperature) noexcept nogil
    void (*log_softmax)(const float* x, Py_ssize_t n, float* y) noexcept nogil
    # the k largest, best first, lowest id first on ties
    void (*top_k)(const float* x, Py_ssize_t n, Candidate* out, Py_ssize_t k) noexcept nogil
    # first id, in id order, at which the running sum of exp(x * inv_temperature - lse) reaches u
    int32_t (*draw)(const float* x, Py_ssize_t n, float inv_temperature, float lse, double u) noexcept nogil
    float (*exp)(float x) noexcept nogil

    # --- what the machine can do at this level; each thread calls these for itself ---
    # XOR of the 32-bit words of n bytes, n a multiple of 512
    uint32_t (*probe_read)(const uint8_t* p, Py_ssize_t n) noexcept nogil
    # x[:fma_lanes] = x * a + b, `rounds` times
    void (*probe_fma)(float* x, float a, float b, Py_ssize_t rounds) noexcept nogil
    # out[dot_rows, dot_lanes] = sum over quads of w . x, `rounds` times over w [PROBE_QUADS][dot_lanes][4], values
    # below 16, and the same x [dot_rows][4] for all quads
    void (*probe_dot)(const uint8_t* w, const int8_t* x, int32_t* out, Py_ssize_t rounds) noexcept nogil
    # sums[16][16] = `rounds` times the products of tiles x [16 rows][32] and w [16 pairs][16 outputs][2], bfloat16, and
    # the same three times more; NULL without tile registers
    void (*probe_tile)(const uint8_t* x, const uint8_t* w, float* sums, Py_ssize_t rounds) noexcept nogil
    int fma_lanes           # at most PROBE_LANES, as is dot_rows * dot_lanes
    int dot_rows
    int dot_lanes
    bint tiles              # activations are rounded to bfloat16, not int8


cdef inline bint is_float_layout(int layout) noexcept nogil:
    """Layouts that are multiplied in float32 whatever the compute mode."""
    return layout == LAYOUT_F32 or layout == LAYOUT_F16 or layout == LAYOUT_BF16


cdef inline Py_ssize_t kv_element_size(int dtype) noexcept nogil:
    """Bytes of an element of K or V."""
    if dtype == KV_I8:
        return 1
    return 4 if dtype == KV_F32 else 2


cdef inline Py_ssize_t activation_bytes(Py_ssize_t m, Py_ssize_t k) noexcept nogil:
    """Room for m rows of Activations in either form."""
    cdef Py_ssize_t tiles = (m + TILE_ROWS - 1) // TILE_ROWS
    return max(tiles * (k // QBLOCK) * <Py_ssize_t>sizeof(QuantBlock), 2 * m * k)


cdef inline Py_ssize_t matmul_scratch_floats() noexcept nogil:
    """Floats of scratch a thread needs for either matmul or embed."""
    return 212992


cdef inline Py_ssize_t attention_scratch_floats(int head_dim) noexcept nogil:
    """Floats of scratch a thread needs for attention.

    Scores, scaled queries, two accumulators, maxima and sums, for 64 rows; a tile of keys or values as floats; and what
    tile registers read: queries, weights and values.
    """
    cdef int wide = max(head_dim, KV_TILE), padded = head_dim + QBLOCK
    return 64 * (KV_TILE + 3 * (head_dim + 16) + 24) + KV_TILE * wide + 64 * padded + 3072
