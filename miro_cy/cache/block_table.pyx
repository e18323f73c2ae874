"""BlockTables, see block_table.pxd."""

import numpy as np

from miro_client.checks import check_int, shown
from miro_cy.errors import ConfigError, InternalError

from miro_cy.native cimport BLOCK_TABLES, MIRO_INDEX, tally


cdef class BlockTables:
    """Tables of up to `max_blocks` blocks for `n_slots` sequences in `n_groups` layer groups. One thread at a time.

    windows: keys that a query of each group sees, itself included, 0 for all; empty: all see all.
    Raises ConfigError when a size is out of range.
    """

    def __cinit__(self, n_groups, n_slots, max_blocks, windows=()):
        for name, value in (("n_groups", n_groups), ("n_slots", n_slots), ("max_blocks", max_blocks)):
            check_int(name, value, 1, 2**31 - 1)
        windows = windows or [0] * n_groups
        if len(windows) != n_groups or not all(0 <= window < 2**30 for window in windows):
            raise ConfigError(f"{n_groups} windows below {2**30} are needed, not {shown(windows)}", field="windows")
        self.n_groups = n_groups
        self.n_slots = n_slots
        self.max_blocks = max_blocks
        self.table = np.full((n_groups, n_slots, max_blocks), NO_BLOCK, np.int32)
        self.window = np.array(windows, np.int32)
        self._start = np.zeros((n_groups, n_slots), np.int32)
        self._length = np.zeros((n_groups, n_slots), np.int32)
        tally(BLOCK_TABLES, 1)
        self._counted = True

    def __dealloc__(self):
        if self._counted:
            tally(BLOCK_TABLES, -1)

    @property
    def array(self):
        """The block ids, int32 [groups, slots, max_blocks]; the memory itself, to be read only."""
        return np.asarray(self.table)

    @property
    def windows(self):
        """Keys that a query of each group sees, itself included; 0: all."""
        return np.asarray(self.window).tolist()

    cpdef int length(self, int slot) except -1:
        """Entries of the longest table of a slot, those given back included."""
        cdef int group, longest = 0
        if slot < 0 or slot >= self.n_slots:
            raise InternalError(f"block table slot {slot} is outside 0..{self.n_slots - 1}")
        for group in range(self.n_groups):
            longest = max(longest, self._length[group, slot])
        return longest

    cpdef int start(self, int group, int slot) except -1:
        """Entries of a table that were given back: the first one that is left."""
        MIRO_INDEX(group, self.n_groups)
        self.length(slot)
        return self._start[group, slot]

    cpdef int held(self, int group, int slot) except -1:
        """Blocks that a table holds."""
        return self.group_length(group, slot) - self._start[group, slot]

    cdef int group_length(self, int group, int slot) except -1:
        """Entries of one table, those given back included."""
        MIRO_INDEX(group, self.n_groups)
        self.length(slot)
        return self._length[group, slot]

    cpdef int missing(self, int slot, int n_blocks) except -1:
        """Blocks that the pool must give, over all groups, for tables of at least n_blocks entries."""
        cdef int group, need = 0
        if slot < 0 or slot >= self.n_slots or n_blocks > self.max_blocks:
            raise InternalError(
                f"no table of {n_blocks} blocks in slot {slot}: the limits are {self.max_blocks} and {self.n_slots}")
        for group in range(self.n_groups):
            need += max(0, n_blocks - self._length[group, slot])
        return need

    cpdef int extend(self, BlockPool pool, int slot, int n_blocks) except -1:
        """Lengthen a slot's tables to at least n_blocks entries, all groups or none; returns the blocks taken.

        InternalError when the pool has too few: ask `missing` first.
        """
        cdef int group
        cdef int need = self.missing(slot, n_blocks)
        if need > pool.available():
            raise InternalError(f"slot {slot} needs {need} more KV blocks, {pool.available()} are available")
        for group in range(self.n_groups):
            self.extend_group(pool, group, slot, n_blocks)
        return need

    cdef int extend_group(self, BlockPool pool, int group, int slot, int n_blocks) except -1:
        """Lengthen one table to at least n_blocks entries; returns the blocks taken."""
        cdef int at, block, length = self.group_length(group, slot)
        if n_blocks > self.max_blocks:
            raise InternalError(f"no table of {n_blocks} blocks: the limit is {self.max_blocks}")
        for at in range(length, n_blocks):
            block = pool.alloc()
            MIRO_INDEX(block, pool.n_blocks)
            self.table[group, slot, at] = block
            self._length[group, slot] = at + 1
        return max(0, n_blocks - length)

    cpdef int give_back(self, BlockPool pool, int group, int slot, int first) except -1:
        """Give back a table's entries before `first`, the last of them first; a shorter table goes on from there.

        Returns the blocks given back.
        """
        cdef int at, n = 0, length = self.group_length(group, slot)
        if first > self.max_blocks:
            raise InternalError(f"a table of at most {self.max_blocks} blocks cannot begin at {first}")
        for at in range(min(first, length) - 1, self._start[group, slot] - 1, -1):
            pool.decref(self.table[group, slot, at])
            self.table[group, slot, at] = NO_BLOCK
            n += 1
        self._start[group, slot] = max(self._start[group, slot], first)
        self._length[group, slot] = max(length, first)
        return n

    cpdef int shorten(self, BlockPool pool, int group, int slot, int n_blocks) except -1:
        """Give back a table's entries from n_blocks on; returns how many."""
        cdef int at, length = self.group_length(group, slot)
        if n_blocks < self._start[group, slot]:
            raise InternalError(f"a table that begins at {self._start[group, slot]} cannot end at {n_blocks}")
        for at in range(length - 1, n_blocks - 1, -1):
            pool.decref(self.table[group, slot, at])
            self.table[group, slot, at] = NO_BLOCK
            self._length[group, slot] = at
        return max(0, length - n_blocks)

    cpdef int share(self, BlockPool pool, int group, int slot, int at, int block) except -1:
        """Put a block that is owned or cached into entry `at` of a table: behind its last one, or in place of another,
        which is given back. Returns the table's length."""
        cdef int length, before
        self.length(slot)
        length = self._length[group, slot]
        if not self._start[group, slot] <= at <= length or at >= self.max_blocks:
            raise InternalError(f"a table of {length} of at most {self.max_blocks} blocks has no place {at}")
        pool.share(block)
        before = self.table[group, slot, at]
        self.table[group, slot, at] = block
        if at == length:
            self._length[group, slot] = at + 1
        else:
            pool.decref(before)
        return self._length[group, slot]

    cpdef int fork(self, BlockPool pool, int source, int target, int n_blocks) except -1:
        """Give an empty slot the first n_blocks blocks of another, in every group, but for those that left a window.

        Returns the entries copied.
        """
        cdef int group, at, n = 0
        if self.length(target) > 0 or source == target or not 0 <= n_blocks <= self.length(source):
            raise InternalError(f"slot {target} cannot take {n_blocks} blocks of slot {source}")
        for group in range(self.n_groups):
            self.give_back(pool, group, target, min(self._start[group, source], n_blocks))
        for at in range(n_blocks):
            for group in range(self.n_groups):
                if self._start[group, source] <= at < self._length[group, source]:
                    self.share(pool, group, target, at, self.table[group, source, at])
                    n += 1
        return n

    cpdef int to_own(self, BlockPool pool, int slot, int at) except -1:
        """Blocks that `own` takes for entry `at`, over all groups: those that others hold too, or may find."""
        cdef int group, block, n = 0
        self.length(slot)
        for group in range(self.n_groups):
            if self._start[group, slot] <= at < self._length[group, slot]:
                block = self.table[group, slot, at]
                n += pool.refcount(block) > 1 or pool.is_entry(block)
        return n

    cpdef int own(self, BlockPool pool, int group, int slot, int at) except -2:
        """Make entry `at` a block that nobody else holds, so that it can be written: copy-on-write.

        Returns the block that was shared, whose content the caller copies before anybody writes it, or NO_BLOCK when
        the entry was the slot's alone. InternalError when the pool has no block left.
        """
        cdef int block, copy
        self.length(slot)
        if not self._start[group, slot] <= at < self._length[group, slot]:
            raise InternalError(f"slot {slot} has no block {at} in group {group}")
        block = self.table[group, slot, at]
        if pool.refcount(block) == 1 and not pool.is_entry(block):
            return NO_BLOCK
        copy = pool.alloc()
        self.table[group, slot, at] = copy
        pool.decref(block)
        return block

    cpdef int free(self, BlockPool pool, int slot) except -1:
        """Give back every block of a slot; returns how many there were."""
        cdef int group, at, n = 0
        # From the end, so that the table is whole at every moment, and that of blocks which stay cached the last of the
        # sequence leave first; the first group last, whose entries the others' hang on.
        for at in range(self.length(slot) - 1, -1, -1):
            for group in range(self.n_groups - 1, -1, -1):
                if self._start[group, slot] <= at < self._length[group, slot]:
                    pool.decref(self.table[group, slot, at])
                    self.table[group, slot, at] = NO_BLOCK
                    self._length[group, slot] = at
                    n += 1
        for group in range(self.n_groups):
            self._start[group, slot] = self._length[group, slot] = 0
        return n

    def holders(self, int n_blocks):
        """How many table entries name each block: int32 [n_blocks]. AssertionError when a table is corrupt."""
        counts = np.zeros(n_blocks, np.int32)
        cdef int32_t[::1] count = counts
        cdef int group, slot, at, block
        for group in range(self.n_groups):
            for slot in range(self.n_slots):
                for at in range(self.max_blocks):
                    block = self.table[group, slot, at]
                    if at >= self._length[group, slot] or at < self._start[group, slot]:
                        if block != NO_BLOCK:
                            where = "past its end" if at >= self._length[group, slot] else "before its start"
                            raise AssertionError(f"slot {slot} names block {block} {where}")
                    elif block < 0 or block >= n_blocks:
                        raise AssertionError(f"slot {slot} names block {block} of {n_blocks}")
                    else:
                        count[block] += 1
        return counts
