/* The schedule of FUSED where sequences differ in length: how many blocks share each segment. */
#include "cuda/attend/kernels.h"
#include "cuda/attend/rows/sequence.cuh"

namespace tq
{
namespace
{

/* The size of a whole block, in twentieths of an equal share: all runs divided by the blocks that can run at once. The
 * last block of a segment has the rest. Whole blocks come first, then last ones, longest first, which fill the time
 * that is left. The second size is tried if there are more segments than blocks that can run at once (measured.md). */
constexpr int SIZES = 2;
__device__ const int32_t OF_20[SIZES] = {22, 11};
static_assert(MOST_WHOLE_OF_SHARE * 11 >= 20, "whole blocks of all segments");

/** Returns the runs of a segment: its units, or with run 2 its pages. */
__device__ __forceinline__ int32_t runs_of(const AttendArgs &a, const Sequence &s)
{
    const Range units = view_packed(a, s).units;
    return units.count() ? (units.hi + a.fused.run - 1) / a.fused.run - units.lo / a.fused.run : 0;
}

/** Returns the whole blocks of a segment. At least one run is left for its last block. */
__device__ __forceinline__ int32_t whole_blocks(int32_t runs, int32_t each) { return runs ? (runs - 1) / each : 0; }

/** Estimates the time of all blocks, in runs of a team. A block's start and end take as long as a run. whole: number of
 *  whole blocks; left: runs of all last blocks, one for each segment. */
__device__ __forceinline__ float time_of(const AttendArgs &a, int32_t each, int32_t whole, float left)
{
    const int32_t room = a.fused.at_once, segments = a.p.layer.batch * a.p.layer.kv_heads, turns = whole / room,
                  rest = whole - turns * room, last_turns = (segments + room - rest - 1) / (room - rest);
    const float of_whole = (float)each / a.fused.teams + 1, of_last = left / a.fused.teams / segments + 1;
    return fmaxf(fmaxf((whole * of_whole + segments * of_last) / room, (turns + (rest > 0)) * of_whole),
                 turns * of_whole + last_turns * of_last);
}

/** Writes the schedule (rows/sequence.cuh). One block, a thread for each sequence. */
__global__ void __launch_bounds__(MOST_RAGGED) share_kernel(const __grid_constant__ AttendArgs a, int4 *schedule)
{
    __shared__ int32_t whole[MOST_RAGGED], left[MOST_RAGGED],
        ordered[MOST_RAGGED]; /* ordered: sequences in the schedule's order */
    __shared__ unsigned long long all;
    __shared__ int32_t whole_of_all[SIZES];
    wait_for_stream();
    const int32_t b = threadIdx.x, batch = a.p.layer.batch, heads = a.p.layer.kv_heads;
    int4 *sequences = const_cast<int4 *>(scheduled_sequences(a, schedule));
    int32_t runs = 0, sizes[SIZES];
    if (b == 0) all = 0;
    if (b < SIZES) whole_of_all[b] = 0;
    __syncthreads();
    if (b < batch) {
        sequences[b] = look_up_sequence(a, b);
        runs = runs_of(a, sequence_of(a, sequences[b]));
        atomicAdd(&all, (unsigned long long)runs);
    }
    __syncthreads();
    const int64_t runs_of_all = heads * (int64_t)all;
    for (int k = 0; k < SIZES; k++) {
        const int64_t of = 20 * (int64_t)a.fused.at_once;
        sizes[k] = max(1, (int32_t)((OF_20[k] * runs_of_all + of - 1) / of));
        if (b < batch) atomicAdd(&whole_of_all[k], heads * whole_blocks(runs, sizes[k]));
    }
    __syncthreads();
    auto time = [&](int k) {
        const int32_t n = whole_of_all[k];
        return time_of(a, sizes[k], n, (float)(runs_of_all - (int64_t)n * sizes[k]));
    };
    const bool second = batch * heads > a.fused.at_once && time(1) < time(0);
    const int32_t each = sizes[second];
    if (b < batch) {
        whole[b] = whole_blocks(runs, each);
        left[b] = runs - whole[b] * each;
    }
    __syncthreads();
    if (b < batch) {
        int32_t before = 0;
#pragma unroll 4
        for (int32_t other = 0; other < batch; other++)
            before += left[other] > left[b] || (left[other] == left[b] && other < b);
        ordered[before] = b;
    }
    __syncthreads();
    if (b >= 32) return;
    int32_t *wholes = const_cast<int32_t *>(scheduled_wholes(a, schedule)), next = 0, rows = 0;
#pragma unroll 1
    for (int32_t first = 0; first < batch; first += 32) {
        const bool is_there = first + b < batch;
        const int32_t sequence = is_there ? ordered[first + b] : 0, n = is_there ? whole[sequence] : 0;
        int32_t upto = n;
#pragma unroll
        for (int k = 1; k < 32; k *= 2) {
            const int32_t before = __shfl_up_sync(ALL_LANES, upto, k);
            if (b >= k) upto += before;
        }
        if (is_there) {
            const int4 s = sequences[sequence]; /* written by this block, before a barrier */
            schedule[1 + first + b] = make_int4(next + heads * (upto - n), n | sequence << 16, s.x, s.y);
        }
        next += heads * __shfl_sync(ALL_LANES, upto, 31);
        const uint32_t have = __ballot_sync(ALL_LANES, n > 0);
        if (n > 0) wholes[rows + __popc(have & ((1u << b) - 1))] = first + b;
        rows += __popc(have);
    }
    if (b == 0) schedule[0] = make_int4(a.schedule_key, next, each, rows);
}

} // namespace

tq_status write_shares(const AttendArgs &args, int32_t *schedule, cudaStream_t stream, tq_error *error)
{
    AttendArgs a = args;
    a.schedule = nullptr;
    return launch(share_kernel, 1, MOST_RAGGED, 0, stream, error, a, reinterpret_cast<int4 *>(schedule));
}

} // namespace tq
