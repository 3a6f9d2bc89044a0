/* The kernel on pages: teams of warps, each with a piece of the line of units. */
#ifndef TQ_CUDA_ATTEND_SPLIT_KERNEL_CUH
#define TQ_CUDA_ATTEND_SPLIT_KERNEL_CUH
#include "cuda/attend/dispatch.h"
#include "cuda/attend/split/pages.cuh"

namespace tq
{

/** Initialises a team's barriers; by one of its threads. */
template <class V, bool ONE_STAGE>
__device__ __forceinline__ void init_barriers(const AttendArgs &a, const Ring<V, ONE_STAGE> &ring)
{
    int stages = ONE_STAGE ? 1 : a.stages, team_warps = ring.team_warps(a), used = team_warps > 1 ? 4 : 2;
#pragma unroll 1
    for (int i = 0; i < stages; i++)
#pragma unroll(ONE_STAGE ? 4 : 1)
        for (int k = 0; k < used; k++)
            barrier_init(ring.barrier(i, k), k >= 2 ? ARRIVALS * team_warps : V::BULK ? 1 : 32 * team_warps);
    barrier_init_fence();
}

/** Whether the kernel runs on the architecture that is compiled for: bulk copies need compute capability 9.0
 *  (look_at_device).
 *  Other combinations are left empty. */
template <class V> __device__ constexpr bool is_for_this_device()
{
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1000)
    return !V::BULK;
#else
    return true;
#endif
}

template <class V> __device__ __forceinline__ void attend_pages(const AttendArgs &a)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, team = warp / a.team_warps,
        member = warp - team * a.team_warps;
    int thread = 32 * member + lane, first_row = 4 * V::BLOCKS * member;
    let_next_start();
    Ring<V> ring = {shared_address(shared_bytes) + team * a.stages * a.stage_bytes,
                    shared_address(shared_bytes) + a.at_barriers + team * a.stages * 32, 0, 0,
                    copy_policy(a.row_tiles == 1)};
    if (thread == 0) init_barriers(a, ring);
    if (a.team_warps > 1) __syncthreads();
    else __syncwarp();
    /* Neighbouring pieces go to different blocks, so that even few units use all multiprocessors. Lengths and pages are
     * complete: prepare waited for all earlier kernels before it let this one start. */
    Cursor cursor(a, team * gridDim.x + blockIdx.x, a.teams * gridDim.x, lane);
    bool tell = thread == 0;
    WarpSpace<V> space(a, warp);
    Lookahead ahead(a, cursor, tell, space.between(), lane);
    if (ahead.now.there) top_up(a, ring, ahead, thread);
    if (has_wave<V>(a)) {
        const WaveConstants<V::TILES * V::RUN> constants(a, lane);
        const LaneIncrements<(V::GROUPS > 4 ? 4 : 2)> increments(a, lane); /* they are complete, as lengths are */
        fill_wave_table(a, constants, increments);
        __syncthreads();
    }
    if (!ahead.now.there) return;
    wait_for_previous(); /* the queries */
#pragma unroll 1
    for (;;) {
        Sums<V> sums;
        WarpRows rows = find_rows_of_warp<V>(a, ahead.now, first_row / 4, lane, space);
        attend_units<V>(a, ring, ahead, rows, thread, sums);
        leave_part<V>(a, ahead.now, space.between()->cursor.piece, first_row, lane, sums);
        ahead.step(a, tell, lane);
        if (!ahead.now.there) return;
        top_up(a, ring, ahead, thread);
    }
}

template <class V> __global__ void __maxnreg__(V::MAX_REGISTERS) attend_kernel(const __grid_constant__ AttendArgs a)
{
    if constexpr (is_for_this_device<V>()) attend_pages<V>(a);
}

/** For compiled_here. */
struct MakeSplit {
    template <Strategy, class V> static void (*kernel())(AttendArgs) { return attend_kernel<V>; }
};

} // namespace tq
#endif
