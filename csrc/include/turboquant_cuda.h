/* TurboQuant: the CUDA launchers, a C ABI. Same plan, same params, same bytes and same numbers as turboquant.h, on the
 * device.
 *
 * Rules that hold for every function here:
 *   - `plan` and `params` are structs in host memory, copied before the call returns. Every data pointer inside params
 *     (q, pages, lengths, block_table, starts, transforms, out, ..) and every data pointer argument is to memory of the
 *     current device.
 *   - `stream` is a cudaStream_t of the current device (NULL: the default stream). A call queues its kernels on it and
 *     returns: no synchronisation, no allocation, no read of device memory by the host. It can be captured in a CUDA
 *     graph, and a replay sees whatever lengths, starts, block_table and other contents the arrays hold then.
 *   - The host cannot see the arrays. Contents that are an error in turboquant.h are made harmless instead. A length is
 *     clamped to 0..capacity, a start to 0..length, an end below 0 to 0, channels of pairs to 0..head_dim-1, and
 *     query_start_loc to an ascending sequence in 0..total_tokens with at most query_tokens of each. A row of sinks or
 *     tails that does not exist counts as -1: absent. For a page index outside 0..n_pages-1 no page is read: its tokens
 *     weigh nothing (attend) or decode to 0 (dequantize), and append drops what it would write there. No contents can
 *     make a kernel read outside the named arrays or write outside its outputs.
 *   - Results are the same from run to run on one device; they do not depend on other streams.
 *   - Errors: TQ_E_VALUE and TQ_E_TYPE for what the host can see, as in turboquant.h; TQ_E_UNSUPPORTED for a device
 *     below compute capability 8.0 or for a TURBOQUANT_CUDA_PATH the device cannot run; TQ_E_CUDA when the runtime
 *     fails (`got` is its cudaError_t). After an error nothing was queued.
 *   - Positions are 32-bit: append and attend refuse sinks + window + max_pages * page_tokens of 2^30 and more.
 *   - `threads` of params is ignored.
 *
 * Workspaces: bytes from the matching _workspace_bytes, 256-byte aligned, on the device, of any contents. One workspace
 * may serve calls of any shape and kind that it is large enough for, one after another (one stream, or streams ordered
 * by events).
 */
#ifndef TURBOQUANT_CUDA_H
#define TURBOQUANT_CUDA_H
#include "turboquant.h"

/* The most channels of a head; TQ_E_UNSUPPORTED for more. */
#define TQ_CUDA_MAX_HEAD_DIM 512
#define TQ_CUDA_MAX_BASELINE_DIM 256 /* of a plan that is not plain */

#if defined(__cplusplus)
extern "C" {
#endif

#define TQ_CUDA_KERNEL_NAME_BYTES 64
#define TQ_CUDA_CALL_WORDS 1024 /* of 64 bits, in a tq_cuda_attend_call */

/** Writes the name of the kernel that tq_cuda_attend, or tq_cuda_append, runs for a plan and sizes, e.g.
 *  "attend_fused_3bit_d128_4x64": strategy, width, largest head_dim, rows at once x tokens of a unit. It is "" if there
 *  is nothing to do. csrc/cuda/README.md lists the names. Helper kernels (prepare, combine, merge_parts, copy_exact)
 *  have no name here.
 *  params   as for the call. Of pointers it uses the alignment of k, v, window_k and window_v (append) and whether
 *           steps and query_start_loc are NULL. Nothing is queued.
 *  gpu      NULL: the current device. Otherwise a GPU that csrc/cuda/attend/choose/gpus.h lists, such as "h100", with
 *           kernels compiled for it. The call then needs no device and does not read TURBOQUANT_CUDA_PATH. Names for
 *           appending do not depend on the GPU: if it has too little shared memory for append_prefill, append_general
 *           runs, but the name is append_prefill.
 *  name     TQ_CUDA_KERNEL_NAME_BYTES bytes, written, with a final 0
 *  The environment variable TURBOQUANT_CUDA_PATH, read at each call, forces how pages of plain plans are loaded: hopper
 *  (bulk copies, compute capability 9.x), hopper-line (the same, but never fused), hopper-N (the same, but way N of
 *  those that csrc/cuda/attend/choose compares, counted from 0; TQ_E_UNSUPPORTED if a call has fewer), hopper-chunk
 *  (the same, but pages are decoded once for all queries in all calls for which there is such a kernel) or portable
 *  (cp.async, 8.0 and newer). Without it, hopper on 9.x, if the kernels were compiled for that, and portable
 *  elsewhere. */
TQ_API tq_status tq_cuda_attend_kernel(const tq_plan *plan, const tq_attend_params *params, const char *gpu, char *name,
                                       tq_error *error);
TQ_API tq_status tq_cuda_append_kernel(const tq_plan *plan, const tq_append_params *params, char *name,
                                       tq_error *error);

/** tq_attend on the device.
 *  Accuracy:  within 1e-3 of float64 over the same bytes for 16-bit dtypes and 4e-4 for float32, relative to the
 *             largest output, while softmax_scale |q| |k| of query and key, transformed, is at most sqrt(head_dim).
 *             Above that the error grows in proportion, because the transformed query is rounded: its largest number
 *             times the step of its codes gets 16 bits, smaller ones get fewer. It is up to half as much again for keys
 *             with groups of different widths in the codebook UNIFORM, whose steps differ up to 15 times. A soft-cap
 *             adds 2e-7 of the cap. On 9.x, for many 16-bit query rows a KV head (attend/loop/team.cuh), weights are
 *             rounded to fp16; values keep their levels. On 9.x, where pages are decoded once for more than 32 rows
 *             (attend/chunk/chunk.h): within 4e-3 of a row's norm, with a wave 1e-2.
 *             Plans that are not plain: float32 throughout, within 2e-5.
 *  Cost:      launch shapes depend on the sizes in params alone; the work follows the lengths found on the device. In
 *             general three kernels overlap, and the work is cut into equal pieces whatever the lengths are. On 9.x one
 *             fused kernel may run instead: every (sequence, KV head) gets equally many thread blocks, and a second
 *             kernel merges if few heads have long caches. It needs a plain plan with tiles of 32 and no dense
 *             rotation, head_dim up to 128, and at most 16 query rows a KV head (128 rows with head_dim 97..128).
 *             With head_dim 97..128, up to 8 rows and up to 1,024 sequences there are fused kernels for lengths that
 *             differ: each (sequence, KV head) gets as many blocks as its length needs, by tq_cuda_schedule or, in a
 *             call without a schedule, by one more small kernel. Costs of all these, measured on an H200, decide
 *             (attend/choose/cost.h). They assume sequences as long as max_pages allows: where all are shorter,
 *             another kernel may be faster.
 *  Moments:   with amplitudes of norm 1,000 and softmax_scale * |q| = 1, the wave's part of a logit is within 1e-3 of
 *             float64, at any position (attend/rows/wave.cuh).
 *  Alignment: q, out, sinks, window and fresh tokens to four of their numbers (8 or 16 bytes), their strides to
 *             multiples of 4; moments to 16 bytes.
 *  Ragged batches and exact tokens by index run the same kernels, chosen for query_tokens queries of every sequence.
 *             Sequences with fewer leave rows of a thread block unused. The batched form has the same results, bit for
 *             bit, under the same schedule. */
typedef struct {
    int64_t opaque[TQ_CUDA_CALL_WORDS];
} tq_cuda_attend_call;

/** Checks a call, chooses its kernel and cuts its work, once; queues nothing. call may be copied, and run any number of
 *  times on the same device while its arrays exist. workspace_bytes: what the call needs. */
TQ_API tq_status tq_cuda_attend_prepare(const tq_plan *plan, const tq_attend_params *params, tq_cuda_attend_call *call,
                                        size_t *workspace_bytes, tq_error *error);
/** tq_attend_workspace_bound on the current device. */
TQ_API tq_status tq_cuda_attend_workspace_bound(const tq_plan *plan, const tq_attend_params *params, size_t *bytes,
                                                tq_error *error);
/** Queues the call. workspace: 256-byte aligned; its contents are lost. */
TQ_API tq_status tq_cuda_attend(const tq_cuda_attend_call *call, void *workspace, size_t workspace_bytes, void *stream,
                                tq_error *error);

/** Cuts a batch into work for tq_cuda_attend, on the device, from the lengths at that point of the stream. It waits for
 *  nothing, so that a CUDA graph can hold it. One schedule serves all layers of a step with the same sizes in params
 *  and the same plan. A call that differs in these cuts its work itself (fused kernels: slowly, with one block for each
 *  sequence and KV head). Results with and without a schedule are equal, bit for bit. A call with a schedule uses
 *  lengths and starts as they were when it was made. What the other arrays below hold must not change in between, or
 *  results are of no use.
 *  params    as for tq_cuda_attend with TQ_SCHEDULE_LINE. Of pointers only lengths, starts, ends, query_start_loc,
 *            sink_rows and tail_rows are read. A call that differs in which of them are NULL cuts its work itself.
 *  schedule  [rows, 4] int32 on the device, 16-byte aligned, written. rows: see TQ_SCHEDULE_ROWS. */
TQ_API tq_status tq_cuda_schedule(const tq_plan *plan, const tq_attend_params *params, int32_t *schedule, int64_t rows,
                                  void *stream, tq_error *error);

/** tq_append on the device. Pages get the same bytes as on the host, except where plans have a tolerance
 *  (docs/rounding.md), and for keys with a wave or a metric (turboquant.h).
 *  flag   int64 on the device, or NULL. When a number of k or v is not finite or exceeds TQ_MAX_INPUT and *flag is 0,
 *         it becomes 1 + position + (sequence << 32) + (1 << 62 if it is in v); it is sticky: only the caller sets it
 *         back to 0.
 *         A number that is not finite is stored as 0, a larger one as +-TQ_MAX_INPUT; other tokens are not affected. */
TQ_API tq_status tq_cuda_append(const tq_plan *plan, const tq_append_params *params, int64_t *flag, void *stream,
                                tq_error *error);

/** tq_rotate on the device, for rows of `dtype`: x, y [rows, head_dim] dense, computed in float32 and rounded once on
 *  the way out. matrix float32 [head_dim, head_dim] or NULL: the plan's Hadamard (or none). x and y may be the same
 *  array. */
TQ_API tq_status tq_cuda_rotate(const tq_plan *plan, const float *matrix, int inverse, tq_dtype dtype, const void *x,
                                void *y, int64_t rows, void *stream, tq_error *error);

/** tq_dequantize on the device, to k and v of `dtype`. lengths above max_tokens count as max_tokens.
 *  Accuracy   float32: as on the host. fp16 and bf16 of plain plans with groups of 32 channels and a head_dim that is a
 *             multiple of 16: values within 1e-3 of a row's norm; A (k - c_p), keys less the wave and after the metric,
 *             within 2e-3 of its norm; plus the rounding to `dtype`. Other plans: float32, rounded.
 *  k, v       16-byte aligned if the workspace has bytes.
 *  workspace  256-byte aligned, on the device; contents lost. */
TQ_API tq_status tq_cuda_dequantize_workspace_bytes(const tq_plan *plan, int32_t kv_heads, tq_dtype dtype,
                                                    size_t *bytes, tq_error *error);
TQ_API tq_status tq_cuda_dequantize(const tq_plan *plan, const tq_layer *layer, int32_t max_tokens, tq_dtype dtype,
                                    void *k, void *v, void *workspace, size_t workspace_bytes, void *stream,
                                    tq_error *error);

/** tq_recode on the device: the same bytes. */
TQ_API tq_status tq_cuda_recode(const tq_plan *plan, const tq_plan *target, const uint8_t *pages, int64_t n_pages,
                                int32_t kv_heads, uint8_t *out, void *stream, tq_error *error);

/** tq_merge on the device. */
TQ_API tq_status tq_cuda_merge(const float *outs, const float *lses, int32_t parts, int64_t rows, int32_t head_dim,
                               float *out, float *lse, void *stream, tq_error *error);

#if defined(__cplusplus)
}
#endif
#endif
