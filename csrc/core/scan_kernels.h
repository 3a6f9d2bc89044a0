/* The seam between the vector index and the instruction sets: csrc/kernels/<isa>_scan.c fill one table each. Everything is integer
 * arithmetic without overflow, so all tables give the same numbers. */
#ifndef TQ_SCAN_KERNELS_H
#define TQ_SCAN_KERNELS_H
#include "turboquant_index.h"

typedef struct {
    const tq_index_layout *layout;
    int8_t levels[7][64]; /* by bits, then rank; 0 behind the last */
} tq_scan_layout;

#define TQ_SCAN_QUERIES 4 /* of one pass over a decoded row */

typedef struct {
    const char *isa;
    /** One row -> its levels, int16 [32 groups]. */
    void (*unpack)(const tq_scan_layout *layout, const uint8_t *row, int16_t *levels);
    /** sums[k] = sum of levels[j] q[k * n + j], j < n, for TQ_SCAN_QUERIES queries; n is a multiple of 32. */
    void (*products)(const int16_t *levels, const int16_t *q, int32_t n, int32_t sums[TQ_SCAN_QUERIES]);
    /** The same for one query. */
    int32_t (*product)(const int16_t *levels, const int16_t *q, int32_t n);
} tq_scan_kernels;

extern const tq_scan_kernels tq_scan_scalar, tq_scan_avx2, tq_scan_avx512, tq_scan_neon;
#endif
