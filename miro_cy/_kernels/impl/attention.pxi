# FlashAttention-2 forward with online softmax (Dao 2023) over a paged KV cache, one path for decode rows and chunks.
#
# For each query row the keys are taken in tiles of KV_TILE tokens at absolute positions; tiles of one range of KV_RANGE
# tokens accumulate into a fresh (max, sum, acc), and ranges merge in ascending order. Nothing depends on which rows
# share a work item, so a token's output has the same bits as a decode row or inside any chunk, at any block size and
# thread count. K and V are read as stored; slots past a row's length are never used.

cdef enum:
    ATTN_ROWS = 48              # query rows (positions x heads of a KV group) a work item covers


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


cdef inline vf load_kv(const int dtype, const void* p, Py_ssize_t i) noexcept nogil:
    if dtype == KV_F16:
        return vf_load_f16(<const uint16_t*>p + i)
    return vf_load(<const float*>p + i)


cdef inline void kv_tile(
    const int dtype, const int mr, const float* a, Py_ssize_t lda, const void* w, Py_ssize_t w0, Py_ssize_t ldw,
    float* c, Py_ssize_t ldc, Py_ssize_t n, bint first,
) noexcept nogil:
    """c[mr][16] = (c +) a[mr][n] w[n][16], one chain along n an element; w0: first element of w. QK^T and PV alike."""
    cdef vf acc[24]
    cdef vf wv[4]
    cdef vf av
    cdef Py_ssize_t k
    cdef int i, v
    for i in range(mr):
        for v in range(MI_NV):
            acc[i * MI_NV + v] = vf_zero() if first else vf_load(c + i * ldc + v * MI_VL)
    for k in range(n):
        for v in range(MI_NV):
            wv[v] = load_kv(dtype, w, w0 + k * ldw + v * MI_VL)
        for i in range(mr):
            av = vf_set1(a[i * lda + k])
            for v in range(MI_NV):
                acc[i * MI_NV + v] = vf_fma(av, wv[v], acc[i * MI_NV + v])
    for i in range(mr):
        for v in range(MI_NV):
            vf_store(c + i * ldc + v * MI_VL, acc[i * MI_NV + v])


cdef void kv_rows(
    const int dtype, int rows, const float* a, Py_ssize_t lda, const void* w, Py_ssize_t w0, Py_ssize_t ldw,
    float* c, Py_ssize_t ldc, Py_ssize_t n, bint first,
) noexcept nogil:
    """kv_tile for any number of rows."""
    cdef int r = 0, mr
    while r < rows:
        mr = min(4, rows - r)
        if mr == 4:
            kv_tile(dtype, 4, a + r * lda, lda, w, w0, ldw, c + r * ldc, ldc, n, first)
        elif mr == 3:
            kv_tile(dtype, 3, a + r * lda, lda, w, w0, ldw, c + r * ldc, ldc, n, first)
        elif mr == 2:
            kv_tile(dtype, 2, a + r * lda, lda, w, w0, ldw, c + r * ldc, ldc, n, first)
        else:
            kv_tile(dtype, 1, a + r * lda, lda, w, w0, ldw, c + r * ldc, ldc, n, first)
        r += mr


cdef void kv_rows_any(
    int dtype, int rows, const float* a, Py_ssize_t lda, const void* w, Py_ssize_t w0, Py_ssize_t ldw,
    float* c, Py_ssize_t ldc, Py_ssize_t n, bint first,
) noexcept nogil:
    if dtype == KV_F16:
        kv_rows(KV_F16, rows, a, lda, w, w0, ldw, c, ldc, n, first)
    else:
        kv_rows(KV_F32, rows, a, lda, w, w0, ldw, c, ldc, n, first)


cdef inline int first_key(const AttentionParams* p, int position) noexcept nogil:
    return max(0, position - p.window + 1) if p.window > 0 else 0


cdef bint blocks_exist(const AttentionItem* it, Py_ssize_t table_size) noexcept nogil:
    """For the debug build: every block that the item reads is in its table, and in the pool."""
    cdef int i, bs = it.kv.block_size
    cdef int last = it.first + it.rows // it.group - 1
    for i in range(first_key(it.p, it.first) // KV_RANGE * KV_RANGE // bs, last // bs + 1):
        MIRO_INDEX(i, table_size)
        MIRO_INDEX(it.table[i], it.kv.n_blocks)
    return True


cdef void score_tile(AttentionItem* it, int t0, int last) noexcept nogil:
    """s = q K^T for tokens [t0, t0 + KV_TILE) up to `last`, the latest any row may see."""
    cdef const KVCache* kv = it.kv
    cdef int bs = kv.block_size, b, c
    cdef Py_ssize_t base
    for b in range(KV_TILE // bs):
        if t0 + b * bs > last:
            return
        base = it.table[t0 // bs + b] * kv.k_block + <Py_ssize_t>it.head * kv.head_dim * bs
        for c in range(bs // PANEL):
            kv_rows_any(
                kv.dtype, it.rows, it.q, kv.head_dim, kv.k, base + c * PANEL, bs, it.s + b * bs + c * PANEL, KV_TILE,
                kv.head_dim, True,
            )


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
    cdef float top = m[0], f
    cdef int j, t
    for j in range(16):
        lane[j] = s[j]
    for t in range(1, KV_TILE // 16):
        for j in range(16):
            lane[j] = s[t * 16 + j] if s[t * 16 + j] > lane[j] else lane[j]
    for j in range(16):
        top = lane[j] if lane[j] > top else top
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
    l[0] = l[0] + fold16(lane)


cdef void add_values(AttentionItem* it, int t0, int row, int rows, int lo, int hi) noexcept nogil:
    """o += s V for `rows` rows from `row`, over the tile's tokens [lo, hi) alone: the rest is never read."""
    cdef const KVCache* kv = it.kv
    cdef int bs = kv.block_size, b, c, j0, j1
    cdef Py_ssize_t base
    for b in range(KV_TILE // bs):
        j0 = max(lo, b * bs)
        j1 = min(hi, (b + 1) * bs)
        if j0 >= j1:
            continue
        base = it.table[t0 // bs + b] * kv.v_block + (<Py_ssize_t>it.head * bs + j0 - b * bs) * kv.v_dim
        for c in range(kv.v_dim // PANEL):
            kv_rows_any(
                kv.dtype, rows, it.s + row * KV_TILE + j0, KV_TILE, kv.v, base + c * PANEL, kv.v_dim,
                it.o + row * kv.v_dim + c * PANEL, kv.v_dim, j1 - j0, False,
            )


cdef void attend_tile(AttentionItem* it, int t0) noexcept nogil:
    cdef int positions = it.rows // it.group, i, r, row, lo, hi
    cdef int last = it.first + positions - 1
    cdef bint whole = t0 + KV_TILE <= it.first + 1 and first_key(it.p, last) <= t0
    score_tile(it, t0, last)
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
        if not whole:
            add_values(it, t0, i * it.group, it.group, lo, hi)
    if whole:
        add_values(it, t0, 0, it.rows, 0, KV_TILE)


cdef void merge_range(AttentionItem* it) noexcept nogil:
    """(m, l, o) of a range into the totals."""
    cdef int r, j, d = it.kv.v_dim
    cdef float top, a, b
    for r in range(it.rows):
        if it.l[r] == 0:                # no token of this range is visible to the row
            continue
        top = it.m[r] if it.m[r] > it.m_all[r] else it.m_all[r]
        a = expf_fast(it.m_all[r] - top)
        b = expf_fast(it.m[r] - top)
        it.m_all[r] = top
        it.l_all[r] = mi_fma(it.l_all[r], a, it.l[r] * b)
        for j in range(d):
            it.o_all[r * d + j] = mi_fma(it.o_all[r * d + j], a, it.o[r * d + j] * b)


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
            attend_tile(it, t)
        merge_range(it)


cdef void attend_rows(AttentionItem* it, const float* q, Py_ssize_t ldq, float* out, Py_ssize_t ldo) noexcept nogil:
    """Scale the queries, attend, divide by the sums. q, out: row of the item's first token."""
    cdef int r, j, d = it.kv.head_dim
    cdef const float* src
    cdef float* dst
    cdef float inverse
    for r in range(it.rows):
        src = q + (r // it.group) * ldq + (it.head * it.group + r % it.group) * d
        for j in range(d):
            it.q[r * d + j] = src[j] * it.p.scale
    attend(it)
    for r in range(it.rows):
        dst = out + (r // it.group) * ldo + (it.head * it.group + r % it.group) * d
        inverse = <float>1.0 / it.l_all[r]
        for j in range(d):
            dst[j] = it.o_all[r * it.kv.v_dim + j] * inverse


cdef void attention(
    int th, int nth, const BatchRows* batch, const KVCache* kv, const AttentionParams* p, const float* q,
    Py_ssize_t ldq, float* out, Py_ssize_t ldo, float* scratch,
) noexcept nogil:
    cdef AttentionItem it
    cdef int group = p.n_heads // kv.n_kv_heads
    cdef int span = max(1, ATTN_ROWS // group)          # positions an item covers
    cdef int r, i, chunks, n, item = 0
    it.kv = kv
    it.p = p
    it.group = group
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
    for r in range(batch.n_rows):
        MIRO_INDEX(batch.slot[r], batch.n_slots)
        MIRO_SPAN(batch.offset[r], batch.n_tok[r], batch.n_tokens)
        MIRO_ASSERT(batch.first_pos[r] >= 0)
        it.table = batch.table + batch.slot[r] * batch.table_stride
        chunks = (batch.n_tok[r] + span - 1) // span
        for i in range(chunks * kv.n_kv_heads):
            item += 1
            if item % nth != th:
                continue
            n = (i // kv.n_kv_heads) * span
            it.head = i % kv.n_kv_heads
            it.first = batch.first_pos[r] + n
            it.rows = min(span, batch.n_tok[r] - n) * group
            MIRO_ASSERT(blocks_exist(&it, batch.table_stride))
            attend_rows(&it, q + (batch.offset[r] + n) * ldq, ldq, out + (batch.offset[r] + n) * ldo, ldo)


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
