/* From scores to logits, for all loops. A score is <q, k>. A logit is what softmax takes, here times log2(e): the score
 * times softmax_scale, after the soft-cap if there is one, or -inf for a token that the row does not see.
 *
 * Loops over packed tokens compute logits only if there is a soft-cap. Otherwise they apply a row's scale on the way to
 * weights, and its bias to the maximum of the row's part. */
#ifndef TQ_CUDA_ATTEND_ROWS_LOGIT_CUH
#define TQ_CUDA_ATTEND_ROWS_LOGIT_CUH
#include "cuda/attend/rows/sequence.cuh"

namespace tq
{

/* ---- exact tokens, and plans that are not plain ---- */

/** Returns the base-2 logit of a score. Callers replace it by -inf if the row does not see the token, whose numbers may
 *  then be anything. */
__device__ __forceinline__ float base2_logit(const AttendArgs &a, float score)
{
    float x = score * a.p.softmax_scale;
    if (a.p.softcap > 0) x = a.p.softcap * tanhf(x / a.p.softcap);
    return x * LOG2_E;
}

/* ---- packed tokens ---- */

/** weight = exp2(scale * score + reference). Loops move a row's reference when the exponent exceeds HEADROOM. It is
 *  NO_REFERENCE before the row's first visible token. */
constexpr float NO_REFERENCE = 1e30f, HEADROOM = 10;

/** Returns the packed indices below `end` that a row sees. */
__device__ __forceinline__ Range seen_by(const RowArgs &row, int32_t end)
{
    return {row.packed_lo, min(row.packed_hi, end)};
}

/** Applies the soft-cap to scores to which scale and bias of the row were not yet applied. */
struct SoftCap {
    float cap, inverse;

    __device__ __forceinline__ explicit SoftCap(const AttendArgs &a)
        : cap(a.p.softcap * LOG2_E), inverse(reciprocal(fmaxf(cap, FLT_MIN)))
    {
    }
    /** Returns the logit; -inf if the score is -inf (hidden). scale, bias: those of the row times `inverse`. */
    __device__ __forceinline__ float logit(float score, float scale, float bias) const
    {
        float capped = cap * tanh_fast(fmaf(score, scale, bias));
        return score == -INFINITY ? score : capped;
    }
};

/** Return what is left to apply after the soft-cap: logit = scale_left * score + bias_left. That is nothing if there is
 *  a soft-cap, because then scores were already replaced by logits. */
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
