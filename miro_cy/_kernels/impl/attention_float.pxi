# The products of attention in floats: scores q K^T of a tile of keys, and o += s V.

cdef void score_floats(AttentionItem* it, int t0, int last) noexcept nogil:
    """s = q K^T for tokens [t0, t0 + KV_TILE) up to `last`, the latest any row may see.

    Where a tile begins before the window, the columns that nobody sees come from a block that exists.
    """
    cdef const KVCache* kv = it.kv
    cdef int bs = kv.block_size, b, c, panels = 0
    cdef KVTile t
    for b in range(KV_TILE // bs):
        if t0 + b * bs > last:
            break
        for c in range(bs // PANEL):
            t.at[panels] = (
                it.table[max(t0 // bs + b, it.first_block)] * kv.k_block
                + <Py_ssize_t>it.head * kv.head_dim * bs + c * PANEL
            )
            panels += 1
    t.a, t.lda = it.q, kv.head_dim
    t.w, t.ldw = kv.k, bs
    t.c, t.ldc = it.s, KV_TILE
    t.n = kv.head_dim
    t.first = True
    t.wide = it.wide
    kv_rows_any(kv.dtype, &t, it.rows, panels)


cdef void add_values(AttentionItem* it, int t0, int row, int rows, int lo, int hi) noexcept nogil:
    """o += s V for `rows` rows from `row`, over the tile's tokens [lo, hi) alone: the rest is never read."""
    cdef const KVCache* kv = it.kv
    cdef int bs = kv.block_size, b, c, c0, j0, j1
    cdef Py_ssize_t base
    cdef KVTile t
    t.lda, t.ldc = KV_TILE, kv.v_dim
    t.first = False
    t.wide = it.wide
    for b in range(lo // bs, (hi + bs - 1) // bs):
        j0 = max(lo, b * bs)
        j1 = min(hi, (b + 1) * bs)
        base = it.table[t0 // bs + b] * kv.v_block + (<Py_ssize_t>it.head * bs + j0 - b * bs) * kv.v_dim
        t.a = it.s + row * KV_TILE + j0
        t.n = j1 - j0
        for c0 in range(0, kv.v_dim // PANEL, 4):     # 4: KV_PANELS, which as an enum would make this no C loop
            for c in range(c0, min(c0 + KV_PANELS, kv.v_dim // PANEL)):
                t.at[c - c0] = base + c * PANEL
            t.w, t.ldw = kv.v, kv.v_dim
            t.c = it.o + row * kv.v_dim + c0 * PANEL
            kv_rows_any(kv.dtype, &t, rows, min(KV_PANELS, kv.v_dim // PANEL - c0))


cdef void add_floats(AttentionItem* it, int t0, int last) noexcept nogil:
    """o += s V for a tile's tokens up to `last`: at once for those that all rows see."""
    cdef int positions = it.rows // it.group, i, lo, hi
    cdef int seen_by_all = 0    # tokens of the tile, from its start
    if first_key(it.p, last) <= t0:
        seen_by_all = max(0, min(KV_TILE, it.first + 1 - t0))
    if seen_by_all > 0:
        add_values(it, t0, 0, it.rows, 0, seen_by_all)
    if seen_by_all == KV_TILE:
        return
    for i in range(positions):
        lo, hi = max(seen_by_all, first_visible(it, i, t0)), end_visible(it, i, t0)
        if lo < hi:
            add_values(it, t0, i * it.group, it.group, lo, hi)


cdef void ask_for_values(const AttentionItem* it, int t0, int last) noexcept nogil:
    """Of this tile, while it is scored."""
    prefetch_values(
        it.kv, it.table, it.head, max(t0, it.first_block * it.kv.block_size), min(t0 + KV_TILE - 1, last),
    )


cdef void ask_for_keys(const AttentionItem* it, int t0, int last) noexcept nogil:
    """Of the next tile, while this one's weights are computed."""
    cdef TokenRange r = next_tokens(it, t0, last)
    if r.table != NULL:
        prefetch_keys(it.kv, r.table, r.head, r.first, r.last)
