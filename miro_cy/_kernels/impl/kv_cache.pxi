# The KV cache's elements: how they are stored, found and read. See KVCache in abi.pxd.
#
# int8 is symmetric, with one float32 scale for the vector of a token and KV head. It depends on that vector alone, so a
# token's bits are the same whichever chunk wrote it. A vector that is not finite has a NaN scale, and so NaN is what
# attention over it gives.

cdef inline vf load_kv(const int dtype, const void* p, Py_ssize_t i) noexcept nogil:
    if dtype == KV_F16:
        return vf_load_f16(<const uint16_t*>p + i)
    if dtype == KV_I8:
        return vf_load_i8(<const int8_t*>p + i)
    return vf_load(<const float*>p + i)


cdef inline const float* scales_of(const KVCache* kv, const float* scales, int block, int head) noexcept nogil:
    """Those of one block and KV head [block_size]; scales: the pool's, of K or of V."""
    return scales + block * kv.scale_block + <Py_ssize_t>head * kv.block_size


cdef void copy_scales(
    const KVCache* kv, const float* scales, const int32_t* table, int first_block, int head, int t0, int last,
    float* out,
) noexcept nogil:
    """out[KV_TILE] = the scales of tokens [t0, t0 + KV_TILE), 0 for those after `last`; before first_block any."""
    cdef int j, n, bs = kv.block_size, end = min(t0 + KV_TILE, last + 1)
    for j in range(end - t0, KV_TILE):
        out[j] = 0
    while t0 < end:
        n = min(bs, end - t0)
        memcpy(out, scales_of(kv, scales, table[max(t0 // bs, first_block)], head), n * sizeof(float))
        out += n
        t0 += n


cdef inline void prefetch_scales(const KVCache* kv, const float* scales, int block, int head) noexcept nogil:
    cdef int i
    for i in range(0, kv.block_size, 16):
        mi_prefetch(scales_of(kv, scales, block, head) + i)


cdef void prefetch_keys(const KVCache* kv, const int32_t* table, int head, int first, int last) noexcept nogil:
    """Ask for the keys of tokens `first` to `last`, of whole blocks."""
    cdef int b
    cdef Py_ssize_t i, size = kv_element_size(kv.dtype), n = <Py_ssize_t>kv.k_dim * kv.block_size
    for b in range(first // kv.block_size, last // kv.block_size + 1):
        for i in range(0, n * size, 64):
            mi_prefetch(<const uint8_t*>kv.k + (table[b] * kv.k_block + head * n) * size + i)
        if kv.dtype == KV_I8:
            prefetch_scales(kv, kv.k_scale, table[b], head)


cdef void prefetch_values(const KVCache* kv, const int32_t* table, int head, int first, int last) noexcept nogil:
    """Alike for the values."""
    cdef int b, bs = kv.block_size
    cdef Py_ssize_t i, base, size = kv_element_size(kv.dtype)
    for b in range(first // bs, last // bs + 1):
        base = (table[b] * kv.v_block + <Py_ssize_t>head * bs * kv.v_dim) * size
        for i in range(0, <Py_ssize_t>min(bs, last + 1 - b * bs) * kv.v_dim * size, 64):
            mi_prefetch(<const uint8_t*>kv.v + base + i)
        if kv.dtype == KV_I8:
            prefetch_scales(kv, kv.v_scale, table[b], head)


cdef inline void store_kv(int dtype, void* p, Py_ssize_t i, float x) noexcept nogil:
    if dtype == KV_F16:
        (<uint16_t*>p)[i] = mi_f32_to_f16(x)
    else:
        (<float*>p)[i] = x


cdef float quantise_vector(const float* x, const float* bias, int n, int8_t* q, Py_ssize_t step) noexcept nogil:
    """x (+ bias) into int8, elements `step` apart; returns the scale."""
    cdef uint32_t bits, top = 0
    cdef float inverse, big
    cdef int j
    if bias == NULL:
        for j in range(n):
            bits = mi_float_to_bits(x[j]) & 0x7fffffffu
            top = bits if bits > top else top
    else:
        for j in range(n):
            bits = mi_float_to_bits(x[j] + bias[j]) & 0x7fffffffu
            top = bits if bits > top else top
    big = mi_bits_to_float(top)
    inverse = int8_inverse(big)
    for j in range(n):
        q[j * step] = <int8_t>to_int8(x[j] if bias == NULL else x[j] + bias[j], inverse)
    return int8_scale(big)


cdef void store_vector(
    const KVCache* kv, void* p, Py_ssize_t at, Py_ssize_t step, float* scales, Py_ssize_t scale, const float* x,
    const float* bias,
) noexcept nogil:
    """x[head_dim] (+ bias) into K or V (p, scales) from element `at` on, elements `step` apart, with that scale."""
    cdef int j
    if kv.dtype == KV_I8:
        scales[scale] = quantise_vector(x, bias, kv.head_dim, <int8_t*>p + at, step)
        return
    for j in range(kv.head_dim):
        store_kv(kv.dtype, p, at + j * step, x[j] if bias == NULL else x[j] + bias[j])


cdef inline uint32_t to_bf16(float x) noexcept nogil:
    """To nearest, ties to even; NaN stays one."""
    cdef uint32_t bits = mi_float_to_bits(x), rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16
    return bits >> 16 | 0x40 if (bits & 0x7fffffffu) > 0x7f800000u else rounded


cdef inline void sixteen_to_bf16(const float* x, const float* bias, int n, uint32_t* out) noexcept nogil:
    """x (+ bias), n of 16 elements, and zeros."""
    cdef int j
    if n >= 16 and bias == NULL:
        for j in range(16):
            out[j] = to_bf16(x[j])
        return
    for j in range(16):
        out[j] = 0 if j >= n else to_bf16(x[j] if bias == NULL else x[j] + bias[j])


cdef void write_pairs(
    const KVCache* kv, Py_ssize_t block, int h, int at, const float* k, const float* v, const float* bias,
) noexcept nogil:
    """One head of a token of a bfloat16 cache, whose cells are pairs."""
    cdef int d, j, bs = kv.block_size
    cdef uint32_t x[16]
    cdef uint32_t* key = <uint32_t*>kv.k + (block * kv.k_block + <Py_ssize_t>h * kv.k_dim * bs) // 2
    cdef uint32_t* value = <uint32_t*>kv.v + (block * kv.v_block + <Py_ssize_t>h * kv.v_dim * bs) // 2 + at // 2 * 16
    cdef uint32_t others = 0xffff0000u if at % 2 == 0 else 0x0000ffffu
    cdef const float* added = NULL
    key += at // 16 * 256 + at % 16
    for d in range(0, kv.k_dim, 16):
        sixteen_to_bf16(k + d, NULL, kv.head_dim - d, x)
        for j in range(8):
            key[d // 32 * 16 * bs + (d % 32 // 2 + j) * 16] = x[2 * j] | x[2 * j + 1] << 16
    for d in range(0, kv.v_dim, 16):
        if bias != NULL:
            added = bias + d
        sixteen_to_bf16(v + d, added, kv.head_dim - d, x)
        for j in range(16):
            value[d // 2 * bs + j] = (value[d // 2 * bs + j] & others) | x[j] << (16 * (at % 2))


cdef void write_token(
    const KVCache* kv, Py_ssize_t block, int at, const float* k, const float* v, const float* v_bias,
) noexcept nogil:
    cdef Py_ssize_t scale
    cdef const float* bias = NULL
    cdef int h, d = kv.head_dim
    for h in range(kv.n_kv_heads):
        scale = block * kv.scale_block + h * kv.block_size + at
        if v_bias != NULL:
            bias = v_bias + h * d
        if kv.dtype == KV_BF16:
            write_pairs(kv, block, h, at, k + h * d, v + h * d, bias)
            continue
        store_vector(
            kv, kv.k, block * kv.k_block + <Py_ssize_t>h * d * kv.block_size + at, kv.block_size, kv.k_scale, scale,
            k + h * d, NULL,
        )
        store_vector(
            kv, kv.v, block * kv.v_block + (<Py_ssize_t>h * kv.block_size + at) * kv.v_dim, 1, kv.v_scale, scale,
            v + h * d, bias,
        )


cdef void kv_write(
    int th, int nth, const BatchRows* batch, const KVCache* kv, const float* k, Py_ssize_t ldk, const float* v,
    Py_ssize_t ldv, const float* v_bias,
) noexcept nogil:
    cdef Py_ssize_t t, first, last
    cdef int r, position
    cdef const int32_t* table
    for r in range(batch.n_rows):
        MIRO_INDEX(batch.slot[r], batch.n_slots)
        MIRO_SPAN(batch.offset[r], batch.n_tok[r], batch.n_tokens)
        first, last = tokens_before(batch, r, th, nth), tokens_before(batch, r, th + 1, nth)
        table = batch.table + batch.slot[r] * batch.table_stride
        for t in range(first, last):
            position = batch.first_pos[r] + <int>(t - batch.offset[r])
            MIRO_INDEX(position // kv.block_size, batch.table_stride)
            MIRO_INDEX(table[position // kv.block_size], kv.n_blocks)
            write_token(
                kv, table[position // kv.block_size], position % kv.block_size, k + t * ldk, v + t * ldv, v_bias,
            )
