/* The schedule of a step: where the piece of each team of SPLIT and MANY_ROWS begins, computed once for all layers. */
#include "cuda/attend/kernels.h"
#include "cuda/attend/split/cursor.cuh"

namespace tq
{
namespace
{

constexpr int SCHEDULE_WARPS = 4; /* of a block */

/** Writes a schedule, with a warp per team and a thread per sequence. a.schedule is NULL, so Cursor finds the piece
 *  as in attention without a schedule. If there are no teams, writes a schedule that no call uses. */
__global__ void __launch_bounds__(32 * SCHEDULE_WARPS)
    schedule_kernel(const __grid_constant__ AttendArgs a, int4 *schedule)
{
    wait_for_stream();
    const int lane = threadIdx.x & 31;
    const int32_t thread = blockIdx.x * blockDim.x + threadIdx.x, piece = thread / 32;
    if (!a.schedule_teams) {
        if (!thread) schedule[0] = make_int4(0, 0, 0, 0);
        return;
    }
    int4 *sequences = const_cast<int4 *>(scheduled_sequences(a, schedule));
    for (int32_t b = thread; b < a.p.layer.batch; b += gridDim.x * blockDim.x) sequences[b] = look_up_sequence(a, b);
    if (piece >= a.schedule_teams) return;
    const Cursor cursor(a, piece, a.schedule_teams, lane);
    if (lane) return;
    const Sequence first = load_sequence(a, cursor.b);
    schedule[1 + piece] = make_int4(cursor.b, cursor.sequence_at, first.length, first.start);
    if (!piece) schedule[0] = make_int4(a.schedule_key, cursor.line.total, 0, 0);
}

} // namespace

tq_status write_schedule(const AttendArgs &args, int32_t *schedule, cudaStream_t stream, tq_error *error)
{
    AttendArgs a = args;
    a.schedule = nullptr;
    int blocks = a.schedule_teams ? (a.schedule_teams + SCHEDULE_WARPS - 1) / SCHEDULE_WARPS : 1;
    return launch(schedule_kernel, blocks, 32 * SCHEDULE_WARPS, 0, stream, error, a,
                  reinterpret_cast<int4 *>(schedule));
}

} // namespace tq
