/* The kernels of the index over whole rows. Written once; each <isa>_scan.c compiles them with its flags. */
#ifndef TQ_SCAN_H
#define TQ_SCAN_H
#include "scan_lists.h"

/* A field of w bits has 4 w bytes. Bits w k .. w k + w - 1 of byte i are of channel i + 4 w k (turboquant_index.h). */
#if defined(__AVX2__)
typedef __m256i scan_codes;

static inline scan_codes scan_no_codes(void) { return _mm256_setzero_si256(); }

static inline scan_codes scan_field(const uint8_t *bytes, int32_t width)
{
    int32_t word;
    if (width == 8) return _mm256_loadu_si256((const __m256i *)bytes);
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

/** Returns codes | field << shift, which must be below 256. */
static inline scan_codes scan_join(scan_codes codes, scan_codes field, int32_t shift)
{
    return _mm256_or_si256(codes, _mm256_slli_epi16(field, shift));
}

static inline scan_codes scan_look_up(const int8_t table[16], scan_codes codes)
{
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), codes);
}

/** Returns the levels of 32 codes as bytes. */
static inline __m256i scan_level_bytes(const int8_t table[64], int32_t bits, scan_codes codes)
{
    if (bits == TQ_WIDE_BITS) return _mm256_xor_si256(codes, _mm256_set1_epi8((char)0x80));
    if (bits < 5) return scan_look_up(table, codes);
#if defined(__AVX512VBMI__)
    __m512i all = _mm512_permutexvar_epi8(_mm512_castsi256_si512(codes), _mm512_loadu_si512(table));
    return _mm512_castsi512_si256(all);
#else
    __m256i low = _mm256_and_si256(codes, _mm256_set1_epi8(15)), bit4 = _mm256_slli_epi16(codes, 3);
    __m256i levels = _mm256_blendv_epi8(scan_look_up(table, low), scan_look_up(table + 16, low), bit4);
    if (bits == 5) return levels;
    __m256i high = _mm256_blendv_epi8(scan_look_up(table + 32, low), scan_look_up(table + 48, low), bit4);
    return _mm256_blendv_epi8(levels, high, _mm256_slli_epi16(codes, 2));
#endif
}

static inline void scan_levels(const int8_t table[64], int32_t bits, scan_codes codes, int16_t out[32])
{
    __m256i levels = scan_level_bytes(table, bits, codes);
    _mm256_storeu_si256((__m256i *)out, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(levels)));
    _mm256_storeu_si256((__m256i *)(out + 16), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(levels, 1)));
}

/** Eight or sixteen partial sums. Integer sums do not depend on their order. */
#if defined(__AVX512BW__)
typedef __m512i scan_sum;
static inline scan_sum scan_no_sum(void) { return _mm512_setzero_si512(); }
static inline scan_sum scan_add_product(scan_sum sum, const int8_t table[64], int32_t bits, scan_codes codes,
                                        const int16_t *q)
{
    __m512i levels = _mm512_cvtepi8_epi16(scan_level_bytes(table, bits, codes));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(levels, _mm512_loadu_si512(q)));
}
static inline scan_sum scan_add_levels(scan_sum sum, const int16_t *levels, const int16_t *q)
{
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_loadu_si512(levels), _mm512_loadu_si512(q)));
}
static inline int32_t scan_all_of(scan_sum sum) { return _mm512_reduce_add_epi32(sum); }
#else
typedef __m256i scan_sum;
static inline scan_sum scan_no_sum(void) { return _mm256_setzero_si256(); }
static inline scan_sum scan_add_product(scan_sum sum, const int8_t table[64], int32_t bits, scan_codes codes,
                                        const int16_t *q)
{
    __m256i levels = scan_level_bytes(table, bits, codes);
    __m256i low = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(levels));
    __m256i high = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(levels, 1));
    low = _mm256_madd_epi16(low, _mm256_loadu_si256((const __m256i *)q));
    high = _mm256_madd_epi16(high, _mm256_loadu_si256((const __m256i *)(q + 16)));
    return _mm256_add_epi32(sum, _mm256_add_epi32(low, high));
}
static inline scan_sum scan_add_levels(scan_sum sum, const int16_t *levels, const int16_t *q)
{
    for (int32_t i = 0; i < 32; i += 16) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(levels + i)), y = _mm256_loadu_si256((const __m256i *)(q + i));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x, y));
    }
    return sum;
}
static inline int32_t scan_all_of(scan_sum sum)
{
    int32_t at[8], all = 0;
    memcpy(at, &sum, sizeof at);
    for (int32_t i = 0; i < 8; i++) all += at[i];
    return all;
}
#endif
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

typedef int32_t scan_sum;
static inline scan_sum scan_no_sum(void) { return 0; }
static inline scan_sum scan_add_product(scan_sum sum, const int8_t table[64], int32_t bits, scan_codes codes,
                                        const int16_t *q)
{
    int16_t levels[32];
    scan_levels(table, bits, codes, levels);
    for (int32_t i = 0; i < 32; i++) sum += levels[i] * q[i];
    return sum;
}
static inline scan_sum scan_add_levels(scan_sum sum, const int16_t *levels, const int16_t *q)
{
    for (int32_t i = 0; i < 32; i++) sum += levels[i] * q[i];
    return sum;
}
static inline int32_t scan_all_of(scan_sum sum) { return sum; }
#endif

/** Joins the next field of the row. Widths and shifts are constants where this is inlined. */
TQ_INLINE scan_codes scan_next(const uint8_t **row, scan_codes codes, int32_t width, int32_t shift)
{
    codes = scan_join(codes, scan_field(*row, width), shift);
    *row += 4 * width;
    return codes;
}

/** Reads the lowest `bits` bits of 32 codes. */
TQ_INLINE scan_codes scan_low_codes(const uint8_t **row, int32_t bits)
{
    scan_codes codes = scan_no_codes();
    switch (bits) {
    case 0: return codes;
    case 1: return scan_next(row, codes, 1, 0);
    case 2: return scan_next(row, codes, 2, 0);
    case 3: return scan_next(row, scan_next(row, codes, 2, 0), 1, 2);
    case 4: return scan_next(row, codes, 4, 0);
    case 5: return scan_next(row, scan_next(row, codes, 4, 0), 1, 4);
    case 6: return scan_next(row, scan_next(row, codes, 4, 0), 2, 4);
    case 7: return scan_next(row, scan_next(row, scan_next(row, codes, 4, 0), 2, 4), 1, 6);
    default: return scan_next(row, codes, 8, 0);
    }
}

/** Reads the codes of a group. Both pointers go on to the next group. */
TQ_INLINE scan_codes scan_all_codes(const uint8_t **row, const uint8_t **leading, int32_t bits, int32_t lead)
{
    scan_codes codes = scan_low_codes(row, bits - lead);
    for (; lead > 1; lead -= 2, bits -= 2) codes = scan_next(leading, codes, 2, bits - 2);
    return lead ? scan_next(leading, codes, 1, bits - 1) : codes;
}

/* ---- groups of 8 ---- */

/** Reads a field of 8 codes, w = width bytes: bits w k .. w k + w - 1 of byte i are of channel i + w k. */
static inline uint64_t scan_eight(const uint8_t **from, int32_t width)
{
    uint64_t word = 0, codes = 0;
    const uint8_t *bytes = *from;
    *from += width;
    switch (width) {
    case 8: memcpy(&word, bytes, 8); return word;
    case 4: memcpy(&word, bytes, 4); return (word & 0x0f0f0f0f) | (word >> 4 & 0x0f0f0f0f) << 32;
    case 2:
        memcpy(&word, bytes, 2);
        for (int32_t k = 0; k < 4; k++) codes |= (word >> 2 * k & 0x0303) << 16 * k;
        return codes;
    default: /* bit k goes to byte k; bit 7 apart, so that nothing is carried */
        return ((uint64_t)(*bytes & 127) * 0x0002040810204081 & 0x0101010101010101) | (uint64_t)(*bytes >> 7) << 56;
    }
}

/** Reads the codes of the last group, which has fewer than 32 channels. Codes behind its last channel are 0. */
static scan_codes scan_last_codes(const tq_scan_layout *layout, const uint8_t *row, const uint8_t *leading)
{
    scan_codes all = scan_no_codes();
    uint64_t eights[4] = {0};
    int32_t bits = layout->layout->bits[layout->groups - 1], lead = layout->layout->lead[layout->groups - 1];
    for (int32_t e = 0; e < layout->eights; e++) {
        int32_t shift = 0, left = bits;
        for (int32_t width = 8; width; width /= 2)
            if ((bits - lead) & width) {
                eights[e] |= scan_eight(&row, width) << shift;
                shift += width;
            }
        for (int32_t n = lead; n > 0; n -= 2) {
            left -= n > 1 ? 2 : 1;
            eights[e] |= scan_eight(&leading, n > 1 ? 2 : 1) << left;
        }
    }
    memcpy(&all, eights, sizeof eights);
    return all;
}

/** Reads the codes of group g. Both pointers go on to the next group, if there is one. */
TQ_INLINE scan_codes scan_group_codes(const tq_scan_layout *layout, int32_t g, const uint8_t **row,
                                      const uint8_t **leading)
{
    if (layout->eights && g + 1 == layout->groups) return scan_last_codes(layout, *row, *leading);
    return scan_all_codes(row, leading, layout->layout->bits[g], layout->layout->lead[g]);
}

static void scan_unpack(const tq_scan_layout *layout, const uint8_t *row, const uint8_t *leading, int16_t *levels)
{
    for (int32_t g = 0; g < layout->groups; g++, levels += 32) {
        int32_t bits = layout->layout->bits[g];
        if (bits == 0) {
            memset(levels, 0, 32 * sizeof *levels);
            continue;
        }
        scan_levels(layout->books[bits].levels, bits, scan_group_codes(layout, g, &row, &leading), levels);
    }
}

static void scan_products(const int16_t *levels, int32_t n, const int16_t *q, int32_t sums[TQ_SCAN_ROWS])
{
    for (int32_t i = 0; i < TQ_SCAN_ROWS; i++, levels += n) {
        scan_sum sum = scan_no_sum();
        for (int32_t j = 0; j < n; j += 32) sum = scan_add_levels(sum, levels + j, q + j);
        sums[i] = scan_all_of(sum);
    }
}

/** Scores a row whose groups all have the same bits and lead, which are constants where this is inlined. */
TQ_INLINE int32_t scan_score_even(const tq_scan_layout *layout, int32_t bits, int32_t lead, const uint8_t *row,
                                  const uint8_t *leading, const int16_t *q)
{
    scan_sum sum = scan_no_sum();
    const int8_t *levels = layout->books[bits].levels;
    for (int32_t g = layout->eights > 0; g < layout->groups; g++, q += 32)
        sum = scan_add_product(sum, levels, bits, scan_all_codes(&row, &leading, bits, lead), q);
    if (layout->eights) sum = scan_add_product(sum, levels, bits, scan_last_codes(layout, row, leading), q);
    return scan_all_of(sum);
}

static int32_t scan_score(const tq_scan_layout *layout, const uint8_t *row, const uint8_t *leading, const int16_t *q)
{
    switch (layout->even_bits ? 10 * layout->layout->lead[0] + layout->even_bits : 0) {
    case 12: return scan_score_even(layout, 2, 1, row, leading, q);
    case 13: return scan_score_even(layout, 3, 1, row, leading, q);
    case 14: return scan_score_even(layout, 4, 1, row, leading, q);
    case 22: return scan_score_even(layout, 2, 2, row, leading, q);
    case 23: return scan_score_even(layout, 3, 2, row, leading, q);
    case 24: return scan_score_even(layout, 4, 2, row, leading, q);
    default: break;
    }
    scan_sum sum = scan_no_sum();
    for (int32_t g = 0; g < layout->groups; g++, q += 32) {
        int32_t bits = layout->layout->bits[g];
        if (bits == 0) continue;
        scan_codes codes = scan_group_codes(layout, g, &row, &leading);
        sum = scan_add_product(sum, layout->books[bits].levels, bits, codes, q);
    }
    return scan_all_of(sum);
}

/* ---- the bit behind the leading one ---- It is the highest of the `rest` bits that are in the row. If rest is
 * odd, it is the last field, of 1 bit. Otherwise there is only one field, of 2 or 4 bits, and it is the highest. */

/** Same as scan_next_sum, for groups with `rest` bits in the row, a constant where this is inlined. */
TQ_INLINE int32_t scan_next_of(const tq_scan_layout *layout, int32_t rest, const uint8_t *row, const int16_t *q)
{
    static const int8_t one[64] = {-1, 1}, two[64] = {-1, -1, 1, 1};
    static const int8_t four[64] = {-1, -1, -1, -1, -1, -1, -1, -1, 1, 1, 1, 1, 1, 1, 1, 1};
    const int32_t width = rest & 1 ? 1 : rest;
    const int8_t *signs = width == 1 ? one : width == 2 ? two : four;
    scan_sum sum = scan_no_sum();
    for (int32_t g = layout->eights > 0; g < layout->groups; g++, q += 32, row += 4 * rest)
        sum = scan_add_product(sum, signs, width, scan_field(row + 4 * (rest - width), width), q);
    if (layout->eights) {
        scan_codes all = scan_no_codes();
        uint64_t eights[4] = {0};
        for (int32_t e = 0; e < layout->eights; e++, row += rest) {
            const uint8_t *from = row + rest - width;
            eights[e] = scan_eight(&from, width);
        }
        memcpy(&all, eights, sizeof eights);
        sum = scan_add_product(sum, signs, width, all, q);
    }
    return scan_all_of(sum);
}

static int32_t scan_next_sum(const tq_scan_layout *layout, const uint8_t *row, const int16_t *q)
{
    switch (layout->even_bits) {
    case 2: return scan_next_of(layout, 1, row, q);
    case 3: return scan_next_of(layout, 2, row, q);
    case 4: return scan_next_of(layout, 3, row, q);
    case 5: return scan_next_of(layout, 4, row, q);
    case 6: return scan_next_of(layout, 5, row, q);
    default: return scan_next_of(layout, 7, row, q);
    }
}

#define TQ_SCAN_TABLE                                                                                                  \
    {scan_centre, scan_rotate,   scan_values,     scan_rough_values, scan_encode,    scan_unpack, scan_products,       \
     scan_score,  scan_next_sum, scan_fill_table, scan_sums,         scan_sums_many, scan_above}
#endif
