/* Levels of packed codes in 256-bit registers: for avx2.c (16-bit products) and avx2_vnni.c (byte products).
 *
 * A 32-byte load of word w of a tile is rows g and g + 1 (of r), four lanes t each; nibble n of a word is
 * column 4 t + n (n < 4) or 16 + 4 t + n - 4. Every width gives two vectors of bytes in one order:
 *   even, byte i of a word    column n = 2 i          n: 0 2 4 6
 *   odd,  byte i of a word    column n = 2 i + 1      n: 1 3 5 7                                  */
#ifndef TQ_KERNELS_AVX2_H
#define TQ_KERNELS_AVX2_H
#include "vector.h"
#include <immintrin.h>

typedef struct {
    __m256i even, odd;
} bytes_u8x32;

/** A codebook as look-up tables, level + 128 by the low four bits of a code: codes 0..15 and 16..31. */
typedef struct {
    __m256i u8x32[2];
} tables;

static inline tables tables_of(const tq_codebook *book)
{
    int8_t levels[32];
    tables t;
    memcpy(levels, book->levels, sizeof levels);
    if (book->bits == 3) memcpy(levels + 8, levels, 8); /* ignores a nibble's top bit, which is another code's */
    TQ_UNROLL
    for (int i = 0; i < 2; i++)
        t.u8x32[i] = _mm256_broadcastsi128_si256(
            _mm_xor_si128(_mm_loadu_si128((const __m128i *)levels + i), _mm_set1_epi8(-128)));
    return t;
}

/* 4 bits   word r: the eight codes of row g + 8 r
 * 3 bits   nibble n, bit       3           2 1 0
 *            w[0]           | h bit 0 | row g      |   h: code n of row g + 24, one bit in each spare place
 *            w[1]           | h bit 1 | row g + 8  |
 *            w[2]           | h bit 2 | row g + 16 |   r < 3 needs no mask: the table repeats */
static inline __m256i fourth_row_3_u8x32(const __m256i *w)
{
    return _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(w[0], 3), _mm256_set1_epi8(0x11)),
                           _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(w[1], 2), _mm256_set1_epi8(0x22)),
                                           _mm256_and_si256(_mm256_srli_epi32(w[2], 1), _mm256_set1_epi8(0x44))));
}

/* Words by row to words by lane, in each 128-bit lane (and sums likewise):
 *   v[r]  | t = 3 | t = 2 | t = 1 | t = 0 |   ->   v[t]  | r = 3 | r = 2 | r = 1 | r = 0 |  */
static inline void vec_transpose(__m256i v[4])
{
    __m256i t01_r01 = _mm256_unpacklo_epi32(v[0], v[1]), t23_r01 = _mm256_unpackhi_epi32(v[0], v[1]);
    __m256i t01_r23 = _mm256_unpacklo_epi32(v[2], v[3]), t23_r23 = _mm256_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm256_unpacklo_epi64(t01_r01, t01_r23);
    v[1] = _mm256_unpackhi_epi64(t01_r01, t01_r23);
    v[2] = _mm256_unpacklo_epi64(t23_r01, t23_r23);
    v[3] = _mm256_unpackhi_epi64(t23_r01, t23_r23);
}

/* Bytes to nibble order:   w0 | c3 c2 c1 c0 |  w1 | c7 c6 c5 c4 |  ->  even | c6 c4 c2 c0 |  odd | c7 c5 c3 c1 |
 * (each byte holds code n of several rows, in bits of their own). */
static inline bytes_u8x32 interleave_u8x32(__m256i w0, __m256i w1)
{
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    w0 = _mm256_shuffle_epi8(w0, order); /* c3 c1 c2 c0 */
    w1 = _mm256_shuffle_epi8(w1, order); /* c7 c5 c6 c4 */
    return (bytes_u8x32){_mm256_blend_epi16(w0, _mm256_slli_epi32(w1, 16), 0xaa),
                         _mm256_blend_epi16(_mm256_srli_epi32(w0, 16), w1, 0xaa)};
}

/** Words of two values of g of a tile before the look-up: nibbles (3 to 8 bits; at 8 of both tiles) by row r or by lane
 *  t, and bytes in nibble order with bits of all four rows (1, 2, 5 and 6 bits). */
typedef struct {
    __m256i nibbles[4], high[4];
    bytes_u8x32 bytes;
} tile_words;

TQ_INLINE tile_words load_words(int bits, int by_lane, const uint8_t *at)
{
    tile_words words = {0};
    __m256i w[TQ_WIDE_BITS] = {{0}};
    TQ_UNROLL
    for (int i = 0; i < bits; i++) w[i] = _mm256_loadu_si256((const __m256i *)(at + 128 * i));
    if (bits == 1) words.bytes = interleave_u8x32(w[0], _mm256_srli_epi32(w[0], 4));
    if (bits == 2) words.bytes = interleave_u8x32(w[0], w[1]);
    if (bits == 5) words.bytes = interleave_u8x32(w[4], _mm256_srli_epi32(w[4], 4));
    if (bits == 6) words.bytes = interleave_u8x32(w[4], w[5]);
    if (bits == 3) w[3] = fourth_row_3_u8x32(w);
    if (bits >= 3 && by_lane) vec_transpose(w);
    if (bits == TQ_WIDE_BITS && by_lane) vec_transpose(w + 4);
    TQ_UNROLL
    for (int i = 0; i < 4 && bits >= 3; i++) words.nibbles[i] = w[i];
    TQ_UNROLL
    for (int i = 0; i < 4 && bits == TQ_WIDE_BITS; i++) words.high[i] = w[4 + i];
    return words;
}

static inline bytes_u8x32 look_up_u8x32(__m256i nibbles, __m256i table)
{
    const __m256i mask = _mm256_set1_epi8(15);
    return (bytes_u8x32){_mm256_shuffle_epi8(table, _mm256_and_si256(nibbles, mask)),
                         _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(nibbles, 4), mask))};
}

/** Word t of each 128-bit lane, four times. */
TQ_INLINE __m256i repeat_u32x8(__m256i x, int t)
{
    switch (t) {
    case 0: return _mm256_shuffle_epi32(x, 0x00);
    case 1: return _mm256_shuffle_epi32(x, 0x55);
    case 2: return _mm256_shuffle_epi32(x, 0xaa);
    default: return _mm256_shuffle_epi32(x, 0xff);
    }
}

/** Ones in bytes of x in which the bit of the mask is set. */
TQ_INLINE __m256i bytes_set_u8x32(__m256i x, __m256i mask)
{
    return _mm256_cmpeq_epi8(_mm256_and_si256(x, mask), mask);
}

/** 128 + level to 128 - level where `negative` has ones. */
TQ_INLINE __m256i negate_u8x32(__m256i levels, __m256i negative)
{
    return _mm256_sub_epi8(_mm256_xor_si256(levels, negative), negative);
}

/** Levels of 6 bits; twos: the upper two bits of codes, in bits of their own (`mask`). */
TQ_INLINE __m256i look_up_6_u8x32(const __m256i tables[2], __m256i nibbles, __m256i twos, __m256i mask)
{
    const __m256i fifth = _mm256_and_si256(mask, _mm256_set1_epi8(0x55)), sign = _mm256_andnot_si256(fifth, mask);
    nibbles = _mm256_and_si256(nibbles, _mm256_set1_epi8(15));
    __m256i levels = _mm256_blendv_epi8(_mm256_shuffle_epi8(tables[0], nibbles),
                                        _mm256_shuffle_epi8(tables[1], nibbles), bytes_set_u8x32(twos, fifth));
    return negate_u8x32(levels, bytes_set_u8x32(twos, sign));
}

/* 2 bits   word h, byte i: code n = 4 h + i of rows g + 8 r in bits 2 r and 2 r + 1; comes as code << 2 r
 * 1 bit    byte i: code n = 4 h + i of row g + 8 r in bit r + 4 h; comes as code << r
 * 5 bits   the magnitude as 4 bits, the sign as 1 bit
 * 6 bits   the low four of the magnitude as 4 bits; its fifth, which chooses the table, and the sign as 2 bits
 * 8 bits   the low four and the upper four as 4 bits: level + 128 itself */
TQ_INLINE bytes_u8x32 levels_u8x32(int bits, int by_lane, const tile_words *words, int m, const tables *t)
{
    if (bits == 3 || bits == 4) return look_up_u8x32(words->nibbles[m], t->u8x32[0]);
    if (bits == TQ_WIDE_BITS) {
        const __m256i low = words->nibbles[m], high = words->high[m], first = _mm256_set1_epi8(15);
        return (bytes_u8x32){
            _mm256_or_si256(_mm256_and_si256(low, first), _mm256_andnot_si256(first, _mm256_slli_epi16(high, 4))),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(low, 4), first), _mm256_andnot_si256(first, high))};
    }
    const __m128i twos = _mm_setr_epi32(0x03030303, 0x0c0c0c0c, 0x30303030, (int)0xc0c0c0c0),
                  ones = _mm_setr_epi32(0x01010101, 0x02020202, 0x04040404, 0x08080808);
    const int is_two = bits == 2 || bits == 6;
    const __m256i mask = by_lane  ? _mm256_broadcastsi128_si256(is_two ? twos : ones)
                         : is_two ? _mm256_set1_epi8((char)(3 << 2 * m))
                                  : _mm256_set1_epi8((char)(1 << m));
    __m256i even = words->bytes.even, odd = words->bytes.odd;
    if (by_lane) even = repeat_u32x8(even, m), odd = repeat_u32x8(odd, m);
    if (bits == 6)
        return (bytes_u8x32){look_up_6_u8x32(t->u8x32, words->nibbles[m], even, mask),
                             look_up_6_u8x32(t->u8x32, _mm256_srli_epi16(words->nibbles[m], 4), odd, mask)};
    if (bits <= 2) return (bytes_u8x32){_mm256_and_si256(even, mask), _mm256_and_si256(odd, mask)};
    bytes_u8x32 levels = look_up_u8x32(words->nibbles[m], t->u8x32[0]);
    return (bytes_u8x32){negate_u8x32(levels.even, bytes_set_u8x32(even, mask)),
                         negate_u8x32(levels.odd, bytes_set_u8x32(odd, mask))};
}

/* ---- definitions for product.h ---- */

typedef __m256i vec;
#define VEC_BYTES 32
#define LEVEL_OFFSET 128
#define SHIFT_2 0, 2, 4, 6
#define SHIFT_1 0, 1, 2, 3

static inline __m256i vec_load(const void *at) { return _mm256_loadu_si256(at); }

static inline __m256i vec_broadcast_u32x4(const void *at) { return _mm256_broadcastsi128_si256(_mm_loadu_si128(at)); }

static inline __m256i vec_broadcast_u32(const void *at)
{
    int32_t word;
    memcpy(&word, at, sizeof word);
    return _mm256_set1_epi32(word);
}

static inline __m256i vec_broadcast_u32_twice(const void *a, const void *b)
{
    return _mm256_blend_epi32(vec_broadcast_u32(a), vec_broadcast_u32(b), 0xcc);
}

static inline __m256i vec_zero(void) { return _mm256_setzero_si256(); }

static inline __m256i vec_add(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }

static inline __m256i vec_times_256(__m256i a) { return _mm256_slli_epi32(a, 8); }

/* ---- definitions for codes.h ---- */

TQ_INLINE tq_floats tq_swap(tq_floats x, int h)
{
    return h == 1 ? _mm256_permute_ps(x, 0xb1) : h == 2 ? _mm256_permute_ps(x, 0x4e) : _mm256_permute2f128_ps(x, x, 1);
}

static inline tq_floats tq_pick(const float *table, tq_ints m)
{
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)m);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)m);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32((__m256i)m, 28))); /* bit 3 */
}

/** n numbers of a dtype to float32. */
static void load_vector(int32_t dtype, const void *x, float *y, int64_t n)
{
    const uint16_t *u = x;
    int64_t i = 0;
    if (dtype == TQ_F32) memcpy(y, x, sizeof(float) * (size_t)n);
    if (dtype == TQ_F16)
        for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(u + i))));
    for (; i < n && dtype == TQ_F16; i++) y[i] = tq_f32_from_f16(u[i]);
    for (; i < n && dtype == TQ_BF16; i++) y[i] = tq_f32_from_bf16(u[i]);
}
#endif
