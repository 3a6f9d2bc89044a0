// tq_cuda_dequantize: packed tokens back to float32, for debugging (plans that are not plain: baselines/dequantize.cu).
// A block has a token tile of one (side, sequence, KV head):
//
//   1  codes -> step * level * scale, rows of tokens in shared memory    a warp per group of channels
//   2  R^T                                                               a warp per token; with a matrix all together
//   3  keys: undo the metric, add the wave; add the centre, write        a warp per token
//
// The operations and their order are those of the C core, so the numbers are the same.
#include "cuda/baselines/baselines.cuh"
#include "cuda/dequantize.h"

namespace tq
{
namespace
{

constexpr int WARPS = 8;

struct KernelArgs : DequantizeArgs {
    int32_t group_channels, dtype;
    LevelsByCode codebooks;
};

/** Decodes a group of a token tile, which is half a tile if groups have 16 channels, to rows [32 tokens][head_dim]. */
__device__ __forceinline__ void decode_group(const KernelArgs &a, int side_index, int h, const uint8_t *record,
                                             int token_tile, int group, float *rows, int lane)
{
    const DequantizeSide &side = a.side[side_index];
    const int bits = side.bits[group];
    const float *steps = side.transform.steps;
    const float step =
        bits ? __fmul_rn(a.codebooks.step[bits], steps ? steps[h * side.transform.stride_head + group] : 1.0f) : 0.0f;
    const bool fine = a.group_channels == TQ_FINE_GROUP;
    const uint32_t *words = reinterpret_cast<const uint32_t *>(
        record + side.codes_offset + (fine ? token_tile / 2 : token_tile) * side.tile_bytes + side.offset[group]);
    const Rows codes = bits ? unpack_lane(bits, words + lane) : Rows{};
    const __half *scales = reinterpret_cast<const __half *>(record + side.scales_offset) + TQ_TILE * token_tile;
    for (int r = 0; r < 4; r++)
        for (int n = 0; n < 8; n++) {
            const Place place = place_of(fine, side_index == 0, lane, r, n);
            const int token = place.token % TQ_TILE, channel = a.group_channels * group + place.channel;
            if (channel >= a.head_dim || (fine && place.token / TQ_TILE != token_tile % 2)) continue;
            float x = 0.0f;
            if (bits) {
                const int code = (int)code_of(codes, r, n),
                          level = bits == TQ_WIDE_BITS ? code - 128 : a.codebooks.levels[bits][code];
                x = __fmul_rn(__fmul_rn(step, (float)level), __half2float(scales[column_of_token(token)]));
            }
            rows[token * a.head_dim + channel] = x;
        }
}

template <int PER_LANE> __global__ void __launch_bounds__(32 * WARPS) dequantize(const __grid_constant__ KernelArgs a)
{
    extern __shared__ __align__(16) float memory[];
    float *rows = memory, *unrotated = rows;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    wait_for_stream();
    int64_t i = blockIdx.x;
    const int tile = (int)(i % a.tiles), h = (int)(i / a.tiles % a.kv_heads),
              b = (int)(i / a.tiles / a.kv_heads % a.batch);
    const int side_index = (int)(i / a.tiles / a.kv_heads / a.batch);
    const DequantizeSide &side = a.side[side_index];
    const int first = TQ_TILE * tile;
    int count = max(0, min(min(a.lengths[b], a.max_tokens) - first, TQ_TILE));
    const int64_t page = count ? a.block_table[(int64_t)b * a.max_pages + first / a.page_tokens] : -1;
    if (page < 0 || page >= a.n_pages) count = 0; // such a page decodes to 0
    if (count) {
        const uint8_t *record = a.pages + page * a.page_bytes + h * a.record_bytes;
        for (int group = warp; group < a.groups; group += WARPS)
            decode_group(a, side_index, h, record, first % a.page_tokens / TQ_TILE, group, rows, lane);
        __syncthreads();
        if (a.rotation == TQ_ROTATION_DENSE) {
            unrotated = rows + TQ_TILE * a.head_dim;
            float *blocks = unrotated + TQ_TILE * a.head_dim;
            multiply_rows<true>(side.transform.rotation + h * side.transform.rotation_stride_head, a.head_dim, rows,
                                unrotated, TQ_TILE, blocks + warp * MATRIX_BLOCK, warp, WARPS, lane);
            __syncthreads();
        }
    }
    const float *centre = side.transform.centre;
    if (centre) centre += h * side.transform.stride_head;
    for (int token = warp; token < TQ_TILE && first + token < a.max_tokens; token += WARPS) {
        float *row = unrotated + token * a.head_dim;
        const int64_t at = (((int64_t)b * a.kv_heads + h) * a.max_tokens + first + token) * a.head_dim;
        const bool stored = token < count;
        if (stored && a.rotation == TQ_ROTATION_HADAMARD) hadamard_row<PER_LANE>(row, a.head_dim, a.signs, true, lane);
        if (stored && side_index == 0 && a.moments.any())
            residual_to_key(a.moments, h, first_position(a.sinks, a.offsets, b) + first + token, row);
        for (int c = lane; c < a.head_dim; c += 32)
            store_number(side.out, at + c, a.dtype, !stored ? 0.0f : centre ? __fadd_rn(row[c], centre[c]) : row[c]);
    }
}

DequantizeSide side_of(const tq_side &from, const tq_transform &transform, void *out)
{
    DequantizeSide side = {};
    for (int group = 0; group < PLAN_GROUPS; group++) {
        side.bits[group] = (uint8_t)from.bits[group];
        side.offset[group] = from.offset[group];
    }
    side.tile_bytes = from.tile_bytes;
    side.codes_offset = (int32_t)from.codes_offset;
    side.scales_offset = (int32_t)from.scales_offset;
    side.transform = transform;
    side.out = out;
    return side;
}

} // namespace

DequantizeArgs dequantize_args(const tq_plan &plan, const tq_layer &layer, int32_t max_tokens, void *k, void *v)
{
    DequantizeArgs args = {};
    args.pages = layer.pages;
    args.block_table = layer.block_table;
    args.lengths = layer.lengths;
    args.offsets = layer.position_offset;
    args.n_pages = layer.n_pages;
    args.page_bytes = tq_page_stride(&plan, &layer);
    args.record_bytes = plan.record_bytes;
    args.kv_heads = layer.kv_heads;
    args.batch = layer.batch;
    args.max_pages = layer.max_pages;
    args.max_tokens = max_tokens;
    args.head_dim = plan.head_dim;
    args.groups = plan.groups;
    args.page_tokens = plan.page_tokens;
    args.rotation = plan.rotation;
    args.sinks = layer.sinks;
    args.tiles = (max_tokens - 1) / TQ_TILE + 1;
    args.side[0] = side_of(plan.key, layer.key, k);
    args.side[1] = side_of(plan.value, layer.value, v);
    args.moments = key_moments_of(plan, layer.key);
    args.signs = signs_of(plan);
    return args;
}

} // namespace tq

using namespace tq;

tq_status tq_cuda_dequantize_workspace_bytes(const tq_plan *plan, int32_t kv_heads, tq_dtype dtype, size_t *bytes,
                                             tq_error *error)
{
    tq_layer layer = {};
    layer.kv_heads = kv_heads;
    TQ_CUDA_TRY(tq_check_dequantize_sizes(plan, &layer, 0, error));
    if (!bytes) return fail(error, TQ_E_VALUE, "bytes", -1, 0, "a pointer, not NULL");
    if (dtype < TQ_F32 || dtype > TQ_BF16)
        return fail(error, TQ_E_TYPE, "dtype", -1, dtype, "0 (float32), 1 (float16) or 2 (bfloat16)");
    *bytes = dtype != TQ_F32 && takes_16bit(*plan) ? bytes_16bit(*plan, kv_heads) : 0;
    return TQ_OK;
}

tq_status tq_cuda_dequantize(const tq_plan *plan, const tq_layer *layer, int32_t max_tokens, tq_dtype dtype, void *k,
                             void *v, void *workspace, size_t workspace_bytes, void *stream, tq_error *error)
{
    TQ_CUDA_TRY(tq_check_dequantize(plan, layer, max_tokens, static_cast<float *>(k), static_cast<float *>(v), error));
    TQ_CUDA_TRY(check_plan(*plan, error));
    const tq_layer &l = *layer;
    if (l.sinks > INT32_MAX / 2)
        return fail(error, TQ_E_VALUE, "sinks", -1, l.sinks, "in 0..2^30 - 1: positions are 32-bit");
    size_t needed;
    TQ_CUDA_TRY(tq_cuda_dequantize_workspace_bytes(plan, l.kv_heads, dtype, &needed, error));
    if (workspace_bytes < needed)
        return fail(error, TQ_E_VALUE, "workspace_bytes", -1, (double)workspace_bytes,
                    "at least tq_cuda_dequantize_workspace_bytes");
    if (needed && (uintptr_t)workspace % 256)
        return fail(error, TQ_E_VALUE, "workspace", -1, (double)((uintptr_t)workspace % 256), "256-byte aligned");
    for (const void *x : {k, v})
        if (needed && (uintptr_t)x % 16)
            return fail(error, TQ_E_VALUE, x == k ? "k" : "v", -1, (double)((uintptr_t)x % 16),
                        "aligned to 16 bytes on CUDA (got: bytes behind)");
    if (!l.batch || !l.kv_heads || !max_tokens) return TQ_OK;
    if (needed) return dequantize_16bit(*plan, l, max_tokens, dtype, k, v, workspace, (cudaStream_t)stream, error);
    if (!tq_is_plain(plan)) {
        BaselinePlan blocks;
        baseline_plan_of(*plan, l, &blocks);
        return dequantize_baseline(*plan, blocks, l, max_tokens, dtype, k, v, (cudaStream_t)stream, error);
    }
    const bool dense = plan->rotation == TQ_ROTATION_DENSE;

    KernelArgs args = {dequantize_args(*plan, l, max_tokens, k, v), plan->group_channels, dtype,
                       of_codebooks<LevelsByCode>(*plan, fill_levels_by_code)};
    const size_t shared_bytes =
        sizeof(float) * (TQ_TILE * plan->head_dim * (dense ? 2 : 1) + (dense ? WARPS * MATRIX_BLOCK : 0));
    return launch(plan->head_dim > 256 ? dequantize<16> : dequantize<8>,
                  (int64_t)(plan->value.tile_bytes ? 2 : 1) * l.batch * l.kv_heads * args.tiles, 32 * WARPS,
                  shared_bytes, (cudaStream_t)stream, error, args);
}
