/* From scores to logits, for all loops. A score is <q, k>; a logit is what softmax takes, here in units of log2: the score times
 * softmax_scale, under the soft-cap if there is one, or -inf for a token that the row does not see.
 *
 * Loops over packed tokens compute logits only where there is a soft-cap. Otherwise they apply scale and bias of a row when they compute
 * weights, with the same instruction that subtracts the row's reference. */
#ifndef TQ_CUDA_ATTEND_ROWS_LOGIT_CUH
#define TQ_CUDA_ATTEND_ROWS_LOGIT_CUH
#include "cuda/attend/rows/sequence.cuh"

namespace tq
{

/* ---- exact tokens, and plans that are not plain ---- */

/** The logit of a score. Callers replace that of a token which the row does not see, whose numbers may be anything, by -inf. */
__device__ __forceinline__ float base2_logit(const AttendArgs &a, float score)
{
    float x = score * a.p.softmax_scale;
    if (a.p.softcap > 0) x = a.p.softcap * tanhf(x / a.p.softcap);
    return x * LOG2_E;
}

/* ---- packed tokens ---- */

/** weight = exp2(scale * score + reference), and the exponent stays below HEADROOM. The reference of a row is NO_REFERENCE before its first
 *  visible token. */
constexpr float NO_REFERENCE = 1e30f, HEADROOM = 10;

/** The packed indices below `end` that a row sees. */
__device__ __forceinline__ Range seen_by(const RowArgs &row, int32_t end)
{
    return {row.packed_lo, min(row.packed_hi, end)};
}

/** The soft-cap of scores: products with keys, before scale and bias of the row. */
struct SoftCap {
    float cap, inverse;

    __device__ __forceinline__ explicit SoftCap(const AttendArgs &a)
        : cap(a.p.softcap * LOG2_E), inverse(reciprocal(fmaxf(cap, FLT_MIN)))
    {
    }
    /** The logit; -inf of a hidden token's -inf. scale, bias: those of the row times `inverse`. */
    __device__ __forceinline__ float logit(float score, float scale, float bias) const
    {
        float capped = cap * tanh_fast(fmaf(score, scale, bias));
        return score == -INFINITY ? score : capped;
    }
};

/** What is left to do for weights: logit = scale_left * score + bias_left. Nothing with a soft-cap, whose scores are logits by then. */
__device__ __forceinline__ float scale_left(const AttendArgs &a, const RowArgs &row)
{
    return a.p.softcap > 0 ? 1.0f : row.scale;
}
__device__ __forceinline__ float bias_left(const AttendArgs &a, const RowArgs &row)
{
    return a.p.softcap > 0 ? 0 : row.bias;
}

} // namespace tq
#endif
