/* binary16 and bfloat16 by integer arithmetic, so that no compiler, flag or CPU can round differently. Conversions to
 * float32 are inline and have no branches, so that loops over them vectorise. */
#ifndef TQ_CONVERT_H
#define TQ_CONVERT_H
#include <stdint.h>
#include <string.h>

static inline uint32_t tq_bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float tq_float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/** Rounds to nearest even. 65520 and above become infinity, NaN a quiet NaN. */
static inline uint16_t tq_f16_from_f32(float x)
{
    uint32_t u = tq_bits_of(x), sign = u >> 16 & 0x8000, drop = 13;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (u < 0x33000000) return (uint16_t)sign; /* below 2^-25 */
    if (u < 0x38800000) {                      /* below 2^-14: a subnormal half, units of 2^-24 */
        drop = 126 - (u >> 23);
        u = (u & 0x7fffff) | 0x800000;
    } else {
        u -= 0x38000000;
    }
    uint32_t half = u >> drop, rest = u & ((1u << drop) - 1), middle = 1u << (drop - 1);
    return (uint16_t)(sign | (half + (rest > middle || (rest == middle && (half & 1)))));
}

/** Converts exactly. Subnormal halves are counted in units of 2^-24, so that no float here is subnormal: a caller may
 *  have set the CPU to flush those to 0 (torch.set_flush_denormal). */
static inline float tq_f32_from_f16(uint16_t half)
{
    uint32_t magnitude = half & 0x7fff, small = tq_bits_of((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t u = (magnitude << 13) + (magnitude < 0x7c00 ? 0x38000000 : 0x70000000);
    u = magnitude < 0x400 ? small : u;
    return tq_float_of(u | (uint32_t)(half & 0x8000) << 16);
}

/** Rounds to nearest even; NaN stays NaN. */
static inline uint16_t tq_bf16_from_f32(float x)
{
    uint32_t u = tq_bits_of(x);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline float tq_f32_from_bf16(uint16_t bf16) { return tq_float_of((uint32_t)bf16 << 16); }
#endif
