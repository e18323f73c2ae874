# Per-row operations: activation quantisation, RMSNorm with residual, SwiGLU, rotary embedding.
# Sums run over 16 fixed lanes, folded in a fixed order, so that a row's bits depend on the row alone.

cdef inline float fold16(const float* lane) noexcept nogil:
    cdef float a[8]
    cdef int i
    for i in range(8):
        a[i] = lane[i] + lane[i + 8]
    for i in range(4):
        a[i] = a[i] + a[i + 4]
    return (a[0] + a[2]) + (a[1] + a[3])


cdef inline void quantise_group(const float* x, int8_t* q, float* d, int32_t* total) noexcept nogil:
    """16 floats -> int8 in [-127, 127], scale max|x| / 127 and the sum of q. Non-finite input gives a NaN scale."""
    cdef uint32_t bits, top = 0
    cdef float big, inverse, r
    cdef int32_t n, s = 0
    cdef int j
    for j in range(16):                 # magnitudes as integers: same order, and NaN and infinity come out on top
        bits = mi_float_to_bits(x[j]) & 0x7fffffffu
        top = bits if bits > top else top
    big = mi_bits_to_float(top)
    inverse = <float>127.0 / big if big > <float>1e-30 else <float>0.0
    for j in range(16):
        r = mi_fma(x[j], inverse, <float>12582912.0) - <float>12582912.0    # to nearest, ties to even
        r = r if r > <float>-127.0 else <float>-127.0
        r = r if r < <float>127.0 else <float>127.0
        n = <int32_t>r
        q[j] = <int8_t>n
        s += n
    total[0] = s
    d[0] = big / <float>127.0 if big > <float>1e-30 else <float>0.0
    if top >= 0x7f800000u:
        d[0] = mi_bits_to_float(0x7fc00000u)


cdef void quantise_row(const float* x, Py_ssize_t row, Py_ssize_t k, const Activations* out) noexcept nogil:
    cdef Py_ssize_t g, b, groups = k // QGROUP
    cdef float* d = out.d + row * groups
    cdef int32_t* total = out.sum + row * groups
    for g in range(groups):
        quantise_group(x + g * QGROUP, out.q + row * k + g * QGROUP, d + g, total + g)
    for b in range(k // QBLOCK):
        out.dsum[row * (k // QBLOCK) + b] = mi_fma(
            d[2 * b + 1], <float>total[2 * b + 1], d[2 * b] * <float>total[2 * b],
        )


cdef void quantise(
    int th, int nth, const float* x, Py_ssize_t ldx, Py_ssize_t m, Py_ssize_t k, const Activations* out,
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(share(m, th, nth), share(m, th + 1, nth)):
        quantise_row(x + i * ldx, i, k, out)


cdef void add_rmsnorm_row(
    float* x, const float* delta, const float* bias, const float* weight, float* y, Py_ssize_t k, float eps,
) noexcept nogil:
    cdef float lane[16]
    cdef float scale
    cdef Py_ssize_t i, j, whole = k // 16 * 16
    if delta != NULL:
        for i in range(k):
            x[i] = x[i] + delta[i]
    if bias != NULL:
        for i in range(k):
            x[i] = x[i] + bias[i]
    for j in range(16):
        lane[j] = 0
    for i in range(0, whole, 16):
        for j in range(16):
            lane[j] = mi_fma(x[i + j], x[i + j], lane[j])
    for i in range(whole, k):
        lane[i - whole] = mi_fma(x[i], x[i], lane[i - whole])
    scale = <float>1.0 / sqrtf(fold16(lane) / <float>k + eps)
    for i in range(k):
        y[i] = x[i] * scale * weight[i]


cdef void add_rmsnorm(
    int th, int nth, float* x, const float* delta, Py_ssize_t ldd, const float* bias, const float* weight, float* y,
    Py_ssize_t m, Py_ssize_t k, float eps,
) noexcept nogil:
    # Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"
    cdef Py_ssize_t i
    cdef const float* row
    for i in range(share(m, th, nth), share(m, th + 1, nth)):
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


cdef void swiglu(
    int th, int nth, const float* gate, const float* up, Py_ssize_t ld, const float* gate_bias, const float* up_bias,
    float* y, Py_ssize_t ldy, Py_ssize_t m, Py_ssize_t k,
) noexcept nogil:
    # Shazeer 2020, "GLU Variants Improve Transformer"
    cdef Py_ssize_t i
    for i in range(share(m, th, nth), share(m, th + 1, nth)):
        swiglu_row(gate + i * ld, up + i * ld, gate_bias, up_bias, y + i * ldy, k)


cdef inline void rope_head(float* x, int rope_dim, const float* cos, const float* sin) noexcept nogil:
    cdef int i
    cdef float a, b
    for i in range(rope_dim // 2):
        a = x[2 * i]
        b = x[2 * i + 1]
        x[2 * i] = a * cos[i] - b * sin[i]
        x[2 * i + 1] = b * cos[i] + a * sin[i]


cdef void rope(
    int th, int nth, const BatchRows* batch, float* x, Py_ssize_t ldx, int n_heads, int head_dim, int rope_dim,
    const float* cos, const float* sin, const float* bias,
) noexcept nogil:
    # Su et al. 2021, "RoFormer", on neighbouring pairs (the order of GGUF llama files)
    cdef Py_ssize_t t, j, first, last, position
    cdef int r, h
    cdef float* row
    for r in range(batch.n_rows):
        first = max(share(batch.n_tokens, th, nth), batch.offset[r])
        last = min(share(batch.n_tokens, th + 1, nth), batch.offset[r] + batch.n_tok[r])
        for t in range(first, last):
            row = x + t * ldx
            position = batch.first_pos[r] + t - batch.offset[r]
            if bias != NULL:
                for j in range(n_heads * head_dim):
                    row[j] = row[j] + bias[j]
            for h in range(n_heads):
                rope_head(
                    row + h * head_dim, rope_dim, cos + position * (rope_dim // 2), sin + position * (rope_dim // 2),
                )
