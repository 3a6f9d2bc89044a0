// The kernels of append_prefill. setup.py compiles this file once for each SHARD of Prefill, in parallel.
#include "cuda/append/prefill.cuh"

namespace tq
{

template <int SHARD> tq_status Prefill<SHARD>::queue(const AppendArgs &args, cudaStream_t stream, tq_error *error)
{
    return fragments::launch_dims<(SHARD & 2) != 0, (SHARD & 1) != 0>(args, stream, error);
}

template struct Prefill<TQ_SHARD>;
static_assert(TQ_SHARDS == 4);

} // namespace tq
