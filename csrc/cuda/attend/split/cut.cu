/* The cut of SPLIT and MANY_ROWS: teams of warps, stages of pages, and the blocks of prepare and combine. */
#include "cuda/attend/choose/cost.h"

namespace tq
{
namespace
{

constexpr int MOST_TEAMS = 12; /* of a block: Variant::MAX_THREADS */

/** Returns the bytes of shared memory that a team has of its own, beside its stages and the wave's. */
int team_bytes(const Launch &l) { return l.kernel.own_bytes * (l.args.team_rows ? 1 : l.args.team_warps); }

/** Sets args.teams and args.stages: how many teams of args.team_warps warps fit a block with `room` bytes of shared
 *  memory, and how many stages each of them gets. teams is 0 if none fits. */
void count_teams(int room, Launch *l)
{
    AttendArgs &a = l->args;
    const int of_team = team_bytes(*l) + a.team_warps * wave_warp_bytes(a, l->kernel);
    if (a.wave.steps) room -= wave_block_bytes(a, l->kernel) + 3 * 256; /* lay_out_wave rounds up */
    for (a.teams = l->kernel.max_threads / 32 / a.team_warps; a.teams > 0; a.teams--) {
        a.stages = (room / a.teams - of_team) / (a.stage_bytes + 32);
        /* a second stage is worth more to attend_many_rows than a fourth team (measured.md) */
        int least_stages = a.team_rows && a.teams > 3 ? 2 : 1;
        if (a.stages >= least_stages) return;
    }
}

/** Cuts the work on pages: rows of a tile, warps of a team, teams and stages of a block, and blocks. */
tq_status cut_pages(const tq_plan &plan, const Device &device, Launch *l, tq_error *error)
{
    AttendArgs &a = l->args;
    int room = device.shared_bytes_per_processor - 6 * 1024 - 1024; /* leaves room for a block of prepare */
    if (room > device.shared_bytes_per_block) room = device.shared_bytes_per_block;
    a.team_rows = l->kernel.team_rows;
    lay_out_stage(&plan, l->kernel.tiles, &a);
    if (a.team_rows) {
        a.team_warps = TEAM_OF_MANY_ROWS;
        a.tile_rows = a.team_rows;
        count_teams(room, l);
    } else {
        int row_quads = (a.rows + 3) / 4;
        a.team_warps = (row_quads + l->kernel.row_quads - 1) / l->kernel.row_quads;
        if (a.team_warps > 8) a.team_warps = 8;
        count_teams(room, l);
        for (; !a.teams && a.team_warps > 1; count_teams(room, l))
            a.team_warps /= 2; /* a wave with many rows, on GPUs with 100 KB of shared memory */
        a.tile_rows = 4 * l->kernel.row_quads * a.team_warps;
    }
    a.row_tiles = (a.rows + a.tile_rows - 1) / a.tile_rows;
    l->segments = (int64_t)a.p.layer.batch * a.p.layer.kv_heads * a.row_tiles;
    /* More stages cost time if they are whole pages, or if there are twelve warps to hide latency (measured.md). */
    int most_stages = a.team_rows ? 2 : l->kernel.tiles == 4 || a.teams * a.team_warps >= 12 ? 1 : 3;
    if (a.stages > most_stages) a.stages = most_stages;
    if (!a.teams) return fail(error, TQ_E_UNSUPPORTED, "device", -1, room, "a GPU with more shared memory");
    a.at_teams = (a.teams * a.stages * a.stage_bytes + 127) / 128 * 128;
    a.at_barriers = a.at_teams + a.teams * team_bytes(*l);
    l->threads = 32 * a.teams * a.team_warps;
    l->shared_bytes = lay_out_wave(l->kernel, l->threads / 32, 0, a.at_barriers + a.teams * a.stages * 32, &a);
    int64_t units = l->segments * ((int64_t)a.p.layer.max_pages * a.page_units + 1);
    if (units > INT32_MAX)
        return fail(error, TQ_E_VALUE, "max_pages", -1, a.p.layer.max_pages, "fewer, or fewer sequences at once");
    l->blocks = (int)(units < device.processors ? units : device.processors);
    return TQ_OK;
}

/** Returns how many warps of combine share the parts of a row. Each has about four parts where there are few rows, and
 *  eight where there are many. A dense rotation gets as many warps as possible, because the whole block computes it. */
int combine_ways(const Launch &l, const Device &device, bool dense)
{
    const AttendArgs &a = l.args;
    int most = 16 / a.combine_rows, at_once = l.segments * a.tile_rows < 2 * device.processors ? 4 : 8;
    if (dense) return most;
    if (a.combine_rows > 1) return 1;
    int64_t units = (int64_t)a.p.layer.max_pages * a.page_units, pieces = (int64_t)l.blocks * a.teams;
    int64_t parts = (pieces + l.segments - 1) / l.segments + 1;
    if (parts > units) parts = units;
    if (parts < a.exact_parts) parts = a.exact_parts;
    int64_t ways = (parts + at_once - 1) / at_once;
    return ways < 1 ? 1 : ways < most ? (int)ways : most;
}

/** Blocks and shared memory of prepare and combine. */
tq_status cut_ends(const Device &device, Launch *l, tq_error *error)
{
    AttendArgs &a = l->args;
    bool dense = a.rotation == TQ_ROTATION_DENSE;
    int most = a.tile_rows < END_ROWS ? a.tile_rows : END_ROWS;
    while (a.tile_rows % most) most /= 2; /* tiles of 20 and 28 rows have fours of rows */
    int64_t rows = l->segments * a.tile_rows;
    /* Few rows are spread over more blocks: four rows for each block of prepare, one for each of combine. */
    a.prepare_rows = rows <= 16 * device.processors && most > 4 && !dense ? 4 : most;
    a.combine_rows = rows < 8 * device.processors ? 1 : most < 4 ? most : 4;
    int64_t sets = rows / a.prepare_rows, row_bytes = (int64_t)a.pitch * sizeof(float);
    int64_t exact_tokens = most_exact_tokens(a.p);
    bool few = sets * ((exact_tokens + 7) / 8) <= 2 * device.processors;
    a.exact_tokens = few ? 8 : 32;
    while (exact_tokens > (int64_t)(few ? 32 : 16) * a.exact_tokens) a.exact_tokens *= 2;
    a.exact_parts = (int32_t)((exact_tokens + a.exact_tokens - 1) / a.exact_tokens);
    int64_t blocks = sets * (1 + a.exact_parts);
    if (blocks > INT32_MAX) return fail(error, TQ_E_VALUE, "query_tokens", -1, a.p.query_tokens, "fewer");
    l->prepare_blocks = (int)blocks;
    l->prepare_threads = dense ? 512 : a.exact_parts ? 256 : 32 * (a.rows < 4 ? a.rows : 4);
    int exact_ways = l->prepare_threads / (a.prepare_rows * 8 * a.groups) > 1
                         ? l->prepare_threads / (a.prepare_rows * 8 * a.groups)
                         : 1;
    int64_t exact_bytes =
        exact_ways * a.prepare_rows * row_bytes + 32 * 24 + (int64_t)a.prepare_rows * 35 * sizeof(float);
    int64_t row_space = (dense ? END_ROWS + a.prepare_rows + 3 : a.prepare_rows) * row_bytes;
    l->prepare_bytes = (int)(a.exact_parts && exact_bytes > row_space ? exact_bytes : row_space);
    int ways = combine_ways(*l, device, dense);
    l->combine_blocks = (int)(rows / a.combine_rows);
    l->combine_threads = 32 * a.combine_rows * ways;
    row_space = ((a.exact_parts ? 2 : 1) * ways * a.combine_rows) * row_bytes;
    int64_t dense_space = dense ? (END_ROWS + a.combine_rows + 3) * row_bytes : 0;
    l->combine_bytes = (int)(row_space > dense_space ? row_space : dense_space);
    return TQ_OK;
}

} // namespace

int32_t key_of(const AttendArgs &a)
{
    const tq_layer &l = a.p.layer;
    const int32_t arrays = (a.p.starts ? 1 : 0) + (a.p.ends ? 2 : 0) + (a.p.query_start_loc ? 4 : 0) +
                           (l.sink_rows ? 8 : 0) + (l.tail_rows ? 16 : 0);
    const int32_t parts[] = {l.batch,       l.kv_heads,         a.p.query_tokens, l.sinks,          l.window,
                             a.p.causal,    a.p.sliding_window, arrays,           a.row_tiles,      a.capacity,
                             a.page_tokens, a.unit_tokens,      a.page_units,     a.schedule_teams, a.fused.ragged,
                             a.fused.teams, a.fused.run,        a.fused.at_once};
    uint32_t key = 2166136261u;
    for (int32_t part : parts)
        for (int byte = 0; byte < 4; byte++) key = (key ^ ((uint32_t)part >> 8 * byte & 255)) * 16777619u;
    return (int32_t)(key | 1);
}

// A schedule of SPLIT has a row for its head, one per team and one per sequence. fused_schedule_rows is for FUSED.
static_assert(TQ_SCHEDULE_ROWS > MOST_TEAMS, "room for the head and the teams");

tq_status check_schedule_rows(int32_t batch, int64_t rows, const DeviceFacts &device, tq_error *error)
{
    if (rows >= (int64_t)TQ_SCHEDULE_ROWS * device.processors + batch) return TQ_OK;
    return fail(error, TQ_E_VALUE, "schedule", -1, (double)rows,
                "of at least TQ_SCHEDULE_ROWS * multiprocessors + batch rows");
}

KernelChoice many_rows_kernel(const tq_plan &plan, const AttendArgs &a)
{
    const KernelChoice kernel = find_kernel(Strategy::MANY_ROWS, true, plan, a.rows <= 16 ? 4 : 8, 4);
    return kernel.kernel ? kernel : find_kernel(Strategy::MANY_ROWS, true, plan, 8, 4);
}

KernelChoice split_kernel(const tq_plan &plan, const Device &device, const AttendArgs &a)
{
    const int64_t pages = (int64_t)a.p.layer.batch * a.p.layer.kv_heads * a.p.layer.max_pages;
    const bool pages_of_128 = plan.page_tokens == 4 * TQ_TILE;
    /* Whole pages are faster once every multiprocessor has some. */
    const bool whole = pages_of_128 && pages >= (int64_t)RULES.whole_from * device.processors;
    const int sizes[] = {whole ? 4 : 2, whole || !pages_of_128 ? 2 : 4};
    KernelChoice kernel = {};
    /* codes of 2 bits are cheap to unpack, so more warps gain more than more rows for each */
    int row_quads = a.rows <= 4 ? 1 : a.rows <= 8 || width_with_own_kernels(plan) == 2 ? 2 : 4;
    for (; row_quads && !kernel.kernel; row_quads /= 2) /* every plan has a kernel for 4 rows and half pages */
        for (int tiles : sizes)
            if (!kernel.kernel) kernel = find_kernel(Strategy::SPLIT, device.bulk, plan, row_quads, tiles);
    return kernel;
}

/** Returns what the line of all pages costs by a kernel that unpacks each page `times` times, for rows in tiles of
 *  `tile_rows`; INFINITY if it has too many pages. */
static double cost_of_line(const tq_plan &plan, const Device &device, const AttendArgs &a, const KernelChoice &kernel,
                           int tile_rows, double times)
{
    const double heads = (double)a.p.layer.kv_heads / device.processors;
    /* cut_pages counts units of half pages, and one more for each segment, in 32 bits. */
    if (heads * device.processors * a.p.layer.batch * times * (half_pages_of(a) + 1) > INT32_MAX) return INFINITY;
    return of_lengths(a, [&](int sequences) {
        Load load;
        load.bytes = bytes_of(a, sequences);
        load.half_pages = half_pages_of(a) * sequences * heads * times;
        load.rows = heads * a.p.layer.batch * ((a.rows + tile_rows - 1) / tile_rows) * tile_rows;
        load.exact = (double)((most_exact_tokens(a.p) + EXACT_TILE - 1) / EXACT_TILE) * load.rows / 4;
        return microseconds(costs_of(kernel), plan, a, kernel, load);
    });
}

void offer_many_rows(const tq_plan &plan, const Device &device, const Launch &launch, Offers *offers)
{
    const AttendArgs &a = launch.args;
    const KernelChoice kernel = many_rows_kernel(plan, a);
    const int rows = kernel.team_rows, times = (a.rows + rows - 1) / rows;
    offers->add({Strategy::MANY_ROWS, cost_of_line(plan, device, a, kernel, rows, times)});
}

void offer_split(const tq_plan &plan, const Device &device, const Launch &launch, Offers *offers)
{
    const KernelChoice kernel = split_kernel(plan, device, launch.args);
    /* Several warps unpack a page, for rows of their own, and each takes half as long again (fitted as Costs are). */
    const int warps = (launch.args.rows + kernel.rows - 1) / kernel.rows;
    const double times = warps > 1 ? 1.5 * warps : 1;
    offers->add({Strategy::SPLIT, cost_of_line(plan, device, launch.args, kernel, 4, times)});
}

tq_status cut_split(const tq_plan &plan, const Device &device, Launch *launch, tq_error *error)
{
    TQ_CUDA_TRY(cut_pages(plan, device, launch, error));
    AttendArgs &a = launch->args;
    a.schedule_teams = launch->blocks * a.teams;
    a.schedule_key = key_of(a);
    if (a.p.schedule) TQ_CUDA_TRY(check_schedule_rows(a.p.layer.batch, a.p.schedule_rows, device, error));
    a.schedule = reinterpret_cast<const int4 *>(a.p.schedule);
    return cut_ends(device, launch, error);
}

size_t lay_out_split_workspace(Launch *l, char *base)
{
    AttendArgs &a = l->args;
    int64_t at = 0, rows = l->segments * a.tile_rows,
            slots = ((int64_t)l->blocks * a.teams + l->segments) * a.tile_rows, width = TQ_TILE * a.groups;
    int64_t exact_rows = (int64_t)a.p.layer.batch * a.p.layer.kv_heads * a.exact_parts * a.row_tiles * a.tile_rows,
            f = sizeof(float);
    a.segments = reinterpret_cast<SegmentParts *>(base + take(&at, l->segments * sizeof(SegmentParts)));
    a.row_args = reinterpret_cast<RowArgs *>(base + take(&at, rows * sizeof(RowArgs)));
    a.queries = reinterpret_cast<uint2 *>(base + take(&at, rows / 4 * a.groups * 32 * sizeof(uint2)));
    a.totals = reinterpret_cast<RowTotals *>(base + take(&at, slots * sizeof(RowTotals)));
    a.sums = reinterpret_cast<float *>(base + take(&at, slots * width * f));
    a.wave.rows =
        reinterpret_cast<float2 *>(base + take(&at, rows * a.wave.steps * WAVE_STEP * (int64_t)sizeof(float2)));
    a.exact_totals = reinterpret_cast<RowTotals *>(base + take(&at, exact_rows * sizeof(RowTotals)));
    a.exact_sums = reinterpret_cast<float *>(base + take(&at, exact_rows * width * f));
    return (size_t)at;
}

} // namespace tq
