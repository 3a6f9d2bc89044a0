// tq_cuda_rotate: multiplies rows of head_dim numbers by the plan's rotation, a matrix, or the inverse of either. A
// block has 16 rows, which share the matrix; without one a warp rotates a row in place.
#include "cuda/device/launch.cuh"
#include "cuda/tile/matrix.cuh"

namespace tq
{
namespace
{

constexpr int WARPS = 8;

struct RotateArgs {
    const void *x;
    void *y;
    const float *matrix;
    int64_t rows;
    int32_t dim, dtype, hadamard, inverse;
    HadamardSigns signs;
};

__device__ __forceinline__ void load_row(const RotateArgs &a, int64_t row, float *to, int lane)
{
    for (int i = lane; i < a.dim; i += 32) to[i] = load_number(a.x, row * a.dim + i, a.dtype);
}

__device__ __forceinline__ void store_row(const RotateArgs &a, int64_t row, const float *from, int lane)
{
    for (int i = lane; i < a.dim; i += 32) store_number(a.y, row * a.dim + i, a.dtype, from[i]);
}

template <int PER_LANE> __global__ void __launch_bounds__(32 * WARPS) rotate(const __grid_constant__ RotateArgs a)
{
    extern __shared__ __align__(16) float memory[];
    float *x = memory, *y = x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t first = (int64_t)blockIdx.x * MATRIX_TOKENS;
    const int rows = (int)min((int64_t)MATRIX_TOKENS, a.rows - first);
    wait_for_stream();
    for (int i = warp; i < rows; i += WARPS) {
        load_row(a, first + i, x + i * a.dim, lane);
        __syncwarp();
        if (!a.matrix && a.hadamard) hadamard_row<PER_LANE>(x + i * a.dim, a.dim, a.signs, a.inverse, lane);
    }
    if (a.matrix) { // the same in all threads of the grid
        y = x + MATRIX_TOKENS * a.dim;
        float *block = y + MATRIX_TOKENS * a.dim + warp * MATRIX_BLOCK;
        __syncthreads();
        if (a.inverse) multiply_rows<true>(a.matrix, a.dim, x, y, rows, block, warp, WARPS, lane);
        else multiply_rows<false>(a.matrix, a.dim, x, y, rows, block, warp, WARPS, lane);
        __syncthreads();
    }
    for (int i = warp; i < rows; i += WARPS) store_row(a, first + i, y + i * a.dim, lane);
}

} // namespace
} // namespace tq

using namespace tq;

tq_status tq_cuda_rotate(const tq_plan *plan, const float *matrix, int inverse, tq_dtype dtype, const void *x, void *y,
                         int64_t rows, void *stream_pointer, tq_error *error)
{
    TQ_CUDA_TRY(tq_check_rotate(plan, matrix, dtype, x, y, rows, error));
    TQ_CUDA_TRY(check_plan(*plan, error));
    if (!rows) return TQ_OK;

    RotateArgs args = {
        x, y, matrix, rows, plan->head_dim, dtype, plan->rotation == TQ_ROTATION_HADAMARD, inverse, signs_of(*plan)};
    const size_t rows_bytes = sizeof(float) * MATRIX_TOKENS * (size_t)plan->head_dim;
    return launch(plan->head_dim > 256 ? rotate<16> : rotate<8>, (rows + MATRIX_TOKENS - 1) / MATRIX_TOKENS, 32 * WARPS,
                  matrix ? 2 * rows_bytes + sizeof(float) * WARPS * MATRIX_BLOCK : rows_bytes,
                  (cudaStream_t)stream_pointer, error, args);
}
