/* Which calls CHUNK takes. Host code. */
#include "cuda/attend/chunk/chunk.h"

#include <stdio.h>

#include <initializer_list>

#include "core/plan_kind.h"
#include "cuda/attend/choose/cost.h"
#include "cuda/attend/chunk/sizes.h"

namespace tq
{

bool chunk_takes(const tq_plan &plan)
{
    if (!tq_is_plain(&plan) || plan.group_channels != TQ_TILE || plan.page_tokens != chunk::PAGE) return false;
    if (plan.groups < 2 || plan.groups > chunk::MOST_GROUPS || plan.rotation == TQ_ROTATION_DENSE) return false;
    for (const tq_side *side : {&plan.key, &plan.value})
        for (int g = 0; g < plan.groups; g++)
            if (side->bits[g] < 1 || side->bits[g] > chunk::MOST_BITS) return false;
    return true;
}

bool chunk_is_for(const tq_plan &plan, const tq_attend_params &p)
{
    const tq_layer &l = p.layer;
    if (!chunk_takes(plan) || p.causal || p.sliding_window > 0 || p.starts || p.ends || l.dtype == TQ_F32) return false;
    return !l.sinks && !l.window && !p.fresh_k && l.kv_heads;
}

bool chunk_can_attend(const tq_plan &plan, const tq_attend_params &p)
{
    const tq_layer &l = p.layer;
    if (!chunk_is_for(plan, p)) return false;
    const int64_t rows = (int64_t)p.query_heads / l.kv_heads * p.query_tokens, tiles = rows / chunk::TEAM_ROWS + 1;
    /* pages of the line, rows and positions are counted in 32 bits */
    if (rows > INT32_MAX / 4 || l.max_pages > INT32_MAX / chunk::PAGE) return false;
    if (tiles * l.batch * l.kv_heads * ((int64_t)l.max_pages + 2 * chunk::TEAM_ROWS) > INT32_MAX) return false;
    return chunk::wave_bytes(plan, l) <= chunk::MOST_WAVE_BYTES;
}

/** Returns the rows of a KV head that share decoded pages. */
static int rows_at_once(const tq_attend_params &p)
{
    const int64_t rows = (int64_t)p.query_heads / p.layer.kv_heads * p.query_tokens;
    return rows <= chunk::TEAM_ROWS ? chunk::TEAM_ROWS : 2 * chunk::TEAM_ROWS;
}

bool chooses_chunk(const tq_plan &plan, const tq_attend_params &p, const Device &device, const Launch &otherwise)
{
    if (!device.bulk || device.never_fused || device.wanted >= 0 || !chunk_can_attend(plan, p)) return false;
    const AttendArgs &a = otherwise.args;
    if (device.always_chunk) return true;
    if (a.rows <= RULES.chunk_rows) return false;
    const double heads = (double)p.layer.kv_heads / device.processors;
    KernelChoice kernel = {};
    kernel.rows = rows_at_once(p);
    const double tiles = (a.rows + kernel.rows - 1) / kernel.rows;
    const double us = of_lengths(a, [&](int sequences) {
        Load load;
        load.bytes = bytes_of(a, sequences);
        load.half_pages = half_pages_of(a) * sequences * heads * tiles;
        load.rows = heads * p.layer.batch * tiles * kernel.rows;
        return microseconds(chunk_costs(), plan, a, kernel, load);
    });
    return us < otherwise.us;
}

void name_chunk(const tq_plan &plan, const tq_attend_params &p, char *name)
{
    snprintf(name, TQ_CUDA_KERNEL_NAME_BYTES, "attend_chunk_d%d_%dx%d%s", TQ_TILE * plan.groups, rows_at_once(p),
             chunk::PAGE, plan.wave_pairs ? "_wave" : "");
}

} // namespace tq
