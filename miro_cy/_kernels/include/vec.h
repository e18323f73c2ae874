/* Vector types and the few primitives that the compiler's own vector code cannot express.
 *
 * vf and vi are GCC vector types as wide as the instruction set this file is compiled for; + - * on them work
 * everywhere. Bodies with intrinsics exist only for narrow loads, fused multiply-add and int8 dot products;
 * each has a portable body beside it that gives the same result. The file is built with -ffp-contract=off: a multiply
 * and an add fuse where vf_fma or mi_fma says so, and nowhere else.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define MI_VL 16
#elif defined(__AVX2__)
#define MI_VL 8
#else
#define MI_VL 4 /* SSE2, SSE4.2, NEON and anything else */
#endif
#define MI_NV (16 / MI_VL) /* vectors in a 16-lane panel row */
/* Whether matmuls of floats call for their next weights: on AVX2, where it was measured to pay. */
#define MI_AHEAD (MI_VL == 8)

/* Cython's "cdef inline" is a hint; the kernels rely on it to specialise on constant arguments. */
#undef CYTHON_INLINE
#define CYTHON_INLINE inline __attribute__((always_inline))
#define MI_INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * MI_VL), may_alias));
typedef float vf_unaligned __attribute__((vector_size(4 * MI_VL), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * MI_VL), may_alias));
typedef int32_t vi_unaligned __attribute__((vector_size(4 * MI_VL), aligned(1), may_alias));
typedef int16_t vi16 __attribute__((vector_size(4 * MI_VL), may_alias));
typedef int8_t vi8 __attribute__((vector_size(4 * MI_VL), may_alias));
typedef uint8_t vu8 __attribute__((vector_size(4 * MI_VL), may_alias));

#define mi_prefetch(p) __builtin_prefetch((p), 0, 3)
#define mi_prefetch_l2(p) __builtin_prefetch((p), 0, 2)

MI_INLINE vf vf_load(const float *p) { return *(const vf_unaligned *)p; }
MI_INLINE void vf_store(float *p, vf v) { *(vf_unaligned *)p = v; }
MI_INLINE vf vf_set1(float x) { return x - (vf){0}; }
MI_INLINE vf vf_zero(void) { return (vf){0}; }
MI_INLINE vi vi_load(const void *p) { return *(const vi_unaligned *)p; }
MI_INLINE void vi_store(void *p, vi v) { *(vi_unaligned *)p = v; }
MI_INLINE vi vi_zero(void) { return (vi){0}; }
MI_INLINE vi vi_set1(int32_t x) { return x - (vi){0}; }
MI_INLINE vi vi_set1_bytes(const void *p) { int32_t x; memcpy(&x, p, 4); return vi_set1(x); }
MI_INLINE vi vi_and(vi x, int32_t mask) { return x & mask; }
MI_INLINE vi vi_or(vi a, vi b) { return a | b; }
MI_INLINE vi vi_flip(vi x) { return x ^ (int32_t)0x80808080; } /* signed bytes <-> unsigned, 128 too large */
MI_INLINE vi vi_shr(vi x, int n) { return x >> n; }
MI_INLINE vi vi_shl(vi x, int n) { return (vi)((vi)x << n); }
MI_INLINE vf vf_from_int(vi x) { return __builtin_convertvector(x, vf); }

MI_INLINE float mi_fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

MI_INLINE vf vf_fma(vf a, vf b, vf c) {
#if MI_VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && MI_VL == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

MI_INLINE float mi_bits_to_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
MI_INLINE uint32_t mi_float_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

/* IEEE half -> float, exact for every input. */
MI_INLINE float mi_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
    if (rest >= 0x7c00u) return mi_bits_to_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    float magnitude = mi_bits_to_float(rest << 13) * 5.192296858534828e+33f; /* 2^112: moves the exponent bias */
    return mi_bits_to_float(sign | mi_float_to_bits(magnitude));
}

/* float -> IEEE half, to nearest, ties to even; overflow gives infinity, NaN stays NaN. */
MI_INLINE uint16_t mi_f32_to_f16(float f) {
#if defined(__F16C__)
    return (uint16_t)_cvtss_sh(f, 0);
#elif defined(__aarch64__)
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(f))), 0);
#else
    uint32_t u = mi_float_to_bits(f), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (a < 0x38800000u) { /* subnormal half: let float addition do the rounding */
        float g = mi_bits_to_float(a) + 0.5f;
        return (uint16_t)(sign | (mi_float_to_bits(g) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((a - 0x38000000u + 0xfffu + (a >> 13 & 1u)) >> 13));
#endif
}

MI_INLINE vf vf_load_f16(const uint16_t *p) {
#if MI_VL == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__) && MI_VL == 8
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    vf r;
    for (int i = 0; i < MI_VL; i++) r[i] = mi_f16_to_f32(p[i]);
    return r;
#endif
}

/* bfloat16 is the upper half of a float: widening is a shift, exact for every input. */
MI_INLINE float mi_bf16_to_f32(uint16_t h) { return mi_bits_to_float((uint32_t)h << 16); }

MI_INLINE vf vf_load_bf16(const uint16_t *p) {
#if MI_VL == 16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#elif defined(__SSE2__)
    return (vf)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)p));
#elif defined(__aarch64__)
    return (vf)vshll_n_u16(vld1_u16(p), 16);
#else
    vf r;
    for (int i = 0; i < MI_VL; i++) r[i] = mi_bf16_to_f32(p[i]);
    return r;
#endif
}

/* Signed bytes as floats. */
MI_INLINE vf vf_load_i8(const int8_t *p) {
#if MI_VL == 16
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#elif defined(__SSE2__) || defined(__aarch64__)
    int32_t four;
    memcpy(&four, p, 4);
#if defined(__SSE2__)
    __m128i wide = _mm_cvtsi32_si128(four); /* each byte to the top of its lane, then down with its sign */
    wide = _mm_unpacklo_epi8(wide, wide);
    wide = _mm_srai_epi32(_mm_unpacklo_epi16(wide, wide), 24);
    return (vf)_mm_cvtepi32_ps(wide);
#else
    return (vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
#endif
#else
    vf r;
    for (int i = 0; i < MI_VL; i++) r[i] = (float)p[i];
    return r;
#endif
}

/* --- 16 lanes into one, always in this order: halves, quarters, then pairs ----------------------------------------
 * Left to the compiler, loops over so few lanes become scalar code that takes as long as a dot product of 128. */
typedef float v4f __attribute__((vector_size(16), may_alias));
typedef float v4f_unaligned __attribute__((vector_size(16), aligned(4), may_alias));

MI_INLINE float mi_fold16(const float *lane) {
    const v4f_unaligned *q = (const v4f_unaligned *)lane;
    v4f t = (q[0] + q[2]) + (q[1] + q[3]);
    return (t[0] + t[2]) + (t[1] + t[3]);
}

/* a > b ? a : b, lane by lane: b where either is NaN */
MI_INLINE v4f mi_max4(v4f a, v4f b) {
#if defined(__SSE__)
    return (v4f)_mm_max_ps((__m128)a, (__m128)b);
#else
    for (int i = 0; i < 4; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
#endif
}

MI_INLINE float mi_fold16_max(const float *lane) {
    const v4f_unaligned *q = (const v4f_unaligned *)lane;
    v4f t = mi_max4(mi_max4(q[0], q[2]), mi_max4(q[1], q[3]));
    float a = t[0] > t[2] ? t[0] : t[2], b = t[1] > t[3] ? t[1] : t[3];
    return a > b ? a : b;
}

/* --- int8 dot products of four neighbouring bytes into each 32-bit lane, exact ---------------------------------
 * Unsigned weights below 64 go through a narrow accumulator: int16 lanes without VNNI. A step adds at most
 * 2 * max * 127 to a lane, so with weights up to 15 / 31 / 63 a caller may take 8 / 4 / 2 steps before it widens. */
#if (MI_VL == 16 && defined(__AVX512VNNI__)) || !defined(__SSSE3__)
#define MI_NARROW 0 /* vi_dot_u8 adds into 32-bit lanes: no widening needed */
#else
#define MI_NARROW 1
#endif

#if defined(__aarch64__)
/* Signed bytes, w any and a in [-127, 127], so two products fit int16; weights below 64 are the same signed or not. */
MI_INLINE vi vi_dot_neon(vi sum, vi w, vi a) {
#if defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)a);
#else
    int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)w), vget_low_s8((int8x16_t)a));
    int16x8_t high = vmull_high_s8((int8x16_t)w, (int8x16_t)a);
    return (vi)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
#endif
}
#endif

/* A sum that must be in a register now: told so, the compiler makes one after the other. Else it makes all products of
 * some steps first and has nowhere to keep them, which costs tiles of four bits a quarter of their speed on AVX2. */
#if defined(__x86_64__)
#define MI_IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define MI_IN_REGISTER(x) (void)0
#endif

MI_INLINE vi vi_dot_u8(vi narrow, vi w, vi a) {
#if MI_VL == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)narrow, (__m512i)w, (__m512i)a);
#elif defined(__SSSE3__)
#if MI_VL == 16
    vi16 sum = (vi16)narrow + (vi16)_mm512_maddubs_epi16((__m512i)w, (__m512i)a);
#elif defined(__AVX2__)
    vi16 sum = (vi16)narrow + (vi16)_mm256_maddubs_epi16((__m256i)w, (__m256i)a);
#else
    vi16 sum = (vi16)narrow + (vi16)_mm_maddubs_epi16((__m128i)w, (__m128i)a);
#endif
    MI_IN_REGISTER(sum);
    return (vi)sum;
#elif defined(__aarch64__)
    return vi_dot_neon(narrow, w, a);
#else
    for (int i = 0; i < MI_VL; i++)
        for (int j = 0; j < 4; j++) narrow[i] += (int32_t)((vu8)w)[4 * i + j] * ((vi8)a)[4 * i + j];
    return narrow;
#endif
}

/* sum + the narrow accumulator of vi_dot_u8 */
MI_INLINE vi vi_widen(vi sum, vi narrow) {
#if !MI_NARROW
    return sum + narrow;
#elif MI_VL == 16
    return sum + (vi)_mm512_madd_epi16((__m512i)narrow, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    return sum + (vi)_mm256_madd_epi16((__m256i)narrow, _mm256_set1_epi16(1));
#else
    return sum + (vi)_mm_madd_epi16((__m128i)narrow, _mm_set1_epi16(1));
#endif
}

/* Signed weights (all 8 bits used). With VNNI the weight's top bit is flipped, which makes it unsigned and 128 too
 * large: MI_SIGNED_ZERO is what a caller must take off again, times the sum of a. Activations lie in [-127, 127].
 * Where all 8 bits go through vi_dot_u8, matmuls of many rows may open their weights into unsigned bytes beforehand. */
#if MI_VL == 16 && defined(__AVX512VNNI__)
#define MI_SIGNED_ZERO 128
#define MI_OPENS 1
#else
#define MI_SIGNED_ZERO 0
#define MI_OPENS 0
#endif
MI_INLINE vi vi_dot_s8(vi sum, vi w, vi a) {
#if MI_VL == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)vi_flip(w), (__m512i)a);
#elif MI_VL == 16
    __m512i minus_a = _mm512_mask_sub_epi8((__m512i)a, _mm512_movepi8_mask((__m512i)w), _mm512_setzero_si512(), (__m512i)a);
    __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)w), minus_a);
    sum += (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
    MI_IN_REGISTER(sum);
    return sum;
#elif defined(__AVX2__)
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), _mm256_sign_epi8((__m256i)a, (__m256i)w));
    sum += (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    MI_IN_REGISTER(sum);
    return sum;
#elif defined(__SSSE3__)
    __m128i pairs = _mm_maddubs_epi16(_mm_abs_epi8((__m128i)w), _mm_sign_epi8((__m128i)a, (__m128i)w));
    sum += (vi)_mm_madd_epi16(pairs, _mm_set1_epi16(1));
    MI_IN_REGISTER(sum);
    return sum;
#elif defined(__aarch64__)
    return vi_dot_neon(sum, w, a);
#else
    for (int i = 0; i < MI_VL; i++)
        for (int j = 0; j < 4; j++) sum[i] += (int32_t)((vi8)w)[4 * i + j] * ((vi8)a)[4 * i + j];
    return sum;
#endif
}
