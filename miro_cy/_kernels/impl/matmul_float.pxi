# y = x W^T with float activations: F32, F16 and BF16 panels directly, quantised ones through a float panel chunk in L1.
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
    if dtype == LAYOUT_BF16:
        return vf_load_bf16(<const uint16_t*>p + i)
    return vf_load_f16(<const uint16_t*>p + i)


cdef struct FloatTile:
    # one call of float_tile: rows of x against neighbouring panels, over a run of k
    const float* x
    Py_ssize_t ldx
    const uint8_t* w
    Py_ssize_t panel_stride     # elements from one panel's run to the next panel's
    float* y
    Py_ssize_t ldy
    Py_ssize_t k
    bint first                  # start from 0 instead of y


cdef inline void float_tile(const int dtype, const int mr, const int np, const FloatTile* t) noexcept nogil:
    """mr rows x np panels."""
    cdef vf acc[48]             # every tile shape compiles everywhere; those in use keep to the registers
    cdef vf wv[FLOAT_PANELS * 4]
    cdef vf xv
    cdef Py_ssize_t k, ldx = t.ldx, ldy = t.ldy, stride = t.panel_stride
    cdef const float* x = t.x
    cdef const uint8_t* w = t.w
    cdef float* y = t.y
    cdef int i, p, v
    for i in range(mr):
        for p in range(np):
            for v in range(MI_NV):
                acc[(i * np + p) * MI_NV + v] = vf_zero() if t.first else vf_load(y + i * ldy + p * PANEL + v * MI_VL)
    for k in range(t.k):
        for p in range(np):
            for v in range(MI_NV):
                wv[p * MI_NV + v] = load_weight(dtype, w, p * stride + k * PANEL + v * MI_VL)
        for i in range(mr):
            xv = vf_set1(x[i * ldx + k])
            for v in range(np * MI_NV):
                acc[i * np * MI_NV + v] = vf_fma(xv, wv[v], acc[i * np * MI_NV + v])
    for i in range(mr):
        for p in range(np):
            for v in range(MI_NV):
                vf_store(y + i * ldy + p * PANEL + v * MI_VL, acc[(i * np + p) * MI_NV + v])


cdef inline void float_tile_rows(const int dtype, int mr, int np, const FloatTile* t) noexcept nogil:
    """Pick the specialised tile; the shapes that float_rows and float_panels ask for."""
    if np == 4 and MI_NV <= 2:
        float_tile(dtype, 1, 4, t)
    elif np == 2 and mr == 1:
        float_tile(dtype, 1, 2, t)
    elif np == 2 and mr == 2 and MI_NV <= 2:
        float_tile(dtype, 2, 2, t)
    elif np == 2 and mr == 3 and MI_NV <= 2:
        float_tile(dtype, 3, 2, t)
    elif np == 2 and mr == 4 and MI_NV == 1:
        float_tile(dtype, 4, 2, t)
    elif np == 2 and mr == 5 and MI_NV == 1:
        float_tile(dtype, 5, 2, t)
    elif np == 2 and mr == 6 and MI_NV == 1:
        float_tile(dtype, 6, 2, t)
    elif mr == 1:
        float_tile(dtype, 1, 1, t)
    elif mr == 2:
        float_tile(dtype, 2, 1, t)
    elif mr == 3:
        float_tile(dtype, 3, 1, t)
    elif mr == 4 and MI_NV <= 2:
        float_tile(dtype, 4, 1, t)
    elif mr == 5 and MI_NV <= 2:
        float_tile(dtype, 5, 1, t)
    elif MI_NV <= 2:
        float_tile(dtype, 6, 1, t)


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


cdef inline void float_chunk(const int dtype, int np, FloatTile t, Py_ssize_t m) noexcept nogil:
    """All m rows against np panels, in balanced tiles."""
    cdef const float* x = t.x
    cdef float* y = t.y
    cdef Py_ssize_t i, r, tiles = (m + float_rows() - 1) // float_rows()
    for i in range(tiles):
        r = m * i // tiles
        t.x = x + r * t.ldx
        t.y = y + r * t.ldy
        float_tile_rows(dtype, <int>(m * (i + 1) // tiles - r), np, &t)


cdef void float_panels_direct(const PackedMatrix* w, Py_ssize_t p, int np, FloatTile t, Py_ssize_t m) noexcept nogil:
    MIRO_SPAN(p, np, w.n_panels)
    t.w = w.data + p * w.panel_bytes
    t.panel_stride = w.k * PANEL
    t.y += p * PANEL
    t.k = w.k
    t.first = True
    if w.layout == LAYOUT_F32:
        float_chunk(LAYOUT_F32, np, t, m)
    elif w.layout == LAYOUT_BF16:
        float_chunk(LAYOUT_BF16, np, t, m)
    else:
        float_chunk(LAYOUT_F16, np, t, m)


cdef void float_panels_quantised(
    const PackedMatrix* w, Py_ssize_t p, int np, FloatTile t, Py_ssize_t m, float* scratch
) noexcept nogil:
    # scratch: FLOAT_PANELS float panels of FLOAT_K, then the byte plane, scales and minima of one
    cdef Plane plane
    cdef uint8_t* q = <uint8_t*>(scratch + FLOAT_PANELS * FLOAT_K * PANEL)
    cdef Py_ssize_t c, k
    cdef int j
    plane.scale = scratch + FLOAT_PANELS * FLOAT_K * PANEL + FLOAT_K * PANEL // 4
    plane.minimum = plane.scale + FLOAT_K
    t.w = <const uint8_t*>scratch
    t.panel_stride = FLOAT_K * PANEL
    t.y += p * PANEL
    for c in range((w.k + FLOAT_K - 1) // FLOAT_K):
        k = c * FLOAT_K
        t.k = min(FLOAT_K, w.k - k)
        t.first = c == 0
        for j in range(np):
            unpack_plane(w, p + j, k // QBLOCK, t.k // QBLOCK, q, &plane)
            dequantise(w, &plane, t.k // QBLOCK, scratch + j * FLOAT_K * PANEL)
        float_chunk(LAYOUT_F32, np, t, m)
        t.x += t.k


cdef void matmul_f32(
    int th, int nth, const PackedMatrix* w, const float* x, Py_ssize_t ldx, float* y, Py_ssize_t ldy, Py_ssize_t m,
    float* scratch,
) noexcept nogil:
    cdef FloatTile t
    cdef Py_ssize_t p, i, r, rows, end = share(w.n_panels, th + 1, nth)
    cdef int np
    MIRO_ASSERT(ldx >= w.k)
    MIRO_ASSERT(ldy >= w.n_panels * PANEL)
    MIRO_SPAN(0, FLOAT_PANELS * FLOAT_K * PANEL + FLOAT_K * PANEL // 4 + 2 * FLOAT_K, matmul_scratch_floats())
    t.ldx = ldx
    t.ldy = ldy
    for i in range((m + FLOAT_ROWS - 1) // FLOAT_ROWS):
        r = i * FLOAT_ROWS
        rows = min(FLOAT_ROWS, m - r)
        t.x = x + r * ldx
        t.y = y + r * ldy
        p = share(w.n_panels, th, nth)
        while p < end:
            np = float_panels(rows)
            while np > end - p:
                np >>= 1
            if is_float_layout(w.layout):
                float_panels_direct(w, p, np, t, rows)
            else:
                float_panels_quantised(w, p, np, t, rows, scratch)
            p += np


cdef void embed_row(const PackedMatrix* w, Py_ssize_t row, float* x, float* scratch) noexcept nogil:
    cdef Plane plane
    cdef Py_ssize_t panel = row // PANEL, i = row % PANEL, c, k, j, kc
    cdef const uint8_t* src = w.data + panel * w.panel_bytes
    MIRO_INDEX(row, w.n)
    if w.layout == LAYOUT_F32:
        for k in range(w.k):
            x[k] = (<const float*>src)[k * PANEL + i]
    elif w.layout == LAYOUT_F16:
        for k in range(w.k):
            x[k] = mi_f16_to_f32((<const uint16_t*>src)[k * PANEL + i])
    elif w.layout == LAYOUT_BF16:
        for k in range(w.k):
            x[k] = mi_bf16_to_f32((<const uint16_t*>src)[k * PANEL + i])
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


cdef void embed(
    int th, int nth, const PackedMatrix* w, const int32_t* ids, Py_ssize_t m, float* x, Py_ssize_t ldx, float* scratch,
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(share(m, th, nth), share(m, th + 1, nth)):
        embed_row(w, ids[i], x + i * ldx, scratch)
