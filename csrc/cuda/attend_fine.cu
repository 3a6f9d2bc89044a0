/* Attention kernels for plans with tiles of 16 channels. */
#include "attend_variants.cuh"

namespace tq
{

KernelChoice attend_kernel_fine(int groups, int blocks, int tiles, bool bulk)
{
    if (groups > 4) return bulk ? fine_kernel<8, true>(blocks, tiles) : fine_kernel<8, false>(blocks, tiles);
    return bulk ? fine_kernel<4, true>(blocks, tiles) : fine_kernel<4, false>(blocks, tiles);
}

} // namespace tq
