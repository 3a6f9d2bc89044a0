// append_fragments for head_dim 64 and 128. 256: append_fragments_2.cu, to compile beside this.
#include "append_fragments.cuh"

namespace tq
{

tq_status launch_append_fragments_2(const AppendArgs &args, cudaStream_t stream, tq_error *error);

tq_status launch_append_fragments(const AppendArgs &args, cudaStream_t stream, tq_error *error)
{
    if (args.head_dim == 64) return fragments::launch_dim<64>(args, stream, error);
    if (args.head_dim == 128) return fragments::launch_dim<128>(args, stream, error);
    return launch_append_fragments_2(args, stream, error);
}

} // namespace tq
