"""What all compiled modules share: checks of the debug build, and counters of the native objects that are alive."""

cdef extern from "check.h" nogil:
    # Nothing in a release. Arguments: plain arithmetic on local names and fields, which leaves no code behind there.
    void MIRO_ASSERT(bint condition)
    void MIRO_INDEX(Py_ssize_t index, Py_ssize_t limit)                     # 0 <= index < limit
    void MIRO_SPAN(Py_ssize_t first, Py_ssize_t count, Py_ssize_t limit)    # first, ... first + count - 1 alike

cdef enum Kind:
    WEIGHTS             # packed matrices
    WEIGHT_BYTES
    EXECUTORS           # that are not closed
    KV_BYTES            # of their KV pools
    BLOCK_POOLS
    OWNED_BLOCKS        # KV blocks that some table holds
    BLOCK_TABLES
    SEQUENCE_TABLES
    SEQUENCES           # entries in use
    N_KINDS


cdef void tally(Kind kind, Py_ssize_t change) noexcept
