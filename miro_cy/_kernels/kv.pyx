"""A layer's KV pool, in the kernels' layout (KVCache in abi.pxd)."""

from libc.stdint cimport uint8_t, uintptr_t
from libc.string cimport memcpy, memset

import numpy as np

from miro_cy._kernels.abi cimport KV_BF16, KV_F16, KV_F32, KV_I8, PANEL, QBLOCK, KVCache, kv_element_size
from miro_cy._kernels.memory import LINE, zeros
from miro_cy.native cimport MIRO_INDEX

#: name -> (KVType, element type); bfloat16 as its bits
KV_TYPES = {
    "fp16": (KV_F16, np.float16),
    "fp32": (KV_F32, np.float32),
    "int8": (KV_I8, np.int8),
    "bf16": (KV_BF16, np.uint16),
}


cdef int padded(int head_dim, int to):
    return (head_dim + to - 1) // to * to


cdef int key_dim(int head_dim, str dtype):
    """KVCache.k_dim."""
    return padded(head_dim, QBLOCK) if dtype == "bf16" else head_dim


cdef class KVLayer:
    """K and V of n_blocks blocks, zeros: the value padding past head_dim is read.

    dtype: a key of KV_TYPES; block_size: 16, 32 or 64. k [blocks, kv_heads, head_dim, block_size], v [blocks, kv_heads,
    block_size, v_dim], bfloat16 as KVCache says; beside int8 k_scale and v_scale, float32 [blocks, kv_heads,
    block_size]. Pages of memory are taken as they are first used. arena: where to lie (memory.Arena). Raises ValueError
    for an unknown dtype or block size.
    """

    def __init__(self, Py_ssize_t n_blocks, int n_kv_heads, int head_dim, int block_size, str dtype, arena=None):
        if dtype not in KV_TYPES or block_size not in (16, 32, 64):
            raise ValueError(f"no KV cache of {dtype} in blocks of {block_size}")
        make = zeros if arena is None else arena.zeros
        cdef KVCache* kv = &self.cache
        kv.dtype, kind = KV_TYPES[dtype]
        kv.n_blocks, kv.n_kv_heads, kv.head_dim, kv.block_size = n_blocks, n_kv_heads, head_dim, block_size
        kv.k_dim, kv.v_dim = key_dim(head_dim, dtype), padded(head_dim, PANEL)
        keys, values = (kv.k_dim, block_size), (block_size, kv.v_dim)
        if kv.dtype == KV_BF16:
            keys = (kv.k_dim // QBLOCK, block_size // 16, 16, 16, 2)
            values = (kv.v_dim // PANEL, block_size // 2, PANEL, 2)
        self.k = make((n_blocks, n_kv_heads, *keys), kind)
        self.v = make((n_blocks, n_kv_heads, *values), kind)
        kv.k, kv.v = <void*><uintptr_t>self.k.ctypes.data, <void*><uintptr_t>self.v.ctypes.data
        kv.k_block, kv.v_block = self.k[0].size, self.v[0].size
        if kv.dtype == KV_I8:
            self.k_scale = make((n_blocks, n_kv_heads, block_size), np.float32)
            self.v_scale = make((n_blocks, n_kv_heads, block_size), np.float32)
            kv.k_scale = <float*><uintptr_t>self.k_scale.ctypes.data
            kv.v_scale = <float*><uintptr_t>self.v_scale.ctypes.data
            kv.scale_block = self.k_scale[0].size

    @staticmethod
    def room(Py_ssize_t n_blocks, int n_kv_heads, int head_dim, int block_size, str dtype):
        """Bytes of an arena that such a layer takes."""
        width = key_dim(head_dim, dtype) + padded(head_dim, PANEL)
        vectors = n_blocks * n_kv_heads * block_size
        return vectors * (width * np.dtype(KV_TYPES[dtype][1]).itemsize + 2 * sizeof(float)) + 4 * LINE

    @property
    def nbytes(self):
        """Bytes of all arrays."""
        return sum(array.nbytes for array in (self.k, self.v, self.k_scale, self.v_scale) if array is not None)


cdef void touch_layer(const KVCache* kv) noexcept nogil:
    """Take the memory now, by writing the zeros that it holds already."""
    cdef Py_ssize_t size = kv_element_size(kv.dtype)
    memset(kv.k, 0, kv.n_blocks * kv.k_block * size)
    memset(kv.v, 0, kv.n_blocks * kv.v_block * size)
    if kv.dtype == KV_I8:
        memset(kv.k_scale, 0, kv.n_blocks * kv.scale_block * sizeof(float))
        memset(kv.v_scale, 0, kv.n_blocks * kv.scale_block * sizeof(float))


cdef void copy_block(const KVCache* kv, Py_ssize_t source, Py_ssize_t target) noexcept nogil:
    """All that a block holds, keys, values and scales, into another one."""
    cdef Py_ssize_t k = kv.k_block * kv_element_size(kv.dtype), v = kv.v_block * kv_element_size(kv.dtype)
    MIRO_INDEX(source, kv.n_blocks)
    MIRO_INDEX(target, kv.n_blocks)
    memcpy(<uint8_t*>kv.k + target * k, <uint8_t*>kv.k + source * k, k)
    memcpy(<uint8_t*>kv.v + target * v, <uint8_t*>kv.v + source * v, v)
    if kv.dtype == KV_I8:
        k = kv.scale_block
        memcpy(kv.k_scale + target * k, kv.k_scale + source * k, k * sizeof(float))
        memcpy(kv.v_scale + target * k, kv.v_scale + source * k, k * sizeof(float))
