/* Attention kernels for 4-bit keys and values. */
#include "attend_variants.cuh"

namespace tq
{

KernelChoice attend_kernel_4(int groups, int blocks, int tiles, bool bulk)
{
    return uniform_kernel<4>(groups, blocks, tiles, bulk);
}

} // namespace tq
