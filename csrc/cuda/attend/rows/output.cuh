/* From merged sums to results: scale, value centre, 1 / sum of weights, log-sum-exp. */
#ifndef TQ_CUDA_ATTEND_ROWS_OUTPUT_CUH
#define TQ_CUDA_ATTEND_ROWS_OUTPUT_CUH
#include "cuda/attend/rows/query.cuh"

namespace tq
{

__device__ __forceinline__ void add_scaled(float4 &sum, float f, float4 x)
{
    sum = make_float4(fmaf(f, x.x, sum.x), fmaf(f, x.y, sum.y), fmaf(f, x.z, sum.z), fmaf(f, x.w, sum.w));
}

/** Returns the factor of weights whose row's maximum moves from `from` to `to`. */
__device__ __forceinline__ float moved(float from, float to) { return from == -INFINITY ? 0 : exp2_fast(from - to); }

/** A row's totals over all parts. */
struct MergedRow {
    float max, sum, packed_sum, rounded_sum;
};

template <int GROUPS> __device__ __forceinline__ void clear(LaneRow<GROUPS> &row)
{
#pragma unroll
    for (int k = 0; k < LaneRow<GROUPS>::QUADS; k++) row.quad[k] = make_float4(0, 0, 0, 0);
}

/** A KV head's steps for the groups of a lane's channels; 1 without steps, or if the group has no bits. */
template <int GROUPS> struct ValueSteps {
    float step[LaneRow<GROUPS>::QUADS];

    __device__ __forceinline__ ValueSteps(const AttendArgs &a, int32_t h, int lane)
    {
#pragma unroll
        for (int k = 0; k < LaneRow<GROUPS>::QUADS; k++) {
            int g = group_of(a, LaneRow<GROUPS>::channel(k, lane));
            bool has = a.p.layer.value.steps && g < a.plan_groups && a.value.bits[g];
            step[k] = has ? a.p.layer.value.steps[h * a.p.layer.value.stride_head + g] : 1.0f;
        }
    }
};

/** Turns a lane's packed sums into rotated values: factor * sum + offset * rounded_sum. It is made before the sums are
 *  known. */
template <int GROUPS> struct ValueScale {
    float factor[LaneRow<GROUPS>::QUADS], offset[LaneRow<GROUPS>::QUADS];

    /** From and to a pair in shared memory, for up to 128 channels. */
    __device__ __forceinline__ explicit ValueScale(float2 pair) : factor{pair.x}, offset{pair.y} {}
    __device__ __forceinline__ float2 pair() const { return make_float2(factor[0], offset[0]); }
    /** The part that depends on the plan alone. */
    __device__ __forceinline__ ValueScale(const AttendArgs &a, int lane)
    {
#pragma unroll
        for (int k = 0; k < LaneRow<GROUPS>::QUADS; k++) {
            int c = LaneRow<GROUPS>::channel(k, lane), g = group_of(a, c),
                bits = g < a.plan_groups ? a.value.bits[g] : 0;
            int down = bits <= 2 && a.value.row_factor ? bits * (c % TQ_TILE / 8) : 0;
            factor[k] = bits ? a.value.factor[bits] * __int_as_float(127 - down << 23) : 0; /* 2^-down */
            offset[k] = bits ? a.value.offset_factor[bits] : 0;
        }
    }
    __device__ __forceinline__ ValueScale(const AttendArgs &a, const RowSet &s, int lane) : ValueScale(a, lane)
    {
        multiply(ValueSteps<GROUPS>(a, s.h, lane));
    }
    __device__ __forceinline__ void multiply(const ValueSteps<GROUPS> &steps)
    {
#pragma unroll
        for (int k = 0; k < LaneRow<GROUPS>::QUADS; k++) factor[k] *= steps.step[k], offset[k] *= steps.step[k];
    }
    __device__ __forceinline__ void apply(LaneRow<GROUPS> &row, float rounded_sum) const
    {
#pragma unroll
        for (int k = 0; k < LaneRow<GROUPS>::QUADS; k++) {
            float4 &x = row.quad[k];
            float f = factor[k], y = offset[k] * rounded_sum;
            x = f == 0 ? make_float4(0, 0, 0, 0)
                       : make_float4(fmaf(f, x.x, y), fmaf(f, x.y, y), fmaf(f, x.z, y), fmaf(f, x.w, y));
        }
    }
};

/** Where a row's results are written. */
struct Output {
    int32_t b, token, head; /* token: index in out and lse, -1 for rows that are not real */
    const float *centre;

    __device__ __forceinline__ Output(const AttendArgs &a, const RowSet &s, int i)
        : b(s.b), centre(a.p.layer.value.centre)
    {
        const RowPlace row = find_row(a, s, i);
        token = row.real ? row.at : -1, head = row.head;
        if (centre) centre += s.h * a.p.layer.value.stride_head;
    }
    __device__ __forceinline__ bool is_there() const { return token >= 0; }
    /** Return the index of the row's first number in out, and of its number in lse. */
    __device__ __forceinline__ int64_t in_out(const AttendArgs &a) const
    {
        return b * a.p.out_stride_batch + head * a.p.out_stride_head + token * a.p.out_stride_token;
    }
    __device__ __forceinline__ int64_t in_lse(const AttendArgs &a) const
    {
        return b * a.p.lse_stride_batch + head * a.p.lse_stride_head + token * a.p.lse_stride_token;
    }

    /** Adds value centre and exact sums to an un-rotated row. */
    template <int GROUPS>
    __device__ __forceinline__ void complete(const AttendArgs &a, LaneRow<GROUPS> &x, const LaneRow<GROUPS> &exact,
                                             const MergedRow &m, int lane) const
    {
#pragma unroll
        for (int k = 0; k < LaneRow<GROUPS>::QUADS; k++) {
            int c = x.channel(k, lane);
            if (centre && c < a.head_dim)
                add_scaled(x.quad[k], m.packed_sum,
                           make_float4(centre[c], centre[c + 1], centre[c + 2], centre[c + 3]));
            add_scaled(x.quad[k], 1, exact.quad[k]);
        }
    }

    /** Writes a completed row. */
    template <int GROUPS>
    __device__ __forceinline__ void write(const AttendArgs &a, const LaneRow<GROUPS> &x, const MergedRow &m,
                                          int lane) const
    {
        if (!is_there()) return;
        const int64_t row = in_out(a);
        float inverse = __fdividef(1.0f, fmaxf(m.sum, 1e-30f)); /* far above 1e-30 if the row sees any token */
#pragma unroll
        for (int k = 0; k < LaneRow<GROUPS>::QUADS; k++) {
            int c = x.channel(k, lane);
            if (c >= a.head_dim) continue;
            float4 y = m.sum > 0 ? x.quad[k] : make_float4(0, 0, 0, 0);
            store_quad(a.p.out, row + c, a.p.layer.dtype,
                       make_float4(y.x * inverse, y.y * inverse, y.z * inverse, y.w * inverse));
        }
        if (a.p.lse && lane == 0) a.p.lse[in_lse(a)] = m.sum > 0 ? (m.max + __log2f(m.sum)) * LN_2 : -INFINITY;
    }
};

} // namespace tq
#endif
