// The Hadamard rotation of two passes with a vector in the registers of two lanes, and its signs at almost no cost.
//
// A butterfly of sa a and sb b is sa (a + s b) and sa (a - s b) with s = sa sb: one rounded sum each, since products
// with +-1 are exact. So a block of channels keeps the sign of its first channel aside, the next stage needs only the
// product of two such signs, which a fused multiply-add includes, and the last sign goes into the last factor. Except
// for signs of zeros, on which no code depends, the bits are those of turboquant.h.
//
// A table for each lane of a token has the products, in the order of their use. Lane q has the channels 2 i + q. The
// stage of distance 1 of the first pass is free, because each lane reads both channels and keeps one of the two sums.
// That of the second pass is a shuffle: t + s other in the lower lane, and t - s other in the upper one, which is minus
// the difference, so its sign changes too.
#ifndef TQ_CUDA_TILE_HADAMARD_CUH
#define TQ_CUDA_TILE_HADAMARD_CUH
#include <math.h>

#include "cuda/device/device.cuh"

namespace tq
{

/** dim channels of a token in two lanes of a warp: lane q of token i is lane 16 q + i. */
template <int DIM_> struct Split {
    static constexpr int DIM = DIM_, LANES = 2, PER_LANE = DIM / LANES, ROUND = 32 / LANES, P = 64, PASSES = 2;
    static_assert(DIM > P && DIM < 2 * P && DIM % 16 == 0);

    __host__ __device__ static constexpr int channel(int i, int q) { return 2 * i + q; }
    /** The xor of lane numbers that leads to a channel's partner at distance h; 0: the same lane. */
    __host__ __device__ static constexpr int other_lane(int h) { return h == 1 ? 16 : 0; }

    /** Index in a table of the product for channel i of a pass, in the stage of distance h. Stages start at multiples
     *  of four. The factor follows the last stage, h = P. */
    __host__ __device__ static constexpr int products(int h)
    {
        return ((h == 1 ? P / LANES : P / (2 * h)) + 3) / 4 * 4;
    }
    __host__ __device__ static constexpr int start(int h) { return h == 1 ? 0 : start(h / 2) + products(h / 2); }
    __host__ __device__ static constexpr int from_start(int h, int i) { return h == P ? 0 : h == 1 ? i : i / h; }
    /** Floats of a table: an odd number of quadruples, so that the lanes of a token read different banks. */
    static constexpr int TABLE = (start(P) + 4) / 4 % 2 ? start(P) + 4 : start(P) + 8;
};

template <class S> struct SignTables {
    float product[S::PASSES][S::LANES][S::TABLE];
};

/** signs: tq_plan.signs. */
template <class S> SignTables<S> sign_tables(const uint32_t (*signs)[TQ_MAX_DIM / 32])
{
    SignTables<S> tables = {};
    const float factor = (float)(1.0 / sqrt((double)S::P));
    for (int pass = 0; pass < S::PASSES; pass++) {
        float sign[S::P]; // factor of a stored channel
        for (int c = 0; c < S::P; c++) sign[c] = signs[pass][c / 32] >> (c % 32) & 1 ? -1.0f : 1.0f;
        for (int h = 1; h < S::P; h *= 2) {
            const bool read = h == 1 && pass == 0;
            float after[S::P];
            for (int i = 0; i < S::P / S::LANES; i++)
                for (int q = 0; q < S::LANES; q++) {
                    const int c = S::channel(i, q), low = c & ~h, high = c | h;
                    const bool upper = c & h, alone = S::other_lane(h) != 0;
                    const float product = sign[low] * sign[high];
                    tables.product[pass][q][S::start(h) + S::from_start(h, i)] = upper && alone ? -product : product;
                    after[c] = upper && alone && !read ? -sign[high] : sign[low];
                }
            for (int c = 0; c < S::P; c++) sign[c] = after[c];
        }
        for (int q = 0; q < S::LANES; q++) tables.product[pass][q][S::start(S::P)] = factor * sign[S::channel(0, q)];
    }
    return tables;
}

/** Number k of a table in shared memory; four at a time, of which the compiler loads each once. */
__device__ __forceinline__ float product_of(const float *table, int k)
{
    const float4 four = reinterpret_cast<const float4 *>(table)[k / 4];
    return k % 4 == 0 ? four.x : k % 4 == 1 ? four.y : k % 4 == 2 ? four.z : four.w;
}

/** Stages of distance H, 2 H .. P / 2 and the factor for the channels of a pass, v[0] the first of them. Indices are
 *  constants once inlined. */
template <class S, int H> __device__ __forceinline__ void hadamard_stages(float *v, const float *table)
{
    constexpr int N = S::P / S::LANES, START = S::start(H);
    if constexpr (H == S::P) {
        const float factor = table[START];
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = __fmul_rn(v[i], factor);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float s = product_of(table, START + S::from_start(H, i));
            if constexpr (S::other_lane(H)) {
                v[i] = __fmaf_rn(__shfl_xor_sync(ALL_LANES, v[i], S::other_lane(H)), s, v[i]);
            } else if (!(i & H / 2)) {
                const float low = v[i], high = v[i + H / 2];
                v[i] = __fmaf_rn(high, s, low);
                v[i + H / 2] = __fmaf_rn(-high, s, low);
            }
        }
        hadamard_stages<S, 2 * H>(v, table);
    }
}

/** Everything after the first stage of the first pass, which was done while reading. tables: [PASSES][LANES][TABLE],
 *  from the lane's own on. */
template <class S> __device__ __forceinline__ void hadamard_split(float (&v)[S::PER_LANE], const float *tables)
{
    hadamard_stages<S, 2>(v, tables);
    hadamard_stages<S, 1>(v + (S::DIM - S::P) / S::LANES, tables + S::LANES * S::TABLE);
}

} // namespace tq
#endif
