// Dense rotations and sketches: a few rows times one matrix.
#ifndef TQ_CUDA_TILE_MATRIX_CUH
#define TQ_CUDA_TILE_MATRIX_CUH
#include "cuda/device/device.cuh"

namespace tq
{

constexpr int MATRIX_TOKENS = 16;                 // rows of x whose sums a warp has in registers
constexpr int MATRIX_COLUMNS = 16;                // columns of a block of the matrix in shared memory; it has 32 rows
constexpr int MATRIX_STRIDE = MATRIX_COLUMNS + 1; // odd: a warp reads a column without bank conflicts
constexpr int MATRIX_BLOCK = 32 * MATRIX_STRIDE;

/** Computes y [rows][outs] = M x [rows][ins], M [outs][ins]; if TRANSPOSED M^T x, M [ins][outs]. x and y do not overlap
 *  in shared memory; their rows are x_stride and y_stride floats apart. A warp takes blocks of 32 channels and
 *  MATRIX_TOKENS rows; x is read up to the next multiple of MATRIX_TOKENS rows. block: MATRIX_BLOCK floats in shared
 *  memory for this warp alone. */
template <bool TRANSPOSED>
__device__ __forceinline__ void multiply_rows(const float *matrix, int outs, int ins, const float *x, int x_stride,
                                              float *y, int y_stride, int rows, float *block, int warp, int warps,
                                              int lane)
{
    const int channel_blocks = (outs + 31) / 32, row_blocks = (rows + MATRIX_TOKENS - 1) / MATRIX_TOKENS;
    for (int item = warp; item < channel_blocks * row_blocks; item += warps) {
        const int channel = item % channel_blocks * 32, first = item / channel_blocks * MATRIX_TOKENS;
        float sum[MATRIX_TOKENS];
#pragma unroll
        for (int i = 0; i < MATRIX_TOKENS; i++) sum[i] = 0.0f;
        for (int j = 0; j < ins; j += MATRIX_COLUMNS) {
            const int columns = min(MATRIX_COLUMNS, ins - j), channels = min(32, outs - channel);
            __syncwarp();
#pragma unroll 8
            for (int i = 0; i < MATRIX_COLUMNS; i++) { // block row: channel, block column: column of M
                if constexpr (TRANSPOSED) {
                    if (i < columns && lane < channels)
                        block[MATRIX_STRIDE * lane + i] = matrix[(int64_t)(j + i) * outs + channel + lane];
                } else {
                    const int row = 2 * i + lane / MATRIX_COLUMNS, column = lane % MATRIX_COLUMNS;
                    if (row < channels && column < columns)
                        block[MATRIX_STRIDE * row + column] = matrix[(int64_t)(channel + row) * ins + j + column];
                }
            }
            __syncwarp();
            for (int c = 0; c < columns; c++) {
                const float m = block[MATRIX_STRIDE * lane + c];
#pragma unroll
                for (int i = 0; i < MATRIX_TOKENS; i++) sum[i] = fmaf(m, x[(first + i) * x_stride + j + c], sum[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < MATRIX_TOKENS; i++)
            if (first + i < rows && channel + lane < outs) y[(first + i) * y_stride + channel + lane] = sum[i];
    }
}

/** The same for a square matrix and dense rows. */
template <bool TRANSPOSED>
__device__ __forceinline__ void multiply_rows(const float *matrix, int dim, const float *x, float *y, int rows,
                                              float *block, int warp, int warps, int lane)
{
    multiply_rows<TRANSPOSED>(matrix, dim, dim, x, dim, y, dim, rows, block, warp, warps, lane);
}

} // namespace tq
#endif
