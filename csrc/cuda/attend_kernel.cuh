/* The kernel on pages: a persistent block and its stretch of the line of units. */
#ifndef TQ_CUDA_ATTEND_KERNEL_CUH
#define TQ_CUDA_ATTEND_KERNEL_CUH
#include "attend_pages.cuh"

namespace tq
{

/** All teams' barriers, two or four per stage, a warp for each team but the scheduling warp, which has more urgent work. */
template <class V>
__device__ __forceinline__ void init_barriers(const AttendArgs &a, const Ring<V> &first, int warp, int warps)
{
    int used = a.team_warps > 1 ? 4 : 2; /* a warp alone never waits for an empty stage */
    for (int team = warp; team < a.teams; team += max(warps - 1, 1))
#pragma unroll 1
        for (int i = 0; i < a.stages; i++)
#pragma unroll 1
            for (int k = 0; k < used; k++)
                barrier_init(first.of_team(a, team).barrier(i, k), k >= 2    ? a.team_warps
                                                                   : V::BULK ? 1
                                                                             : 32 * a.team_warps);
    barrier_init_fence();
}

/** [teams][tile_rows] of what each warp has of its rows. */
__device__ __forceinline__ RowTotals *warp_totals(const AttendArgs &a)
{
    return reinterpret_cast<RowTotals *>(shared_bytes + a.at_stats);
}

/** A team's sums of a row, where its ring was. */
__device__ __forceinline__ float *team_row(const AttendArgs &a, int team, int row)
{
    return reinterpret_cast<float *>(shared_bytes + team * a.stages * a.stage_bytes) + row * a.pitch;
}

/** Each warp's totals and sums into shared memory; the team's ring is empty, and every warp of it has read its last stage. */
template <class V>
__device__ __forceinline__ void leave_warp(const AttendArgs &a, const Sums<V> &sums, int team, int first_row, int lane)
{
#pragma unroll
    for (int n = 0; n < V::BLOCKS; n++) {
        int row = first_row + 4 * n;
        float *to = team_row(a, team, row) + lane / 4, weights = sums.weights[n];
#pragma unroll
        for (int g = 0; g < V::GROUPS; g++) {
            if (!V::UNIFORM && g >= a.groups) break;
#pragma unroll
            for (int r = 0; r < 4; r++) to[TQ_TILE * g + 8 * r] = sums.o[g][r][n];
        }
#pragma unroll
        for (int k = 4; k < 32; k *= 2) weights += __shfl_xor_sync(ALL_LANES, weights, k);
        if (lane < 4)
            warp_totals(a)[team * a.tile_rows + row] = {
                sums.reference[n] == NO_REFERENCE ? -INFINITY : sums.bias[n] - sums.reference[n], weights,
                sums.rounded[n], 0};
    }
}

/** Adds up the warps of `active` teams and leaves the block's part in the workspace. */
__device__ __forceinline__ void leave_part(const AttendArgs &a, const Work &w, int active)
{
    int quads = 8 * a.groups;
    int64_t out = (int64_t)(blockIdx.x + w.segment) * a.tile_rows;
#pragma unroll 1
    for (int i = threadIdx.x; i < a.tile_rows * quads; i += blockDim.x) {
        int row = i / quads, c = 4 * (i - row * quads);
        const RowTotals *totals = warp_totals(a) + row;
        RowTotals t = {-INFINITY, 0, 0, 0};
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int k = 0; k < active; k++) t.max = fmaxf(t.max, totals[k * a.tile_rows].max);
#pragma unroll 4
        for (int k = 0; k < active; k++) {
            RowTotals part = totals[k * a.tile_rows];
            float f = part.max == -INFINITY ? 0 : exp2_fast(part.max - t.max);
            float4 x = *reinterpret_cast<const float4 *>(team_row(a, k, row) + c);
            sum = make_float4(fmaf(f, x.x, sum.x), fmaf(f, x.y, sum.y), fmaf(f, x.z, sum.z), fmaf(f, x.w, sum.w));
            t.sum = fmaf(f, part.sum, t.sum);
            t.rounded_sum = fmaf(f, part.rounded_sum, t.rounded_sum);
        }
        reinterpret_cast<float4 *>(a.sums)[(out + row) * quads + c / 4] = sum;
        if (c == 0) a.totals[out + row] = t;
    }
}

template <class V> __global__ void __maxnreg__(V::MAX_REGISTERS) attend_kernel(const __grid_constant__ AttendArgs a)
{
    __shared__ Work works[2]; /* the segment at work and the next */
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, team = warp / a.team_warps,
        member = warp - team * a.team_warps;
    int team_thread = 32 * member + lane, first_row = 4 * V::BLOCKS * member + (lane & 3);
    int warps = blockDim.x / 32;
    bool scheduler = warp == warps - 1;
    let_next_start();
    Ring<V> ring = {shared_address(shared_bytes), shared_address(shared_bytes) + a.at_barriers, 0, 0};
    Cursor cursor;
    if (lane == 0 && (!scheduler || warps == 1)) init_barriers<V>(a, ring, warp, warps);
    if (scheduler) { /* lengths and pages are complete: prepare has waited for all kernels in front before it let this one start */
        cursor = find_start(a, lane);
        if (lane == 0) next_work(a, cursor, works[0]);
    }
    __syncthreads();
    if (!works[0].there) return;
    ring = ring.of_team(a, team);
    start_ring<V>(a, ring, Pages(a, works[0], team), team_thread);
    wait_for_previous(); /* the queries */
#pragma unroll 1
    for (int turn = 0;; turn ^= 1) {
        const Work &work = works[turn];
        const Work &next = works[turn ^ 1];
        Sums<V> sums;
        if (scheduler && lane == 0) next_work(a, cursor, works[turn ^ 1]);
        attend_pages<V>(a, ring, work, team, team_thread, sums);
        int active = min(a.teams, work.units.count());
        if (a.team_warps > 1) __syncthreads(); /* the ring becomes room for sums when all of the team have left it */
        if (team < active) leave_warp<V>(a, sums, team, first_row, lane);
        __syncthreads();
        leave_part(a, work, active);
        if (!next.there) return;
        shared_writes_before_copies();
        __syncthreads();
        start_ring<V>(a, ring, Pages(a, next, team), team_thread);
    }
}

} // namespace tq
#endif
