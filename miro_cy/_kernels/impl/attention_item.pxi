# What attention computes at once: some query rows of one KV head, and which keys each of them sees.

cdef enum:
    ATTN_ROWS = 48              # query rows (positions x heads of a KV group) a work item covers
    FEW_ROWS = 16               # rows up to which an item waits for memory, and prefetches


cdef struct ItemPlace:
    # which part of the batch an item is
    int row                     # of the batch
    Py_ssize_t before           # items of the rows before it; a row's are chunk by chunk, in each the KV heads
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
    int first_block             # entry of the table with the first key that any row sees: those before may be gone
    int rows
    float* s                    # [rows][KV_TILE] scores
    float* q                    # [rows][head_dim], scaled
    float* wide                 # keys or values of a tile as floats
    uint8_t* tiles              # what tile registers read, where there are any
    int shape                   # that they have
    float* o                    # [rows][v_dim], of the range
    float* m                    # [rows] max of the range
    float* top                  # [rows] max with that of a tile
    float* l                    # [rows][16] sums of the range, of each 16th token
    float* o_all                # these, over all ranges so far; sums [rows]
    float* m_all
    float* l_all
    float k_scale[KV_TILE]      # of an int8 cache, the tokens of a tile
    float v_scale[KV_TILE]
    const ItemPlace* next       # of the item that comes after this one; its table is NULL if none does


cdef inline int first_key(const AttentionParams* p, int position) noexcept nogil:
    return max(0, position - p.window + 1) if p.window > 0 else 0


cdef inline int first_tile(const AttentionParams* p, int position) noexcept nogil:
    """Where the first tile begins that is read for a position."""
    return first_key(p, position) // KV_TILE * KV_TILE


cdef bint blocks_exist(const AttentionItem* it, Py_ssize_t table_size) noexcept nogil:
    """For the debug build: every block that the item reads is in its table, and in the pool."""
    cdef int i, bs = it.kv.block_size
    cdef int last = it.first + it.rows // it.group - 1
    for i in range(it.first_block, last // bs + 1):
        MIRO_INDEX(i, table_size)
        MIRO_INDEX(it.table[i], it.kv.n_blocks)
    return True


cdef inline int first_visible(const AttentionItem* it, int i, int t0) noexcept nogil:
    """First token, from t0 on, that the item's position i sees of the tile there."""
    return max(0, first_key(it.p, it.first + i) - t0)


cdef inline int end_visible(const AttentionItem* it, int i, int t0) noexcept nogil:
    """One past the last; not above the first where it sees nothing of the tile."""
    return min(KV_TILE, it.first + i + 1 - t0)


cdef struct TokenRange:
    # the tokens of one tile that an item will read first; table NULL: there is nothing more
    const int32_t* table
    int head
    int first
    int last


cdef inline TokenRange next_tokens(const AttentionItem* it, int t0, int last) noexcept nogil:
    """Those after the tile at t0, of this item or of the next one."""
    cdef TokenRange r
    cdef const ItemPlace* next = it.next
    if t0 + KV_TILE <= last:
        r.table, r.head, r.first, r.last = it.table, it.head, t0 + KV_TILE, min(t0 + 2 * KV_TILE - 1, last)
        return r
    r.table = next.table
    if next.table != NULL:
        r.head, r.first = next.head, first_key(it.p, next.first)
        r.last = min(first_tile(it.p, next.first) + KV_TILE - 1, next.first)
    return r
