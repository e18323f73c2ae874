"""Sliding windows: which blocks of a layer group a sequence needs, and which it gives back. Ints only.

    the table of a group whose layers see `window` keys, the sequence having computed n_computed tokens

        given back: NO_BLOCK | keys that the next query sees, and room for what it adds | not taken yet
        0 ................... start ............................................. length ...........

    start = the block of key max(0, n_computed - window + 1); a group without a window (0) starts at 0 for ever.

Between two steps a table with a window spans at most `most_blocks`: what covers its window wherever that lies. Its
sequence is never longer for it. In a step it may be longer, for a chunk of the prompt, if the pool has blocks to spare.
"""

from cython cimport final

from miro_cy.cache.block_pool cimport BlockPool
from miro_cy.cache.block_table cimport BlockTables


cdef inline int first_block(int window, int n_computed, int block_size) noexcept:
    """The first entry that a query at n_computed or later reads."""
    return max(0, n_computed - window + 1) // block_size if window > 0 else 0


cdef inline int most_blocks(int window, int n_blocks, int block_size) noexcept:
    """Blocks that `window` neighbouring tokens touch at most, of a table of n_blocks entries."""
    return min(n_blocks, (window + block_size - 2) // block_size + 1) if window > 0 else n_blocks


@final
cdef class GroupWindows:
    cdef readonly BlockPool pool
    cdef readonly BlockTables tables
    cdef readonly int n_rolling     # groups with a window

    cpdef int capacity(self) except -1
    cdef int to_start(self, int n_computed, int n_tokens) except -1
    cdef int start(self, int slot, int n_computed, int n_tokens) except -1
    cdef int to_grow(self, int slot, int n_rolling, int n_others) except -1
    cdef int grow(self, int slot, int n_rolling, int n_others) except -1
    cdef int roll(self, int slot, int n_computed) except -1
    cdef int trim(self, int slot, int n_tokens) except -1
    cdef int growing(self, int slot, int n_tokens) except -1
    cdef int most(self, int n_tokens, bint rolling) except -1
    cdef int shortfall(self, int slot, int n_tokens) except -1
    cdef int beyond(self, int slot, int n_tokens, int stored) except -1
    cdef int owned(self) except -1
