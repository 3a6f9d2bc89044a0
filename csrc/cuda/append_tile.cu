// append_tile: which plans it takes, and its kernels for head_dim 64 and 128. The others: append_tile_2.cu, to compile beside this.
#include "append_tile.cuh"

namespace tq
{

tq_status launch_append_tile_2(const AppendArgs &args, const tq_plan &plan, cudaStream_t stream, tq_error *error);

bool append_tile_takes(const tq_plan &plan)
{
    const int d = plan.head_dim;
    if (is_fine(plan)) return false;
    if (d != 64 && d != 80 && d != 96 && d != 128 && d != 256) return false;
    for (const tq_side *side : {&plan.key, &plan.value})
        for (int group = 0; side->tile_bytes && group < plan.groups; group++)
            if (side->bits[group] < 1 || side->bits[group] > 4) return false;
    return plan.rotation == TQ_ROTATION_HADAMARD && (plan.scale == TQ_SCALE_EDEN || plan.scale == TQ_SCALE_NORM);
}

tq_status launch_append_tile(const AppendArgs &args, const tq_plan &plan, cudaStream_t stream, tq_error *error)
{
    if (args.head_dim == 64) return tile::launch_split<64, 1>(args, plan, stream, error);
    if (args.head_dim == 128) return tile::launch_split<128, 2>(args, plan, stream, error);
    return launch_append_tile_2(args, plan, stream, error);
}

} // namespace tq
