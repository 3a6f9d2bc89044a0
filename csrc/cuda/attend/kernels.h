/* The kernels as the host sees them: those of KERNELS (choose/table.h), and those that run before and after them. */
#ifndef TQ_CUDA_ATTEND_KERNELS_H
#define TQ_CUDA_ATTEND_KERNELS_H
#include <cuda_runtime.h>

#include "cuda/attend/choose/table.h"

namespace tq
{

/** The kernels of every SHARDS-th row of KERNELS, from row SHARD on (instances.cu). */
constexpr int SHARDS = 8;
template <int SHARD> struct Shard {
    static KernelChoice kernel(int row, int row_quads, int tiles);
};

constexpr int END_THREADS = 512; /* the most threads of a block of prepare or combine */

struct EndKernels {
    void (*prepare)(AttendArgs), (*combine)(AttendArgs);
};
EndKernels attend_end_kernels(int groups);

/** merge_parts: merges the parts of attend_fused's blocks if these form no cluster. One block of `threads` per row. */
struct MergeKernel {
    void (*kernel)(AttendArgs);
    int threads;
};
MergeKernel attend_merge_parts();

/** Finds AttendArgs.absent_record on the current device. TQ_E_UNSUPPORTED if the plan's records are longer. */
tq_status find_absent_record(const DeviceFacts &device, const tq_plan &plan, const uint8_t **at, tq_error *error);

/** Queues the kernel that writes a schedule. args: from cut_split. Other kernels have schedule_teams 0: then it writes
 *  a schedule that no call uses, so that an earlier step's is not used either. */
tq_status write_schedule(const AttendArgs &args, int32_t *schedule, cudaStream_t stream, tq_error *error);

/** The same for FUSED. args: from cut_fused, with fused.ragged. */
tq_status write_shares(const AttendArgs &args, int32_t *schedule, cudaStream_t stream, tq_error *error);

} // namespace tq
#endif
