# Floats to symmetric int8: activations and keys and values of the cache.

cdef inline float int8_inverse(float big) noexcept nogil:
    """What elements of magnitude up to `big` are multiplied by to lie in [-127, 127]."""
    return <float>127.0 / big if big > <float>1e-30 else <float>0.0


cdef inline int32_t to_int8(float x, float inverse) noexcept nogil:
    """x * inverse, to nearest, ties to even; never outside [-127, 127], whatever x is."""
    cdef float r = mi_fma(x, inverse, <float>12582912.0) - <float>12582912.0
    r = r if r > <float>-127.0 else <float>-127.0
    r = r if r < <float>127.0 else <float>127.0
    return <int32_t>r


cdef inline float int8_scale(float big) noexcept nogil:
    """What the integers stand for; NaN where `big` is not finite."""
    cdef float d = big / <float>127.0 if big > <float>1e-30 else <float>0.0
    return mi_bits_to_float(0x7fc00000u) if mi_float_to_bits(big) >= 0x7f800000u else d
