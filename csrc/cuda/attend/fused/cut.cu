/* The cut of the fused kernels: blocks that share a segment, warps, shared memory, and whether SPLIT is faster. */
#include "cuda/attend/choose/cut.h"

namespace tq
{
namespace
{

/* ---- the cut of attend_fused ---- */

/** Returns how many blocks share a multiprocessor that has room for `warps` warps: as many as let all segments run at
 *  once, if that is possible, because otherwise some wait for a turn of their own. A block has at least two warps. */
int blocks_at_once(int64_t segments, int warps, const Device &device)
{
    int blocks = 1;
    for (int n = 2; 2 * n <= warps && blocks * (int64_t)device.processors < segments; n++)
        if (warps % n == 0) blocks = n;
    return blocks;
}

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

/** Whether few places stay empty. Blocks run in turns, up to `room` of them at once, and each is taken to be as long as
 *  the longest. */
bool keeps_busy(int64_t blocks, int64_t room)
{
    int64_t turns = (blocks + room - 1) / room;
    return blocks * 20 >= turns * room * RULES.busy_of_20;
}

/** A warp with at most this many units is faster here than in SPLIT, whatever else holds. */
constexpr int FEW_UNITS = 2;
constexpr int SCHEDULERS = 4; /* warp schedulers of a multiprocessor */

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

enum class Verdict { YES, FEWER_AT_ONCE, NO };

/** Whether the cut is faster than that of SPLIT, or might be with fewer blocks at once. at_once: blocks of a
 *  multiprocessor; rounds: from share_segments. */
Verdict fused_is_faster(const AttendArgs &a, const KernelChoice &kernel, int64_t segments, int at_once, int64_t rounds,
                        const Device &device)
{
    const FusedArgs &f = a.fused;
    int64_t half_pages = rounds * kernel.tiles * kernel.run / 2;
    if ((kernel.row_quads == 1 ? rounds : half_pages) <= FEW_UNITS) return Verdict::YES;
    if (a.p.layer.batch > 1 && a.p.schedule_kind != TQ_SCHEDULE_EQUAL)
        return Verdict::NO; /* one long sequence would keep all waiting */
    /* SPLIT attends to exact tokens in another kernel (prepare). So with these, fewer blocks at once are often still
     * faster than SPLIT: measured with four rows of 128 channels. */
    const bool may_be_fewer =
        a.exact_parts && kernel.bits && kernel.row_quads == 1 && a.groups == 4 && half_pages <= RULES.most_in_turns;
    if (!keeps_busy(segments * f.sharing, (int64_t)at_once * device.processors))
        return may_be_fewer ? Verdict::FEWER_AT_ONCE : Verdict::NO;
    /* long caches are faster by whole pages, here or in SPLIT */
    if (!kernel.bits && kernel.row_quads == 2 && kernel.tiles == 2 && half_pages > RULES.most_8_rows)
        return Verdict::NO;
    /* Kernels for any widths, several blocks per multiprocessor: with four rows, two blocks are faster than SPLIT at
     * any length. More blocks, or more rows, are faster only if a warp has few pages (measured.md). */
    if (kernel.bits || at_once == 1) return Verdict::YES;
    bool short_enough = kernel.row_quads == 1 ? at_once == 2 || half_pages <= RULES.most_any_4_rows
                                              : half_pages <= RULES.most_any_8_rows;
    return short_enough ? Verdict::YES : Verdict::NO;
}

int page_cost(const AttendArgs &a) { return RULES.page_cost[a.groups > 2]; }

/** Returns the cost of `rounds` units for a warp; with run 2 of pages: after the first, one less than two halves. */
int64_t units_cost(const AttendArgs &a, const KernelChoice &kernel, int64_t rounds)
{
    if (kernel.run > 1) return rounds * (2 * RULES.half_cost - 1) + 1;
    return rounds * (kernel.tiles == 2 ? RULES.half_cost : page_cost(a));
}

/** Cuts the work for the kernel whose units have `tiles` token tiles, and returns about what it costs. Returns 0, with
 *  *l undefined, if there is no such kernel, if it has no room, or if SPLIT is faster. */
int64_t cut_units(const tq_plan &plan, const Device &device, int tiles, Launch *l)
{
    AttendArgs &a = l->args;
    FusedArgs &f = a.fused;
    KernelChoice kernel = find_kernel(Strategy::FUSED, true, plan, a.tile_rows / 4, tiles);
    if (!kernel.kernel) return 0;
    lay_out_stage(&plan, kernel.tiles, &a);
    const int most = kernel.max_threads / 32, busy_warps = kernel.run > 1 ? most : RULES.busy_warps;
    /* Each block has its own tables of the wave. So with many segments, only two blocks share a multiprocessor, if that
     * leaves room for enough warps (measured.md; with four rows). */
    const bool two = a.wave.steps && tiles == 4 && a.tile_rows == 4 && l->segments > 2 * device.processors;
    for (int at_once = two ? 2 : blocks_at_once(l->segments, most, device); at_once; at_once--) {
        int room = device.shared_bytes_per_processor / at_once - 1024;
        if (room > device.shared_bytes_per_block) room = device.shared_bytes_per_block;
        const int first = most / at_once < FUSED_WARPS ? most / at_once : FUSED_WARPS;
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
                                   rounds > (kernel.run > 1 ? RULES.long_wave_pages : FEW_UNITS);
            if (long_wave && at_once * f.warps % SCHEDULERS) continue;
            l->shared_bytes = lay_out_fused(kernel, &a);
            if (l->shared_bytes > room) continue;
            if (two && kernel.run == 1 && at_once * f.warps < busy_warps) return 0;
            l->kernel = kernel;
            l->blocks = f.sharing * (int)(l->segments / a.row_tiles);
            l->threads = 32 * f.warps;
            const Verdict verdict = fused_is_faster(a, kernel, l->segments, at_once, rounds, device);
            if (verdict == Verdict::FEWER_AT_ONCE) break;
            if (verdict == Verdict::NO) return 0;
            return units_cost(a, kernel, rounds ? rounds : 1) + (f.sharing == f.cluster ? 0 : RULES.merge_cost);
        }
    }
    return 0;
}

/* ---- the cut of attend_fused_many_rows ---- */

/** Returns how many turns the blocks take, each of which fills a multiprocessor. */
int64_t wide_turns(const Launch &l, const Device &device)
{
    int64_t blocks = l.segments * l.args.fused.sharing;
    return (blocks + device.processors - 1) / device.processors;
}

/** Cuts the work into tiles of 16 rows if `rows` is at most 16, otherwise of 32. Returns the most pages of a team, over
 *  all turns; 0 if there is no such kernel, or no room for three teams. */
int64_t cut_tiles(const tq_plan &plan, const Device &device, int rows, Launch *l)
{
    AttendArgs &a = l->args;
    FusedArgs &f = a.fused;
    l->kernel = find_kernel(Strategy::FUSED_MANY_ROWS, true, plan, rows <= 16 ? 4 : 8, 4);
    if (!l->kernel.kernel) return 0;
    a.tile_rows = a.team_rows = l->kernel.team_rows;
    a.row_tiles = (a.rows + a.tile_rows - 1) / a.tile_rows;
    l->segments = (int64_t)a.p.layer.batch * a.p.layer.kv_heads * a.row_tiles;
    lay_out_stage(&plan, l->kernel.tiles, &a);
    for (f.teams = l->kernel.max_threads / (32 * TEAM_OF_MANY_ROWS); f.teams > 2; f.teams--) {
        f.warps = TEAM_OF_MANY_ROWS * f.teams;
        int64_t rounds = share_segments(l->segments, a.p.layer.max_pages, device.processors, device, &f);
        l->shared_bytes = lay_out_fused(l->kernel, &a);
        if (l->shared_bytes > device.shared_bytes_per_block) continue;
        l->blocks = f.sharing * (int)(l->segments / a.row_tiles);
        l->threads = 32 * f.warps;
        return (rounds ? rounds : 1) * wide_turns(*l, device);
    }
    return 0;
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

/** Cuts the work for sequences of any lengths. Returns false if there is no kernel, no room, or if SPLIT is faster. */
bool cut_ragged(const tq_plan &plan, const Device &device, int tiles, Launch *launch)
{
    constexpr int LEAST_WARPS = 4, WARPS_WITH_WAVE = 8;
    Launch best = *launch;
    int most_warps = 0;
    KernelChoice kernel = find_kernel(Strategy::FUSED, true, plan, launch->args.tile_rows / 4, tiles);
    const int most = kernel.ragged_threads / 32, busy = RULES.busy_warps;
    const double of_100 = 100.0 * (double)launch->segments / device.processors; /* segments for 100 multiprocessors */
    const bool wave = launch->args.wave.steps;
    if (!kernel.ragged) return false;
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
    /* More than two segments for each multiprocessor were not measured. */
    const bool few = launch->segments <= a.fused.at_once && launch->segments <= 2 * device.processors;
    /* SPLIT attends to exact tokens in another kernel, so with these any number of segments runs here. SPLIT is faster
     * for eight rows of 2 bits with a wave and without exact tokens (measured.md). */
    const bool slow = wave && of_100 > RULES.ragged_few && a.tile_rows == 8 && kernel.bits == 2 && !a.exact_parts;
    return most_warps && !slow && (few || a.exact_parts || (!wave && of_100 >= RULES.ragged_many));
}

} // namespace

bool cut_fused_many_rows(const tq_plan &plan, const Device &device, Launch *launch)
{
    Launch l = *launch;
    if (!start_fused(&l)) return false;
    const Launch start = l;
    const AttendArgs &a = l.args;
    int64_t pages = cut_tiles(plan, device, a.rows, &l);
    int bits = l.kernel.bits; /* 2, 3, 4, or BY_GROUP, which is 0 */
    if (a.rows > 16) { /* A block of 32 rows takes longer before and after its pages, by the time of `longer` pages. */
        Launch by_16 = start;
        int64_t pages_by_16 = cut_tiles(plan, device, 16, &by_16),
                longer = RULES.longer_32_rows[bits > 2 ? 2 : bits / 2];
        if (pages_by_16 && (!pages || pages_by_16 < pages + longer)) l = by_16, pages = pages_by_16;
    }
    int64_t turns = wide_turns(l, device);
    if (!pages || turns > RULES.most_turns || (!bits && a.tile_rows == 16 && pages > RULES.most_pages_any_16_rows))
        return false;
    if (pages > 2 * turns) {
        if (a.p.layer.batch > 1 && a.p.schedule_kind != TQ_SCHEDULE_EQUAL)
            return false; /* one long sequence would keep all waiting */
        if (!keeps_busy(l.segments * a.fused.sharing, device.processors)) return false;
    }
    *launch = l;
    return true;
}

bool cut_fused(const tq_plan &plan, const Device &device, Launch *launch)
{
    Launch halves = *launch;
    if (!start_fused(&halves)) return false;
    const AttendArgs &a = halves.args;
    const int64_t segments = halves.segments;
    const int row_quads = a.tile_rows / 4;
    Launch wholes = halves;
    int64_t by_half = cut_units(plan, device, 2, &halves), by_page = 0;
    /* Whole pages are tried where there are no kernels for half pages, and with few segments if each multiprocessor has
     * two pages. Many segments leave few warps for each: then whole pages are tried for more than four rows, fewer than
     * four groups, a wave, which is summed once a page, and mixed widths that cannot run by half pages. With many
     * segments or more than four rows they run only if they cost no more than half pages, and at least `least`: four
     * pages of a warp, or with few segments two pages in kernels for any widths. */
    const bool only_wholes = !find_kernel(Strategy::FUSED, true, plan, row_quads, 2).kernel;
    const bool many = segments > 2 * device.processors;
    if (plan.page_tokens > 2 * TQ_TILE &&
        (only_wholes || (many ? row_quads > 1 || a.groups < 4 || a.wave.steps || (!one_width_of(&plan) && !by_half)
                              : segments * a.p.layer.max_pages >= 2 * device.processors)))
        by_page = cut_units(plan, device, 4, &wholes);
    /* Where segments are few, pages of two units must cost less than half pages, not only as much (measured.md). */
    const bool two_units = wholes.kernel.run > 1 && segments <= device.processors;
    const bool compare = !only_wholes && (many || row_quads > 1 || two_units);
    int least = page_cost(a) * (many ? 4 : wholes.kernel.bits ? 0 : 2);
    const bool dearer = two_units ? by_page >= by_half : by_page > by_half;
    if (compare && (by_page < least || (by_half && dearer))) by_page = 0;
    if (by_half || by_page) {
        *launch = by_page ? wholes : halves;
        return true;
    }
    const bool equal = a.p.layer.batch <= 1 || a.p.schedule_kind == TQ_SCHEDULE_EQUAL;
    if (equal || a.p.layer.batch > MOST_RAGGED ||
        fused_schedule_rows(a.p.layer.batch) > TQ_SCHEDULE_ROWS * (int64_t)device.processors + a.p.layer.batch ||
        a.rows > 8 || segments > 1 << 20)
        return false;
    Launch l = *launch;
    start_fused(&l);
    if (!(plan.page_tokens > 2 * TQ_TILE && cut_ragged(plan, device, 4, &l)) && !cut_ragged(plan, device, 2, &l))
        return false;
    *launch = l;
    return true;
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
