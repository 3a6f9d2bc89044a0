/* Compiles the kernels on pages that the table lists for a file (dispatch.h). */
#ifndef TQ_CUDA_ATTEND_SPLIT_VARIANTS_CUH
#define TQ_CUDA_ATTEND_SPLIT_VARIANTS_CUH
#include "cuda/attend/dispatch.h"
#include "cuda/attend/split/kernel.cuh"

namespace tq
{

struct Split {
    template <Strategy, class V, int> static void (*kernel())(AttendArgs) { return attend_kernel<V>; }
};

} // namespace tq
#endif
