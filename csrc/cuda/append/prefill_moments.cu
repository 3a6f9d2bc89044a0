// append_prefill for plans with a wave or a metric.
#include "cuda/append/prefill.cuh"

namespace tq
{

tq_status launch_append_prefill_moments(const AppendArgs &args, cudaStream_t stream, tq_error *error)
{
    if (args.head_dim == 64) return fragments::launch_dim<64, true>(args, stream, error);
    if (args.head_dim == 128) return fragments::launch_dim<128, true>(args, stream, error);
    return fragments::launch_dim<256, true>(args, stream, error);
}

} // namespace tq
