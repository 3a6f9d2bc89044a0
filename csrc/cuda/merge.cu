// tq_cuda_merge: merges attention results over disjoint tokens. A warp has a row and adds parts in the C core's order.
#include "cuda/device/launch.cuh"

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
            if (x == -INFINITY) continue; // saw nothing: its out is ignored, whatever it holds
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
    TQ_CUDA_TRY(tq_check_merge(outs, lses, parts, rows, head_dim, out, lse, error));
    if (!rows) return TQ_OK;
    const MergeArgs args = {outs, lses, out, lse, rows, parts, head_dim};
    return launch(merge, (rows + WARPS - 1) / WARPS, 32 * WARPS, 0, (cudaStream_t)stream, error, args);
}
