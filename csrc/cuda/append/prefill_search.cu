// append_prefill of plans with tries; a file of its own, to compile beside the others.
#include "cuda/append/prefill.cuh"

namespace tq
{

tq_status launch_append_prefill_search(const AppendArgs &args, cudaStream_t stream, tq_error *error)
{
    return fragments::launch_dims<false, true>(args, stream, error);
}

} // namespace tq
