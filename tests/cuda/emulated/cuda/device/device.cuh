// What csrc/cuda/tile/fragments.cuh needs of csrc/cuda/device/device.cuh, for a host compiler. Products and fp16
// arithmetic, which tests/cuda/fragments.cpp does not use, do nothing.
#ifndef TQ_CUDA_DEVICE_CUH
#define TQ_CUDA_DEVICE_CUH
#include <cstdint>

#include "../../../prmt.h"
#include "cuda/device/host.h"

struct __half2 {
    uint32_t bits;
};

inline __half2 __float2half2_rn(float) { return {}; }
inline __half2 __hfma2(__half2, __half2, __half2) { return {}; }
inline __half2 __hadd2(__half2, __half2) { return {}; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }

namespace tq
{

template <bool, bool> void mma(int (&)[4], const uint32_t (&)[4], uint32_t, uint32_t) {}

} // namespace tq
#endif
