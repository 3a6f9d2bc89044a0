/* Exact tokens: sinks, window and fresh tokens, in the model's dtype. Blocks of prepare attend to them in float32.
 * There are few of them, so the code minimises latency: loads should not wait for each other. */
#ifndef TQ_CUDA_ATTEND_ROWS_EXACT_CUH
#define TQ_CUDA_ATTEND_ROWS_EXACT_CUH
#include "cuda/attend/rows/logit.cuh"
#include "cuda/attend/rows/query.cuh"

namespace tq
{

constexpr int EXACT_CHUNK = 32; /* tokens that a block has at a time */

struct ExactToken {
    const void *k, *v; /* addresses of its key and value */
    int32_t position, unused;
};

/** Positions of the exact tokens that some row of a sequence sees. */
struct ExactView {
    Range sinks, recent;
};

/** As `seen`, limited by `ends`; for exact tokens. seen_packed has the limit from the Sequence. */
__device__ __forceinline__ Range seen_exact(const AttendArgs &a, const Sequence &s, int32_t b, int32_t p)
{
    Range r = seen(a, s, p);
    if (a.p.ends) r.hi = min(r.hi, end_of(a, b));
    return r;
}

__device__ __forceinline__ ExactView view_exact(const AttendArgs &a, const Sequence &s, int32_t b)
{
    Range first = seen_exact(a, s, b, s.first_position), last = seen_exact(a, s, b, s.length - 1);
    ExactView v = {{first.lo, min(last.hi, min(a.p.layer.sinks, s.length))}, {0, 0}};
    if (a.p.layer.sink_rows && !has_sinks(a, b)) v.sinks.hi = v.sinks.lo;
    if (!a.p.layer.window) return v;
    if (a.p.layer.tail_rows) {
        v.recent = {max(first.lo, tail_begin(a, b, s.length)), last.hi};
        if (has_sinks(a, b)) v.recent.lo = max(v.recent.lo, a.p.layer.sinks);
        return v;
    }
    int32_t stored = a.p.fresh_k ? max(s.first_position, 0) : s.length; /* length for which the ring was written */
    v.recent = {max(max(first.lo, a.p.layer.sinks), stored - a.p.layer.window), last.hi};
    if (a.p.causal) v.recent.lo = max(v.recent.lo, s.first_position - a.p.layer.window + 1);
    return v;
}

/** A block's state in shared memory, after the rows of shared_row, which hold the sums of each way:
 *  |tokens [EXACT_CHUNK]|scores [prepare_rows][EXACT_CHUNK]|max, sum, factor [prepare_rows] each|. */
struct ExactState {
    ExactToken *tokens;
    float *scores, *max, *sum, *factor;
};

/** Returns how many groups of threads ("ways") of a block share the tokens. Each has its own rows of sums. */
__device__ __forceinline__ int ways_of(const AttendArgs &a)
{
    return max(1, (int)blockDim.x / (a.prepare_rows * 8 * a.groups));
}

__device__ __forceinline__ ExactState exact_state(const AttendArgs &a)
{
    ExactToken *tokens = reinterpret_cast<ExactToken *>(shared_row(a, ways_of(a) * a.prepare_rows));
    float *scores = reinterpret_cast<float *>(tokens + EXACT_CHUNK), *max = scores + a.prepare_rows * EXACT_CHUNK;
    return {tokens, scores, max, max + a.prepare_rows, max + 2 * a.prepare_rows};
}

/** Returns token i of a view: sinks first, then recent ones. */
__device__ __forceinline__ ExactToken exact_token(const AttendArgs &a, const RowSet &s, const Sequence &seq,
                                                  const ExactView &view, int32_t i)
{
    int64_t at_k, at_v;
    int32_t bytes = dtype_bytes(a.p.layer.dtype), position = view.sinks.lo + i;
    const void *k = a.p.layer.sink_k, *v = a.p.layer.sink_v;
    if (i < view.sinks.count()) {
        const int32_t row = a.p.layer.sink_rows ? a.p.layer.sink_rows[s.b] : s.b;
        const int64_t head = (int64_t)row * a.p.layer.kv_heads + s.h;
        at_k = at_v = (head * a.p.layer.sinks + position) * a.head_dim;
    } else {
        position = view.recent.lo + i - view.sinks.count();
        if (a.p.fresh_k && position >= seq.first_position) {
            int64_t token = position - seq.first_position;
            k = a.p.fresh_k, v = a.p.fresh_v;
            at_k = s.b * a.p.fresh_k_stride_batch + s.h * a.p.fresh_k_stride_head + token * a.p.fresh_k_stride_token;
            at_v = s.b * a.p.fresh_v_stride_batch + s.h * a.p.fresh_v_stride_head + token * a.p.fresh_v_stride_token;
        } else {
            k = a.p.layer.window_k, v = a.p.layer.window_v;
            int32_t row = s.b;
            if (a.p.layer.tail_rows) row = a.p.layer.tail_rows[2 * (int64_t)row + (a.by_page.quotient(position) & 1)];
            const int64_t head = (int64_t)row * a.p.layer.kv_heads + s.h;
            at_k = at_v = (head * a.by_slots.divisor + a.by_slots.remainder(position)) * a.head_dim;
        }
    }
    return {static_cast<const char *>(k) + at_k * bytes, static_cast<const char *>(v) + at_v * bytes, position, 0};
}

__device__ __forceinline__ float dot_quads(float4 x, float4 y, float sum)
{
    return fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, sum))));
}

/** Which exact tokens a row sees: sinks in `visible`, and others in `visible` from recent_lo on. */
struct ExactSight {
    Range visible;
    int32_t recent_lo;

    __device__ __forceinline__ ExactSight(const AttendArgs &a, const Sequence &seq, int32_t b, const RowPlace &row)
    {
        int32_t p = seq.first_position + row.token;
        visible = seen_exact(a, seq, b, p);
        if (!row.real) visible.hi = visible.lo;
        recent_lo = max(visible.lo, p - a.recent + 1);
    }
    /** Returns a token's base-2 logit from its product with the query; -inf if the row does not see it. */
    __device__ __forceinline__ float logit(const AttendArgs &a, int32_t position, float dot) const
    {
        float x = base2_logit(a, dot);
        bool sees = position >= (position >= a.p.layer.sinks ? recent_lo : visible.lo) && position < visible.hi;
        return sees ? x : -INFINITY;
    }
};

/** Returns how many tokens of a chunk a warp scores for one row: 4, 8 or 16, as many as leave no warp idle. The number
 *  divides the chunk. */
__device__ __forceinline__ int tokens_of_warp(int rows, int chunk, int warps)
{
    int tokens = 4;
    while (tokens < min(16, chunk) && 2 * tokens * warps <= rows * chunk) tokens *= 2;
    return tokens;
}

/** Computes base-2 logits of n <= EXACT_CHUNK tokens for all rows; -inf for tokens that a row does not see. A warp has
 *  one row and tokens_of_warp tokens at a time. Eight lanes share a token. */
template <int GROUPS>
__device__ __forceinline__ void exact_scores(const AttendArgs &a, const RowSet &s, const Sequence &seq, int32_t n,
                                             const ExactState &x)
{
    constexpr int AT_ONCE = GROUPS < 8 ? GROUPS : 8; /* groups of a key: as many as the registers allow */
    int warps = blockDim.x / 32, lane = threadIdx.x & 31, piece = lane % 8, chunk = min(a.exact_tokens, EXACT_CHUNK),
        tokens = tokens_of_warp(a.prepare_rows, chunk, warps);
#pragma unroll 1
    for (int item = threadIdx.x / 32; item * tokens < a.prepare_rows * chunk; item += warps) {
        int row = item % a.prepare_rows, first = item / a.prepare_rows * tokens;
        int64_t at = query_at(a, s, row);
        Quad raw[GROUPS];
        float4 q[GROUPS];
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            int c = TQ_TILE * g + 4 * piece;
            raw[g].raw = make_uint4(0, 0, 0, 0);
            if (c < a.head_dim && at >= 0) raw[g] = load_quad(a.p.q, at + c, a.p.layer.dtype);
        }
#pragma unroll
        for (int g = 0; g < GROUPS; g++) q[g] = to_float4(raw[g], a.p.layer.dtype);
        ExactSight sight(a, seq, s.b, find_row(a, s, row));
#pragma unroll 1
        for (int i = first + lane / 8; i < first + tokens; i += 4) {
            ExactToken token = x.tokens[min(i, n - 1)];
            float dot = 0;
#pragma unroll
            for (int from = 0; from < GROUPS; from += AT_ONCE) {
                Quad k[AT_ONCE];
#pragma unroll
                for (int g = 0; g < AT_ONCE; g++) {
                    int c = TQ_TILE * (from + g) + 4 * piece;
                    k[g].raw = make_uint4(0, 0, 0, 0);
                    if (c < a.head_dim) k[g] = load_quad(token.k, c, a.p.layer.dtype);
                }
#pragma unroll
                for (int g = 0; g < AT_ONCE; g++) dot = dot_quads(q[from + g], to_float4(k[g], a.p.layer.dtype), dot);
            }
#pragma unroll
            for (int d = 1; d < 8; d *= 2) dot += __shfl_xor_sync(ALL_LANES, dot, d);
            if (piece) continue;
            x.scores[row * EXACT_CHUNK + i] = i < n ? sight.logit(a, token.position, dot) : -INFINITY;
        }
    }
}

/** Turns logits into weights in place, and updates the running maximum and sum of each row. A warp per row. */
__device__ __forceinline__ void exact_softmax(const AttendArgs &a, const ExactState &x, int32_t n)
{
    int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < a.prepare_rows; row += blockDim.x / 32) {
        float score = lane < n ? x.scores[row * EXACT_CHUNK + lane] : -INFINITY;
        float before = x.max[row], largest = fmaxf(before, warp_max(score)), shift = largest == -INFINITY ? 0 : largest;
        float weight = exp2_fast(score - shift), factor = exp2_fast(before - shift), sum = warp_sum(weight);
        __syncwarp(); /* all lanes have read the maximum */
        x.scores[row * EXACT_CHUNK + lane] = weight;
        if (lane) continue;
        x.max[row] = largest;
        x.sum[row] = x.sum[row] * factor + sum;
        x.factor[row] = factor;
    }
}

/** Adds the chunk's weighted values to the sums. Each way has every `ways`-th token. */
__device__ __forceinline__ void exact_values(const AttendArgs &a, int32_t n, const ExactState &x)
{
    constexpr int AT_ONCE = 8;
    int quads = 8 * a.groups, items = a.prepare_rows * quads, ways = ways_of(a);
#pragma unroll 1
    for (int i = threadIdx.x; i < items * ways; i += blockDim.x) {
        int way = i / items, item = i - way * items, row = item / quads, c = 4 * (item - row * quads);
        if (c >= a.head_dim) continue;
        float4 *sum = reinterpret_cast<float4 *>(shared_row(a, way * a.prepare_rows + row) + c);
        float factor = x.factor[row];
        float4 o = make_float4(sum->x * factor, sum->y * factor, sum->z * factor, sum->w * factor);
#pragma unroll 1
        for (int first = way; first < n; first += AT_ONCE * ways) {
            Quad v[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                v[j] = load_quad(x.tokens[min(first + j * ways, n - 1)].v, c, a.p.layer.dtype);
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                if (first + j * ways >= n) break;
                float weight = x.scores[row * EXACT_CHUNK + first + j * ways];
                float4 y = to_float4(v[j], a.p.layer.dtype);
                o = make_float4(fmaf(weight, y.x, o.x), fmaf(weight, y.y, o.y), fmaf(weight, y.z, o.z),
                                fmaf(weight, y.w, o.w));
            }
        }
        *sum = o;
    }
}

/** Attends to part `part` of the exact tokens, for the set's rows. A whole block calls it. */
template <int GROUPS> __device__ __forceinline__ void attend_exact(const AttendArgs &a, const RowSet &s, int32_t part)
{
    Sequence seq = load_sequence(a, s.b);
    ExactView view = view_exact(a, seq, s.b);
    ExactState x = exact_state(a);
    int32_t first = part * a.exact_tokens, end = min(first + a.exact_tokens, view.sinks.count() + view.recent.count());
    int ways = ways_of(a), width = TQ_TILE * a.groups;
    for (int i = threadIdx.x; i < ways * a.prepare_rows * a.pitch; i += blockDim.x) shared_row(a, 0)[i] = 0;
    for (int i = threadIdx.x; i < a.prepare_rows; i += blockDim.x) x.max[i] = -INFINITY, x.sum[i] = 0;
#pragma unroll 1
    for (; first < end; first += EXACT_CHUNK) {
        int32_t n = min(end - first, EXACT_CHUNK);
        if ((int)threadIdx.x < n) x.tokens[threadIdx.x] = exact_token(a, s, seq, view, first + threadIdx.x);
        __syncthreads();
        exact_scores<GROUPS>(a, s, seq, n, x);
        __syncthreads();
        exact_softmax(a, x, n);
        __syncthreads();
        exact_values(a, n, x);
        __syncthreads();
    }
    __syncthreads();
    int64_t out = (((int64_t)s.b * a.p.layer.kv_heads + s.h) * a.exact_parts + part) * a.row_tiles * a.tile_rows +
                  s.row_tile * a.tile_rows + s.first;
    for (int i = threadIdx.x; i < a.prepare_rows; i += blockDim.x) a.exact_totals[out + i] = {x.max[i], x.sum[i], 0, 0};
    if (view.sinks.count() + view.recent.count() <= part * a.exact_tokens) return; /* sums with weight 0 are not read */
#pragma unroll 1
    for (int i = threadIdx.x; i < a.prepare_rows * width; i += blockDim.x) {
        int row = i / width, c = i - row * width;
        float sum = 0;
        for (int way = 0; way < ways; way++) sum += shared_row(a, way * a.prepare_rows + row)[c];
        a.exact_sums[(out + row) * width + c] = sum;
    }
}

} // namespace tq
#endif
