# The shapes of int_tile that int_rows and int_panels choose. Each is a function of its own, called through a pointer:
# compiled into one, they spill one another's addresses.

cdef void nibbles_1(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES, 1, 1, t)


cdef void nibbles_2(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES, 2, 1, t)


cdef void nibbles_3(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES, 3, 1, t)


cdef void nibbles_4(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES, 4, 1, t)


cdef void nibbles_5(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES, 5, 1, t)


cdef void nibbles_6(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES, 6, 1, t)


cdef void nibbles_7(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES, 7, 1, t)


cdef void nibbles_8(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES, 8, 1, t)


cdef void nibbles_1x2(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES, 1, 2, t)


cdef void nibbles_2x2(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES, 2, 2, t)


cdef void nibbles_3x2(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES, 3, 2, t)


cdef void nibbles_4x2(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES, 4, 2, t)


cdef void nibbles_min_1(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES_MIN, 1, 1, t)


cdef void nibbles_min_2(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES_MIN, 2, 1, t)


cdef void nibbles_min_3(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES_MIN, 3, 1, t)


cdef void nibbles_min_4(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES_MIN, 4, 1, t)


cdef void nibbles_min_5(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES_MIN, 5, 1, t)


cdef void nibbles_min_6(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES_MIN, 6, 1, t)


cdef void nibbles_min_7(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES_MIN, 7, 1, t)


cdef void nibbles_min_8(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES_MIN, 8, 1, t)


cdef void nibbles_min_1x2(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES_MIN, 1, 2, t)


cdef void nibbles_min_2x2(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES_MIN, 2, 2, t)


cdef void nibbles_min_3x2(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES_MIN, 3, 2, t)


cdef void nibbles_min_4x2(const IntTile* t) noexcept nogil:
    int_tile(NIBBLES_MIN, 4, 2, t)


cdef void bytes_1(const IntTile* t) noexcept nogil:
    int_tile(BYTES, 1, 1, t)


cdef void bytes_2(const IntTile* t) noexcept nogil:
    int_tile(BYTES, 2, 1, t)


cdef void bytes_3(const IntTile* t) noexcept nogil:
    int_tile(BYTES, 3, 1, t)


cdef void bytes_4(const IntTile* t) noexcept nogil:
    int_tile(BYTES, 4, 1, t)


cdef void bytes_5(const IntTile* t) noexcept nogil:
    int_tile(BYTES, 5, 1, t)


cdef void bytes_6(const IntTile* t) noexcept nogil:
    int_tile(BYTES, 6, 1, t)


cdef void bytes_7(const IntTile* t) noexcept nogil:
    int_tile(BYTES, 7, 1, t)


cdef void bytes_8(const IntTile* t) noexcept nogil:
    int_tile(BYTES, 8, 1, t)


cdef void bytes_1x2(const IntTile* t) noexcept nogil:
    int_tile(BYTES, 1, 2, t)


cdef void bytes_2x2(const IntTile* t) noexcept nogil:
    int_tile(BYTES, 2, 2, t)


cdef void bytes_3x2(const IntTile* t) noexcept nogil:
    int_tile(BYTES, 3, 2, t)


cdef void bytes_4x2(const IntTile* t) noexcept nogil:
    int_tile(BYTES, 4, 2, t)


cdef void plane_1(const IntTile* t) noexcept nogil:
    int_tile(PLANE, 1, 1, t)


cdef void plane_2(const IntTile* t) noexcept nogil:
    int_tile(PLANE, 2, 1, t)


cdef void plane_3(const IntTile* t) noexcept nogil:
    int_tile(PLANE, 3, 1, t)


cdef void plane_4(const IntTile* t) noexcept nogil:
    int_tile(PLANE, 4, 1, t)


cdef void plane_5(const IntTile* t) noexcept nogil:
    int_tile(PLANE, 5, 1, t)


cdef void plane_6(const IntTile* t) noexcept nogil:
    int_tile(PLANE, 6, 1, t)


cdef void plane_7(const IntTile* t) noexcept nogil:
    int_tile(PLANE, 7, 1, t)


cdef void plane_8(const IntTile* t) noexcept nogil:
    int_tile(PLANE, 8, 1, t)


cdef void open_nibbles_1x2(const IntTile* t) noexcept nogil:
    int_tile(OPEN_NIBBLES, 1, 2, t)


cdef void open_nibbles_2x2(const IntTile* t) noexcept nogil:
    int_tile(OPEN_NIBBLES, 2, 2, t)


cdef void open_nibbles_3x2(const IntTile* t) noexcept nogil:
    int_tile(OPEN_NIBBLES, 3, 2, t)


cdef void open_nibbles_4x2(const IntTile* t) noexcept nogil:
    int_tile(OPEN_NIBBLES, 4, 2, t)


cdef void open_nibbles_min_1x2(const IntTile* t) noexcept nogil:
    int_tile(OPEN_NIBBLES_MIN, 1, 2, t)


cdef void open_nibbles_min_2x2(const IntTile* t) noexcept nogil:
    int_tile(OPEN_NIBBLES_MIN, 2, 2, t)


cdef void open_nibbles_min_3x2(const IntTile* t) noexcept nogil:
    int_tile(OPEN_NIBBLES_MIN, 3, 2, t)


cdef void open_nibbles_min_4x2(const IntTile* t) noexcept nogil:
    int_tile(OPEN_NIBBLES_MIN, 4, 2, t)


cdef void open_bytes_1x2(const IntTile* t) noexcept nogil:
    int_tile(OPEN_BYTES, 1, 2, t)


cdef void open_bytes_2x2(const IntTile* t) noexcept nogil:
    int_tile(OPEN_BYTES, 2, 2, t)


cdef void open_bytes_3x2(const IntTile* t) noexcept nogil:
    int_tile(OPEN_BYTES, 3, 2, t)


cdef void open_bytes_4x2(const IntTile* t) noexcept nogil:
    int_tile(OPEN_BYTES, 4, 2, t)


cdef int_tile_t INT_TILES[7][INT_PANELS][TILE_ROWS]
INT_TILES[NIBBLES][0][0] = nibbles_1
INT_TILES[NIBBLES][0][1] = nibbles_2
INT_TILES[NIBBLES][0][2] = nibbles_3
INT_TILES[NIBBLES][0][3] = nibbles_4
INT_TILES[NIBBLES][0][4] = nibbles_5
INT_TILES[NIBBLES][0][5] = nibbles_6
INT_TILES[NIBBLES][0][6] = nibbles_7
INT_TILES[NIBBLES][0][7] = nibbles_8
INT_TILES[NIBBLES][1][0] = nibbles_1x2
INT_TILES[NIBBLES][1][1] = nibbles_2x2
INT_TILES[NIBBLES][1][2] = nibbles_3x2
INT_TILES[NIBBLES][1][3] = nibbles_4x2
INT_TILES[NIBBLES_MIN][0][0] = nibbles_min_1
INT_TILES[NIBBLES_MIN][0][1] = nibbles_min_2
INT_TILES[NIBBLES_MIN][0][2] = nibbles_min_3
INT_TILES[NIBBLES_MIN][0][3] = nibbles_min_4
INT_TILES[NIBBLES_MIN][0][4] = nibbles_min_5
INT_TILES[NIBBLES_MIN][0][5] = nibbles_min_6
INT_TILES[NIBBLES_MIN][0][6] = nibbles_min_7
INT_TILES[NIBBLES_MIN][0][7] = nibbles_min_8
INT_TILES[NIBBLES_MIN][1][0] = nibbles_min_1x2
INT_TILES[NIBBLES_MIN][1][1] = nibbles_min_2x2
INT_TILES[NIBBLES_MIN][1][2] = nibbles_min_3x2
INT_TILES[NIBBLES_MIN][1][3] = nibbles_min_4x2
INT_TILES[BYTES][0][0] = bytes_1
INT_TILES[BYTES][0][1] = bytes_2
INT_TILES[BYTES][0][2] = bytes_3
INT_TILES[BYTES][0][3] = bytes_4
INT_TILES[BYTES][0][4] = bytes_5
INT_TILES[BYTES][0][5] = bytes_6
INT_TILES[BYTES][0][6] = bytes_7
INT_TILES[BYTES][0][7] = bytes_8
INT_TILES[BYTES][1][0] = bytes_1x2
INT_TILES[BYTES][1][1] = bytes_2x2
INT_TILES[BYTES][1][2] = bytes_3x2
INT_TILES[BYTES][1][3] = bytes_4x2
INT_TILES[PLANE][0][0] = plane_1
INT_TILES[PLANE][0][1] = plane_2
INT_TILES[PLANE][0][2] = plane_3
INT_TILES[PLANE][0][3] = plane_4
INT_TILES[PLANE][0][4] = plane_5
INT_TILES[PLANE][0][5] = plane_6
INT_TILES[PLANE][0][6] = plane_7
INT_TILES[PLANE][0][7] = plane_8
if MI_OPENS:
    INT_TILES[OPEN_NIBBLES][1][0] = open_nibbles_1x2
    INT_TILES[OPEN_NIBBLES][1][1] = open_nibbles_2x2
    INT_TILES[OPEN_NIBBLES][1][2] = open_nibbles_3x2
    INT_TILES[OPEN_NIBBLES][1][3] = open_nibbles_4x2
    INT_TILES[OPEN_NIBBLES_MIN][1][0] = open_nibbles_min_1x2
    INT_TILES[OPEN_NIBBLES_MIN][1][1] = open_nibbles_min_2x2
    INT_TILES[OPEN_NIBBLES_MIN][1][2] = open_nibbles_min_3x2
    INT_TILES[OPEN_NIBBLES_MIN][1][3] = open_nibbles_min_4x2
    INT_TILES[OPEN_BYTES][1][0] = open_bytes_1x2
    INT_TILES[OPEN_BYTES][1][1] = open_bytes_2x2
    INT_TILES[OPEN_BYTES][1][2] = open_bytes_3x2
    INT_TILES[OPEN_BYTES][1][3] = open_bytes_4x2
