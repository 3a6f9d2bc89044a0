/* What runs on the device, for the host: the kernels of KERNELS (choose/table.h), and those beside them. */
#ifndef TQ_CUDA_ATTEND_KERNELS_H
#define TQ_CUDA_ATTEND_KERNELS_H
#include <cuda_runtime.h>

#include "cuda/attend/choose/table.h"

namespace tq
{

/** The kernels of every SHARDS-th row of KERNELS from row SHARD on: instances.cu. */
constexpr int SHARDS = 8;
template <int SHARD> struct Shard {
    static KernelChoice kernel(int row, int row_quads, int tiles);
};

constexpr int END_THREADS = 512; /* of a block of prepare or combine at most */

struct EndKernels {
    void (*prepare)(AttendArgs), (*combine)(AttendArgs);
};
EndKernels attend_end_kernels(int groups);

/** Adds up the parts of attend_fused's blocks if they are not clusters: a block of `threads` per row. */
struct MergeKernel {
    void (*kernel)(AttendArgs);
    int threads;
};
MergeKernel attend_merge_parts();

/** AttendArgs.absent_record for the current device and plain plans of records of at most its length. */
tq_status find_absent_record(const DeviceFacts &device, const tq_plan &plan, const uint8_t **at, tq_error *error);

/** Queues the kernel that writes a schedule. args: from cut_split. For other kernels schedule_teams is 0: then the
 *  schedule is written so that no call uses it, not even an earlier step's. */
tq_status write_schedule(const AttendArgs &args, int32_t *schedule, cudaStream_t stream, tq_error *error);

/** The same for FUSED. args: from cut_fused, `ragged`. */
tq_status write_shares(const AttendArgs &args, int32_t *schedule, cudaStream_t stream, tq_error *error);

} // namespace tq
#endif
