/* Attention kernels for 2-bit keys and values. */
#include "attend_variants.cuh"

namespace tq
{

KernelChoice attend_kernel_2(int groups, int blocks, int tiles, bool bulk)
{
    return uniform_kernel<2>(groups, blocks, tiles, bulk);
}

} // namespace tq
