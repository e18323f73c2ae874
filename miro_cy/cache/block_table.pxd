"""Block tables: which blocks hold the tokens of each running sequence, one table a layer group. Ints only.

    array[group, slot, 0 .. length[group, slot] - 1]    block ids; token p is in entry p // block_size
    array[group, slot, length[group, slot] ..]          NO_BLOCK, never read

The array is the one copy: every BatchView shares it. All groups have the same length now; a group whose layers attend
locally will give back what left its window, hence a length for each group. A table holds one reference to each of its
blocks, so that sequences can share them: a prefix hit and a fork copy ids, not a cache. A shared block is only read.
What is still to be written goes into a block of its own: hits and forks end before it, or `own` puts one there.
"""

from cython cimport final
from libc.stdint cimport int32_t

from miro_cy.cache.block_pool cimport BlockPool

cdef enum:
    NO_BLOCK = -1


@final
cdef class BlockTables:
    cdef readonly int n_groups
    cdef readonly int n_slots
    cdef readonly int max_blocks       # entries a table
    cdef int32_t[:, :, ::1] table      # [groups, slots, max_blocks]
    cdef int32_t[:, ::1] _length       # [groups, slots]
    cdef bint _counted                 # among the live objects

    cpdef int length(self, int slot) except -1
    cpdef int missing(self, int slot, int n_blocks) except -1
    cpdef int extend(self, BlockPool pool, int slot, int n_blocks) except -1
    cpdef int share(self, BlockPool pool, int group, int slot, int at, int block) except -1
    cpdef int fork(self, BlockPool pool, int source, int target, int n_blocks) except -1
    cpdef int to_own(self, BlockPool pool, int slot, int at) except -1
    cpdef int own(self, BlockPool pool, int group, int slot, int at) except -2
    cpdef int free(self, BlockPool pool, int slot) except -1
