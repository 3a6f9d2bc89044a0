/* The interface between the vector index and the instruction sets: each csrc/kernels/<isa>_scan.c fills one table.
 * Integer arithmetic does not overflow and float operations are rounded one by one, so all tables give the same
 * numbers; only rough_values may differ. */
#ifndef TQ_SCAN_KERNELS_H
#define TQ_SCAN_KERNELS_H
#include "turboquant_index.h"
#include <string.h>

enum {
    TQ_SCAN_BITS = TQ_MAX_BITS, /* the widest codes that are ranks */
    TQ_SCAN_QUERIES = 4,        /* queries of one pass over a block */
    TQ_SCAN_ROWS = TQ_INDEX_BLOCK
};

/** Levels of N(0, 1) by rank, in units of `step`, and the thresholds between them. Symmetric: rank and n_levels - 1 -
 *  rank have the same magnitude. The book of 8 bits has only `step`. */
typedef struct {
    int32_t n_levels;
    float step;
    int8_t levels[64];    /* 0 after the last */
    float thresholds[63]; /* rank = how many of them are <= u */
} tq_index_book;

typedef struct {
    const tq_index_layout *layout;
    const tq_index_book *books; /* [TQ_WIDE_BITS + 1], by bits */
    int32_t groups, eights; /* groups of 32 channels, the last filled up with 0; groups of 8 in a last one of less */
    int32_t coded;          /* channels that have bits */
    int32_t even_bits;      /* bits of all groups, if they are equal and 1 or 2 of them lead; else 0 */
    int32_t next;           /* whether the bit after the leading one gives a second bound: even_bits > lead = 1 */
    int32_t sized;          /* whether rows have sizes: even_bits is 3 or more, and all steps are equal */
} tq_scan_layout;

typedef struct {
    /** Centres x [n], n a multiple of 32. out: x / |x| with `unit`, otherwise x, less mean (NULL: 0). offset: <mean,
     *  out>. squares: those of x with `unit`, otherwise of out, summed. Returns whether all numbers are finite and,
     *  without `unit`, at most TQ_INDEX_MAX_INPUT in magnitude. Sums are in float64: 32 lanes, then halves added. */
    int (*centre)(const float *x, const float *mean, int32_t n, int unit, float *out, double *offset, double *squares);
    /** Computes y [rows, n] = x [rows, n] matrix [n, n]. The matrix is bfloat16; each y adds its products in ascending
     *  order. n: a multiple of 8. Rows of x and y begin `stride` numbers apart. y may not overlap x. */
    void (*rotate)(const uint16_t *matrix, int32_t n, const float *x, int32_t rows, int64_t stride, float *y);
    /** Computes the values of TQ_INDEX_CENTRES lists (turboquant_index.h) for rows of x, which begin `stride` numbers
     *  apart: centres [n, 16] -> values [rows, 16], whose rows begin `values_stride` apart. l2: whether |c|^2 / 2 is
     *  subtracted. */
    void (*values)(const float *centres, int32_t n, const float *x, int32_t rows, int64_t stride, int l2,
                   double *values, int64_t values_stride);
    /** The same in float32, for centres [tiles, n, 16] and without `l2`. A value is wrong by at most
     *  (n + 2) 2^-24 |x| |c|, and differs between instruction sets. */
    void (*rough_values)(const float *centres, int32_t tiles, int32_t n, const float *x, int32_t rows, int64_t stride,
                         double *values, int64_t values_stride);
    /** Encodes z [32 groups], 0 after the last channel, to a byte for each code (0 without bits). Returns the scale. */
    float (*encode)(const tq_scan_layout *layout, const float *z, uint8_t *codes);
    /** Decodes a row and its leading bits [planes] to levels, int16 [32 groups], undefined after the last channel. */
    void (*unpack)(const tq_scan_layout *layout, const uint8_t *row, const uint8_t *lead, int16_t *levels);
    /** Computes the sum of levels[j] q[j] for TQ_SCAN_ROWS rows, levels [rows, n], n a multiple of 32. */
    void (*products)(const int16_t *levels, int32_t n, const int16_t *q, int32_t sums[TQ_SCAN_ROWS]);
    /** Returns the sum of level[j] q[j] of a row; q [32 groups], 0 after the last channel. */
    int32_t (*score)(const tq_scan_layout *layout, const uint8_t *row, const uint8_t *lead, const int16_t *q);
    /** Returns the sum of q[j] where the bit after the leading one is set, less the others; the layout has `next`. */
    int32_t (*next_sum)(const tq_scan_layout *layout, const uint8_t *row, const int16_t *q);
    /** Fills table[e] = floor(min(63, factor (a[e & 3] + b[e >> 2 & 3] + c[e >> 4]) + 0.5)); a, b, c: pairs, whose
     *  numbers are at least 0. */
    void (*fill_table)(const float *const pairs[3], float factor, uint8_t table[64]);
    /** Sums table entries by the leading bits of a block (kernels/scan_signs.h); tables: [ceil(planes / 3), 4, 64].
     *  Returns whether a sum is at least `least`. */
    int32_t (*sums)(const uint8_t *block, int32_t planes, const uint8_t *tables, uint16_t least,
                    uint16_t sums[TQ_SCAN_ROWS]);
    /** The same for TQ_SCAN_QUERIES queries with tables of their own; bit q of the result is that of query q. */
    int32_t (*sums_many)(const uint8_t *block, int32_t planes, const uint8_t *const tables[TQ_SCAN_QUERIES],
                         const uint16_t least[TQ_SCAN_QUERIES], uint16_t sums[TQ_SCAN_QUERIES][TQ_SCAN_ROWS]);
    /** Returns in bit i whether tq_leading_scale(scales[i]) * (sums[i] * unit + add) + offsets[i] >= limit, each
     *  operation in float32; offsets may be NULL. */
    uint64_t (*above)(const uint16_t sums[TQ_SCAN_ROWS], const float *scales, const float *offsets, float unit,
                      float add, float limit);
} tq_scan_kernels;

/** Returns k of a row (turboquant_index.h), -32 .. 31. */
static inline int32_t tq_leading_class(float scale)
{
    int32_t word;
    memcpy(&word, &scale, sizeof word);
    return (word >> 3 & 63) - (word >> 2 & 64);
}

/** Returns what the first bound uses as a row's scale. */
static inline float tq_leading_scale(float scale) { return scale * (1 + (float)tq_leading_class(scale) * (1.0f / 64)); }

extern const tq_scan_kernels tq_scan_scalar, tq_scan_avx2, tq_scan_avx512, tq_scan_avx512_vnni, tq_scan_neon;
#endif
