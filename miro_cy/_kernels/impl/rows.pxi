# Per-row operations: rounding activations, RMSNorm with residual, SwiGLU, rotary embedding with or without a norm.
# Sums run over 16 fixed lanes, folded in a fixed order, so that a row's bits depend on the row alone.

cdef inline Py_ssize_t row_tiles(Py_ssize_t m) noexcept nogil:
    return (m + TILE_ROWS - 1) // TILE_ROWS


cdef inline Py_ssize_t share_of_rows(Py_ssize_t m, int th, int nth) noexcept nogil:
    """Start of thread th's share of m rows in whole tiles."""
    return min(m, share(row_tiles(m), th, nth) * TILE_ROWS)


cdef inline Py_ssize_t share_of_blocks(Py_ssize_t m, Py_ssize_t nb, bint whole, int th, int nth) noexcept nogil:
    """Start of thread th's share of the blocks of m rows; whole: of whole tiles, as share_of_rows has them."""
    return share(row_tiles(m), th, nth) * nb if whole else share(row_tiles(m) * nb, th, nth)


cdef void quantise(
    int th, int nth, const float* x, Py_ssize_t ldx, Py_ssize_t m, Py_ssize_t k, const Activations* out, bint whole,
) noexcept nogil:
    cdef Py_ssize_t u, row, nb = k // QBLOCK
    for u in range(share_of_blocks(m, nb, whole, th, nth), share_of_blocks(m, nb, whole, th + 1, nth)):
        row = u // nb * TILE_ROWS
        put_rows(out, m, row, <int>min(TILE_ROWS, m - row), u % nb, nb, x + row * ldx + u % nb * QBLOCK, ldx)


cdef inline float rms_inverse(const float* x, Py_ssize_t k, float eps) noexcept nogil:
    """1 / sqrt(mean(x^2) + eps)"""
    cdef float lane[16]
    cdef Py_ssize_t i, j, whole = k // 16 * 16
    for j in range(16):
        lane[j] = 0
    for i in range(0, whole, 16):
        for j in range(16):
            lane[j] = mi_fma(x[i + j], x[i + j], lane[j])
    for i in range(whole, k):
        lane[i - whole] = mi_fma(x[i], x[i], lane[i - whole])
    return <float>1.0 / sqrtf(mi_fold16(lane) / <float>k + eps)


cdef void add_rmsnorm_row(
    float* x, const float* delta, const float* bias, const float* weight, float* y, Py_ssize_t k, float eps,
) noexcept nogil:
    cdef float scale
    cdef Py_ssize_t i
    if delta != NULL:
        for i in range(k):
            x[i] = x[i] + delta[i]
    if bias != NULL:
        for i in range(k):
            x[i] = x[i] + bias[i]
    scale = rms_inverse(x, k, eps)
    for i in range(k):
        y[i] = x[i] * scale * weight[i]


cdef void add_rmsnorm(
    int th, int nth, float* x, const float* delta, Py_ssize_t ldd, const float* bias, const float* weight, float* y,
    Py_ssize_t m, Py_ssize_t k, float eps,
) noexcept nogil:
    # Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"
    cdef Py_ssize_t i
    cdef const float* row
    for i in range(share_of_rows(m, th, nth), share_of_rows(m, th + 1, nth)):
        row = delta
        if delta != NULL:
            row = delta + i * ldd
        add_rmsnorm_row(x + i * k, row, bias, weight, y + i * k, k, eps)


cdef void swiglu_row(
    const float* gate, const float* up, const float* gate_bias, const float* up_bias, float* y, Py_ssize_t k,
) noexcept nogil:
    cdef Py_ssize_t i
    cdef float g
    if gate_bias == NULL:
        for i in range(k):
            g = gate[i]
            y[i] = g / (<float>1.0 + expf_fast(-g)) * up[i]
    else:
        for i in range(k):
            g = gate[i] + gate_bias[i]
            y[i] = g / (<float>1.0 + expf_fast(-g)) * (up[i] + up_bias[i])


cdef void swiglu_rows(
    const float* gate, const float* up, Py_ssize_t ld, const float* gate_bias, const float* up_bias, Py_ssize_t at,
    float* y, Py_ssize_t ldy, Py_ssize_t rows, Py_ssize_t n,
) noexcept nogil:
    """n elements of some rows; at: where they lie in the biases."""
    cdef const float* gate_at = NULL
    cdef const float* up_at = NULL
    cdef Py_ssize_t i
    if gate_bias != NULL:
        gate_at, up_at = gate_bias + at, up_bias + at
    for i in range(rows):
        swiglu_row(gate + i * ld, up + i * ld, gate_at, up_at, y + i * ldy, n)


cdef void swiglu(
    int th, int nth, const float* gate, const float* up, Py_ssize_t ld, const float* gate_bias, const float* up_bias,
    float* y, Py_ssize_t ldy, Py_ssize_t m, Py_ssize_t k,
) noexcept nogil:
    # Shazeer 2020, "GLU Variants Improve Transformer". Shared out as `quantise` does, which may follow at once.
    cdef Py_ssize_t u, row, at, blocks = (k + QBLOCK - 1) // QBLOCK
    for u in range(share_of_blocks(m, blocks, False, th, nth), share_of_blocks(m, blocks, False, th + 1, nth)):
        row, at = u // blocks * TILE_ROWS, u % blocks * QBLOCK
        swiglu_rows(
            gate + row * ld + at, up + row * ld + at, ld, gate_bias, up_bias, at, y + row * ldy + at, ldy,
            min(TILE_ROWS, m - row), min(QBLOCK, k - at),
        )


cdef void norm_heads(float* x, int n_heads, int head_dim, const float* weight, float eps) noexcept nogil:
    """Each head of a row / its rms * weight, in place."""
    cdef float scale
    cdef float* head
    cdef int h, i
    for h in range(n_heads):
        head = x + h * head_dim
        scale = rms_inverse(head, head_dim, eps)
        for i in range(head_dim):
            head[i] = head[i] * scale * weight[i]


cdef inline void rope_head(float* x, int rope_dim, const float* cos, const float* sin) noexcept nogil:
    cdef int i
    cdef float a, b
    for i in range(rope_dim // 2):
        a = x[2 * i]
        b = x[2 * i + 1]
        x[2 * i] = a * cos[i] - b * sin[i]
        x[2 * i + 1] = b * cos[i] + a * sin[i]


cdef inline Py_ssize_t tokens_before(const BatchRows* batch, int r, int th, int nth) noexcept nogil:
    """Where thread th's share of a row's tokens begins, and that of the one before it ends.

    Rotating keys and writing them to the cache have the same shares, so that no barrier need be between them. None ends
    after an even position: two neighbours may be a pair of the cache, which no two threads may write.
    """
    cdef Py_ssize_t t = share(batch.n_tokens, th, nth), first = batch.offset[r], end = first + batch.n_tok[r]
    if t <= first:
        return first
    return min(end, t + ((batch.first_pos[r] + t - first) & 1))


cdef void rope(
    int th, int nth, const BatchRows* batch, float* x, Py_ssize_t ldx, int n_heads, int head_dim, int rope_dim,
    const float* cos, const float* sin, const float* bias, const float* norm, float eps,
) noexcept nogil:
    # Su et al. 2021, "RoFormer", on neighbouring pairs (the order of GGUF llama files)
    cdef Py_ssize_t t, j, first, last, position
    cdef int r, h
    cdef float* row
    for r in range(batch.n_rows):
        first, last = tokens_before(batch, r, th, nth), tokens_before(batch, r, th + 1, nth)
        for t in range(first, last):
            row = x + t * ldx
            position = batch.first_pos[r] + t - batch.offset[r]
            if bias != NULL:
                for j in range(n_heads * head_dim):
                    row[j] = row[j] + bias[j]
            if norm != NULL:
                norm_heads(row, n_heads, head_dim, norm, eps)
            for h in range(n_heads):
                rope_head(
                    row + h * head_dim, rope_dim, cos + position * (rope_dim // 2), sin + position * (rope_dim // 2),
                )
