/* 256-bit registers for avx2.c (16-bit products) and avx2_vnni.c (byte products): what levels.h, product.h, codes.h
 * and recode.h need from a unit. */
#ifndef TQ_KERNELS_AVX2_H
#define TQ_KERNELS_AVX2_H
#include "vector.h"

/* ---- definitions for levels.h and product.h ---- */

typedef __m256i vec;
#define SUM_REGISTERS 8
#define LEVEL_OFFSET 128
#define ROW_3_SHIFT 6

typedef struct {
    vec even, odd;
} byte_pair;

TQ_INLINE vec vec_broadcast_u32x4(const void *at) { return _mm256_broadcastsi128_si256(_mm_loadu_si128(at)); }

TQ_INLINE vec vec_two_of_each(vec a, vec b) { return _mm256_blend_epi32(a, b, 0xcc); }
TQ_INLINE vec vec_zip_low_u32(vec a, vec b) { return _mm256_unpacklo_epi32(a, b); }
TQ_INLINE vec vec_zip_high_u32(vec a, vec b) { return _mm256_unpackhi_epi32(a, b); }
TQ_INLINE vec vec_zip_low_u64(vec a, vec b) { return _mm256_unpacklo_epi64(a, b); }
TQ_INLINE vec vec_zip_high_u64(vec a, vec b) { return _mm256_unpackhi_epi64(a, b); }
#define vec_repeat_u32(x, t) _mm256_shuffle_epi32(x, 0x55 * (t))

TQ_INLINE vec vec_zip_low_u8(vec a, vec b) { return _mm256_unpacklo_epi8(a, b); }
TQ_INLINE vec vec_zip_high_u8(vec a, vec b) { return _mm256_unpackhi_epi8(a, b); }
TQ_INLINE vec vec_zip_low_u16(vec a, vec b) { return _mm256_unpacklo_epi16(a, b); }
TQ_INLINE vec vec_zip_high_u16(vec a, vec b) { return _mm256_unpackhi_epi16(a, b); }

TQ_INLINE vec vec_add_dots(vec sums, vec a, vec b)
{
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sums, a, b);
#else
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
#endif
}

TQ_INLINE vec vec_low_nibbles(vec x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
TQ_INLINE vec vec_high_nibbles(vec x) { return vec_low_nibbles(_mm256_srli_epi16(x, 4)); }
TQ_INLINE vec vec_look_up(vec table, vec nibbles) { return _mm256_shuffle_epi8(table, nibbles); }

TQ_INLINE vec bytes_set(vec x, vec mask) { return _mm256_cmpeq_epi8(_mm256_and_si256(x, mask), mask); }

TQ_INLINE vec vec_choose_set(vec x, vec mask, vec a, vec b) { return _mm256_blendv_epi8(b, a, bytes_set(x, mask)); }

TQ_INLINE vec vec_negate_set(vec levels, vec x, vec mask)
{
    const vec negative = bytes_set(x, mask);
    return _mm256_sub_epi8(_mm256_xor_si256(levels, negative), negative);
}

TQ_INLINE vec vec_align_twos(vec x, int by_lane, int m) { return (void)by_lane, (void)m, x; }

TQ_INLINE vec fourth_row_3(const vec *w)
{
    return _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(w[0], 3), _mm256_set1_epi8(0x11)),
                           _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(w[1], 2), _mm256_set1_epi8(0x22)),
                                           _mm256_and_si256(_mm256_srli_epi32(w[2], 1), _mm256_set1_epi8(0x44))));
}

TQ_INLINE byte_pair join_nibbles(vec low, vec high)
{
    const vec first = _mm256_set1_epi8(15);
    return (byte_pair){
        _mm256_or_si256(_mm256_and_si256(low, first), _mm256_andnot_si256(first, _mm256_slli_epi16(high, 4))),
        _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(low, 4), first), _mm256_andnot_si256(first, high))};
}

TQ_INLINE byte_pair interleave(vec w0, vec w1)
{
    const vec order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    w0 = _mm256_shuffle_epi8(w0, order); /* c3 c1 c2 c0 */
    w1 = _mm256_shuffle_epi8(w1, order); /* c7 c5 c6 c4 */
    return (byte_pair){_mm256_blend_epi16(w0, _mm256_slli_epi32(w1, 16), 0xaa),
                       _mm256_blend_epi16(_mm256_srli_epi32(w0, 16), w1, 0xaa)};
}

/* ---- definitions for codes.h ---- */

TQ_INLINE tq_floats tq_swap(tq_floats x, int h)
{
    return h == 1 ? _mm256_permute_ps(x, 0xb1) : h == 2 ? _mm256_permute_ps(x, 0x4e) : _mm256_permute2f128_ps(x, x, 1);
}

TQ_INLINE tq_floats tq_pick(const float *table, tq_ints m)
{
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)m);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)m);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32((__m256i)m, 28))); /* bit 3 */
}

TQ_INLINE tq_floats tq_load_halves(const uint16_t *x) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)x)); }
#endif
