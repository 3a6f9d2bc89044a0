/* tq_cuda_dequantize to fp16 and bf16 by tensor cores (dequantize_16bit.cu). */
#ifndef TQ_CUDA_DEQUANTIZE_H
#define TQ_CUDA_DEQUANTIZE_H
#include "cuda/device/device.cuh"

namespace tq
{

/** Whether dequantize_16bit takes the plan. */
bool takes_16bit(const tq_plan &plan);
size_t bytes_16bit(const tq_plan &plan, int32_t kv_heads);
/** dtype: TQ_F16 or TQ_BF16. The rest as in tq_cuda_dequantize, checked. */
tq_status dequantize_16bit(const tq_plan &plan, const tq_layer &layer, int32_t max_tokens, tq_dtype dtype, void *k,
                           void *v, void *workspace, cudaStream_t stream, tq_error *error);

} // namespace tq
#endif
