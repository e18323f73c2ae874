"""PrefixIndex, see prefix.pxd."""

import hashlib
import os

import numpy as np

from miro_client.checks import check_int
from miro_cy.errors import InternalError

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.string cimport memcmp, memcpy

from miro_cy.native cimport MIRO_INDEX


cdef class PrefixIndex:
    """An index of `n_blocks` blocks of `block_size` tokens. One thread at a time.

    hash_bits: how many bits of a hash are used; fewer than 64 only to make hashes collide in tests.
    Raises ConfigError when a size is out of range.
    """

    def __cinit__(self, n_blocks, block_size, hash_bits=64):
        cdef int n_buckets = 1
        for name, value, low, high in (
            ("n_blocks", n_blocks, 1, 2**31 - 2), ("block_size", block_size, 1, 2**16), ("hash_bits", hash_bits, 0, 64)
        ):
            check_int(name, value, low, high)
        self.n_blocks = n_blocks
        self.block_size = block_size
        self._keyed = hashlib.blake2b(key=os.urandom(32), digest_size=16)
        self._mask = (1 << hash_bits) - 1
        while n_buckets < self.n_blocks and n_buckets < 1 << 30:
            n_buckets *= 2
        self._bucket = np.full(n_buckets, -1, np.int32)
        self._after = np.full(n_blocks, -1, np.int32)
        self._group = np.full(n_blocks, -1, np.int32)
        self._parent = np.full(n_blocks, NO_PARENT, np.int32)
        self._child = np.full(n_blocks, -1, np.int32)
        self._next = np.full(n_blocks, -1, np.int32)
        self._prev = np.full(n_blocks, -1, np.int32)
        self._serial = np.zeros(n_blocks, np.uint64)
        self._hash = np.zeros(n_blocks, np.uint64)
        self._domain = np.zeros((n_blocks, 2), np.uint64)
        self._tokens = np.zeros((n_blocks, block_size), np.int32)

    cpdef bytes domain(self, extras):
        """The 16 bytes that keep chains apart: a keyed digest of pairs (tag, value) of bytes, in that order.

        Tags and lengths are part of it, so a salt never equals an adapter of the same name.
        """
        keyed = self._keyed.copy()
        for tag, value in extras:
            keyed.update(b"%d:%b%d:%b" % (len(tag), tag, len(value), value))
        return keyed.digest()

    cdef int hash_blocks(self, Chain* chain, const int32_t* tokens, int n_blocks) except -1:
        """Hash what is not yet hashed of a sequence's first n_blocks blocks; tokens: all of its tokens."""
        cdef Py_ssize_t block_bytes = self.block_size * sizeof(int32_t)
        cdef bytes digest
        cdef uint64_t before
        while chain.n_hashed < n_blocks:
            keyed = self._keyed.copy()
            if chain.n_hashed == 0:
                keyed.update(PyBytes_FromStringAndSize(<const char*> chain.domain, sizeof(chain.domain)))
            else:
                before = chain.hash[chain.n_hashed - 1]
                keyed.update(PyBytes_FromStringAndSize(<const char*> &before, sizeof(before)))
            keyed.update(PyBytes_FromStringAndSize(
                <const char*> (tokens + chain.n_hashed * self.block_size), block_bytes))
            digest = keyed.digest()
            memcpy(&chain.hash[chain.n_hashed], PyBytes_AS_STRING(digest), sizeof(uint64_t))
            chain.hash[chain.n_hashed] &= self._mask
            chain.n_hashed += 1
        return 0

    cdef int find(self, const Chain* chain, int at, const int32_t* tokens, int group, int parent) noexcept:
        """The entry of a sequence's block `at` in a group, or -1.

        parent: in the first group the entry of the block before, NO_PARENT at 0; in others the first group's of `at`.
        """
        cdef uint64_t key = chain.hash[at]
        cdef int block = self._bucket[key & <uint64_t> (self._bucket.shape[0] - 1)]
        while block >= 0:
            MIRO_INDEX(block, self.n_blocks)
            if (
                self._hash[block] == key and self._group[block] == group and self._parent[block] == parent
                and (parent != NO_PARENT or memcmp(&self._domain[block, 0], chain.domain, sizeof(chain.domain)) == 0)
                and memcmp(
                    &self._tokens[block, 0], tokens + at * self.block_size, self.block_size * sizeof(int32_t)) == 0
            ):
                return block
            block = self._after[block]
        return -1

    cdef int insert(
        self, const Chain* chain, int at, const int32_t* tokens, int group, int parent, int block
    ) except -1:
        """Enter a sequence's block `at`, which nobody writes any more; parent: as in `find`."""
        cdef uint64_t key = chain.hash[at]
        cdef Py_ssize_t bucket = <Py_ssize_t> (key & <uint64_t> (self._bucket.shape[0] - 1))
        cdef bint is_root = group == 0 and at == 0
        if self._group[block] >= 0 or is_root != (parent == NO_PARENT) or at >= chain.n_hashed:
            raise InternalError(f"block {block} cannot enter the prefix index")
        if parent != NO_PARENT and self._group[parent] != 0:
            raise InternalError(f"block {parent} is not in the prefix index: it cannot be a parent")
        self._n_inserted += 1
        self._serial[block] = self._n_inserted
        self._group[block] = group
        self._hang(block, parent)
        self._hash[block] = key
        memcpy(&self._domain[block, 0], chain.domain, sizeof(chain.domain))
        memcpy(&self._tokens[block, 0], tokens + at * self.block_size, self.block_size * sizeof(int32_t))
        self._after[block] = self._bucket[bucket]
        self._bucket[bucket] = block
        self.n_entries += 1
        return 0

    cdef bint holds(self, int block) noexcept:
        """Whether the block is an entry."""
        MIRO_INDEX(block, self.n_blocks)
        return self._group[block] >= 0

    cdef uint64_t serial(self, int block) noexcept:
        """Tells an entry from every other that this block has been; 0 when it is none."""
        MIRO_INDEX(block, self.n_blocks)
        return self._serial[block] if self._group[block] >= 0 else 0

    cdef int parent(self, int block) noexcept:
        """The parent of an entry, or NO_PARENT."""
        MIRO_INDEX(block, self.n_blocks)
        return self._parent[block]

    cdef int deepest(self, int block) noexcept:
        """An entry below this one that nobody names as parent; the block itself when nobody names it."""
        MIRO_INDEX(block, self.n_blocks)
        while self._child[block] >= 0:
            block = self._child[block]
            MIRO_INDEX(block, self.n_blocks)
        return block

    cdef int remove(self, int block) except -1:
        """Forget an entry. InternalError when there is none, or when others name it as their parent."""
        cdef int32_t* link
        if self._group[block] < 0 or self._child[block] >= 0:
            raise InternalError(f"block {block} cannot leave the prefix index: block {self._child[block]} names it")
        link = &self._bucket[<Py_ssize_t> (self._hash[block] & <uint64_t> (self._bucket.shape[0] - 1))]
        while link[0] != block:
            MIRO_INDEX(link[0], self.n_blocks)
            link = &self._after[link[0]]
        link[0] = self._after[block]
        self._after[block] = -1
        self._group[block] = -1
        if self._next[block] >= 0:
            self._prev[self._next[block]] = self._prev[block]
        if self._prev[block] >= 0:
            self._next[self._prev[block]] = self._next[block]
        elif self._parent[block] != NO_PARENT:
            self._child[self._parent[block]] = self._next[block]
        self._next[block] = self._prev[block] = -1
        self.n_entries -= 1
        return 0

    cdef void _hang(self, int block, int parent) noexcept:
        """Make a new entry the first child of its parent."""
        self._parent[block] = parent
        if parent == NO_PARENT:
            return
        MIRO_INDEX(parent, self.n_blocks)
        self._next[block] = self._child[parent]
        if self._child[parent] >= 0:
            self._prev[self._child[parent]] = block
        self._child[parent] = block

    # --- what can be seen ----------------------------------------------------------------------------------------

    def entry(self, int block):
        """(group, parent, token ids) of an entry, None for a block that is not one."""
        if not 0 <= block < self.n_blocks or self._group[block] < 0:
            return None
        return self._group[block], self._parent[block], np.asarray(self._tokens[block]).tolist()

    def check(self):
        """Raise AssertionError unless buckets, entries and parents agree."""
        cdef int bucket, block, child, before, listed = 0, named = 0, seen = 0
        for bucket in range(self._bucket.shape[0]):
            block = self._bucket[bucket]
            while block >= 0:
                seen += 1
                if seen > self.n_blocks or self._group[block] < 0:
                    raise AssertionError(f"the prefix index is corrupt at block {block}")
                if self._hash[block] & <uint64_t> (self._bucket.shape[0] - 1) != <uint64_t> bucket:
                    raise AssertionError(f"block {block} is in another bucket than its hash says")
                if self._parent[block] != NO_PARENT:
                    if self._group[self._parent[block]] != 0:
                        raise AssertionError(f"the parent of block {block} is not in the prefix index")
                    named += 1
                child, before = self._child[block], -1
                while child >= 0:
                    if self._parent[child] != block or self._prev[child] != before or listed == self.n_blocks:
                        raise AssertionError(f"the children of block {block} are corrupt at block {child}")
                    listed += 1
                    child, before = self._next[child], child
                block = self._after[block]
        if seen != self.n_entries or listed != named:
            raise AssertionError(f"the prefix index counts {self.n_entries} entries and holds {seen}")
