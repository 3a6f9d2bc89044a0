/* Attention of up to 16 rows in one kernel (up to 128: FUSED_MANY_ROWS). What prepare, pages and combine pass on in the
 * workspace stays in shared memory here.
 *
 * Several blocks may share a segment. Each of them
 *   - prepares all queries of the tile of rows, one warp per row, while the first pages are loaded,
 *   - attends: each of the segment's n teams (one warp, or four as in attend_many_rows) processes every n-th unit.
 *     Then warps attend to exact tokens,
 *   - merges the parts of its teams.
 * If the blocks form a cluster, each finishes some of the rows from parts that the others send, un-rotates and writes
 * them. Otherwise, if there are several, all write their parts of all rows to the workspace, and a second kernel,
 * merge_parts, finishes.
 *
 * If there are more rows than a tile has, each tile has its own blocks, in the grid's second dimension.
 *
 * The work is cut by segments. If sequences are about equally long, or where it costs less, all segments have equally
 * many blocks, and a team has every n-th unit of its segment. Otherwise (`ragged`) a schedule gives each segment as
 * many blocks as its length needs (fused/share.cu), and each block has a piece of the segment's units. */
#ifndef TQ_CUDA_ATTEND_FUSED_KERNEL_CUH
#define TQ_CUDA_ATTEND_FUSED_KERNEL_CUH
#include "cuda/attend/fused/exact.cuh"
#include "cuda/attend/loop/team.cuh"
#include "cuda/attend/loop/warp.cuh"

namespace tq
{

/** The head_dim that a kernel rotates in registers (USUAL in rotate_lanes). */
template <class V> constexpr int USUAL_DIM = TQ_TILE * (V::ONE_WIDTH ? V::GROUPS : 4);

/** The units of one team: every fused.stride-th of a segment, or with RUN 2 the units of every fused.stride-th page.
 *  `unit` is the next to load; the team's unit before it is being computed (at_work). The struct is small, because
 *  kernels with 96 or 128 registers would spill more. */
template <int RUN> struct Stride : UnitPlace {
    Range seen_by_all; /* packed indices that all rows see */
    int32_t end;       /* of the segment's units */

    __device__ __forceinline__ Stride(const AttendArgs &a, const PackedView &view, int32_t b, int32_t h, int32_t turn)
        : UnitPlace(a, max((view.units.lo & -RUN) + RUN * turn, view.units.lo), b, h), seen_by_all(view.common),
          end(view.units.hi)
    {
    }
    __device__ __forceinline__ Range common() const { return seen_by_all; }
    __device__ __forceinline__ bool more() const { return unit < end; }
    __device__ __forceinline__ bool works(const AttendArgs &a) const { return at_work(a) < end; }
    __device__ __forceinline__ int32_t at_work(const AttendArgs &a) const
    {
        return RUN == 1 ? unit - a.fused.stride : unit % 2 ? unit - 1 : unit - 2 * a.fused.stride + 1;
    }
    __device__ __forceinline__ void step_on(const AttendArgs &a, bool)
    {
        unit += RUN == 1 ? a.fused.stride : unit % 2 ? 2 * a.fused.stride - 1 : 1;
    }
};

/** What a block knows of its segment. */
struct FusedBlock {
    RowSet set;
    int32_t rank, active; /* rank among the blocks that share the segment; the block's teams that have units */
    PackedView view;      /* ragged: its units are the block's own */

    /** Reads back what kernels with 128 registers and a wave would otherwise spill. */
    __device__ __forceinline__ void read_back(const FusedBlock &from)
    {
        set.b = from.set.b, rank = from.rank, active = from.active;
    }
    /** Returns the place of a team's first run among the segment's (ragged: the block's) runs. */
    template <bool RAGGED> __device__ __forceinline__ int32_t turn(const AttendArgs &a, int team) const
    {
        return RAGGED ? team : rank + team * a.fused.sharing;
    }
};
constexpr int AT_SENT = FUSED_BLOCK_BYTES - 16,
              AT_SHARING = AT_SENT + 8; /* offsets in FUSED_BLOCK_BYTES: FusedSpace::sent, own_sharing */
static_assert(sizeof(FusedBlock) <= AT_SENT);

/** A block's shared memory after the stages of its teams. The stages hold packed sums, [rows][pitch], once the units
 *  are done. A warp attends to exact tokens for one set of rows, so SETS neighbouring warps have the same tokens. */
template <class V> struct FusedSpace {
    static constexpr int ROWS = V::ROWS, SETS = exact_sets(V::TEAM_WARPS > 1 ? ROWS : 0), ROWS_OF_SET = ROWS / SETS;
    static_assert(V::TEAM_WARPS % SETS == 0, "every set has as many warps of a block");
    const AttendArgs &a;

    template <class T> __device__ __forceinline__ T *at(int32_t bytes) const
    {
        return reinterpret_cast<T *>(shared_bytes + bytes);
    }
    __device__ __forceinline__ RowArgs *rows() const { return at<RowArgs>(a.fused.rows); }
    __device__ __forceinline__ uint2 *queries() const { return at<uint2>(a.fused.queries); }
    __device__ __forceinline__ float2 *wave() const { return at<float2>(a.wave.at_rows); }
    __device__ __forceinline__ float2 *value_scale() const { return at<float2>(a.fused.value_scale); }
    __device__ __forceinline__ FusedBlock *block() const { return at<FusedBlock>(a.fused.block); }
    /** The barrier for the parts that the cluster's blocks send to this one. */
    __device__ __forceinline__ uint32_t sent() const { return shared_address(shared_bytes) + a.fused.block + AT_SENT; }
    /** How many blocks share the segment, if ragged. It is in shared memory because registers are short. */
    __device__ __forceinline__ int32_t *own_sharing() const { return at<int32_t>(a.fused.block + AT_SHARING); }
    __device__ __forceinline__ int32_t sharing() const { return V::RAGGED ? *own_sharing() : a.fused.sharing; }
    __device__ __forceinline__ float *spare_row(int row) const { return at<float>(a.fused.spare) + row * a.pitch; }
    __device__ __forceinline__ float *packed_sums(int team, int row) const
    {
        return at<float>(team * a.fused.team_bytes) + row * a.pitch;
    }
    /** A row's exact sums of a part. If teams are single warps, they lie in the warp's stage after its packed sums. */
    __device__ __forceinline__ float *exact_sums(int part, int row) const
    {
        if (V::TEAM_WARPS > 1) return at<float>(a.fused.exact) + (part * ROWS + row) * a.pitch;
        return at<float>((a.fused.teams - 1 - part) * a.fused.team_bytes + a.fused.exact) + row * a.pitch;
    }
    /** Totals of a part of a row: {max, sum, sum of packed tokens, rounded_sum}. Parts of packed tokens come first, one
     *  for each team, then exact ones. */
    __device__ __forceinline__ float4 *totals(int part, int row) const
    {
        return at<float4>(a.fused.totals) + part * ROWS + row;
    }
    /** The part (part_floats numbers) that block `rank` of the cluster sends for a row that this block finishes. */
    __device__ __forceinline__ float *slot(int row, int rank) const
    {
        return at<float>(a.fused.slots) + ((row & -a.fused.cluster) + rank) * part_floats(a);
    }
};

/** attend_exact_of_warp for float32 and ROWS rows from first_row on. Not inlined: few calls need it, and skipped code
 *  costs time, too (measured.md). */
template <class V, int ROWS>
__device__ __noinline__ void attend_exact_floats(const AttendArgs &a, RowSet s, Sequence seq, ExactTokens tokens,
                                                 int part, int first_row, int lane)
{
    const FusedSpace<V> space = {a};
    ExactSumsOfFloats<ROWS> sums;
    sums.attend(a, s, seq, tokens, first_row, lane);
    if (lane % sums.LANES == 0)
        *space.totals(a.fused.teams + part, first_row + lane / sums.LANES) =
            make_float4(sums.weights.top, sums.weights.sum, 0, 0);
    if (4 * lane >= TQ_TILE * a.groups) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        *reinterpret_cast<float4 *>(space.exact_sums(part, first_row + r) + 4 * lane) = sums.o[r];
}

/** Attends to a warp's part of the exact tokens, after its units, and writes the sums to where the block merges. The
 *  last warps get parts first, because they have the fewest units. Inlined, because a call is slower (measured.md). */
template <class V>
__device__ __forceinline__ void attend_exact_of_warp(const AttendArgs &a, const FusedBlock &block,
                                                     const FusedSpace<V> &space, int warp, int lane)
{
    constexpr int OF_SET = FusedSpace<V>::ROWS_OF_SET, SETS = FusedSpace<V>::SETS,
                  ROWS = OF_SET < EXACT_ROWS ? OF_SET : EXACT_ROWS;
    const int turn = a.fused.warps - 1 - warp, part = turn / SETS, first_of_set = OF_SET * (turn % SETS), g = lane / 4,
              t = lane % 4;
    if (part >= a.fused.exact_warps) return;
    const RowSet &s = block.set;
    const Sequence seq = load_sequence(a, s.b);
    const ExactTokens first(a, s, seq, block.rank, part, space.sharing(), lane);
#pragma unroll 1
    for (int row = first_of_set; row < first_of_set + OF_SET; row += ROWS) {
        float4 *totals = space.totals(a.fused.teams + part, row);
        if (!first.more()) {
            if (lane < ROWS) totals[lane] = make_float4(-INFINITY, 0, 0, 0);
            continue;
        }
        if (a.p.layer.dtype == TQ_F32) {
            attend_exact_floats<V, ROWS>(a, s, seq, first, part, row, lane);
            continue;
        }
        ExactTokens tokens = first;
        ExactSums<V::GROUPS, ROWS> sums;
        sums.attend(a, s, seq, tokens, row, lane);
        if (t == 0 && g < ROWS) totals[g] = make_float4(sums.weights.top, sums.weights.sum, 0, 0);
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int c = 0; c < V::GROUPS; c++) {
                if (2 * t + j >= ROWS || c >= a.groups) continue;
                const auto &o = sums.o[c];
                *reinterpret_cast<float4 *>(space.exact_sums(part, row + 2 * t + j) + TQ_TILE * c + 4 * g) =
                    make_float4(o[0][j], o[0][2 + j], o[1][j], o[1][2 + j]);
            }
    }
}

/** Writes a warp's part of the packed tokens to where the block merges. */
template <class V>
__device__ __forceinline__ void leave_part_in_block(const AttendArgs &a, const FusedSpace<V> &space, int warp, int lane,
                                                    const Sums<V> &sums)
{
#pragma unroll
    for (int n = 0; n < V::ROW_QUADS; n++) {
        int row = 4 * n + (lane & 3);
        float weights = sums.weights[n];
#pragma unroll
        for (int k = 4; k < 32; k *= 2) weights += __shfl_xor_sync(ALL_LANES, weights, k);
        if (lane < 4)
            *space.totals(warp, row) =
                make_float4(sums.reference[n] == NO_REFERENCE ? -INFINITY : sums.bias[n] - sums.reference[n], weights,
                            weights, sums.rounded[n]);
        float *to = space.packed_sums(warp, row) + lane / 4;
#pragma unroll
        for (int g = 0; g < V::GROUPS; g++) {
            if (!V::ONE_WIDTH && g >= a.groups) break;
#pragma unroll
            for (int r = 0; r < 4; r++) to[TQ_TILE * g + 8 * r] = sums.o[g][r][n];
        }
    }
}

/** Adds a part to a row's totals. Every lane adds all parts, which is faster than one part per lane. */
__device__ __forceinline__ void add_totals(MergedRow &m, float factor, float4 totals)
{
    m.sum = fmaf(factor, totals.y, m.sum);
    m.packed_sum = fmaf(factor, totals.z, m.packed_sum);
    m.rounded_sum = fmaf(factor, totals.w, m.rounded_sum);
}

/** Returns the weighted sum of n parts of a row, and adds their totals to m. Part w has its sums at at(w, row), its
 *  totals at index first + w, and its factor in lane first + w; a lane adds four channels, from c on. Unless
 *  ALL_WRITTEN, the sums of a part with factor 0 may be unwritten. */
template <bool ALL_WRITTEN, class V, class Row>
__device__ __forceinline__ float4 add_parts(const FusedSpace<V> &space, int row, int n, float factor, int first, int c,
                                            Row at, MergedRow &m)
{
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int w = 0; w < n; w++) {
        float f = __shfl_sync(ALL_LANES, factor, first + w);
        float4 x = *reinterpret_cast<const float4 *>(at(w, row) + c);
        add_scaled(sum, f, !ALL_WRITTEN && f == 0 ? make_float4(0, 0, 0, 0) : x);
        add_totals(m, f, *space.totals(first + w, row));
    }
    return sum;
}

/** Whether merge_parts finishes all rows of a segment. It also un-rotates them, faster than all blocks could here. */
__device__ __forceinline__ bool leaves_parts(const AttendArgs &a, int32_t sharing)
{
    return sharing != a.fused.cluster;
}

/** Merges the parts of the block's teams, of which the first `active` had units, and sends each row to the block that
 *  finishes it. A warp has a row, a lane four channels. */
template <class V>
__device__ __forceinline__ void send_rows(const AttendArgs &a, const FusedSpace<V> &space, const FusedBlock &block,
                                          int warp, int lane)
{
    const RowSet &s = block.set;
    const int rank = block.rank, active = block.active;
    int warps = a.fused.warps, teams = a.fused.teams, exact_parts = a.fused.exact_warps, width = TQ_TILE * a.groups,
        c = 4 * lane;
    bool exact = a.exact_parts, has = c < width, in_cluster = a.fused.cluster > 1;
    if (!has) c = 0;
    float *slot;
    uint32_t sent_to, bar;
    auto put = [&](int at, float4 x) {
        if (in_cluster) send_cluster(sent_to + 4 * at, x, bar);
        else *reinterpret_cast<float4 *>(slot + at) = x;
    };
#pragma unroll 1
    for (int row = warp; row < s.n; row += warps) {
        float highest = lane < (exact ? teams + exact_parts : active) ? space.totals(lane, row)->x : -INFINITY;
        float top = warp_max(highest), f = moved(highest, top);
        MergedRow m = {top, 0, 0, 0};
        if (in_cluster) {
            sent_to = cluster_address(shared_address(space.slot(row, rank)), row & (a.fused.cluster - 1));
            bar = cluster_address(space.sent(), row & (a.fused.cluster - 1));
        } else if (leaves_parts(a, space.sharing())) {
            slot = a.sums + ((int64_t)blockIdx.x * a.rows + s.row_tile * space.ROWS + row) * part_floats(a);
        } else {
            slot = space.slot(row, 0);
        }
        auto packed = [&](int w, int row) { return space.packed_sums(w, row); };
        float4 sum = add_parts<true>(space, row, active, f, 0, c, packed, m);
        if (has) put(4 + c, sum);
        if (exact) {
            auto exact_of = [&](int w, int row) { return space.exact_sums(w, row); };
            sum = add_parts<false>(space, row, exact_parts, f, teams, c, exact_of, m);
            if (has) put(4 + width + c, sum);
        }
        if (lane == 0) put(0, make_float4(m.max, m.sum, m.packed_sum, m.rounded_sum));
    }
}

/** Returns the weighted sum of a row's slots. Lane k has the factor of slot k. A lane adds four channels of each slot,
 *  from `first` on; lanes after the last channel return garbage. Always takes four slots at a time: usually there are
 *  eight, and skipped code costs time, too. WITH_TOTALS: also adds the totals to m. */
template <bool WITH_TOTALS, class V>
__device__ __forceinline__ float4 add_slots(const FusedSpace<V> &space, int row, float factor, int first, int lane,
                                            MergedRow &m)
{
    constexpr int AT_ONCE = 4;
    int blocks = space.a.fused.cluster, at = first + (4 * lane < TQ_TILE * space.a.groups ? 4 * lane : 0);
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int k = 0; k < blocks; k += AT_ONCE)
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            int block = min(k + j, blocks - 1);
            float f = __shfl_sync(ALL_LANES, factor, block);
            if (k + j >= blocks) f = 0;
            const float *slot = space.slot(row, block);
            add_scaled(sum, f, *reinterpret_cast<const float4 *>(slot + at));
            if (WITH_TOTALS) add_totals(m, f, *reinterpret_cast<const float4 *>(slot));
        }
    return sum;
}

/** Merges the parts that the cluster's blocks sent for a row that this block finishes, and writes results. One warp. */
template <class V>
__device__ __forceinline__ void finish_row(const AttendArgs &a, int row, const ValueScale<4> &scale, uint32_t flip,
                                           const Output &output, const FusedSpace<V> &space, int lane)
{
    int width = TQ_TILE * a.groups;
    float highest = *space.slot(row, lane & (a.fused.cluster - 1)), top = warp_max(highest), f = moved(highest, top);
    MergedRow m = {top, 0, 0, 0};
    LaneRow<4> sum, exact_sum;
    sum.quad[0] = add_slots<true>(space, row, f, 4, lane, m);
    clear(exact_sum);
    if (a.exact_parts) exact_sum.quad[0] = add_slots<false>(space, row, f, 4 + width, lane, m);
    scale.apply(sum, m.rounded_sum);
    rotate_lanes<4, USUAL_DIM<V>>(a, sum, space.spare_row(row), flip, true, lane);
    output.complete<4>(a, sum, exact_sum, m, lane);
    output.write<4>(a, sum, m, lane);
}

/** Returns the first row that a warp prepares. The last warps come first, because the first ones have the units. */
__device__ __forceinline__ int first_row_of_warp(const AttendArgs &a, int warp) { return a.fused.warps - 1 - warp; }

/** Prepares the rows of a segment in shared memory. load: row first_row_of_warp, in flight; flip: lane_signs. */
template <class V>
__device__ __forceinline__ void prepare_rows(const AttendArgs &a, const RowSet &s, const Sequence &seq,
                                             QueryLoad<4> load, const WaveLoad<4> &wave_load,
                                             const MetricLoad<4> &metric, const QueryScale<4> &scale, uint32_t flip,
                                             const FusedSpace<V> &space, int warp, int lane)
{
    PreparedRows to = {reinterpret_cast<uint32_t *>(space.queries()), space.rows(), space.wave()};
#pragma unroll 1
    for (int first = first_row_of_warp(a, warp), i = first; i < FusedSpace<V>::ROWS; i += a.fused.warps) {
        if (i >= s.n || (a.p.query_start_loc && !find_row(a, s, i).real)) {
            leave_row_empty<4, V::WAVE>(a, i, to, lane);
            continue;
        }
        LaneRow<4> row;
        if (i != first) load = QueryLoad<4>(a, s, i, lane);
        float bias = take_query<4>(a, s, load, row, lane);
        float wave = 0;
        if constexpr (V::WAVE) {
            wave = put_wave<4>(a, wave_load, row, space.spare_row(i), to.wave_of(a, i), lane);
            undo_metric<4>(a, metric, row, lane);
        }
        rotate_lanes<4, USUAL_DIM<V>>(a, row, space.spare_row(i), flip, false, lane);
        round_query<4, V::VARIANCE>(a, s, seq, i, row, scale, bias, wave, to, lane);
    }
}

/** Prefetches the arguments into the constant caches, some lines by each warp. */
__device__ __forceinline__ void touch_arguments(const AttendArgs &a, int warp)
{
    constexpr int LINE_WORDS = 16;
    const uint32_t *words = reinterpret_cast<const uint32_t *>(&a);
    uint32_t all = 0;
#pragma unroll 1
    for (int i = LINE_WORDS * warp; i < (int)(sizeof a / 4); i += LINE_WORDS * a.fused.warps) all |= words[i];
    if (all == 0xdeadbeefu) __nanosleep(0); /* never true, but the compiler does not know that */
}

/** Processes a warp's units and writes its part to shared memory. The version for teams is below. */
template <class V>
__device__ __forceinline__ void attend_share(const AttendArgs &a, Ring<V, true> &ring, Stride<V::RUN> &ahead,
                                             const FusedSpace<V> &space, int warp, int lane)
{
    Sums<V> sums;
    attend_units<V>(a, ring, ahead, {space.rows(), space.queries(), space.wave()}, lane, sums);
    __syncwarp();
    leave_part_in_block<V>(a, space, warp, lane, sums);
}

/** Merges the parts of the block's teams, and finishes the block's rows unless merge_parts does. */
template <class V>
__device__ __forceinline__ void finish_block(const AttendArgs &a, const FusedSpace<V> &space, const FusedBlock &block,
                                             int warp, int lane)
{
    int cluster = a.fused.cluster;
    int row = (cluster > 1 ? block.rank : 0) + warp * cluster;
    Output output(a, block.set, row);
    ValueScale<4> scale(space.value_scale()[lane]);
    uint32_t flip = lane_signs<4>(a, lane);
    __syncthreads();
    if (cluster > 1) cluster_wait(); /* all blocks have started */
    send_rows<V>(a, space, block, warp, lane);
    if (leaves_parts(a, space.sharing())) return;
    if (cluster == 1) __syncthreads();
    if (row >= block.set.n) return;
    if (cluster > 1) barrier_wait_cluster(space.sent());
#pragma unroll 1
    for (;;) {
        finish_row<V>(a, row, scale, flip, output, space, lane);
        row += a.fused.warps * cluster;
        if (row >= block.set.n) return;
        output = Output(a, block.set, row);
    }
}

/** Initialises the barrier of the parts that this block will receive. One thread. */
template <class V>
__device__ __forceinline__ void expect_rows(const AttendArgs &a, const FusedSpace<V> &space, int rows, int rank)
{
    int cluster = a.fused.cluster, own = max(rows - rank + cluster - 1, 0) / cluster, parts = a.exact_parts ? 2 : 1;
    barrier_init(space.sent(), 1);
    barrier_init_fence();
    barrier_expect(space.sent(), own * cluster * (4 + parts * TQ_TILE * a.groups) * (int)sizeof(float));
}

/** The state of a team before its units: its block's segment, and the units. works: whether it has any. */
template <int RUN> struct BlockStart {
    FusedBlock block;
    Stride<RUN> ahead;
    bool works;
};

/** What a schedule says of block `index`: whole blocks come first, then the last one of each segment. sharing 0: the
 *  block has nothing to do. By a whole warp. */
struct BlockShare {
    int32_t b, h, rank, sharing, each;
    Sequence seq;

    __device__ __forceinline__ BlockShare(const AttendArgs &a, int32_t index, int lane)
    {
        const int32_t heads = a.p.layer.kv_heads, batch = a.p.layer.batch;
        auto load_row = [&](int32_t at) { return __ldcg(a.schedule + 1 + min(at, batch - 1)); };
        const int4 head = __ldcg(a.schedule);
        int4 row = load_row(divide(index, heads));      /* right if there are no whole blocks; loaded with the head */
        const bool scheduled = is_schedule_of(a, head); /* otherwise each segment has one block */
        const int32_t last = index - (scheduled ? head.y : 0);
        if (last < 0) {
            row = find_row(a, index, lane);
        } else {
            const int32_t at = divide(last, heads);
            if (scheduled && head.y) row = load_row(at);
            if (!scheduled) row.y = min(at, batch - 1) << 16;
            /* Here the KV head, not the first whole block; `heads` in blocks that the grid has too many of. */
            row.x = at < batch ? last - at * heads : heads;
        }
        /* so that the compiler knows that lanes agree */
        row = make_int4(__reduce_max_sync(ALL_LANES, row.x), __reduce_max_sync(ALL_LANES, row.y),
                        __reduce_max_sync(ALL_LANES, row.z), __reduce_max_sync(ALL_LANES, row.w));
        const int32_t whole = row.y & 0xffff, of_head = index - row.x;
        b = row.y >> 16, each = head.z, sharing = whole + 1;
        h = last >= 0 ? row.x : divide(of_head, whole);
        rank = last >= 0 ? whole : of_head - h * whole;
        if (h >= heads) sharing = 0;
        seq = scheduled && !a.varies ? make_sequence(a, row.z, row.w) : load_sequence(a, b);
    }
    /** Returns the view with the block's own units. */
    template <int RUN> __device__ __forceinline__ PackedView view(const AttendArgs &a) const
    {
        PackedView v = view_packed(a, seq);
        if (sharing == 1 || !v.units.count()) return v;
        const int32_t first = RUN * (v.units.lo / RUN + each * rank);
        v.units = {max(v.units.lo, first), rank + 1 == sharing ? v.units.hi : min(v.units.hi, first + RUN * each)};
        return v;
    }

private:
    /** Returns the row of the schedule that has whole block `index`: {first whole block, whole blocks of each of its
     *  segments | sequence << 16, length, start}. */
    static __device__ __forceinline__ int4 find_row(const AttendArgs &a, int32_t index, int lane)
    {
        constexpr int AT_ONCE = 4;
        const int32_t batch = a.p.layer.batch;
        int4 entry = {};
#pragma unroll 1
        for (int32_t first = 0; first < batch; first += 32 * AT_ONCE) {
            int4 row[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) row[j] = __ldcg(a.schedule + 1 + min(first + 32 * j + lane, batch - 1));
            bool last = false;
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int n = __popc(__ballot_sync(ALL_LANES, first + 32 * j + lane < batch && row[j].x <= index));
                if (n)
                    entry = make_int4(__shfl_sync(ALL_LANES, row[j].x, n - 1), __shfl_sync(ALL_LANES, row[j].y, n - 1),
                                      __shfl_sync(ALL_LANES, row[j].z, n - 1), __shfl_sync(ALL_LANES, row[j].w, n - 1));
                last |= n < 32;
            }
            if (last) break;
        }
        return entry;
    }
};

/** Finds the block's segment and all addresses while the previous kernel still runs. Then loads the queries and the
 *  first pages, and prepares everything else meanwhile. FRUGAL: as in attend_fused. */
template <class V, bool FRUGAL>
__device__ __forceinline__ BlockStart<V::RUN> start_block(const AttendArgs &a, const FusedSpace<V> &space,
                                                          const Ring<V, true> &ring, int team, int thread, int warp,
                                                          int lane)
{
    constexpr bool ragged = V::RAGGED;
    int sharing = a.fused.sharing, segment = divide(blockIdx.x, sharing), rank = blockIdx.x - segment * sharing,
        b = divide(segment, a.p.layer.kv_heads), h = segment - b * a.p.layer.kv_heads;
    int turn = rank + team * sharing; /* among the segment's teams */
    Sequence seq;
    PackedView view;
    RowSet set = {b, h, 0, segment, 0, a.rows};
    if (V::ROWS >= 16) set.row_tile = blockIdx.y, set.n = min(a.rows - set.row_tile * space.ROWS, space.ROWS);
    touch_arguments(a, warp);
    if (ring.sends(thread) && elect_lane()) init_barriers(a, ring);
    __syncwarp();
    if (a.fused.cluster > 1) {
        if (threadIdx.x == 0) expect_rows<V>(a, space, set.n, rank);
        __syncwarp();
        cluster_arrive(); /* from here on others may write into this block's shared memory */
    }
    let_next_start();
    int32_t first_unit = V::RUN * turn; /* if rows see the first page */
    if constexpr (ragged) {
        wait_for_previous();
        const BlockShare share(a, blockIdx.x, lane);
        b = share.b, h = share.h, rank = share.rank, sharing = share.sharing, turn = team, seq = share.seq;
        set = {b, h, 0, b * a.p.layer.kv_heads + h, 0, a.rows};
        if (!sharing) return {{set, 0, -1, {}}, Stride<V::RUN>(a, {}, 0, 0, 0), false};
        view = share.template view<V::RUN>(a);
        first_unit = Stride<V::RUN>(a, view, b, h, turn).unit;
    }
    /* What does not depend on results of the previous kernel comes first. */
    UnitPlace guess(a, min(first_unit, a.p.layer.max_pages * a.page_units - 1), b, h);
    uint32_t flip = lane_signs<4>(a, lane), entry = guess.entry(a);
    QueryScale<4> scale(a, lane);
    int64_t query = a.p.query_start_loc ? -1 /* not yet known */ : query_at(a, set, first_row_of_warp(a, warp));
    WaveConstants<V::TILES * V::RUN> wave_constants;
    if (has_wave<V>(a)) wave_constants = WaveConstants<V::TILES * V::RUN>(a, lane);
    compute_here(query), compute_here(entry), compute_here(flip), compute_here(scale.factor[0]),
        compute_here(scale.levels[0]);
    wait_for_previous();

    /* All loads are in flight together. Queries come first, because they take the longest to process: an instruction
     * that waits for a load stalls all instructions after it. */
    QueryLoad<4> load(a, query, lane);
    WaveLoad<4> wave_load;
    MetricLoad<4> metric;
    LaneIncrements<2> increments;
    if constexpr (V::WAVE) {
        if (first_row_of_warp(a, warp) < set.n) wave_load = WaveLoad<4>(a, h, lane), metric = MetricLoad<4>(a, h, lane);
        if (has_wave<V>(a)) increments = LaneIncrements<2>(a, lane);
    }
    scale.load_steps(a, h, lane);
    int32_t page = a.p.layer.max_pages ? a.p.layer.block_table[entry] : 0;
    if (!ragged) seq = load_sequence(a, b);
    if (a.p.query_start_loc) /* with the loads above in flight */
        load = QueryLoad<4>(a, set, first_row_of_warp(a, warp), lane);
    if (!ragged) view = view_packed(a, seq);
    Stride<V::RUN> ahead(a, view, b, h, turn);
    bool works = ahead.more();
    if (works && ring.sends(thread)) {
        if (ahead.unit != guess.unit) page = ahead.page(a);
        const uint8_t *record = ahead.record(a, page);
#pragma unroll
        for (int which = 0; which < 2; which++) ring.fill(a, 0, which, record, ahead.unit, thread);
    }
    ahead.step_on(a, works);
    /* teams with units (divide may be off for very large quotients, far above `teams`) */
    const int runs = view.units.count() ? (view.units.hi + V::RUN - 1) / V::RUN - view.units.lo / V::RUN : 0;
    int active = min(a.fused.teams, ragged ? runs : divide(max(runs - rank, 0) + sharing - 1, sharing));
    FusedBlock block = {set, rank, active, view};
    if (ragged && threadIdx.x == 0) *space.own_sharing() = sharing;
    if ((FRUGAL || V::WAVE) && threadIdx.x == 0) *space.block() = block;
    if (has_wave<V>(a)) fill_wave_table(a, wave_constants, increments);
    if constexpr (V::WAVE) wave_load.turn_on(a, b, lane);
    prepare_rows<V>(a, set, seq, load, wave_load, metric, scale, flip, space, warp, lane);
    if (warp == 0) /* warp 0 has the fewest rows */
        space.value_scale()[lane] = ValueScale<4>(a, set, lane).pair();
    return {block, ahead, works};
}

/** FRUGAL keeps the block's segment in shared memory between steps. Kernels of 96 registers and FUSED_MANY_ROWS would
 *  spill it to device memory, which is busy with pages. In other kernels, reading it back costs time (measured.md). */
template <class V, bool FRUGAL> __device__ __forceinline__ void attend_fused(const AttendArgs &a)
{
    int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0); /* so that the compiler knows that lanes agree */
    int lane = threadIdx.x & 31, thread = threadIdx.x % (32 * V::TEAM_WARPS), team = warp / V::TEAM_WARPS;
    Ring<V, true> ring = {shared_address(shared_bytes) + team * a.fused.team_bytes,
                          shared_address(shared_bytes) + a.at_barriers + team * 32, 0, 0,
                          copy_policy(V::ROWS < 16 || a.row_tiles == 1)};
    FusedSpace<V> space = {a};
    BlockStart<V::RUN> start = start_block<V, FRUGAL>(a, space, ring, team, thread, warp, lane);
    if (V::RAGGED && start.block.active < 0) return;      /* the whole block */
    if (V::TEAM_WARPS > 1) shared_writes_before_copies(); /* WGMMA reads queries by the async proxy */
    __syncthreads();
    if (FRUGAL) {
        start.block = *space.block();
        const FusedBlock &block = start.block;
        start.ahead = Stride<V::RUN>(a, block.view, block.set.b, block.set.h, block.turn<V::RAGGED>(a, team));
        start.works = start.ahead.more();
        start.ahead.step_on(a, start.works);
    }
    if (start.works) attend_share(a, ring, start.ahead, space, warp, lane);
    else if (thread < FusedSpace<V>::ROWS) *space.totals(team, thread) = make_float4(-INFINITY, 0, 0, 0);
    if (V::TEAM_WARPS > 1 && !V::ONE_WIDTH) /* frees registers of the loop (measured.md: thread_again) */
        lane = thread_again(), warp = __shfl_sync(ALL_LANES, lane / 32, 0), lane %= 32;
    if (FRUGAL) start.block = *space.block();
    else if (V::WAVE) start.block.read_back(*space.block());
    if (!FRUGAL) /* so that nothing computed from them takes uniform registers in the loop, whose copies need these */
        compute_here(start.block.set.b), compute_here(start.block.set.h);
    if (a.exact_parts) attend_exact_of_warp<V>(a, start.block, space, warp, lane);
    finish_block<V>(a, space, start.block, warp, lane);
}

template <class V>
__global__ void __maxnreg__(V::FUSED_REGISTERS) attend_fused_kernel(const __grid_constant__ AttendArgs a)
{
    if constexpr (is_for_this_device<V>()) attend_fused<V, V::FUSED_REGISTERS <= 96>(a);
}

/* ---- FUSED_MANY_ROWS: teams of four warps process the units, which are whole pages (loop/team.cuh) ---- */

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
