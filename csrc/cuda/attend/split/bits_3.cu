/* Attention kernels for 3-bit keys and values. */
#include "cuda/attend/split/variants.cuh"

namespace tq
{

KernelChoice split_3_kernels(int row, int blocks, int tiles)
{
    return compiled_here<Split, split_3_kernels>(row, blocks, tiles);
}

} // namespace tq
