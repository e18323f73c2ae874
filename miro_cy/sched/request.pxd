"""The life of a sequence (one choice of a request), as types.

     create, fork_queued, join_queued                                        finish_queued
        (nothing) ----> Queued -----------------------------------------------------------.
                         |  ^                                                             |
                   admit |  | preempt_prefilling, preempt_decoding                        |
                         v  |   (blocks back to the pool, tokens kept, to be recomputed)  |
        .............................................                                     |
        :  Prefilling ----- start_decoding ---> Decoding : <-- fork_decoding  (nothing)   |
        :                                                :     finish_prefilling          v
        :                                                : ------------------------>  Finished
        :......... the only states that own blocks ......:     finish_decoding            |
                                                                                   forget | entry is reused
                                                                                          v
                                                                                      (nothing)

Each state is a struct of its own over one table. A transition takes the handle of one state and returns that of the
next, so a call in the wrong state does not compile. What the compiler cannot see is a handle used twice: each
transition changes the entry's generation, and a spent handle raises StaleHandle. Functions that touch KV blocks take
Prefilling or Decoding (or admit to one).
A fork (forks.pxd) leaves its Decoding sequence as it is and makes another beside it: a Decoding one that shares its
blocks, or one that is Queued until there is room for it. One that joins another has tokens of its own, none computed.
"""

from cython cimport final
from libc.stdint cimport int32_t, int64_t, uint32_t

from miro_cy.batch cimport BatchView
from miro_cy.cache.block_pool cimport BlockPool
from miro_cy.cache.block_table cimport BlockTables
from miro_cy.sched.blocks cimport SequenceBlocks
from miro_cy.sched.sequence cimport Sequence, State

cdef struct Queued:
    int slot
    uint32_t generation

cdef struct Prefilling:
    int slot
    uint32_t generation

cdef struct Decoding:
    int slot
    uint32_t generation

cdef struct Finished:
    int slot
    uint32_t generation


@final
cdef class SequenceTable:
    cdef readonly BlockPool pool
    cdef readonly BlockTables tables
    cdef readonly SequenceBlocks blocks
    cdef readonly int n_entries
    cdef int n_entries_free
    cdef int64_t _n_admitted
    cdef Sequence* _entry           # [n_entries]
    cdef int32_t[::1] _free_entry   # a stack

    # Transitions, one an edge of the diagram.
    cpdef Queued create(
        self, int64_t sequence_id, const int32_t[::1] tokens, int max_new, int logits_from, double now, extras=*
    ) except *
    cpdef Prefilling admit(self, Queued h, double now) except *
    cpdef Decoding start_decoding(self, Prefilling h, int token, double now) except *
    cpdef Queued preempt_prefilling(self, Prefilling h) except *
    cpdef Queued preempt_decoding(self, Decoding h) except *
    cpdef Finished finish_queued(self, Queued h) except *
    cpdef Finished finish_prefilling(self, Prefilling h) except *
    cpdef Finished finish_decoding(self, Decoding h) except *
    cpdef int forget(self, Finished h) except -1

    # Queries: is the handle good, and what lies behind it.
    cdef bint holds_prefilling(self, Prefilling h) noexcept
    cdef bint holds_decoding(self, Decoding h) noexcept
    cdef const Sequence* queued(self, Queued h) except NULL
    cdef const Sequence* prefilling(self, Prefilling h) except NULL
    cdef const Sequence* decoding(self, Decoding h) except NULL
    cdef const Sequence* entry(self, int slot) except NULL

    # Work on blocks and tokens, only for the states that own blocks.
    cpdef int blocks_to_admit(self, Queued h) except -1
    cpdef int blocks_to_grow(self, Decoding h) except -1
    cpdef int grow(self, Decoding h, BatchView view) except -1
    cpdef int blocks_to_promise(self, Queued h) except -1
    cpdef int blocks_to_chunk(self, Prefilling h, int n_tok) except -1
    cpdef int reach(self, Prefilling h, int n_tok) except -1
    cpdef int trim(self, Prefilling h) except -1
    cpdef int catch_up(self, Prefilling h) except -1
    cpdef bint is_awaiting(self, Prefilling h) except -1
    cpdef int push_chunk(self, Prefilling h, BatchView view, int n_tok) except -1
    cpdef int push_next(self, Decoding h, BatchView view) except -1
    cpdef int advance_prefilling(self, Prefilling h, int n_tok) except -1
    cpdef int advance_decoding(self, Decoding h) except -1
    cpdef int append(self, Decoding h, int token) except -1

    cdef Sequence* _at(self, int slot, uint32_t generation, State state) except NULL
    cdef uint32_t _move(self, int slot, uint32_t generation, State source, State target) except? 0
    cdef int _unused_entry(self) except -1
    cdef int _advance(self, Sequence* seq, int n_tok) except -1
    cdef int _append(self, Sequence* seq, int token) except -1
