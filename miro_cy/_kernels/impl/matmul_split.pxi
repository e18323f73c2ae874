# y = x W^T for F16 and BF16 weights in tile registers, as exact as float32: both sides are split into bfloat16 pieces.
#
# x = x0 + x1 + x2 and w = w0 + w1 exactly (BF16: w = w0), each piece the upper 16 bits of what the ones before leave.
# Of the products only x2 w1 is left out: it is below a float32's last bit. Products of pieces are exact, and a block of
# 32 k adds all five in a fixed order to one sum, so a row's bits depend on neither row count nor tile (the splitting:
# Henry et al. 2019, "Leveraging the bfloat16 Artificial Intelligence Datatype for Higher-Precision Computations").

cdef enum:
    SPLIT_RUN = 16          # 32-k blocks of a run, when what was opened is kept for more rows than PAIR_ROWS
    SPLIT_ROWS = 256        # rows whose pieces of such a run there is room for
    SPLIT_PIECES = 3
    SPLIT_AHEAD = 8192      # bytes of a panel ahead to prefetch


cdef struct SplitRun:
    # a run of 32-k blocks of two neighbouring panels against up to PAIR_ROWS rows
    const uint8_t* x[2]         # [block][piece][row][32] of each tile of rows
    Py_ssize_t step[2]          # bytes from one of its pieces to the next
    int rows
    const uint16_t* w           # of the first panel's run
    Py_ssize_t panel            # elements from one panel's run to the next panel's
    Py_ssize_t k                # of the run: less than its blocks hold at the end of a row
    uint8_t* open               # [block][panel][piece][pair][16][2]
    Py_ssize_t slots            # a power of two of such blocks, used in turn
    int panels                  # 1: there is no second one
    bint first                  # start from 0 instead of y
    float* y
    Py_ssize_t ldy


cdef inline void split_block(const int dtype, const uint16_t* w, uint8_t* out) noexcept nogil:
    """32 k of a panel: pairs of k = i and 16 + i."""
    cdef vf a, b
    cdef int i
    for i in range(16):
        a = load_weight(dtype, <const uint8_t*>w, i * PANEL)
        b = load_weight(dtype, <const uint8_t*>w, (16 + i) * PANEL)
        vi_store(out + 64 * i, mi_upper_halves(a, b))
        if dtype == LAYOUT_F16:
            vi_store(out + OPEN_TILE + 64 * i, mi_upper_halves(mi_below(a), mi_below(b)))


cdef inline void split_row(const float* x, uint8_t* out, Py_ssize_t piece) noexcept nogil:
    """32 k of a row, in the same pairs; piece: bytes from one piece to the next."""
    cdef vf a = vf_load(x), b = vf_load(x + 16)
    cdef int i
    for i in range(SPLIT_PIECES):
        vi_store(out + i * piece, mi_upper_halves(a, b))
        a, b = mi_below(a), mi_below(b)


cdef void split_rows(
    const float* x, Py_ssize_t ldx, Py_ssize_t rows, Py_ssize_t k, uint8_t* out,
) noexcept nogil:
    """A run of some rows into [tile][block][piece][row][32]; past k there are zeros."""
    cdef float padded[QBLOCK]
    cdef Py_ssize_t r, b, blocks = (k + QBLOCK - 1) // QBLOCK, n, piece
    cdef const float* at
    for r in range(rows):
        n = min(16, rows - r // 16 * 16)
        piece = n * 64
        for b in range(blocks):
            at = x + r * ldx + b * QBLOCK
            if k - b * QBLOCK < QBLOCK:
                memset(padded, 0, sizeof(padded))
                memcpy(padded, at, (k - b * QBLOCK) * sizeof(float))
                at = padded
            split_row(
                at, out + r // 16 * 16 * blocks * SPLIT_PIECES * 64 + b * SPLIT_PIECES * piece + r % 16 * 64, piece,
            )


cdef inline void split_pair(const int dtype, const SplitRun* t, Py_ssize_t b, uint8_t* out) noexcept nogil:
    """Block b of both panels."""
    cdef uint16_t padded[QBLOCK * PANEL]
    cdef Py_ssize_t left = min(<Py_ssize_t>QBLOCK, t.k - b * QBLOCK)
    cdef const uint16_t* w
    cdef int p, j
    for p in range(t.panels):
        w = t.w + p * t.panel + b * QBLOCK * PANEL
        for j in range(16):
            mi_prefetch_l2(<const uint8_t*>w + SPLIT_AHEAD + 64 * j)
        if left < QBLOCK:
            memset(padded, 0, sizeof(padded))
            memcpy(padded, w, left * PANEL * sizeof(uint16_t))
            w = padded
        split_block(dtype, w, out + p * 2 * OPEN_TILE)


cdef inline void multiply_pieces(const bint both) noexcept nogil:
    """What lies in the tiles of activations times what lies in those of weights."""
    mi_tile_dot(0, 4, 6)
    mi_tile_dot(1, 4, 7)
    if both:
        mi_tile_dot(2, 5, 6)
        mi_tile_dot(3, 5, 7)


cdef inline void load_rows(const bint both, const SplitRun* t, Py_ssize_t b, int piece) noexcept nogil:
    mi_tile_load(4, t.x[0] + (b * SPLIT_PIECES + piece) * t.step[0], 64)
    if both:
        mi_tile_load(5, t.x[1] + (b * SPLIT_PIECES + piece) * t.step[1], 64)


cdef inline void load_weights(const uint8_t* w, int piece) noexcept nogil:
    mi_tile_load(6, w + piece * OPEN_TILE, 64)
    mi_tile_load(7, w + (2 + piece) * OPEN_TILE, 64)


cdef inline void add_split(
    const int dtype, const bint both, const SplitRun* t, Py_ssize_t b, const uint8_t* w,
) noexcept nogil:
    """One block's products, the small ones first; both: of two tiles of rows."""
    load_rows(both, t, b, 2)
    load_weights(w, 0)
    multiply_pieces(both)           # x2 w0
    load_rows(both, t, b, 1)
    multiply_pieces(both)           # x1 w0
    if dtype == LAYOUT_F16:
        load_weights(w, 1)
        multiply_pieces(both)       # x1 w1
        load_rows(both, t, b, 0)
        multiply_pieces(both)       # x0 w1
        load_weights(w, 0)
    else:
        load_rows(both, t, b, 0)
    multiply_pieces(both)           # x0 w0


cdef inline void split_tile(const int dtype, const bint opening, const SplitRun* t) noexcept nogil:
    cdef Py_ssize_t b
    cdef uint8_t* open
    start_sums(t.first, t.panels, t.rows, t.y, t.ldy)
    for b in range((t.k + QBLOCK - 1) // QBLOCK):
        open = t.open + (b & (t.slots - 1)) * 4 * OPEN_TILE
        if opening:
            split_pair(dtype, t, b, open)
        if t.rows > 16:
            add_split(dtype, True, t, b, open)
        else:
            add_split(dtype, False, t, b, open)
    store_sums(t.panels, t.rows, t.y, t.ldy)


cdef inline void split_tiles(
    const int dtype, SplitRun* t, const uint8_t* x, Py_ssize_t rows, int* shape,
) noexcept nogil:
    """All rows of a pass, their pieces at x, against a run of two panels; t.y is of the first."""
    cdef Py_ssize_t r = 0, blocks = (t.k + QBLOCK - 1) // QBLOCK
    cdef int i
    while r < rows:
        t.rows = <int>min(PAIR_ROWS, rows - r)
        for i in range(2):
            t.x[i] = x + (r + 16 * i) * blocks * SPLIT_PIECES * 64
            t.step[i] = tile_step(rows, min(r + 16 * i, rows - 1))
        shape_for(shape, t.rows)
        if r == 0:
            split_tile(dtype, True, t)
        else:
            split_tile(dtype, False, t)
        t.y += PAIR_ROWS * t.ldy
        r += PAIR_ROWS


cdef void split_run(
    const PackedMatrix* w, Py_ssize_t p, Py_ssize_t k0, SplitRun t, const uint8_t* x, Py_ssize_t rows, int* shape,
) noexcept nogil:
    t.panels = <int>min(2, w.n_panels - p)
    MIRO_SPAN(p, t.panels, w.n_panels)
    MIRO_SPAN(k0, t.k, w.k)
    t.w = <const uint16_t*>(w.data + p * w.panel_bytes) + k0 * PANEL
    t.panel = w.k * PANEL
    t.first = k0 == 0
    t.y += p * PANEL
    if w.layout == LAYOUT_BF16:
        split_tiles(LAYOUT_BF16, &t, x, rows, shape)
    else:
        split_tiles(LAYOUT_F16, &t, x, rows, shape)


cdef void matmul_split(
    mi_member* me, const PackedMatrix* w, const float* x, Py_ssize_t ldx, float* y, Py_ssize_t ldy, Py_ssize_t m,
    float* scratch,
) noexcept nogil:
    # scratch: an opened run of two panels, then the pieces of a run of SPLIT_ROWS rows
    cdef SplitRun t
    cdef uint8_t* pieces = <uint8_t*>scratch + SPLIT_RUN * 4 * OPEN_TILE
    cdef Py_ssize_t r = 0, k, i, rows, run, n, first, pairs = (w.n_panels + 1) // 2
    cdef int shape = 0
    MIRO_ASSERT(ldx >= w.k)
    MIRO_ASSERT(ldy >= w.n_panels * PANEL)
    MIRO_SPAN(
        0, (SPLIT_RUN * 4 * OPEN_TILE + SPLIT_RUN * SPLIT_ROWS * SPLIT_PIECES * 64) // 4, matmul_scratch_floats(),
    )
    t.open, t.ldy = <uint8_t*>scratch, ldy
    while r < m:
        rows = min(SPLIT_ROWS, m - r)
        run = SPLIT_RUN if rows > PAIR_ROWS else SPLIT_RUN * SPLIT_ROWS // rows
        t.slots = SPLIT_RUN if rows > PAIR_ROWS else RING
        k = 0
        while k < w.k:
            t.k = min(run * QBLOCK, w.k - k)
            split_rows(x + r * ldx + k, ldx, rows, t.k, pieces)
            t.y = y + r * ldy
            if k > 0:
                mi_meet(me)         # who goes on with a sum may be another one
            mi_deal(me, pairs)
            while True:
                n = mi_take(me, pairs, &first)
                if n == 0:
                    break
                for i in range(first, first + n):
                    split_run(w, 2 * i, k, t, pieces, rows, &shape)
            k += t.k
        r += rows
    mi_tiles_release()


cdef void matmul_f32_or_split(
    mi_member* me, const PackedMatrix* w, const float* x, Py_ssize_t ldx, float* y, Py_ssize_t ldy, Py_ssize_t m,
    float* scratch,
) noexcept nogil:
    """Weights of 16 bits in tiles; the others in fused multiply-adds, which have as many bits as they."""
    if w.layout == LAYOUT_F16 or w.layout == LAYOUT_BF16:
        matmul_split(me, w, x, ldx, y, ldy, m, scratch)
    else:
        matmul_f32(me, w, x, ldx, y, ldy, m, scratch)
