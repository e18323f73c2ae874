"""Which sequence is where: the waiting, prefilling and decoding handles, each set in order of arrival.

        prefilling + decoding (running)          waiting
        |  older  ........  newer  |      older  ........  newer
                                   ^      ^
        preempt_newest takes here _|      |_ admit_first takes here, preempt_newest puts back here

Arrival order is service order, so every running sequence is older than every waiting one, and stays so.
"""

from cython cimport final
from libc.stdint cimport int32_t, int64_t

from miro_cy.sched.request cimport Decoding, Prefilling, Queued, Sequence, SequenceTable


@final
cdef class SequenceSets:
    cdef readonly SequenceTable table
    cdef readonly int n_waiting
    cdef readonly int n_prefilling
    cdef readonly int n_decoding
    cdef Queued* waiting            # [n_entries]
    cdef Prefilling* prefilling     # [n_entries]
    cdef Decoding* decoding         # [n_entries]
    cdef dict _slot_of              # sequence id -> entry
    cdef int64_t _next_id

    cdef int64_t add(self, const int32_t[::1] tokens, int max_new, int logits_from, double now, extras) except -1
    cdef int admit_first(self, double now) except -1
    cdef int start_decoding(self, Prefilling h, int token, double now) except -1
    cdef int preempt_newest(self) except -1
    cdef int finish(self, object id) except -1
    cdef int n_running(self) noexcept
    cdef bint is_live(self, object id) except -1
    cdef const Sequence* find(self, object id) except NULL
