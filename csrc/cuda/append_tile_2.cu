// append_tile for head_dim 80, 96 and 256.
#include "append_tile.cuh"

namespace tq
{

tq_status launch_append_tile_2(const AppendArgs &args, const tq_plan &plan, cudaStream_t stream, tq_error *error)
{
    if (args.head_dim == 80) return tile::launch_split<80, 2>(args, plan, stream, error);
    if (args.head_dim == 96) return tile::launch_split<96, 2>(args, plan, stream, error);
    return tile::launch_split<256, 4>(args, plan, stream, error);
}

} // namespace tq
