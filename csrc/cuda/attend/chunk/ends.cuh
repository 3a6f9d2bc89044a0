/* The kernels before and after the one on pages: they make operands of queries and merge parts. A warp has a row. */
#ifndef TQ_CUDA_ATTEND_CHUNK_ENDS_CUH
#define TQ_CUDA_ATTEND_CHUNK_ENDS_CUH
#include "cuda/attend/chunk/params.h"
#include "cuda/device/launch.cuh"
#include "cuda/tile/fragments.cuh"

namespace tq
{
namespace chunk
{

constexpr int END_WARPS = 8; /* warps of a block; a divisor of TEAM_ROWS */
constexpr int MOST_CHANNELS = TQ_TILE * MOST_GROUPS;

/** A row of a segment's tile. */
struct RowPlace {
    int32_t b, h, tile, segment, in_tile;
    int32_t token, at, head; /* the query: token in the sequence, token in q, query head */
    bool is_real;

    /** i: index of the row among those of all segments. */
    __device__ __forceinline__ RowPlace(const Args &a, int64_t i)
        : segment((int32_t)(i / a.tile_rows)), in_tile((int32_t)(i - (int64_t)segment * a.tile_rows))
    {
        tile = segment % a.tiles;
        h = segment / a.tiles % a.heads;
        b = segment / a.tiles / a.heads;
        const int32_t row = tile * a.tile_rows + in_tile;
        const Queries queries = queries_of(a, b);
        token = row / a.heads_per_kv;
        head = h * a.heads_per_kv + row - token * a.heads_per_kv;
        at = queries.first + token;
        is_real = row < a.rows && token < queries.count;
    }
};

/** Writes a.line. Called by one warp. */
__device__ __forceinline__ void cut_line(const Args &a, int lane)
{
    int32_t before = 0, longest = 0;
    for (int32_t first = 0; first < a.batch; first += 32) {
        const int32_t b = first + lane;
        int32_t end = 0;
        if (b < a.batch) {
            const Share share(a, b);
            end = share.units(a);
            longest = max(longest, share.pages);
        }
#pragma unroll
        for (int k = 1; k < 32; k *= 2) {
            const int32_t other = __shfl_up_sync(ALL_LANES, end, k);
            if (lane >= k) end += other;
        }
        if (b < a.batch) a.line[b + 1] = before + end;
        before += __shfl_sync(ALL_LANES, end, 31);
    }
    longest = __reduce_max_sync(ALL_LANES, longest);
    if (lane == 0) a.line[0] = 0, a.line[a.batch + 1] = longest;
}

__device__ __forceinline__ float square_of(const float *row, int head_dim, int lane)
{
    float sum = 0;
    for (int c = lane; c < head_dim; c += 32) sum = fmaf(row[c], row[c], sum);
    return warp_sum(sum);
}

/** The last block cuts the line, the others prepare rows. */
__global__ void __launch_bounds__(32 * END_WARPS) prepare_chunk(const __grid_constant__ Args a)
{
    __shared__ float rows[END_WARPS][MOST_CHANNELS];
    wait_for_stream();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = TQ_TILE * a.groups;
    if (blockIdx.x == gridDim.x - 1) {
        if (warp == 0) cut_line(a, lane);
        return;
    }
    const RowPlace place(a, (int64_t)blockIdx.x * END_WARPS + warp);
    float *row = rows[warp];
    const float *centre = a.key.transform.centre, *steps = a.key.transform.steps;
    float bias = 0, variance = 0, largest = 0;
    for (int c = lane; c < width; c += 32) {
        float x = 0;
        if (place.is_real && c < a.head_dim)
            x = load_number(a.q, place.b * a.q_batch + place.head * a.q_head + place.at * a.q_token + c, a.dtype);
        row[c] = x;
        if (centre && c < a.head_dim) bias = fmaf(x, centre[place.h * a.key.transform.stride_head + c], bias);
    }
    __syncwarp();
    if (centre) bias = warp_sum(bias);
    if (a.moments.metric) apply_metric<true>(a.moments, a.moments.of_head(place.h), row);
    if (a.variance > 0) variance = a.variance * square_of(row, a.head_dim, lane);
    if (a.rotation == TQ_ROTATION_HADAMARD) hadamard_row<4>(row, a.head_dim, a.signs, false, lane);
    for (int c = lane; c < width; c += 32) {
        const int group = c / TQ_TILE;
        const float step = steps ? steps[place.h * a.key.transform.stride_head + group] : 1.0f;
        row[c] *= a.key.factor[a.key.bits[group]] * step;
        largest = fmaxf(largest, fabsf(row[c]));
    }
    largest = warp_max(largest);
    __syncwarp();
    /* A power of two brings the largest number to 2^13 .. 2^14, exactly. */
    const int up = largest > 1e-30f ? 13 + 127 - (int)(__float_as_uint(largest) >> 23) : 0;
    const float factor = __int_as_float((127 + up) << 23) * (a.softmax_scale < 0 ? -1.0f : 1.0f);
    uint4 *to = reinterpret_cast<uint4 *>(a.queries) +
                ((int64_t)place.segment * a.tile_rows + place.in_tile / TEAM_ROWS * TEAM_ROWS) * 4 * a.groups +
                place.in_tile % TEAM_ROWS;
    if (lane < 4 * a.groups) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float lo = row[channel_at(8 * lane + 2 * i)], hi = row[channel_at(8 * lane + 2 * i + 1)];
            x[i] = as_word(__floats2half2_rn(lo * factor, hi * factor));
        }
        to[lane * TEAM_ROWS] = make_uint4(x[0], x[1], x[2], x[3]);
    }
    if (lane == 0)
        a.row_args[(int64_t)place.segment * a.tile_rows + place.in_tile] = {
            fmaxf(fabsf(a.softmax_scale) * LOG2_E * __int_as_float((127 - up) << 23), 1e-35f),
            bias * a.softmax_scale * LOG2_E, variance, 0};
}

/** Merges parts. has_bias: whether logits had their bias added before they were weighed. */
__global__ void __launch_bounds__(32 * END_WARPS) merge_chunk(const __grid_constant__ Args a, bool has_bias)
{
    __shared__ __align__(16) float rows[END_WARPS][MOST_CHANNELS];
    wait_for_stream();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = TQ_TILE * a.groups;
    const int64_t i = (int64_t)blockIdx.x * END_WARPS + warp;
    const RowPlace place(a, i);
    if (!place.is_real) return;
    const Share share(a, place.b);
    const int32_t total = a.line[a.batch], begin = a.line[place.b] + (place.h * share.tiles + place.tile) * share.pages;
    float reference = -INFINITY, sum = 0;
    float4 x = make_float4(0, 0, 0, 0);
    if (share.pages) {
        const int32_t first = block_of(a, begin, total), last = block_of(a, begin + share.pages - 1, total);
        const auto total_of = [&](int32_t block) {
            const float2 y = __ldcg(reinterpret_cast<const float2 *>(
                a.totals + (int64_t)(block + place.segment) * a.tile_rows + place.in_tile));
            return Total{y.x, y.y};
        };
        for (int32_t block = first + lane; block <= last; block += 32)
            reference = fmaxf(reference, total_of(block).reference);
        reference = warp_max(reference);
        if (reference > -INFINITY)
#pragma unroll 4
            for (int32_t block = first; block <= last; block++) {
                const Total part = total_of(block);
                const float factor = exp2_fast(part.reference - reference);
                sum = fmaf(factor, part.sum, sum);
                if (4 * lane < width) {
                    const float4 y = __ldcg(reinterpret_cast<const float4 *>(
                        a.sums + ((int64_t)(block + place.segment) * a.tile_rows + place.in_tile) * width + 4 * lane));
                    x = make_float4(fmaf(factor, y.x, x.x), fmaf(factor, y.y, x.y), fmaf(factor, y.z, x.z),
                                    fmaf(factor, y.w, x.w));
                }
            }
    }
    const bool is_seen = sum > 0;
    float *row = rows[warp];
    if (4 * lane < width) {
        const int group = 4 * lane / TQ_TILE;
        const float *steps = a.value.transform.steps;
        float by = is_seen ? a.value.factor[a.value.bits[group]] / sum : 0.0f;
        if (steps) by *= steps[place.h * a.value.transform.stride_head + group];
        reinterpret_cast<float4 *>(row)[lane] = make_float4(x.x * by, x.y * by, x.z * by, x.w * by);
    }
    __syncwarp();
    if (a.rotation == TQ_ROTATION_HADAMARD) hadamard_row<4>(row, a.head_dim, a.signs, true, lane);
    const float *centre = a.value.transform.centre;
    for (int c = lane; c < a.head_dim; c += 32) {
        const float add = centre && is_seen ? centre[place.h * a.value.transform.stride_head + c] : 0.0f;
        store_number(a.out, place.b * a.out_batch + place.head * a.out_head + place.at * a.out_token + c, a.dtype,
                     row[c] + add);
    }
    if (lane == 0 && a.lse) {
        const float bias = has_bias ? 0.0f : a.row_args[i].bias;
        a.lse[place.b * a.lse_batch + place.head * a.lse_head + place.at * a.lse_token] =
            is_seen ? LN_2 * (reference + log2f(sum) + bias) : -INFINITY;
    }
}

} // namespace chunk
} // namespace tq
#endif
