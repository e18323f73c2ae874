"""BlockPool, see block_pool.pxd."""

import numpy as np

from miro_client.checks import check_int
from miro_cy.errors import ConfigError, InternalError

from miro_cy.cache.prefix cimport NO_PARENT
from miro_cy.native cimport BLOCK_POOLS, MIRO_INDEX, OWNED_BLOCKS, tally


cdef class BlockPool:
    """`n_blocks` KV blocks of `block_size` tokens each. One thread at a time.

    index: which blocks hold which tokens, of the same sizes; its entries keep their content when nobody holds them.
    Raises ConfigError when a size is out of range.
    """

    def __cinit__(self, n_blocks, block_size, PrefixIndex index=None):
        for name, value in (("n_blocks", n_blocks), ("block_size", block_size)):
            check_int(name, value, 1, 2**31 - 2)
        if index is not None and (index.n_blocks != n_blocks or index.block_size != block_size):
            raise ConfigError(
                f"a prefix index of {index.n_blocks} blocks of {index.block_size} does not fit the pool", field="index")
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.index = index
        self.n_free = self.n_blocks
        self.n_cached = 0
        self._ref = np.zeros(n_blocks, np.int32)
        # Ascending at first: sentinel -> 0 -> 1 -> ... -> n_blocks - 1 -> sentinel.
        self._next = np.roll(np.arange(n_blocks + 1, dtype=np.int32), -1)
        self._prev = np.roll(np.arange(n_blocks + 1, dtype=np.int32), 1)
        tally(BLOCK_POOLS, 1)
        self._counted = True

    def __dealloc__(self):
        if self._counted:
            tally(BLOCK_POOLS, -1)
            tally(OWNED_BLOCKS, self.n_free + self.n_cached - self.n_blocks)

    cpdef int available(self) noexcept:
        """Blocks that alloc() can hand out now: free and cached ones."""
        return self.n_free + self.n_cached

    cpdef int blocks_for(self, int n_tokens) except -1:
        """Blocks that hold n_tokens tokens."""
        if n_tokens < 0:
            raise ValueError(f"a number of tokens cannot be {n_tokens}")
        return n_tokens // self.block_size + (n_tokens % self.block_size != 0)

    cpdef int alloc(self) except -1:
        """Take a block, with a reference count of one: a free one, else the cached one that was used least recently, or
        rather the end of a prompt that goes on behind it.

        InternalError when none is available.
        """
        cdef int last, block = self._next[self.n_blocks]
        if block == self.n_blocks:
            raise InternalError("the KV pool has no block left")
        if self.is_entry(block):
            last = self.index.deepest(block)
            if self._ref[last] == 0:
                block = last
            self._forget(block)
            self.evictions += 1
        self.n_free -= 1
        self._unlink(block)
        self._ref[block] = 1
        tally(OWNED_BLOCKS, 1)
        return block

    cpdef int share(self, int block) except -1:
        """One more holder of an owned or a cached block. Returns the new count; InternalError for a free one."""
        if block < 0 or block >= self.n_blocks:
            raise InternalError(f"block {block} is outside the pool of {self.n_blocks}")
        if self._ref[block] == 0:
            if not self.is_entry(block):
                raise InternalError(f"block {block} is free already")
            self._unlink(block)
            self.n_cached -= 1
            tally(OWNED_BLOCKS, 1)
        self._ref[block] += 1
        return self._ref[block]

    cpdef int decref(self, int block) except -1:
        """One holder less; the last one leaves it cached or frees it. Returns the new count.

        InternalError when nobody owns it.
        """
        if block < 0 or block >= self.n_blocks:
            raise InternalError(f"block {block} is outside the pool of {self.n_blocks}")
        if self._ref[block] < 1:
            raise InternalError(f"block {block} is free already")
        self._ref[block] -= 1
        if self._ref[block] == 0:
            if self.is_entry(block):
                self._link(block, self.n_blocks)
                self.n_cached += 1
            else:
                # The block freed last is taken first: it is the one most likely still in a CPU cache.
                self._link(block, self._next[self.n_blocks])
                self.n_free += 1
            tally(OWNED_BLOCKS, -1)
        return self._ref[block]

    cpdef int refcount(self, int block) except -1:
        """Holders of a block; 0 when it is free."""
        if block < 0 or block >= self.n_blocks:
            raise InternalError(f"block {block} is outside the pool of {self.n_blocks}")
        return self._ref[block]

    def check(self, const int32_t[::1] holders=None, bint in_order=True):
        """Raise AssertionError unless every block is in exactly one place (promise 3).

        holders: int32 [n_blocks], how many tables hold each block; then the reference counts must equal it. in_order:
        whoever holds an entry holds its parent too, and entries are evicted before their parents.
        """
        cdef int block, parent, owned = 0, seen = self._check_list(in_order)
        for block in range(self.n_blocks):
            if (self._ref[block] == 0) == (self._next[block] < 0):
                raise AssertionError(f"block {block} has {self._ref[block]} holders; on the free list or not?")
            owned += self._ref[block] > 0
            if holders is not None and holders[block] != self._ref[block]:
                raise AssertionError(f"block {block}: reference count {self._ref[block]}, holders {holders[block]}")
            parent = self.index.entry(block)[1] if self.is_entry(block) else NO_PARENT
            if in_order and parent != NO_PARENT and self._ref[parent] < self._ref[block]:
                raise AssertionError(f"block {block} has more holders than its parent")
        if seen != self.n_free + self.n_cached or seen + owned != self.n_blocks:
            raise AssertionError(
                f"{self.n_free} free + {self.n_cached} cached + {owned} owned blocks are not {self.n_blocks}"
            )
        if self.index is not None:
            self.index.check()

    cdef int _check_list(self, bint in_order) except -1:
        """The length of the free list: free blocks, then cached ones, in order children before their parents."""
        cdef int at = self._next[self.n_blocks], before = self.n_blocks, seen = 0, cached = 0
        gone = set()
        while at != self.n_blocks:
            if at < 0 or at > self.n_blocks or self._prev[at] != before or self._ref[at] != 0 or seen == self.n_blocks:
                raise AssertionError(f"the free list is corrupt at block {at}")
            if self.is_entry(at):
                parent = self.index.entry(at)[1]
                if in_order and parent in gone:
                    raise AssertionError(f"block {at} would be evicted after its parent {parent}")
                gone.add(at)
                cached += 1
            elif cached:
                raise AssertionError(f"block {at} is free and waits behind cached ones")
            seen += 1
            before, at = at, self._next[at]
        if self._prev[self.n_blocks] != before or cached != self.n_cached:
            raise AssertionError(f"the free list is corrupt at its end: {cached} of {self.n_cached} cached blocks")
        return seen

    cdef bint is_entry(self, int block) noexcept:
        return self.index is not None and self.index.holds(block)

    cdef int _forget(self, int block) except -1:
        """Have a cached block leave the index, and before it whatever names it as parent; what nobody holds is free."""
        cdef int at, parent = block
        while True:
            at = self.index.deepest(parent)
            parent = self.index.parent(at)
            self.index.remove(at)
            if self._ref[at] == 0:
                self._unlink(at)
                self._link(at, self._next[self.n_blocks])
                self.n_cached -= 1
                self.n_free += 1
            if at == block:
                return 0

    cdef void _unlink(self, int block) noexcept:
        MIRO_INDEX(block, self.n_blocks)
        self._next[self._prev[block]] = self._next[block]
        self._prev[self._next[block]] = self._prev[block]
        self._next[block] = self._prev[block] = -1

    cdef void _link(self, int block, int before) noexcept:
        """Put a block on the list, in front of another one or of the sentinel."""
        cdef int after = self._prev[before]
        MIRO_INDEX(block, self.n_blocks)
        MIRO_INDEX(after, self.n_blocks + 1)
        self._next[block] = before
        self._prev[block] = after
        self._prev[before] = block
        self._next[after] = block
