# y = x W^T with int8 activations: integer dot products over 16 k, which are exact in any order, then one chain of float
# additions over groups in ascending k for each output, continued from y between chunks. A row's bits depend on neither
# row count nor tile.

cdef void open_weights(const int fmt, const IntTile* t, int panels, uint8_t* out) noexcept nogil:
    """The weights of a run of some panels, taken apart once for all rows."""
    cdef Py_ssize_t b
    cdef const uint8_t* src
    cdef int p, i, j
    for p in range(panels):
        for b in range(t.blocks):
            src = t.w + p * t.panel + b * t.stride
            if fmt == BYTES:
                for i in range(8 * MI_NV):
                    vi_store(out + p * OPENED + b * 512 + i * MI_VL * 4, vi_flip(vi_load(src + i * MI_VL * 4)))
            else:
                unpack_nibbles(0, src, out + p * OPENED + b * 512)
            for j in range(9 if fmt == BYTES else 5):
                mi_prefetch(src + t.ahead + 64 * j)


cdef void int_rows_of_tile(int fmt, int np, int rows, IntTile* t) noexcept nogil:
    """All rows of a tile of x against np panels."""
    cdef int i, parts = (rows + int_rows(np) - 1) // int_rows(np)
    for i in range(parts):
        t.row = rows * i // parts
        INT_TILES[fmt][np - 1][rows * (i + 1) // parts - t.row - 1](t)
        t.ahead = 0             # the weights are here now


cdef struct IntOutput:
    # where a run of panels of a matmul goes
    float* y                    # of the first row and the first panel
    Py_ssize_t ldy


cdef void int_panels_of(
    const PackedMatrix* w, Py_ssize_t p, int panels, const QuantBlock* x, Py_ssize_t m, const IntOutput* out,
    float* scratch,
) noexcept nogil:
    """All m rows, the first tile's blocks at x, against panels [p, p + panels), as many as a tile takes at once."""
    # scratch: what was opened of some panels, or of a plane the bytes of INT_BLOCKS blocks, then their scales
    cdef Plane plane
    cdef IntTile t
    cdef int fmt = int_format(w)
    cdef Py_ssize_t nb = w.k // QBLOCK, first, c, i
    cdef Py_ssize_t chunks = 1 if m <= TILE_ROWS and fmt != PLANE else (nb + INT_BLOCKS - 1) // INT_BLOCKS
    cdef bint opening = panels == INT_PANELS and opens(fmt, m)
    plane.scale = scratch + INT_BLOCKS * 512 // 4
    plane.minimum = NULL
    t.scale = plane.scale
    t.ldy = out.ldy
    t.panel = w.panel_bytes
    t.stride = 512 if fmt == PLANE else w.block_bytes
    MIRO_SPAN(p, panels, w.n_panels)
    for c in range(chunks):
        first = nb * c // chunks
        t.blocks = nb * (c + 1) // chunks - first
        t.first = c == 0
        t.ahead = panels * w.panel_bytes if w.panel_bytes < FAR else PREFETCH
        if fmt == PLANE:
            MIRO_SPAN(0, t.blocks, INT_BLOCKS)
            unpack_plane(w, p, first, t.blocks, <uint8_t*>scratch, &plane)
            t.w, t.ahead = plane.q, 0
        else:
            t.w = w.data + p * w.panel_bytes + first * w.block_bytes
            if opening:
                open_weights(fmt, &t, panels, <uint8_t*>scratch)
                t.open, t.ahead = <const uint8_t*>scratch, 0
        for i in range((m + TILE_ROWS - 1) // TILE_ROWS):
            t.x = x + i * nb + first
            t.y = out.y + i * TILE_ROWS * out.ldy
            int_rows_of_tile(fmt + OPEN_NIBBLES if opening else fmt, panels, <int>min(TILE_ROWS, m - i * TILE_ROWS), &t)


cdef inline Py_ssize_t block_scratch_floats() noexcept nogil:
    """What int_panels_of needs."""
    return INT_PANELS * INT_BLOCKS * 512 // 4 + 2 * INT_BLOCKS * PANEL


cdef void matmul_i8(
    mi_member* me, const PackedMatrix* w, const Activations* x, float* y, Py_ssize_t ldy, Py_ssize_t m, float* scratch
) noexcept nogil:
    cdef IntOutput out
    cdef int fmt = int_format(w), most = int_panels(fmt, m), np
    cdef Py_ssize_t p, n, end, first
    MIRO_ASSERT(ldy >= w.n_panels * PANEL)
    MIRO_ASSERT(w.zero == (8 if fmt == NIBBLES else 32 if fmt == PLANE else 0))
    MIRO_SPAN(0, block_scratch_floats(), matmul_scratch_floats())
    out.ldy = ldy
    mi_deal(me, (w.n_panels + most - 1) // most)
    while True:
        n = mi_take(me, w.n_panels, &first)
        if n == 0:
            return
        p, end = first * most, min(w.n_panels, (first + n) * most)
        while p < end:
            np = min(most, <int>(end - p))
            out.y = y + p * PANEL
            int_panels_of(w, p, np, <const QuantBlock*>x.data, m, &out, scratch)
            p += np


cdef void matmul_block(
    const PackedMatrix* w, Py_ssize_t b, const Activations* x, Py_ssize_t m, Py_ssize_t row, Py_ssize_t rows, float* y,
    int* state, float* scratch,
) noexcept nogil:
    """y [rows, 32] = the outputs [32 b, 32 b + 32) of some rows of m; `row` begins a tile; state: not needed here."""
    cdef const QuantBlock* blocks = <const QuantBlock*>x.data + row // TILE_ROWS * (w.k // QBLOCK)
    cdef IntOutput out
    cdef int np = int_panels(int_format(w), rows), p = 0
    out.ldy = QBLOCK
    while p < QBLOCK // PANEL:
        out.y = y + p * PANEL
        int_panels_of(w, b * (QBLOCK // PANEL) + p, np, blocks, rows, &out, scratch)
        p += np


cdef inline void matmul_blocks_done() noexcept nogil:
    pass
