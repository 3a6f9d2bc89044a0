/* attend_fused with the loop of attend_many_rows: teams of four warps process the units, which are whole pages. */
#ifndef TQ_CUDA_ATTEND_MANY_ROWS_FUSED_CUH
#define TQ_CUDA_ATTEND_MANY_ROWS_FUSED_CUH
#include "cuda/attend/fused/fused.cuh"
#include "cuda/attend/many_rows/pages.cuh"

namespace tq
{

/** Processes a team's units and writes its part to the block's shared memory. */
template <int BITS, int ROWS, bool WAVE>
__device__ __forceinline__ void attend_share(const AttendArgs &a, Ring<ManyRows<BITS, ROWS, WAVE>, true> &ring,
                                             Stride<1> &ahead, const FusedSpace<ManyRows<BITS, ROWS, WAVE>> &space,
                                             int warp_of_block, int lane)
{
    using V = ManyRows<BITS, ROWS, WAVE>;
    /* so that the compiler knows they are the same for all lanes */
    int team = __shfl_sync(ALL_LANES, warp_of_block / V::TEAM_WARPS, 0),
        warp = __shfl_sync(ALL_LANES, warp_of_block % V::TEAM_WARPS, 0);
    TeamSpace own(a, team, V::SHARING_BYTES, a.fused.queries, false);
    ManyRowsSums<V> sums;
    attend_units_of_team<V>(a, ring, ahead, space.rows(), space.wave(), own, warp, lane, sums);
    add_weights_of_team<V>(own, warp, lane, sums); /* synchronises: no warp reads the stage any more */
    store_sums_of_team<V>(warp, lane, sums, [&](int row) { return space.packed_sums(team, row); });
    if (warp == 0 && lane < 4)
#pragma unroll
        for (int c = 0; c < V::COLUMNS; c++) {
            float2 total = total_of_team<V>(a, space.rows(), own, row_of(c, lane));
            *space.totals(team, row_of(c, lane)) = make_float4(total.x, total.y, total.y, 0);
        }
}

template <class V>
__global__ void __maxnreg__(V::MAX_REGISTERS) attend_fused_many_rows_kernel(const __grid_constant__ AttendArgs a)
{
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    attend_fused<V, true>(a);
#endif
}

} // namespace tq
#endif
