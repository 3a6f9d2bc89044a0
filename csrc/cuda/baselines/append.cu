// Appending for plans that are not plain. A thread block takes one token tile of a (side, sequence, KV head), or all:
//
//   1  rows to shared memory, centred                        one warp per token
//   2  y = R x for all tokens of the tile                    one warp per 32 channels of 16 tokens; only if dense
//   3  row -> rotation -> codes, numbers, and the residual   one warp per token
//   4  S times the residual, whose signs are codes           one warp per 32 rows of S, 16 tokens; only if Gaussian
//   5  codes -> words, merged with the tile's other tokens   one warp per tile
//
// Shared memory: | codes [32][code_stride] | rows [32][head_dim] | with matrices: y [32][head_dim] | matrix blocks |
#include "cuda/baselines/encode.cuh"

namespace tq
{
namespace
{

constexpr int WARPS = 8;

struct AppendBaselineArgs {
    AppendArgs append;
    BaselineSide side[2];
    int32_t blocks; // per (side, sequence, head); a single one also copies the tokens that stay exact
};
static_assert(sizeof(AppendBaselineArgs) <= 4096, "kernel parameters");

struct Shared {
    uint8_t *codes;
    float *rows, *y, *matrix;
    int stride; // bytes between the codes of two tokens
};

__device__ __forceinline__ Shared shared_of(const AppendArgs &a, const BaselineSide &side, uint8_t *memory)
{
    Shared s;
    s.stride = code_stride(side.tiles);
    s.codes = memory;
    s.rows = reinterpret_cast<float *>(memory + TQ_TILE * s.stride);
    s.y = s.rows + TQ_TILE * a.head_dim;
    s.matrix = s.y + TQ_TILE * a.head_dim + threadIdx.x / 32 * MATRIX_BLOCK;
    return s;
}

size_t shared_bytes(const tq_plan &plan)
{
    size_t most = 0;
    for (const tq_side *side : {&plan.key, &plan.value}) {
        const size_t row = sizeof(float) * TQ_TILE * (size_t)plan.head_dim,
                     bytes = TQ_TILE * (size_t)code_stride(side->tiles) + row +
                             (side->matrix_rows ? row + sizeof(float) * WARPS * MATRIX_BLOCK : 0);
        if (bytes > most) most = bytes;
    }
    return most;
}

/** The tokens to pack: begin .. end - 1 of a token tile. */
struct Tile {
    uint8_t *record; // NULL: there is no page
    int base, begin, end, page_token;
};

/** Runs steps 1 and 2. Returns the rows of tokens tile.begin .. */
__device__ __forceinline__ float *load_tile(const AppendArgs &a, bool is_dense, const Work &work, const Head &head,
                                            const Span &span, const Tile &tile, const Shared &shared, int warp,
                                            int lane)
{
    LaneNumbers x;
    for (int i = tile.begin + warp; i < tile.end; i += WARPS) {
        float *row = shared.rows + (i - tile.begin) * a.head_dim;
        load_row(a, work, head, head.centre, span, tile.base + i, x, lane);
#pragma unroll
        for (int k = 0; k < BASELINE_GROUPS; k++)
            if (lane + 32 * k < a.head_dim) row[lane + 32 * k] = x[k];
        if (has_moments(a, work))
            key_to_residual(a.moments, work.h, wave_position(a, work, tile.base + i + a.sinks), row);
    }
    __syncwarp(); // a row's warp goes on with it
    if (!is_dense) return shared.rows;
    __syncthreads();
    multiply_rows<false>(head.matrix, a.head_dim, shared.rows, shared.y, tile.end - tile.begin, shared.matrix, warp,
                         WARPS, lane);
    __syncthreads();
    return shared.y;
}

/** Runs step 3 for token i of the tile, whose row is lost. */
__device__ __forceinline__ void encode_token(const AppendBaselineArgs &args, const Work &work, const Tile &tile, int i,
                                             float *row, const Shared &shared, int lane)
{
    const AppendArgs &a = args.append;
    const BaselineSide &side = args.side[work.side];
    LaneNumbers z;
#pragma unroll
    for (int k = 0; k < BASELINE_GROUPS; k++) z[k] = lane + 32 * k < a.head_dim ? row[lane + 32 * k] : 0.0f;
    if (side.rotation == TQ_ROTATION_HADAMARD) rotate_warp(a, z, row, lane);
    const float *table = side.levels == TQ_LEVELS_TABLE ? table_of(side, work.h) : nullptr;
    __half *numbers = tile.record ? scale_at(a.side[work.side], tile.record, tile.page_token + i) : nullptr;
    encode_blocks(a, side, table, z, shared.codes + i * shared.stride, {numbers, (int)a.page_tokens.divisor}, lane);
    if (side.sketch != TQ_SKETCH_GAUSSIAN) return;
    __syncwarp();
    float *left = shared.y + (i - tile.begin) * a.head_dim;
#pragma unroll
    for (int k = 0; k < BASELINE_GROUPS; k++)
        if (lane + 32 * k < a.head_dim) left[lane + 32 * k] = z[k];
}

/** Runs step 4, after a barrier. */
__device__ __forceinline__ void sketch_tile(const AppendArgs &a, const BaselineSide &side, int h, const Tile &tile,
                                            const Shared &shared, int warp, int lane)
{
    const int n = tile.end - tile.begin, rows = side.sketch_rows, padded = TQ_TILE * (side.tiles - a.groups);
    multiply_rows<false>(sketch_of(side, a.head_dim, h), rows, a.head_dim, shared.y, a.head_dim, shared.rows, rows, n,
                         shared.matrix, warp, WARPS, lane);
    __syncthreads();
    for (int i = threadIdx.x; i < n * padded; i += blockDim.x) {
        const int token = i / padded, j = i % padded;
        shared.codes[(tile.begin + token) * shared.stride + TQ_TILE * a.groups + j] =
            j < rows && shared.rows[token * rows + j] >= 0.0f;
    }
    __syncthreads();
}

/** Encodes and packs those packed tokens base .. base + 31 that are in the span. */
__device__ __forceinline__ void append_tile(const AppendBaselineArgs &args, const Work &work, const Head &head,
                                            const Span &span, int base, const Shared &shared, int warp, int lane)
{
    const AppendArgs &a = args.append;
    const BaselineSide &side = args.side[work.side];
    const Tile tile = {record_of(a, work, base), base, max(0, span.first - base), min(TQ_TILE, span.last - base),
                       (int)a.page_tokens.remainder((uint32_t)base)};
    float *rows = load_tile(a, side.rotation == TQ_ROTATION_DENSE, work, head, span, tile, shared, warp, lane);
    for (int i = tile.begin + warp; i < tile.end; i += WARPS)
        encode_token(args, work, tile, i, rows + (i - tile.begin) * a.head_dim, shared, lane);
    __syncthreads();
    if (side.sketch == TQ_SKETCH_GAUSSIAN) sketch_tile(a, side, work.h, tile, shared, warp, lane);
    for (int t = warp; tile.record && t < side.tiles; t += WARPS) {
        uint8_t *at = tiles_of(a.side[work.side], tile.record, tile.page_token / TQ_TILE) + side.offset[t];
        for (int plane = 0; plane < planes_of(side.bits[t]); plane++) {
            const int bits = plane_bits(side.bits[t], plane);
            uint32_t *words = reinterpret_cast<uint32_t *>(at) + 4 * TQ_TILE * plane;
            const uint8_t *codes = shared.codes + TQ_TILE * t;
            if (tile.end - tile.begin == TQ_TILE)
                pack_tile<true>(words, bits, work.side == 0, codes, shared.stride, 0, TQ_TILE, lane, 4 * plane);
            else
                pack_tile<false>(words, bits, work.side == 0, codes, shared.stride, tile.begin, tile.end, lane,
                                 4 * plane);
        }
    }
    __syncthreads();
}

__global__ void __launch_bounds__(32 * WARPS) append_baseline(const __grid_constant__ AppendBaselineArgs args)
{
    extern __shared__ __align__(16) uint8_t memory[];
    const AppendArgs &a = args.append;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = args.blocks;
    const Work work = work_of(a, blockIdx.x / (unsigned)blocks);
    const Head head = head_of(a, work);
    wait_for_stream();
    const Span span = span_of(a, work.b);
    const Shared shared = shared_of(a, args.side[work.side], memory);
    for (int tile = span.first / TQ_TILE + (int)(blockIdx.x % (unsigned)blocks); (int64_t)tile * TQ_TILE < span.last;
         tile += blocks)
        append_tile(args, work, head, span, tile * TQ_TILE, shared, warp, lane);
    if (blocks > 1) return;
#pragma unroll 1
    for (int r = warp; copy_exact_row<BASELINE_GROUPS>(a, work, head, span, r, lane);) r += WARPS;
}

} // namespace

tq_status launch_append_baseline(const AppendArgs &args, const tq_plan &plan, const tq_append_params &params,
                                 bool one_block, cudaStream_t stream, tq_error *error)
{
    const AppendBaselineArgs blocks = {
        args,
        {baseline_side_of(plan, false, params.layer.key), baseline_side_of(plan, true, params.layer.value)},
        one_block ? 1 : (int)append_tiles(args)};
    return launch(append_baseline, (int64_t)args.sides * args.batch * args.kv_heads * blocks.blocks, 32 * WARPS,
                  shared_bytes(plan), stream, error, blocks);
}

} // namespace tq
