/* The kernels of the index's scan over leading bits, which sum looked-up bytes for 64 rows at a time.
 *
 * A block has `planes` bytes of each of its 64 rows, plane after plane. Three planes A, B, C give four 6-bit indices:
 *   A & 63, B & 63, C & 63 and A >> 6 | (B >> 6) << 2 | (C >> 6) << 4
 * into the four tables of 64 bytes that belong to them. Planes behind the last count as 0. Entries are at most 63, so
 * that four of them fit in a byte. Sums are kept in 16-bit lanes: lane i of `all` sums byte 2 i + 256 * byte 2 i + 1,
 * lane i of `odd` sums byte 2 i + 1. */
#ifndef TQ_SCAN_SIGNS_H
#define TQ_SCAN_SIGNS_H
#include "scan.h"

enum { TABLES = 4 * 64, SCAN_ROWS = TQ_SCAN_ROWS };

#if defined(__AVX512BW__)
enum { SIGN_LANES = 64 };
typedef __m512i sign_vector;
static inline sign_vector sign_zero(void) { return _mm512_setzero_si512(); }
static inline sign_vector sign_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
static inline sign_vector sign_add8(sign_vector a, sign_vector b) { return _mm512_add_epi8(a, b); }
static inline sign_vector sign_add16(sign_vector a, sign_vector b) { return _mm512_add_epi16(a, b); }
static inline sign_vector sign_high_byte(sign_vector a) { return _mm512_srli_epi16(a, 8); }
static inline sign_vector sign_rest(sign_vector a, sign_vector b, sign_vector c)
{
    __m512i ab = _mm512_ternarylogic_epi64(_mm512_set1_epi8(3), _mm512_srli_epi16(a, 6), _mm512_srli_epi16(b, 4), 0xCA);
    ab = _mm512_ternarylogic_epi64(_mm512_set1_epi8(15), ab, _mm512_srli_epi16(c, 2), 0xCA);
    return ab; /* bits 6 and 7 are those of c, shifted: look-ups do not see them */
}
static inline sign_vector sign_look_up(const uint8_t table[64], sign_vector codes)
{
#if defined(__AVX512VBMI__)
    return _mm512_permutexvar_epi8(codes, _mm512_loadu_si512(table));
#else
    __m512i low = _mm512_and_si512(codes, _mm512_set1_epi8(15)), part[4];
    for (int32_t k = 0; k < 4; k++)
        part[k] = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(table + 16 * k))), low);
    __mmask64 bit4 = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(16));
    __mmask64 bit5 = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(32));
    return _mm512_mask_blend_epi8(bit5, _mm512_mask_blend_epi8(bit4, part[0], part[1]),
                                  _mm512_mask_blend_epi8(bit4, part[2], part[3]));
#endif
}
static inline int32_t sign_store(sign_vector all, sign_vector odd, uint16_t least, uint16_t *sums)
{
    __m512i even = _mm512_sub_epi16(all, _mm512_slli_epi16(odd, 8));
    __mmask32 reach = _mm512_cmpge_epu16_mask(_mm512_max_epu16(even, odd), _mm512_set1_epi16((int16_t)least));
    __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
    _mm512_storeu_si512(sums, _mm512_permutex2var_epi64(low, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high));
    _mm512_storeu_si512(sums + 32, _mm512_permutex2var_epi64(low, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), high));
    return reach != 0;
}
#elif defined(__AVX2__)
enum { SIGN_LANES = 32 };
typedef __m256i sign_vector;
static inline sign_vector sign_zero(void) { return _mm256_setzero_si256(); }
static inline sign_vector sign_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline sign_vector sign_add8(sign_vector a, sign_vector b) { return _mm256_add_epi8(a, b); }
static inline sign_vector sign_add16(sign_vector a, sign_vector b) { return _mm256_add_epi16(a, b); }
static inline sign_vector sign_high_byte(sign_vector a) { return _mm256_srli_epi16(a, 8); }
static inline sign_vector sign_rest(sign_vector a, sign_vector b, sign_vector c)
{
    __m256i x = _mm256_and_si256(_mm256_srli_epi16(a, 6), _mm256_set1_epi8(3));
    __m256i y = _mm256_and_si256(_mm256_srli_epi16(b, 4), _mm256_set1_epi8(12));
    __m256i z = _mm256_and_si256(_mm256_srli_epi16(c, 2), _mm256_set1_epi8(48));
    return _mm256_or_si256(_mm256_or_si256(x, y), z);
}
static inline sign_vector sign_look_up(const uint8_t table[64], sign_vector codes)
{
    __m256i low = _mm256_and_si256(codes, _mm256_set1_epi8(15)), bit4 = _mm256_slli_epi16(codes, 3);
    const int8_t *t = (const int8_t *)table;
    __m256i first = _mm256_blendv_epi8(scan_look_up(t, low), scan_look_up(t + 16, low), bit4);
    __m256i last = _mm256_blendv_epi8(scan_look_up(t + 32, low), scan_look_up(t + 48, low), bit4);
    return _mm256_blendv_epi8(first, last, _mm256_slli_epi16(codes, 2));
}
static inline int32_t sign_store(sign_vector all, sign_vector odd, uint16_t least, uint16_t *sums)
{
    __m256i even = _mm256_sub_epi16(all, _mm256_slli_epi16(odd, 8)), most = _mm256_max_epu16(even, odd);
    __m256i reach = _mm256_cmpeq_epi16(_mm256_max_epu16(most, _mm256_set1_epi16((int16_t)least)), most);
    __m256i low = _mm256_unpacklo_epi16(even, odd), high = _mm256_unpackhi_epi16(even, odd);
    _mm256_storeu_si256((__m256i *)sums, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256((__m256i *)(sums + 16), _mm256_permute2x128_si256(low, high, 0x31));
    return _mm256_movemask_epi8(reach) != 0;
}
#elif defined(__ARM_NEON) && defined(__aarch64__)
enum { SIGN_LANES = 16 };
typedef uint8x16_t sign_vector;
static inline sign_vector sign_zero(void) { return vdupq_n_u8(0); }
static inline sign_vector sign_load(const uint8_t *p) { return vld1q_u8(p); }
static inline sign_vector sign_add8(sign_vector a, sign_vector b) { return vaddq_u8(a, b); }
static inline sign_vector sign_add16(sign_vector a, sign_vector b)
{
    return vreinterpretq_u8_u16(vaddq_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
static inline sign_vector sign_high_byte(sign_vector a)
{
    return vreinterpretq_u8_u16(vshrq_n_u16(vreinterpretq_u16_u8(a), 8));
}
static inline sign_vector sign_rest(sign_vector a, sign_vector b, sign_vector c)
{
    uint8x16_t x = vshrq_n_u8(a, 6), y = vandq_u8(vshrq_n_u8(b, 4), vdupq_n_u8(12));
    return vorrq_u8(vorrq_u8(x, y), vandq_u8(vshrq_n_u8(c, 2), vdupq_n_u8(48)));
}
static inline sign_vector sign_look_up(const uint8_t table[64], sign_vector codes)
{
    uint8x16x4_t t = {{vld1q_u8(table), vld1q_u8(table + 16), vld1q_u8(table + 32), vld1q_u8(table + 48)}};
    return vqtbl4q_u8(t, vandq_u8(codes, vdupq_n_u8(63)));
}
static inline int32_t sign_store(sign_vector all, sign_vector odd, uint16_t least, uint16_t *sums)
{
    uint16x8_t high = vreinterpretq_u16_u8(odd);
    uint16x8x2_t both = {{vsubq_u16(vreinterpretq_u16_u8(all), vshlq_n_u16(high, 8)), high}};
    vst2q_u16(sums, both);
    return vmaxvq_u16(vmaxq_u16(both.val[0], both.val[1])) >= least;
}
#endif

#if defined(__AVX2__) || (defined(__ARM_NEON) && defined(__aarch64__))
typedef struct {
    sign_vector a, b, c, rest;
} sign_codes;

typedef struct {
    sign_vector all, odd;
} sign_sums;

/** Loads the n planes of a triple, 1 to 3. The others are 0. */
static inline sign_codes sign_triple(const uint8_t *plane, int32_t n)
{
    sign_codes x = {sign_load(plane), sign_zero(), sign_zero(), sign_zero()};
    if (n > 1) x.b = sign_load(plane + SCAN_ROWS);
    if (n > 2) x.c = sign_load(plane + 2 * SCAN_ROWS);
    x.rest = sign_rest(x.a, x.b, x.c);
    return x;
}

static inline void sign_accumulate(sign_sums *sums, sign_codes x, const uint8_t *tables)
{
    sign_vector ab = sign_add8(sign_look_up(tables, x.a), sign_look_up(tables + 64, x.b));
    sign_vector cd = sign_add8(sign_look_up(tables + 128, x.c), sign_look_up(tables + 192, x.rest));
    sign_vector sum = sign_add8(ab, cd);
    sums->all = sign_add16(sums->all, sum);
    sums->odd = sign_add16(sums->odd, sign_high_byte(sum));
}

static int32_t scan_sums(const uint8_t *block, int32_t planes, const uint8_t *tables, uint16_t least,
                         uint16_t sums[SCAN_ROWS])
{
    int32_t reach = 0;
    for (int32_t v = 0; v < SCAN_ROWS; v += SIGN_LANES) {
        const uint8_t *plane = block + v, *table = tables;
        sign_sums s = {sign_zero(), sign_zero()};
        int32_t left = planes;
        for (; left >= 3; left -= 3, plane += 3 * SCAN_ROWS, table += TABLES)
            sign_accumulate(&s, sign_triple(plane, 3), table);
        if (left) sign_accumulate(&s, sign_triple(plane, left), table);
        reach |= sign_store(s.all, s.odd, least, sums + v);
    }
    return reach;
}

static inline void sign_four(sign_sums s[TQ_SCAN_QUERIES], sign_codes x, const uint8_t *const tables[TQ_SCAN_QUERIES],
                             int64_t at)
{
    for (int32_t q = 0; q < TQ_SCAN_QUERIES; q++) sign_accumulate(&s[q], x, tables[q] + at);
}

static int32_t scan_sums_many(const uint8_t *block, int32_t planes, const uint8_t *const tables[TQ_SCAN_QUERIES],
                              const uint16_t least[TQ_SCAN_QUERIES], uint16_t sums[TQ_SCAN_QUERIES][SCAN_ROWS])
{
    int32_t reach = 0;
    for (int32_t v = 0; v < SCAN_ROWS; v += SIGN_LANES) {
        const uint8_t *plane = block + v;
        int64_t at = 0;
        sign_sums s[TQ_SCAN_QUERIES];
        for (int32_t q = 0; q < TQ_SCAN_QUERIES; q++) s[q] = (sign_sums){sign_zero(), sign_zero()};
        int32_t left = planes;
        for (; left >= 3; left -= 3, plane += 3 * SCAN_ROWS, at += TABLES)
            sign_four(s, sign_triple(plane, 3), tables, at);
        if (left) sign_four(s, sign_triple(plane, left), tables, at);
        for (int32_t q = 0; q < TQ_SCAN_QUERIES; q++)
            reach |= sign_store(s[q].all, s[q].odd, least[q], sums[q] + v) << q;
    }
    return reach;
}
#else
static int32_t scan_sums(const uint8_t *block, int32_t planes, const uint8_t *tables, uint16_t least,
                         uint16_t sums[SCAN_ROWS])
{
    int32_t reach = 0;
    memset(sums, 0, SCAN_ROWS * sizeof *sums);
    for (int32_t p = 0; p < planes; p += 3, tables += TABLES)
        for (int32_t i = 0; i < SCAN_ROWS; i++) {
            const uint8_t *at = block + (int64_t)p * SCAN_ROWS + i;
            int32_t a = at[0], b = p + 1 < planes ? at[SCAN_ROWS] : 0, c = p + 2 < planes ? at[2 * SCAN_ROWS] : 0;
            int32_t rest = a >> 6 | b >> 6 << 2 | c >> 6 << 4;
            sums[i] = (uint16_t)(sums[i] + tables[a & 63] + tables[64 + (b & 63)] + tables[128 + (c & 63)] +
                                 tables[192 + rest]);
        }
    for (int32_t i = 0; i < SCAN_ROWS; i++) reach |= sums[i] >= least;
    return reach;
}

static int32_t scan_sums_many(const uint8_t *block, int32_t planes, const uint8_t *const tables[TQ_SCAN_QUERIES],
                              const uint16_t least[TQ_SCAN_QUERIES], uint16_t sums[TQ_SCAN_QUERIES][SCAN_ROWS])
{
    int32_t reach = 0;
    for (int32_t q = 0; q < TQ_SCAN_QUERIES; q++) reach |= scan_sums(block, planes, tables[q], least[q], sums[q]) << q;
    return reach;
}
#endif

static void scan_fill_table(const float *const pairs[3], float factor, uint8_t table[64])
{
    float first[16]; /* a[e & 3] + b[e >> 2] */
    tq_floats ab[16 / TQ_LANES], most = tq_all(63.0f);
    for (int32_t e = 0; e < 16; e++) first[e] = pairs[0][e & 3] + pairs[1][e >> 2];
    memcpy(ab, first, sizeof first);
    for (int32_t e = 0; e < 4; e++) TQ_UNROLL
    for (int32_t v = 0; v < 16 / TQ_LANES; v++, table += TQ_LANES) {
        tq_floats x = (ab[v] + pairs[2][e]) * factor + 0.5f;
        tq_bytes bytes =
            __builtin_convertvector(__builtin_convertvector(tq_select(x > most, most, x), tq_ints), tq_bytes);
        memcpy(table, &bytes, sizeof bytes);
    }
}

/** Sets bit i if tq_leading_scale(scale) * (sum * unit + add) + offset >= limit in row i, each operation in float32. */
static uint64_t scan_above(const uint16_t sums[SCAN_ROWS], const float *scales, const float *offsets, float unit,
                           float add, float limit)
{
    uint64_t mask = 0;
#if defined(__AVX512BW__)
    for (int32_t i = 0; i < SCAN_ROWS; i += 16) {
        __m512 v = _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(sums + i))));
        v = _mm512_add_ps(_mm512_mul_ps(v, _mm512_set1_ps(unit)), _mm512_set1_ps(add));
        __m512i k = _mm512_srai_epi32(_mm512_slli_epi32(_mm512_loadu_si512(scales + i), 23), 26);
        __m512 factor = _mm512_mul_ps(_mm512_cvtepi32_ps(k), _mm512_set1_ps(1.0f / 64));
        factor = _mm512_add_ps(factor, _mm512_set1_ps(1));
        v = _mm512_mul_ps(v, _mm512_mul_ps(_mm512_loadu_ps(scales + i), factor));
        if (offsets) v = _mm512_add_ps(v, _mm512_loadu_ps(offsets + i));
        mask |= (uint64_t)_mm512_cmp_ps_mask(v, _mm512_set1_ps(limit), _CMP_GE_OQ) << i;
    }
#elif defined(__AVX2__)
    for (int32_t i = 0; i < SCAN_ROWS; i += 8) {
        __m256 v = _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(sums + i))));
        v = _mm256_add_ps(_mm256_mul_ps(v, _mm256_set1_ps(unit)), _mm256_set1_ps(add));
        __m256i words = _mm256_loadu_si256((const __m256i *)(scales + i));
        __m256i k = _mm256_srai_epi32(_mm256_slli_epi32(words, 23), 26);
        __m256 factor = _mm256_mul_ps(_mm256_cvtepi32_ps(k), _mm256_set1_ps(1.0f / 64));
        factor = _mm256_add_ps(factor, _mm256_set1_ps(1));
        v = _mm256_mul_ps(v, _mm256_mul_ps(_mm256_loadu_ps(scales + i), factor));
        if (offsets) v = _mm256_add_ps(v, _mm256_loadu_ps(offsets + i));
        mask |= (uint64_t)_mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_set1_ps(limit), _CMP_GE_OQ)) << i;
    }
#else
    for (int32_t i = 0; i < SCAN_ROWS; i++) {
        float v = ((float)sums[i] * unit + add) * tq_leading_scale(scales[i]);
        if (offsets) v += offsets[i];
        mask |= (uint64_t)(v >= limit) << i;
    }
#endif
    return mask;
}
#endif
