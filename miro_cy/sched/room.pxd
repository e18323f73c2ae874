"""Room in the KV pool: who is admitted, and how far a prompt may go on, beside what others will need. Ints only.

    admission="watermark"   admitted is who finds the blocks for its tokens, beside the watermark and a block for each
                            running sequence and layer group that may grow; who finds none later has the newest give way
    admission="reserve"     nobody ever has to: every running sequence can come to hold the most that it may

What a sequence may hold is all its blocks in a group without a window; `reserve` takes them at once. In one with a
window it is the `most` of windows.pxd, which it takes and gives back as it goes, sharing some with others. Who shares
may later be left with a block alone, so nothing is deducted for it: F blocks in groups without a window, and the
most of each running sequence in the others, are no more than the pool has. Forks to come count alike.

A prompt's chunk may take more, for a step, of what is left when all of that is kept.
"""

from cython cimport final

from miro_cy.cache.block_pool cimport BlockPool
from miro_cy.cache.windows cimport GroupWindows
from miro_cy.sched.request cimport Prefilling, Queued, SequenceTable
from miro_cy.sched.sequence cimport Sequence
from miro_cy.sched.sets cimport SequenceSets


@final
cdef class KVRoom:
    cdef BlockPool _pool
    cdef GroupWindows _windows
    cdef SequenceTable _table
    cdef SequenceSets _sets
    cdef int _watermark             # blocks

    cdef bint admits(self, Queued h, int forks) except -1
    cdef bint for_fork(self, const Sequence* seq) except -1
    cdef int fork_blocks(self, int n_prompt, int max_new) except -1
    cdef int fitting(self, Prefilling h, int n_tok) except -1
    cdef int _n_full(self) noexcept
    cdef int _promised(self) except -1
    cdef int _kept(self) except -1
    cdef int _kept_for(self, const Sequence* seq) except -1
