from libc.stdint cimport uint8_t

from miro_cy._kernels.abi cimport PackedMatrix


cdef class PackedWeights:
    cdef PackedMatrix matrix
    cdef fill(self, uint8_t* dst, const uint8_t* src, Py_ssize_t row_bytes, int threads)
    cdef object buffer
    cdef Py_ssize_t counted     # bytes among the live objects
    cdef readonly str kind
