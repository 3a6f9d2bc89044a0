/* Vector search: how an index stores rotated vectors, and the scan over them. Rules and errors as in turboquant.h.
 *
 * A vector is z, its rotated coordinates: groups of 32 channels, group g in bits[g] bits (0..6 or 8; 0 takes no space).
 *   t = z / steps[g],  u = t / rms(t) over the channels that have bits,  code = rank of u among the levels of the normal codebook
 *   of that width (turboquant.h; at 6 bits 64 Lloyd-Max levels of N(0, 1), rounded to int8 times a step as the others are), at 8 bits
 *   u / TQ_WIDE_STEP + 128 rounded half to even and clamped to 1..255.
 *   scale = rms(t) * sum (step u)^2 / sum (step c)(step u)  makes inner products unbiased (EDEN, arXiv 2108.08842).
 * The leading bit of a code is apart from the others, so that a scan can read it alone.
 *   A row holds the other bits, 4 (bits[g] - 1) bytes a group, in fields of 4, 2 and 1 bits, the widest and lowest bits first. A field
 *   of w bits has 4 w bytes: bits w k .. w k + w - 1 of byte i are of channel i + 4 w k.
 *   The leading bits of a row are a field of 1 bit for each group that has bits. Byte p of all rows is plane p; blocks of 64 rows hold
 *   them plane after plane, [rows / 64 rounded up, planes, 64] bytes, 0 behind the last row. */
#ifndef TURBOQUANT_INDEX_H
#define TURBOQUANT_INDEX_H
#include "turboquant.h"

#if defined(__cplusplus)
extern "C" {
#endif

#define TQ_INDEX_BLOCK 64 /* rows whose leading bits lie together */

typedef struct {
    int32_t groups;      /* 1 .. TQ_MAX_GROUPS */
    const uint8_t *bits; /* [groups], 0..6 or 8, not all 0 */
    const float *steps;  /* [groups], finite and above 0 */
} tq_index_layout;

/** Bytes of a row, 4 * sum of (bits - 1) over groups with bits, and planes of leading bits, 4 for each such group. */
TQ_API tq_status tq_index_row_bytes(const tq_index_layout *layout, int64_t *bytes, int32_t *planes, tq_error *error);

/** What a level of a width counts, in units of u: 0 for 0 bits and for widths that there are not. */
TQ_API float tq_index_step(int32_t bits);

/** z [n, 32 groups] float32 -> codes [n, row bytes], signs [blocks, planes, 64] and scales [n]. The same bytes on every machine. z must be finite. A row whose
 *  coded channels are all 0 gets scale 0. */
TQ_API tq_status tq_index_encode(const tq_index_layout *layout, const float *z, int64_t n, uint8_t *codes,
                                 uint8_t *signs, float *scales, int32_t threads, tq_error *error);

/** The numbers that codes stand for: z [n, 32 groups] float32; 0 in groups without bits. signs: [n, planes], row after row. */
TQ_API tq_status tq_index_decode(const tq_index_layout *layout, const uint8_t *codes, const uint8_t *signs,
                                 const float *scales, int64_t n, float *z, tq_error *error);

/** Queries as fixed point. The score of row i is
 *      v = (units[q] * scales[i]) * sum_j query_j level_ij + offsets[i] + constants[q],   in float64, left to right,
 *  rounded to float32; with `squared` it is -max(0, squared[q] - 2 v), a negated squared distance. Larger is better. */
typedef struct {
    int64_t n;
    const int16_t *q;        /* [n, 32 groups]; sum of |q_j| of a row at most 2^24, so that no sum leaves int32 */
    const double *units;     /* [n] */
    const double *constants; /* [n] */
    const double *squared;   /* [n], or NULL */
} tq_index_queries;

/** Rows of one segment. */
typedef struct {
    int64_t n;
    const uint8_t *codes; /* [n, row bytes] */
    const uint8_t *signs; /* [blocks, planes, 64] */
    const float *scales;  /* [n] */
    const float *offsets; /* [n], or NULL: 0 */
    const int64_t *ids;   /* [n], or NULL: first_id + i */
    int64_t first_id;
    const uint8_t *allowed; /* [n], 0 where a row is left out, or NULL: none is */
} tq_index_rows;

/** The k best allowed rows of all segments for each query: scores [queries, k] float32, best first, equal ones by ascending id, and
 *  ids [queries, k]; -inf and -1 where fewer are left.
 *  A row's leading bits bound its score from above, by 2.5 standard deviations of what the other bits add, 4 where widths differ.
 *  With the smaller of score and bound as lower bound, a row takes part if its upper bound reaches the k-th largest lower bound of all
 *  allowed rows. Where at most 1 row in 50 is allowed, all of these take part. So the result depends on neither threads nor segments
 *  nor the instruction set.
 *  Allocates some 4 k bytes a query and thread, and 24 for each row that takes part: TQ_E_MEMORY. */
TQ_API tq_status tq_index_search(const tq_index_layout *layout, const tq_index_queries *queries,
                                 const tq_index_rows *segments, int64_t n_segments, int64_t k, float *scores,
                                 int64_t *ids, int32_t threads, tq_error *error);

/** The score of every row, allowed or not: scores [queries, rows.n] float32. */
TQ_API tq_status tq_index_scores(const tq_index_layout *layout, const tq_index_queries *queries,
                                 const tq_index_rows *rows, float *scores, int32_t threads, tq_error *error);

#if defined(__cplusplus)
}
#endif
#endif
