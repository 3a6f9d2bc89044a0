/* CHUNK: attention of many query tokens to packed tokens that all of them see, on compute capability 9.0. */
#ifndef TQ_CUDA_ATTEND_CHUNK_CHUNK_H
#define TQ_CUDA_ATTEND_CHUNK_CHUNK_H
#include "cuda/device/host.h"

namespace tq
{

/** Plain plans with groups of 32 channels of 1 to 5 bits, pages of 128 tokens, a head_dim of 33 to 128, without a dense rotation. */
bool chunk_takes(const tq_plan &plan);
/** Whether a call is for these kernels but for its sizes: such a plan, not causal, without a sliding window, starts, ends and exact tokens,
 *  fp16 or bf16. */
bool chunk_is_for(const tq_plan &plan, const tq_attend_params &params);
/** The same with sizes: counts fit 32 bits, and rows of a wave MOST_WAVE_BYTES. */
bool chunk_can_attend(const tq_plan &plan, const tq_attend_params &params);

/** The attention of `params`, for which chunk_can_attend holds. A page is decoded once for up to 128 rows, in shared memory, as fp16. Launch
 *  shapes depend on sizes in params alone.
 *  Accuracy: an output row is within 4e-3 of float64 over the same bytes (1e-2 with a wave), relative to its norm, and the rounding of
 *  `out`. chunk_workspace_bytes are also at least those of any smaller params that chunk_is_for. */
tq_status chunk_workspace_bytes(const tq_plan &plan, const tq_attend_params &params, size_t *bytes, tq_error *error);
tq_status attend_chunk(const tq_plan &plan, const tq_attend_params &params, void *workspace, size_t workspace_bytes,
                       void *stream, tq_error *error);

} // namespace tq
#endif
