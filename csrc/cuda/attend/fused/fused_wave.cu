/* Those of attend_fused's kernels that take plans with a wave or a metric. */
#include "cuda/attend/dispatch.h"
#include "cuda/attend/fused/fused.cuh"

namespace tq
{
namespace
{

struct Make {
    template <Strategy, class V, int REGISTERS> static void (*kernel())(AttendArgs)
    {
        return attend_fused_kernel<V, REGISTERS>;
    }
};

} // namespace

KernelChoice fused_wave_kernels(int row, int blocks, int tiles)
{
    return compiled_here<Make, fused_wave_kernels>(row, blocks, tiles);
}

} // namespace tq
