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

/** A codebook as look-up tables, level + 128 by the low four bits of a code: codes 0..15, codes 16..31. */
typedef struct {
    __m256i low_u8x32, high_u8x32;
} tables;

static inline tables tables_of(const tq_codebook *book)
{
    int8_t levels[32];
    memcpy(levels, book->levels, sizeof levels);
    if (book->bits == 3) memcpy(levels + 8, levels, 8); /* a nibble's top bit is another code's: do not care */
    __m128i low = _mm_loadu_si128((const __m128i *)levels), high = _mm_loadu_si128((const __m128i *)levels + 1),
            sign = _mm_set1_epi8(-128);
    return (tables){_mm256_broadcastsi128_si256(_mm_xor_si128(low, sign)),
                    _mm256_broadcastsi128_si256(_mm_xor_si128(high, sign))};
}

/* 4 bits   word r: the eight codes of row g + 8 r
 * 3 bits   nibble n, bit       3           2 1 0
 *            w[0]           | h bit 0 | row g      |   h: code n of row g + 24, one bit in each spare place
 *            w[1]           | h bit 1 | row g + 8  |
 *            w[2]           | h bit 2 | row g + 16 |   r < 3 needs no mask: the table repeats */
static inline __m256i nibbles_3_u8x32(const __m256i *w, int r)
{
    if (r < 3) return w[r];
    return _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(w[0], 3), _mm256_set1_epi8(0x11)),
                           _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(w[1], 2), _mm256_set1_epi8(0x22)),
                                           _mm256_and_si256(_mm256_srli_epi32(w[2], 1), _mm256_set1_epi8(0x44))));
}

static inline bytes_u8x32 look_up_u8x32(__m256i nibbles, __m256i table)
{
    const __m256i mask = _mm256_set1_epi8(15);
    return (bytes_u8x32){_mm256_shuffle_epi8(table, _mm256_and_si256(nibbles, mask)),
                         _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(nibbles, 4), mask))};
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

/* 2 bits   word h, byte i: code n = 4 h + i of rows g + 8 r in bits 2 r and 2 r + 1; comes as code << 2 r */
static inline bytes_u8x32 levels_2_u8x32(const __m256i *w, int r)
{
    bytes_u8x32 all = interleave_u8x32(w[0], w[1]);
    const __m256i mask = _mm256_set1_epi8((char)(3 << 2 * r));
    return (bytes_u8x32){_mm256_and_si256(all.even, mask), _mm256_and_si256(all.odd, mask)};
}

/* 1 bit    byte i: code n = 4 h + i of row g + 8 r in bit r + 4 h; comes as code << r */
static inline bytes_u8x32 levels_1_u8x32(__m256i w, int r)
{
    bytes_u8x32 all = interleave_u8x32(w, _mm256_srli_epi32(w, 4));
    const __m256i mask = _mm256_set1_epi8((char)(1 << r));
    return (bytes_u8x32){_mm256_and_si256(all.even, mask), _mm256_and_si256(all.odd, mask)};
}

/* 5 bits   the low four as 4 bits, the fifth as 1 bit: it chooses the table */
static inline bytes_u8x32 levels_5_u8x32(const __m256i *w, int r, const tables *t)
{
    bytes_u8x32 low = look_up_u8x32(w[r], t->low_u8x32), high = look_up_u8x32(w[r], t->high_u8x32),
                fifth = levels_1_u8x32(w[4], r);
    const __m256i bit = _mm256_set1_epi8((char)(1 << r));
    return (bytes_u8x32){_mm256_blendv_epi8(low.even, high.even, _mm256_cmpeq_epi8(fifth.even, bit)),
                         _mm256_blendv_epi8(low.odd, high.odd, _mm256_cmpeq_epi8(fifth.odd, bit))};
}

TQ_INLINE bytes_u8x32 levels_u8x32(int bits, const __m256i *w, int r, const tables *t)
{
    switch (bits) {
    case 1: return levels_1_u8x32(w[0], r);
    case 2: return levels_2_u8x32(w, r);
    case 3: return look_up_u8x32(nibbles_3_u8x32(w, r), t->low_u8x32);
    case 4: return look_up_u8x32(w[r], t->low_u8x32);
    default: return levels_5_u8x32(w, r, t);
    }
}

/* ---- what product.h asks for ---- */

typedef __m256i vec;
#define VEC_BYTES 32
#define LEVEL_OFFSET 128
#define SHIFT_2 0, 2, 4, 6
#define SHIFT_1 0, 1, 2, 3

static inline __m256i vec_load(const void *at) { return _mm256_loadu_si256(at); }

static inline __m256i vec_broadcast(const void *at) { return _mm256_broadcastsi128_si256(_mm_loadu_si128(at)); }

static inline __m256i vec_zero(void) { return _mm256_setzero_si256(); }

static inline __m256i vec_add(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }

static inline __m256i vec_times_256(__m256i a) { return _mm256_slli_epi32(a, 8); }

/* | v0: t3 t2 t1 t0 | .. | v3: t3 t2 t1 t0 |  ->  | sum v3 | sum v2 | sum v1 | sum v0 |, in each 128-bit lane */
static inline __m256i add_lanes(const __m256i v[4])
{
    __m256i v01 = _mm256_add_epi32(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
    __m256i v23 = _mm256_add_epi32(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
    return _mm256_add_epi32(_mm256_unpacklo_epi64(v01, v23), _mm256_unpackhi_epi64(v01, v23));
}

/* ---- what codes.h asks for ---- */

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
