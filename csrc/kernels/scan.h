/* The kernels of the index's scan, once for all instruction sets: each <isa>_scan.c compiles them with its flags. Loops are of
 * fixed length and written so that compilers vectorise them; only the table look-up is spelled out. */
#ifndef TQ_SCAN_H
#define TQ_SCAN_H
#include "core/scan_kernels.h"
#include <string.h>
#if defined(__SSSE3__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

/** out[i] = table[codes[i]] for 16 codes below 16. */
static inline void scan_look_up(const int8_t table[16], const uint8_t codes[16], int8_t out[16])
{
#if defined(__SSSE3__)
    __m128i t = _mm_loadu_si128((const __m128i *)table), c = _mm_loadu_si128((const __m128i *)codes);
    _mm_storeu_si128((__m128i *)out, _mm_shuffle_epi8(t, c));
#elif defined(__ARM_NEON) && defined(__aarch64__)
    vst1q_s8(out, vqtbl1q_s8(vld1q_s8(table), vld1q_u8(codes)));
#else
    for (int32_t i = 0; i < 16; i++) out[i] = table[codes[i]];
#endif
}

/** Ors a field of `width` bits, shifted by `shift`, into 32 codes. Both are constants where this is inlined. */
static inline const uint8_t *scan_field(const uint8_t *bytes, int32_t width, int32_t shift, uint8_t codes[32])
{
    int32_t n = 4 * width, mask = (1 << width) - 1;
    for (int32_t k = 0; k < 8 / width; k++)
        for (int32_t i = 0; i < n; i++)
            codes[n * k + i] = (uint8_t)(codes[n * k + i] | (bytes[i] >> width * k & mask) << shift);
    return bytes + n;
}

static inline const uint8_t *scan_codes(const uint8_t *bytes, int32_t bits, uint8_t codes[32])
{
    memset(codes, 0, 32);
    switch (bits) {
    case 1: return scan_field(bytes, 1, 0, codes);
    case 2: return scan_field(bytes, 2, 0, codes);
    case 3: return scan_field(scan_field(bytes, 2, 0, codes), 1, 2, codes);
    case 4: return scan_field(bytes, 4, 0, codes);
    case 5: return scan_field(scan_field(bytes, 4, 0, codes), 1, 4, codes);
    case 6: return scan_field(scan_field(bytes, 4, 0, codes), 2, 4, codes);
    default: return scan_field(bytes, 8, 0, codes);
    }
}

/** 32 codes of 1..6 bits -> levels. Each 16 of more than 16 levels are looked up apart. */
static inline void scan_levels(const int8_t table[64], int32_t bits, const uint8_t codes[32], int16_t out[32])
{
    int8_t levels[32];
    if (bits < 5) {
        scan_look_up(table, codes, levels);
        scan_look_up(table, codes + 16, levels + 16);
    } else {
        uint8_t low[32];
        int8_t part[32];
        for (int32_t i = 0; i < 32; i++) low[i] = codes[i] & 15;
        for (int32_t k = 0; k < 1 << (bits - 4); k++) {
            scan_look_up(table + 16 * k, low, part);
            scan_look_up(table + 16 * k, low + 16, part + 16);
            for (int32_t i = 0; i < 32; i++) levels[i] = codes[i] >> 4 == k ? part[i] : levels[i];
        }
    }
    for (int32_t i = 0; i < 32; i++) out[i] = levels[i];
}

static void scan_unpack(const tq_scan_layout *layout, const uint8_t *row, int16_t *levels)
{
    for (int32_t g = 0; g < layout->layout->groups; g++, levels += 32) {
        int32_t bits = layout->layout->bits[g];
        uint8_t codes[32];
        if (bits == 0) {
            memset(levels, 0, 32 * sizeof *levels);
            continue;
        }
        row = scan_codes(row, bits, codes);
        if (bits == TQ_WIDE_BITS)
            for (int32_t i = 0; i < 32; i++) levels[i] = (int16_t)(codes[i] - 128);
        else scan_levels(layout->levels[bits], bits, codes, levels);
    }
}

static int32_t scan_product(const int16_t *levels, const int16_t *q, int32_t n)
{
    int32_t sum = 0;
    for (int32_t j = 0; j < n; j++) sum += levels[j] * q[j];
    return sum;
}

static void scan_products(const int16_t *levels, const int16_t *q, int32_t n, int32_t sums[TQ_SCAN_QUERIES])
{
    const int16_t *q1 = q + n, *q2 = q1 + n, *q3 = q2 + n;
    int32_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    for (int32_t j = 0; j < n; j++) {
        s0 += levels[j] * q[j];
        s1 += levels[j] * q1[j];
        s2 += levels[j] * q2[j];
        s3 += levels[j] * q3[j];
    }
    sums[0] = s0;
    sums[1] = s1;
    sums[2] = s2;
    sums[3] = s3;
}
#endif
