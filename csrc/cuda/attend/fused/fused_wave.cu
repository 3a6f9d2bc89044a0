/* The kernels of attend_fused for plans with a wave or a metric. */
#include "cuda/attend/fused/fused.cuh"

namespace tq
{

KernelChoice fused_wave_kernels(int row, int blocks, int tiles)
{
    return compiled_here<MakeFused, fused_wave_kernels>(row, blocks, tiles);
}

} // namespace tq
