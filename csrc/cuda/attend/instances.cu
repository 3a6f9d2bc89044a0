/* All kernels that KERNELS lists. setup.py compiles this file for each SHARD, so that several compilers share them. */
#include "cuda/attend/choose/compiled.h"
#include "cuda/attend/fused/kernel.cuh"
#include "cuda/attend/kernels.h"
#include "cuda/attend/split/kernel.cuh"

namespace tq
{
namespace
{

struct Make {
    template <Strategy STRATEGY, class V> static void (*kernel())(AttendArgs)
    {
        if constexpr (STRATEGY == Strategy::SPLIT) return attend_kernel<V>;
        else if constexpr (STRATEGY == Strategy::MANY_ROWS) return attend_many_rows_kernel<V>;
        else if constexpr (STRATEGY == Strategy::FUSED) return attend_fused_kernel<V>;
        else return attend_fused_many_rows_kernel<V>;
    }
};

} // namespace

template <int SHARD> KernelChoice Shard<SHARD>::kernel(int row, int row_quads, int tiles)
{
    return kernels_of_rows<Make, SHARD, SHARDS>(row, row_quads, tiles);
}

template struct Shard<TQ_SHARD>;
static_assert(TQ_SHARDS == SHARDS);

} // namespace tq
