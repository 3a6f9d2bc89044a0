/* Instantiates attention kernels; included by the translation units of attend_launch.cuh alone. */
#ifndef TQ_CUDA_ATTEND_VARIANTS_CUH
#define TQ_CUDA_ATTEND_VARIANTS_CUH
#include "attend_kernel.cuh"
#include "attend_launch.cuh"

namespace tq
{

template <class V> KernelChoice choice()
{
    return {attend_kernel<V>, V::KEY_BITS,     V::BLOCKS,           V::TILES,
            V::MAX_THREADS,   V::TWO_PRODUCTS, WarpSpace<V>::BYTES, 0};
}

template <int BITS, int GROUPS, int BLOCKS, bool BULK> KernelChoice choice_of_tiles(int tiles)
{
    if constexpr (takes_whole_pages(BITS, GROUPS))
        if (tiles == 4) return choice<Variant<BITS, BITS, GROUPS, BLOCKS, 4, BULK>>();
    return choice<Variant<BITS, BITS, GROUPS, BLOCKS, 2, BULK>>();
}

template <int BITS, int GROUPS, bool BULK> KernelChoice choice_of_shape(int blocks, int tiles)
{
    if (blocks == 1) return choice_of_tiles<BITS, GROUPS, 1, BULK>(tiles);
    if (blocks == 2) return choice_of_tiles<BITS, GROUPS, 2, BULK>(tiles);
    if constexpr (GROUPS <= 4 && BITS != 2) return choice_of_tiles<BITS, GROUPS, 4, BULK>(tiles);
    else return {};
}

/** head_dim 64, 80, 96, 128, 256 with bulk copies, 128 without. */
template <int BITS> KernelChoice uniform_kernel(int groups, int blocks, int tiles, bool bulk)
{
    if (!bulk) return groups == 4 ? choice_of_shape<BITS, 4, false>(blocks, tiles) : KernelChoice{};
    switch (groups) {
    case 2: return choice_of_shape<BITS, 2, true>(blocks, tiles);
    case 3: return choice_of_shape<BITS, 3, true>(blocks, tiles);
    case 4: return choice_of_shape<BITS, 4, true>(blocks, tiles);
    case 8: return choice_of_shape<BITS, 8, true>(blocks, tiles);
    }
    return {};
}

/** Tiles of 16: at most eight rows a warp. Without bulk copies half pages alone: one kernel less for each architecture. */
template <int GROUPS, bool BULK> KernelChoice fine_kernel(int blocks, int tiles)
{
    if constexpr (BULK)
        if (tiles == 4)
            return blocks == 1 ? choice<Variant<0, 0, GROUPS, 1, 4, BULK, true>>()
                               : choice<Variant<0, 0, GROUPS, 2, 4, BULK, true>>();
    return blocks == 1 ? choice<Variant<0, 0, GROUPS, 1, 2, BULK, true>>()
                       : choice<Variant<0, 0, GROUPS, 2, 2, BULK, true>>();
}

} // namespace tq
#endif
