# Unpacking a run of 32-k blocks of one panel into what a micro-kernel reads: a byte plane [quad][16][4] and float
# scales [group][16]. Both matmuls and the embedding lookup go through here, whatever the layout and the row count.

cdef enum:
    # how a matmul of rounded activations finds its weights
    NIBBLES                 # packed blocks of 4 bits, zero point 8
    NIBBLES_MIN             # packed blocks of 4 bits with minima
    BYTES                   # packed blocks of signed 8 bits
    PLANE                   # an unpacked byte plane with a scale for each 16 k, zero point 32


cdef int int_format(const PackedMatrix* w) noexcept nogil:
    if w.layout == LAYOUT_Q8:
        return BYTES
    if w.block != QBLOCK:
        return PLANE
    return NIBBLES_MIN if w.has_min else NIBBLES


cdef struct Plane:
    const uint8_t* q            # first block's bytes
    Py_ssize_t stride           # bytes from one 32-k block to the next
    float* scale                # [32-k blocks][32 / group][16]
    float* minimum              # alike, where the layout has minima


cdef inline void load_halves(const uint8_t* src, float* dst) noexcept nogil:
    """16 IEEE halves -> floats."""
    cdef int v
    for v in range(MI_NV):
        vf_store(dst + v * MI_VL, vf_load_f16(<const uint16_t*>src + v * MI_VL))


cdef inline void unpack_nibbles(const int high_bits, const uint8_t* src, uint8_t* dst) noexcept nogil:
    """One 32-k block of nibbles (and 2-bit plane) -> 512 bytes."""
    cdef int p, v
    cdef vi x, lo, hi, top
    for p in range(4):
        for v in range(MI_NV):
            x = vi_load(src + (p * PANEL + v * MI_VL) * 4)
            lo = vi_and(x, 0x0f0f0f0f)
            hi = vi_and(vi_shr(x, 4), 0x0f0f0f0f)
            if high_bits == 2:
                top = vi_load(src + 256 + ((p & 1) * PANEL + v * MI_VL) * 4)
                top = vi_shr(top, 2 * (p >> 1))
                lo = vi_or(lo, vi_shl(vi_and(top, 0x03030303), 4))
                hi = vi_or(hi, vi_and(top, 0x30303030))
            vi_store(dst + (p * PANEL + v * MI_VL) * 4, lo)
            vi_store(dst + ((p + 4) * PANEL + v * MI_VL) * 4, hi)


cdef enum:
    PREFETCH = 4096         # bytes ahead: panels lie behind each other, so this runs on into the next one
    FAR = 16384             # bytes of a panel above which the next one is too far ahead to prefetch


cdef inline void prefetch_block(const uint8_t* src, Py_ssize_t size) noexcept nogil:
    """Ask for bytes that will be unpacked some blocks from now: with few rows, a step mostly waits for memory."""
    cdef Py_ssize_t i
    for i in range(0, size, 64):
        mi_prefetch(src + PREFETCH + i)


cdef inline void unpack_simple(
    const PackedMatrix* w, const uint8_t* src, Py_ssize_t blocks, uint8_t* q, Plane* out,
) noexcept nogil:
    """Blocks of 32 with their own half scales."""
    cdef Py_ssize_t b, scales = 512 if w.layout == LAYOUT_Q8 else 256
    if w.layout == LAYOUT_Q8:       # read in place: the plane is already bytes
        out.q = src
        out.stride = w.block_bytes
    for b in range(blocks):
        prefetch_block(src, w.block_bytes)
        if w.layout == LAYOUT_Q4:
            unpack_nibbles(0, src, q + b * 512)
        load_halves(src + scales, out.scale + b * PANEL)
        if w.has_min:
            load_halves(src + scales + 32, out.minimum + b * PANEL)
        src += w.block_bytes


cdef inline void unpack_super(
    const PackedMatrix* w, const uint8_t* src, Py_ssize_t first, Py_ssize_t blocks, uint8_t* q, Plane* out,
) noexcept nogil:
    """Blocks first.. of super-blocks of 256 with int8 sub-scales (Q6_K)."""
    cdef Py_ssize_t b, s, g, i, groups = 32 // w.group, plane = 256 + 64 * w.high_bits
    cdef const uint8_t* block
    cdef const int8_t* sub
    cdef float d[PANEL]
    for b in range(blocks):
        block = src + ((first + b) // 8) * w.block_bytes
        s = (first + b) % 8
        unpack_nibbles(2, block + s * plane, q + b * 512)
        load_halves(block + 8 * plane + (256 // w.group) * PANEL, d)
        sub = <const int8_t*>(block + 8 * plane + s * groups * PANEL)
        for g in range(groups):
            for i in range(PANEL):
                out.scale[(b * groups + g) * PANEL + i] = d[i] * <float>sub[g * PANEL + i]


cdef inline void unpack_plane(
    const PackedMatrix* w, Py_ssize_t panel, Py_ssize_t first, Py_ssize_t blocks, uint8_t* q, Plane* out,
) noexcept nogil:
    """32-k blocks [first, first + blocks) of a panel; q: room for blocks * 512 bytes."""
    cdef const uint8_t* src = w.data + panel * w.panel_bytes
    MIRO_INDEX(panel, w.n_panels)
    MIRO_SPAN(first, blocks, w.k // QBLOCK)
    out.q = q
    out.stride = 512
    if w.block == 256:
        unpack_super(w, src, first, blocks, q, out)
    else:
        unpack_simple(w, src + first * w.block_bytes, blocks, q, out)


cdef inline void dequantise_block(
    const bint is_signed, const bint has_min, const uint8_t* q, const float* scale, const float* minimum,
    Py_ssize_t group_step, float zero, float* dst
) noexcept nogil:
    """One 32-k block; group_step: floats from the first 16 k's scales to the second's."""
    cdef int p, v, j
    cdef vi x, value
    cdef vf y, s
    for p in range(8):
        for v in range(MI_NV):
            x = vi_load(q + (p * PANEL + v * MI_VL) * 4)
            s = vf_load(scale + (p >> 2) * group_step + v * MI_VL)
            for j in range(4):
                value = vi_shr(vi_shl(x, 24 - 8 * j), 24) if is_signed else vi_and(vi_shr(x, 8 * j), 255)
                y = s * (vf_from_int(value) - vf_set1(zero))
                if has_min:
                    y = y + vf_load(minimum + (p >> 2) * group_step + v * MI_VL)
                vf_store(dst + (p * 4 + j) * PANEL + v * MI_VL, y)


cdef inline void dequantise(const PackedMatrix* w, const Plane* p, Py_ssize_t blocks, float* dst) noexcept nogil:
    """Plane -> floats [k][16], as the file format defines them: scale * (q - zero) + min, each step rounded."""
    cdef Py_ssize_t b, scales = 32 // w.group * PANEL, step = PANEL if w.group == 16 else 0
    for b in range(blocks):
        if w.layout == LAYOUT_Q8:
            dequantise_block(True, False, p.q + b * p.stride, p.scale + b * scales, NULL, step, 0, dst)
        elif w.has_min:
            dequantise_block(
                False, True, p.q + b * p.stride, p.scale + b * scales, p.minimum + b * scales, step, <float>w.zero, dst
            )
        else:
            dequantise_block(False, False, p.q + b * p.stride, p.scale + b * scales, NULL, step, <float>w.zero, dst)
        dst += 32 * PANEL
