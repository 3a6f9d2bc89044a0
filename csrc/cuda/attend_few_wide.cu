/* Attention kernels for few segments of many rows. */
#include "attend_few_wide.cuh"
#include "attend_launch.cuh"

namespace tq
{
namespace
{

template <int BITS, int ROWS> KernelChoice choice()
{
    using V = Wide<BITS, BITS, ROWS>;
    return {attend_few_wide_kernel<V>, BITS, 0, V::TILES, V::MAX_THREADS, false, V::SHARING_BYTES, ROWS};
}

template <int BITS> KernelChoice choice_of_rows(int rows)
{
    return rows <= 16 ? choice<BITS, 16>() : choice<BITS, 32>();
}

} // namespace

KernelChoice attend_kernel_few_wide(int bits, int rows)
{
    switch (bits) {
    case 2: return choice_of_rows<2>(rows);
    case 3: return choice_of_rows<3>(rows);
    case 4: return choice_of_rows<4>(rows);
    }
    return choice_of_rows<0>(rows);
}

} // namespace tq
