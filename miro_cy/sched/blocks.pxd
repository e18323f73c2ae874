"""The KV blocks of running sequences: what each needs next, takes, shares with others and gives back.

    to_admit, to_promise     what one that waits needs in order to run, and in order never to wait again
    admit                    a slot of the block tables, what the prefix index lends, room for what is left
    catch_up, is_awaiting    what others have computed of a prompt meanwhile, or compute in this step
    to_chunk, reach, trim    room for a prompt's chunk, where a window has it come as it is needed
    to_grow, grow            room for the last token, in a block that nobody else holds
    to_fork, share           a fork begins with what its sequence has
    publish                  what is computed can be found by others, and what no query will see goes back
    give_back                the slot and all blocks

Only SequenceTable and forks.pyx call these: they have checked the handle, so a sequence is in the state that it must be
in. Nothing here changes a state.
"""

from cython cimport final
from libc.stdint cimport int32_t

from miro_cy.batch cimport BatchView
from miro_cy.cache.block_pool cimport BlockPool
from miro_cy.cache.block_table cimport BlockTables
from miro_cy.cache.sharing cimport PrefixSharing
from miro_cy.cache.windows cimport GroupWindows
from miro_cy.sched.sequence cimport Sequence


@final
cdef class SequenceBlocks:
    cdef readonly BlockPool pool
    cdef readonly BlockTables tables
    cdef readonly GroupWindows windows
    cdef readonly bint reserving    # whether `admit` takes the blocks of all tokens that may come
    cdef readonly int n_slots_free
    cdef PrefixSharing _sharing     # None: nothing is shared
    cdef int32_t[::1] _free_slot    # a stack

    cdef bytes domain(self, extras)
    cdef void begin_plan(self) noexcept
    cdef int to_admit(self, Sequence* seq) except -1
    cdef int to_promise(self, Sequence* seq) except -1
    cdef int admit(self, Sequence* seq) except -1
    cdef int catch_up(self, Sequence* seq) except -1
    cdef bint is_awaiting(self, Sequence* seq) except -1
    cdef int expect(self, Sequence* seq, int n_tok) except -1
    cdef int to_chunk(self, const Sequence* seq, int n_tok) except -1
    cdef int reach(self, const Sequence* seq, int n_tok) except -1
    cdef int trim(self, const Sequence* seq) except -1
    cdef int to_grow(self, const Sequence* seq) except -1
    cdef int grow(self, const Sequence* seq, BatchView view) except -1
    cdef int to_fork(self, const Sequence* source) except -1
    cdef int share(self, const Sequence* source, Sequence* seq) except -1
    cdef int publish(self, Sequence* seq) except -1
    cdef int give_back(self, Sequence* seq) except -1

    cdef int check_one(self, const Sequence* seq) except -1
    cdef int check(self, set slots) except -1

    cdef int _check_available(self, const Sequence* seq, int need) except -1
    cdef int _take_slot(self, Sequence* seq) except -1
    cdef int _tokens_at_first(self, const Sequence* seq) noexcept
    cdef int _hits(self, Sequence* seq, int[2] owned) except -1
    cdef int _may_borrow(self, const Sequence* seq) noexcept
    cdef int _tokens_to_hold(self, const Sequence* seq, bint rolling) noexcept
    cdef int _to_own(self, const Sequence* seq) except -1
