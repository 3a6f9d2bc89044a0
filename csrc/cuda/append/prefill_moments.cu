// append_prefill of plans with a wave or a metric; a file of its own, to compile beside the others.
#include "cuda/append/prefill.cuh"

namespace tq
{

tq_status launch_append_prefill_moments(const AppendArgs &args, cudaStream_t stream, tq_error *error)
{
    return fragments::launch_dims<true, false>(args, stream, error);
}

} // namespace tq
