/* Kernels on pages for plans of one width. */
#include "cuda/attend/split/kernel.cuh"

namespace tq
{

KernelChoice split_kernels(int row, int blocks, int tiles)
{
    return compiled_here<MakeSplit, split_kernels>(row, blocks, tiles);
}

} // namespace tq
