# FlashAttention-2 forward with online softmax (Dao 2023) over a paged KV cache, one path for decode rows and chunks.
#
# For each query row the keys are taken in tiles of KV_TILE tokens at absolute positions; tiles of one range of KV_RANGE
# tokens accumulate into a fresh (max, sum, acc), and ranges merge in ascending order. Nothing depends on which rows
# share a work item, so a token's output has the same bits as a decode row or inside any chunk, at any block size and
# thread count. K and V are read as stored; slots past a row's length are never used.

cdef enum:
    ATTN_ROWS = 48              # query rows (positions x heads of a KV group) a work item covers
    FEW_ROWS = 16               # rows up to which an item waits for memory, and prefetches
    KV_PANELS = 4               # most panels a tile covers: the keys of a KV_TILE


cdef struct ItemPlace:
    # which part of the batch an item is
    int row                     # of the batch
    int i                       # of the row's items: chunk by chunk, in each the KV heads
    const int32_t* table
    int head                    # KV head
    int first                   # position of its first token
    int n_tok
    Py_ssize_t token            # its first token's number in the batch


cdef struct AttentionItem:
    # query rows of one KV head: row r is head r % group of position first + r / group
    const KVCache* kv
    const AttentionParams* p
    const int32_t* table
    int head                    # KV head
    int group                   # query heads a KV head serves
    int first                   # position of row 0
    int rows
    float* s                    # [rows][KV_TILE] scores
    float* q                    # [rows][head_dim], scaled
    float* o                    # [rows][v_dim], of the range
    float* m                    # [rows] max of the range
    float* l                    # [rows] sum of the range
    float* o_all                # the same, over all ranges so far
    float* m_all
    float* l_all
    const ItemPlace* next       # of the item that comes after this one; its table is NULL if none does


cdef inline vf load_kv(const int dtype, const void* p, Py_ssize_t i) noexcept nogil:
    if dtype == KV_F16:
        return vf_load_f16(<const uint16_t*>p + i)
    return vf_load(<const float*>p + i)


cdef struct KVTile:
    # one call of kv_rows: rows of scores or queries against neighbouring panels of 16 keys, or of 16 value elements
    const float* a              # [rows][n], lda apart
    Py_ssize_t lda
    const void* w               # the pool's K or V
    Py_ssize_t at[KV_PANELS]    # first element of each panel
    Py_ssize_t ldw              # elements from one of the n to the next
    float* c                    # [rows][panels * 16], ldc apart
    Py_ssize_t ldc
    Py_ssize_t n
    bint first                  # start from 0 instead of c


cdef inline Py_ssize_t element_size(int dtype) noexcept nogil:
    return 2 if dtype == KV_F16 else 4


cdef inline void kv_tile(
    const int dtype, const int mr, const int np, const KVTile* t, int row, int panel,
) noexcept nogil:
    """c[mr][np * 16] = (c +) a[mr][n] w[n][np * 16], one chain along n an element. QK^T and PV alike."""
    cdef vf acc[24]             # every tile shape compiles everywhere; those in use keep to the registers
    cdef vf wv[16]
    cdef vf av
    cdef Py_ssize_t k, lda = t.lda, ldc = t.ldc, ldw = t.ldw
    cdef Py_ssize_t at[KV_PANELS]
    cdef const float* a = t.a + row * lda
    cdef float* c = t.c + row * ldc + panel * PANEL
    cdef int i, v
    for i in range(np):
        at[i] = t.at[panel + i]
    for i in range(mr):
        for v in range(np * MI_NV):
            acc[i * np * MI_NV + v] = vf_zero() if t.first else vf_load(c + i * ldc + v * MI_VL)
    for k in range(t.n):
        for v in range(np * MI_NV):
            wv[v] = load_kv(dtype, t.w, at[v // MI_NV] + k * ldw + v % MI_NV * MI_VL)
        for i in range(mr):
            av = vf_set1(a[i * lda + k])
            for v in range(np * MI_NV):
                acc[i * np * MI_NV + v] = vf_fma(av, wv[v], acc[i * np * MI_NV + v])
    for i in range(mr):
        for v in range(np * MI_NV):
            vf_store(c + i * ldc + v * MI_VL, acc[i * np * MI_NV + v])


cdef inline void kv_tile_rows(
    const int dtype, const int np, const KVTile* t, int row, int mr, int panel,
) noexcept nogil:
    """Pick the specialised tile; the shapes that kv_most_rows allows."""
    if mr == 1:
        kv_tile(dtype, 1, np, t, row, panel)
    elif mr == 2:
        kv_tile(dtype, 2, np, t, row, panel)
    elif mr == 3 and (np == 1 or MI_NV == 1):
        kv_tile(dtype, 3, np, t, row, panel)
    elif mr == 4 and (np * MI_NV <= 2 or MI_NV == 1):
        kv_tile(dtype, 4, np, t, row, panel)
    elif mr == 5 and (np * MI_NV <= 2 or MI_NV == 1):
        kv_tile(dtype, 5, np, t, row, panel)
    elif np * MI_NV <= 2 or MI_NV == 1:
        kv_tile(dtype, 6, np, t, row, panel)


cdef inline int kv_most_rows(int np) noexcept nogil:
    """Rows a tile takes with so many panels: what the registers hold."""
    if MI_NV == 1:
        return 6
    if MI_NV == 2:
        return 6 if np == 1 else 2
    return 3


cdef inline int kv_most_panels(int rows) noexcept nogil:
    """Panels a tile takes when there are so many rows: few rows keep the units busy with several."""
    if MI_NV == 1:
        return 4
    if MI_NV == 2:
        return 2 if rows <= 2 else 1
    return 1


cdef inline void kv_panels(const int dtype, const int np, const KVTile* t, int rows, int panel) noexcept nogil:
    """All rows against np panels, in balanced tiles."""
    cdef int i, row, tiles = (rows + kv_most_rows(np) - 1) // kv_most_rows(np)
    for i in range(tiles):
        row = rows * i // tiles
        kv_tile_rows(dtype, np, t, row, rows * (i + 1) // tiles - row, panel)


cdef inline void kv_rows(const int dtype, const KVTile* t, int rows, int panels) noexcept nogil:
    cdef int panel = 0, np
    while panel < panels:
        np = kv_most_panels(rows)
        while np > panels - panel:
            np >>= 1
        if np == 4 and MI_NV == 1:
            kv_panels(dtype, 4, t, rows, panel)
        elif np == 2 and MI_NV <= 2:
            kv_panels(dtype, 2, t, rows, panel)
        else:
            kv_panels(dtype, 1, t, rows, panel)
        panel += np


cdef void kv_rows_any(int dtype, const KVTile* t, int rows, int panels) noexcept nogil:
    if dtype == KV_F16:
        kv_rows(KV_F16, t, rows, panels)
    else:
        kv_rows(KV_F32, t, rows, panels)


cdef inline int first_key(const AttentionParams* p, int position) noexcept nogil:
    return max(0, position - p.window + 1) if p.window > 0 else 0


cdef inline int first_tile(const AttentionParams* p, int position) noexcept nogil:
    """Where the first tile begins that is read for a position."""
    return first_key(p, position) // KV_TILE * KV_TILE


cdef bint blocks_exist(const AttentionItem* it, Py_ssize_t table_size) noexcept nogil:
    """For the debug build: every block that the item reads is in its table, and in the pool."""
    cdef int i, bs = it.kv.block_size
    cdef int last = it.first + it.rows // it.group - 1
    for i in range(first_tile(it.p, it.first) // bs, last // bs + 1):
        MIRO_INDEX(i, table_size)
        MIRO_INDEX(it.table[i], it.kv.n_blocks)
    return True


cdef void score_tile(AttentionItem* it, int t0, int last) noexcept nogil:
    """s = q K^T for tokens [t0, t0 + KV_TILE) up to `last`, the latest any row may see."""
    cdef const KVCache* kv = it.kv
    cdef int bs = kv.block_size, b, c, panels = 0
    cdef KVTile t
    for b in range(KV_TILE // bs):
        if t0 + b * bs > last:
            break
        for c in range(bs // PANEL):
            t.at[panels] = (
                it.table[t0 // bs + b] * kv.k_block + <Py_ssize_t>it.head * kv.head_dim * bs + c * PANEL
            )
            panels += 1
    t.a, t.lda = it.q, kv.head_dim
    t.w, t.ldw = kv.k, bs
    t.c, t.ldc = it.s, KV_TILE
    t.n = kv.head_dim
    t.first = True
    kv_rows_any(kv.dtype, &t, it.rows, panels)


cdef void prefetch_keys(const KVCache* kv, const int32_t* table, int head, int t0, int last) noexcept nogil:
    """Ask for the keys of the tile at t0, up to token `last`."""
    cdef int b
    cdef Py_ssize_t i, size = element_size(kv.dtype), n = <Py_ssize_t>kv.head_dim * kv.block_size
    for b in range(t0 // kv.block_size, min(t0 + KV_TILE - 1, last) // kv.block_size + 1):
        for i in range(0, n * size, 64):
            mi_prefetch(<const uint8_t*>kv.k + (table[b] * kv.k_block + head * n) * size + i)


cdef void prefetch_values(const KVCache* kv, const int32_t* table, int head, int t0, int last) noexcept nogil:
    """Alike for the values."""
    cdef int b, bs = kv.block_size
    cdef Py_ssize_t i, base, size = element_size(kv.dtype)
    for b in range(t0 // bs, min(t0 + KV_TILE - 1, last) // bs + 1):
        base = (table[b] * kv.v_block + <Py_ssize_t>head * bs * kv.v_dim) * size
        for i in range(0, <Py_ssize_t>min(bs, last + 1 - b * bs) * kv.v_dim * size, 64):
            mi_prefetch(<const uint8_t*>kv.v + base + i)


cdef inline void mask_row(float* s, int lo, int hi) noexcept nogil:
    cdef int j
    for j in range(lo):
        s[j] = -INFINITY
    for j in range(hi, KV_TILE):
        s[j] = -INFINITY


cdef inline void cap_row(float* s, float cap) noexcept nogil:
    """s = cap * tanh(s / cap)."""
    cdef int j
    for j in range(KV_TILE):
        s[j] = cap * (<float>1.0 - <float>2.0 / (expf_fast(<float>2.0 * (s[j] / cap)) + <float>1.0))


cdef inline void softmax_row(float* s, float* m, float* l, float* o, int v_dim) noexcept nogil:
    """Online softmax over one row of a tile: s becomes exp(s - max); rescales the row's sum and accumulator."""
    cdef float lane[16]
    cdef float top, f
    cdef int j, t
    for j in range(16):
        lane[j] = s[j]
    for t in range(1, KV_TILE // 16):
        for j in range(16):
            lane[j] = s[t * 16 + j] if s[t * 16 + j] > lane[j] else lane[j]
    top = mi_fold16_max(lane)
    top = top if top > m[0] else m[0]
    if top > m[0]:
        f = expf_fast(m[0] - top)
        m[0] = top
        l[0] = l[0] * f
        for j in range(v_dim):
            o[j] = o[j] * f
    for j in range(16):
        lane[j] = 0
    for t in range(KV_TILE // 16):
        for j in range(16):
            f = expf_fast(s[t * 16 + j] - top)
            s[t * 16 + j] = f
            lane[j] = lane[j] + f
    l[0] = l[0] + mi_fold16(lane)


cdef void add_values(AttentionItem* it, int t0, int row, int rows, int lo, int hi) noexcept nogil:
    """o += s V for `rows` rows from `row`, over the tile's tokens [lo, hi) alone: the rest is never read."""
    cdef const KVCache* kv = it.kv
    cdef int bs = kv.block_size, b, c, c0, j0, j1
    cdef Py_ssize_t base
    cdef KVTile t
    t.lda, t.ldc = KV_TILE, kv.v_dim
    t.w, t.ldw = kv.v, kv.v_dim
    t.first = False
    for b in range(lo // bs, (hi + bs - 1) // bs):
        j0 = max(lo, b * bs)
        j1 = min(hi, (b + 1) * bs)
        base = it.table[t0 // bs + b] * kv.v_block + (<Py_ssize_t>it.head * bs + j0 - b * bs) * kv.v_dim
        t.a = it.s + row * KV_TILE + j0
        t.n = j1 - j0
        for c0 in range(0, kv.v_dim // PANEL, 4):     # 4: KV_PANELS, which as an enum would make this no C loop
            for c in range(c0, min(c0 + KV_PANELS, kv.v_dim // PANEL)):
                t.at[c - c0] = base + c * PANEL
            t.c = it.o + row * kv.v_dim + c0 * PANEL
            kv_rows_any(kv.dtype, &t, rows, min(KV_PANELS, kv.v_dim // PANEL - c0))


cdef void attend_tile(AttentionItem* it, int t0) noexcept nogil:
    cdef int positions = it.rows // it.group, i, r, row, lo, hi
    cdef int last = it.first + positions - 1
    cdef int seen_by_all = 0    # tokens of the tile, from its start, that every row sees
    if first_key(it.p, last) <= t0:
        seen_by_all = max(0, min(KV_TILE, it.first + 1 - t0))
    if it.rows <= FEW_ROWS:     # more rows take longer to compute than the memory takes to answer
        prefetch_values(it.kv, it.table, it.head, t0, last)
    score_tile(it, t0, last)
    if it.rows <= FEW_ROWS:
        if t0 + KV_TILE <= last:
            prefetch_keys(it.kv, it.table, it.head, t0 + KV_TILE, last)
        elif it.next.table != NULL:
            prefetch_keys(it.kv, it.next.table, it.next.head, first_tile(it.p, it.next.first), it.next.first)
    for i in range(positions):
        lo = max(0, first_key(it.p, it.first + i) - t0)
        hi = min(KV_TILE, it.first + i + 1 - t0)
        if lo >= hi:
            continue
        for r in range(it.group):
            row = i * it.group + r
            if it.p.soft_cap > 0:
                cap_row(it.s + row * KV_TILE, it.p.soft_cap)
            mask_row(it.s + row * KV_TILE, lo, hi)
            softmax_row(it.s + row * KV_TILE, it.m + row, it.l + row, it.o + row * it.kv.v_dim, it.kv.v_dim)
    if seen_by_all > 0:
        add_values(it, t0, 0, it.rows, 0, seen_by_all)
    if seen_by_all == KV_TILE:
        return
    for i in range(positions):
        lo = max(seen_by_all, first_key(it.p, it.first + i) - t0)
        hi = min(KV_TILE, it.first + i + 1 - t0)
        if lo < hi:
            add_values(it, t0, i * it.group, it.group, lo, hi)


cdef void merge_range(AttentionItem* it) noexcept nogil:
    """(m, l, o) of a range into the totals."""
    cdef int r, j, d = it.kv.v_dim
    cdef float top, a, b
    cdef const float* o
    cdef float* total
    for r in range(it.rows):
        if it.l[r] == 0:                # no token of this range is visible to the row
            continue
        top = it.m[r] if it.m[r] > it.m_all[r] else it.m_all[r]
        a = expf_fast(it.m_all[r] - top)
        b = expf_fast(it.m[r] - top)
        it.m_all[r] = top
        it.l_all[r] = mi_fma(it.l_all[r], a, it.l[r] * b)
        o, total = it.o + r * d, it.o_all + r * d
        for j in range(d):
            total[j] = mi_fma(total[j], a, o[j] * b)


cdef void attend(AttentionItem* it) noexcept nogil:
    """All ranges that some row of the item sees."""
    cdef int last = it.first + it.rows // it.group - 1
    cdef int r, i, t, g
    for i in range(it.rows):
        it.m_all[i] = -INFINITY
        it.l_all[i] = 0
    memset(it.o_all, 0, it.rows * it.kv.v_dim * sizeof(float))
    for g in range(first_key(it.p, it.first) // KV_RANGE, last // KV_RANGE + 1):
        for i in range(it.rows):
            it.m[i] = -INFINITY
            it.l[i] = 0
        memset(it.o, 0, it.rows * it.kv.v_dim * sizeof(float))
        for r in range(KV_RANGE // KV_TILE):
            t = g * KV_RANGE + r * KV_TILE
            if t > last:
                break
            if t >= first_tile(it.p, it.first):     # what has left the window may have no blocks any more
                attend_tile(it, t)
        merge_range(it)


cdef void attend_rows(AttentionItem* it, const float* q, Py_ssize_t ldq, float* out, Py_ssize_t ldo) noexcept nogil:
    """Scale the queries, attend, divide by the sums. q, out: row of the item's first token."""
    cdef int r, j, d = it.kv.head_dim
    cdef float scale = it.p.scale, inverse
    cdef const float* src
    cdef float* dst
    for r in range(it.rows):
        src = q + (r // it.group) * ldq + (it.head * it.group + r % it.group) * d
        dst = it.q + r * d
        for j in range(d):
            dst[j] = src[j] * scale
    attend(it)
    for r in range(it.rows):
        src = it.o_all + r * it.kv.v_dim
        dst = out + (r // it.group) * ldo + (it.head * it.group + r % it.group) * d
        inverse = <float>1.0 / it.l_all[r]
        for j in range(d):
            dst[j] = src[j] * inverse


cdef void quantise_output(
    const AttentionItem* it, const float* out, Py_ssize_t ldo, Py_ssize_t token, const Activations* quantised,
) noexcept nogil:
    """The item's part of out, its first row being `token`, in int8: nobody else writes those rows of those blocks."""
    cdef int width = it.group * it.kv.head_dim, b
    cdef Py_ssize_t t, nb = it.p.n_heads * it.kv.head_dim // QBLOCK
    MIRO_ASSERT(width % QBLOCK == 0)
    for t in range(token, token + it.rows // it.group):
        for b in range(it.head * width // QBLOCK, (it.head + 1) * width // QBLOCK):
            quantise_rows(
                out + t * ldo + b * QBLOCK, ldo, 1, <int>(t % TILE_ROWS), quantised.block + t // TILE_ROWS * nb + b,
            )


cdef void place_item(
    const BatchRows* batch, const KVCache* kv, int span, int row, int i, ItemPlace* at,
) noexcept nogil:
    """The i-th item counted from the first of `row`; a NULL table when the batch has none so far on."""
    cdef int n
    at.table = NULL
    while row < batch.n_rows:
        n = (batch.n_tok[row] + span - 1) // span * kv.n_kv_heads
        if i < n:
            MIRO_INDEX(batch.slot[row], batch.n_slots)
            MIRO_SPAN(batch.offset[row], batch.n_tok[row], batch.n_tokens)
            MIRO_ASSERT(batch.first_pos[row] >= 0)
            n = i // kv.n_kv_heads * span
            at.row, at.i = row, i
            at.table = batch.table + batch.slot[row] * batch.table_stride
            at.head = i % kv.n_kv_heads
            at.first = batch.first_pos[row] + n
            at.n_tok = min(span, batch.n_tok[row] - n)
            at.token = batch.offset[row] + n
            return
        i -= n
        row += 1


cdef void attention(
    int th, int nth, const BatchRows* batch, const KVCache* kv, const AttentionParams* p, const float* q,
    Py_ssize_t ldq, float* out, Py_ssize_t ldo, const Activations* quantised, float* scratch,
) noexcept nogil:
    cdef AttentionItem it
    cdef ItemPlace at, after
    cdef int group = p.n_heads // kv.n_kv_heads
    cdef int span = max(1, ATTN_ROWS // group)          # positions an item covers
    it.kv = kv
    it.p = p
    it.group = group
    it.next = &after
    it.s = scratch
    it.q = it.s + span * group * KV_TILE
    it.o = it.q + span * group * kv.head_dim
    it.o_all = it.o + span * group * kv.v_dim
    it.m = it.o_all + span * group * kv.v_dim
    it.l = it.m + span * group
    it.m_all = it.l + span * group
    it.l_all = it.m_all + span * group
    MIRO_ASSERT(KV_TILE % kv.block_size == 0)
    MIRO_SPAN(0, it.l_all + span * group - scratch, attention_scratch_floats(kv.head_dim))
    place_item(batch, kv, span, 0, th, &at)
    while at.table != NULL:
        place_item(batch, kv, span, at.row, at.i + nth, &after)
        it.table, it.head, it.first, it.rows = at.table, at.head, at.first, at.n_tok * group
        MIRO_ASSERT(blocks_exist(&it, batch.table_stride))
        attend_rows(&it, q + at.token * ldq, ldq, out + at.token * ldo, ldo)
        if quantised != NULL:
            quantise_output(&it, out, ldo, at.token, quantised)
        at = after


cdef inline void store_kv(int dtype, void* p, Py_ssize_t i, float x) noexcept nogil:
    if dtype == KV_F16:
        (<uint16_t*>p)[i] = mi_f32_to_f16(x)
    else:
        (<float*>p)[i] = x


cdef void write_token(
    const KVCache* kv, Py_ssize_t block, int at, const float* k, const float* v, const float* v_bias,
) noexcept nogil:
    cdef Py_ssize_t base
    cdef int h, j, d = kv.head_dim
    cdef float x
    for h in range(kv.n_kv_heads):
        base = block * kv.k_block + <Py_ssize_t>h * d * kv.block_size + at
        for j in range(d):
            store_kv(kv.dtype, kv.k, base + j * kv.block_size, k[h * d + j])
        base = block * kv.v_block + (<Py_ssize_t>h * kv.block_size + at) * kv.v_dim
        for j in range(d):
            x = v[h * d + j]
            if v_bias != NULL:
                x = x + v_bias[h * d + j]
            store_kv(kv.dtype, kv.v, base + j, x)


cdef void kv_write(
    int th, int nth, const BatchRows* batch, const KVCache* kv, const float* k, Py_ssize_t ldk, const float* v,
    Py_ssize_t ldv, const float* v_bias,
) noexcept nogil:
    cdef Py_ssize_t t, first, last
    cdef int r, position
    cdef const int32_t* table
    for r in range(batch.n_rows):
        MIRO_INDEX(batch.slot[r], batch.n_slots)
        MIRO_SPAN(batch.offset[r], batch.n_tok[r], batch.n_tokens)
        first = max(share(batch.n_tokens, th, nth), batch.offset[r])
        last = min(share(batch.n_tokens, th + 1, nth), batch.offset[r] + batch.n_tok[r])
        table = batch.table + batch.slot[r] * batch.table_stride
        for t in range(first, last):
            position = batch.first_pos[r] + <int>(t - batch.offset[r])
            MIRO_INDEX(position // kv.block_size, batch.table_stride)
            MIRO_INDEX(table[position // kv.block_size], kv.n_blocks)
            write_token(
                kv, table[position // kv.block_size], position % kv.block_size, k + t * ldk, v + t * ldv, v_bias,
            )
