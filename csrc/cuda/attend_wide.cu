/* Attention kernels for many rows: one of three, and all in one. */
#include "attend_few_wide.cuh"
#include "attend_launch.cuh"

namespace tq
{
namespace
{

/** ONE: attend_few_wide. */
template <bool ONE, int BITS, int ROWS> KernelChoice choice()
{
    using V = Wide<BITS, BITS, ROWS>;
    if constexpr (ONE)
        return {attend_few_wide_kernel<V>, BITS, 0, V::TILES, V::MAX_THREADS, V::TWO_PRODUCTS, V::SHARING_BYTES, ROWS};
    else return {attend_wide_kernel<V>, BITS, 0, V::TILES, V::MAX_THREADS, V::TWO_PRODUCTS, V::TEAM_BYTES, ROWS};
}

template <bool ONE, int BITS> KernelChoice choice_of_rows(int rows)
{
    if constexpr (ONE || BITS != 0)
        if (rows <= 16) return choice<ONE, BITS, 16>();
    return choice<ONE, BITS, 32>();
}

template <bool ONE> KernelChoice choice_of_bits(int bits, int rows)
{
    switch (bits) {
    case 2: return choice_of_rows<ONE, 2>(rows);
    case 3: return choice_of_rows<ONE, 3>(rows);
    case 4: return choice_of_rows<ONE, 4>(rows);
    }
    return choice_of_rows<ONE, 0>(rows);
}

} // namespace

KernelChoice attend_kernel_wide(int bits, int rows) { return choice_of_bits<false>(bits, rows); }

KernelChoice attend_kernel_few_wide(int bits, int rows) { return choice_of_bits<true>(bits, rows); }

} // namespace tq
