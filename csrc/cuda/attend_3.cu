/* Attention kernels for 3-bit keys and values. */
#include "attend_variants.cuh"

namespace tq
{

KernelChoice attend_kernel_3(int groups, int blocks, int tiles, bool bulk)
{
    return uniform_kernel<3>(groups, blocks, tiles, bulk);
}

} // namespace tq
