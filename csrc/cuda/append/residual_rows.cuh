// append_prefill of keys with a wave or a metric: turns 16 rows into A (k - c_p) and runs the first five stages of
// their rotation. Lane 4 g + t has tokens g and g + 8, of every 16 channels 4 t .. 4 t + 3. Tensor cores leave results
// in this order, and take it in operands.
//
//   wave      in float32. Amplitudes are turned to the pass's first position and to its ninth, and from there by a
//             table of angles for 8 positions, which all heads and passes share. A pass turns the second amplitudes of
//             the pass before by 8 and by 16 positions; every eighth pass starts anew, so that errors do not add up
//   metric    W^T S x and what it adds, of rank 4, by tensor cores: products of 11-bit numbers (TF32), sums in float32
//   rotation  the same, with y rounded to 11 bits. turboquant.h says what that may change
//
// For each number of a row, cosine, sine and two amplitudes are read from shared memory. For pairs i and i + DIM / 2,
// which most models have, half of these reads serve two numbers. Moments out of range are clamped, so that z is finite
// whatever device memory holds.
#ifndef TQ_CUDA_APPEND_RESIDUAL_ROWS_CUH
#define TQ_CUDA_APPEND_RESIDUAL_ROWS_CUH
#include "cuda/append/params.cuh"

namespace tq
{
namespace fragments
{

/** Computes c += a b in TF32, a 16 x 8, b 8 x 8. Lane 4 g + t holds a: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4);
 *  b: (t, g), (t + 4, g); c: (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1). */
__device__ __forceinline__ void multiply_tf32(float *c, const uint32_t (&a)[4], float b0, float b1)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

/** Returns bits of a finite number that are rounded to 11 bits once a product drops the last 13. */
__device__ __forceinline__ uint32_t bits_of_tf32(float x) { return __float_as_uint(x) + 0x1000u; }
__device__ __forceinline__ float rounded_tf32(float x) { return __uint_as_float(bits_of_tf32(x) & ~0x1fffu); }

/** Fills a from x[4 m + 2 h + j] of a chunk (token g + 8 h, channel 4 t + 2 m + j), rounded or cut to 11 bits. */
template <bool ROUNDED> __device__ __forceinline__ void factor_of(const float (&x)[8], int m, uint32_t (&a)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float y = x[4 * m + i / 2 + 2 * (i % 2)];
        a[i] = ROUNDED ? bits_of_tf32(y) : __float_as_uint(y);
    }
}

__device__ __forceinline__ float clamped(float x, float low, float high) { return fminf(fmaxf(x, low), high); }

// ---- for a layer ----

constexpr uint32_t NO_PAIR = 0xffffffffu;

/** What the warps of a block share. */
template <class S> struct Turns {
    static constexpr int RUN = 8, STRIDE = S::DIM + 16,
                         PAIRS = S::DIM / 2;              // STRIDE: against bank conflicts of neighbouring positions
    float cosine[RUN + 1][STRIDE], sine[RUN + 1][STRIDE]; // by position and channel
    /** x: a pair's first channel and, << 16, its second, each with 0x8000 if the rotation flips its sign; y: increment.
     *  x is NO_PAIR if there is no pair or it shares a channel with an earlier one: `shared` has the bits of those. */
    uint2 pair[PAIRS];
    uint32_t increment[S::DIM];
    int32_t owner[S::DIM]; // the first pair with a channel
    uint32_t shared[PAIRS / 32];
    bool halves; // whether the pairs of `pair` are channels i and i + DIM / 2
};

/** Fills the tables, by a whole block. */
template <class S> __device__ __forceinline__ void prepare_turns(const AppendArgs &a, Turns<S> &turns)
{
    for (int i = threadIdx.x; i < S::DIM; i += blockDim.x) turns.owner[i] = S::DIM, turns.increment[i] = 0;
    for (int i = threadIdx.x; i < S::DIM / 64; i += blockDim.x) turns.shared[i] = 0;
    for (int i = threadIdx.x; i < Turns<S>::PAIRS; i += blockDim.x) turns.pair[i] = make_uint2(NO_PAIR, 0);
    __syncthreads();
    const int i = threadIdx.x; // there are more threads than pairs
    const bool is_there = i < a.moments.pairs;
    const Pair pair = is_there ? a.moments.pair(i) : Pair{0, 0, 0};
    if (pair.first != pair.second) {
        atomicMin(&turns.owner[pair.first], i);
        atomicMin(&turns.owner[pair.second], i);
    }
    __syncthreads();
    if (is_there && pair.first != pair.second && turns.owner[pair.first] == i && turns.owner[pair.second] == i) {
        const auto flip = [&](int channel) { return (a.signs.word[0][channel / 32] >> channel % 32 & 1) << 15; };
        turns.pair[i] =
            make_uint2((pair.first | flip(pair.first)) | (pair.second | flip(pair.second)) << 16, pair.increment);
        turns.increment[pair.first] = turns.increment[pair.second] = pair.increment;
    } else if (is_there) {
        atomicOr(&turns.shared[i / 32], 1u << i % 32);
    }
    const bool alone = i < Turns<S>::PAIRS && turns.pair[i].x != NO_PAIR; // this thread's pair is in turns.pair
    const bool halves = __syncthreads_and(!alone || pair.second == pair.first + S::DIM / 2);
    if (i == 0) turns.halves = halves;
    for (int j = threadIdx.x; j < (Turns<S>::RUN + 1) * S::DIM; j += blockDim.x) {
        const int position = j / S::DIM, channel = j % S::DIM;
        const float2 there = turn(phase_of(turns.increment[channel], position));
        turns.cosine[position][channel] = there.x;
        turns.sine[position][channel] = there.y;
    }
}

// ---- for a head ----

/** For one warp. In along, across, centre and directions, signs that the rotation flips are flipped already. */
template <int DIM> struct alignas(16) HeadResidual {
    // Factors of cosines and sines at the pass's first position and its ninth; if `halves`, for channels below DIM / 2.
    float along[2][DIM], across[2][DIM];
    float centre[DIM], squares[DIM];                // squares: S S
    float directions[TQ_MAX_METRIC_RANK][DIM + 16]; // S W, rounded; neighbours are in different banks
    float2 amplitude[DIM / 2];
    float stretch[TQ_MAX_METRIC_RANK];
    bool shares, centred; // whether a pair that shares a channel has an amplitude; whether there is a constant centre
};

/** Fills `to`, by the warp. centre: [head_dim], or NULL. */
template <class S>
__device__ __forceinline__ void prepare_residual(const AppendArgs &a, const Turns<S> &turns, int h, const float *centre,
                                                 HeadResidual<S::DIM> &to, int lane)
{
    constexpr float LEAST = 0x1p-10f, MOST = 0x1p10f; // of scales
    const HeadMoments from = a.moments.of_head(h);
    const int rank = a.moments.rank();
    bool shares = false;
    __syncwarp();
    for (int i = lane; i < S::DIM / 2; i += 32) {
        const bool is_there = i < a.moments.pairs;
        const auto number = [&](int k) {
            return is_there ? clamped(from.wave[2 * i + k], -TQ_MAX_INPUT, TQ_MAX_INPUT) : 0.0f;
        };
        to.amplitude[i] = make_float2(number(0), number(1));
        shares |= (turns.shared[i / 32] >> i % 32 & 1) && (number(0) != 0.0f || number(1) != 0.0f);
    }
    shares = __any_sync(ALL_LANES, shares);
    if (lane == 0) to.shares = shares, to.centred = centre;
    for (int c = lane; c < S::DIM; c += 32) {
        const float sign = a.signs.word[0][c / 32] >> c % 32 & 1 ? -1.0f : 1.0f,
                    scale = a.moments.metric ? clamped(from.scale[c], LEAST, MOST) : 1.0f;
        to.along[0][c] = to.along[1][c] = to.across[0][c] = to.across[1][c] = 0.0f;
        to.centre[c] = centre ? sign * clamped(centre[c], -TQ_MAX_INPUT, TQ_MAX_INPUT) : 0.0f;
        to.squares[c] = scale * scale;
        for (int r = 0; r < TQ_MAX_METRIC_RANK; r++)
            to.directions[r][c] =
                r < rank ? rounded_tf32(sign * scale * clamped(from.directions[r * S::DIM + c], -1.001f, 1.001f))
                         : 0.0f;
    }
    if (lane < TQ_MAX_METRIC_RANK)
        to.stretch[lane] = lane < rank ? clamped(from.stretch[lane], LEAST - 1.0f, MOST) : 0.0f;
    __syncwarp();
}

constexpr int EXACT_TILES = 4; // every fourth tile of a run, from its first on, begins with turn_amplitudes

/** Turns amplitudes to a pass that begins at `position`. */
template <class S>
__device__ __forceinline__ void turn_amplitudes(const Turns<S> &turns, HeadResidual<S::DIM> &head, int position,
                                                int lane)
{
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < S::DIM / 2; i += 32) {
        const uint2 pair = turns.pair[i];
        if (pair.x == NO_PAIR) continue;
        const int first = pair.x & 0x7fff, second = pair.x >> 16 & 0x7fff;
        const uint32_t flip_first = pair.x << 16 & 0x80000000u, flip_second = pair.x & 0x80000000u;
        const auto flipped = [](float x, uint32_t flip) { return __uint_as_float(__float_as_uint(x) ^ flip); };
        float2 at = turned(head.amplitude[i], turn(phase_of(pair.y, position)));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            head.along[half][first] = flipped(at.x, flip_first);
            head.across[half][first] = flipped(-at.y, flip_first);
            if (!turns.halves) {
                head.along[half][second] = flipped(at.y, flip_second);
                head.across[half][second] = flipped(at.x, flip_second);
            }
            at = turned(at, make_float2(turns.cosine[Turns<S>::RUN][first], turns.sine[Turns<S>::RUN][first]));
        }
    }
    __syncwarp();
}

/** Turns amplitudes from a pass to the next. (along, across) is (X, -Y) or (Y, X), times a sign: both turn alike. */
template <class S>
__device__ __forceinline__ void advance_amplitudes(const Turns<S> &turns, HeadResidual<S::DIM> &head, int lane)
{
    constexpr int EACH = 2;
    const int channels = turns.halves ? S::DIM / 2 : S::DIM;
    __syncwarp();
#pragma unroll 1
    for (int c = EACH * lane; c < channels; c += EACH * 32) {
        const auto pair_at = [](const float *x) { return *reinterpret_cast<const float2 *>(x); };
        const float2 cosine = pair_at(&turns.cosine[Turns<S>::RUN][c]), sine = pair_at(&turns.sine[Turns<S>::RUN][c]);
        float2 along = pair_at(&head.along[1][c]), across = pair_at(&head.across[1][c]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 before = along;
            along.x = before.x * cosine.x + across.x * sine.x, along.y = before.y * cosine.y + across.y * sine.y;
            across.x = across.x * cosine.x - before.x * sine.x, across.y = across.y * cosine.y - before.y * sine.y;
            *reinterpret_cast<float2 *>(&head.along[half][c]) = along;
            *reinterpret_cast<float2 *>(&head.across[half][c]) = across;
        }
    }
    __syncwarp();
}

// ---- rows ----

__device__ __forceinline__ void load_four(float (&to)[4], const float *from)
{
    *reinterpret_cast<float4 *>(to) = *reinterpret_cast<const float4 *>(from);
}

template <bool BF16> __device__ __forceinline__ float2 numbers_of(uint32_t two)
{
    if constexpr (BF16) return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
    else return __half22float2(*reinterpret_cast<const __half2 *>(&two));
}

/** Computes channels 4 t .. 4 t + 3 of a chunk of row g + 8 * half: raw numbers less along * cosine + across * sine. */
template <bool BF16>
__device__ __forceinline__ void subtract_four(uint2 raw, uint2 flips, int half, const float (&along)[4],
                                              const float (&across)[4], const float (&cosine)[4],
                                              const float (&sine)[4], float (&x)[8])
{
    const float2 low = numbers_of<BF16>(raw.x ^ flips.x), high = numbers_of<BF16>(raw.y ^ flips.y);
    const float k[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
    for (int n = 0; n < 4; n++)
        x[n / 2 * 4 + 2 * half + n % 2] = fmaf(-across[n], sine[n], fmaf(-along[n], cosine[n], k[n]));
}

/** Adapts cosine and sine of pairs' first channels to their second ones, which keep along = X, across = -Y:
 *  Y cosine + X sine = X sine + (-Y)(-cosine). flips: the signs that the rotation flips in only one of the two. */
__device__ __forceinline__ void second_of_pairs(uint2 flips, float (&cosine)[4], float (&sine)[4])
{
    const uint32_t sign[4] = {flips.x << 16, flips.x, flips.y << 16, flips.y};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const uint32_t along = __float_as_uint(sine[n]) ^ (sign[n] & 0x80000000u),
                       across = __float_as_uint(cosine[n]) ^ (~sign[n] & 0x80000000u);
        cosine[n] = __uint_as_float(along);
        sine[n] = __uint_as_float(across);
    }
}

/** Computes raw rows less the wave of the pairs in Turns::pair. HALVES: Turns::halves. BF16: otherwise binary16. */
template <class S, bool HALVES, bool BF16, class Raw, class Signs>
__device__ __forceinline__ void subtract_waves(const Raw &raw, const Signs &signs, const Turns<S> &turns,
                                               const HeadResidual<S::DIM> &head, int lane, float (&x)[S::CHUNKS][8])
{
    constexpr int HALF = S::CHUNKS / 2;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < HALF; c++) {
        const int first = 16 * c + 4 * t, second = first + S::DIM / 2;
        const uint2 flips = signs[c][t], others = signs[c + HALF][t];
        float cosine[4], sine[4], along[2][4], across[2][4];
        load_four(cosine, &turns.cosine[g][first]);
        load_four(sine, &turns.sine[g][first]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            load_four(along[h], &head.along[h][first]);
            load_four(across[h], &head.across[h][first]);
            subtract_four<BF16>(raw.of[h][c], flips, h, along[h], across[h], cosine, sine, x[c]);
        }
        if constexpr (HALVES) {
            second_of_pairs(make_uint2(flips.x ^ others.x, flips.y ^ others.y), cosine, sine);
        } else {
            load_four(cosine, &turns.cosine[g][second]);
            load_four(sine, &turns.sine[g][second]);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                load_four(along[h], &head.along[h][second]);
                load_four(across[h], &head.across[h][second]);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
            subtract_four<BF16>(raw.of[h][c + HALF], others, h, along[h], across[h], cosine, sine, x[c + HALF]);
    }
}

/** The same, less the centre too. */
template <class S, class Raw, class Signs>
__device__ __forceinline__ void subtract_centres(const Raw &raw, bool bf16, const Signs &signs, const Turns<S> &turns,
                                                 const HeadResidual<S::DIM> &head, int lane, float (&x)[S::CHUNKS][8])
{
    if (turns.halves && bf16) subtract_waves<S, true, true>(raw, signs, turns, head, lane, x);
    else if (turns.halves) subtract_waves<S, true, false>(raw, signs, turns, head, lane, x);
    else if (bf16) subtract_waves<S, false, true>(raw, signs, turns, head, lane, x);
    else subtract_waves<S, false, false>(raw, signs, turns, head, lane, x);
    if (!head.centred) return;
    const int t = lane % 4;
#pragma unroll
    for (int c = 0; c < S::CHUNKS; c++) {
        float centre[4];
        load_four(centre, &head.centre[16 * c + 4 * t]);
#pragma unroll
        for (int e = 0; e < 8; e++) x[c][e] -= centre[e / 4 * 2 + e % 2];
    }
}

/** Subtracts the wave of a pair that shares a channel. */
template <class S>
__device__ __forceinline__ void subtract_pair(const AppendArgs &a, const Pair &pair, float2 amplitude, int position,
                                              int lane, float (&x)[S::CHUNKS][8])
{
    const auto flipped = [&](float y, int channel) {
        return a.signs.word[0][channel / 32] >> channel % 32 & 1 ? -y : y;
    };
    float first[2], second[2]; // of the lane's tokens
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float2 at = turned(amplitude, turn(phase_of(pair.increment, position + lane / 4 + 8 * h)));
        first[h] = flipped(at.x, pair.first), second[h] = flipped(at.y, pair.second);
    }
#pragma unroll
    for (int c = 0; c < S::CHUNKS; c++)
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const int channel = 16 * c + 4 * (lane % 4) + e / 4 * 2 + e % 2, h = e / 2 % 2;
            if (channel == pair.first) x[c][e] -= first[h];
            if (channel == pair.second) x[c][e] -= second[h];
        }
}

/** Subtracts all of those, one after the other. */
template <class S>
__device__ __forceinline__ void subtract_shared(const AppendArgs &a, const Turns<S> &turns,
                                                const HeadResidual<S::DIM> &head, int position, int lane,
                                                float (&x)[S::CHUNKS][8])
{
#pragma unroll 1
    for (int i = 0; i < S::DIM / 2; i++) {
        const float2 amplitude = head.amplitude[i];
        const bool is_shared = turns.shared[i / 32] >> i % 32 & 1;
        if (is_shared && (amplitude.x != 0.0f || amplitude.y != 0.0f))
            subtract_pair<S>(a, a.moments.pair(i), amplitude, position, lane, x);
    }
}

/** x -> S S x + S W e (S W)^T x. */
template <class S>
__device__ __forceinline__ void apply_metric(const HeadResidual<S::DIM> &head, int rank, int lane,
                                             float (&x)[S::CHUNKS][8])
{
    const int g = lane / 4, t = lane % 4;
    float along[4] = {}, others[4] = {}; // two sums, so that a product does not wait for the last one
    uint32_t factor[4] = {};
    if (rank) { // columns g and g + 4 of the product have the same direction
#pragma unroll
        for (int c = 0; c < S::CHUNKS; c++) {
            float direction[4];
            load_four(direction, &head.directions[g % 4][16 * c + 4 * t]);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                factor_of<false>(x[c], m, factor); // cutting is enough: 2^-11 of what S S x gets is little
                multiply_tf32(m ? others : along, factor, direction[2 * m], direction[2 * m + 1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) along[i] += others[i];
        const float low = head.stretch[t % 2 * 2], high = head.stretch[t % 2 * 2 + 1]; // of columns 2 t, 2 t + 1
        const float at[2][2] = {{low * along[0], low * along[2]}, {high * along[1], high * along[3]}};
#pragma unroll
        for (int i = 0; i < 4; i++) factor[i] = bits_of_tf32(i / 2 == t % 2 ? at[0][i % 2] : at[1][i % 2]);
    }
    // The two directions are swapped at t == 1, which so reads from other banks than t == 0.
    const float *first = head.directions[t == 1 ? 3 : 0], *second = head.directions[t == 1 ? 2 : 1];
#pragma unroll
    for (int c = 0; c < S::CHUNKS; c++) {
        float squares[4];
        load_four(squares, &head.squares[16 * c + 4 * t]);
#pragma unroll
        for (int e = 0; e < 8; e++) x[c][e] *= squares[e / 4 * 2 + e % 2];
        if (!rank) continue;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int channel = 16 * c + 4 * (g / 2) + 2 * m + g % 2; // of column g
            multiply_tf32(x[c] + 4 * m, factor, t < 2 ? first[channel] : 0.0f, t < 2 ? second[channel] : 0.0f);
        }
    }
}

/** Runs the stages of distance 1 to 16 in place, 32 channels at a time. */
template <class S> __device__ __forceinline__ void rotate_groups(int lane, float (&x)[S::CHUNKS][8])
{
    const int g = lane / 4, t = lane % 4;
    // Inputs are 4 t + 2 m and 4 t + 2 m + 1, the output is 4 (g / 2) + 2 i + g % 2: m and i flip a sign if both are 1.
    const float even = __popc(t & g / 2) & 1 ? -1.0f : 1.0f, odd = g % 2 ? -even : even;
#pragma unroll
    for (int c = 0; c < S::CHUNKS; c += 2) {
        float z[2][8] = {};
#pragma unroll
        for (int from = 0; from < 2; from++)
#pragma unroll
            for (int m = 0; m < 2; m++) {
                uint32_t factor[4];
                factor_of<true>(x[c + from], m, factor);
#pragma unroll
                for (int to = 0; to < 2; to++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const bool minus = (from && to) != (m && i);
                        multiply_tf32(z[to] + 4 * i, factor, minus ? -even : even, minus ? -odd : odd);
                    }
            }
#pragma unroll
        for (int to = 0; to < 2; to++)
#pragma unroll
            for (int e = 0; e < 8; e++) x[c + to][e] = z[to][e];
    }
}

/** Turns rows into z, but for the stages of distance 32 and more. position: of the pass's first token. advances:
 *  whether the pass before had the 16 tokens before. */
template <class S, class Raw, class Signs>
__device__ __forceinline__ void residual_rows(const AppendArgs &a, const Raw &raw, const Signs &signs,
                                              const Turns<S> &turns, HeadResidual<S::DIM> &head, int position,
                                              bool advances, int lane, float (&x)[S::CHUNKS][8])
{
    if (advances) advance_amplitudes<S>(turns, head, lane);
    else turn_amplitudes<S>(turns, head, position, lane);
    subtract_centres<S>(raw, a.dtype == TQ_BF16, signs, turns, head, lane, x);
    if (head.shares) subtract_shared<S>(a, turns, head, position, lane, x);
    apply_metric<S>(head, a.moments.rank(), lane, x);
    rotate_groups<S>(lane, x);
}

} // namespace fragments
} // namespace tq
#endif
