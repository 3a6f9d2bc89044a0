/* Attention kernels for many rows. */
#include "attend_launch.cuh"
#include "attend_wide.cuh"

namespace tq
{
namespace
{

template <int BITS, int ROWS> KernelChoice choice()
{
    using V = Wide<BITS, BITS, ROWS>;
    return {attend_wide_kernel<V>, BITS, 0, V::TILES, V::MAX_THREADS, false, V::TEAM_BYTES, ROWS};
}

template <int BITS> KernelChoice choice_of_rows(int rows)
{
    return rows <= 16 ? choice<BITS, 16>() : choice<BITS, 32>();
}

} // namespace

KernelChoice attend_kernel_wide(int bits, int rows)
{
    switch (bits) {
    case 2: return choice_of_rows<2>(rows);
    case 3: return choice_of_rows<3>(rows);
    case 4: return choice_of_rows<4>(rows);
    }
    return choice<0, 32>();
}

} // namespace tq
