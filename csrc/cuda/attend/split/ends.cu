/* The kernels around the one on pages: prepare and combine. All orders of addition are fixed by the shapes and lengths,
 * so results repeat bit for bit. */
#include "cuda/attend/kernels.h"
#include "cuda/attend/rows/exact.cuh"
#include "cuda/attend/rows/output.cuh"

namespace tq
{
namespace
{

/* ---- prepare ---- */

/** The first blocks prepare queries, a set of rows each. The others attend to exact tokens, a part and a set each. */
template <int GROUPS>
__global__ void __launch_bounds__(END_THREADS, GROUPS > 8 ? 1 : 2) prepare_kernel(const __grid_constant__ AttendArgs a)
{
    wait_for_previous();
    let_next_start(); /* after the wait, because `pages` reads what earlier kernels wrote before it waits itself */
    int32_t sets = a.p.layer.batch * a.p.layer.kv_heads * a.row_tiles * (a.tile_rows / a.prepare_rows),
            turn = blockIdx.x / sets;
    RowSet s = find_rows(a, blockIdx.x - turn * sets, a.prepare_rows);
    if (turn == 0) prepare_queries<GROUPS>(a, s);
    else attend_exact<GROUPS>(a, s, turn - 1);
}

/* ---- combine ---- */

/** The n parts of a row for packed or for exact tokens, `stride` rows apart. */
struct RowParts {
    const RowTotals *totals;
    const float *sums;
    int32_t n, stride;

    __device__ __forceinline__ float4 total(int32_t i) const
    {
        return __ldcg(reinterpret_cast<const float4 *>(totals + (int64_t)i * stride));
    }
};

__device__ __forceinline__ RowParts packed_parts(const AttendArgs &a, const RowSet &s, const SegmentParts &parts, int i)
{
    int64_t row = (int64_t)(parts.first + s.segment) * a.tile_rows + s.first + i;
    return {a.totals + row, a.sums + row * TQ_TILE * a.groups, parts.last - parts.first + 1, a.tile_rows};
}

__device__ __forceinline__ RowParts exact_parts(const AttendArgs &a, const RowSet &s, int i)
{
    int32_t rows = a.row_tiles * a.tile_rows;
    int64_t row =
        ((int64_t)s.b * a.p.layer.kv_heads + s.h) * a.exact_parts * rows + s.row_tile * a.tile_rows + s.first + i;
    return {a.exact_totals + row, a.exact_sums + row * TQ_TILE * a.groups, a.exact_parts, rows};
}

/** Merges the totals of all parts of a row. Each lane takes every 32nd part, with AT_ONCE loads in flight. */
template <int AT_ONCE>
__device__ __forceinline__ MergedRow merge_totals(const RowParts &packed, const RowParts &exact, int lane)
{
    MergedRow m = {-INFINITY, 0, 0, 0};
#pragma unroll 1
    for (int32_t first = lane; first < packed.n + exact.n; first += 32 * AT_ONCE) {
        float4 t[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            int32_t i = first + 32 * j;
            t[j] = make_float4(-INFINITY, 0, 0, 0);
            if (i < packed.n + exact.n) t[j] = i < packed.n ? packed.total(i) : exact.total(i - packed.n);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            bool is_packed = first + 32 * j < packed.n;
            float max = fmaxf(m.max, t[j].x), before = moved(m.max, max), f = moved(t[j].x, max);
            m = {max, fmaf(m.sum, before, f * t[j].y), fmaf(m.packed_sum, before, is_packed ? f * t[j].y : 0),
                 fmaf(m.rounded_sum, before, is_packed ? f * t[j].z : 0)};
        }
    }
    float max = warp_max(m.max), f = moved(m.max, max);
    return {max, warp_sum(f * m.sum), warp_sum(f * m.packed_sum), warp_sum(f * m.rounded_sum)};
}

/** A batch of a row's parts being loaded: parts first, first + step, .. */
template <int GROUPS> struct PartLoads {
    static constexpr int AT_ONCE = GROUPS > 8 ? 2 : GROUPS > 4 ? 3 : 6;
    LaneRow<GROUPS> x[AT_ONCE];
    float max[AT_ONCE];

    __device__ __forceinline__ void load(const RowParts &parts, int32_t first, int step, int width, int lane)
    {
        const float *max_at = &(parts.totals + (int64_t)first * parts.stride)->max,
                    *at = parts.sums + (int64_t)first * parts.stride * width;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            max[j] = -INFINITY;
            if (first + j * step >= parts.n) continue;
            max[j] = __ldcg(max_at + (int64_t)j * step * parts.stride * 4);
#pragma unroll
            for (int k = 0; k < LaneRow<GROUPS>::QUADS; k++) {
                int c = x[j].channel(k, lane);
                x[j].quad[k] =
                    c < width
                        ? __ldcg(reinterpret_cast<const float4 *>(at + (int64_t)j * step * parts.stride * width + c))
                        : make_float4(0, 0, 0, 0);
            }
        }
    }
    __device__ __forceinline__ void add(LaneRow<GROUPS> &sum, float max_of_all) const
    {
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            if (max[j] == -INFINITY) continue; /* the sums of such a part may be unwritten */
            float f = exp2_fast(max[j] - max_of_all);
#pragma unroll
            for (int k = 0; k < LaneRow<GROUPS>::QUADS; k++) add_scaled(sum.quad[k], f, x[j].quad[k]);
        }
    }
};

/** Sets `sum` to the weighted sum of parts way, way + ways, .. `loads` holds the first batch of them. */
template <int GROUPS>
__device__ __forceinline__ void add_parts(const RowParts &parts, PartLoads<GROUPS> &loads, int way, int ways, int width,
                                          float max, LaneRow<GROUPS> &sum, int lane)
{
    clear(sum);
#pragma unroll 1
    for (int32_t first = way;;) {
        loads.add(sum, max);
        first += ways * PartLoads<GROUPS>::AT_ONCE;
        if (first >= parts.n) break;
        loads.load(parts, first, ways, width, lane);
    }
}

/** Finishes rows: combine_rows in each block. A warp takes every `ways`-th part of one row. Rows in shared memory: each
 *  way's packed sums, then each way's exact ones. */
template <int GROUPS>
__global__ void __launch_bounds__(END_THREADS) combine_kernel(const __grid_constant__ AttendArgs a)
{
    let_next_start();
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, n = a.combine_rows, way = warp / n, i = warp - way * n,
        ways = blockDim.x / 32 / n;
    int width = TQ_TILE * a.groups;
    RowSet s = find_rows(a, blockIdx.x, n);
    ValueScale<GROUPS> scale(a, s, lane);
    Output output(a, s, i);
    wait_for_previous();
    int2 blocks = __ldcg(reinterpret_cast<const int2 *>(a.segments + s.segment));
    RowParts packed = packed_parts(a, s, {blocks.x, blocks.y}, i), exact = exact_parts(a, s, i);
    if (!output.is_there()) packed.n = exact.n = 0;
    PartLoads<GROUPS> loads;
    loads.load(packed, way, ways, width, lane);
    MergedRow m =
        packed.n + exact.n <= 32 ? merge_totals<1>(packed, exact, lane) : merge_totals<4>(packed, exact, lane);
    LaneRow<GROUPS> sum, exact_sum;
    add_parts<GROUPS>(packed, loads, way, ways, width, m.max, sum, lane);
    clear(exact_sum);
    if (exact.n) {
        loads.load(exact, way, ways, width, lane);
        add_parts<GROUPS>(exact, loads, way, ways, width, m.max, exact_sum, lane);
    }
    if (ways > 1) {
        sum.store(shared_row(a, way * n + i), width, lane);
        if (exact.n) exact_sum.store(shared_row(a, (ways + way) * n + i), width, lane);
        __syncthreads();
        for (int k = 1; way == 0 && k < ways; k++) {
            LaneRow<GROUPS> other;
            other.load(shared_row(a, k * n + i), width, lane);
#pragma unroll
            for (int q = 0; q < other.QUADS; q++) add_scaled(sum.quad[q], 1, other.quad[q]);
            if (!exact.n) continue;
            other.load(shared_row(a, (ways + k) * n + i), width, lane);
#pragma unroll
            for (int q = 0; q < other.QUADS; q++) add_scaled(exact_sum.quad[q], 1, other.quad[q]);
        }
    }
    scale.apply(sum, m.rounded_sum);
    if (a.rotation == TQ_ROTATION_DENSE) { /* by the whole block, in shared memory */
        __syncthreads();
        if (way == 0) sum.store(shared_row(a, i), width, lane);
        rotate_dense(a, n, a.p.layer.value.rotation + s.h * a.p.layer.value.rotation_stride_head, true);
        sum.load(shared_row(a, i), width, lane);
    } else if (way == 0) {
        rotate_lanes<GROUPS>(a, sum, shared_row(a, i), lane_signs<GROUPS>(a, lane), true, lane);
    }
    if (way) return;
    output.complete<GROUPS>(a, sum, exact_sum, m, lane);
    output.write<GROUPS>(a, sum, m, lane);
}

} // namespace

EndKernels attend_end_kernels(int groups)
{
    if (groups > 8) return {prepare_kernel<16>, combine_kernel<16>};
    if (groups > 4) return {prepare_kernel<8>, combine_kernel<8>};
    return {prepare_kernel<4>, combine_kernel<4>};
}

} // namespace tq
