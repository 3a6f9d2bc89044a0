// tq_cuda_recode: a warp recodes 32 tokens of one side of a record. A lane reads its words of a tile and writes those
// of the recoded one. Sums over channels are integers, so that their order does not matter. From 3, 4 and 5 bits a lane
// works on eight codes at once: prmt looks up four levels by three bits of their codes (twice at 5 bits), and dp4a
// multiplies and adds them. Other widths, tiles with padding and tiles with unused tokens take a code at a time.
#include "core/plan_kind.h"
#include "cuda/device/launch.cuh"
#include "cuda/tile/codebooks.h"
#include "cuda/tile/pack.cuh"
#include <type_traits>

namespace tq
{
namespace
{

constexpr int WARPS = 8;

/** Neighbouring groups with the same widths, whose tiles lie side by side; a group with padding is a run of its own. */
struct Run {
    uint8_t from, to, n, width; // bits before and after, groups, real channels of each group
};

struct SideArgs {
    int64_t codes_from, codes_to, scales_from, scales_to; // offsets in a record
    int32_t tile_bytes_from, tile_bytes_to;               // of a token tile
    int32_t runs;                                         // 0: all widths stay
    Run run[PLAN_GROUPS];
};

/** Magnitudes of levels in steps, a byte each, by the low three bits of a code (at 5 bits by the low four). */
struct Magnitudes {
    uint2 low, high;
};

struct RecodeArgs {
    const uint8_t *pages;
    uint8_t *out;
    int64_t record_from, record_to;
    uint32_t jobs, sides, tiles; // jobs: records * sides * token tiles
    SideArgs side[2];
    Magnitudes before[3], after[3][3]; // of codes of 3 to 5 bits, and of what they become at 2 to 4
    LevelsByCode books;
};

__host__ __device__ __forceinline__ int rank_of(int code, int bits)
{
    if (bits <= 3) return code;
    const int half = 1 << (bits - 1), magnitude = code & (half - 1);
    return code & half ? half - 1 - magnitude : half + magnitude;
}

__host__ __device__ __forceinline__ int code_of_rank(int rank, int bits)
{
    if (bits <= 3) return rank;
    const int half = 1 << (bits - 1);
    return rank >= half ? rank - half : (half - 1 - rank) | half;
}

__host__ __device__ __forceinline__ int fewer_bits(int code, int from, int to)
{
    return code_of_rank(rank_of(code, from) >> (from - to), to);
}

/** The same for eight codes, the nibbles of x. At 5 bits, bit 0 of a nibble of `fifth` is a code's fifth bit. At 3
 *  bits, bit 3 of a nibble is ignored. */
template <int FROM, int TO> __device__ __forceinline__ uint32_t eight_fewer(uint32_t x, uint32_t fifth)
{
    static_assert(FROM <= 5 && FROM > TO && TO >= 2);
    if (FROM == 3) return x >> 1 & 0x33333333u;
    if (TO == 4) return (x >> 1 & 0x77777777u) | fifth << 3;            // both have a sign and a magnitude
    const uint32_t negative = FROM == 5 ? fifth : x >> 3 & 0x11111111u; // ranks of negative codes count down
    if (TO == 3) return ((x >> (FROM - 3) & 0x33333333u) | 0x44444444u) ^ negative * 7;
    return ((x >> (FROM - 2) & 0x11111111u) | 0x22222222u) ^ negative * 3;
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

/** Sums over a lane's channels, for each of its tokens: r of keys, n of values. */
struct Sums {
    int before[8], between[8];
};

/** Looks up the magnitudes of four levels by nibbles 0..3 of `codes`. Below 5 bits their bit 3 must be 0. */
template <int FROM> __device__ __forceinline__ uint32_t look_up_four(uint32_t codes, Magnitudes magnitudes)
{
    if (FROM < 5) return prmt(magnitudes.low.x, magnitudes.low.y, codes);
    const uint32_t three_bits = codes & 0x7777u, is_high = prmt(0x80808080u, 0x80808080u, codes); // bytes 0xff or 0x80
    return choose(prmt(magnitudes.high.x, magnitudes.high.y, three_bits),
                  prmt(magnitudes.low.x, magnitudes.low.y, three_bits), is_high); // no magnitude has bit 7
}

/** Adds the products of four levels of token i. */
template <int FROM>
__device__ __forceinline__ void add_four(Sums &sums, int i, uint32_t codes, Magnitudes before, Magnitudes after)
{
    const uint32_t y = look_up_four<FROM>(codes, before), z = look_up_four<FROM>(codes, after);
    sums.before[i] = __dp4a((int)y, (int)y, sums.before[i]);
    sums.between[i] = __dp4a((int)y, (int)z, sums.between[i]);
}

/** Recodes n tiles side by side, all of whose codes are real and used. */
template <int FROM, int TO>
__device__ __forceinline__ void recode_whole(bool is_key, int n, const uint32_t *__restrict__ words,
                                             uint32_t *__restrict__ out, Magnitudes before, Magnitudes after,
                                             Sums &sums)
{
#pragma unroll 4
    for (int k = 0; k < n; k++) {
        Rows target = {}, codes = unpack_lane(FROM, words + TQ_TILE * FROM * k);
        uint32_t (&x)[4] = codes.low;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            target.low[r] = eight_fewer<FROM, TO>(x[r], codes.high[r]);
            if (FROM < 5) x[r] &= 0x77777777u;
        }
        store_whole(out + TQ_TILE * TO * k, TO, target);
        if (is_key) {
#pragma unroll
            for (int r = 0; r < 4; r++) {
                add_four<FROM>(sums, r, x[r], before, after);
                add_four<FROM>(sums, r, x[r] >> 16, before, after);
            }
            continue;
        }
        // Brings the four rows of each column to nibbles 0..3 or 4..7 of a word.
        const uint32_t even_01 = choose(x[0], x[1] << 4, LOW_NIBBLES), odd_01 = choose(x[0] >> 4, x[1], LOW_NIBBLES);
        const uint32_t even_23 = choose(x[2], x[3] << 4, LOW_NIBBLES), odd_23 = choose(x[2] >> 4, x[3], LOW_NIBBLES);
        const uint32_t columns[4] = {prmt(even_01, even_23, 0x5140), prmt(odd_01, odd_23, 0x5140),
                                     prmt(even_01, even_23, 0x7362), prmt(odd_01, odd_23, 0x7362)};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int first = 4 * (i / 2) + i % 2; // columns 0 2, 1 3, 4 6, 5 7
            add_four<FROM>(sums, first, columns[i], before, after);
            add_four<FROM>(sums, first + 2, columns[i] >> 16, before, after);
        }
    }
}

template <int BITS> constexpr std::integral_constant<int, BITS> width_of = {};

/** Recodes a run of any widths. live: a bit for each column, set if its token has a scale other than 0. */
__device__ __forceinline__ void recode_any(const RecodeArgs &a, bool is_key, const Run &run, const uint32_t *words,
                                           uint32_t *out, uint32_t live, int lane, Sums &sums)
{
    for (int k = 0; k < run.n; k++, words += TQ_TILE * run.from, out += TQ_TILE * run.to) {
        const Rows rows = unpack_lane(run.from, words);
        Rows target = {};
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const int code = (int)code_of(rows, r, n), column = column_of_lane(lane % 4, n), row = lane / 4 + 8 * r;
                const int channel = is_key ? column : row;
                if (!(live >> (is_key ? column_of_token(row) : column) & 1) || channel >= run.width) continue; // code 0
                const int fewer = fewer_bits(code, run.from, run.to), level = a.books.levels[run.from][code];
                const int both = level * a.books.levels[run.to][fewer];
                if (is_key) sums.before[r] += level * level, sums.between[r] += both; // constant r, n: registers
                else sums.before[n] += level * level, sums.between[n] += both;
                target.low[r] |= (uint32_t)(fewer & 15) << 4 * n;
                target.high[r] |= (uint32_t)(fewer >> 4) << 4 * n;
            }
        store_lane(out, run.to, target);
    }
}

/** Sums x, by token, over the lanes that have the same tokens. Each lane gets one sum: of keys for token lane % 4 of
 *  the four lanes of a row, of values for token lane / 4 of the eight lanes of a column. */
__device__ __forceinline__ int sum_lanes(bool is_key, const int (&x)[8], int lane)
{
    int y[8];
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = x[i];
#pragma unroll
    for (int half = 4; half; half /= 2) {
        if (is_key && half == 4) continue;
        const int by = is_key ? half : 4 * half;
#pragma unroll
        for (int i = 0; i < half; i++) {
            const int kept = lane & by ? y[i + half] : y[i], other = lane & by ? y[i] : y[i + half];
            y[i] = kept + __shfl_xor_sync(ALL_LANES, other, by);
        }
    }
    return y[0];
}

__global__ void __launch_bounds__(32 * WARPS) recode(const __grid_constant__ RecodeArgs a)
{
    const int lane = threadIdx.x % 32;
    const uint32_t job = blockIdx.x * WARPS + threadIdx.x / 32;
    wait_for_stream();
    if (job >= a.jobs) return;
    const uint32_t tile = job % a.tiles, which = job / a.tiles % a.sides, record = job / a.tiles / a.sides;
    const bool is_key = which == 0;
    const SideArgs &side = a.side[which];
    const uint8_t *from = a.pages + record * a.record_from;
    uint8_t *to = a.out + record * a.record_to;
    // The column of the token whose sums the lane gets.
    const int column = is_key ? lane : column_of_lane(lane % 4, lane / 4);
    uint16_t scale = reinterpret_cast<const uint16_t *>(from + side.scales_from)[TQ_TILE * tile + column];
    uint16_t *scale_out = reinterpret_cast<uint16_t *>(to + side.scales_to) + TQ_TILE * tile + column;
    const uint32_t *words =
        reinterpret_cast<const uint32_t *>(from + side.codes_from) + (int64_t)tile * (side.tile_bytes_from / 4) + lane;
    uint32_t *out = reinterpret_cast<uint32_t *>(to + side.codes_to) + (int64_t)tile * (side.tile_bytes_to / 4) + lane;
    if (!side.runs) {
        for (int i = 0; i < side.tile_bytes_from / 4; i += 32) out[i] = words[i];
        *scale_out = scale;
        return;
    }
    const bool is_live = (scale & 0x7fff) != 0;
    uint32_t live = __ballot_sync(ALL_LANES, is_live);
    if (!is_key && ~live) { // from lanes to columns: lane 4 g + t has column 16 (g / 4) + 4 t + g % 4
        const int holder = 4 * (4 * (lane / 16) + lane % 4) + lane / 4 % 4;
        live = __ballot_sync(ALL_LANES, live >> holder & 1);
    }
    float before = 0, between = 0;
    for (int i = 0; i < side.runs; i++) {
        const Run run = side.run[i];
        const bool is_whole = !~live && run.width == TQ_TILE;
        Sums sums = {};
        const int widths = is_whole ? 10 * run.from + run.to : 0;
        auto whole = [&](auto from, auto to) {
            constexpr int FROM = decltype(from)::value, TO = decltype(to)::value;
            recode_whole<FROM, TO>(is_key, run.n, words, out, a.before[FROM - 3], a.after[FROM - 3][TO - 2], sums);
        };
        if (widths == 54) whole(width_of<5>, width_of<4>);
        else if (widths == 53) whole(width_of<5>, width_of<3>);
        else if (widths == 52) whole(width_of<5>, width_of<2>);
        else if (widths == 43) whole(width_of<4>, width_of<3>);
        else if (widths == 42) whole(width_of<4>, width_of<2>);
        else if (widths == 32) whole(width_of<3>, width_of<2>);
        else recode_any(a, is_key, run, words, out, live, lane, sums);
        words += TQ_TILE * run.from * run.n, out += TQ_TILE * run.to * run.n;
        const float step = a.books.step[run.from], yy = (float)sum_lanes(is_key, sums.before, lane),
                    yz = (float)sum_lanes(is_key, sums.between, lane);
        before = __fadd_rn(before, __fmul_rn(__fmul_rn(step, step), yy));
        between = __fadd_rn(between, __fmul_rn(__fmul_rn(step, a.books.step[run.to]), yz));
    }
    if (is_live) {
        const float s = __fmul_rn(__half2float(__ushort_as_half(scale)), __fdiv_rn(before, between));
        scale = __half_as_ushort(__float2half_rn(s < 65504.0f ? s : 65504.0f));
    }
    *scale_out = scale;
}

/** Lists the runs of a side, as list_runs of core/recode.c does. */
SideArgs side_of(const tq_plan &plan, const tq_side &from, const tq_side &to)
{
    SideArgs a = {};
    a.codes_from = from.codes_offset, a.codes_to = to.codes_offset;
    a.scales_from = from.scales_offset, a.scales_to = to.scales_offset;
    a.tile_bytes_from = from.tile_bytes, a.tile_bytes_to = to.tile_bytes;
    if (!memcmp(from.bits, to.bits, sizeof from.bits)) return a;
    for (int g = 0; g < plan.groups; g++) {
        if (!from.bits[g]) continue;
        const int width = plan.head_dim - TQ_TILE * g < TQ_TILE ? plan.head_dim - TQ_TILE * g : TQ_TILE;
        Run *last = a.runs ? &a.run[a.runs - 1] : nullptr;
        if (last && last->from == from.bits[g] && last->to == to.bits[g] && width == TQ_TILE) last->n++;
        else a.run[a.runs++] = {from.bits[g], to.bits[g], 1, (uint8_t)width};
    }
    return a;
}

Magnitudes magnitudes_of(const LevelsByCode &books, int from, int to)
{
    uint8_t bytes[16] = {};
    Magnitudes magnitudes;
    for (int code = 0; code < (from == 5 ? 16 : 8); code++) {
        const int level = books.levels[to][fewer_bits(code, from, to)];
        bytes[code] = (uint8_t)(level < 0 ? -level : level);
    }
    memcpy(&magnitudes, bytes, sizeof magnitudes);
    return magnitudes;
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
    args.sides = 1 + (plan->value.tile_bytes != 0), args.tiles = (uint32_t)(plan->page_tokens / TQ_TILE);
    const int64_t jobs = n_pages * kv_heads * args.sides * args.tiles;
    args.jobs = (uint32_t)jobs; // fits: 2^32 of the smallest tiles are more than a device has
    args.side[0] = side_of(*plan, plan->key, target->key);
    args.side[1] = side_of(*plan, plan->value, target->value);
    args.books = of_codebooks<LevelsByCode>(*plan, fill_levels_by_code);
    for (int from = 3; from <= 5; from++) {
        args.before[from - 3] = magnitudes_of(args.books, from, from);
        for (int to = 2; to < from; to++) args.after[from - 3][to - 2] = magnitudes_of(args.books, from, to);
    }
    return launch(recode, (jobs + WARPS - 1) / WARPS, 32 * WARPS, 0, (cudaStream_t)stream, error, args);
}
