/* The loop over units for few rows, by one warp: computes scores and weights, sums weighted values, loads the next
 * units. Only warps of one team wait for each other, when they reuse a stage.
 *
 * Lane 4 g + t of a warp owns row t of each quad of rows: the scores of tokens g, g + 8, g + 16, g + 24 of each token
 * tile, and the sums of channels g + 8 r of each group. */
#ifndef TQ_CUDA_ATTEND_LOOP_WARP_CUH
#define TQ_CUDA_ATTEND_LOOP_WARP_CUH
#include "cuda/attend/loop/stages.cuh"
#include "cuda/attend/rows/logit.cuh"
#include "cuda/attend/rows/wave.cuh"

namespace tq
{

/** A lane's state of its row in each quad. */
template <class V> struct Sums {
    float o[V::GROUPS][4][V::ROW_QUADS];
    float reference[V::ROW_QUADS], weights[V::ROW_QUADS], rounded[V::ROW_QUADS],
        bias[V::ROW_QUADS]; /* bias: added to all logits of the row */
};

template <class V> struct LaneRows {
    float scale[V::ROW_QUADS], offset[V::ROW_QUADS]; /* offset: added to products of ROW_FACTOR codes */
    float variance[V::ROW_QUADS];                    /* RowArgs::variance, if VARIANCE */
    int start[V::ROW_QUADS][2]; /* initial sums of key products, by plane, if keys have an offset */
    uint2 query[V::GROUPS];     /* if QUERY_IN_REGISTERS */
};

/** The bits of 1.5 * 2^23. Adding an integer n, |n| < 2^22, gives the bits of 1.5 * 2^23 + n. So an accumulator that
 *  starts with them ends as a float, without a conversion, which would use the same pipe as the look-ups. */
constexpr int FLOAT_BITS = 0x4b400000;

/** Initial accumulators: FLOAT_BITS at 3 and 4 bits with two quads of rows and two tiles, else 0 and a conversion. */
template <class V, int BITS>
constexpr int START = V::ONE_WIDTH && (BITS == 3 || BITS == 4) && V::ROW_QUADS == 2 && V::TILES == 2 ? FLOAT_BITS : 0;
static_assert(8 * TQ_TILE * 127 * 127 < 1 << 22 && 2 * TQ_TILE * 255 * 255 < 1 << 22,
              "keys x queries, values x weights; kernels of one width have 8 groups at most");
static_assert((int64_t)TQ_CUDA_MAX_HEAD_DIM * 127 * QUERY_LIMIT <= INT32_MAX, "keys x queries, both planes joined");
static_assert(4LL * TQ_TILE * 255 * 65535 <= INT32_MAX, "values x weights of a unit, both planes joined");

/** Returns hi * BASE + lo of two accumulators that started from START. */
template <class V, int BITS, int BASE> __device__ __forceinline__ float join_planes(int hi, int lo)
{
    if constexpr (START<V, BITS> == 0) return (float)(hi * BASE + lo);
    return fmaf(__int_as_float(hi), (float)BASE, -12582912.0f * (BASE + 1)) + __int_as_float(lo);
}

/** Calls f(Width<bits>()) with V::BITS or, if that is BY_SIDE, with the width of the side, looked up. */
template <class V, class F> __device__ __forceinline__ void with_side_width(const SideArgs &side, F f)
{
    if constexpr (V::BITS == BY_SIDE) with_width<MOST_BY_SIDE>(side.width[0], f);
    else f(Width<V::BITS>());
}

/** Computes s[quad][4 tile + r], the score of token g + 8 r of a tile, for tiles first .. first + N - 1: the integer
 *  product, less the variance term, times the key scale. BITS: of keys, or BY_GROUP. GROUPS_AT_ONCE: how far the loop
 *  over groups is unrolled, for plans of one width. */
template <class V, int BITS, int N, int GROUPS_AT_ONCE>
__device__ __forceinline__ void score_tiles(const AttendArgs &a, StageView keys, const uint2 *query,
                                            const LaneRows<V> &rows, int first, int lane,
                                            float (&s)[V::ROW_QUADS][4 * V::TILES])
{
    constexpr int B = V::ROW_QUADS;
    LaneScales<N> scales;
    if (B > 1) scales.load(keys, first, lane); /* early, because there are few warps to hide the latency */
    int c[N][2][B][4];
#pragma unroll
    for (int tile = 0; tile < N; tile++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < B; n++) {
                constexpr int FROM = START<V, BITS>;
                c[tile][half][n][0] = c[tile][half][n][2] =
                    V::template HAS_OFFSET<BITS> ? FROM + rows.start[n][0] : FROM;
                c[tile][half][n][1] = c[tile][half][n][3] =
                    V::template HAS_OFFSET<BITS> ? FROM + rows.start[n][1] : FROM;
            }
    const uint8_t *codes = keys.codes + 4 * lane;
    if constexpr (V::ONE_WIDTH) {
#pragma unroll GROUPS_AT_ONCE
        for (int g = 0; g < V::GROUPS; g++) {
            uint2 b[B];
#pragma unroll
            for (int n = 0; n < B; n++)
                b[n] = V::QUERY_IN_REGISTERS ? rows.query[g] : query[(n * V::GROUPS + g) * 32 + lane];
#pragma unroll
            for (int tile = 0; tile < N; tile++)
                multiply_tile<BITS, Reading::ROW_FACTOR, V::TWO_PRODUCTS, V::MULTIPLY, false, B>(
                    codes + ((first + tile) * V::GROUPS + g) * 128 * BITS, a.tables, b, c[tile]);
        }
    } else if constexpr (V::FINE) {
#pragma unroll 1
        for (int g = 0; g < a.plan_groups; g++) {
            /* b[0] is for the first token tile, in lanes t = 0, 1; b[1] for the second, in lanes 2, 3. The query's even
             * groups of the plan are in lanes t = 0, 1, its odd ones in 2, 3. */
            uint2 b[2][B];
#pragma unroll
            for (int n = 0; n < B; n++) {
                uint2 own = query[(n * a.groups + g / 2) * 32 + ((lane & ~2) | (g & 1) << 1)], none = {0, 0};
                b[0][n] = lane & 2 ? none : own;
                b[1][n] = lane & 2 ? own : none;
            }
            const uint8_t *at = codes + a.key.offset[g] + first * a.key.tile_bytes;
            auto all_tiles = [&](auto width) {
#pragma unroll
                for (int tile = 0; tile < N; tile += 2)
                    multiply_fine_keys<decltype(width)::value, B>(at + tile * a.key.tile_bytes, a.tables, b, c + tile);
            };
            with_fine_width(a.key.width[g], all_tiles);
        }
    } else {
#pragma unroll 1
        for (int g = 0; g < a.groups; g++) {
            uint2 b[B];
#pragma unroll
            for (int n = 0; n < B; n++) b[n] = query[(n * a.groups + g) * 32 + lane];
            const uint8_t *at = codes + a.key.offset[g] + first * a.key.tile_bytes;
            auto all_tiles = [&](auto width) {
#pragma unroll
                for (int tile = 0; tile < N; tile++)
                    multiply_tile<decltype(width)::value, Reading::SCALED, V::TWO_PRODUCTS, V::MULTIPLY, false, B>(
                        at + tile * a.key.tile_bytes, a.tables, b, c[tile]);
            };
            with_width(a.key.width[g], all_tiles);
        }
    }
    if (B == 1) scales.load(keys, first, lane);
#pragma unroll
    for (int tile = 0; tile < N; tile++) {
#pragma unroll
        for (int n = 0; n < B; n++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int *row = &c[tile][r >> 1][n][2 * (r & 1)];
                float x = join_planes<V, BITS, QUERY_BASE>(row[0], row[1]);
                if constexpr (V::template HAS_ROW_FACTOR<BITS>) x = fmaf(x, 1.0f / (1 << BITS * r), rows.offset[n]);
                if constexpr (V::VARIANCE) x = fmaf(-rows.variance[n], scales[4 * tile + r], x);
                s[n][4 * (first + tile) + r] = x * scales[4 * tile + r];
            }
    }
}

/** Computes the scores of a unit; with several quads of rows two tiles at a time, because the products of four would
 *  need the registers of the scores. */
template <class V, int BITS, int GROUPS_AT_ONCE>
__device__ __forceinline__ void score_unit(const AttendArgs &a, StageView keys, const uint2 *query,
                                           const LaneRows<V> &rows, int lane, float (&s)[V::ROW_QUADS][4 * V::TILES])
{
    constexpr int N = V::ROW_QUADS == 1 ? V::TILES : 2;
#pragma unroll
    for (int first = 0; first < V::TILES; first += N)
        score_tiles<V, BITS, N, GROUPS_AT_ONCE>(a, keys, query, rows, first, lane, s);
}

/** Hides the tokens of a unit that a row does not see: their scores become -inf. first: packed index of its first
 *  token; end: tokens from it on are hidden from all rows. Sets the value scales of tokens that no row of the lane sees
 *  to 0, because places without a token may have any. */
template <class V>
__device__ __forceinline__ void hide_tokens(const RowArgs *rows, int32_t first, int32_t end, int lane,
                                            float (&s)[V::ROW_QUADS][4 * V::TILES], LaneScales<V::TILES> &value_scales)
{
    uint32_t seen = 0;
#pragma unroll
    for (int n = 0; n < V::ROW_QUADS; n++) {
        const Range sees = seen_by(rows[4 * n + (lane & 3)], end);
#pragma unroll
        for (int i = 0; i < 4 * V::TILES; i++) {
            int32_t token = first + TQ_TILE * (i / 4) + 8 * (i % 4) + lane / 4;
            if (token >= sees.lo && token < sees.hi) seen |= 1u << i;
            else s[n][i] = -INFINITY;
        }
    }
#pragma unroll
    for (int i = 0; i < 4 * V::TILES; i++)
        if (!(seen >> i & 1)) value_scales.clear(i);
}

template <class V>
__device__ __forceinline__ void cap_scores(const AttendArgs &a, const RowArgs *rows, int lane,
                                           float (&s)[V::ROW_QUADS][4 * V::TILES])
{
    const SoftCap cap(a);
#pragma unroll
    for (int n = 0; n < V::ROW_QUADS; n++) {
        float scale = rows[4 * n + (lane & 3)].scale * cap.inverse, bias = rows[4 * n + (lane & 3)].bias * cap.inverse;
#pragma unroll
        for (int i = 0; i < 4 * V::TILES; i++) s[n][i] = cap.logit(s[n][i], scale, bias);
    }
}

/** Returns the largest of N numbers, by a tree of minimal depth. */
template <int N> __device__ __forceinline__ float largest_of(const float (&x)[N])
{
    float y[(N + 1) / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) y[i] = fmaxf(x[2 * i], x[2 * i + 1]);
    if constexpr (N % 2) y[N / 2] = x[N - 1];
    if constexpr (N <= 2) return y[0];
    else return largest_of(y);
}

/** Moves each row's reference so that its largest score, over all lanes of the row, has a weight of at most 1. */
template <class V>
__device__ __forceinline__ void raise_reference(const LaneRows<V> &rows, Sums<V> &sums,
                                                const float (&top)[V::ROW_QUADS])
{
#pragma unroll
    for (int n = 0; n < V::ROW_QUADS; n++) {
        float largest = top[n];
#pragma unroll
        for (int k = 4; k < 32; k *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, k));
        float reference = largest == -INFINITY ? sums.reference[n] : fminf(sums.reference[n], -largest * rows.scale[n]);
        float factor = exp2_fast(reference - sums.reference[n]);
        sums.reference[n] = reference;
        sums.weights[n] *= factor;
        sums.rounded[n] *= factor;
#pragma unroll
        for (int g = 0; g < V::GROUPS; g++)
#pragma unroll
            for (int r = 0; r < 4; r++) sums.o[g][r][n] *= factor;
    }
}

/** Turns scores into weights times value scales, as 16-bit fixed point relative to the unit's largest, in the products'
 *  column order. Writes them to b[tile][quad], as operands B, and the value of 1 in them to unit_scale[quad]. */
template <class V>
__device__ __forceinline__ void weigh_unit(const LaneRows<V> &rows, const LaneScales<V::TILES> &value_scales,
                                           const float (&s)[V::ROW_QUADS][4 * V::TILES], int lane, Sums<V> &sums,
                                           uint2 (&b)[V::TILES][V::ROW_QUADS], float (&unit_scale)[V::ROW_QUADS])
{
    constexpr int B = V::ROW_QUADS;
    float top[B];
    bool above = false;
#pragma unroll
    for (int n = 0; n < B; n++) {
        top[n] = largest_of(s[n]);
        above |= fmaf(top[n], rows.scale[n], sums.reference[n]) > HEADROOM;
    }
    if (__any_sync(ALL_LANES, above)) raise_reference<V>(rows, sums, top);

    /* Even columns need the high plane, odd ones the low. In the first round lanes 0 to 15 send the high plane of their
     * tokens and the others the low one, in the second the reverse, so that every word is sent once. */
    bool low_half = lane < 16, even = !(lane & 4);
    uint32_t first_choice = low_half ? 0x7531 : 0x6420, second_choice = low_half ? 0x6420 : 0x7531;
    int from = 4 * (lane & 3) + (lane >> 3) + (even ? 0 : 16);
#pragma unroll
    for (int n = 0; n < B; n++) {
        float weight[4 * V::TILES], sum[4];
#pragma unroll
        for (int i = 0; i < 4 * V::TILES; i++) {
            float w = exp2_fast(fmaf(s[n][i], rows.scale[n], sums.reference[n]));
            sum[i % 4] = i < 4 ? w : sum[i % 4] + w;
            weight[i] = w * value_scales[i];
        }
        sums.weights[n] += (sum[0] + sum[1]) + (sum[2] + sum[3]);
        float largest = fmaxf(largest_of(weight), 1e-30f);
#pragma unroll
        for (int k = 4; k < 32; k *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, k));
        float steps = 65535.0f * reciprocal(largest);
        unit_scale[n] = largest * (1.0f / 65535);
#pragma unroll
        for (int tile = 0; tile < V::TILES; tile++) {
            uint32_t x[4]; /* 2^23 + x has x in its low bits */
#pragma unroll
            for (int r = 0; r < 4; r++) x[r] = __float_as_uint(fmaf(weight[4 * tile + r], steps, 8388608.0f));
            uint32_t x01 = prmt(x[0], x[1], 0x5410), x23 = prmt(x[2], x[3], 0x5410);
            uint32_t first = __shfl_sync(ALL_LANES, prmt(x01, x23, first_choice), from);
            uint32_t second = __shfl_sync(ALL_LANES, prmt(x01, x23, second_choice), from ^ 16);
            b[tile][n] = even ? make_uint2(first, second) : make_uint2(second, first);
        }
    }
}

/** Adds the unit's weighted values to the sums. b, unit_scale: from weigh_unit; BITS: of values, or BY_GROUP. */
template <class V, int BITS>
__device__ __forceinline__ void add_values(const AttendArgs &a, StageView values,
                                           const uint2 (&b)[V::TILES][V::ROW_QUADS],
                                           const float (&unit_scale)[V::ROW_QUADS], int lane, Sums<V> &sums)
{
    constexpr int B = V::ROW_QUADS;
    const uint8_t *codes = values.codes + 4 * lane;
    if constexpr (V::template NEEDS_WEIGHT_SUMS<BITS>) { /* a product with ones: the sum of the rounded weights */
        int c[B][4] = {};
#pragma unroll
        for (int n = 0; n < B; n++) {
            const uint32_t ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
#pragma unroll
            for (int tile = 0; tile < V::TILES; tile++) mma<true, true>(c[n], ones, b[tile][n].x, b[tile][n].y);
            sums.rounded[n] = fmaf((float)(c[n][0] * 256 + c[n][1]), unit_scale[n], sums.rounded[n]);
        }
    }
    /* Not unrolled with BY_GROUP: the code for every width, again for each group, would be over half of the kernel. */
#pragma unroll(V::ONE_WIDTH ? V::GROUPS : 1)
    for (int g = 0; g < V::GROUPS; g++) {
        int c[2][B][4];
#pragma unroll
        for (int i = 0; i < 8 * B; i++) c[i / (4 * B)][i / 4 % B][i % 4] = START<V, BITS>;
        if constexpr (V::ONE_WIDTH) {
#pragma unroll
            for (int tile = 0; tile < V::TILES; tile++)
                multiply_tile<BITS, Reading::ROW_FACTOR, V::TWO_PRODUCTS, V::MULTIPLY, true, B>(
                    codes + (tile * V::GROUPS + g) * 128 * BITS, a.tables, b[tile], c);
        } else if constexpr (V::FINE) {
            if (g >= a.groups) continue;
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const uint8_t *at = codes + a.value.offset[2 * g + k];
                auto all_tiles = [&](auto width) {
#pragma unroll
                    for (int tile = 0; tile < V::TILES; tile += 2)
                        multiply_fine_values<decltype(width)::value, B>(at + tile * a.value.tile_bytes, a.tables,
                                                                        b + tile, c[k]);
                };
                with_fine_width(a.value.width[2 * g + k], all_tiles);
            }
        } else {
            if (g >= a.groups || !a.value.bits[g]) continue;
            const uint8_t *at = codes + a.value.offset[g];
            auto both_tiles = [&](auto width) {
#pragma unroll
                for (int tile = 0; tile < V::TILES; tile++)
                    multiply_tile<decltype(width)::value, Reading::ROW_FACTOR, V::TWO_PRODUCTS, V::MULTIPLY, true, B>(
                        at + tile * a.value.tile_bytes, a.tables, b[tile], c);
            };
            with_width(a.value.width[g], both_tiles);
        }
        float found[4][B];
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int n = 0; n < B; n++) {
                const int *row = &c[r >> 1][n][2 * (r & 1)];
                found[r][n] = join_planes<V, BITS, 256>(row[0], row[1]);
            }
#pragma unroll
        for (int k = 0; k < V::GROUPS; k++) /* g is no constant, and registers cannot be indexed */
            if (k == g)
#pragma unroll
                for (int i = 0; i < 4 * B; i++)
                    sums.o[k][i / B][i % B] = fmaf(found[i / B][i % B], unit_scale[i % B], sums.o[k][i / B][i % B]);
    }
}

/** A warp's prepared rows: their arguments, and their queries. */
struct WarpRows {
    const RowArgs *args;
    const uint2 *queries;
    const float2 *wave; /* from put_wave */
};

/** Initialises a lane's state of its rows, and its sums. */
template <class V>
__device__ __forceinline__ void start_rows(const AttendArgs &a, const WarpRows &given, int lane, LaneRows<V> &rows,
                                           Sums<V> &sums)
{
#pragma unroll
    for (int n = 0; n < V::ROW_QUADS; n++) {
        RowArgs row = given.args[4 * n + (lane & 3)];
        rows.scale[n] = scale_left(a, row);
        if constexpr (V::VARIANCE) rows.variance[n] = row.variance;
        rows.start[n][0] = row.offset_hi;
        rows.start[n][1] = row.offset_lo;
        rows.offset[n] = 0.5f * (float)(row.offset_hi * QUERY_BASE + row.offset_lo); /* a byte is half a level */
        sums.bias[n] = bias_left(a, row);
        sums.reference[n] = NO_REFERENCE;
        sums.weights[n] = sums.rounded[n] = 0;
#pragma unroll
        for (int g = 0; g < V::GROUPS; g++)
#pragma unroll
            for (int r = 0; r < 4; r++) sums.o[g][r][n] = 0;
    }
    if constexpr (V::QUERY_IN_REGISTERS)
#pragma unroll
        for (int g = 0; g < V::GROUPS; g++) rows.query[g] = given.queries[32 * g + lane];
}

/** Attends to the units of the current segment. thread: index in the team. */
template <class V, class R, class Ahead>
__device__ __forceinline__ void attend_units(const AttendArgs &a, R &ring, Ahead &ahead, const WarpRows &given,
                                             int thread, Sums<V> &sums)
{
    constexpr int B = V::ROW_QUADS;
    int lane = thread & 31;
    LaneRows<V> rows;
    start_rows<V>(a, given, lane, rows, sums);
    Range whole = whole_units(a, ahead.common());
    bool capped = a.p.softcap > 0;
    UnitWave<B, V::TILES, V::RUN> wave;
#pragma unroll 1
    while (ahead.works(a)) {
        bool more = ahead.more();
        int32_t unit = ahead.at_work(a);
        int32_t next_page = more && ring.sends(thread) ? ahead.page(a) : 0; /* loaded long before it is needed */
        float s[B][4 * V::TILES], unit_scale[B];
        if (has_wave<V>(a)) {
            const int32_t run_start = V::RUN > 1 ? unit & -a.page_units : unit;
            wave.sum(a, given.args, given.wave, unit, first_token(a, run_start, V::TILES), lane);
        }
        barrier_wait(ring.barrier(ring.stage, 0), ring.parity);
        StageView keys = ring.view(a, a.key);
        with_side_width<V>(a.key, [&](auto width) {
            /* AT_ONCE: groups that the loop over keys unrolls. With more than four rows, code for more groups of 4-bit
             * keys does not fit the nearest instruction cache, which costs time in attend_fused (measured.md). */
            constexpr int BITS = decltype(width)::value, AT_ONCE = R::ONE_STAGE && BITS == 4 && B > 1 ? 2 : V::GROUPS;
            score_unit<V, BITS, AT_ONCE>(a, keys, given.queries, rows, lane, s);
        });
        StageView values = ring.view(a, a.value);
        LaneScales<V::TILES> value_scales; /* read now: they are in the keys' half of the stage */
        value_scales.load(values, 0, lane);
        const uint8_t *next_record = ahead.record(a, next_page);
        refill(a, ring, 0, more, next_record, ahead.unit, thread);

        if (has_wave<V>(a)) wave.add(a, given.args, lane, s);
        const bool absent = value_scales.absent();
        if (unit < whole.lo || unit >= whole.hi || absent) {
            int32_t first = first_token(a, unit, V::TILES), page = unit >> (a.page_units - 1);
            int32_t end = absent ? first : min(first + V::TILES * TQ_TILE, (page + 1) * a.page_tokens);
            hide_tokens<V>(given.args, first, end, lane, s, value_scales);
        }
        if (capped) cap_scores<V>(a, given.args, lane, s);

        uint2 b[V::TILES][B];
        weigh_unit<V>(rows, value_scales, s, lane, sums, b, unit_scale);
        barrier_wait(ring.barrier(ring.stage, 1), ring.parity);
        with_side_width<V>(
            a.value, [&](auto width) { add_values<V, decltype(width)::value>(a, values, b, unit_scale, lane, sums); });
        refill(a, ring, 1, more, next_record, ahead.unit, thread);
        ring.advance(a);
        ahead.step_on(a, more);
    }
}

} // namespace tq
#endif
