/* Attention kernels for plans of any widths. */
#include "cuda/attend/split/variants.cuh"

namespace tq
{

KernelChoice split_any_kernels(int row, int blocks, int tiles)
{
    return compiled_here<Split, split_any_kernels>(row, blocks, tiles);
}

} // namespace tq
