// Appends many tokens of plans with settled rows (docs/rounding.md, "Settled rows"). A warp takes whole token tiles of
// one (side, sequence, KV head), half a tile (16 tokens) at a time. A lane makes the words of the tile that it stores.
//
// Sums of 32 settled numbers are exact in any order, so tensor cores run the first five stages of the rotation, as
// products over 32 channels. With columns in a suitable order, lane 4 g + t gets the numbers that its words need:
//
//   keys     tokens g and g + 8, of every 16 channels 4 t .. 4 t + 3             rows x H
//   values   tokens t + 4 k, k = 0 .. 3, of every 16 channels g and g + 8        H x rows
//
// The other stages pair numbers of one lane. u, in whole units (TQ_SETTLED_UNITS), is the index of its code in a table.
// Only sums go from lane to lane. A number takes about 16 instructions. Registers limit a multiprocessor to 16 warps
// (head_dim 128), too few to hide the latency of tables, levels and products (measured.md).
//
// Shared memory: | a table of codes for each width | for each warp: 16 rows, 8 words apart modulo 32 (row_of_token) |
//                  centre | rms, <c, u> of 32 tokens | with a wave or a metric: HeadResidual (residual_rows.cuh) |
#ifndef TQ_CUDA_APPEND_PREFILL_CUH
#define TQ_CUDA_APPEND_PREFILL_CUH
#include "cuda/append/encode_warp.cuh"
#include "cuda/append/residual_rows.cuh"
#include "cuda/append/rows.cuh"
#include "cuda/tile/pack.cuh"

namespace tq
{
namespace fragments
{

constexpr int PASS = 16;     // tokens at a time
constexpr int MOST_BITS = 4; // the most bits of a group

/** One compiled kernel, for groups of 1 to 4 bits. MOMENTS: for plans with a wave or a metric. SEARCHES: with tries. */
template <int DIM_, bool MOMENTS_, bool SEARCHES_> struct Shape {
    static constexpr int DIM = DIM_, GROUPS = DIM / 32, CHUNKS = DIM / 16;
    static constexpr bool MOMENTS = MOMENTS_, SEARCHES = SEARCHES_;
    static constexpr int PIECES = DIM / 8, ROW_BYTES = 2 * DIM + 32, ROWS_BYTES = PASS * ROW_BYTES,
                         AT_CENTRE = ROWS_BYTES, AT_SUMS = AT_CENTRE + 4 * DIM, AT_RESIDUAL = AT_SUMS + 2 * 4 * TQ_TILE,
                         WARP_BYTES = AT_RESIDUAL + (MOMENTS ? (int)sizeof(HeadResidual<DIM_>) : 0);
    /* Warps of a multiprocessor, as many as registers allow. */
    static constexpr int WARPS = DIM <= 64 ? (SEARCHES ? 16 : 24) : DIM <= 128 ? (SEARCHES ? 12 : 16) : 8;
    /* Units of the largest |u|: sqrt(DIM) but for rounding, times the largest factor. Tables have -MOST .. MOST - 1. */
    static constexpr int MOST = SEARCHES ? (DIM <= 64    ? 640
                                            : DIM <= 128 ? 896
                                                         : 1264)
                                         : (DIM <= 64    ? 528
                                            : DIM <= 128 ? 736
                                                         : 1040),
                         TABLE_BYTES = 2 * MOST;
};

/** How warps share the tiles of a side: warp t takes `each`, and one more if t < more. For values, warps are counted
 *  from the last one backwards. So a warp with one more tile of keys has none more of values, if that is possible. */
struct Shares {
    uint32_t each, more;

    __device__ __forceinline__ uint32_t first(uint32_t t) const { return t * each + min(t, more); }
};

struct Nothing {};

struct FragmentsArgs : SettledArgs {
    /** By side and group. The address of u's code is table + the address of the block's shared memory + the bits of
     *  WHOLE + u in units (tile/quantize.cuh). The compiler must not know it: it would add a part of it separately. */
    uint32_t table[2][256 / TQ_TILE];
    int32_t table_of_width[MOST_BITS + 1], tables;            // offset of a width's table, or -1; bytes of all tables
    int16_t first_place[MOST_BITS + 1][(1 << MOST_BITS) - 1]; // by width: index in its table where rank i + 1 begins
    /** tiles: token tiles of a (side, sequence, head). Tiles of a side are numbered one (sequence, head) after the
     *  other. Warps from values_from on take only values, those before it only keys; if it is 0, all take both. */
    Divisor tiles;
    Shares shares[2];
    uint32_t values_from;
};

/** What the warps of a block share. */
template <class S> struct Tables : std::conditional_t<S::MOMENTS, Turns<S>, Nothing> {
    uint2 signs[S::CHUNKS][4];       // [c][t]: sign flips of channels 16 c + 4 t .. + 3, for rows as stored
    float levels[MOST_BITS + 1][32]; // by width and code
};

/** Returns the index in shared memory of a channel of the centre, chosen so that a lane reads four at a time. */
template <bool IS_KEY> __device__ __forceinline__ int place_of_centre(int channel)
{
    return IS_KEY ? channel : channel / 32 * 32 + channel % 8 * 4 + channel / 8 % 4;
}

/** Returns the row in shared memory of token i of a pass: for keys also its row in products, for values its column. */
template <bool IS_KEY> __device__ __forceinline__ int row_of_token(int i)
{
    return IS_KEY ? i : (i & 8) | (i & 3) << 1 | (i >> 2 & 1);
}

/** A lane's numbers: x[c][4 i + d] is register d of the result of product i of chunk c, which is 16 channels. */
template <class S> struct Numbers {
    float x[S::CHUNKS][8];
};

/** For number e = 4 i + d of a chunk: which of the lane's tokens it belongs to, and which of that token's numbers it
 *  is. Number n is channel 4 t + n for keys, g + 8 n for values. */
template <bool IS_KEY> struct Lane {
    static constexpr int TOKENS = IS_KEY ? 2 : 4;
    __device__ static constexpr int token(int e) { return IS_KEY ? e / 2 % 2 : e / 4 * 2 + e % 2; }
    __device__ static constexpr int n(int e) { return IS_KEY ? e / 4 * 2 + e % 2 : e / 2 % 2; }

    /** Returns the lane's own token: the one of its tokens whose sums it ends up with. */
    __device__ static int own(int lane) { return IS_KEY ? lane / 2 % 2 : lane / 4 % 4; }
    /** Returns the bits of token k in a word of codes: for keys in word k of a group, for values in both words. */
    __device__ static constexpr uint32_t mask(int k)
    {
        return IS_KEY ? 0xffffffffu : 0x000f000fu << (8 * (k % 2) + 4 * (k / 2));
    }
    /** Returns a lane whose own token is this lane's token k. */
    __device__ static int lane_of(int lane, int k) { return IS_KEY ? (lane & ~3) | 2 * k : 4 * k + lane % 4; }
    /** Whether the lane is the first of those with the same own token. */
    __device__ static bool first(int lane) { return IS_KEY ? lane % 2 == 0 : lane < 16; }
    /** Returns which token of the pass the lane's token k is. */
    __device__ static int in_pass(int lane, int k) { return IS_KEY ? lane / 4 + 8 * k : lane % 4 + 4 * k; }
};

// ---- rows ----

/** Queues copies of tokens first .. first + 15 (packed indices); writes zeros for those that are not in the span. */
template <class S, bool IS_KEY>
__device__ __forceinline__ void load_pass(const AppendArgs &a, const Work &work, const Head &head, const Span &span,
                                          int first, uint8_t *rows, int lane)
{
    constexpr int AT_ONCE = 32 / S::PIECES;
    const int token = lane / S::PIECES, piece = lane % S::PIECES * 16,
              fresh = first + a.sinks - span.before;                                     // index in the new tokens
    const bool all_new = fresh >= 0 && first >= span.first && first + PASS <= span.last; // the usual case
    const int64_t stride = a.side[!IS_KEY].stride_token;
    const char *from = head.fresh + (span.fresh + fresh + token) * stride + piece;
    if (all_new) {
#pragma unroll
        for (int r = 0; r < PASS; r += AT_ONCE)
            copy_16(rows + row_of_token<IS_KEY>(r + token) * S::ROW_BYTES + piece, from + r * stride);
        return;
    }
#pragma unroll 1
    for (int i = token; i < PASS; i += AT_ONCE)
        copy_or_clear(a, work, head, span, first + i, rows + row_of_token<IS_KEY>(i) * S::ROW_BYTES + piece, piece);
}

/** The lane's numbers as stored: rows g and g + 8, channels 4 t .. 4 t + 3 of each chunk. */
template <class S> struct Raw {
    uint2 of[2][S::CHUNKS];

    __device__ __forceinline__ void load(const uint8_t *rows, int lane)
    {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int c = 0; c < S::CHUNKS; c++)
                of[h][c] = *reinterpret_cast<const uint2 *>(rows + (lane / 4 + 8 * h) * S::ROW_BYTES + 32 * c +
                                                            8 * (lane % 4));
    }
};

/** Returns the magnitudes of two numbers of 16 bits. */
__device__ __forceinline__ uint32_t magnitudes(uint32_t x) { return x & 0x7fff7fffu; }

/** Returns of each two numbers the one with the larger magnitude, with any sign; of a NaN, a number that is_too_large.
 *  bfloat16 is compared as binary16: magnitudes have the same order, and what then is a NaN is too large. */
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b)
{
    uint32_t most;
#if __CUDA_ARCH__ >= 860
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
#else
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(most) : "r"(magnitudes(a)), "r"(magnitudes(b)));
#endif
    return most;
}

/** Returns the largest magnitude of row g in the low half, that of row g + 8 in the high half. */
template <class S> __device__ __forceinline__ uint32_t largest_of_rows(const Raw<S> &raw)
{
    uint32_t most[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint2 two = raw.of[h][0];
#pragma unroll
        for (int c = 1; c < S::CHUNKS; c++) {
            two.x = larger(two.x, raw.of[h][c].x);
            two.y = larger(two.y, raw.of[h][c].y);
        }
        most[h] = larger(two.x, two.y);
    }
    uint32_t both = larger(prmt(most[0], most[1], 0x5410), prmt(most[0], most[1], 0x7632));
    both = larger(both, __shfl_xor_sync(ALL_LANES, both, 1));
    return magnitudes(larger(both, __shfl_xor_sync(ALL_LANES, both, 2)));
}

/** Whether one of two magnitudes exceeds TQ_MAX_INPUT or is NaN. */
__device__ __forceinline__ bool is_too_large(uint32_t two, bool bf16)
{
    const uint32_t limit = bf16 ? 0x4680 : 0x7400; // 2^14
    return (two & 0xffffu) > limit || two >> 16 > limit;
}

// ---- settling ----

/** Returns the bits of a binary16 number as a float. */
__device__ __forceinline__ uint32_t bits_of_half(uint32_t half)
{
    return __float_as_uint(__half2float(__ushort_as_half((unsigned short)half)));
}

/** Settles two numbers of a row and flips their signs where `signs` has a bit. */
template <bool BF16> struct Settler;

/** bfloat16 numbers are settled already, except those below 2^(E - 11), which become 0. They are compared as binary16:
 *  magnitudes have the same order, and instructions for binary16 can compare magnitudes. */
template <> struct Settler<true> {
    __half2 least;

    __device__ __forceinline__ explicit Settler(uint32_t largest)
    {
        const uint32_t bits = (uint32_t)max((int)(largest & 0x7f80u) - (11 << 7), 0) * 0x10001u;
        least = *reinterpret_cast<const __half2 *>(&bits);
    }
    __device__ __forceinline__ uint32_t operator()(uint32_t two, uint32_t signs) const
    {
        return (two & __hge2_mask(__habs2(*reinterpret_cast<const __half2 *>(&two)), least)) ^ signs;
    }
};

template <> struct Settler<false> {
    Settling settling;

    __device__ __forceinline__ explicit Settler(uint32_t largest) : settling(bits_of_half(largest)) {}
    __device__ __forceinline__ uint32_t operator()(uint32_t two, uint32_t signs) const
    {
        const float2 x = __half22float2(*reinterpret_cast<const __half2 *>(&two));
        const __half2 settled = __floats2half2_rn(settling(x.x), settling(x.y)); // exact
        return *reinterpret_cast<const uint32_t *>(&settled) ^ signs;
    }
};

// ---- rotation ----

/** Returns entries (in, out) and (in + 1, out) of the 16 x 16 Hadamard matrix, in even, as two numbers of 16 bits. */
__device__ __forceinline__ uint32_t hadamard_pair(int in, int out, bool bf16)
{
    const uint32_t one = bf16 ? 0x3f803f80u : 0x3c003c00u;
    const uint32_t low = __popc(in & out) & 1, high = __popc((in + 1) & out) & 1;
    return one ^ low << 15 ^ high << 31;
}

/** Computes c += a b by tensor cores, a 16 x 16, b 16 x 8; operands are fragments of mma.m16n8k16. */
template <bool BF16>
__device__ __forceinline__ void multiply(float *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1)
{
#define TQ_MULTIPLY(type)                                                                                              \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "          \
        "{%0,%1,%2,%3};"                                                                                               \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                               \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
    if constexpr (BF16) TQ_MULTIPLY("bf16");
    else TQ_MULTIPLY("f16");
#undef TQ_MULTIPLY
}

/** The matrix and its negative as fragments: for keys the second factor, by [product][k / 8]; for values the first. */
template <bool IS_KEY> struct Matrix {
    uint32_t h[2][4];

    __device__ __forceinline__ Matrix(int lane, bool bf16)
    {
        const int g = lane / 4, in = 4 * (lane % 4);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            h[0][i] = IS_KEY ? hadamard_pair(in + 2 * (i % 2), 4 * (g / 2) + g % 2 + 2 * (i / 2), bf16)
                             : hadamard_pair(in + 2 * (i / 2), g + 8 * (i % 2), bf16);
            h[1][i] = h[0][i] ^ 0x80008000u;
        }
    }
    /** Adds to x a chunk of rows g (low) and g + 8 (high), times the matrix or (negative: 1) its negative. */
    template <bool BF16>
    __device__ __forceinline__ void multiply_chunk(float (&x)[8], uint2 low, uint2 high, int negative) const
    {
        const uint32_t (&m)[4] = h[negative];
        if constexpr (IS_KEY) {
            multiply<BF16>(x, low.x, high.x, low.y, high.y, m[0], m[1]);
            multiply<BF16>(x + 4, low.x, high.x, low.y, high.y, m[2], m[3]);
        } else {
            multiply<BF16>(x, m[0], m[1], m[2], m[3], low.x, low.y);
            multiply<BF16>(x + 4, m[0], m[1], m[2], m[3], high.x, high.y);
        }
    }
};

/** Runs the stages of distance 32 and more. */
template <class S> __device__ __forceinline__ void rotate_chunks(Numbers<S> &z)
{
#pragma unroll
    for (int h = 2; h < S::CHUNKS; h *= 2)
#pragma unroll
        for (int c = 0; c < S::CHUNKS; c++)
#pragma unroll
            for (int e = 0; e < 8 && !(c & h); e++) {
                const float a = z.x[c][e], b = z.x[c + h][e];
                z.x[c][e] = __fadd_rn(a, b);
                z.x[c + h][e] = __fsub_rn(a, b);
            }
}

/** Settles rows and rotates them, but for the stages of distance 32 and more. BF16: bfloat16; otherwise binary16. */
template <class S, bool IS_KEY, bool BF16>
__device__ __forceinline__ void multiply_chunks(const Raw<S> &raw, uint32_t largest, const Matrix<IS_KEY> &matrix,
                                                const Tables<S> &tables, int lane, Numbers<S> &z)
{
    const Settler<BF16> low(largest & 0xffffu), high(largest >> 16);
#pragma unroll
    for (int i = 0; i < 8 * S::CHUNKS; i++) z.x[i / 8][i % 8] = 0;
#pragma unroll
    for (int c = 0; c < S::CHUNKS; c++) {
        const uint2 signs = tables.signs[c][lane % 4], x = raw.of[0][c], y = raw.of[1][c];
        const uint2 settled_x = make_uint2(low(x.x, signs.x), low(x.y, signs.y)),
                    settled_y = make_uint2(high(y.x, signs.x), high(y.y, signs.y));
        matrix.template multiply_chunk<BF16>(z.x[c & ~1], settled_x, settled_y, 0);
        matrix.template multiply_chunk<BF16>(z.x[c | 1], settled_x, settled_y, c & 1);
    }
}

/** Settles and rotates rows to z. largest: from largest_of_rows. centre: from prepare_centre, or NULL. */
template <class S, bool IS_KEY>
__device__ __forceinline__ void rotate_rows(const Raw<S> &raw, bool bf16, uint32_t largest,
                                            const Matrix<IS_KEY> &matrix, const Tables<S> &tables, const float *centre,
                                            int lane, Numbers<S> &z)
{
    if (bf16) multiply_chunks<S, IS_KEY, true>(raw, largest, matrix, tables, lane, z);
    else multiply_chunks<S, IS_KEY, false>(raw, largest, matrix, tables, lane, z);
    rotate_chunks(z);
    if (centre) {
        constexpr int AT_ONCE = IS_KEY ? 1 : 2; // chunks
#pragma unroll
        for (int k = 0; k < S::CHUNKS; k += AT_ONCE) {
            const float4 four = *reinterpret_cast<const float4 *>(centre + 16 * k + 4 * (IS_KEY ? lane % 4 : lane / 4));
            const float mu[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int e = 0; e < 8 * AT_ONCE; e++) {
                float &x = z.x[k + e / 8][e % 8];
                x = __fsub_rn(x, mu[Lane<IS_KEY>::n(e % 8) + 2 * (e / 8)]);
            }
        }
    }
}

// ---- sums ----

/** Returns a sum over this lane and the one at distance h: of `low` in lanes without bit h, of `high` in the others. */
__device__ __forceinline__ float exchange(float low, float high, int h, int lane)
{
    const bool upper = lane & h;
    return __fadd_rn(upper ? high : low, __shfl_xor_sync(ALL_LANES, upper ? low : high, h));
}

/** Sums over channels i, i + 32, .. of a lane's numbers, by [chunk % 2][number of the chunk]. */
struct Chains {
    float of[2][8];

    __device__ __forceinline__ void add(int c, int e, float x, float y)
    {
        of[c % 2][e] = c < 2 ? __fmul_rn(x, y) : __fmaf_rn(x, y, of[c % 2][e]);
    }
};

/** Returns the sum of the lane's own token, in the order of docs/rounding.md: 16, 8, 2, 1, 4. */
template <bool IS_KEY> __device__ __forceinline__ float sum_of_own(const Chains &chains, int lane)
{
    float s[8], x[4], sum;
#pragma unroll
    for (int e = 0; e < 8; e++) s[e] = __fadd_rn(chains.of[0][e], chains.of[1][e]);
    if constexpr (IS_KEY) { // s[4 i + 2 token + j]: channel 4 t + 2 i + j
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = exchange(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + 2 + i % 2], 2, lane);
        sum = __fadd_rn(__fadd_rn(x[0], x[2]), __fadd_rn(x[1], x[3]));
        return __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 1));
    } else { // s[4 i + 2 n + j]: token 2 i + j, channel g + 8 n
#pragma unroll
        for (int k = 0; k < 4; k++) x[k] = __fadd_rn(s[k / 2 * 4 + k % 2], s[k / 2 * 4 + 2 + k % 2]);
        sum = exchange(exchange(x[0], x[2], 8, lane), exchange(x[1], x[3], 8, lane), 4, lane);
        return __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 16));
    }
}

// ---- codes ----

/** Codes of a tile, by pass and group. Keys: rows (tile/pack.cuh) of the pass's two tokens. Values: word h has two
 *  bytes of row 2 h and two of row 2 h + 1, in pass p nibbles 2 p, 2 p + 1 and 2 p + 4, 2 p + 5 of each. That takes
 *  fewer registers at a time than whole rows. */
template <class S> struct Codes {
    uint32_t of[2][S::GROUPS][2];

    __device__ __forceinline__ Rows rows(bool is_key, int group) const
    {
        Rows rows = {};
#pragma unroll
        for (int r = 0; r < 4; r++)
            rows.low[r] = is_key ? of[r / 2][group][r % 2]
                                 : prmt(of[0][group][r / 2], of[1][group][r / 2], r % 2 ? 0x7362 : 0x5140);
        return rows;
    }
};

__device__ __forceinline__ uint32_t load_byte(uint32_t address)
{
    uint32_t x;
    asm("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}

/** Adds codes of a pass to `codes`; sums <c, z> and, if SEARCHES, <c, c>. times: units of u per z, by token. Codes are
 *  looked up one chunk ahead, because levels wait for codes and sums for levels. */
template <class S, bool IS_KEY>
__device__ __forceinline__ void quantise(const FragmentsArgs &a, const Tables<S> &tables, const Numbers<S> &z,
                                         const float (&times)[Lane<IS_KEY>::TOKENS], uint32_t (&codes)[S::GROUPS][2],
                                         Chains &cz, Chains &cc, uint32_t memory, int lane)
{
    using L = Lane<IS_KEY>;
    uint32_t next[8];
    const auto look_up = [&](int c) {
        const uint32_t table = memory + a.table[!IS_KEY][c / 2];
#pragma unroll
        for (int e = 0; e < 8; e++)
            next[e] = load_byte(__float_as_uint(__fmaf_rd(z.x[c][e], times[L::token(e)], WHOLE)) + table);
    };
    look_up(0);
    float level_of_lane;
#pragma unroll
    for (int c = 0; c < S::CHUNKS; c++) {
        const int group = c / 2;
        uint32_t code[8];
#pragma unroll
        for (int e = 0; e < 8; e++) code[e] = next[e];
        if (c + 1 < S::CHUNKS) look_up(c + 1);
        if (c % 2 == 0) level_of_lane = tables.levels[a.side[!IS_KEY].bits[group]][lane];
        float level[8];
#pragma unroll
        for (int e = 0; e < 8; e++) level[e] = __shfl_sync(ALL_LANES, level_of_lane, code[e]);
        __syncwarp(); // keeps this order, which the compiler would change to use fewer registers
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const int token = L::token(e), n = L::n(e);
            cz.add(c, e, level[e], z.x[c][e]);
            if constexpr (S::SEARCHES) cc.add(c, e, level[e], level[e]);
            if constexpr (IS_KEY) codes[group][token] += code[e] << 4 * (4 * (c % 2) + n);
            else codes[group][c % 2] += code[e] << (16 * n + 8 * (token % 2) + 4 * (token / 2));
        }
    }
}

/** Fills times, the units of u per z, for all of the lane's tokens; own: that of its own token. */
template <bool IS_KEY>
__device__ __forceinline__ void times_of_tokens(float own, float (&times)[Lane<IS_KEY>::TOKENS], int lane)
{
#pragma unroll
    for (int k = 0; k < Lane<IS_KEY>::TOKENS; k++)
        times[k] = __shfl_sync(ALL_LANES, own, Lane<IS_KEY>::lane_of(lane, k));
}

/** Makes codes of a pass, which are 0 before, from z. Returns <c, u> of the lane's own token. */
template <class S, bool IS_KEY>
__device__ __forceinline__ float codes_of_pass(const FragmentsArgs &a, const Tables<S> &tables, const Numbers<S> &z,
                                               float inverse, uint32_t (&codes)[S::GROUPS][2], uint32_t memory,
                                               int lane)
{
    Chains cz;
    float times[Lane<IS_KEY>::TOKENS];
    times_of_tokens<IS_KEY>(__fmul_rn(inverse, TQ_SETTLED_UNITS), times, lane);
    quantise<S, IS_KEY>(a, tables, z, times, codes, cz, cz, memory, lane);
    return __fmul_rn(sum_of_own<IS_KEY>(cz, lane), inverse);
}

/** The same with the codes of the best factor: docs/rounding.md, "Tries". */
template <class S, bool IS_KEY>
__device__ __forceinline__ float search_pass(const FragmentsArgs &a, const Tables<S> &tables, const Numbers<S> &z,
                                             float inverse, uint32_t (&codes)[S::GROUPS][2], uint32_t memory, int lane)
{
    using L = Lane<IS_KEY>;
    float best = 0.0f, best_cu = 0.0f;
#pragma unroll 1
    for (int i = 0; i < a.tries; i++) {
        uint32_t tried[S::GROUPS][2] = {};
        Chains cz, cc;
        float times[L::TOKENS];
        times_of_tokens<IS_KEY>(__fmul_rn(__fmul_rn(inverse, a.factors[i]), TQ_SETTLED_UNITS), times, lane);
        quantise<S, IS_KEY>(a, tables, z, times, tried, cz, cc, memory, lane);
        const float cu = __fmul_rn(sum_of_own<IS_KEY>(cz, lane), inverse),
                    gain = __fmul_rn(cu, __fdiv_rn(cu, sum_of_own<IS_KEY>(cc, lane)));
        const bool better = i == 0 || gain > best;
        best = better ? gain : best;
        best_cu = better ? cu : best_cu;
        const uint32_t won = __ballot_sync(ALL_LANES, better);
        uint32_t masks[2] = {};
#pragma unroll
        for (int k = 0; k < L::TOKENS; k++)
            if (won >> L::lane_of(lane, k) & 1) masks[IS_KEY ? k : 0] |= L::mask(k);
        if (!IS_KEY) masks[1] = masks[0];
#pragma unroll
        for (int j = 0; j < 2 * S::GROUPS; j++)
            codes[j / 2][j % 2] = choose(codes[j / 2][j % 2], tried[j / 2][j % 2], ~masks[j % 2]);
    }
    return best_cu;
}

/** Stores tokens begin .. end - 1 of one tile in the lane's words; the bits of other tokens stay. */
inline __device__ __noinline__ void store_part(uint32_t *words, int bits, bool is_key, Rows rows, int begin, int end,
                                               int lane)
{
    uint32_t marked[4] = {};
    mark_tokens(is_key, begin, end, lane, marked);
#pragma unroll
    for (int r = 0; r < 4; r++) rows.low[r] &= marked[r];
    store_marked(words, bits, rows, marked);
}

/** Stores the lane's words of whole tiles of one width. */
template <class S, bool IS_KEY, int BITS>
__device__ __forceinline__ void store_whole_tiles(uint8_t *tiles, const Codes<S> &codes)
{
#pragma unroll
    for (int group = 0; group < S::GROUPS; group++)
        store_whole(reinterpret_cast<uint32_t *>(tiles + 128 * BITS * group), BITS, codes.rows(IS_KEY, group));
}

/** Stores tokens begin .. end - 1 of a token tile. tiles: its tiles, at the lane's first word. */
template <class S, bool IS_KEY>
__device__ __forceinline__ void store_tiles(const AppendSide &side, uint8_t *tiles, const Codes<S> &codes, int begin,
                                            int end, int lane)
{
    switch (end - begin == TQ_TILE ? side.one_width : 0) {
    case 4: return store_whole_tiles<S, IS_KEY, 4>(tiles, codes);
    case 3: return store_whole_tiles<S, IS_KEY, 3>(tiles, codes);
    case 2: return store_whole_tiles<S, IS_KEY, 2>(tiles, codes);
    case 1: return store_whole_tiles<S, IS_KEY, 1>(tiles, codes);
    }
#pragma unroll
    for (int group = 0; group < S::GROUPS; group++)
        store_part(reinterpret_cast<uint32_t *>(tiles + side.offset[group]), side.bits[group], IS_KEY,
                   codes.rows(IS_KEY, group), begin, end, lane);
}

// ---- preparation ----

/** Fills entry i = 4 c + t of the signs. */
template <class S> __device__ __forceinline__ void prepare_signs(const FragmentsArgs &a, int i, Tables<S> &tables)
{
    const uint32_t bits = a.signs.word[0][i / 8] >> 4 * (i % 8);
    tables.signs[i / 4][i % 4] =
        make_uint2((bits & 1) << 15 | (bits >> 1 & 1) << 31, (bits >> 2 & 1) << 15 | (bits >> 3 & 1) << 31);
}

/** Fills the codes of -MOST .. MOST - 1 units and the levels by code, of one width. */
template <class S>
__device__ __forceinline__ void prepare_width(const FragmentsArgs &a, int bits, uint8_t *table, Tables<S> &tables,
                                              int warp, int lane)
{
    static_assert(S::TABLE_BYTES % 32 == 0);
    for (int first = 4 * 32 * warp; first < S::TABLE_BYTES; first += 4 * 32 * S::WARPS) {
        int ranks[4] = {};
#pragma unroll 1
        for (int rank = 0; rank < (1 << bits) - 1; rank++) {
            const int place = a.first_place[bits][rank];
#pragma unroll
            for (int i = 0; i < 4; i++) ranks[i] += first + 4 * lane + i >= place;
        }
        uint32_t four = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) four |= code_of_rank(ranks[i], bits) << 8 * i;
        if (first + 4 * lane < S::TABLE_BYTES) *reinterpret_cast<uint32_t *>(table + first + 4 * lane) = four;
    }
    if (warp == 0 && lane < 1 << bits) tables.levels[bits][code_of_rank(lane, bits)] = a.books[bits].levels[lane];
}

/** Rotates the centre, which is not NULL, for this warp. A number that is not finite becomes 0: its code would be
 *  looked up outside the table. */
template <class S, bool IS_KEY>
__device__ __forceinline__ void prepare_centre(const FragmentsArgs &a, const Head &head, float *centre, int lane)
{
    float mu[S::GROUPS];
#pragma unroll
    for (int k = 0; k < S::GROUPS; k++) mu[k] = head.centre[lane + 32 * k];
    rotate_registers<SettledArgs>(a, Flips<S::GROUPS>(a.signs, lane), mu, lane);
#pragma unroll
    for (int k = 0; k < S::GROUPS; k++) centre[place_of_centre<IS_KEY>(lane + 32 * k)] = isfinite(mu[k]) ? mu[k] : 0.0f;
}

// ---- a warp's tiles ----

/** Encodes a pass from rows in shared memory; writes rms and <c, u> to the warp's sums. first: packed index of its
 *  first token. advances: as in residual_rows. memory: the warp's; block: the block's. next: queues the next copies. */
template <class S, bool IS_KEY, class Next>
__device__ __forceinline__ void encode_pass(const FragmentsArgs &a, const Work &work, const Tables<S> &tables,
                                            const Matrix<IS_KEY> &matrix, int first, bool advances, uint8_t *memory,
                                            const float *centre, uint32_t block, uint32_t (&codes)[S::GROUPS][2],
                                            int lane, Next next)
{
    using L = Lane<IS_KEY>;
    const bool bf16 = a.dtype == TQ_BF16; // or binary16
    Raw<S> raw;
    uint32_t largest;
    int again, mended = 0;
    // Runs once; twice in the rare case of a bad number. If the compiler knew `mended`, it would make a second copy.
#pragma unroll 1
    do {
        raw.load(memory, lane);
        largest = largest_of_rows(raw);
        again = __any_sync(ALL_LANES, is_too_large(largest, bf16)) && !mended;
        if (again && lane < PASS)
            mend_row(memory + row_of_token<IS_KEY>(lane) * S::ROW_BYTES, S::DIM, a.dtype, a.flag, work,
                     first + lane + a.sinks);
        mended = opaque(1);
        __syncwarp();
    } while (again);
    next();
    Numbers<S> z;
    if constexpr (S::MOMENTS && IS_KEY) {
        residual_rows<S>(a, raw, tables.signs, tables,
                         *reinterpret_cast<HeadResidual<S::DIM> *>(memory + S::AT_RESIDUAL),
                         wave_position(a, work, first + a.sinks), advances, lane, z.x);
        rotate_chunks(z);
    } else {
        rotate_rows<S, IS_KEY>(raw, bf16, largest, matrix, tables, centre, lane, z);
    }
    Chains chains;
#pragma unroll
    for (int i = 0; i < 8 * S::CHUNKS; i++) chains.add(i / 8, i % 8, z.x[i / 8][i % 8], z.x[i / 8][i % 8]);
    const float ss = sum_of_own<IS_KEY>(chains, lane);
    const Norm norm = norm_of(ss, __fmul_rn(ss, 1.0f / S::DIM)); // DIM is a power of two: equals the quotient
    float cu;
    if constexpr (S::SEARCHES) cu = search_pass<S, IS_KEY>(a, tables, z, norm.inverse, codes, block, lane);
    else cu = codes_of_pass<S, IS_KEY>(a, tables, z, norm.inverse, codes, block, lane);
    float *sums = reinterpret_cast<float *>(memory + S::AT_SUMS) + first % TQ_TILE + L::in_pass(lane, L::own(lane));
    if (L::first(lane)) {
        sums[0] = norm.rms;
        sums[TQ_TILE] = cu;
    }
}

/** Appends token tiles tile .. end_tile - 1 of a (side, sequence, head). */
template <class S, bool IS_KEY>
__device__ __forceinline__ void append_run(const FragmentsArgs &a, const Tables<S> &tables, const Work &work,
                                           const Head &head, const Span &span, int tile, int end_tile, uint8_t *memory,
                                           uint32_t block, int lane)
{
    const AppendSide &side = a.side[!IS_KEY];
    const float *sums = reinterpret_cast<const float *>(memory + S::AT_SUMS);
    const Matrix<IS_KEY> matrix(lane, a.dtype == TQ_BF16);
    load_pass<S, IS_KEY>(a, work, head, span, tile * TQ_TILE, memory, lane);
    if constexpr (S::MOMENTS && IS_KEY)
        prepare_residual<S>(a, tables, work.h, head.centre,
                            *reinterpret_cast<HeadResidual<S::DIM> *>(memory + S::AT_RESIDUAL), lane);
    else if (head.centre) prepare_centre<S, IS_KEY>(a, head, reinterpret_cast<float *>(memory + S::AT_CENTRE), lane);
    const float *centre = head.centre ? reinterpret_cast<const float *>(memory + S::AT_CENTRE) : nullptr;
    const int first_tile = tile;
    // Pages of 32 tiles, one per lane, long before use. The compiler would wait at once for a load that lanes share.
    int32_t pages = 0;
#pragma unroll 1
    for (; tile < end_tile; tile++) {
        const int base = tile * TQ_TILE, turn = (tile - first_tile) % 32;
        if (turn == 0 && tile + lane < end_tile) pages = page_of(a, work, base + lane * TQ_TILE);
        Codes<S> codes = {};
#pragma unroll 1
        for (int token = 0; token < TQ_TILE; token += PASS) {
            wait_for_copies();
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 2 * S::GROUPS; i++) {
                codes.of[0][i / 2][i % 2] = codes.of[1][i / 2][i % 2];
                codes.of[1][i / 2][i % 2] = 0;
            }
            const int next = base + token + PASS;
            const bool advances = token || turn % EXACT_TILES;
            encode_pass<S, IS_KEY>(a, work, tables, matrix, base + token, advances, memory, centre, block, codes.of[1],
                                   lane, [&] {
                                       if (next < end_tile * TQ_TILE)
                                           load_pass<S, IS_KEY>(a, work, head, span, next, memory, lane);
                                   });
        }
        __syncwarp();
        const int32_t page = __shfl_sync(ALL_LANES, pages, turn);
        const int page_token = (int)a.page_tokens.remainder((uint32_t)base);
        const int begin = max(0, span.first - base), end = min(TQ_TILE, span.last - base);
        if (uint8_t *record = record_of_page(a, work, page)) {
            store_tiles<S, IS_KEY>(side, tiles_of(side, record, page_token / TQ_TILE) + 4 * lane, codes, begin, end,
                                   lane);
            const int scale = a.scale == TQ_SCALE_EDEN ? TQ_SCALE_EDEN : TQ_SCALE_NORM; // the plan has one of these two
            if (lane >= begin && lane < end)
                *scale_at(side, record, page_token + lane) =
                    scale_of(scale, sums[lane], {side.coded_channels, sums[lane + TQ_TILE], 0.0f}, a.factor);
        }
        __syncwarp();
    }
}

/** Appends the consecutive tiles of a side that warp `turn` takes. Warps with consecutive turns are in different
 *  blocks, so that blocks have about equally many tiles even if sequences differ in length. */
template <class S, bool IS_KEY>
__device__ __forceinline__ void append_side(const FragmentsArgs &a, const Tables<S> &tables, uint32_t turn,
                                            uint8_t *memory, uint32_t block, int lane)
{
    const Shares &shares = a.shares[!IS_KEY];
    // Shuffled, as `warp` is, so that the compiler knows that lanes agree.
    uint32_t at = __shfl_sync(ALL_LANES, shares.first(turn), 0);
    const uint32_t end = __shfl_sync(ALL_LANES, shares.first(turn + 1), 0);
#pragma unroll 1
    for (int count; at < end; at += count) {
        const uint32_t item = a.tiles.quotient(at), of_item = at - item * a.tiles.divisor;
        count = (int)min(end - at, a.tiles.divisor - of_item);
        const Work work = work_of(a, item + (IS_KEY ? 0 : a.batch * a.kv_heads));
        const Span span = span_of(a, work.b);
        const int first = __shfl_sync(ALL_LANES, span.first / TQ_TILE + (int)of_item, 0);
        const int end_of_span = span.first < span.last ? (span.last + TQ_TILE - 1) / TQ_TILE : first;
        const int last = min(first + count, __shfl_sync(ALL_LANES, end_of_span, 0));
        if (first >= last) continue;
        append_run<S, IS_KEY>(a, tables, work, head_of(a, work), span, first, last, memory, block, lane);
    }
}

template <class S>
__global__ void __launch_bounds__(32 * S::WARPS, 1) append_prefill(const __grid_constant__ FragmentsArgs a)
{
    extern __shared__ __align__(16) uint8_t memory[];
    __shared__ __align__(16) Tables<S> tables;
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0); // so that the compiler knows that lanes agree
    const int lane = threadIdx.x % 32;
    for (int bits = 1; bits <= MOST_BITS; bits++)
        if (a.table_of_width[bits] >= 0) prepare_width<S>(a, bits, memory + a.table_of_width[bits], tables, warp, lane);
    if (threadIdx.x < 4 * S::CHUNKS) prepare_signs(a, threadIdx.x, tables);
    __syncthreads();
    wait_for_stream();
    if constexpr (S::MOMENTS) {
        prepare_turns<S>(a, tables);
        __syncthreads();
    }
    uint8_t *own = memory + a.tables + warp * S::WARP_BYTES;
    const uint32_t block = shared_address(memory);
    const uint32_t turn = warp * gridDim.x + blockIdx.x, turns = S::WARPS * gridDim.x, values_from = a.values_from;
    if (turn < values_from || !values_from) append_side<S, true>(a, tables, turn, own, block, lane);
    if (a.sides == 2 && turn >= values_from) append_side<S, false>(a, tables, turns - 1 - turn, own, block, lane);
}

template <class S> tq_status launch_shape(const AppendArgs &args, cudaStream_t stream, tq_error *error)
{
    DeviceFacts device;
    TQ_CUDA_TRY(current_device(&device, error));
    FragmentsArgs a = {};
    static_cast<AppendArgs &>(a) = args;
    for (int bits = 0; bits <= MOST_BITS; bits++) {
        const bool has = bits && (args.side[0].widths | args.side[1].widths) >> bits & 1;
        a.table_of_width[bits] = has ? a.tables : -1;
        a.tables += has ? S::TABLE_BYTES : 0;
        for (int i = 0; i < (1 << bits) - 1; i++) {
            // the first unit whose middle is at or above the threshold; exact
            const double units = ceil((double)TQ_SETTLED_UNITS * args.books[bits].thresholds[i] - 0.5);
            a.first_place[bits][i] = (int16_t)(S::MOST + units);
        }
    }
    for (int i = 0; i < 2 * S::GROUPS; i++) {
        const int side = i / S::GROUPS, group = i % S::GROUPS;
        a.table[side][group] = (uint32_t)(a.table_of_width[args.side[side].bits[group]] + S::MOST) - WHOLE_BITS;
    }
    const int bytes = a.tables + S::WARPS * S::WARP_BYTES;
    const int64_t tiles = append_tiles(args), line = (int64_t)args.batch * args.kv_heads * tiles;
    if (bytes + (int)sizeof(Tables<S>) > device.shared_bytes_per_block || line > INT32_MAX)
        return launch_append_general(args, true, false, stream, error);
    const bool few = args.sides * line <= (int64_t)S::WARPS * device.processors; // at most one tile per warp
    const int64_t blocks = args.sides * line < device.processors ? args.sides * line : device.processors;
    const uint32_t turns = (uint32_t)(S::WARPS * blocks);
    const auto shares = [&](uint32_t warps) { return Shares{(uint32_t)line / warps, (uint32_t)line % warps}; };
    a.tiles = divisor_of(tiles);
    a.values_from = few && args.sides == 2 ? (uint32_t)line : 0;
    a.shares[0] = shares(a.values_from ? a.values_from : turns);
    a.shares[1] = shares(turns - a.values_from);
    return launch(append_prefill<S>, blocks, 32 * S::WARPS, bytes, stream, error, a);
}

/** MOMENTS: the centre of keys is subtracted with their wave, that of values as in plans without one. */
template <bool MOMENTS, bool SEARCHES>
tq_status launch_dims(const AppendArgs &args, cudaStream_t stream, tq_error *error)
{
    if (args.head_dim == 64) return launch_shape<Shape<64, MOMENTS, SEARCHES>>(args, stream, error);
    if (args.head_dim == 128) return launch_shape<Shape<128, MOMENTS, SEARCHES>>(args, stream, error);
    return launch_shape<Shape<256, MOMENTS, SEARCHES>>(args, stream, error);
}

} // namespace fragments
} // namespace tq
#endif
