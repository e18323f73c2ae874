"""The prefix index: which KV blocks hold which tokens, after which others. Ints only; bounded by the pool's blocks.

    domain ---> block of tokens 0..31 ---> block of tokens 32..63 ---> ...       a chain a prompt, branching into a tree
    (salt)      parent: NO_PARENT          parent: the block before

An entry is one full block of one layer group whose keys and values are computed. It is found by the hash of its chain
(all tokens up to its end, under the domain), keyed with a secret of the process, and then compared: parent block and
token ids, and at the root the domain. Equal hashes therefore cost time and nothing else.

The chain above is that of the first layer group. An entry of another group hangs on the first group's entry of the same
tokens: that is its parent. So a group may lack blocks that left its window, and those that it has are found.

Since a child names its parent by block id, an entry must leave the index before its parent does. Where the first group
has no window, the pool's order of eviction sees to that. Where it has one, a sequence gives parents back before their
children, and when the pool takes a parent, `deepest` names one by one the entries below it that must go first. Somebody
may hold such a block: then it is merely found no more. `serial` tells whether a block still is the entry that it was.
"""

from cython cimport final
from libc.stdint cimport int32_t, uint64_t

cdef enum:
    NO_PARENT = -1

cdef struct Chain:             # a sequence as the index sees it
    uint64_t[2] domain         # whose blocks it may share: a digest of the tagged extras
    uint64_t* hash             # [blocks of the sequence] of each full block and all before it; owned by the sequence
    int n_hashed
    int n_shared               # leading blocks that were entered or borrowed, given back or not
    int tip                    # the first group's entry of the last of them, if n_shared > 0
    uint64_t serial            # of tip, as it was then


@final
cdef class PrefixIndex:
    cdef readonly int n_blocks
    cdef readonly int block_size
    cdef readonly int n_entries
    cdef object _keyed              # a keyed hash of nothing, copied for each use
    cdef uint64_t _mask
    cdef int32_t[::1] _bucket       # [power of two] the first entry of each bucket, or -1
    cdef int32_t[::1] _after        # [n_blocks] the next entry of its bucket, or -1
    cdef int32_t[::1] _group        # [n_blocks] layer group, or -1: not an entry
    cdef int32_t[::1] _parent       # [n_blocks]
    cdef int32_t[::1] _child        # [n_blocks] an entry whose parent it is, or -1
    cdef int32_t[::1] _next         # [n_blocks] the next entry of the same parent, or -1
    cdef int32_t[::1] _prev         # [n_blocks]
    cdef uint64_t[::1] _serial      # [n_blocks] counts insertions
    cdef uint64_t _n_inserted
    cdef uint64_t[::1] _hash        # [n_blocks]
    cdef uint64_t[:, ::1] _domain   # [n_blocks, 2]
    cdef int32_t[:, ::1] _tokens    # [n_blocks, block_size]

    cpdef bytes domain(self, extras)
    cdef int hash_blocks(self, Chain* chain, const int32_t* tokens, int n_blocks) except -1
    cdef int find(self, const Chain* chain, int at, const int32_t* tokens, int group, int parent) noexcept
    cdef int insert(
        self, const Chain* chain, int at, const int32_t* tokens, int group, int parent, int block
    ) except -1
    cdef bint holds(self, int block) noexcept
    cdef uint64_t serial(self, int block) noexcept
    cdef int deepest(self, int block) noexcept
    cdef int parent(self, int block) noexcept
    cdef int remove(self, int block) except -1
    cdef void _hang(self, int block, int parent) noexcept
