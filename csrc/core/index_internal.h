/* Shared by the files of the vector index. */
#ifndef TQ_INDEX_INTERNAL_H
#define TQ_INDEX_INTERNAL_H
#include "index_pool.h"
#include "internal.h"
#include "scan_kernels.h"

/** Returns the table of the instruction set in use, or NULL with *error filled (dispatch.c). */
const tq_scan_kernels *tq_get_scan_kernels(tq_error *error);

/** Returns the books of all widths, [TQ_WIDE_BITS + 1]. They are made once. */
const tq_index_book *tq_index_books(void);

/** Returns the number of groups of 32 channels. The last group may have fewer channels. */
static inline int32_t tq_index_groups(const tq_index_layout *layout) { return (layout->channels + 31) / 32; }

/** Returns the channels of a group. */
static inline int32_t tq_index_group_channels(const tq_index_layout *layout, int32_t g)
{
    int32_t left = layout->channels - 32 * g;
    return left < 32 ? left : 32;
}

/** A checked space, with sizes and arrays for a call. */
typedef struct {
    const tq_index_space *space;
    const tq_kernels *kernels;
    const tq_scan_kernels *scan;
    tq_scan_layout layout;
    int32_t channels, padded, planes; /* padded: 32 groups */
    int64_t row_bytes, list_stride;   /* list_stride: n_lists rounded up to a multiple of TQ_INDEX_CENTRES */
    double mean_squares;
    float mean[TQ_MAX_DIM]; /* 0 after the last; unused without a mean */
} tq_index_use;

tq_scan_layout tq_index_scan_layout(const tq_index_layout *layout);
tq_status tq_index_begin(const tq_index_space *space, tq_index_use *use, tq_error *error);

/** Centres x [dim] as `centre` in scan_kernels.h does: centred [padded], 0 after the last number. Also returns 0 for a
 *  row of zeros with cosine. */
int tq_index_centre(const tq_index_use *use, const float *x, float *centred, double *offset, double *squares);
/** The same for a row of a list: x [padded] is a result of tq_index_centre, offset is <c, x - c>. Writes c to centre
 *  [padded]. */
void tq_index_centre_on_list(const tq_index_use *use, const float *x, int32_t list, float *centred, double *offset,
                             double *squares, float *centre);
/** Computes the values of all lists for centred vectors x [rows, padded]: values [rows, list_stride]. */
void tq_index_list_values(const tq_index_use *use, const float *x, int32_t rows, double *values);
/** Finds the n lists with the largest values, best first; of equal values the smaller list number is better. skipped
 *  [n_lists], or NULL: lists that may not be taken. hits [n]: overwritten. Returns how many it found. */
int32_t tq_index_best_lists(const double *values, const uint8_t *skipped, int32_t n_lists, int32_t n, hit *hits,
                            int32_t *lists);
/** Finds the n best lists of each row, lists [rows, n], and their values. Values of other lists are lost. Not for l2.
 *  Has the results of tq_index_list_values and tq_index_best_lists, in less time if n is a small part of all lists. */
void tq_index_near_lists(const tq_index_use *use, const float *x, int32_t rows, const uint8_t *skipped, int32_t n,
                         double *values, hit *hits, int32_t *lists);
/** Rotates centred vectors [rows, padded] to z [rows, padded], which may not overlap them; 0 after the last channel. */
void tq_index_rotate(const tq_index_use *use, const float *centred, int32_t rows, float *z);
/** Returns the error for row i of x, which tq_index_centre refused. */
tq_status tq_index_refused(const tq_index_use *use, const float *x, int64_t i, tq_error *error);

/** Queries as fixed point (turboquant_index.h). */
typedef struct {
    int16_t *q;        /* [n, padded], 0 after the last channel */
    double *units;     /* [n] */
    double *constants; /* [n], <mean, query>; 0 with l2 */
    double *squared;   /* [n], |query - mean|^2, 0 unless l2 */
} tq_index_queries;

/** Converts queries first .. first + rows - 1 of x, which are rotated together. workspace [2, rows, padded] begins with
 *  the centred queries afterwards. Returns 0 if a query is refused. */
int tq_index_fix(const tq_index_use *use, const float *x, int64_t first, int32_t rows, float *workspace,
                 const tq_index_queries *out);

/** A row's score, without the query's constant, is at most tq_leading_scale(scale) * (sum * unit + margin) + offset.
 *  `sum` adds the table entries of its leading bits (kernels/scan_signs.h). The bound fails only if the other bits add
 *  more than `sigmas` standard deviations. If the layout has `next`, there is a second bound: scale *
 *  tq_index_next_factor * (sum * both_unit + next_sum * next_unit + both_margin) + offset. */
typedef struct {
    float unit, margin, inverse_unit;
    float both_unit, next_unit, both_margin;
} tq_sign_query;

/** Returns the factor by which the second bound multiplies a scale. */
static inline float tq_index_next_factor(int32_t bits, float scale)
{
    int32_t k = tq_leading_class(scale);
    return bits < TQ_WIDE_BITS && k > 0 ? 1 + (float)k / 192 : 1;
}

/** Fills in for each code its level and the estimate of it from its first `lead` bits, [256] each, in units of u. */
void tq_index_estimates(int32_t bits, int32_t lead, float *levels, float *estimates);

/** Returns how many tables of 64 bytes there are for this many planes. */
int32_t tq_sign_tables(int32_t planes);
/** Returns the sum of the table entries of one row's leading bits [planes], as the kernels compute it. */
uint16_t tq_sign_sum(const uint8_t *tables, int32_t planes, const uint8_t *lead);
/** Makes tables [tq_sign_tables(planes), 64] and bounds of a query q [padded], which is in units of `unit`. */
void tq_sign_query_make(const tq_index_use *use, const int16_t *q, double unit, uint8_t *tables, tq_sign_query *out);
#endif
