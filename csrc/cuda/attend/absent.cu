/* The record that kernels read where an entry of a block table names no page. */
#include "cuda/attend/kernels.h"
#include "cuda/device/device.cuh"

namespace tq
{
namespace
{

/** The longest record of a plain plan: 8-bit codes and scales of a page of keys and values at head_dim 512. */
constexpr int ABSENT_BYTES = 2 * TQ_PAGE_TOKENS * (TQ_CUDA_MAX_HEAD_DIM + 2);

struct AbsentRecord {
    uint32_t words[ABSENT_BYTES / 4];
    constexpr AbsentRecord() : words()
    {
        for (uint32_t &word : words) word = NO_PAGE;
    }
};
__device__ __align__(128) const AbsentRecord absent_record;

} // namespace

tq_status find_absent_record(const DeviceFacts &device, const tq_plan &plan, const uint8_t **at, tq_error *error)
{
    static thread_local int known = -1;
    static thread_local void *found;
    if (plan.record_bytes > ABSENT_BYTES)
        return fail(error, TQ_E_UNSUPPORTED, "plan", -1, (double)plan.record_bytes, "records of 131584 bytes at most");
    if (device.id != known) {
        TQ_CUDA_TRY(check_cuda(cudaGetSymbolAddress(&found, absent_record), "cudaGetSymbolAddress", error));
        known = device.id;
    }
    *at = static_cast<const uint8_t *>(found);
    return TQ_OK;
}

} // namespace tq
