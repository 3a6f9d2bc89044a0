// append_prefill of plans with tries and a wave or a metric; a file of its own, to compile beside the others.
#include "cuda/append/prefill.cuh"

namespace tq
{

tq_status launch_append_prefill_search_moments(const AppendArgs &args, cudaStream_t stream, tq_error *error)
{
    return fragments::launch_dims<true, true>(args, stream, error);
}

} // namespace tq
