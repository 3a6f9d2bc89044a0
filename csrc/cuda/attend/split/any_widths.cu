/* Kernels on pages for plans of any widths. */
#include "cuda/attend/split/kernel.cuh"

namespace tq
{

KernelChoice split_any_kernels(int row, int blocks, int tiles)
{
    return compiled_here<MakeSplit, split_any_kernels>(row, blocks, tiles);
}

} // namespace tq
