/* 128-bit registers for neon.c and neon_dot.c: what levels.h, product.h, codes.h and recode.h need from a unit. Words,
 * bytes and sums (four integers) are all uint8x16_t. Bytes are signed, and levels have no offset. */
#ifndef TQ_KERNELS_NEON_H
#define TQ_KERNELS_NEON_H
#include "vector.h"

/* ---- definitions for levels.h and product.h ---- */

typedef uint8x16_t vec;
#define PARTS 2
#define LOW_PLANES 2
#define SUM_REGISTERS 16
#define LEVEL_OFFSET 0
#define ROW_3_SHIFT 4

typedef struct {
    vec even, odd;
} byte_pair;

TQ_INLINE vec vec_broadcast_u32x4(const void *at) { return vld1q_u8(at); }

TQ_INLINE vec vec_two_of_each(vec a, vec b) { return vcombine_u8(vget_low_u8(a), vget_low_u8(b)); }
TQ_INLINE vec vec_zip_low_u32(vec a, vec b) { return (vec)vzip1q_u32((uint32x4_t)a, (uint32x4_t)b); }
TQ_INLINE vec vec_zip_high_u32(vec a, vec b) { return (vec)vzip2q_u32((uint32x4_t)a, (uint32x4_t)b); }
TQ_INLINE vec vec_zip_low_u64(vec a, vec b) { return (vec)vzip1q_u64((uint64x2_t)a, (uint64x2_t)b); }
TQ_INLINE vec vec_zip_high_u64(vec a, vec b) { return (vec)vzip2q_u64((uint64x2_t)a, (uint64x2_t)b); }
#define vec_repeat_u32(x, t) ((vec)vdupq_laneq_u32((uint32x4_t)(x), t))

TQ_INLINE vec vec_zip_low_u8(vec a, vec b) { return vzip1q_u8(a, b); }
TQ_INLINE vec vec_zip_high_u8(vec a, vec b) { return vzip2q_u8(a, b); }
TQ_INLINE vec vec_zip_low_u16(vec a, vec b) { return (vec)vzip1q_u16((uint16x8_t)a, (uint16x8_t)b); }
TQ_INLINE vec vec_zip_high_u16(vec a, vec b) { return (vec)vzip2q_u16((uint16x8_t)a, (uint16x8_t)b); }

TQ_INLINE vec vec_add_dots(vec sums, vec a, vec b)
{
#if defined(__ARM_FEATURE_DOTPROD)
    return (vec)vdotq_u32((uint32x4_t)sums, a, b);
#else
    const uint16x8_t low = vmull_u8(vget_low_u8(a), vget_low_u8(b)), high = vmull_high_u8(a, b);
    return (vec)vpadalq_u16((uint32x4_t)sums, vpaddq_u16(low, high)); /* two products: at most 2 * 127 * 127 */
#endif
}

TQ_INLINE vec vec_low_nibbles(vec x) { return vandq_u8(x, vdupq_n_u8(15)); }
TQ_INLINE vec vec_high_nibbles(vec x) { return vshrq_n_u8(x, 4); }
TQ_INLINE vec vec_look_up(vec table, vec nibbles) { return vqtbl1q_u8(table, nibbles); }

TQ_INLINE vec vec_choose_set(vec x, vec mask, vec a, vec b) { return vbslq_u8(vtstq_u8(x, mask), a, b); }

TQ_INLINE vec vec_negate_set(vec levels, vec x, vec mask)
{
    const vec negative = vtstq_u8(x, mask);
    return vsubq_u8(veorq_u8(levels, negative), negative);
}

TQ_INLINE vec vec_align_twos(vec x, int by_lane, int m)
{
    const uint32x4_t row_3 = {0, 0, 0, 0xfefefefe};
    return vshlq_u8(x, by_lane ? (int8x16_t)row_3 : vdupq_n_s8(m < 3 ? 0 : -2));
}

TQ_INLINE vec fourth_row_3(const vec *w)
{
    return vorrq_u8(
        vandq_u8(vshrq_n_u8(w[0], 3), vdupq_n_u8(0x11)),
        vorrq_u8(vandq_u8(vshrq_n_u8(w[1], 2), vdupq_n_u8(0x22)), vandq_u8(vshrq_n_u8(w[2], 1), vdupq_n_u8(0x44))));
}

TQ_INLINE byte_pair join_nibbles(vec low, vec high)
{
    const vec sign = vdupq_n_u8(128);
    return (byte_pair){veorq_u8(vsliq_n_u8(low, high, 4), sign), veorq_u8(vsriq_n_u8(high, low, 4), sign)};
}

TQ_INLINE byte_pair interleave(vec w0, vec w1)
{
    static const uint8_t even[16] = {0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30};
    const vec order = vld1q_u8(even);
    const uint8x16x2_t both = {{w0, w1}};
    return (byte_pair){vqtbl2q_u8(both, order), vqtbl2q_u8(both, vaddq_u8(order, vdupq_n_u8(1)))};
}

/* ---- definitions for codes.h ---- */

TQ_INLINE tq_floats tq_swap(tq_floats x, int h) { return h == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2); }

TQ_INLINE tq_floats tq_pick(const float *table, tq_ints m)
{
    const uint8_t *bytes = (const uint8_t *)table;
    const uint8x16x4_t all = {{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
    return vreinterpretq_f32_u8(vqtbl4q_u8(all, vreinterpretq_u8_s32(m * 0x04040404 + 0x03020100)));
}

TQ_INLINE tq_floats tq_load_halves(const uint16_t *x) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x))); }
#endif
