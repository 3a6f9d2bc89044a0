/* The launches of attention of many query tokens (chunk.h). */
#include "cuda/attend/chunk/chunk.h"

#include "cuda/attend/chunk/ends.cuh"
#include "cuda/attend/chunk/kernel.cuh"
#include "cuda/tile/codebooks.h"

namespace tq
{
namespace chunk
{
namespace
{

Side side_of(const tq_plan &plan, const tq_side &from, const tq_transform &transform)
{
    const LevelsByCode &steps = of_codebooks<LevelsByCode>(plan, fill_levels_by_code);
    Side side = {};
    for (int g = 0; g < plan.groups; g++) {
        side.bits[g] = from.bits[g];
        side.width[g] = (uint16_t)(1u << from.bits[g]);
        side.offset[g] = from.offset[g];
    }
    side.tile_bytes = from.tile_bytes;
    side.codes_offset = (int32_t)from.codes_offset;
    side.scales_offset = (int32_t)from.scales_offset;
    side.one_width = from.one_width;
    for (int bits = 1; bits <= MOST_BITS; bits++) side.factor[bits] = steps.step[bits] / unit_of(bits);
    side.transform = transform;
    return side;
}

size_t rounded_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

/** Sets sizes, and arrays as offsets in a workspace. Returns the bytes of the workspace. */
size_t lay_out(const tq_plan &plan, const tq_attend_params &p, const DeviceFacts &device, Args *to)
{
    Args &a = *to;
    a.batch = p.layer.batch, a.heads = p.layer.kv_heads, a.max_pages = p.layer.max_pages;
    a.head_dim = plan.head_dim, a.groups = plan.groups;
    a.query_tokens = p.query_tokens, a.total_tokens = p.total_tokens;
    a.heads_per_kv = a.heads ? p.query_heads / a.heads : 0;
    a.rows = a.heads_per_kv * p.query_tokens;
    a.tile_rows = a.rows > TEAM_ROWS ? 2 * TEAM_ROWS : TEAM_ROWS;
    a.tiles = (a.rows + a.tile_rows - 1) / a.tile_rows;
    a.segments = a.batch * a.heads * a.tiles;
    a.blocks = device.processors;
    const size_t rows = (size_t)a.segments * a.tile_rows, parts = (size_t)(a.segments + a.blocks) * a.tile_rows,
                 width = (size_t)TQ_TILE * a.groups;
    size_t at = 0;
    const auto take = [&](auto **array, size_t bytes) {
        *reinterpret_cast<size_t *>(array) = at;
        at += rounded_up(bytes);
    };
    static_assert(sizeof(size_t) == sizeof(void *));
    take(&a.line, sizeof *a.line * (a.batch + 2));
    take(&a.queries, sizeof *a.queries * rows * width);
    take(&a.row_args, sizeof *a.row_args * rows);
    take(&a.totals, sizeof *a.totals * parts);
    take(&a.sums, sizeof *a.sums * parts * width);
    if (plan.wave_pairs) {
        a.wave_sets = p.layer.position_offset ? a.batch : 1;
        const size_t steps = most_wave_steps(plan.wave_pairs);
        take(&a.wave, sizeof(int32_t) * (1 + a.heads));
        take(&a.wave_rows, sizeof *a.wave_rows * a.heads * 2 * plan.wave_pairs * width);
        take(&a.wave_basis, sizeof *a.wave_basis * (PAGE / 16) * steps * 32);
        const size_t bytes = wave_bytes(plan, p.layer);
        take(&a.wave_pages, bytes < MOST_WAVE_BYTES ? bytes : MOST_WAVE_BYTES);
    }
    return at;
}

template <int GROUPS, int TEAMS, bool SCORES, bool WAVE>
tq_status launch_pages(Args &a, const DeviceFacts &device, cudaStream_t stream, tq_error *error)
{
    using S = Shape<GROUPS, TEAMS, SCORES, WAVE>;
    a.slot_bytes = (int32_t)((a.record_bytes + 127) / 128 * 128);
    const int room = device.shared_bytes_per_block - S::AT_RING, step_bytes = wave_step_bytes(GROUPS),
              slots = (room - (WAVE ? USUAL_STEPS * step_bytes : 0)) / a.slot_bytes;
    a.ring = slots < MOST_SLOTS ? slots : MOST_SLOTS;
    if (a.ring < 1)
        return fail(error, TQ_E_UNSUPPORTED, "device", -1, device.shared_bytes_per_block,
                    "a GPU with 227 KB of shared memory of a thread block");
    const int left = room - a.ring * a.slot_bytes, most = (MOST_STEPS + 1) * step_bytes;
    a.wave_room = !WAVE ? 0 : left < most ? left / step_bytes * step_bytes : most;
    return launch(attend_chunk_pages<GROUPS, TEAMS, SCORES, WAVE>, a.blocks, S::THREADS,
                  (size_t)S::AT_RING + a.ring * a.slot_bytes + a.wave_room, stream, error, a);
}

template <int GROUPS, bool WAVE>
tq_status choose(Args &a, bool scores, const DeviceFacts &device, cudaStream_t stream, tq_error *error)
{
    if (a.tile_rows == TEAM_ROWS)
        return scores ? launch_pages<GROUPS, 1, true, WAVE>(a, device, stream, error)
                      : launch_pages<GROUPS, 1, false, WAVE>(a, device, stream, error);
    return scores ? launch_pages<GROUPS, 2, true, WAVE>(a, device, stream, error)
                  : launch_pages<GROUPS, 2, false, WAVE>(a, device, stream, error);
}

template <int GROUPS>
tq_status launch_all(Args &a, bool scores, const DeviceFacts &device, cudaStream_t stream, tq_error *error)
{
    if (!a.moments.pairs) return choose<GROUPS, false>(a, scores, device, stream, error);
    const int64_t rows = (int64_t)a.heads * 2 * a.moments.pairs, pages = (int64_t)a.wave_sets * a.max_pages;
    TQ_CUDA_TRY(launch(prepare_wave, rows / END_WARPS + BASIS_BLOCKS, 32 * END_WARPS, 0, stream, error, a));
    int64_t runs = 2 * device.processors / a.heads;
    runs = runs < 1 ? 1 : runs < pages ? runs : pages < 1 ? 1 : pages;
    TQ_CUDA_TRY(launch(put_wave_pages<GROUPS>, a.heads * runs, 64 * GROUPS, 0, stream, error, a, (int)runs));
    return choose<GROUPS, true>(a, scores, device, stream, error);
}

} // namespace
} // namespace chunk

tq_status chunk_workspace_bytes(const tq_plan &plan, const tq_attend_params &p, size_t *bytes, tq_error *error)
{
    DeviceFacts device;
    TQ_CUDA_TRY(current_device(&device, error));
    chunk::Args a = {};
    *bytes = chunk::lay_out(plan, p, device, &a);
    return TQ_OK;
}

tq_status attend_chunk(const tq_plan &plan, const tq_attend_params &p, void *workspace, size_t workspace_bytes,
                       void *stream_, tq_error *error)
{
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
    using namespace chunk;
    DeviceFacts device;
    TQ_CUDA_TRY(current_device(&device, error));
    Args a = {};
    const size_t needed = lay_out(plan, p, device, &a);
    if (workspace_bytes < needed)
        return fail(error, TQ_E_VALUE, "workspace_bytes", -1, (double)workspace_bytes,
                    "at least chunk_workspace_bytes");
    if (!a.segments || (p.query_start_loc && !p.total_tokens)) return TQ_OK;
    const auto place = [&](auto **array) {
        *reinterpret_cast<char **>(array) = static_cast<char *>(workspace) + *reinterpret_cast<size_t *>(array);
    };
    place(&a.line), place(&a.queries), place(&a.row_args), place(&a.totals), place(&a.sums);
    if (plan.wave_pairs) place(&a.wave), place(&a.wave_rows), place(&a.wave_basis), place(&a.wave_pages);
    a.sinks = p.layer.sinks, a.position_offset = p.layer.position_offset;
    a.pages = p.layer.pages, a.block_table = p.layer.block_table, a.lengths = p.layer.lengths;
    a.query_start_loc = p.query_start_loc;
    a.page_bytes = tq_page_stride(&plan, &p.layer), a.record_bytes = plan.record_bytes;
    a.page_limit = p.layer.n_pages <= INT32_MAX ? (uint32_t)p.layer.n_pages : 1u << 31;
    a.rotation = plan.rotation, a.dtype = p.layer.dtype;
    a.q = p.q, a.out = p.out, a.lse = p.lse;
    a.q_batch = p.q_stride_batch, a.q_head = p.q_stride_head, a.q_token = p.q_stride_token;
    const tq_row_strides out = tq_strides_of_out(&plan, &p), lse = tq_strides_of_lse(&p);
    a.out_batch = out.batch, a.out_head = out.head, a.out_token = out.token;
    a.lse_batch = lse.batch, a.lse_head = lse.head, a.lse_token = lse.token;
    if (p.query_start_loc) a.q_batch = a.out_batch = a.lse_batch = 0;
    a.softmax_scale = p.softmax_scale, a.softcap = p.softcap;
    a.variance = plan.variance * p.softmax_scale * p.softmax_scale * LOG2_E / (2.0f * (float)plan.head_dim);
    a.key = side_of(plan, plan.key, p.layer.key), a.value = side_of(plan, plan.value, p.layer.value);
    a.moments = key_moments_of(plan, p.layer.key);
    a.signs = signs_of(plan);
    a.tables = of_codebooks<LevelTables>(plan, fill_level_tables);

    const int64_t row_blocks = (int64_t)a.segments * a.tile_rows / END_WARPS;
    const bool scores = a.variance > 0 || a.softcap > 0;
    TQ_CUDA_TRY(launch(prepare_chunk, row_blocks + 1, 32 * END_WARPS, 0, stream, error, a));
    TQ_CUDA_TRY(a.groups == 4   ? launch_all<4>(a, scores, device, stream, error)
                : a.groups == 3 ? launch_all<3>(a, scores, device, stream, error)
                                : launch_all<2>(a, scores, device, stream, error));
    return launch(merge_chunk, row_blocks, 32 * END_WARPS, 0, stream, error, a, scores);
}

} // namespace tq
