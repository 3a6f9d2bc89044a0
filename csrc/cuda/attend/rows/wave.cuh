/* The wave's terms of the scores of packed tokens: <q, wave at the token's position> (turboquant.h, "Keys of a plan
 * with a wave or a metric"). They depend on the query and the position alone, so a warp computes them for a unit while
 * the unit's codes are still being loaded, and adds them to the scores later.
 *
 * A unit's tokens are mirrored around its middle: two of them are u and -u positions away from it, u = 1/2, 3/2 .. Let
 * x and y be the row's coefficients of a pair's cosine and sine at position 0. Turned to the middle, by t, they are
 *     X = x cos t + y sin t,  Y = y cos t - x sin t
 *     terms at +-u = sum over pairs X cos(u phi) +- sum over pairs Y sin(u phi)
 * The cosines and sines of u phi are a table that all units and rows share, operand A of two matrix products; X and Y
 * of four rows are operand B. Each number is the sum of two fp16 halves, a high and a low one. B has both halves of a
 * row, in separate columns, so two products, with the high and with the low half of the table, give 22 bits.
 *
 * Pairs that turn little within a unit are slow. The sum over a step (16 pairs) of slow pairs is nearly a polynomial of
 * u. It is computed at eight nodes only, whatever the number of tokens. One more product interpolates the sums of all
 * slow steps.
 *
 * Pairs 4 t .. 4 t + 3 of a step are at k = 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of its products, so that a lane's pairs
 * are neighbours. */
#ifndef TQ_CUDA_ATTEND_ROWS_WAVE_CUH
#define TQ_CUDA_ATTEND_ROWS_WAVE_CUH
#include "cuda/attend/rows/sequence.cuh"
#include "cuda/device/wave.cuh"

namespace tq
{

__device__ __forceinline__ KeyMoments key_moments(const AttendArgs &a)
{
    return {a.p.layer.key.turns, a.p.layer.key.moments, a.p.layer.key.stride_head,
            a.wave.pairs,        a.wave.metric,         a.head_dim};
}

/** Whether there is a wave, in a kernel that supports it. */
template <class V> __device__ __forceinline__ bool has_wave(const AttendArgs &a) { return V::WAVE && a.wave.steps; }

/** Two numbers rounded to fp16, and the remainders. */
struct SplitPair {
    uint32_t high, low;

    __device__ __forceinline__ SplitPair(float x, float y)
    {
        const __half2 h = __floats2half2_rn(x, y);
        const float2 back = __half22float2(h);
        const __half2 l = __floats2half2_rn(x - back.x, y - back.y);
        high = *reinterpret_cast<const uint32_t *>(&h);
        low = *reinterpret_cast<const uint32_t *>(&l);
    }
};

/** Returns the phase by which a pair turns in twice / 2 positions. */
__device__ __forceinline__ uint32_t phase_by_halves(int32_t increment, int32_t twice)
{
    return (uint32_t)((int64_t)increment * twice >> 1);
}

/** Returns cosine and sine of a phase, within 1e-6: that changes a logit by less than 1e-3 at an amplitude of 1,000. */
__device__ __forceinline__ float2 turn_fast(uint32_t phase)
{
    const float x = (float)(int32_t)phase * 1.46291808e-9f; /* 2 pi / 2^32 */
    return make_float2(__cosf(x), __sinf(x));
}

/** The wave's shared memory: |table|polynomials|increments|slow| of the block, then |turns|terms| of each warp. */
struct WaveSpace {
    /* [step][tile of 16 positions u][cosines high, low, sines high, low][32 lanes]. A slow step begins with [cosines,
     * sines][32 lanes] at the nodes, high halves in rows 0..7 and low ones in rows 8..15, and has nothing else. */
    uint4 *table;
    uint4 *polynomials;  /* [tile of 16 positions u][even, odd][32 lanes]: high halves at the nodes, then low ones */
    int32_t *increments; /* [16 steps] */
    int32_t *slow;       /* [steps] */
    float2 *turns;       /* [16 steps]: each pair's cosine and sine in the middle of the unit */
    float4 *terms;       /* [quads of rows][token tile][32 lanes]: of the lane's four tokens, from put_terms */

    __device__ __forceinline__ WaveSpace(const AttendArgs &a, int warp)
    {
        uint8_t *of_warp = shared_bytes + a.wave.at_warps + warp * a.wave.warp_bytes;
        table = reinterpret_cast<uint4 *>(shared_bytes + a.wave.at_table);
        polynomials = reinterpret_cast<uint4 *>(shared_bytes + a.wave.at_polynomials);
        increments = reinterpret_cast<int32_t *>(shared_bytes + a.wave.at_increments);
        slow = increments + WAVE_STEP * a.wave.steps;
        turns = reinterpret_cast<float2 *>(of_warp);
        terms = reinterpret_cast<float4 *>(of_warp + WAVE_STEP * a.wave.steps * sizeof(float2));
    }
};

/* ---- slow pairs ---- */

constexpr int WAVE_NODES = 8;

/** The positive Chebyshev nodes cos(pi (2 n + 1) / 32), in units of the distance from a unit's middle to its last
 *  token. */
constexpr double wave_node(int n)
{
    constexpr double AT[WAVE_NODES] = {0.99518472667219688624, 0.95694033573220886494, 0.88192126434835502971,
                                       0.77301045336273696081, 0.63439328416364549822, 0.47139673682599764856,
                                       0.29028467725446236764, 0.09801714032956060199};
    return AT[n];
}

/** A pair is slow if it turns by at most this many radians from a unit's middle to its last token: polynomials of
 *  degree 15 are then off by 5^16 / (2^15 16!) = 2e-7 of an amplitude. */
constexpr double SLOW_RADIANS = 5;

/** Returns a node's Lagrange polynomial at x: the even one, 1 at +-node and 0 at the others, or the odd one, 1 at the
 *  node and -1 at its mirror image. */
constexpr double wave_polynomial(int node, bool odd, double x)
{
    const double at = wave_node(node);
    double product = odd ? x / at : 1;
    for (int m = 0; m < WAVE_NODES; m++)
        if (m != node) product *= (x * x - wave_node(m) * wave_node(m)) / (at * at - wave_node(m) * wave_node(m));
    return product;
}

/** The bits of a number rounded to fp16, and the remainder; for numbers below 2. */
struct ConstantHalf {
    uint32_t bits = 0;
    double rest = 0;

    constexpr explicit ConstantHalf(double x)
    {
        double size = x < 0 ? -x : x, unit = 1.0 / 1024;
        uint32_t exponent = 15;
        for (; exponent > 1 && size < 1024 * unit; exponent--) unit /= 2;
        uint32_t units = (uint32_t)(size / unit + 0.5);
        rest = x < 0 ? x + units * unit : x - units * unit;
        bits = (x < 0 ? 0x8000u : 0u) + (units < 1024 ? units : (exponent << 10) + units - 1024);
    }
};

/** The polynomials at all positions as operands A, for units of 1, 2 and 4 token tiles in turn:
 *  [tile of 16 positions u][even, odd][lane][rows g and g + 8, high halves and then low ones]. */
struct WavePolynomials {
    alignas(16) uint32_t words[1 + 2 + 4][2][32][4] = {};
    double nodes[WAVE_NODES] = {};

    constexpr WavePolynomials()
    {
        for (int n = 0; n < WAVE_NODES; n++) nodes[n] = wave_node(n);
        for (int tiles = 1; tiles <= 4; tiles *= 2)
            for (int tile = 0; tile < tiles; tile++)
                for (int odd = 0; odd < 2; odd++)
                    for (int i = 0; i < 32 * 2 * 2; i++) {
                        const int lane = i / 4, row = i / 2 % 2, node = 2 * (lane % 4) + i % 2;
                        const double u = 16 * tile + 8 * row + lane / 4 + 0.5;
                        const ConstantHalf high(wave_polynomial(node, odd, u / ((TQ_TILE * tiles - 1) / 2.0)));
                        uint32_t *to = words[tiles - 1 + tile][odd][lane];
                        to[row] |= high.bits << 16 * (i % 2);
                        to[2 + row] |= ConstantHalf(high.rest).bits << 16 * (i % 2);
                    }
    }
};
static __device__ const WavePolynomials wave_polynomials;

/** Constants of a block's part of the wave, for units of TILES token tiles. Read while the previous kernel may run. */
template <int TILES> struct WaveConstants {
    double node; /* of the lane's row, in positions from a unit's middle */

    WaveConstants() = default;
    /** Starts to copy the polynomials to shared memory. */
    __device__ __forceinline__ WaveConstants(const AttendArgs &a, int lane)
    {
        uint4 *to = WaveSpace(a, 0).polynomials;
        const uint4 *from = reinterpret_cast<const uint4 *>(wave_polynomials.words[TILES - 1]);
        for (int i = threadIdx.x; i < 2 * TILES * 32; i += blockDim.x) copy_16(to + i, from + i);
        node = wave_polynomials.nodes[lane / 4] * ((TQ_TILE * TILES - 1) / 2.0);
    }
};

/** Writes a quarter of a lane's words of a tile and step: cosines and sines of two pairs at position lane / 4 +
 *  8 (i % 2), of the lane's first two pairs for i < 2, otherwise of its last two. If the step is slow, writes half of
 *  its words: of the lane's pairs 2 i and 2 i + 1, at its node. */
__device__ __forceinline__ void fill_quarter(const int32_t (&increments)[4], bool slow, int tile, int i, double node,
                                             uint4 *to, int lane)
{
    constexpr int PART = 32 * 4; /* words of cosines high, cosines low, .. */
    uint32_t *words = reinterpret_cast<uint32_t *>(to + lane);
    const bool last = slow ? i : i / 2;
    const int32_t first = last ? increments[2] : increments[0], second = last ? increments[3] : increments[1],
                  twice = 2 * (16 * tile + 8 * (i % 2) + lane / 4) + 1;
    const float2 x = turn(slow ? (uint32_t)(int64_t)(first * node) : phase_by_halves(first, twice)),
                 y = turn(slow ? (uint32_t)(int64_t)(second * node) : phase_by_halves(second, twice));
    const SplitPair cosines(x.x, y.x), sines(x.y, y.y);
    words[slow ? 2 * i : i] = cosines.high;
    words[slow ? 2 * i + 1 : PART + i] = cosines.low;
    words[slow ? PART + 2 * i : 2 * PART + i] = sines.high;
    words[slow ? PART + 2 * i + 1 : 3 * PART + i] = sines.low;
}

/** Increments of the lane's pairs lane, lane + 32 .. Those of padding pairs are 0, so they are slow. */
template <int PAIRS> struct LaneIncrements {
    int32_t of[PAIRS];

    LaneIncrements() = default;
    __device__ __forceinline__ LaneIncrements(const AttendArgs &a, int lane)
    {
#pragma unroll
        for (int k = 0; k < PAIRS; k++)
            of[k] = lane + 32 * k < a.wave.pairs ? a.p.layer.key.turns[3 * (lane + 32 * k) + 2] : 0;
    }
    /** Returns the increment of pair i; lanes may ask for different pairs. A whole warp calls it. */
    __device__ __forceinline__ int32_t operator[](int i) const
    {
        int32_t x = 0;
#pragma unroll
        for (int k = 0; k < PAIRS; k++) {
            const int32_t y = __shfl_sync(ALL_LANES, of[k], i % 32);
            x = i / 32 == k ? y : x;
        }
        return x;
    }
};

/** Fills the block's part of the wave. All threads of the block call it, and then __syncthreads. */
template <int TILES, int PAIRS>
__device__ __forceinline__ void fill_wave_table(const AttendArgs &a, const WaveConstants<TILES> &constants,
                                                const LaneIncrements<PAIRS> &of_lanes)
{
    constexpr double RADIUS = (TQ_TILE * TILES - 1) / 2.0;
    constexpr float SLOWEST = (float)(SLOW_RADIANS / RADIUS * (4294967296.0 / 6.283185307179586));
    const WaveSpace space(a, 0);
    const int steps = a.wave.steps, lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (warp == 0)
#pragma unroll
        for (int k = 0; k < PAIRS; k++)
            if (lane + 32 * k < WAVE_STEP * steps) space.increments[lane + 32 * k] = of_lanes.of[k];
    int piece = warp; /* a warp has every `warps`-th piece of all steps */
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        int32_t increments[4];
        bool slow = true;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            increments[j] = of_lanes[WAVE_STEP * step + 4 * (lane % 4) + j];
            slow = slow && fabsf((float)increments[j]) <= SLOWEST;
        }
        slow = __all_sync(ALL_LANES, slow);
        if (warp == 0 && lane == 0) space.slow[step] = slow;
        const int pieces = slow ? 2 : 4 * TILES;
        uint4 *to = space.table + step * TILES * 4 * 32;
#pragma unroll 1
        for (; piece < pieces; piece += warps)
            fill_quarter(increments, slow, piece / 4, piece % 4, constants.node, to + piece / 4 * 4 * 32, lane);
        piece -= pieces;
    }
    wait_for_copies();
}

/** Returns a lane's part of operand B. x, y: a row's numbers of two pairs. Even columns have high halves, odd ones low
 *  halves. Of the four pairs that both columns' lanes need, the lane of the even column has computed the first two, and
 *  that of the odd one the others. */
__device__ __forceinline__ uint2 second_factor(float x, float y, bool odd)
{
    const SplitPair own(x, y);
    const uint32_t other = __shfl_xor_sync(ALL_LANES, odd ? own.high : own.low, 4);
    return odd ? make_uint2(other, own.low) : make_uint2(own.high, other);
}

/** A lane's operands B of a step, for cosines and for sines. row, turn: two pairs' coefficients and turns. */
struct StepFactors {
    uint2 cosines, sines;

    __device__ __forceinline__ StepFactors(float4 row, float4 turn, bool odd)
        : cosines(second_factor(fmaf(row.x, turn.x, row.y * turn.y), fmaf(row.z, turn.z, row.w * turn.w), odd)),
          sines(second_factor(fmaf(row.y, turn.x, -row.x * turn.y), fmaf(row.w, turn.z, -row.z * turn.w), odd))
    {
    }
};

/** Sums over pairs, of cosines and of sines: terms at +u and -u are their sum and difference. */
template <int TILES> struct WaveSums {
    float cosines[TILES][4] = {}, sines[TILES][4] = {};
    float cosines_at_nodes[4] = {}, sines_at_nodes[4] = {};

    /** Adds a step's products. table: the lane's entries of the step. */
    __device__ __forceinline__ void add(const StepFactors &f, bool slow, const uint4 *table)
    {
        if (slow) {
            mma_halves(cosines_at_nodes, table[0], f.cosines);
            mma_halves(sines_at_nodes, table[32], f.sines);
            return;
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const uint4 *at = table + tile * 4 * 32;
            mma_halves(cosines[tile], at[0], f.cosines);
            mma_halves(sines[tile], at[64], f.sines);
            mma_halves(cosines[tile], at[32], f.cosines);
            mma_halves(sines[tile], at[96], f.sines);
        }
    }

    /** Interpolates the sums at the nodes and adds the results. Lane 4 g + t has the sums of row t at node g. */
    __device__ __forceinline__ void interpolate(const uint4 *polynomials, bool odd, int lane)
    {
        const float *c = cosines_at_nodes, *s = sines_at_nodes;
        const float of_cosines = (c[0] + c[1]) + (c[2] + c[3]), of_sines = (s[0] + s[1]) + (s[2] + s[3]);
        const int from = 8 * (lane & 3) + lane / 8; /* the lane with the first of this lane's two nodes */
        const SplitPair x(__shfl_sync(ALL_LANES, of_cosines, from), __shfl_sync(ALL_LANES, of_cosines, from + 4)),
            y(__shfl_sync(ALL_LANES, of_sines, from), __shfl_sync(ALL_LANES, of_sines, from + 4));
        const uint32_t even_factor = odd ? x.low : x.high, odd_factor = odd ? y.low : y.high;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            mma_halves(cosines[tile], polynomials[tile * 2 * 32], make_uint2(even_factor, even_factor));
            mma_halves(sines[tile], polynomials[(tile * 2 + 1) * 32], make_uint2(odd_factor, odd_factor));
        }
    }
};

/** Computes the warp's turns at the middle of a unit. first: packed index of its first token. A whole warp calls it. */
__device__ __forceinline__ void turn_to_middle(const AttendArgs &a, const WaveSpace &space, int32_t first, int tokens,
                                               int lane)
{
    const uint32_t next = a.unpacked_sinks + first + tokens / 2; /* half a position behind the middle */
    __syncwarp();                                                /* all lanes have read the last unit's turns */
#pragma unroll 2
    for (int i = lane; i < WAVE_STEP * a.wave.steps; i += 32) {
        const int32_t increment = space.increments[i];
        space.turns[i] = turn_fast((uint32_t)increment * next - (increment >> 1));
    }
    __syncwarp();
}

/** Computes the terms of a unit for ROW_QUADS quads of rows (first_quad, first_quad + quad_step ..), without the rows'
 *  factors. put(n, terms) gets the terms of the n-th quad: of the lane's four tokens of each token tile. first: packed
 *  index of the unit's first token; rows: [row][16 steps], from put_wave. A whole warp calls it. */
template <int ROW_QUADS, int TILES, class Put>
__device__ __forceinline__ void sum_wave(const AttendArgs &a, const float2 *rows, int32_t first, int first_quad,
                                         int quad_step, int lane, Put put)
{
    constexpr int STEP = WAVE_STEP / 2; /* float4 of a step, with two pairs each */
    const WaveSpace space(a, threadIdx.x / 32);
    const int steps = a.wave.steps;
    const bool odd = lane >> 2 & 1;
    const int place = 2 * (lane & 3) + odd; /* the lane's float4 of a step */
    auto row_of_quad = [&](int n) {
        const int row = 4 * (first_quad + n * quad_step) + lane / 8;
        return reinterpret_cast<const float4 *>(rows + row * WAVE_STEP * steps) + place;
    };
    const float4 *row = row_of_quad(0);
    float4 next[2] = {row[0], row[STEP]}; /* loaded ahead */
    turn_to_middle(a, space, first, TQ_TILE * TILES, lane);
    const uint32_t slow = __ballot_sync(ALL_LANES, lane < steps && space.slow[lane]);
#pragma unroll 1
    for (int n = 0; n < ROW_QUADS; n++) {
        const float4 *turns = reinterpret_cast<const float4 *>(space.turns) + place;
        const uint4 *table = space.table + lane;
        WaveSums<TILES> sums;
#pragma unroll 1
        for (int step = 0; step < steps; step += 2, turns += 2 * STEP, table += 2 * TILES * 4 * 32) {
            const StepFactors f(next[0], turns[0], odd), g(next[1], turns[STEP], odd);
            row = step + 2 < steps ? row + 2 * STEP : n + 1 < ROW_QUADS ? row_of_quad(n + 1) : row;
            next[0] = row[0], next[1] = row[STEP];
            sums.add(f, slow >> step & 1, table);
            sums.add(g, slow >> step & 2, table + TILES * 4 * 32);
        }
        if (slow) sums.interpolate(space.polynomials + lane, odd, lane);
        float terms[4 * TILES]; /* by the lane's tokens: that of index i is 8 i + lane / 4 */
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            const float *c = sums.cosines[i / 2] + 2 * (i % 2), *s = sums.sines[i / 2] + 2 * (i % 2);
            const float cosines = c[0] + c[1], sines = s[0] + s[1];
            terms[2 * TILES + i] = cosines + sines;
            terms[2 * TILES - 1 - i] = __shfl_xor_sync(ALL_LANES, cosines - sines, 28); /* g to 7 - g */
        }
        put(n, terms);
    }
}

/** Stores the terms of the n-th quad of rows, times `factor`, in the warp's shared memory. */
template <int TILES>
__device__ __forceinline__ void put_terms(const AttendArgs &a, int n, const float *terms, float factor, int lane)
{
    const WaveSpace space(a, threadIdx.x / 32);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const float *t = terms + 4 * tile;
        space.terms[(n * TILES + tile) * 32 + lane] =
            make_float4(factor * t[0], factor * t[1], factor * t[2], factor * t[3]);
    }
}

/** Adds a lane's terms of a token tile to its scores. */
__device__ __forceinline__ void add_terms(float4 terms, float *s)
{
    s[0] += terms.x;
    s[1] += terms.y;
    s[2] += terms.z;
    s[3] += terms.w;
}

/** The terms of a unit until its scores are known: of one quad of rows in registers, of several in the warp's shared
 *  memory. With RUN 2, both units of a page are computed at once, and the second's terms wait in shared memory. */
template <int ROW_QUADS, int TILES, int RUN> struct UnitWave {
    static_assert(RUN == 1 || (RUN == 2 && ROW_QUADS == 1));
    float terms[4 * TILES];
    int32_t summed = -1; /* RUN 2: the page whose terms are there */

    /** Computes a unit's terms. first: packed index of the first token of the unit or, with RUN 2, of its page. */
    __device__ __forceinline__ void sum(const AttendArgs &a, const RowArgs *args, const float2 *rows, int32_t unit,
                                        int32_t first, int lane)
    {
        const int32_t page = unit >> (a.page_units - 1);
        const bool second = RUN > 1 && (unit & (a.page_units - 1));
        if (RUN == 1 || summed != page) {
            auto put = [&](int n, const float (&found)[4 *TILES *RUN]) {
                if constexpr (ROW_QUADS > 1) {
                    put_terms<TILES>(a, n, found, args[4 * n + (lane & 3)].wave, lane);
                } else {
#pragma unroll
                    for (int i = 0; i < 4 * TILES; i++) terms[i] = found[i];
                    if constexpr (RUN > 1) put_terms<TILES>(a, 0, found + 4 * TILES, 1, lane);
                }
            };
            sum_wave<ROW_QUADS, TILES * RUN>(a, rows, first, 0, 1, lane, put);
            if constexpr (RUN > 1) summed = page;
        }
        if (!second) return;
        const WaveSpace space(a, threadIdx.x / 32);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const float4 t = space.terms[tile * 32 + lane]; /* stored by the same lane */
            terms[4 * tile] = t.x, terms[4 * tile + 1] = t.y, terms[4 * tile + 2] = t.z, terms[4 * tile + 3] = t.w;
        }
    }
    __device__ __forceinline__ void add(const AttendArgs &a, const RowArgs *args, int lane,
                                        float (&s)[ROW_QUADS][4 * TILES]) const
    {
        if constexpr (ROW_QUADS == 1) {
            const float factor = args[lane & 3].wave;
#pragma unroll
            for (int i = 0; i < 4 * TILES; i++) s[0][i] = fmaf(factor, terms[i], s[0][i]);
        } else {
            const WaveSpace space(a, threadIdx.x / 32);
#pragma unroll
            for (int n = 0; n < ROW_QUADS; n++)
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
                    add_terms(space.terms[(n * TILES + tile) * 32 + lane], s[n] + 4 * tile);
        }
    }
};

} // namespace tq
#endif
