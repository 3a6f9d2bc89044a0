// append_prefill for head_dim 256.
#include "cuda/append/prefill.cuh"

namespace tq
{

tq_status launch_append_prefill_2(const AppendArgs &args, cudaStream_t stream, tq_error *error)
{
    return fragments::launch_dim<256>(args, stream, error);
}

} // namespace tq
