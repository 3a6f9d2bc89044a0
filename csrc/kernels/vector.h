/* Vectors of the native width in GNU C. Code with them is written once, and each unit (<isa>.c) compiles it with its
 * own flags.
 * There is no contraction and no reassociation (setup.py), so equal expressions give equal bits on every ISA. */
#ifndef TQ_KERNELS_VECTOR_H
#define TQ_KERNELS_VECTOR_H
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#include "core/kernels.h"

#if defined(__AVX512F__)
#define TQ_LANES 16
#elif defined(__AVX__)
#define TQ_LANES 8
#else
#define TQ_LANES 4
#endif

/* Goes before a loop whose index must be a constant, or whose arrays must be registers. */
#if defined(__clang__)
#define TQ_UNROLL _Pragma("unroll")
#else
#define TQ_UNROLL _Pragma("GCC unroll 8")
#endif

#define TQ_INLINE static inline __attribute__((always_inline))

typedef float tq_floats __attribute__((vector_size(4 * TQ_LANES)));
typedef int32_t tq_ints __attribute__((vector_size(4 * TQ_LANES)));
typedef uint32_t tq_words __attribute__((vector_size(4 * TQ_LANES)));
typedef uint8_t tq_bytes __attribute__((vector_size(TQ_LANES)));

TQ_INLINE tq_floats tq_load_floats(const float *x)
{
    tq_floats y;
    memcpy(&y, x, sizeof y);
    return y;
}

TQ_INLINE void tq_store_floats(float *x, tq_floats y) { memcpy(x, &y, sizeof y); }

TQ_INLINE tq_floats tq_all(float x) { return (tq_floats){0} + x; }

/** Returns a where mask is -1, and b where it is 0. */
TQ_INLINE tq_floats tq_select(tq_ints mask, tq_floats a, tq_floats b)
{
    return (tq_floats)(((tq_ints)a & mask) | ((tq_ints)b & ~mask));
}

/* Operations that GNU C cannot express. Code that decides codes uses tq_fused exactly where scalar.c uses fmaf. */

TQ_INLINE tq_floats tq_fused(tq_floats a, tq_floats b, tq_floats c)
{
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
    return vfmaq_f32(c, a, b);
#else
    for (int i = 0; i < TQ_LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/** Returns the larger of a and b, and b where a is NaN. b must not be NaN. */
TQ_INLINE tq_floats tq_max(tq_floats a, tq_floats b)
{
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX__)
    return _mm256_max_ps(a, b);
#elif defined(__ARM_NEON)
    return vmaxnmq_f32(a, b);
#else
    return tq_select(a > b, a, b);
#endif
}

TQ_INLINE tq_ints tq_max_ints(tq_ints a, tq_ints b)
{
#if defined(__AVX512F__)
    return (tq_ints)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX__)
    return (tq_ints)_mm256_max_epi32((__m256i)a, (__m256i)b);
#elif defined(__ARM_NEON)
    return vmaxq_s32(a, b);
#else
    return (tq_ints)tq_select(a > b, (tq_floats)a, (tq_floats)b);
#endif
}

TQ_INLINE tq_ints tq_min_ints(tq_ints a, tq_ints b)
{
#if defined(__AVX512F__)
    return (tq_ints)_mm512_min_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX__)
    return (tq_ints)_mm256_min_epi32((__m256i)a, (__m256i)b);
#elif defined(__ARM_NEON)
    return vminq_s32(a, b);
#else
    return (tq_ints)tq_select(a < b, (tq_floats)a, (tq_floats)b);
#endif
}

/* Reductions over all lanes, by halves: a chain of sixteen sums would be slow. */

typedef float tq_floats4 __attribute__((vector_size(16)));
typedef int32_t tq_ints4 __attribute__((vector_size(16)));

TQ_INLINE float tq_sum_lanes(tq_floats x)
{
    tq_floats4 quarters[TQ_LANES / 4], sum;
    memcpy(quarters, &x, sizeof x);
    sum = quarters[0];
    for (int i = 1; i < TQ_LANES / 4; i++) sum += quarters[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/** Adds up four lanes at a time: lane i of the result is x[i] + x[i + 4] + .. */
TQ_INLINE tq_ints4 tq_fold_ints(tq_ints x)
{
    tq_ints4 quarters[TQ_LANES / 4], sum;
    memcpy(quarters, &x, sizeof x);
    sum = quarters[0];
    for (int i = 1; i < TQ_LANES / 4; i++) sum += quarters[i];
    return sum;
}

TQ_INLINE int32_t tq_sum_ints4(tq_ints4 x) { return (x[0] + x[2]) + (x[1] + x[3]); }

/** Returns the largest lane. No lane may be NaN. */
TQ_INLINE float tq_max_lanes(tq_floats x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(x);
#elif defined(__AVX__)
    __m128 max = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    max = _mm_max_ps(max, _mm_movehl_ps(max, max));
    return _mm_cvtss_f32(_mm_max_ss(max, _mm_movehdup_ps(max)));
#elif defined(__ARM_NEON)
    return vmaxvq_f32(x);
#else
    float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
#endif
}

TQ_INLINE tq_ints tq_magnitude_bits(tq_floats x) { return (tq_ints)x & 0x7fffffff; }
#endif
