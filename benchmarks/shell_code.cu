/* Could 2 bits have the shell code E8P of QuIP# (arXiv 2402.04396) on a GPU? Attention over packed pages with its decode, beside today's levels.
 *
 *   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a benchmarks/shell_code.cu -o shell_code
 *   ./shell_code [sequences kv_heads tokens]       needs compute capability 9.0; 16 8 32768 unless given; ends with one line of JSON
 *   ./shell_code --host                            checks the decode of all codes, without a GPU
 *
 * All kernels are attend_fused_2bit_d128_4x128 without what a plan may have beside codes and scales: four query heads, a block a segment, a
 * warp's page of 128 tokens in one stage of its own. They differ in the codes. A group of 8 channels of a token has 16 bits: one of 256
 * patterns of magnitudes 1/2, 3/2, 5/2, the signs of 7 numbers, from whose parity that of the eighth follows, and whether 1/4 is added or
 * subtracted. So 4 times a number is 2 n - 15 with n in 2 .. 13: a nibble. A code becomes a word of eight nibbles, a pattern's word ^ a word of
 * signs, in which each number has its 1/4 too; two masks make bytes of it, of which one are 16 n.
 *
 *   table       both words are looked up in shared memory, which has 32 copies of both tables (64 KiB), one for each lane's bank
 *   arithmetic  the word of signs is computed: S has the signs of four codes as bits of nibbles, and sign n is bit n ^ bit n - 1
 *
 * Keys: n and 16 n have accumulators of their own. Values: a code has channels where a product of bytes wants tokens. Instead of a transposition,
 * weights are the first factor of a sparse product: of each four columns one weight is not 0, so a row sums one of a word's four channels. */
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_fp16.h>
#include <vector>

#define BOTH __host__ __device__ __forceinline__
#define DEVICE __device__ __forceinline__
enum How { TODAY, TABLE, ARITHMETIC };
constexpr int DIM = 128, PAGE = 128, HEADS = 4, BASE = 254, SIDE_BYTES = PAGE * DIM / 4,
              RECORD = 2 * SIDE_BYTES + 4 * PAGE;
constexpr uint32_t ALL = 0xffffffff, AT_TABLE = 0x10000, AFTER_TABLE = 0x20000, LOW = 0x0f0f0f0f;
constexpr int STAGES_BEFORE = 7; /* the table lies at AT_TABLE, so that a byte permutation makes an address in it */
static_assert(STAGES_BEFORE * RECORD + 4096 <= AT_TABLE, "stages, and what lies before them");

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        cudaError_t error_ = call;                                                                                     \
        if (error_ != cudaSuccess) fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error_)), exit(1);            \
    } while (0)

/* ---- the code ---- */

struct Tables {
    uint32_t
        word[2][256]; /* nibbles, number j in byte j % 4, the upper half of it for j >= 4: of patterns, of sign bytes */
    uint8_t fields[256][8];

    Tables()
    {
        int n = 0;
        memset(this, 0, sizeof *this);
        for (int norm = 10; norm <= 12; norm += 2) /* 227 of squared norm 10 or less, and 29 of 12 */
            for (int code = 0; code < 6561 && n < 256; code++) {
                int rest = code, squares = 0;
                for (int i = 0; i < 8; i++, rest /= 3) {
                    fields[n][i] = (uint8_t)(rest % 3);
                    squares += (2 * (rest % 3) + 1) * (2 * (rest % 3) + 1);
                }
                if (norm == 10 ? squares <= 40 : squares == 48) n++;
            }
        for (int i = 0; i < 256; i++)
            for (int j = 0; j < 8; j++) {
                const int at = 8 * (j % 4) + 4 * (j / 4), odd = j == 7 && odd_fields(i);
                const int negative = j < 7 ? i >> j & 1 : parity(i & 127);
                word[0][i] |= (uint32_t)(((fields[i][j] ^ (odd ? 7 : 0) ^ 4) & 7) << 1) << at;
                word[1][i] |= (uint32_t)((negative ? 14 : 0) | (i >> 7)) << at;
            }
    }
    static int parity(int x) { return __builtin_popcount((unsigned)x) & 1; }
    int odd_fields(int i) const
    {
        int sum = 0;
        for (int j = 0; j < 8; j++) sum += fields[i][j];
        return sum & 1;
    }
    /** Four times number j of code i of the four in two words, by definition. */
    int quarters(How how, uint32_t patterns, uint32_t signs, int i, int j) const
    {
        const int pattern = patterns >> 8 * i & 255, byte = signs >> 8 * i & 255, n = j % 4 * 2 + j / 4;
        auto bit = [&](int k) { return k < 0 || k > 6 ? 0 : (int)(signs >> (4 * k + i) & 1); };
        int negative = how == ARITHMETIC ? bit(n) ^ bit(n - 1) : j < 7 ? byte >> j & 1 : parity(byte & 127);
        if (j == 7) negative ^= odd_fields(pattern);
        const int quarter = (how == ARITHMETIC ? signs >> (28 + i) & 1 : byte >> 7) ? 1 : -1;
        return (negative ? -1 : 1) * (2 + 4 * fields[pattern][j]) + quarter;
    }
};

/** x >> by, by in 1 .. 31. On a GPU by the multipliers, since the other pipe is busy; right[by] is 2^(32 - by), which the compiler must not know. */
struct Shifts {
    uint32_t right[32];
};
BOTH uint32_t shift_right(const Shifts &shifts, uint32_t x, int by)
{
#ifdef __CUDA_ARCH__
    return __umulhi(x, shifts.right[by]);
#else
    return (uint32_t)((uint64_t)x * shifts.right[by] >> 32);
#endif
}

/** The signs of four codes, as they differ: nibble n, bit i for code i. Their number is even. */
BOTH uint32_t changes(uint32_t signs) { return (signs & 0x0fffffff) ^ signs * 16; }

/** The word of signs of code i. */
BOTH uint32_t sign_word(const Shifts &shifts, uint32_t signs, uint32_t changed, int i)
{
    const uint32_t negative = (i ? shift_right(shifts, changed, i) : changed) & 0x11111111;
    const uint32_t last = shift_right(shifts, signs, 28 + i), up = i < 3 ? last & 1 : last;
    return negative * 14 + up * 0x11111111;
}

/** (x ^ y) & mask, which is one instruction. The compiler would compute x ^ y once for two masks, in three. */
BOTH uint32_t changed_and(uint32_t x, uint32_t y, uint32_t mask)
{
#ifdef __CUDA_ARCH__
    asm("lop3.b32 %0, %0, %1, %2, 0x28;" : "+r"(x) : "r"(y), "r"(mask));
    return x;
#else
    return (x ^ y) & mask;
#endif
}

BOTH void to_bytes(uint32_t pattern_word, uint32_t sign_word, uint32_t &low, uint32_t &high)
{
    low = changed_and(pattern_word, sign_word, LOW);
    high = changed_and(pattern_word, sign_word, ~LOW);
}

/* ---- instructions ---- */

DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t s)
{
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(s));
    return r;
}
template <int OFFSET> DEVICE uint32_t load_table(uint32_t address)
{
    uint32_t r;
    asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(r) : "r"(address), "n"(OFFSET));
    return r;
}
template <bool B_UNSIGNED> DEVICE void mma(int (&c)[4], const uint32_t (&a)[4], uint2 b)
{
#define MMA(types)                                                                                                     \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." types                                                        \
                 ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                          \
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y))
    if constexpr (B_UNSIGNED) MMA("u8.u8");
    else MMA("u8.s8");
}
/** Bytes of a are for columns FIRST and FIRST + 1 of each four, in turn. */
template <int FIRST> DEVICE void mma_sparse(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[4])
{
    asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                 "{%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0x0;"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),
                   "r"(FIRST ? 0xeeeeeeee : 0x44444444));
}
DEVICE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE bool elect_lane()
{
    uint32_t elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
    return elected;
}
DEVICE void expect(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void copy_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t bar)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(bar), "l"(0x12f0000000000000) /* evict first */
        : "memory");
}
DEVICE void wait(uint32_t bar, int parity)
{
    asm volatile(
        "{ .reg .pred p;\nWAIT: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE: }" ::
            "r"(bar),
        "r"(parity)
        : "memory");
}

/* ---- a page ---- */

struct Args {
    const uint8_t *pages;       /* [page][kv head][RECORD]: |key codes|value codes|key scales|value scales| */
    const int32_t *block_table; /* [sequence][page] */
    const uint2 *queries;       /* [segment][4][32]: operand b of the products with keys */
    const float2 *rows;         /* [segment][head]: scale of a score, offset of a product */
    const uint32_t *words;      /* Tables.word */
    float *out;                 /* [segment][head][DIM] */
    int32_t kv_heads, table_pages;
    Shifts shifts;
};

struct State {
    float
        o[32]; /* TODAY: [32 channels][row], 16 of them; otherwise [64 channels][half of a byte][channels 2 k ..][4] */
    float scale, offset, reference, weights, rounded;
    uint2 query[4];
};

/** Four codes to bytes of n and of 16 n. */
template <How HOW>
DEVICE void decode(const Args &a, uint32_t patterns, uint32_t signs, uint32_t table, uint32_t (&x)[2][4])
{
    const uint32_t changed = HOW == ARITHMETIC ? changes(signs) : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t pattern_word = load_table<0>(prmt(patterns, table, 0x7604 | i << 4));
        uint32_t signs_of;
        if constexpr (HOW == TABLE) signs_of = load_table<128>(prmt(signs, table, 0x7604 | i << 4));
        else signs_of = sign_word(a.shifts, signs, changed, i);
        to_bytes(pattern_word, signs_of, x[0][i], x[1][i]);
    }
}

/** s[4 tile + r]: token 8 r + lane / 4 of the tile, head lane % 4. */
template <How HOW>
DEVICE void score(const Args &a, const State &state, const uint8_t *codes, const uint2 (&scales)[4], uint32_t table,
                  int lane, float (&s)[16])
{
    auto finish = [&](int i, int hi, int lo, float factor) {
        const __half2 two = *reinterpret_cast<const __half2 *>(i % 4 < 2 ? &scales[i / 4].x : &scales[i / 4].y);
        s[i] = fmaf((float)(hi * BASE + lo), factor, state.offset) * (i % 2 ? __high2float(two) : __low2float(two));
    };
    if constexpr (HOW == TODAY) {
        int c[4][2][4] = {};
#pragma unroll
        for (int g = 0; g < 4; g++)
#pragma unroll
            for (int tile = 0; tile < 4; tile++) {
                const uint8_t *at = codes + (tile * 4 + g) * 256 + 4 * lane;
                const uint32_t w[2] = {*(const uint32_t *)at, *(const uint32_t *)(at + 128)};
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint32_t low = 0x03030303u << 4 * half, high = low << 2,
                                   x[4] = {w[0] & low, w[0] & high, w[1] & low, w[1] & high};
                    mma<false>(c[tile][half], x, state.query[g]);
                }
            }
#pragma unroll
        for (int i = 0; i < 16; i++)
            finish(i, c[i / 4][i / 2 % 2][i % 2 * 2], c[i / 4][i / 2 % 2][i % 2 * 2 + 1], 1.0f / (1 << 2 * (i % 4)));
    } else {
#pragma unroll
        for (int half = 0; half < 8; half++) { /* of a tile */
            const uint4 w = *(const uint4 *)(codes + half * 512 + 16 * lane);
            int c[2][4] = {};
#pragma unroll
            for (int step = 0; step < 2; step++) {
                uint32_t x[2][4];
                decode<HOW>(a, step ? w.z : w.x, step ? w.w : w.y, table, x);
                mma<false>(c[0], x[0], state.query[2 * step]);
                mma<false>(c[1], x[1], state.query[2 * step + 1]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
                finish(2 * half + i, c[0][2 * i] * 16 + c[1][2 * i], c[0][2 * i + 1] * 16 + c[1][2 * i + 1], 0.125f);
        }
    }
}

DEVICE float largest_of_row(float x)
{
#pragma unroll
    for (int k = 4; k < 32; k *= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, k));
    return x;
}
template <int N> DEVICE float largest_of(const float (&x)[N])
{
    float y[(N + 1) / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) y[i] = fmaxf(x[2 * i], x[2 * i + 1]);
    if constexpr (N <= 2) return y[0];
    else return largest_of(y);
}

/** As weigh_unit of csrc/cuda/attend/loop/warp.cuh. */
template <How HOW>
DEVICE float weigh(State &state, const float (&s)[16], const uint2 (&scales)[4], int lane, uint2 (&b)[4])
{
    const float top = largest_of(s);
    if (__any_sync(ALL, fmaf(top, state.scale, state.reference) > 10.0f)) {
        const float reference = fminf(state.reference, -largest_of_row(top) * state.scale);
        const float factor = exp2_fast(reference - state.reference),
                    of_sums = HOW == TODAY ? factor : __shfl_sync(ALL, factor, lane >> 3);
        state.reference = reference, state.weights *= factor, state.rounded *= factor;
#pragma unroll
        for (int i = 0; i < (HOW == TODAY ? 16 : 32); i++) state.o[i] *= of_sums;
    }
    const bool low_half = lane < 16, even = !(lane & 4);
    const uint32_t first_choice = low_half ? 0x7531 : 0x6420, second_choice = low_half ? 0x6420 : 0x7531;
    const int from = 4 * (lane & 3) + (lane >> 3) + (even ? 0 : 16);
    float weight[16], sum[4];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const __half2 two = *reinterpret_cast<const __half2 *>(i % 4 < 2 ? &scales[i / 4].x : &scales[i / 4].y);
        const float w = exp2_fast(fmaf(s[i], state.scale, state.reference));
        sum[i % 4] = i < 4 ? w : sum[i % 4] + w;
        weight[i] = w * (i % 2 ? __high2float(two) : __low2float(two));
    }
    state.weights += (sum[0] + sum[1]) + (sum[2] + sum[3]);
    const float largest = largest_of_row(fmaxf(largest_of(weight), 1e-30f)), steps = 65535.0f * reciprocal(largest);
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
        uint32_t x[4];
#pragma unroll
        for (int r = 0; r < 4; r++) x[r] = __float_as_uint(fmaf(weight[4 * tile + r], steps, 8388608.0f));
        const uint32_t x01 = prmt(x[0], x[1], 0x5410), x23 = prmt(x[2], x[3], 0x5410);
        const uint32_t first = __shfl_sync(ALL, prmt(x01, x23, first_choice), from),
                       second = __shfl_sync(ALL, prmt(x01, x23, second_choice), from ^ 16);
        b[tile] = even ? make_uint2(first, second) : make_uint2(second, first);
    }
    return largest * (1.0f / 65535);
}

/** Byte r of b[tile].x and .y is for tokens lane % 4 + 8 r and 4 more of the tile. */
template <How HOW>
DEVICE void add_values(const Args &a, State &state, const uint8_t *codes, const uint2 (&b)[4], float unit,
                       uint32_t table, int lane)
{
    int sum[4] = {};
    const uint32_t ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
#pragma unroll
    for (int tile = 0; tile < 4; tile++) mma<true>(sum, ones, b[tile]);
    state.rounded = fmaf((float)(sum[0] * 256 + sum[1]), unit, state.rounded);
    if constexpr (HOW == TODAY) {
#pragma unroll
        for (int g = 0; g < 4; g++) {
            int c[2][4] = {};
#pragma unroll
            for (int tile = 0; tile < 4; tile++) {
                const uint8_t *at = codes + (tile * 4 + g) * 256 + 4 * lane;
                const uint32_t w[2] = {*(const uint32_t *)at, *(const uint32_t *)(at + 128)};
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint32_t low = 0x03030303u << 4 * half, high = low << 2,
                                   x[4] = {w[0] & low, w[0] & high, w[1] & low, w[1] & high};
                    mma<true>(c[half], x, b[tile]);
                }
            }
#pragma unroll
            for (int r = 0; r < 4; r++)
                state.o[4 * g + r] =
                    fmaf((float)(c[r / 2][r % 2 * 2] * 256 + c[r / 2][r % 2 * 2 + 1]), unit, state.o[4 * g + r]);
        }
    } else {
        constexpr int START = 0x4b000000; /* 2^23 + n, n < 2^23: no conversion */
        static_assert(PAGE * 13 * 16 * 255 < 1 << 23, "a sum of 16 n");
        const float of_sums = __shfl_sync(ALL, unit, lane >> 3) * (lane & 4 ? 1.0f : 256.0f);
        int c[2][2][2][4];
#pragma unroll
        for (int i = 0; i < 32; i++) c[i / 16][i / 8 % 2][i / 4 % 2][i % 4] = START;
#pragma unroll
        for (int half = 0; half < 8; half++) {
            const uint32_t weights = half % 2 ? b[half / 2].y : b[half / 2].x;
            /* of channels 0 and 2 of a word, and of 1 and 3 */
            const uint32_t x[4] = {prmt(weights, 0, 0x4140), prmt(weights, 0, 0x1404), prmt(weights, 0, 0x4342),
                                   prmt(weights, 0, 0x3424)};
            const uint4 w = *(const uint4 *)(codes + half * 512 + 16 * lane);
#pragma unroll
            for (int part = 0; part < 2; part++) { /* 64 channels */
                uint32_t y[2][4];
                decode<HOW>(a, part ? w.z : w.x, part ? w.w : w.y, table, y);
#pragma unroll
                for (int f = 0; f < 2; f++)
                    mma_sparse<0>(c[part][f][0], x, y[f]), mma_sparse<2>(c[part][f][1], x, y[f]);
            }
        }
#pragma unroll
        for (int i = 0; i < 32; i++)
            state.o[i] = fmaf(__int_as_float(c[i / 16][i / 8 % 2][i / 4 % 2][i % 4]) - 8388608.0f, of_sums, state.o[i]);
    }
}

extern __shared__ __align__(128) uint8_t shared_bytes[];

/** A block is a segment; its warps have every WARPS-th page. */
template <How HOW, int WARPS> __global__ void __launch_bounds__(32 * WARPS, 1) attend(const __grid_constant__ Args a)
{
    __shared__ __align__(8) uint64_t barriers[2 * WARPS];
    __shared__ float4 totals[WARPS][HEADS]; /* reference, weights, rounded weights */
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, segment = blockIdx.x, head = segment % a.kv_heads;
    const uint32_t start = (uint32_t)__cvta_generic_to_shared(shared_bytes),
                   bar = (uint32_t)__cvta_generic_to_shared(barriers) + 16 * warp;
    auto stage_of = [&](int w) {
        return HOW == TODAY || w < STAGES_BEFORE ? w * RECORD : AFTER_TABLE - start + (w - STAGES_BEFORE) * RECORD;
    };
    const uint8_t *stage = shared_bytes + stage_of(warp);
    const uint32_t to = start + stage_of(warp), table = AT_TABLE | 4 * lane;
    const int32_t *pages = a.block_table + segment / a.kv_heads * a.table_pages;
    auto fill = [&](int which, const uint8_t *record) {
        if (!elect_lane()) return;
        expect(bar + 8 * which, which ? SIDE_BYTES : SIDE_BYTES + 4 * PAGE);
        copy_bulk(to + which * SIDE_BYTES, record + which * SIDE_BYTES, SIDE_BYTES, bar + 8 * which);
        if (!which) copy_bulk(to + 2 * SIDE_BYTES, record + 2 * SIDE_BYTES, 4 * PAGE, bar);
    };
    auto record_of = [&](int page) { return a.pages + ((uint64_t)page * a.kv_heads + head) * RECORD; };
    if (lane == 0) {
        for (int i = 0; i < 2; i++) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar + 8 * i) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    if (warp < a.table_pages)
        for (int i = 0; i < 2; i++) fill(i, record_of(pages[warp]));
    if constexpr (HOW != TODAY)
        for (int i = threadIdx.x; i < 4096; i += 32 * WARPS) {
            const uint32_t w = a.words[i / 8 % 2 * 256 + i / 16];
            *(uint4 *)(shared_bytes + (AT_TABLE - start) + 16 * i) = make_uint4(w, w, w, w);
        }
    State state = {};
    const float2 row = a.rows[segment * HEADS + lane % 4];
    state.scale = row.x, state.offset = row.y, state.reference = 1e30f;
    for (int i = 0; i < 4; i++) state.query[i] = a.queries[(segment * 4 + i) * 32 + lane];
    __syncthreads();
    int parity = 0;
#pragma unroll 1
    for (int unit = warp; unit < a.table_pages; unit += WARPS, parity ^= 1) {
        const bool more = unit + WARPS < a.table_pages;
        const int next = more ? pages[unit + WARPS] : 0;
        float s[16];
        uint2 b[4], key_scales[4], value_scales[4];
        wait(bar, parity);
        for (int i = 0; i < 4; i++) key_scales[i] = *(const uint2 *)(stage + 2 * SIDE_BYTES + 64 * i + 2 * (lane & ~3));
        score<HOW>(a, state, stage, key_scales, table, lane, s);
        for (int i = 0; i < 4; i++)
            value_scales[i] = *(const uint2 *)(stage + 2 * SIDE_BYTES + 2 * PAGE + 64 * i + 2 * (lane & ~3));
        __syncwarp();
        if (more) fill(0, record_of(next));
        const float of_unit = weigh<HOW>(state, s, value_scales, lane, b);
        wait(bar + 8, parity);
        add_values<HOW>(a, state, stage + SIDE_BYTES, b, of_unit, table, lane);
        __syncwarp();
        if (more) fill(1, record_of(next));
    }
    for (int k = 4; k < 32; k *= 2) state.weights += __shfl_xor_sync(ALL, state.weights, k);
    if (lane < HEADS) totals[warp][lane] = make_float4(state.reference, state.weights, state.rounded, 0);
    auto sums_of = [&](int w) { return (float *)(shared_bytes + stage_of(w)); };
    for (int i = 0; i < (HOW == TODAY ? 16 : 32); i++) {
        if constexpr (HOW == TODAY)
            sums_of(warp)[lane % 4 * DIM + i / 4 * 32 + i % 4 * 8 + lane / 4] = state.o[i] / (float)(1 << 2 * (i % 4));
        else {
            const int part = i / 16, f = i / 8 % 2, column = 2 * (lane & 3) + i % 2, j = i / 4 % 2 * 2 + i / 2 % 2;
            const float both = state.o[i] + __shfl_xor_sync(ALL, state.o[i], 4); /* of both planes of the weights */
            if (!(lane & 4))
                sums_of(warp)[lane / 8 * DIM + (8 * part + column) * 8 + 4 * f + j] = both * (f ? 0.125f : 2.0f);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HEADS * DIM; i += 32 * WARPS) {
        float reference = 1e30f, sum = 0, weights = 0, rounded = 0;
        for (int w = 0; w < WARPS; w++) reference = fminf(reference, totals[w][i / DIM].x);
        for (int w = 0; w < WARPS; w++) {
            const float4 t = totals[w][i / DIM];
            const float factor = exp2f(reference - t.x);
            sum += factor * sums_of(w)[i], weights += factor * t.y, rounded += factor * t.z;
        }
        a.out[segment * HEADS * DIM + i] = (sum - (HOW == TODAY ? 1.5f : 15.0f) * rounded) / weights;
    }
}

/* ---- what is around it ---- */

__global__ void read_only(const uint4 *x, size_t n, uint32_t *out)
{
    uint32_t seen = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += 4 * (size_t)gridDim.x * blockDim.x) {
        uint4 v[4] = {};
        for (int k = 0; k < 4; k++)
            if (i + k * (size_t)gridDim.x * blockDim.x < n) v[k] = __ldcs(x + i + k * (size_t)gridDim.x * blockDim.x);
        for (int k = 0; k < 4; k++) seen ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (seen == 0x12345678) *out = seen; /* so that the loads stay */
}

BOTH uint32_t random_word(uint64_t i)
{
    uint64_t z = (i + 1) * 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (uint32_t)(z >> 32);
}

__global__ void make_pages(uint32_t *pages, size_t words)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < words; i += (size_t)gridDim.x * blockDim.x) {
        const uint32_t x = random_word(i);
        const bool scales = i % (RECORD / 4) >= 2 * SIDE_BYTES / 4; /* .0625 to .125 */
        pages[i] = scales ? 0x2c002c00 | (x & 0x03ff03ff) : x;
    }
}

/** A channel's number in a page, and its size: the place of its code. */
static double number(How how, const Tables &tables, const uint8_t *page, int side, int token, int channel)
{
    const uint8_t *codes = page + side * SIDE_BYTES;
    const int tile = token / 32, r = token / 8 % 4, g = token % 8;
    uint32_t w[2];
    if (how == TODAY) {
        const int row = side ? channel % 32 : token % 32, column = side ? g % 4 * 4 + g / 4 * 16 + r : channel % 32;
        const int lane = row % 8 * 4 + column % 16 / 4, word = column / 16, up = 8 * (column % 4) + 2 * (row / 8);
        memcpy(w, codes + (tile * 4 + channel / 32) * 256 + 128 * word + 4 * lane, 4);
        return (w[0] >> up & 3) - 1.5;
    }
    const int group = channel / 8, chunk = r / 2 * 8 + g % 4 * 2 + r % 2; /* of values: the place of a token among 16 */
    const int half = side ? 2 * tile + g / 4 : 2 * tile + r / 2,
              lane = side ? group % 8 * 4 + chunk % 4 : 4 * g + group % 4;
    const int i = side ? chunk / 4 : r % 2 + 2 * (group / 4 % 2);
    memcpy(w, codes + half * 512 + 16 * lane + 8 * (group / 8), 8);
    return tables.quarters(how, w[0], w[1], i, channel % 8);
}

struct Problem {
    int sequences, kv_heads, pages;
    std::vector<int> q; /* [segment][head][DIM] */
    std::vector<int32_t> block_table;
    double scale(How how) const { return how == TODAY ? 4e-4 : 1e-4; } /* logits of about 3 in base 2 */
};

/** Attention of one segment, by definition. page_at(page): its record of the segment. */
template <class F>
static std::vector<double> slow_attention(How how, const Tables &tables, const Problem &p, int segment, F page_at)
{
    std::vector<double> out(HEADS * DIM), sums(HEADS);
    for (int i = 0; i < p.pages; i++) {
        const uint8_t *page = page_at(p.block_table[segment / p.kv_heads * p.pages + i]);
        for (int token = 0; token < PAGE; token++) {
            double k[DIM], v[DIM], scale[2];
            for (int side = 0; side < 2; side++) {
                __half h;
                memcpy(&h,
                       page + 2 * SIDE_BYTES + side * 2 * PAGE + 2 * (token / 32 * 32 + token % 8 * 4 + token / 8 % 4),
                       2);
                scale[side] = __half2float(h);
                for (int c = 0; c < DIM; c++)
                    (side ? v : k)[c] = number(how, tables, page, side, token, c) * scale[side];
            }
            for (int head = 0; head < HEADS; head++) {
                double score = 0;
                for (int c = 0; c < DIM; c++) score += k[c] * p.q[(segment * HEADS + head) * DIM + c];
                const double w = exp2(score * p.scale(how));
                sums[head] += w;
                for (int c = 0; c < DIM; c++) out[head * DIM + c] += w * v[c];
            }
        }
    }
    for (int i = 0; i < HEADS * DIM; i++) out[i] /= sums[i / DIM];
    return out;
}

/** Operand b of the products with keys. */
static std::vector<uint2> queries_of(How how, const Problem &p)
{
    std::vector<uint2> b;
    for (int i = 0; i < p.sequences * p.kv_heads * 4 * 32; i++) {
        const int segment = i / 128, n = i / 32 % 4, lane = i % 32, t = lane % 4, row = lane / 8, low = lane / 4 % 2;
        uint8_t bytes[8];
        for (int j = 0; j < 8; j++) {
            const int channel = how == TODAY ? 32 * n + 16 * (j / 4) + 4 * t + j % 4
                                             : (n / 2 * 8 + j / 4 * 4 + t) * 8 + n % 2 * 4 + j % 4;
            const int q = p.q[(segment * HEADS + row) * DIM + channel], hi = (int)lround((double)q / BASE);
            bytes[j] = (uint8_t)(low ? q - hi * BASE : hi);
        }
        b.emplace_back();
        memcpy(&b.back(), bytes, 8);
    }
    return b;
}

static Shifts make_shifts()
{
    Shifts s = {};
    for (int i = 1; i < 32; i++) s.right[i] = 1u << (32 - i);
    return s;
}

/** Every code, at each of the four places, by both decodes. */
static int check_host(const Tables &tables)
{
    const Shifts shifts = make_shifts();
    std::vector<uint32_t> seen[2];
    for (int how = TABLE; how <= ARITHMETIC; how++)
        for (uint32_t i = 0; i < 4; i++)
            for (uint32_t code = 0; code < 65536; code++) {
                const uint32_t others = random_word(code), keep = ~(how == TABLE ? 255u << 8 * i : 0x11111111u << i);
                uint32_t mine = 0, low, high, patterns = (others & ~(255u << 8 * i)) | (code & 255) << 8 * i;
                for (int n = 0; n < 8; n++) mine |= (code >> (8 + n) & 1) << (how == TABLE ? 8 * i + n : 4 * n + i);
                const uint32_t signs = (others * 77 & keep) | mine;
                to_bytes(tables.word[0][patterns >> 8 * i & 255],
                         how == TABLE ? tables.word[1][signs >> 8 * i & 255]
                                      : sign_word(shifts, signs, changes(signs), (int)i),
                         low, high);
                for (int j = 0; j < 8; j++)
                    if (2 * (int)((j < 4 ? low : high / 16) >> 8 * (j % 4) & 255) - 15 !=
                        tables.quarters((How)how, patterns, signs, (int)i, j))
                        return fprintf(stderr, "code %u at place %u decodes to a wrong number %d\n", code, i, j), 1;
                if (i == 0) seen[how - TABLE].push_back(low | high);
            }
    for (auto &s : seen) std::sort(s.begin(), s.end());
    if (seen[0] != seen[1] || std::unique(seen[0].begin(), seen[0].end()) != seen[0].end())
        return fprintf(stderr, "both decodes should have the same 65,536 points\n"), 1;
    for (int how = TABLE; how <= ARITHMETIC; how++) /* each number of a page has a place of its own */
        for (int side = 0; side < 2; side++) {
            std::vector<uint8_t> page(RECORD);
            double total = 0;
            for (int i = 0; i < SIDE_BYTES; i++) page[side * SIDE_BYTES + i] = (uint8_t)random_word(i);
            for (int i = 0; i < PAGE * DIM; i++) total += number((How)how, tables, page.data(), side, i / DIM, i % DIM);
            for (int i = 0; i < SIDE_BYTES / 2; i++) {
                uint32_t w[2];
                memcpy(w, &page[side * SIDE_BYTES + i / 4 * 8], 8);
                for (int j = 0; j < 8; j++) total -= tables.quarters((How)how, w[0], w[1], i % 4, j);
            }
            if (total != 0) return fprintf(stderr, "the places of a page's numbers are wrong\n"), 1;
        }
    printf("{\"host\": \"right\", \"codes\": 65536}\n");
    return 0;
}

template <class F> static double microseconds(F launch)
{
    cudaEvent_t events[2];
    std::vector<float> took;
    for (auto &e : events) CHECK(cudaEventCreate(&e));
    for (int i = 0; i < 12; i++) {
        CHECK(cudaEventRecord(events[0]));
        for (int k = 0; k < 10; k++) launch();
        CHECK(cudaEventRecord(events[1]));
        CHECK(cudaEventSynchronize(events[1]));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, events[0], events[1]));
        if (i > 1) took.push_back(ms);
    }
    std::sort(took.begin(), took.end());
    return 100.0 * took[took.size() / 2];
}

template <class T> static T *to_device(const std::vector<T> &x)
{
    T *p;
    CHECK(cudaMalloc(&p, x.size() * sizeof(T)));
    CHECK(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

/** Microseconds; ends the program if two segments differ from slow_attention. */
template <How HOW, int WARPS>
static double time_attention(const Tables &tables, const Problem &p, Args a, const char *name)
{
    const int segments = p.sequences * p.kv_heads;
    const size_t record_of_page = (size_t)p.kv_heads * RECORD;
    std::vector<float2> rows;
    for (int i = 0; i < segments * HEADS; i++) {
        double sum = 0;
        for (int c = 0; c < DIM; c++) sum += p.q[i * DIM + c];
        rows.push_back(make_float2((float)p.scale(HOW), (float)(-sum * (HOW == TODAY ? 1.5 : 15))));
    }
    a.rows = to_device(rows);
    a.queries = to_device(queries_of(HOW, p));
    const int bytes = HOW == TODAY ? WARPS * RECORD : (int)AFTER_TABLE + std::max(WARPS - STAGES_BEFORE, 0) * RECORD;
    CHECK(cudaFuncSetAttribute(attend<HOW, WARPS>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    CHECK(cudaMemset(a.out, 0xff, (size_t)segments * HEADS * DIM * sizeof(float)));
    auto launch = [&] { attend<HOW, WARPS><<<segments, 32 * WARPS, bytes>>>(a); };
    launch();
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    std::vector<uint8_t> record(RECORD);
    for (int segment : {0, segments - 1}) {
        std::vector<float> found(HEADS * DIM);
        CHECK(cudaMemcpy(found.data(), a.out + (size_t)segment * HEADS * DIM, HEADS * DIM * sizeof(float),
                         cudaMemcpyDeviceToHost));
        const auto want = slow_attention(HOW, tables, p, segment, [&](int page) {
            CHECK(cudaMemcpy(record.data(), a.pages + page * record_of_page + segment % p.kv_heads * RECORD, RECORD,
                             cudaMemcpyDeviceToHost));
            return record.data();
        });
        double difference = 0, largest = 0;
        for (int i = 0; i < HEADS * DIM; i++) {
            difference = std::max(difference, std::isfinite(found[i]) ? fabs(found[i] - want[i]) : INFINITY);
            largest = std::max(largest, fabs(want[i]));
        }
        fprintf(stderr, "%s, %d warps, segment %d: largest difference %.2g of %.3g\n", name, WARPS, segment, difference,
                largest);
        if (!(difference < 1e-3 * largest)) fprintf(stderr, "wrong\n"), exit(1);
    }
    return microseconds(launch);
}

int main(int argc, char **argv)
{
    static const Tables tables;
    if (argc == 2 && !strcmp(argv[1], "--host")) return check_host(tables);
    Problem p = {argc == 4 ? atoi(argv[1]) : 16,
                 argc == 4 ? atoi(argv[2]) : 8,
                 (argc == 4 ? atoi(argv[3]) : 32768) / PAGE,
                 {},
                 {}};
    if ((argc != 1 && argc != 4) || p.sequences < 1 || p.kv_heads < 1 || p.pages < 16)
        return fprintf(stderr, "usage: shell_code [--host | sequences kv_heads tokens], at least 2048 tokens\n"), 1;
    const int pages = p.sequences * p.pages, segments = p.sequences * p.kv_heads;
    const size_t bytes = (size_t)pages * p.kv_heads * RECORD;
    for (int i = 0; i < segments * HEADS * DIM; i++)
        p.q.push_back((int)(random_word((uint64_t)i << 33) % 24001) - 12000);
    for (int i = 0; i < pages; i++) p.block_table.push_back(i);
    for (int i = pages - 1; i > 0; i--)
        std::swap(p.block_table[i], p.block_table[random_word((uint64_t)i << 20) % (i + 1)]);
    Args a = {};
    uint8_t *at;
    uint32_t *none;
    CHECK(cudaMalloc(&at, bytes));
    CHECK(cudaMalloc(&none, 4));
    CHECK(cudaMalloc(&a.out, (size_t)segments * HEADS * DIM * sizeof(float)));
    make_pages<<<1024, 256>>>((uint32_t *)at, bytes / 4);
    CHECK(cudaDeviceSynchronize());
    a.pages = at, a.block_table = to_device(p.block_table), a.kv_heads = p.kv_heads, a.table_pages = p.pages,
    a.shifts = make_shifts();
    a.words = to_device(std::vector<uint32_t>(&tables.word[0][0], &tables.word[0][0] + 512));
    cudaDeviceProp gpu;
    CHECK(cudaGetDeviceProperties(&gpu, 0));
    const double read =
        microseconds([&] { read_only<<<gpu.multiProcessorCount * 8, 512>>>((const uint4 *)at, bytes / 16, none); });
    const char *names[6] = {"today", "today", "table", "table", "arithmetic", "arithmetic"};
    const double took[6] = {time_attention<TODAY, 12>(tables, p, a, "today"),
                            time_attention<TODAY, 16>(tables, p, a, "today"),
                            time_attention<TABLE, 12>(tables, p, a, "table"),
                            time_attention<TABLE, 16>(tables, p, a, "table"),
                            time_attention<ARITHMETIC, 12>(tables, p, a, "arithmetic"),
                            time_attention<ARITHMETIC, 16>(tables, p, a, "arithmetic")};
    const double today = std::min(took[0], took[1]);
    printf(
        "{\"gpu\": \"%s\", \"sequences\": %d, \"kv_heads\": %d, \"tokens\": %d, \"bytes\": %zu, \"read_us\": %.2f, \"read_gb_s\": %.0f, \"kernels\": [",
        gpu.name, p.sequences, p.kv_heads, p.pages * PAGE, bytes, read, 1e-3 * bytes / read);
    for (int i = 0; i < 6; i++)
        printf(
            "%s{\"codes\": \"%s\", \"warps\": %d, \"us\": %.2f, \"gb_s\": %.0f, \"share_of_read\": %.3f, \"speed_of_today\": %.3f}",
            i ? ", " : "", names[i], i % 2 ? 16 : 12, took[i], 1e-3 * bytes / took[i], read / took[i], today / took[i]);
    printf("]}\n");
    return 0;
}
