"""The limits of this machine at the active instruction-set level, with a number of threads: for `miro bench`.

Each function does a known amount of work in pieces, all threads at once, and returns its result and the rate of the
fastest piece. Pieces are timed inside one parallel region, between barriers: what a loaded machine takes to wake a
thread is no part of them. The tests compare the results with their twins, so the work cannot have been optimised away.
"""

from cython.parallel cimport parallel
from libc.stdint cimport int8_t, int32_t, uint8_t, uint32_t
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

import numpy as np

from miro_cy._kernels.abi cimport PROBE_LANES, PROBE_QUADS, KernelTable
from miro_cy._kernels.select cimport kernels, table_of
from miro_cy._kernels.team cimport mi_barrier, mi_barrier_wait, mi_team_size, mi_thread_id

from miro_cy._kernels.select import TILES

#: Bytes that a buffer of `read` is a multiple of.
READ_UNIT = 512
#: Most rounds of `dot`: its sums are of 32 quads of 4 products of at most 15 * 127.
MAX_DOT_ROUNDS = 8192

cdef enum:
    UNIT = 512
    CHUNK = 1 << 20         # units that a timed piece of `read` has: 512 MiB, of which no cache holds much
    MOST_THREADS = 1024


cdef struct Team:
    # the threads of one region, and their fastest piece
    mi_barrier barrier
    int size                # set by thread 0, like the rest
    double began
    double best             # seconds


cdef double now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + 1e-9 * t.tv_nsec


cdef void begin_piece(Team* team, int th, int nth) noexcept nogil:
    mi_barrier_wait(&team.barrier, nth)
    if th == 0:
        team.began = now()


cdef void end_piece(Team* team, int th, int nth) noexcept nogil:
    mi_barrier_wait(&team.barrier, nth)
    if th == 0:
        team.size = nth         # may be fewer than were asked for
        team.best = min(team.best, max(now() - team.began, 1e-9))


cdef void new_team(Team* team) noexcept nogil:
    memset(team, 0, sizeof(Team))
    team.best = 1e300


cdef check_threads(int threads):
    if not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"threads must be 1 to {MOST_THREADS}, not {threads}")


cdef check_buffer(Py_ssize_t size):
    if size < UNIT or size % UNIT:
        raise ValueError(f"a buffer of {size} bytes is not a multiple of {UNIT}")


cdef Py_ssize_t bound(Py_ssize_t first, Py_ssize_t n, int th, int nth) noexcept nogil:
    """Byte at which thread th's share of units [first, first + n) begins."""
    return (first + n * th // nth) * UNIT


cdef void fill_share(uint8_t* p, Py_ssize_t units, int value, int th, int nth) noexcept nogil:
    cdef Py_ssize_t first = 0, n
    while first < units:
        n = min(CHUNK, units - first)
        memset(p + bound(first, n, th, nth), value, bound(first, n, th + 1, nth) - bound(first, n, th, nth))
        first += n


cdef uint32_t read_share(
    const KernelTable* table, const uint8_t* p, Py_ssize_t units, Team* team, int th, int nth
) noexcept nogil:
    cdef Py_ssize_t first = 0, n, start
    cdef Py_ssize_t chunk = min(CHUNK, units)
    cdef uint32_t total = 0
    while first < units:
        n = min(chunk, units - first)
        start = bound(first, n, th, nth)
        if n == chunk:          # a shorter rest is read, but not timed
            begin_piece(team, th, nth)
        total ^= table.probe_read(p + start, bound(first, n, th + 1, nth) - start)
        if n == chunk:
            end_piece(team, th, nth)
        first += n
    return total


def fill(uint8_t[::1] buffer not None, int value, int threads=1):
    """Set all bytes, each thread those that it will read, so that memory is near the thread that uses it."""
    check_threads(threads)
    check_buffer(buffer.shape[0])
    cdef uint8_t* p = &buffer[0]
    cdef Py_ssize_t units = buffer.shape[0] // UNIT
    with nogil, parallel(num_threads=threads):
        fill_share(p, units, value, mi_thread_id(), mi_team_size())


def read(const uint8_t[::1] buffer not None, int threads=1):
    """(XOR of the buffer's 32-bit words, bytes a second); its size is a multiple of READ_UNIT."""
    check_threads(threads)
    check_buffer(buffer.shape[0])
    cdef const KernelTable* table = kernels()
    cdef uint32_t[::1] totals = np.zeros(threads, np.uint32)
    cdef const uint8_t* p = &buffer[0]
    cdef Py_ssize_t units = buffer.shape[0] // UNIT
    cdef Team team
    new_team(&team)
    with nogil, parallel(num_threads=threads):
        totals[mi_thread_id()] = read_share(table, p, units, &team, mi_thread_id(), mi_team_size())
    return int(np.bitwise_xor.reduce(np.asarray(totals))), min(CHUNK, units) * UNIT / team.best


cdef void fma_share(
    const KernelTable* table, float* x, float a, float b, Py_ssize_t rounds, int pieces, Team* team, int th, int nth
) noexcept nogil:
    cdef int _i
    for _i in range(pieces):
        begin_piece(team, th, nth)
        table.probe_fma(x, a, b, rounds)
        end_piece(team, th, nth)


def fma(float[::1] x not None, float a, float b, Py_ssize_t rounds, int pieces=1, int threads=1):
    """x * a + b, `rounds` times over, `pieces` times, on each of the threads; x float32 [at least 192].

    Returns (what became of the first `lanes` of x, as many as the level's registers take, float32 [team, lanes];
    floating-point operations a second of the whole team: a multiplication and an addition are two).
    """
    check_threads(threads)
    if x.shape[0] < PROBE_LANES or rounds < 1 or pieces < 1:
        raise ValueError(f"x needs {PROBE_LANES} floats, rounds and pieces must be at least 1")
    cdef const KernelTable* table = kernels()
    cdef float[:, ::1] out = np.tile(np.asarray(x)[:PROBE_LANES], (threads, 1))
    cdef Team team
    new_team(&team)
    with nogil, parallel(num_threads=threads):
        fma_share(table, &out[mi_thread_id(), 0], a, b, rounds, pieces, &team, mi_thread_id(), mi_team_size())
    return np.asarray(out)[:team.size, :table.fma_lanes], 2.0 * rounds * table.fma_lanes * team.size / team.best


cdef void dot_share(
    const KernelTable* table, const uint8_t* w, const int8_t* x, int32_t* out, Py_ssize_t rounds, int pieces,
    Team* team, int th, int nth,
) noexcept nogil:
    cdef int _i
    for _i in range(pieces):
        begin_piece(team, th, nth)
        table.probe_dot(w, x, out, rounds)
        end_piece(team, th, nth)


def dot(
    const uint8_t[::1] w not None, const int8_t[::1] x not None, Py_ssize_t rounds, int pieces=1, int threads=1
):
    """Int8 dot products, `pieces` times on each thread: w uint8 [at least 4096] below 16, x int8 [at least 32].

    Returns (the sums of one piece, int32 [team, rows, lanes]: of the quads w [32, lanes, 4] with x [rows, 4], `rounds`
    times; operations a second of the whole team: each byte's multiplication and addition are two).
    """
    check_threads(threads)
    if w.shape[0] < PROBE_QUADS * 128 or x.shape[0] < 32 or not 1 <= rounds <= MAX_DOT_ROUNDS or pieces < 1:
        raise ValueError(f"w needs 4096 bytes, x 32; rounds must be 1 to {MAX_DOT_ROUNDS}, pieces at least 1")
    cdef const KernelTable* table = kernels()
    cdef int32_t[:, ::1] out = np.zeros((threads, PROBE_LANES), np.int32)
    cdef Team team
    new_team(&team)
    with nogil, parallel(num_threads=threads):
        dot_share(
            table, &w[0], &x[0], &out[mi_thread_id(), 0], rounds, pieces, &team, mi_thread_id(), mi_team_size()
        )
    sums = np.asarray(out)[:team.size, :table.dot_rows * table.dot_lanes]
    rate = 8.0 * PROBE_QUADS * rounds * table.dot_rows * table.dot_lanes * team.size / team.best
    return sums.reshape(team.size, table.dot_rows, table.dot_lanes), rate


cdef void tile_share(
    const KernelTable* table, const uint8_t* x, const uint8_t* w, float* sums, Py_ssize_t rounds, int pieces,
    Team* team, int th, int nth,
) noexcept nogil:
    cdef int _i
    for _i in range(pieces):
        begin_piece(team, th, nth)
        table.probe_tile(x, w, sums, rounds)
        end_piece(team, th, nth)


def tile(const uint8_t[::1] x not None, const uint8_t[::1] w not None, Py_ssize_t rounds, int pieces=1, int threads=1):
    """Products in tile registers, `pieces` times on each thread: x, w the 1,024 bytes of a tile each (abi.pxd).

    Returns (the sums of one piece, float32 [team, 16, 16]; operations a second of the whole team). Raises ConfigError
    where there are no tile registers.
    """
    check_threads(threads)
    if x.shape[0] != 1024 or w.shape[0] != 1024 or rounds < 1 or pieces < 1:
        raise ValueError("x and w must have 1,024 bytes, rounds and pieces must be at least 1")
    cdef const KernelTable* table = table_of(TILES)
    cdef float[:, ::1] out = np.zeros((threads, 256), np.float32)
    cdef Team team
    new_team(&team)
    with nogil, parallel(num_threads=threads):
        tile_share(table, &x[0], &w[0], &out[mi_thread_id(), 0], rounds, pieces, &team, mi_thread_id(), mi_team_size())
    rate = 4 * 2.0 * 16 * 16 * 32 * rounds * team.size / team.best
    return np.asarray(out)[:team.size].reshape(team.size, 16, 16), rate
