# Without tile registers the products of attention are all of floats.

cdef inline Py_ssize_t item_bytes(const AttentionItem* it) noexcept nogil:
    return 0


cdef inline void begin_item(AttentionItem* it) noexcept nogil:
    """The queries are there."""


cdef inline void ask_before_scores(const AttentionItem* it, int t0, int last) noexcept nogil:
    ask_for_values(it, t0, last)


cdef inline void ask_after_scores(const AttentionItem* it, int t0, int last) noexcept nogil:
    ask_for_keys(it, t0, last)


cdef inline void score_tile(AttentionItem* it, int t0, int last) noexcept nogil:
    score_floats(it, t0, last)


cdef inline void add_tile(AttentionItem* it, int t0, int last) noexcept nogil:
    add_floats(it, t0, last)


cdef inline void items_done() noexcept nogil:
    """The thread's last item is."""
