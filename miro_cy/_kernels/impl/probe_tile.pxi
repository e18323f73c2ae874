# What tile registers can do: products of tiles that stay where they are, four sums in turn as in the matmuls.

cdef void probe_tile(const uint8_t* x, const uint8_t* w, float* sums, Py_ssize_t rounds) noexcept nogil:
    cdef Py_ssize_t _r
    mi_tiles_shape(16, 16)
    mi_tile_load(4, x, 64)
    mi_tile_load(5, x, 64)
    mi_tile_load(6, w, 64)
    mi_tile_load(7, w, 64)
    for _r in range(rounds):
        mi_tile_dot(0, 4, 6)
        mi_tile_dot(1, 4, 7)
        mi_tile_dot(2, 5, 6)
        mi_tile_dot(3, 5, 7)
    mi_tile_store(0, sums, 64)
    mi_tiles_release()
