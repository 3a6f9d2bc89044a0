/* Attention kernels for many rows: attend_many_rows and attend_fused_many_rows. */
#include "cuda/attend/dispatch.h"
#include "cuda/attend/many_rows/fused.cuh"

namespace tq
{
namespace
{

struct Make {
    template <Strategy STRATEGY, class V> static void (*kernel())(AttendArgs)
    {
        if constexpr (STRATEGY == Strategy::FUSED_MANY_ROWS) return attend_fused_many_rows_kernel<V>;
        else return attend_many_rows_kernel<V>;
    }
};

} // namespace

KernelChoice many_rows_kernels(int row, int blocks, int tiles)
{
    return compiled_here<Make, many_rows_kernels>(row, blocks, tiles);
}

} // namespace tq
