/* Before encoding: centring, rotation, fixed-point queries, and the codebooks. turboquant_index.h has the
 * definitions. */
#include "index_internal.h"
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static tq_index_book all_books[TQ_WIDE_BITS + 1];
static pthread_once_t books_once = PTHREAD_ONCE_INIT;

static void make_books(void)
{
    for (int32_t bits = 1; bits <= TQ_SCAN_BITS; bits++) {
        tq_index_book *out = &all_books[bits];
        out->n_levels = 1 << bits;
        tq_codebook book;
        tq_get_codebook(TQ_CODEBOOK_NORMAL, 0, bits, &book, NULL); /* cannot fail for these widths */
        out->step = book.step;
        for (int32_t rank = 0; rank < book.n_levels; rank++) out->levels[rank] = book.levels[book.code_of_rank[rank]];
        memcpy(out->thresholds, book.thresholds, sizeof book.thresholds);
    }
    all_books[TQ_WIDE_BITS].step = TQ_WIDE_STEP;
}

const tq_index_book *tq_index_books(void)
{
    pthread_once(&books_once, make_books);
    return all_books;
}

float tq_index_step(int32_t bits) { return bits < 1 || bits > TQ_WIDE_BITS ? 0 : tq_index_books()[bits].step; }

tq_status tq_index_row_bytes(const tq_index_layout *layout, int64_t *bytes, int32_t *planes, tq_error *error)
{
    if (layout->channels < 8 || layout->channels > TQ_MAX_DIM || layout->channels % 8)
        return tq_refuse(error, "channels", layout->channels, "a multiple of 8 in 8..4096");
    *bytes = 0;
    *planes = 0;
    for (int32_t g = 0; g < tq_index_groups(layout); g++) {
        int32_t b = layout->bits[g], lead = layout->lead[g], eighth = tq_index_group_channels(layout, g) / 8;
        if (b > TQ_SCAN_BITS && b != TQ_WIDE_BITS) return tq_fail(error, TQ_E_VALUE, "bits", g, b, "in 0..6 or 8");
        if (lead > b || lead > TQ_SCAN_BITS) return tq_fail(error, TQ_E_VALUE, "lead", g, lead, "in 0..min(bits, 6)");
        if (!(layout->steps[g] > 0) || !isfinite(layout->steps[g]))
            return tq_fail(error, TQ_E_VALUE, "steps", g, layout->steps[g], "finite and above 0");
        *bytes += (b - lead) * eighth;
        *planes += lead * eighth;
    }
    if (*planes > TQ_INDEX_MAX_PLANES) return tq_refuse(error, "lead", *planes, "of at most 780 planes together");
    return TQ_OK;
}

tq_status tq_index_begin(const tq_index_space *space, tq_index_use *use, tq_error *error)
{
    TQ_TRY(tq_index_row_bytes(&space->layout, &use->row_bytes, &use->planes, error));
    TQ_TRY(tq_plan_check(space->plan, error));
    if (!(use->kernels = tq_get_kernels(error)) || !(use->scan = tq_get_scan_kernels(error))) return TQ_E_UNSUPPORTED;
    use->space = space;
    use->channels = space->layout.channels;
    use->padded = 32 * tq_index_groups(&space->layout);
    if (space->plan->head_dim != use->channels)
        return tq_refuse(error, "head_dim", space->plan->head_dim, "the layout's channels");
    int dense = space->plan->rotation == TQ_ROTATION_DENSE;
    if (dense != (space->matrix != NULL))
        return tq_refuse(error, "matrix", space->plan->rotation,
                         dense ? "given, because the plan's rotation is dense"
                               : "absent, because the plan's rotation is not dense");
    if (space->dim < 1 || space->dim > use->channels) return tq_refuse(error, "dim", space->dim, "in 1..channels");
    if (!(space->sigmas >= 0)) return tq_refuse(error, "sigmas", space->sigmas, "at least 0");
    if (space->metric < TQ_INDEX_IP || space->metric > TQ_INDEX_L2)
        return tq_refuse(error, "metric", space->metric, "in 0..2");
    if (space->n_lists < 0 || space->n_lists > TQ_INDEX_MAX_LISTS)
        return tq_refuse(error, "n_lists", space->n_lists, "in 0..2^20");
    if (space->n_lists && (space->mean || !space->directions || !space->lengths))
        return tq_refuse(error, "n_lists", space->n_lists, "0 unless there are centres and no mean");
    use->list_stride = (space->n_lists + TQ_INDEX_CENTRES - 1) / TQ_INDEX_CENTRES * TQ_INDEX_CENTRES;
    memset(use->mean, 0, sizeof(float) * (size_t)use->padded);
    if (space->mean) memcpy(use->mean, space->mean, sizeof(float) * (size_t)space->dim);
    use->mean_squares = 0;
    for (int32_t j = 0; j < space->dim; j++) use->mean_squares += (double)use->mean[j] * use->mean[j];
    use->layout = tq_index_scan_layout(&space->layout);
    return TQ_OK;
}

tq_scan_layout tq_index_scan_layout(const tq_index_layout *layout)
{
    int32_t lead = layout->lead[0], groups = tq_index_groups(layout);
    tq_scan_layout out = {layout, tq_index_books(), groups, layout->channels % 32 / 8, 0, 0, 0, 0};
    out.even_bits = lead == 1 || lead == 2 ? layout->bits[0] : 0;
    for (int32_t g = 0; g < groups; g++) {
        out.coded += layout->bits[g] ? tq_index_group_channels(layout, g) : 0;
        if (layout->bits[g] != layout->bits[0] || layout->lead[g] != lead) out.even_bits = 0;
    }
    out.next = lead == 1 && out.even_bits > 1;
    out.sized = out.even_bits > 2;
    for (int32_t g = 0; g < groups; g++) out.sized &= layout->steps[g] == layout->steps[0];
    return out;
}

int tq_index_centre(const tq_index_use *use, const float *x, float *centred, double *offset, double *squares)
{
    float padded[TQ_MAX_DIM];
    if (use->space->dim < use->padded) {
        memcpy(padded, x, sizeof(float) * (size_t)use->space->dim);
        memset(padded + use->space->dim, 0, sizeof(float) * (size_t)(use->padded - use->space->dim));
        x = padded;
    }
    int unit = use->space->metric == TQ_INDEX_COSINE;
    const float *mean = use->space->mean ? use->mean : NULL;
    return use->scan->centre(x, mean, use->padded, unit, centred, offset, squares) && !(unit && *squares == 0);
}

tq_status tq_index_refused(const tq_index_use *use, const float *x, int64_t i, tq_error *error)
{
    int cosine = use->space->metric == TQ_INDEX_COSINE;
    for (int64_t j = i * use->space->dim; j < (i + 1) * use->space->dim; j++)
        if (!(fabsf(x[j]) <= (cosine ? FLT_MAX : TQ_INDEX_MAX_INPUT)))
            return tq_fail(error, TQ_E_VALUE, "x", j, x[j], cosine ? "finite" : "finite and at most 2^55 in magnitude");
    return tq_fail(error, TQ_E_VALUE, "x", i * use->space->dim, 0, "of a row that is not zero, with cosine");
}

void tq_index_rotate(const tq_index_use *use, const float *centred, int32_t rows, float *z)
{
    const tq_plan *plan = use->space->plan;
    if (use->space->matrix) use->scan->rotate(use->space->matrix, use->channels, centred, rows, use->padded, z);
    for (int64_t i = 0; i < rows; i++) {
        float *row = z + i * use->padded;
        if (!use->space->matrix)
            tq_rotate_vector(use->kernels, plan, plan->rotation, NULL, 0, centred + i * use->padded, row);
        for (int32_t j = use->channels; j < use->padded; j++) row[j] = 0;
    }
}

/** Converts query i, which is rotated to z, to fixed point. Overwrites z. */
static void fix_query(const tq_index_use *use, float *z, int64_t i, const tq_index_queries *out)
{
    const tq_index_layout *layout = &use->space->layout;
    int32_t n = use->channels;
    double largest = 0, sum = 0;
    for (int32_t j = 0; j < n; j++) {
        z[j] *= layout->steps[j / 32] * use->layout.books[layout->bits[j / 32]].step;
        double magnitude = fabs((double)z[j]);
        if (magnitude > largest) largest = magnitude;
        sum += magnitude;
    }
    double unit = largest / 32767, least = sum / ((1 << 24) - TQ_MAX_DIM);
    if (unit < least) unit = least;
    int16_t *q = out->q + i * use->padded;
    for (int32_t j = 0; j < n; j++) q[j] = unit > 0 ? (int16_t)lrint(z[j] / unit) : 0;
    for (int32_t j = n; j < use->padded; j++) q[j] = 0;
    out->units[i] = unit;
}

int tq_index_fix(const tq_index_use *use, const float *x, int64_t first, int32_t rows, float *workspace,
                 const tq_index_queries *out)
{
    float *z = workspace + (int64_t)rows * use->padded;
    int l2 = use->space->metric == TQ_INDEX_L2;
    for (int32_t r = 0; r < rows; r++) {
        double offset, squares;
        float *centred = workspace + (int64_t)r * use->padded;
        if (!tq_index_centre(use, x + (first + r) * use->space->dim, centred, &offset, &squares)) return 0;
        out->constants[first + r] = l2 ? 0 : offset + use->mean_squares; /* <mean, query> */
        out->squared[first + r] = l2 ? squares : 0;
    }
    tq_index_rotate(use, workspace, rows, z);
    for (int32_t r = 0; r < rows; r++) fix_query(use, z + (int64_t)r * use->padded, first + r, out);
    return 1;
}
