// tq_cuda_merge: partial attention results over disjoint tokens. A warp a row; the parts in order, as in the C core.
#include "launch.cuh"

namespace tq
{
namespace
{

constexpr int WARPS = 4;

struct MergeArgs {
    const float *outs, *lses; // [parts, rows, dim], [parts, rows]
    float *out, *lse;
    int64_t rows;
    int32_t parts, dim;
};

__global__ void __launch_bounds__(32 * WARPS) merge(const __grid_constant__ MergeArgs a)
{
    const int lane = threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    wait_for_stream();
    if (row >= a.rows) return;
    float most = -INFINITY;
    for (int i = 0; i < a.parts; i++) {
        const float x = a.lses[i * a.rows + row];
        if (x > most || isnan(x)) most = x;
    }
    float sum = 0;
    for (int c = lane; c < a.dim; c += 32) {
        float out = 0;
        sum = 0;
        for (int i = 0; i < a.parts; i++) {
            const float x = a.lses[i * a.rows + row];
            if (x == -INFINITY) continue; // attended nothing: its out counts for nothing, whatever it holds
            const float weight = expf(x - most);
            sum += weight;
            out += weight * a.outs[(i * a.rows + row) * a.dim + c];
        }
        a.out[row * a.dim + c] = most == -INFINITY ? 0.0f : out / sum;
    }
    if (lane == 0) a.lse[row] = most == -INFINITY ? -INFINITY : most + logf(sum);
}

} // namespace
} // namespace tq

using namespace tq;

tq_status tq_cuda_merge(const float *outs, const float *lses, int32_t parts, int64_t rows, int32_t head_dim, float *out,
                        float *lse, void *stream, tq_error *error)
{
    if (parts < 1) return fail(error, TQ_E_VALUE, "parts", -1, parts, "at least 1");
    if (rows < 0) return fail(error, TQ_E_VALUE, "rows", -1, (double)rows, "at least 0");
    if (head_dim < 1) return fail(error, TQ_E_VALUE, "head_dim", -1, head_dim, "at least 1");
    if (!rows) return TQ_OK;
    if (!outs || !lses || !out || !lse)
        return fail(error, TQ_E_VALUE, "outs", -1, 0, "a pointer, not NULL, as lses, out and lse");
    const int64_t row_bytes = 4 * rows * head_dim;
    if (overlap(out, row_bytes, outs, row_bytes * parts))
        return fail(error, TQ_E_VALUE, "out", -1, 0, "apart from outs");
    if (overlap(lse, 4 * rows, lses, 4 * rows * parts)) return fail(error, TQ_E_VALUE, "lse", -1, 0, "apart from lses");
    const MergeArgs args = {outs, lses, out, lse, rows, parts, head_dim};
    return launch(merge, (rows + WARPS - 1) / WARPS, 32 * WARPS, 0, (cudaStream_t)stream, error, args);
}
