/* The kernels of SPLIT and MANY_ROWS that attend to pages. Each team of warps takes a piece of the line of units. */
#ifndef TQ_CUDA_ATTEND_SPLIT_KERNEL_CUH
#define TQ_CUDA_ATTEND_SPLIT_KERNEL_CUH
#include "cuda/attend/loop/team.cuh"
#include "cuda/attend/loop/warp.cuh"
#include "cuda/attend/split/cursor.cuh"

namespace tq
{

/** A warp's state that it needs only between segments. It is in shared memory, because local variables would be spilled
 *  to device memory, which is busy with pages. */
struct Between {
    Cursor cursor;
    Segment after; /* the segment after the current one */
};
static_assert(sizeof(Between) <= BETWEEN_BYTES);

/** A team's current and next segment. position (next to compute), fetched (next to load), now_end and after_end count
 *  units of the piece. The UnitPlace is that of unit `fetched`; working: number of unit `position` in its sequence. */
struct Lookahead : UnitPlace {
    Segment now;
    Between *between;
    int32_t position, now_end, after_end, fetched, working;

    /** tell: as in Cursor::next. A whole warp calls it. */
    __device__ __forceinline__ Lookahead(const AttendArgs &a, Cursor &cursor, bool tell, Between *between_, int lane)
        : UnitPlace(a, 0, 0, 0), now(cursor.next(a, tell)), between(between_), position(0), now_end(now.count),
          fetched(0)
    {
        look_on(a, cursor, tell, lane);
    }
    __device__ __forceinline__ void step(const AttendArgs &a, bool tell, int lane)
    {
        Cursor cursor = between->cursor;
        now = between->after;
        now_end = after_end;
        look_on(a, cursor, tell, lane);
    }
    __device__ __forceinline__ void look_on(const AttendArgs &a, Cursor &cursor, bool tell, int lane)
    {
        working = now.first;
        Segment after = cursor.next(a, tell);
        after_end = now_end + after.count;
        __syncwarp();
        if (lane == 0) *between = {cursor, after};
        __syncwarp();
        locate(a);
    }
    __device__ __forceinline__ void locate(const AttendArgs &a)
    {
        bool is_now = fetched < now_end;
        Segment s = now;
        if (!is_now) s = between->after;
        static_cast<UnitPlace &>(*this) =
            UnitPlace(a, s.first + fetched - (is_now ? now_end - now.count : now_end), s.b, s.h);
    }
    __device__ __forceinline__ Range common() const { return now.common; }
    /** Whether the current segment has another unit to compute. at_work: its number in the sequence. */
    __device__ __forceinline__ bool works(const AttendArgs &) const { return position < now_end; }
    __device__ __forceinline__ int32_t at_work(const AttendArgs &) const { return working; }
    /** To call when a unit is done. more: the load of another one into its stage was started. */
    __device__ __forceinline__ void step_on(const AttendArgs &a, bool more)
    {
        position++, working++;
        if (more) advance(a);
    }
    /** Whether the two segments have another unit to load. */
    __device__ __forceinline__ bool more() const { return fetched < after_end; }
    /** To call when the load of unit `fetched` was started. */
    __device__ __forceinline__ void advance(const AttendArgs &a)
    {
        fetched++, unit++;
        if (fetched == now_end) locate(a);
    }
};

/** Starts to load units until the ring is full, or all units of the two segments are loaded. */
template <class V>
__device__ __forceinline__ void top_up(const AttendArgs &a, const Ring<V> &ring, Lookahead &ahead, int thread)
{
#pragma unroll 1
    while (ahead.fetched < min(ahead.position + a.stages, ahead.after_end)) {
        if (ring.sends(thread)) {
            int stage = ring.stage + ahead.fetched - ahead.position;
            const uint8_t *record = ahead.record(a, ahead.page(a));
            if (stage >= a.stages) stage -= a.stages;
#pragma unroll 1
            for (int which = 0; which < 2; which++) ring.fill(a, stage, which, record, ahead.unit, thread);
        }
        ahead.advance(a);
    }
}

/** A warp's shared memory beside the stages of its team: |Between|queries, with QUERY_IN_SHARED|. */
template <class V> struct WarpSpace {
    static constexpr int BYTES = V::WARP_BYTES;
    uint8_t *at;

    __device__ __forceinline__ WarpSpace(const AttendArgs &a, int warp) : at(shared_bytes + a.at_teams + warp * BYTES)
    {
    }
    __device__ __forceinline__ Between *between() const { return reinterpret_cast<Between *>(at); }
    __device__ __forceinline__ uint2 *queries() const { return reinterpret_cast<uint2 *>(at + BETWEEN_BYTES); }
};

/* ---- SPLIT: one warp computes a unit for its rows (loop/warp.cuh) ---- */

/** Returns a warp's rows of a segment in the workspace. With QUERY_IN_SHARED, copies their queries to shared memory. */
template <class V>
__device__ __forceinline__ WarpRows find_rows_of_warp(const AttendArgs &a, const Segment &s, int first_quad, int lane,
                                                      const WarpSpace<V> &space)
{
    WarpRows r = {a.row_args + s.index * a.tile_rows + 4 * first_quad,
                  a.queries + ((int64_t)s.index * (a.tile_rows / 4) + first_quad) * a.groups * 32,
                  a.wave.rows + ((int64_t)s.index * a.tile_rows + 4 * first_quad) * WAVE_STEP * a.wave.steps};
    if constexpr (V::QUERY_IN_SHARED) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < V::ROW_QUADS * V::GROUPS; i++)
            if (V::ONE_WIDTH || i < V::ROW_QUADS * a.groups) space.queries()[32 * i + lane] = r.queries[32 * i + lane];
        __syncwarp();
        r.queries = space.queries();
    }
    return r;
}

/** Writes the warp's part of a segment to its slot in the workspace. */
template <class V>
__device__ __forceinline__ void leave_part(const AttendArgs &a, const Segment &s, int32_t piece, int first_row,
                                           int lane, const Sums<V> &sums)
{
    int64_t slot = (int64_t)(piece + s.index) * a.tile_rows;
#pragma unroll
    for (int n = 0; n < V::ROW_QUADS; n++) {
        int64_t row = slot + first_row + 4 * n + (lane & 3);
        float weights = sums.weights[n];
#pragma unroll
        for (int k = 4; k < 32; k *= 2) weights += __shfl_xor_sync(ALL_LANES, weights, k);
        if (lane < 4)
            a.totals[row] = {sums.reference[n] == NO_REFERENCE ? -INFINITY : sums.bias[n] - sums.reference[n], weights,
                             sums.rounded[n], 0};
        float *to = a.sums + row * TQ_TILE * a.groups + lane / 4;
#pragma unroll
        for (int g = 0; g < V::GROUPS; g++) {
            if (!V::ONE_WIDTH && g >= a.groups) break;
#pragma unroll
            for (int r = 0; r < 4; r++) to[TQ_TILE * g + 8 * r] = sums.o[g][r][n];
        }
    }
}

template <class V> __device__ __forceinline__ void attend_pages(const AttendArgs &a)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, team = warp / a.team_warps,
        member = warp - team * a.team_warps;
    int thread = 32 * member + lane, first_row = 4 * V::ROW_QUADS * member;
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
        const LaneIncrements<(V::GROUPS > 4 ? V::GROUPS / 2 : 2)> increments(
            a, lane); /* moments are complete, as lengths are */
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

/* ---- MANY_ROWS: four warps share a page (loop/team.cuh) ---- */

/** Copies the segment's queries to the team's own shared memory. */
template <class V>
__device__ __forceinline__ void load_queries(const AttendArgs &a, const Segment &s, const TeamSpace &space, int thread)
{
    const uint4 *from = reinterpret_cast<const uint4 *>(reinterpret_cast<const uint8_t *>(a.queries) +
                                                        (int64_t)s.index * V::QUERY_BYTES);
    uint4 *to = reinterpret_cast<uint4 *>(space.at + V::AT_QUERIES);
#pragma unroll
    for (int i = 0; i < V::QUERY_BYTES / 16 / 128; i++) to[128 * i + thread] = __ldcg(from + 128 * i + thread);
    shared_writes_before_copies();
}

/** Writes the team's part of a segment to its slot in the workspace. */
template <class V>
__device__ __forceinline__ void leave_part_of_team(const AttendArgs &a, const Segment &s, int32_t piece,
                                                   const RowArgs *rows, const TeamSpace &space, int warp, int lane,
                                                   const ManyRowsSums<V> &sums)
{
    int64_t slot = (int64_t)(piece + s.index) * V::ROWS;
    add_weights_of_team<V>(space, warp, lane, sums);
    store_sums_of_team<V>(warp, lane, sums, [&](int row) { return a.sums + (slot + row) * TQ_TILE * V::GROUPS; });
    if (warp || lane >= 4) return;
#pragma unroll
    for (int c = 0; c < V::COLUMNS; c++) {
        int row = row_of(c, lane);
        float2 total = total_of_team<V>(a, rows, space, row);
        a.totals[slot + row] = {total.x, total.y, 0, 0};
    }
}

template <class V> __device__ __forceinline__ void attend_pages_wide(const AttendArgs &a)
{
    int lane = threadIdx.x & 31, thread = threadIdx.x % 128;
    /* so that the compiler knows they are the same for all lanes */
    int team = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0), warp = __shfl_sync(ALL_LANES, thread / 32, 0);
    let_next_start();
    Ring<V> ring = {shared_address(shared_bytes) + team * a.stages * a.stage_bytes,
                    shared_address(shared_bytes) + a.at_barriers + team * a.stages * 32, 0, 0,
                    copy_policy(a.row_tiles == 1)};
    if (thread == 0) init_barriers(a, ring);
    __syncthreads();
    Cursor cursor(a, team * gridDim.x + blockIdx.x, a.teams * gridDim.x, lane);
    bool tell = thread == 0;
    TeamSpace space(a, team, V::TEAM_BYTES, V::AT_QUERIES, true);
    Lookahead ahead(a, cursor, tell,
                    reinterpret_cast<Between *>(space.at + V::AT_BETWEEN + thread / 32 * BETWEEN_BYTES), lane);
    if (ahead.now.there) top_up(a, ring, ahead, thread);
    if (has_wave<V>(a)) {
        const WaveConstants<V::TILES> constants(a, lane);
        fill_wave_table(a, constants, LaneIncrements<2>(a, lane)); /* moments are complete, as lengths are */
        __syncthreads();
    }
    if (!ahead.now.there) return;
    wait_for_previous(); /* the queries */
#pragma unroll 1
    for (;;) {
        ManyRowsSums<V> sums;
        const RowArgs *rows = a.row_args + ahead.now.index * V::ROWS;
        const float2 *wave = a.wave.rows + (int64_t)ahead.now.index * V::ROWS * WAVE_STEP * a.wave.steps;
        load_queries<V>(a, ahead.now, space, thread);
        attend_units_of_team<V>(a, ring, ahead, rows, wave, space, warp, lane, sums);
        leave_part_of_team<V>(a, ahead.now, ahead.between->cursor.piece, rows, space, warp, lane, sums);
        ahead.step(a, tell, lane);
        if (!ahead.now.there) return;
        top_up(a, ring, ahead, thread);
    }
}

template <class V>
__global__ void __maxnreg__(V::MAX_REGISTERS) attend_many_rows_kernel(const __grid_constant__ AttendArgs a)
{
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    attend_pages_wide<V>(a);
#endif
}

} // namespace tq
#endif
