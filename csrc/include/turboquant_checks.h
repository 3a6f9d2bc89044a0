/* Checks of arguments that CPU and CUDA share. They read no array, so pointers may be to either memory. tq_append,
 * tq_cuda_append and the others call these first; a binding calls one itself only to check before it allocates. Rules
 * and errors as in turboquant.h.
 *
 * If a caller may leave an argument out (NULL), `wants` begins with "given" or "absent". */
#ifndef TURBOQUANT_CHECKS_H
#define TURBOQUANT_CHECKS_H
#include "turboquant.h"

#if defined(__cplusplus)
extern "C" {
#endif

/** x and y have rows of dtype. */
TQ_API tq_status tq_check_rotate(const tq_plan *plan, const float *matrix, int32_t dtype, const void *x, const void *y,
                                 int64_t rows, tq_error *error);

/** Checks only plan, numbers and strides, on which sizes of workspace depend. */
TQ_API tq_status tq_check_append_sizes(const tq_plan *plan, const tq_append_params *params, tq_error *error);
TQ_API tq_status tq_check_append(const tq_plan *plan, const tq_append_params *params, tq_error *error);
TQ_API tq_status tq_check_attend_sizes(const tq_plan *plan, const tq_attend_params *params, tq_error *error);
TQ_API tq_status tq_check_attend(const tq_plan *plan, const tq_attend_params *params, tq_error *error);

/** Elements from one row of an array to the next. */
typedef struct {
    int64_t batch, head, token;
} tq_row_strides;
/** Return the strides of out and lse: as given, or if all are 0 those of dense arrays. */
TQ_API tq_row_strides tq_strides_of_out(const tq_plan *plan, const tq_attend_params *params);
TQ_API tq_row_strides tq_strides_of_lse(const tq_attend_params *params);

TQ_API tq_status tq_check_dequantize_sizes(const tq_plan *plan, const tq_layer *layer, int32_t max_tokens,
                                           tq_error *error);
TQ_API tq_status tq_check_dequantize(const tq_plan *plan, const tq_layer *layer, int32_t max_tokens, const float *k,
                                     const float *v, tq_error *error);

TQ_API tq_status tq_check_recode(const tq_plan *plan, const tq_plan *target, const uint8_t *pages, int64_t n_pages,
                                 int32_t kv_heads, const uint8_t *out, tq_error *error);

TQ_API tq_status tq_check_merge(const float *outs, const float *lses, int32_t parts, int64_t rows, int32_t head_dim,
                                const float *out, const float *lse, tq_error *error);

#if defined(__cplusplus)
}
#endif
#endif
