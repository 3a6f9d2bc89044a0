/* Could 2-bit keys have the shell code E8P of QuIP# (arXiv 2402.04396)? A decode loop for AVX-512, beside today's levels.
 *
 *   cc -O3 -march=native benchmarks/shell_code.c -o shell_code && ./shell_code     needs AVX-512 with VBMI, VNNI and GFNI
 *
 * Scores of keys of 128 channels, for one query head and for four, as integer products before scales. A group of 8 numbers has
 * 16 bits: one of 256 patterns of magnitudes 1/2, 3/2, 5/2, the signs of 7 numbers, from whose parity that of the eighth
 * follows, and whether 1/4 is added or subtracted. A pattern is two bytes of four fields, 0 to 2, in two tables of 256 bytes,
 * looked up by vpermi2b. Prints nanoseconds of processor time for a token, of a cache that fits L2 and of one that does not. */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHANNELS 128
#define GROUPS 16
#define HEADS 4
#define DIGITS 2 /* signed bytes of a query's number */
#define TOKEN_BYTES 32
#define UNROLL _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline))
typedef __m512i vec;

typedef struct {
    int8_t shell[HEADS][DIGITS][9]
                [GROUPS];                  /* by place in a group; the last: what the 1/4 of a group is multiplied by */
    int8_t today[HEADS][DIGITS][4][2][16]; /* by tile of 32 channels, even and odd ones */
} queries;

static uint8_t patterns[256][8], tables[2][256];

static void make_patterns(void)
{
    int n = 0;
    for (int norm = 10; norm <= 12; norm += 2) /* 227 of squared norm 10 or less, and 29 of 12 */
        for (int code = 0; code < 6561 && n < 256; code++) {
            int rest = code, squares = 0;
            for (int i = 0; i < 8; i++, rest /= 3) {
                patterns[n][i] = (uint8_t)(rest % 3);
                squares += (2 * (rest % 3) + 1) * (2 * (rest % 3) + 1);
            }
            if (norm == 10 ? squares <= 40 : squares == 48) n++;
        }
    for (int i = 0; i < 256; i++)
        for (int j = 0; j < 8; j++) tables[j / 4][i] |= (uint8_t)(patterns[i][j] << 2 * (j % 4));
}

/** Number j of a group in quarters, without the 1/4 that is added or subtracted. */
static int level(uint8_t pattern, uint8_t signs, int j)
{
    int negative = signs >> j & 1;
    if (j == 7) {
        negative = __builtin_popcount(signs & 127) & 1;
        for (int i = 0; i < 8; i++) negative ^= patterns[pattern][i] & 1;
    }
    return (negative ? -1 : 1) * (2 + 4 * patterns[pattern][j]);
}

INLINE vec repeated(const int8_t *x) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)x)); }

/** Adds up the four words of each 128-bit lane of low + 256 high, and writes four sums. */
INLINE void store_sums(vec low, vec high, int32_t *out)
{
    vec x = _mm512_add_epi32(low, _mm512_slli_epi32(high, 8));
    x = _mm512_add_epi32(x, _mm512_shuffle_epi32(x, 0x4e));
    x = _mm512_add_epi32(x, _mm512_shuffle_epi32(x, 0xb1));
    x = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), x);
    _mm_storeu_si128((__m128i *)out, _mm512_castsi512_si128(x));
}

INLINE vec look_up_256(const vec table[4], vec index, __mmask64 upper)
{
    return _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(table[0], index, table[1]),
                                  _mm512_permutex2var_epi8(table[2], index, table[3]));
}

/** Four tokens are 64 bytes of patterns and 64 of signs, byte 16 t + c for channels 8 c .. 8 c + 7 of token t. */
INLINE void shell(int heads, const uint8_t *codes, int tokens, const queries *q, int32_t *out)
{
    vec table[2][4], zero = _mm512_setzero_si512();
    uint8_t of_field[64];
    for (int i = 0; i < 64; i++) of_field[i] = (uint8_t)(128 + 2 + 4 * (i & 3)); /* of the low two bits of six */
    for (int i = 0; i < 8; i++) table[i / 4][i % 4] = _mm512_loadu_si512(tables[i / 4] + 64 * (i % 4));
    const vec magnitudes = _mm512_loadu_si512(of_field);
    for (int t = 0; t < tokens; t += 4, codes += 4 * TOKEN_BYTES) {
        const vec pattern = _mm512_loadu_si512(codes), signs = _mm512_loadu_si512(codes + 64);
        const __mmask64 upper = _mm512_movepi8_mask(pattern);
        const vec fields[2] = {look_up_256(table[0], pattern, upper), look_up_256(table[1], pattern, upper)};
        /* bit 7: the parity of bits 0 to 6 and of the fields; GFNI multiplies each byte by a matrix of bits */
        const vec negative = _mm512_xor_si512(
            _mm512_gf2p8affine_epi64_epi8(signs, _mm512_set1_epi64(0x010204081020407f), 0),
            _mm512_gf2p8affine_epi64_epi8(_mm512_xor_si512(fields[0], fields[1]), _mm512_set1_epi64(0x55), 0));
        const vec quarter =
            _mm512_mask_blend_epi8(_mm512_movepi8_mask(signs), _mm512_set1_epi8(127), _mm512_set1_epi8((char)129));
        vec sums[HEADS][DIGITS];
        UNROLL for (int h = 0; h < heads; h++) UNROLL for (int d = 0; d < DIGITS; d++) sums[h][d] =
            _mm512_dpbusd_epi32(zero, quarter, repeated(q->shell[h][d][8]));
        UNROLL for (int j = 0; j < 8; j++)
        {
            vec x = fields[j / 4];
            if (j % 4) x = _mm512_srli_epi16(x, 2 * (unsigned)(j % 4));
            x = _mm512_permutexvar_epi8(x, magnitudes);
            x = _mm512_mask_sub_epi8(x, _mm512_test_epi8_mask(negative, _mm512_set1_epi8((char)(1 << j))), zero, x);
            UNROLL for (int h = 0; h < heads; h++) UNROLL for (int d = 0; d < DIGITS; d++) sums[h][d] =
                _mm512_dpbusd_epi32(sums[h][d], x, repeated(q->shell[h][d][j]));
        }
        UNROLL for (int h = 0; h < heads; h++) store_sums(sums[h][0], sums[h][1], out + h * tokens + t);
    }
}

/** Tiles of 32 tokens and 32 channels, as csrc/kernels/levels.h reads 2 bits; two heads at a time, for 16 registers. */
INLINE void today(int heads, const uint8_t *codes, int tokens, const queries *q, int32_t *out)
{
    const vec evens = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 0, 2, 4, 6, 4, 6, 8, 10, 8, 10, 12, 14, 12, 14));
    const vec odds = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 3, 1, 3, 5, 7, 5, 7, 9, 11, 9, 11, 13, 15, 13, 15));
    const __mmask64 second = 0xcccccccccccccccc;
    const int together = heads < 2 ? 1 : 2;
    for (int t = 0; t < tokens; t += 32, codes += 32 * TOKEN_BYTES)
        for (int half = 0; half < 2; half++)
            for (int first = 0; first < heads; first += together) {
                vec sums[4][2][DIGITS];
                memset(sums, 0, sizeof sums);
                UNROLL for (int tile = 0; tile < 4; tile++)
                {
                    const uint8_t *at = codes + 256 * tile + 64 * half;
                    const vec a = _mm512_loadu_si512(at), b = _mm512_loadu_si512(at + 128);
                    const vec even = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(a, evens), second, b, evens);
                    const vec odd = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(a, odds), second, b, odds);
                    UNROLL for (int r = 0; r < 4; r++)
                    {
                        const vec mask = _mm512_set1_epi8((char)(3 << 2 * r));
                        const vec x = _mm512_and_si512(even, mask), y = _mm512_and_si512(odd, mask);
                        UNROLL for (int h = 0; h < together; h++) UNROLL for (int d = 0; d < DIGITS; d++)
                        {
                            const int8_t (*of)[16] = q->today[first + h][d][tile];
                            sums[r][h][d] = _mm512_dpbusd_epi32(sums[r][h][d], x, repeated(of[0]));
                            sums[r][h][d] = _mm512_dpbusd_epi32(sums[r][h][d], y, repeated(of[1]));
                        }
                    }
                }
                UNROLL for (int h = 0; h < together; h++) UNROLL for (int r = 0; r < 4; r++)
                    store_sums(sums[r][h][0], sums[r][h][1], out + (first + h) * tokens + t + 8 * r + 4 * half);
            }
}

typedef void loop(const uint8_t *, int, const queries *, int32_t *);
#define LOOP(what, heads)                                                                                              \
    static __attribute__((noinline)) void what##_##heads(const uint8_t *codes, int tokens, const queries *q,           \
                                                         int32_t *out)                                                 \
    {                                                                                                                  \
        what(heads, codes, tokens, q, out);                                                                            \
    }
LOOP(shell, 1)
LOOP(shell, 4)
LOOP(today, 1)
LOOP(today, 4)

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/** Of the quickest of some calls, nanoseconds a token. */
static double time_of(loop *f, const uint8_t *codes, int tokens, const queries *q, int32_t *out)
{
    double least = 1;
    for (int i = 0, calls = tokens > 100000 ? 7 : 3000; i < calls; i++) {
        double start = seconds();
        f(codes, tokens, q, out);
        double took = seconds() - start;
        if (took < least) least = took;
    }
    return 1e9 * least / tokens;
}

/** Whether scores are those of `level`; all levels have 128 added, which a kernel takes off again with the query's sum. */
static int is_right(const uint8_t *codes, const queries *q, int32_t *out)
{
    enum { TOKENS = 256 };
    shell_4(codes, TOKENS, q, out);
    for (int i = 0; i < HEADS * TOKENS; i++) {
        const int h = i / TOKENS, t = i % TOKENS;
        const uint8_t *at = codes + t / 4 * 4 * TOKEN_BYTES + t % 4 * GROUPS;
        long want = 0;
        for (int d = 0; d < DIGITS; d++)
            for (int c = 0; c < GROUPS; c++) {
                const int quarter = at[64 + c] & 128 ? 1 : -1;
                want += (128L + quarter) * q->shell[h][d][8][c] * (1 << 8 * d);
                for (int j = 0; j < 8; j++)
                    want += (128L + level(at[c], at[64 + c], j)) * q->shell[h][d][j][c] * (1 << 8 * d);
            }
        if (want != out[i]) return 0;
    }
    return 1;
}

int main(void)
{
    const int sizes[2] = {1 << 13, 1 << 22};
    static queries q;
    uint8_t *codes = malloc((size_t)sizes[1] * TOKEN_BYTES);
    int32_t *out = malloc((size_t)sizes[1] * HEADS * sizeof *out);
    uint32_t x = 1;
    if (!codes || !out) return 1;
    make_patterns();
    for (size_t i = 0; i < (size_t)sizes[1] * TOKEN_BYTES; i++)
        codes[i] = (uint8_t)((x = x * 1664525 + 1013904223) >> 24);
    for (size_t i = 0; i < sizeof q; i++) ((uint8_t *)&q)[i] = (uint8_t)((x = x * 1664525 + 1013904223) >> 24);
    if (!is_right(codes, &q, out)) {
        fprintf(stderr, "scores of the shell code are wrong\n");
        return 1;
    }
    for (int i = 0; i < 2; i++) {
        const double one[2] = {time_of(today_1, codes, sizes[i], &q, out), time_of(shell_1, codes, sizes[i], &q, out)};
        const double four[2] = {time_of(today_4, codes, sizes[i], &q, out), time_of(shell_4, codes, sizes[i], &q, out)};
        printf("%d KiB of codes, ns a token, today and shell code: one query head %.2f, %.2f; four %.2f, %.2f\n",
               sizes[i] / 1024 * TOKEN_BYTES, one[0], one[1], four[0], four[1]);
    }
    free(codes);
    free(out);
    return 0;
}
