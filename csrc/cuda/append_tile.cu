// append_tile for head_dim 80 and 96.
#include "append_tile.cuh"

namespace tq
{

tq_status launch_append_tile(const AppendArgs &args, const tq_plan &plan, cudaStream_t stream, tq_error *error)
{
    if (args.head_dim == 80) return tile::launch_dim<80>(args, plan, stream, error);
    return tile::launch_dim<96>(args, plan, stream, error);
}

} // namespace tq
