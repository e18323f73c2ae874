from miro_cy._kernels.abi cimport KVCache


cdef class KVLayer:
    cdef KVCache cache
    cdef readonly object k
    cdef readonly object v
    cdef readonly object k_scale
    cdef readonly object v_scale


cdef void touch_layer(const KVCache* kv) noexcept nogil
cdef void copy_block(const KVCache* kv, Py_ssize_t source, Py_ssize_t target) noexcept nogil
