/* The schedule of FUSED where sequences differ in length: how many blocks share each segment. Blocks of long sequences come first, so that
 * the last ones to run are short. */
#include "cuda/attend/kernels.h"
#include "cuda/attend/rows/sequence.cuh"

namespace tq
{
namespace
{

constexpr int SHARE_WARPS = 32;
/* What a block's start and end take, in rounds, and the share of the longest block that runs when others have ended: about what was best of a
 * simulation of five ragged batches (measured.md). */
constexpr float START_ROUNDS = 1.5f, TAIL = 0.2f;

/** The most units, or pages with run 2, that a warp has one after the other: each warp of share_kernel tries another number. */
__device__ const int32_t ROUNDS[SHARE_WARPS] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10,  11,  12,  14,  16,  18,  20,
                                                24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256, 384, 768, 3072};

/** Units of a segment, or pages with run 2. */
__device__ __forceinline__ int32_t runs_of(const AttendArgs &a, const Sequence &s)
{
    const Range units = view_packed(a, s).units;
    return units.count() ? (units.hi + a.fused.run - 1) / a.fused.run - units.lo / a.fused.run : 0;
}

__device__ __forceinline__ int32_t blocks_for(const AttendArgs &a, int32_t runs, int32_t rounds)
{
    const int32_t of_block = a.fused.teams * rounds;
    return max(1, (runs + of_block - 1) / of_block);
}

/** About the time of all blocks, in rounds; INFINITY if there are more than the grid has. By a whole warp. */
__device__ __forceinline__ float time_of(const AttendArgs &a, const int32_t *runs, int32_t rounds, int lane)
{
    const int32_t batch = a.p.layer.batch, heads = a.p.layer.kv_heads;
    float blocks = 0, work = 0;
#pragma unroll 1
    for (int32_t b = lane; b < batch; b += 32) {
        const int32_t n = blocks_for(a, runs[b], rounds), warps = n * a.fused.teams;
        blocks += n;
        work += n * (START_ROUNDS + (runs[b] + warps - 1) / warps);
    }
    blocks = heads * warp_sum(blocks), work = heads * warp_sum(work);
    const float longest = rounds + START_ROUNDS;
    if (blocks > batch * heads + a.fused.at_once) return INFINITY;
    return blocks <= a.fused.at_once ? longest : work / a.fused.at_once + TAIL * longest;
}

/** One block. */
__global__ void __launch_bounds__(32 * SHARE_WARPS) share_kernel(const __grid_constant__ AttendArgs a, int4 *schedule)
{
    __shared__ float times[SHARE_WARPS];
    __shared__ int32_t runs[MOST_RAGGED], ordered[MOST_RAGGED]; /* ordered: sequences, long ones first */
    wait_for_stream();
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int32_t batch = a.p.layer.batch, heads = a.p.layer.kv_heads;
    int4 *sequences = const_cast<int4 *>(scheduled_sequences(a, schedule));
    for (int32_t b = threadIdx.x; b < batch; b += blockDim.x) {
        sequences[b] = look_up_sequence(a, b);
        runs[b] = runs_of(a, sequence_of(a, sequences[b]));
    }
    __syncthreads();
    const float time = time_of(a, runs, ROUNDS[warp], lane);
    if (lane == 0) times[warp] = time;
    for (int32_t b = threadIdx.x; b < batch; b += blockDim.x) {
        int32_t before = 0;
#pragma unroll 4
        for (int32_t other = 0; other < batch; other++)
            before += runs[other] > runs[b] || (runs[other] == runs[b] && other < b);
        ordered[before] = b;
    }
    __syncthreads();
    if (warp) return;
    const float least = -warp_max(-times[lane]);
    const int32_t rounds = ROUNDS[__ffs(__ballot_sync(ALL_LANES, times[lane] == least)) - 1];
    int32_t next = 0, shared = 0;
#pragma unroll 1
    for (int32_t first = 0; first < batch; first += 32) {
        const bool is_there = first + lane < batch;
        const int32_t b = is_there ? ordered[first + lane] : 0,
                      n = is_there ? least < INFINITY ? blocks_for(a, runs[b], rounds) : 1 : 0;
        int32_t upto = n;
#pragma unroll
        for (int k = 1; k < 32; k *= 2) {
            const int32_t before = __shfl_up_sync(ALL_LANES, upto, k);
            if (lane >= k) upto += before;
        }
        if (is_there) {
            const int4 s = sequences[b]; /* written by this block, before a barrier */
            schedule[1 + first + lane] = make_int4(next + heads * (upto - n), n | b << 16, s.x, s.y);
        }
        next += heads * __shfl_sync(ALL_LANES, upto, 31);
        shared += __popc(__ballot_sync(ALL_LANES, n > 1));
    }
    if (lane == 0) schedule[0] = make_int4(a.schedule_key, shared, 0, 0);
}

} // namespace

tq_status write_shares(const AttendArgs &args, int32_t *schedule, cudaStream_t stream, tq_error *error)
{
    AttendArgs a = args;
    a.schedule = nullptr;
    return launch(share_kernel, 1, 32 * SHARE_WARPS, 0, stream, error, a, reinterpret_cast<int4 *>(schedule));
}

} // namespace tq
