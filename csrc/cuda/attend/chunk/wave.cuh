/* The wave of keys (turboquant.h, "Keys of a plan with a wave or a metric"), added to keys as they are decoded.
 *
 * Decoded keys are in the space of prepared queries, R A (k - centre) over steps. There a pair's wave is one row times
 * cos(position * angle) plus another times sin(..) (`wave_rows`). On the tokens of a page it is a product of few rows:
 *
 *   wave[token] = basis[token][rows] x pages[page][rows]
 *
 *   fast pairs   two rows each, turned to the first token of the page; basis: cosine and sine of token * angle
 *   slow pairs   16 rows in all: their sum at the Chebyshev nodes of the page; basis: Lagrange polynomials of the nodes
 *
 * The basis is the same for all pages. A pair is slow if it turns by at most 7 radians from the middle of a page to
 * its end: polynomials of degree 15 are then off by 7^16 / (2^15 16!) = 5e-5 of an amplitude. Numbers are rounded to
 * fp16, as keys are. */
#ifndef TQ_CUDA_ATTEND_CHUNK_WAVE_CUH
#define TQ_CUDA_ATTEND_CHUNK_WAVE_CUH
#include "cuda/attend/chunk/decode.cuh"
#include "cuda/attend/chunk/ends.cuh"

namespace tq
{
namespace chunk
{

constexpr int USUAL_STEPS = 3; /* of 64 pairs at a RoPE base of 500,000 or more, the step of nodes included */
constexpr int NODES = 16;
constexpr double PI = 3.14159265358979323846;
constexpr int BASIS_BLOCKS = 16;
constexpr uint32_t SLOW_INCREMENT = (uint32_t)(7 / ((PAGE - 1) / 2.0) / (2 * PI) * 4294967296.0);
/** The rows of a head are divided by 2^e, with e such that the largest number is in 2^(WAVE_SIZE - 1) .. 2^WAVE_SIZE.
 *  Then sums of them fit fp16, and so do small numbers. e is NO_WAVE if none is above 1e-30. */
constexpr int WAVE_SIZE = 6, NO_WAVE = -100;

struct WaveInfo {
    int32_t fast_steps;        /* steps of fast pairs; one step of nodes follows */
    int32_t exponent[1 << 20]; /* [heads] */
};

/** Returns the index of a page and head in wave_pages, which is [set][page][head][step][group][lane][2]. */
__device__ __forceinline__ int64_t wave_page_at(const Args &a, int64_t set, int32_t page, int32_t h)
{
    return (set * a.max_pages + page) * a.heads + h;
}

/** Chebyshev nodes, cos(pi (2 n + 1) / 32), and their barycentric weights, (-1)^n sin(pi (2 n + 1) / 32) (Berrut and
 *  Trefethen, Barycentric Lagrange interpolation, 2004, section 5). */
__constant__ float NODE_AT[NODES] = {0.99518473f,  0.95694034f,  0.88192126f,  0.77301045f,  0.63439328f,  0.47139674f,
                                     0.29028468f,  0.09801714f,  -0.09801714f, -0.29028468f, -0.47139674f, -0.63439328f,
                                     -0.77301045f, -0.88192126f, -0.95694034f, -0.99518473f};
__constant__ float NODE_WEIGHT[NODES] = {
    0.09801714f, -0.29028468f, 0.47139674f, -0.63439328f, 0.77301045f, -0.88192126f, 0.95694034f, -0.99518473f,
    0.99518473f, -0.95694034f, 0.88192126f, -0.77301045f, 0.63439328f, -0.47139674f, 0.29028468f, -0.09801714f};

/** Lists the plan's pairs, fast ones first, and returns how many are fast. Called by one warp. */
__device__ __forceinline__ int order_pairs(const Args &a, uint8_t *order, int lane)
{
    uint32_t fast[2], slow[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int i = lane + 32 * k;
        const bool is_there = i < a.moments.pairs;
        const int32_t increment = is_there ? a.moments.turns[3 * i + 2] : 0;
        const bool is_fast = (increment < 0 ? 0u - (uint32_t)increment : (uint32_t)increment) > SLOW_INCREMENT;
        fast[k] = __ballot_sync(ALL_LANES, is_there && is_fast);
        slow[k] = __ballot_sync(ALL_LANES, is_there && !is_fast);
    }
    const int n = __popc(fast[0]) + __popc(fast[1]);
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const uint32_t before = (1u << lane) - 1;
        if (fast[k] >> lane & 1) order[(k ? __popc(fast[0]) : 0) + __popc(fast[k] & before)] = (uint8_t)(lane + 32 * k);
        if (slow[k] >> lane & 1)
            order[n + (k ? __popc(slow[0]) : 0) + __popc(slow[k] & before)] = (uint8_t)(lane + 32 * k);
    }
    __syncwarp();
    return n;
}

/** Writes the row that the cosine of pair i is multiplied by, or if `second` its sine. Called by one warp. */
__device__ __forceinline__ void put_wave_row(const Args &a, int h, int i, bool second, float *row, float *to, int lane)
{
    const int width = TQ_TILE * a.groups;
    const HeadMoments head = a.moments.of_head(h);
    for (int c = lane; c < width; c += 32) row[c] = 0;
    __syncwarp();
    if (lane == 0) {
        const Pair pair = a.moments.pair(i);
        const float x = head.wave[2 * i], y = head.wave[2 * i + 1];
        row[pair.first] += second ? -y : x;
        row[pair.second] += second ? x : y;
    }
    __syncwarp();
    if (a.moments.metric) apply_metric<false>(a.moments, head, row);
    if (a.rotation == TQ_ROTATION_HADAMARD) hadamard_row<4>(row, a.head_dim, a.signs, false, lane);
    const float *steps = a.key.transform.steps;
    for (int c = lane; c < width; c += 32) {
        const int group = c / TQ_TILE;
        const float step = steps ? steps[h * a.key.transform.stride_head + group] : 1.0f;
        to[c] = c < a.head_dim ? row[c] / (a.key.factor[a.key.bits[group]] * step) : 0.0f;
    }
}

/** Writes the basis as operands A, [token tile][half][step][lane][4]. block: index among BASIS_BLOCKS that call it. */
__device__ __forceinline__ void put_basis(const Args &a, const uint8_t *order, int fast, int block)
{
    const int steps = (fast + STEP_PAIRS - 1) / STEP_PAIRS + 1;
    uint32_t *to = reinterpret_cast<uint32_t *>(a.wave_basis);
    for (int i = block * blockDim.x + threadIdx.x; i < PAGE / 16 * steps * 32 * 4; i += BASIS_BLOCKS * blockDim.x) {
        const int word = i % 4, lane = i / 4 % 32, step = i / 128 % steps, sixteen = i / 128 / steps;
        const int token = 16 * sixteen + lane / 4 + 8 * (word % 2), at = lane % 4 + 4 * (word / 2);
        float2 x = make_float2(0, 0);
        if (step < steps - 1) {
            const int slot = STEP_PAIRS * step + at;
            if (slot < fast) x = turn(phase_of(a.moments.pair(order[slot]).increment, token));
        } else { /* polynomial n at u is weight n / (u - node n), over the sum of these for all n */
            const float u = (float)(2 * token - (PAGE - 1)) / (PAGE - 1); /* never a node */
            float sum = 0, of[2] = {};
#pragma unroll
            for (int n = 0; n < NODES; n++) {
                const float w = __fdividef(NODE_WEIGHT[n], u - NODE_AT[n]);
                sum += w;
                if (n / 2 == at) of[n % 2] = w;
            }
            x = make_float2(of[0] / sum, of[1] / sum);
        }
        to[i] = as_word(__floats2half2_rn(x.x, x.y));
    }
}

/** Writes the basis and wave_rows: the last BASIS_BLOCKS blocks the basis, each warp of the others one row. */
__global__ void __launch_bounds__(32 * END_WARPS) prepare_wave(const __grid_constant__ Args a)
{
    __shared__ float rows[END_WARPS][MOST_CHANNELS];
    __shared__ uint8_t order[MOST_PAIRS];
    __shared__ int fast;
    wait_for_stream();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, of_head = 2 * a.moments.pairs,
              of_basis = (int)blockIdx.x - ((int)gridDim.x - BASIS_BLOCKS);
    if (of_basis < 0) {
        const int64_t i = (int64_t)blockIdx.x * END_WARPS + warp; /* of_head is a multiple of END_WARPS */
        const int h = (int)(i / of_head), row = (int)(i - (int64_t)h * of_head);
        put_wave_row(a, h, row / 2, row % 2, rows[warp], a.wave_rows + i * TQ_TILE * a.groups, lane);
        return;
    }
    if (warp == 0) {
        const int n = order_pairs(a, order, lane);
        if (lane == 0) {
            fast = n;
            if (of_basis == 0) a.wave->fast_steps = (n + STEP_PAIRS - 1) / STEP_PAIRS;
        }
    }
    __syncthreads();
    put_basis(a, order, fast, of_basis);
}

/** Writes the wave's rows of pages, as operands B of WaveAddend. A block has every `runs`-th page of a head. A warp has
 *  16 channels of a group: those in words 2 x and 2 x + 1 that lanes store. */
template <int GROUPS>
__global__ void __launch_bounds__(64 * GROUPS) put_wave_pages(const __grid_constant__ Args a, int runs)
{
    constexpr int PITCH = MOST_PAIRS + 4;
    __shared__ uint32_t turns[16 * (MOST_STEPS + 1)][PITCH]; /* [row][place of the pair]: factors of the pair's rows */
    __shared__ float maxima[2 * GROUPS];
    __shared__ uint8_t order[MOST_PAIRS];
    __shared__ int fast_pairs;
    wait_for_stream();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, group = warp / 2,
              x = warp % 2, h = blockIdx.x / runs, run = blockIdx.x % runs, pairs = a.moments.pairs;
    if (warp == 0) {
        const int n = order_pairs(a, order, lane);
        if (lane == 0) fast_pairs = n;
    }
    __syncthreads();
    const int fast = fast_pairs, fast_steps = (fast + STEP_PAIRS - 1) / STEP_PAIRS, first_slow = fast / STEP_PAIRS,
              steps = pairs / STEP_PAIRS;
    /* The warp's channels of all rows of the head, as operands A. */
    const float *rows = a.wave_rows + (int64_t)h * 2 * pairs * TQ_TILE * GROUPS;
    float of_head[MOST_STEPS][4][2], largest = 0;
#pragma unroll
    for (int s = 0; s < MOST_STEPS; s++)
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int place = STEP_PAIRS * s + t + 4 * (i / 2),
                          channel = channel_at(TQ_TILE * group + 8 * (g / 2) + 2 * (2 * x + i % 2) + g % 2);
                of_head[s][i][e] = s < steps ? rows[(2 * order[place] + e) * TQ_TILE * GROUPS + channel] : 0.0f;
                largest = fmaxf(largest, fabsf(of_head[s][i][e]));
            }
    largest = warp_max(largest);
    if (lane == 0) maxima[warp] = largest;
    __syncthreads();
    for (int i = 0; i < 2 * GROUPS; i++) largest = fmaxf(largest, maxima[i]);
    const int exponent = largest > 1e-30f ? (int)(__float_as_uint(largest) >> 23) - 127 - (WAVE_SIZE - 1) : NO_WAVE;
    if (run == 0 && threadIdx.x == 0) a.wave->exponent[h] = exponent;
    const float down = largest > 1e-30f ? power_of_two(-exponent) : 0.0f;
    uint4 operands[MOST_STEPS];
#pragma unroll
    for (int s = 0; s < MOST_STEPS; s++) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = as_word(__floats2half2_rn(of_head[s][i][0] * down, of_head[s][i][1] * down));
        operands[s] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    const int32_t longest = a.line[a.batch + 1];
#pragma unroll 1
    for (int64_t i = run; i < (int64_t)a.wave_sets * longest; i += runs) {
        const int32_t set = (int32_t)(i / longest), page = (int32_t)(i - (int64_t)set * longest);
        if (a.wave_sets > 1 && page * PAGE >= length_of(a, set)) continue; /* the same in all threads */
        const int32_t first =
            (int32_t)((uint32_t)first_position(a.sinks, a.position_offset, set) + (uint32_t)page * PAGE);
        __syncthreads(); /* no warp reads the last page's turns any more */
        for (int k = threadIdx.x; k < 16 * fast_steps * STEP_PAIRS;
             k += 64 * GROUPS) { /* for each row the places of its step */
            const int row = k / STEP_PAIRS, place = row / 16 * STEP_PAIRS + k % STEP_PAIRS;
            uint32_t word = 0;
            if (place == row / 2 && place < fast) {
                const float2 at = turn(phase_of(a.moments.pair(order[place]).increment, first));
                word = as_word(row % 2 ? __floats2half2_rn(-at.y, at.x) : __floats2half2_rn(at.x, at.y));
            }
            turns[row][place] = word;
        }
        const int places = pairs - STEP_PAIRS * first_slow;
        for (int k = threadIdx.x; k < NODES * places; k += 64 * GROUPS) {
            const int n = k / places, place = STEP_PAIRS * first_slow + k % places;
            uint32_t word = 0;
            if (place >= fast) {
                const uint32_t increment = a.moments.pair(order[place]).increment;
                const double from_first = (PAGE - 1) / 2.0 * (1 + (double)NODE_AT[n]);
                const float2 at =
                    turn(phase_of(increment, first) + (uint32_t)(int64_t)((int32_t)increment * from_first));
                word = as_word(__floats2half2_rn(at.x, at.y));
            }
            turns[16 * fast_steps + n][place] = word;
        }
        __syncthreads();
        uint4 *to = a.wave_pages + wave_page_at(a, set, page, h) * (fast_steps + 1) * wave_step_words(GROUPS) +
                    (group * 32 + lane) * 2 + x;
#pragma unroll 1
        for (int step = 0; step <= fast_steps; step++) {
            float c[2][4] = {};
#pragma unroll
            for (int s = 0; s < MOST_STEPS; s++) {
                if (step < fast_steps ? s != step : s < first_slow || s >= steps) continue;
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const uint32_t *row = turns[16 * step + 8 * j + g] + STEP_PAIRS * s + t;
                    mma_halves(c[j], operands[s], make_uint2(row[0], row[4]));
                }
            }
            to[step * wave_step_words(GROUPS)] =
                make_uint4(as_word(__floats2half2_rn(c[0][0], c[0][1])), as_word(__floats2half2_rn(c[1][0], c[1][1])),
                           as_word(__floats2half2_rn(c[0][2], c[0][3])), as_word(__floats2half2_rn(c[1][2], c[1][3])));
        }
    }
}

/** Computes the wave of a group's channels on a token tile, for decode_tile to add. */
template <int GROUPS> struct WaveAddend {
    const uint4 *basis, *page; /* of the lane: [half][step][32], and [step][wave_step_words] */
    int steps;
    __half2 by;

    __device__ __forceinline__ WaveAddend(const uint4 *all, const uint4 *of_page, int n, int token_tile, int group,
                                          __half2 factor, int lane)
        : basis(all + 2 * token_tile * n * 32 + lane), page(of_page + (group * 32 + lane) * 2), steps(n), by(factor)
    {
    }

    __device__ __forceinline__ void operator()(int half, uint32_t (&words)[2][4]) const
    {
        float c[4][4] = {};
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            const uint4 low = page[step * wave_step_words(GROUPS)], high = page[step * wave_step_words(GROUPS) + 1],
                        tokens = basis[(half * steps + step) * 32];
            mma_halves(c[0], tokens, make_uint2(low.x, low.y));
            mma_halves(c[1], tokens, make_uint2(low.z, low.w));
            mma_halves(c[2], tokens, make_uint2(high.x, high.y));
            mma_halves(c[3], tokens, make_uint2(high.z, high.w));
        }
#pragma unroll
        for (int word = 0; word < 4; word++) {
            words[0][word] = as_word(__floats2half2_rn(c[word][0], c[word][1]));
            words[1][word] = as_word(__floats2half2_rn(c[word][2], c[word][3]));
        }
    }
};

} // namespace chunk
} // namespace tq
#endif
