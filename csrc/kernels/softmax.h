/* The softmax step, written once: plain C without branches in its loops, which each ISA's unit compiles for its own vectors. */
#ifndef TQ_KERNELS_SOFTMAX_H
#define TQ_KERNELS_SOFTMAX_H
#include <math.h>
#include <string.h>
#include "core/kernels.h"

/** exp(x) for x <= 0 to 2 units in the last place; 0 below -87. Cody-Waite reduction, then a polynomial of degree 6. */
static inline float tq_exp_nonpositive(float x)
{
    float clamped = x < -87.0f ? -87.0f : x;
    float shifted = clamped * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the integer lands in the low bits */
    float k = shifted - 12582912.0f;
    float r = clamped - k * 0.693359375f + k * 2.12194440e-4f;
    float y = 1.0f + r * (1.0f + r * (0.5f + r * (1.6666667e-1f + r * (4.1666668e-2f + r * (8.3333640e-3f + r * 1.3888889e-3f)))));
    float two_to_k = tq_float_of((tq_bits_of(shifted) << 23) + 0x3f800000u);
    return x < -87.0f ? 0.0f : y * two_to_k;
}

static inline float tq_softmax_step(float *scores, const uint16_t *key_scales, const uint16_t *value_scales, const uint8_t *visible, int32_t n,
                                    const tq_logit *logit, tq_softmax_state *state)
{
    float scale = logit->scale, bias = logit->bias;
    if (key_scales)
        for (int32_t i = 0; i < n; i++) scores[i] = scale * (scores[i] * tq_f32_from_f16(key_scales[i])) + bias;
    else
        for (int32_t i = 0; i < n; i++) scores[i] = scale * scores[i] + bias;
    if (logit->softcap > 0)
        for (int32_t i = 0; i < n; i++) scores[i] = logit->softcap * tanhf(scores[i] / logit->softcap);
    if (visible) /* a token out of sight may hold anything, NaN scales too: replaced, not multiplied */
        for (int32_t i = 0; i < n; i++) scores[i] = visible[i] ? scores[i] : -INFINITY;
    float max = state->max;
    for (int32_t i = 0; i < n; i++) max = scores[i] > max || scores[i] != scores[i] ? scores[i] : max;
    if (max == -INFINITY) {
        memset(scores, 0, sizeof(float) * (size_t)n);
        return 1.0f;
    }
    float factor = state->max == -INFINITY ? 0.0f : expf(state->max - max), sum = 0;
    for (int32_t i = 0; i < n; i++) scores[i] = tq_exp_nonpositive(scores[i] - max);
    for (int32_t i = 0; i < n; i++) sum += scores[i];
    if (value_scales && visible)
        for (int32_t i = 0; i < n; i++) scores[i] = visible[i] ? scores[i] * tq_f32_from_f16(value_scales[i]) : 0.0f;
    else if (value_scales)
        for (int32_t i = 0; i < n; i++) scores[i] *= tq_f32_from_f16(value_scales[i]);
    state->max = max;
    state->sum = state->sum * factor + sum;
    state->packed_sum = state->packed_sum * factor + (value_scales ? sum : 0.0f);
    return factor;
}
#endif
