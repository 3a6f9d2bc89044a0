/* tq_merge: partial attention results over disjoint tokens, from splits or devices. */
#include "internal.h"
#include <math.h>

/** One row: weights exp(lse_i - max) of the parts, in the order of the parts. */
static void merge_row(const float *outs, const float *lses, int32_t parts, int64_t rows, int64_t row, int32_t head_dim,
                      float *out, float *lse)
{
    float max = -INFINITY, sum = 0;
    for (int32_t i = 0; i < parts; i++) {
        float x = lses[i * rows + row];
        if (x > max || isnan(x)) max = x;
    }
    for (int32_t c = 0; c < head_dim; c++) out[row * head_dim + c] = 0;
    for (int32_t i = 0; i < parts; i++) {
        float x = lses[i * rows + row];
        if (x == -INFINITY) continue; /* attended nothing: its out counts for nothing, whatever it holds */
        float weight = expf(x - max);
        sum += weight;
        for (int32_t c = 0; c < head_dim; c++)
            out[row * head_dim + c] += weight * outs[(i * rows + row) * head_dim + c];
    }
    lse[row] = max == -INFINITY ? -INFINITY : max + logf(sum);
    for (int32_t c = 0; c < head_dim && max != -INFINITY; c++) out[row * head_dim + c] /= sum;
}

tq_status tq_merge(const float *outs, const float *lses, int32_t parts, int64_t rows, int32_t head_dim, float *out,
                   float *lse, tq_error *error)
{
    if (parts < 1) return tq_fail(error, TQ_E_VALUE, "parts", -1, parts, "at least 1");
    if (rows < 0) return tq_fail(error, TQ_E_VALUE, "rows", -1, (double)rows, "at least 0");
    if (head_dim < 1) return tq_fail(error, TQ_E_VALUE, "head_dim", -1, head_dim, "at least 1");
    if (!rows) return TQ_OK;
    TQ_NEED(error, {"outs", outs, 0}, {"lses", lses, 0}, {"out", out, 0}, {"lse", lse, 0});
    int64_t row_bytes, bytes;
    TQ_TRY(tq_product(rows, (int64_t)sizeof(float) * head_dim, &row_bytes, "rows", error));
    TQ_TRY(tq_product(parts, row_bytes, &bytes, "parts", error));
    if (tq_overlap(out, row_bytes, outs, bytes)) return tq_fail(error, TQ_E_VALUE, "out", -1, 0, "apart from outs");
    if (tq_overlap(lse, 4 * rows, lses, 4 * rows * parts))
        return tq_fail(error, TQ_E_VALUE, "lse", -1, 0, "apart from lses");
    for (int64_t row = 0; row < rows; row++) merge_row(outs, lses, parts, rows, row, head_dim, out, lse);
    return TQ_OK;
}
