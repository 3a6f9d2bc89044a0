/* What a call takes, by each way to run it. The choice takes the least (choose.cu). */
#ifndef TQ_CUDA_ATTEND_CHOOSE_COST_H
#define TQ_CUDA_ATTEND_CHOOSE_COST_H
#include <math.h>

#include <initializer_list>

#include "cuda/attend/choose/cut.h"

namespace tq
{

/** Microseconds on an H200 (measured.md: the choice). Every GPU uses them: only their ratios matter. "wave": more with a
 *  wave. A half page is 64 tokens of 128 channels, for the fewest rows that a kernel of the strategy takes at once. */
struct Costs {
    double start = 0, start_wave = 0, start_rows = 0; /* of a call; rows: more for each doubling of the rows at once */
    double turn = 0;                                  /* each further block that a multiprocessor runs after another */
    double warp = 0, warp_wave = 0; /* start and end of a block of one warp, for four rows; more warps share them */
    double row = 0, row_wave = 0;   /* each row of a multiprocessor, in prepare and combine */
    double merge = 0, part = 0;     /* merge_parts, and each part of a segment */
    double exact = 0, exact_tile = 0, exact_chain = 0; /* exact tokens; each tile of a multiprocessor; of a warp */
    double bits_2 = 0, bits_3 = 0, bits_4 = 0;         /* a half page of a multiprocessor, in kernels for one width */
    double any = 0, any_bit = 0;      /* in other kernels, if the bits of key and value add up to 8; each bit more */
    double six = 0, eight = 0;        /* more for 6 bits on a side, less for 8 */
    double by_side = 1;               /* times as much in kernels for one width a side */
    double wave = 0;                  /* more with a wave, in all kernels */
    double twice = 1, four_times = 1; /* times as much for two and for four times the rows */
    double whole = 1;                 /* times as much in units of whole pages */
    double any_dim = 1;               /* the share that does not depend on head_dim */
    double alone = 0, alone_any = 0, alone_wave = 0; /* a half page for one warp, which waits for it */
    double bytes = 0;                                /* millions of bytes of pages that are read in a microsecond */
};

constexpr Costs split_costs()
{
    Costs c;
    c.start = 15.5, c.start_wave = 1.9, c.start_rows = 2.37;
    c.row = .286, c.row_wave = .0524;
    c.exact = 3, c.exact_tile = .744;
    c.bits_2 = .0205, c.bits_3 = .0721, c.bits_4 = .086;
    c.any = .146, c.any_bit = .0188, c.six = .08, c.eight = .05, c.wave = .102;
    c.twice = 2.06, c.four_times = 3.14, c.any_dim = .43;
    c.bytes = 4.55;
    return c;
}

constexpr Costs many_rows_costs()
{
    Costs c;
    c.start = 17, c.start_wave = 3.4;
    c.row = .313, c.row_wave = .08;
    c.exact = 4.5, c.exact_tile = .73;
    c.bits_2 = .25, c.bits_3 = .26, c.bits_4 = .32;
    c.any = .61, c.any_bit = .031, c.six = .08, c.eight = .05, c.wave = .372;
    c.twice = 1.66;
    c.bytes = 5;
    return c;
}

constexpr Costs fused_costs()
{
    Costs c;
    c.start = 4.76, c.start_wave = .999, c.turn = 3.7, c.warp = 6.2, c.warp_wave = 4.2;
    c.merge = 1.39, c.part = .0325;
    c.exact_tile = .093, c.exact_chain = .646;
    c.bits_2 = .0753, c.bits_3 = .126, c.bits_4 = .159;
    c.any = .22, c.any_bit = .0275, c.six = .0479, c.eight = .108, c.by_side = .839, c.wave = .1;
    c.twice = 1.53, c.four_times = 1.97, c.whole = .741, c.any_dim = .464;
    c.alone = .3, c.alone_any = 1.24, c.alone_wave = .327, c.bytes = 5.5;
    return c;
}

constexpr Costs fused_many_rows_costs()
{
    Costs c;
    c.start = 6.8, c.start_wave = 3.8, c.start_rows = 3, c.turn = 8.4;
    c.merge = 2.1, c.part = .025;
    c.exact_tile = .098;
    c.bits_2 = .25, c.bits_3 = .26, c.bits_4 = .29;
    c.any = .405, c.any_bit = .02, c.six = .08, c.eight = .05, c.wave = .275;
    c.twice = 1.66;
    c.bytes = 5;
    return c;
}

/** FUSED for any lengths. */
constexpr Costs ragged_costs()
{
    Costs c;
    c.start = 9.83, c.start_wave = 3.07;
    c.row = .36, c.row_wave = .453;
    c.exact_tile = .143;
    c.bits_2 = .0503, c.bits_3 = .0608, c.bits_4 = .0783;
    c.any = .11, c.any_bit = .02, c.six = .08, c.eight = .05, c.by_side = 1.12, c.wave = .08;
    c.twice = 2.16, c.any_dim = .5;
    c.bytes = 6.7;
    return c;
}

/** CHUNK: 64 rows or twice as many. */
constexpr Costs chunk_costs()
{
    Costs c;
    c.start = 14.6, c.start_wave = 20.4;
    c.row = .257;
    c.any = .889, c.any_bit = .016, c.wave = .781;
    c.twice = 1.254, c.any_dim = .289, c.bytes = 4.5;
    return c;
}

inline Costs costs_of(const KernelChoice &kernel)
{
    if (kernel.is_ragged) return ragged_costs();
    switch (KERNELS[kernel.row].strategy) {
    case Strategy::MANY_ROWS: return many_rows_costs();
    case Strategy::FUSED: return fused_costs();
    case Strategy::FUSED_MANY_ROWS: return fused_many_rows_costs();
    default: return split_costs();
    }
}

/** What a call gives the multiprocessor that has most to do. */
struct Load {
    double bytes = 0;       /* of all pages, in millions */
    double half_pages = 0;  /* of the multiprocessor */
    double chain = 0;       /* half pages that a warp takes one after the other */
    double rows = 0;        /* query rows of the multiprocessor that other kernels prepare or combine */
    double exact = 0;       /* tiles of EXACT_TILE tokens of the multiprocessor, times fours of rows */
    double exact_chain = 0; /* tiles that a warp takes one after the other */
    double turns = 1;       /* blocks that the multiprocessor runs one after the other */
    double parts = 0;       /* of a segment, for merge_parts; 0 if it does not run */
    int warps = 1;          /* of a block */
};

/** Returns the microseconds of a call. kernel: the kernel, or for CHUNK its rows. */
inline double microseconds(const Costs &c, const tq_plan &plan, const AttendArgs &a, const KernelChoice &kernel,
                           const Load &load)
{
    const bool wave = a.wave.steps, one_width = kernel.bits > 0;
    const int fewest = kernel.row_quads ? 4 : kernel.team_rows ? 16 : 64, doublings = kernel.rows / fewest / 2;
    double any = c.any - 8 * c.any_bit, quads = kernel.rows / 4;
    for (const tq_side *side : {&plan.key, &plan.value})
        for (int g = 0; g < plan.groups; g++) {
            const int bits = side->bits[g];
            any += (bits * c.any_bit + (bits == 6 ? c.six : 0) - (bits == TQ_WIDE_BITS ? c.eight : 0)) / plan.groups;
        }
    const double channels = c.any_dim + (1 - c.any_dim) * a.groups / 4,
                 rows = doublings == 0   ? 1
                        : doublings == 1 ? c.twice
                                         : c.four_times,
                 width = kernel.bits == 2   ? c.bits_2
                         : kernel.bits == 3 ? c.bits_3
                         : kernel.bits == 4 ? c.bits_4
                                            : fmax(any, c.bits_2) * (kernel.bits == BY_SIDE ? c.by_side : 1),
                 half_page = (width + c.wave * wave) * channels * rows * (kernel.tiles * kernel.run == 4 ? c.whole : 1),
                 alone = ((one_width ? c.alone : c.alone_any) + c.alone_wave * wave) * channels * rows,
                 read = load.bytes / c.bytes, work = half_page * load.half_pages, wait = alone * load.chain,
                 block = (c.warp + c.warp_wave * wave) * quads / load.warps;
    return c.start + c.start_wave * wave + c.start_rows * doublings + (load.turns - 1) * c.turn + load.turns * block +
           (c.row + c.row_wave * wave) * load.rows * channels +
           (load.parts > 0 ? c.merge + c.part * load.parts * sqrt(quads) : 0) + (load.exact > 0 ? c.exact : 0) +
           (c.exact_tile * load.exact + c.exact_chain * load.exact_chain) * channels +
           sqrt(read * read + work * work + wait * wait); /* the three overlap, but not wholly */
}

/** Returns the half pages of a sequence and KV head that has max_pages; with a kernel, those of what a warp takes. */
inline double half_pages_of(const AttendArgs &a) { return a.p.layer.max_pages * (a.page_tokens / 64.0); }
inline double half_pages_of(const AttendArgs &a, const KernelChoice &kernel)
{
    const int tokens = kernel.tiles * kernel.run * TQ_TILE;
    return (tokens < a.page_tokens ? tokens : a.page_tokens) / 64.0;
}

/** Returns the bytes, in millions, of the pages of `sequences` that all have max_pages. */
inline double bytes_of(const AttendArgs &a, int sequences)
{
    return 1e-6 * sequences * a.p.layer.kv_heads * a.p.layer.max_pages * a.record_bytes;
}

/** Returns the mean of `cost(batch)` and `cost(1)`, where cost(n) is that of a call in which n sequences have max_pages
 *  and the others no page; of about equal lengths, the former alone. */
template <class Cost> double of_lengths(const AttendArgs &a, Cost cost)
{
    const int batch = a.p.layer.batch;
    const double most = cost(batch);
    return batch <= 1 || a.p.schedule_kind == TQ_SCHEDULE_EQUAL ? most : (most + cost(1)) / 2;
}

} // namespace tq
#endif
