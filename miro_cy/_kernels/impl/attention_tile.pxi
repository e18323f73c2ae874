# The products of attention in tile registers, over a cache of bfloat16, which lies as they read it. Queries and weights
# of the values are rounded to bfloat16 too (to nearest), sums are of float32. Other caches are multiplied in floats.
#
# What a row does not see has the weight 0, and tokens that no row of an item sees are taken as zeros, whatever the
# cache holds there. So a row's bits depend neither on the rows beside it nor on whether its zeros were added: the
# driver makes all zeros positive in the end.

cdef enum:
    ROW_TILES = 4               # of 16 rows, most of an item
    ROW_TILE = 1024             # bytes of 16 rows x 32
    TOKEN_BLOCKS = KV_TILE // 32


cdef inline bint in_tiles(const AttentionItem* it) noexcept nogil:
    return it.kv.dtype == KV_BF16


cdef inline int head_blocks(const AttentionItem* it) noexcept nogil:
    """Of 32 dimensions."""
    return it.kv.k_dim // QBLOCK


cdef inline uint8_t* query_tiles(const AttentionItem* it) noexcept nogil:
    """[row tile][head block][16 rows][32]"""
    return it.tiles


cdef inline uint8_t* weight_tiles(const AttentionItem* it) noexcept nogil:
    """[row tile][TOKEN_BLOCKS][16 rows][32]"""
    return query_tiles(it) + ROW_TILES * head_blocks(it) * ROW_TILE


cdef inline uint8_t* value_tiles(const AttentionItem* it) noexcept nogil:
    """[TOKEN_BLOCKS][v_dim / 16][16 pairs][16][2], those that are not taken from the cache"""
    return weight_tiles(it) + ROW_TILES * TOKEN_BLOCKS * ROW_TILE


cdef inline Py_ssize_t item_bytes(const AttentionItem* it) noexcept nogil:
    return value_tiles(it) - it.tiles + TOKEN_BLOCKS * (it.kv.v_dim // PANEL) * OPEN_TILE


cdef inline void put_32(const float* x, int n, uint8_t* out) noexcept nogil:
    """A row's 32 elements, or n and zeros."""
    cdef float filled[QBLOCK]
    if n < QBLOCK:
        memset(filled, 0, sizeof(filled))
        memcpy(filled, x, n * sizeof(float))
        x = filled
    mi_store_rounded(out, vf_load(x), vf_load(x + 16))


cdef inline void begin_item(AttentionItem* it) noexcept nogil:
    """The queries are there. Rows that fill the last tile up are zeros, in queries and weights."""
    cdef int r, b, blocks = head_blocks(it), d = it.kv.head_dim
    if not in_tiles(it):
        return
    MIRO_SPAN(0, it.rows, ROW_TILES * 16)
    if it.rows > 16 and it.rows % 16:
        memset(query_tiles(it) + it.rows // 16 * blocks * ROW_TILE, 0, blocks * ROW_TILE)
        memset(weight_tiles(it) + it.rows // 16 * TOKEN_BLOCKS * ROW_TILE, 0, TOKEN_BLOCKS * ROW_TILE)
    for r in range(it.rows):
        for b in range(blocks):
            put_32(
                it.q + r * d + b * QBLOCK, d - b * QBLOCK,
                query_tiles(it) + ((r // 16 * blocks + b) * 16 + r % 16) * 64,
            )


cdef inline int whole_tiles(AttentionItem* it) noexcept nogil:
    """Gives the tiles their shape, the item's rows or whole tiles of them if there are more than one; how many."""
    shape_for(&it.shape, it.rows if it.rows <= 16 else PAIR_ROWS)
    return it.rows if it.rows <= 16 else (it.rows + 15) // 16 * 16


cdef inline void add_block(
    const bint both, const uint8_t* x, Py_ssize_t row_tile, const uint8_t* first, const uint8_t* second,
) noexcept nogil:
    """Sums += a block of 32 of one or two row tiles, `row_tile` bytes apart, by two panels."""
    mi_tile_load(4, x, 64)
    mi_tile_load(6, first, 64)
    mi_tile_dot(0, 4, 6)
    mi_tile_load(7, second, 64)
    mi_tile_dot(1, 4, 7)
    if both:
        mi_tile_load(5, x + row_tile, 64)
        mi_tile_dot(2, 5, 6)
        mi_tile_dot(3, 5, 7)


cdef inline void add_block_of(
    int rows, const uint8_t* x, Py_ssize_t row_tile, const uint8_t* first, const uint8_t* second,
) noexcept nogil:
    if rows > 16:
        add_block(True, x, row_tile, first, second)
    else:
        add_block(False, x, row_tile, first, second)


cdef void score_tiles(AttentionItem* it, int t0, int last) noexcept nogil:
    """s = q K^T up to `last` and as far as its panel goes; before the window, of any block that exists."""
    cdef const KVCache* kv = it.kv
    cdef int bs = kv.block_size, blocks = head_blocks(it), rows = whole_tiles(it), n, r, p, b, t
    cdef int panels = (min(KV_TILE, last + 1 - t0) + PANEL - 1) // PANEL
    cdef const uint8_t* key[KV_PANELS + 1]
    cdef const uint8_t* x
    cdef Py_ssize_t step = bs // PANEL * OPEN_TILE      # from 32 dimensions to the next
    for p in range(panels):
        t = t0 + p * PANEL
        key[p] = <const uint8_t*>kv.k + 2 * (
            it.table[max(t // bs, it.first_block)] * kv.k_block + <Py_ssize_t>it.head * kv.k_dim * bs
        ) + t % bs // PANEL * OPEN_TILE
    key[panels] = key[panels - 1]                       # beside an odd one: its scores are masked
    for r in range(0, rows, 32):            # PAIR_ROWS, which as an enum would make this no C loop
        n = min(PAIR_ROWS, rows - r)
        x = query_tiles(it) + r // 16 * blocks * ROW_TILE
        for p in range(0, panels, 2):
            start_sums(True, 2, n, it.s, KV_TILE)
            for b in range(blocks):
                add_block_of(n, x + b * ROW_TILE, blocks * ROW_TILE, key[p] + b * step, key[p + 1] + b * step)
            store_sums(2, n, it.s + r * KV_TILE + p * PANEL, KV_TILE)


cdef inline Py_ssize_t values_at(const AttentionItem* it, int t) noexcept nogil:
    """Element at which the pair of token t begins, in the first panel; panels are 16 * block_size apart."""
    cdef const KVCache* kv = it.kv
    return (
        it.table[t // kv.block_size] * kv.v_block + <Py_ssize_t>it.head * kv.v_dim * kv.block_size
        + t % kv.block_size // 2 * 32
    )


cdef void copy_values(const AttentionItem* it, int t0, int lo, int hi, uint8_t* out) noexcept nogil:
    """out [v_dim / 16][16 pairs][16][2] = 32 tokens from t0 on, zeros for those outside [lo, hi)."""
    cdef Py_ssize_t panel = it.kv.block_size * 16 * 2
    cdef const uint8_t* v
    cdef int i, p, panels = it.kv.v_dim // PANEL
    cdef int32_t mask
    for i in range(0, QBLOCK, 2):
        mask = (0x0000ffff if lo <= i < hi else 0) | (<int32_t>0xffff0000 if lo <= i + 1 < hi else 0)
        if mask == 0:
            for p in range(panels):
                memset(out + p * OPEN_TILE + i * 32, 0, 64)
            continue
        v = <const uint8_t*>it.kv.v + 2 * values_at(it, t0 + i)
        for p in range(panels):
            vi_store(out + p * OPEN_TILE + i * 32, vi_and(vi_load(v + p * panel), mask))


cdef struct ValueBlock:
    # 32 tokens' values
    const uint8_t* at
    Py_ssize_t panel        # bytes from 16 dimensions to the next


cdef inline ValueBlock values_of(const AttentionItem* it, int t0, int b, int lo, int hi) noexcept nogil:
    """Block b of the tile at t0: of the cache, or a copy where that has more, or less in one place, than is seen."""
    cdef ValueBlock v
    if it.kv.block_size >= QBLOCK and lo <= b * QBLOCK and hi >= (b + 1) * QBLOCK:
        v.at = <const uint8_t*>it.kv.v + 2 * values_at(it, t0 + b * QBLOCK)
        v.panel = it.kv.block_size * 16 * 2
    else:
        v.at = value_tiles(it) + b * (it.kv.v_dim // PANEL) * OPEN_TILE
        v.panel = OPEN_TILE
        copy_values(it, t0 + b * QBLOCK, lo - b * QBLOCK, hi - b * QBLOCK, <uint8_t*>v.at)
    return v


cdef void multiply_values(const AttentionItem* it, int t0, int lo, int hi, int rows, float* o) noexcept nogil:
    """o [rows, v_dim] += the tile's weights times its tokens [lo, hi)."""
    cdef ValueBlock block[TOKEN_BLOCKS]
    cdef const ValueBlock* v
    cdef const uint8_t* x
    cdef int first = lo // QBLOCK, end = (hi + QBLOCK - 1) // QBLOCK, ld = it.kv.v_dim, n, panels, r, p, b
    for b in range(first, end):
        block[b] = values_of(it, t0, b, lo, hi)
    for r in range(0, rows, 32):            # PAIR_ROWS, which as an enum would make this no C loop
        n = min(PAIR_ROWS, rows - r)
        x = weight_tiles(it) + r // 16 * TOKEN_BLOCKS * ROW_TILE
        for p in range(0, ld // PANEL, 2):
            panels = min(2, ld // PANEL - p)
            start_sums(False, panels, n, o + r * ld + p * PANEL, ld)
            for b in range(first, end):
                v = &block[b]
                add_block_of(
                    n, x + b * ROW_TILE, TOKEN_BLOCKS * ROW_TILE, v.at + p * v.panel,
                    v.at + (p + panels - 1) * v.panel,
                )
            store_sums(panels, n, o + r * ld + p * PANEL, ld)


cdef inline void put_weights(const AttentionItem* it, int row, int lo, int hi, int to) noexcept nogil:
    """Row of s into row `to` of the tiles, zeros if it sees nothing; what it does not see beside that is zero."""
    cdef float* s = it.s + row * KV_TILE
    cdef uint8_t* out = weight_tiles(it) + (to // 16 * TOKEN_BLOCKS * 16 + to % 16) * 64
    cdef int b
    if lo >= hi:
        memset(s, 0, KV_TILE * sizeof(float))
    for b in range(TOKEN_BLOCKS):
        put_32(s + b * QBLOCK, QBLOCK, out + b * ROW_TILE)


cdef bint finite_values(const AttentionItem* it, int t0, int lo, int hi) noexcept nogil:
    """Whether zero times any value of these tokens is zero; those beside them in a pair count."""
    cdef const uint16_t* v
    cdef uint16_t top = 0, x
    cdef int t, p, j, panels = it.kv.v_dim // PANEL
    for t in range(lo & ~1, hi, 2):
        for p in range(panels):
            v = <const uint16_t*>it.kv.v + values_at(it, t0 + t) + p * it.kv.block_size * 16
            for j in range(2 * PANEL):
                x = v[j] & 0x7fff
                top = x if x > top else top
    return top < 0x7f80


cdef void add_position(AttentionItem* it, int t0, int i) noexcept nogil:
    """The values for the rows of one position of several, as if there were no others."""
    cdef int lo = first_visible(it, i, t0), hi = end_visible(it, i, t0), at = i * it.group, r
    MIRO_ASSERT(it.group <= ATTN_ROWS // 2)     # or there would be one position alone
    if lo >= hi:
        return
    for r in range(it.group):
        put_weights(it, at + r, lo, hi, r)
    shape_for(&it.shape, it.group)
    multiply_values(it, t0, lo, hi, it.group, it.o + at * it.kv.v_dim)


cdef void add_tiles(AttentionItem* it, int t0) noexcept nogil:
    """o += s V for what each row sees."""
    cdef int positions = it.rows // it.group, i, r
    cdef int lo = first_visible(it, 0, t0), hi = end_visible(it, positions - 1, t0)
    cdef bint alike = first_visible(it, positions - 1, t0) == lo and end_visible(it, 0, t0) == hi
    if not alike and not finite_values(it, t0, lo, hi):
        for i in range(positions):
            add_position(it, t0, i)
        begin_item(it)      # the zeros that were written over
        return
    for i in range(positions):
        for r in range(i * it.group, (i + 1) * it.group):
            put_weights(it, r, first_visible(it, i, t0), end_visible(it, i, t0), r)
    multiply_values(it, t0, lo, hi, whole_tiles(it), it.o)


cdef void ask_for_next(const AttentionItem* it, int t0, int last, bint keys) noexcept nogil:
    """Keys or values of the next tile: products take less time than memory, so there is none to win within one."""
    cdef const KVCache* kv = it.kv
    cdef TokenRange r = next_tokens(it, t0, last)
    cdef int bs = kv.block_size, b, n, p, i
    cdef const uint8_t* at
    if r.table == NULL:
        return
    for b in range(r.first // bs, r.last // bs + 1):
        n = min(bs, r.last + 1 - b * bs)                # tokens of the block, from its first
        if keys:
            at = <const uint8_t*>kv.k + 2 * (r.table[b] * kv.k_block + <Py_ssize_t>r.head * kv.k_dim * bs)
            for p in range(kv.k_dim // QBLOCK):
                for i in range((n + 15) // 16 * 16):
                    mi_prefetch_l2(at + p * bs * 64 + i * 64)
        else:
            at = <const uint8_t*>kv.v + 2 * (r.table[b] * kv.v_block + <Py_ssize_t>r.head * kv.v_dim * bs)
            for p in range(kv.v_dim // PANEL):
                for i in range((n + 1) // 2):
                    mi_prefetch_l2(at + p * bs * 32 + i * 64)


cdef inline void ask_before_scores(const AttentionItem* it, int t0, int last) noexcept nogil:
    if in_tiles(it):
        ask_for_next(it, t0, last, True)
    else:
        ask_for_values(it, t0, last)


cdef inline void ask_after_scores(const AttentionItem* it, int t0, int last) noexcept nogil:
    if in_tiles(it):
        ask_for_next(it, t0, last, False)
    else:
        ask_for_keys(it, t0, last)


cdef inline void score_tile(AttentionItem* it, int t0, int last) noexcept nogil:
    if in_tiles(it):
        score_tiles(it, t0, last)
    else:
        score_floats(it, t0, last)


cdef inline void add_tile(AttentionItem* it, int t0, int last) noexcept nogil:
    if in_tiles(it):
        add_tiles(it, t0)
    else:
        add_floats(it, t0, last)


cdef inline void items_done() noexcept nogil:
    mi_tiles_release()
