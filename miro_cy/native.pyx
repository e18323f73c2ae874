"""The compiled part itself: which build it is, and which native objects are alive in this process."""

cdef extern from "check.h":
    const char* MIRO_BUILD

_NAMES = (
    "weights", "weight_bytes", "executors", "kv_bytes", "block_pools", "owned_blocks", "block_tables",
    "sequence_tables", "sequences",
)

cdef Py_ssize_t[N_KINDS] alive


cdef void tally(Kind kind, Py_ssize_t change) noexcept:
    """So many more, or fewer, of a kind. Whoever calls it holds the GIL."""
    alive[<int>kind] += change
    MIRO_ASSERT(alive[<int>kind] >= 0)


def build_mode():
    """"release", "debug" (MIRO_DEBUG=1: bounds and internal assertions are checked) or "sanitized" (beside that,
    MIRO_SANITIZE: memory is watched)."""
    return MIRO_BUILD.decode()


def live_objects():
    """How many native objects are alive in this process, and the bytes of the large ones, by kind.

    All are 0 once every engine is closed and forgotten.
    """
    return {name: alive[i] for i, name in enumerate(_NAMES)}
