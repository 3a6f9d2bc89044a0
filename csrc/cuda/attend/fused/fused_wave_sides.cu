/* The kernels of attend_fused for plans with a wave or a metric that look the width of keys and that of values up (BY_SIDE). */
#include "cuda/attend/fused/fused.cuh"

namespace tq
{

KernelChoice fused_wave_side_kernels(int row, int blocks, int tiles)
{
    return compiled_here<MakeFused, fused_wave_side_kernels>(row, blocks, tiles);
}

} // namespace tq
