/* By hand, for AVX2 and AVX-512, what loops.pyx says in Cython: the same sums in the same order, so the same bits. */
#pragma once
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define HAND static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))

HAND float sum4(__m128 s) { /* (0 + 2) + (1 + 3) */
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
HAND float sum8(__m256 s) { return sum4(_mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1))); }

/* W is [panels][k][16] halves, x [8, k]; y [8, 16 * panels]. A tile is some rows of x by some vectors of outputs. */
#if defined(__AVX512F__)

APART void c_dots(const float *q, const float *k, float *y, ptrdiff_t n) {
    for (ptrdiff_t r = 0; r < n; r++, k += 128) {
        __m512 a = _mm512_mul_ps(_mm512_loadu_ps(q), _mm512_loadu_ps(k));
        __m512 b = _mm512_mul_ps(_mm512_loadu_ps(q + 16), _mm512_loadu_ps(k + 16));
        a = _mm512_fmadd_ps(_mm512_loadu_ps(q + 32), _mm512_loadu_ps(k + 32), a);
        b = _mm512_fmadd_ps(_mm512_loadu_ps(q + 48), _mm512_loadu_ps(k + 48), b);
        a = _mm512_fmadd_ps(_mm512_loadu_ps(q + 64), _mm512_loadu_ps(k + 64), a);
        b = _mm512_fmadd_ps(_mm512_loadu_ps(q + 80), _mm512_loadu_ps(k + 80), b);
        a = _mm512_fmadd_ps(_mm512_loadu_ps(q + 96), _mm512_loadu_ps(k + 96), a);
        b = _mm512_fmadd_ps(_mm512_loadu_ps(q + 112), _mm512_loadu_ps(k + 112), b);
        a = _mm512_add_ps(a, b);
        y[r] = sum8(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
    }
}

HAND void hand_tile(int rows, int panels, const float *x, const uint16_t *w, float *y, ptrdiff_t k, ptrdiff_t ldy) {
    __m512 acc[8][2], weights[2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) acc[r][p] = _mm512_setzero_ps();
    for (ptrdiff_t i = 0; i < k; i++) {
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++)
            weights[p] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(w + (p * k + i) * 16)));
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            __m512 one = _mm512_set1_ps(x[r * k + i]);
#pragma GCC unroll 2
            for (int p = 0; p < panels; p++) acc[r][p] = _mm512_fmadd_ps(one, weights[p], acc[r][p]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) _mm512_storeu_ps(y + r * ldy + p * 16, acc[r][p]);
}

/* all 8 rows by 2 panels, as the kernel does it */
APART void c_matmul_same(const float *x, const uint16_t *w, float *y, ptrdiff_t k, ptrdiff_t panels, ptrdiff_t ldy) {
    for (ptrdiff_t p = 0; p < panels; p += 2) hand_tile(8, 2, x, w + p * k * 16, y + p * 16, k, ldy);
}

/* 4 rows by 2 panels: twice the loads of weights */
APART void c_matmul_other(const float *x, const uint16_t *w, float *y, ptrdiff_t k, ptrdiff_t panels, ptrdiff_t ldy) {
    for (ptrdiff_t p = 0; p < panels; p += 2)
        for (int r = 0; r < 8; r += 4) hand_tile(4, 2, x + r * k, w + p * k * 16, y + r * ldy + p * 16, k, ldy);
}

#else

APART void c_dots(const float *q, const float *k, float *y, ptrdiff_t n) {
    for (ptrdiff_t r = 0; r < n; r++, k += 128) {
        __m256 a = _mm256_mul_ps(_mm256_loadu_ps(q), _mm256_loadu_ps(k));
        __m256 b = _mm256_mul_ps(_mm256_loadu_ps(q + 8), _mm256_loadu_ps(k + 8));
        __m256 c = _mm256_mul_ps(_mm256_loadu_ps(q + 16), _mm256_loadu_ps(k + 16));
        __m256 d = _mm256_mul_ps(_mm256_loadu_ps(q + 24), _mm256_loadu_ps(k + 24));
#pragma GCC unroll 3
        for (int i = 32; i < 128; i += 32) {
            a = _mm256_fmadd_ps(_mm256_loadu_ps(q + i), _mm256_loadu_ps(k + i), a);
            b = _mm256_fmadd_ps(_mm256_loadu_ps(q + i + 8), _mm256_loadu_ps(k + i + 8), b);
            c = _mm256_fmadd_ps(_mm256_loadu_ps(q + i + 16), _mm256_loadu_ps(k + i + 16), c);
            d = _mm256_fmadd_ps(_mm256_loadu_ps(q + i + 24), _mm256_loadu_ps(k + i + 24), d);
        }
        y[r] = sum8(_mm256_add_ps(_mm256_add_ps(a, c), _mm256_add_ps(b, d)));
    }
}

HAND void hand_tile(int rows, int vectors, const float *x, const uint16_t *w, float *y, ptrdiff_t k, ptrdiff_t ldy) {
    __m256 acc[8][2], weights[2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) acc[r][v] = _mm256_setzero_ps();
    for (ptrdiff_t i = 0; i < k; i++) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            weights[v] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(w + i * 16 + v * 8)));
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            __m256 one = _mm256_set1_ps(x[r * k + i]);
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) acc[r][v] = _mm256_fmadd_ps(one, weights[v], acc[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) _mm256_storeu_ps(y + r * ldy + v * 8, acc[r][v]);
}

/* 4 rows by a panel, as the kernel does it */
APART void c_matmul_same(const float *x, const uint16_t *w, float *y, ptrdiff_t k, ptrdiff_t panels, ptrdiff_t ldy) {
    for (ptrdiff_t p = 0; p < panels; p++)
        for (int r = 0; r < 8; r += 4) hand_tile(4, 2, x + r * k, w + p * k * 16, y + r * ldy + p * 16, k, ldy);
}

/* all 8 rows by half a panel: each weight is widened once */
APART void c_matmul_other(const float *x, const uint16_t *w, float *y, ptrdiff_t k, ptrdiff_t panels, ptrdiff_t ldy) {
    for (ptrdiff_t p = 0; p < panels; p++)
        for (int v = 0; v < 2; v++) hand_tile(8, 1, x, w + p * k * 16 + v * 8, y + p * 16 + v * 8, k, ldy);
}

#endif
