/* How attention's work is cut into blocks: what attend.cu and attend_cut_few share. */
#ifndef TQ_CUDA_ATTEND_CUT_CUH
#define TQ_CUDA_ATTEND_CUT_CUH
#include "attend_launch.cuh"

namespace tq
{

struct Device : DeviceFacts {
    bool bulk, line;    /* line: never attend_few, for tests */
    int large_clusters; /* as count_large_clusters says, for those who ask it */
};

struct Launch {
    KernelChoice kernel;
    AttendArgs args;
    int blocks, threads, shared_bytes;
    int prepare_blocks, prepare_threads, prepare_bytes, combine_blocks, combine_threads, combine_bytes;
    int64_t segments;
};

/** The next `bytes` behind *at, 256-byte aligned. */
inline int64_t take(int64_t *at, int64_t bytes)
{
    int64_t start = *at;
    *at += (bytes + 255) / 256 * 256;
    return start;
}

/** The width of all groups, keys and values; 0 where they differ. */
inline int uniform_bits(const tq_plan *plan)
{
    bool same =
        tq_has_one_width(&plan->key) && tq_has_one_width(&plan->value) && plan->key.bits[0] == plan->value.bits[0];
    return same && !tq_tile_is_16(plan) ? plan->key.bits[0] : 0;
}

/** Whether the kernels for many rows take this; they round weights to fp16. */
inline bool is_for_wide(const tq_plan *plan, int dtype, const Device &device)
{
    return device.bulk && dtype != TQ_F32 && !tq_tile_is_16(plan) && plan->groups == 4 &&
           plan->page_tokens == 4 * TQ_TILE;
}

/** Exact tokens of a sequence at most. */
inline int64_t most_exact_tokens(const tq_attend_params &p)
{
    return p.window ? (int64_t)p.sinks + p.window + (p.query_tokens - 1) : p.sinks;
}

/** Where the sides of a unit are in a stage, and what is copied there. */
inline void lay_out_stage(const tq_plan *plan, int tiles, AttendArgs *args)
{
    AttendArgs &a = *args;
    int page_tiles = plan->page_tokens / TQ_TILE;
    a.unit_tokens = tiles * TQ_TILE;
    a.page_units = (plan->page_tokens + a.unit_tokens - 1) / a.unit_tokens;
    a.key.at_codes = 0;
    a.value.at_codes = tiles * a.key.tile_bytes;
    a.key.at_scales = a.value.at_codes + tiles * a.value.tile_bytes;
    a.value.at_scales = a.key.at_scales + 2 * plan->page_tokens; /* as far on as in the page: scales are one piece */
    a.stage_bytes = a.value.at_scales + tiles * 2 * TQ_TILE;
    a.last_is_short = page_tiles != a.page_units * tiles;
    a.sees_all = !a.last_is_short && !a.p.starts && !a.p.sliding_window;
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

/** Cuts the work for attend_few or attend_few_wide; false, and nothing done, where that is not possible or the three kernels are faster. */
bool cut_few(const tq_plan *plan, const Device &device, Launch *launch);
/** Where the parts of its blocks are, if they are no clusters: at `base`, NULL for only their size; returns their bytes. */
size_t lay_out_parts(Launch *l, char *base);

} // namespace tq
#endif
