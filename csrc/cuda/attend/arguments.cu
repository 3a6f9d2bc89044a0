/* Arguments of the attention kernels that depend on the plan, sizes and the chosen kernel. */
#include <math.h>
#include <string.h>

#include "cuda/attend/choose/cut.h"
#include "cuda/tile/codebooks.h"
#include "turboquant_checks.h"

namespace tq
{
namespace
{

void copy_side(const tq_plan &plan, const tq_side &from, SideArgs *to)
{
    for (int g = 0; g < PLAN_GROUPS; g++) {
        to->bits[g] = (uint8_t)from.bits[g];
        to->width[g] = (uint16_t)(1u << from.bits[g]);
        to->offset[g] = (uint16_t)from.offset[g]; // less than 32 tokens x 512 channels x 1 byte
    }
    to->tile_bytes = from.tile_bytes * TQ_TILE / plan.tile_tokens;
    to->codes_offset = (int32_t)from.codes_offset;
    to->scales_offset = (int32_t)from.scales_offset;
}

/** Sets the factors of the code bytes that kernel k unpacks. steps: [TQ_WIDE_BITS + 1], a codebook's step by width. */
void set_factors(const tq_plan &plan, const float *steps, const KernelChoice &k, bool keys, SideArgs *to)
{
    bool fine = tq_tile_is_16(&plan);
    to->row_factor = !k.team_rows && !fine;
    for (int b = 1; b <= TQ_WIDE_BITS; b++) {
        float step = steps[b]; /* a number is step * level; at 1 and 2 bits a level is 2 code - (2^b - 1) */
        int offset = b < 4 || (k.two_products && b <= 5) ? 0 : 128; /* byte - level (tile/fragments.cuh) */
        bool scaled = b <= 2 && (fine || (keys && k.bits == BY_GROUP));
        int top = (1 << b) - 1;
        if (k.team_rows && !keys) { /* unpack_half_exactly leaves no offset */
            to->factor[b] = has_sign(b) ? step / LEVEL_UNIT : b > 2 ? step : 2 * step;
            continue;
        }
        to->factor[b] = b > 2 ? step : scaled ? 2 * step / (1 << (8 - b)) : 2 * step;
        to->offset_levels[b] = b <= 2 ? (scaled ? -top * (1 << (7 - b)) : -top) : -offset;
        to->offset_factor[b] = b <= 2 ? -top * step : -offset * step;
    }
}

} // namespace

void fill_ragged(const tq_plan &plan, const tq_attend_params &p, AttendArgs *args)
{
    AttendArgs &a = *args;
    a.varies = p.query_start_loc || p.ends || tq_is_indexed(&p.layer);
    a.unpacked_sinks = tq_unpacked_sinks(&p.layer);
    a.unpacked_window = tq_unpacked_window(&p.layer);
    a.recent = p.causal && !p.layer.tail_rows ? p.layer.window : FAR_BACK;
    a.by_slots = divisor_of(tq_window_slots(&p.layer));
    a.by_page = divisor_of(plan.page_tokens);
    const tq_row_strides out = tq_strides_of_out(&plan, &p), lse = tq_strides_of_lse(&p);
    a.p.out_stride_batch = out.batch, a.p.out_stride_head = out.head, a.p.out_stride_token = out.token;
    a.p.lse_stride_batch = lse.batch, a.p.lse_stride_head = lse.head, a.p.lse_stride_token = lse.token;
    if (p.query_start_loc) a.p.q_stride_batch = a.p.out_stride_batch = a.p.lse_stride_batch = 0;
}

tq_status fill_args(const tq_plan &plan, const tq_attend_params &p, Launch *l, tq_error *error)
{
    memset(l, 0, sizeof *l);
    AttendArgs &a = l->args;
    a.p = p;
    a.head_dim = plan.head_dim;
    a.groups = (plan.head_dim + TQ_TILE - 1) / TQ_TILE;
    a.pitch = TQ_TILE * a.groups + 8;
    a.rotation_factor = (float)(1 / sqrt((double)plan.head_dim));
    a.plan_groups = plan.groups;
    a.fine = tq_tile_is_16(&plan);
    const int64_t capacity = tq_capacity(&plan, &p.layer);
    if (capacity > INT32_MAX / 2)
        return fail(error, TQ_E_VALUE, "max_pages", -1, p.layer.max_pages, "fewer: positions are 32-bit");
    a.capacity = (int32_t)capacity;
    if (p.sliding_window >= capacity) a.p.sliding_window = 0; // position - window may overflow
    a.page_tokens = plan.page_tokens;
    a.rotation = plan.rotation;
    a.record_bytes = plan.record_bytes;
    a.page_limit = p.layer.n_pages <= INT32_MAX ? (uint32_t)p.layer.n_pages : 1u << 31;
    const int64_t page_bytes = tq_page_stride(&plan, &p.layer);
    if (page_bytes > UINT32_MAX)
        return fail(error, TQ_E_VALUE, "kv_heads", -1, p.layer.kv_heads, "fewer: a page has 4 GiB at most");
    if ((int64_t)p.layer.batch * a.p.layer.max_pages > UINT32_MAX)
        return fail(error, TQ_E_VALUE, "max_pages", -1, p.layer.max_pages,
                    "fewer: a block table has 2^32 entries at most");
    a.page_bytes = (uint32_t)page_bytes;
    a.heads_per_kv = p.layer.kv_heads ? p.query_heads / p.layer.kv_heads : 0;
    a.by_heads_per_kv = divisor_of(a.heads_per_kv);
    int64_t rows = (int64_t)a.heads_per_kv * p.query_tokens;
    if (rows > INT32_MAX / 2) return fail(error, TQ_E_VALUE, "query_tokens", -1, p.query_tokens, "fewer");
    a.rows = p.layer.batch && (!p.query_start_loc || p.total_tokens) ? (int32_t)rows : 0;
    fill_ragged(plan, p, &a);
    copy_side(plan, plan.key, &a.key);
    copy_side(plan, plan.value, &a.value);
    a.signs = signs_of(plan);
    a.wave.pairs = plan.wave_pairs;
    a.wave.metric = plan.metric;
    a.wave.steps = (plan.wave_pairs + 2 * WAVE_STEP - 1) / (2 * WAVE_STEP) * 2;
    a.wave.variance = plan.variance * p.softmax_scale * p.softmax_scale * LOG2_E / (2.0f * (float)plan.head_dim);
    return TQ_OK;
}

void fill_factors(const tq_plan &plan, Launch *launch)
{
    AttendArgs &a = launch->args;
    const LevelsByCode &levels = of_codebooks<LevelsByCode>(plan, fill_levels_by_code);
    a.tables = of_codebooks<LevelTables>(plan, fill_level_tables);
    set_factors(plan, levels.step, launch->kernel, true, &a.key);
    set_factors(plan, levels.step, launch->kernel, false, &a.value);
}

} // namespace tq
