/* The choice of a kernel and the cut of its work into thread blocks, from what the host knows: plan, sizes, device. */
#ifndef TQ_CUDA_ATTEND_CHOOSE_CUT_H
#define TQ_CUDA_ATTEND_CHOOSE_CUT_H
#include <math.h>

#include "core/plan_kind.h"
#include "cuda/attend/choose/rules.h"
#include "cuda/attend/choose/table.h"

namespace tq
{

struct Launch {
    KernelChoice kernel;
    AttendArgs args;
    double us; /* what the call costs (cost.h) */
    int blocks, threads, shared_bytes;
    int prepare_blocks, prepare_threads, prepare_bytes, combine_blocks, combine_threads, combine_bytes;
    int64_t segments;
};

/** One way to run a call. */
struct Offer {
    Strategy strategy;
    double us = INFINITY;   /* what it costs (cost.h); INFINITY: impossible */
    int size = 0;           /* FUSED: token tiles of a unit; FUSED_MANY_ROWS: rows of a tile */
    int at_once = 0;        /* FUSED: blocks for which a multiprocessor is divided */
    bool is_ragged = false; /* FUSED for any lengths */
};

/** Keeps the offer that costs least; with `wanted`, the one of this number, counted from 0. */
struct Offers {
    Offer best = {Strategy::SPLIT};
    int wanted = -1, count = 0;

    void add(const Offer &offer)
    {
        if (!(offer.us < INFINITY)) return;
        if (wanted < 0 ? offer.us < best.us : count == wanted) best = offer;
        count++;
    }
};

/** Returns the strategy's kernel for 4 * row_quads rows and units of `tiles` token tiles. The first row of KERNELS that
 *  takes the plan, its pages and this many rows decides: the plan's own bit width comes before BY_SIDE and BY_GROUP.
 *  `kernel` is NULL if there is no such row, or if it has no kernel for units of this size. */
KernelChoice find_kernel(Strategy strategy, bool hopper, const tq_plan &plan, int row_quads, int tiles);
/** Chooses the kernel for a plain plan and cuts the work. launch: from fill_args, with args.rows > 0. */
tq_status choose_kernel(const tq_plan &plan, const Device &device, Launch *launch, tq_error *error);
/** Writes to `name` (TQ_CUDA_KERNEL_NAME_BYTES) the kernel that runs on a device; "" if there is nothing to do. */
tq_status name_of_choice(const tq_plan &plan, const tq_attend_params &params, const Device &device, char *name,
                         tq_error *error);

/** Whether CHUNK takes a call and costs less than `otherwise`, which choose_kernel has chosen. */
bool chooses_chunk(const tq_plan &plan, const tq_attend_params &params, const Device &device, const Launch &otherwise);
/** Writes to `name` (TQ_CUDA_KERNEL_NAME_BYTES) the kernel of CHUNK. */
void name_chunk(const tq_plan &plan, const tq_attend_params &params, char *name);

/** Reserves `bytes`, rounded up to a multiple of 256, from *at on, and returns where they start. */
inline int64_t take(int64_t *at, int64_t bytes)
{
    int64_t start = *at;
    *at += (bytes + 255) / 256 * 256;
    return start;
}

/** Returns the bit width that all groups of keys and values have; 0 if they differ, and for tiles of 16 channels. */
inline int one_width_of(const tq_plan *plan)
{
    bool same =
        tq_has_one_width(&plan->key) && tq_has_one_width(&plan->value) && plan->key.bits[0] == plan->value.bits[0];
    return same && !tq_tile_is_16(plan) ? plan->key.bits[0] : 0;
}

/** Returns one_width_of the plan if it is 2, 3 or 4 bits, otherwise 0. */
inline int width_with_own_kernels(const tq_plan &plan)
{
    int bits = one_width_of(&plan);
    return bits >= 2 && bits <= 4 ? bits : 0;
}

/** Returns the most exact tokens that the rows of a sequence see. */
inline int64_t most_exact_tokens(const tq_attend_params &p)
{
    const int64_t older = p.layer.window && !p.layer.tail_rows ? p.query_tokens - 1 : 0; /* only early rows see them */
    return (int64_t)p.layer.sinks + p.layer.window + older;
}

/** Sets the layout of a unit in a stage, and the copies that fill it. */
inline void lay_out_stage(const tq_plan *plan, int tiles, AttendArgs *args)
{
    AttendArgs &a = *args;
    int page_tiles = plan->page_tokens / TQ_TILE;
    a.unit_tokens = tiles * TQ_TILE;
    a.page_units = (plan->page_tokens + a.unit_tokens - 1) / a.unit_tokens;
    a.key.at_codes = 0;
    a.value.at_codes = tiles * a.key.tile_bytes;
    a.key.at_scales = a.value.at_codes + tiles * a.value.tile_bytes;
    a.value.at_scales = a.key.at_scales + 2 * plan->page_tokens; /* as far apart as in the page: one copy takes both */
    a.stage_bytes = a.value.at_scales + tiles * 2 * TQ_TILE;
    a.last_is_short = page_tiles != a.page_units * tiles;
    a.sees_all = !a.last_is_short && !a.p.starts && !a.p.sliding_window && !a.varies;
    for (int second = 0; second < a.page_units; second++) {
        CopyArgs *copies = a.copies[second];
        int here = page_tiles - second * tiles < tiles ? page_tiles - second * tiles : tiles;
        int scales = a.key.scales_offset + second * tiles * 2 * TQ_TILE, scale_bytes = here * 2 * TQ_TILE;
        copies[COPY_KEYS] = {a.key.codes_offset + second * tiles * a.key.tile_bytes, a.key.at_codes,
                             here * a.key.tile_bytes, 0};
        copies[COPY_VALUES] = {a.value.codes_offset + second * tiles * a.value.tile_bytes, a.value.at_codes,
                               here * a.value.tile_bytes, 0};
        copies[COPY_SCALES] = {scales, a.key.at_scales, 2 * plan->page_tokens + scale_bytes, 0};
        a.copy_bytes[second][1] = copies[COPY_VALUES].bytes;
        a.copy_bytes[second][0] = copies[COPY_KEYS].bytes + copies[COPY_SCALES].bytes;
    }
}

/** Bytes of shared memory for a wave, of a block and of each warp (WaveSpace in rows/wave.cuh). */
inline int wave_block_bytes(const AttendArgs &a, const KernelChoice &kernel)
{
    const int tiles = kernel.tiles * kernel.run;
    return a.wave.steps ? tiles * (4 * a.wave.steps + 2) * 32 * 16 + a.wave.steps * (WAVE_STEP + 1) * 4 : 0;
}

inline int wave_warp_bytes(const AttendArgs &a, const KernelChoice &kernel)
{
    const int row_quads = kernel.team_rows       ? kernel.team_rows / 4 / TEAM_OF_MANY_ROWS
                          : kernel.row_quads > 1 ? kernel.row_quads
                                                 : kernel.run - 1; /* terms of the first unit stay in registers */
    return a.wave.steps ? a.wave.steps * WAVE_STEP * 8 + row_quads * kernel.tiles * 32 * 16 : 0;
}

/** Lays a wave out after the first `bytes` of a block's shared memory, with put_wave's results for `rows` rows. Returns
 *  the end; without a wave, `bytes`. */
inline int lay_out_wave(const KernelChoice &kernel, int warps, int rows, int bytes, AttendArgs *args)
{
    WaveArgs &w = args->wave;
    int64_t at = (bytes + 127) / 128 * 128;
    if (!w.steps) return bytes;
    w.warp_bytes = wave_warp_bytes(*args, kernel);
    w.at_table = (int32_t)at;
    w.at_increments = (int32_t)at + wave_block_bytes(*args, kernel) - w.steps * (WAVE_STEP + 1) * 4;
    w.at_polynomials = w.at_increments - kernel.tiles * kernel.run * 2 * 32 * 16;
    take(&at, wave_block_bytes(*args, kernel));
    w.at_rows = (int32_t)take(&at, (int64_t)rows * w.steps * WAVE_STEP * 8);
    w.at_warps = (int32_t)take(&at, (int64_t)warps * w.warp_bytes);
    return (int)at;
}

/** Add the ways of a strategy to run a call. launch: from fill_args. */
void offer_fused(const tq_plan &plan, const Device &device, const Launch &launch, Offers *offers);
void offer_fused_many_rows(const tq_plan &plan, const Device &device, const Launch &launch, Offers *offers);
void offer_many_rows(const tq_plan &plan, const Device &device, const Launch &launch, Offers *offers);
void offer_split(const tq_plan &plan, const Device &device, const Launch &launch, Offers *offers);
/** Chooses the kernel of an offer of FUSED or FUSED_MANY_ROWS, and cuts the work for it. */
void cut_fused(const tq_plan &plan, const Device &device, const Offer &offer, Launch *launch);
/** Choose the kernel for any plan and sizes that the strategy takes. */
KernelChoice split_kernel(const tq_plan &plan, const Device &device, const AttendArgs &args);
KernelChoice many_rows_kernel(const tq_plan &plan, const AttendArgs &args);
/** Cuts the work for launch->kernel, which is SPLIT or MANY_ROWS. */
tq_status cut_split(const tq_plan &plan, const Device &device, Launch *launch, tq_error *error);

/** Sets the schedule and its key, for a cut of FUSED that is `ragged`. Fails if the call's schedule is too short. */
tq_status use_shares(const Device &device, Launch *launch, tq_error *error);
/** Returns a hash (FNV-1a) of all that a schedule depends on except the contents of arrays; never 0. */
int32_t key_of(const AttendArgs &a);
tq_status check_schedule_rows(int32_t batch, int64_t rows, const DeviceFacts &device, tq_error *error);

/** Fills the arguments that depend on plan and sizes alone, and clears the others. args.rows 0: nothing to do. */
tq_status fill_args(const tq_plan &plan, const tq_attend_params &params, Launch *launch, tq_error *error);
/** Fills the arguments that ragged batches, exact tokens by index and strides decide. args->p must be a copy of p. */
void fill_ragged(const tq_plan &plan, const tq_attend_params &p, AttendArgs *args);
/** Fills the tables of levels, and the factors of code bytes, which depend on launch->kernel. */
void fill_factors(const tq_plan &plan, Launch *launch);

/** Lay the workspace out at `base` and return its bytes; base NULL: only count them. FUSED needs a workspace only for
 *  parts of blocks that form no cluster. */
size_t lay_out_fused_workspace(Launch *launch, char *base);
/** Returns bytes that are enough for a call with these arguments, and for one with a smaller batch, fewer query tokens
 *  or fewer pages. args: from fill_args. */
size_t workspace_bound(const AttendArgs &args, const DeviceFacts &device);
size_t lay_out_split_workspace(Launch *launch, char *base);

} // namespace tq
#endif
