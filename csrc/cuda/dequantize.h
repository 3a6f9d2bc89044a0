/* The arguments of both kernels of tq_cuda_dequantize: to float32 (dequantize.cu), and to fp16 and bf16 by tensor cores
 * (dequantize_16bit.cu). */
#ifndef TQ_CUDA_DEQUANTIZE_H
#define TQ_CUDA_DEQUANTIZE_H
#include "cuda/device/wave.cuh"
#include "cuda/tile/codebooks.h"

namespace tq
{

struct DequantizeSide {
    uint8_t bits[PLAN_GROUPS];
    int32_t offset[PLAN_GROUPS];
    int32_t tile_bytes, codes_offset, scales_offset;
    tq_transform transform;
    void *out; // [batch, kv_heads, max_tokens, head_dim]
};

struct DequantizeArgs {
    const uint8_t *pages;
    const int32_t *block_table, *lengths, *offsets; // offsets: of positions, or NULL
    int64_t n_pages, page_bytes, record_bytes;
    int32_t kv_heads, batch, max_pages, max_tokens, head_dim, groups, page_tokens, rotation, sinks;
    int32_t tiles; // token tiles of a sequence
    DequantizeSide side[2];
    KeyMoments moments;
    HadamardSigns signs;
};

/** Makes the kernels' arguments from checked ones of tq_cuda_dequantize. */
DequantizeArgs dequantize_args(const tq_plan &plan, const tq_layer &layer, int32_t max_tokens, void *k, void *v);

/** Whether dequantize_16bit takes the plan, and the bytes of workspace that it needs. */
bool takes_16bit(const tq_plan &plan);
size_t bytes_16bit(const tq_plan &plan, int32_t kv_heads);
/** dtype: TQ_F16 or TQ_BF16. The rest as in tq_cuda_dequantize, checked. */
tq_status dequantize_16bit(const tq_plan &plan, const tq_layer &layer, int32_t max_tokens, tq_dtype dtype, void *k,
                           void *v, void *workspace, cudaStream_t stream, tq_error *error);

} // namespace tq
#endif
