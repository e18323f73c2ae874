"""PrefixSharing, see sharing.pxd."""

import numpy as np

from miro_cy.errors import InternalError

from libc.stdlib cimport free, malloc
from libc.string cimport memcmp

from miro_cy.cache.prefix cimport NO_PARENT
from miro_cy.native cimport MIRO_INDEX


cdef class PrefixSharing:
    """Between the tables of sequences and the prefix index of their pool. One thread at a time."""

    def __cinit__(self, BlockPool pool not None, BlockTables tables not None):
        if pool.index is None:
            raise InternalError("a pool without a prefix index shares nothing")
        self.pool = pool
        self.tables = tables
        self._index = pool.index
        self._found = np.full(tables.n_groups, NO_PARENT, np.int32)
        self._expected = <Expected*> malloc(tables.n_slots * sizeof(Expected))
        if self._expected == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self._expected)

    cdef int owned_hits(self, Chain* chain, const int32_t* tokens, int limit) except -1:
        """Blocks, over all groups, that `borrow` would take into empty tables and that somebody holds already: those
        cost the pool nothing. limit: leading blocks that may be taken."""
        cdef int at, group, owned = 0
        self._index.hash_blocks(chain, tokens, limit)
        for group in range(self.tables.n_groups):
            self._found[group] = NO_PARENT
        for at in range(limit):
            if not self._find(chain, at, tokens):
                break
            for group in range(self.tables.n_groups):
                owned += self.pool.refcount(self._found[group]) > 0
        return owned

    cdef int borrow(self, Chain* chain, const int32_t* tokens, int slot, int limit) except -1:
        """Take from the index what follows a slot's shared blocks, in all groups at once, up to `limit` leading blocks.

        It goes behind the tables' last blocks, or in place of blocks that are yet to be computed. Returns n_shared.
        """
        cdef int group
        self._index.hash_blocks(chain, tokens, limit)
        while chain.n_shared < limit:
            for group in range(self.tables.n_groups):
                self._found[group] = self._parent(group, slot, chain.n_shared)
            if not self._find(chain, chain.n_shared, tokens):
                break
            for group in range(self.tables.n_groups):
                self.tables.share(self.pool, group, slot, chain.n_shared, self._found[group])
            chain.n_shared += 1
        return chain.n_shared

    cdef int publish(self, Chain* chain, const int32_t* tokens, int slot, int n_blocks) except -1:
        """The first n_blocks blocks of a slot are computed: whoever has the same tokens may take them from now on."""
        cdef int group, parent, block
        self._index.hash_blocks(chain, tokens, n_blocks)
        while chain.n_shared < n_blocks:
            for group in range(self.tables.n_groups):
                parent = self._parent(group, slot, chain.n_shared)
                block = self._index.find(chain, chain.n_shared, tokens, group, parent)
                if block >= 0:
                    self.tables.share(self.pool, group, slot, chain.n_shared, block)
                else:
                    block = self.tables.table[group, slot, chain.n_shared]
                    self._index.insert(chain, chain.n_shared, tokens, group, parent, block)
            chain.n_shared += 1
        return 0

    cdef void expect_nothing(self) noexcept:
        """A step is planned anew."""
        self._n_expected = 0

    cdef void expect(self, const Chain* chain, const int32_t* tokens, int slot, int n_blocks) noexcept:
        """The step will complete a sequence's first n_blocks blocks."""
        cdef Expected* e = &self._expected[self._n_expected]
        if n_blocks > chain.n_shared:
            MIRO_INDEX(self._n_expected, self.tables.n_slots)
            e.chain, e.at = chain, chain.n_shared
            e.tokens = tokens + e.at * self.pool.block_size
            e.parent = self._parent(0, slot, e.at)
            self._n_expected += 1

    cdef bint expects(self, const Chain* chain, const int32_t* tokens, int slot) noexcept:
        """Whether the step will complete the very block that a sequence needs next, once it has borrowed all it can.

        Others that have this block in common are as far as it is: what they had computed it would have borrowed.
        """
        cdef int i, at = chain.n_shared, parent = self._parent(0, slot, at)
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

    cdef bint _find(self, const Chain* chain, int at, const int32_t* tokens) noexcept:
        """Look a block up in every group; _found: its parents, and then the entries. False when one has none."""
        cdef int group
        for group in range(self.tables.n_groups):
            self._found[group] = self._index.find(chain, at, tokens, group, self._found[group])
            if self._found[group] < 0:
                return False
        return True

    cdef int _parent(self, int group, int slot, int at) noexcept:
        return self.tables.table[group, slot, at - 1] if at > 0 else NO_PARENT
