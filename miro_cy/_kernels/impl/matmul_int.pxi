# y = x W^T with int8 activations: integer dot products over 16 k, which are exact in any order, then one chain of float
# additions over groups in ascending k for each output, continued from y between chunks. A row's bits depend on neither
# row count nor tile.

cdef enum:
    INT_BLOCKS = 32         # most 32-k blocks a chunk covers
    INT_ROWS = 256          # rows a pass over the weights covers


cdef struct IntTile:
    # one call of int_tile: rows [row, row + mr) of x against a panel, over a run of 32-k blocks
    const Activations* x
    Py_ssize_t row
    Py_ssize_t k                # of the whole matrix
    Py_ssize_t first_block
    Py_ssize_t blocks
    const Plane* w              # of the run
    int runs                    # 16 k are `runs` runs of `steps` quads: arguments, not constants, because
    int steps                   # unrolled, the quad loop spills
    int zero
    float* y                    # of the panel and row 0
    Py_ssize_t ldy


cdef inline void int_tile(
    const int mr, const int is_signed, const int group, const int has_min, const IntTile* t
) noexcept nogil:
    """mr rows x 16 outputs; group: k a weight scale covers."""
    cdef vf acc[32]
    cdef vf part[32]            # of a 32-k block: sum of d * integer dot
    cdef vi total[32]
    cdef vi narrow[32]
    cdef vi wv[4]
    cdef vi xv
    cdef vf scale, dot
    cdef Py_ssize_t b, k = t.k, ldy = t.ldy, nb = k // QBLOCK
    cdef const int8_t* q = t.x.q + t.row * k + t.first_block * QBLOCK
    cdef const float* d = t.x.d + (t.row * nb + t.first_block) * 2
    cdef const int32_t* sums = t.x.sum + (t.row * nb + t.first_block) * 2
    cdef const float* dsum = t.x.dsum + t.row * nb + t.first_block
    cdef const Plane* w = t.w
    cdef float* y = t.y + t.row * ldy
    cdef int runs = t.runs, steps = t.steps, zero = t.zero
    cdef bint first = t.first_block == 0
    cdef const uint8_t* wq
    cdef int i, v, h, r, s
    for i in range(mr):
        for v in range(MI_NV):
            acc[i * MI_NV + v] = vf_zero() if first else vf_load(y + i * ldy + v * MI_VL)
    for b in range(t.blocks):
        wq = w.q + b * w.stride
        for h in range(2):
            for i in range(mr):
                for v in range(MI_NV):
                    total[i * MI_NV + v] = vi_set1(-zero * sums[i * nb * 2 + h])
            for r in range(runs):
                if MI_NARROW and not is_signed:
                    for i in range(mr * MI_NV):
                        narrow[i] = vi_zero()
                for s in range(steps):
                    for v in range(MI_NV):
                        wv[v] = vi_load(wq + v * MI_VL * 4)
                    for i in range(mr):
                        xv = vi_set1_bytes(q + i * k)
                        for v in range(MI_NV):
                            if is_signed:
                                total[i * MI_NV + v] = vi_dot_s8(total[i * MI_NV + v], wv[v], xv)
                            elif not MI_NARROW:
                                total[i * MI_NV + v] = vi_dot_u8(total[i * MI_NV + v], wv[v], xv)
                            else:
                                narrow[i * MI_NV + v] = vi_dot_u8(narrow[i * MI_NV + v], wv[v], xv)
                    wq += PANEL * 4
                    q += 4
                if MI_NARROW and not is_signed:
                    for i in range(mr * MI_NV):
                        total[i] = vi_widen(total[i], narrow[i])
            for i in range(mr):
                for v in range(MI_NV):
                    dot = vf_from_int(total[i * MI_NV + v])
                    if group == 16:
                        scale = vf_load(w.scale + (b * 2 + h) * PANEL + v * MI_VL)
                        acc[i * MI_NV + v] = vf_fma(scale, dot * vf_set1(d[i * nb * 2 + h]), acc[i * MI_NV + v])
                    elif h == 0:
                        part[i * MI_NV + v] = dot * vf_set1(d[i * nb * 2])
                    else:
                        part[i * MI_NV + v] = vf_fma(dot, vf_set1(d[i * nb * 2 + 1]), part[i * MI_NV + v])
        if group == 32:
            for v in range(MI_NV):
                scale = vf_load(w.scale + b * PANEL + v * MI_VL)
                for i in range(mr):
                    acc[i * MI_NV + v] = vf_fma(scale, part[i * MI_NV + v], acc[i * MI_NV + v])
                if has_min:
                    scale = vf_load(w.minimum + b * PANEL + v * MI_VL)
                    for i in range(mr):
                        acc[i * MI_NV + v] = vf_fma(scale, vf_set1(dsum[i * nb]), acc[i * MI_NV + v])
        d += 2
        sums += 2
        dsum += 1
    for i in range(mr):
        for v in range(MI_NV):
            vf_store(y + i * ldy + v * MI_VL, acc[i * MI_NV + v])


cdef inline int int_rows() noexcept nogil:
    """Most rows a tile takes."""
    return 8 if MI_NV == 1 else 4


cdef inline void int_tile_kind(
    const int is_signed, const int group, const int has_min, int mr, const IntTile* t
) noexcept nogil:
    """Pick the tile specialised on the row count; int_rows bounds mr."""
    if mr == 1:
        int_tile(1, is_signed, group, has_min, t)
    elif mr == 2:
        int_tile(2, is_signed, group, has_min, t)
    elif mr == 3:
        int_tile(3, is_signed, group, has_min, t)
    elif mr == 4:
        int_tile(4, is_signed, group, has_min, t)
    elif mr == 5 and MI_NV == 1:
        int_tile(5, is_signed, group, has_min, t)
    elif mr == 6 and MI_NV == 1:
        int_tile(6, is_signed, group, has_min, t)
    elif mr == 7 and MI_NV == 1:
        int_tile(7, is_signed, group, has_min, t)
    elif MI_NV == 1:
        int_tile(8, is_signed, group, has_min, t)


cdef void int_tile_rows(const PackedMatrix* w, int mr, const IntTile* t) noexcept nogil:
    """Pick the tile specialised on the layout."""
    if w.layout == LAYOUT_Q8:
        int_tile_kind(1, 32, 0, mr, t)
    elif w.group == 16:
        int_tile_kind(0, 16, 0, mr, t)
    elif w.has_min:
        int_tile_kind(0, 32, 1, mr, t)
    else:
        int_tile_kind(0, 32, 0, mr, t)


cdef void matmul_i8(
    int th, int nth, const PackedMatrix* w, const Activations* x, float* y, Py_ssize_t ldy, Py_ssize_t m, float* scratch
) noexcept nogil:
    # scratch: byte plane of INT_BLOCKS blocks, then scales and minima
    cdef Plane plane
    cdef IntTile t
    cdef Py_ssize_t nb = w.k // QBLOCK, chunks = (nb + INT_BLOCKS - 1) // INT_BLOCKS
    cdef Py_ssize_t s, r, rows, p, c, i, tiles
    MIRO_ASSERT(ldy >= w.n_panels * PANEL)
    MIRO_SPAN(0, INT_BLOCKS * 512 // 4 + 4 * INT_BLOCKS * PANEL, matmul_scratch_floats())
    plane.scale = scratch + INT_BLOCKS * 512 // 4
    plane.minimum = plane.scale + INT_BLOCKS * 2 * PANEL
    t.x = x
    t.k = w.k
    t.w = &plane
    t.runs = QGROUP // 4 // w.steps
    t.steps = w.steps
    t.zero = MI_SIGNED_ZERO if w.layout == LAYOUT_Q8 else w.zero
    t.ldy = ldy
    for s in range((m + INT_ROWS - 1) // INT_ROWS):
        r = s * INT_ROWS
        rows = min(INT_ROWS, m - r)
        tiles = (rows + int_rows() - 1) // int_rows()
        for p in range(share(w.n_panels, th, nth), share(w.n_panels, th + 1, nth)):
            t.y = y + p * PANEL
            for c in range(chunks):
                t.first_block = nb * c // chunks
                t.blocks = nb * (c + 1) // chunks - t.first_block
                MIRO_SPAN(0, t.blocks, INT_BLOCKS)
                unpack_plane(w, p, t.first_block, t.blocks, <uint8_t*>scratch, &plane)
                for i in range(tiles):
                    t.row = r + rows * i // tiles
                    int_tile_rows(w, <int>(r + rows * (i + 1) // tiles - t.row), &t)
