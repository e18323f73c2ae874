/* Every primitive of tiles.h against plain C: halves and bfloat16 in vectors, and the tile instructions. Prints how many
 * values it compared, and ends with 1 at the first that differs, with 2 where the system gives no tile registers.
 *
 * The references share nothing with tiles.h: halves are decoded and rounded in double arithmetic, tiles are summed one
 * product at a time. Values are compared by their bits. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tiles.h"

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
    if (bits_of(got) == bits_of(wanted)) return;
    printf("%s: got %a (%#x), wanted %a (%#x)\n", name, got, bits_of(got), wanted, bits_of(wanted));
    exit(1);
}

static uint64_t state = 88172645463325252u;
static uint32_t random32(void) { /* xorshift64* (Vigna 2016) */
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (uint32_t)(state * 2685821657736338717u >> 32);
}

/* --- plain C -------------------------------------------------------------------------------------------------- */
static double half_to_double(uint16_t h) { /* of what is finite */
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    double x = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    return h & 0x8000 ? -x : x;
}

/* To nearest, ties to even; x: exact in double, the result finite. */
static uint16_t double_to_half(double x) {
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    int exponent;
    x = fabs(x);
    frexp(x, &exponent);
    if (exponent < -13) exponent = -13; /* subnormal halves have the spacing of the smallest normal ones */
    double rounded = ldexp(rint(ldexp(x, 11 - exponent)), exponent - 11);
    if (rounded > 65504) return sign | 0x7c00;
    if (rounded < ldexp(1, -14)) return (uint16_t)(sign | (int)ldexp(rounded, 24));
    frexp(rounded, &exponent);
    return (uint16_t)(sign | ((exponent + 14) << 10) | ((int)ldexp(rounded, 11 - exponent) & 1023));
}

static float bf16_to_float(uint16_t b) { return float_of((uint32_t)b << 16); }

/* To nearest, ties to even, as the lower half of the bits says; subnormal floats become zero. */
static uint16_t float_to_bf16(float f) {
    uint32_t u = bits_of(f);
    if (f != f) return (uint16_t)(u >> 16 | 0x40);
    if (fabsf(f) < ldexpf(1, -126)) return (uint16_t)(u >> 16 & 0x8000);
    uint32_t lower = u & 0xffff, upper = u >> 16;
    return (uint16_t)(upper + (lower > 0x8000 || (lower == 0x8000 && upper & 1)));
}

/* --- vectors of halves ---------------------------------------------------------------------------------------- */
static void check_nibbles_and_bytes(void) {
    uint16_t x[32], y[32];
    for (int r = 0; r < ROUNDS; r++) {
        for (int i = 0; i < 32; i++) x[i] = (uint16_t)random32();
        vi v = vi_load(x);
#define NIBBLES(shift)                                                                             \
    {                                                                                              \
        vi_store(y, (vi)vh_nibbles(v, shift));                                                     \
        for (int i = 0; i < 32; i++)                                                               \
            same_int("vh_nibbles", y[i], double_to_half((x[i] >> shift & 15) - 8 + 0.0));          \
    }
        NIBBLES(0) NIBBLES(4) NIBBLES(8) NIBBLES(12)
#define BYTES(shift, zero)                                                                         \
    {                                                                                              \
        vi_store(y, (vi)vh_bytes(v, shift, zero));                                                 \
        for (int i = 0; i < 32; i++)                                                               \
            same_int("vh_bytes", y[i], double_to_half((double)(x[i] >> shift & 255) - (zero)));    \
    }
        BYTES(0, 128) BYTES(8, 128) BYTES(0, 32) BYTES(8, 32)
#define SIGNED_BYTES(shift)                                                                        \
    {                                                                                              \
        vi_store(y, (vi)vh_signed_bytes(v, shift));                                                \
        for (int i = 0; i < 32; i++)                                                               \
            same_int("vh_signed_bytes", y[i], double_to_half((int8_t)(x[i] >> shift) + 0.0));      \
    }
        SIGNED_BYTES(0) SIGNED_BYTES(8)
    }
}

static void check_pairs(void) {
    uint16_t h[17], y[32];
    float f[17];
    for (int r = 0; r < ROUNDS; r++) {
        int e = (int)(random32() % 31) - 15;
        for (int i = 0; i < 17; i++) {
            h[i] = (uint16_t)random32();
            double at = half_to_double((uint16_t)(random32() & 0xfbff)); /* a half, or near one, or the middle of two */
            f[i] = (float)(ldexp(at, -e) * (1 + (int)(random32() % 3 - 1) * ldexp(1, -11 - (int)(random32() % 3))));
        }
        vi_store(y, (vi)vh_pairs_of_halves(h + 1)); /* + 1: loads need no alignment */
        for (int i = 0; i < 32; i++) same_int("vh_pairs_of_halves", y[i], h[1 + i / 2]);
        vi_store(y, (vi)vh_pairs_of_floats(f + 1, ldexpf(1, e)));
        for (int i = 0; i < 32; i++)
            same_int("vh_pairs_of_floats", y[i], double_to_half(ldexp((double)f[1 + i / 2], e)));
    }
}

static void check_half_arithmetic(void) {
    uint16_t a[32], b[32], c[32], y[32], z[32];
    for (int r = 0; r < ROUNDS; r++) {
        for (int i = 0; i < 32; i++) { /* magnitudes below 2**7: no product leaves the range; subnormal ones too */
            a[i] = (uint16_t)(random32() & 0xffff), b[i] = (uint16_t)(random32() & 0xffff);
            c[i] = (uint16_t)(random32() & 0xffff);
            a[i] = (uint16_t)((a[i] & 0x83ff) | (a[i] >> 10 & 31) % 22 << 10);
            b[i] = (uint16_t)((b[i] & 0x83ff) | (b[i] >> 10 & 31) % 22 << 10);
            c[i] = (uint16_t)((c[i] & 0x83ff) | (c[i] >> 10 & 31) % 29 << 10);
        }
        vi_store(y, (vi)vh_fma((vh)vi_load(a), (vh)vi_load(b), (vh)vi_load(c)));
        vi_store(z, (vi)((vh)vi_load(a) * (vh)vi_load(b)));
        for (int i = 0; i < 32; i++) { /* exact in double: 22 bits and 11, at most 48 apart */
            double product = half_to_double(a[i]) * half_to_double(b[i]), sum = product + half_to_double(c[i]);
            if (sum - product == half_to_double(c[i]) && sum - half_to_double(c[i]) == product)
                same_int("vh_fma", y[i], double_to_half(sum));
            same_int("product of halves", z[i], double_to_half(product));
        }
        vi_store(y, (vi)vh_set1((float)half_to_double(a[0])));
        for (int i = 0; i < 32; i++) same_int("vh_set1", y[i], a[0]);
    }
}

static void check_cut(void) { /* every half that is finite */
    uint16_t h[32], y[33];
    for (int n = 0; n < 0x10000; n += 32) {
        for (int i = 0; i < 32; i++) h[i] = (uint16_t)(n + i);
        vh_store_cut(y + 1, (vh)vi_load(h));
        for (int i = 0; i < 32; i++) {
            int exponent = h[i] >> 10 & 31;
            if (exponent == 31) continue;
            float got = bf16_to_float(y[1 + i]);
            double toward_zero = half_to_double((uint16_t)(h[i] & 0xfff8)); /* what seven bits of mantissa leave */
            if (exponent) same_float("vh_store_cut", got, (float)ldexp(toward_zero, -112));
            else same_int("vh_store_cut of a subnormal half", fabsf(got) < ldexpf(1, -126), 1);
            same_int("sign of vh_store_cut", signbit(got) != 0, h[i] >> 15);
        }
    }
}

/* --- floats to bfloat16 --------------------------------------------------------------------------------------- */
static int k_of(int at) { /* which of 32 k lies at a place of a block, as the header says it */
    int pair = at / 2, q = pair / 4, j = pair % 4;
    return 4 * q + j / 2 + 16 * (j % 2) + 2 * (at % 2);
}

static void check_store_pairs(void) {
    float x[33];
    uint16_t y[33];
    for (int r = 0; r < ROUNDS; r++) {
        float factor = r % 3 ? 1.0f : r % 2 ? ldexpf(1.00247f, 100) : 3.0f;
        for (int i = 0; i < 33; i++) {
            x[i] = float_of(r % 4 ? random32() : (random32() & 0xffff0000) + 0x8000); /* many ties */
            if (x[i] != x[i]) x[i] = (float)i;
        }
        if (r < 32) x[1 + r] = r % 2 ? NAN : INFINITY;
        mi_store_pairs(y + 1, x + 1, factor);
        for (int i = 0; i < 32; i++) {
            volatile float product = x[1 + k_of(i)] * factor;
            if (product != product) same_int("mi_store_pairs of NaN", (y[1 + i] & 0x7fff) > 0x7f80, 1);
            else same_int("mi_store_pairs", y[1 + i], float_to_bf16(product));
        }
    }
}

static void check_store_rounded(void) {
    float x[33];
    uint16_t y[33];
    for (int r = 0; r < ROUNDS; r++) {
        for (int i = 0; i < 33; i++) x[i] = float_of(r % 4 ? random32() : (random32() & 0xffff0000) + 0x8000);
        mi_store_rounded(y + 1, vf_load(x + 1), vf_load(x + 17));
        for (int i = 1; i < 33; i++) {
            if (x[i] != x[i]) same_int("mi_store_rounded of NaN", (y[i] & 0x7fff) > 0x7f80, 1);
            else same_int("mi_store_rounded", y[i], float_to_bf16(x[i]));
        }
    }
}

static void check_pieces(void) { /* a float is the sum of its upper half and what is left, of that again, and the last */
    float a[16], b[16], rest[16];
    uint16_t y[32];
    for (int r = 0; r < ROUNDS; r++) {
        for (int i = 0; i < 16; i++) {
            a[i] = float_of((random32() & 0x807fffff) | (64 + random32() % 128) << 23);
            b[i] = float_of((random32() & 0x807fffff) | (64 + random32() % 128) << 23);
        }
        vi_store(y, mi_upper_halves(vf_load(a), vf_load(b)));
        vf_store(rest, mi_below(vf_load(a)));
        for (int i = 0; i < 16; i++) {
            same_int("mi_upper_halves, lower", y[2 * i], bits_of(a[i]) >> 16);
            same_int("mi_upper_halves, upper", y[2 * i + 1], bits_of(b[i]) >> 16);
            same_float("mi_below", rest[i], (float)((double)a[i] - bf16_to_float((uint16_t)(bits_of(a[i]) >> 16))));
        }
        vf left = mi_below(mi_below(vf_load(a)));
        vf_store(rest, mi_below(left));
        for (int i = 0; i < 16; i++) same_float("three pieces", fabsf(rest[i]), 0.0f);
    }
}

/* --- tiles ---------------------------------------------------------------------------------------------------- */
static uint16_t random_bf16(int r) { /* magnitudes around 1; now and then zero, or anything finite that is not tiny */
    uint32_t u = random32();
    if (u % 16 == 0) return (uint16_t)(u & 0x8000);
    return (uint16_t)((u >> 16 & 0x807f) | ((r % 2 ? 127 : 100) + u % (r % 2 ? 4 : 50)) << 7);
}

/* What the header says of the instruction, for one sum. */
static float plain_tile_dot(float sum, const uint16_t *x, uint16_t (*w)[16][2], int output) {
    float half[2] = {0, 0};
    for (int p = 0; p < 16; p++)
        for (int h = 0; h < 2; h++) half[h] = fmaf(bf16_to_float(x[2 * p + h]), bf16_to_float(w[p][output][h]), half[h]);
    return sum + (half[0] + half[1]);
}

#define COLUMNS 20 /* floats from one row of sums to the next */

static void same_sums(const char *name, int rows, uint16_t (*x)[32], uint16_t (*w)[16][2], float (*before)[COLUMNS],
                      float (*after)[COLUMNS]) {
    for (int i = 0; i < 16; i++)
        for (int o = 0; o < COLUMNS; o++) {
            if (i >= rows || o >= 16) same_float("beside a tile", after[i][o], before[i][o]);
            else same_float(name, after[i][o], plain_tile_dot(before[i][o], x[i], w, o));
        }
}

/* Every number of rows, of both tiles of them: four sums of two tiles of rows and two of weights. */
static void check_tiles(void) {
    static uint16_t x[2][16][32], w[2][16][16][2];
    static float before[4][16][COLUMNS], after[4][16][COLUMNS];
    for (int r = 0; r < 17 * 16 * 2; r++) {
        int a = r % 16 + 1, b = r / 16 % 17;
        for (int t = 0; t < 2; t++)
            for (int i = 0; i < 16; i++)
                for (int j = 0; j < 32; j++) x[t][i][j] = random_bf16(r), w[t][i][j / 2][j % 2] = random_bf16(r);
        for (int t = 0; t < 4; t++)
            for (int i = 0; i < 16; i++)
                for (int o = 0; o < COLUMNS; o++) before[t][i][o] = (float)(int32_t)random32() * 4.6566129e-10f;
        memcpy(after, before, sizeof after);
        mi_tiles_shape(a, b);
        long ld = COLUMNS * sizeof(float);
        mi_tile_load(0, after[0], ld);
        mi_tile_load(1, after[1], ld);
        mi_tile_load(4, x[0], 64);
        mi_tile_load(6, w[0], 64);
        mi_tile_load(7, w[1], 64);
        mi_tile_dot(0, 4, 6);
        mi_tile_dot(1, 4, 7);
        mi_tile_store(0, after[0], ld);
        mi_tile_store(1, after[1], ld);
        if (b) {
            mi_tile_load(2, after[2], ld);
            mi_tile_zero(3);
            mi_tile_load(5, x[1], 64);
            mi_tile_dot(2, 5, 6);
            mi_tile_dot(3, 5, 7);
            mi_tile_store(2, after[2], ld);
            mi_tile_store(3, after[3], ld);
            for (int i = 0; i < b; i++) memset(before[3][i], 0, 64);
        }
        mi_tiles_release();
        for (int t = 0; t < 4; t++) same_sums("tile", t < 2 ? a : b, x[t / 2], w[t % 2], before[t], after[t]);
    }
}

int main(void) {
    check_nibbles_and_bytes();
    check_pairs();
    check_half_arithmetic();
    check_cut();
    check_store_pairs();
    check_store_rounded();
    check_pieces();
    if (syscall(SYS_arch_prctl, 0x1023, 18)) { /* ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA */
        printf("no tile registers, %ld values\n", compared);
        return 2;
    }
    check_tiles();
    printf("tiles, %ld values\n", compared);
    return 0;
}
