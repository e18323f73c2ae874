/* Tile registers (Intel AMX) and the float16 vectors that weights are opened in.
 *
 * A tile is 16 rows of 64 bytes. TDPBF16PS adds to a tile of 16 x 16 floats the products of 16 rows of 32 bfloat16 with
 * 32 x 16 of them, which lie in pairs: weights[pair][output][2]. For each sum: one chain of fused multiply-adds over the
 * 16 first halves of the pairs, one over the 16 second ones, their sum, and that added to the tile (Intel, Software
 * Developer's Manual). So an output's bits depend on its own row and column alone, whatever the tile's other rows.
 *
 * All of it is written as assembly that touches memory, because GCC's intrinsics do not say that they read it: the
 * compiler may then store weights after the tile was loaded, or drop the configuration (GCC 12 does).
 */
#pragma once
#include "vec.h"
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512FP16__) && defined(__AVX512VBMI__)
#define MI_TILES 1
#else
#define MI_TILES 0
#endif

#if MI_TILES
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} mi_tile_config __attribute__((aligned(64)));

/* Two tiles of `a` and `b` rows of activations (1 to 16, 0 to 16), and clears all: tiles 4 and 5 are those, 6 and 7 two
 * panels of weights, 0 and 1 the sums of the first rows with each, 2 and 3 those of the second. */
MI_INLINE void mi_tiles_shape(int a, int b) {
    mi_tile_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        int second = i == 2 || i == 3 || i == 5;
        c.row_bytes[i] = 64;
        c.rows[i] = (uint8_t)(i >= 6 ? 16 : second ? (b ? b : 1) : a);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(c) : "memory");
}
MI_INLINE void mi_tiles_release(void) { __asm__ volatile("tilerelease" : : : "memory"); }
/* The numbers of tiles must be constants. */
#define mi_tile_zero(t) __asm__ volatile("tilezero %%tmm%c0" : : "i"(t) : "memory")
#define mi_tile_load(t, p, stride) \
    __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(t), "r"(p), "r"((long)(stride)) : "memory")
#define mi_tile_store(t, p, stride) \
    __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(t), "r"(p), "r"((long)(stride)) : "memory")
#define mi_tile_dot(sum, x, w) \
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(x), "i"(w) : "memory")

/* --- 32 float16: of 16 outputs, a pair of k each ------------------------------------------------------------------ */
typedef _Float16 vh __attribute__((vector_size(64), may_alias));
typedef uint16_t vu16 __attribute__((vector_size(64), may_alias));
typedef uint8_t vu8 __attribute__((vector_size(64), may_alias));

MI_INLINE vh vh_set1(float x) { return (vh)_mm512_set1_ph((_Float16)x); }
MI_INLINE vh vh_fma(vh a, vh b, vh c) { return (vh)_mm512_fmadd_ph((__m512h)a, (__m512h)b, (__m512h)c); }

/* 16 values, each for both k of its output's pair. Bytes are permuted here and below: vpermb is one operation, vpermw
 * two, which take both vector ports. */
MI_INLINE vh vh_pairs(__m256i halves) {
    const vu8 twice = {0,  1,  0,  1,  2,  3,  2,  3,  4,  5,  4,  5,  6,  7,  6,  7,  8,  9,  8,  9,  10, 11,
                       10, 11, 12, 13, 12, 13, 14, 15, 14, 15, 16, 17, 16, 17, 18, 19, 18, 19, 20, 21, 20, 21,
                       22, 23, 22, 23, 24, 25, 24, 25, 26, 27, 26, 27, 28, 29, 28, 29, 30, 31, 30, 31};
    return (vh)_mm512_permutexvar_epi8((__m512i)twice, _mm512_castsi256_si512(halves));
}
MI_INLINE vh vh_pairs_of_halves(const void *p) { return vh_pairs(_mm256_loadu_si256((const __m256i *)p)); }
/* floats may be out of float16's range before they are multiplied */
MI_INLINE vh vh_pairs_of_floats(const float *p, float factor) {
    __m512 scaled = (__m512)(vf_load(p) * vf_set1(factor));
    return vh_pairs(_mm512_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* The nibble at bit `shift` of each 16 bits, less 8. Halves of -8 to 7 have nothing in their lower byte, so only the
 * upper one is looked up, by the six lowest bits of it; the table has all values four times, as whatever lies above the
 * nibble does not matter.
 *
 * The nibble at bit 0 gets there by the other vector port than shifts take: while tiles multiply, fused multiply-adds
 * have only that of the shifts. */
#define MI_HALVES 0xc8, 0xc7, 0xc6, 0xc5, 0xc4, 0xc2, 0xc0, 0xbc, 0x00, 0x3c, 0x40, 0x42, 0x44, 0x45, 0x46, 0x47
MI_INLINE vh vh_nibbles(vi x, int shift) {
    const vu8 value = {MI_HALVES, MI_HALVES, MI_HALVES, MI_HALVES};
    const __m512i from = _mm512_set1_epi64(0x3000200010000000); /* in bits: byte 2 i + 1 of eight is to be byte 2 i */
    __m512i upper = shift == 0  ? _mm512_multishift_epi64_epi8(from, (__m512i)x)
                    : shift > 8 ? _mm512_srli_epi16((__m512i)x, shift - 8)
                                : _mm512_slli_epi16((__m512i)x, 8 - shift);
    return (vh)_mm512_maskz_permutexvar_epi8(0xaaaaaaaaaaaaaaaa, upper, (__m512i)value);
}

/* The byte at bit `shift` of each 16 bits, 0 or 8, into the lower one, above it zeros or what lay there. */
MI_INLINE __m512i mi_lower_bytes(vi x, int shift) {
    const vi upper = {0x80038001, 0x80078005, 0x800b8009, 0x800f800d, 0x80038001, 0x80078005, 0x800b8009, 0x800f800d,
                      0x80038001, 0x80078005, 0x800b8009, 0x800f800d, 0x80038001, 0x80078005, 0x800b8009, 0x800f800d};
    return shift ? _mm512_shuffle_epi8((__m512i)x, (__m512i)upper) : (__m512i)x;
}
/* An unsigned one, less `zero`; 0x6400 is 1024 and its last bit counts 1. */
MI_INLINE vh vh_bytes(vi x, int shift, float zero) {
    __m512i y = _mm512_ternarylogic_epi32( /* of y, a and b: y & a | b */
        mi_lower_bytes(x, shift), _mm512_set1_epi16(0xff), _mm512_set1_epi16(0x6400), 0xea);
    return (vh)y - vh_set1(1024 + zero);
}
/* A signed one: its sign is inverted, which makes it 128 larger and unsigned. */
MI_INLINE vh vh_signed_bytes(vi x, int shift) {
    __m512i y = _mm512_ternarylogic_epi32( /* of y, a and b: a ? y ^ b : b */
        mi_lower_bytes(x, shift), _mm512_set1_epi16(0xff), _mm512_set1_epi16(0x6480), 0x6a);
    return (vh)y - vh_set1(1024 + 128);
}

/* float16 -> bfloat16 of 2**-112 times as much: the sign stays, the other bits move down by three, which cuts the
 * mantissa off. Subnormal halves become bfloat16 that the tiles take for zero. */
MI_INLINE void vh_store_cut(void *p, vh v) {
    __m512i bits = _mm512_srai_epi16((__m512i)v, 3);
    _mm512_storeu_si512(p, _mm512_and_si512(bits, _mm512_set1_epi16((short)0x8fff)));
}

/* 32 floats times `factor` as bfloat16, to nearest, in the pairs that blocks of weights lie in: pair 4 * q + j is of
 * k = 4 * q + j / 2 + 16 * (j % 2) and that plus 2. */
MI_INLINE void mi_store_pairs(void *p, const float *x, float factor) {
    const vu16 order = {0,  2,  16, 18, 1,  3,  17, 19, 4,  6,  20, 22, 5,  7,  21, 23,
                        8,  10, 24, 26, 9,  11, 25, 27, 12, 14, 28, 30, 13, 15, 29, 31};
    __m512 low = (__m512)(vf_load(x) * vf_set1(factor)), high = (__m512)(vf_load(x + 16) * vf_set1(factor));
    __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi16((__m512i)order, rounded));
}

/* 32 floats as bfloat16, to nearest */
MI_INLINE void mi_store_rounded(void *p, vf low, vf high) {
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}

/* --- floats in pieces of bfloat16, exactly ------------------------------------------------------------------------ */
/* a in the lower and b in the upper half of each 32 bits, cut to their upper 16 bits */
MI_INLINE vi mi_upper_halves(vf a, vf b) {
    return (vi)_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32((__m512i)a, 16), (__m512i)b);
}
/* what that leaves of a */
MI_INLINE vf mi_below(vf a) { return a - (vf)((vi)a & (int32_t)0xffff0000); }
#endif
