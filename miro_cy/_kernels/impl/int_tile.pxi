# The tiles of matmul_int.pxi: some rows of int8 activations against some panels of weights.

cdef enum:
    INT_BLOCKS = 32         # most 32-k blocks a chunk covers
    INT_PANELS = 2          # most panels a tile covers
    OPEN_BYTES_ROWS = 24    # from so many rows on weights are opened once for all of them
    OPEN_NIBBLES_ROWS = 48
    OPENED = INT_BLOCKS * 512   # bytes from one panel's opened weights to the next panel's

cdef enum:
    # formats of unpack.pxi, whose weights were opened into unsigned bytes for many rows
    OPEN_NIBBLES = 4
    OPEN_NIBBLES_MIN
    OPEN_BYTES              # 128 too large


cdef struct IntTile:
    # one call of int_tile: rows [row, row + mr) of a tile of x against neighbouring panels, over a run of 32-k blocks
    const QuantBlock* x         # of the run
    int row
    Py_ssize_t blocks
    bint first                  # start from 0 instead of y
    const uint8_t* w            # of the first panel's run
    Py_ssize_t stride           # bytes from one 32-k block to the next
    Py_ssize_t panel            # bytes from one panel's run to the next panel's
    Py_ssize_t ahead            # bytes ahead to prefetch; 0: nothing
    const uint8_t* open         # OPEN_*: the weights of the run, of each panel
    const float* scale          # PLANE: of the run
    float* y                    # of the first panel and the tile's row 0
    Py_ssize_t ldy


ctypedef void (*int_tile_t)(const IntTile* t) noexcept nogil


cdef inline bint has_nibbles(const int fmt) noexcept nogil:
    return fmt == NIBBLES or fmt == NIBBLES_MIN


cdef inline bint is_open(const int fmt) noexcept nogil:
    return fmt >= OPEN_NIBBLES


cdef inline vi int_weights(const int fmt, const int h, const uint8_t* w, Py_ssize_t quad, const int v) noexcept nogil:
    """Vector v of a quad of the first or second 16 k of a block."""
    if has_nibbles(fmt):
        if h == 0:
            return vi_and(vi_load(w + (quad * PANEL + v * MI_VL) * 4), 0x0f0f0f0f)
        return vi_and(vi_shr(vi_load(w + (quad * PANEL + v * MI_VL) * 4), 4), 0x0f0f0f0f)
    return vi_load(w + ((4 * h + quad) * PANEL + v * MI_VL) * 4)


cdef inline vi int_start(const int fmt, const int32_t* start) noexcept nogil:
    """What a sum begins with: minus the zero point times the sum of x. That of nibbles is taken off in float32."""
    if fmt == PLANE:
        return vi_shr(vi_set1_bytes(start), 2)
    if fmt == OPEN_BYTES or (fmt == BYTES and MI_SIGNED_ZERO == 128):
        return vi_set1_bytes(start)
    return vi_zero()


cdef inline void int_quad(
    const int fmt, const int mr, const int np, const int h, const IntTile* t, const QuantBlock* x, const uint8_t* w,
    int s, vi* total,
) noexcept nogil:
    """Adds the dot products of quad s of a half."""
    cdef vi wv[INT_PANELS * 4]
    cdef vi xv
    cdef int i, c
    for c in range(np * MI_NV):
        wv[c] = int_weights(fmt, h, w + c // MI_NV * (OPENED if is_open(fmt) else t.panel), s, c % MI_NV)
    for i in range(mr):
        xv = vi_set1_bytes(&x.q[t.row][16 * h] + i * QBLOCK + 4 * s)
        for c in range(np * MI_NV):
            if fmt == BYTES:
                total[i * np * MI_NV + c] = vi_dot_s8(total[i * np * MI_NV + c], wv[c], xv)
            else:
                total[i * np * MI_NV + c] = vi_dot_u8(total[i * np * MI_NV + c], wv[c], xv)


cdef inline void int_half(
    const int fmt, const int mr, const int np, const int h, const IntTile* t, const QuantBlock* x, const uint8_t* w,
    vi* total,
) noexcept nogil:
    """Integer dot products over the first or second 16 k of a block, [row][panel][vector]."""
    cdef vi narrow[32]
    cdef vi start
    cdef int i, c, r, s, steps = 2 if fmt == PLANE else 4   # weights are below 64, or below 16
    for i in range(mr):
        start = int_start(fmt, &x.start[h][t.row + i])
        for c in range(np * MI_NV):
            total[i * np * MI_NV + c] = start
    if not MI_NARROW:
        for s in range(4):
            int_quad(fmt, mr, np, h, t, x, w, s, total)
        return
    for r in range(4 // steps):
        if fmt != BYTES:
            for i in range(mr * np * MI_NV):
                narrow[i] = vi_zero()
        for s in range(r * steps, (r + 1) * steps):
            int_quad(fmt, mr, np, h, t, x, w, s, total if fmt == BYTES else narrow)
        if fmt != BYTES:
            for i in range(mr * np * MI_NV):
                total[i] = vi_widen(total[i], narrow[i])


cdef inline void int_tile(const int fmt, const int mr, const int np, const IntTile* t) noexcept nogil:
    """mr rows x np panels of 16 outputs."""
    cdef vf acc[32]             # every tile shape compiles everywhere; those in use keep to the registers
    cdef vf part[32]            # of a 32-k block: sum of d * integer dot
    cdef vi total[32]
    cdef vf scale
    cdef Py_ssize_t b, ldy = t.ldy
    cdef const QuantBlock* x = t.x
    cdef const uint8_t* w = t.w
    cdef const uint8_t* q = t.open if is_open(fmt) else w
    cdef const uint8_t* scales
    cdef float* y = t.y + t.row * ldy
    cdef int i, c, j, row = t.row, halves = 512 if fmt == BYTES or fmt == OPEN_BYTES else 256
    for i in range(mr):
        for c in range(np * MI_NV):
            acc[i * np * MI_NV + c] = vf_zero() if t.first else vf_load(y + i * ldy + c * MI_VL)
    for b in range(t.blocks):
        if t.ahead > 0:
            for c in range(np):
                for j in range(9 if halves == 512 else 5):
                    mi_prefetch(w + c * t.panel + t.ahead + 64 * j)
        int_half(fmt, mr, np, 0, t, x, q, total)
        for i in range(mr):
            for c in range(np * MI_NV):
                if fmt == PLANE:
                    scale = vf_load(t.scale + 2 * b * PANEL + c * MI_VL)
                    part[i * np * MI_NV + c] = vf_from_int(total[i * np * MI_NV + c]) * vf_set1(x.d[0][row + i])
                    acc[i * np * MI_NV + c] = vf_fma(scale, part[i * np * MI_NV + c], acc[i * np * MI_NV + c])
                else:
                    part[i * np * MI_NV + c] = vf_from_int(total[i * np * MI_NV + c]) * vf_set1(x.d[0][row + i])
        int_half(fmt, mr, np, 1, t, x, q, total)
        for i in range(mr):
            for c in range(np * MI_NV):
                if fmt == PLANE:
                    scale = vf_load(t.scale + (2 * b + 1) * PANEL + c * MI_VL)
                    part[i * np * MI_NV + c] = vf_from_int(total[i * np * MI_NV + c]) * vf_set1(x.d[1][row + i])
                    acc[i * np * MI_NV + c] = vf_fma(scale, part[i * np * MI_NV + c], acc[i * np * MI_NV + c])
                else:
                    part[i * np * MI_NV + c] = vf_fma(
                        vf_from_int(total[i * np * MI_NV + c]), vf_set1(x.d[1][row + i]), part[i * np * MI_NV + c],
                    )
        if fmt == NIBBLES or fmt == OPEN_NIBBLES:   # the zero point
            for i in range(mr):
                for c in range(np * MI_NV):
                    part[i * np * MI_NV + c] = vf_fma(
                        vf_set1(<float>-8.0), vf_set1(x.dsum[row + i]), part[i * np * MI_NV + c],
                    )
        if fmt != PLANE:
            for c in range(np * MI_NV):
                scales = w + c // MI_NV * t.panel + halves + c % MI_NV * MI_VL * 2
                scale = vf_load_f16(<const uint16_t*>scales)
                for i in range(mr):
                    acc[i * np * MI_NV + c] = vf_fma(scale, part[i * np * MI_NV + c], acc[i * np * MI_NV + c])
                if fmt == NIBBLES_MIN or fmt == OPEN_NIBBLES_MIN:
                    scale = vf_load_f16(<const uint16_t*>(scales + 2 * PANEL))
                    for i in range(mr):
                        acc[i * np * MI_NV + c] = vf_fma(scale, vf_set1(x.dsum[row + i]), acc[i * np * MI_NV + c])
        x += 1
        w += t.stride
        q += 512 if is_open(fmt) else t.stride
    for i in range(mr):
        for c in range(np * MI_NV):
            vf_store(y + i * ldy + c * MI_VL, acc[i * np * MI_NV + c])


cdef inline int int_rows(int np) noexcept nogil:
    """Most rows a tile of so many panels takes."""
    return TILE_ROWS if MI_NV == 1 and np == 1 else 4


cdef inline bint opens(int fmt, Py_ssize_t m) noexcept nogil:
    """Whether m rows are worth opening weights for."""
    return MI_OPENS and ((fmt == BYTES and m >= OPEN_BYTES_ROWS) or (has_nibbles(fmt) and m >= OPEN_NIBBLES_ROWS))


cdef inline int int_panels(int fmt, Py_ssize_t m) noexcept nogil:
    """Panels that a tile takes when there are m rows: few rows keep the units busy with two.

    With many, two share what is loaded of x, which pays where weights are not taken apart anew for every four rows.
    """
    return 2 if MI_NV == 1 and fmt != PLANE and (m <= 4 or (fmt == BYTES and m > TILE_ROWS) or opens(fmt, m)) else 1
