/* The cuts of the fused kernels: blocks that share a segment, warps, shared memory, and what they cost. */
#include "cuda/attend/choose/cost.h"

#include <initializer_list>

namespace tq
{
namespace
{

/* ---- the cut of attend_fused ---- */

/** Chooses how many thread blocks share a segment, and whether they form a cluster. Returns the most units of a team.
 *  units: the most of a segment; blocks: how many can run at once on the device. */
int64_t share_segments(int64_t segments, int64_t units, int64_t blocks, const Device &device, FusedArgs *f)
{
    int processors = device.processors,
        in_clusters = processors * RULES.clusters_of_11 / 11; /* the rest fit no cluster of four or eight */
    f->cluster = PORTABLE_CLUSTER;
    while (f->cluster > 1 && segments * f->cluster > (f->cluster > 2 ? in_clusters : processors)) f->cluster /= 2;
    /* A large cluster, if it has a team for each unit and one of eight would keep more than busy_warps teams busy. */
    int busy = f->teams < RULES.busy_warps ? f->teams : RULES.busy_warps;
    if (segments <= device.large_clusters && segments * LARGE_CLUSTER <= processors &&
        units > PORTABLE_CLUSTER * busy && units <= LARGE_CLUSTER * f->teams)
        f->cluster = LARGE_CLUSTER;
    int64_t parts = blocks / segments;
    auto rounds = [&](int64_t sharing) { return (units + sharing * f->teams - 1) / (sharing * f->teams); };
    bool split = parts > 1 && rounds(f->cluster) > rounds(parts); /* merge_parts costs at most a round */
    f->sharing = split ? (int)parts : f->cluster;
    if (split) f->cluster = 1;
    return rounds(f->sharing);
}

constexpr int SCHEDULERS = 4; /* warp schedulers of a multiprocessor */
constexpr int MEASURED = 6;   /* blocks of a multiprocessor for which Costs were fitted */

/** Lays out a block's shared memory; returns its bytes. Sets f.stride and f.exact_warps: at most one per exact tile. */
int lay_out_fused(const KernelChoice &kernel, AttendArgs *args)
{
    AttendArgs &a = *args;
    FusedArgs &f = a.fused;
    int64_t row_bytes = a.pitch * (int64_t)sizeof(float), sums = a.tile_rows * row_bytes, at = 0;
    int64_t rows = a.row_tiles > 1 ? a.tile_rows : a.rows, sent = (rows + f.cluster - 1) / f.cluster * f.cluster,
            slot = f.sharing == f.cluster ? part_floats(a) * (int64_t)sizeof(float) : 0;
    f.stride = f.teams * f.sharing;
    const int64_t tiles = (most_exact_tokens(a.p) + EXACT_TILE - 1) / EXACT_TILE,
                  of_block = (tiles + f.sharing - 1) / f.sharing;
    f.exact_warps = f.warps / exact_sets(kernel.team_rows);
    if (f.exact_warps > of_block) f.exact_warps = (int)of_block;
    const int64_t kept = a.exact_parts && !kernel.team_rows ? 2 * sums : sums;
    f.team_bytes = (int32_t)(a.stage_bytes > kept ? a.stage_bytes : kept);
    take(&at, (int64_t)f.teams * f.team_bytes);
    f.rows = (int32_t)take(&at, a.tile_rows * sizeof(RowArgs));
    f.queries = (int32_t)take(&at, (int64_t)a.tile_rows / 4 * a.groups * 32 * sizeof(uint2));
    f.spare = (int32_t)take(&at, sums);
    f.value_scale = (int32_t)take(&at, 32 * sizeof(float2));
    f.totals = (int32_t)take(&at, (f.teams + f.exact_warps) * a.tile_rows * sizeof(float4));
    f.exact = kernel.team_rows ? (int32_t)take(&at, f.exact_warps * sums) : (int32_t)sums;
    f.slots = (int32_t)take(&at, sent * slot);
    a.at_teams = (int32_t)take(&at, (int64_t)f.teams * kernel.own_bytes);
    a.at_barriers = (int32_t)at;
    f.block = a.at_barriers + f.teams * 32;
    return lay_out_wave(kernel, f.warps, a.tile_rows, f.block + FUSED_BLOCK_BYTES, args);
}

/** Returns what a cut into equally many blocks for each segment costs. places: blocks of a multiprocessor that can run at
 *  once; rounds: units of a warp or team. */
double cost_of(const tq_plan &plan, const Device &device, const Launch &l, int places, int64_t rounds)
{
    const AttendArgs &a = l.args;
    const FusedArgs &f = a.fused;
    const int64_t all = l.segments * f.sharing, room = (int64_t)places * device.processors,
                  tiles = (most_exact_tokens(a.p) + EXACT_TILE - 1) / EXACT_TILE,
                  of_block = (tiles + f.sharing - 1) / f.sharing;
    auto turns = [&](int64_t blocks) { return (blocks + room - 1) / room; };
    /* Blocks of the multiprocessor that has most. If other blocks have no pages, two that have some may share one. */
    auto fullest = [&](int64_t blocks) {
        const int64_t before = turns(blocks) - 1,
                      last = (blocks - before * room + device.processors - 1) / device.processors;
        return before * places + (blocks < all && last < places ? last + 1 : last);
    };
    return of_lengths(a, [&](int sequences) {
        const int64_t blocks = all / a.p.layer.batch * sequences;
        Load load;
        load.bytes = bytes_of(a, sequences);
        load.half_pages = fullest(blocks) * half_pages_of(a) / f.sharing;
        load.chain = turns(blocks) * rounds * half_pages_of(a, l.kernel);
        load.turns = (double)turns(all);
        load.parts = f.sharing == f.cluster ? 0 : f.sharing;
        load.warps = f.warps;
        if (tiles) {
            load.exact = (double)(fullest(all) * of_block * a.tile_rows / 4);
            load.exact_chain = (double)(turns(all) * ((of_block + f.exact_warps - 1) / f.exact_warps));
        }
        return microseconds(costs_of(l.kernel), plan, a, l.kernel, load);
    });
}

/** Cuts the work into units of `tiles` token tiles, for blocks of which at_once share a multiprocessor. Returns what the
 *  cut costs; INFINITY, with *l undefined, if there is no such kernel or no room. */
double cut_units(const tq_plan &plan, const Device &device, int tiles, int at_once, Launch *l)
{
    AttendArgs &a = l->args;
    FusedArgs &f = a.fused;
    KernelChoice kernel = find_kernel(Strategy::FUSED, true, plan, a.tile_rows / 4, tiles);
    if (!kernel.kernel) return INFINITY;
    lay_out_stage(&plan, kernel.tiles, &a);
    const int most = kernel.max_threads / 32, busy_warps = kernel.run > 1 ? most : RULES.busy_warps,
              first = most / at_once < FUSED_WARPS ? most / at_once : FUSED_WARPS;
    int room = device.shared_bytes_per_processor / at_once - 1024;
    if (room > device.shared_bytes_per_block) room = device.shared_bytes_per_block;
    for (f.warps = first; f.warps >= 2; f.warps--) {
        f.teams = f.warps;
        int64_t units = (int64_t)a.p.layer.max_pages * a.page_units / kernel.run,
                rounds = share_segments(l->segments, units, at_once * (int64_t)device.processors, device, &f);
        /* More than busy_warps warps shorten a block's start and end, but slow down reading. So a block has either
         * `first` warps or at most busy_warps: `first` if at most busy_warps of them have a unit, or if each has at
         * most one and that makes a large cluster possible or saves merge_parts. */
        FusedArgs fewer = f;
        fewer.teams = busy_warps;
        share_segments(l->segments, units, at_once * (int64_t)device.processors, device, &fewer);
        bool saves = f.cluster == LARGE_CLUSTER || (rounds == 1 && f.cluster > 1 && fewer.cluster == 1);
        int busy = saves ? f.warps : busy_warps;
        if (f.warps > busy_warps && (f.warps < first || units > busy * f.sharing)) continue;
        /* With a wave and many units, each scheduler has equally many warps (measured.md). */
        const bool long_wave = a.wave.steps && kernel.bits && a.tile_rows == 4 && a.groups == 4 &&
                               rounds > (kernel.run > 1 ? RULES.long_wave_pages : RULES.long_wave_units);
        if (long_wave && at_once * f.warps % SCHEDULERS) continue;
        l->shared_bytes = lay_out_fused(kernel, &a);
        if (l->shared_bytes > room) continue;
        if (l->segments * f.sharing <= (at_once - 1) * (int64_t)device.processors)
            return INFINITY; /* at_once - 1 hold all of them, and may be larger */
        l->kernel = kernel;
        l->blocks = f.sharing * (int)(l->segments / a.row_tiles);
        l->threads = 32 * f.warps;
        const int by_shared = device.shared_bytes_per_processor / (l->shared_bytes + 1024), by_warps = most / f.warps;
        return cost_of(plan, device, *l, by_shared < by_warps ? by_shared : by_warps, rounds);
    }
    return INFINITY;
}

/* ---- the cut of attend_fused_many_rows ---- */

/** Cuts the work into tiles of 16 or of 32 rows. Returns what the cut costs; INFINITY, with *l undefined, if there is no
 *  such kernel, or no room for three teams. */
double cut_tiles(const tq_plan &plan, const Device &device, int rows, Launch *l)
{
    AttendArgs &a = l->args;
    FusedArgs &f = a.fused;
    l->kernel = find_kernel(Strategy::FUSED_MANY_ROWS, true, plan, rows / 4, 4);
    if (!l->kernel.kernel) return INFINITY;
    a.tile_rows = a.team_rows = rows;
    a.row_tiles = (a.rows + a.tile_rows - 1) / a.tile_rows;
    l->segments = (int64_t)a.p.layer.batch * a.p.layer.kv_heads * a.row_tiles;
    lay_out_stage(&plan, l->kernel.tiles, &a);
    for (f.teams = l->kernel.max_threads / (32 * TEAM_OF_MANY_ROWS); f.teams > 2; f.teams--) {
        f.warps = TEAM_OF_MANY_ROWS * f.teams;
        const int64_t rounds = share_segments(l->segments, a.p.layer.max_pages, device.processors, device, &f);
        l->shared_bytes = lay_out_fused(l->kernel, &a);
        if (l->shared_bytes > device.shared_bytes_per_block) continue;
        l->blocks = f.sharing * (int)(l->segments / a.row_tiles);
        l->threads = 32 * f.warps;
        return cost_of(plan, device, *l, 1, rounds);
    }
    return INFINITY;
}

/** Sets what both fused strategies start from. Returns false if there are more segments than `divide` takes. */
bool start_fused(Launch *launch)
{
    AttendArgs &a = launch->args;
    a.tile_rows = a.rows <= 4 ? 4 : a.rows <= 8 ? 8 : 16;
    a.row_tiles = (a.rows + a.tile_rows - 1) / a.tile_rows;
    a.exact_parts = most_exact_tokens(a.p) > 0;
    launch->segments = (int64_t)a.p.layer.batch * a.p.layer.kv_heads * a.row_tiles;
    return launch->segments < 1 << 22;
}

/** Cuts the work for sequences of any lengths, into units of `tiles` token tiles. Returns what the cut costs; INFINITY,
 *  with *launch undefined, if there is no kernel or no room. */
double cut_ragged(const tq_plan &plan, const Device &device, int tiles, Launch *launch)
{
    constexpr int LEAST_WARPS = 4, WARPS_WITH_WAVE = 8;
    Launch best = *launch;
    int most_warps = 0;
    KernelChoice kernel = find_kernel(Strategy::FUSED, true, plan, launch->args.tile_rows / 4, tiles);
    const int most = kernel.ragged_threads / 32, busy = RULES.busy_warps;
    const double of_100 = 100.0 * (double)launch->segments / device.processors; /* segments for 100 multiprocessors */
    const bool wave = launch->args.wave.steps;
    if (!kernel.ragged) return INFINITY;
    kernel.kernel = kernel.ragged, kernel.is_ragged = true;
    const int first = most > busy && of_100 <= RULES.ragged_two ? 2 : most / LEAST_WARPS;
    /* While a lone block starts or ends, its multiprocessor is idle. With a wave that costs more than few warps do. */
    const int enough = wave ? WARPS_WITH_WAVE : busy;
    for (int at_once = first; at_once; at_once--) {
        Launch l = *launch;
        AttendArgs &a = l.args;
        FusedArgs &f = a.fused;
        l.kernel = kernel;
        lay_out_stage(&plan, kernel.tiles, &a);
        f.ragged = true, f.run = kernel.run, f.sharing = f.cluster = 1;
        int room = device.shared_bytes_per_processor / at_once - 1024;
        if (room > device.shared_bytes_per_block) room = device.shared_bytes_per_block;
        for (f.warps = most / at_once < FUSED_WARPS ? most / at_once : FUSED_WARPS; f.warps >= 2; f.warps--) {
            f.teams = f.warps;
            l.shared_bytes = lay_out_fused(kernel, &a);
            if (l.shared_bytes <= room && (!wave || at_once * f.warps % SCHEDULERS == 0)) break;
        }
        const int warps = at_once * f.warps < enough ? at_once * f.warps : enough;
        if (f.warps < 2 || warps <= most_warps) continue;
        most_warps = warps;
        f.at_once = at_once * device.processors;
        l.threads = 32 * f.warps;
        l.blocks = (int)l.segments + (l.segments > f.at_once ? MOST_WHOLE_OF_SHARE : 1) * f.at_once;
        best = l;
    }
    *launch = best;
    const AttendArgs &a = launch->args;
    if (!most_warps) return INFINITY;
    return of_lengths(a, [&](int sequences) {
        const double heads = (double)a.p.layer.kv_heads / device.processors;
        Load load;
        load.bytes = bytes_of(a, sequences);
        load.half_pages = half_pages_of(a) * sequences * heads;
        load.rows = heads * a.p.layer.batch * a.tile_rows;
        load.exact = (double)((most_exact_tokens(a.p) + EXACT_TILE - 1) / EXACT_TILE) * load.rows / 4;
        return microseconds(costs_of(kernel), plan, a, kernel, load);
    });
}

/** Whether units may have `tiles` token tiles: four are more than half a page. */
bool takes_units(const tq_plan &plan, int tiles) { return tiles == 2 || plan.page_tokens > 2 * TQ_TILE; }

/** Whether cut_ragged takes a call. */
bool takes_ragged(const Device &device, const AttendArgs &a)
{
    const int32_t batch = a.p.layer.batch;
    return batch > 1 && a.p.schedule_kind != TQ_SCHEDULE_EQUAL && batch <= MOST_RAGGED && a.rows <= 8 &&
           fused_schedule_rows(batch) <= TQ_SCHEDULE_ROWS * (int64_t)device.processors + batch &&
           (int64_t)batch * a.p.layer.kv_heads <= 1 << 20;
}

} // namespace

void offer_fused_many_rows(const tq_plan &plan, const Device &device, const Launch &launch, Offers *offers)
{
    Launch l = launch;
    if (!start_fused(&l)) return;
    for (int rows : {16, 32})
        if (rows == 16 || l.args.rows > 16)
            offers->add({Strategy::FUSED_MANY_ROWS, cut_tiles(plan, device, rows, &l), rows});
}

void offer_fused(const tq_plan &plan, const Device &device, const Launch &launch, Offers *offers)
{
    Launch l = launch;
    if (!start_fused(&l)) return;
    /* More than MEASURED blocks at once are offered only where fewer would not let all segments run at once. */
    const int64_t needed = (l.segments + device.processors - 1) / device.processors;
    const int most = needed < MEASURED ? MEASURED : needed < FUSED_WARPS / 2 ? (int)needed : FUSED_WARPS / 2;
    for (int tiles : {2, 4})
        for (int at_once = 1; at_once <= most && takes_units(plan, tiles); at_once++)
            offers->add({Strategy::FUSED, cut_units(plan, device, tiles, at_once, &l), tiles, at_once});
    if (!takes_ragged(device, l.args)) return;
    for (int tiles : {4, 2}) { /* the larger units, if there is a kernel for them */
        l = launch;
        start_fused(&l);
        const double us = takes_units(plan, tiles) ? cut_ragged(plan, device, tiles, &l) : INFINITY;
        offers->add({Strategy::FUSED, us, tiles, 0, true});
        if (us < INFINITY) return;
    }
}

void cut_fused(const tq_plan &plan, const Device &device, const Offer &offer, Launch *launch)
{
    start_fused(launch);
    if (offer.strategy == Strategy::FUSED_MANY_ROWS) cut_tiles(plan, device, offer.size, launch);
    else if (offer.is_ragged) cut_ragged(plan, device, offer.size, launch);
    else cut_units(plan, device, offer.size, offer.at_once, launch);
}

tq_status use_shares(const Device &device, Launch *launch, tq_error *error)
{
    AttendArgs &a = launch->args;
    a.schedule_teams = a.p.layer.batch; /* one row for each sequence */
    a.schedule_key = key_of(a);
    if (a.p.schedule) TQ_CUDA_TRY(check_schedule_rows(a.p.layer.batch, a.p.schedule_rows, device, error));
    a.schedule = reinterpret_cast<const int4 *>(a.p.schedule);
    return TQ_OK;
}

size_t lay_out_fused_workspace(Launch *l, char *base)
{
    AttendArgs &a = l->args;
    if (a.fused.sharing == a.fused.cluster && !a.fused.ragged) return 0;
    int64_t at = 0;
    a.sums = reinterpret_cast<float *>(base + take(&at, (int64_t)l->blocks * a.rows * part_floats(a) * sizeof(float)));
    if (a.fused.ragged && !a.p.schedule) /* the call's own schedule */
        a.schedule =
            reinterpret_cast<const int4 *>(base + take(&at, fused_schedule_rows(a.p.layer.batch) * sizeof(int4)));
    return (size_t)at;
}

} // namespace tq
