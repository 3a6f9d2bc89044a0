/* Attention kernels for 2-bit keys and values. */
#include "cuda/attend/split/variants.cuh"

namespace tq
{

KernelChoice split_2_kernels(int row, int blocks, int tiles)
{
    return compiled_here<Split, split_2_kernels>(row, blocks, tiles);
}

} // namespace tq
