/* The loop over units: loads pages into shared memory, computes scores and weights, sums weighted values. Only warps of
 * one team wait for each other, when they reuse a stage.
 *
 * A lane 4 g + t of a warp owns, of each block of four rows, row t: the scores of its tokens g, g + 8, g + 16, g + 24
 * of each token tile, and the sums of its channels g + 8 r of each group. */
#ifndef TQ_CUDA_ATTEND_SPLIT_PAGES_CUH
#define TQ_CUDA_ATTEND_SPLIT_PAGES_CUH
#include "cuda/attend/schedule.cuh"
#include "cuda/attend/variant.h"
#include "cuda/attend/wave.cuh"
#include "cuda/tile/fragments.cuh"

namespace tq
{

/** A side of a unit in shared memory. A stage is |key codes|value codes|key scales|value scales|. If a page is two
 *  units, the stage also has the other unit's scales. */
struct StageView {
    const uint8_t *codes;
    const uint8_t
        *scales; /* fp16, in column order: scales of tokens g + 8 r, r = 0..3, of a tile are neighbours, from 4 g on */
};

/** The scales of a lane's tokens in TILES tiles: word i has those of 2 i and 2 i + 1. */
template <int TILES> struct LaneScales {
    uint32_t pair[2 * TILES];

    __device__ __forceinline__ void load(StageView side, int first, int lane)
    {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            uint2 four = *reinterpret_cast<const uint2 *>(side.scales + 2 * ((first + tile) * TQ_TILE + (lane & ~3)));
            pair[2 * tile] = four.x;
            pair[2 * tile + 1] = four.y;
        }
    }
    __device__ __forceinline__ float operator[](int i) const
    {
        __half2 h = *reinterpret_cast<const __half2 *>(&pair[i / 2]);
        return i % 2 ? __high2float(h) : __low2float(h);
    }
    /** Of value scales: whether they are of the absent record. */
    __device__ __forceinline__ bool absent() const { return pair[0] == NO_PAGE; }
    __device__ __forceinline__ bool any_zero() const
    {
        bool any = false;
#pragma unroll
        for (int i = 0; i < 4 * TILES; i++) any |= !(pair[i / 2] & (i % 2 ? 0xffff0000u : 0x0000ffffu));
        return any;
    }
    __device__ __forceinline__ void clear(int i) { pair[i / 2] &= i % 2 ? 0x0000ffffu : 0xffff0000u; }
};

/** A team's ring of stages. Key codes with all scales, and value codes, have separate barriers, so that the next unit's
 *  keys are loaded while this unit's values are used. Addresses are in shared memory. A stage has four barriers: full
 *  keys, full values, empty keys, empty values; a team of one warp never waits for an empty stage. ONE_STAGE: there is
 *  only one stage, and the team has V's number of warps. */
template <class V, bool ONE_STAGE_ = false> struct Ring {
    static constexpr bool ONE_STAGE = ONE_STAGE_;
    uint32_t stages, barriers; /* of the team */
    int stage, parity;         /* of the current unit */
    uint64_t policy;           /* of its copies */

    __device__ __forceinline__ uint32_t barrier(int stage_, int which) const
    {
        return barriers + (ONE_STAGE ? 0 : 32 * stage_) + 8 * which;
    }

    __device__ __forceinline__ StageView view(const AttendArgs &a, const SideArgs &side) const
    {
        const uint8_t *at =
            shared_bytes + (stages - shared_address(shared_bytes)) + (ONE_STAGE ? 0 : stage * a.stage_bytes);
        return {at + side.at_codes, at + side.at_scales};
    }

    __device__ __forceinline__ static int team_warps(const AttendArgs &a)
    {
        return ONE_STAGE || V::TEAM_WARPS > 1 ? V::TEAM_WARPS : a.team_warps;
    }

    /** Whether a thread of the team issues copies of pages. With bulk copies the first warp does (one lane issues all);
     *  otherwise every thread issues its share. */
    __device__ __forceinline__ static bool sends(int thread) { return !V::BULK || thread < 32; }

    /** Issues the copies of half a stage: key codes and all scales, or value codes. By whole warps, all for which
     *  `sends`. */
    __device__ __forceinline__ void fill(const AttendArgs &a, int stage_, int which, const uint8_t *record,
                                         int32_t unit, int thread) const
    {
        uint32_t to = stages + (ONE_STAGE ? 0 : stage_ * a.stage_bytes), full = barrier(stage_, which);
        int second = V::TILES == 4 ? 0 : unit & (a.page_units - 1); /* four tiles are at least a page */
        const CopyArgs *c = a.copies[second];
        const int first = which ? COPY_VALUES : COPY_KEYS, last = which ? COPY_VALUES : COPY_SCALES;
        if constexpr (V::BULK) {
            if (!elect_lane()) return;
            barrier_expect(full, a.copy_bytes[second][which]);
#pragma unroll
            for (int k = 0; k < COPIES; k++)
                if (k >= first && k <= last) copy_bulk(to + c[k].to, record + c[k].from, c[k].bytes, full, policy);
        } else {
            for (int k = first; k <= last; k++)
                for (int i = 16 * thread; i < c[k].bytes; i += 16 * 32 * a.team_warps)
                    copy_16(to + c[k].to + i, record + c[k].from + i);
            barrier_arrive_after_copies(full);
        }
    }

    __device__ __forceinline__ void advance(const AttendArgs &a)
    {
        if (ONE_STAGE || ++stage == a.stages) stage = 0, parity ^= 1;
    }
};

/** A lane's state of its row in each block. weight = exp2(scale * score + reference), and the exponent stays below
 *  HEADROOM.
 *  The reference is NO_REFERENCE before the first visible token. */
constexpr float NO_REFERENCE = 1e30f, HEADROOM = 10;

template <class V> struct Sums {
    float o[V::GROUPS][4][V::BLOCKS];
    float reference[V::BLOCKS], weights[V::BLOCKS], rounded[V::BLOCKS],
        bias[V::BLOCKS]; /* bias: added to all logits of the row */
};

template <class V> struct LaneRows {
    float scale[V::BLOCKS], offset[V::BLOCKS]; /* offset: of ROW_FACTOR codes */
    int start[V::BLOCKS][2];                   /* initial sums of key products, by plane, of keys that have an offset */
    uint2 query[V::GROUPS];                    /* if QUERY_IN_REGISTERS */
};

/** The bits of 1.5 2^23. Adding an integer n, |n| < 2^22, gives the bits of 1.5 2^23 + n. So an accumulator that starts
 *  with them ends as a float, without a conversion, which would use the same pipe as the look-ups. */
constexpr int FLOAT_BITS = 0x4b400000;

/** Initial accumulators of a side: FLOAT_BITS with two blocks of rows at 3 and 4 bits (1 to 2 % faster), otherwise 0 and
 *  a conversion. */
template <class V, int BITS>
constexpr int START = V::UNIFORM && (BITS == 3 || BITS == 4) && V::BLOCKS == 2 && V::TILES == 2 ? FLOAT_BITS : 0;
static_assert(8 * TQ_TILE * 127 * 127 < 1 << 22 && 2 * TQ_TILE * 255 * 255 < 1 << 22,
              "keys x queries, values x weights");
static_assert(4LL * TQ_TILE * 255 * 65535 <= INT32_MAX, "values x weights of a unit, both planes joined");

/** hi * BASE + lo, for accumulators that started from START. */
template <class V, int BITS, int BASE> __device__ __forceinline__ float join_planes(int hi, int lo)
{
    if constexpr (START<V, BITS> == 0) return (float)(hi * BASE + lo);
    return fmaf(__int_as_float(hi), (float)BASE, -12582912.0f * (BASE + 1)) + __int_as_float(lo);
}

/** f(Width<bits>()) with the width of a side: the kernel's own, or looked up. */
template <class V, class F> __device__ __forceinline__ void with_side_width(const SideArgs &side, F f)
{
    if constexpr (V::BITS == BY_SIDE) with_width<MOST_BY_SIDE>(side.width[0], f);
    else f(Width<V::BITS>());
}

/** s[block][4 tile + r] = score of token g + 8 r of the tile: integer product times key scale; tiles first .. first + N
 *  - 1. BITS: of keys, or BY_GROUP.
 *  GROUPS_AT_ONCE: unrolling of the loop over groups, for uniform plans. */
template <class V, int BITS, int N, int GROUPS_AT_ONCE>
__device__ __forceinline__ void score_tiles(const AttendArgs &a, StageView keys, const uint2 *query,
                                            const LaneRows<V> &rows, int first, int lane,
                                            float (&s)[V::BLOCKS][4 * V::TILES])
{
    constexpr int B = V::BLOCKS;
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
    if constexpr (V::UNIFORM) {
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
            uint2
                b[2]
                 [B]; /* of lanes of both token tiles: the plan's even groups are in lanes t = 0, 1, odd ones in 2, 3 */
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
                s[n][4 * (first + tile) + r] = x * scales[4 * tile + r];
            }
    }
}

/** The scores of a unit. With many rows two tiles at a time, because the products of four would need the scores'
 *  registers. */
template <class V, int BITS, int GROUPS_AT_ONCE>
__device__ __forceinline__ void score_unit(const AttendArgs &a, StageView keys, const uint2 *query,
                                           const LaneRows<V> &rows, int lane, float (&s)[V::BLOCKS][4 * V::TILES])
{
    constexpr int N = V::BLOCKS == 1 ? V::TILES : 2;
#pragma unroll
    for (int first = 0; first < V::TILES; first += N)
        score_tiles<V, BITS, N, GROUPS_AT_ONCE>(a, keys, query, rows, first, lane, s);
}

/** For a unit of which some row sees a part: hidden tokens get -inf. Places without a token may have any value scale,
 *  so it is set to 0. */
template <class V>
__device__ __forceinline__ void hide_tokens(const RowArgs *rows, int32_t first, int32_t end, int lane,
                                            float (&s)[V::BLOCKS][4 * V::TILES], LaneScales<V::TILES> &value_scales)
{
    uint32_t seen = 0;
#pragma unroll
    for (int n = 0; n < V::BLOCKS; n++) {
        int32_t lo = rows[4 * n + (lane & 3)].packed_lo, hi = min(rows[4 * n + (lane & 3)].packed_hi, end);
#pragma unroll
        for (int i = 0; i < 4 * V::TILES; i++) {
            int32_t token = first + TQ_TILE * (i / 4) + 8 * (i % 4) + lane / 4;
            if (token >= lo && token < hi) seen |= 1u << i;
            else s[n][i] = -INFINITY;
        }
    }
#pragma unroll
    for (int i = 0; i < 4 * V::TILES; i++)
        if (!(seen >> i & 1)) value_scales.clear(i);
}

/** tanh to 2e-7 absolute, enough for a logit. */
__device__ __forceinline__ float tanh_fast(float x)
{
    return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(fminf(2 * LOG2_E * x, 126.0f)));
}

template <class V>
__device__ __forceinline__ void cap_scores(const AttendArgs &a, const RowArgs *rows, int lane,
                                           float (&s)[V::BLOCKS][4 * V::TILES])
{
    float cap = a.p.softcap * LOG2_E, inverse = reciprocal(fmaxf(cap, FLT_MIN));
#pragma unroll
    for (int n = 0; n < V::BLOCKS; n++) {
        float scale = rows[4 * n + (lane & 3)].scale * inverse, bias = rows[4 * n + (lane & 3)].bias * inverse;
#pragma unroll
        for (int i = 0; i < 4 * V::TILES; i++) {
            float capped = cap * tanh_fast(fmaf(s[n][i], scale, bias));
            s[n][i] = s[n][i] == -INFINITY ? s[n][i] : capped;
        }
    }
}

/** The largest of N numbers, by a tree of minimal depth. */
template <int N> __device__ __forceinline__ float largest_of(const float (&x)[N])
{
    float y[(N + 1) / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) y[i] = fmaxf(x[2 * i], x[2 * i + 1]);
    if constexpr (N % 2) y[N / 2] = x[N - 1];
    if constexpr (N <= 2) return y[0];
    else return largest_of(y);
}

/** Moves a row's reference up to the largest score, over all lanes that share the row. */
template <class V>
__device__ __forceinline__ void raise_reference(const LaneRows<V> &rows, Sums<V> &sums, const float (&top)[V::BLOCKS])
{
#pragma unroll
    for (int n = 0; n < V::BLOCKS; n++) {
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

/** Scores to weights times value scales, as 16-bit fixed point relative to the unit's largest, in the products' column
 *  order. b[tile][block]: the operand; unit_scale[block]: the size of its step. */
template <class V>
__device__ __forceinline__ void weigh_unit(const LaneRows<V> &rows, const LaneScales<V::TILES> &value_scales,
                                           const float (&s)[V::BLOCKS][4 * V::TILES], int lane, Sums<V> &sums,
                                           uint2 (&b)[V::TILES][V::BLOCKS], float (&unit_scale)[V::BLOCKS])
{
    constexpr int B = V::BLOCKS;
    float top[B];
    bool above = false;
#pragma unroll
    for (int n = 0; n < B; n++) {
        top[n] = largest_of(s[n]);
        above |= fmaf(top[n], rows.scale[n], sums.reference[n]) > HEADROOM;
    }
    if (__any_sync(ALL_LANES, above)) raise_reference<V>(rows, sums, top);

    /* even columns need the high plane, odd ones the low; in each of two rounds a lane sends the high plane of two
     * columns' tokens and the low plane of the others, so that every word is sent once */
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

/** Adds the unit's weighted values to the sums. BITS: of values, or BY_GROUP. */
template <class V, int BITS>
__device__ __forceinline__ void add_values(const AttendArgs &a, StageView values, const uint2 (&b)[V::TILES][V::BLOCKS],
                                           const float (&unit_scale)[V::BLOCKS], int lane, Sums<V> &sums)
{
    constexpr int B = V::BLOCKS;
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
    /* Of any widths in a loop: each group has code for every width, and a copy of all that for each group was more than half of a kernel. */
#pragma unroll(V::UNIFORM ? V::GROUPS : 1)
    for (int g = 0; g < V::GROUPS; g++) {
        int c[2][B][4];
#pragma unroll
        for (int i = 0; i < 8 * B; i++) c[i / (4 * B)][i / 4 % B][i % 4] = START<V, BITS>;
        if constexpr (V::UNIFORM) {
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
        for (int k = 0; k < V::GROUPS; k++) /* registers have no index */
            if (k == g)
#pragma unroll
                for (int i = 0; i < 4 * B; i++)
                    sums.o[k][i / B][i % B] = fmaf(found[i / B][i % B], unit_scale[i % B], sums.o[k][i / B][i % B]);
    }
}

/** Lanes of a warp that arrive at a team's barrier of an empty stage. One is enough: it arrives after __syncwarp, so what all lanes have read
 *  comes before the copy that another warp starts. compute-sanitizer's racecheck does not follow that, and reports hazards; the programs for it
 *  (setup.py, build_sanitize) let every lane arrive. At 2 bits that takes 4 to 6 % longer (H200). */
#ifdef TQ_EVERY_LANE_ARRIVES
constexpr int ARRIVALS = 32;
#else
constexpr int ARRIVALS = 1;
#endif

/** Releases half of the unit's stage and, if there is another unit, starts to load it there. */
template <class R>
__device__ __forceinline__ void refill(const AttendArgs &a, const R &ring, int which, bool more, const uint8_t *record,
                                       int32_t unit, int thread)
{
    __syncwarp();
    if (ring.team_warps(a) > 1) {
        uint32_t empty = ring.barrier(ring.stage, 2 + which);
        if (thread % (32 / ARRIVALS) == 0) barrier_arrive(empty);
        if (R::sends(thread)) barrier_wait(empty, ring.parity);
    }
    if (more && ring.sends(thread)) ring.fill(a, ring.stage, which, record, unit, thread);
}

/** A warp's state that is only needed between segments. It is in shared memory, because local variables would be
 *  spilled to device memory, which is busy with pages. */
struct Between {
    Cursor cursor;
    Segment after; /* the current segment */
};
static_assert(sizeof(Between) <= BETWEEN_BYTES);

/** The place of the next unit to load. */
struct UnitPlace {
    int32_t unit;         /* in its sequence */
    uint32_t table, head; /* the sequence's first entry in the block table; offset of the KV head's record in a page */

    __device__ __forceinline__ UnitPlace(const AttendArgs &a, int32_t unit_, int32_t b, int32_t h)
        : unit(unit_), table((uint32_t)b * (uint32_t)a.p.layer.max_pages), head(h * (uint32_t)a.record_bytes)
    {
    }
    /** Index in the block table. */
    __device__ __forceinline__ uint32_t entry(const AttendArgs &a) const
    {
        return table + (uint32_t)(unit >> (a.page_units - 1));
    }
    __device__ __forceinline__ int32_t page(const AttendArgs &a) const { return a.p.layer.block_table[entry(a)]; }
    /** A page that is not in the cache has the absent record: a branch here would cost up to 7 % at batch 1. */
    __device__ __forceinline__ const uint8_t *record(const AttendArgs &a, int32_t page) const
    {
        const uint8_t *there = a.p.layer.pages + ((uint64_t)(uint32_t)page * a.page_bytes + head);
        return (uint32_t)page < a.page_limit ? there : a.absent_record;
    }
};

/** A team's current and next segment, and how many of their units were loaded and done. Positions count units along the
 *  team's piece; the UnitPlace is that of unit `fetched`, the next to load. */
struct Lookahead : UnitPlace {
    Segment now;
    Between *between;
    int32_t position, now_end, after_end, fetched, working;

    /** By a whole warp; tell: as in Cursor::next. */
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
    /** Whether there is a unit to compute; at_work: its number in the sequence. */
    __device__ __forceinline__ bool works(const AttendArgs &) const { return position < now_end; }
    __device__ __forceinline__ int32_t at_work(const AttendArgs &) const { return working; }
    /** The unit is done. more: another one was loaded in its place. */
    __device__ __forceinline__ void step_on(const AttendArgs &a, bool more)
    {
        position++, working++;
        if (more) advance(a);
    }
    /** Whether there is a unit to load. */
    __device__ __forceinline__ bool more() const { return fetched < after_end; }
    /** The load of unit `fetched` was started. */
    __device__ __forceinline__ void advance(const AttendArgs &a)
    {
        fetched++, unit++;
        if (fetched == now_end) locate(a);
    }
};

/** Loads units until the ring is full or no further unit is known. */
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

/** A warp's shared memory beside the stages of its team: |Between|queries, if they are there|. */
template <class V> struct WarpSpace {
    static constexpr int BYTES = V::WARP_BYTES;
    uint8_t *at;

    __device__ __forceinline__ WarpSpace(const AttendArgs &a, int warp) : at(shared_bytes + a.at_teams + warp * BYTES)
    {
    }
    __device__ __forceinline__ Between *between() const { return reinterpret_cast<Between *>(at); }
    __device__ __forceinline__ uint2 *queries() const { return reinterpret_cast<uint2 *>(at + BETWEEN_BYTES); }
};

/** A warp's prepared rows: their arguments, and their queries. */
struct WarpRows {
    const RowArgs *args;
    const uint2 *queries;
    const float2 *wave; /* put_wave's */
};

/** The rows of a segment in the workspace; copies the queries to where they are read. */
template <class V>
__device__ __forceinline__ WarpRows find_rows_of_warp(const AttendArgs &a, const Segment &s, int first_block, int lane,
                                                      const WarpSpace<V> &space)
{
    WarpRows r = {a.row_args + s.index * a.tile_rows + 4 * first_block,
                  a.queries + ((int64_t)s.index * (a.tile_rows / 4) + first_block) * a.groups * 32,
                  a.wave.rows + ((int64_t)s.index * a.tile_rows + 4 * first_block) * WAVE_STEP * a.wave.steps};
    if constexpr (V::QUERY_IN_SHARED) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < V::BLOCKS * V::GROUPS; i++)
            if (V::UNIFORM || i < V::BLOCKS * a.groups) space.queries()[32 * i + lane] = r.queries[32 * i + lane];
        __syncwarp();
        r.queries = space.queries();
    }
    return r;
}

/** Initialises a lane's state of its rows, and its sums. */
template <class V>
__device__ __forceinline__ void start_rows(const AttendArgs &a, const WarpRows &given, int lane, LaneRows<V> &rows,
                                           Sums<V> &sums)
{
#pragma unroll
    for (int n = 0; n < V::BLOCKS; n++) {
        RowArgs row = given.args[4 * n + (lane & 3)];
        rows.scale[n] =
            a.p.softcap > 0 ? 1.0f : row.scale; /* with a cap, scores become logits before they are weighed */
        rows.start[n][0] = row.offset_hi;
        rows.start[n][1] = row.offset_lo;
        rows.offset[n] = 0.5f * (float)(row.offset_hi * QUERY_BASE + row.offset_lo); /* a byte is half a level */
        sums.bias[n] = a.p.softcap > 0 ? 0 : row.bias; /* with a cap it is in the scores already */
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

/** The first packed index of a unit of `tiles` token tiles. */
__device__ __forceinline__ int32_t first_token(const AttendArgs &a, int32_t unit, int tiles)
{
    const int32_t second = a.page_units - 1, page = unit >> second;
    return page * a.page_tokens + (unit & second) * tiles * TQ_TILE;
}

/** The units of the current segment. thread: index within the team. */
template <class V, class R, class Ahead>
__device__ __forceinline__ void attend_units(const AttendArgs &a, R &ring, Ahead &ahead, const WarpRows &given,
                                             int thread, Sums<V> &sums)
{
    constexpr int B = V::BLOCKS;
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
        int32_t next_page = more && ring.sends(thread) ? ahead.page(a) : 0; /* long before it is needed */
        float s[B][4 * V::TILES], unit_scale[B];
        if (has_wave<V>(a)) {
            const int32_t run_start = V::RUN > 1 ? unit & -a.page_units : unit;
            wave.sum(a, given.args, given.wave, unit, first_token(a, run_start, V::TILES), lane);
        }
        barrier_wait(ring.barrier(ring.stage, 0), ring.parity);
        StageView keys = ring.view(a, a.key);
        with_side_width<V>(a.key, [&](auto width) {
            /* AT_ONCE: groups that the loop over keys unrolls. With more than four rows more groups of 4-bit keys took attend_fused up to 7 %
             * longer at batch 1: their code does not fit the nearest instruction cache beside that of the values. At large batches, and in
             * attend_kernel, two at once took up to 3 % longer, and with four rows, whose code is short, up to 8 %. */
            constexpr int BITS = decltype(width)::value, AT_ONCE = R::ONE_STAGE && BITS == 4 && B > 1 ? 2 : V::GROUPS;
            score_unit<V, BITS, AT_ONCE>(a, keys, given.queries, rows, lane, s);
        });
        StageView values = ring.view(a, a.value);
        LaneScales<V::TILES> value_scales; /* read now: they share the stage half of the keys */
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

/** The warp's part of a segment into its slot. */
template <class V>
__device__ __forceinline__ void leave_part(const AttendArgs &a, const Segment &s, int32_t piece, int first_row,
                                           int lane, const Sums<V> &sums)
{
    int64_t slot = (int64_t)(piece + s.index) * a.tile_rows;
#pragma unroll
    for (int n = 0; n < V::BLOCKS; n++) {
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
            if (!V::UNIFORM && g >= a.groups) break;
#pragma unroll
            for (int r = 0; r < 4; r++) to[TQ_TILE * g + 8 * r] = sums.o[g][r][n];
        }
    }
}

} // namespace tq
#endif
