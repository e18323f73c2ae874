"""Cython loops and, beside them, the same by hand (intrinsics.h), timed by the same calls; see intrinsics.py.

Compiled once for each instruction-set level, with the flags of setup.py.
"""

import time

import numpy as np

from miro_cy._kernels.select cimport kernels
from miro_cy._kernels.team cimport mi_alone, mi_member
from miro_cy._kernels.weights cimport PackedWeights

from miro_cy._kernels.memory import empty

include "miro_cy/_kernels/impl/vec.pxi"

cdef extern from "intrinsics.h" nogil:
    void c_dots(const float* q, const float* k, float* y, Py_ssize_t n)
    void c_matmul_same(const float* x, const uint16_t* w, float* y, Py_ssize_t k, Py_ssize_t panels, Py_ssize_t ldy)
    void c_matmul_other(const float* x, const uint16_t* w, float* y, Py_ssize_t k, Py_ssize_t panels, Py_ssize_t ldy)

cdef enum:
    DIM = 128
    LANES = 32
    ROWS = 8                # of activations


cdef inline float looped_fold16(const float* lane) noexcept nogil:
    """vec.h's mi_fold16 as plain loops."""
    cdef float a[8]
    cdef int i
    for i in range(8):
        a[i] = lane[i] + lane[i + 8]
    for i in range(4):
        a[i] = a[i] + a[i + 4]
    return (a[0] + a[2]) + (a[1] + a[3])


cdef void lane_dots(const float* q, const float* k, float* y, Py_ssize_t n) noexcept nogil:
    """y[n] = k[n, 128] q: plain loops over 32 lanes, which the compiler vectorises."""
    cdef float lane[LANES]
    cdef Py_ssize_t r
    cdef int i, j
    for r in range(n):
        for j in range(LANES):
            lane[j] = q[j] * k[j]
        for i in range(1, DIM // LANES):
            for j in range(LANES):
                lane[j] = mi_fma(q[i * LANES + j], k[i * LANES + j], lane[j])
        for j in range(16):
            lane[j] = lane[j] + lane[j + 16]
        y[r] = looped_fold16(lane)
        k += DIM


cdef inline void vector_dots(
    const bint fold_by_hand, const float* q, const float* k, float* y, Py_ssize_t n
) noexcept nogil:
    """The same with the vector types of vec.h, of which the tiles of the kernels are made."""
    cdef vf acc[8]
    cdef float lane[16]
    cdef Py_ssize_t r
    cdef int i, v
    for r in range(n):
        for v in range(2 * MI_NV):
            acc[v] = vf_load(q + v * MI_VL) * vf_load(k + v * MI_VL)
        for i in range(1, DIM // LANES):
            for v in range(2 * MI_NV):
                acc[v] = vf_fma(vf_load(q + i * LANES + v * MI_VL), vf_load(k + i * LANES + v * MI_VL), acc[v])
        for v in range(MI_NV):
            vf_store(lane + v * MI_VL, acc[v] + acc[v + MI_NV])
        y[r] = mi_fold16(lane) if fold_by_hand else looped_fold16(lane)
        k += DIM


cdef void vector_dots_plain(const float* q, const float* k, float* y, Py_ssize_t n) noexcept nogil:
    vector_dots(False, q, k, y, n)


cdef void vector_dots_folded(const float* q, const float* k, float* y, Py_ssize_t n) noexcept nogil:
    vector_dots(True, q, k, y, n)


def dots(str which, const float[::1] q not None, const float[:, ::1] k not None, float[::1] y not None, int repeats):
    """CPU seconds of `repeats` times y = k q; which: lanes, vectors, folded or intrinsics."""
    if q.shape[0] != DIM or k.shape[1] != DIM or k.shape[0] != y.shape[0] or y.shape[0] < 1:
        raise ValueError("shapes differ")
    cdef void (*run)(const float*, const float*, float*, Py_ssize_t) noexcept nogil
    if which == "lanes":
        run = lane_dots
    elif which == "vectors":
        run = vector_dots_plain
    elif which == "folded":
        run = vector_dots_folded
    else:
        run = c_dots
    start = time.thread_time()
    for _ in range(repeats):
        run(&q[0], &k[0, 0], &y[0], y.shape[0])
    return time.thread_time() - start


def matmul(
    str which, PackedWeights w not None, const float[:, ::1] x not None, float[:, ::1] y not None,
    int repeats,
):
    """CPU seconds of `repeats` times y [8, n] = x W^T, float16 weights; which: kernel, same_tile or other_tile."""
    cdef Py_ssize_t k = w.matrix.k, panels = w.matrix.n_panels
    if w.kind != "F16" or x.shape[0] != ROWS or y.shape[0] != ROWS or x.shape[1] != k or y.shape[1] != panels * PANEL:
        raise ValueError("shapes differ")
    cdef float[::1] scratch = empty(matmul_scratch_floats(), np.float32)
    cdef const KernelTable* table = kernels()
    cdef const uint16_t* halves = <const uint16_t*>w.matrix.data
    cdef mi_member alone = mi_alone()
    cdef int _i
    start = time.thread_time()
    if which == "kernel":
        for _i in range(repeats):
            table.matmul_f32(&alone, &w.matrix, &x[0, 0], k, &y[0, 0], panels * PANEL, ROWS, &scratch[0])
    elif which == "same_tile":
        for _i in range(repeats):
            c_matmul_same(&x[0, 0], halves, &y[0, 0], k, panels, panels * PANEL)
    else:
        for _i in range(repeats):
            c_matmul_other(&x[0, 0], halves, &y[0, 0], k, panels, panels * PANEL)
    return time.thread_time() - start
