/* Vectors of the native width in GNU C. Code with them is written once, and each unit (<isa>.c) compiles it with its
 * own flags.
 * There is no contraction and no reassociation (setup.py), so equal expressions give equal bits on every ISA. */
#ifndef TQ_KERNELS_VECTOR_H
#define TQ_KERNELS_VECTOR_H
#include <math.h>
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

/* ---- rows ---- */

/** Returns the largest magnitude of n numbers, infinity if one is not finite. n: a multiple of 32. */
TQ_INLINE float tq_largest_magnitude(const float *x, int32_t n)
{
    tq_ints even = {0}, odd = {0}; /* as integers, so that NaN is largest */
    for (int32_t i = 0; i < n; i += 2 * TQ_LANES) {
        even = tq_max_ints(even, tq_magnitude_bits(tq_load_floats(x + i)));
        odd = tq_max_ints(odd, tq_magnitude_bits(tq_load_floats(x + i + TQ_LANES)));
    }
    tq_ints largest = tq_max_ints(even, odd), infinite = (tq_ints)tq_all(INFINITY);
    return tq_max_lanes(tq_select(largest > infinite, (tq_floats)infinite, (tq_floats)largest));
}

/** Writes codes and decoded levels of n channels at 8 bits, as tq_wide_code (kernels.h) does. c may be u. */
TQ_INLINE void tq_encode_wide(const float *u, uint8_t *codes, float *c, int32_t n)
{
    for (int32_t i = 0; i < n; i += TQ_LANES) {
        tq_floats x = tq_load_floats(u + i) * (1 / TQ_WIDE_STEP), most = tq_all(127.0f);
        x = tq_select(x > most, most, tq_select(x < -most, -most, tq_select(x == x, x, tq_all(0.0f))));
        tq_floats level = (x + TQ_ROUND) - TQ_ROUND;
        tq_store_floats(c + i, level * TQ_WIDE_STEP);
        tq_bytes bytes = __builtin_convertvector(__builtin_convertvector(level, tq_ints) + 128, tq_bytes);
        memcpy(codes + i, &bytes, sizeof bytes);
    }
}

/* In these, n is a multiple of 8. */

static inline float tq_dot_rows(const float *x, const float *y, int32_t n)
{
    typedef float floats8 __attribute__((vector_size(32)));
    floats8 sums = {0};
    float sum = 0;
    for (int32_t i = 0; i < n; i += 8) {
        floats8 a, b;
        memcpy(&a, x + i, sizeof a);
        memcpy(&b, y + i, sizeof b);
        sums += a * b;
    }
    for (int32_t j = 0; j < 8; j++) sum += sums[j];
    return sum;
}

static inline void tq_add_row(float a, const float *restrict x, float *restrict y, int32_t n)
{
    for (int32_t i = 0; i < n; i++) y[i] += a * x[i];
}

/* ---- the table of an instruction set. KIND: what its functions' names end in, scalar or vector ---- */

#define TQ_TABLE(ISA, KIND)                                                                                            \
    const tq_kernels tq_kernels_##ISA = {                                                                              \
        .isa = #ISA,                                                                                                   \
        .hadamard = hadamard_##KIND,                                                                                   \
        .settle = settle_##KIND,                                                                                       \
        .encode = encode_##KIND,                                                                                       \
        .pack = pack_##KIND,                                                                                           \
        .unpack = unpack_##KIND,                                                                                       \
        .recode = recode_##KIND,                                                                                       \
        .operand_bytes = operand_bytes_##KIND,                                                                         \
        .prepare = prepare_##KIND,                                                                                     \
        .multiply = multiply_##KIND,                                                                                   \
        .logits = tq_logits,                                                                                           \
        .weights = tq_weights,                                                                                         \
        .add_wave = tq_add_wave,                                                                                       \
        .turn = tq_turn_vector,                                                                                        \
        .subtract = tq_subtract,                                                                                       \
        .within = tq_within,                                                                                           \
        .load = load_##KIND,                                                                                           \
        .dot = tq_dot_rows,                                                                                            \
        .axpy = tq_add_row,                                                                                            \
        .names = {"rotate_" #ISA, "append_" #ISA, "attend_" #ISA, "dequantize_" #ISA, "dot_" #ISA},                    \
    }
#endif
