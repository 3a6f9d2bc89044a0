/* From rows of KERNELS to compiled kernels. */
#ifndef TQ_CUDA_ATTEND_CHOOSE_COMPILED_H
#define TQ_CUDA_ATTEND_CHOOSE_COMPILED_H
#include <type_traits>
#include <utility>

#include "cuda/attend/choose/table.h"

namespace tq
{

constexpr bool takes_wave(int row) { return KERNELS[row].wave || !is_fused(KERNELS[row].strategy); }

/** FUSED with a wave: whether a warp takes a page as two units. Its stage is then half as large, so that 16 warps fit
 *  instead of 12. So at 4 bits and BY_SIDE; at 3 and 2 bits it gains nothing (measured.md). */
constexpr bool by_halves(int row, int row_quads, int tiles)
{
    const KernelRow &r = KERNELS[row];
    return r.wave && r.strategy == Strategy::FUSED && (r.width == 4 || r.width == BY_SIDE) && r.last_groups == 4 &&
           row_quads == 1 && tiles == 4;
}

/** SPLIT: whether a warp computes the wave of both halves of a page at once. */
constexpr bool wave_by_page(int row, int row_quads, int tiles)
{
    const KernelRow &r = KERNELS[row];
    return r.strategy == Strategy::SPLIT && r.hopper && r.width == 4 && r.last_groups == 4 && row_quads == 1 &&
           tiles == 2;
}

/** FUSED: whether there is also a kernel for sequences of any lengths. Only the larger units in KERNELS have one. */
constexpr bool has_ragged(int row, int row_quads, int tiles)
{
    const KernelRow &r = KERNELS[row];
    return r.strategy == Strategy::FUSED && r.last_groups == 4 && r.width != BY_GROUP && row_quads <= 2 &&
           (tiles == 4 || !(r.rows_by_page & row_quads));
}

template <int ROW, int ROW_QUADS, int TILES>
using VariantOf = std::conditional_t<
    has_many_rows(KERNELS[ROW].strategy), ManyRows<KERNELS[ROW].width, 4 * ROW_QUADS, takes_wave(ROW)>,
    Variant<KERNELS[ROW].width, KERNELS[ROW].last_groups, ROW_QUADS,
            by_halves(ROW, ROW_QUADS, TILES) ? TILES / 2 : TILES, KERNELS[ROW].hopper, KERNELS[ROW].tile_16,
            takes_wave(ROW), by_halves(ROW, ROW_QUADS, TILES) || wave_by_page(ROW, ROW_QUADS, TILES) ? 2 : 1>>;

template <class MAKE, int ROW, int ROW_QUADS, int TILES> KernelChoice compiled_kernel()
{
    constexpr KernelRow R = KERNELS[ROW];
    using V = VariantOf<ROW, ROW_QUADS, TILES>;
    KernelChoice k = {};
    k.kernel = MAKE::template kernel<R.strategy, V>();
    if constexpr (has_ragged(ROW, ROW_QUADS, TILES)) {
        k.ragged = MAKE::template kernel<R.strategy, Ragged<V>>();
        k.ragged_threads = most_threads(Ragged<V>::FUSED_REGISTERS);
    }
    k.row = ROW, k.rows = V::ROWS, k.bits = R.width, k.tiles = V::TILES, k.run = V::RUN,
    k.two_products = V::TWO_PRODUCTS;
    if constexpr (has_many_rows(R.strategy)) {
        k.team_rows = V::ROWS, k.max_threads = V::MAX_THREADS;
        k.own_bytes = is_fused(R.strategy) ? V::SHARING_BYTES : V::TEAM_BYTES;
    } else {
        k.row_quads = ROW_QUADS;
        k.max_threads = is_fused(R.strategy) ? most_threads(V::FUSED_REGISTERS) : V::MAX_THREADS;
        k.own_bytes = is_fused(R.strategy) ? 0 : V::WARP_BYTES;
    }
    return k;
}

template <class MAKE, int ROW, int TILES, int... LOG2_QUADS>
void take_kernels(int row_quads, KernelChoice *taken, std::integer_sequence<int, LOG2_QUADS...>)
{
    constexpr unsigned LISTED = TILES == 2 ? KERNELS[ROW].rows_by_half_page : KERNELS[ROW].rows_by_page;
    auto take = [&](auto log2) {
        constexpr int ROW_QUADS = 1 << decltype(log2)::value;
        if constexpr (LISTED & ROW_QUADS)
            if (row_quads == ROW_QUADS) *taken = compiled_kernel<MAKE, ROW, ROW_QUADS, TILES>();
    };
    (take(std::integral_constant<int, LOG2_QUADS>()), ...);
}

/** Compiles the kernels of every STEP-th row of KERNELS, from FIRST on, and returns the one that the arguments name.
 *  MAKE::kernel<STRATEGY, V>() returns a kernel's address. */
template <class MAKE, int FIRST, int STEP> KernelChoice kernels_of_rows(int row, int row_quads, int tiles)
{
    KernelChoice taken = {};
    if constexpr (FIRST < KERNEL_ROWS) {
        using Sizes = std::make_integer_sequence<int, 4>;
        if (row != FIRST) return kernels_of_rows<MAKE, FIRST + STEP, STEP>(row, row_quads, tiles);
        if (tiles == 2) take_kernels<MAKE, FIRST, 2>(row_quads, &taken, Sizes());
        if (tiles == 4) take_kernels<MAKE, FIRST, 4>(row_quads, &taken, Sizes());
    }
    return taken;
}

} // namespace tq
#endif
