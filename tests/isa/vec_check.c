/* Every primitive of vec.h against plain C, and two small tiles made of them. Compiled once for each instruction-set
 * level; prints which body that gave and how many values it compared, and ends with 1 at the first that differs.
 *
 * The references share nothing with vec.h: halves are decoded and rounded in double arithmetic, dot products are summed
 * in 64 bits. Values are compared by their bits, NaN by being NaN. */
#include <stdio.h>
#include <stdlib.h>

#include "vec.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define BODY "dotprod"
#elif defined(__aarch64__)
#define BODY "neon"
#elif MI_VL == 16 && defined(__AVX512VNNI__)
#define BODY "avx512vnni"
#elif MI_VL == 16
#define BODY "avx512"
#elif MI_VL == 8
#define BODY "avx2"
#elif defined(__SSSE3__)
#define BODY "ssse3"
#else
#define BODY "portable"
#endif
#if defined(__FMA__) || defined(__aarch64__)
#define FUSED 1
#else
#define FUSED 0
#endif
#define ROUNDS 20000

static long compared = 0;

static void same_int(const char *name, long long got, long long wanted) {
    compared++;
    if (got == wanted) return;
    printf("%s: got %lld (%#llx), wanted %lld (%#llx)\n", name, got, got, wanted, wanted);
    exit(1);
}

static uint32_t bits_of(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
static float float_of(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }

static void same_float(const char *name, float got, float wanted) {
    compared++;
    if (bits_of(got) == bits_of(wanted) || (got != got && wanted != wanted)) return;
    printf("%s: got %a (%#x), wanted %a (%#x)\n", name, got, bits_of(got), wanted, bits_of(wanted));
    exit(1);
}

static uint64_t state = 88172645463325252u;
static uint32_t random32(void) { /* xorshift64* (Vigna 2016) */
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (uint32_t)(state * 2685821657736338717u >> 32);
}

/* --- plain C -------------------------------------------------------------------------------------------------- */
static float half_to_float(uint16_t h) {
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    double x = exponent == 31 ? (mantissa ? NAN : INFINITY)
             : exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    return (float)(h & 0x8000 ? -x : x);
}

static uint16_t float_to_half(float f) {
    uint16_t sign = (uint16_t)(bits_of(f) >> 16 & 0x8000);
    double x = fabs((double)f);
    int exponent;
    if (f != f) return sign | 0x7e00;
    frexp(x, &exponent);
    if (exponent < -13) exponent = -13; /* subnormal halves have the spacing of the smallest normal ones */
    double units = isinf(x) ? INFINITY : rint(ldexp(x, 11 - exponent)); /* ties to even, as is the default */
    double rounded = ldexp(units, exponent - 11);
    if (rounded > 65504) return sign | 0x7c00;
    if (rounded < ldexp(1, -14)) return (uint16_t)(sign | (int)ldexp(rounded, 24));
    frexp(rounded, &exponent);
    return (uint16_t)(sign | ((exponent + 14) << 10) | ((int)ldexp(rounded, 11 - exponent) & 1023));
}

static float plain_fma(float a, float b, float c) {
    if (FUSED) return fmaf(a, b, c);
    volatile float product = a * b;
    return product + c;
}

static int64_t plain_dot(const uint8_t *w, int is_signed, const int8_t *a, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++) sum += (is_signed ? (int8_t)w[i] : w[i]) * (int64_t)a[i];
    return sum;
}

/* --- primitives ----------------------------------------------------------------------------------------------- */
static const uint32_t EDGES[] = {
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000, 0x80800000, 0x00800001, /* subnormal, least */
    0x3f800000, 0xbf800000, 0x3f7fffff, 0x3f800001, 0x34000000, 0x33800000, 0x4b800000, 0x4b800001, /* ties of 1 + x */
    0x7f7fffff, 0xff7fffff, 0x7f000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001, /* large, inf, NaN */
    0x33000000, 0x33000001, 0x38800000, 0x387fe000, 0x387ff000, 0x477fe000, 0x477fefff, 0x477ff000, /* half's limits */
};
#define N_EDGES ((int)(sizeof EDGES / sizeof *EDGES))

static void check_fma(void) {
    float a[MI_VL], b[MI_VL], c[MI_VL], y[MI_VL];
    long edges = (long)N_EDGES * N_EDGES * N_EDGES;
    for (long r = 0; r < edges + ROUNDS * MI_VL; r += MI_VL) {
        for (int i = 0; i < MI_VL; i++) {
            long n = r + i;
            a[i] = float_of(n < edges ? EDGES[n % N_EDGES] : random32());
            b[i] = float_of(n < edges ? EDGES[n / N_EDGES % N_EDGES] : random32());
            c[i] = float_of(n < edges ? EDGES[n / N_EDGES / N_EDGES] : random32());
            if (n >= edges && random32() & 1) c[i] = -(a[i] * b[i]); /* what only a fused product leaves over */
        }
        vf_store(y, vf_fma(vf_load(a), vf_load(b), vf_load(c)));
        for (int i = 0; i < MI_VL; i++) {
            same_float("vf_fma", y[i], plain_fma(a[i], b[i], c[i]));
            same_float("mi_fma", mi_fma(a[i], b[i], c[i]), plain_fma(a[i], b[i], c[i]));
        }
    }
}

static void check_widening(void) {
    uint16_t h[MI_VL + 1];
    float y[MI_VL];
    for (int n = 0; n < 0x10000; n += MI_VL) {
        for (int i = 0; i < MI_VL; i++) h[1 + i] = (uint16_t)(n + i); /* + 1: loads need no alignment */
        vf_store(y, vf_load_f16(h + 1));
        for (int i = 0; i < MI_VL; i++) {
            same_float("vf_load_f16", y[i], half_to_float(h[1 + i]));
            same_float("mi_f16_to_f32", mi_f16_to_f32(h[1 + i]), half_to_float(h[1 + i]));
        }
        vf_store(y, vf_load_bf16(h + 1));
        for (int i = 0; i < MI_VL; i++) {
            same_int("vf_load_bf16", bits_of(y[i]), (uint32_t)h[1 + i] << 16);
            same_int("mi_bf16_to_f32", bits_of(mi_bf16_to_f32(h[1 + i])), (uint32_t)h[1 + i] << 16);
        }
    }
}

static void check_bytes(void) {
    int8_t b[MI_VL + 1];
    float y[MI_VL];
    for (int n = -128; n < 128; n++) {
        for (int i = 0; i <= MI_VL; i++) b[i] = (int8_t)(n + 37 * i);
        vf_store(y, vf_load_i8(b + 1));
        for (int i = 0; i < MI_VL; i++) same_float("vf_load_i8", y[i], (float)b[1 + i]);
    }
}

static void same_half(float f) {
    uint16_t got = mi_f32_to_f16(f), wanted = float_to_half(f);
    if (f != f) same_int("mi_f32_to_f16 of NaN", (got & 0x7c00) == 0x7c00 && (got & 0x3ff) != 0, 1);
    else same_int("mi_f32_to_f16", got, wanted);
}

static void check_narrowing(void) {
    for (int i = 0; i < N_EDGES; i++) same_half(float_of(EDGES[i]));
    for (int h = 0; h < 0x7c00; h++) { /* each half, the tie with the next one, and the floats around that */
        float low = half_to_float((uint16_t)h);
        float next = h == 0x7bff ? 65536.0f : half_to_float((uint16_t)(h + 1)); /* what would overflow to infinity */
        uint32_t tie = bits_of((float)(((double)low + next) / 2));
        for (int sign = 0; sign < 2; sign++) {
            same_half(sign ? -low : low);
            for (int d = -1; d <= 1; d++) same_half(float_of((tie + (uint32_t)d) | (uint32_t)sign << 31));
        }
    }
    for (int r = 0; r < 50 * ROUNDS; r++) same_half(float_of(random32()));
}

static void check_integers(void) {
    int32_t x[MI_VL], y[MI_VL];
    uint8_t bytes[4 * MI_VL + 1];
    float f[MI_VL];
    for (int r = 0; r < ROUNDS; r++) {
        int n = (int)(random32() % 32);
        for (int i = 0; i < MI_VL; i++) x[i] = (int32_t)(r % 16 ? random32() : (uint32_t)(i % 2 ? INT32_MIN + i : -i));
        memcpy(bytes + 1, x, sizeof x);
        vi v = vi_load(bytes + 1);
        vi_store(y, vi_and(v, 0x0f0f0f0f));
        for (int i = 0; i < MI_VL; i++) same_int("vi_and", y[i], x[i] & 0x0f0f0f0f);
        vi_store(y, vi_or(v, vi_set1(r)));
        for (int i = 0; i < MI_VL; i++) same_int("vi_or", y[i], x[i] | r);
        vi_store(y, vi_shr(v, n));
        for (int i = 0; i < MI_VL; i++) same_int("vi_shr", y[i], (int64_t)x[i] >> n);
        vi_store(y, vi_shl(v, n));
        for (int i = 0; i < MI_VL; i++) same_int("vi_shl", y[i], (int32_t)((uint32_t)x[i] << n));
        vi_store(y, vi_set1_bytes(bytes + 1));
        for (int i = 0; i < MI_VL; i++) same_int("vi_set1_bytes", y[i], x[0]);
        vf_store(f, vf_from_int(v));
        for (int i = 0; i < MI_VL; i++) same_float("vf_from_int", f[i], (float)x[i]);
        vf_store(f, vf_set1(float_of((uint32_t)x[0])));
        for (int i = 0; i < MI_VL; i++) same_float("vf_set1", f[i], float_of((uint32_t)x[0]));
        vf_store(f, vf_zero());
        vi_store(y, vi_zero());
        for (int i = 0; i < MI_VL; i++) same_int("zero", bits_of(f[i]) | (uint32_t)y[i], 0);
    }
}

/* A byte of weights or activations: a random one, or an extreme that all of a round share. */
static int8_t draw_activation(int r) { return (int8_t)(r % 8 == 0 ? 127 : r % 8 == 1 ? -127 : (int)(random32() % 255) - 127); }

static void check_unsigned_dots(void) { /* as many steps as the narrow accumulator may take */
    uint8_t w[8][4 * MI_VL];
    int8_t a[8][4 * MI_VL];
    int32_t before[MI_VL], y[MI_VL];
    for (int r = 0; r < ROUNDS; r++) {
        int steps = 8 >> r % 3, most = 128 / steps - 1; /* 8, 4, 2: 15, 31, 63 */
        vi narrow = vi_zero();
        for (int i = 0; i < MI_VL; i++) before[i] = (int32_t)random32() >> 4;
        for (int s = 0; s < steps; s++) {
            for (int i = 0; i < 4 * MI_VL; i++) {
                w[s][i] = (uint8_t)(r % 5 == 0 ? most : (int)(random32() % (uint32_t)(most + 1)));
                a[s][i] = draw_activation(r / 4);
            }
            narrow = vi_dot_u8(narrow, vi_load(w[s]), vi_load(a[s]));
        }
        vi_store(y, vi_widen(vi_load(before), narrow));
        for (int i = 0; i < MI_VL; i++) {
            int64_t wanted = before[i];
            for (int s = 0; s < steps; s++) wanted += plain_dot(w[s] + 4 * i, 0, a[s] + 4 * i, 4);
            same_int("vi_dot_u8", y[i], wanted);
        }
    }
}

static void check_signed_dots(void) {
    uint8_t w[4 * MI_VL];
    int8_t a[4 * MI_VL];
    int32_t before[MI_VL], y[MI_VL];
    for (int r = 0; r < ROUNDS; r++) {
        for (int i = 0; i < MI_VL; i++) before[i] = (int32_t)random32() >> 4;
        for (int i = 0; i < 4 * MI_VL; i++) {
            w[i] = (uint8_t)(r % 5 == 0 ? 0x80 : r % 5 == 1 ? 0x7f : random32() & 255);
            a[i] = draw_activation(r / 5);
        }
        vi_store(y, vi_dot_s8(vi_load(before), vi_load(w), vi_load(a)));
        for (int i = 0; i < MI_VL; i++) {
            int64_t sum = 0;
            for (int j = 0; j < 4; j++) sum += a[4 * i + j];
            same_int("vi_dot_s8", y[i] - MI_SIGNED_ZERO * sum, before[i] + plain_dot(w + 4 * i, 1, a + 4 * i, 4));
        }
    }
}

/* --- tiles ---------------------------------------------------------------------------------------------------- */
#define ROWS 3
#define OUTPUTS 16

/* ROWS rows of 32 activations against a packed block of 16 outputs of 4 bits, low nibbles first, and one of 8 bits. */
static void check_int8_tile(void) {
    uint8_t nibbles[4][OUTPUTS][4], bytes[8][OUTPUTS][4], plain[OUTPUTS][32], signed_plain[OUTPUTS][32];
    int8_t a[ROWS][32];
    int32_t y[ROWS][OUTPUTS], z[ROWS][OUTPUTS];
    for (int r = 0; r < ROUNDS / 10; r++) {
        int32_t total[ROWS] = {0};
        for (int i = 0; i < ROWS; i++)
            for (int k = 0; k < 32; k++) total[i] += a[i][k] = draw_activation(r);
        for (int o = 0; o < OUTPUTS; o++)
            for (int k = 0; k < 32; k++) {
                plain[o][k] = r % 3 ? random32() & 15 : 15;
                signed_plain[o][k] = r % 3 ? random32() & 255 : 0x80;
                bytes[k / 4][o][k % 4] = signed_plain[o][k];
            }
        for (int o = 0; o < OUTPUTS; o++)
            for (int k = 0; k < 16; k++) nibbles[k / 4][o][k % 4] = (uint8_t)(plain[o][k] | plain[o][16 + k] << 4);
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < MI_NV; v++) {
                vi narrow = vi_zero(), sum = vi_zero();
                for (int s = 0; s < 8; s++) {
                    vi packed = vi_load(nibbles[s % 4][v * MI_VL]), x = vi_set1_bytes(a[i] + 4 * s);
                    narrow = vi_dot_u8(narrow, vi_and(s < 4 ? packed : vi_shr(packed, 4), 0x0f0f0f0f), x);
                    sum = vi_dot_s8(sum, vi_load(bytes[s][v * MI_VL]), x);
                }
                vi_store(y[i] + v * MI_VL, vi_widen(vi_zero(), narrow));
                vi_store(z[i] + v * MI_VL, sum - vi_set1(MI_SIGNED_ZERO * total[i]));
            }
        for (int i = 0; i < ROWS; i++)
            for (int o = 0; o < OUTPUTS; o++) {
                same_int("4-bit tile", y[i][o], plain_dot(plain[o], 0, a[i], 32));
                same_int("8-bit tile", z[i][o], plain_dot(signed_plain[o], 1, a[i], 32));
            }
    }
}

/* ROWS rows of float32 against a packed panel of 16 outputs of half precision: one chain along k an output. */
static void check_f16_tile(void) {
    enum { K = 48 };
    uint16_t w[K][OUTPUTS];
    float x[ROWS][K], y[ROWS][OUTPUTS];
    for (int r = 0; r < ROUNDS / 10; r++) {
        vf acc[ROWS * MI_NV];
        for (int k = 0; k < K; k++) {
            for (int o = 0; o < OUTPUTS; o++) w[k][o] = (uint16_t)(random32() & (r % 2 ? 0xbfff : 0x83ff)); /* finite */
            for (int i = 0; i < ROWS; i++) x[i][k] = (float)(int32_t)random32() * 4.6566129e-10f;
        }
        for (int i = 0; i < ROWS * MI_NV; i++) acc[i] = vf_zero();
        for (int k = 0; k < K; k++)
            for (int v = 0; v < MI_NV; v++) {
                vf wv = vf_load_f16(w[k] + v * MI_VL);
                for (int i = 0; i < ROWS; i++) acc[i * MI_NV + v] = vf_fma(vf_set1(x[i][k]), wv, acc[i * MI_NV + v]);
            }
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < MI_NV; v++) vf_store(y[i] + v * MI_VL, acc[i * MI_NV + v]);
        for (int i = 0; i < ROWS; i++)
            for (int o = 0; o < OUTPUTS; o++) {
                float sum = 0;
                for (int k = 0; k < K; k++) sum = plain_fma(x[i][k], half_to_float(w[k][o]), sum);
                same_float("f16 tile", y[i][o], sum);
            }
    }
}

int main(void) {
    check_fma();
    check_widening();
    check_bytes();
    check_narrowing();
    check_integers();
    check_unsigned_dots();
    check_signed_dots();
    check_int8_tile();
    check_f16_tile();
    printf("%s: %d lanes, %ld values\n", BODY, MI_VL, compared);
    return 0;
}
