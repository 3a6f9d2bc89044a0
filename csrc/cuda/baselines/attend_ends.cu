// The kernels around the one that meets the tokens, for plans that are not plain: prepare and combine. A warp a row, but for matrices.
#include <math.h>

#include "cuda/baselines/attend.cuh"

namespace tq
{
namespace
{

// ---- prepare ----

/** Pairs' products of a row before its metric and rotation, to `to`; then the row's metric is undone. By one warp. */
__device__ __forceinline__ void take_moments(const KeyMoments &m, int h, float *row, float2 *to, int lane)
{
    __syncwarp();
    for (int i = lane; i < m.pairs; i += 32) {
        const Pair pair = m.pair(i);
        const float *wave = m.of_head(h).wave + 2 * i, first = row[pair.first], second = row[pair.second];
        to[i] = make_float2(first * wave[0] + second * wave[1], second * wave[0] - first * wave[1]);
    }
    __syncwarp();
    if (m.metric) apply_metric<true>(m, m.of_head(h), row);
}

/** Shared memory: | rows [MATRIX_TOKENS][key_width] | BlockRows' |. */
__global__ void __launch_bounds__(SET_THREADS) prepare_kernel(const __grid_constant__ AttendBlocksArgs args)
{
    const AttendArgs &a = args.attend;
    const BlockSide &side = args.plan.side[0];
    const int row = threadIdx.x / 32, lane = threadIdx.x % 32, width = args.key_width;
    float *rows = reinterpret_cast<float *>(shared_bytes);
    const BlockRows x(args.plan, rows, width, SET_ROWS, rows + MATRIX_TOKENS * width);
    wait_for_stream();
    const RowSet s = find_rows(a, blockIdx.x, SET_ROWS);
    const int64_t at = query_at(a, s, row);
    const float *centre = centre_of(side, a.head_dim, s.h);
    float *to = side.rotation == TQ_ROTATION_DENSE ? x.spare + row * a.head_dim : rows + row * width, bias = 0.0f;
    for (int c = lane; c < width; c += 32) rows[row * width + c] = 0.0f;
    __syncwarp();
    for (int c = lane; c < a.head_dim; c += 32) {
        to[c] = at < 0 ? 0.0f : load_number(a.p.q, at + c, a.p.dtype);
        if (centre) bias += to[c] * centre[c];
    }
    bias = warp_sum(bias);
    if (lane == 0) args.biases[blockIdx.x * SET_ROWS + row] = bias;
    if (args.moments.any())
        take_moments(args.moments, s.h, to, waves_of(args, blockIdx.x) + row * args.moments.pairs, lane);
    project_rows(args.plan, side, s.h, x);
    for (int i = threadIdx.x; i < SET_ROWS * width; i += SET_THREADS)
        args.queries[(int64_t)blockIdx.x * SET_ROWS * width + i] = rows[i];
}

// ---- combine ----

__device__ __forceinline__ float4 totals_of(const AttendBlocksArgs &args, const RowSet &s, int split)
{
    return *reinterpret_cast<const float4 *>(part_at(args, s.segment, split, threadIdx.x / 32));
}

/** A row's totals over all splits, by a warp. Whatever is NaN makes the sum NaN. */
__device__ __forceinline__ RowTotals merge_totals(const AttendBlocksArgs &args, const RowSet &s)
{
    float max = -INFINITY, sum = 0, packed_sum = 0;
    for (int i = 0; i < args.splits; i++) max = fmaxf(max, totals_of(args, s, i).x);
    const float shift = max == -INFINITY ? 0.0f : max;
    for (int i = 0; i < args.splits; i++) {
        const float4 t = totals_of(args, s, i);
        const float factor = exp2_fast(t.x - shift);
        sum += factor * t.y;
        packed_sum += factor * t.z;
    }
    return {max, sum, packed_sum, 0};
}

/** Shared memory: | rows [MATRIX_TOKENS][value_width] | BlockRows' |; a warp a row but for matrices. */
__global__ void __launch_bounds__(SET_THREADS) combine_kernel(const __grid_constant__ AttendBlocksArgs args)
{
    const AttendArgs &a = args.attend;
    const BlockSide &side = args.plan.side[1];
    const int row = threadIdx.x / 32, lane = threadIdx.x % 32, width = args.value_width;
    float *rows = reinterpret_cast<float *>(shared_bytes), exact[BLOCK_GROUPS] = {}, packed[BLOCK_TILES] = {};
    wait_for_stream();
    const RowSet s = find_rows(a, blockIdx.x, SET_ROWS);
    const RowTotals totals = merge_totals(args, s);
    for (int split = 0; split < args.splits; split++) {
        const float4 t = totals_of(args, s, split);
        if (t.y == 0.0f) continue; // it attended nothing
        const float factor = exp2_fast(t.x - (totals.max == -INFINITY ? 0.0f : totals.max));
        const float *part = part_at(args, s.segment, split, row) + 4;
#pragma unroll
        for (int k = 0; k < BLOCK_TILES; k++)
            if (32 * k < width) packed[k] = fmaf(factor, part[lane + 32 * k], packed[k]);
#pragma unroll
        for (int k = 0; k < BLOCK_GROUPS; k++)
            if (lane + 32 * k < a.head_dim) exact[k] = fmaf(factor, part[width + lane + 32 * k], exact[k]);
    }
#pragma unroll
    for (int k = 0; k < BLOCK_TILES; k++)
        if (32 * k < width) rows[row * width + lane + 32 * k] = packed[k];
    const RestoredRows restored =
        restore_rows(args.plan, side, s.h, BlockRows(args.plan, rows, width, SET_ROWS, rows + MATRIX_TOKENS * width));
    int32_t token, head;
    if (!find_row(a, s, row, token, head)) return;
    const int64_t at = ((int64_t)s.b * a.p.query_heads + head) * a.p.query_tokens + token;
    const float *centre = centre_of(side, a.head_dim, s.h);
    const bool nothing = totals.sum == 0.0f;
    const float inverse = nothing ? 0.0f : 1.0f / totals.sum;
#pragma unroll
    for (int k = 0; k < BLOCK_GROUPS; k++) {
        const int c = lane + 32 * k;
        if (c >= a.head_dim) continue;
        const float x =
            restored.result[row * restored.stride + c] + exact[k] + (centre ? centre[c] * totals.rounded_sum : 0.0f);
        store_number(a.p.out, at * a.head_dim + c, a.p.dtype, nothing ? 0.0f : x * inverse);
    }
    if (a.p.lse && lane == 0) a.p.lse[at] = nothing ? -INFINITY : (totals.max + log2f(totals.sum)) * LN_2;
}

} // namespace

BlockEndKernels attend_blocks_ends() { return {prepare_kernel, combine_kernel}; }

} // namespace tq
