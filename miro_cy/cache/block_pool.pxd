"""The pool of KV blocks: fixed-size, reference-counted, handed out from an intrusive free list. Ints only.

Every block is in exactly one place:

    owned     ref >= 1   in as many block tables as its reference count says
    cached    ref == 0   on the free list, an entry of the prefix index: whoever has the same tokens may take it
    free      ref == 0   on the free list, content worthless

    free + cached + owned = total, after every step.

The free list is circular through a sentinel (index n_blocks) and lives in two arrays, so that taking a block out of
its middle costs O(1) and nothing is ever allocated:

    sentinel <-> freed last <-> ... <-> freed first <-> [cached, least recently used first] <-> sentinel
        alloc() takes here                                blocks that keep content join at this end: reused last

Children leave before their parents: whoever holds an entry holds the blocks before it, and gives blocks back from the
last to the first, so a parent is always used more recently than its children. Only where the first layer group has a
window may a parent be the older one. Then an entry below it goes in its stead; but if somebody holds that, the parent
goes, all entries below it leave the index, and those that nobody holds are free.
"""

from cython cimport final
from libc.stdint cimport int32_t, int64_t

from miro_cy.cache.prefix cimport PrefixIndex


@final
cdef class BlockPool:
    cdef readonly int n_blocks
    cdef readonly int block_size   # tokens a block
    cdef readonly int n_free
    cdef readonly int n_cached
    cdef readonly int64_t evictions    # cached blocks that were taken for other tokens, since the start
    cdef readonly PrefixIndex index    # or None: nothing is shared
    cdef int32_t[::1] _ref         # [n_blocks]
    cdef int32_t[::1] _next        # [n_blocks + 1], -1 when the block is not on the list
    cdef int32_t[::1] _prev        # [n_blocks + 1]
    cdef bint _counted             # among the live objects

    cpdef int available(self) noexcept
    cpdef int blocks_for(self, int n_tokens) except -1
    cpdef int alloc(self) except -1
    cpdef int share(self, int block) except -1
    cpdef int decref(self, int block) except -1
    cpdef int refcount(self, int block) except -1
    cdef int _check_list(self, bint in_order) except -1
    cdef bint is_entry(self, int block) noexcept
    cdef int _forget(self, int block) except -1
    cdef void _unlink(self, int block) noexcept
    cdef void _link(self, int block, int before) noexcept
