"""PrefixSharing, see sharing.pxd."""

import numpy as np

from miro_cy.errors import InternalError

from libc.stdlib cimport free, malloc
from libc.string cimport memcmp

from miro_cy.cache.prefix cimport NO_PARENT
from miro_cy.cache.windows cimport first_block
from miro_cy.native cimport MIRO_INDEX


cdef class PrefixSharing:
    """Between the tables of sequences and the prefix index of their pool. One thread at a time."""

    def __cinit__(self, BlockPool pool not None, BlockTables tables not None):
        if pool.index is None:
            raise InternalError("a pool without a prefix index shares nothing")
        self.pool = pool
        self.tables = tables
        self._index = pool.index
        self._found = np.full((tables.n_groups, tables.max_blocks), -1, np.int32)
        self._run = np.zeros(tables.n_groups, np.int32)
        self._expected = <Expected*> malloc(tables.n_slots * sizeof(Expected))
        if self._expected == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self._expected)

    cdef int hits(self, Chain* chain, const int32_t* tokens, int limit, int[2] owned) except -1:
        """Leading blocks that `borrow` would give empty tables, up to `limit`.

        owned: how many of the blocks it would take somebody holds already, in groups without and with a window: those
        cost the pool nothing.
        """
        cdef int at, group, end, size = self.pool.block_size
        owned[0] = owned[1] = 0
        self._index.hash_blocks(chain, tokens, limit)
        end = self._reach(chain, tokens, limit)
        for group in range(self.tables.n_groups):
            for at in range(first_block(self.tables.window[group], end * size, size), end):
                owned[self.tables.window[group] > 0] += self.pool.refcount(self._found[group, at]) > 0
        return end

    cdef int borrow(self, Chain* chain, const int32_t* tokens, int slot, int limit) except -1:
        """Take from the index what follows a slot's shared blocks, in all groups at once, up to `limit` leading blocks.

        It goes behind the tables' last blocks, or in place of blocks that are yet to be computed; what then has left a
        window is given back. Returns n_shared.
        """
        cdef int at, group, first, end, size = self.pool.block_size
        self._index.hash_blocks(chain, tokens, limit)
        end = self._reach(chain, tokens, limit)
        if end == chain.n_shared:
            return end
        for group in range(self.tables.n_groups):
            first = first_block(self.tables.window[group], end * size, size)
            self.tables.give_back(self.pool, group, slot, first)
            for at in range(max(first, chain.n_shared), end):
                self.tables.share(self.pool, group, slot, at, self._found[group, at])
        self._move_tip(chain, end, self._found[0, end - 1])
        return end

    cdef int publish(self, Chain* chain, const int32_t* tokens, int slot, int n_blocks) except -1:
        """The first n_blocks blocks of a slot are computed: whoever has the same tokens may take them from now on."""
        cdef int group, tip
        self._index.hash_blocks(chain, tokens, n_blocks)
        while chain.n_shared < n_blocks:
            tip = self._tip(chain)
            if tip == LOST:
                chain.n_shared = n_blocks
                break
            tip = self._enter(chain, tokens, 0, slot, tip)
            for group in range(1, self.tables.n_groups):
                self._enter(chain, tokens, group, slot, tip)
            self._move_tip(chain, chain.n_shared + 1, tip)
        return 0

    cdef void expect_nothing(self) noexcept:
        """A step is planned anew."""
        self._n_expected = 0

    cdef void expect(self, const Chain* chain, const int32_t* tokens, int n_blocks) noexcept:
        """The step will complete a sequence's first n_blocks blocks."""
        cdef Expected* e = &self._expected[self._n_expected]
        if n_blocks > chain.n_shared and self._tip(chain) != LOST:
            MIRO_INDEX(self._n_expected, self.tables.n_slots)
            e.chain, e.at = chain, chain.n_shared
            e.tokens = tokens + e.at * self.pool.block_size
            e.parent = self._tip(chain)
            self._n_expected += 1

    cdef bint expects(self, const Chain* chain, const int32_t* tokens) noexcept:
        """Whether the step will complete the very block that a sequence needs next, once it has borrowed all it can.

        Others that have this block in common are as far as it is: what they had computed it would have borrowed.
        """
        cdef int i, at = chain.n_shared, parent = self._tip(chain)
        cdef Expected* e
        for i in range(self._n_expected):
            e = &self._expected[i]
            if (
                e.at == at and e.parent == parent
                and memcmp(e.chain.domain, chain.domain, sizeof(chain.domain)) == 0
                and memcmp(
                    e.tokens, tokens + at * self.pool.block_size, self.pool.block_size * sizeof(int32_t)) == 0
            ):
                return True
        return False

    cdef int _reach(self, const Chain* chain, const int32_t* tokens, int limit) noexcept:
        """The most leading blocks, up to `limit`, behind which a sequence with the chain's blocks may go on.

        _found: the entries from n_shared on. Some of them may be missing where a window does not reach.
        """
        cdef int at, group, block, end = chain.n_shared, lead = self._tip(chain), size = self.pool.block_size
        cdef bint whole
        for group in range(self.tables.n_groups):
            self._run[group] = 0
        for at in range(chain.n_shared, limit):
            lead = self._index.find(chain, at, tokens, 0, lead)
            if lead < 0:
                break
            self._found[0, at] = lead
            whole = True
            for group in range(1, self.tables.n_groups):
                block = self._found[group, at] = self._index.find(chain, at, tokens, group, lead)
                self._run[group] = self._run[group] + 1 if block >= 0 else 0
                if self._run[group] < at + 1 - max(
                    chain.n_shared, first_block(self.tables.window[group], (at + 1) * size, size)
                ):
                    whole = False
            if whole:
                end = at + 1
        return end

    cdef int _enter(self, Chain* chain, const int32_t* tokens, int group, int slot, int parent) except -1:
        """Enter a slot's block n_shared in a group, or take the entry that there is in its place; returns the entry."""
        cdef int at = chain.n_shared, block = self._index.find(chain, at, tokens, group, parent)
        if block >= 0:
            self.tables.share(self.pool, group, slot, at, block)
        else:
            block = self.tables.table[group, slot, at]
            self._index.insert(chain, at, tokens, group, parent, block)
        return block

    cdef int _tip(self, const Chain* chain) noexcept:
        """The parent of what follows the shared blocks in the first group; LOST when it has left the index."""
        if chain.n_shared == 0:
            return NO_PARENT
        return chain.tip if self._index.serial(chain.tip) == chain.serial else LOST

    cdef void _move_tip(self, Chain* chain, int n_shared, int tip) noexcept:
        chain.n_shared, chain.tip, chain.serial = n_shared, tip, self._index.serial(tip)
