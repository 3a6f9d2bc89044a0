/* Levels of packed codes in 512-bit registers: for avx512.c (16-bit products) and avx512_vnni.c (byte products).
 *
 * A 64-byte load of word w of a tile is rows g .. g + 3 (of r), four lanes t each; nibble n of a word is
 * column 4 t + n (n < 4) or 16 + 4 t + n - 4. Every width gives two vectors of bytes in one order:
 *   even, byte i of a word    column n = 2 i          n: 0 2 4 6
 *   odd,  byte i of a word    column n = 2 i + 1      n: 1 3 5 7                                  */
#ifndef TQ_KERNELS_AVX512_H
#define TQ_KERNELS_AVX512_H
#include "vector.h"
#include <immintrin.h>

typedef struct {
    __m512i even, odd;
} bytes_u8x64;

/** A codebook as look-up tables, level + 128 by the low four bits of a code: codes 0..15 and 16..31. */
typedef struct {
    __m512i u8x64[2];
} tables;

static inline tables tables_of(const tq_codebook *book)
{
    int8_t levels[32];
    tables t;
    memcpy(levels, book->levels, sizeof levels);
    if (book->bits == 3) memcpy(levels + 8, levels, 8); /* ignores a nibble's top bit, which is another code's */
    TQ_UNROLL
    for (int i = 0; i < 2; i++)
        t.u8x64[i] =
            _mm512_broadcast_i32x4(_mm_xor_si128(_mm_loadu_si128((const __m128i *)levels + i), _mm_set1_epi8(-128)));
    return t;
}

/** table[low four bits of each byte]. */
static inline __m512i look_up_u8x64(__m512i x, __m512i table)
{
#if defined(__AVX512VBMI__) /* vpermb uses six bits, and the table is repeated four times: no mask */
    return _mm512_permutexvar_epi8(x, table);
#else
    return _mm512_shuffle_epi8(table, _mm512_and_si512(x, _mm512_set1_epi8(15)));
#endif
}

/* 4 bits   word r: the eight codes of row g + 8 r
 * 3 bits   nibble n, bit       3           2 1 0
 *            w[0]           | h bit 0 | row g      |   h: code n of row g + 24, one bit in each spare place
 *            w[1]           | h bit 1 | row g + 8  |
 *            w[2]           | h bit 2 | row g + 16 |   r < 3 needs no mask: the table repeats */
static inline __m512i fourth_row_3_u8x64(const __m512i *w)
{
    __m512i bits_0_2 = _mm512_ternarylogic_epi32(_mm512_srli_epi32(w[0], 3), _mm512_srli_epi32(w[2], 1),
                                                 _mm512_set1_epi8(0x11), 0xe4); /* c ? a : b */
    return _mm512_ternarylogic_epi32(bits_0_2, _mm512_srli_epi32(w[1], 2), _mm512_set1_epi8(0x22),
                                     0xd8); /* c ? b : a */
}

/* Words by row to words by lane, in each 128-bit lane (and sums likewise):
 *   v[r]  | t = 3 | t = 2 | t = 1 | t = 0 |   ->   v[t]  | r = 3 | r = 2 | r = 1 | r = 0 |  */
static inline void vec_transpose(__m512i v[4])
{
    __m512i t01_r01 = _mm512_unpacklo_epi32(v[0], v[1]), t23_r01 = _mm512_unpackhi_epi32(v[0], v[1]);
    __m512i t01_r23 = _mm512_unpacklo_epi32(v[2], v[3]), t23_r23 = _mm512_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm512_unpacklo_epi64(t01_r01, t01_r23);
    v[1] = _mm512_unpackhi_epi64(t01_r01, t01_r23);
    v[2] = _mm512_unpacklo_epi64(t23_r01, t23_r23);
    v[3] = _mm512_unpackhi_epi64(t23_r01, t23_r23);
}

/* Bytes to nibble order:   w0 | c3 c2 c1 c0 |  w1 | c7 c6 c5 c4 |  ->  even | c6 c4 c2 c0 |  odd | c7 c5 c3 c1 |
 * (each byte holds code n of several rows, in bits of their own). The upper half of a word comes from w1 by a merging
 * mask. */
static inline bytes_u8x64 interleave_u8x64(__m512i w0, __m512i w1)
{
    const __m512i even = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 0, 2, 4, 6, 4, 6, 8, 10, 8, 10, 12, 14, 12, 14));
    const __m512i odd = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 3, 1, 3, 5, 7, 5, 7, 9, 11, 9, 11, 13, 15, 13, 15));
    const __mmask64 upper = 0xcccccccccccccccc;
    return (bytes_u8x64){_mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(w0, even), upper, w1, even),
                         _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(w0, odd), upper, w1, odd)};
}

/** Words of four values of g of a tile before the look-up: nibbles (3 to 8 bits; at 8 of both tiles) by row r or by
 *  lane t, and bytes in nibble order with bits of all four rows (1, 2, 5 and 6 bits). */
typedef struct {
    __m512i nibbles[4], high[4];
    bytes_u8x64 bytes;
} tile_words;

TQ_INLINE tile_words load_words(int bits, int by_lane, const uint8_t *at)
{
    tile_words words = {0};
    __m512i w[TQ_WIDE_BITS] = {{0}};
    TQ_UNROLL
    for (int i = 0; i < bits; i++) w[i] = _mm512_loadu_si512(at + 128 * i);
    if (bits == 1) words.bytes = interleave_u8x64(w[0], _mm512_srli_epi32(w[0], 4));
    if (bits == 2) words.bytes = interleave_u8x64(w[0], w[1]);
    if (bits == 5) words.bytes = interleave_u8x64(w[4], _mm512_srli_epi32(w[4], 4));
    if (bits == 6) words.bytes = interleave_u8x64(w[4], w[5]);
    if (bits == 3) w[3] = fourth_row_3_u8x64(w);
    if (bits >= 3 && by_lane) vec_transpose(w);
    if (bits == TQ_WIDE_BITS && by_lane) vec_transpose(w + 4);
    TQ_UNROLL
    for (int i = 0; i < 4 && bits >= 3; i++) words.nibbles[i] = w[i];
    TQ_UNROLL
    for (int i = 0; i < 4 && bits == TQ_WIDE_BITS; i++) words.high[i] = w[4 + i];
    return words;
}

static inline bytes_u8x64 look_up_nibbles_u8x64(__m512i nibbles, __m512i table)
{
    return (bytes_u8x64){look_up_u8x64(nibbles, table), look_up_u8x64(_mm512_srli_epi16(nibbles, 4), table)};
}

/** Word t of each 128-bit lane, four times. */
TQ_INLINE __m512i repeat_u32x16(__m512i x, int t)
{
    switch (t) {
    case 0: return _mm512_shuffle_epi32(x, 0x00);
    case 1: return _mm512_shuffle_epi32(x, 0x55);
    case 2: return _mm512_shuffle_epi32(x, 0xaa);
    default: return _mm512_shuffle_epi32(x, 0xff);
    }
}

/** 128 + level to 128 - level where the bit of the mask is set in x. */
TQ_INLINE __m512i negate_u8x64(__m512i levels, __m512i x, __m512i mask)
{
    return _mm512_mask_sub_epi8(levels, _mm512_test_epi8_mask(x, mask), _mm512_setzero_si512(), levels);
}

/** Levels of 6 bits; twos: the upper two bits of codes, in bits of their own (`mask`). */
TQ_INLINE __m512i look_up_6_u8x64(const __m512i tables[2], __m512i nibbles, __m512i twos, __m512i mask)
{
    const __m512i fifth = _mm512_and_si512(mask, _mm512_set1_epi8(0x55));
    __m512i levels = _mm512_mask_blend_epi8(_mm512_test_epi8_mask(twos, fifth), look_up_u8x64(nibbles, tables[0]),
                                            look_up_u8x64(nibbles, tables[1]));
    return negate_u8x64(levels, twos, _mm512_andnot_si512(fifth, mask));
}

/* 2 bits   word h, byte i: code n = 4 h + i of rows g + 8 r in bits 2 r and 2 r + 1; comes as code << 2 r
 * 1 bit    byte i: code n = 4 h + i of row g + 8 r in bit r + 4 h; comes as code << r
 * 5 bits   the magnitude as 4 bits, the sign as 1 bit
 * 6 bits   the low four of the magnitude as 4 bits; its fifth, which chooses the table, and the sign as 2 bits
 * 8 bits   the low four and the upper four as 4 bits: level + 128 itself */
TQ_INLINE bytes_u8x64 levels_u8x64(int bits, int by_lane, const tile_words *words, int m, const tables *t)
{
    if (bits == 3 || bits == 4) return look_up_nibbles_u8x64(words->nibbles[m], t->u8x64[0]);
    if (bits == TQ_WIDE_BITS) {
        const __m512i low = words->nibbles[m], high = words->high[m], first = _mm512_set1_epi8(15); /* first ? a : b */
        return (bytes_u8x64){_mm512_ternarylogic_epi32(low, _mm512_slli_epi16(high, 4), first, 0xe4),
                             _mm512_ternarylogic_epi32(_mm512_srli_epi16(low, 4), high, first, 0xe4)};
    }
    const __m512i twos = _mm512_broadcast_i32x4(_mm_setr_epi32(0x03030303, 0x0c0c0c0c, 0x30303030, (int)0xc0c0c0c0)),
                  ones = _mm512_broadcast_i32x4(_mm_setr_epi32(0x01010101, 0x02020202, 0x04040404, 0x08080808));
    const int is_two = bits == 2 || bits == 6;
    const __m512i mask = by_lane  ? is_two ? twos : ones
                         : is_two ? _mm512_set1_epi8((char)(3 << 2 * m))
                                  : _mm512_set1_epi8((char)(1 << m));
    __m512i even = words->bytes.even, odd = words->bytes.odd;
    if (by_lane) even = repeat_u32x16(even, m), odd = repeat_u32x16(odd, m);
    if (bits == 6)
        return (bytes_u8x64){look_up_6_u8x64(t->u8x64, words->nibbles[m], even, mask),
                             look_up_6_u8x64(t->u8x64, _mm512_srli_epi16(words->nibbles[m], 4), odd, mask)};
    if (bits <= 2) return (bytes_u8x64){_mm512_and_si512(even, mask), _mm512_and_si512(odd, mask)};
    bytes_u8x64 levels = look_up_nibbles_u8x64(words->nibbles[m], t->u8x64[0]);
    return (bytes_u8x64){negate_u8x64(levels.even, even, mask), negate_u8x64(levels.odd, odd, mask)};
}

/* ---- definitions for product.h ---- */

typedef __m512i vec;
#define VEC_BYTES 64
#define SUM_REGISTERS 16
#define LEVEL_OFFSET 128
#define SHIFT_2 0, 2, 4, 6
#define SHIFT_1 0, 1, 2, 3

static inline __m512i vec_load(const void *at) { return _mm512_loadu_si512(at); }

static inline __m512i vec_broadcast_u32x4(const void *at) { return _mm512_broadcast_i32x4(_mm_loadu_si128(at)); }

static inline __m512i vec_broadcast_u32(const void *at)
{
    int32_t word;
    memcpy(&word, at, sizeof word);
    return _mm512_set1_epi32(word);
}

static inline __m512i vec_broadcast_u32_twice(const void *a, const void *b)
{
    int32_t word;
    memcpy(&word, b, sizeof word);
    return _mm512_mask_set1_epi32(vec_broadcast_u32(a), 0xcccc, word);
}

static inline __m512i vec_zero(void) { return _mm512_setzero_si512(); }

static inline __m512i vec_add(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }

static inline __m512i vec_times_256(__m512i a) { return _mm512_slli_epi32(a, 8); }

/* ---- definitions for codes.h ---- */

TQ_INLINE tq_floats tq_swap(tq_floats x, int h)
{
    switch (h) {
    case 1: return _mm512_permute_ps(x, 0xb1);
    case 2: return _mm512_permute_ps(x, 0x4e);
    case 4: return _mm512_shuffle_f32x4(x, x, 0xb1);
    default: return _mm512_shuffle_f32x4(x, x, 0x4e);
    }
}

static inline tq_floats tq_pick(const float *table, tq_ints m)
{
    return _mm512_permutexvar_ps((__m512i)m, _mm512_loadu_ps(table));
}

/** n numbers of a dtype to float32. */
static void load_vector(int32_t dtype, const void *x, float *y, int64_t n)
{
    const uint16_t *u = x;
    int64_t i = 0;
    if (dtype == TQ_F32) memcpy(y, x, sizeof(float) * (size_t)n);
    if (dtype == TQ_F16)
        for (; i + 16 <= n; i += 16)
            _mm512_storeu_ps(y + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(u + i))));
    for (; i < n && dtype == TQ_F16; i++) y[i] = tq_f32_from_f16(u[i]);
    for (; i < n && dtype == TQ_BF16; i++) y[i] = tq_f32_from_bf16(u[i]);
}
#endif
