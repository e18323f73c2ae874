# FlashAttention-2 forward with online softmax (Dao 2023) over a paged KV cache, one path for decode rows and chunks.
#
# For each query row the keys are taken in tiles of KV_TILE tokens at absolute positions; tiles of one range of KV_RANGE
# tokens accumulate into a fresh (max, sum, acc), and ranges merge in ascending order. Nothing depends on which rows
# share a work item, so a token's output has the same bits as a decode row or inside any chunk, at any block size and
# thread count. K and V are read as stored; slots past a row's length are never used. The scales of an int8 cache belong
# to tokens: K's multiply the scores, V's the probabilities, one number a column, and the tiles multiply bare integers.

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


cdef inline void scale_row(float* s, const float* by) noexcept nogil:
    cdef int j
    for j in range(KV_TILE):
        s[j] = s[j] * by[j]


cdef inline float largest(const float* s, float top) noexcept nogil:
    """Of `top` and a row's scores of a tile."""
    cdef float lane[16]
    cdef float x
    cdef int j, t
    for j in range(16):
        lane[j] = s[j]
    for t in range(1, KV_TILE // 16):
        for j in range(16):
            lane[j] = s[t * 16 + j] if s[t * 16 + j] > lane[j] else lane[j]
    x = mi_fold16_max(lane)
    return x if x > top else top


cdef inline void exponentials(float* s, float top, float* l) noexcept nogil:
    """s becomes exp(s - top), and the row's sums, one for each of 16 columns, grow by them."""
    cdef float lane[16]
    cdef float f
    cdef int j, t
    for j in range(16):
        lane[j] = l[j]
    for t in range(KV_TILE // 16):
        for j in range(16):
            f = expf_fast(s[t * 16 + j] - top)
            s[t * 16 + j] = f
            lane[j] = lane[j] + f
    for j in range(16):
        l[j] = lane[j]


cdef inline void finish_scores(AttentionItem* it, int row, int lo, int hi) noexcept nogil:
    """The row's scores of a tile, tokens [lo, hi) being visible, and the maximum with them."""
    cdef float* s = it.s + row * KV_TILE
    if it.kv.dtype == KV_I8:
        scale_row(s, it.k_scale)
    if it.p.soft_cap > 0:
        cap_row(s, it.p.soft_cap)
    mask_row(s, lo, hi)
    it.top[row] = largest(s, it.m[row])


cdef inline void scale_sums(AttentionItem* it, int row, float by) noexcept nogil:
    cdef float* l = it.l + row * 16
    cdef float* o = it.o + row * it.kv.v_dim
    cdef int j
    for j in range(16):
        l[j] = l[j] * by
    for j in range(it.kv.v_dim):
        o[j] = o[j] * by


cdef void raise_maxima(AttentionItem* it) noexcept nogil:
    """Rows whose maximum is a new one: what they have summed up is of the old one."""
    cdef float by[16]
    cdef float top
    cdef int r, j
    for r in range(0, it.rows, 16):
        for j in range(16):
            top = it.top[r + j]
            by[j] = <float>1.0 if top == it.m[r + j] else expf_fast(it.m[r + j] - top)
            it.m[r + j] = top
        for j in range(min(16, it.rows - r)):
            if by[j] != 1:
                scale_sums(it, r + j, by[j])


cdef inline void weigh_row(AttentionItem* it, int row) noexcept nogil:
    """The row's scores into weights of the values."""
    cdef float* s = it.s + row * KV_TILE
    exponentials(s, it.m[row], it.l + row * 16)
    if it.kv.dtype == KV_I8:    # after the sum: it is of probabilities
        scale_row(s, it.v_scale)


cdef void weigh_tile(AttentionItem* it, int t0) noexcept nogil:
    """Online softmax: scores of a tile into weights, all maxima first."""
    cdef int i, r, lo, hi, positions = it.rows // it.group
    memcpy(it.top, it.m, (it.rows + 15) // 16 * 16 * sizeof(float))
    for i in range(positions):
        lo, hi = first_visible(it, i, t0), end_visible(it, i, t0)
        if lo < hi:
            for r in range(i * it.group, (i + 1) * it.group):
                finish_scores(it, r, lo, hi)
    raise_maxima(it)
    for i in range(positions):
        if first_visible(it, i, t0) < end_visible(it, i, t0):
            for r in range(i * it.group, (i + 1) * it.group):
                weigh_row(it, r)


cdef void attend_tile(AttentionItem* it, int t0) noexcept nogil:
    cdef int last = it.first + it.rows // it.group - 1
    cdef bint few = it.rows <= FEW_ROWS     # more rows take longer to compute than the memory takes to answer
    if few:
        ask_before_scores(it, t0, last)
    score_tile(it, t0, last)
    if few:
        ask_after_scores(it, t0, last)
    if it.kv.dtype == KV_I8:
        copy_scales(it.kv, it.kv.k_scale, it.table, it.first_block, it.head, t0, last, it.k_scale)
        copy_scales(it.kv, it.kv.v_scale, it.table, it.first_block, it.head, t0, last, it.v_scale)
    weigh_tile(it, t0)
    add_tile(it, t0, last)


cdef void merge_range(AttentionItem* it) noexcept nogil:
    """(m, l, o) of a range into the totals."""
    cdef int r, j, d = it.kv.v_dim
    cdef float top, a, b, l
    cdef const float* o
    cdef float* total
    for r in range(it.rows):
        l = mi_fold16(it.l + r * 16)
        if l == 0:                      # no token of this range is visible to the row
            continue
        top = it.m[r] if it.m[r] > it.m_all[r] else it.m_all[r]
        a = expf_fast(it.m_all[r] - top)
        b = expf_fast(it.m[r] - top)
        it.m_all[r] = top
        it.l_all[r] = mi_fma(it.l_all[r], a, l * b)
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
        for i in range((it.rows + 15) // 16 * 16):
            it.m[i] = -INFINITY
        memset(it.l, 0, it.rows * 16 * sizeof(float))
        memset(it.o, 0, it.rows * it.kv.v_dim * sizeof(float))
        for r in range(KV_RANGE // KV_TILE):
            t = g * KV_RANGE + r * KV_TILE
            if t > last:
                break
            if t >= first_tile(it.p, it.first):
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
    begin_item(it)
    attend(it)
    for r in range(it.rows):
        src = it.o_all + r * it.kv.v_dim
        dst = out + (r // it.group) * ldo + (it.head * it.group + r % it.group) * d
        inverse = <float>1.0 / it.l_all[r]
        for j in range(d):
            dst[j] = mi_fma(src[j], inverse, 0)     # no negative zeros: tiles add what is not seen as zeros


cdef void quantise_output(
    const AttentionItem* it, const float* out, Py_ssize_t ldo, Py_ssize_t token, Py_ssize_t m,
    const Activations* quantised,
) noexcept nogil:
    """The item's part of out, its first row `token` of m, rounded: nobody else writes those rows of those blocks."""
    cdef int width = it.group * it.kv.head_dim, b
    cdef Py_ssize_t t, nb = it.p.n_heads * it.kv.head_dim // QBLOCK
    MIRO_ASSERT(width % QBLOCK == 0)
    for t in range(token, token + it.rows // it.group):
        for b in range(it.head * width // QBLOCK, (it.head + 1) * width // QBLOCK):
            put_rows(quantised, m, t, 1, b, nb, out + t * ldo + b * QBLOCK, ldo)


cdef inline Py_ssize_t items_of_row(const BatchRows* batch, const KVCache* kv, int span, int row) noexcept nogil:
    return <Py_ssize_t>((batch.n_tok[row] + span - 1) // span) * kv.n_kv_heads


cdef void deal_items(mi_member* me, const BatchRows* batch, const KVCache* kv, int span, ItemPlace* at) noexcept nogil:
    cdef Py_ssize_t n = 0
    cdef int row
    for row in range(batch.n_rows):
        n += items_of_row(batch, kv, span, row)
    mi_deal(me, n)
    at.row, at.before = 0, 0


cdef void take_item(
    mi_member* me, const BatchRows* batch, const KVCache* kv, int span, const ItemPlace* last, ItemPlace* at,
) noexcept nogil:
    """The next item; a NULL table when there are none left. last: the one before, near which it probably is."""
    cdef Py_ssize_t i
    cdef int n
    at[0] = last[0]
    at.table = NULL
    if mi_take(me, 1, &i) == 0:
        return
    if i < at.before:
        at.row, at.before = 0, 0
    while i >= at.before + items_of_row(batch, kv, span, at.row):
        at.before += items_of_row(batch, kv, span, at.row)
        at.row += 1
        MIRO_INDEX(at.row, batch.n_rows)
    i -= at.before
    MIRO_INDEX(batch.slot[at.row], batch.n_slots)
    MIRO_SPAN(batch.offset[at.row], batch.n_tok[at.row], batch.n_tokens)
    MIRO_ASSERT(batch.first_pos[at.row] >= 0)
    n = <int>(i // kv.n_kv_heads) * span
    at.table = batch.table + batch.slot[at.row] * batch.table_stride
    at.head = <int>(i % kv.n_kv_heads)
    at.first = batch.first_pos[at.row] + n
    at.n_tok = min(span, batch.n_tok[at.row] - n)
    at.token = batch.offset[at.row] + n


cdef void attention(
    mi_member* me, const BatchRows* batch, const KVCache* kv, const AttentionParams* p, const float* q,
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
    cdef int rows = (span * group + 15) // 16 * 16      # that there is room for
    it.s = scratch
    it.q = it.s + rows * KV_TILE
    it.wide = it.q + rows * kv.head_dim
    it.o = it.wide + KV_TILE * max(kv.head_dim, KV_TILE)
    it.o_all = it.o + rows * kv.v_dim
    it.m = it.o_all + rows * kv.v_dim
    it.top = it.m + rows
    it.l = it.top + rows
    it.m_all = it.l + rows * 16
    it.l_all = it.m_all + rows
    it.tiles = <uint8_t*>(it.l_all + rows)
    it.tiles += -<Py_ssize_t>it.tiles & 63
    it.shape = 0
    MIRO_ASSERT(KV_TILE % kv.block_size == 0)
    MIRO_SPAN(0, <float*>(it.tiles + item_bytes(&it)) - scratch, attention_scratch_floats(kv.head_dim))
    deal_items(me, batch, kv, span, &after)
    take_item(me, batch, kv, span, &after, &at)
    while at.table != NULL:
        take_item(me, batch, kv, span, &at, &after)     # now, so that its first keys can be asked for
        it.table, it.head, it.first, it.rows = at.table, at.head, at.first, at.n_tok * group
        it.first_block = first_key(p, at.first) // kv.block_size
        MIRO_ASSERT(blocks_exist(&it, batch.table_stride))
        attend_rows(&it, q + at.token * ldq, ldq, out + at.token * ldo, ldo)
        if quantised != NULL:
            quantise_output(&it, out, ldo, at.token, batch.n_tokens, quantised)
        at = after
    items_done()
