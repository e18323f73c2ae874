# SwiGLU between matmuls of rounded activations, over `matmul_block` and `put_rows` of the level.

cdef enum:
    FFN_ROWS = 256              # rows that swiglu_i8 takes at a time, whole tiles


cdef void swiglu_i8(
    int th, int nth, const PackedMatrix* gate, const PackedMatrix* up, const Activations* x, const float* gate_bias,
    const float* up_bias, const Activations* out, Py_ssize_t m, float* scratch,
) noexcept nogil:
    # Each 32 outputs of some rows go from both matmuls through SwiGLU into rounded form without leaving the caches.
    # scratch: gate and up of FFN_ROWS rows, one row of SwiGLU for each of a tile, then what matmul_block needs
    cdef Py_ssize_t b, r, i, rows, tile, nb = gate.n // QBLOCK
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
        for b in range(share(nb, th, nth), share(nb, th + 1, nth)):
            matmul_block(gate, b, x, m, r, rows, g, &state, rest)
            matmul_block(up, b, x, m, r, rows, u, &state, rest)
            for tile in range(row_tiles(rows)):
                i = tile * TILE_ROWS
                swiglu_rows(
                    g + i * QBLOCK, u + i * QBLOCK, QBLOCK, gate_bias, up_bias, b * QBLOCK, h, QBLOCK,
                    min(TILE_ROWS, rows - i), QBLOCK,
                )
                put_rows(out, m, r + i, <int>min(TILE_ROWS, rows - i), b, nb, h, QBLOCK)
        r += FFN_ROWS
    matmul_blocks_done()
