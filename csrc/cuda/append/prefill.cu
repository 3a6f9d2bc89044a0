// append_prefill of plans without tries, a wave and a metric, and the choice between its kernels.
#include "cuda/append/prefill.cuh"

namespace tq
{

tq_status launch_append_prefill_moments(const AppendArgs &args, cudaStream_t stream, tq_error *error);
tq_status launch_append_prefill_search(const AppendArgs &args, cudaStream_t stream, tq_error *error);
tq_status launch_append_prefill_search_moments(const AppendArgs &args, cudaStream_t stream, tq_error *error);

tq_status launch_append_prefill(const AppendArgs &args, cudaStream_t stream, tq_error *error)
{
    const bool moments = args.moments.any();
    if (args.tries)
        return moments ? launch_append_prefill_search_moments(args, stream, error)
                       : launch_append_prefill_search(args, stream, error);
    return moments ? launch_append_prefill_moments(args, stream, error)
                   : fragments::launch_dims<false, false>(args, stream, error);
}

} // namespace tq
