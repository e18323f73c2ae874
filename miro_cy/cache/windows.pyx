"""GroupWindows, see windows.pxd."""

import numpy as np

from libc.stdint cimport int32_t


def blocks_needed(windows, int n_tokens, int block_size):
    """Blocks that a sequence of n_tokens stored tokens needs at once when it runs alone, over all groups.

    windows: keys that a query of each group sees (0: all).
    """
    cdef int n_blocks = n_tokens // block_size + (n_tokens % block_size != 0)
    return sum(most_blocks(window, n_blocks, block_size) for window in windows)


def tokens_within(windows, int n_blocks, int block_size, int limit):
    """The longest sequence, in stored tokens up to `limit`, that n_blocks blocks can serve alone."""
    cdef int low = 0, high = limit, middle
    while low < high:       # more tokens never need fewer blocks
        middle = low + (high - low + 1) // 2
        if blocks_needed(windows, middle, block_size) <= n_blocks:
            low = middle
        else:
            high = middle - 1
    return low


cdef class GroupWindows:
    """The arithmetic of windows over a pool's tables. One thread at a time."""

    def __cinit__(self, BlockPool pool not None, BlockTables tables not None):
        cdef int group
        self.pool = pool
        self.tables = tables
        for group in range(tables.n_groups):
            self.n_rolling += tables.window[group] > 0

    cpdef int capacity(self) except -1:
        """The longest sequence, in stored tokens, that the empty pool can serve and a table can hold."""
        cdef int limit = <int> min(<long long> self.tables.max_blocks * self.pool.block_size, 2147483647)
        return tokens_within(list(self.tables.window), self.pool.n_blocks, self.pool.block_size, limit)

    cdef int to_start(self, int n_computed, int n_tokens) except -1:
        """Blocks that a sequence holds after `start`, over all groups."""
        cdef int group, first, n = 0, need = self.pool.blocks_for(n_tokens), size = self.pool.block_size
        for group in range(self.tables.n_groups):
            first = first_block(self.tables.window[group], n_computed, size)
            n += min(need - first, most_blocks(self.tables.window[group], need, size))
        return n

    cdef int start(self, int slot, int n_computed, int n_tokens) except -1:
        """Lengthen the tables of a sequence that begins to compute at n_computed: for n_tokens tokens, or as far as a
        window reaches. Returns the blocks taken; InternalError when the pool has too few."""
        cdef int group, first, n = 0, need = self.pool.blocks_for(n_tokens), size = self.pool.block_size
        for group in range(self.tables.n_groups):
            first = first_block(self.tables.window[group], n_computed, size)
            n += self.tables.extend_group(
                self.pool, group, slot, min(need, first + most_blocks(self.tables.window[group], need, size)))
        return n

    cdef int to_grow(self, int slot, int n_rolling, int n_others) except -1:
        """Blocks that `grow` takes."""
        cdef int group, n = 0, rolling = self.pool.blocks_for(n_rolling), others = self.pool.blocks_for(n_others)
        for group in range(self.tables.n_groups):
            n += max(
                0,
                (rolling if self.tables.window[group] > 0 else others) - self.tables.group_length(group, slot))
        return n

    cdef int grow(self, int slot, int n_rolling, int n_others) except -1:
        """Lengthen the tables for n_rolling tokens where there is a window, for n_others elsewhere; returns the blocks
        taken. InternalError when the pool has too few."""
        cdef int group, n = 0, rolling = self.pool.blocks_for(n_rolling), others = self.pool.blocks_for(n_others)
        for group in range(self.tables.n_groups):
            n += self.tables.extend_group(
                self.pool, group, slot, rolling if self.tables.window[group] > 0 else others)
        return n

    cdef int roll(self, int slot, int n_computed) except -1:
        """Give back what no query from n_computed on sees; returns the entries given back."""
        cdef int group, n = 0
        if self.n_rolling > 0:
            for group in range(self.tables.n_groups):
                n += self.tables.give_back(
                    self.pool, group, slot,
                    first_block(self.tables.window[group], n_computed, self.pool.block_size))
        return n

    cdef int trim(self, int slot, int n_tokens) except -1:
        """Give back what was taken for a chunk that was not computed after all; n_tokens: most that it may store."""
        cdef int group, n = 0, need = self.pool.blocks_for(n_tokens)
        for group in range(self.tables.n_groups):
            if self.tables.window[group] > 0:
                n += self.tables.shorten(
                    self.pool, group, slot,
                    self.tables.start(group, slot)
                    + most_blocks(self.tables.window[group], need, self.pool.block_size))
        return n

    cdef int growing(self, int slot, int n_tokens) except -1:
        """Groups in which a sequence may come to hold more than it does; n_tokens: most that it may store."""
        cdef int group, window, n = 0, need = self.pool.blocks_for(n_tokens)
        for group in range(self.tables.n_groups):
            window = self.tables.window[group]
            n += (
                self.tables.group_length(group, slot) < need
                and self.tables.held(group, slot) < most_blocks(window, need, self.pool.block_size))
        return n

    cdef int most(self, int n_tokens, bint rolling) except -1:
        """Blocks that a sequence of n_tokens holds at most between two steps, in groups with a window or without."""
        cdef int group, n = 0, need = self.pool.blocks_for(n_tokens)
        for group in range(self.tables.n_groups):
            if (self.tables.window[group] > 0) == rolling:
                n += most_blocks(self.tables.window[group], need, self.pool.block_size)
        return n

    cdef int shortfall(self, int slot, int n_tokens) except -1:
        """Blocks that the tables with a window are short of the most they may hold."""
        cdef int group, n = 0, need = self.pool.blocks_for(n_tokens)
        for group in range(self.tables.n_groups):
            if self.tables.window[group] > 0:
                n += max(
                    0,
                    most_blocks(self.tables.window[group], need, self.pool.block_size)
                    - self.tables.held(group, slot))
        return n

    cdef int beyond(self, int slot, int n_tokens, int stored) except -1:
        """Blocks to be taken for n_tokens tokens past what the shortfall of a sequence of `stored` tokens covers."""
        cdef int group, n = 0, need = self.pool.blocks_for(n_tokens), all = self.pool.blocks_for(stored), own
        for group in range(self.tables.n_groups):
            own = most_blocks(self.tables.window[group], all, self.pool.block_size) - self.tables.held(group, slot)
            n += max(0, need - self.tables.group_length(group, slot) - max(0, own))
        return n

    cdef int owned(self) except -1:
        """Blocks in tables with a window, each counted once however many hold it."""
        cdef int group, slot, at, n = 0
        cdef int32_t[::1] seen = np.zeros(self.pool.n_blocks, np.int32)
        for group in range(self.tables.n_groups):
            if self.tables.window[group] > 0:
                for slot in range(self.tables.n_slots):
                    for at in range(self.tables.start(group, slot), self.tables.group_length(group, slot)):
                        n += not seen[self.tables.table[group, slot, at]]
                        seen[self.tables.table[group, slot, at]] = True
        return n

    def check(self, int slot, int n_computed):
        """Raise AssertionError unless a slot's tables begin where its windows do."""
        cdef int group, first
        for group in range(self.tables.n_groups):
            first = first_block(self.tables.window[group], n_computed, self.pool.block_size)
            if self.tables.start(group, slot) != first:
                raise AssertionError(
                    f"the table of slot {slot} begins at {self.tables.start(group, slot)}, not at {first}")
