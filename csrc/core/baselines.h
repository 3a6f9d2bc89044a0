/* Plans that are not plain: encodes one vector, decodes one token tile at a time. A decoded token is one row of
 * 32 * side->tiles numbers, still rotated: the channels, then the signs of its sketch. A query becomes such a row too,
 * [R q | S R q], and an inner product is that of two rows; a weighted sum of rows is un-rotated once. */
#ifndef TQ_BASELINES_H
#define TQ_BASELINES_H
#include "tiles.h"

/** One side of such a plan for one KV head, with its arrays. */
typedef struct {
    const tq_kernels *kernels;
    const tq_plan *plan;
    const tq_side *side;
    const tq_codebook *books; /* [TQ_WIDE_BITS + 1], by bits */
    const float *matrix;      /* [head_dim, head_dim], or NULL */
    const float *sketch;      /* [sketch_rows, head_dim], or NULL */
    const float *table;       /* [step_columns], or NULL */
} tq_baseline_coder;

tq_baseline_coder tq_baseline_coder_of(const tq_kernels *kernels, const tq_plan *plan, const tq_codebook *books,
                                       const tq_transform *transform, int is_key, int32_t head);

/** Encodes a centred vector x [head_dim], which may be overwritten, to codes [32 * tiles] and binary16 numbers
 *  scales[32 * i], i < side->scales. z: workspace [head_dim]. */
void tq_baseline_encode(const tq_baseline_coder *c, float *x, float *z, uint8_t *codes, uint16_t *scales);

/** Decodes tokens first .. last - 1 of a token tile to rows of 32 * tiles numbers, 0 where padded. */
void tq_baseline_decode(const tq_baseline_coder *c, const uint8_t *record, int32_t token_tile, int32_t first,
                        int32_t last, float *rows);

/** Projects x [head_dim] to [R x | S R x], a row of 32 * tiles numbers. */
void tq_baseline_project(const tq_baseline_coder *c, const float *x, float *row);
/** Does the transpose of that: row -> x = R^T (channels + S^T signs), [head_dim]. Overwrites the row. */
void tq_baseline_restore(const tq_baseline_coder *c, float *row, float *x);
#endif
