/* tq_cuda_attend: checks what the host can see, chooses a kernel and its launch shape, queues it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attend_cut.cuh"
#include "blocks.cuh"

namespace tq
{
namespace
{

/* ---- the device ---- */

/** How many clusters of LARGE_CLUSTER blocks the current device can have at work, a block a multiprocessor: an H200 7. 0 where it cannot
 *  say. Remembered as in current_device. */
int count_large_clusters(const DeviceFacts &device)
{
    static thread_local int known = -1, count;
    if (device.id == known) return count;
    void (*kernel)(AttendArgs) = attend_kernel_few(4, 4, 1, 2, false).kernel;
    const void *function = reinterpret_cast<const void *>(kernel);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {LARGE_CLUSTER, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(LARGE_CLUSTER);
    config.blockDim = dim3(32 * FEW_WARPS);
    config.dynamicSmemBytes = device.shared_bytes_per_block / 4 * 3; /* so that no two share a multiprocessor */
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (allow_shared(function, device, config.dynamicSmemBytes, true, nullptr) != TQ_OK ||
        allow_large_clusters(function, device, nullptr) != TQ_OK ||
        cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess) {
        cudaGetLastError();
        count = 0;
    }
    known = device.id;
    return count;
}

tq_status look_at_device(Device *d, tq_error *error)
{
    TQ_CUDA_TRY(current_device(d, error));
    d->bulk = d->line = false;
    d->large_clusters = 0;
    if (d->major == 9)
        TQ_CUDA_TRY(is_hopper_code(reinterpret_cast<const void *>(attend_end_kernels(4).prepare), *d, &d->bulk, error));
    const char *path = getenv("TURBOQUANT_CUDA_PATH");
    if (!path || !*path) return TQ_OK;
    bool portable = !strcmp(path, "portable");
    d->line = !strcmp(path, "hopper-line");
    if (!portable && !d->line && strcmp(path, "hopper"))
        return fail(error, TQ_E_UNSUPPORTED, "TURBOQUANT_CUDA_PATH", -1, 0,
                    "\"hopper\", \"hopper-line\" or \"portable\"");
    if (!portable && !d->bulk)
        return fail(error, TQ_E_UNSUPPORTED, "TURBOQUANT_CUDA_PATH", -1, d->major,
                    "\"portable\" but on compute capability 9.0, with kernels compiled for it");
    d->bulk = !portable;
    return TQ_OK;
}

/* ---- checks ---- */

/** What CUDA alone asks for: rows are read four numbers at a time. */
tq_status check_alignment(const tq_attend_params *p, tq_error *error)
{
    int64_t bytes = p->dtype == TQ_F32 ? 4 : 2;
    const struct {
        const char *name;
        const void *at;
    } arrays[] = {{"q", p->q},
                  {"sink_k", p->sink_k},
                  {"sink_v", p->sink_v},
                  {"window_k", p->window_k},
                  {"window_v", p->window_v},
                  {"out", p->out},
                  {"fresh_k", p->fresh_k},
                  {"fresh_v", p->fresh_v}};
    for (auto &x : arrays)
        if ((uintptr_t)x.at % (4 * bytes))
            return fail(error, TQ_E_VALUE, x.name, -1, (double)((uintptr_t)x.at % (4 * bytes)),
                        "aligned to four of its numbers (got: bytes behind)");
    const struct {
        const char *name;
        int64_t stride, length; /* of a dimension: whose only element has none */
    } strides[] = {{"q", p->q_stride_batch, p->batch},
                   {"q", p->q_stride_head, p->query_heads},
                   {"q", p->q_stride_token, p->query_tokens},
                   {"fresh_k", p->fresh_k_stride_batch, p->batch},
                   {"fresh_k", p->fresh_k_stride_head, p->kv_heads},
                   {"fresh_k", p->fresh_k_stride_token, p->query_tokens},
                   {"fresh_v", p->fresh_v_stride_batch, p->batch},
                   {"fresh_v", p->fresh_v_stride_head, p->kv_heads},
                   {"fresh_v", p->fresh_v_stride_token, p->query_tokens}};
    for (auto &x : strides)
        if (x.length > 1 && x.stride % 4)
            return fail(error, TQ_E_VALUE, x.name, -1, (double)x.stride, "of strides that are multiples of 4 on CUDA");
    return TQ_OK;
}

/* ---- the plan ---- */

/** The choices below are as measured on an H200. */
KernelChoice choose_kernel(const tq_plan *plan, int rows, int dtype, int64_t pages, const Device &device)
{
    int bits = uniform_bits(plan), groups = (plan->head_dim + TQ_TILE - 1) / TQ_TILE;
    /* Whole pages pay off once every multiprocessor has some; at 2 and 3 bits not where a warp has 1 to 10. */
    int64_t processors = device.processors;
    bool a_few =
        (bits == 2 || bits == 3) && groups == 4 && rows <= 4 && pages >= 12 * processors && pages < 128 * processors;
    bool whole = plan->page_tokens == 4 * TQ_TILE && pages >= 3 * processors && !a_few;
    if (tq_tile_is_16(plan)) return attend_kernel_fine(groups, rows <= 4 ? 1 : 2, whole ? 4 : 2, device.bulk);
    bool has_own = bits >= 2 && bits <= 4; /* kernels of its width; others take those of any plan */
    if (rows > (has_own ? 8 : 16) && is_for_wide(plan, dtype, device)) return attend_kernel_wide(bits, rows);
    bool narrow = groups <= 4; /* 2 bits cost so little to unpack that more warps are worth more than rows a warp */
    int blocks = rows <= 4 ? 1 : rows <= 8 || !narrow || bits == 2 ? 2 : 4;
    int tiles = whole && takes_whole_pages(bits, groups) ? 4 : 2;
    KernelChoice k = {};
    switch (bits) {
    case 2: k = attend_kernel_2(groups, blocks, tiles, device.bulk); break;
    case 3: k = attend_kernel_3(groups, blocks, tiles, device.bulk); break;
    case 4: k = attend_kernel_4(groups, blocks, tiles, device.bulk); break;
    }
    return k.kernel ? k : attend_kernel_mixed(groups, blocks, tiles, device.bulk);
}

void copy_side(const tq_plan &plan, const tq_side &from, SideArgs *to)
{
    for (int g = 0; g < GROUPS_MAX; g++) {
        to->bits[g] = from.bits[g];
        to->width[g] = 1u << from.bits[g];
        to->offset[g] = from.offset[g];
    }
    to->tile_bytes = from.tile_bytes * TQ_TILE / plan.tile_tokens;
    to->codes_offset = (int32_t)from.codes_offset;
    to->scales_offset = (int32_t)from.scales_offset;
}

/** What bytes mean to a kernel. books: [TQ_WIDE_BITS + 1], by width. */
void set_factors(const tq_plan &plan, const tq_codebook *books, const KernelChoice &k, bool keys, SideArgs *to)
{
    bool fine = tq_tile_is_16(&plan);
    to->row_factor = !k.wide_rows && !fine;
    for (int b = 1; b <= TQ_WIDE_BITS; b++) {
        float step = books[b].step; /* of a level; uniform levels are 2 code - (2^b - 1) */
        int offset = b < 4 ? 0 : !k.two_products ? 128 : b == 5 ? -1 : 0; /* of bytes above levels (attend_fragments) */
        bool scaled = b <= 2 && (fine || (keys && !k.key_bits));
        int top = (1 << b) - 1;
        if (k.wide_rows && !keys) { /* multiplies exact levels */
            to->factor[b] = b > 3 ? step / LEVEL_UNIT : b > 2 ? step : 2 * step;
            continue;
        }
        to->factor[b] = b > 2 ? step : scaled ? 2 * step / (1 << (8 - b)) : 2 * step;
        to->offset_levels[b] = b <= 2 ? (scaled ? -top * (1 << (7 - b)) : -top) : -offset;
        to->offset_factor[b] = b <= 2 ? -top * step : -offset * step;
    }
}

tq_status fill_tables(const tq_plan *plan, tq_codebook *books, LevelTables *tables, tq_error *error)
{
    uint8_t level3[8], offset3[8], plus4[8], minus4[8], magnitude4[8], complement5[16];
    memset(books, 0, (TQ_WIDE_BITS + 1) * sizeof *books);
    books[TQ_WIDE_BITS].step = TQ_WIDE_STEP;
    for (int b = 1; b <= TQ_MAX_BITS; b++)
        TQ_CUDA_TRY(tq_get_codebook((tq_codebook_law)plan->codebook, plan->head_dim, b, &books[b], error));
    for (int m = 0; m < 8; m++) {
        level3[m] = (uint8_t)books[3].levels[m];
        offset3[m] = (uint8_t)(128 + books[3].levels[m]);
        magnitude4[m] = (uint8_t)books[4].levels[m];
        plus4[m] = (uint8_t)(magnitude4[m] + 1);
        minus4[7 - m] = (uint8_t)-magnitude4[m];
        if (plus4[m] > 127)
            return fail(error, TQ_E_VALUE, "plan", -1, magnitude4[m], "one whose 4-bit levels are at most 126");
        complement5[m] = (uint8_t)(255 - books[5].levels[m]);
        complement5[8 + m] = (uint8_t)(255 - books[5].levels[16 + m]);
    }
    memcpy(tables->level3, level3, 8);
    memcpy(tables->offset3, offset3, 8);
    memcpy(tables->plus4, plus4, 8);
    memcpy(tables->minus4, minus4, 8);
    memcpy(tables->magnitude4, magnitude4, 8);
    memcpy(tables->complement5, complement5, 16);
    const uint32_t right[4] = {1u << 31, 1u << 30, 1u << 29, 1u << 16};
    memcpy(tables->right, right, sizeof right);
    tables->magic = MAGIC;
    tables->two = 2;
    tables->ones = ~0u;
    return TQ_OK;
}

/* ---- the cut ---- */

/** Rows, warps and stages of pages. */
tq_status cut_pages(const tq_plan *plan, const Device &device, Launch *l, tq_error *error)
{
    AttendArgs &a = l->args;
    a.wide_rows = l->kernel.wide_rows;
    if (a.wide_rows) {
        a.team_warps = WIDE_WARPS;
        a.tile_rows = a.wide_rows;
    } else {
        int row_blocks = (a.rows + 3) / 4;
        a.team_warps = (row_blocks + l->kernel.blocks - 1) / l->kernel.blocks;
        if (a.team_warps > 8) a.team_warps = 8;
        a.tile_rows = 4 * l->kernel.blocks * a.team_warps;
    }
    a.row_tiles = (a.rows + a.tile_rows - 1) / a.tile_rows;
    lay_out_stage(plan, l->kernel.tiles, &a);
    l->segments = (int64_t)a.p.batch * a.p.kv_heads * a.row_tiles;
    int warps = l->kernel.max_threads / 32;
    int room = device.shared_bytes_per_processor - 6 * 1024 - 1024; /* a block of prepare fits beside */
    if (room > device.shared_bytes_per_block) room = device.shared_bytes_per_block;
    int team_bytes = l->kernel.own_bytes * (a.wide_rows ? 1 : a.team_warps);
    for (a.teams = warps / a.team_warps; a.teams > 0; a.teams--) {
        a.stages = (room / a.teams - team_bytes) / (a.stage_bytes + 32);
        /* a second stage is worth more to attend_wide than a fourth team: where pages had 4 bits and 32 rows 5 % */
        int least_stages = a.wide_rows && a.teams > 3 ? 2 : 1;
        if (a.stages >= least_stages) break;
    }
    /* Measured: more stages cost up to 5 % where they are whole pages, and up to 9 % where twelve warps hide what one waits for. */
    int most_stages = a.wide_rows ? 2 : l->kernel.tiles == 4 || a.teams * a.team_warps >= 12 ? 1 : 3;
    if (a.stages > most_stages) a.stages = most_stages;
    if (!a.teams) return fail(error, TQ_E_UNSUPPORTED, "device", -1, room, "a GPU with more shared memory");
    a.at_teams = (a.teams * a.stages * a.stage_bytes + 127) / 128 * 128;
    a.at_barriers = a.at_teams + a.teams * team_bytes;
    l->shared_bytes = a.at_barriers + a.teams * a.stages * 32;
    l->threads = 32 * a.teams * a.team_warps;
    int64_t units = l->segments * ((int64_t)a.p.max_pages * a.page_units + 1);
    if (units > INT32_MAX)
        return fail(error, TQ_E_VALUE, "max_pages", -1, a.p.max_pages, "fewer, or fewer sequences at once");
    l->blocks = (int)(units < device.processors ? units : device.processors);
    return TQ_OK;
}

/** Warps that share the parts of a row: about four parts each where there are few rows, eight where there are many. Dense rotations
 *  want all there can be. */
int combine_ways(const Launch &l, const Device &device, bool dense)
{
    const AttendArgs &a = l.args;
    int most = 16 / a.combine_rows, at_once = l.segments * a.tile_rows < 2 * device.processors ? 4 : 8;
    if (dense) return most;
    if (a.combine_rows > 1) return 1;
    int64_t units = (int64_t)a.p.max_pages * a.page_units, pieces = (int64_t)l.blocks * a.teams;
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
    int most = a.tile_rows <= END_ROWS ? a.tile_rows : a.tile_rows % END_ROWS ? END_ROWS / 2 : END_ROWS;
    int64_t rows = l->segments * a.tile_rows;
    a.prepare_rows = rows <= 16 * device.processors && most > 4 && !dense
                         ? 4
                         : most; /* rather many blocks than much to do for each */
    a.combine_rows = rows < 8 * device.processors ? 1 : most < 4 ? most : 4; /* few rows: all warps of a block on one */
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

/** Lays out the workspace at `base` (NULL: only its size); returns its bytes. */
size_t lay_out_workspace(Launch *l, char *base)
{
    AttendArgs &a = l->args;
    int64_t at = 0, rows = l->segments * a.tile_rows,
            slots = ((int64_t)l->blocks * a.teams + l->segments) * a.tile_rows, width = TQ_TILE * a.groups;
    int64_t exact_rows = (int64_t)a.p.batch * a.p.kv_heads * a.exact_parts * a.row_tiles * a.tile_rows,
            f = sizeof(float);
    a.segments = reinterpret_cast<SegmentParts *>(base + take(&at, l->segments * sizeof(SegmentParts)));
    a.row_args = reinterpret_cast<RowArgs *>(base + take(&at, rows * sizeof(RowArgs)));
    a.queries = reinterpret_cast<uint2 *>(base + take(&at, rows / 4 * a.groups * 32 * sizeof(uint2)));
    a.totals = reinterpret_cast<RowTotals *>(base + take(&at, slots * sizeof(RowTotals)));
    a.sums = reinterpret_cast<float *>(base + take(&at, slots * width * f));
    a.exact_totals = reinterpret_cast<RowTotals *>(base + take(&at, exact_rows * sizeof(RowTotals)));
    a.exact_sums = reinterpret_cast<float *>(base + take(&at, exact_rows * width * f));
    return (size_t)at;
}

tq_status prepare(const tq_plan *plan, const tq_attend_params *p, Launch *l, tq_error *error)
{
    Device device;
    TQ_CUDA_TRY(look_at_device(&device, error));
    memset(l, 0, sizeof *l);
    AttendArgs &a = l->args;
    a.p = *p;
    if (!p->n_pages) a.p.max_pages = 0;
    a.head_dim = plan->head_dim;
    a.groups = (plan->head_dim + TQ_TILE - 1) / TQ_TILE;
    a.pitch = TQ_TILE * a.groups + 8;
    a.rotation_factor = (float)(1 / sqrt((double)plan->head_dim));
    a.plan_groups = plan->groups;
    a.fine = tq_tile_is_16(plan);
    int64_t capacity = (int64_t)p->sinks + p->window + (int64_t)a.p.max_pages * plan->page_tokens;
    if (capacity > INT32_MAX / 2)
        return fail(error, TQ_E_VALUE, "max_pages", -1, p->max_pages, "fewer: positions are 32-bit");
    a.capacity = (int32_t)capacity;
    if (p->sliding_window >= capacity) a.p.sliding_window = 0; // position - window may overflow
    a.page_tokens = plan->page_tokens;
    a.rotation = plan->rotation;
    a.record_bytes = plan->record_bytes;
    a.page_limit = p->n_pages <= INT32_MAX ? (uint32_t)p->n_pages : 1u << 31;
    if (p->kv_heads * a.record_bytes > UINT32_MAX)
        return fail(error, TQ_E_VALUE, "kv_heads", -1, p->kv_heads, "fewer: a page has 4 GiB at most");
    if ((int64_t)p->batch * a.p.max_pages > UINT32_MAX)
        return fail(error, TQ_E_VALUE, "max_pages", -1, p->max_pages, "fewer: a block table has 2^32 entries at most");
    a.page_bytes = (uint32_t)(p->kv_heads * a.record_bytes);
    a.group = p->kv_heads ? p->query_heads / p->kv_heads : 0;
    a.by_group = divisor_of(a.group);
    a.by_window = divisor_of(p->window);
    int64_t rows = (int64_t)a.group * p->query_tokens;
    if (rows > INT32_MAX / 2) return fail(error, TQ_E_VALUE, "query_tokens", -1, p->query_tokens, "fewer");
    a.rows = (int32_t)rows;
    if (!p->batch || !rows) return TQ_OK;
    int64_t pages = (int64_t)p->batch * p->kv_heads * a.p.max_pages;
    copy_side(*plan, plan->key, &a.key);
    copy_side(*plan, plan->value, &a.value);
    if (device.bulk && !device.line) device.large_clusters = count_large_clusters(device);
    bool few = cut_few(plan, device, l);
    if (!few) l->kernel = choose_kernel(plan, a.rows, p->dtype, pages, device);
    tq_codebook books[TQ_WIDE_BITS + 1];
    TQ_CUDA_TRY(fill_tables(plan, books, &a.tables, error));
    set_factors(*plan, books, l->kernel, true, &a.key);
    set_factors(*plan, books, l->kernel, false, &a.value);
    a.signs = signs_of(*plan);
    if (few) return TQ_OK;
    TQ_CUDA_TRY(cut_pages(plan, device, l, error));
    return cut_ends(device, l, error);
}

} // namespace
} // namespace tq

using namespace tq;

tq_status tq_cuda_attend_workspace_bytes(const tq_plan *plan, const tq_attend_params *params, size_t *bytes,
                                         tq_error *error)
{
    Launch l;
    TQ_CUDA_TRY(tq_check_attend_sizes(plan, params, error));
    TQ_CUDA_TRY(check_plan(*plan, error));
    if (!bytes) return fail(error, TQ_E_VALUE, "bytes", -1, 0, "a pointer, not NULL");
    if (!tq_is_plain(plan)) return attend_blocks_bytes(*plan, *params, bytes, error);
    TQ_CUDA_TRY(prepare(plan, params, &l, error));
    *bytes = !l.blocks ? 0 : l.args.few.warps ? lay_out_parts(&l, nullptr) : lay_out_workspace(&l, nullptr);
    return TQ_OK;
}

tq_status tq_cuda_attend(const tq_plan *plan, const tq_attend_params *params, void *workspace, size_t workspace_bytes,
                         void *stream, tq_error *error)
{
    Launch l;
    TQ_CUDA_TRY(tq_check_attend(plan, params, error));
    TQ_CUDA_TRY(check_plan(*plan, error));
    TQ_CUDA_TRY(check_alignment(params, error));
    if (!tq_is_plain(plan))
        return attend_blocks(*plan, *params, workspace, workspace_bytes, static_cast<cudaStream_t>(stream), error);
    TQ_CUDA_TRY(prepare(plan, params, &l, error));
    if (!l.blocks) return TQ_OK;
    char *base = static_cast<char *>(workspace);
    size_t needed = l.args.few.warps ? lay_out_parts(&l, base) : lay_out_workspace(&l, base);
    if (needed && (!workspace || (uintptr_t)workspace % 256 || workspace_bytes < needed))
        return fail(error, TQ_E_VALUE, "workspace_bytes", -1, (double)workspace_bytes,
                    "at least tq_cuda_attend_workspace_bytes, 256-byte aligned");
    cudaStream_t s = static_cast<cudaStream_t>(stream);
    DeviceFacts device;
    TQ_CUDA_TRY(current_device(&device, error));
    if (l.args.few.warps) {
        MergeKernel merge = attend_merge_parts();
        for (auto kernel : {l.kernel.kernel, merge.kernel})
            TQ_CUDA_TRY(allow_shared(reinterpret_cast<const void *>(kernel), device, 0, true, error));
        TQ_CUDA_TRY(launch_clusters(l.kernel.kernel, l.blocks, l.args.row_tiles, l.args.few.cluster, l.threads,
                                    l.shared_bytes, s, error, l.args));
        if (!needed) return TQ_OK;
        return launch(merge.kernel, l.segments / l.args.row_tiles * l.args.rows, merge.threads, 0, s, error, l.args);
    }
    EndKernels ends = attend_end_kernels(l.args.groups);
    /* A multiprocessor divides its memory into cache and shared memory anew only when it is empty: ask for the same division thrice. */
    for (auto kernel : {ends.prepare, l.kernel.kernel, ends.combine})
        TQ_CUDA_TRY(allow_shared(reinterpret_cast<const void *>(kernel), device, 0, true, error));
    TQ_CUDA_TRY(launch(ends.prepare, l.prepare_blocks, l.prepare_threads, l.prepare_bytes, s, error, l.args));
    TQ_CUDA_TRY(launch(l.kernel.kernel, l.blocks, l.threads, l.shared_bytes, s, error, l.args));
    return launch(ends.combine, l.combine_blocks, l.combine_threads, l.combine_bytes, s, error, l.args);
}

const char *tq_cuda_kernel_name(const char *operation, const tq_plan *plan)
{
    Device device;
    if (!operation || !plan || look_at_device(&device, nullptr) != TQ_OK) return nullptr;
    const char *const blocked[][2] = {
        {"append", "append_blocks"}, {"attend", "attend_blocks"}, {"dequantize", "dequantize_blocks"}};
    for (auto &names : blocked)
        if (!tq_is_plain(plan) && !strcmp(operation, names[0])) return names[1];
    const char *plain[] = {"rotate", "append", "dequantize", "merge"};
    for (const char *name : plain)
        if (!strcmp(operation, name)) return name;
    if (strcmp(operation, "attend")) return nullptr;
    switch (choose_kernel(plan, 4, TQ_BF16, 0, device).key_bits) {
    case 2: return device.bulk ? "attend_hopper_2" : "attend_portable_2";
    case 3: return device.bulk ? "attend_hopper_3" : "attend_portable_3";
    case 4: return device.bulk ? "attend_hopper_4" : "attend_portable_4";
    }
    if (tq_tile_is_16(plan)) return device.bulk ? "attend_hopper_fine" : "attend_portable_fine";
    return device.bulk ? "attend_hopper_mixed" : "attend_portable_mixed";
}
