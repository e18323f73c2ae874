"""What can be seen of a scheduler's sequences. Nothing here changes anything."""

from libc.math cimport isnan
from libc.stdint cimport int32_t
from libc.string cimport memcpy

import numpy as np

from miro_cy.sched.sequence cimport DECODING, PREFILLING, QUEUED, Sequence, cached_tokens, to_compute


cdef class VisibleSequences:
    """The part of a scheduler that only looks."""

    @property
    def n_waiting(self):
        """Sequences in the queue, preempted ones included."""
        return self._sets.n_waiting + self._sets.n_preempted

    @property
    def n_running(self):
        """Sequences that own KV blocks."""
        return self._sets.n_running()

    @property
    def preemptions(self):
        """How often a sequence gave its blocks back for others, since the start."""
        return self._sets.preemptions

    @property
    def has_work(self):
        """Whether any sequence waits or has tokens to compute. False when all that is left waits to be finished."""
        cdef int i
        if self.n_waiting > 0:
            return True
        for i in range(self._sets.n_prefilling):
            if to_compute(self._table.prefilling(self._sets.prefilling[i])) > 0:
                return True
        for i in range(self._sets.n_decoding):
            if to_compute(self._table.decoding(self._sets.decoding[i])) > 0:
                return True
        return False

    def is_live(self, seq):
        """Whether the sequence was added and is not finished."""
        return self._sets.is_live(seq)

    def tokens(self, seq):
        """Prompt and generated tokens, int32 [n], a copy. InternalError when it is not live, as below."""
        cdef const Sequence* s = self._sets.find(seq)
        copy = np.empty(s.n_tokens, np.int32)
        cdef int32_t[::1] to = copy
        memcpy(&to[0], s.tokens, s.n_tokens * sizeof(int32_t))
        return copy

    def num_computed(self, seq):
        """Tokens in the KV cache; 0 again after a preemption."""
        return self._sets.find(seq).n_computed

    def has_computed(self, seq):
        """Whether all its tokens are in the KV cache: it waits for the next one, or to be finished."""
        cdef const Sequence* s = self._sets.find(seq)
        return s.n_computed == s.n_tokens

    def cached_tokens(self, seq):
        """Prompt tokens that it did not have to compute, because others with the same prefix had."""
        return cached_tokens(self._sets.find(seq))

    def state(self, seq):
        """'queued', 'prefilling' or 'decoding'."""
        return {QUEUED: "queued", PREFILLING: "prefilling", DECODING: "decoding"}[self._sets.find(seq).state]

    def times(self, seq):
        """(arrival, first admission, first generated token) in seconds of the clock; None for what is yet to come."""
        cdef const Sequence* s = self._sets.find(seq)
        return (
            s.arrival,
            None if isnan(s.admitted) else s.admitted,
            None if isnan(s.first_token) else s.first_token,
        )

    def check_integrity(self):
        """Raise AssertionError unless free + cached + owned blocks = total and every holder is counted (promise 3)."""
        self._sets.check()
