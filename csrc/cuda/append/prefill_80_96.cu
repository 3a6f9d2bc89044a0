// append_prefill_80_96 for head_dim 80 and 96.
#include "cuda/append/prefill_80_96.cuh"

namespace tq
{

tq_status launch_append_prefill_80_96(const AppendArgs &args, const tq_plan &plan, cudaStream_t stream, tq_error *error)
{
    if (args.head_dim == 80) return tile::launch_shape<tile::Shape<80>>(args, plan, stream, error);
    return tile::launch_shape<tile::Shape<96>>(args, plan, stream, error);
}

} // namespace tq
