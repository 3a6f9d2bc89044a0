/* How fast one core multiplies 2-bit keys with a query: levels looked up, as the kernels do, against levels computed from the states
 * of a bit-shift trellis (QTIP, arXiv 2406.11235, Algorithm 1, "1MAD": the sum of the bytes of an integer hash of a 16-bit state).
 *
 *     gcc -O3 -march=native benchmarks/trellis_decode.c -o trellis_decode && ./trellis_decode       needs AVX-512 VNNI and VBMI2
 *
 * Codes are random and in L1, 32 channels to a group; nothing but the inner loops is here. Prints codes per second. */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { GROUPS = 64, REPEATS = 200000 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/** 16 tokens x 32 channels a group: [2 words][64 bytes]; byte b of a word holds four codes of the channels 4 (b % 4) .. of token b / 4.
 *  The query as two signed planes of bytes, four channels a lane. */
static __m512i looked_up(const uint8_t *codes, const __m512i *query, __m512i levels)
{
    __m512i hi = _mm512_setzero_si512(), lo = hi, low2 = _mm512_set1_epi8(3);
    for (int g = 0; g < GROUPS; g++)
        for (int w = 0; w < 2; w++) {
            __m512i x = _mm512_loadu_si512(codes + (2 * g + w) * 64);
            for (int r = 0; r < 4; r++) {
                __m512i u = _mm512_shuffle_epi8(levels, _mm512_and_si512(_mm512_srli_epi16(x, 2 * r), low2));
                const __m512i *q = query + 2 * (8 * (g % 4) + 4 * w + r);
                hi = _mm512_dpbusd_epi32(hi, u, q[0]);
                lo = _mm512_dpbusd_epi32(lo, u, q[1]);
            }
        }
    return _mm512_add_epi32(_mm512_slli_epi32(hi, 8), lo);
}

/** The same bits: 16 tokens in 32-bit lanes, 64 bits each, the state of channel c the 16 bits from bit 2 c on, round the end. */
static __m512 computed(const uint8_t *codes, const float *query)
{
    __m512 sums[4] = {};
    const __m512i factor = _mm512_set1_epi32(34038481), add = _mm512_set1_epi32(76625530), ones = _mm512_set1_epi8(1),
                  state = _mm512_set1_epi32(0xffff), middle = _mm512_set1_epi32(-510);
    for (int g = 0; g < GROUPS; g++) {
        __m512i word[2] = {_mm512_loadu_si512(codes + 2 * g * 64), _mm512_loadu_si512(codes + (2 * g + 1) * 64)};
#pragma GCC unroll 32
        for (int c = 0; c < 32; c++) {
            __m512i x = _mm512_shrdv_epi32(word[c / 16], word[!(c / 16)], _mm512_set1_epi32(2 * (c % 16)));
            x = _mm512_add_epi32(_mm512_mullo_epi32(_mm512_and_si512(x, state), factor), add);
            __m512i level = _mm512_dpbusd_epi32(middle, x, ones);
            sums[c % 4] =
                _mm512_fmadd_ps(_mm512_cvtepi32_ps(level), _mm512_set1_ps(query[32 * (g % 4) + c]), sums[c % 4]);
        }
    }
    return _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
}

int main(void)
{
    static uint8_t codes[GROUPS * 128];
    static __m512i planes[64];
    static float query[128];
    for (size_t i = 0; i < sizeof codes; i++) codes[i] = rand();
    for (size_t i = 0; i < sizeof planes; i++) ((int8_t *)planes)[i] = rand() % 255 - 127;
    for (int i = 0; i < 128; i++) query[i] = rand() / 1e9f - 1;
    const double n = 16.0 * 32 * GROUPS * REPEATS;
    __m512i levels =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 80, 120, 200, 0, 80, 120, 200, 0, 80, 120, 200, 0, 80, 120, 200));
    __m512i integers = _mm512_setzero_si512();
    __m512 floats = _mm512_setzero_ps();
    double start = now();
    for (int i = 0; i < REPEATS; i++)
        integers = _mm512_xor_si512(integers, looked_up(codes, planes, levels)), codes[i % 64]++;
    double middle = now();
    for (int i = 0; i < REPEATS; i++) floats = _mm512_add_ps(floats, computed(codes, query)), codes[i % 64]++;
    double end = now();
    printf("looked up %5.1f G codes/s\ncomputed  %5.1f G codes/s\n(%d %g)\n", n / (middle - start) / 1e9,
           n / (end - middle) / 1e9, _mm512_reduce_add_epi32(integers), _mm512_reduce_add_ps(floats));
    return 0;
}
