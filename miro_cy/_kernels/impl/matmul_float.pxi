# y = x W^T with float activations: F32, F16 and BF16 panels directly, quantised ones through a float panel chunk in L1.
#
# One chain of fused multiply-adds along k for each output, continued from y between chunks: the bits of a row depend on
# neither the number of rows, nor the tile that computed it, nor the chunk length. Tiles of few rows keep the FMA units
# busy by taking several panels at once, never by splitting k. Each thread first lays a chunk of x out in tiles
# [k][rows]: a tile reads it through one pointer, and rows a large power of two apart do not share a cache set.

cdef enum:
    FLOAT_K = 128           # k elements a dequantised chunk covers
    FLOAT_PANELS = 4        # most panels a tile covers
    FLOAT_ROWS = 96        # rows a pass over the weights covers
    FLOAT_X = 98304         # floats of x that a chunk covers: in a second-level cache, 96 rows of 1,024 k
    AHEAD_K = 32            # k elements between two calls for what comes next


cdef inline vf load_weight(const int dtype, const uint8_t* p, Py_ssize_t i) noexcept nogil:
    if dtype == LAYOUT_F32:
        return vf_load(<const float*>p + i)
    if dtype == LAYOUT_BF16:
        return vf_load_bf16(<const uint16_t*>p + i)
    return vf_load_f16(<const uint16_t*>p + i)


cdef struct FloatTile:
    # one call of float_tile: rows of x against neighbouring panels, over a run of k
    const float* x              # [k][rows]
    const uint8_t* w
    Py_ssize_t panel_stride     # elements from one panel's run to the next panel's
    float* y
    Py_ssize_t ldy
    Py_ssize_t k
    bint first                  # start from 0 instead of y
    const uint8_t* ahead        # what to prefetch meanwhile: so many cache lines for each AHEAD_K
    int lines


cdef inline void float_tile(const int dtype, const int mr, const int np, const FloatTile* t) noexcept nogil:
    """mr rows x np panels."""
    cdef vf acc[48]             # every tile shape compiles everywhere; those in use keep to the registers
    cdef vf wv[FLOAT_PANELS * 4]
    cdef vf xv
    cdef Py_ssize_t k, ldy = t.ldy, stride = t.panel_stride
    cdef const float* x = t.x
    cdef const uint8_t* w = t.w
    cdef float* y = t.y
    cdef const uint8_t* ahead = t.ahead
    cdef Py_ssize_t run
    cdef int i, p, v
    for i in range(mr):
        for p in range(np):
            for v in range(MI_NV):
                acc[(i * np + p) * MI_NV + v] = vf_zero() if t.first else vf_load(y + i * ldy + p * PANEL + v * MI_VL)
    for run in range((t.k + AHEAD_K - 1) // AHEAD_K if MI_AHEAD else 1):
        if MI_AHEAD:
            for i in range(t.lines):
                mi_prefetch_l2(ahead + 64 * i)
            ahead += 64 * t.lines
        for k in range(run * AHEAD_K, min(t.k, (run + 1) * AHEAD_K) if MI_AHEAD else t.k):
            for p in range(np):
                for v in range(MI_NV):
                    wv[p * MI_NV + v] = load_weight(dtype, w, p * stride + k * PANEL + v * MI_VL)
            for i in range(mr):
                xv = vf_set1(x[k * mr + i])
                for v in range(np * MI_NV):
                    acc[i * np * MI_NV + v] = vf_fma(xv, wv[v], acc[i * np * MI_NV + v])
    for i in range(mr):
        for p in range(np):
            for v in range(MI_NV):
                vf_store(y + i * ldy + p * PANEL + v * MI_VL, acc[(i * np + p) * MI_NV + v])


cdef inline void float_tile_rows(const int dtype, int mr, int np, const FloatTile* t) noexcept nogil:
    """Pick the specialised tile; the shapes that float_rows and float_panels ask for."""
    if np == 4 and MI_NV <= 2:
        float_tile_of_four(dtype, mr, t)
    elif np == 2:
        float_tile_of_two(dtype, mr, t)
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
    elif mr == 6 and MI_NV <= 2:
        float_tile(dtype, 6, 1, t)
    elif mr == 7 and MI_NV == 1:
        float_tile(dtype, 7, 1, t)
    elif MI_NV == 1:
        float_tile(dtype, 8, 1, t)


cdef inline void float_tile_of_two(const int dtype, int mr, const FloatTile* t) noexcept nogil:
    if mr == 1:
        float_tile(dtype, 1, 2, t)
    elif mr == 2 and MI_NV <= 2:
        float_tile(dtype, 2, 2, t)
    elif mr == 3 and MI_NV <= 2:
        float_tile(dtype, 3, 2, t)
    elif mr == 4 and MI_NV == 1:
        float_tile(dtype, 4, 2, t)
    elif mr == 5 and MI_NV == 1:
        float_tile(dtype, 5, 2, t)
    elif mr == 6 and MI_NV == 1:
        float_tile(dtype, 6, 2, t)
    elif mr == 7 and MI_NV == 1:
        float_tile(dtype, 7, 2, t)
    elif MI_NV == 1:
        float_tile(dtype, 8, 2, t)


cdef inline void float_tile_of_four(const int dtype, int mr, const FloatTile* t) noexcept nogil:
    if mr == 1:
        float_tile(dtype, 1, 4, t)
    elif mr == 2 and MI_NV == 1:
        float_tile(dtype, 2, 4, t)
    elif mr == 3 and MI_NV == 1:
        float_tile(dtype, 3, 4, t)
    elif mr == 4 and MI_NV == 1:
        float_tile(dtype, 4, 4, t)
    elif mr == 5 and MI_NV == 1:
        float_tile(dtype, 5, 4, t)
    elif MI_NV == 1:
        float_tile(dtype, 6, 4, t)


cdef inline int float_rows(Py_ssize_t m) noexcept nogil:
    """Most rows a tile takes when m are to be computed: what the registers hold."""
    if MI_NV == 1:
        return 8 if m <= 8 else 6
    return 6 if MI_NV == 2 else 3


cdef inline int float_panels(Py_ssize_t m) noexcept nogil:
    """Panels a tile takes when m rows are to be computed."""
    if MI_NV == 1:
        return 2 if 5 <= m <= 8 else 4
    if MI_NV == 2:
        return 4 if m == 1 else 2 if m <= 3 else 1
    return 2 if m == 1 else 1


cdef struct FloatChunk:
    # all rows of a pass over the weights, for a run of k
    const float* x              # tiles one after another, each [run][rows]
    Py_ssize_t rows
    Py_ssize_t run
    float* y                    # of the first row


cdef inline Py_ssize_t float_tiles(Py_ssize_t rows) noexcept nogil:
    return (rows + float_rows(rows) - 1) // float_rows(rows)


cdef void pack_rows(const float* x, Py_ssize_t ldx, Py_ssize_t rows, Py_ssize_t run, float* out) noexcept nogil:
    """x [rows][run] into the tiles of a FloatChunk."""
    cdef Py_ssize_t t, i, k, r, mr, tiles = float_tiles(rows)
    cdef const float* row
    cdef float* tile
    for t in range(tiles):
        r = rows * t // tiles
        mr = rows * (t + 1) // tiles - r
        for i in range(mr):
            row = x + (r + i) * ldx
            tile = out + r * run + i
            for k in range(run):
                tile[k * mr] = row[k]


cdef inline void float_chunk(
    const int dtype, int np, FloatTile t, const FloatChunk* c, Py_ssize_t at, int lines
) noexcept nogil:
    """All rows against np panels, over t.k of the run's k from `at` on, in balanced tiles.

    lines: cache lines of weights for each AHEAD_K. While these tiles compute, each calls for its share of the next np
    panels; so few rows that they wait for memory in any case only lose by it.
    """
    cdef Py_ssize_t i, r, mr, tiles = float_tiles(c.rows)
    cdef const uint8_t* ahead = t.ahead
    cdef float* y = t.y
    for i in range(tiles):
        r = c.rows * i // tiles
        mr = c.rows * (i + 1) // tiles - r
        t.x = c.x + r * c.run + at * mr
        if MI_AHEAD and c.rows > 2:
            t.lines = <int>(lines * (i + 1) // tiles - lines * i // tiles)
            t.ahead = ahead + t.k // AHEAD_K * 64 * (lines * i // tiles)
        t.y = y + r * t.ldy
        float_tile_rows(dtype, <int>mr, np, &t)


cdef void float_panels_direct(
    const PackedMatrix* w, Py_ssize_t p, int np, Py_ssize_t k0, FloatTile t, const FloatChunk* c,
) noexcept nogil:
    cdef int lines = np * AHEAD_K // 2
    MIRO_SPAN(p, np, w.n_panels)
    t.w = w.data + p * w.panel_bytes + k0 * w.block_bytes
    t.ahead = t.w + np * w.panel_bytes
    t.panel_stride = w.k * PANEL
    t.y = c.y + p * PANEL
    t.k = c.run
    t.first = k0 == 0
    if w.layout == LAYOUT_F32:
        float_chunk(LAYOUT_F32, np, t, c, 0, 2 * lines)
    elif w.layout == LAYOUT_BF16:
        float_chunk(LAYOUT_BF16, np, t, c, 0, lines)
    else:
        float_chunk(LAYOUT_F16, np, t, c, 0, lines)


cdef void float_panels_quantised(
    const PackedMatrix* w, Py_ssize_t p, int np, Py_ssize_t k0, FloatTile t, const FloatChunk* c, float* scratch,
) noexcept nogil:
    # scratch: FLOAT_PANELS float panels of FLOAT_K, then the byte plane, scales and minima of one
    cdef Plane plane
    cdef uint8_t* q = <uint8_t*>(scratch + FLOAT_PANELS * FLOAT_K * PANEL)
    cdef Py_ssize_t i, k
    cdef int j
    plane.scale = scratch + FLOAT_PANELS * FLOAT_K * PANEL + FLOAT_K * PANEL // 4
    plane.minimum = plane.scale + FLOAT_K
    t.w = <const uint8_t*>scratch
    t.panel_stride = FLOAT_K * PANEL
    t.y = c.y + p * PANEL
    for i in range((c.run + FLOAT_K - 1) // FLOAT_K):
        k = i * FLOAT_K
        t.k = min(FLOAT_K, c.run - k)
        t.first = k0 + k == 0
        for j in range(np):
            unpack_plane(w, p + j, (k0 + k) // QBLOCK, t.k // QBLOCK, q, &plane)
            dequantise(w, &plane, t.k // QBLOCK, scratch + j * FLOAT_K * PANEL)
        float_chunk(LAYOUT_F32, np, t, c, k, 0)


cdef inline Py_ssize_t float_run(Py_ssize_t rows, Py_ssize_t k) noexcept nogil:
    """k elements of a chunk; not the whole of them only where x would not stay in the cache."""
    return k if rows == 1 else min(k, FLOAT_X // rows // FLOAT_K * FLOAT_K)


cdef void float_panels_dealt(
    mi_member* me, const PackedMatrix* w, Py_ssize_t k0, const FloatTile* t, const FloatChunk* c, float* scratch,
) noexcept nogil:
    """All panels, as many at a time as a tile takes."""
    cdef int most = float_panels(c.rows), np
    cdef Py_ssize_t p, end, first, n
    mi_deal(me, (w.n_panels + most - 1) // most)
    while True:
        n = mi_take(me, w.n_panels, &first)
        if n == 0:
            return
        p, end = first * most, min(w.n_panels, (first + n) * most)
        while p < end:
            np = most
            while np > end - p:
                np >>= 1
            if is_float_layout(w.layout):
                float_panels_direct(w, p, np, k0, t[0], c)
            else:
                float_panels_quantised(w, p, np, k0, t[0], c, scratch)
            p += np


cdef void matmul_f32(
    mi_member* me, const PackedMatrix* w, const float* x, Py_ssize_t ldx, float* y, Py_ssize_t ldy, Py_ssize_t m,
    float* scratch,
) noexcept nogil:
    # scratch: a chunk of x, then what float_panels_quantised needs
    cdef FloatTile t
    cdef FloatChunk c
    cdef Py_ssize_t r, k, run
    MIRO_ASSERT(ldx >= w.k)
    MIRO_ASSERT(ldy >= w.n_panels * PANEL)
    MIRO_SPAN(
        0, FLOAT_X + FLOAT_PANELS * FLOAT_K * PANEL + FLOAT_K * PANEL // 4 + 2 * FLOAT_K, matmul_scratch_floats(),
    )
    t.ldy = ldy
    t.ahead, t.lines = NULL, 0
    r = 0
    while r < m:
        c.rows = min(FLOAT_ROWS, m - r)
        c.y = y + r * ldy
        run = float_run(c.rows, w.k)
        k = 0
        while k < w.k:
            c.run = min(run, w.k - k)
            c.x = x + r * ldx + k
            if c.rows > 1:
                pack_rows(c.x, ldx, c.rows, c.run, scratch)
                c.x = scratch
            if k > 0:
                mi_meet(me)         # who goes on with a sum may be another one
            float_panels_dealt(me, w, k, &t, &c, scratch + FLOAT_X)
            k += run
        r += FLOAT_ROWS


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
