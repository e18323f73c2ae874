"""BlockTables, see block_table.pxd."""

import numpy as np

from miro_client.checks import check_int
from miro_cy.errors import InternalError

from miro_cy.native cimport BLOCK_TABLES, MIRO_INDEX, tally


cdef class BlockTables:
    """Tables of up to `max_blocks` blocks for `n_slots` sequences in `n_groups` layer groups. One thread at a time.

    Raises ConfigError when a size is out of range.
    """

    def __cinit__(self, n_groups, n_slots, max_blocks):
        for name, value in (("n_groups", n_groups), ("n_slots", n_slots), ("max_blocks", max_blocks)):
            check_int(name, value, 1, 2**31 - 1)
        self.n_groups = n_groups
        self.n_slots = n_slots
        self.max_blocks = max_blocks
        self.table = np.full((n_groups, n_slots, max_blocks), NO_BLOCK, np.int32)
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

    cpdef int length(self, int slot) except -1:
        """Blocks in the longest table of a slot."""
        cdef int group, longest = 0
        if slot < 0 or slot >= self.n_slots:
            raise InternalError(f"block table slot {slot} is outside 0..{self.n_slots - 1}")
        for group in range(self.n_groups):
            longest = max(longest, self._length[group, slot])
        return longest

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
        cdef int group, at, block
        cdef int need = self.missing(slot, n_blocks)
        if need > pool.available():
            raise InternalError(f"slot {slot} needs {need} more KV blocks, {pool.available()} are available")
        for group in range(self.n_groups):
            for at in range(self._length[group, slot], n_blocks):
                block = pool.alloc()
                MIRO_INDEX(block, pool.n_blocks)
                self.table[group, slot, at] = block
                self._length[group, slot] = at + 1
        return need

    cpdef int share(self, BlockPool pool, int group, int slot, int at, int block) except -1:
        """Put a block that is owned or cached into entry `at` of a table: behind its last one, or in place of another,
        which is given back. Returns the table's length."""
        cdef int length, before
        self.length(slot)
        length = self._length[group, slot]
        if not 0 <= at <= length or at >= self.max_blocks:
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
        """Give an empty slot the first n_blocks blocks of another, in every group. Returns the entries copied."""
        cdef int group, at, n = 0
        if self.length(target) > 0 or source == target or not 0 <= n_blocks <= self.length(source):
            raise InternalError(f"slot {target} cannot take {n_blocks} blocks of slot {source}")
        for at in range(n_blocks):
            for group in range(self.n_groups):
                if at < self._length[group, source]:
                    self.share(pool, group, target, at, self.table[group, source, at])
                    n += 1
        return n

    cpdef int to_own(self, BlockPool pool, int slot, int at) except -1:
        """Blocks that `own` takes for entry `at`, over all groups: those that others hold too, or may find."""
        cdef int group, block, n = 0
        self.length(slot)
        for group in range(self.n_groups):
            if 0 <= at < self._length[group, slot]:
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
        if not 0 <= at < self._length[group, slot]:
            raise InternalError(f"slot {slot} has no block {at} in group {group}")
        block = self.table[group, slot, at]
        if pool.refcount(block) == 1 and not pool.is_entry(block):
            return NO_BLOCK
        copy = pool.alloc()
        self.table[group, slot, at] = copy
        pool.decref(block)
        return block

    cpdef int free(self, BlockPool pool, int slot) except -1:
        """Give back every block of a slot; returns how many entries there were."""
        cdef int group, at, n = 0
        # From the end, so that the table is whole at every moment, and that of blocks which stay cached the last of the
        # sequence leave first.
        for at in range(self.length(slot) - 1, -1, -1):
            for group in range(self.n_groups):
                if at < self._length[group, slot]:
                    pool.decref(self.table[group, slot, at])
                    self.table[group, slot, at] = NO_BLOCK
                    self._length[group, slot] = at
                    n += 1
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
                    if at >= self._length[group, slot]:
                        if block != NO_BLOCK:
                            raise AssertionError(f"slot {slot} names block {block} past its end")
                    elif block < 0 or block >= n_blocks:
                        raise AssertionError(f"slot {slot} names block {block} of {n_blocks}")
                    else:
                        count[block] += 1
        return counts
