// tq_cuda_recode: a warp for each 32 tokens of one side of a record. A lane reads its words of a tile and writes its words of
// the recoded one, by a table of what each code becomes; sums over channels are integers, so that their order does not matter.
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
template <bool IS_KEY> __device__ __forceinline__ int sum_channels(int x)
{
#pragma unroll
    for (int by = IS_KEY ? 1 : 4; by <= (IS_KEY ? 2 : 16); by *= 2) x += __shfl_xor_sync(ALL_LANES, x, by);
    return x;
}

/** What a code becomes, by code. */
struct Recoded {
    uint32_t code;    // of fewer bits
    uint32_t squares; // level^2 and, from bit 16 on, level * its new level: neither has more than 14 bits
};

/** Recoded codes from `from` bits to `to` bits begin at PAIR_CODES * pair_of(from, to). */
constexpr int PAIR_CODES = 1 << TQ_MAX_BITS, PAIRS = TQ_MAX_BITS * (TQ_MAX_BITS + 1) / 2;

__device__ __forceinline__ int pair_of(int from, int to) { return from * (from - 1) / 2 + to - 1; }

/** Fills the tables of the plan's pairs of widths, by a block. Needs a __syncthreads after it. */
__device__ __forceinline__ void fill_pairs(const RecodeArgs &a, Recoded *pairs)
{
    for (int i = 0; i < a.sides * a.groups; i++) {
        const SideArgs &side = a.side[i / a.groups];
        const int g = i % a.groups, from = side.from[g], to = side.to[g];
        if (!from || (g && side.from[g - 1] == from && side.to[g - 1] == to)) continue;
        for (int code = threadIdx.x; code < 1 << from; code += blockDim.x) {
            const int fewer = code_of_rank(rank_of(code, from) >> (from - to), to), level = a.books.levels[from][code];
            pairs[PAIR_CODES * pair_of(from, to) + code] = {
                (uint32_t)fewer, (uint32_t)(level * level | level * a.books.levels[to][fewer] << 16)};
        }
    }
}

/** Of tokens r (keys) or n (values) of a lane: the sums of a run over the lane's channels, and those of the runs before it. */
struct Token {
    int run_before, run_between;
    float before, between;
};

/** GENERAL: also codes of more than 4 bits, groups with padding and tokens that have no vector. */
template <bool IS_KEY, bool GENERAL>
__device__ __forceinline__ void recode_tile(int from, int to, int width, const Recoded *recoded, const uint32_t *words,
                                            uint32_t *out, uint32_t live, int lane, Token (&tokens)[8])
{
    const Rows rows = unpack_lane(from, words + lane);
    Rows made = {};
    uint32_t sums[8][2] = {}; // of four codes each
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int t = IS_KEY ? r : n, channel = IS_KEY ? column_of_lane(lane % 4, n) : lane / 4 + 8 * r;
            const uint32_t code = GENERAL ? code_of(rows, r, n) : rows.low[r] >> 4 * n & 15;
            Recoded x = recoded[code];
            if (GENERAL && (channel >= width || !(live >> t & 1))) x = {0, 0};
            sums[t][IS_KEY ? n / 4 : 0] += x.squares;
            made.low[r] |= (GENERAL ? x.code & 15 : x.code) << 4 * n;
            if (GENERAL) made.high[r] |= x.code >> 4 << 4 * n;
        }
    store_lane(out + lane, to, made);
#pragma unroll
    for (int t = 0; t < (IS_KEY ? 4 : 8); t++) {
        tokens[t].run_before += (sums[t][0] & 0xffff) + (sums[t][1] & 0xffff);
        tokens[t].run_between += (sums[t][0] >> 16) + (sums[t][1] >> 16);
    }
}
static_assert(4 * 127 * 127 < 1 << 16, "four products of levels in 16 bits");

/** Ends a run, whose sum over all channels is exact before it is rounded once. */
template <bool IS_KEY>
__device__ __forceinline__ void end_run(const RecodeArgs &a, int from, int to, Token (&tokens)[8])
{
    const float step = a.books.step[from], step_after = a.books.step[to];
#pragma unroll
    for (int t = 0; t < (IS_KEY ? 4 : 8); t++) {
        Token &x = tokens[t];
        const float yy = (float)sum_channels<IS_KEY>(x.run_before), yz = (float)sum_channels<IS_KEY>(x.run_between);
        x.before = __fadd_rn(x.before, __fmul_rn(__fmul_rn(step, step), yy));
        x.between = __fadd_rn(x.between, __fmul_rn(__fmul_rn(step, step_after), yz));
        x.run_before = x.run_between = 0;
    }
}

/** 32 tokens of one side of a record, by a warp. */
template <bool IS_KEY>
__device__ __forceinline__ void recode_tokens(const RecodeArgs &a, const SideArgs &side, const Recoded *pairs, int tile,
                                              const uint8_t *from, uint8_t *to, int lane)
{
    constexpr int N = IS_KEY ? 4 : 8;
    const uint16_t *scales = reinterpret_cast<const uint16_t *>(from + side.scales_from) + TQ_TILE * tile;
    uint16_t *scales_out = reinterpret_cast<uint16_t *>(to + side.scales_to) + TQ_TILE * tile;
    const uint32_t *words =
        reinterpret_cast<const uint32_t *>(from + side.codes_from + (int64_t)tile * side.tile_bytes_from);
    uint32_t *out = reinterpret_cast<uint32_t *>(to + side.codes_to + (int64_t)tile * side.tile_bytes_to);

    // All cache lines at once: the loop below has loads of one group only on their way.
    for (int at = 128 * lane; at < side.tile_bytes_from; at += 128 * 32)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const uint8_t *>(words) + at));
    uint16_t scale[N];
    uint32_t live = 0; // a bit for each token
    Token tokens[8] = {};
#pragma unroll
    for (int t = 0; t < N; t++) {
        scale[t] = scales[IS_KEY ? column_of_token(lane / 4 + 8 * t) : column_of_lane(lane % 4, t)];
        live |= (uint32_t)((scale[t] & 0x7fff) != 0) << t;
    }
    const bool all_live = __all_sync(ALL_LANES, live == (1u << N) - 1);
    bool changes = false;
    int run_from = 0, run_to = 0; // widths of the run (docs/rounding.md, "Recoding")
    for (int g = 0; g < a.groups; g++) {
        const int bits = side.from[g], fewer = side.to[g], width = min(a.dim - TQ_TILE * g, TQ_TILE);
        if (!bits) continue;
        if (run_from && (bits != run_from || fewer != run_to || width < TQ_TILE))
            end_run<IS_KEY>(a, run_from, run_to, tokens);
        run_from = bits, run_to = fewer;
        const Recoded *recoded = pairs + PAIR_CODES * pair_of(bits, fewer);
        if (all_live && width == TQ_TILE && bits <= 4)
            recode_tile<IS_KEY, false>(bits, fewer, width, recoded, words, out, live, lane, tokens);
        else recode_tile<IS_KEY, true>(bits, fewer, width, recoded, words, out, live, lane, tokens);
        words += TQ_TILE * bits, out += TQ_TILE * fewer;
        changes |= bits != fewer;
    }
    if (run_from) end_run<IS_KEY>(a, run_from, run_to, tokens);
    if (IS_KEY ? lane % 4 : lane >= 4) return; // one of the lanes that have the token goes on
#pragma unroll
    for (int t = 0; t < N; t++) {
        uint16_t bits = scale[t];
        if (live >> t & 1 && changes) {
            const float s =
                __fmul_rn(__half2float(__ushort_as_half(bits)), __fdiv_rn(tokens[t].before, tokens[t].between));
            bits = __half_as_ushort(__float2half_rn(s < 65504.0f ? s : 65504.0f));
        }
        scales_out[IS_KEY ? column_of_token(lane / 4 + 8 * t) : column_of_lane(lane % 4, t)] = bits;
    }
}

__global__ void __launch_bounds__(32 * WARPS, 2) recode(const __grid_constant__ RecodeArgs a)
{
    __shared__ Recoded pairs[PAIR_CODES * PAIRS];
    fill_pairs(a, pairs);
    __syncthreads();
    wait_for_stream();
    const int lane = threadIdx.x % 32;
    const int64_t job = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (job >= a.jobs) return;
    const int tile = (int)(job % a.tiles), which = (int)(job / a.tiles % a.sides);
    const int64_t record = job / a.tiles / a.sides;
    const uint8_t *from = a.pages + record * a.record_from;
    uint8_t *to = a.out + record * a.record_to;
    if (which == 0) recode_tokens<true>(a, a.side[0], pairs, tile, from, to, lane);
    else recode_tokens<false>(a, a.side[1], pairs, tile, from, to, lane);
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
