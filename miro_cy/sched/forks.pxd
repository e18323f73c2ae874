"""Forks: a sequence that goes on from where another one is, with a token of its own.

    n_computed tokens of both        before             after both have written
    full blocks                      shared             shared, for good: nobody writes them again
    the last block, if not full      shared             copied for all but the last who came to write it

Nothing is copied and no block taken until a sequence is about to write into a block that another one holds too
(SequenceTable.grow): then it takes one in its place, and the step's forward pass copies the content first. Under
`admission="reserve"`, where nobody may have to grow, both are done by the fork.

The edges are (nothing) -> Decoding and (nothing) -> Queued, the latter where there is no room for one that runs. It has
its place in the order all the same, behind its family, and computes its tokens again once it is admitted; the prefix
index lends it what it still has.
"""

from libc.stdint cimport int32_t, int64_t

from miro_cy.batch cimport BatchView
from miro_cy.sched.request cimport Decoding, Queued, SequenceTable

cpdef int blocks_to_fork(SequenceTable table, Decoding h) except -1
cpdef Decoding fork_decoding(SequenceTable table, Decoding h, int64_t sequence_id, int token, BatchView view) except *
cpdef Queued fork_queued(SequenceTable table, Decoding h, int64_t sequence_id, int token) except *
cpdef Queued join_queued(SequenceTable table, int slot, int64_t sequence_id, const int32_t[::1] tokens) except *
