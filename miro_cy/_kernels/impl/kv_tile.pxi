# The tiles of attention, QK^T and PV alike: a few rows against panels of 16 keys or value elements, read as stored.

cdef enum:
    KV_PANELS = 4               # most panels a tile covers: the keys of a KV_TILE
    WIDEN_ROWS = 12             # from so many rows on keys and values are widened to floats once for all of them


cdef struct KVTile:
    # one call of kv_rows: rows of scores or queries against neighbouring panels of 16 keys, or of 16 value elements
    const float* a              # [rows][n], lda apart
    Py_ssize_t lda
    const void* w               # the pool's K or V
    Py_ssize_t at[KV_PANELS]    # first element of each panel
    Py_ssize_t ldw              # elements from one of the n to the next
    float* c                    # [rows][panels * 16], ldc apart
    Py_ssize_t ldc
    Py_ssize_t n
    bint first                  # start from 0 instead of c
    float* wide                 # room for [n][panels * 16]


cdef inline void kv_tile(
    const int dtype, const int mr, const int np, const KVTile* t, int row, int panel,
) noexcept nogil:
    """c[mr][np * 16] = (c +) a[mr][n] w[n][np * 16], one chain along n an element. QK^T and PV alike."""
    cdef vf acc[24]             # every tile shape compiles everywhere; those in use keep to the registers
    cdef vf wv[16]
    cdef vf av
    cdef Py_ssize_t k, lda = t.lda, ldc = t.ldc, ldw = t.ldw
    cdef Py_ssize_t at[KV_PANELS]
    cdef const float* a = t.a + row * lda
    cdef float* c = t.c + row * ldc + panel * PANEL
    cdef int i, v
    for i in range(np):
        at[i] = t.at[panel + i]
    for i in range(mr):
        for v in range(np * MI_NV):
            acc[i * np * MI_NV + v] = vf_zero() if t.first else vf_load(c + i * ldc + v * MI_VL)
    for k in range(t.n):
        for v in range(np * MI_NV):
            wv[v] = load_kv(dtype, t.w, at[v // MI_NV] + k * ldw + v % MI_NV * MI_VL)
        for i in range(mr):
            av = vf_set1(a[i * lda + k])
            for v in range(np * MI_NV):
                acc[i * np * MI_NV + v] = vf_fma(av, wv[v], acc[i * np * MI_NV + v])
    for i in range(mr):
        for v in range(np * MI_NV):
            vf_store(c + i * ldc + v * MI_VL, acc[i * np * MI_NV + v])


cdef inline void kv_tile_rows(
    const int dtype, const int np, const KVTile* t, int row, int mr, int panel,
) noexcept nogil:
    """Pick the specialised tile; the shapes that kv_most_rows allows."""
    if mr == 1:
        kv_tile(dtype, 1, np, t, row, panel)
    elif mr == 2:
        kv_tile(dtype, 2, np, t, row, panel)
    elif mr == 3 and (np == 1 or MI_NV == 1):
        kv_tile(dtype, 3, np, t, row, panel)
    elif mr == 4 and (np * MI_NV <= 2 or MI_NV == 1):
        kv_tile(dtype, 4, np, t, row, panel)
    elif mr == 5 and (np * MI_NV <= 2 or MI_NV == 1):
        kv_tile(dtype, 5, np, t, row, panel)
    elif np * MI_NV <= 2 or MI_NV == 1:
        kv_tile(dtype, 6, np, t, row, panel)


cdef inline int kv_most_rows(int np) noexcept nogil:
    """Rows a tile takes with so many panels: what the registers hold."""
    if MI_NV == 1:
        return 6
    if MI_NV == 2:
        return 6 if np == 1 else 2
    return 3


cdef inline int kv_most_panels(int rows) noexcept nogil:
    """Panels a tile takes when there are so many rows: few rows keep the units busy with several."""
    if MI_NV == 1:
        return 4
    if MI_NV == 2:
        return 2 if rows <= 2 else 1
    return 1


cdef inline void kv_panels(const int dtype, const int np, const KVTile* t, int rows, int panel) noexcept nogil:
    """All rows against np panels, in balanced tiles."""
    cdef int i, row, tiles = (rows + kv_most_rows(np) - 1) // kv_most_rows(np)
    for i in range(tiles):
        row = rows * i // tiles
        kv_tile_rows(dtype, np, t, row, rows * (i + 1) // tiles - row, panel)


cdef inline void kv_rows(const int dtype, const KVTile* t, int rows, int panels) noexcept nogil:
    cdef int panel = 0, np
    while panel < panels:
        np = kv_most_panels(rows)
        while np > panels - panel:
            np >>= 1
        if np == 4 and MI_NV == 1:
            kv_panels(dtype, 4, t, rows, panel)
        elif np == 2 and MI_NV <= 2:
            kv_panels(dtype, 2, t, rows, panel)
        else:
            kv_panels(dtype, 1, t, rows, panel)
        panel += np


cdef inline void widen(const int dtype, KVTile* t, int panels) noexcept nogil:
    """The panels as floats in t.wide, and t of them: widening is exact, so nothing else changes."""
    cdef Py_ssize_t k
    cdef int p, v, ld = panels * PANEL
    for k in range(t.n):
        for p in range(panels):
            for v in range(MI_NV):
                vf_store(
                    t.wide + k * ld + p * PANEL + v * MI_VL, load_kv(dtype, t.w, t.at[p] + k * t.ldw + v * MI_VL),
                )
    for p in range(panels):
        t.at[p] = p * PANEL
    t.w, t.ldw = t.wide, ld


cdef void kv_rows_any(int dtype, KVTile* t, int rows, int panels) noexcept nogil:
    """All rows against all panels; what t says of w may be another place afterwards."""
    if dtype != KV_F32 and rows >= WIDEN_ROWS:
        if dtype == KV_F16:
            widen(KV_F16, t, panels)
        else:
            widen(KV_I8, t, panels)
        kv_rows(KV_F32, t, rows, panels)
    elif dtype == KV_F16:
        kv_rows(KV_F16, t, rows, panels)
    elif dtype == KV_I8:
        kv_rows(KV_I8, t, rows, panels)
    else:
        kv_rows(KV_F32, t, rows, panels)
