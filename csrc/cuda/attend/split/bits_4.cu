/* Attention kernels for 4-bit keys and values. */
#include "cuda/attend/split/variants.cuh"

namespace tq
{

KernelChoice split_4_kernels(int row, int blocks, int tiles)
{
    return compiled_here<Split, split_4_kernels>(row, blocks, tiles);
}

} // namespace tq
