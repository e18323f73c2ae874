# Declarations of include/vec.h. The vector types are opaque to Cython: + - * on them pass straight through to C.

from libc.math cimport INFINITY, fabsf, frexpf, logf, sqrtf
from libc.stdint cimport int8_t, int32_t, uint8_t, uint16_t, uint32_t
from libc.string cimport memcpy, memset

from miro_cy._kernels.abi cimport (
    EXPONENT, KV_BF16, KV_F16, KV_F32, KV_I8, KV_RANGE, KV_TILE, LAYOUT_BF16, LAYOUT_F16, LAYOUT_F32, LAYOUT_Q4,
    LAYOUT_Q8, PANEL, PROBE_QUADS, QBLOCK, QGROUP, TILE_ROWS, Activations, AttentionParams, BatchRows, Candidate,
    KVCache, KernelTable, PackedMatrix, QuantBlock, attention_scratch_floats, is_float_layout, kv_element_size,
    matmul_scratch_floats,
)
from miro_cy._kernels.team cimport mi_deal, mi_meet, mi_member, mi_take
from miro_cy.native cimport MIRO_ASSERT, MIRO_INDEX, MIRO_SPAN

cdef extern from "tiles.h" nogil:
    enum:
        MI_TILES

cdef extern from "vec.h" nogil:
    ctypedef float vf
    ctypedef int vi
    enum:
        MI_VL
        MI_NV
        MI_SIGNED_ZERO
        MI_OPENS
        MI_AHEAD
        MI_NARROW
    vf vf_load(const float* p)
    void vf_store(float* p, vf v)
    vf vf_set1(float x)
    vf vf_zero()
    vf vf_fma(vf a, vf b, vf c)
    vf vf_load_f16(const uint16_t* p)
    vf vf_load_bf16(const uint16_t* p)
    vf vf_load_i8(const int8_t* p)
    vf vf_from_int(vi x)
    vi vi_load(const void* p)
    void vi_store(void* p, vi v)
    vi vi_zero()
    vi vi_set1(int32_t x)
    vi vi_set1_bytes(const void* p)
    vi vi_and(vi x, int32_t mask)
    vi vi_or(vi a, vi b)
    vi vi_flip(vi x)
    vi vi_shr(vi x, int n)
    vi vi_shl(vi x, int n)
    vi vi_dot_u8(vi narrow, vi w, vi a)
    vi vi_dot_s8(vi sum, vi w, vi a)
    vi vi_widen(vi sum, vi narrow)
    float mi_fma(float a, float b, float c)
    float mi_fold16(const float* lane)
    float mi_fold16_max(const float* lane)
    float mi_bits_to_float(uint32_t u)
    uint32_t mi_float_to_bits(float f)
    float mi_f16_to_f32(uint16_t h)
    float mi_bf16_to_f32(uint16_t h)
    uint16_t mi_f32_to_f16(float f)
    void mi_prefetch(const void* p)
    void mi_prefetch_l2(const void* p)


cdef inline Py_ssize_t share(Py_ssize_t n, int th, int nth) noexcept nogil:
    """Start of thread th's share of n items."""
    return n * th // nth


cdef inline float expf_fast(float x) noexcept nogil:
    """e**x, relative error below 2e-7 where the result is normal; 0 below -87.3, NaN for NaN.

    Cody and Waite range reduction, degree-5 polynomial (Cephes expf); the rounding trick and the selects vectorise.
    """
    cdef float z = <float>-87.33654 if x < <float>-87.33654 else x
    cdef float n, r, p
    cdef uint32_t bits
    z = <float>88.72283 if z > <float>88.72283 else z
    n = mi_fma(z, <float>1.44269504088896341, <float>12582912.0)
    bits = mi_float_to_bits(n)
    n = n - <float>12582912.0
    r = mi_fma(n, <float>-0.693359375, z)
    r = mi_fma(n, <float>2.12194440e-4, r)
    p = <float>1.9875691500E-4
    p = mi_fma(p, r, <float>1.3981999507E-3)
    p = mi_fma(p, r, <float>8.3334519073E-3)
    p = mi_fma(p, r, <float>4.1665795894E-2)
    p = mi_fma(p, r, <float>1.6666665459E-1)
    p = mi_fma(p, r, <float>5.0000001201E-1)
    p = mi_fma(p * r, r, r + <float>1.0)
    p = p * mi_bits_to_float((bits << 23) + 0x3f800000u)
    return <float>0.0 if x < <float>-87.33654 else p
