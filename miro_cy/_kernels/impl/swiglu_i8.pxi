# SwiGLU between matmuls of rounded activations, over `matmul_block` and `put_rows` of the level.

cdef enum:
    FFN_ROWS = 256              # rows that swiglu_i8 takes at a time, whole tiles


cdef inline void swiglu_block(
    const float* g, const float* u, Py_ssize_t rows, const float* gate_bias, const float* up_bias, Py_ssize_t b,
    float* h, const Activations* out, Py_ssize_t m, Py_ssize_t row, Py_ssize_t nb,
) noexcept nogil:
    """Block b of nb of some rows of m, the first being `row`, from gate and up; h: room for a tile's."""
    cdef Py_ssize_t i, tile
    for tile in range(row_tiles(rows)):
        i = tile * TILE_ROWS
        swiglu_rows(
            g + i * QBLOCK, u + i * QBLOCK, QBLOCK, gate_bias, up_bias, b * QBLOCK, h, QBLOCK,
            min(TILE_ROWS, rows - i), QBLOCK,
        )
        put_rows(out, m, row + i, <int>min(TILE_ROWS, rows - i), b, nb, h, QBLOCK)


cdef void swiglu_i8(
    mi_member* me, const PackedMatrix* gate, const PackedMatrix* up, const Activations* x, const float* gate_bias,
    const float* up_bias, const Activations* out, Py_ssize_t m, float* scratch,
) noexcept nogil:
    # Each 32 outputs of some rows go from both matmuls through SwiGLU into rounded form without leaving the caches.
    # scratch: gate and up of FFN_ROWS rows, one row of SwiGLU for each of a tile, then what matmul_block needs
    cdef Py_ssize_t b, r, rows, n, first = 0, nb = gate.n // QBLOCK
    cdef int state = 0
    cdef float* g = scratch
    cdef float* u = g + FFN_ROWS * QBLOCK
    cdef float* h = u + FFN_ROWS * QBLOCK
    cdef float* rest = h + TILE_ROWS * QBLOCK
    MIRO_ASSERT(gate.n % QBLOCK == 0)
    MIRO_SPAN(0, rest - scratch + block_scratch_floats(), matmul_scratch_floats())
    r = 0
    while r < m:
        rows = min(FFN_ROWS, m - r)
        mi_deal(me, nb)
        while True:
            n = mi_take(me, nb, &first)
            if n == 0:
                break
            for b in range(first, first + n):
                matmul_block(gate, b, x, m, r, rows, g, &state, rest)
                matmul_block(up, b, x, m, r, rows, u, &state, rest)
                swiglu_block(g, u, rows, gate_bias, up_bias, b, h, out, m, r, nb)
        r += FFN_ROWS
    matmul_blocks_done()
