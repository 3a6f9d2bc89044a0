/* 512-bit registers for avx512.c (16-bit products) and avx512_vnni.h (byte products): what levels.h, product.h,
 * codes.h and recode.h need from a unit. */
#ifndef TQ_KERNELS_AVX512_H
#define TQ_KERNELS_AVX512_H
#include "vector.h"

/* ---- definitions for levels.h and product.h ---- */

typedef __m512i vec;
#define SUM_REGISTERS 16
#define LEVEL_OFFSET 128
#define ROW_3_SHIFT 6

typedef struct {
    vec even, odd;
} byte_pair;

TQ_INLINE vec vec_broadcast_u32x4(const void *at) { return _mm512_broadcast_i32x4(_mm_loadu_si128(at)); }

TQ_INLINE vec vec_two_of_each(vec a, vec b) { return _mm512_mask_blend_epi32(0xcccc, a, b); }
TQ_INLINE vec vec_zip_low_u32(vec a, vec b) { return _mm512_unpacklo_epi32(a, b); }
TQ_INLINE vec vec_zip_high_u32(vec a, vec b) { return _mm512_unpackhi_epi32(a, b); }
TQ_INLINE vec vec_zip_low_u64(vec a, vec b) { return _mm512_unpacklo_epi64(a, b); }
TQ_INLINE vec vec_zip_high_u64(vec a, vec b) { return _mm512_unpackhi_epi64(a, b); }
#define vec_repeat_u32(x, t) _mm512_shuffle_epi32(x, 0x55 * (t))

TQ_INLINE vec vec_zip_low_u8(vec a, vec b) { return _mm512_unpacklo_epi8(a, b); }
TQ_INLINE vec vec_zip_high_u8(vec a, vec b) { return _mm512_unpackhi_epi8(a, b); }
TQ_INLINE vec vec_zip_low_u16(vec a, vec b) { return _mm512_unpacklo_epi16(a, b); }
TQ_INLINE vec vec_zip_high_u16(vec a, vec b) { return _mm512_unpackhi_epi16(a, b); }

TQ_INLINE vec vec_add_dots(vec sums, vec a, vec b)
{
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(sums, a, b);
#else
    return _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1)));
#endif
}

#if defined(__AVX512VBMI__) /* vpermb reads six bits and the table is repeated four times: no mask */
TQ_INLINE vec vec_low_nibbles(vec x) { return x; }
TQ_INLINE vec vec_look_up(vec table, vec nibbles) { return _mm512_permutexvar_epi8(nibbles, table); }
#else
TQ_INLINE vec vec_low_nibbles(vec x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
TQ_INLINE vec vec_look_up(vec table, vec nibbles) { return _mm512_shuffle_epi8(table, nibbles); }
#endif
TQ_INLINE vec vec_high_nibbles(vec x) { return vec_low_nibbles(_mm512_srli_epi16(x, 4)); }

TQ_INLINE vec vec_choose_set(vec x, vec mask, vec a, vec b)
{
    return _mm512_mask_blend_epi8(_mm512_test_epi8_mask(x, mask), b, a);
}

TQ_INLINE vec vec_negate_set(vec levels, vec x, vec mask)
{
    return _mm512_mask_sub_epi8(levels, _mm512_test_epi8_mask(x, mask), _mm512_setzero_si512(), levels);
}

TQ_INLINE vec vec_align_twos(vec x, int by_lane, int m) { return (void)by_lane, (void)m, x; }

TQ_INLINE vec vec_choose(vec bits, vec a, vec b) { return _mm512_ternarylogic_epi32(a, b, bits, 0xe4); }

TQ_INLINE vec fourth_row_3(const vec *w)
{
    vec bits_0_2 = vec_choose(_mm512_set1_epi8(0x11), _mm512_srli_epi32(w[0], 3), _mm512_srli_epi32(w[2], 1));
    return vec_choose(_mm512_set1_epi8(0x22), _mm512_srli_epi32(w[1], 2), bits_0_2);
}

TQ_INLINE byte_pair join_nibbles(vec low, vec high)
{
    const vec first = _mm512_set1_epi8(15);
    return (byte_pair){vec_choose(first, low, _mm512_slli_epi16(high, 4)),
                       vec_choose(first, _mm512_srli_epi16(low, 4), high)};
}

/** A merging mask takes the upper half of each word from w1. */
TQ_INLINE byte_pair interleave(vec w0, vec w1)
{
    const vec even = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 0, 2, 4, 6, 4, 6, 8, 10, 8, 10, 12, 14, 12, 14));
    const vec odd = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 3, 1, 3, 5, 7, 5, 7, 9, 11, 9, 11, 13, 15, 13, 15));
    const __mmask64 upper = 0xcccccccccccccccc;
    return (byte_pair){_mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(w0, even), upper, w1, even),
                       _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(w0, odd), upper, w1, odd)};
}

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

TQ_INLINE tq_floats tq_pick(const float *table, tq_ints m)
{
    return _mm512_permutexvar_ps((__m512i)m, _mm512_loadu_ps(table));
}

TQ_INLINE tq_floats tq_load_halves(const uint16_t *x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)x)); }
#endif
