/* From rows to operands: rotates a query, multiplies it by the plan's steps, rounds it to two planes of signed bytes,
 * in fragment order. Also rotates rows in shared memory, for prepare and combine. */
#ifndef TQ_CUDA_ATTEND_ROWS_QUERY_CUH
#define TQ_CUDA_ATTEND_ROWS_QUERY_CUH
#include "cuda/attend/rows/sequence.cuh"
#include "cuda/attend/rows/wave.cuh"

namespace tq
{

/** The rows of a block of prepare or combine: first .. first + n - 1 of a segment's tile of rows. */
struct RowSet {
    int32_t b, h, row_tile, segment, first, n;
};

__device__ __forceinline__ RowSet find_rows(const AttendArgs &a, int32_t block, int32_t n)
{
    int32_t sets = a.tile_rows / n, segment = block / sets, b = segment / (a.p.layer.kv_heads * a.row_tiles),
            in = segment - b * a.p.layer.kv_heads * a.row_tiles;
    return {b, in / a.row_tiles, in % a.row_tiles, segment, (block - segment * sets) * n, n};
}

/** A row's query token (`token`: in its sequence, `at`: in q) and query head. */
struct RowPlace {
    int32_t token, at, head;
    bool real; /* false for padding rows of the tile, and where the sequence has fewer query tokens */
};

/** Returns the place of row i of the set. */
__device__ __forceinline__ RowPlace find_row(const AttendArgs &a, const RowSet &s, int i)
{
    const int32_t row = s.row_tile * a.tile_rows + s.first + i,
                  token = a.p.query_tokens == 1 ? 0 : a.by_heads_per_kv.quotient(row),
                  head = s.h * a.heads_per_kv + row - token * a.heads_per_kv;
    if (!a.p.query_start_loc) return {token, token, head, row < a.rows};
    const Queries queries = queries_of(a, s.b);
    return {token, queries.first + token, head, row < a.rows && token < queries.count};
}

/** Returns the index of the first number in q of row i of the set, or -1 if the row is not real. */
__device__ __forceinline__ int64_t query_at(const AttendArgs &a, const RowSet &s, int i)
{
    const RowPlace row = find_row(a, s, i);
    if (!row.real) return -1;
    return s.b * a.p.q_stride_batch + row.head * a.p.q_stride_head + row.at * a.p.q_stride_token;
}

/** Returns a row of `pitch` floats in shared memory. In prepare and combine, shared memory begins with such rows. */
__device__ __forceinline__ float *shared_row(const AttendArgs &a, int row)
{
    return reinterpret_cast<float *>(shared_bytes) + row * a.pitch;
}

/** Replaces x by R x (or R^T x if `inverse`) in shared rows 0 .. n - 1, with rows from END_ROWS on as workspace. The
 *  whole block calls it; it synchronises the block. */
__device__ __forceinline__ void rotate_dense(const AttendArgs &a, int n, const float *matrix, bool inverse)
{
    int d = a.head_dim, lane = threadIdx.x & 31;
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < n; first += 4) {
        if (inverse) { /* a thread per channel, for coalesced reads of the matrix */
#pragma unroll 1
            for (int c = threadIdx.x; c < d; c += blockDim.x) {
                float y[4] = {0, 0, 0, 0};
#pragma unroll 8
                for (int k = 0; k < d; k++) {
                    float r = matrix[k * d + c];
#pragma unroll
                    for (int j = 0; j < 4; j++) y[j] = fmaf(r, shared_row(a, first + j)[k], y[j]);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) shared_row(a, END_ROWS + first + j)[c] = y[j];
            }
        } else { /* a warp per channel */
#pragma unroll 2
            for (int c = threadIdx.x / 32; c < d; c += blockDim.x / 32) {
                float y[4] = {0, 0, 0, 0};
                for (int k = lane; k < d; k += 32) {
                    float r = matrix[c * d + k];
#pragma unroll
                    for (int j = 0; j < 4; j++) y[j] = fmaf(r, shared_row(a, first + j)[k], y[j]);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    y[j] = warp_sum(y[j]);
                    if (lane == j) shared_row(a, END_ROWS + first + j)[c] = y[j];
                }
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n * d; i += blockDim.x)
        shared_row(a, i / d)[i % d] = shared_row(a, END_ROWS + i / d)[i % d];
    __syncthreads();
}

/** A row in a warp's registers: lane l holds channels 4 l .. 4 l + 3 of each 128. */
template <int GROUPS> struct LaneRow {
    static constexpr int QUADS = (GROUPS + 3) / 4;
    float4 quad[QUADS];

    static __device__ __forceinline__ int channel(int k, int lane) { return 128 * k + 4 * lane; }
    __device__ __forceinline__ void load(const float *row, int width, int lane)
    {
#pragma unroll
        for (int k = 0; k < QUADS; k++)
            quad[k] = channel(k, lane) < width ? *reinterpret_cast<const float4 *>(row + channel(k, lane))
                                               : make_float4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void store(float *row, int width, int lane) const
    {
#pragma unroll
        for (int k = 0; k < QUADS; k++)
            if (channel(k, lane) < width) *reinterpret_cast<float4 *>(row + channel(k, lane)) = quad[k];
    }
};

/** Returns the rotation's signs of a lane's channels, bit i for the i-th, if head_dim is a power of two. */
template <int GROUPS> __device__ __forceinline__ uint32_t lane_signs(const AttendArgs &a, int lane)
{
    uint32_t flip = 0;
#pragma unroll
    for (int k = 0; k < LaneRow<GROUPS>::QUADS; k++)
        flip |= (a.signs.pass(0)[LaneRow<GROUPS>::channel(k, lane) / 32] >> (4 * (lane % 8)) & 15) << 4 * k;
    return flip;
}

/** As hadamard_row, in registers, for a head_dim (`dim`) that is a power of two. Lanes beyond it must have zeros.
 *  factor: head_dim^-1/2; flip: lane_signs. */
template <int GROUPS>
__device__ __forceinline__ void hadamard_lanes(LaneRow<GROUPS> &row, int dim, float factor, uint32_t flip, bool inverse,
                                               int lane)
{
    constexpr int N = 4 * LaneRow<GROUPS>::QUADS;
    float x[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float4 &q = row.quad[i / 4];
        x[i] = i % 4 == 0 ? q.x : i % 4 == 1 ? q.y : i % 4 == 2 ? q.z : q.w;
        if (!inverse && flip >> i & 1) x[i] = -x[i];
    }
#pragma unroll
    for (int d = 1; d < 4; d *= 2)
#pragma unroll
        for (int i = 0; i < N; i++)
            if (!(i & d)) {
                float a = x[i], b = x[i + d];
                x[i] = a + b;
                x[i + d] = a - b;
            }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        if (4 * d >= dim) break;
        float sign = lane & d ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = fmaf(sign, x[i], __shfl_xor_sync(ALL_LANES, x[i], d));
    }
#pragma unroll
    for (int d = 4; d < N; d *= 2) {
        if (32 * d >= dim) break;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (!(i & d)) {
                float a = x[i], b = x[i + d];
                x[i] = a + b;
                x[i + d] = a - b;
            }
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] *= factor;
        if (inverse && flip >> i & 1) x[i] = -x[i];
    }
#pragma unroll
    for (int k = 0; k < N / 4; k++) row.quad[k] = make_float4(x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3]);
}

/** Applies the plan's rotation to a row, unless it is dense. spare: a row of shared memory; flip: lane_signs. USUAL:
 *  the only head_dim that is rotated in registers, for short code; 0: every power of two is. */
template <int GROUPS, int USUAL = 0>
__device__ __forceinline__ void rotate_lanes(const AttendArgs &a, LaneRow<GROUPS> &row, float *spare, uint32_t flip,
                                             bool inverse, int lane)
{
    if (a.rotation != TQ_ROTATION_HADAMARD) return;
    if (USUAL ? a.head_dim == USUAL : (a.head_dim & (a.head_dim - 1)) == 0) {
        hadamard_lanes<GROUPS>(row, USUAL ? USUAL : a.head_dim, a.rotation_factor, flip, inverse, lane);
        return;
    }
    row.store(spare, TQ_TILE * a.groups, lane);
    __syncwarp();
    hadamard_row<GROUPS <= 4 ? 4 : 8>(spare, a.head_dim, a.signs, inverse, lane);
    row.load(spare, TQ_TILE * a.groups, lane);
}

/** Row i of the set, being loaded into a warp's registers; zeros from head_dim on. */
template <int GROUPS> struct QueryLoad {
    Quad raw[LaneRow<GROUPS>::QUADS];

    __device__ __forceinline__ QueryLoad(const AttendArgs &a, const RowSet &s, int i, int lane)
        : QueryLoad(a, query_at(a, s, i), lane)
    {
    }
    /** at: from query_at. */
    __device__ __forceinline__ QueryLoad(const AttendArgs &a, int64_t at, int lane)
    {
#pragma unroll
        for (int k = 0; k < LaneRow<GROUPS>::QUADS; k++) {
            int c = LaneRow<GROUPS>::channel(k, lane);
            raw[k].raw = make_uint4(0, 0, 0, 0);
            if (at >= 0 && c < a.head_dim) raw[k] = load_quad(a.p.q, at + c, a.p.layer.dtype);
        }
    }
};

/** Converts a loaded query to float32. Returns <q, key centre>, 0 without a centre. A whole warp calls it. */
template <int GROUPS>
__device__ __forceinline__ float take_query(const AttendArgs &a, const RowSet &s, const QueryLoad<GROUPS> &load,
                                            LaneRow<GROUPS> &row, int lane)
{
    constexpr int QUADS = LaneRow<GROUPS>::QUADS;
#pragma unroll
    for (int k = 0; k < QUADS; k++) row.quad[k] = to_float4_once(load.raw[k], a.p.layer.dtype);
    const float *centre = a.p.layer.key.centre;
    if (!centre) return 0;
    centre += s.h * a.p.layer.key.stride_head;
    float dot = 0;
#pragma unroll
    for (int k = 0; k < QUADS; k++) {
        int c = row.channel(k, lane);
        if (c < a.head_dim)
            dot += row.quad[k].x * centre[c] + row.quad[k].y * centre[c + 1] + row.quad[k].z * centre[c + 2] +
                   row.quad[k].w * centre[c + 3];
    }
    return warp_sum(dot);
}

/** A KV head's wave, being loaded into a warp's registers. */
template <int GROUPS> struct WaveLoad {
    static constexpr int PAIRS = GROUPS > 4 ? GROUPS / 2 : 2; /* lane, lane + 32 .. */
    int32_t first[PAIRS], second[PAIRS];                      /* channels of a pair */
    float2 amplitude[PAIRS];

    WaveLoad() = default;
    __device__ __forceinline__ WaveLoad(const AttendArgs &a, int32_t h, int lane)
    {
        if (!a.wave.steps) return;
        const KeyMoments m = key_moments(a);
        const float2 *amplitudes = reinterpret_cast<const float2 *>(m.of_head(h).wave);
        const uint32_t last = (uint32_t)a.head_dim - 1; /* an invalid channel must not fault */
#pragma unroll
        for (int k = 0; k < PAIRS; k++) {
            const int i = lane + 32 * k;
            const bool is_there = i < m.pairs;
            first[k] = is_there ? (int32_t)min((uint32_t)m.turns[3 * i], last) : 0;
            second[k] = is_there ? (int32_t)min((uint32_t)m.turns[3 * i + 1], last) : 0;
            amplitude[k] = is_there ? amplitudes[i] : make_float2(0, 0);
        }
    }
    /** Turns the wave by the offset of a sequence, which is added to the positions of all its keys. */
    __device__ __forceinline__ void turn_on(const AttendArgs &a, int32_t b, int lane)
    {
        if (!a.p.layer.position_offset || !a.wave.steps) return;
        const int32_t offset = a.p.layer.position_offset[b];
#pragma unroll
        for (int k = 0; k < PAIRS; k++)
            if (lane + 32 * k < a.wave.pairs)
                amplitude[k] =
                    turned(amplitude[k], turn(phase_of(a.p.layer.key.turns[3 * (lane + 32 * k) + 2], offset)));
    }
};

/** A KV head's metric, being loaded into a warp's registers. */
template <int GROUPS> struct MetricLoad {
    LaneRow<GROUPS> scale, directions[TQ_MAX_METRIC_RANK];
    float4 stretch;

    MetricLoad() = default;
    __device__ __forceinline__ MetricLoad(const AttendArgs &a, int32_t h, int lane)
    {
        if (!a.wave.metric) return;
        const KeyMoments m = key_moments(a);
        const HeadMoments of_head = m.of_head(h);
        scale.load(of_head.scale, a.head_dim, lane);
        stretch = *reinterpret_cast<const float4 *>(of_head.stretch);
#pragma unroll
        for (int r = 0; r < TQ_MAX_METRIC_RANK; r++)
            directions[r].load(of_head.directions + r * a.head_dim, r < m.metric - 1 ? a.head_dim : 0, lane);
    }
};

/** Multiplies a query by the inverse of the metric, A^-1 (turboquant.h, "Keys of a plan with a wave or a metric"),
 *  before its rotation. A whole warp calls it. */
template <int GROUPS>
__device__ __forceinline__ void undo_metric(const AttendArgs &a, const MetricLoad<GROUPS> &metric, LaneRow<GROUPS> &row,
                                            int lane)
{
    constexpr int QUADS = LaneRow<GROUPS>::QUADS;
    if (!a.wave.metric) return;
    float4 inverse[QUADS];
    const float stretch[TQ_MAX_METRIC_RANK] = {metric.stretch.x, metric.stretch.y, metric.stretch.z, metric.stretch.w};
    float along[TQ_MAX_METRIC_RANK] = {};
    auto times = [](float4 x, float4 y) { return make_float4(x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w); };
#pragma unroll
    for (int k = 0; k < QUADS; k++) {
        const float4 &s = metric.scale.quad[k];
        inverse[k] = row.channel(k, lane) < a.head_dim
                         ? make_float4(reciprocal(s.x), reciprocal(s.y), reciprocal(s.z), reciprocal(s.w))
                         : make_float4(0, 0, 0, 0);
        row.quad[k] = times(row.quad[k], inverse[k]);
#pragma unroll
        for (int r = 0; r < TQ_MAX_METRIC_RANK; r++) {
            const float4 &x = row.quad[k], &w = metric.directions[r].quad[k];
            along[r] += x.x * w.x + x.y * w.y + x.z * w.z + x.w * w.w;
        }
    }
#pragma unroll
    for (int r = 0; r < TQ_MAX_METRIC_RANK; r++)
        along[r] = (__fdividef(1.0f, 1.0f + stretch[r]) - 1.0f) * warp_sum(along[r]);
#pragma unroll
    for (int k = 0; k < QUADS; k++) {
        float4 &x = row.quad[k];
#pragma unroll
        for (int r = 0; r < TQ_MAX_METRIC_RANK; r++) {
            const float4 &w = metric.directions[r].quad[k];
            x = make_float4(fmaf(along[r], w.x, x.x), fmaf(along[r], w.y, x.y), fmaf(along[r], w.z, x.z),
                            fmaf(along[r], w.w, x.w));
        }
        x = times(x, inverse[k]);
    }
}

/** Returns a KV head's wave for a sequence. */
template <int GROUPS>
__device__ __forceinline__ WaveLoad<GROUPS> load_wave(const AttendArgs &a, const RowSet &s, int lane)
{
    WaveLoad<GROUPS> wave(a, s.h, lane);
    wave.turn_on(a, s.b, lane);
    return wave;
}

constexpr float WAVE_SIZE = 64; /* the largest number that put_wave writes; leaves room in fp16 for smaller ones */

/** Writes a row's coefficients of each pair's cosine and sine at position 0 to `to` [16 steps], scaled so that the
 *  largest is WAVE_SIZE. Returns the factor that undoes the scaling. row: the query before metric and rotation; spare:
 *  a row of shared memory. A whole warp calls it. */
template <int GROUPS>
__device__ __forceinline__ float put_wave(const AttendArgs &a, const WaveLoad<GROUPS> &wave, const LaneRow<GROUPS> &row,
                                          float *spare, float2 *to, int lane)
{
    constexpr int PAIRS = WaveLoad<GROUPS>::PAIRS;
    if (!a.wave.steps) return 0;
    row.store(spare, TQ_TILE * a.groups, lane);
    __syncwarp();
    float2 x[PAIRS];
    float largest = 0;
#pragma unroll
    for (int k = 0; k < PAIRS; k++) {
        const float2 amplitude = wave.amplitude[k];
        const float first = spare[wave.first[k]], second = spare[wave.second[k]];
        x[k] = make_float2(first * amplitude.x + second * amplitude.y, second * amplitude.x - first * amplitude.y);
        largest = fmaxf(largest, fmaxf(fabsf(x[k].x), fabsf(x[k].y)));
    }
    largest = warp_max(largest);
    if (largest < 1e-30f) largest = 0;
    const float factor = largest > 0 ? __fdividef(WAVE_SIZE, largest) : 0;
#pragma unroll
    for (int k = 0; k < PAIRS; k++)
        if (lane + 32 * k < WAVE_STEP * a.wave.steps) to[lane + 32 * k] = make_float2(factor * x[k].x, factor * x[k].y);
    __syncwarp(); /* spare may be written again */
    return largest * (1 / WAVE_SIZE);
}

/** Where the queries of a tile of rows hold channels 4 place .. 4 place + 3 of group g of a row: `word` is the index of
 *  the high plane's word, `to_low` the distance from it to the low plane's. For loop/warp.cuh in fragment order: words
 *  0 and 1 of lane 4 n + t of a group are channels 4 t .. and 16 + 4 t .. of column n. With tiles of 16, lanes t = 0, 1
 *  have the first group of 16 channels, as in its tiles, and lanes 2, 3 the second: bits 3 and 4 of the channel are
 *  swapped. For loop/team.cuh an operand B of device/warpgroup.cuh for each group. */
struct QueryPlace {
    int32_t word, to_low;

    __device__ __forceinline__ QueryPlace(const AttendArgs &a, int row, int g, int place)
    {
        if (a.team_rows) {
            word = (2 * g + place / 4) * 8 * a.tile_rows + 8 * row + place % 4;
            to_low = 4;
        } else {
            if (a.fine) place = (place & 1) | (place & 2) << 1 | (place & 4) >> 1;
            word = ((row / 4 * a.groups + g) * 32 + 8 * (row % 4) + place % 4) * 2 + place / 4;
            to_low = 8; /* the next column: four lanes on */
        }
    }
};

/** Where the prepared rows of a segment are written. */
struct PreparedRows {
    uint32_t *queries; /* QueryPlace */
    RowArgs *args;
    float2 *wave; /* [row][16 steps], from put_wave */

    __device__ __forceinline__ float2 *wave_of(const AttendArgs &a, int row) const
    {
        return wave + row * WAVE_STEP * a.wave.steps;
    }
};

__device__ __forceinline__ PreparedRows rows_in_workspace(const AttendArgs &a, int segment)
{
    return {reinterpret_cast<uint32_t *>(a.queries + (int64_t)segment * (a.tile_rows / 4) * a.groups * 32),
            a.row_args + segment * a.tile_rows,
            a.wave.rows + (int64_t)segment * a.tile_rows * WAVE_STEP * a.wave.steps};
}

/** Factors of a lane's channels for rounding; computed before the rows are known. */
template <int GROUPS> struct QueryScale {
    static constexpr int QUADS = LaneRow<GROUPS>::QUADS;
    float factor[QUADS], step[QUADS];
    int levels[QUADS]; /* SideArgs::offset_levels */

    /** The part that depends on the plan alone. */
    __device__ __forceinline__ QueryScale(const AttendArgs &a, int lane)
    {
        float sign =
            a.p.softmax_scale < 0 ? -1.0f : 1.0f; /* so that the row's scale is positive, and maxima stay maxima */
#pragma unroll
        for (int k = 0; k < QUADS; k++) {
            int g = group_of(a, LaneRow<GROUPS>::channel(k, lane)), bits = g < a.plan_groups ? a.key.bits[g] : 0;
            factor[k] = bits ? sign * a.key.factor[bits] : 0;
            step[k] = 1;
            levels[k] = a.key.offset_levels[bits];
        }
    }
    /** Loads the KV head's steps, if there are any. */
    __device__ __forceinline__ void load_steps(const AttendArgs &a, int32_t h, int lane)
    {
#pragma unroll
        for (int k = 0; k < QUADS; k++) {
            int g = group_of(a, LaneRow<GROUPS>::channel(k, lane));
            if (a.p.layer.key.steps && factor[k] != 0) step[k] = a.p.layer.key.steps[h * a.p.layer.key.stride_head + g];
        }
    }
};

/** Returns the squared norm of a row. A whole warp calls it. */
template <int GROUPS> __device__ __forceinline__ float square_of(const LaneRow<GROUPS> &row)
{
    float sum = 0;
#pragma unroll
    for (int k = 0; k < LaneRow<GROUPS>::QUADS; k++) {
        const float4 &x = row.quad[k];
        sum += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
    }
    return warp_sum(sum);
}

/** Rounds a rotated row to two planes, and writes these and its RowArgs. bias: from take_query; wave: from put_wave;
 *  VARIANCE: as in Variant. A whole warp calls it. */
template <int GROUPS, bool VARIANCE = true>
__device__ __forceinline__ void round_query(const AttendArgs &a, const RowSet &s, const Sequence &seq, int i,
                                            const LaneRow<GROUPS> &rotated, const QueryScale<GROUPS> &scale, float bias,
                                            float wave, const PreparedRows &to, int lane)
{
    constexpr int QUADS = LaneRow<GROUPS>::QUADS;
    Range packed = seen_packed(a, seq, seq.first_position + find_row(a, s, i).token); /* only real rows come here */
    float number[4 * QUADS],
        largest = fmaxf(1e-30f, 1e-7f * wave); /* keeps the wave's terms finite in units of scores */
#pragma unroll
    for (int k = 0; k < QUADS; k++) {
        float factor = scale.factor[k] * scale.step[k];
        const float4 &y = rotated.quad[k];
        number[4 * k] = y.x * factor, number[4 * k + 1] = y.y * factor, number[4 * k + 2] = y.z * factor,
                   number[4 * k + 3] = y.w * factor;
    }
#pragma unroll
    for (int j = 0; j < 4 * QUADS; j++) largest = fmaxf(largest, fabsf(number[j]));
    largest = warp_max(largest);
    float step = largest * (1.0f / QUERY_LIMIT), inverse = reciprocal(step);
    int offset_hi = 0, offset_lo = 0, row = s.first + i;
#pragma unroll
    for (int k = 0; k < QUADS; k++) { /* four channels: one word of each plane */
        int c = rotated.channel(k, lane), g = c / TQ_TILE, place = c % TQ_TILE / 4;
        uint32_t hi_word = 0, lo_word = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int whole = __float2int_rn(number[4 * k + j] * inverse), hi = __float2int_rn(whole * (1.0f / QUERY_BASE)),
                lo = whole - hi * QUERY_BASE;
            hi_word |= (hi & 255) << 8 * j;
            lo_word |= (lo & 255) << 8 * j;
        }
        offset_hi += scale.levels[k] * sum_of_bytes(hi_word);
        offset_lo += scale.levels[k] * sum_of_bytes(lo_word);
        if (g >= a.groups) continue;
        QueryPlace at(a, row, g, place);
        to.queries[at.word] = hi_word;
        to.queries[at.word + at.to_low] = lo_word;
    }
    offset_hi = warp_sum(offset_hi);
    offset_lo = warp_sum(offset_lo);
    float variance = 0; /* a rotation does not change norms */
    if (VARIANCE && a.wave.variance > 0) variance = a.wave.variance * square_of<GROUPS>(rotated);
    if (lane) return;
    float row_scale = fmaxf(step * fabsf(a.p.softmax_scale) * LOG2_E, 1e-35f);
    to.args[row] = {row_scale,
                    bias * a.p.softmax_scale * LOG2_E,
                    offset_hi,
                    offset_lo,
                    packed.lo,
                    packed.hi,
                    wave * a.p.softmax_scale * LOG2_E * reciprocal(row_scale),
                    variance * reciprocal(row_scale)};
}

/** Writes a padding row of the tile: zeros, and it sees no tokens. WAVE: as in Variant. A whole warp calls it. */
template <int GROUPS, bool WAVE = true>
__device__ __forceinline__ void leave_row_empty(const AttendArgs &a, int row, const PreparedRows &to, int lane)
{
#pragma unroll
    for (int k = 0; k < LaneRow<GROUPS>::QUADS; k++) {
        int c = LaneRow<GROUPS>::channel(k, lane);
        if (c / TQ_TILE >= a.groups) continue;
        QueryPlace at(a, row, c / TQ_TILE, c % TQ_TILE / 4);
        to.queries[at.word] = to.queries[at.word + at.to_low] = 0;
    }
    for (int i = lane; WAVE && i < WAVE_STEP * a.wave.steps; i += 32) to.wave_of(a, row)[i] = make_float2(0, 0);
    if (lane == 0) to.args[row] = {1e-35f};
}

/** Prepares the set's rows. A whole block calls it. */
template <int GROUPS> __device__ __forceinline__ void prepare_queries(const AttendArgs &a, const RowSet &s)
{
    __shared__ float biases[END_ROWS], waves[END_ROWS];
    int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x & 31;
    bool dense = a.rotation == TQ_ROTATION_DENSE;
    PreparedRows to = rows_in_workspace(a, s.segment);
    QueryScale<GROUPS> scale(a, lane);
    scale.load_steps(a, s.h, lane);
    LaneRow<GROUPS> row;
    if (dense) { /* the whole block rotates all rows, in shared memory */
        for (int i = warp; i < s.n; i += warps) {
            float bias = take_query<GROUPS>(a, s, QueryLoad<GROUPS>(a, s, i, lane), row, lane);
            waves[i] = put_wave<GROUPS>(a, load_wave<GROUPS>(a, s, lane), row, shared_row(a, i),
                                        to.wave_of(a, s.first + i), lane);
            undo_metric<GROUPS>(a, MetricLoad<GROUPS>(a, s.h, lane), row, lane);
            row.store(shared_row(a, i), TQ_TILE * a.groups, lane);
            biases[i] = bias;
        }
        rotate_dense(a, s.n, a.p.layer.key.rotation + s.h * a.p.layer.key.rotation_stride_head, false);
    }
#pragma unroll 1
    for (int i = warp; i < s.n; i += warps) {
        if (!find_row(a, s, i).real) {
            leave_row_empty<GROUPS>(a, s.first + i, to, lane);
            continue;
        }
        float bias, wave;
        if (dense) {
            bias = biases[i], wave = waves[i];
            row.load(shared_row(a, i), TQ_TILE * a.groups, lane);
        } else {
            bias = take_query<GROUPS>(a, s, QueryLoad<GROUPS>(a, s, i, lane), row, lane);
            wave = put_wave<GROUPS>(a, load_wave<GROUPS>(a, s, lane), row, shared_row(a, i), to.wave_of(a, s.first + i),
                                    lane);
            undo_metric<GROUPS>(a, MetricLoad<GROUPS>(a, s.h, lane), row, lane);
            rotate_lanes<GROUPS>(a, row, shared_row(a, i), lane_signs<GROUPS>(a, lane), false, lane);
        }
        round_query<GROUPS>(a, s, load_sequence(a, s.b), i, row, scale, bias, wave, to, lane);
    }
}

} // namespace tq
#endif
