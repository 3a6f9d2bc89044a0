// The wave and the metric of keys (turboquant.h, "Keys of a plan with a wave or a metric") on the device; core/wave.h
// has the CPU's code.
//
// Pairs that share channels are added one after the other; otherwise the order of sums is free. Device memory may hold
// any channel numbers, so they are clamped to head_dim - 1.
#ifndef TQ_CUDA_DEVICE_WAVE_CUH
#define TQ_CUDA_DEVICE_WAVE_CUH
#include "core/plan_kind.h"
#include "cuda/device/device.cuh"

namespace tq
{

/** Returns the position of packed index 0 of a sequence for the wave: sinks plus its offset, modulo 2^32. */
__device__ __forceinline__ int32_t first_position(int32_t sinks, const int32_t *offsets, int32_t b)
{
    return offsets ? (int32_t)((uint32_t)sinks + (uint32_t)offsets[b]) : sinks;
}

/** Returns the phase at a position, in units of 2^-32 turns. */
__host__ __device__ __forceinline__ uint32_t phase_of(uint32_t increment, int64_t position)
{
    return increment * (uint32_t)position; // modulo 2^32, so higher bits of the position do not matter
}

/** Returns cosine (x) and sine (y) of a phase, within 1e-7, bit for bit as tq_turn of core/wave.h does. */
__device__ __forceinline__ float2 turn(uint32_t phase)
{
    const uint32_t quarter = (phase + 0x20000000u) >> 30;                                 // the nearest quarter turn
    const float x = __fmul_rn((float)(int32_t)(phase - (quarter << 30)), 1.46291808e-9f), // 2 pi / 2^32
        z = __fmul_rn(x, x);
    float s = __fadd_rn(__fmul_rn(-1.9515295891e-4f, z), 8.3321608736e-3f); // Cephes' sinf and cosf
    s = __fadd_rn(__fmul_rn(s, z), -1.6666654611e-1f);
    s = __fadd_rn(__fmul_rn(__fmul_rn(s, z), x), x);
    float c = __fadd_rn(__fmul_rn(2.443315711809948e-5f, z), -1.388731625493765e-3f);
    c = __fadd_rn(__fmul_rn(c, z), 4.166664568298827e-2f);
    c = __fadd_rn(__fsub_rn(__fmul_rn(__fmul_rn(c, z), z), __fmul_rn(0.5f, z)), 1.0f);
    const float along = quarter & 1 ? s : c, across = quarter & 1 ? c : s;
    return make_float2((quarter + 1) & 2 ? -along : along, quarter & 2 ? -across : across);
}

/** Turns the amplitudes (a, b) of a pair: returns the wave of its first channel (x) and its second one (y). */
__device__ __forceinline__ float2 turned(float2 amplitude, float2 turn)
{
    return make_float2(amplitude.x * turn.x - amplitude.y * turn.y, amplitude.x * turn.y + amplitude.y * turn.x);
}

/** The moments of one head, in device memory. */
struct HeadMoments {
    const float *wave;                         // [pairs][2]: a and b
    const float *scale, *directions, *stretch; // [head_dim], [rank][head_dim], [4]; not read without a metric
};

/** A pair of channels and how far it turns in one position. */
struct Pair {
    int first, second;
    uint32_t increment;
};

/** tq_transform.turns and .moments of a plan's keys, for kernels; all zero without a wave and a metric. */
struct KeyMoments {
    const int32_t *turns;
    const float *numbers;
    int64_t stride;                  // from one head's numbers to the next
    int32_t pairs, metric, head_dim; // metric: of the plan, 1 + its rank or 0

    __host__ __device__ __forceinline__ bool any() const { return pairs || metric; }
    __device__ __forceinline__ int rank() const { return metric ? metric - 1 : 0; }

    __device__ __forceinline__ HeadMoments of_head(int h) const
    {
        const float *wave = numbers + h * stride, *scale = wave + 2 * pairs;
        return {wave, scale, scale + head_dim, scale + (int64_t)metric * head_dim};
    }
    __device__ __forceinline__ Pair pair(int i) const
    {
        const uint32_t last = (uint32_t)head_dim - 1;
        return {(int)min((uint32_t)turns[3 * i], last), (int)min((uint32_t)turns[3 * i + 1], last),
                (uint32_t)turns[3 * i + 2]};
    }
};

inline KeyMoments key_moments_of(const tq_plan &plan, const tq_transform &key)
{
    if (!tq_has_moments(&plan)) return {};
    return {key.turns, key.moments, key.stride_head, plan.wave_pairs, plan.metric, plan.head_dim};
}

// ---- a row in the registers of a warp: lane l has channels l, l + 32, .. ----

/** The pairs of a head of up to 32 PER_LANE channels; lane i has pairs i, i + 32, .. Loaded once for many positions. */
template <int PER_LANE> struct WarpWave {
    static constexpr int PAIRS = (PER_LANE + 1) / 2;
    Pair pair[PAIRS];
    float2 amplitude[PAIRS]; // (0, 0): no pair

    WarpWave() = default;
    __device__ __forceinline__ WarpWave(const KeyMoments &m, int h, int lane)
    {
        const float *wave = m.of_head(h).wave;
#pragma unroll
        for (int k = 0; k < PAIRS; k++) {
            const int i = lane + 32 * k;
            pair[k] = i < m.pairs ? m.pair(i) : Pair{0, 0, 0};
            amplitude[k] = i < m.pairs ? make_float2(wave[2 * i], wave[2 * i + 1]) : make_float2(0.0f, 0.0f);
        }
    }

    __device__ __forceinline__ bool turns(int k) const { return amplitude[k].x != 0.0f || amplitude[k].y != 0.0f; }

    /** Whether in every lane the pairs k that turn have the lane's own channels k and k + PAIRS. This holds if pair i
     *  of the plan has channels i and i + head_dim / 2. */
    __device__ __forceinline__ bool are_own() const
    {
        bool own = PER_LANE % 2 == 0;
#pragma unroll
        for (int k = 0; k < PAIRS; k++) {
            const int first = threadIdx.x % 32 + 32 * k;
            own = own && (!turns(k) || (pair[k].first == first && pair[k].second == first + 32 * PAIRS));
        }
        return __all_sync(ALL_LANES, own);
    }

    /** Subtracts the wave at a position from x, if are_own. */
    __device__ __forceinline__ void subtract(int position, float (&x)[PER_LANE]) const
    {
#pragma unroll
        for (int k = 0; k < PER_LANE / 2; k++) {
            const float2 c = turned(amplitude[k], turn(phase_of(pair[k].increment, position)));
            x[k] -= c.x;
            x[k + PAIRS] -= c.y;
        }
    }

    /** Whether no two pairs that turn share a channel, in any lane. row: [head_dim] in shared memory, for this warp. */
    __device__ __forceinline__ bool are_apart(float *row) const
    {
        int *owner = reinterpret_cast<int *>(row);
        const int lane = threadIdx.x % 32;
        __syncwarp();
#pragma unroll
        for (int k = 0; k < PAIRS; k++)
            if (turns(k)) owner[pair[k].first] = owner[pair[k].second] = lane + 32 * k;
        __syncwarp();
        bool apart = true;
#pragma unroll
        for (int k = 0; k < PAIRS; k++)
            if (turns(k))
                apart = apart && pair[k].first != pair[k].second && owner[pair[k].first] == lane + 32 * k &&
                        owner[pair[k].second] == lane + 32 * k;
        return __all_sync(ALL_LANES, apart);
    }

    /** Writes the wave at a position to row, [head_dim]. apart: what are_apart returned. */
    __device__ __forceinline__ void put(float *row, int head_dim, int position, bool apart) const
    {
        const int lane = threadIdx.x % 32;
        __syncwarp();
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            if (lane + 32 * k < head_dim) row[lane + 32 * k] = 0.0f;
        __syncwarp();
#pragma unroll
        for (int k = 0; k < PAIRS; k++) {
            const float2 c = turned(amplitude[k], turn(phase_of(pair[k].increment, position)));
            if (apart) {
                if (turns(k)) row[pair[k].first] = c.x, row[pair[k].second] = c.y;
                continue;
            }
#pragma unroll 1
            for (int i = 0; i < 32; i++) { // pairs in their order, one after the other
                if (i == lane && turns(k)) row[pair[k].first] += c.x;
                if (i == lane && turns(k)) row[pair[k].second] += c.y;
                __syncwarp();
            }
        }
        __syncwarp();
    }
};

/** The metric of a head: the numbers for a lane's channels, 0 where it has none. */
template <int PER_LANE> struct WarpMetric {
    float scale[PER_LANE], direction[TQ_MAX_METRIC_RANK][PER_LANE], stretch[TQ_MAX_METRIC_RANK];

    WarpMetric() = default;
    __device__ __forceinline__ WarpMetric(const KeyMoments &m, int h, int head_dim, int lane)
    {
        if (!m.metric) return; // then apply is not called
        const HeadMoments head = m.of_head(h);
        load(scale, head.scale, head_dim, lane);
#pragma unroll
        for (int r = 0; r < TQ_MAX_METRIC_RANK; r++) { // from the rank on any row will do: stretch is 0
            load(direction[r], r < m.rank() ? head.directions + r * head_dim : head.scale, head_dim, lane);
            stretch[r] = r < m.rank() ? head.stretch[r] : 0.0f;
        }
    }

    /** x = A x: applies the metric to a centred key. */
    __device__ __forceinline__ void apply(float (&x)[PER_LANE]) const
    {
        static_assert(TQ_MAX_METRIC_RANK == 4, "what a lane sums");
        const int lane = threadIdx.x % 32;
        float along[TQ_MAX_METRIC_RANK] = {};
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            x[k] *= scale[k];
#pragma unroll
            for (int r = 0; r < TQ_MAX_METRIC_RANK; r++) along[r] = fmaf(direction[r][k], x[k], along[r]);
        }
        // Half of the lanes go on with one sum, half with another, and so again: in the end a quarter has each sum.
        float sum =
            of_halves(of_halves(along[0], along[1], 16, lane), of_halves(along[2], along[3], 16, lane), 8, lane);
#pragma unroll
        for (int h = 4; h; h /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, h);
#pragma unroll
        for (int r = 0; r < TQ_MAX_METRIC_RANK; r++) {
            const float stretched = stretch[r] * __shfl_sync(ALL_LANES, sum, r % 2 * 16 + r / 2 * 8);
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) x[k] = fmaf(stretched, direction[r][k], x[k]);
        }
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) x[k] *= scale[k];
    }

private:
    static __device__ __forceinline__ void load(float (&to)[PER_LANE], const float *from, int head_dim, int lane)
    {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) to[k] = lane + 32 * k < head_dim ? from[lane + 32 * k] : 0.0f;
    }

    /** Returns the sum, over this lane and lane ^ h, of low if lane & h is 0, otherwise of high. */
    static __device__ __forceinline__ float of_halves(float low, float high, int h, int lane)
    {
        const bool upper = lane & h;
        return (upper ? high : low) + __shfl_xor_sync(ALL_LANES, upper ? low : high, h);
    }
};

/** Turns keys of a head into residuals. Loaded long before it is needed. */
template <int PER_LANE> struct WarpResidual {
    WarpWave<PER_LANE> wave;
    WarpMetric<PER_LANE> metric;

    WarpResidual() = default;
    /** For plans with a wave or a metric. head_dim: the plan's, which the compiler may know. */
    __device__ __forceinline__ WarpResidual(const KeyMoments &m, int h, int head_dim, int lane)
        : wave(m, h, lane), metric(m, h, head_dim, lane)
    {
    }

    /** Turns x, a key minus the constant part of its centre, into A (k - c_p). row: [head_dim] in shared memory, for
     *  this warp alone. */
    __device__ __forceinline__ void take(int head_dim, bool has_metric, int position, float *row, float (&x)[PER_LANE],
                                         int lane) const
    {
        if (wave.are_own()) {
            wave.subtract(position, x);
        } else {
            wave.put(row, head_dim, position, wave.are_apart(row));
#pragma unroll
            for (int k = 0; k < PER_LANE; k++)
                if (lane + 32 * k < head_dim) x[k] -= row[lane + 32 * k];
            __syncwarp();
        }
        if (has_metric) metric.apply(x);
    }
};

// ---- a row in shared memory, by one warp, in place: slower, but with few registers ----

/** Adds x to row[channel] in lanes with `wanted`. Lanes with the same channel add one after the other. */
__device__ __forceinline__ void add_to_row(float *row, int channel, float x, bool wanted)
{
    const int lane = threadIdx.x % 32;
    const uint32_t others = __match_any_sync(ALL_LANES, wanted ? channel : -1 - lane);
    int before = __popc(others & ((1u << lane) - 1)); // earlier lanes with the same channel
#pragma unroll 1
    for (bool more = true; more; before--) {
        if (wanted && before == 0) row[channel] += x;
        __syncwarp();
        more = __any_sync(ALL_LANES, wanted && before > 0);
    }
}

/** Adds sign * (the wave of a head at a position) to row. */
__device__ __forceinline__ void add_wave(const KeyMoments &m, const HeadMoments &head, int position, float sign,
                                         float *row)
{
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < m.pairs; first += 32) {
        const int i = first + threadIdx.x % 32;
        const bool is_there = i < m.pairs;
        const Pair pair = m.pair(is_there ? i : 0);
        const float2 amplitude = is_there ? make_float2(head.wave[2 * i], head.wave[2 * i + 1]) : make_float2(0, 0);
        const float2 at = turned(amplitude, turn(phase_of(pair.increment, position)));
        const bool turns = amplitude.x != 0.0f || amplitude.y != 0.0f;
        add_to_row(row, pair.first, sign * at.x, turns);
        add_to_row(row, pair.second, sign * at.y, turns);
    }
}

/** Multiplies row by A, or if INVERSE by A^-1. */
template <bool INVERSE>
__device__ __forceinline__ void apply_metric(const KeyMoments &m, const HeadMoments &head, float *row)
{
    const int lane = threadIdx.x % 32;
    float along[TQ_MAX_METRIC_RANK] = {};
    __syncwarp();
#pragma unroll 1
    for (int c = lane; c < m.head_dim; c += 32) {
        const float x = INVERSE ? __fdiv_rn(row[c], head.scale[c]) : row[c] * head.scale[c];
        row[c] = x;
#pragma unroll
        for (int r = 0; r < TQ_MAX_METRIC_RANK; r++)
            if (r < m.rank()) along[r] = fmaf(head.directions[r * m.head_dim + c], x, along[r]);
    }
#pragma unroll
    for (int h = 16; h; h /= 2)
#pragma unroll
        for (int r = 0; r < TQ_MAX_METRIC_RANK; r++) along[r] += __shfl_xor_sync(ALL_LANES, along[r], h);
#pragma unroll
    for (int r = 0; r < TQ_MAX_METRIC_RANK; r++)
        along[r] *= INVERSE ? __fdiv_rn(1.0f, 1.0f + head.stretch[r]) - 1.0f : head.stretch[r];
#pragma unroll 1
    for (int c = lane; c < m.head_dim; c += 32) {
        float x = row[c];
#pragma unroll
        for (int r = 0; r < TQ_MAX_METRIC_RANK; r++)
            if (r < m.rank()) x = fmaf(along[r], head.directions[r * m.head_dim + c], x);
        row[c] = INVERSE ? __fdiv_rn(x, head.scale[c]) : x * head.scale[c];
    }
    __syncwarp();
}

/** Turns row, a key minus the constant part of its centre, into A (k - c_p). */
__device__ __forceinline__ void key_to_residual(const KeyMoments &m, int h, int position, float *row)
{
    const HeadMoments head = m.of_head(h);
    if (m.pairs) add_wave(m, head, position, -1.0f, row);
    if (m.metric) apply_metric<false>(m, head, row);
}

/** Turns a decoded row into its key minus the constant part of the centre. */
__device__ __forceinline__ void residual_to_key(const KeyMoments &m, int h, int position, float *row)
{
    const HeadMoments head = m.of_head(h);
    if (m.metric) apply_metric<true>(m, head, row);
    if (m.pairs) add_wave(m, head, position, 1.0f, row);
    __syncwarp();
}

} // namespace tq
#endif
