// append_prefill: copies rows to shared memory, and mends rows that have bad numbers.
#ifndef TQ_CUDA_APPEND_ROWS_CUH
#define TQ_CUDA_APPEND_ROWS_CUH
#include "cuda/append/params.cuh"

namespace tq
{

/** Queues a copy of bytes at .. at + 15 of the row of packed index `index`; writes zeros if it is not in the span. */
__device__ __forceinline__ void copy_or_clear(const AppendArgs &a, const Work &work, const Head &head, const Span &span,
                                              int index, uint8_t *to, int at)
{
    if (index >= span.first && index < span.last) copy_16(to, source_row(a, work, head, span, index + a.sinks) + at);
    else *reinterpret_cast<uint4 *>(to) = make_uint4(0, 0, 0, 0);
}

/** Mends a row in shared memory, and reports it if it had a bad number. */
inline __device__ __noinline__ void mend_row(uint8_t *row, int dim, int dtype, int64_t *flag, Work work, int position)
{
    bool bad = false;
#pragma unroll 1
    for (int i = 0; i < dim; i++) {
        const float x = load_number(row, i, dtype);
        if (!is_bad(x)) continue;
        store_number(row, i, dtype, mended(x));
        bad = true;
    }
    if (bad) report_bad(flag, work, position);
}

/** Returns x, but hides its value from the compiler. */
__device__ __forceinline__ int opaque(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}

} // namespace tq
#endif
