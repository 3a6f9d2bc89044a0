/* merge_parts, which adds up the parts of blocks that share a segment. */
#include "cuda/attend/fused/kernel.cuh"
#include "cuda/attend/kernels.h"

namespace tq
{
namespace
{

constexpr int MERGE_WARPS = 4; /* for each row */

/** A part of a row, or a sum of parts: a lane has four channels of both sums. */
struct RowPart {
    MergedRow m = {-INFINITY, 0, 0, 0};
    float4 packed = {0, 0, 0, 0}, exact = {0, 0, 0, 0};
};

/** Loads a lane's share of a part that a block of attend_fused wrote. */
__device__ __forceinline__ RowPart load_part(const AttendArgs &a, const float *part, int lane)
{
    const int quads = 8 * a.groups;
    const float4 t = __ldcg(reinterpret_cast<const float4 *>(part));
    const float4 *at = reinterpret_cast<const float4 *>(part + 4) + lane;
    RowPart x;
    x.m = {t.x, t.y, t.z, t.w};
    if (lane < quads) x.packed = __ldcg(at);
    if (lane < quads && a.exact_parts) x.exact = __ldcg(at + quads);
    return x;
}

template <int N> __device__ __forceinline__ RowPart add_row_parts(const RowPart (&parts)[N])
{
    RowPart sum;
#pragma unroll
    for (int i = 0; i < N; i++) sum.m.max = fmaxf(sum.m.max, parts[i].m.max);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const MergedRow &m = parts[i].m;
        const float f = moved(m.max, sum.m.max);
        add_totals(sum.m, f, make_float4(m.max, m.sum, m.packed_sum, m.rounded_sum));
        add_scaled(sum.packed, f, parts[i].packed);
        add_scaled(sum.exact, f, parts[i].exact);
    }
    return sum;
}

/** Finishes a row from the parts of the blocks that share its segment: a block per row, a warp every fourth part. */
__global__ void __launch_bounds__(32 * MERGE_WARPS) merge_parts_kernel(const __grid_constant__ AttendArgs a)
{
    constexpr int AT_ONCE = 4;
    /* RowPart [MERGE_WARPS][32]: shared memory cannot have its initialisers */
    __shared__ __align__(16) uint8_t memory[MERGE_WARPS * 32 * sizeof(RowPart)];
    __shared__ __align__(16) float spare[TQ_TILE * 4];
    RowPart *of_lanes = reinterpret_cast<RowPart *>(memory);
    let_next_start();
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, segment = blockIdx.x / a.rows,
        row = blockIdx.x - segment * a.rows, n = a.fused.sharing, b = segment / a.p.layer.kv_heads,
        h = segment - b * a.p.layer.kv_heads;
    int64_t first = (int64_t)segment * n, last = first + n - 1; /* blocks; all but the last are neighbours */
    if (a.fused.ragged) {
        wait_for_previous();
        const int4 head = __ldcg(a.schedule);
        if (!is_schedule_of(a, head) || b >= head.w) return;
        const int32_t at = __ldcg(scheduled_wholes(a, a.schedule) + b);
        const int4 share = __ldcg(a.schedule + 1 + at);
        n = 1 + (share.y & 0xffff), first = share.x + h * (n - 1), last = head.y + at * a.p.layer.kv_heads + h;
        b = share.y >> 16;
    }
    RowSet s = {b, h, 0, b * a.p.layer.kv_heads + h, 0, a.rows};
    ValueScale<4> scale(a, lane);
    uint32_t flip = lane_signs<4>(a, lane);
    auto part_at = [&](int part) {
        return a.sums + ((part < n - 1 ? first + part : last) * a.rows + row) * part_floats(a);
    };
    RowPart sum;
    wait_for_previous(); /* also for kernels before attend_fused, which lets this one start before it waits for them */
    ValueSteps<4> steps(a, s.h, lane); /* loaded together with the parts */
    Output output(a, s, row);          /* likewise, for a ragged batch */
#pragma unroll 1
    for (int k = warp; k < n; k += MERGE_WARPS * AT_ONCE) {
        RowPart parts[AT_ONCE + 1];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            int part = k + MERGE_WARPS * j;
            if (part < n) parts[j] = load_part(a, part_at(part), lane);
        }
        parts[AT_ONCE] = sum;
        sum = add_row_parts(parts);
    }
    of_lanes[32 * warp + lane] = sum;
    __syncthreads();
    if (warp) return;
    RowPart parts[MERGE_WARPS];
#pragma unroll
    for (int w = 0; w < MERGE_WARPS; w++) parts[w] = of_lanes[32 * w + lane];
    sum = add_row_parts(parts);
    LaneRow<4> packed = {{sum.packed}}, exact = {{sum.exact}};
    scale.multiply(steps);
    scale.apply(packed, sum.m.rounded_sum);
    rotate_lanes<4>(a, packed, spare, flip, true, lane);
    output.complete<4>(a, packed, exact, sum.m, lane);
    output.write<4>(a, packed, sum.m, lane);
}

} // namespace

MergeKernel attend_merge_parts() { return {merge_parts_kernel, 32 * MERGE_WARPS}; }

} // namespace tq
