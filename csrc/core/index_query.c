/* What the scan over leading bits needs of a query: tables to look them up in, and how far a sum may be from the score. */
#include "index_internal.h"
#include <math.h>
#include <string.h>

/* Of u ~ N(0, 1): the mean of |u|, and 1 less the distortion of so many bits: the mean of u c and c^2, c being u's level.
 *   With weight w = (1 - D) / MEAN, a leading bit s = +-1 estimates c without bias for neighbours too, whose u lean towards the query's:
 *   E[w s u] = E[c u]. Its error w s - c has variance w^2 - (1 - D). */
static const double MEAN = 0.79788456;
static const double KEPT[TQ_WIDE_BITS + 1] = {0,        0.63662,   0.88115, 0.96545,  0.990494,
                                              0.997481, 0.9993375, 0,       0.9999186};
/* Of the upper bound. Rows differ in how their energy is spread over groups; where groups differ in width, that adds to the errors. */
static const double SIGMAS = 2.5, SIGMAS_OF_MIXED_WIDTHS = 4;

int32_t tq_sign_tables(int32_t planes) { return (planes + 2) / 3 * 4; }

/** Entry e: sum of weights, negative ones of bits that are not set, plus the sum of magnitudes: at least 0. Returns that sum. */
static float sums_of_six(const float w[6], float sums[64])
{
    float magnitudes = 0;
    sums[0] = 0;
    for (int32_t k = 0; k < 6; k++) {
        magnitudes += fabsf(w[k]);
        sums[0] += fabsf(w[k]) - w[k];
    }
    for (int32_t k = 0; k < 6; k++)
        for (int32_t e = 0; e < 1 << k; e++) sums[e | 1 << k] = sums[e] + 2 * w[k];
    return magnitudes;
}

/** The weights of the bits that table t is looked up by (kernels/scan_signs.h). */
static void weights_of(const float *weights, int32_t t, float w[6])
{
    const float *plane = weights + t / 4 * 24;
    for (int32_t k = 0; k < 6; k++) w[k] = t % 4 < 3 ? plane[t % 4 * 8 + k] : plane[k / 2 * 8 + 6 + k % 2];
}

void tq_sign_query_make(const tq_index_layout *layout, const int16_t *q, double unit, uint8_t *tables,
                        tq_sign_query *out)
{
    float weights[TQ_MAX_DIM + 24], w[6], sums[64], largest = 0, magnitudes = 0;
    double variance = 0;
    int32_t n = 0, mixed = 0;
    for (int32_t g = 0; g < layout->groups; g++) {
        int32_t bits = layout->bits[g];
        mixed |= bits != layout->bits[0];
        if (!bits) continue;
        double level = unit / tq_index_step(bits), weight = KEPT[bits] / MEAN;
        for (int32_t j = 0; j < 32; j++) {
            double z = level * q[32 * g + j];
            weights[n + j % 4 * 8 + j / 4] = (float)(z * weight);
            variance += z * z * (weight * weight - KEPT[bits]);
        }
        n += 32;
    }
    memset(weights + n, 0, 24 * sizeof *weights);
    int32_t count = tq_sign_tables(n / 8);
    for (int32_t t = 0; t < count; t++) {
        weights_of(weights, t, w);
        float own = sums_of_six(w, sums);
        magnitudes += own;
        if (2 * own > largest) largest = 2 * own;
    }
    float factor = largest > 0 ? 63.0f / largest : 0;
    for (int32_t t = 0; t < count; t++) {
        weights_of(weights, t, w);
        sums_of_six(w, sums);
        for (int32_t e = 0; e < 64; e++) {
            float entry = rintf(factor * sums[e]);
            tables[64 * t + e] = (uint8_t)(entry < 0 ? 0 : entry > 63 ? 63 : entry);
        }
    }
    out->unit = largest / 63.0f;
    variance += count * (double)out->unit * out->unit / 12; /* of rounding the entries */
    out->margin = (float)((mixed ? SIGMAS_OF_MIXED_WIDTHS : SIGMAS) * sqrt(variance > 0 ? variance : 0) - magnitudes);
}
