/* Questions about a plan, for kernels on the host and on CUDA. */
#ifndef TQ_PLAN_KIND_H
#define TQ_PLAN_KIND_H
#include "../include/turboquant.h"

/** Whether the fast kernels run a plan: both sides have the levels of a codebook, one block, no sketch, and the same
 *  rotation. Other plans have slower code (csrc/core/baselines.c, csrc/cuda/baselines/baselines.cuh). */
static inline int tq_is_plain(const tq_plan *plan) { return plan->is_plain; }
/** Whether tiles have 64 tokens x 16 channels; otherwise 32 x 32. */
static inline int tq_tile_is_16(const tq_plan *plan) { return plan->group_channels == 16; }
/** Whether all groups of a side have the same number of bits. */
static inline int tq_has_one_width(const tq_side *side) { return side->one_width; }
/** Whether keys have a wave or a metric. */
static inline int tq_has_moments(const tq_plan *plan) { return plan->wave_pairs || plan->metric; }
/** Whether rows are settled; docs/rounding.md. */
static inline int tq_is_settled(const tq_plan *plan)
{
    return plan->is_plain && plan->rotation == TQ_ROTATION_HADAMARD && plan->head_dim >= 64 &&
           (plan->head_dim & (plan->head_dim - 1)) == 0;
}
/** Returns the factors of a plan with 3, 5 or 7 tries; docs/rounding.md. */
static inline const float *tq_tries(int32_t tries)
{
    static const float three[] = TQ_TRIES_3, five[] = TQ_TRIES_5, seven[] = TQ_TRIES_7;
    return tries == 3 ? three : tries == 5 ? five : seven;
}

/** Returns the bytes from one page of a layer to the next. */
static inline int64_t tq_page_stride(const tq_plan *plan, const tq_layer *layer)
{
    return layer->page_stride ? layer->page_stride : layer->kv_heads * plan->record_bytes;
}

/** Whether exact tokens are by index, and packed indices are positions. */
static inline int tq_is_indexed(const tq_layer *layer) { return layer->sink_rows || layer->tail_rows; }
/** Return the rows of sink_k, those of window_k, and the tokens of a row of window_k. Unless exact tokens are by index,
 *  the rows are the sequences of the batch. */
static inline int32_t tq_sink_rows(const tq_layer *layer)
{
    return layer->sink_rows ? layer->n_sink_rows : layer->batch;
}
static inline int32_t tq_window_rows(const tq_layer *layer)
{
    return layer->tail_rows ? layer->n_tail_rows : layer->batch;
}
static inline int32_t tq_window_slots(const tq_layer *layer)
{
    return layer->tail_rows ? layer->tail_slots : layer->window;
}
/** Return the position of packed index 0, and how many of the last positions have no place in the pages. */
static inline int32_t tq_unpacked_sinks(const tq_layer *layer) { return tq_is_indexed(layer) ? 0 : layer->sinks; }
static inline int32_t tq_unpacked_window(const tq_layer *layer) { return tq_is_indexed(layer) ? 0 : layer->window; }
/** Returns the most tokens that a sequence may have. */
static inline int64_t tq_capacity(const tq_plan *plan, const tq_layer *layer)
{
    return (int64_t)tq_unpacked_sinks(layer) + tq_unpacked_window(layer) +
           (int64_t)layer->max_pages * plan->page_tokens;
}
#endif
