"""Teams of threads, and a look at how they deal work out; see team.pxd."""

from cython.parallel cimport parallel
from libc.stdint cimport int32_t, uintptr_t

import numpy as np

from miro_cy._kernels.memory import zeros


cdef class Team:
    def __init__(self, int threads):
        self.turns = zeros(threads * sizeof(mi_turn), np.uint8)
        self.shared.turns = <mi_turn*><uintptr_t>self.turns.ctypes.data


cdef void take_all(
    mi_team* team, mi_barrier* held, int late, const Py_ssize_t[::1] sizes, Py_ssize_t most, int32_t[:, ::1] taken,
    Py_ssize_t[::1] largest,
) noexcept nogil:
    """As one of the team; largest: of its takes, or -1 where there was no such thread."""
    cdef mi_member me = mi_join(team)
    cdef Py_ssize_t i, n, first = 0, before = 0, item
    largest[me.th] = max(0, largest[me.th])
    if me.th == late:
        mi_barrier_wait(held, me.nth)
    for i in range(sizes.shape[0]):
        mi_deal(&me, sizes[i])
        while True:
            n = mi_take(&me, most, &first)
            if n == 0:
                break
            largest[me.th] = max(n, largest[me.th])
            for item in range(before + first, before + first + n):
                taken[me.th, item] += 1
        before += sizes[i]
    if late >= 0 and me.th != late:
        mi_barrier_wait(held, me.nth)
    mi_leave(&me)


def deal(sizes not None, int threads, Py_ssize_t most, late=None, int rounds=1):
    """Deals of so many items, for tests: how often each thread took each item, int32 [threads, all items], and the most
    that each took at once, [threads], -1 for those that the team turned out not to have.

    most: items that are taken at a time. late: a thread that begins when the others are done with all deals. rounds: in
    how many parallel regions the same is done.
    """
    if threads < 1 or most < 1 or rounds < 1 or (late is not None and not 0 <= late < threads):
        raise ValueError("threads, most and rounds must be at least 1, and late be a thread")
    cdef const Py_ssize_t[::1] sizes_ = np.array(sizes, np.intp)
    if sizes_.shape[0] < 1 or not 0 <= min(sizes_) <= max(sizes_) < 1 << MI_TAKEN_BITS:
        raise ValueError(f"each deal has 0 to {(1 << MI_TAKEN_BITS) - 1} items")
    taken = np.zeros((threads, max(sum(sizes_), 1)), np.int32)
    cdef int32_t[:, ::1] taken_ = taken
    largest = np.full(threads, -1, np.intp)
    cdef Py_ssize_t[::1] largest_ = largest
    cdef Team team = Team(threads)
    cdef Team other = Team(threads)
    cdef int held = -1 if late is None else late, _i
    for _i in range(rounds):
        with nogil, parallel(num_threads=threads):
            take_all(&team.shared, &other.shared.barrier, held, sizes_, most, taken_, largest_)
    return taken[:, :sum(sizes_)], largest
