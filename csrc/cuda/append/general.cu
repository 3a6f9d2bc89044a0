// Appending in the general case: any head_dim, dtype, rotation, widths and scale. A thread block takes one token tile
// of a (side, sequence, KV head), or all of them. A tile of 16 channels has words of two token tiles: one block takes
// both, one after the other in steps 1 to 3.
//
//   1  rows to shared memory, centred                        one warp per token; only for dense rotations, and for keys
//                                                            with a wave or a metric, which are applied here
//   2  y = R x for all tokens of the tile                    one warp per 32 channels of 16 tokens; only if dense
//   3  row -> rotation -> codes, and the scale               one warp per token
//   4  codes -> words, merged with the tile's other tokens   one warp per group of channels
//
// Shared memory: | codes [tile_tokens][code_stride] | rows [32][head_dim] | if dense: y, like rows | matrix blocks |
#include "cuda/append/encode_warp.cuh"
#include "cuda/tile/matrix.cuh"
#include "cuda/tile/pack.cuh"

namespace tq
{
namespace
{

constexpr int WARPS = 8;

struct Shared {
    uint8_t *codes;
    int stride; // bytes between the codes of two tokens
    float *rows, *y, *matrix;
};

__host__ __device__ __forceinline__ int stride_of_codes(const AppendArgs &a)
{
    return code_stride((a.head_dim + TQ_TILE - 1) / TQ_TILE);
}

__device__ __forceinline__ Shared shared_of(const AppendArgs &a, int tokens, uint8_t *memory)
{
    Shared s;
    s.codes = memory;
    s.stride = stride_of_codes(a);
    s.rows = reinterpret_cast<float *>(memory + tokens * s.stride);
    s.y = s.rows + TQ_TILE * a.head_dim;
    s.matrix = s.y + TQ_TILE * a.head_dim;
    return s;
}

size_t shared_bytes(const AppendArgs &a)
{
    size_t floats = (size_t)TQ_TILE * a.head_dim;
    if (a.rotation == TQ_ROTATION_DENSE) floats += floats + WARPS * MATRIX_BLOCK;
    return a.tile_tokens * stride_of_codes(a) + sizeof(float) * floats;
}

/** Runs steps 1 to 3 for those packed tokens base .. base + 31 that are in the span. codes: those of token base. */
template <int PER_LANE, bool FINE, class Args>
__device__ __forceinline__ void encode_tile(const Args &a, const Work &work, const Head &head, const Span &span,
                                            int base, const SliceBooks<FINE> &books, const Shared &shared,
                                            uint8_t *codes, uint8_t *record, int warp, int lane)
{
    const AppendSide &side = a.side[work.side];
    const int begin = max(0, span.first - base), end = min(TQ_TILE, span.last - base);
    const int page_token = (int)a.page_tokens.remainder((uint32_t)base);
    const bool dense = a.rotation == TQ_ROTATION_DENSE, moments = has_moments(a, work),
               ready = dense || moments; // rows are in shared memory, centred
    float x[PER_LANE], centre[PER_LANE]; // centre: rotated, for settled rows only
    const Flips<PER_LANE> flips(a.signs, lane);
    if constexpr (Args::SETTLED) {
        const bool centred = head.centre && !ready;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) centre[k] = centred ? head.centre[lane + 32 * k] : 0.0f;
        if (centred) rotate_registers(a, flips, centre, lane);
    }

    for (int i = begin + warp; ready && i < end; i += WARPS) {
        float *row = shared.rows + (i - begin) * a.head_dim;
        load_row(a, work, head, head.centre, span, base + i, x, lane);
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            if (lane + 32 * k < a.head_dim) row[lane + 32 * k] = x[k];
        if (moments) key_to_residual(a.moments, work.h, wave_position(a, work, base + i + a.sinks), row);
    }
    if (dense) {
        __syncthreads();
        multiply_rows<false>(head.matrix, a.head_dim, shared.rows, shared.y, end - begin,
                             shared.matrix + warp * MATRIX_BLOCK, warp, WARPS, lane);
        __syncthreads();
    }
    for (int i = begin + warp; i < end; i += WARPS) {
        float *row = (dense ? shared.y : shared.rows) + (i - begin) * a.head_dim;
        if (!ready) load_row(a, work, head, Args::SETTLED ? nullptr : head.centre, span, base + i, x, lane);
        else
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) x[k] = lane + 32 * k < a.head_dim ? row[lane + 32 * k] : 0.0f;
        if constexpr (Args::SETTLED) rotate_settled(a, flips, x, centre, lane);
        else if (a.rotation == TQ_ROTATION_HADAMARD) rotate_warp(a, x, row, lane);
        const __half scale = encode_warp(a, side, head.steps, books, x, codes + i * shared.stride, lane);
        if (record && lane == 0) *scale_at(side, record, page_token + i) = scale;
    }
}

/** Encodes and packs those packed tokens base .. base + TOKENS - 1 that are in the span. */
template <int PER_LANE, bool FINE, class Args>
__device__ __forceinline__ void append_tile(const Args &a, const Work &work, const Head &head, const Span &span,
                                            int base, const Shared &shared, int warp, int lane)
{
    constexpr int TOKENS = TILE_TOKENS<FINE>, CHANNELS = TQ_TILE * TQ_TILE / TOKENS;
    const AppendSide &side = a.side[work.side];
    const int begin = max(0, span.first - base), end = min(TOKENS, span.last - base);
    uint8_t *record = record_of(a, work, base);
    const SliceBooks<FINE> books(a, side, lane);
    // Without FINE, constant bounds show the compiler that the loop runs once. Otherwise it uses twice the registers.
    for (int token = FINE ? begin / TQ_TILE * TQ_TILE : 0; token < (FINE ? end : TQ_TILE); token += TQ_TILE)
        encode_tile<PER_LANE, FINE>(a, work, head, span, base + token, books, shared,
                                    shared.codes + token * shared.stride, record, warp, lane);
    __syncthreads();
    for (int i = warp; record && i < 2 * a.groups; i += WARPS) {
        const int plane = i >= a.groups, group = i - plane * a.groups;
        const bool is_key = work.side == 0;
        if (!side.bits[group] || plane >= planes_of(side.bits[group])) continue;
        const int bits = plane_bits(side.bits[group], plane);
        uint8_t *tiles = tiles_of(side, record, (int)a.page_tokens.remainder((uint32_t)base) / TOKENS);
        uint32_t *words = reinterpret_cast<uint32_t *>(tiles + side.offset[group]) + 4 * TQ_TILE * plane;
        const uint8_t *codes = shared.codes + CHANNELS * group;
        if (end - begin == TOKENS)
            pack_tile<true, FINE>(words, bits, is_key, codes, shared.stride, begin, end, lane, 4 * plane);
        else pack_tile<false, FINE>(words, bits, is_key, codes, shared.stride, begin, end, lane, 4 * plane);
    }
    __syncthreads();
}

/** Thread blocks that must fit on a multiprocessor; limits the registers per thread. */
template <int PER_LANE, bool FINE, class Args>
constexpr int BLOCKS = PER_LANE > 8     ? 1
                       : !Args::SETTLED ? (PER_LANE == 2 && !FINE ? 4 : 2)
                       : PER_LANE > 4   ? 2
                       : FINE           ? 3
                                        : 4;

/** Each (side, sequence, head) has `blocks` thread blocks. A single one also copies the tokens that stay exact. */
template <int PER_LANE, bool FINE, class Args>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS<PER_LANE, FINE, Args>)
    append_general(const __grid_constant__ Args a, int blocks)
{
    extern __shared__ __align__(16) uint8_t memory[];
    constexpr int TOKENS = TILE_TOKENS<FINE>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Work work = work_of(a, blockIdx.x / (unsigned)blocks);
    const Head head = head_of(a, work);
    wait_for_stream();
    const Span span = span_of(a, work.b);
    const Shared shared = shared_of(a, TOKENS, memory);
    for (int tile = span.first / TOKENS + (int)(blockIdx.x % (unsigned)blocks); (int64_t)tile * TOKENS < span.last;
         tile += blocks)
        append_tile<PER_LANE, FINE>(a, work, head, span, tile * TOKENS, shared, warp, lane);
    if (blocks > 1) return;
#pragma unroll 1
    for (int r = warp; copy_exact_row<PER_LANE>(a, work, head, span, r, lane);) r += WARPS;
}

} // namespace

tq_status launch_append_general(const AppendArgs &args, bool settled, bool one_block, cudaStream_t stream,
                                tq_error *error)
{
    const int blocks = one_block ? 1 : (int)append_tiles(args);
    return with_channels_per_lane(args, settled, [&](auto per_lane, auto fine, const auto &as_it_is) {
        return launch(append_general<per_lane(), fine(), std::decay_t<decltype(as_it_is)>>,
                      (int64_t)args.sides * args.batch * args.kv_heads * blocks, 32 * WARPS, shared_bytes(args), stream,
                      error, as_it_is, blocks);
    });
}

} // namespace tq
