// One warp encodes one vector of a plan that is not plain, bit for bit as csrc/core/baselines.c does. Lane l has
// channels l, l + 32, l + 64, .., so that group k is z[k] of all lanes.
#ifndef TQ_CUDA_BASELINES_ENCODE_CUH
#define TQ_CUDA_BASELINES_ENCODE_CUH
#include "cuda/append/encode_warp.cuh"
#include "cuda/baselines/baselines.cuh"

namespace tq
{

/** A number for each of a lane's channels. */
using LaneNumbers = float[BASELINE_GROUPS];

/** Tells which numbers of a lane belong to a block (groups first .. last - 1) and are no padding. */
struct BlockSpan {
    int first, last, dim, lane;

    __device__ __forceinline__ bool has_group(int k) const { return k >= first && k < last; }
    __device__ __forceinline__ bool has(int k) const { return has_group(k) && lane + 32 * k < dim; }
    __device__ __forceinline__ float channels() const { return (float)(min(32 * last, dim) - 32 * first); }
};

/** An encoded block. The code of number k is codes[32 * k + lane], 0 for padding, and its level is level[k]. */
struct CodedBlock {
    uint8_t *codes;
    LaneNumbers level;
    __half s, o;

    __device__ __forceinline__ void put(const BlockSpan &span, int k, int code, float level_of_code)
    {
        codes[32 * k + span.lane] = span.has(k) ? (uint8_t)code : 0;
        level[k] = level_of_code;
    }
};

__device__ __forceinline__ __half stored(float x)
{
    return __float2half_rn(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x);
}

/** Encodes by codebook. The scale (turboquant.h, tq_scale) is of the block alone. Sums run over all groups, with 0
 *  outside the block, but round like sums over the block: the larger tree adds the same groups in the same steps. */
__device__ __forceinline__ void encode_codebook(const AppendArgs &a, const BaselineSide &side, const BlockSpan &span,
                                                const LaneNumbers &z, CodedBlock &to)
{
    float squares[1][BASELINE_GROUPS];
    LaneNumbers u, c;
#pragma unroll
    for (int k = 0; k < BASELINE_GROUPS; k++) squares[0][k] = span.has(k) ? __fmul_rn(z[k], z[k]) : 0.0f;
    warp_trees(squares);
    const Norm norm = norm_of(squares[0][0], __fdiv_rn(squares[0][0], span.channels()));
#pragma unroll
    for (int k = 0; k < BASELINE_GROUPS; k++) {
        u[k] = c[k] = 0.0f;
        if (!span.has_group(k)) continue;
        const int bits = side.bits[k];
        const float scaled = __fmul_rn(z[k], norm.inverse);
        Coded coded;
        if (bits == TQ_WIDE_BITS) {
            coded = wide_coded(scaled);
        } else {
            const Ranked nearest = ranked(scaled, lane_book(a.books[bits], span.lane));
            coded = {code_of_rank(nearest.rank, bits), nearest.level};
        }
        if (span.has(k)) u[k] = scaled, c[k] = coded.level;
        to.put(span, k, (int)coded.code, coded.level);
    }
    to.s = scale_warp(a, norm.rms, u, c);
}

/** Returns the least (sign 1) or largest (sign -1) number of a block; of equal ones the first, as zeros have signs. */
__device__ __forceinline__ float first_least(const BlockSpan &span, const LaneNumbers &z, float sign)
{
    int at = 0;
    float start = 0.0f;
#pragma unroll
    for (int k = 0; k < BASELINE_GROUPS; k++)
        if (k == span.first) start = z[k];
    float least = __fmul_rn(sign, __shfl_sync(ALL_LANES, start, 0));
#pragma unroll
    for (int k = 0; k < BASELINE_GROUPS; k++)
        if (span.has(k) && sign * z[k] < least) least = sign * z[k], at = 32 * (k - span.first) + span.lane;
#pragma unroll
    for (int h = 16; h; h /= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, least, h);
        const int other_at = __shfl_xor_sync(ALL_LANES, at, h);
        if (other < least || (other == least && other_at < at)) least = other, at = other_at;
    }
    return sign * least;
}

/** Chooses codes with the scale and zero point as they are stored. */
__device__ __forceinline__ void encode_affine(int bits, const BlockSpan &span, const LaneNumbers &z, CodedBlock &to)
{
    const float top = (float)((1 << bits) - 1), low = first_least(span, z, 1.0f), high = first_least(span, z, -1.0f);
    to.o = stored(low);
    to.s = stored(__fdiv_rn(__fsub_rn(high, low), top));
    const float s = __half2float(to.s), o = __half2float(to.o);
#pragma unroll
    for (int k = 0; k < BASELINE_GROUPS; k++) {
        if (!span.has_group(k)) continue;
        const float code = s > 0.0f ? rintf(__fdiv_rn(__fsub_rn(z[k], o), s)) : 0.0f,
                    kept = code > 0.0f ? (code < top ? code : top) : 0.0f; // 0 for a NaN, which a matrix may make
        to.put(span, k, (int)kept, kept);
    }
}

__device__ __forceinline__ void encode_absmax(int bits, const BlockSpan &span, const LaneNumbers &z, CodedBlock &to)
{
    const float top = (float)((1 << (bits - 1)) - 1);
    float most = 0.0f;
#pragma unroll
    for (int k = 0; k < BASELINE_GROUPS; k++)
        if (span.has(k)) most = fmaxf(most, fabsf(z[k]));
    const float s = __fdiv_rn(warp_max(most), top), inverse = s > 0.0f ? __frcp_rn(s) : 0.0f;
    to.s = stored(s);
#pragma unroll
    for (int k = 0; k < BASELINE_GROUPS; k++) {
        if (!span.has_group(k)) continue;
        float code = roundf(__fmul_rn(z[k], inverse));
        code = code > top ? top : code < -top ? -top : code; // a subnormal scale has an inverse that overflows
        if (code != code) code = 0.0f;
        to.put(span, k, (int)code + (1 << (bits - 1)), code);
    }
}

/** Chooses the nearest entry, the lower of two that are equally near. */
__device__ __forceinline__ void encode_table(int bits, const float *table, const BlockSpan &span, const LaneNumbers &z,
                                             CodedBlock &to)
{
#pragma unroll
    for (int k = 0; k < BASELINE_GROUPS; k++) {
        if (!span.has_group(k)) continue;
        int best = 0;
        float level = table[0], distance = fabsf(__fsub_rn(z[k], level));
        for (int code = 1; code < 1 << bits; code++) {
            const float next = table[code], further = fabsf(__fsub_rn(z[k], next));
            if (further < distance) best = code, level = next, distance = further;
        }
        to.put(span, k, best, level);
    }
}

/** Where a token's numbers are stored in its record, `stride` apart; NULL: they are not stored. */
struct TokenNumbers {
    __half *at;
    int stride;

    __device__ __forceinline__ void put(int i, __half number, int lane) const
    {
        if (at && lane == 0) at[stride * i] = number;
    }
};

/** Encodes one block: its codes and its numbers. z becomes the residual. */
__device__ __forceinline__ void encode_block(const AppendArgs &a, const BaselineSide &side, const float *table,
                                             int block, const BlockSpan &span, LaneNumbers &z, uint8_t *codes,
                                             const TokenNumbers &numbers)
{
    const int bits = side.bits[span.first];
    CodedBlock coded;
    coded.codes = codes;
    coded.s = __float2half_rn(1.0f);
    coded.o = __float2half_rn(0.0f);
    if (side.levels == TQ_LEVELS_AFFINE) encode_affine(bits, span, z, coded);
    else if (side.levels == TQ_LEVELS_ABSMAX) encode_absmax(bits, span, z, coded);
    else if (side.levels == TQ_LEVELS_TABLE) encode_table(bits, table, span, z, coded);
    else encode_codebook(a, side, span, z, coded);
    if (side.levels == TQ_LEVELS_AFFINE) {
        numbers.put(2 * block, coded.s, span.lane);
        numbers.put(2 * block + 1, coded.o, span.lane);
    } else if (side.levels != TQ_LEVELS_TABLE) {
        numbers.put(block, coded.s, span.lane);
    }
    const float s = __half2float(coded.s), o = __half2float(coded.o);
#pragma unroll
    for (int k = 0; k < BASELINE_GROUPS; k++)
        if (span.has_group(k)) z[k] = __fsub_rn(z[k], __fadd_rn(__fmul_rn(s, coded.level[k]), o));
}

/** Stores the factor of the sketch of the residual r and, if its own signs are the sketch, those signs as codes. */
__device__ __forceinline__ void encode_sketch(const AppendArgs &a, const BaselineSide &side, const LaneNumbers &r,
                                              uint8_t *codes, const TokenNumbers &numbers, int lane)
{
    const bool is_norm = side.sketch == TQ_SKETCH_GAUSSIAN;
    float sizes[1][BASELINE_GROUPS];
#pragma unroll
    for (int k = 0; k < BASELINE_GROUPS; k++) {
        const bool real = lane + 32 * k < a.head_dim;
        sizes[0][k] = !real ? 0.0f : is_norm ? __fmul_rn(r[k], r[k]) : fabsf(r[k]);
        if (!is_norm && k < a.groups) codes[32 * (a.groups + k) + lane] = real && r[k] >= 0.0f;
    }
    if (side.levels == TQ_LEVELS_TABLE && !is_norm) return; // the factor is in the table
    warp_trees(sizes);
    const float sum = sizes[0][0];
    numbers.put(side.scales - 1, stored(is_norm ? __fsqrt_rn(sum) : __fdiv_rn(sum, (float)a.head_dim)), lane);
}

/** Encodes a rotated z: its numbers and its codes [32 * tiles], but for a Gaussian sketch's. z becomes the residual. */
__device__ __forceinline__ void encode_blocks(const AppendArgs &a, const BaselineSide &side, const float *table,
                                              LaneNumbers &z, uint8_t *codes, const TokenNumbers &numbers, int lane)
{
    for (int first = 0, last; first < a.groups; first = last) {
        for (last = first + 1; last < a.groups && side.block[last] == side.block[first];) last++;
        encode_block(a, side, table, side.block[first], {first, last, a.head_dim, lane}, z, codes, numbers);
    }
    if (side.sketch) encode_sketch(a, side, z, codes, numbers, lane);
}

} // namespace tq
#endif
