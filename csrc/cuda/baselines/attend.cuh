// Attention for plans that are not plain: what its two files share. In float32 throughout. Three kernels, one behind the other:
//
//   prepare   queries to rows [R q | S R q]                              a block a set             baselines/attend_ends.cu
//   attend    those rows and a split of the tokens that they see         a block a set and split   baselines/attend.cu
//   combine   merges the splits, takes the weighted sums back, writes    a block a set             baselines/attend_ends.cu
//
// A set is eight rows (query token, query head) of one (sequence, KV head). The tokens that some of its rows see stand in one line,
// packed ones by token tile, then exact ones, cut into as many equal splits for every set; how many follows from upper bounds alone.
#ifndef TQ_CUDA_BASELINES_ATTEND_CUH
#define TQ_CUDA_BASELINES_ATTEND_CUH
#include "cuda/attend/exact.cuh"
#include "cuda/baselines/blocks.cuh"

namespace tq
{

constexpr int SET_ROWS = 8, SET_WARPS = SET_ROWS, SET_THREADS = 32 * SET_WARPS;

/** AttendArgs: p, the sizes and how rows are cut, for what attend_schedule and attend_exact know. */
struct AttendBlocksArgs {
    AttendArgs attend;
    BlockPlan plan;
    KeyMoments moments;
    int32_t splits, key_width, value_width, part_floats;
    // workspace, by set
    float2 *waves;  // [SET_ROWS][pairs]: what a row has of a pair's cosine and sine at position 0
    float *queries; // [SET_ROWS][key_width]
    float *biases;  // [SET_ROWS]: <q, key centre>
    float *parts;   // [splits][SET_ROWS][part_floats]: RowTotals | packed sums [value_width] | exact sums [head_dim]
};
static_assert(sizeof(AttendBlocksArgs) <= 4096, "kernel parameters");

/** Of all rows of a set. */
__device__ __forceinline__ float2 *waves_of(const AttendBlocksArgs &args, int64_t set)
{
    return args.waves + set * SET_ROWS * args.moments.pairs;
}

__device__ __forceinline__ float *part_at(const AttendBlocksArgs &args, int64_t set, int split, int row)
{
    return args.parts + ((set * args.splits + split) * SET_ROWS + row) * args.part_floats;
}

/** Shared memory of either: | rows [MATRIX_TOKENS][width] | BlockRows' |, width that of the keys or the values. */
struct BlockEndKernels {
    void (*prepare)(AttendBlocksArgs), (*combine)(AttendBlocksArgs);
};

BlockEndKernels attend_blocks_ends();

} // namespace tq
#endif
