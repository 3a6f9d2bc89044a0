/* CHUNK: attention of many query tokens to packed tokens that all of them see, on compute capability 9.0. */
#ifndef TQ_CUDA_ATTEND_CHUNK_CHUNK_H
#define TQ_CUDA_ATTEND_CHUNK_CHUNK_H
#include "cuda/device/host.h"

namespace tq
{

/** Whether CHUNK takes a plan: it is plain, has groups of 32 channels at 1 to 5 bits, pages of 128 tokens, a head_dim
 *  of 33 to 128, and no dense rotation. */
bool chunk_takes(const tq_plan &plan);
/** Whether CHUNK takes a call, if its sizes allow: chunk_takes the plan, the dtype is fp16 or bf16, and the call is not
 *  causal and has no sliding window, starts, ends or exact tokens. */
bool chunk_is_for(const tq_plan &plan, const tq_attend_params &params);
/** Whether chunk_is_for holds and the sizes fit: counts 32 bits, and the rows of a wave MOST_WAVE_BYTES. */
bool chunk_can_attend(const tq_plan &plan, const tq_attend_params &params);

/** Queues the attention of `params`, for which chunk_can_attend must hold. A page is decoded once for up to 128 rows,
 *  to fp16 in shared memory. Launch shapes depend on the sizes in params alone.
 *  Accuracy: an output row is within 4e-3 (with a wave 1e-2) of float64 over the same bytes, relative to its norm, plus
 *  the rounding of `out`. chunk_workspace_bytes also suffice for all smaller params for which chunk_is_for holds. */
tq_status chunk_workspace_bytes(const tq_plan &plan, const tq_attend_params &params, size_t *bytes, tq_error *error);
tq_status attend_chunk(const tq_plan &plan, const tq_attend_params &params, void *workspace, size_t workspace_bytes,
                       void *stream, tq_error *error);

} // namespace tq
#endif
