# Activations in bfloat16, tiles of 16 rows and 32 k, in the pairs that tiles of weights lie in (include/tiles.h).
#
# Weights are opened 2**(EXPONENT - 112) times as large as they are and cut off instead
# of rounded, which makes them CUT of themselves on average; activations are stored that much larger.

cdef extern from "tiles.h" nogil:
    ctypedef float vh
    vh vh_set1(float x)
    vh vh_fma(vh a, vh b, vh c)
    vh vh_pairs_of_halves(const void* p)
    vh vh_pairs_of_floats(const float* p, float factor)
    vh vh_nibbles(vi x, int shift)
    vh vh_bytes(vi x, int shift, float zero)
    vh vh_signed_bytes(vi x, int shift)
    void vh_store_cut(void* p, vh v)
    void mi_store_pairs(void* p, const float* x, float factor)
    void mi_store_rounded(void* p, vf a, vf b)
    vi mi_upper_halves(vf a, vf b)
    vf mi_below(vf a)
    void mi_tiles_shape(int a, int b)
    void mi_tiles_release()
    void mi_tile_zero(int t)
    void mi_tile_load(int t, const void* p, Py_ssize_t stride)
    void mi_tile_store(int t, void* p, Py_ssize_t stride)
    void mi_tile_dot(int sum, int x, int w)


cdef inline float activation_factor() noexcept nogil:
    """2**(112 - EXPONENT) / CUT"""
    return <float>1267650600228229401496703205376.0 * <float>1.00247


cdef inline Py_ssize_t tile_step(Py_ssize_t m, Py_ssize_t row) noexcept nogil:
    """Bytes from one block of 32 k of the tile that `row` begins to the next: it has up to 16 of m rows."""
    return 64 * min(16, m - row)


cdef inline void put_rows(
    const Activations* out, Py_ssize_t m, Py_ssize_t row, int rows, Py_ssize_t b, Py_ssize_t nb, const float* x,
    Py_ssize_t ldx,
) noexcept nogil:
    """32 k, block b of nb, of rows [row, row + rows) of m, which lie in one tile."""
    cdef Py_ssize_t first = row // 16 * 16
    cdef uint8_t* to = <uint8_t*>out.data + first * nb * 64 + b * tile_step(m, first) + (row - first) * 64
    cdef int i
    for i in range(rows):
        mi_store_pairs(to + 64 * i, x + i * ldx, activation_factor())
