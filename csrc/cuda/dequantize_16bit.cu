// tq_cuda_dequantize to fp16 and bf16, for attention by other libraries: plain plans with groups of 32 channels and a
// head_dim that is a multiple of 16, up to 256.
//
// A decoded row is linear in its levels:
//
//   row = scale * M [levels] + wave(position) + centre,    M = A^-1 R^T diag(step)
//
// so undoing steps, rotation and metric is one product of fp16 matrices on tensor cores. M is the same for all tokens
// of a KV head. `make_matrices` writes it to the workspace; a block of `dequantize_rows` keeps its rows of M in
// registers and goes through token tiles:
//
//   1  codes of a token tile, copied ahead -> levels as fp16 in shared memory
//   2  products; scales, wave, centre; 16-byte stores
//
// M is divided by a factor for each channel, so that its numbers are about 1 and fit fp16. The wave of a channel is an
// oscillation, which a lane turns on from token to token.
#include "cuda/dequantize.h"
#include "cuda/device/launch.cuh"
#include "cuda/tile/fragments.cuh"
#include "cuda/tile/pack.cuh"

namespace tq
{
namespace
{

constexpr int MOST_CHANNELS = 256; // of a plan
constexpr int MATRIX_WARPS = 8;

/** The wave of a channel: along * cos + across * sin of position * increment. pairs: how many turn in the channel; the
 *  other numbers are those of one of them. */
struct Oscillation {
    uint32_t increment, pairs;
    float along, across;
};

/** Output of `make_matrices` for each head: | Oscillation [head_dim], of keys | M / factor, fp16 [head_dim][columns]
 *  | factor, float32 [head_dim] |, keys before values. Factors of values are all the same. */
struct Matrices {
    uint8_t *memory;
    int32_t head_dim, columns; // columns: channels in whole groups

    __host__ __device__ int64_t bytes() const // of a head
    {
        return (int64_t)head_dim * (sizeof(Oscillation) + sizeof(__half) * columns + sizeof(float));
    }
    __device__ Oscillation *oscillations(int head) const
    {
        return reinterpret_cast<Oscillation *>(memory + head * bytes());
    }
    __device__ __half *matrix(int head) const { return reinterpret_cast<__half *>(oscillations(head) + head_dim); }
    __device__ float *factors(int head) const
    {
        return reinterpret_cast<float *>(matrix(head) + (int64_t)head_dim * columns);
    }
};

struct Args : DequantizeArgs {
    int32_t per_block; // token tiles of a block
    int32_t runs;      // blocks that share the token tiles of a head
    Matrices matrices;
    LevelTables tables;
    float step[TQ_WIDE_BITS + 1];
};
static_assert(sizeof(Args) <= 4096, "kernel parameters");

// ---- the matrices ----

/** Finds the oscillations of all channels of a head. Called by a whole block. found: [head_dim] in shared memory. */
__device__ __forceinline__ void find_oscillations(const KeyMoments &m, const HeadMoments &head, Oscillation *found,
                                                  Oscillation *to)
{
    for (int c = threadIdx.x; c < m.head_dim; c += blockDim.x) found[c] = {};
    __syncthreads();
    for (int i = threadIdx.x; i < m.pairs; i += blockDim.x) {
        const Pair pair = m.pair(i);
        const float a = head.wave[2 * i], b = head.wave[2 * i + 1];
        if (a == 0.0f && b == 0.0f) continue;
        const uint32_t before[2] = {atomicAdd(&found[pair.first].pairs, 1), atomicAdd(&found[pair.second].pairs, 1)};
        if (!before[0])
            found[pair.first].increment = pair.increment, found[pair.first].along = a, found[pair.first].across = -b;
        if (!before[1])
            found[pair.second].increment = pair.increment, found[pair.second].along = b, found[pair.second].across = a;
    }
    __syncthreads();
    for (int c = threadIdx.x; c < m.head_dim; c += blockDim.x) to[c] = found[c];
}

/** Writes the matrices. A block has MATRIX_WARPS columns of one (side, head), a warp one column. The first block of a
 *  head of keys also finds its oscillations. */
__global__ void __launch_bounds__(32 * MATRIX_WARPS) make_matrices(const __grid_constant__ Args a)
{
    __shared__ float rows[MATRIX_WARPS][MOST_CHANNELS];
    __shared__ Oscillation oscillations[MOST_CHANNELS];
    wait_for_previous();
    let_next_start(); // after the wait: before its own, dequantize_rows reads the layer's arrays
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, d = a.head_dim, columns = a.matrices.columns;
    const int parts = columns / MATRIX_WARPS, part = blockIdx.x % parts, head_index = blockIdx.x / parts,
              h = head_index % a.kv_heads, s = head_index / a.kv_heads, j = part * MATRIX_WARPS + warp;
    const DequantizeSide &side = a.side[s];
    const HeadMoments head = s == 0 && a.moments.any() ? a.moments.of_head(h) : HeadMoments{};
    if (s == 0 && part == 0 && a.moments.pairs)
        find_oscillations(a.moments, head, oscillations, a.matrices.oscillations(head_index));
    auto step_of = [&](int group) {
        const float *steps = side.transform.steps;
        return side.bits[group]
                   ? a.step[side.bits[group]] * (steps ? steps[h * side.transform.stride_head + group] : 1.0f)
                   : 0.0f;
    };
    float largest = 0.0f;
    for (int group = 0; group < a.groups; group++) largest = fmaxf(largest, step_of(group));
    const float step = step_of(j / TQ_TILE);
    float *row = rows[warp];
    const float *matrix_row = side.transform.rotation; // R^T e_j is row j of R
    if (matrix_row) matrix_row += h * side.transform.rotation_stride_head + (int64_t)j * d;
    const bool is_read = j < d && step != 0.0f, has_metric = s == 0 && a.moments.metric;
    for (int c = lane; c < d; c += 32)
        row[c] = !is_read ? 0.0f : a.rotation == TQ_ROTATION_DENSE ? matrix_row[c] : c == j ? 1.0f : 0.0f;
    __syncwarp();
    if (a.rotation == TQ_ROTATION_HADAMARD) hadamard_row(row, d, a.signs, true, lane);
    if (has_metric) apply_metric<true>(a.moments, head, row);
    for (int c = lane; c < d; c += 32) {
        const float inverse = has_metric ? 1.0f / head.scale[c] : 1.0f,
                    factor = largest * inverse * inverse * rsqrtf((float)d);
        a.matrices.matrix(head_index)[(int64_t)c * columns + j] =
            __float2half_rn(is_read ? row[c] * (step / factor) : 0.0f);
        if (j == 0) a.matrices.factors(head_index)[c] = factor;
    }
}

// ---- the rows ----

__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&x)[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

/** Shapes for head_dim up to D. A warp has 8 * BLOCKS channels of all tokens of a tile. */
template <int D> struct Shape {
    static constexpr int BLOCKS = D == 128 ? 4 : 2, CHANNELS = 8 * BLOCKS;
    static constexpr int WARPS = D <= 64 ? 4 : D == 128 ? 4 : 8;    // of a block, at most
    static constexpr int RESIDENT = D <= 64 ? 4 : D == 128 ? 3 : 2; // blocks of a multiprocessor
    static constexpr int STEPS = D / 16;                            // k16 steps of a product
    // Bytes of a row in shared memory, such that eight neighbours are in different banks.
    static constexpr int KEY_ROW = 2 * D + 16, VALUE_ROW = 2 * TQ_TILE + 16;
    static constexpr int LEVELS = TQ_TILE * KEY_ROW > D *VALUE_ROW ? TQ_TILE * KEY_ROW : D * VALUE_ROW;
};

/** Turns four bytes of unpack_half into levels: byte * up + shift, exactly. */
struct ByteToLevel {
    __half2 up, shift;

    __device__ __forceinline__ explicit ByteToLevel(int bits)
    {
        const float by = bits <= 2 ? (float)(1 << bits) / 128.0f : 1.0f; // SCALED bytes are code << (8 - bits)
        up = __float2half2_rn(by);
        shift = __float2half2_rn(-1024.0f * by - (bits <= 2 ? (float)((1 << bits) - 1) : 128.0f));
    }
    __device__ __forceinline__ uint2 operator()(uint32_t bytes) const
    {
        return make_uint2(as_word(__hfma2(as_halves(prmt(bytes, MAGIC, 0x5150)), up, shift)),
                          as_word(__hfma2(as_halves(prmt(bytes, MAGIC, 0x5352)), up, shift)));
    }
};

/** Unpacks a group's tile of codes to levels at `to`. A row is a token of keys, from the group's first channel on, or a
 *  channel of values, in the order of the tile's columns. row: bytes of a row. */
__device__ __forceinline__ void unpack_group(int bits, const uint8_t *tile, const LevelTables &tables, char *to,
                                             int row, int lane)
{
    char *at = to + lane / 4 * row + lane % 4 * 8;
    if (!bits) {
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *reinterpret_cast<uint2 *>(at + 8 * r * row + 32 * half) = make_uint2(0, 0);
        return;
    }
    const ByteToLevel levels(bits);
    with_width(1u << bits, [&](auto width) {
        constexpr int BITS = decltype(width)::value;
        const TileWords<BITS> words = load_tile<BITS>(tile + 4 * lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t a[4];
            unpack_half<BITS, BITS <= 2 ? Reading::SCALED : Reading::OFFSET>(words, half, tables, a);
#pragma unroll
            for (int i = 0; i < 4; i++)
                *reinterpret_cast<uint2 *>(at + (2 * half + i % 2) * 8 * row + i / 2 * 32) = levels(a[i]);
        }
    });
}

/** A token tile of a sequence. */
struct TilePlace {
    int b, tile, page, in_page; // tile = page * tiles of a page + in_page
    int length;                 // tokens of the sequence to decode

    __device__ __forceinline__ TilePlace(const Args &a, int64_t i)
        : b((int)(i / a.tiles)), tile((int)(i % a.tiles)), page(TQ_TILE * tile / a.page_tokens),
          in_page(tile - page * (a.page_tokens / TQ_TILE)), length(length_of(a, b))
    {
    }
    __device__ __forceinline__ void move_on(const Args &a)
    {
        tile++, in_page++;
        if (in_page == a.page_tokens / TQ_TILE) in_page = 0, page++;
        if (tile == a.tiles) {
            tile = page = in_page = 0, b++;
            length = length_of(a, b);
        }
    }
    __device__ __forceinline__ int stored() const { return max(0, min(length - TQ_TILE * tile, TQ_TILE)); }
    __device__ __forceinline__ int page_number(const Args &a) const
    {
        return TQ_TILE * tile < length ? a.block_table[(int64_t)b * a.max_pages + page] : -1;
    }

private:
    static __device__ __forceinline__ int length_of(const Args &a, int b)
    {
        return b < a.batch ? min(a.lengths[b], a.max_tokens) : 0;
    }
};

/** The wave of a channel at every eighth token: its value, and the value a quarter turn later. */
struct Turning {
    float now, later;

    /** Begins at `position`. */
    __device__ __forceinline__ void start(const Oscillation &o, int position)
    {
        const float2 at = turn(phase_of(o.increment, position));
        now = o.along * at.x + o.across * at.y;
        later = o.across * at.x - o.along * at.y;
    }
    /** Moves on by eight positions. by: their cosine and sine. */
    __device__ __forceinline__ void turn_on(float2 by)
    {
        const float next = now * by.x + later * by.y;
        later = later * by.x - now * by.y;
        now = next;
    }
};

/** Returns the wave of a channel in which several pairs turn. */
__device__ __noinline__ float sum_of_pairs(const KeyMoments &m, int h, int channel, int position)
{
    const HeadMoments head = m.of_head(h);
    float sum = 0.0f;
    for (int i = 0; i < m.pairs; i++) {
        const Pair pair = m.pair(i);
        const float2 at =
            turned(make_float2(head.wave[2 * i], head.wave[2 * i + 1]), turn(phase_of(pair.increment, position)));
        if (pair.first == channel) sum += at.x;
        if (pair.second == channel) sum += at.y;
    }
    return sum;
}

template <int D, bool BF16, bool KEYS, bool WAVE>
__device__ __forceinline__ void rows_of_side(const Args &a, char *memory)
{
    using S = Shape<D>;
    constexpr int BLOCKS = S::BLOCKS, OWN = 2 * BLOCKS; // channels of a lane
    const int threads = blockDim.x, warps = threads / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32,
              g = lane / 4, t = lane % 4, d = a.head_dim;
    const DequantizeSide &side = a.side[!KEYS];
    // blockIdx.x: | side | head | channels of a block | run |
    const int wide = (d + S::CHANNELS * warps - 1) / (S::CHANNELS * warps), run = blockIdx.x % a.runs,
              part = blockIdx.x / a.runs % wide, h = blockIdx.x / a.runs / wide % a.kv_heads,
              first_channel = (part * warps + warp) * S::CHANNELS, own_channel = first_channel + OWN * t;
    const bool works = first_channel < d;
    char *levels = memory;
    float *factors = reinterpret_cast<float *>(levels + S::LEVELS) + warp * 2 * S::CHANNELS, // of the warp's channels
        *centres = factors + S::CHANNELS;
    uint8_t *raw = reinterpret_cast<uint8_t *>(levels + S::LEVELS) + warps * 2 * S::CHANNELS * sizeof(float);
    const __half *scales = reinterpret_cast<const __half *>(raw + side.tile_bytes);

    // The next tile to copy, and its page: looked up a tile ahead.
    TilePlace copied(a, (int64_t)run * a.per_block), place = copied;
    int page = copied.page_number(a);
    auto copy_and_move_on = [&] {
        if (page >= 0 && page < a.n_pages) {
            const uint8_t *record = a.pages + (int64_t)page * a.page_bytes + h * a.record_bytes,
                          *codes = record + side.codes_offset + copied.in_page * side.tile_bytes;
            for (int at = 16 * threadIdx.x; at < side.tile_bytes; at += 16 * threads) copy_16(raw + at, codes + at);
            if (threadIdx.x < TQ_TILE / 8)
                copy_16(raw + side.tile_bytes + 16 * threadIdx.x, record + side.scales_offset +
                                                                      copied.in_page * TQ_TILE * (int)sizeof(__half) +
                                                                      16 * threadIdx.x);
        }
        copied.move_on(a);
        page = copied.page_number(a);
    };
    int present = page >= 0 && page < a.n_pages; // of the tile at `place`
    copy_and_move_on();

    wait_for_previous();
    const int head_index = KEYS ? h : a.kv_heads + h, columns = a.matrices.columns, steps = 2 * a.groups;
    // Column n = g of block j is channel OWN (g / 2) + 2 j + g % 2 of the warp's: so a lane's results of all blocks are
    // neighbours in memory.
    uint32_t matrix[S::STEPS][BLOCKS][2];
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
        const int channel = first_channel + OWN * (g / 2) + 2 * j + g % 2;
        const __half *row = a.matrices.matrix(head_index) + (int64_t)channel * columns + 2 * t;
#pragma unroll
        for (int k = 0; k < S::STEPS; k++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                matrix[k][j][e] = works && k < steps ? *reinterpret_cast<const uint32_t *>(row + 16 * k + 8 * e) : 0;
    }
    Turning wave[OWN];
    float2 eight[OWN]; // cosine and sine of eight positions
    uint32_t most_pairs = 0;
    if constexpr (WAVE) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const Oscillation o = works ? a.matrices.oscillations(head_index)[own_channel + i] : Oscillation{};
            eight[i] = turn(phase_of(o.increment, 8));
            most_pairs = max(most_pairs, o.pairs);
        }
    }
    if (lane < S::CHANNELS && works) {
        factors[lane] = a.matrices.factors(head_index)[first_channel + lane];
        centres[lane] =
            side.transform.centre ? side.transform.centre[h * side.transform.stride_head + first_channel + lane] : 0.0f;
    }
    const uint32_t operand =
        shared_address(levels) + (KEYS ? lane % 16 * S::KEY_ROW + lane / 16 * 16
                                       : (lane / 16 * 8 + lane % 8) * S::VALUE_ROW + lane / 8 % 2 * 16);
    const int column = KEYS ? column_of_token(g) : g; // of row g; that of row 8 i + g is i (keys) or 8 i (values) more

    int turned_to = -1; // b of the sequence that the wave follows
    for (int n = 0; n < a.per_block && place.b < a.batch; n++) {
        const int first = TQ_TILE * place.tile, stored = present ? place.stored() : 0;
        wait_for_copies();
        __syncthreads(); // the codes are there, and no warp reads the last tile's levels any more
        if (stored)
            for (int group = warp; group < a.groups; group += warps)
                unpack_group(side.bits[group], raw + side.offset[group], a.tables,
                             levels + (KEYS ? 2 * TQ_TILE * group : TQ_TILE * group * S::VALUE_ROW),
                             KEYS ? S::KEY_ROW : S::VALUE_ROW, lane);
        float scale[4]; // of rows 8 i + g of the tile
#pragma unroll
        for (int i = 0; i < 4; i++) scale[i] = __half2float(scales[column + (KEYS ? i : 8 * i)]);
        __syncthreads();
        present = page >= 0 && page < a.n_pages;
        copy_and_move_on();
        const int64_t out_row = ((int64_t)place.b * a.kv_heads + h) * a.max_tokens + first;
        const int b = place.b;
        place.move_on(a);
        if (!works) continue;

        float c[2][BLOCKS][4] = {}; // rows 16 m ..
        if (stored)
#pragma unroll
            for (int k = 0; k < S::STEPS; k++) {
                if (k >= steps) break;
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    uint32_t x[4];
                    if constexpr (KEYS) load_matrices(x, operand + 16 * m * S::KEY_ROW + 32 * k);
                    else load_matrices_transposed(x, operand + 16 * k * S::VALUE_ROW + 32 * m);
#pragma unroll
                    for (int j = 0; j < BLOCKS; j++)
                        mma_halves(c[m][j], make_uint4(x[0], x[1], x[2], x[3]),
                                   make_uint2(matrix[k][j][0], matrix[k][j][1]));
                }
            }
        float sums[4][OWN]; // in local memory
        if constexpr (WAVE) {
            const int zero = first_position(a.sinks, a.offsets, b);
            if (turned_to != b) {
                turned_to = b;
#pragma unroll
                for (int i = 0; i < OWN; i++)
                    wave[i].start(a.matrices.oscillations(head_index)[own_channel + i], zero + first + g);
            }
            if (most_pairs > 1)
#pragma unroll 1
                for (int i = 0; i < 4 * OWN; i++)
                    sums[i / OWN][i % OWN] =
                        sum_of_pairs(a.moments, h, own_channel + i % OWN, zero + first + i / OWN * 8 + g);
        }
        float factor[OWN], centre[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i += 4) {
            *reinterpret_cast<float4 *>(factor + i) = *reinterpret_cast<float4 *>(factors + OWN * t + i);
            *reinterpret_cast<float4 *>(centre + i) = *reinterpret_cast<float4 *>(centres + OWN * t + i);
        }
        uint16_t *rows = static_cast<uint16_t *>(side.out) + out_row * d + own_channel;
        const int room = min(a.max_tokens - first, TQ_TILE);
#pragma unroll
        for (int r = 0; r < 4; r++) { // rows 8 r + g
            const int row = 8 * r + g, token = KEYS ? row : token_of_column(row);
            const float common = scale[r] * factor[0];
            uint32_t packed[BLOCKS];
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) {
                float x[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int i = 2 * j + e;
                    float add = centre[i];
                    if constexpr (WAVE) {
                        add += most_pairs > 1 ? sums[r][i] : wave[i].now;
                        wave[i].turn_on(eight[i]);
                    }
                    x[e] = fmaf(c[r / 2][j][r % 2 * 2 + e], KEYS ? scale[r] * factor[i] : common, add);
                }
                packed[j] = BF16 ? bf16_of_floats(x[0], x[1]) : as_word(__floats2half2_rn(x[0], x[1]));
            }
            if (token >= stored) // there is no such token
#pragma unroll
                for (int j = 0; j < BLOCKS; j++) packed[j] = 0;
            if (token >= room) continue;
            if constexpr (BLOCKS == 4)
                *reinterpret_cast<uint4 *>(rows + token * d) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
            else *reinterpret_cast<uint2 *>(rows + token * d) = make_uint2(packed[0], packed[1]);
        }
    }
}

template <int D, bool BF16, bool WAVE>
__global__ void __launch_bounds__(32 * Shape<D>::WARPS, Shape<D>::RESIDENT)
    dequantize_rows(const __grid_constant__ Args a, int key_blocks)
{
    extern __shared__ __align__(16) char dequantize_memory[];
    let_next_start();
    if ((int)blockIdx.x < key_blocks) rows_of_side<D, BF16, true, WAVE>(a, dequantize_memory);
    else rows_of_side<D, BF16, false, false>(a, dequantize_memory);
}

Matrices matrices_of(const tq_plan &plan, void *workspace)
{
    return {static_cast<uint8_t *>(workspace), plan.head_dim, TQ_TILE * plan.groups};
}

int sides_of(const tq_plan &plan) { return plan.value.tile_bytes ? 2 : 1; }

template <int D>
tq_status start(Args &a, int sides, bool bf16, const DeviceFacts &device, cudaStream_t stream, tq_error *error)
{
    using S = Shape<D>;
    const int warps = min((a.head_dim + S::CHANNELS - 1) / S::CHANNELS, S::WARPS),
              wide = (a.head_dim + S::CHANNELS * warps - 1) / (S::CHANNELS * warps);
    // Twice as many blocks as run at once, since those of keys take longer than those of values.
    const int64_t tiles = (int64_t)a.batch * a.tiles, lines = (int64_t)sides * a.kv_heads * wide,
                  at_once = (int64_t)device.processors * S::RESIDENT, wanted = 2 * at_once / lines,
                  runs = wanted < 1       ? 1
                         : wanted < tiles ? wanted
                                          : tiles;
    a.per_block = (int32_t)((tiles + runs - 1) / runs);
    a.runs = (int32_t)((tiles + a.per_block - 1) / a.per_block);
    const int64_t blocks = (int64_t)a.runs * wide * a.kv_heads;
    if (sides * blocks > INT32_MAX) return fail(error, TQ_E_VALUE, "batch", -1, a.batch, "smaller");
    const int tile_bytes = max(a.side[0].tile_bytes, a.side[1].tile_bytes);
    const bool wave = a.moments.pairs;
    return launch(bf16   ? wave ? dequantize_rows<D, true, true> : dequantize_rows<D, true, false>
                  : wave ? dequantize_rows<D, false, true>
                         : dequantize_rows<D, false, false>,
                  sides * blocks, 32 * warps,
                  S::LEVELS + 2 * S::CHANNELS * warps * sizeof(float) + tile_bytes + TQ_TILE * sizeof(__half), stream,
                  error, a, (int)blocks);
}

} // namespace

bool takes_16bit(const tq_plan &plan)
{
    return tq_is_plain(&plan) && plan.group_channels == TQ_TILE && plan.head_dim % 16 == 0 &&
           plan.head_dim <= MOST_CHANNELS;
}

size_t bytes_16bit(const tq_plan &plan, int32_t kv_heads)
{
    return sides_of(plan) * kv_heads * matrices_of(plan, nullptr).bytes();
}

tq_status dequantize_16bit(const tq_plan &plan, const tq_layer &layer, int32_t max_tokens, tq_dtype dtype, void *k,
                           void *v, void *workspace, cudaStream_t stream, tq_error *error)
{
    DeviceFacts device;
    TQ_CUDA_TRY(current_device(&device, error));
    const LevelsByCode &steps = of_codebooks<LevelsByCode>(plan, fill_levels_by_code);
    Args a = {};
    static_cast<DequantizeArgs &>(a) = dequantize_args(plan, layer, max_tokens, k, v);
    a.matrices = matrices_of(plan, workspace);
    a.tables = of_codebooks<LevelTables>(plan, fill_level_tables);
    for (int bits = 0; bits <= TQ_WIDE_BITS; bits++) a.step[bits] = steps.step[bits];
    const int sides = sides_of(plan);
    TQ_CUDA_TRY(launch(make_matrices, (int64_t)sides * a.kv_heads * (a.matrices.columns / MATRIX_WARPS),
                       32 * MATRIX_WARPS, 0, stream, error, a));
    const bool bf16 = dtype == TQ_BF16;
    if (a.head_dim == 128) return start<128>(a, sides, bf16, device, stream, error);
    if (a.head_dim <= 64) return start<64>(a, sides, bf16, device, stream, error);
    if (a.head_dim <= 96) return start<96>(a, sides, bf16, device, stream, error);
    return start<256>(a, sides, bf16, device, stream, error);
}

} // namespace tq
