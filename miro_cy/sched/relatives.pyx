"""RelatedSequences, see relatives.pxd."""

from libc.stdint cimport int32_t, int64_t


cdef class RelatedSequences(VisibleSequences):
    """The part of a scheduler that changes families. `fork`, `join` and `resume` raise ValueError between a plan that
    computes something and its commit."""

    cdef int _check_committed(self) except -1:
        if self._is_planned:
            raise ValueError("a family changes before the step is committed")
        return 0

    def fork(self, seq, int token):
        """A new sequence that has what a decoding one has computed, and `token` behind it; returns its id.

        Usually `seq` has just got another token; one that got none, because it is to be finished, can be forked too.
        The new one decodes in the next step, or waits until there is room for it.
        Raises InternalError when `seq` does not decode or its family has all its `choices`.
        """
        self._check_committed()
        cdef int64_t family = self._sets.find(seq).family
        self._families.fork(family)
        try:
            forked = self._sets.fork(seq, token, self.view, self._room.for_fork(self._sets.find(seq)))
        except BaseException:
            self._families.leave(family)
            raise
        self._policy.charge(family, 0, 1)
        return forked

    def join(self, seq, const int32_t[::1] tokens not None):
        """A new sequence of the family of `seq`, all of whose tokens are to be computed; returns its id.

        tokens: int32 [n], copied: its prompt, as `seq` has it, and what it has generated. It waits behind its family.
        Raises InternalError when they do not fit, or its family has all its `choices`.
        """
        self._check_committed()
        cdef int64_t family = self._sets.find(seq).family
        self._families.fork(family)
        try:
            joined = self._sets.join(seq, tokens)
        except BaseException:
            self._families.leave(family)
            raise
        self._policy.charge(family, 0, 1)
        return joined

    def resume(self, seq, int token):
        """The next token of a sequence that `has_computed` all it has and got none at its commit.

        Raises InternalError when it has not, or has no place for another token.
        """
        self._check_committed()
        cdef int64_t family = self._sets.find(seq).family
        self._sets.resume(seq, token, self._clock())
        self._policy.charge(family, 0, 1)

    def settle(self, seq):
        """The family of a live sequence will get no more of them: what was kept for that is for others."""
        self._families.settle(self._sets.find(seq).family)
