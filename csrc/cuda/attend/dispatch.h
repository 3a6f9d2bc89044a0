/* The table of all attention kernels, and what the choice between them reads. dispatch.cu chooses. Nothing here needs CUDA. */
#ifndef TQ_CUDA_ATTEND_DISPATCH_H
#define TQ_CUDA_ATTEND_DISPATCH_H
#include <type_traits>
#include <utility>

#include "core/plan_kind.h"
#include "cuda/attend/variant.h"

namespace tq
{

/* ---- kernels ---- */

enum class Strategy {
    SPLIT,     /* prepare, pages, combine: all pages of all sequences in one line, cut into equal pieces (split/) */
    MANY_ROWS, /* the same, where four warps share a page and unpack it once for 16 or 32 rows (many_rows/) */
    FUSED,     /* one kernel; every (sequence, KV head) has equally many thread blocks (fused/) */
    FUSED_MANY_ROWS, /* the same with the loop of MANY_ROWS (many_rows/) */
};
constexpr bool has_many_rows(Strategy s) { return s == Strategy::MANY_ROWS || s == Strategy::FUSED_MANY_ROWS; }
constexpr bool is_fused(Strategy s) { return s == Strategy::FUSED || s == Strategy::FUSED_MANY_ROWS; }

/** A compiled kernel. */
struct KernelChoice {
    void (*kernel)(AttendArgs); /* NULL: there is none */
    int bits;                   /* the width of all groups; or BY_SIDE, or BY_GROUP */
    int blocks;                 /* of four rows a warp; 0 with many rows */
    int tiles;                  /* token tiles of a unit: 2 (half a page) or 4 (a page) */
    int run; /* neighbouring units that a warp has one after the other: 1, or 2 for the halves of a page */
    int max_threads;
    bool two_products;
    bool exact_last, fewer_exact; /* fused: of its Variant */
    int own_bytes;                /* shared memory beside the stages: of a warp, with many rows of a team */
    int team_rows;                /* with many rows: rows of a team; 0 otherwise */
    int row;                      /* of KERNELS */
    int rows;                     /* that it takes at once */
};

/** The kernel of a row of KERNELS for 4 * blocks rows and units of so many tiles. One function for each file that compiles some. */
using Kernels = KernelChoice (*)(int row, int blocks, int tiles);
KernelChoice split_kernels(int row, int blocks, int tiles);
KernelChoice split_any_kernels(int row, int blocks, int tiles);
KernelChoice fused_kernels(int row, int blocks, int tiles);
KernelChoice fused_wave_kernels(int row, int blocks, int tiles);
KernelChoice fused_wave_side_kernels(int row, int blocks, int tiles);
KernelChoice many_rows_kernels(int row, int blocks, int tiles);

constexpr unsigned R4 = 1, R8 = 2, R16 = 4, R32 = 8; /* sets of numbers of rows, in units of four */

/** Kernels that differ only in the rows they take at once and in the size of their units. */
struct KernelRow {
    Strategy strategy;
    bool hopper;                      /* bulk copies (TMA), for 9.x; otherwise cp.async, for 8.0 and newer */
    int width;                        /* of all groups of keys and values; or BY_SIDE, or BY_GROUP: any widths */
    bool tile_16;                     /* tiles of 16 channels, of any widths */
    int first_groups, last_groups;    /* head_dim / 32, rounded up; code is for the last */
    unsigned half_pages, whole_pages; /* numbers of rows with such units */
    Kernels kernels;
    bool wave =
        false; /* fused: for plans with a wave or a metric, and only for those. The others take plans with and without */
};

/** All attention kernels of plain plans. Adding one, or taking one away, is a change here alone: the files below compile what is listed.
 *  Of the rows of a strategy that take a plan, the first is chosen: those of one width, then BY_SIDE, then BY_GROUP.
 *  No two rows are for one case (tests/test_dispatch.py). Several warps share the query rows that one kernel cannot take at once.
 *  README.md says why a kernel is here. */
constexpr KernelRow KERNELS[] = {
    /* strategy     hopper width tile_16 groups  half pages  whole pages */
    {Strategy::SPLIT, true, 2, false, 2, 2, 0, R4 | R8, split_kernels},
    {Strategy::SPLIT, true, 3, false, 2, 2, 0, R4 | R16, split_kernels},
    {Strategy::SPLIT, true, 4, false, 2, 2, 0, R4 | R16, split_kernels},
    {Strategy::SPLIT, true, 2, false, 4, 4, 0, R4 | R8, split_kernels},
    {Strategy::SPLIT, true, 3, false, 4, 4, 0, R4 | R8, split_kernels},
    {Strategy::SPLIT, true, 4, false, 4, 4, R4 | R8, 0, split_kernels},
    {Strategy::SPLIT, true, 2, false, 8, 8, R4 | R8, 0, split_kernels},
    {Strategy::SPLIT, true, 3, false, 8, 8, R4 | R8, 0, split_kernels},
    {Strategy::SPLIT, true, 4, false, 8, 8, R4 | R8, 0, split_kernels},
    {Strategy::SPLIT, true, BY_GROUP, false, 1, 4, R4, R4 | R8 | R16, split_any_kernels},
    {Strategy::SPLIT, true, BY_GROUP, false, 5, 8, R4 | R8, 0, split_any_kernels},
    {Strategy::SPLIT, true, BY_GROUP, true, 1, 8, R4 | R8, 0, split_any_kernels},
    {Strategy::SPLIT, false, 2, false, 4, 4, R4, 0, split_kernels},
    {Strategy::SPLIT, false, 3, false, 4, 4, R4, 0, split_kernels},
    {Strategy::SPLIT, false, 4, false, 4, 4, R4, 0, split_kernels},
    {Strategy::SPLIT, false, BY_GROUP, false, 1, 4, R4 | R8, 0, split_any_kernels},
    {Strategy::SPLIT, false, BY_GROUP, false, 5, 8, R4 | R8, 0, split_any_kernels},
    {Strategy::SPLIT, false, BY_GROUP, true, 1, 8, R4 | R8, 0, split_any_kernels},
    {Strategy::FUSED, true, 2, false, 2, 2, 0, R4, fused_kernels},
    {Strategy::FUSED, true, 3, false, 2, 2, 0, R4, fused_kernels},
    {Strategy::FUSED, true, 4, false, 2, 2, R4, 0, fused_kernels},
    {Strategy::FUSED, true, 2, false, 4, 4, R4, R4 | R8, fused_kernels},
    {Strategy::FUSED, true, 3, false, 4, 4, R4, R8, fused_kernels},
    {Strategy::FUSED, true, 4, false, 4, 4, R4 | R8, 0, fused_kernels},
    {Strategy::FUSED, true, BY_GROUP, false, 1, 4, R4 | R8, R4 | R8 | R16, fused_kernels},
    /* Waves have kernels of their own here: with their code in every FUSED kernel, plans without a wave took 11 to 23 % longer at 8,192 tokens
     * of batch 1. */
    {Strategy::FUSED, true, 2, false, 2, 2, 0, R4, fused_wave_kernels, true},
    {Strategy::FUSED, true, 3, false, 2, 2, 0, R4, fused_wave_kernels, true},
    {Strategy::FUSED, true, 4, false, 2, 2, 0, R4, fused_wave_kernels, true},
    {Strategy::FUSED, true, 2, false, 4, 4, R4, R4 | R8, fused_wave_kernels, true},
    {Strategy::FUSED, true, 3, false, 4, 4, R4 | R8, R4, fused_wave_kernels, true},
    {Strategy::FUSED, true, 4, false, 4, 4, R4 | R8, R4, fused_wave_kernels, true},
    {Strategy::FUSED, true, BY_SIDE, false, 2, 2, 0, R4, fused_wave_side_kernels, true},
    {Strategy::FUSED, true, BY_SIDE, false, 4, 4, R4 | R8, R4, fused_wave_side_kernels, true},
    {Strategy::FUSED, true, BY_GROUP, false, 1, 4, R4 | R8, 0, fused_wave_kernels, true},
    {Strategy::MANY_ROWS, true, 2, false, 4, 4, 0, R16 | R32, many_rows_kernels},
    {Strategy::MANY_ROWS, true, 3, false, 4, 4, 0, R16 | R32, many_rows_kernels},
    {Strategy::MANY_ROWS, true, 4, false, 4, 4, 0, R16 | R32, many_rows_kernels},
    {Strategy::MANY_ROWS, true, BY_GROUP, false, 4, 4, 0, R32, many_rows_kernels},
    {Strategy::FUSED_MANY_ROWS, true, 2, false, 4, 4, 0, R16 | R32, many_rows_kernels},
    {Strategy::FUSED_MANY_ROWS, true, 3, false, 4, 4, 0, R16 | R32, many_rows_kernels},
    {Strategy::FUSED_MANY_ROWS, true, 4, false, 4, 4, 0, R16 | R32, many_rows_kernels},
    {Strategy::FUSED_MANY_ROWS, true, BY_GROUP, false, 4, 4, 0, R16 | R32, many_rows_kernels},
    {Strategy::FUSED_MANY_ROWS, true, BY_GROUP, false, 4, 4, 0, R16, many_rows_kernels, true}, /* 32 lack the memory */
};
constexpr int KERNEL_ROWS = sizeof KERNELS / sizeof *KERNELS;

/* ---- what the choice reads ---- */

/** Numbers that decide, as measured on one kind of GPU. A half page is 64 tokens of one (sequence, KV head); a warp's half pages are those
 *  that it has one after the other. */
struct Rules {
    const char *gpu;
    /* SPLIT */
    int whole_from; /* pages a multiprocessor from which units are whole pages */
    /* FUSED */
    int clusters_of_11;  /* multiprocessors of 11 that are in clusters of four or eight */
    int busy_warps;      /* of a block, where warps have many units; 16 took up to 5 % longer */
    int busy_of_20;      /* blocks at work, on the average, of 20 that there is room for */
    int most_8_rows;     /* half pages of a warp: 8 rows, not 4 bits, by half pages */
    int most_any_4_rows; /* any widths, several blocks a multiprocessor (two: no limit) */
    int most_any_8_rows;
    int long_wave_pages; /* pages of a warp: with more, fewer warps have exact tokens, so that there is room for more warps */
    int most_in_turns; /* half pages of a warp: with exact tokens, and more blocks than there is room for at once */
    int half_cost, merge_cost; /* what a warp takes for half a page, and what merge_parts takes; only ratios count */
    int page_cost[2];          /* for a page: head_dim up to 64, above */
    /* FUSED_MANY_ROWS */
    int most_turns;             /* blocks of a multiprocessor, one after the other */
    int most_pages_any_16_rows; /* of a team, any widths */
    int longer_32_rows
        [3]; /* pages that 32 rows are longer before and behind the loop than 16: any widths, 2 bits, 3 and 4 bits */
};

/** The current device, as far as the choice depends on it. */
struct Device : DeviceFacts {
    bool bulk, line;    /* bulk: 9.x with kernels compiled for it. line: never fused, for tests */
    int large_clusters; /* clusters of LARGE_CLUSTER blocks at work at once */
    const Rules *rules;
};

/** The rules for a device. All have those of an H200, the only one that was measured. */
const Rules &rules_of(const DeviceFacts &device);

struct Launch {
    KernelChoice kernel;
    AttendArgs args;
    int blocks, threads, shared_bytes;
    int prepare_blocks, prepare_threads, prepare_bytes, combine_blocks, combine_threads, combine_bytes;
    int64_t segments;
};

/** The kernel of a strategy for 4 * blocks rows and units of so many tiles: of the plan's own width where there are some for so many
 *  rows and its pages, otherwise one that looks widths up, by side or by group. Its `kernel` is NULL if KERNELS lists none. */
KernelChoice find_kernel(Strategy strategy, bool hopper, const tq_plan &plan, int blocks, int tiles);
/** Chooses the kernel of a plain plan, and if it is fused also cuts the work. launch: as fill_args leaves it. */
void choose_kernel(const tq_plan &plan, const Device &device, Launch *launch);

/** Writes attend_<strategy>_<width>_d<head_dim>_<rows>x<tokens of a unit>[_wave][_portable], TQ_CUDA_KERNEL_NAME_BYTES at most. */
void name_kernel(const KernelChoice &kernel, char *name);

/* ---- for the files that compile kernels ---- */

constexpr bool takes_wave(int row) { return KERNELS[row].wave || !is_fused(KERNELS[row].strategy); }

/** FUSED: whether a warp takes a page as two units: with a wave at 4 bits, and BY_SIDE. The stage is half as large, and 16 warps fit instead of
 *  12. At 4 bits that takes 8 % less time; at 3 and 2 bits it gained nothing. */
constexpr bool by_halves(int row, int blocks, int tiles)
{
    const KernelRow &r = KERNELS[row];
    return r.wave && r.strategy == Strategy::FUSED && (r.width == 4 || r.width == BY_SIDE) && r.last_groups == 4 &&
           blocks == 1 && tiles == 4;
}

/** SPLIT: whether a warp computes the wave of both halves of a page at once. */
constexpr bool wave_by_page(int row, int blocks, int tiles)
{
    const KernelRow &r = KERNELS[row];
    return r.strategy == Strategy::SPLIT && r.hopper && r.width == 4 && r.last_groups == 4 && blocks == 1 && tiles == 2;
}

template <int ROW, int BLOCKS, int TILES>
using VariantOf = std::conditional_t<
    has_many_rows(KERNELS[ROW].strategy), ManyRows<KERNELS[ROW].width, 4 * BLOCKS, takes_wave(ROW)>,
    Variant<KERNELS[ROW].width, KERNELS[ROW].last_groups, BLOCKS, by_halves(ROW, BLOCKS, TILES) ? TILES / 2 : TILES,
            KERNELS[ROW].hopper, KERNELS[ROW].tile_16, takes_wave(ROW),
            by_halves(ROW, BLOCKS, TILES) || wave_by_page(ROW, BLOCKS, TILES) ? 2 : 1>>;

template <class MAKE, int ROW, int BLOCKS, int TILES> KernelChoice compiled_kernel()
{
    constexpr KernelRow R = KERNELS[ROW];
    using V = VariantOf<ROW, BLOCKS, TILES>;
    KernelChoice k = {};
    k.kernel = MAKE::template kernel<R.strategy, V>();
    k.row = ROW, k.rows = V::ROWS, k.bits = R.width, k.tiles = V::TILES, k.run = V::RUN,
    k.two_products = V::TWO_PRODUCTS;
    k.exact_last = V::EXACT_LAST, k.fewer_exact = V::FEWER_EXACT;
    if constexpr (has_many_rows(R.strategy)) {
        k.team_rows = V::ROWS, k.max_threads = V::MAX_THREADS;
        k.own_bytes = is_fused(R.strategy) ? V::SHARING_BYTES : V::TEAM_BYTES;
    } else {
        k.blocks = BLOCKS;
        k.max_threads = is_fused(R.strategy) ? most_threads(V::FUSED_REGISTERS) : V::MAX_THREADS;
        k.own_bytes = is_fused(R.strategy) ? 0 : V::WARP_BYTES;
    }
    return k;
}

template <class MAKE, Kernels OWNER, int ROW, int BLOCKS, int TILES>
void take_kernel(int row, int blocks, int tiles, KernelChoice *found)
{
    constexpr KernelRow R = KERNELS[ROW];
    if constexpr (R.kernels == OWNER && ((TILES == 2 ? R.half_pages : R.whole_pages) & BLOCKS))
        if (row == ROW && blocks == BLOCKS && tiles == TILES) *found = compiled_kernel<MAKE, ROW, BLOCKS, TILES>();
}

template <class MAKE, Kernels OWNER, int TILES, int... ROWS>
void take_kernels(int row, int blocks, int tiles, KernelChoice *found, std::integer_sequence<int, ROWS...>)
{
    (take_kernel<MAKE, OWNER, ROWS, 1, TILES>(row, blocks, tiles, found), ...);
    (take_kernel<MAKE, OWNER, ROWS, 2, TILES>(row, blocks, tiles, found), ...);
    (take_kernel<MAKE, OWNER, ROWS, 4, TILES>(row, blocks, tiles, found), ...);
    (take_kernel<MAKE, OWNER, ROWS, 8, TILES>(row, blocks, tiles, found), ...);
}

/** Of the rows of KERNELS whose `kernels` is OWNER: compiles all kernels that they list, and returns one of them. MAKE::kernel<STRATEGY, V>()
 *  is the kernel's address. */
template <class MAKE, Kernels OWNER> KernelChoice compiled_here(int row, int blocks, int tiles)
{
    KernelChoice found = {};
    take_kernels<MAKE, OWNER, 2>(row, blocks, tiles, &found, std::make_integer_sequence<int, KERNEL_ROWS>());
    take_kernels<MAKE, OWNER, 4>(row, blocks, tiles, &found, std::make_integer_sequence<int, KERNEL_ROWS>());
    return found;
}

} // namespace tq
#endif
