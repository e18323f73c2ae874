"""Prefix sharing: what a sequence takes from the prefix index, and what it adds to it.

    its tables     [ shared: entries of the index, only read | computed or to be computed: its own ]
    blocks         0 ............................ n_shared - 1   n_shared ........................

Every full block whose tokens are computed is shared: `publish` enters it, or puts the entry that another sequence made
of the same tokens in its place, since their bits are equal. So all blocks of a table before a shared one are shared
too, and who holds an entry holds its parent.
"""

from cython cimport final
from libc.stdint cimport int32_t

from miro_cy.cache.block_pool cimport BlockPool
from miro_cy.cache.block_table cimport BlockTables
from miro_cy.cache.prefix cimport Chain, PrefixIndex

cdef struct Expected:      # the first block that a sequence will complete
    const Chain* chain
    const int32_t* tokens  # of the block
    int at
    int parent             # in the first group


@final
cdef class PrefixSharing:
    cdef readonly BlockPool pool
    cdef readonly BlockTables tables
    cdef PrefixIndex _index
    cdef int32_t[::1] _found     # [groups]
    cdef Expected* _expected     # [slots] one for each sequence that will complete a block in the step being planned
    cdef int _n_expected

    cdef int owned_hits(self, Chain* chain, const int32_t* tokens, int limit) except -1
    cdef int borrow(self, Chain* chain, const int32_t* tokens, int slot, int limit) except -1
    cdef int publish(self, Chain* chain, const int32_t* tokens, int slot, int n_blocks) except -1
    cdef void expect_nothing(self) noexcept
    cdef void expect(self, const Chain* chain, const int32_t* tokens, int slot, int n_blocks) noexcept
    cdef bint expects(self, const Chain* chain, const int32_t* tokens, int slot) noexcept
    cdef bint _find(self, const Chain* chain, int at, const int32_t* tokens) noexcept
    cdef int _parent(self, int group, int slot, int at) noexcept
