/* The seam between the vector index and the instruction sets: csrc/kernels/<isa>_scan.c fill one table each. Integer arithmetic does
 * not overflow and float operations are rounded one by one, so all tables give the same numbers. */
#ifndef TQ_SCAN_KERNELS_H
#define TQ_SCAN_KERNELS_H
#include "turboquant_index.h"

typedef struct {
    const tq_index_layout *layout;
    int8_t levels[7][64]; /* by bits, then rank; 0 behind the last */
} tq_scan_layout;

enum {
    TQ_SCAN_QUERIES = 4, /* of one pass over a block */
    TQ_SCAN_ROWS = TQ_INDEX_BLOCK
};

typedef struct {
    const char *isa;
    /** One row and its own leading bits [planes] -> its levels, int16 [32 groups]. */
    void (*unpack)(const tq_scan_layout *layout, const uint8_t *row, const uint8_t *signs, int16_t *levels);
    /** sum of levels[j] q[j], j < n; n is a multiple of 32. */
    int32_t (*product)(const int16_t *levels, const int16_t *q, int32_t n);
    /** Sums of table entries by the leading bits of a block (kernels/scan_signs.h); tables: [ceil(planes / 3), 4, 64]. */
    void (*sums)(const uint8_t *block, int32_t planes, const uint8_t *tables, uint16_t sums[TQ_SCAN_ROWS]);
    /** The same for queries whose tables lie `stride` bytes apart. */
    void (*sums_many)(const uint8_t *block, int32_t planes, const uint8_t *tables, int64_t stride,
                      uint16_t sums[TQ_SCAN_QUERIES][TQ_SCAN_ROWS]);
    /** Bit i: whether scales[i] * (sums[i] * unit + add) + offsets[i] >= limit, each operation in float32; offsets may be NULL. */
    uint64_t (*above)(const uint16_t sums[TQ_SCAN_ROWS], const float *scales, const float *offsets, float unit,
                      float add, float limit);
} tq_scan_kernels;

extern const tq_scan_kernels tq_scan_scalar, tq_scan_avx2, tq_scan_avx512, tq_scan_avx512_vnni, tq_scan_neon;
#endif
