// tq_cuda_dequantize for plans that are not plain. A block takes half a token tile of one (side, sequence, KV head). It
// decodes it to rows in shared memory, un-rotates them, undoes the metric and adds the wave of keys, adds the centre.
#include "cuda/baselines/baselines.cuh"

namespace tq
{
namespace
{

constexpr int WARPS = 4, TOKENS = MATRIX_TOKENS;

struct DequantizeBaselineArgs {
    BaselinePlan plan;
    KeyMoments moments;
    const int32_t *lengths, *offsets;               // offsets: of positions, or NULL
    int32_t batch, max_tokens, sinks, dtype, parts; // parts: of a sequence, of TOKENS tokens each
    void *out[2];                                   // [batch, kv_heads, max_tokens, head_dim]
};
static_assert(sizeof(DequantizeBaselineArgs) <= 4096, "kernel parameters");

/** Shared memory: | levels [LEVEL_TABLE] | rows [32][width + 16] | the rest of BaselineRows |. */
__global__ void __launch_bounds__(32 * WARPS)
    dequantize_baseline_kernel(const __grid_constant__ DequantizeBaselineArgs a)
{
    extern __shared__ __align__(16) float memory[];
    const BaselinePlan &plan = a.plan;
    wait_for_stream();
    const int heads = plan.packed.kv_heads, part = blockIdx.x % a.parts, h = blockIdx.x / a.parts % heads,
              b = blockIdx.x / a.parts / heads % a.batch, is_value = blockIdx.x / a.parts / heads / a.batch;
    const BaselineSide &side = plan.side[is_value];
    const int first = TOKENS * part, d = plan.head_dim, stride = TQ_TILE * side.tiles + 16,
              tokens = max(0, min(min(a.lengths[b], a.max_tokens) - first, TOKENS)),
              wanted = min(TOKENS, a.max_tokens - first);
    const uint8_t *record = tokens ? record_of(plan, b, h, first) : nullptr;
    const int stored = record ? tokens : 0;
    float *rows = memory + LEVEL_TABLE;
    RestoredRows restored = {};
    if (stored) { // all threads of a block agree
        const int token_tile = first % plan.page_tokens / TQ_TILE;
        load_levels(plan, side, h, memory);
        __syncthreads();
        if (is_value) decode_values(plan, h, record, token_tile, 0, TQ_TILE, memory, rows, stride);
        else decode_keys(plan, h, record, token_tile, memory, rows, stride);
        restored =
            restore_rows(plan, side, h,
                         BaselineRows(plan, rows + first % TQ_TILE * stride, stride, stored, rows + TQ_TILE * stride));
    }
    if (!is_value && a.moments.any()) {
        for (int i = threadIdx.x / 32; i < stored; i += WARPS)
            residual_to_key(a.moments, h, first_position(a.sinks, a.offsets, b) + first + i,
                            restored.result + i * restored.stride);
        __syncthreads();
    }
    const float *centre = centre_of(side, h);
    const int64_t at = (((int64_t)b * heads + h) * a.max_tokens + first) * d;
    for (int i = threadIdx.x; i < wanted * d; i += blockDim.x) {
        const float number = i / d < stored ? restored.result[i / d * restored.stride + i % d] : 0.0f;
        store_number(a.out[is_value], at + i, a.dtype, i / d < stored && centre ? number + centre[i % d] : number);
    }
}

} // namespace

tq_status dequantize_baseline(const tq_plan &plan, const BaselinePlan &blocks, const tq_layer &layer,
                              int32_t max_tokens, tq_dtype dtype, void *k, void *v, cudaStream_t stream,
                              tq_error *error)
{
    const int32_t parts = (max_tokens - 1) / TOKENS + 1;
    DequantizeBaselineArgs args = {blocks,        key_moments_of(plan, layer.key),
                                   layer.lengths, layer.position_offset,
                                   layer.batch,   max_tokens,
                                   layer.sinks,   dtype,
                                   parts,         {k, v}};
    size_t shared_bytes = 0;
    for (const tq_side *side : {&plan.key, &plan.value}) {
        const size_t rows = sizeof(float) * (LEVEL_TABLE + TQ_TILE * ((size_t)TQ_TILE * side->tiles + 16)),
                     bytes = rows + matrix_bytes(*side, plan.head_dim, WARPS);
        if (bytes > shared_bytes) shared_bytes = bytes;
    }
    return launch(dequantize_baseline_kernel, (int64_t)(v ? 2 : 1) * layer.batch * layer.kv_heads * args.parts,
                  32 * WARPS, shared_bytes, stream, error, args);
}

} // namespace tq
