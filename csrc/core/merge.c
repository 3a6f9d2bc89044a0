/* tq_merge: partial attention results over disjoint tokens, from splits or devices. */
#include "internal.h"
#include <math.h>

/** Merges one row, with weights exp(lse_i - max), in the order of the parts. */
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
        if (x == -INFINITY) continue; /* attended nothing: its out is ignored, whatever it holds */
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
    TQ_TRY(tq_check_merge(outs, lses, parts, rows, head_dim, out, lse, error));
    for (int64_t row = 0; row < rows; row++) merge_row(outs, lses, parts, rows, row, head_dim, out, lse);
    return TQ_OK;
}
