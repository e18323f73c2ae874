# Opening quantised weights for tiles: a block of 32 k of a panel becomes 16 pairs of k x 16 outputs of bfloat16.
#
# It is done in float16, 32 lanes at once: (q - zero) is exact, times the scale and plus the minimum is one rounding to
# 11 bits, and cutting three of them off makes bfloat16 of it. Scales are multiplied by 2**exponent of their panel
# first, so that neither large nor small weights leave float16's range.

cdef enum:
    OPEN_TILE = 1024        # bytes of one opened block of a panel


cdef inline float power_of_two(int e) noexcept nogil:
    return mi_bits_to_float(<uint32_t>(e + 127) << 23)


cdef inline int pair_of(const int quad, const int odd) noexcept nogil:
    """The first pair of a vector of bytes: those at even k of a quad, or those at odd k."""
    return 4 * (quad & 3) + (quad >> 2) + 2 * odd


cdef inline void open_nibbles(const int fmt, const uint8_t* w, vh power, uint8_t* out) noexcept nogil:
    """A block of 4 bits with its scales."""
    cdef vh d = vh_pairs_of_halves(w + 256) * power
    cdef vh m = d
    cdef vi x
    cdef int q, j
    if fmt == NIBBLES_MIN:
        m = vh_fma(d, vh_set1(8), vh_pairs_of_halves(w + 288) * power)
    for q in range(4):
        x = vi_load(w + 64 * q)
        for j in range(4):
            if fmt == NIBBLES_MIN:
                vh_store_cut(out + 64 * (4 * q + j), vh_fma(vh_nibbles(x, 4 * j), d, m))
            else:
                vh_store_cut(out + 64 * (4 * q + j), vh_nibbles(x, 4 * j) * d)


cdef inline void open_bytes(const uint8_t* w, vh power, uint8_t* out) noexcept nogil:
    """A block of signed 8 bits with its scales."""
    cdef vh d = vh_pairs_of_halves(w + 512) * power
    cdef vi x
    cdef int q
    for q in range(8):
        x = vi_load(w + 64 * q)
        vh_store_cut(out + 64 * pair_of(q, 0), vh_signed_bytes(x, 0) * d)
        vh_store_cut(out + 64 * pair_of(q, 1), vh_signed_bytes(x, 8) * d)


cdef inline void open_plane(const uint8_t* w, const float* scale, float power, uint8_t* out) noexcept nogil:
    """32 k of a byte plane with scales of each 16 [2][16]."""
    cdef vh d
    cdef vi x
    cdef int q, h
    for h in range(2):
        d = vh_pairs_of_floats(scale + h * PANEL, power)
        for q in range(4 * h, 4 * h + 4):
            x = vi_load(w + 64 * q)
            vh_store_cut(out + 64 * pair_of(q, 0), vh_bytes(x, 0, 32) * d)
            vh_store_cut(out + 64 * pair_of(q, 1), vh_bytes(x, 8, 32) * d)


cdef inline void open_block(
    const int fmt, const uint8_t* w, const float* scale, float power, vh powers, uint8_t* out,
) noexcept nogil:
    """powers: 32 times power."""
    if fmt == BYTES:
        open_bytes(w, powers, out)
    elif fmt == PLANE:
        open_plane(w, scale, power, out)
    else:
        open_nibbles(fmt, w, powers, out)
