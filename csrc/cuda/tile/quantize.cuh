// Quantisation on the device: ranks, sums and scales, bit for bit those of the C core (csrc/kernels/scalar.c).
//
// Nothing here may be contracted or flushed: every operation that decides a byte is one of the __f*_rn intrinsics, in
// the order of the core. A rank is the number of thresholds <= u. Counting them would cost an instruction or two for
// each; here it costs five in all. The numbers are divided into `cells` of equal width, so that cell k has at most
// threshold k (5 bits: k and k + 1). Edges of cells need not be exact, because the threshold is looked up and compared:
// rank = k + (T[k] <= u).
// Tables are distributed over the lanes of a warp, so a look-up is a shuffle and costs the same for any width.
#ifndef TQ_CUDA_TILE_QUANTIZE_CUH
#define TQ_CUDA_TILE_QUANTIZE_CUH
#include <float.h>
#include <math.h>

#include "cuda/device/device.cuh"

#if defined(__CUDA_FTZ)
#error "codes are decided in subnormal numbers too: compile without -ftz=true or -use_fast_math"
#endif

namespace tq
{

/** A codebook as the kernels use it. At 6 bits, which use binary search, it has the positive half alone. */
struct Book {
    float per_cell;       // 1 / (n * width of a cell). Cells are 0..n; the outer two reach to infinity
    int32_t cells;        // n. As float bits it is n * 2^-149: a product with it has a rounded integer as its bits
    int32_t compares;     // thresholds in a cell; 0 at 6 bits
    float thresholds[32]; // ascending, padded with infinity
    float levels[32];     // by rank, level * step
};

struct Books {
    Book bits[TQ_MAX_BITS + 1]; // [0] unused
};

/** A lane's entries of a Book. */
struct LaneBook {
    float per_cell, cells;
    int32_t compares;
    float threshold, level;
};

/** Finds cells for a codebook; returns false if there are none. All codebooks of tq_get_codebook have some
 *  (tests/cuda/append_harness.cu). */
inline bool make_book(const tq_codebook &from, Book *to)
{
    const int levels = from.n_levels, half = levels / 2;
    if (from.bits == 6) {
        *to = {};
        for (int m = 0; m < half; m++) {
            to->thresholds[m] = m < half - 1 ? from.thresholds[half + m] : HUGE_VALF;
            to->levels[m] = (float)from.levels[from.code_of_rank[half + m]] * from.step;
        }
        return true;
    }
    const float *middle = from.thresholds + half - 1; // symmetric; middle[m] is the m-th threshold from 0 upwards
    for (int rank = 0; rank < 32; rank++) {
        to->thresholds[rank] = rank < levels - 1 ? from.thresholds[rank] : HUGE_VALF;
        to->levels[rank] = rank < levels ? (float)from.levels[from.code_of_rank[rank]] * from.step : 0.0f;
    }
    for (int compares = 1; compares <= 2; compares++) {
        // If the number of cells is odd, edges are at (m - 1/2) widths, with threshold m - 1 below and m above. If it
        // is even, they are at m widths, with m - 1 below and m + 1 above.
        float least = 0, most = HUGE_VALF;
        for (int m = 1; m + compares <= half; m++) {
            float edge = compares == 1 ? m - 0.5f : (float)m;
            least = fmaxf(least, middle[m - 1] / edge);
            most = fminf(most, middle[compares == 1 ? m : m + 1] / edge);
        }
        int n = levels - 1 - compares;
        if (n > 0 && !(most > least * 1.001f)) continue; // leaves room for rounding of the cell's number
        to->per_cell = n > 0 ? 2.0f / ((least + most) * (float)n) : 0.0f;
        to->cells = n > 0 ? n : 0;
        to->compares = compares;
        return true;
    }
    return false;
}

__device__ __forceinline__ LaneBook lane_book(const Book &book, int lane)
{
    return {book.per_cell, __int_as_float(book.cells), book.compares, book.thresholds[lane], book.levels[lane]};
}

/** count += threshold <= u. A predicate, because otherwise the compiler adds first and then selects. */
__device__ __forceinline__ void count_if_at_most(int &count, float threshold, float u)
{
    asm("{ .reg .pred p; setp.le.f32 p, %1, %2; @p add.s32 %0, %0, 1; }" : "+r"(count) : "f"(threshold), "f"(u));
}

/** Returns the rank of u. All lanes of a warp call it, with one book. TWICE: whether book.compares may be 2. */
template <bool TWICE> __device__ __forceinline__ int rank_of(float u, const LaneBook &book)
{
    float share =
        __saturatef(__fmaf_rn(u, book.per_cell, 0.5f)); // NaN becomes 0, and no threshold is <= it: rank 0 as in C
    int cell = __float_as_int(__fmul_rn(share, book.cells)), rank = cell;
    count_if_at_most(rank, __shfl_sync(ALL_LANES, book.threshold, cell), u);
    if constexpr (TWICE)
        if (book.compares == 2) count_if_at_most(rank, __shfl_sync(ALL_LANES, book.threshold, cell + 1), u);
    return rank;
}

/** A rank and its level. */
struct Ranked {
    int rank;
    float level;
};

/** Returns rank and level at 6 bits. By symmetry only the magnitude is searched: the number of positive thresholds that
 *  are <= u, or < -u for negative u. */
__device__ __forceinline__ Ranked ranked_of_6(float u, const LaneBook &book)
{
    const bool negative = !(u >= 0.0f); // NaN too: rank 0 as in C
    int magnitude = 0;
#pragma unroll
    for (int h = 16; h; h /= 2) {
        const float threshold = __shfl_sync(ALL_LANES, book.threshold, magnitude + h - 1);
        if (negative ? !(threshold >= -u) : threshold <= u) magnitude += h;
    }
    const float level = __shfl_sync(ALL_LANES, book.level, magnitude);
    return negative ? Ranked{31 - magnitude, -level} : Ranked{32 + magnitude, level};
}

__device__ __forceinline__ Ranked ranked(float u, const LaneBook &book)
{
    if (!book.compares) return ranked_of_6(u, book);
    const int rank = rank_of<true>(u, book);
    return {rank, __shfl_sync(ALL_LANES, book.level, rank)};
}

/** Returns the code of a rank: turboquant.h, "Codes of a codebook". */
__device__ __forceinline__ uint32_t code_of_rank(int rank, int bits)
{
    if (bits <= 3) return rank;
    const int half = 1 << (bits - 1);
    return rank ^ (rank < half ? 2 * half - 1 : half);
}

/** Sums for a scale over the channels of a row, of u = z / rms and its levels c. */
struct Sums {
    float uu, cu, cc;
};

struct Norm {
    float rms, inverse; // 0 and 0 if all numbers are 0
};

/** Returns rms and 1 / rms. ss: the sum of squares of z; mean: ss over the number of coded channels, rounded once. */
__device__ __forceinline__ Norm norm_of(float ss, float mean)
{
    if (ss < FLT_MIN) return {0.0f, 0.0f};
    const float rms = __fsqrt_rn(mean);
    return {rms, __frcp_rn(rms)};
}

/** Returns the scale of a row. times: another factor, 1 or that of settled rows. */
__device__ __forceinline__ __half scale_of(int scale, float rms, const Sums &sums, float times)
{
    float factor = 1.0f;
    if (scale == TQ_SCALE_EDEN) factor = __fdiv_rn(sums.uu, sums.cu);
    if (scale == TQ_SCALE_NORM_CORRECTED) factor = __fsqrt_rn(__fdiv_rn(sums.uu, sums.cc));
    if (scale == TQ_SCALE_LEAST_SQUARES) factor = __fdiv_rn(sums.cu, sums.cc);
    float s = rms == 0.0f ? 0.0f : __fmul_rn(rms, __fmul_rn(factor, times));
    return __float2half_rn(s < 65504.0f ? s : 65504.0f);
}

/** Settles a row's numbers (docs/rounding.md, "Settled rows"). largest: bits of the largest magnitude, whose exponent
 *  is E. least: 2^(E - 11). round: 1.5 * 2^(E - 18 + 23). */
struct Settling {
    float least, round;

    __device__ __forceinline__ explicit Settling(uint32_t largest)
    {
        const int exponent = (int)(largest >> 23);
        least = __int_as_float(max(exponent - 11, 0) << 23);
        round = __int_as_float((exponent + 5) << 23 | 0x400000);
    }
    __device__ __forceinline__ float operator()(float x) const
    {
        return fabsf(x) < least ? 0.0f : __fsub_rn(__fadd_rn(x, round), round);
    }
};

/** Sums in the order of encoding, for rows that are not settled: v[i] += v[i + h] for h = n/2 .. 1, with zeros up to
 *  the power of two n. Lane l holds v[l + 32 k] in v[k]; more zeros than needed change no sum. N trees run at once, to
 *  hide the latency of shuffles. Every lane gets all sums, in v[..][0]. */
template <int N, int PER_LANE> __device__ __forceinline__ void warp_trees(float (&v)[N][PER_LANE])
{
#pragma unroll
    for (int h = PER_LANE / 2; h; h /= 2)
#pragma unroll
        for (int k = 0; k < h; k++)
#pragma unroll
            for (int n = 0; n < N; n++) v[n][k] = __fadd_rn(v[n][k], v[n][k + h]);
#pragma unroll
    for (int h = 16; h; h /= 2)
#pragma unroll
        for (int n = 0; n < N; n++) v[n][0] = __fadd_rn(v[n][0], __shfl_xor_sync(ALL_LANES, v[n][0], h));
}

/** Turns x, lane l's sums over channels l + 32 k of settled rows, into the sums of the rows, in every lane. */
template <int N> __device__ __forceinline__ void settled_sums(float (&x)[N])
{
    constexpr int ORDER[] = {16, 8, 2, 1, 4};
#pragma unroll
    for (int i = 0; i < 5; i++)
#pragma unroll
        for (int n = 0; n < N; n++) x[n] = __fadd_rn(x[n], __shfl_xor_sync(ALL_LANES, x[n], ORDER[i]));
}

/** 1.5 * 2^23: the bits of x + WHOLE, rounded down, are WHOLE_BITS + floor(x). */
constexpr float WHOLE = 12582912.0f;
constexpr uint32_t WHOLE_BITS = 0x4b400000u;

/** Returns the sum of warp_trees within one thread. Addends are leaf(i), i < N, and zeros up to N2, a power of two.
 *  Indices are constants once inlined. */
template <int N, int N2, int H = 1, class Leaf>
__device__ __forceinline__ float thread_tree(const Leaf &leaf, int i = 0)
{
    if constexpr (H == N2) {
        return leaf(i);
    } else {
        float low = thread_tree<N, N2, 2 * H>(leaf, i);
        return i + H < N ? __fadd_rn(low, thread_tree<N, N2, 2 * H>(leaf, i + H)) : low;
    }
}

} // namespace tq
#endif
