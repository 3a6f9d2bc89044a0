// append_prefill. Plans with a wave or a metric: append/prefill_moments.cu, to compile beside this.
#include "cuda/append/prefill.cuh"

namespace tq
{

tq_status launch_append_prefill_moments(const AppendArgs &args, cudaStream_t stream, tq_error *error);

tq_status launch_append_prefill(const AppendArgs &args, cudaStream_t stream, tq_error *error)
{
    if (args.moments.any()) return launch_append_prefill_moments(args, stream, error);
    if (args.head_dim == 64) return fragments::launch_dim<64, false>(args, stream, error);
    if (args.head_dim == 128) return fragments::launch_dim<128, false>(args, stream, error);
    return fragments::launch_dim<256, false>(args, stream, error);
}

} // namespace tq
