/* fp16 for the simulated GPU, by the compiler's own type. */
#ifndef TQ_SIMULATED_CUDA_FP16_H
#define TQ_SIMULATED_CUDA_FP16_H
#include <cuda_runtime.h>

struct __half {
    _Float16 x;
};
struct alignas(4) __half2 {
    _Float16 x, y;
};
inline float __half2float(__half h) { return (float)h.x; }
inline __half __float2half_rn(float x) { return {(_Float16)x}; }
inline float2 __half22float2(__half2 h) { return {(float)h.x, (float)h.y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {(_Float16)x, (_Float16)y}; }
inline __half2 __float2half2_rn(float x) { return __floats2half2_rn(x, x); }
inline __half2 __low2half2(__half2 h) { return {h.x, h.x}; }
inline __half2 __high2half2(__half2 h) { return {h.y, h.y}; }
inline __half2 __hmul2(__half2 a, __half2 b)
{
    return {(_Float16)((float)a.x * (float)b.x), (_Float16)((float)a.y * (float)b.y)};
}
inline __half2 __hadd2(__half2 a, __half2 b)
{
    return {(_Float16)((float)a.x + (float)b.x), (_Float16)((float)a.y + (float)b.y)};
}
/* a * b is exact in double, and so are nearly all sums. */
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c)
{
    return {(_Float16)((double)(float)a.x * (float)b.x + (float)c.x),
            (_Float16)((double)(float)a.y * (float)b.y + (float)c.y)};
}
#endif
