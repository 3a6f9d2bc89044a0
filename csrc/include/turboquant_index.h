/* Vector search: how an index stores vectors, and the scan over them. Rules and errors as in turboquant.h, but
 * tq_index_assign, tq_index_encode, tq_index_search, tq_index_scores and tq_index_scores_of allocate, and may fail with
 * TQ_E_MEMORY. The last three keep up to 8 MiB for the next call of the same thread, until it ends.
 *
 * A vector is stored as its rotated coordinates z = R (x - mean). There are `channels` of them: dim rounded up to a
 * multiple of 8. They form groups of 32; the last has 8, 16, 24 or 32. Group g has bits[g] bits (0..6 or 8; 0 takes no
 * space). With the cosine metric x is divided by its length first.
 *   t = z / steps[g],  u = t / rms(t) over the channels that have bits.
 *   code: the rank of u among the levels of the normal codebook of that width (turboquant.h; at 6 bits 64 Lloyd-Max
 *   levels of N(0, 1), rounded to int8 times a step as the others are). At 8 bits u / TQ_WIDE_STEP + 128, rounded half
 *   to even and clamped to 1..255. If all groups that have bits have 8, and none of these bits leads, u is first
 *   multiplied by 127 TQ_WIDE_STEP / max |u|, so that nothing is clamped.
 *   size: rows have sizes if all groups have the same step and the same 3 to 6 or 8 bits, of which 1 or 2 lead. The
 *   code is then that of size * u, where size is one of TQ_INDEX_SIZES. Up to 6 bits it is one of the first five: the
 *   one whose levels c, as multiples of the book's step, have the largest fl(<c, u> fl(<c, u> / <c, c>)); of equal ones
 *   the first. These sums are float32, of lanes i, i + 32, .., then halves added. At 8 bits it is the largest that
 *   clamps nothing, at least 1.
 *   scale = rms(t) * sum (step u)^2 / sum (step c)(step u)  makes inner products unbiased (EDEN, arXiv 2108.08842).
 *   u and the scale are 0 if rms(t) is below 2^-126. If bits lead, the lowest 3 bits of a scale's significand are the
 *   row's noise class, and the next 6 say how its leading bits compare; both are explained below.
 *   offset = <mean, x - mean>, for squared distances -|x - mean|^2 / 2.
 * The first lead[g] bits of a code are stored apart from the others, so that a scan can read them alone.
 *   A row holds the other bits in fields of 8, 4, 2 and 1 bits, the widest and lowest bits first. A field of w bits has
 *   4 w bytes: bits w k .. w k + w - 1 of byte i are of channel i + 4 w k. A last group of less than 32 channels is one
 *   to three groups of 8, whose fields have w bytes: those bits of byte i are of channel i + w k.
 *   The leading bits of a row are fields of 2 bits, from the highest on, and one of 1 bit if lead[g] is odd. Byte p of
 *   them, over all groups, is plane p. Blocks of 64 rows hold them plane after plane, [rows / 64 rounded up, planes,
 *   64] bytes, 0 after the last row. */
#ifndef TURBOQUANT_INDEX_H
#define TURBOQUANT_INDEX_H
#include "turboquant.h"

#if defined(__cplusplus)
extern "C" {
#endif

#define TQ_INDEX_BLOCK 64 /* rows whose leading bits lie together */

/* Lists: x belongs to the list with the largest value; of equal ones to the first. The value is <its direction, x>
 * (cosine: x of unit length; l2: <centre, x> - |centre|^2 / 2), in float64, summed in the order of the numbers. The
 * centre c of a list is its direction times its length. A row then stores z = R (x - c), and
 *   offset = <c, x - c> - <R c, what z's code stands for>, for squared distances -|x - c|^2 / 2 in place of <c, x - c>.
 * One table serves all lists: its estimate of <query, x - c> plus the offset is an estimate of <query - c, x - c>, plus
 * <c, x - c>. */
#define TQ_INDEX_CENTRES 16 /* centres whose numbers lie together */
#define TQ_INDEX_MAX_LISTS (1 << 20)

#define TQ_INDEX_MAX_PLANES 780 /* sums of table entries fit 16 bits */

#define TQ_INDEX_MAX_INPUT 0x1p55f /* the largest magnitude of a number, but with cosine: scores are finite float32 */

/* The noise of a row: what its unread bits add to a score, in standard deviations as the bound of tq_index_search
 * assumes them, for queries that have their energy where the row has its own. It is measured in the coordinates of x:
 * if the energy of vectors lies in few numbers, errors of rotated coordinates are not independent noise. The classes
 * end at 1, 1.2, 1.5, 1.9, 2.4, 3.2, 4.5 and infinity; of two bounds the larger class counts. Rows under a dense
 * rotation, rows whose bits all lead, and rows whose groups differ in bits, leading bits or step have class 0. */
#define TQ_INDEX_NOISE_CLASSES 8

/* A row's scale fits its levels c, and shrinks as its size grows. The estimates e of the levels from leading bits do
 * not grow as much. So a scan's bound multiplies the scale by 1 + k / 64, with k in -32 .. 31 nearest to <c, u> / <e,
 * u>. Bits 3 to 8 of the scale hold k; it is 0 if rows have no sizes. The second bound, of 2 bits, multiplies the scale
 * by 1 + k / 192 if k is above 0 and there are at most 6 bits, otherwise by 1. */
#define TQ_INDEX_SIZES {1.0f, 0.84375f, 0.9375f, 1.0625f, 1.1875f, 1.25f, 1.3125f, 1.4375f}
#define TQ_INDEX_N_SIZES 8

typedef struct {
    int32_t channels;    /* a multiple of 8 in 8 .. TQ_MAX_DIM; groups = channels / 32 rounded up */
    const uint8_t *bits; /* [groups], 0..6 or 8 */
    const uint8_t *lead; /* [groups], 0..min(bits, 6), at most TQ_INDEX_MAX_PLANES planes together; all 0: rows
                          * are scored one by one (tq_index_scores_of), not searched */
    const float *steps;  /* [groups], finite and above 0 */
} tq_index_layout;

typedef enum { TQ_INDEX_IP, TQ_INDEX_COSINE, TQ_INDEX_L2 } tq_index_metric;

typedef struct {
    tq_index_layout layout;
    const tq_plan *plan; /* its head_dim is `channels`; R is its rotation */
    int32_t dim;         /* numbers of a vector, 1 .. channels */
    int32_t metric;      /* tq_index_metric */
    double sigmas;       /* width of a scan's bound in standard deviations, at least 0; infinite: no bound */
    const float *mean;   /* [dim], or NULL: 0 */
    /* [channels, channels] bfloat16, R transposed: z = (x - mean) matrix; NULL unless the plan's rotation is dense */
    const uint16_t *matrix;
    int32_t n_lists;         /* 0 .. TQ_INDEX_MAX_LISTS; 0: rows are in no lists */
    const float *directions; /* [n_lists / 16 rounded up, dim, 16], 0 after the last, of unit length; l2: centres. NULL
                              * without lists; with lists the mean must be NULL */
    const float *lengths;    /* [n_lists]; l2: 1 */
} tq_index_space;

/** Finds the bytes of a row, the sum of (bits - lead) * channels of the group / 8, and the planes of its leading bits,
 *  the sum of lead * channels of the group / 8. */
TQ_API tq_status tq_index_row_bytes(const tq_index_layout *layout, int64_t *bytes, int32_t *planes, tq_error *error);

/** Returns the step between levels of a width, in units of u; 0 for 0 bits and for widths that do not exist. */
TQ_API float tq_index_step(int32_t bits);

/** Returns the expected squared error of a level of N(0, 1) of this many bits, if only the first `lead` are known.
 *  tq_index_search uses it as the noise of its bound. lead: 0 .. min(bits, 6); otherwise NaN. */
TQ_API double tq_index_lead_error(int32_t bits, int32_t lead);

/** Finds the list of each row of x [n, dim], which is as in tq_index_encode: lists [n]. There must be lists. */
TQ_API tq_status tq_index_assign(const tq_index_space *space, const float *x, int64_t n, int32_t *lists,
                                 int32_t threads, tq_error *error);

/** Encodes x [n, dim] float32 to codes [n, row bytes], signs [blocks, planes, 64], scales [n] and offsets [n]. offsets
 *  may be NULL if there is neither a mean nor lists and the metric is not l2. lists [n]: the list of each row, in 0 ..
 *  n_lists - 1 (not checked); NULL without lists. The bytes are the same on every machine, unless the rotation is
 *  dense. A row whose coded channels are all 0 gets scale 0. x must be finite; without cosine at most
 *  TQ_INDEX_MAX_INPUT in magnitude, with cosine no row of zeros. Otherwise the error is "x", its index that of the
 *  number or of the row's first number, and the outputs hold some rows. */
TQ_API tq_status tq_index_encode(const tq_index_space *space, const float *x, int64_t n, const int32_t *lists,
                                 uint8_t *codes, uint8_t *signs, float *scales, float *offsets, int32_t threads,
                                 tq_error *error);

/** Decodes codes to the numbers that they stand for: z [n, channels] float32, 0 in groups without bits. signs:
 *  [n, planes], row after row. */
TQ_API tq_status tq_index_decode(const tq_index_layout *layout, const uint8_t *codes, const uint8_t *signs,
                                 const float *scales, int64_t n, float *z, tq_error *error);

/** Computes what a search needs of each block of 64 rows: 1 / the largest scale * (1 + k / 64), or 0 if that is 0, and
 *  the largest offset. offsets [n], or NULL: 0. factors: [n / 64 rounded up, 2]. */
TQ_API void tq_index_factors(const float *scales, const float *offsets, int64_t n, float *factors);

/* A query is converted to fixed point: z_j ~ unit * q_j / (steps[g] * tq_index_step(bits[g])), q_j int16, the sum of
 * |q_j| at most 2^24.
 * The score of row i is
 *      v = (unit * scales[i]) * sum_j q_j level_ij + offsets[i] + <mean, query>,   in float64, left to right,
 * rounded to float32. Larger is better. For l2 it is a negated squared distance, -max(0, |query - mean|^2 - 2 v), and v
 * lacks its last term. With lists, v has another term before it is rounded, <c, query>; for l2 that is
 * -|query - c|^2 / 2, in place of what the mean adds. */

/** Rows of one segment. With lists, all rows are of `list`, or each has a list of its own in `lists`. */
typedef struct {
    int64_t n;
    const uint8_t *codes; /* [n, row bytes] */
    const uint8_t *signs; /* [blocks, planes, 64] */
    const float *scales;  /* [n] */
    const float *offsets; /* [n], or NULL: 0 */
    const float *factors; /* [blocks, 2], of tq_index_factors */
    const int64_t *ids;   /* [n], or NULL: first_id + i */
    int64_t first_id;
    const uint8_t *allowed; /* [n], 0 where a row is left out, or NULL: none is */
    const int32_t *lists;   /* [n], in 0 .. n_lists - 1 (not checked), or NULL: all are of `list` */
    int32_t list;           /* in 0 .. n_lists - 1 (not checked); without lists 0 */
} tq_index_rows;

/** Finds the k best allowed rows of all segments for each of n queries [n, dim], float32 as x in tq_index_encode:
 *  scores [n, k] float32, best first, equal ones by ascending id, and ids [n, k]; -inf and -1 where fewer are left.
 *  A row's leading bits bound its score from above: the other bits count as `sigmas` standard deviations of what they
 *  add. If all groups have the same bits, at least 2, and 1 of them leads, the bit after it gives a second bound, of
 *  1.2 sigmas; the smaller bound counts. A row's lower bound is the smaller of its score and its upper bound. The
 *  results are the best among the rows whose upper bound reaches the k-th largest lower bound of all allowed rows. If
 *  at most 1 row in 50 is allowed, or without a bound, they are the best of all allowed rows. So the result depends on
 *  neither threads nor segments nor the instruction set.
 *  With lists, some segments have rows of one list alone. Of these a query reads those of the `probe` lists that have
 *  the largest values for it (above, "Lists"), among lists that have allowed rows there. It also reads all segments
 *  whose rows are of different lists; and all segments if at most 1 row in 50 is allowed. probe: at least 1; without
 *  lists it is not looked at.
 *  Allocates some 4 k + 450 bytes for each query and thread, or up to 1 MiB more if these are few, and 24 for each
 *  further row that is scored. */
TQ_API tq_status tq_index_search(const tq_index_space *space, const float *queries, int64_t n,
                                 const tq_index_rows *segments, int64_t n_segments, int64_t k, int32_t probe,
                                 float *scores, int64_t *ids, int32_t threads, tq_error *error);

/** Computes the scores of all rows of all segments, one after the other, allowed or not: scores [n, rows] float32. */
TQ_API tq_status tq_index_scores(const tq_index_space *space, const float *queries, int64_t n,
                                 const tq_index_rows *segments, int64_t n_segments, float *scores, int32_t threads,
                                 tq_error *error);

/** Computes the scores of m rows for each query: rows [n, m], which are counted over all segments, one after the other
 *  (not checked), or -1: none, which has the score -inf. scores [n, m] float32. */
TQ_API tq_status tq_index_scores_of(const tq_index_space *space, const float *queries, int64_t n,
                                    const tq_index_rows *segments, int64_t n_segments, const int64_t *rows, int64_t m,
                                    float *scores, int32_t threads, tq_error *error);

#if defined(__cplusplus)
}
#endif
#endif
