/* Vectors against the centres of lists, in float64. Each sum adds its terms in the order of the numbers, so all units give
 * the same bits. */
#ifndef TQ_SCAN_LISTS_H
#define TQ_SCAN_LISTS_H
#include "scan_encode.h"

enum { CENTRE_VECTORS = TQ_INDEX_CENTRES / HALF, VALUES_TOGETHER = TQ_LANES == 16 ? 8 : TQ_LANES == 8 ? 2 : 1 };

TQ_INLINE void value_tile(const float *centres, int32_t n, const float *x, int32_t rows, int64_t stride, int l2,
                          double *values, int64_t values_stride)
{
    half_doubles sums[VALUES_TOGETHER][CENTRE_VECTORS] = {{{0}}};
    for (int32_t j = 0; j < n; j++) {
        half_doubles c[CENTRE_VECTORS];
        TQ_UNROLL
        for (int32_t v = 0; v < CENTRE_VECTORS; v++) c[v] = load_doubles(centres + TQ_INDEX_CENTRES * j + HALF * v);
        TQ_UNROLL
        for (int32_t r = 0; r < rows; r++) {
            double own = x[r * stride + j];
            TQ_UNROLL
            for (int32_t v = 0; v < CENTRE_VECTORS; v++) sums[r][v] += l2 ? c[v] * (own - 0.5 * c[v]) : c[v] * own;
        }
    }
    TQ_UNROLL
    for (int32_t r = 0; r < rows; r++) memcpy(values + r * values_stride, sums[r], sizeof sums[r]);
}

static void scan_values(const float *centres, int32_t n, const float *x, int32_t rows, int64_t stride, int l2,
                        double *values, int64_t values_stride)
{
    int32_t r = 0;
    for (; r + VALUES_TOGETHER <= rows; r += VALUES_TOGETHER) {
        const float *some = x + r * stride;
        double *to = values + r * values_stride;
        if (l2) value_tile(centres, n, some, VALUES_TOGETHER, stride, 1, to, values_stride);
        else value_tile(centres, n, some, VALUES_TOGETHER, stride, 0, to, values_stride);
    }
    for (; r < rows; r++)
        value_tile(centres, n, x + r * stride, 1, stride, l2, values + r * values_stride, values_stride);
}
#endif
