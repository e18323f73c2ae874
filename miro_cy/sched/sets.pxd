"""Which sequence is where: the waiting, preempted, prefilling and decoding handles.

        prefilling + decoding (running)          preempted                    waiting (never admitted)
        |  older  ........  newer  |      |  older  ........  newer  |        in order of arrival
                                   ^      ^                                       ^
        preempt_newest takes here _|      |_ and puts here, admit_preempted       |_ admit_waiting takes whom the policy
                                             takes here                              names, once nobody is preempted

"Older" is the order of first admission, which is service order from then on: every running sequence is older than every
preempted one, and stays so. A fork comes right behind its family. It runs at once, or it joins the preempted ones: when
there is no room, or one of its family waits already. Who joins a family with tokens of its own waits with them, and
newer ones that run give way to it: else they could keep it waiting for as long as they like.
"""

from cython cimport final
from libc.stdint cimport int32_t, int64_t

from miro_cy.batch cimport BatchView
from miro_cy.sched.request cimport Decoding, Prefilling, Queued, SequenceTable
from miro_cy.sched.sequence cimport Sequence


@final
cdef class SequenceSets:
    cdef readonly SequenceTable table
    cdef readonly int n_waiting
    cdef readonly int n_preempted
    cdef readonly int n_prefilling
    cdef readonly int n_decoding
    cdef readonly int preemptions   # since the start
    cdef Queued* waiting            # [n_entries]
    cdef Queued* preempted          # [n_entries]
    cdef Prefilling* prefilling     # [n_entries]
    cdef Decoding* decoding         # [n_entries]
    cdef dict _slot_of              # sequence id -> entry
    cdef int64_t _next_id

    cdef int64_t add(
        self, const int32_t[::1] tokens, int max_new, int logits_from, double now, extras
    ) except -1
    cdef Queued find_waiting(self, object id) except *
    cdef int admit_waiting(self, object id, double now) except -1
    cdef int admit_preempted(self, double now) except -1
    cdef int start_decoding(self, Prefilling h, int token, double now) except -1
    cdef int64_t fork(self, object id, int token, BatchView view, bint has_room) except -1
    cdef int64_t join(self, object id, const int32_t[::1] tokens) except -1
    cdef int resume(self, object id, int token, double now) except -1
    cdef int preempt_newest(self) except -1
    cdef bint is_newest(self, const Sequence* seq) except -1
    cdef int finish(self, object id) except -1
    cdef int n_running(self) noexcept
    cdef bint is_live(self, object id) except -1
    cdef const Sequence* find(self, object id) except NULL
    cdef int64_t _know(self, int slot) except -1
    cdef int _behind_family(self, const Sequence* seq) except -1
    cdef int64_t _add_preempted(self, Queued h, int at) except -1
    cdef int _add_decoding(self, Decoding d) except -1
    cdef int _admit(self, Queued h, double now) except -1
