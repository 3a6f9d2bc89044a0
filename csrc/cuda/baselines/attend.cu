// tq_cuda_attend for plans that are not plain, in float32 throughout. Three kernels, one after the other:
//
//   prepare   turns queries into rows [R q | S R q]             one block per set, one warp per row except for matrices
//   attend    attends with those rows to a split of the tokens  one block per set and split
//   combine   merges the splits, un-rotates the sums, writes    one block per set, one warp per row except for matrices
//
// A set is eight rows (query token, query head) of one (sequence, KV head). The tokens that some of its rows see,
// packed ones by token tile, then exact ones, are cut into equal splits. Upper bounds give one number for all sets.
//
// A tile of tokens takes four steps, each followed by a barrier:
//
//   keys      decode the tile's keys, or load exact ones      scores    eight threads per token, then one per score
//   softmax   one warp per row; decode the tile's values      values    one thread per channel, for all rows
#include <math.h>

#include "cuda/attend/choose/cut.h"
#include "cuda/attend/rows/exact.cuh"
#include "cuda/attend/rows/output.cuh"
#include "cuda/baselines/baselines.cuh"

namespace tq
{
namespace
{

constexpr int SET_ROWS = 8, SET_WARPS = SET_ROWS, SET_THREADS = 32 * SET_WARPS;

/** attend: only p, the sizes and how rows are cut, which are what attend/rows/ needs here. */
struct AttendBaselineArgs {
    AttendArgs attend;
    BaselinePlan plan;
    KeyMoments moments;
    int32_t splits, key_width, value_width, part_floats;
    // workspace, by set
    float2 *waves;  // [SET_ROWS][pairs]: a row's coefficients of each pair's cosine and sine
    float *queries; // [SET_ROWS][key_width]
    float *biases;  // [SET_ROWS]: <q, key centre>
    float *parts;   // [splits][SET_ROWS][part_floats]: RowTotals | packed sums [value_width] | exact sums [head_dim]
};
static_assert(sizeof(AttendBaselineArgs) <= 4096, "kernel parameters");

/** Returns the coefficients of all rows of a set. */
__device__ __forceinline__ float2 *waves_of(const AttendBaselineArgs &args, int64_t set)
{
    return args.waves + set * SET_ROWS * args.moments.pairs;
}

__device__ __forceinline__ float *part_at(const AttendBaselineArgs &args, int64_t set, int split, int row)
{
    return args.parts + ((set * args.splits + split) * SET_ROWS + row) * args.part_floats;
}

// ---- prepare ----

/** Writes a row's coefficients of the wave to `to`, then undoes the metric, all before its rotation. By one warp. */
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

/** Shared memory: | rows [MATRIX_TOKENS][key_width] | the rest of BaselineRows |. */
__global__ void __launch_bounds__(SET_THREADS) prepare_kernel(const __grid_constant__ AttendBaselineArgs args)
{
    const AttendArgs &a = args.attend;
    const BaselineSide &side = args.plan.side[0];
    const int row = threadIdx.x / 32, lane = threadIdx.x % 32, width = args.key_width;
    float *rows = reinterpret_cast<float *>(shared_bytes);
    const BaselineRows x(args.plan, rows, width, SET_ROWS, rows + MATRIX_TOKENS * width);
    wait_for_stream();
    const RowSet s = find_rows(a, blockIdx.x, SET_ROWS);
    const int64_t at = query_at(a, s, row);
    const float *centre = centre_of(side, s.h);
    float *to = side.rotation == TQ_ROTATION_DENSE ? x.spare + row * a.head_dim : rows + row * width, bias = 0.0f;
    for (int c = lane; c < width; c += 32) rows[row * width + c] = 0.0f;
    __syncwarp();
    for (int c = lane; c < a.head_dim; c += 32) {
        to[c] = at < 0 ? 0.0f : load_number(a.p.q, at + c, a.p.layer.dtype);
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

// ---- attend ----

constexpr int PIECES = SET_THREADS / TQ_TILE;
static_assert(PIECES == SET_ROWS, "the threads of a token finish the score of a row each");
constexpr int COLUMNS = BASELINE_TILES * TQ_TILE / SET_THREADS; // the most of a value row that a thread sums
constexpr int MOST_SPLITS = 32, LEAST_TILES = 4;                // LEAST_TILES: of one split

/** The shared memory of attend. Rows are 16-byte aligned. */
struct AttendShared {
    float *tile;                // [32][tile_stride]: keys, then values
    float *projected, *queries; // [SET_ROWS][key_width], [SET_ROWS][32 groups]: for packed and exact keys
    float *scores;              // [SET_ROWS][32], then weights
    float *factors;             // [SET_ROWS], by which the sums so far are multiplied
    float2 *waves;              // [SET_ROWS][pairs]: copy of waves_of
    float *levels[2];           // from load_levels
    ExactToken *tokens;         // [32]
};

/** Padding of a tile's rows: 16 or 8 floats modulo 32 avoid bank conflicts in decode_keys or decode_values. */
constexpr int KEY_PAD = 16, VALUE_PAD = 8;

__host__ __device__ __forceinline__ int tile_floats(int key_width, int value_width)
{
    const int width = key_width + KEY_PAD > value_width + VALUE_PAD ? key_width + KEY_PAD : value_width + VALUE_PAD;
    return TQ_TILE * width;
}

size_t attend_bytes(const AttendBaselineArgs &args)
{
    const size_t floats = tile_floats(args.key_width, args.value_width) +
                          SET_ROWS * ((size_t)args.key_width + TQ_TILE * args.attend.groups + TQ_TILE + 4) +
                          2 * LEVEL_TABLE + 2 * SET_ROWS * (size_t)args.moments.pairs;
    return sizeof(float) * floats + TQ_TILE * sizeof(ExactToken);
}

__device__ __forceinline__ AttendShared shared_of(const AttendBaselineArgs &args)
{
    AttendShared s;
    s.tile = reinterpret_cast<float *>(shared_bytes);
    s.projected = s.tile + tile_floats(args.key_width, args.value_width);
    s.queries = s.projected + SET_ROWS * args.key_width;
    s.scores = s.queries + SET_ROWS * TQ_TILE * args.attend.groups;
    s.factors = s.scores + SET_ROWS * TQ_TILE;
    s.levels[0] = s.factors + SET_ROWS * 4;
    s.levels[1] = s.levels[0] + LEVEL_TABLE;
    s.waves = reinterpret_cast<float2 *>(s.levels[1] + LEVEL_TABLE);
    s.tokens = reinterpret_cast<ExactToken *>(s.waves + SET_ROWS * args.moments.pairs);
    return s;
}

/** The tokens that some row of a set sees: packed indices, exact positions, and the tiles that they make. */
struct SetView {
    Range packed;
    ExactView exact;
    int32_t packed_tiles, exact_tokens, tiles;
};

/** Returns the positions of the set's first and last row. Without rows hi < lo, or the sequence is empty. */
__device__ __forceinline__ Range positions_of(const AttendArgs &a, const RowSet &s, const Sequence &seq)
{
    const int rows = a.heads_per_kv * queries_of(a, s.b).count, first = s.row_tile * SET_ROWS,
              last = min(first + SET_ROWS, rows) - 1;
    return {seq.first_position + first / a.heads_per_kv, seq.first_position + last / a.heads_per_kv};
}

__device__ __forceinline__ SetView view_of(const AttendArgs &a, const RowSet &s, const Sequence &seq)
{
    const Range rows = positions_of(a, s, seq);
    const int32_t lo = seen(a, seq, rows.lo).lo, hi = seen(a, seq, rows.hi).hi;
    SetView v = {};
    if (rows.hi < rows.lo) return v;
    v.packed = {seen_packed(a, seq, rows.lo).lo, seen_packed(a, seq, rows.hi).hi};
    v.exact = view_exact(a, seq, s.b); // of all rows of the sequence
    v.exact.sinks = {max(v.exact.sinks.lo, lo), min(v.exact.sinks.hi, hi)};
    v.exact.recent = {max(v.exact.recent.lo, lo), min(v.exact.recent.hi, hi)};
    v.exact.recent.lo = max(v.exact.recent.lo, rows.lo - a.recent + 1);
    v.packed_tiles = v.packed.count() ? (v.packed.hi - 1) / TQ_TILE - v.packed.lo / TQ_TILE + 1 : 0;
    v.exact_tokens = v.exact.sinks.count() + v.exact.recent.count();
    v.tiles = v.packed_tiles + (v.exact_tokens + TQ_TILE - 1) / TQ_TILE;
    return v;
}

/** The positions that a row sees, for the thread of (token threadIdx.x / 8, row threadIdx.x % 8). */
struct RowView {
    Range packed, seen; // packed: indices
    int32_t recent_lo;  // the first exact position that is no sink
    float bias;

    __device__ __forceinline__ RowView(const AttendBaselineArgs &args, const RowSet &s, const Sequence &seq, int row)
    {
        const AttendArgs &a = args.attend;
        const RowPlace place = find_row(a, s, row);
        const int32_t p = seq.first_position + place.token;
        packed = seen_packed(a, seq, p), seen = seen_exact(a, seq, s.b, p);
        if (!place.real) packed.hi = packed.lo, seen.hi = seen.lo;
        recent_lo = max(seen.lo, p - a.recent + 1);
        bias = args.biases[s.segment * SET_ROWS + row];
    }
    __device__ __forceinline__ bool sees_packed(int32_t index) const { return index >= packed.lo && index < packed.hi; }
    __device__ __forceinline__ bool sees_exact(int32_t position, int32_t sinks) const
    {
        return position >= (position < sinks ? seen.lo : recent_lo) && position < seen.hi;
    }
};

/** Adds up each row's sum over the eight threads of a token. Returns that of row threadIdx.x % 8. */
__device__ __forceinline__ float sum_of_row(float (&sums)[SET_ROWS])
{
    float mine = 0.0f;
#pragma unroll
    for (int r = 0; r < SET_ROWS; r++) {
#pragma unroll
        for (int h = 1; h < PIECES; h *= 2) sums[r] += __shfl_xor_sync(ALL_LANES, sums[r], h);
        if (r == (int)threadIdx.x % PIECES) mine = sums[r];
    }
    return mine;
}

/** Returns what the wave adds to the product of that row with a token at a position. */
__device__ __forceinline__ float wave_product(const KeyMoments &m, const float2 *waves, int32_t position)
{
    float sums[SET_ROWS] = {};
    for (int i = threadIdx.x % PIECES; i < m.pairs; i += PIECES) {
        const float2 c = turn(phase_of(m.pair(i).increment, position));
#pragma unroll
        for (int r = 0; r < SET_ROWS; r++) {
            const float2 x = waves[r * m.pairs + i];
            sums[r] = fmaf(x.x, c.x, fmaf(x.y, c.y, sums[r]));
        }
    }
    return sum_of_row(sums);
}

/** Returns row threadIdx.x % 8 of `queries` times row threadIdx.x / 8 of the tile. Eight threads share a tile's row. */
__device__ __forceinline__ float product(const float *tile, int stride, const float *queries, int width)
{
    const int piece = threadIdx.x % PIECES;
    const float *key = tile + threadIdx.x / PIECES * stride;
    float sums[SET_ROWS] = {};
    for (int c = 4 * piece; c < width; c += 4 * PIECES) {
        const float4 k = *reinterpret_cast<const float4 *>(key + c);
#pragma unroll
        for (int r = 0; r < SET_ROWS; r++)
            sums[r] = dot_quads(k, *reinterpret_cast<const float4 *>(queries + r * width + c), sums[r]);
    }
    return sum_of_row(sums);
}

/** Stores the logit of a score for softmax; -inf if the row does not see the token, whose bytes may be anything. */
__device__ __forceinline__ void put_score(const AttendArgs &a, const AttendShared &shared, float score, bool seen)
{
    float x = base2_logit(a, score);
    shared.scores[threadIdx.x % PIECES * TQ_TILE + threadIdx.x / PIECES] = seen ? x : -INFINITY;
}

/** Turns scores into weights, in place, by the warp with the row's totals. rounded_sum: the sum of packed tokens. */
__device__ __forceinline__ void softmax(const AttendShared &shared, RowTotals &totals, bool is_packed)
{
    const int row = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *score = shared.scores + row * TQ_TILE + lane;
    const float max = fmaxf(totals.max, warp_max(*score)), shift = max == -INFINITY ? 0.0f : max,
                weight = exp2_fast(*score - shift), factor = exp2_fast(totals.max - shift), sum = warp_sum(weight);
    totals = {max, totals.sum * factor + sum, totals.rounded_sum * factor + (is_packed ? sum : 0.0f), 0.0f};
    *score = weight;
    if (lane == 0) shared.factors[row] = factor;
}

/** Adds a column of the tile, weighted by row and token, to a thread's sums. */
__device__ __forceinline__ void add_column(const AttendShared &shared, const float *column, int stride,
                                           float (&sums)[SET_ROWS])
{
    for (int i = 0; i < TQ_TILE; i += 4) {
        const float v[4] = {column[i * stride], column[(i + 1) * stride], column[(i + 2) * stride],
                            column[(i + 3) * stride]};
#pragma unroll
        for (int r = 0; r < SET_ROWS; r++) {
            const float4 w = *reinterpret_cast<const float4 *>(shared.scores + r * TQ_TILE + i);
            sums[r] = dot_quads(w, make_float4(v[0], v[1], v[2], v[3]), sums[r]);
        }
    }
}

/** A thread's part of the weighted sums of all rows. */
struct ColumnSums {
    float packed[COLUMNS][SET_ROWS], exact[SET_ROWS];

    __device__ __forceinline__ void rescale(const AttendShared &shared)
    {
#pragma unroll
        for (int r = 0; r < SET_ROWS; r++) {
            const float factor = shared.factors[r];
#pragma unroll
            for (int k = 0; k < COLUMNS; k++) packed[k][r] *= factor;
            exact[r] *= factor;
        }
    }
    __device__ __forceinline__ void add_packed(const AttendShared &shared, int width)
    {
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) {
            const int c = threadIdx.x + SET_THREADS * k;
            if (c < width) add_column(shared, shared.tile + c, width + VALUE_PAD, packed[k]);
        }
    }
    __device__ __forceinline__ void add_exact(const AttendShared &shared, int dim, int stride)
    {
        if ((int)threadIdx.x < dim) add_column(shared, shared.tile + threadIdx.x, stride, exact);
    }
};

/** Attends to token tile `tile` of the packed tokens that the set sees. */
__device__ __forceinline__ void attend_packed(const AttendBaselineArgs &args, const RowSet &s, const SetView &view,
                                              const RowView &row, int tile, const AttendShared &shared,
                                              RowTotals &totals, ColumnSums &sums)
{
    const AttendArgs &a = args.attend;
    const int first = (view.packed.lo / TQ_TILE + tile) * TQ_TILE, stride = args.key_width + KEY_PAD;
    const uint8_t *record = record_of(args.plan, s.b, s.h, first);
    if (!record) return; // all threads of a block agree
    const int token_tile = first % a.page_tokens / TQ_TILE;
    decode_keys(args.plan, s.h, record, token_tile, shared.levels[0], shared.tile, stride);
    __syncthreads();
    float x = product(shared.tile, stride, shared.projected, args.key_width);
    if (args.moments.pairs)
        x += wave_product(args.moments, shared.waves,
                          first_position(a.unpacked_sinks, a.p.layer.position_offset, s.b) + first +
                              (int)threadIdx.x / PIECES);
    put_score(a, shared, x + row.bias, row.sees_packed(first + (int)threadIdx.x / PIECES));
    __syncthreads();
    softmax(shared, totals, true);
    decode_values(args.plan, s.h, record, token_tile, view.packed.lo - first, view.packed.hi - first, shared.levels[1],
                  shared.tile, args.value_width + VALUE_PAD);
    __syncthreads();
    sums.rescale(shared);
    sums.add_packed(shared, args.value_width);
    __syncthreads();
}

/** Loads keys or values of n exact tokens into the tile; 0 from token n and from head_dim on. */
__device__ __forceinline__ void load_exact(const AttendArgs &a, const AttendShared &shared, int n, bool is_value,
                                           int stride)
{
    const int quads = TQ_TILE / 4 * a.groups;
    for (int i = threadIdx.x; i < TQ_TILE * quads; i += SET_THREADS) {
        const int token = i / quads, c = 4 * (i % quads);
        float4 x = make_float4(0, 0, 0, 0);
        if (token < n && c < a.head_dim)
            x = to_float4(load_quad(is_value ? shared.tokens[token].v : shared.tokens[token].k, c, a.p.layer.dtype),
                          a.p.layer.dtype);
        *reinterpret_cast<float4 *>(shared.tile + token * stride + c) = x;
    }
}

/** Attends to tile `tile`, of 32 tokens, of the exact ones. */
__device__ __forceinline__ void attend_exact_tile(const AttendArgs &a, const RowSet &s, const Sequence &seq,
                                                  const SetView &view, const RowView &row, int tile,
                                                  const AttendShared &shared, RowTotals &totals, ColumnSums &sums)
{
    const int first = TQ_TILE * tile, n = min(TQ_TILE, view.exact_tokens - first), width = TQ_TILE * a.groups,
              token = threadIdx.x / PIECES;
    if ((int)threadIdx.x < n) shared.tokens[threadIdx.x] = exact_token(a, s, seq, view.exact, first + threadIdx.x);
    __syncthreads();
    load_exact(a, shared, n, false, width + KEY_PAD);
    __syncthreads();
    const float x = product(shared.tile, width + KEY_PAD, shared.queries, width);
    put_score(a, shared, x, token < n && row.sees_exact(shared.tokens[min(token, n - 1)].position, a.p.layer.sinks));
    __syncthreads();
    softmax(shared, totals, false);
    load_exact(a, shared, n, true, width + VALUE_PAD);
    __syncthreads();
    sums.rescale(shared);
    sums.add_exact(shared, a.head_dim, width + VALUE_PAD);
    __syncthreads();
}

__device__ __forceinline__ void leave_part(const AttendBaselineArgs &args, const RowSet &s, int split,
                                           const RowTotals &totals, const ColumnSums &sums)
{
    if (threadIdx.x % 32 == 0)
        *reinterpret_cast<float4 *>(part_at(args, s.segment, split, threadIdx.x / 32)) =
            make_float4(totals.max, totals.sum, totals.rounded_sum, 0);
#pragma unroll
    for (int r = 0; r < SET_ROWS; r++) {
        float *to = part_at(args, s.segment, split, r) + 4;
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) {
            const int c = threadIdx.x + SET_THREADS * k;
            if (c < args.value_width) to[c] = sums.packed[k][r];
        }
        if ((int)threadIdx.x < args.attend.head_dim) to[args.value_width + threadIdx.x] = sums.exact[r];
    }
}

__global__ void __launch_bounds__(SET_THREADS) attend_kernel(const __grid_constant__ AttendBaselineArgs args)
{
    const AttendArgs &a = args.attend;
    const int split = blockIdx.x % args.splits, width = TQ_TILE * a.groups;
    const AttendShared shared = shared_of(args);
    wait_for_stream();
    const RowSet s = find_rows(a, blockIdx.x / args.splits, SET_ROWS);
    const Sequence seq = load_sequence(a, s.b);
    const SetView view = view_of(a, s, seq);
    const RowView row(args, s, seq, threadIdx.x % PIECES);
    const int from = (int)((int64_t)view.tiles * split / args.splits),
              upto = (int)((int64_t)view.tiles * (split + 1) / args.splits);
    for (int i = threadIdx.x; i < SET_ROWS * args.key_width; i += SET_THREADS)
        shared.projected[i] = args.queries[(int64_t)s.segment * SET_ROWS * args.key_width + i];
    for (int i = threadIdx.x; i < SET_ROWS * args.moments.pairs; i += SET_THREADS)
        shared.waves[i] = waves_of(args, s.segment)[i];
    for (int i = threadIdx.x; i < SET_ROWS * width; i += SET_THREADS) {
        const int64_t at = query_at(a, s, i / width);
        shared.queries[i] =
            at >= 0 && i % width < a.head_dim ? load_number(a.p.q, at + i % width, a.p.layer.dtype) : 0.0f;
    }
    for (int side = 0; side < 2; side++) load_levels(args.plan, args.plan.side[side], s.h, shared.levels[side]);
    __syncthreads();
    RowTotals totals = {-INFINITY, 0, 0, 0};
    ColumnSums sums = {};
    for (int tile = from; tile < upto; tile++)
        if (tile < view.packed_tiles) attend_packed(args, s, view, row, tile, shared, totals, sums);
        else attend_exact_tile(a, s, seq, view, row, tile - view.packed_tiles, shared, totals, sums);
    leave_part(args, s, split, totals, sums);
}

// ---- combine ----

__device__ __forceinline__ float4 totals_of(const AttendBaselineArgs &args, const RowSet &s, int split)
{
    return *reinterpret_cast<const float4 *>(part_at(args, s.segment, split, threadIdx.x / 32));
}

/** Returns a row's totals over all splits, by a warp. A NaN in any of them makes the sum NaN. */
__device__ __forceinline__ RowTotals merge_totals(const AttendBaselineArgs &args, const RowSet &s)
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

/** Shared memory: | rows [MATRIX_TOKENS][value_width] | the rest of BaselineRows |. */
__global__ void __launch_bounds__(SET_THREADS) combine_kernel(const __grid_constant__ AttendBaselineArgs args)
{
    const AttendArgs &a = args.attend;
    const BaselineSide &side = args.plan.side[1];
    const int row = threadIdx.x / 32, lane = threadIdx.x % 32, width = args.value_width;
    float *rows = reinterpret_cast<float *>(shared_bytes), exact[BASELINE_GROUPS] = {}, packed[BASELINE_TILES] = {};
    wait_for_stream();
    const RowSet s = find_rows(a, blockIdx.x, SET_ROWS);
    const RowTotals totals = merge_totals(args, s);
    for (int split = 0; split < args.splits; split++) {
        const float4 t = totals_of(args, s, split);
        if (t.y == 0.0f) continue; // the split attended to nothing
        const float factor = exp2_fast(t.x - (totals.max == -INFINITY ? 0.0f : totals.max));
        const float *part = part_at(args, s.segment, split, row) + 4;
#pragma unroll
        for (int k = 0; k < BASELINE_TILES; k++)
            if (32 * k < width) packed[k] = fmaf(factor, part[lane + 32 * k], packed[k]);
#pragma unroll
        for (int k = 0; k < BASELINE_GROUPS; k++)
            if (lane + 32 * k < a.head_dim) exact[k] = fmaf(factor, part[width + lane + 32 * k], exact[k]);
    }
#pragma unroll
    for (int k = 0; k < BASELINE_TILES; k++)
        if (32 * k < width) rows[row * width + lane + 32 * k] = packed[k];
    const RestoredRows restored = restore_rows(
        args.plan, side, s.h, BaselineRows(args.plan, rows, width, SET_ROWS, rows + MATRIX_TOKENS * width));
    const Output output(a, s, row);
    if (!output.is_there()) return;
    const float *centre = centre_of(side, s.h);
    const bool nothing = totals.sum == 0.0f;
    const float inverse = nothing ? 0.0f : 1.0f / totals.sum;
#pragma unroll
    for (int k = 0; k < BASELINE_GROUPS; k++) {
        const int c = lane + 32 * k;
        if (c >= a.head_dim) continue;
        const float x =
            restored.result[row * restored.stride + c] + exact[k] + (centre ? centre[c] * totals.rounded_sum : 0.0f);
        store_number(a.p.out, output.in_out(a) + c, a.p.layer.dtype, nothing ? 0.0f : x * inverse);
    }
    if (a.p.lse && lane == 0) a.p.lse[output.in_lse(a)] = nothing ? -INFINITY : (totals.max + log2f(totals.sum)) * LN_2;
}

// ---- host ----

/** Sets args->splits for four blocks per multiprocessor, but with LEAST_TILES tiles per split at the largest length. */
tq_status count_splits(AttendBaselineArgs *args, int64_t sets, tq_error *error)
{
    const tq_attend_params &p = args->attend.p;
    DeviceFacts device;
    TQ_CUDA_TRY(current_device(&device, error));
    const int64_t tokens = (int64_t)args->attend.capacity + SET_ROWS, tiles = tokens / TQ_TILE + 2,
                  wanted = (4 * (int64_t)device.processors + sets - 1) / sets;
    int64_t splits = wanted < tiles / LEAST_TILES ? wanted : tiles / LEAST_TILES;
    if (splits > MOST_SPLITS) splits = MOST_SPLITS;
    args->splits = splits < 1 || !p.layer.batch ? 1 : (int32_t)splits;
    return TQ_OK;
}

/** Fills sizes and lays out the workspace at `base` (NULL: only its bytes). *sets is 0 if there is nothing to do. */
tq_status make_args(const tq_plan &plan, const tq_attend_params &p, char *base, AttendBaselineArgs *args, int64_t *sets,
                    size_t *bytes, tq_error *error)
{
    AttendArgs &a = args->attend;
    *args = {};
    *sets = 0, *bytes = 0;
    a.p = p;
    a.head_dim = plan.head_dim;
    a.groups = plan.groups;
    a.page_tokens = plan.page_tokens;
    a.heads_per_kv = p.layer.kv_heads ? p.query_heads / p.layer.kv_heads : 0;
    a.by_heads_per_kv = divisor_of(a.heads_per_kv);
    fill_ragged(plan, p, &a);
    const int64_t capacity = tq_capacity(&plan, &p.layer), rows = (int64_t)a.heads_per_kv * p.query_tokens;
    if (capacity > INT32_MAX / 2)
        return fail(error, TQ_E_VALUE, "max_pages", -1, p.layer.max_pages, "fewer: positions are 32-bit");
    if (rows > INT32_MAX / 2) return fail(error, TQ_E_VALUE, "query_tokens", -1, p.query_tokens, "fewer");
    a.capacity = (int32_t)capacity;
    if (p.sliding_window >= capacity) a.p.sliding_window = 0; // position - window may overflow
    a.rows = (int32_t)rows;
    a.tile_rows = SET_ROWS;
    a.row_tiles = (a.rows + SET_ROWS - 1) / SET_ROWS;
    if (!p.layer.batch || !rows || (p.query_start_loc && !p.total_tokens)) return TQ_OK;
    *sets = (int64_t)p.layer.batch * p.layer.kv_heads * a.row_tiles;
    baseline_plan_of(plan, a.p.layer, &args->plan);
    TQ_CUDA_TRY(count_splits(args, *sets, error));
    if (*sets * args->splits > INT32_MAX) return fail(error, TQ_E_VALUE, "query_tokens", -1, p.query_tokens, "fewer");
    args->key_width = TQ_TILE * plan.key.tiles;
    args->value_width = TQ_TILE * plan.value.tiles;
    args->part_floats = 4 + args->value_width + (plan.head_dim + 3) / 4 * 4;
    const int64_t set_rows = *sets * SET_ROWS, queries = set_rows * args->key_width, biases = (set_rows + 63) / 64 * 64;
    args->moments = key_moments_of(plan, p.layer.key);
    const int64_t waves =
        2 * set_rows * args->moments.pairs; // a multiple of 64 floats, as biases are: rows and pairs are multiples of 8
    args->queries = reinterpret_cast<float *>(base);
    args->waves = reinterpret_cast<float2 *>(args->queries + queries);
    args->biases = args->queries + queries + waves;
    args->parts = args->biases + biases;
    *bytes = sizeof(float) * (queries + waves + biases + set_rows * args->splits * args->part_floats);
    return TQ_OK;
}

} // namespace

tq_status attend_baseline_bytes(const tq_plan &plan, const tq_attend_params &params, size_t *bytes, tq_error *error)
{
    AttendBaselineArgs args;
    int64_t sets;
    return make_args(plan, params, nullptr, &args, &sets, bytes, error);
}

tq_status attend_baseline_bound(const tq_plan &plan, const tq_attend_params &params, size_t *bytes, tq_error *error)
{
    AttendBaselineArgs args;
    int64_t sets;
    DeviceFacts device;
    TQ_CUDA_TRY(make_args(plan, params, nullptr, &args, &sets, bytes, error));
    TQ_CUDA_TRY(current_device(&device, error));
    if (!sets) return TQ_OK;
    /* Smaller calls have fewer sets, but perhaps more splits of each: sets * splits stays below this. */
    const int64_t parts = 4 * (int64_t)device.processors + sets - sets * args.splits;
    *bytes += sizeof(float) * SET_ROWS * (size_t)(parts > 0 ? parts : 0) * args.part_floats;
    return TQ_OK;
}

tq_status attend_baseline(const tq_plan &plan, const tq_attend_params &params, void *workspace, size_t workspace_bytes,
                          cudaStream_t stream, tq_error *error)
{
    AttendBaselineArgs args;
    int64_t sets;
    size_t bytes;
    TQ_CUDA_TRY(make_args(plan, params, static_cast<char *>(workspace), &args, &sets, &bytes, error));
    if (!sets) return TQ_OK;
    if (!workspace || (uintptr_t)workspace % 256 || workspace_bytes < bytes)
        return fail(error, TQ_E_VALUE, "workspace_bytes", -1, (double)workspace_bytes,
                    "at least what tq_cuda_attend_prepare says, 256-byte aligned");
    auto rows_bytes = [&](const tq_side &side) {
        return sizeof(float) * MATRIX_TOKENS * TQ_TILE * side.tiles + matrix_bytes(side, plan.head_dim, SET_WARPS);
    };
    TQ_CUDA_TRY(launch(prepare_kernel, sets, SET_THREADS, rows_bytes(plan.key), stream, error, args));
    TQ_CUDA_TRY(launch(attend_kernel, sets * args.splits, SET_THREADS, attend_bytes(args), stream, error, args));
    return launch(combine_kernel, sets, SET_THREADS, rows_bytes(plan.value), stream, error, args);
}

} // namespace tq
