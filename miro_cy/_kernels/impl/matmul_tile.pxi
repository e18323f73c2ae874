# y = x W^T with bfloat16 activations in tile registers: two panels of weights against up to two tiles of 16 rows.
#
# A sum is one chain over blocks of 32 k, in ascending order, continued from y between runs; within a block the order
# is the instruction's (include/tiles.h). One row and many go through the same instructions, so a row's bits depend on
# neither row count nor tile. Weights are opened as they are met. When there are more rows than two tiles, what was
# opened for the first two is kept for the others.

cdef enum:
    RUN_BLOCKS = 64         # most 32-k blocks of a run, when what was opened is kept
    PLANE_BLOCKS = 32       # the same of a plane, always
    RING = 4                # opened blocks of two panels that are there at once, when it is not
    PAIR_ROWS = 32          # rows of two tiles


cdef struct TileRun:
    # two neighbouring panels over a run of 32-k blocks, against up to PAIR_ROWS rows
    const uint8_t* x[2]         # each tile of rows, of the run
    Py_ssize_t step[2]          # bytes from one of its blocks to the next
    int rows
    const uint8_t* w            # of the first panel's run
    Py_ssize_t panel            # bytes from one panel's run to the next panel's
    Py_ssize_t stride           # bytes from one block to the next
    Py_ssize_t ahead            # bytes ahead to prefetch
    const float* scale          # PLANE: of the run, [2][16] a block, the next panel's PLANE_BLOCKS blocks on
    float power[2]              # that each panel's weights are opened times
    uint8_t* open               # opened blocks of both panels
    Py_ssize_t blocks
    Py_ssize_t slots            # a power of two of them, used in turn
    int panels                  # 1: there is no second one
    bint first                  # start from 0 instead of y
    float* y                    # of the first panel and the first row
    Py_ssize_t ldy


cdef inline void start_sums(bint first, int panels, int rows, const float* y, Py_ssize_t ldy) noexcept nogil:
    """Those of up to two tiles of rows by two panels: 0, or what y holds."""
    cdef const float* second = y + 16 * ldy
    mi_tile_zero(0)
    mi_tile_zero(1)
    mi_tile_zero(2)
    mi_tile_zero(3)
    if first:
        return
    mi_tile_load(0, y, ldy * sizeof(float))
    if panels == 2:
        mi_tile_load(1, y + PANEL, ldy * sizeof(float))
    if rows > 16:
        mi_tile_load(2, second, ldy * sizeof(float))
        if panels == 2:
            mi_tile_load(3, second + PANEL, ldy * sizeof(float))


cdef inline void store_sums(int panels, int rows, float* y, Py_ssize_t ldy) noexcept nogil:
    cdef float* second = y + 16 * ldy
    mi_tile_store(0, y, ldy * sizeof(float))
    if panels == 2:
        mi_tile_store(1, y + PANEL, ldy * sizeof(float))
    if rows > 16:
        mi_tile_store(2, second, ldy * sizeof(float))
        if panels == 2:
            mi_tile_store(3, second + PANEL, ldy * sizeof(float))


cdef inline void add_products(const bint both, const TileRun* t, Py_ssize_t b, const uint8_t* w) noexcept nogil:
    """Block b; both: of two tiles of rows."""
    mi_tile_load(4, t.x[0] + b * t.step[0], 64)
    mi_tile_load(6, w, 64)
    mi_tile_dot(0, 4, 6)
    mi_tile_load(7, w + OPEN_TILE, 64)
    mi_tile_dot(1, 4, 7)
    if both:
        mi_tile_load(5, t.x[1] + b * t.step[1], 64)
        mi_tile_dot(2, 5, 6)
        mi_tile_dot(3, 5, 7)


cdef inline void open_panel(
    const int fmt, const TileRun* t, const int p, vh powers, Py_ssize_t b, uint8_t* out,
) noexcept nogil:
    """Block b of a panel."""
    cdef int j
    cdef const uint8_t* w = t.w + p * t.panel + b * t.stride
    if fmt != PLANE:
        for j in range(9 if fmt == BYTES else 5):
            mi_prefetch_l2(w + t.ahead + 64 * j)
    open_block(fmt, w, t.scale + (p * PLANE_BLOCKS + b) * 2 * PANEL, t.power[p], powers, out)


cdef inline void open_and_multiply(const int fmt, const TileRun* t) noexcept nogil:
    """Opens the run, and multiplies the first rows by it.

    Without a second panel its place is left as it is, and its sums are not stored.
    """
    cdef vh first = vh_set1(t.power[0]), second = vh_set1(t.power[1])
    cdef Py_ssize_t b
    cdef uint8_t* open
    start_sums(t.first, t.panels, t.rows, t.y, t.ldy)
    for b in range(t.blocks):
        open = t.open + (b & (t.slots - 1)) * 2 * OPEN_TILE
        open_panel(fmt, t, 0, first, b, open)
        if t.panels == 2:
            open_panel(fmt, t, 1, second, b, open + OPEN_TILE)
        if t.rows > 16:
            add_products(True, t, b, open)
        else:
            add_products(False, t, b, open)
    store_sums(t.panels, t.rows, t.y, t.ldy)


cdef void tile_nibbles(const TileRun* t) noexcept nogil:
    open_and_multiply(NIBBLES, t)


cdef void tile_nibbles_min(const TileRun* t) noexcept nogil:
    open_and_multiply(NIBBLES_MIN, t)


cdef void tile_bytes(const TileRun* t) noexcept nogil:
    open_and_multiply(BYTES, t)


cdef void tile_plane(const TileRun* t) noexcept nogil:
    open_and_multiply(PLANE, t)


cdef void tile_opened(const TileRun* t) noexcept nogil:
    """Multiplies rows by a run that is open."""
    cdef Py_ssize_t b
    start_sums(t.first, t.panels, t.rows, t.y, t.ldy)
    if t.rows > 16:
        for b in range(t.blocks):
            add_products(True, t, b, t.open + b * 2 * OPEN_TILE)
    else:
        for b in range(t.blocks):
            add_products(False, t, b, t.open + b * 2 * OPEN_TILE)
    store_sums(t.panels, t.rows, t.y, t.ldy)


ctypedef void (*tile_t)(const TileRun* t) noexcept nogil

cdef tile_t TILES[4]
TILES[NIBBLES] = tile_nibbles
TILES[NIBBLES_MIN] = tile_nibbles_min
TILES[BYTES] = tile_bytes
TILES[PLANE] = tile_plane


cdef inline void shape_for(int* shape, int rows) noexcept nogil:
    """Tiles of so many rows; shape: those they have now."""
    if shape[0] != rows:
        mi_tiles_shape(min(rows, 16), max(rows - 16, 0))
        shape[0] = rows


cdef struct Rows:
    # those of activations that a matmul takes: [row, row + rows) of m
    const uint8_t* data
    Py_ssize_t m
    Py_ssize_t row
    Py_ssize_t rows


cdef void run_of_rows(int fmt, TileRun* t, const Rows* x, Py_ssize_t b, Py_ssize_t nb, int* shape) noexcept nogil:
    """All rows against a run of blocks from b of nb; t.y is of the first."""
    cdef Py_ssize_t r = x.row, at
    cdef int i
    cdef tile_t tile = TILES[fmt]
    while r < x.row + x.rows:
        t.rows = <int>min(PAIR_ROWS, x.row + x.rows - r)
        for i in range(2):
            at = min(r + 16 * i, x.m - 1)           # without a second tile, not read
            t.step[i] = tile_step(x.m, at)
            t.x[i] = x.data + at * nb * 64 + b * t.step[i]
        shape_for(shape, t.rows)
        tile(t)
        tile = tile_opened
        t.y += PAIR_ROWS * t.ldy
        r += PAIR_ROWS


cdef void unscale(const TileRun* t, const int8_t* exponent, float* y, Py_ssize_t m) noexcept nogil:
    """Sums of panels that were not opened times 2**EXPONENT into those of panels that were."""
    cdef Py_ssize_t i
    cdef int p, j
    cdef float factor
    for p in range(t.panels):
        if exponent[p] != EXPONENT:
            factor = power_of_two(EXPONENT - exponent[p])
            for i in range(m):
                for j in range(PANEL):
                    y[i * t.ldy + p * PANEL + j] = y[i * t.ldy + p * PANEL + j] * factor


cdef inline Py_ssize_t run_length(const PackedMatrix* w, Py_ssize_t m) noexcept nogil:
    """Blocks of 32 k of a run, all runs of about the same length."""
    cdef Py_ssize_t nb = w.k // QBLOCK, runs = 1
    if int_format(w) == PLANE:
        runs = (nb + PLANE_BLOCKS - 1) // PLANE_BLOCKS
    elif m > PAIR_ROWS:
        runs = (nb + RUN_BLOCKS - 1) // RUN_BLOCKS
    return (nb + runs - 1) // runs


cdef void tile_run(
    const PackedMatrix* w, Py_ssize_t p, Py_ssize_t b, Py_ssize_t blocks, const Rows* x, float* y, Py_ssize_t ldy,
    int* shape, float* scratch,
) noexcept nogil:
    """All rows against blocks [b, b + blocks) of panels p and p + 1, if there is one; y: of panel p."""
    # scratch: opened blocks of two panels; of a plane also the bytes, scales and minima of two panels
    cdef Plane plane
    cdef TileRun t
    cdef int fmt = int_format(w), i
    cdef uint8_t* bytes = <uint8_t*>scratch + RUN_BLOCKS * 2 * OPEN_TILE
    cdef float* scale = <float*>(bytes + 2 * PLANE_BLOCKS * 512)
    t.blocks, t.first = blocks, b == 0
    cdef Py_ssize_t nb = w.k // QBLOCK
    t.y, t.ldy = y, ldy
    t.open, t.slots = <uint8_t*>scratch, RUN_BLOCKS if x.rows > PAIR_ROWS else RING
    t.panels = <int>min(2, w.n_panels - p)
    t.scale = scale
    t.ahead = 2 * w.panel_bytes
    MIRO_SPAN(p, t.panels, w.n_panels)
    MIRO_SPAN(b, blocks, nb)
    MIRO_SPAN(0, blocks, RUN_BLOCKS if x.rows > PAIR_ROWS else nb)
    MIRO_SPAN(x.row, x.rows, x.m)
    t.power[1] = 0
    for i in range(t.panels):
        t.power[i] = power_of_two(w.exponent[p + i])
        if fmt == PLANE:
            MIRO_SPAN(0, blocks, PLANE_BLOCKS)
            plane.scale, plane.minimum = scale + i * PLANE_BLOCKS * 2 * PANEL, NULL
            unpack_plane(w, p + i, b, blocks, bytes + i * PLANE_BLOCKS * 512, &plane)
    if fmt == PLANE:
        t.w, t.panel, t.stride = bytes, PLANE_BLOCKS * 512, 512
    else:
        t.w = w.data + p * w.panel_bytes + b * w.block_bytes
        t.panel, t.stride = w.panel_bytes, w.block_bytes
    run_of_rows(fmt, &t, x, b, nb, shape)
    if b + blocks == nb:
        unscale(&t, w.exponent + p, y, x.rows)


cdef inline Py_ssize_t block_scratch_floats() noexcept nogil:
    """What tile_run needs."""
    return (RUN_BLOCKS * 2 * OPEN_TILE + 2 * PLANE_BLOCKS * 512) // 4 + 2 * PLANE_BLOCKS * 2 * PANEL


cdef void matmul_i8(
    mi_member* me, const PackedMatrix* w, const Activations* x, float* y, Py_ssize_t ldy, Py_ssize_t m, float* scratch
) noexcept nogil:
    # a run of k against all panels before the next one: the rows of that run stay in the second-level cache
    cdef Py_ssize_t i, pairs = (w.n_panels + 1) // 2, b = 0, nb = w.k // QBLOCK, run = run_length(w, m), blocks
    cdef Py_ssize_t n, first
    cdef Rows rows = Rows(<const uint8_t*>x.data, m, 0, m)
    cdef int shape = 0
    MIRO_ASSERT(ldy >= w.n_panels * PANEL)
    MIRO_SPAN(0, block_scratch_floats(), matmul_scratch_floats())
    while b < nb:
        blocks = min(run, nb - b)
        if b > 0:
            mi_meet(me)             # who goes on with a sum may be another one
        mi_deal(me, pairs)
        while True:
            n = mi_take(me, pairs, &first)
            if n == 0:
                break
            for i in range(first, first + n):
                tile_run(w, 2 * i, b, blocks, &rows, y + 2 * i * PANEL, ldy, &shape, scratch)
        b += blocks
    mi_tiles_release()


cdef void matmul_block(
    const PackedMatrix* w, Py_ssize_t b, const Activations* x, Py_ssize_t m, Py_ssize_t row, Py_ssize_t rows, float* y,
    int* state, float* scratch,
) noexcept nogil:
    """y [rows, 32] = the outputs [32 b, 32 b + 32) of some rows of m; `row` begins a tile of 16.

    state: what shape the tiles have, 0 at first.
    """
    cdef Rows some = Rows(<const uint8_t*>x.data, m, row, rows)
    cdef Py_ssize_t at = 0, nb = w.k // QBLOCK, run = run_length(w, rows), blocks
    while at < nb:
        blocks = min(run, nb - at)
        tile_run(w, 2 * b, at, blocks, &some, y, QBLOCK, state, scratch)
        at += blocks


cdef inline void matmul_blocks_done() noexcept nogil:
    mi_tiles_release()
