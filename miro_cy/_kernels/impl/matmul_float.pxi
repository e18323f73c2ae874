# y = x W^T with float activations: F32 and F16 panels directly, quantised ones through a float panel chunk in L1.
#
# One chain of fused multiply-adds along k for each output, continued from y between chunks: the bits of a row depend on
# neither the number of rows, nor the tile that computed it, nor the chunk length. Tiles of few rows keep the FMA units
# busy by taking several panels at once, never by splitting k.

cdef enum:
    FLOAT_K = 128           # k elements a dequantised chunk covers
    FLOAT_PANELS = 4        # most panels a tile covers
    FLOAT_ROWS = 96         # rows a pass over the weights covers


cdef inline vf load_weight(const int dtype, const uint8_t* p, Py_ssize_t i) noexcept nogil:
    if dtype == LAYOUT_F32:
        return vf_load(<const float*>p + i)
    return vf_load_f16(<const uint16_t*>p + i)


cdef inline void float_tile(
    const int dtype, const int mr, const int np, const float* x, Py_ssize_t ldx, const uint8_t* w, Py_ssize_t panel_stride,
    float* y, Py_ssize_t ldy, Py_ssize_t kc, bint first,
) noexcept nogil:
    """mr rows x np panels; panel_stride in elements."""
    cdef vf acc[16]
    cdef vf wv[FLOAT_PANELS * 4]
    cdef vf xv
    cdef Py_ssize_t k
    cdef int i, p, v
    for i in range(mr):
        for p in range(np):
            for v in range(MI_NV):
                acc[(i * np + p) * MI_NV + v] = vf_zero() if first else vf_load(y + i * ldy + p * PANEL + v * MI_VL)
    for k in range(kc):
        for p in range(np):
            for v in range(MI_NV):
                wv[p * MI_NV + v] = load_weight(dtype, w, p * panel_stride + k * PANEL + v * MI_VL)
        for i in range(mr):
            xv = vf_set1(x[i * ldx + k])
            for v in range(np * MI_NV):
                acc[i * np * MI_NV + v] = vf_fma(xv, wv[v], acc[i * np * MI_NV + v])
    for i in range(mr):
        for p in range(np):
            for v in range(MI_NV):
                vf_store(y + i * ldy + p * PANEL + v * MI_VL, acc[(i * np + p) * MI_NV + v])


cdef inline void float_tile_rows(
    const int dtype, int mr, int np, const float* x, Py_ssize_t ldx, const uint8_t* w, Py_ssize_t panel_stride,
    float* y, Py_ssize_t ldy, Py_ssize_t kc, bint first,
) noexcept nogil:
    """Pick the specialised tile; the shapes that float_rows and float_panels ask for."""
    if np == 4:
        if MI_NV <= 2: float_tile(dtype, 1, 4, x, ldx, w, panel_stride, y, ldy, kc, first)
    elif np == 2:
        if mr == 1: float_tile(dtype, 1, 2, x, ldx, w, panel_stride, y, ldy, kc, first)
        elif MI_NV <= 2 and mr == 2: float_tile(dtype, 2, 2, x, ldx, w, panel_stride, y, ldy, kc, first)
        elif MI_NV <= 2 and mr == 3: float_tile(dtype, 3, 2, x, ldx, w, panel_stride, y, ldy, kc, first)
        elif MI_NV == 1:
            if mr == 4: float_tile(dtype, 4, 2, x, ldx, w, panel_stride, y, ldy, kc, first)
            elif mr == 5: float_tile(dtype, 5, 2, x, ldx, w, panel_stride, y, ldy, kc, first)
            else: float_tile(dtype, 6, 2, x, ldx, w, panel_stride, y, ldy, kc, first)
    elif mr == 1: float_tile(dtype, 1, 1, x, ldx, w, panel_stride, y, ldy, kc, first)
    elif mr == 2: float_tile(dtype, 2, 1, x, ldx, w, panel_stride, y, ldy, kc, first)
    elif mr == 3: float_tile(dtype, 3, 1, x, ldx, w, panel_stride, y, ldy, kc, first)
    elif MI_NV <= 2:
        if mr == 4: float_tile(dtype, 4, 1, x, ldx, w, panel_stride, y, ldy, kc, first)
        elif mr == 5: float_tile(dtype, 5, 1, x, ldx, w, panel_stride, y, ldy, kc, first)
        else: float_tile(dtype, 6, 1, x, ldx, w, panel_stride, y, ldy, kc, first)


cdef inline int float_rows() noexcept nogil:
    """Most rows a tile takes: what the registers hold."""
    return 3 if MI_NV == 4 else 6


cdef inline int float_panels(Py_ssize_t m) noexcept nogil:
    """Panels a tile takes when m rows are to be computed."""
    if MI_NV == 4:
        return 1 if m > 1 else 2
    if m == 1:
        return 4
    return 2 if MI_NV == 1 or m <= 3 else 1


cdef inline void float_chunk(
    const int dtype, const uint8_t* w, Py_ssize_t panel_stride, int np, const float* x, Py_ssize_t ldx, float* y, Py_ssize_t ldy,
    Py_ssize_t m, Py_ssize_t kc, bint first,
) noexcept nogil:
    """All m rows against np panels, in balanced tiles."""
    cdef Py_ssize_t t, r, tiles = (m + float_rows() - 1) // float_rows()
    for t in range(tiles):
        r = m * t // tiles
        float_tile_rows(dtype, <int>(m * (t + 1) // tiles - r), np, x + r * ldx, ldx, w, panel_stride, y + r * ldy, ldy, kc, first)


cdef void float_panels_direct(const int dtype, const PackedMatrix* w, Py_ssize_t p, int np, const float* x, Py_ssize_t ldx, float* y, Py_ssize_t ldy, Py_ssize_t m) noexcept nogil:
    cdef const uint8_t* src = w.data + p * w.panel_bytes
    float_chunk(dtype, src, w.k * PANEL, np, x, ldx, y + p * PANEL, ldy, m, w.k, True)


cdef void float_panels_quantised(const PackedMatrix* w, Py_ssize_t p, int np, const float* x, Py_ssize_t ldx, float* y, Py_ssize_t ldy, Py_ssize_t m, float* scratch) noexcept nogil:
    # scratch: FLOAT_PANELS float panels of FLOAT_K, then the byte plane, scales and minima of one
    cdef Plane plane
    cdef uint8_t* q = <uint8_t*>(scratch + FLOAT_PANELS * FLOAT_K * PANEL)
    cdef Py_ssize_t c, k, kc
    cdef int j
    plane.scale = scratch + FLOAT_PANELS * FLOAT_K * PANEL + FLOAT_K * PANEL // 4
    plane.minimum = plane.scale + FLOAT_K
    for c in range((w.k + FLOAT_K - 1) // FLOAT_K):
        k = c * FLOAT_K
        kc = min(FLOAT_K, w.k - k)
        for j in range(np):
            unpack_plane(w, p + j, k // QBLOCK, kc // QBLOCK, q, &plane)
            dequantise(w, &plane, kc // QBLOCK, scratch + j * FLOAT_K * PANEL)
        float_chunk(LAYOUT_F32, <const uint8_t*>scratch, FLOAT_K * PANEL, np, x + k, ldx, y + p * PANEL, ldy, m, kc, k == 0)


cdef void matmul_f32(int th, int nth, const PackedMatrix* w, const float* x, Py_ssize_t ldx, float* y, Py_ssize_t ldy, Py_ssize_t m, float* scratch) noexcept nogil:
    cdef Py_ssize_t p, s, r, rows, end = share(w.n_panels, th + 1, nth)
    cdef int np
    for s in range((m + FLOAT_ROWS - 1) // FLOAT_ROWS):
        r = s * FLOAT_ROWS
        rows = min(FLOAT_ROWS, m - r)
        p = share(w.n_panels, th, nth)
        while p < end:
            np = float_panels(rows)
            while np > end - p:
                np >>= 1
            if w.layout == LAYOUT_F32:
                float_panels_direct(LAYOUT_F32, w, p, np, x + r * ldx, ldx, y + r * ldy, ldy, rows)
            elif w.layout == LAYOUT_F16:
                float_panels_direct(LAYOUT_F16, w, p, np, x + r * ldx, ldx, y + r * ldy, ldy, rows)
            else:
                float_panels_quantised(w, p, np, x + r * ldx, ldx, y + r * ldy, ldy, rows, scratch)
            p += np


cdef void embed_row(const PackedMatrix* w, Py_ssize_t row, float* x, float* scratch) noexcept nogil:
    cdef Plane plane
    cdef Py_ssize_t panel = row // PANEL, i = row % PANEL, c, k, j, kc
    cdef const uint8_t* src = w.data + panel * w.panel_bytes
    if w.layout == LAYOUT_F32:
        for k in range(w.k):
            x[k] = (<const float*>src)[k * PANEL + i]
    elif w.layout == LAYOUT_F16:
        for k in range(w.k):
            x[k] = mi_f16_to_f32((<const uint16_t*>src)[k * PANEL + i])
    else:
        plane.scale = scratch + FLOAT_K * PANEL + FLOAT_K * PANEL // 4
        plane.minimum = plane.scale + FLOAT_K
        for c in range((w.k + FLOAT_K - 1) // FLOAT_K):
            k = c * FLOAT_K
            kc = min(FLOAT_K, w.k - k)
            unpack_plane(w, panel, k // QBLOCK, kc // QBLOCK, <uint8_t*>(scratch + FLOAT_K * PANEL), &plane)
            dequantise(w, &plane, kc // QBLOCK, scratch)
            for j in range(kc):
                x[k + j] = scratch[j * PANEL + i]


cdef void embed(int th, int nth, const PackedMatrix* w, const int32_t* ids, Py_ssize_t m, float* x, Py_ssize_t ldx, float* scratch) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(share(m, th, nth), share(m, th + 1, nth)):
        embed_row(w, ids[i], x + i * ldx, scratch)
