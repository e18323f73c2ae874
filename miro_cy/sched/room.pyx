"""KVRoom, see room.pxd."""

from miro_cy.sched.sequence cimport DECODING, stored_limit, to_compute


cdef class KVRoom:
    """Over the running sequences of a scheduler. watermark: blocks to be kept free beside them."""

    def __cinit__(self, SequenceSets sets not None, int watermark):
        self._sets = sets
        self._table = sets.table
        self._pool = sets.table.pool
        self._windows = sets.table.blocks.windows
        self._watermark = watermark

    cdef bint admits(self, Queued h, int forks) except -1:
        """Whether the pool has the blocks that a sequence needs now, and what should stay free beside them.

        forks: blocks promised to forks to come, its own included; they do not count when nothing runs.
        """
        if self._sets.n_running() == 0:
            forks = 0
        if self._table.blocks.reserving and self._windows.n_rolling > 0:
            if self._table.blocks_to_promise(h) + self._promised() + forks > self._pool.available():
                return False
            forks = 0
        return self._table.blocks_to_admit(h) + self._kept() + forks <= self._pool.available()

    cdef bint for_fork(self, const Sequence* seq) except -1:
        """Whether a fork of a sequence, under `reserve`, can come to hold the most that it may."""
        cdef int stored = stored_limit(seq), full
        if not self._table.blocks.reserving or self._windows.n_rolling == 0 or seq.n_computed >= stored:
            return True
        full = self._windows.most(stored, False) - self._n_full() * (seq.n_computed // self._pool.block_size)
        return full + self._windows.most(stored, True) + self._promised() <= self._pool.available()

    cdef int fork_blocks(self, int n_prompt, int max_new) except -1:
        """Blocks to leave for each fork of a sequence: one a group, or under `reserve` all that it cannot share."""
        cdef int stored = n_prompt + max_new - 1
        if not self._table.blocks.reserving:
            return self._table.tables.n_groups
        if max_new == 0:
            return 0
        return (
            self._windows.most(stored, False) - self._n_full() * (n_prompt // self._pool.block_size)
            + self._windows.most(stored, True))

    cdef int fitting(self, Prefilling h, int n_tok) except -1:
        """Of a prompt's next n_tok tokens, those that there is room for: in its blocks, in what is kept for it, and in
        what nobody is kept; failing these, up to the end of a block if the pool has it."""
        cdef const Sequence* seq = self._table.prefilling(h)
        cdef int n = n_tok, size = self._pool.block_size, own = 0, spare
        if self._table.blocks_to_chunk(h, n) == 0:
            return n
        spare = self._pool.available() - self._kept()
        if self._table.blocks.reserving:
            own = stored_limit(seq)
        while n > 0 and self._windows.beyond(seq.table_slot, seq.n_computed + n, own) > max(0, spare):
            n = (seq.n_computed + n - 1) // size * size - seq.n_computed
        if n <= 0 and self._table.blocks_to_chunk(h, 1) <= self._pool.available():
            n = min(n_tok, size - seq.n_computed % size)
        return max(0, n)

    cdef int _n_full(self) noexcept:
        """Groups without a window."""
        return self._table.tables.n_groups - self._windows.n_rolling

    cdef int _promised(self) except -1:
        """Blocks that the running sequences may come to hold in groups with a window, less those that they do, which
        may be more while chunks are computed."""
        cdef int i, n = 0
        for i in range(self._sets.n_prefilling):
            n += self._windows.most(stored_limit(self._table.prefilling(self._sets.prefilling[i])), True)
        for i in range(self._sets.n_decoding):
            n += self._windows.most(stored_limit(self._table.decoding(self._sets.decoding[i])), True)
        return max(0, n - self._windows.owned())

    cdef int _kept(self) except -1:
        """Blocks that others than newcomers should find free; none when nothing runs."""
        cdef int i, n = 0 if self._table.blocks.reserving else self._watermark
        if self._sets.n_running() == 0 or (self._table.blocks.reserving and self._windows.n_rolling == 0):
            return 0
        for i in range(self._sets.n_prefilling):
            n += self._kept_for(self._table.prefilling(self._sets.prefilling[i]))
        for i in range(self._sets.n_decoding):
            n += self._kept_for(self._table.decoding(self._sets.decoding[i]))
        return n

    cdef int _kept_for(self, const Sequence* seq) except -1:
        cdef int n
        if self._table.blocks.reserving:
            return self._windows.shortfall(seq.table_slot, stored_limit(seq))
        n = self._windows.growing(seq.table_slot, stored_limit(seq))
        if seq.state == DECODING and to_compute(seq) > 0:
            n = max(
                n,
                self._table.tables.to_own(self._pool, seq.table_slot, seq.n_computed // self._pool.block_size))
        return n
