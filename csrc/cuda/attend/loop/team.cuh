/* The loop over units for many rows of one KV head (compute capability 9.0, four groups, whole pages of four tiles). A
 * team is four warps that share pages and rows, so that each code is unpacked once for 16 or 32 rows. Unpacked codes
 * stay in registers, as operand A of the four warps' WGMMA products. Operand B is in shared memory.
 *
 *   scores   (128 tokens x rows) = keys x queries, in bytes, two planes a query, as in loop/warp.cuh. Warp w has
 *            token tile w.
 *   weights  exp2(score + reference) times value scale, rounded to fp16, go to shared memory for all four warps. The
 *            barrier for that, the only one of a page without a wave, also tells them to move references: if a weight
 *            is too large for fp16 (rare), or if a value scale is 0, since its weight may be too large for float32.
 *   sums     (128 channels x rows) += values x weights, in fp16, which holds levels exactly. Warp w has channel group
 *            w.
 *
 * Lane 4 g + t owns row t of each four rows: the scores of tokens g + 8 r of its warp's tile, r = 0..3, and the sums of
 * channels g + 8 r of its warp's group. */
#ifndef TQ_CUDA_ATTEND_LOOP_TEAM_CUH
#define TQ_CUDA_ATTEND_LOOP_TEAM_CUH
#include "cuda/attend/loop/stages.cuh"
#include "cuda/attend/rows/logit.cuh"
#include "cuda/attend/rows/wave.cuh"
#include "cuda/device/warpgroup.cuh"

namespace tq
{

/** Factors and terms that turn a row's products into exponents. x: scale; y: term for the offset of the key codes;
 *  half[0].w: reference, as in loop/warp.cuh; half[1].w: factor of the variance term, in units of exponents. At 1 and 2
 *  bits, whose bytes have four sizes, half[i].y and .z are for the lane's tokens 2 i and 2 i + 1. */
struct RowScales {
    float4 half[2];
};
static_assert(sizeof(RowScales) == ROW_SCALES_BYTES);

/** Addresses of a team's own shared memory and of its queries. */
struct TeamSpace {
    uint8_t *at;
    uint32_t address, queries;
    int team;

    /** at_queries: offset of the queries in bytes, in the team's own shared memory (own_queries) or in the block's. */
    __device__ __forceinline__ TeamSpace(const AttendArgs &a, int team_, int bytes, int at_queries, bool own_queries)
        : at(shared_bytes + a.at_teams + team_ * bytes),
          address(shared_address(shared_bytes) + a.at_teams + team_ * bytes),
          queries((own_queries ? address : shared_address(shared_bytes)) + at_queries), team(team_)
    {
    }
    template <class V> __device__ __forceinline__ float *numbers() const
    {
        return reinterpret_cast<float *>(at + V::AT_NUMBERS);
    }
    template <class V> __device__ __forceinline__ RowScales *rows() const
    {
        return reinterpret_cast<RowScales *>(at + V::AT_SCALES);
    }
};

template <class V> struct ManyRowsSums {
    float o[2][V::ROWS / 2]; /* [half of the channel group], in WGMMA's layout */
    float weights[V::COLUMNS];
};

/** Returns the index in o[r / 2] of a lane's channel g + 8 r, r = 0..3, of its row c. */
__device__ __forceinline__ constexpr int sum_at(int r, int c) { return 4 * (c / 2) + 2 * (r & 1) + c % 2; }

__device__ __forceinline__ int row_of(int c, int lane) { return 4 * c + (lane & 3); }

/** Issues c[i] = keys x queries of a group, plus c[i] if `add`. c[i] is half first + i of each warp's token tile x both
 *  planes of each row. */
template <class V, int BITS>
__device__ __forceinline__ void queue_keys(const TileWords<BITS> &words, int first, const LevelTables &tables,
                                           uint64_t queries, bool add, int (&c)[V::HALVES][V::ROWS])
{
    constexpr bool TWICE = V::TWO_PRODUCTS && (BITS == 4 || BITS == 5);
    uint32_t x[V::HALVES][4], second[TWICE ? V::HALVES : 1][4];
#pragma unroll
    for (int i = 0; i < V::HALVES; i++)
        if constexpr (TWICE) unpack_half_twice<false>(words, first + i, tables, x[i], second[i]);
        else unpack_half<BITS, V::KEY_READING>(words, first + i, tables, x[i]);
    order_products();
#pragma unroll
    for (int i = 0; i < V::HALVES; i++) {
        queue_product<BITS != 3 && !TWICE, 2 * V::ROWS>(c[i], x[i], queries, add);
        if constexpr (TWICE) queue_product<false, 2 * V::ROWS>(c[i], second[i], queries, true);
    }
    end_batch();
    wait_for_batches<V::BATCHES_LEFT>();
}

/** Sets c to keys x queries, summed over all groups, for HALVES halves of each warp's token tile. c[i][4 n + 2 j] and
 *  the next number are the high and the low plane of the lane's token 2 (first + i) + j for its row n. */
template <class V>
__device__ __forceinline__ void multiply_keys(const AttendArgs &a, const uint8_t *codes, uint64_t queries, int warp,
                                              int first, int (&c)[V::HALVES][V::ROWS])
{
    if constexpr (V::ONE_WIDTH) {
        codes += warp * V::GROUPS * 128 * V::BITS;
        TileWords<V::BITS> words = load_tile<V::BITS>(codes);
#pragma unroll
        for (int g = 0; g < V::GROUPS; g++) {
            TileWords<V::BITS> now = words;
            if (g + 1 < V::GROUPS) words = load_tile<V::BITS>(codes + (g + 1) * 128 * V::BITS);
            queue_keys<V>(now, first, a.tables, queries + g * V::QUERY_STEP / 16, g > 0, c);
        }
    } else {
#pragma unroll
        for (int i = 0; i < V::HALVES * V::ROWS; i++) c[i / V::ROWS][i % V::ROWS] = 0;
#pragma unroll 1
        for (int g = 0; g < V::GROUPS; g++) {
            auto queue = [&](auto width) {
                constexpr int BITS = decltype(width)::value;
                queue_keys<V>(load_tile<BITS>(codes + a.key.offset[g] + warp * a.key.tile_bytes), first, a.tables,
                              queries + g * V::QUERY_STEP / 16, true, c);
            };
            with_width(a.key.width[g], queue);
        }
    }
    wait_for_batches<0>();
#pragma unroll
    for (int i = 0; i < V::HALVES; i++) take_results(c[i]);
}

/** Whether the key bytes of the lane's token r are its codes * 2^(bits r) (Reading::ROW_FACTOR). */
template <class V> constexpr bool SMALLER_BYTES = V::ONE_WIDTH && V::BITS <= 2;

/** Computes a page's scores, times scale_left: s[c][r] * k[r] for the lane's token r and its row c. */
template <class V>
__device__ __forceinline__ void score_page(const AttendArgs &a, StageView keys, const TeamSpace &space, int warp,
                                           int lane, float (&s)[V::COLUMNS][4], float (&k)[4])
{
    constexpr bool SMALLER = SMALLER_BYTES<V>;
    uint64_t queries = describe_b<2 * V::ROWS>(space.queries);
    LaneScales<1> scales;
    scales.load(keys, warp, lane);
#pragma unroll
    for (int first = 0; first < 2; first += V::HALVES) {
        int c[V::HALVES][V::ROWS];
        multiply_keys<V>(a, keys.codes + 4 * lane, queries, warp, first, c);
#pragma unroll
        for (int n = 0; n < V::COLUMNS; n++) {
#pragma unroll
            for (int i = 0; i < V::HALVES; i++) {
                float4 f = space.rows<V>()[row_of(n, lane)].half[SMALLER ? first + i : 0];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int *planes = &c[i][4 * n + 2 * j];
                    float x = (float)(planes[0] * QUERY_BASE + planes[1]);
                    s[n][2 * (first + i) + j] = V::BITS == 3 ? x * f.x : fmaf(x, f.x, SMALLER && j == 1 ? f.z : f.y);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) k[r] = SMALLER ? scales[r] * (1.0f / (1 << V::BITS * r)) : scales[r];
}

/** Subtracts the variance term from the scores. */
template <class V>
__device__ __forceinline__ void subtract_variance(const TeamSpace &space, int lane, float (&s)[V::COLUMNS][4],
                                                  const float (&k)[4])
{
    float factor[4]; /* the key scale; with SMALLER_BYTES k[r] is that divided by 2^(bits r) */
#pragma unroll
    for (int r = 0; r < 4; r++) factor[r] = SMALLER_BYTES<V> ? k[r] * (1 << 2 * V::BITS * r) : k[r];
#pragma unroll
    for (int c = 0; c < V::COLUMNS; c++) {
        const float variance = space.rows<V>()[row_of(c, lane)].half[1].w;
#pragma unroll
        for (int r = 0; r < 4; r++) s[c][r] = fmaf(-variance, factor[r], s[c][r]);
    }
}

/** Computes the wave's terms of a page. Each warp stores those of a fourth of the rows. wave: from put_wave. */
template <class V>
__device__ __forceinline__ void sum_wave_of_page(const AttendArgs &a, const RowArgs *rows, const float2 *wave,
                                                 int32_t page, int warp, int lane)
{
    constexpr int ROW_QUADS = V::COLUMNS / V::TEAM_WARPS;
    auto factor_of = [&](int quad, int i) {
        const RowArgs &row = rows[row_of(quad, i)];
        return a.p.softcap > 0 ? row.wave : row.wave * row.scale; /* scores are already multiplied by scale_left */
    };
    auto put = [&](int n, const float (&terms)[4 *V::TILES]) {
        put_terms<V::TILES>(a, n, terms, factor_of(warp + n * V::TEAM_WARPS, lane), lane);
    };
    sum_wave<ROW_QUADS, V::TILES>(a, wave, page * a.page_tokens, warp, V::TEAM_WARPS, lane, put);
}

/** Multiplies scores by key scales, so that k becomes 1, and adds the wave's terms. The whole team calls it. */
template <class V>
__device__ __forceinline__ void add_wave_of_page(const AttendArgs &a, int team, int warp, int lane,
                                                 float (&s)[V::COLUMNS][4], float (&k)[4])
{
    meet(team);
#pragma unroll
    for (int c = 0; c < V::COLUMNS; c++) {
        const WaveSpace space(a, threadIdx.x / 32 - warp + c % V::TEAM_WARPS); /* of the warp that has these rows */
#pragma unroll
        for (int r = 0; r < 4; r++) s[c][r] *= k[r];
        add_terms(space.terms[(c / V::TEAM_WARPS * V::TILES + warp) * 32 + lane], s[c]);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) k[r] = 1;
}

/** Hides the tokens of a page that a row does not see: their scores become -inf. first: packed index of the first token
 *  of the warp's tile; end: tokens from it on are hidden from all rows. */
template <class V>
__device__ __forceinline__ void hide_tokens_of_page(const RowArgs *rows, int32_t first, int32_t end, int lane,
                                                    float (&s)[V::COLUMNS][4], float (&k)[4],
                                                    LaneScales<1> &value_scales)
{
    uint32_t seen = 0;
#pragma unroll
    for (int c = 0; c < V::COLUMNS; c++) {
        const Range visible = seen_by(rows[row_of(c, lane)], end);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            int32_t token = first + 8 * r + lane / 4;
            bool sees = token >= visible.lo && token < visible.hi;
            seen |= sees << r;
            s[c][r] = sees ? s[c][r] * k[r] : -INFINITY;
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        k[r] = 1; /* -inf times a key scale of 0 would be NaN */
        if (!(seen >> r & 1)) value_scales.clear(r);
    }
}

template <class V>
__device__ __forceinline__ void cap_page(const AttendArgs &a, const RowArgs *rows, int lane, float (&s)[V::COLUMNS][4],
                                         float (&k)[4])
{
    const SoftCap cap(a);
#pragma unroll
    for (int c = 0; c < V::COLUMNS; c++) {
        const RowArgs &row = rows[row_of(c, lane)];
        float scale = row.scale * cap.inverse, bias = row.bias * cap.inverse;
#pragma unroll
        for (int r = 0; r < 4; r++) s[c][r] = cap.logit(s[c][r] * k[r], scale, bias);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) k[r] = 1;
}

/** Turns scores into weights. Writes their products with value scales, as fp16, to `to`, the lane's place in a buffer,
 *  and the sums of the weights to `weights`. Returns true if a product exceeds 2^HEADROOM: that is too large,
 *  because they are stored as fp16. */
template <class V>
__device__ __forceinline__ bool weigh_page(const TeamSpace &space, const LaneScales<1> &value_scales,
                                           const float (&s)[V::COLUMNS][4], const float (&k)[4], int lane, uint8_t *to,
                                           float (&weights)[V::COLUMNS])
{
    float v[4], reference[V::COLUMNS];
#pragma unroll
    for (int r = 0; r < 4; r++) v[r] = value_scales[r];
#pragma unroll
    for (int c = 0; c < V::COLUMNS; c++)
        reference[c] = space.rows<V>()[row_of(c, lane)].half[0].w; /* now, so that no load waits for a store */
    __half2 top = __float2half2_rn(0);
#pragma unroll
    for (int c = 0; c < V::COLUMNS; c++) {
        float w[4];
#pragma unroll
        for (int r = 0; r < 4; r++) w[r] = exp2_fast(fmaf(s[c][r], k[r], reference[c]));
        weights[c] = (w[0] + w[1]) + (w[2] + w[3]);
        __half2 even = __floats2half2_rn(w[0] * v[0], w[2] * v[2]), odd = __floats2half2_rn(w[1] * v[1], w[3] * v[3]);
        top = __hmax2(top, __hmax2(even, odd));
        uint8_t *piece = to + c / 2 * PIECE_BYTES + c % 2 * 16;
        *reinterpret_cast<__half2 *>(piece) = even;
        *reinterpret_cast<__half2 *>(piece + STEP_BYTES<V::ROWS> / 2) = odd;
    }
    float most = fmaxf(__low2float(top), __high2float(top));
    return most > (float)(1 << (int)HEADROOM);
}

/** Moves the rows' references so that weights times value scales are at most about 1. The whole team calls it. */
template <class V>
__device__ __forceinline__ void raise_references(const TeamSpace &space, const LaneScales<1> &value_scales,
                                                 const float (&s)[V::COLUMNS][4], const float (&k)[4], int warp,
                                                 int lane, ManyRowsSums<V> &sums)
{
    float *tops = space.numbers<V>(), v[4], before[V::COLUMNS];
#pragma unroll
    for (int r = 0; r < 4; r++) v[r] = __log2f(fmaxf(value_scales[r], 0x1p-24f)); /* the least fp16 number but 0 */
#pragma unroll
    for (int c = 0; c < V::COLUMNS; c++) {
        float top = -INFINITY;
        before[c] = space.rows<V>()[row_of(c, lane)].half[0].w;
#pragma unroll
        for (int r = 0; r < 4; r++) top = fmaxf(top, fmaf(s[c][r], k[r], v[r]));
#pragma unroll
        for (int i = 4; i < 32; i *= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, i));
        if (lane < 4) tops[V::ROWS * warp + row_of(c, lane)] = top;
    }
    meet(space.team);
#pragma unroll
    for (int c = 0; c < V::COLUMNS; c++) {
        const float *row = tops + row_of(c, lane);
        float largest = fmaxf(fmaxf(row[0], row[V::ROWS]), fmaxf(row[2 * V::ROWS], row[3 * V::ROWS]));
        float reference = largest == -INFINITY ? before[c] : fminf(before[c], -largest);
        float factor = exp2_fast(reference - before[c]);
        if (warp == 0 && lane < 4) space.rows<V>()[row_of(c, lane)].half[0].w = reference;
        sums.weights[c] *= factor;
#pragma unroll
        for (int r = 0; r < 4; r++) sums.o[r / 2][sum_at(r, c)] *= factor;
    }
    meet(space.team);
}

/** Issues a token tile's values x weights. weights: of its first 16 tokens; x: value fragments, [half][step of 16]. */
template <class V>
__device__ __forceinline__ void queue_values(const uint32_t (&x)[2][2][4], uint64_t weights, ManyRowsSums<V> &sums)
{
    order_products();
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            queue_product<V::ROWS>(sums.o[half], x[half][j], weights + j * V::WEIGHT_STEP / 16, true);
    end_batch();
    wait_for_batches<V::BATCHES_LEFT>();
}

/** Adds the page's weighted values to the sums. */
template <class V>
__device__ __forceinline__ void add_values_of_page(const AttendArgs &a, StageView values, const TeamSpace &space,
                                                   uint32_t weights_at, int warp, int lane, ManyRowsSums<V> &sums)
{
    const uint8_t *codes = values.codes + 4 * lane;
    uint64_t weights = describe_b<V::ROWS>(space.address + weights_at);
    uint32_t x[2][2][4];
    if constexpr (V::ONE_WIDTH) {
        constexpr int BITS = V::BITS;
        codes += warp * 128 * BITS;
        TileWords<BITS> words = load_tile<BITS>(codes);
#pragma unroll
        for (int tile = 0; tile < V::TILES; tile++) {
            TileWords<BITS> now = words;
            if (tile + 1 < V::TILES) words = load_tile<BITS>(codes + (tile + 1) * V::GROUPS * 128 * BITS);
#pragma unroll
            for (int half = 0; half < 2; half++) unpack_half_exactly(now, half, a.tables, x[half]);
            queue_values<V>(x, weights + 2 * tile * V::WEIGHT_STEP / 16, sums);
        }
    } else {
        codes += a.value.offset[warp];
#pragma unroll 1
        for (int tile = 0; tile < V::TILES; tile++) {
#pragma unroll
            for (int i = 0; i < 16; i++) x[i / 8][i / 4 % 2][i % 4] = 0; /* a group of 0 bits */
            auto unpack = [&](auto width) {
                auto words = load_tile<decltype(width)::value>(codes + tile * a.value.tile_bytes);
#pragma unroll
                for (int half = 0; half < 2; half++) unpack_half_exactly(words, half, a.tables, x[half]);
            };
            with_width(a.value.width[warp], unpack);
            queue_values<V>(x, weights + 2 * tile * V::WEIGHT_STEP / 16, sums);
        }
    }
    wait_for_batches<0>();
#pragma unroll
    for (int half = 0; half < 2; half++) take_results(sums.o[half]);
}

/** Initialises a team's state of its rows, and its sums, and synchronises the team. */
template <class V>
__device__ __forceinline__ void start_rows_of_team(const AttendArgs &a, const RowArgs *rows, const TeamSpace &space,
                                                   int thread, ManyRowsSums<V> &sums)
{
    if (thread < V::ROWS) {
        RowArgs row = rows[thread];
        float byte = V::ONE_WIDTH && V::BITS <= 2 ? 0.5f : 1.0f; /* levels per byte unit */
        float scale = scale_left(a, row);
        float offset = scale * byte * (float)(row.offset_hi * QUERY_BASE + row.offset_lo);
        constexpr float TIMES = 1 << V::BITS;
        space.rows<V>()[thread] = {
            {{scale, offset, TIMES * offset, NO_REFERENCE},
             {scale, TIMES * TIMES * offset, TIMES * TIMES * TIMES * offset, scale * row.variance}}};
    }
#pragma unroll
    for (int c = 0; c < V::COLUMNS; c++) sums.weights[c] = 0;
#pragma unroll
    for (int i = 0; i < V::ROWS; i++) sums.o[i % 2][i / 2] = 0;
    meet(space.team);
}

/** Attends to the units of the current segment. wave: from put_wave; warp: index in the team, uniform over lanes. */
template <class V, class R, class Ahead>
__device__ __forceinline__ void attend_units_of_team(const AttendArgs &a, R &ring, Ahead &ahead, const RowArgs *rows,
                                                     const float2 *wave, const TeamSpace &space, int warp, int lane,
                                                     ManyRowsSums<V> &sums)
{
    int thread = 32 * warp + lane, g = lane / 4;
    start_rows_of_team<V>(a, rows, space, thread, sums);
    Range whole = whole_units(a, ahead.common());
    bool capped = a.p.softcap > 0, has_variance = a.wave.variance > 0;
    constexpr int32_t FIRST = 2; /* buffer 0, for the first page: rows have no references yet */
    int32_t buffer = FIRST;
    /* where the lane's weights are in a buffer, in bytes */
    int place = (2 * warp + g / 4) * V::WEIGHT_STEP + 32 * (lane & 3) + 4 * (g % 4);
#pragma unroll 1
    while (ahead.works(a)) {
        bool more = ahead.more();
        int32_t page = ahead.at_work(a);
        int32_t next_page = more && warp == 0 ? ahead.page(a) : 0; /* loaded long before it is needed */
        float s[V::COLUMNS][4], k[4], weights[V::COLUMNS];
        if (has_wave<V>(a)) sum_wave_of_page<V>(a, rows, wave, page, warp, lane);
        barrier_wait(ring.barrier(ring.stage, 0), ring.parity);
        score_page<V>(a, ring.view(a, a.key), space, warp, lane, s, k);
        StageView values = ring.view(a, a.value);
        LaneScales<1> value_scales; /* read now: they are in the keys' half of the stage */
        value_scales.load(values, warp, lane);
        const uint8_t *next_record = ahead.record(a, next_page);
        refill(a, ring, 0, more, next_record, ahead.unit, thread);

        /* from lane 0, so that all lanes agree, whatever a page holds */
        const bool absent = __shfl_sync(ALL_LANES, value_scales.absent(), 0);
        bool part = page < whole.lo || page >= whole.hi || absent;
        if (part || capped || has_variance || has_wave<V>(a)) { /* one branch around all of it */
            if (has_variance) subtract_variance<V>(space, lane, s, k);
            if (has_wave<V>(a)) add_wave_of_page<V>(a, space.team, warp, lane, s, k);
            if (part)
                hide_tokens_of_page<V>(rows, page * a.page_tokens + TQ_TILE * warp,
                                       absent ? 0 : (page + 1) * a.page_tokens, lane, s, k, value_scales);
            if (capped) cap_page<V>(a, rows, lane, s, k);
        }

        /* so that the compiler knows it is the same for all lanes */
        uint32_t weights_at = __shfl_sync(ALL_LANES, buffer == 1 ? V::WEIGHT_BYTES : 0, 0);
        bool above =
            buffer == FIRST || weigh_page<V>(space, value_scales, s, k, lane, space.at + weights_at + place, weights);
        above |= value_scales.any_zero(); /* infinity times 0 is NaN */
        shared_writes_before_copies();
        if (meet_any(space.team, above)) {
            raise_references<V>(space, value_scales, s, k, warp, lane, sums);
            weigh_page<V>(space, value_scales, s, k, lane, space.at + weights_at + place, weights);
            shared_writes_before_copies();
            meet(space.team);
        }
#pragma unroll
        for (int c = 0; c < V::COLUMNS; c++) sums.weights[c] += weights[c];
        barrier_wait(ring.barrier(ring.stage, 1), ring.parity);
        add_values_of_page<V>(a, values, space, weights_at, warp, lane, sums);
        refill(a, ring, 1, more, next_record, ahead.unit, thread);
        ring.advance(a);
        buffer = buffer == 1 ? 0 : 1;
        ahead.step_on(a, more);
    }
}

/** Writes each warp's sums of weights to the team's numbers (row r: r, ROWS + r, ..), and synchronises the team. */
template <class V>
__device__ __forceinline__ void add_weights_of_team(const TeamSpace &space, int warp, int lane,
                                                    const ManyRowsSums<V> &sums)
{
#pragma unroll
    for (int c = 0; c < V::COLUMNS; c++) {
        float weights = sums.weights[c];
#pragma unroll
        for (int k = 4; k < 32; k *= 2) weights += __shfl_xor_sync(ALL_LANES, weights, k);
        if (lane < 4) space.numbers<V>()[V::ROWS * warp + row_of(c, lane)] = weights;
    }
    meet(space.team);
}

/** Writes the team's sums. to(row) returns the address of the row's first channel. */
template <class V, class To>
__device__ __forceinline__ void store_sums_of_team(int warp, int lane, const ManyRowsSums<V> &sums, To to)
{
#pragma unroll
    for (int c = 0; c < V::COLUMNS; c++) {
        float *row = to(row_of(c, lane)) + TQ_TILE * warp + lane / 4;
#pragma unroll
        for (int r = 0; r < 4; r++) row[8 * r] = sums.o[r / 2][sum_at(r, c)];
    }
}

/** Returns the maximum and the sum of a row's part, as in RowTotals. */
template <class V>
__device__ __forceinline__ float2 total_of_team(const AttendArgs &a, const RowArgs *rows, const TeamSpace &space,
                                                int row)
{
    const float *x = space.numbers<V>() + row;
    float bias = a.p.softcap > 0 ? 0 : rows[row].bias; /* bias_left, read only if there is no cap */
    float reference = space.rows<V>()[row].half[0].w;
    return make_float2(reference == NO_REFERENCE ? -INFINITY : bias - reference,
                       (x[0] + x[V::ROWS]) + (x[2 * V::ROWS] + x[3 * V::ROWS]));
}

} // namespace tq
#endif
