# y = x W^T with int8 activations: integer dot products over 16 k, which are exact in any order, then one chain of float
# additions over groups in ascending k for each output, continued from y between chunks. A row's bits depend on neither
# row count nor tile.

cdef int int_format(const PackedMatrix* w) noexcept nogil:
    if w.layout == LAYOUT_Q8:
        return BYTES
    if w.block != QBLOCK:
        return PLANE
    return NIBBLES_MIN if w.has_min else NIBBLES


cdef void int_rows_of_tile(int fmt, int np, int rows, IntTile* t) noexcept nogil:
    """All rows of a tile of x against np panels."""
    cdef int i, parts = (rows + int_rows() - 1) // int_rows()
    for i in range(parts):
        t.row = rows * i // parts
        INT_TILES[fmt][np - 1][rows * (i + 1) // parts - t.row - 1](t)
        t.ahead = 0             # the weights are here now


cdef void matmul_i8(
    int th, int nth, const PackedMatrix* w, const Activations* x, float* y, Py_ssize_t ldy, Py_ssize_t m, float* scratch
) noexcept nogil:
    # scratch, for planes alone: the bytes of INT_BLOCKS blocks, then their scales
    cdef Plane plane
    cdef IntTile t
    cdef int fmt = int_format(w), np
    cdef Py_ssize_t nb = w.k // QBLOCK, first, p, c, i
    cdef Py_ssize_t chunks = 1 if m <= TILE_ROWS and fmt != PLANE else (nb + INT_BLOCKS - 1) // INT_BLOCKS
    cdef Py_ssize_t end = share(w.n_panels, th + 1, nth)
    MIRO_ASSERT(ldy >= w.n_panels * PANEL)
    MIRO_ASSERT(w.zero == (8 if fmt == NIBBLES else 32 if fmt == PLANE else 0))
    MIRO_SPAN(0, INT_BLOCKS * 512 // 4 + 2 * INT_BLOCKS * PANEL, matmul_scratch_floats())
    plane.scale = scratch + INT_BLOCKS * 512 // 4
    plane.minimum = NULL
    t.scale = plane.scale
    t.runs = QGROUP // 4 // w.steps
    t.steps = w.steps
    t.ldy = ldy
    t.panel = w.panel_bytes
    t.stride = 512 if fmt == PLANE else w.block_bytes
    p = share(w.n_panels, th, nth)
    while p < end:
        np = min(int_panels(fmt, <int>min(m, TILE_ROWS)), <int>(end - p))
        for c in range(chunks):
            first = nb * c // chunks
            t.blocks = nb * (c + 1) // chunks - first
            t.first = c == 0
            t.ahead = np * w.panel_bytes if w.panel_bytes < FAR else PREFETCH
            if fmt == PLANE:
                MIRO_SPAN(0, t.blocks, INT_BLOCKS)
                unpack_plane(w, p, first, t.blocks, <uint8_t*>scratch, &plane)
                t.w, t.ahead = plane.q, 0
            else:
                t.w = w.data + p * w.panel_bytes + first * w.block_bytes
            for i in range((m + TILE_ROWS - 1) // TILE_ROWS):
                t.x = x.block + i * nb + first
                t.y = y + i * TILE_ROWS * ldy + p * PANEL
                int_rows_of_tile(fmt, np, <int>min(TILE_ROWS, m - i * TILE_ROWS), &t)
        p += np
