/* Shared by the files of the vector index. */
#ifndef TQ_INDEX_INTERNAL_H
#define TQ_INDEX_INTERNAL_H
#include "internal.h"
#include "scan_kernels.h"

/** The table for the instruction set in use, or NULL with *error filled (dispatch.c). */
const tq_scan_kernels *tq_get_scan_kernels(tq_error *error);

/** The books of all widths, [TQ_WIDE_BITS + 1]; made once. */
const tq_index_book *tq_index_books(void);

/** Groups of 32 channels, the last of which may have less. */
static inline int32_t tq_index_groups(const tq_index_layout *layout) { return (layout->channels + 31) / 32; }

/** The channels of a group. */
static inline int32_t tq_index_group_channels(const tq_index_layout *layout, int32_t g)
{
    int32_t left = layout->channels - 32 * g;
    return left < 32 ? left : 32;
}

/** A checked space, with sizes and arrays for its calls. */
typedef struct {
    const tq_index_space *space;
    const tq_kernels *kernels;
    const tq_scan_kernels *scan;
    tq_scan_layout layout;
    int32_t channels, padded, planes; /* padded: 32 groups */
    int64_t row_bytes, list_stride;   /* list_stride: n_lists rounded up to a multiple of TQ_INDEX_CENTRES */
    double mean_squares;
    float mean[TQ_MAX_DIM]; /* 0 behind the last; unused without a mean */
} tq_index_use;

tq_scan_layout tq_index_scan_layout(const tq_index_layout *layout);
tq_status tq_index_begin(const tq_index_space *space, tq_index_use *use, tq_error *error);

/** x [dim] -> centred, [padded], 0 behind the last; see centre in scan_kernels.h. */
int tq_index_centre(const tq_index_use *use, const float *x, float *centred, double *offset, double *squares);
/** The same for a row of a list: x [padded] is centred already (of unit length with cosine), offset is <c, x - c>. */
void tq_index_centre_on_list(const tq_index_use *use, const float *x, int32_t list, float *centred, double *offset,
                             double *squares, float *centre);
/** The values of all lists for centred vectors x [rows, padded]: values [rows, list_stride]. */
void tq_index_list_values(const tq_index_use *use, const float *x, int32_t rows, double *values);
/** The n lists with the largest values, the best first; of equal values the smaller list is better. skipped [n_lists]:
 *  those that may not be taken. Returns how many there are. */
int32_t tq_index_best_lists(const double *values, const uint8_t *skipped, int32_t n_lists, int32_t n, int32_t *lists);
/** The n best lists of each of some rows, lists [rows, n], and their values; those of others are lost. Not for l2. Gives
 *  what tq_index_list_values and tq_index_best_lists do in less time, where n is a small part of all lists. */
void tq_index_near_lists(const tq_index_use *use, const float *x, int32_t rows, const uint8_t *skipped, int32_t n,
                         double *values, int32_t *lists);
/** Rows of centred vectors [rows, padded] -> z [rows, padded], which is apart from them; 0 behind the last channel. */
void tq_index_rotate(const tq_index_use *use, const float *centred, int32_t rows, float *z);
/** The error for row i of x, which tq_index_centre refused. */
tq_status tq_index_refused(const tq_index_use *use, const float *x, int64_t i, tq_error *error);

/** Queries as fixed point (turboquant_index.h). */
typedef struct {
    int16_t *q;        /* [n, padded], 0 behind the last channel */
    double *units;     /* [n] */
    double *constants; /* [n] */
    double *squared;   /* [n], |query - mean|^2, 0 unless l2 */
} tq_index_queries;

/** Queries first .. first + rows - 1 of x, rotated together. workspace: [2, rows, padded]. Returns 0 if one is
 *  refused. */
int tq_index_fix(const tq_index_use *use, const float *x, int64_t first, int32_t rows, float *workspace,
                 const tq_index_queries *out);

/** A row's score, without the query's constant, is at most scale * (sum * unit + margin) + offset. `sum` adds table
 *  entries for its leading bits (kernels/scan_signs.h). The bound fails only if the other bits add more than `sigmas`
 *  standard deviations. Where the layout has `next`, a second bound is scale * (sum * both_unit + next_sum * next_unit +
 *  both_margin) + offset. */
typedef struct {
    float unit, margin, inverse_unit;
    float both_unit, next_unit, both_margin;
} tq_sign_query;

/** What the second bound multiplies a scale by. */
static inline float tq_index_next_factor(int32_t bits, float scale)
{
    int32_t k = tq_leading_class(scale);
    return bits < TQ_WIDE_BITS && k > 0 ? 1 + (float)k / 192 : 1;
}

/** The level of each code, in units of u, and what its leading bits estimate: [256] each. */
void tq_index_estimates(int32_t bits, int32_t lead, float *levels, float *estimates);

/** How many tables of 64 bytes there are for this many planes. */
int32_t tq_sign_tables(int32_t planes);
/** The sum of the table entries of one row's leading bits [planes], as the kernels add them up. */
uint16_t tq_sign_sum(const uint8_t *tables, int32_t planes, const uint8_t *lead);
/** q [padded] in units of `unit`; tables: [tq_sign_tables(planes), 64]. */
void tq_sign_query_make(const tq_index_use *use, const int16_t *q, double unit, uint8_t *tables, tq_sign_query *out);
#endif
