// Appending in the general case: any head_dim up to 256, dtype, rotation, widths and scale. A block takes the token tiles of a
// (side, sequence, KV head), one or all of them:
//
//   1  rows to shared memory, centred                        a warp a token       only for dense rotations
//   2  y = R x for all tokens of the tile                    a warp 32 channels of 16 tokens, only then
//   3  row -> rotation -> codes, and the scale               a warp a token
//   4  codes -> words, merged with the tile's other tokens   a warp a group of channels
//
// Shared memory: | codes [32][code_stride] | rows [32][head_dim] | only dense: y [32][head_dim] | matrix blocks [warps] |
#include "encode_warp.cuh"
#include "matrix.cuh"
#include "pack.cuh"

namespace tq
{
namespace
{

constexpr int WARPS = 8;

struct Shared {
    uint8_t *codes;
    float *rows, *y, *matrix;
};

__device__ __forceinline__ Shared shared_of(const AppendArgs &a, uint8_t *memory)
{
    Shared s;
    s.codes = memory;
    s.rows = reinterpret_cast<float *>(memory + TQ_TILE * code_stride(a.groups));
    s.y = s.rows + TQ_TILE * a.head_dim;
    s.matrix = s.y + TQ_TILE * a.head_dim;
    return s;
}

size_t shared_bytes(const AppendArgs &a)
{
    size_t floats = (size_t)TQ_TILE * a.head_dim;
    if (a.rotation == TQ_ROTATION_DENSE) floats += floats + WARPS * MATRIX_BLOCK;
    return TQ_TILE * code_stride(a.groups) + sizeof(float) * floats;
}

/** Packed tokens 32 tile .. 32 tile + 31, as far as they are in the span. */
template <int PER_LANE>
__device__ __forceinline__ void append_tile(const AppendArgs &a, const Work &work, const Head &head, const Span &span,
                                            int tile, const Shared &shared, int warp, int lane)
{
    const AppendSide &side = a.side[work.side];
    const int base = tile * TQ_TILE, begin = max(0, span.first - base), end = min(TQ_TILE, span.last - base);
    uint8_t *record = record_of(a, work, base);
    const int page_token = (int)a.page_tokens.remainder((uint32_t)base);
    const bool dense = a.rotation == TQ_ROTATION_DENSE;
    const LaneBook book = lane_book(a.books[side.bits[0]], lane);
    float x[PER_LANE];

    if (dense) {
        for (int i = begin + warp; i < end; i += WARPS) {
            load_row(a, work, head, span, base + i, x, lane);
#pragma unroll
            for (int k = 0; k < PER_LANE; k++)
                if (lane + 32 * k < a.head_dim) shared.rows[(i - begin) * a.head_dim + lane + 32 * k] = x[k];
        }
        __syncthreads();
        multiply_rows<false>(head.matrix, a.head_dim, shared.rows, shared.y, end - begin,
                             shared.matrix + warp * MATRIX_BLOCK, warp, WARPS, lane);
        __syncthreads();
    }
    for (int i = begin + warp; i < end; i += WARPS) {
        float *row = (dense ? shared.y : shared.rows) + (i - begin) * a.head_dim;
        if (!dense) load_row(a, work, head, span, base + i, x, lane);
        if (a.rotation == TQ_ROTATION_HADAMARD) rotate_warp(a, x, row, lane);
        if (dense)
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) x[k] = lane + 32 * k < a.head_dim ? row[lane + 32 * k] : 0.0f;
        const __half scale = encode_warp(a, side, head.steps, book, x, shared.codes + i * code_stride(a.groups), lane);
        if (record && lane == 0) *scale_at(side, record, page_token + i) = scale;
    }
    __syncthreads();
    for (int group = warp; record && group < a.groups; group += WARPS) {
        if (!side.bits[group]) continue;
        uint32_t *words =
            reinterpret_cast<uint32_t *>(tiles_of(side, record, page_token / TQ_TILE) + side.offset[group]);
        const uint8_t *codes = shared.codes + TQ_TILE * group;
        const int stride = code_stride(a.groups);
        if (end - begin == TQ_TILE)
            pack_tile<true>(words, side.bits[group], work.side == 0, codes, stride, begin, end, lane);
        else pack_tile<false>(words, side.bits[group], work.side == 0, codes, stride, begin, end, lane);
    }
    __syncthreads();
}

/** `blocks` blocks for each (side, sequence, head); a single one also copies what stays exact. */
template <int PER_LANE>
__global__ void __launch_bounds__(32 * WARPS) append_warp(const __grid_constant__ AppendArgs a, int blocks)
{
    extern __shared__ __align__(16) uint8_t memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Work work = work_of(a, blockIdx.x / (unsigned)blocks);
    const Head head = head_of(a, work);
    wait_for_stream();
    const Span span = span_of(a, work.b);
    const Shared shared = shared_of(a, memory);
    for (int tile = span.first / TQ_TILE + (int)(blockIdx.x % (unsigned)blocks); tile * TQ_TILE < span.last;
         tile += blocks)
        append_tile<PER_LANE>(a, work, head, span, tile, shared, warp, lane);
    if (blocks > 1) return;
    for (int r = warp;; r += WARPS) {
        const int position = exact_position(a, span, r);
        if (position < 0) break;
        copy_exact_row<PER_LANE>(a, work, head, span, position, lane);
    }
}

} // namespace

tq_status launch_append_warp(const AppendArgs &args, bool one_block, cudaStream_t stream, tq_error *error)
{
    const int blocks = one_block ? 1 : (int)append_tiles(args);
    return with_channels_per_lane(args.head_dim, [&](auto per_lane) {
        return launch(append_warp<per_lane()>, (int64_t)args.sides * args.batch * args.kv_heads * blocks, 32 * WARPS,
                      shared_bytes(args), stream, error, args, blocks);
    });
}

} // namespace tq
