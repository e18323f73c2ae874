"""Prefix sharing: what a sequence takes from the prefix index, and what it adds to it.

    its tables     [ shared: entries of the index, only read | computed or to be computed: its own ]
    blocks         0 ............................ n_shared - 1   n_shared ........................

Every full block whose tokens are computed is shared: `publish` enters it, or puts the entry that another sequence made
of the same tokens in its place, since their bits are equal. So all blocks of a table before a shared one are shared
too, and in groups without a window who holds an entry holds its parent.

A sequence may go on behind block n if the first group has entries of all blocks up to n, held by somebody or not, and
every group has those that a query behind n sees. Of a group with a window it takes only these:

    first group, no window   [ 0 ........................................ n ]
    a group with a window    [ not needed | seen by the next query ...... n ]

Where the first group has a window itself, one of its entries may have left the index when a sequence that computed
what follows would enter the next: from then on that sequence enters nothing and finds nothing (LOST).
"""

from cython cimport final
from libc.stdint cimport int32_t

from miro_cy.cache.block_pool cimport BlockPool
from miro_cy.cache.block_table cimport BlockTables
from miro_cy.cache.prefix cimport Chain, PrefixIndex

cdef enum:
    LOST = -2

cdef struct Expected:      # the first block that a sequence will complete
    const Chain* chain
    const int32_t* tokens  # of the block
    int at
    int parent             # the first group's entry of the block before


@final
cdef class PrefixSharing:
    cdef readonly BlockPool pool
    cdef readonly BlockTables tables
    cdef PrefixIndex _index
    cdef int32_t[:, ::1] _found  # [groups, max_blocks] what `_reach` found, or -1
    cdef int32_t[::1] _run       # [groups] blocks that it found up to where it is, without a gap
    cdef Expected* _expected     # [slots] one for each sequence that will complete a block in the step being planned
    cdef int _n_expected

    cdef int hits(self, Chain* chain, const int32_t* tokens, int limit, int[2] owned) except -1
    cdef int borrow(self, Chain* chain, const int32_t* tokens, int slot, int limit) except -1
    cdef int publish(self, Chain* chain, const int32_t* tokens, int slot, int n_blocks) except -1
    cdef void expect_nothing(self) noexcept
    cdef void expect(self, const Chain* chain, const int32_t* tokens, int n_blocks) noexcept
    cdef bint expects(self, const Chain* chain, const int32_t* tokens) noexcept
    cdef int _reach(self, const Chain* chain, const int32_t* tokens, int limit) noexcept
    cdef int _enter(self, Chain* chain, const int32_t* tokens, int group, int slot, int parent) except -1
    cdef int _tip(self, const Chain* chain) noexcept
    cdef void _move_tip(self, Chain* chain, int n_shared, int tip) noexcept
