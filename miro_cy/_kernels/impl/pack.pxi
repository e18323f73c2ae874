# Packing: rows of a model file -> 16-row panels (layouts in abi.pxd). Rows past n are zero.

cdef void pack_f32(
    PackedMatrix* w, uint8_t* dst, const uint8_t* src, Py_ssize_t row_bytes, Py_ssize_t p0, Py_ssize_t p1,
) noexcept nogil:
    cdef Py_ssize_t p, i, k, rows
    cdef float* out
    cdef const float* row
    for p in range(p0, p1):
        out = <float*>(dst + p * w.panel_bytes)
        rows = min(PANEL, w.n - p * PANEL)
        if rows < PANEL:
            memset(out, 0, w.panel_bytes)
        for i in range(rows):
            row = <const float*>(src + (p * PANEL + i) * row_bytes)
            for k in range(w.k):
                out[k * PANEL + i] = row[k]


cdef void pack_16bit(
    PackedMatrix* w, uint8_t* dst, const uint8_t* src, Py_ssize_t row_bytes, Py_ssize_t p0, Py_ssize_t p1,
) noexcept nogil:
    cdef Py_ssize_t p, i, k, rows
    cdef uint16_t* out
    cdef const uint16_t* row
    for p in range(p0, p1):
        out = <uint16_t*>(dst + p * w.panel_bytes)
        rows = min(PANEL, w.n - p * PANEL)
        if rows < PANEL:
            memset(out, 0, w.panel_bytes)
        for i in range(rows):
            row = <const uint16_t*>(src + (p * PANEL + i) * row_bytes)
            for k in range(w.k):
                out[k * PANEL + i] = row[k]


cdef inline void copy_quads(uint8_t* dst, const uint8_t* src, Py_ssize_t i, int quads) noexcept nogil:
    """Row i's run of quads into a plane [quad][16][4]."""
    cdef int p
    for p in range(quads):
        memcpy(dst + (p * PANEL + i) * 4, src + p * 4, 4)


cdef void pack_q8_0(
    PackedMatrix* w, uint8_t* dst, const uint8_t* src, Py_ssize_t row_bytes, Py_ssize_t p0, Py_ssize_t p1,
) noexcept nogil:
    # file block: d f16, q int8[32]
    cdef Py_ssize_t p, i, b, rows
    cdef uint8_t* out
    cdef const uint8_t* block
    for p in range(p0, p1):
        rows = min(PANEL, w.n - p * PANEL)
        if rows < PANEL:
            memset(dst + p * w.panel_bytes, 0, w.panel_bytes)
        for b in range(w.k // 32):
            out = dst + p * w.panel_bytes + b * w.block_bytes
            for i in range(rows):
                block = src + (p * PANEL + i) * row_bytes + b * 34
                copy_quads(out, block + 2, i, 8)
                memcpy(out + 512 + i * 2, block, 2)


cdef void pack_q4(
    PackedMatrix* w, uint8_t* dst, const uint8_t* src, Py_ssize_t row_bytes, Py_ssize_t p0, Py_ssize_t p1,
) noexcept nogil:
    # file block (Q4_0, Q4_1): d f16, [m f16,] 16 bytes whose low nibbles are elements 0-15, high nibbles 16-31
    cdef Py_ssize_t p, i, b, rows, head = 4 if w.has_min else 2
    cdef uint8_t* out
    cdef const uint8_t* block
    for p in range(p0, p1):
        rows = min(PANEL, w.n - p * PANEL)
        if rows < PANEL:
            memset(dst + p * w.panel_bytes, 0, w.panel_bytes)
        for b in range(w.k // 32):
            out = dst + p * w.panel_bytes + b * w.block_bytes
            for i in range(rows):
                block = src + (p * PANEL + i) * row_bytes + b * (head + 16)
                copy_quads(out, block + head, i, 4)
                memcpy(out + 256 + i * 2, block, 2)
                if w.has_min:
                    memcpy(out + 288 + i * 2, block + 2, 2)


cdef inline void q6_values(const uint8_t* block, uint8_t* q) noexcept nogil:
    """The 256 6-bit values of a Q6_K file block: ql[128], qh[64], in two halves of 128."""
    cdef int half, i
    cdef const uint8_t* low
    cdef const uint8_t* high
    for half in range(2):
        low = block + half * 64
        high = block + 128 + half * 32
        for i in range(32):
            q[half * 128 + i] = (low[i] & 15) | ((high[i] & 3) << 4)
            q[half * 128 + 32 + i] = (low[i + 32] & 15) | (((high[i] >> 2) & 3) << 4)
            q[half * 128 + 64 + i] = (low[i] >> 4) | (((high[i] >> 4) & 3) << 4)
            q[half * 128 + 96 + i] = (low[i + 32] >> 4) | ((high[i] >> 6) << 4)


cdef inline void split_planes_2bit(const uint8_t* q, uint8_t* out, Py_ssize_t i) noexcept nogil:
    """32 values below 64 -> nibbles [4][16][4] and 2-bit plane [2][16][4] of row i."""
    cdef int p, j, h, s
    cdef uint8_t bits
    for p in range(4):
        for j in range(4):
            out[(p * PANEL + i) * 4 + j] = (q[p * 4 + j] & 15) | ((q[16 + p * 4 + j] & 15) << 4)
    for h in range(2):
        for j in range(4):
            bits = 0
            for s in range(4):
                bits |= (q[(h + 2 * s) * 4 + j] >> 4) << (2 * s)
            out[256 + (h * PANEL + i) * 4 + j] = bits


cdef void pack_q6_k(
    PackedMatrix* w, uint8_t* dst, const uint8_t* src, Py_ssize_t row_bytes, Py_ssize_t p0, Py_ssize_t p1,
) noexcept nogil:
    # file block of 256: ql[128], qh[64], scales int8[16], d f16 = 210 bytes
    cdef Py_ssize_t p, i, b, rows
    cdef int s
    cdef uint8_t* out
    cdef const uint8_t* block
    cdef uint8_t q[256]
    for p in range(p0, p1):
        rows = min(PANEL, w.n - p * PANEL)
        if rows < PANEL:
            memset(dst + p * w.panel_bytes, 0, w.panel_bytes)
        for b in range(w.k // 256):
            out = dst + p * w.panel_bytes + b * w.block_bytes
            for i in range(rows):
                block = src + (p * PANEL + i) * row_bytes + b * 210
                q6_values(block, q)
                for s in range(8):
                    split_planes_2bit(q + s * 32, out + s * 384, i)
                for s in range(16):
                    out[3072 + s * PANEL + i] = block[192 + s]
                memcpy(out + 3328 + i * 2, block + 208, 2)


cdef inline int largest_half(const uint8_t* src, int top) noexcept nogil:
    """The bits of the largest magnitude of 16 IEEE halves, or top; those of infinity and NaN are larger than all."""
    cdef const uint16_t* half = <const uint16_t*>src
    cdef int i
    for i in range(PANEL):
        top = max(top, half[i] & 0x7fff)
    return top


cdef float largest_weight(const PackedMatrix* w, const uint8_t* panel) noexcept nogil:
    """What no weight of a quantised panel exceeds in magnitude; not finite where one of its scales is not."""
    cdef int d = 0, m = 0
    cdef float scale
    cdef Py_ssize_t b, scales = 512 if w.layout == LAYOUT_Q8 else 256
    cdef Py_ssize_t super_scales = 8 * (256 + 64 * w.high_bits) + 256 // w.group * PANEL
    for b in range(w.k // w.block):
        if w.block == 256:
            d = largest_half(panel + super_scales, d)
        else:
            d = largest_half(panel + scales, d)
            if w.has_min:
                m = largest_half(panel + scales + 2 * PANEL, m)
        panel += w.block_bytes
    scale = mi_f16_to_f32(<uint16_t>d)
    if w.block == 256:
        return scale * <float>(128 * 32)
    return scale * <float>128 if w.layout == LAYOUT_Q8 else scale * <float>15 + mi_f16_to_f32(<uint16_t>m)


cdef void scan(PackedMatrix* w, const uint8_t* src, int8_t* exponent, Py_ssize_t p0, Py_ssize_t p1) noexcept nogil:
    cdef Py_ssize_t p
    cdef float top
    cdef int e
    for p in range(p0, p1):
        top = largest_weight(w, src + p * w.panel_bytes)
        e = EXPONENT
        if not top < INFINITY:
            # bfloat16 of 2**-112 times as much cannot say so: the sums are multiplied by infinity instead
            e = EXPONENT - 128
        elif not <float>0.002 <= top <= <float>15 and top > 0:
            # the next power of two becomes 2**15; a half's own range ends a shift at 2**15
            frexpf(top, &e)
            e = min(15 - e, 15)
        exponent[p] = <int8_t>e
