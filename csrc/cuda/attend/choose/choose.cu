/* Chooses the kernel: what the conditions allow -> what costs least -> a row of KERNELS (table.h). csrc/cuda/README.md
 * explains it. */
#include <stdio.h>

#include "cuda/attend/choose/cut.h"

namespace tq
{
namespace
{

/** When a strategy is considered. Rows are query tokens * query heads per KV head. */
struct Condition {
    Strategy strategy;
    bool hopper;                    /* only on 9.x */
    int first_rows, first_rows_any; /* the fewest rows: with a width that has its own kernels, and without */
    int last_rows;
    int first_groups, last_groups;
    bool whole_pages_of_16_bits; /* only pages of 128 tokens, and fp16 or bf16, because weights are rounded to fp16 */
    bool dense, tile_16;         /* whether it takes dense rotations, and tiles of 16 channels */
    void (*offer)(const tq_plan &plan, const Device &device, const Launch &launch, Offers *offers);
};

/** All fused strategies whose conditions hold, and the first other one, offer ways to run the call. The cheapest runs. */
constexpr Condition CONDITIONS[] = {
    /* strategy                hopper rows (own, any, most)  groups  128 tokens, 16 bits  dense  tile_16 */
    {Strategy::FUSED_MANY_ROWS, true, 9, 9, FUSED_ROWS, 4, 4, true, false, false, offer_fused_many_rows},
    {Strategy::FUSED, true, 1, 1, 16, 1, 4, false, false, false, offer_fused},
    {Strategy::MANY_ROWS, true, 9, 17, INT32_MAX, 4, 4, true, true, false, offer_many_rows},
    {Strategy::SPLIT, false, 1, 1, INT32_MAX, 1, 16, false, true, true, offer_split},
};

bool holds(const Condition &c, const tq_plan &plan, const Device &device, const AttendArgs &a)
{
    if (c.hopper && !device.bulk) return false;
    if (is_fused(c.strategy) && device.never_fused) return false;
    if (a.rows < (width_with_own_kernels(plan) ? c.first_rows : c.first_rows_any) || a.rows > c.last_rows) return false;
    if (a.groups < c.first_groups || a.groups > c.last_groups) return false;
    if (c.whole_pages_of_16_bits && (plan.page_tokens != 4 * TQ_TILE || a.p.layer.dtype == TQ_F32)) return false;
    return (c.dense || plan.rotation != TQ_ROTATION_DENSE) && (c.tile_16 || !tq_tile_is_16(&plan));
}

/** Whether kernels that KERNELS lists with `width` take the plan's bit widths. */
bool takes_widths(int width, const tq_plan &plan)
{
    const int key = plan.key.bits[0], value = plan.value.bits[0];
    if (width == BY_GROUP) return true;
    if (!tq_has_one_width(&plan.key) || !tq_has_one_width(&plan.value)) return false;
    return width == BY_SIDE ? key <= MOST_BY_SIDE && value <= MOST_BY_SIDE : key == width && value == width;
}

} // namespace

KernelChoice find_kernel(Strategy strategy, bool hopper, const tq_plan &plan, int row_quads, int tiles)
{
    /* In FUSED only kernels with a wave have the variance term. All of FUSED_MANY_ROWS have it, behind a branch. */
    const bool term = strategy == Strategy::FUSED && plan.variance > 0,
               wave = is_fused(strategy) && (tq_has_moments(&plan) || term), tile_16 = tq_tile_is_16(&plan);
    const int groups = (plan.head_dim + TQ_TILE - 1) / TQ_TILE;
    for (int row = 0; row < KERNEL_ROWS; row++) {
        const KernelRow &r = KERNELS[row];
        const unsigned takes = r.rows_by_half_page | (plan.page_tokens == 4 * TQ_TILE ? r.rows_by_page : 0);
        if (r.strategy == strategy && r.hopper == hopper && takes_widths(r.width, plan) && r.tile_16 == tile_16 &&
            r.first_groups <= groups && groups <= r.last_groups && r.wave == wave && takes & row_quads)
            return compiled_kernel(row, row_quads, tiles);
    }
    return {};
}

tq_status choose_kernel(const tq_plan &plan, const Device &device, Launch *launch, tq_error *error)
{
    Offers offers;
    offers.wanted = device.wanted;
    for (const Condition &c : CONDITIONS) {
        if (!holds(c, plan, device, launch->args)) continue;
        c.offer(plan, device, *launch, &offers);
        if (!is_fused(c.strategy)) break;
    }
    if (device.wanted >= offers.count)
        return fail(error, TQ_E_UNSUPPORTED, "TURBOQUANT_CUDA_PATH", -1, offers.wanted,
                    "hopper-N, where the call has a way N");
    const Strategy strategy = offers.best.strategy;
    launch->us = offers.best.us;
    if (is_fused(strategy)) cut_fused(plan, device, offers.best, launch);
    else
        launch->kernel = strategy == Strategy::SPLIT ? split_kernel(plan, device, launch->args)
                                                     : many_rows_kernel(plan, launch->args);
    fill_factors(plan, launch);
    if (launch->args.fused.ragged) return use_shares(device, launch, error);
    return is_fused(strategy) ? TQ_OK : cut_split(plan, device, launch, error);
}

size_t workspace_bound(const AttendArgs &a, const DeviceFacts &device)
{
    constexpr int64_t MOST_WARPS = 20, MOST_TILE_ROWS = 128, MOST_PREPARED = 16, ARRAYS = 8, F = sizeof(float);
    const int64_t heads = (int64_t)a.p.layer.batch * a.p.layer.kv_heads, width = TQ_TILE * (int64_t)a.groups,
                  of_warp = a.rows <= 4   ? 4
                            : a.rows <= 8 ? 8
                                          : 16,
                  processors = device.processors;
    if (!a.rows) return 0;
    /* FUSED: blocks leave parts of their rows: at most MOST_WARPS / 2 for each multiprocessor; if lengths differ,
     * MOST_WHOLE_OF_SHARE times as many, and one for each segment. A call may also write its own schedule. */
    const int64_t fused = (MOST_WHOLE_OF_SHARE * MOST_WARPS / 2 * processors + heads) * of_warp * (4 + 2 * width) * F +
                          fused_schedule_rows(a.p.layer.batch) * sizeof(int4) + 2 * 256;
    /* SPLIT: rows are padded to whole tiles. Parts have a slot for each piece and each segment (SegmentParts). */
    const int64_t padding = a.rows + 31 < MOST_TILE_ROWS ? a.rows + 31 : MOST_TILE_ROWS,
                  rows = heads * (a.rows + padding), slots = MOST_WARPS * processors * of_warp + rows,
                  prepared = sizeof(SegmentParts) + sizeof(RowArgs) + 64 * (int64_t)a.groups +
                             a.wave.steps * WAVE_STEP * (int64_t)sizeof(float2);
    /* cut_ends makes parts of at least 8 exact tokens where that gives few blocks, otherwise of at least 32. */
    const int64_t tokens = most_exact_tokens(a.p), parts = (tokens + 31) / 32 < 16 ? (tokens + 31) / 32 : 16,
                  few = tokens ? 2 * processors * MOST_PREPARED : 0, exact = few > rows * parts ? few : rows * parts;
    const int64_t split = rows * prepared + (slots + exact) * ((int64_t)sizeof(RowTotals) + width * F) + ARRAYS * 256;
    return (size_t)(split > fused ? split : fused);
}

tq_status name_of_choice(const tq_plan &plan, const tq_attend_params &params, const Device &device, char *name,
                         tq_error *error)
{
    Launch launch;
    const bool rows = params.layer.batch && params.layer.kv_heads && params.query_heads && params.query_tokens;
    snprintf(name, TQ_CUDA_KERNEL_NAME_BYTES, "%s", rows && !tq_is_plain(&plan) ? "attend_baseline" : "");
    if (!tq_is_plain(&plan)) return TQ_OK;
    TQ_CUDA_TRY(fill_args(plan, params, &launch, error));
    if (!launch.args.rows) return TQ_OK;
    TQ_CUDA_TRY(choose_kernel(plan, device, &launch, error));
    if (chooses_chunk(plan, params, device, launch)) name_chunk(plan, params, name);
    else if (launch.blocks) name_kernel(launch.kernel, name);
    return TQ_OK;
}

void name_kernel(const KernelChoice &kernel, char *name)
{
    const KernelRow &r = KERNELS[kernel.row];
    const char *const strategies[] = {"split", "many_rows", "fused", "fused_many_rows"};
    char width[16];
    if (r.width == BY_SIDE) snprintf(width, sizeof width, "sides");
    else if (r.width) snprintf(width, sizeof width, "%dbit", r.width);
    else snprintf(width, sizeof width, r.tile_16 ? "tile16" : "any");
    snprintf(name, TQ_CUDA_KERNEL_NAME_BYTES, "attend_%s_%s_d%d_%dx%d%s%s%s", strategies[(int)r.strategy], width,
             TQ_TILE * r.last_groups, kernel.rows, TQ_TILE * kernel.tiles * (is_fused(r.strategy) ? kernel.run : 1),
             r.wave ? "_wave" : "", kernel.is_ragged ? "_ragged" : "", r.hopper ? "" : "_portable");
}

} // namespace tq
