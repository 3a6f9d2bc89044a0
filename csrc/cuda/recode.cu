// tq_cuda_recode: a warp for each 32 tokens of one side of a record. A lane reads its words of a tile and writes its words of
// the recoded one; sums over channels are integers, so that their order does not matter.
#include "core/plan_kind.h"
#include "cuda/device/launch.cuh"
#include "cuda/tile/codebooks.h"
#include "cuda/tile/pack.cuh"

namespace tq
{
namespace
{

constexpr int WARPS = 8;

struct SideArgs {
    int64_t codes_from, codes_to, scales_from, scales_to; // offsets in a record
    int32_t tile_bytes_from, tile_bytes_to;               // of a token tile
    uint8_t from[PLAN_GROUPS], to[PLAN_GROUPS];           // bits
};

struct RecodeArgs {
    const uint8_t *pages;
    uint8_t *out;
    int64_t jobs, record_from, record_to; // jobs: records * sides * token tiles
    int32_t sides, tiles, groups, dim;
    SideArgs side[2];
    LevelsByCode books;
};

__device__ __forceinline__ int rank_of(int code, int bits)
{
    if (bits <= 3) return code;
    const int half = 1 << (bits - 1), magnitude = code & (half - 1);
    return code & half ? half - 1 - magnitude : half + magnitude;
}

__device__ __forceinline__ int code_of_rank(int rank, int bits)
{
    if (bits <= 3) return rank;
    const int half = 1 << (bits - 1);
    return rank >= half ? rank - half : (half - 1 - rank) | half;
}

__device__ __forceinline__ void store_lane(uint32_t *words, int bits, const Rows &rows)
{
    if (bits <= MOST_PACKED_BITS) {
        store_whole(words, bits, rows);
        return;
    }
    store_whole(words, 4, rows); // 6 bits: two planes
    Rows upper = {};
#pragma unroll
    for (int r = 0; r < 4; r++) upper.low[r] = rows.high[r];
    store_whole(words + TQ_TILE * 4, 2, upper);
}

/** Sums over the channels of a token: of keys over the four lanes of a row, of values over the eight of a column. */
__device__ __forceinline__ int sum_channels(bool is_key, int x)
{
    const int first = is_key ? 1 : 4, last = is_key ? 2 : 16;
    for (int by = first; by <= last; by *= 2) x += __shfl_xor_sync(ALL_LANES, x, by);
    return x;
}

/** Of tokens r (keys) or n (values) of a lane. */
struct Token {
    float before, between;
};

__device__ __forceinline__ void recode_tile(const RecodeArgs &a, bool is_key, int from, int to, int width,
                                            const uint32_t *words, uint32_t *out, const bool (&live)[8], int lane,
                                            Token (&tokens)[8])
{
    const Rows rows = unpack_lane(from, words + lane);
    const float step = a.books.step[from], step_after = a.books.step[to];
    int before[8] = {}, between[8] = {};
    Rows made = {};
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int code = (int)code_of(rows, r, n), t = is_key ? r : n;
            const int channel = is_key ? column_of_lane(lane % 4, n) : lane / 4 + 8 * r;
            if (!live[t] || channel >= width) continue; // code 0
            const int fewer = code_of_rank(rank_of(code, from) >> (from - to), to);
            const int level = a.books.levels[from][code];
            before[t] += level * level;
            between[t] += level * a.books.levels[to][fewer];
            made.low[r] |= (uint32_t)(fewer & 15) << 4 * n;
            made.high[r] |= (uint32_t)(fewer >> 4) << 4 * n;
        }
    store_lane(out + lane, to, made);
#pragma unroll
    for (int t = 0; t < 8; t++) {
        if (is_key && t >= 4) break;
        const float yy = (float)sum_channels(is_key, before[t]), yz = (float)sum_channels(is_key, between[t]);
        tokens[t].before = __fadd_rn(tokens[t].before, __fmul_rn(__fmul_rn(step, step), yy));
        tokens[t].between = __fadd_rn(tokens[t].between, __fmul_rn(__fmul_rn(step, step_after), yz));
    }
}

__global__ void __launch_bounds__(32 * WARPS) recode(const __grid_constant__ RecodeArgs a)
{
    const int lane = threadIdx.x % 32;
    const int64_t job = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    wait_for_stream();
    if (job >= a.jobs) return;
    const int tile = (int)(job % a.tiles), which = (int)(job / a.tiles % a.sides);
    const int64_t record = job / a.tiles / a.sides;
    const bool is_key = which == 0;
    const SideArgs &side = a.side[which];
    const uint8_t *from = a.pages + record * a.record_from;
    uint8_t *to = a.out + record * a.record_to;
    const uint16_t *scales = reinterpret_cast<const uint16_t *>(from + side.scales_from) + TQ_TILE * tile;
    uint16_t *scales_out = reinterpret_cast<uint16_t *>(to + side.scales_to) + TQ_TILE * tile;
    const uint32_t *words =
        reinterpret_cast<const uint32_t *>(from + side.codes_from + (int64_t)tile * side.tile_bytes_from);
    uint32_t *out = reinterpret_cast<uint32_t *>(to + side.codes_to + (int64_t)tile * side.tile_bytes_to);

    uint16_t scale[8];
    bool live[8];
    int column[8];
    Token tokens[8] = {};
#pragma unroll
    for (int t = 0; t < 8; t++) {
        column[t] = is_key ? column_of_token(lane / 4 + 8 * (t % 4)) : column_of_lane(lane % 4, t);
        scale[t] = scales[column[t]];
        live[t] = (scale[t] & 0x7fff) != 0;
    }
    bool changes = false;
    for (int g = 0; g < a.groups; g++) {
        const int bits = side.from[g], fewer = side.to[g];
        if (!bits) continue;
        recode_tile(a, is_key, bits, fewer, min(a.dim - TQ_TILE * g, TQ_TILE), words, out, live, lane, tokens);
        words += TQ_TILE * bits, out += TQ_TILE * fewer;
        changes |= bits != fewer;
    }
    const bool writes = is_key ? lane % 4 == 0 : lane < 4; // one of the lanes that have the token
#pragma unroll
    for (int t = 0; t < 8; t++) {
        if (!writes || (is_key && t >= 4)) continue;
        uint16_t bits = scale[t];
        if (live[t] && changes) {
            const float s =
                __fmul_rn(__half2float(__ushort_as_half(bits)), __fdiv_rn(tokens[t].before, tokens[t].between));
            bits = __half_as_ushort(__float2half_rn(s < 65504.0f ? s : 65504.0f));
        }
        scales_out[column[t]] = bits;
    }
}

SideArgs side_of(const tq_side &from, const tq_side &to, int groups)
{
    SideArgs a = {from.codes_offset,
                  to.codes_offset,
                  from.scales_offset,
                  to.scales_offset,
                  from.tile_bytes,
                  to.tile_bytes,
                  {},
                  {}};
    for (int g = 0; g < groups; g++) a.from[g] = from.bits[g], a.to[g] = to.bits[g];
    return a;
}

} // namespace
} // namespace tq

using namespace tq;

tq_status tq_cuda_recode(const tq_plan *plan, const tq_plan *target, const uint8_t *pages, int64_t n_pages,
                         int32_t kv_heads, uint8_t *out, void *stream, tq_error *error)
{
    TQ_CUDA_TRY(tq_check_recode(plan, target, pages, n_pages, kv_heads, out, error));
    TQ_CUDA_TRY(check_plan(*plan, error));
    if (!n_pages || !kv_heads) return TQ_OK;
    RecodeArgs args = {};
    args.pages = pages, args.out = out;
    args.record_from = plan->record_bytes, args.record_to = target->record_bytes;
    args.sides = 1 + (plan->value.tile_bytes != 0), args.tiles = plan->page_tokens / TQ_TILE;
    args.groups = plan->groups, args.dim = plan->head_dim;
    args.jobs = n_pages * kv_heads * args.sides * args.tiles;
    args.side[0] = side_of(plan->key, target->key, plan->groups);
    args.side[1] = side_of(plan->value, target->value, plan->groups);
    args.books = of_codebooks<LevelsByCode>(*plan, fill_levels_by_code);
    return launch(recode, (args.jobs + WARPS - 1) / WARPS, 32 * WARPS, 0, (cudaStream_t)stream, error, args);
}
