/* Attention kernels for plans with tiles of 16 channels. */
#include "cuda/attend/split/variants.cuh"

namespace tq
{

KernelChoice split_tile_16_kernels(int row, int blocks, int tiles)
{
    return compiled_here<Split, split_tile_16_kernels>(row, blocks, tiles);
}

} // namespace tq
