"""BatchView, see batch.pxd."""

from libc.string cimport memcpy

import numpy as np


cdef class BatchView:
    """A ragged batch for one forward pass.

    tables: int32 [groups, slots, max_blocks], the cache's block tables (not copied).
    """

    def __init__(self, int max_rows, int max_tokens, int32_t[:, :, ::1] tables not None):
        if max_rows < 1 or max_tokens < 1:
            raise ValueError("a batch view needs room for at least one row and one token")
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.tables = tables
        self.slot = np.zeros(max_rows, np.int32)
        self.first_pos = np.zeros(max_rows, np.int32)
        self.n_tok = np.zeros(max_rows, np.int32)
        self.n_log = np.zeros(max_rows, np.int32)
        self.offset = np.zeros(max_rows, np.int32)
        self.tokens = np.zeros(max_tokens, np.int32)
        self.max_copies = <int>(tables.shape[0] * tables.shape[1])
        self.copy = np.zeros((self.max_copies, 3), np.int32)
        self.clear()

    cpdef void clear(self):
        """Forget all rows; copies that were not made yet stay."""
        self.n_rows = self.n_tokens = self.n_logits = 0

    cdef int push_row(self, int slot, int first_pos, const int32_t* tokens, int n_tok, int n_log) except -1:
        """Append a row; raises ValueError when it does not fit or makes no sense."""
        cdef int row = self.n_rows
        if row >= self.max_rows or n_tok < 1 or n_tok > self.max_tokens - self.n_tokens:
            raise ValueError(f"row of {n_tok} tokens does not fit the batch view")
        if slot < 0 or slot >= self.tables.shape[1] or first_pos < 0 or n_log < 0 or n_log > n_tok:
            raise ValueError(f"bad row: {slot=} {first_pos=} {n_tok=} {n_log=}")
        self.slot[row] = slot
        self.first_pos[row] = first_pos
        self.n_tok[row] = n_tok
        self.n_log[row] = n_log
        self.offset[row] = self.n_tokens
        memcpy(&self.tokens[self.n_tokens], tokens, n_tok * sizeof(int32_t))
        self.n_rows += 1
        self.n_tokens += n_tok
        self.n_logits += n_log
        return 0

    cdef int push_copy(self, int group, int source, int target) except -1:
        """One more block to copy before anything is written; raises ValueError when there is no room."""
        if self.n_copies >= self.max_copies or source == target or source < 0 or target < 0:
            raise ValueError(f"no room in the batch view to copy block {source} to {target}")
        self.copy[self.n_copies, 0] = group
        self.copy[self.n_copies, 1] = source
        self.copy[self.n_copies, 2] = target
        self.n_copies += 1
        return 0

    cpdef void copies_made(self):
        """Whoever runs the forward pass says that the blocks are copied."""
        self.n_copies = 0

    def copies(self):
        """The copies still to be made, in order, as (group, from, to): for executors in Python, tests and tools."""
        return [(self.copy[i, 0], self.copy[i, 1], self.copy[i, 2]) for i in range(self.n_copies)]

    def add_row(self, int slot, int first_pos, const int32_t[::1] tokens not None, int n_log):
        """Append a row from Python (tests, tools): tokens is int32 [n]."""
        if tokens.shape[0] == 0:
            raise ValueError("a row needs at least one token")
        self.push_row(slot, first_pos, &tokens[0], <int>tokens.shape[0], n_log)

    def rows(self):
        """The rows as (slot, first position, number of tokens, trailing tokens with logits), for tests and tools."""
        return [(self.slot[i], self.first_pos[i], self.n_tok[i], self.n_log[i]) for i in range(self.n_rows)]
