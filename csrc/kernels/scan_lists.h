/* The values of lists for vectors (turboquant_index.h), in float64. Each sum adds its terms in the order of the
 * numbers, so all units give the same bits. Rough values are float32 and may differ. */
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

enum { ROUGH_VECTORS = TQ_INDEX_CENTRES / TQ_LANES, ROUGH_TOGETHER = TQ_LANES == 16 ? 8 : TQ_LANES == 8 ? 4 : 2 };

/** Computes one row with several tiles, whose sums do not wait for one another, or one tile with several rows. Both
 *  numbers are constants where this is inlined. */
TQ_INLINE void rough_tiles(const float *centres, int32_t tiles, int32_t n, const float *x, int32_t rows, int64_t stride,
                           double *values, int64_t values_stride)
{
    tq_floats sums[ROUGH_TOGETHER][ROUGH_VECTORS] = {{{0}}};
    for (int32_t j = 0; j < n; j++) TQ_UNROLL
    for (int32_t t = 0; t < tiles; t++) TQ_UNROLL
    for (int32_t v = 0; v < ROUGH_VECTORS; v++) {
        tq_floats c = tq_load_floats(centres + TQ_INDEX_CENTRES * ((int64_t)t * n + j) + TQ_LANES * v);
        TQ_UNROLL
        for (int32_t r = 0; r < rows; r++) sums[r + t][v] = tq_fused(c, tq_all(x[r * stride + j]), sums[r + t][v]);
    }
    for (int32_t i = 0; i < rows + tiles - 1; i++) {
        float own[TQ_INDEX_CENTRES];
        double *to = values + (rows > 1 ? i * values_stride : TQ_INDEX_CENTRES * i);
        memcpy(own, sums[i], sizeof own);
        for (int32_t k = 0; k < TQ_INDEX_CENTRES; k++) to[k] = own[k];
    }
}

static void scan_rough_values(const float *centres, int32_t tiles, int32_t n, const float *x, int32_t rows,
                              int64_t stride, double *values, int64_t values_stride)
{
    int64_t tile = (int64_t)n * TQ_INDEX_CENTRES;
    int32_t t = 0;
    if (rows == 1)
        for (; t + ROUGH_TOGETHER <= tiles; t += ROUGH_TOGETHER)
            rough_tiles(centres + t * tile, ROUGH_TOGETHER, n, x, 1, stride, values + TQ_INDEX_CENTRES * t, 0);
    for (; t < tiles; t++) {
        const float *own = centres + t * tile;
        double *to = values + TQ_INDEX_CENTRES * t;
        int32_t r = 0;
        for (; r + ROUGH_TOGETHER <= rows; r += ROUGH_TOGETHER)
            rough_tiles(own, 1, n, x + r * stride, ROUGH_TOGETHER, stride, to + r * values_stride, values_stride);
        for (; r < rows; r++) rough_tiles(own, 1, n, x + r * stride, 1, stride, to + r * values_stride, 0);
    }
}
#endif
