// One vector encoded by one warp: lane l has channels l, l + 32, l + 64, ..
#ifndef TQ_CUDA_ENCODE_WARP_CUH
#define TQ_CUDA_ENCODE_WARP_CUH
#include <type_traits>

#include "append.cuh"

namespace tq
{

/** The plan's rotation in place; row: a.head_dim floats of shared memory for this warp alone, contents lost. Where one pass takes
 *  all channels they stay in registers: distances below 32 are shuffles. */
template <int PER_LANE>
__device__ __forceinline__ void rotate_warp(const AppendArgs &a, float (&x)[PER_LANE], float *row, int lane)
{
    const bool one_pass = (a.head_dim & (a.head_dim - 1)) == 0;
    if (!one_pass) {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            if (lane + 32 * k < a.head_dim) row[lane + 32 * k] = x[k];
        __syncwarp();
        hadamard_row(row, a.head_dim, a.signs, false, lane);
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) x[k] = lane + 32 * k < a.head_dim ? row[lane + 32 * k] : 0.0f;
        return;
    }
#pragma unroll
    for (int k = 0; k < PER_LANE; k++)
        x[k] = __uint_as_float(__float_as_uint(x[k]) ^ (a.signs.word[0][k] >> lane & 1u) << 31);
#pragma unroll
    for (int h = 1; h < 32; h *= 2) {
        if (h >= a.head_dim) break;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            const float other = __shfl_xor_sync(ALL_LANES, x[k], h);
            x[k] = __fadd_rn(other, lane & h ? -x[k] : x[k]);
        }
    }
#pragma unroll
    for (int h = 1; h < PER_LANE; h *= 2) {
        if (32 * h >= a.head_dim) break;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            if (k & h) continue;
            const float low = x[k], high = x[k + h];
            x[k] = __fadd_rn(low, high);
            x[k + h] = __fsub_rn(low, high);
        }
    }
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) x[k] = __fmul_rn(x[k], a.hadamard_factor);
}

/** The sums that the scale is made of, from u and its levels c, 0 where a channel has no code. */
template <int PER_LANE>
__device__ __forceinline__ __half scale_warp(const AppendArgs &a, float rms, const float (&u)[PER_LANE],
                                             const float (&c)[PER_LANE])
{
    Sums sums = {};
    if (a.scale == TQ_SCALE_NORM) return scale_of(a.scale, rms, sums);
    float products[2][PER_LANE]; // what the scale is a quotient of: <u, u> or <c, u>, and <c, u> or <c, c>
    const bool eden = a.scale == TQ_SCALE_EDEN, least_squares = a.scale == TQ_SCALE_LEAST_SQUARES;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
        products[0][k] = __fmul_rn(least_squares ? c[k] : u[k], u[k]);
        products[1][k] = __fmul_rn(c[k], eden ? u[k] : c[k]);
    }
    warp_trees(products);
    sums.uu = products[0][0];
    sums.cu = least_squares ? products[0][0] : products[1][0];
    sums.cc = products[1][0];
    return scale_of(a.scale, rms, sums);
}

/** z, rotated but not divided by the steps yet -> codes [32 * groups] in shared memory, one byte each; the scale to every lane.
 *  first: the book of group 0, as it is wanted early. Any plan: widths by group, padding, steps. */
template <int PER_LANE>
__device__ __forceinline__ __half encode_any(const AppendArgs &a, const AppendSide &side, const float *steps,
                                             const LaneBook &first, float (&z)[PER_LANE], uint8_t *codes, int lane)
{
    float squares[1][PER_LANE], u[PER_LANE], c[PER_LANE];
    bool coded[PER_LANE];
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
        coded[k] = k < a.groups && side.bits[k] && lane + 32 * k < a.head_dim;
        if (steps && k < a.groups) z[k] = __fmul_rn(z[k], __fdiv_rn(1.0f, steps[k]));
        squares[0][k] = coded[k] ? __fmul_rn(z[k], z[k]) : 0.0f;
    }
    warp_trees(squares);
    const Norm norm = norm_of(squares[0][0], __fdiv_rn(squares[0][0], side.coded_channels));
    LaneBook book = first;
    int bits_of_book = side.bits[0];
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
        u[k] = c[k] = 0.0f;
        if (k >= a.groups) continue;
        const int bits = side.bits[k];
        uint32_t code = 0;
        if (bits) {
            if (bits != bits_of_book) book = lane_book(a.books[bits], lane);
            bits_of_book = bits;
            const float scaled = __fmul_rn(z[k], norm.inverse);
            const int rank = rank_of<true>(scaled, book);
            const float level = __shfl_sync(ALL_LANES, book.level, rank), step = steps ? steps[k] : 1.0f;
            if (coded[k]) { // with steps the scale is found in the units of x
                u[k] = __fmul_rn(scaled, step);
                c[k] = __fmul_rn(level, step);
                code = code_of_rank(rank, bits);
            }
        }
        codes[lane + 32 * k] = (uint8_t)code;
    }
    return scale_warp(a, norm.rms, u, c);
}

/** The same where all groups have one width and no padding, and there are no steps. */
template <int PER_LANE>
__device__ __forceinline__ __half encode_one_width(const AppendArgs &a, const AppendSide &side, const LaneBook &book,
                                                   const float (&z)[PER_LANE], uint8_t *codes, int lane)
{
    float squares[1][PER_LANE], u[PER_LANE], c[PER_LANE];
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) squares[0][k] = __fmul_rn(z[k], z[k]); // 0 behind head_dim
    warp_trees(squares);
    const Norm norm = norm_of(squares[0][0], __fdiv_rn(squares[0][0], side.coded_channels));
    int ranks[PER_LANE];
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
        u[k] = __fmul_rn(z[k], norm.inverse);
        ranks[k] = rank_of<true>(u[k], book);
    }
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
        c[k] = __shfl_sync(ALL_LANES, book.level, ranks[k]);
        if (k < a.groups) codes[lane + 32 * k] = (uint8_t)code_of_rank(ranks[k], side.one_width);
        else c[k] = 0.0f;
    }
    return scale_warp(a, norm.rms, u, c);
}

template <int PER_LANE>
__device__ __forceinline__ __half encode_warp(const AppendArgs &a, const AppendSide &side, const float *steps,
                                              const LaneBook &first, float (&z)[PER_LANE], uint8_t *codes, int lane)
{
    return side.one_width ? encode_one_width(a, side, first, z, codes, lane)
                          : encode_any(a, side, steps, first, z, codes, lane);
}

/** f with as many channels a lane as the plan needs, as std::integral_constant. */
template <class F> tq_status with_channels_per_lane(int head_dim, const F &f)
{
    if (head_dim <= 32) return f(std::integral_constant<int, 1>());
    if (head_dim <= 64) return f(std::integral_constant<int, 2>());
    if (head_dim <= 128) return f(std::integral_constant<int, 4>());
    return f(std::integral_constant<int, 8>());
}

} // namespace tq
#endif
