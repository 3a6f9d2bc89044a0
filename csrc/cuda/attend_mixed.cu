/* Attention kernels for plans of any widths. */
#include "attend_variants.cuh"

namespace tq
{

KernelChoice attend_kernel_mixed(int groups, int blocks, int tiles, bool bulk)
{
    if (groups > 4)
        return bulk ? choice_of_shape<0, 8, true>(blocks, tiles) : choice_of_shape<0, 8, false>(blocks, tiles);
    return bulk ? choice_of_shape<0, 4, true>(blocks, tiles) : choice_of_shape<0, 4, false>(blocks, tiles);
}

} // namespace tq
