/* The softmax step, written once for every unit. */
#ifndef TQ_KERNELS_SOFTMAX_H
#define TQ_KERNELS_SOFTMAX_H
#include "vector.h"
#include <math.h>

/** Returns exp(x) for x <= 0 as 2^k 2^r, where 2^r is a minimax polynomial of degree 5 on [-1/2, 1/2]. The relative
 *  error is 2e-7 + 4e-8 |x|, so at most 2e-7 of the largest weight. 0 below -87, NaN for NaN. */
TQ_INLINE tq_floats tq_exp_nonpositive(tq_floats x)
{
    const tq_floats log2_e = tq_all(1.44269504f);
    const tq_floats shift = tq_all(12583039.0f); /* 1.5 * 2^23 + 127: the exponent of 2^k lands in the low bits */
    tq_floats shifted = tq_fused(x, log2_e, shift), r = tq_fused(x, log2_e, shift - shifted);
    tq_floats y = tq_fused(r, tq_all(1.32647273e-3f), tq_all(9.67151299e-3f));
    y = tq_fused(r, y, tq_all(5.55073358e-2f));
    y = tq_fused(r, y, tq_all(2.40222424e-1f));
    y = tq_fused(r, y, tq_all(6.93147004e-1f));
    y = tq_fused(r, y, tq_all(1.0f));
    y *= (tq_floats)((tq_words)shifted << 23);
    return (tq_floats)((tq_ints)y & ~(x < -87.0f));
}

/** Returns tanh with relative error 2.2e-7, also for logits far below the cap: by exp or, near 0 where 1 - exp cancels,
 *  by x + x^3 P(x^2), minimax. */
TQ_INLINE tq_floats tq_tanh(tq_floats x)
{
    tq_floats magnitude = (tq_floats)tq_magnitude_bits(x), e = tq_exp_nonpositive(magnitude * -2.0f), z = x * x;
    tq_floats p = tq_fused(z, tq_all(-5.70500e-3f), tq_all(2.063910e-2f));
    p = tq_fused(z, p, tq_all(-5.373972e-2f));
    p = tq_fused(z, p, tq_all(1.3331442e-1f));
    p = tq_fused(z, p, tq_all(-3.3333282e-1f));
    tq_floats far = (tq_floats)((tq_ints)((1.0f - e) / (1.0f + e)) | ((tq_ints)x & (int32_t)0x80000000));
    return tq_select(magnitude < 0.625f, tq_fused(x * z, p, x), far);
}

/** Whether one of n numbers is NaN. */
static inline int tq_any_nan(const float *x, int32_t n)
{
    int any = 0;
    for (int32_t i = 0; i < n; i++) any |= x[i] != x[i];
    return any;
}

static inline float tq_logits(float *scores, const float *key_scales, const uint8_t *visible, int32_t n,
                              const tq_logit *logit, float max)
{
    tq_floats largest = tq_all(max), scale = tq_all(logit->scale), bias = tq_all(logit->bias);
    const float *scales = logit->scales;
    tq_floats variance = tq_all(logit->variance);
    for (int32_t i = 0; i < n; i += TQ_LANES) {
        tq_floats x = tq_load_floats(scores + i);
        if (key_scales) x *= tq_load_floats(key_scales + i);
        x = tq_fused(x, scale, bias);
        if (scales) {
            tq_floats s = tq_load_floats(scales + i);
            x = tq_fused(s * s, variance, x);
        }
        if (logit->softcap > 0) x = logit->softcap * tq_tanh(x / logit->softcap);
        if (visible) { /* a hidden token may hold anything, NaN scales too: replace, do not multiply */
            tq_ints seen;
            for (int32_t j = 0; j < TQ_LANES; j++) seen[j] = -(int32_t)visible[i + j];
            x = tq_select(seen, x, tq_all(-INFINITY));
        }
        largest = tq_max(x, largest);
        tq_store_floats(scores + i, x);
    }
    max = tq_max_lanes(largest);
    return max == -INFINITY && tq_any_nan(scores, n) ? 0.0f : max; /* so that the sum becomes NaN */
}

static inline float tq_weights(float *logits, const float *value_scales, int hidden, int32_t n, float max,
                               tq_softmax_state *state)
{
    if (max == -INFINITY) {
        memset(logits, 0, sizeof(float) * (size_t)n);
        return 1.0f;
    }
    tq_floats sums = {0};
    float factor = state->max == max ? 1.0f : state->max == -INFINITY ? 0.0f : expf(state->max - max), sum = 0;
    for (int32_t i = 0; i < n; i += TQ_LANES) {
        tq_floats x = tq_load_floats(logits + i), weight = tq_exp_nonpositive(x - max);
        sums += weight;
        if (value_scales) weight *= tq_load_floats(value_scales + i);
        if (value_scales && hidden) weight = tq_select(x == -INFINITY, (tq_floats){0}, weight);
        tq_store_floats(logits + i, weight);
    }
    sum = tq_sum_lanes(sums);
    state->max = max;
    state->sum = state->sum * factor + sum;
    state->packed_sum = state->packed_sum * factor + (value_scales ? sum : 0.0f);
    return factor;
}
#endif
