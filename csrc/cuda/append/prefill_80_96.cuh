// Appending many tokens of head_dim 80 and 96: a warp takes whole token tiles of one (side, sequence, KV head), two lanes a token.
//
//   1  rows arrive in shared memory (cp.async), one round of tokens ahead
//   2  a token's lanes take its row into registers, rotate it there and quantise it; they meet in few stages of the rotation, in the
//      last sums of a tree, and otherwise wait for nobody but look-ups
//   3  codes go to shared memory as nibbles, in the order in which step 4 finds half a row in a word
//   4  lanes change roles: lane 4 g + t of the tile packs and stores its words, 128 bytes of the tile at a time
//
// What limits it is the issue of instructions, about 28 a number at 4 bits: 10 for the rotation, 6 for the three sums, 8 to quantise.
// All of it is unrolled, since registers have no index, and the nearest instruction cache of compute capability 9.0 holds 2,048
// instructions: measured, 3.9 instructions a cycle and multiprocessor up to there, 1.7 to 2.8 beyond.
//
// Per warp in shared memory: | rows of a round, odd multiples of 16 bytes apart | nibbles | rms, <u, u>, <c, u> of 32 tokens |
//   nibbles of keys     [groups][halves][32 tokens][4]   word t of half h: nibble n, n even, is column n + h of lane t of the tile: the
//                                                        halves are the even and the odd channels
//   nibbles of values   [groups][2][32 tokens][2]        half word k of half h: nibble r is channel 2 k + h + 8 r
#ifndef TQ_CUDA_APPEND_PREFILL_80_96_CUH
#define TQ_CUDA_APPEND_PREFILL_80_96_CUH
#include "cuda/append/rows.cuh"
#include "cuda/tile/hadamard.cuh"
#include "cuda/tile/pack.cuh"

namespace tq
{
namespace tile
{

constexpr int WARPS = 8;

/** One compiled kernel. Every group has 1 to 4 bits. */
template <int DIM_> struct Shape : Split<DIM_> {
    using Base = Split<DIM_>;
    static constexpr int GROUPS = (DIM_ + 31) / 32, TREE = Base::P; // leaves of a lane
    static constexpr int PIECES = DIM_ / 8, ROW_BYTES = (PIECES | 1) * 16, ROWS_BYTES = Base::ROUND * ROW_BYTES;
    static constexpr int HALVES = 2, NIBBLE_BYTES = GROUPS * HALVES * 512;
    static constexpr int WARP_BYTES = ROWS_BYTES + NIBBLE_BYTES + 3 * 128;
    static constexpr int BLOCKS = Base::PER_LANE <= 40 ? 3 : 2; // of a multiprocessor, by registers
};

/** What the warps of a block share. */
template <class S> struct Tables {
    float product[S::PASSES][S::LANES][S::TABLE];
    float centre[S::DIM]; // if is_centred
    bool is_centred;
    Book books[5]; // by bits, up to 4
    float limit;   // of the sum of squares of a row, from which on one of its numbers may be bad
};

// ---- step 1 ----

/** Queues the copies of tokens first .. first + ROUND - 1 (packed indices) that the span has; rows of others are zeros. */
template <class S>
__device__ __forceinline__ void load_round(const AppendArgs &a, const Work &work, const Head &head, const Span &span,
                                           int first, uint8_t *rows, int lane)
{
    constexpr int ROWS_AT_ONCE = 32 / S::PIECES, PIECE = 16;
    const int row = lane / S::PIECES, piece = lane % S::PIECES, fresh = first + a.sinks - span.before;
    uint8_t *to = rows + row * S::ROW_BYTES + piece * PIECE;
    if (row >= ROWS_AT_ONCE) return;
    if (fresh >= 0 && first >= span.first && first + S::ROUND <= span.last) { // all new, the usual case
        const int64_t stride = a.side[work.side].stride_token;
        const char *from = head.fresh + (fresh + row) * stride + piece * PIECE;
#pragma unroll
        for (int r = 0; r < S::ROUND; r += ROWS_AT_ONCE)
            if (S::ROUND % ROWS_AT_ONCE == 0 || r + row < S::ROUND) copy_16(to + r * S::ROW_BYTES, from + r * stride);
    } else {
#pragma unroll 1
        for (int r = row; r < S::ROUND; r += ROWS_AT_ONCE, to += ROWS_AT_ONCE * S::ROW_BYTES)
            copy_or_clear(a, work, head, span, first + r, to, piece * PIECE);
    }
}

// ---- step 2 ----

template <bool BF16> __device__ __forceinline__ float2 unpack(uint32_t two)
{
    if constexpr (BF16) return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
    else return __half22float2(*reinterpret_cast<const __half2 *>(&two));
}

/** A row to the registers of lane q, after the first stage of the rotation. BF16: or binary16. */
template <class S, bool BF16, bool CENTRED>
__device__ __forceinline__ void read_row(float (&v)[S::PER_LANE], const uint8_t *row, const float *centre,
                                         const float *table, int q)
{
#pragma unroll
    for (int pair = 0; pair < S::PER_LANE; pair += 4) {
        uint32_t words[4];
        *reinterpret_cast<uint4 *>(words) = *reinterpret_cast<const uint4 *>(row + 4 * pair);
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const int i = pair + w, channel = S::channel(i, 0);
            float2 x = unpack<BF16>(words[w]);
            if constexpr (CENTRED) {
                x.x = __fsub_rn(x.x, centre[channel]);
                x.y = __fsub_rn(x.y, centre[channel + 1]);
            }
            v[i] = channel < S::P ? __fmaf_rn(x.y, product_of(table, i), x.x) : q ? x.y : x.x;
        }
    }
}

/** The tree of turboquant.h over all channels of a token: leaf(i) in each of its lanes. */
template <class S, class Leaf> __device__ __forceinline__ float token_tree(const Leaf &leaf)
{
    const float sum = thread_tree<S::PER_LANE, S::TREE>(leaf);
    return __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 16));
}

/** Row -> z, and its sum of squares. */
template <class S>
__device__ __forceinline__ float rotate_row(float (&v)[S::PER_LANE], const uint8_t *row, bool bf16,
                                            const Tables<S> &tables, int q)
{
    const float *centre = tables.centre, *table = tables.product[0][q];
    if (tables.is_centred && bf16) read_row<S, true, true>(v, row, centre, table, q);
    else if (tables.is_centred) read_row<S, false, true>(v, row, centre, table, q);
    else if (bf16) read_row<S, true, false>(v, row, centre, table, q);
    else read_row<S, false, false>(v, row, centre, table, q);
    hadamard_split<S>(v, tables.product[0][q]);
    return token_tree<S>([&](int i) { return __fmul_rn(v[i], v[i]); });
}

/** u of a group -> its ranks as nibbles, to shared memory (see above); u becomes c u. nibbles: those of the token, in its group. */
template <class S, bool IS_KEY, int GROUP>
__device__ __forceinline__ void quantise_group(float (&v)[S::PER_LANE], const LaneBook &book, uint32_t *nibbles, int q)
{
    constexpr int FIRST = GROUP * 32 / S::LANES, LAST = FIRST + 32 / S::LANES;
    uint32_t word[4] = {};
#pragma unroll
    for (int i = FIRST; i < LAST && i < S::PER_LANE; i++) {
        const int c = S::channel(i, 0) % 32, g = c % 8; // of lane 0
        int w, nibble;
        if (IS_KEY) {
            w = c % 16 / 4;
            nibble = c / 16 * 4 + c % 4;
        } else {
            w = g / 4;
            nibble = g / 2 % 2 * 4 + c / 8;
        }
        const int rank = rank_of<false>(v[i], book);
        v[i] = __fmul_rn(__shfl_sync(ALL_LANES, book.level, rank), v[i]);
        word[w] += (uint32_t)rank << 4 * nibble;
    }
    uint32_t *half = nibbles + q * (IS_KEY ? 128 : 64);
    if constexpr (IS_KEY) *reinterpret_cast<uint4 *>(half) = make_uint4(word[0], word[1], word[2], word[3]);
    else *reinterpret_cast<uint2 *>(half) = make_uint2(word[0], word[1]);
}

template <class S, bool IS_KEY, int GROUP = 0>
__device__ __forceinline__ void quantise_groups(const AppendSide &side, const Book *books, LaneBook &book,
                                                int &bits_of_book, float (&v)[S::PER_LANE], uint32_t *nibbles, int q,
                                                int lane)
{
    if constexpr (GROUP < S::GROUPS) {
        if (side.bits[GROUP] != bits_of_book) {
            bits_of_book = side.bits[GROUP];
            book = lane_book(books[bits_of_book], lane);
        }
        quantise_group<S, IS_KEY, GROUP>(v, book, nibbles, q);
        quantise_groups<S, IS_KEY, GROUP + 1>(side, books, book, bits_of_book, v,
                                              nibbles + (IS_KEY ? S::HALVES : 1) * 128, q, lane);
    }
}

// ---- steps 3 and 4 ----

/** Half words of columns 0..7 with a nibble for each of the rows 0..3 -> the rows. */
__device__ __forceinline__ void transpose(const uint32_t (&x)[8], uint32_t (&rows)[4])
{
    uint32_t even[2], odd[2]; // bytes: row 0, row 2 of two columns, twice; rows 1 and 3
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t first = prmt(x[4 * i], x[4 * i + 2], 0x5410), second = prmt(x[4 * i + 1], x[4 * i + 3], 0x5410);
        even[i] = choose(first, second << 4, LOW_NIBBLES);
        odd[i] = choose(first >> 4, second, LOW_NIBBLES);
    }
    rows[0] = prmt(even[0], even[1], 0x6420);
    rows[1] = prmt(odd[0], odd[1], 0x6420);
    rows[2] = prmt(even[0], even[1], 0x7531);
    rows[3] = prmt(odd[0], odd[1], 0x7531);
}

/** The rows of lane 4 g + t in the tile of a group, whose nibbles are at `nibbles`. */
template <class S, bool IS_KEY>
__device__ __forceinline__ Rows rows_of_lane(const uint32_t *nibbles, int group, int bits, int lane)
{
    const int g = lane / 4, t = lane % 4;
    Rows rows = {};
    if constexpr (IS_KEY) {
        nibbles += S::HALVES * 128 * group + lane;
#pragma unroll
        for (int r = 0; r < 4; r++) rows.low[r] = nibbles[32 * r] | nibbles[32 * r + 128] << 4;
    } else {
        uint32_t x[8];
        const uint16_t *half = reinterpret_cast<const uint16_t *>(nibbles + 128 * group + g % 2 * 64) + 4 * t + g / 2;
#pragma unroll
        for (int n = 0; n < 8; n++) x[n] = half[4 * token_of_column(column_of_lane(0, n))];
        transpose(x, rows.low);
    }
    if (bits == 4) {
        const bool padded = S::DIM % 32 && group == S::GROUPS - 1; // from channel 16 on
        static_assert(S::DIM % 32 == 0 || S::DIM % 32 == 16, "");
#pragma unroll
        for (int r = 0; r < 4; r++) {
            rows.low[r] = signed_codes(rows.low[r]);
            if (padded) rows.low[r] &= IS_KEY ? 0xffffu : r < 2 ? 0xffffffffu : 0;
        }
    }
    return rows;
}

/** `tiles`: of this token tile, at the lane's first word. WHOLE: all of its tokens, otherwise begin .. end - 1. */
template <class S, bool IS_KEY, bool WHOLE>
__device__ __forceinline__ void store_tile(const AppendSide &side, uint8_t *tiles, const uint32_t *nibbles, int begin,
                                           int end, int lane)
{
    uint32_t marked[4] = {};
    if (!WHOLE) mark_tokens(IS_KEY, begin, end, lane, marked);
#pragma unroll 1
    for (int group = 0; group < S::GROUPS; group++) {
        const int bits = side.bits[group];
        Rows rows = rows_of_lane<S, IS_KEY>(nibbles, group, bits, lane);
#pragma unroll
        for (int r = 0; r < 4; r++)
            if constexpr (!WHOLE) rows.low[r] &= marked[r];
        uint32_t *words = reinterpret_cast<uint32_t *>(tiles + side.offset[group]);
        if constexpr (WHOLE) store_whole(words, bits, rows);
        else store_marked(words, bits, rows, marked);
    }
}

// ---- a warp's tiles ----

/** Tiles tile, tile + WARPS .. of those that the span touches, up to end_tile. */
template <class S, bool IS_KEY>
__device__ __forceinline__ void append_tiles_of_warp(const AppendArgs &a, const Tables<S> &tables, const Work &work,
                                                     const Head &head, const Span &span, int tile, int end_tile,
                                                     uint8_t *memory, int lane)
{
    const AppendSide &side = a.side[!IS_KEY];
    const int q = lane / S::ROUND, token_of_lane = lane % S::ROUND;
    uint8_t *row = memory + token_of_lane * S::ROW_BYTES;
    uint32_t *nibbles = reinterpret_cast<uint32_t *>(memory + S::ROWS_BYTES);
    float *sums_of_tile = reinterpret_cast<float *>(memory + S::ROWS_BYTES + S::NIBBLE_BYTES);
    float v[S::PER_LANE];
    int bits_of_book = side.bits[0];
    LaneBook book = lane_book(tables.books[bits_of_book], lane);
    load_round<S>(a, work, head, span, tile * TQ_TILE, memory, lane);
#pragma unroll 1
    for (; tile < end_tile; tile += WARPS) {
        const int base = tile * TQ_TILE;
#pragma unroll 1
        for (int first = 0; first < TQ_TILE; first += S::ROUND) {
            const int token = first + token_of_lane;
            wait_for_copies();
            __syncwarp();
            float ss;
            int mended = 0, again;
            // Once; twice in the rare case that a number may be bad. Of a `mended` known to be 1 then, the compiler would make
            // a second copy of the loop, for nothing but more code.
#pragma unroll 1
            do {
                ss = rotate_row<S>(v, row, a.dtype == TQ_BF16, tables, q);
                again = __any_sync(ALL_LANES, !(ss < tables.limit)) && !mended;
                if (again) mend_row(row, S::DIM, a.dtype, a.flag, work, base + token + a.sinks);
                mended = opaque(1);
                __syncwarp();
            } while (again);
            const int next = first + S::ROUND < TQ_TILE ? base + first + S::ROUND : base + WARPS * TQ_TILE;
            if (next < end_tile * TQ_TILE) load_round<S>(a, work, head, span, next, memory, lane);

            const Norm norm = norm_of(ss, __fdiv_rn(ss, (float)S::DIM));
#pragma unroll
            for (int i = 0; i < S::PER_LANE; i++) v[i] = __fmul_rn(v[i], norm.inverse);
            const float uu = token_tree<S>([&](int i) { return __fmul_rn(v[i], v[i]); });
            quantise_groups<S, IS_KEY>(side, tables.books, book, bits_of_book, v, nibbles + token * (IS_KEY ? 4 : 2), q,
                                       lane);
            const float cu = token_tree<S>([&](int i) { return v[i]; });
            if (q == 0) {
                sums_of_tile[token] = norm.rms;
                sums_of_tile[token + 32] = uu;
                sums_of_tile[token + 64] = cu;
            }
        }
        __syncwarp();
        uint8_t *record = record_of(a, work, base);
        const int page_token = (int)a.page_tokens.remainder((uint32_t)base);
        const int begin = max(0, span.first - base), end = min(TQ_TILE, span.last - base);
        if (record) {
            uint8_t *tiles = tiles_of(side, record, page_token / TQ_TILE) + 4 * lane;
            if (end - begin == TQ_TILE) store_tile<S, IS_KEY, true>(side, tiles, nibbles, begin, end, lane);
            else store_tile<S, IS_KEY, false>(side, tiles, nibbles, begin, end, lane);
            const Sums sums = {sums_of_tile[lane + 32], sums_of_tile[lane + 64], 0.0f};
            if (lane >= begin && lane < end)
                *scale_at(side, record, page_token + lane) = scale_of(a.scale, sums_of_tile[lane], sums, 1.0f);
        }
        __syncwarp();
    }
}

/** The centre, and the limit: |x| > TQ_MAX_INPUT makes the sum of squares exceed (TQ_MAX_INPUT - |centre|)^2, as rotations keep norms,
 *  and the rounding of the sum is far below the 1 % left here. */
template <class S> __device__ __forceinline__ void prepare_centre(const Head &head, Tables<S> &tables, int lane)
{
    float most = 0;
    for (int i = lane; head.centre && i < S::DIM; i += 32) {
        tables.centre[i] = head.centre[i];
        most = fmaxf(most, fabsf(tables.centre[i]));
    }
    const float room = TQ_MAX_INPUT - warp_max(most);
    if (lane == 0) tables.limit = room > 0 ? 0.99f * room * room : -1.0f, tables.is_centred = head.centre;
}

/** Block i of `blocks` for a (side, sequence, head): WARPS * tiles_per_warp token tiles. */
template <class S>
__global__ void __launch_bounds__(32 * WARPS, S::BLOCKS)
    append_prefill_80_96(const __grid_constant__ AppendArgs a, const __grid_constant__ SignTables<S> signs,
                         const __grid_constant__ Divisor blocks, int tiles_per_warp)
{
    extern __shared__ __align__(16) uint8_t memory[];
    __shared__ __align__(16) Tables<S> tables;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned item = blocks.quotient(blockIdx.x), block = blockIdx.x - item * blocks.divisor;
    const Work work = work_of(a, item);
    const Head head = head_of(a, work);
    for (int i = threadIdx.x; i < (int)(sizeof signs / 4); i += 32 * WARPS)
        (&tables.product[0][0][0])[i] = (&signs.product[0][0][0])[i];
    for (int i = threadIdx.x; i < (int)(sizeof tables.books / 4); i += 32 * WARPS)
        reinterpret_cast<uint32_t *>(tables.books)[i] = reinterpret_cast<const uint32_t *>(a.books)[i];
    wait_for_stream();
    const Span span = span_of(a, work.b);
    const int begin = span.first / TQ_TILE + (int)block * WARPS * tiles_per_warp;
    const int end = min(begin + WARPS * tiles_per_warp, (span.last + TQ_TILE - 1) / TQ_TILE);
    if (begin >= end || span.first == span.last) return;
    if (warp == 0) prepare_centre(head, tables, lane);
    __syncthreads();
    if (begin + warp >= end) return;
    uint8_t *own = memory + warp * S::WARP_BYTES;
    if (work.side == 0) append_tiles_of_warp<S, true>(a, tables, work, head, span, begin + warp, end, own, lane);
    else append_tiles_of_warp<S, false>(a, tables, work, head, span, begin + warp, end, own, lane);
}

template <class S>
tq_status launch_shape(const AppendArgs &args, const tq_plan &plan, cudaStream_t stream, tq_error *error)
{
    DeviceFacts device;
    TQ_CUDA_TRY(current_device(&device, error));
    const int64_t heads = (int64_t)args.sides * args.batch * args.kv_heads, tiles = append_tiles(args);
    const int64_t waves = heads * tiles / (S::BLOCKS * WARPS * (int64_t)device.processors); // of a tile a warp
    const int tiles_per_warp = waves >= 4 ? 2 : 1;
    const int64_t blocks = (tiles + WARPS * tiles_per_warp - 1) / (WARPS * tiles_per_warp);
    return launch(append_prefill_80_96<S>, heads * blocks, 32 * WARPS, WARPS * S::WARP_BYTES, stream, error, args,
                  sign_tables<S>(plan.signs), divisor_of(blocks), tiles_per_warp);
}

} // namespace tile
} // namespace tq
#endif
