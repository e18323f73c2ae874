# Activations in int8, tiles of eight rows with all that a matmul reads of them beside each other (QuantBlock, abi.pxd).

cdef inline void quantise_group(const float* x, int8_t* q, float* d, int32_t* total) noexcept nogil:
    """16 floats -> int8 in [-127, 127], scale max|x| / 127 and the sum of q. Non-finite input gives a NaN scale."""
    cdef uint32_t bits, top = 0
    cdef float big, inverse
    cdef int32_t n[16]
    cdef int32_t s = 0
    cdef int j
    for j in range(16):                 # magnitudes as integers: same order, and NaN and infinity come out on top
        bits = mi_float_to_bits(x[j]) & 0x7fffffffu
        top = bits if bits > top else top
    big = mi_bits_to_float(top)
    inverse = int8_inverse(big)
    for j in range(16):                 # apart from the bytes, which would make the vectors of this loop short ones
        n[j] = to_int8(x[j], inverse)
    for j in range(16):
        s += n[j]
    for j in range(16):
        q[j] = <int8_t>n[j]
    total[0] = s
    d[0] = int8_scale(big)


cdef void quantise_rows(const float* x, Py_ssize_t ldx, int rows, int at, QuantBlock* block) noexcept nogil:
    """32 k of some rows into rows [at, at + rows) of a block."""
    cdef int i, h
    cdef int32_t total[2]
    for i in range(rows):
        for h in range(2):
            quantise_group(x + i * ldx + h * QGROUP, &block.q[at + i][h * QGROUP], &block.d[h][at + i], &total[h])
            block.start[h][at + i] = -128 * total[h]
        block.dsum[at + i] = mi_fma(
            block.d[1][at + i], <float>total[1], block.d[0][at + i] * <float>total[0],
        )


cdef inline void put_rows(
    const Activations* out, Py_ssize_t m, Py_ssize_t row, int rows, Py_ssize_t b, Py_ssize_t nb, const float* x,
    Py_ssize_t ldx,
) noexcept nogil:
    """32 k, block b of nb, of rows [row, row + rows) of m, which lie in one tile."""
    cdef QuantBlock* block = <QuantBlock*>out.data + row // TILE_ROWS * nb + b
    quantise_rows(x, ldx, rows, <int>(row % TILE_ROWS), block)
