/* The kernels of the index's scan over whole rows, once for all instruction sets: each <isa>_scan.c compiles them with its flags. */
#ifndef TQ_SCAN_H
#define TQ_SCAN_H
#include "core/scan_kernels.h"
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

/* Fields of w bits: 4 w bytes, bits w k .. w k + w - 1 of byte i are of channel i + 4 w k (turboquant_index.h). */
#if defined(__AVX2__)
typedef __m256i scan_codes;

static inline scan_codes scan_no_codes(void) { return _mm256_setzero_si256(); }

static inline scan_codes scan_field(const uint8_t *bytes, int32_t width)
{
    int32_t word;
    if (width == 1) {
        memcpy(&word, bytes, 4);
        __m256i shifted = _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        return _mm256_and_si256(shifted, _mm256_set1_epi8(1));
    }
    if (width == 2) {
        __m256i all = _mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)bytes));
        __m256i shifted = _mm256_srlv_epi64(all, _mm256_setr_epi64x(0, 2, 4, 6));
        return _mm256_and_si256(shifted, _mm256_set1_epi8(3));
    }
    __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)bytes));
    __m256i shifted = _mm256_srlv_epi64(all, _mm256_setr_epi64x(0, 0, 4, 4));
    return _mm256_and_si256(shifted, _mm256_set1_epi8(15));
}

/** codes | field << shift; codes stay below 256. */
static inline scan_codes scan_join(scan_codes codes, scan_codes field, int32_t shift)
{
    return _mm256_or_si256(codes, _mm256_slli_epi16(field, shift));
}

static inline scan_codes scan_look_up(const int8_t table[16], scan_codes codes)
{
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), codes);
}

static inline void scan_levels(const int8_t table[64], int32_t bits, scan_codes codes, int16_t out[32])
{
    __m256i levels;
    if (bits == TQ_WIDE_BITS) levels = _mm256_xor_si256(codes, _mm256_set1_epi8((char)0x80));
    else if (bits < 5) levels = scan_look_up(table, codes);
    else {
        __m256i low = _mm256_and_si256(codes, _mm256_set1_epi8(15)), bit4 = _mm256_slli_epi16(codes, 3);
        levels = _mm256_blendv_epi8(scan_look_up(table, low), scan_look_up(table + 16, low), bit4);
        if (bits == 6) {
            __m256i high = _mm256_blendv_epi8(scan_look_up(table + 32, low), scan_look_up(table + 48, low), bit4);
            levels = _mm256_blendv_epi8(levels, high, _mm256_slli_epi16(codes, 2));
        }
    }
    _mm256_storeu_si256((__m256i *)out, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(levels)));
    _mm256_storeu_si256((__m256i *)(out + 16), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(levels, 1)));
}
#else
typedef struct {
    uint8_t at[32];
} scan_codes;

static inline scan_codes scan_no_codes(void) { return (scan_codes){{0}}; }

static inline scan_codes scan_field(const uint8_t *bytes, int32_t width)
{
    scan_codes codes;
    int32_t n = 4 * width, mask = (1 << width) - 1;
    for (int32_t k = 0; k < 8 / width; k++)
        for (int32_t i = 0; i < n; i++) codes.at[n * k + i] = (uint8_t)(bytes[i] >> width * k & mask);
    return codes;
}

static inline scan_codes scan_join(scan_codes codes, scan_codes field, int32_t shift)
{
    for (int32_t i = 0; i < 32; i++) codes.at[i] = (uint8_t)(codes.at[i] | field.at[i] << shift);
    return codes;
}

static inline void scan_levels(const int8_t table[64], int32_t bits, scan_codes codes, int16_t out[32])
{
    if (bits == TQ_WIDE_BITS)
        for (int32_t i = 0; i < 32; i++) out[i] = (int16_t)(codes.at[i] - 128);
    else
        for (int32_t i = 0; i < 32; i++) out[i] = table[codes.at[i]];
}
#endif

/** Joins the next field of the row. Widths and shifts are constants where this is inlined. */
static inline scan_codes scan_next(const uint8_t **row, scan_codes codes, int32_t width, int32_t shift)
{
    codes = scan_join(codes, scan_field(*row, width), shift);
    *row += 4 * width;
    return codes;
}

static inline scan_codes scan_low_codes(const uint8_t **row, int32_t bits)
{
    scan_codes codes = scan_no_codes();
    switch (bits) {
    case 0: return codes;
    case 1: return scan_next(row, codes, 1, 0);
    case 2: return scan_next(row, codes, 2, 0);
    case 3: return scan_next(row, scan_next(row, codes, 2, 0), 1, 2);
    case 4: return scan_next(row, codes, 4, 0);
    case 5: return scan_next(row, scan_next(row, codes, 4, 0), 1, 4);
    default: return scan_next(row, scan_next(row, scan_next(row, codes, 4, 0), 2, 4), 1, 6);
    }
}

static void scan_unpack(const tq_scan_layout *layout, const uint8_t *row, const uint8_t *signs, int16_t *levels)
{
    for (int32_t g = 0; g < layout->layout->groups; g++, levels += 32) {
        int32_t bits = layout->layout->bits[g];
        if (bits == 0) {
            memset(levels, 0, 32 * sizeof *levels);
            continue;
        }
        scan_codes codes = scan_join(scan_low_codes(&row, bits - 1), scan_field(signs, 1), bits - 1);
        signs += 4;
        scan_levels(layout->levels[bits % TQ_WIDE_BITS], bits, codes, levels);
    }
}

static int32_t scan_product(const int16_t *levels, const int16_t *q, int32_t n)
{
    int32_t sum = 0;
    for (int32_t j = 0; j < n; j++) sum += levels[j] * q[j];
    return sum;
}

#define TQ_SCAN_TABLE(name) {name, scan_unpack, scan_product, scan_sums, scan_sums_many, scan_above}
#endif
