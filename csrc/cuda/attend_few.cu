/* Attention kernels for few rows, and the one that adds up the parts of blocks that share a segment. */
#include "attend_few.cuh"
#include "attend_launch.cuh"

namespace tq
{
namespace
{

template <class V, int REGISTERS = few_registers<V>()> KernelChoice choice()
{
    return {attend_few_kernel<V, REGISTERS>, V::KEY_BITS,     V::BLOCKS, V::TILES,
            most_threads(REGISTERS),         V::TWO_PRODUCTS, 0,         0};
}

template <int BITS, int GROUPS, int TILES> KernelChoice choice_of_rows(int blocks)
{
    switch (blocks) {
    case 1: return choice<Variant<BITS, BITS, GROUPS, 1, TILES, true>>();
    case 2: return choice<Variant<BITS, BITS, GROUPS, 2, TILES, true>>();
    default: return choice<Variant<BITS, BITS, GROUPS, 4, TILES, true>>();
    }
}

template <int BITS, int GROUPS> KernelChoice choice_of_tiles(int blocks, int tiles)
{
    if (tiles == 2) return choice_of_rows<BITS, GROUPS, 2>(blocks);
    if constexpr (takes_whole_pages(BITS, GROUPS)) return choice_of_rows<BITS, GROUPS, 4>(blocks);
    else return {};
}

/** Of two groups, 20 warps a multiprocessor; four tiles where they were faster by whole pages. One block of rows and two tiles have so
 *  many anyway. The three kernels took 15 to 75 % longer; with fewer segments more registers are worth more. */
template <int BITS> KernelChoice choice_of_high_occupancy(int blocks, int tiles)
{
    if (blocks == 1 && tiles == 2) return choice<Variant<BITS, BITS, 2, 1, 2, true>>();
    if (blocks == 2 && tiles == 2) return choice<Variant<BITS, BITS, 2, 2, 2, true>, FOR_20_WARPS>();
    if constexpr (BITS != 4)
        if (blocks == 1 && tiles == 4) return choice<Variant<BITS, BITS, 2, 1, 4, true>, FOR_20_WARPS>();
    return {};
}

template <int BITS> KernelChoice choice_of_shape(int groups, int blocks, int tiles, bool high_occupancy)
{
    switch (groups) {
    case 2:
        return high_occupancy && blocks <= 2 ? choice_of_high_occupancy<BITS>(blocks, tiles)
                                             : choice_of_tiles<BITS, 2>(blocks, tiles);
    case 4: return choice_of_tiles<BITS, 4>(blocks, tiles);
    }
    return {};
}

constexpr int MERGE_WARPS = 4; /* of a row */

/** Adds up the parts of a row: a block per row, a warp every fourth part. */
__global__ void __launch_bounds__(32 * MERGE_WARPS) merge_parts_kernel(const __grid_constant__ AttendArgs a)
{
    constexpr int AT_ONCE = 4;
    __shared__ __align__(16) float sums[MERGE_WARPS][TQ_TILE * 4];
    __shared__ RowTotals totals[MERGE_WARPS];
    let_next_start();
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, segment = blockIdx.x / a.rows,
        row = blockIdx.x - segment * a.rows, width = TQ_TILE * a.groups, n = a.few.sharing, b = segment / a.p.kv_heads;
    Output output(a, {b, segment - b * a.p.kv_heads, 0, segment, 0, a.rows}, row);
    int64_t first = (int64_t)segment * n * a.rows + row;
    const float *at = a.sums + first * width;
    const RowTotals *totals_at = a.totals + first;
    wait_for_previous();
    MergedRow m = {-INFINITY, 0, 0, 0};
    LaneRow<4> sum;
    clear(sum);
#pragma unroll 1
    for (int k = warp; k < n; k += MERGE_WARPS * AT_ONCE) {
        LaneRow<4> x[AT_ONCE];
        float2 t[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            int part = k + MERGE_WARPS * j;
            clear(x[j]);
            t[j] = make_float2(-INFINITY, 0);
            if (part >= n) continue;
            t[j] = __ldcg(reinterpret_cast<const float2 *>(totals_at + (int64_t)part * a.rows));
            if (4 * lane < width)
                x[j].quad[0] = __ldcg(reinterpret_cast<const float4 *>(at + (int64_t)part * a.rows * width + 4 * lane));
        }
        float top = m.max;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) top = fmaxf(top, t[j].x);
        float before = moved(m.max, top);
        m.sum *= before;
        sum.quad[0] =
            make_float4(sum.quad[0].x * before, sum.quad[0].y * before, sum.quad[0].z * before, sum.quad[0].w * before);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            float f = moved(t[j].x, top);
            m.sum = fmaf(f, t[j].y, m.sum);
            add_scaled(sum.quad[0], f, x[j].quad[0]);
        }
        m.max = top;
    }
    sum.store(sums[warp], width, lane);
    if (lane == 0) totals[warp] = {m.max, m.sum, 0, 0};
    __syncthreads();
    if (warp) return;
    float top = m.max;
#pragma unroll
    for (int w = 1; w < MERGE_WARPS; w++) top = fmaxf(top, totals[w].max);
    m = {top, 0, 0, 0};
    clear(sum);
#pragma unroll
    for (int w = 0; w < MERGE_WARPS; w++) {
        LaneRow<4> part;
        part.load(sums[w], width, lane);
        float f = moved(totals[w].max, top);
        m.sum = fmaf(f, totals[w].sum, m.sum);
        add_scaled(sum.quad[0], f, part.quad[0]);
    }
    output.write<4>(a, sum, m, lane);
}

} // namespace

KernelChoice attend_kernel_few(int bits, int groups, int blocks, int tiles, bool high_occupancy)
{
    switch (bits) {
    case 2: return choice_of_shape<2>(groups, blocks, tiles, high_occupancy);
    case 3: return choice_of_shape<3>(groups, blocks, tiles, high_occupancy);
    case 4: return choice_of_shape<4>(groups, blocks, tiles, high_occupancy);
    }
    return choice_of_tiles<0, 4>(blocks, tiles);
}

MergeKernel attend_merge_parts() { return {merge_parts_kernel, 32 * MERGE_WARPS}; }

} // namespace tq
