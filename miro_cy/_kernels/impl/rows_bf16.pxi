# Activations in bfloat16, whole rows, each block of 32 k in the pairs that tiles of weights lie in (include/tiles.h).
#
# Rows are tile_row_bytes(k) apart. Weights are opened 2**(EXPONENT - 112) times as large as they are and cut off instead
# of rounded, which makes them CUT of themselves on average; activations are stored that much larger.

cdef extern from "tiles.h" nogil:
    ctypedef float vh
    vh vh_set1(float x)
    vh vh_fma(vh a, vh b, vh c)
    vh vh_pairs_of_halves(const void* p)
    vh vh_pairs_of_floats(const float* p)
    vh vh_nibbles(vi x, int shift)
    vh vh_bytes(vi x, int shift, float zero)
    void vh_store_cut(void* p, vh v)
    void mi_store_pairs(void* p, const float* x, float factor)
    vi mi_upper_halves(vf a, vf b)
    vf mi_below(vf a)
    void mi_tiles_shape(int a, int b, int split)
    void mi_tiles_release()
    void mi_tile_zero(int t)
    void mi_tile_load(int t, const void* p, Py_ssize_t stride)
    void mi_tile_store(int t, void* p, Py_ssize_t stride)
    void mi_tile_dot(int sum, int x, int w)


cdef inline float activation_factor() noexcept nogil:
    """2**(112 - EXPONENT) / CUT"""
    return <float>1267650600228229401496703205376.0 * <float>1.00247


cdef inline void put_rows(
    const Activations* out, Py_ssize_t row, int rows, Py_ssize_t b, Py_ssize_t nb, const float* x, Py_ssize_t ldx,
) noexcept nogil:
    """32 k, block b of nb, of rows [row, row + rows)."""
    cdef Py_ssize_t ld = tile_row_bytes(nb * QBLOCK)
    cdef uint8_t* to = <uint8_t*>out.data + row * ld + b * 64
    cdef int i
    for i in range(rows):
        mi_store_pairs(to + i * ld, x + i * ldx, activation_factor())
