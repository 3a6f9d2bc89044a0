// One warp encodes one vector: lane l has channels l, l + 32, l + 64, .. A slice is channels 32 k .. 32 k + 31. It is
// one group of 32 channels or, with groups of 16 (FINE), two groups, one for each half of the warp.
#ifndef TQ_CUDA_APPEND_ENCODE_WARP_CUH
#define TQ_CUDA_APPEND_ENCODE_WARP_CUH
#include <type_traits>

#include "cuda/append/params.cuh"

namespace tq
{

/** The sign bits to flip in a lane's numbers before the rotation. */
template <int PER_LANE> struct Flips {
    uint32_t bit[PER_LANE];

    __device__ __forceinline__ Flips(const HadamardSigns &signs, int lane)
    {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) bit[k] = (signs.pass(0)[k] >> lane & 1u) << 31;
    }
};

/** Applies the rotation of a head_dim that is a power of two, in registers; for settled rows without its factor. */
template <class Args, int PER_LANE>
__device__ __forceinline__ void rotate_registers(const Args &a, const Flips<PER_LANE> &flips, float (&x)[PER_LANE],
                                                 int lane)
{
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) x[k] = __uint_as_float(__float_as_uint(x[k]) ^ flips.bit[k]);
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
    if constexpr (!Args::SETTLED)
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) x[k] = __fmul_rn(x[k], a.factor);
}

/** Applies the rotation in place. row: a.head_dim floats of shared memory for this warp alone, contents lost. */
template <class Args, int PER_LANE>
__device__ __forceinline__ void rotate_warp(const Args &a, float (&x)[PER_LANE], float *row, int lane)
{
    const bool one_pass = (a.head_dim & (a.head_dim - 1)) == 0;
    if (one_pass) {
        rotate_registers(a, Flips<PER_LANE>(a.signs, lane), x, lane);
        return;
    }
#pragma unroll
    for (int k = 0; k < PER_LANE; k++)
        if (lane + 32 * k < a.head_dim) row[lane + 32 * k] = x[k];
    __syncwarp();
    hadamard_row(row, a.head_dim, a.signs, false, lane);
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) x[k] = lane + 32 * k < a.head_dim ? row[lane + 32 * k] : 0.0f;
}

/** Settles a row and turns it into z, in place. centre: rotated as rows are; 0 if there is none. */
template <class Args, int PER_LANE>
__device__ __forceinline__ void rotate_settled(const Args &a, const Flips<PER_LANE> &flips, float (&x)[PER_LANE],
                                               const float (&centre)[PER_LANE], int lane)
{
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) largest = max(largest, __float_as_uint(x[k]) & 0x7fffffffu);
    const Settling settling(__reduce_max_sync(ALL_LANES, largest));
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) x[k] = settling(x[k]);
    rotate_registers(a, flips, x, lane);
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) x[k] = __fsub_rn(x[k], centre[k]);
}

/** Sums x y over all channels, for every lane: N sums at once, to hide the latency of shuffles. pair(n, k): x, y. */
template <class Args, int PER_LANE, int N, class Pair>
__device__ __forceinline__ void warp_dots(float (&sums)[N], const Pair &pair)
{
    if constexpr (Args::SETTLED) {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float2 xy = pair(n, k);
                sums[n] = k ? __fmaf_rn(xy.x, xy.y, sums[n]) : __fmul_rn(xy.x, xy.y);
            }
        settled_sums(sums);
    } else {
        float products[N][PER_LANE];
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float2 xy = pair(n, k);
                products[n][k] = __fmul_rn(xy.x, xy.y);
            }
        warp_trees(products);
#pragma unroll
        for (int n = 0; n < N; n++) sums[n] = products[n][0];
    }
}

template <class Args, int PER_LANE>
__device__ __forceinline__ float warp_dot(const float (&x)[PER_LANE], const float (&y)[PER_LANE])
{
    float sum[1];
    warp_dots<Args, PER_LANE>(sum, [&](int, int k) { return make_float2(x[k], y[k]); });
    return sum[0];
}

/** Returns the number that has a code of up to 5 bits: u = z * times or, for settled rows, the middle of its cell. */
template <class Args> __device__ __forceinline__ float searched(float z, float times)
{
    if constexpr (!Args::SETTLED) return __fmul_rn(z, times);
    const float units = __fmul_rn(times, TQ_SETTLED_UNITS);
    const float whole = __fsub_rn(__fmaf_rd(z, units, WHOLE), WHOLE);
    return __fmul_rn(__fadd_rn(whole, 0.5f), 1.0f / TQ_SETTLED_UNITS);
}

/** Returns the scale for u and its levels c, both 0 where a channel has no code. */
template <class Args, int PER_LANE>
__device__ __forceinline__ __half scale_warp(const Args &a, float rms, const float (&u)[PER_LANE],
                                             const float (&c)[PER_LANE])
{
    Sums sums = {};
    if (a.scale == TQ_SCALE_NORM) return scale_of(a.scale, rms, sums, 1.0f);
    float products[2][PER_LANE]; // the scale's dividend <u, u> or <c, u>, and its divisor <c, u> or <c, c>
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
    return scale_of(a.scale, rms, sums, 1.0f);
}

/** The same for settled rows, from z instead of u. steps: whether there are any. */
template <class Args, int PER_LANE>
__device__ __forceinline__ __half scale_settled(const Args &a, const AppendSide &side, bool steps, const Norm &norm,
                                                const float (&z)[PER_LANE], const float (&c)[PER_LANE])
{
    const bool eden = a.scale == TQ_SCALE_EDEN, least_squares = a.scale == TQ_SCALE_LEAST_SQUARES;
    Sums sums = {side.coded_channels, 0.0f, 0.0f};
    if (eden || least_squares) sums.cu = __fmul_rn(warp_dot<Args>(c, z), norm.inverse);
    if (steps && !least_squares) sums.uu = __fmul_rn(__fmul_rn(warp_dot<Args>(z, z), norm.inverse), norm.inverse);
    if (!eden) sums.cc = warp_dot<Args>(c, c);
    return scale_of(a.scale, norm.rms, sums, a.factor);
}

/** The group of a lane's channel in slice k. */
template <bool FINE> __device__ __forceinline__ int group_of(int k, int lane) { return FINE ? 2 * k + lane / 16 : k; }

/** A code and its level. */
struct Coded {
    uint32_t code;
    float level;
};

/** Encodes at 8 bits (turboquant.h). Clamping after rounding is enough: the rounding saturates and makes NaN 0. */
__device__ __forceinline__ Coded wide_coded(float u)
{
    const int level = max(-127, min(127, __float2int_rn(__fmul_rn(u, 1 / TQ_WIDE_STEP))));
    return {(uint32_t)(128 + level), __fmul_rn((float)level, TQ_WIDE_STEP)};
}

/** The books of a slice's groups. Each is spread over the whole warp, so with two books all lanes look up in both. */
template <bool FINE> struct SliceBooks {
    static constexpr int GROUPS = FINE ? 2 : 1;
    LaneBook book[GROUPS];
    int bits[GROUPS]; // width of the book; if a group needs none, the book of an earlier slice stays

    /** Returns the width of the book that a group needs; 0: it needs none. */
    static __device__ __forceinline__ int book_bits(const AppendSide &side, int group)
    {
        return side.bits[group] == TQ_WIDE_BITS ? 0 : side.bits[group];
    }

    __device__ __forceinline__ SliceBooks(const AppendArgs &a, const AppendSide &side, int lane)
    {
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            bits[i] = book_bits(side, i);
            book[i] = lane_book(a.books[bits[i]], lane);
        }
    }

    /** Loads the books of slice k. Returns whether it has bits. */
    __device__ __forceinline__ bool take(const AppendArgs &a, const AppendSide &side, int k, int lane)
    {
        bool any = false;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            const int wanted = book_bits(side, GROUPS * k + i);
            if (wanted && wanted != bits[i]) {
                bits[i] = wanted;
                book[i] = lane_book(a.books[wanted], lane);
            }
            any |= side.bits[GROUPS * k + i] != 0;
        }
        return any;
    }

    /** Returns rank and level. u: from `searched`, for up to 5 bits; exact: z * times, for 6 bits. */
    __device__ __forceinline__ Ranked look_up(float u, float exact, int lane) const
    {
        Ranked nearest = ranked(bits[0] == 6 ? exact : u, book[0]);
        if constexpr (FINE) {
            if (bits[1] == bits[0]) return nearest;
            const Ranked high = ranked(bits[1] == 6 ? exact : u, book[1]);
            if (lane >= 16) nearest = high;
        }
        return nearest;
    }
};

// ---- the search for a scale: docs/rounding.md, "Tries" ----

/** The result of the best factor so far. */
template <int PER_LANE> struct Found {
    float gain, cu;
    uint32_t codes[PER_LANE]; // or ranks
};

/** Tries factors first .. first + N - 1. numbers: z if rows are settled, else u; like the levels, in the units of x. */
template <int N, class Args, int PER_LANE, class Round>
__device__ __forceinline__ void try_factors(const Args &a, int first, float inverse, const float (&numbers)[PER_LANE],
                                            const Round &round, Found<PER_LANE> &found)
{
    uint32_t codes[N][PER_LANE];
    float c[N][PER_LANE], sums[2 * N]; // <c, u> and <c, c>
#pragma unroll
    for (int n = 0; n < N; n++) round(__fmul_rn(inverse, a.factors[first + n]), codes[n], c[n]);
    warp_dots<Args, PER_LANE>(sums,
                              [&](int i, int k) { return make_float2(c[i / 2][k], i % 2 ? c[i / 2][k] : numbers[k]); });
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float cu = Args::SETTLED ? __fmul_rn(sums[2 * n], inverse) : sums[2 * n],
                    gain = __fmul_rn(cu, __fdiv_rn(cu, sums[2 * n + 1]));
        const bool better = (first == 0 && n == 0) || gain > found.gain;
        found.gain = better ? gain : found.gain;
        found.cu = better ? cu : found.cu;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) found.codes[k] = better ? codes[n][k] : found.codes[k];
    }
}

/** Finds the best factor's codes; returns their scale. round(times, codes, c): makes codes and levels of z * times. */
template <class Args, int PER_LANE, class Round>
__device__ __forceinline__ __half search_scale(const Args &a, const AppendSide &side, bool steps, const Norm &norm,
                                               const float (&numbers)[PER_LANE], const Round &round,
                                               uint32_t (&codes)[PER_LANE])
{
    Found<PER_LANE> found;
    if constexpr (Args::USUAL) { // several at once, as latency is all that counts
        try_factors<3>(a, 0, norm.inverse, numbers, round, found);
#pragma unroll 1
        for (int first = 3; first < a.tries; first += 2) try_factors<2>(a, first, norm.inverse, numbers, round, found);
    } else {
#pragma unroll 1
        for (int first = 0; first < a.tries; first++) try_factors<1>(a, first, norm.inverse, numbers, round, found);
    }
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) codes[k] = found.codes[k];
    float uu = side.coded_channels;
    if (!Args::SETTLED || steps) uu = warp_dot<Args>(numbers, numbers);
    if (Args::SETTLED && steps) uu = __fmul_rn(__fmul_rn(uu, norm.inverse), norm.inverse);
    return scale_of(TQ_SCALE_EDEN, norm.rms, {uu, found.cu, 0.0f}, Args::SETTLED ? a.factor : 1.0f);
}

// ---- rows ----

/** Encodes z, rotated but not yet divided by the steps, of any plan: widths by group, padding, steps. codes: whole
 *  slices in shared memory, one byte each. books: of slice 0, loaded early. Returns the scale to every lane. */
template <int PER_LANE, bool FINE, class Args>
__device__ __forceinline__ __half encode_any(const Args &a, const AppendSide &side, const float *steps,
                                             SliceBooks<FINE> books, float (&z)[PER_LANE], uint8_t *codes, int lane)
{
    float kept[PER_LANE], u[PER_LANE],
        c[PER_LANE]; // u: z if rows are settled. With steps, u and c are in the units of x
    uint32_t found[PER_LANE];
    bool coded[PER_LANE];
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
        const int group = group_of<FINE>(k, lane);
        coded[k] = group < a.groups && side.bits[group] && lane + 32 * k < a.head_dim;
        if (steps && group < a.groups) z[k] = __fmul_rn(z[k], __fdiv_rn(1.0f, steps[group]));
        kept[k] = coded[k] ? z[k] : 0.0f;
    }
    const auto step_of = [&](int k) { return steps && coded[k] ? steps[group_of<FINE>(k, lane)] : 1.0f; };
    const float ss = warp_dot<Args>(kept, kept);
    const Norm norm = norm_of(ss, __fdiv_rn(ss, side.coded_channels));
#pragma unroll
    for (int k = 0; k < PER_LANE; k++)
        u[k] = coded[k] ? __fmul_rn(Args::SETTLED ? z[k] : __fmul_rn(z[k], norm.inverse), step_of(k)) : 0.0f;
    const auto round = [&](float times, uint32_t (&to)[PER_LANE], float (&levels)[PER_LANE]) {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            levels[k] = 0.0f, to[k] = 0;
            if (32 * k >= a.head_dim || !books.take(a, side, k, lane)) continue;
            const float scaled = __fmul_rn(z[k], times);
            const Ranked ranked = books.look_up(searched<Args>(z[k], times), scaled, lane);
            if (!coded[k]) continue;
            const int bits = side.bits[group_of<FINE>(k, lane)];
            const Coded one =
                bits == TQ_WIDE_BITS ? wide_coded(scaled) : Coded{code_of_rank(ranked.rank, bits), ranked.level};
            levels[k] = __fmul_rn(one.level, step_of(k));
            to[k] = one.code;
        }
    };
    __half scale;
    if constexpr (Args::SEARCHES) {
        scale = search_scale(a, side, steps, norm, u, round, found);
    } else {
        round(norm.inverse, found, c);
        if constexpr (Args::SETTLED) scale = scale_settled(a, side, steps, norm, u, c);
        else scale = scale_warp(a, norm.rms, u, c);
    }
#pragma unroll
    for (int k = 0; k < PER_LANE; k++)
        if (32 * k < a.head_dim) codes[lane + 32 * k] = (uint8_t)found[k];
    return scale;
}

/** The same where all groups have one width, `bits`, no slice has padding, and there are no steps. */
template <class Args, int PER_LANE>
__device__ __forceinline__ __half encode_one_width(const Args &a, const AppendSide &side, int bits,
                                                   const LaneBook &book, const float (&z)[PER_LANE], uint8_t *codes,
                                                   int lane)
{
    const float ss = warp_dot<Args>(z, z); // z is 0 from head_dim on
    float mean;                            // for a power of two, the product equals the quotient
    if constexpr (Args::USUAL) mean = __fmul_rn(ss, 1.0f / Args::head_dim);
    else mean = __fdiv_rn(ss, side.coded_channels);
    const Norm norm = norm_of(ss, mean);
    const auto round = [&](float times, uint32_t (&ranks)[PER_LANE], float (&c)[PER_LANE]) {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            ranks[k] = (uint32_t)rank_of<!Args::USUAL>(searched<Args>(z[k], times), book);
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            c[k] = __shfl_sync(ALL_LANES, book.level, (int)ranks[k]);
            if (32 * k >= a.head_dim) c[k] = 0.0f;
        }
    };
    const auto store = [&](const uint32_t (&ranks)[PER_LANE]) {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            if (32 * k < a.head_dim) codes[lane + 32 * k] = (uint8_t)code_of_rank((int)ranks[k], bits);
    };
    float u[PER_LANE], c[PER_LANE]; // u: z if rows are settled
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) u[k] = Args::SETTLED ? z[k] : __fmul_rn(z[k], norm.inverse);
    uint32_t ranks[PER_LANE];
    if constexpr (Args::SEARCHES) {
        const __half scale = search_scale(a, side, false, norm, u, round, ranks);
        store(ranks);
        return scale;
    }
    round(norm.inverse, ranks, c);
    store(ranks);
    if constexpr (Args::SETTLED) return scale_settled(a, side, false, norm, u, c);
    else return scale_warp(a, norm.rms, u, c);
}

template <int PER_LANE, bool FINE, class Args>
__device__ __forceinline__ __half encode_warp(const Args &a, const AppendSide &side, const float *steps,
                                              const SliceBooks<FINE> &books, float (&z)[PER_LANE], uint8_t *codes,
                                              int lane)
{
    return side.one_width ? encode_one_width(a, side, side.one_width, books.book[0], z, codes, lane)
                          : encode_any(a, side, steps, books, z, codes, lane);
}

/** Calls f(channels per lane, whether groups have 16 channels, arguments). The first two are std::integral_constant,
 *  and the arguments have the type that the plan needs. */
template <class F> tq_status with_channels_per_lane(const AppendArgs &args, bool settled, const F &f)
{
    const auto with = [&](auto fine, const auto &as_it_is) {
        if (args.head_dim <= 64) return f(std::integral_constant<int, 2>(), fine, as_it_is);
        if (args.head_dim <= 128) return f(std::integral_constant<int, 4>(), fine, as_it_is);
        if constexpr (!fine()) // no plan has groups of 16 above 256 channels
            if (args.head_dim > 256) return f(std::integral_constant<int, 16>(), fine, as_it_is);
        return f(std::integral_constant<int, 8>(), fine, as_it_is);
    };
    const auto with_groups = [&](const auto &as_it_is) {
        return args.tile_tokens == TQ_TILE ? with(std::false_type(), as_it_is) : with(std::true_type(), as_it_is);
    };
    if (settled && args.tries) return with_groups(SearchArgs<SettledArgs>{{{args}}});
    if (settled) return with_groups(SettledArgs{args});
    if (args.tries) return with_groups(SearchArgs<AppendArgs>{{args}});
    return with_groups(args);
}

} // namespace tq
#endif
