// What the kernels for plans that are not plain share. turboquant_schemes.h has the formulas (tq_levels, tq_sketch),
// and csrc/core/baselines.c does the same on the host. A rotated token is one row of 32 * tiles numbers: its decoded
// channels, then the decoded signs of its sketch. A query becomes such a row too, [R q | S R q], and a score is the
// inner product of two rows. A weighted sum of rows is un-rotated once.
//
//   baselines/append.cu      vectors to codes       baselines/encode.cuh: one vector by one warp
//   baselines/attend.cu      attention, with a token tile's rows in shared memory
//   baselines/dequantize.cu  rows back to vectors
#ifndef TQ_CUDA_BASELINES_BASELINES_CUH
#define TQ_CUDA_BASELINES_BASELINES_CUH
#include "cuda/device/launch.cuh"
#include "cuda/device/wave.cuh"
#include "cuda/tile/codebooks.h"
#include "cuda/tile/matrix.cuh"
#include "cuda/tile/pack.cuh"
#include "turboquant_schemes.h"

namespace tq
{

constexpr int BASELINE_GROUPS = TQ_CUDA_MAX_BASELINE_DIM / TQ_TILE;
constexpr int BASELINE_TILES = 2 * BASELINE_GROUPS; // those of groups, and as many of a sketch
constexpr int LEVELS_MAX = 1 << TQ_MAX_BITS;
constexpr int LEVEL_TABLE = (TQ_MAX_BITS + 1) * LEVELS_MAX; // by bits and code

/** Keys or values: tq_side and tq_transform. */
struct BaselineSide {
    int32_t rotation, levels, sketch, sketch_rows, step_columns, tiles, scales;
    int32_t tile_bytes, codes_offset, scales_offset;
    float sketch_factor; // sqrt(pi / 2) / m for a Gaussian sketch, 1 for the residual's own signs
    int32_t offset[BASELINE_TILES];
    uint8_t bits[BASELINE_TILES], block[BASELINE_GROUPS]; // block: index of each group's block
    tq_transform transform;
};

/** Pages [n_pages, kv_heads, record_bytes] and block table [batch, max_pages]. */
struct PackedPages {
    const uint8_t *pages;
    const int32_t *block_table;
    int64_t n_pages, page_bytes; // page_bytes: from one page to the next
    int32_t kv_heads, max_pages;
};

/** Everything that decoding needs. */
struct BaselinePlan {
    int32_t head_dim, groups, page_tokens;
    int64_t record_bytes;
    PackedPages packed;
    HadamardSigns signs;
    BaselineSide side[2]; // keys, values
    LevelsByCode codebooks;
};

inline BaselineSide baseline_side_of(const tq_plan &plan, bool is_value, const tq_transform &transform)
{
    const tq_side &from = is_value ? plan.value : plan.key;
    BaselineSide side = {};
    side.rotation = from.rotation;
    side.levels = from.levels;
    side.sketch = from.sketch;
    side.sketch_rows = from.sketch_rows;
    side.step_columns = from.step_columns;
    side.tiles = from.tiles;
    side.scales = from.scales;
    side.tile_bytes = from.tile_bytes;
    side.codes_offset = (int32_t)from.codes_offset;
    side.scales_offset = (int32_t)from.scales_offset;
    side.sketch_factor = from.sketch == TQ_SKETCH_GAUSSIAN ? 1.25331414f / (float)from.sketch_rows : 1.0f;
    for (int tile = 0; tile < from.tiles; tile++) {
        side.offset[tile] = from.offset[tile];
        side.bits[tile] = from.bits[tile];
    }
    for (int group = 1; group < plan.groups; group++)
        side.block[group] = (uint8_t)(side.block[group - 1] + from.begins[group]);
    side.transform = transform;
    return side;
}

inline void baseline_plan_of(const tq_plan &plan, const tq_layer &layer, BaselinePlan *to)
{
    *to = {};
    to->head_dim = plan.head_dim;
    to->groups = plan.groups;
    to->page_tokens = plan.page_tokens;
    to->record_bytes = plan.record_bytes;
    to->packed = {layer.pages,    layer.block_table, layer.n_pages, tq_page_stride(&plan, &layer),
                  layer.kv_heads, layer.max_pages};
    to->signs = signs_of(plan);
    to->side[0] = baseline_side_of(plan, false, layer.key);
    to->side[1] = baseline_side_of(plan, true, layer.value);
    to->codebooks = of_codebooks<LevelsByCode>(plan, fill_levels_by_code);
}

// ---- launchers, called after the checks of all plans ----

tq_status attend_baseline_bytes(const tq_plan &plan, const tq_attend_params &params, size_t *bytes, tq_error *error);
/** The most workspace bytes that calls with these or smaller arguments need. */
tq_status attend_baseline_bound(const tq_plan &plan, const tq_attend_params &params, size_t *bytes, tq_error *error);
tq_status attend_baseline(const tq_plan &plan, const tq_attend_params &params, void *workspace, size_t workspace_bytes,
                          cudaStream_t stream, tq_error *error);
tq_status dequantize_baseline(const tq_plan &plan, const BaselinePlan &blocks, const tq_layer &layer,
                              int32_t max_tokens, tq_dtype dtype, void *k, void *v, cudaStream_t stream,
                              tq_error *error);

// ---- arrays that come with each call ----

__device__ __forceinline__ const float *matrix_of(const BaselineSide &side, int h)
{
    return side.transform.rotation + h * side.transform.rotation_stride_head;
}

/** Returns S [sketch_rows][head_dim], which lies below R if R is a matrix. */
__device__ __forceinline__ const float *sketch_of(const BaselineSide &side, int head_dim, int h)
{
    return matrix_of(side, h) + (side.rotation == TQ_ROTATION_DENSE ? head_dim * head_dim : 0);
}

__device__ __forceinline__ const float *table_of(const BaselineSide &side, int h)
{
    return side.transform.steps + h * side.transform.stride_head;
}

__device__ __forceinline__ const float *centre_of(const BaselineSide &side, int h)
{
    const float *centre = side.transform.centre;
    return centre ? centre + h * side.transform.stride_head : nullptr;
}

/** Returns the record of the page with packed index `index`; NULL if the block table names no page of the cache. */
__device__ __forceinline__ const uint8_t *record_of(const BaselinePlan &plan, int b, int h, int index)
{
    const PackedPages &at = plan.packed;
    int64_t page = at.block_table[(int64_t)b * at.max_pages + index / plan.page_tokens];
    if (page < 0 || page >= at.n_pages) return nullptr;
    return at.pages + page * at.page_bytes + h * plan.record_bytes;
}

// ---- decoding ----

/** Fills to[LEVEL_TABLE] with the levels of codebooks or of the side's table, by LEVELS_MAX * bits + code. */
__device__ __forceinline__ void load_levels(const BaselinePlan &plan, const BaselineSide &side, int h, float *to)
{
    for (int i = threadIdx.x; i < LEVEL_TABLE; i += blockDim.x) {
        const int bits = i / LEVELS_MAX, code = i % LEVELS_MAX;
        to[i] = __fmul_rn((float)plan.codebooks.levels[bits][code], plan.codebooks.step[bits]);
        if (side.levels == TQ_LEVELS_TABLE) to[i] = code < 1 << side.bits[0] ? table_of(side, h)[code] : 0.0f;
    }
}

/** The two numbers that decode a block: s * level + o. */
struct Affine {
    float s, o;
};

/** What lane 4 g + t of a warp has of one tile: codes (r, n) as in turboquant.h, "tile", and what decodes them. */
struct LaneTile {
    Rows codes;
    const __half *numbers;                                  // stored numbers of the token tile's column 0
    int32_t levels, bits, block, scales, page_tokens, real; // real: channels or rows of a sketch that are no padding
    bool is_sketch, is_static;
    float static_scale, sketch_factor;

    __device__ __forceinline__ LaneTile(const BaselinePlan &plan, const BaselineSide &side, int h,
                                        const uint8_t *record, int token_tile, int tile, int lane)
        : levels(side.levels), bits(side.bits[tile]), block(0), scales(side.scales), page_tokens(plan.page_tokens),
          real(plan.head_dim - TQ_TILE * tile), is_sketch(tile >= plan.groups),
          is_static(side.levels == TQ_LEVELS_TABLE && side.sketch == TQ_SKETCH_SIGN), static_scale(0),
          sketch_factor(side.sketch_factor)
    {
        const uint8_t *words = record + side.codes_offset + token_tile * side.tile_bytes + side.offset[tile];
        codes = unpack_lane(bits, reinterpret_cast<const uint32_t *>(words) + lane);
        numbers = reinterpret_cast<const __half *>(record + side.scales_offset) + TQ_TILE * token_tile;
        if (!is_sketch) {
            block = side.block[tile];
            return;
        }
        real = side.sketch_rows - TQ_TILE * (tile - plan.groups);
        if (is_static) static_scale = table_of(side, h)[side.step_columns - 1];
    }

    __device__ __forceinline__ float number(int i, int column) const
    {
        return __half2float(numbers[page_tokens * i + column]);
    }

    /** Returns what decodes the token in a column. */
    __device__ __forceinline__ Affine scale(int column) const
    {
        if (is_sketch) return {is_static ? static_scale : number(scales - 1, column), 0.0f};
        if (levels == TQ_LEVELS_TABLE) return {1.0f, 0.0f};
        if (levels == TQ_LEVELS_AFFINE) return {number(2 * block, column), number(2 * block + 1, column)};
        return {number(block, column), 0.0f};
    }

    /** Decodes code (r, n), which is channel `channel` of the tile. table: from load_levels. */
    __device__ __forceinline__ float decoded(int r, int n, int channel, const Affine &a, const float *table) const
    {
        const int code = (int)code_of(codes, r, n);
        float level = 0.0f;
        if (is_sketch) level = code ? sketch_factor : -sketch_factor;
        else if (levels == TQ_LEVELS_AFFINE) level = (float)code;
        else if (levels == TQ_LEVELS_ABSMAX) level = (float)(code - (1 << (bits - 1)));
        else if (bits == TQ_WIDE_BITS) level = (float)(code - 128) * TQ_WIDE_STEP;
        else level = table[LEVELS_MAX * bits + code];
        return channel < real ? __fadd_rn(__fmul_rn(a.s, level), a.o) : 0.0f;
    }
};

/** Decodes a token tile to rows of 32 * tiles numbers, 0 where padded, by a whole block. Rows are 16-byte aligned and
 *  `stride` floats apart. */
__device__ __forceinline__ void decode_keys(const BaselinePlan &plan, int h, const uint8_t *record, int token_tile,
                                            const float *table, float *rows, int stride)
{
    const BaselineSide &side = plan.side[0];
    const int lane = threadIdx.x % 32;
    for (int tile = threadIdx.x / 32; tile < side.tiles; tile += blockDim.x / 32) {
        const LaneTile x(plan, side, h, record, token_tile, tile, lane);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int token = lane / 4 + 8 * r;
            const Affine a = x.scale(column_of_token(token));
#pragma unroll
            for (int n = 0; n < 8; n += 4) {
                const int c = column_of_lane(lane % 4, n);
                *reinterpret_cast<float4 *>(rows + stride * token + TQ_TILE * tile + c) =
                    make_float4(x.decoded(r, n, c, a, table), x.decoded(r, n + 1, c + 1, a, table),
                                x.decoded(r, n + 2, c + 2, a, table), x.decoded(r, n + 3, c + 3, a, table));
            }
        }
    }
}

/** The same for values. Tokens outside of begin .. end - 1, whose bytes may be anything, become 0. */
__device__ __forceinline__ void decode_values(const BaselinePlan &plan, int h, const uint8_t *record, int token_tile,
                                              int begin, int end, const float *table, float *rows, int stride)
{
    const BaselineSide &side = plan.side[1];
    const int lane = threadIdx.x % 32;
    for (int tile = threadIdx.x / 32; tile < side.tiles; tile += blockDim.x / 32) {
        const LaneTile x(plan, side, h, record, token_tile, tile, lane);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int column = column_of_lane(lane % 4, n), token = token_of_column(column);
            const bool wanted = token >= begin && token < end;
            const Affine a = x.scale(column);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int c = lane / 4 + 8 * r;
                rows[stride * token + TQ_TILE * tile + c] = wanted ? x.decoded(r, n, c, a, table) : 0.0f;
            }
        }
    }
}

// ---- rows in shared memory to and from vectors: at most MATRIX_TOKENS rows, by a whole block ----

/** n rows, `stride` floats apart, in memory for MATRIX_TOKENS rows. If the side has matrices, `behind` is memory for
 *  | spare [MATRIX_TOKENS][head_dim] | matrix blocks [warps] |. */
struct BaselineRows {
    float *rows, *spare, *blocks; // blocks: this warp's
    int stride, n;

    __device__ __forceinline__ BaselineRows(const BaselinePlan &plan, float *rows_, int stride_, int n_, float *behind)
        : rows(rows_), spare(behind), blocks(behind + MATRIX_TOKENS * plan.head_dim + threadIdx.x / 32 * MATRIX_BLOCK),
          stride(stride_), n(n_)
    {
    }
};

/** Returns the bytes of `behind`. */
inline size_t matrix_bytes(const tq_side &side, int head_dim, int warps)
{
    return side.matrix_rows ? sizeof(float) * (MATRIX_TOKENS * (size_t)head_dim + warps * MATRIX_BLOCK) : 0;
}

/** Turns rows into [R x | S R x]. x: in spare, dense, if R is a matrix, else in the rows; their other numbers are 0. */
__device__ __forceinline__ void project_rows(const BaselinePlan &plan, const BaselineSide &side, int h,
                                             const BaselineRows &x)
{
    const int d = plan.head_dim, warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    float *signs = x.rows + TQ_TILE * plan.groups;
    __syncthreads();
    if (side.rotation == TQ_ROTATION_DENSE)
        multiply_rows<false>(matrix_of(side, h), d, d, x.spare, d, x.rows, x.stride, x.n, x.blocks, warp, warps, lane);
    else if (side.rotation == TQ_ROTATION_HADAMARD)
        for (int i = warp; i < x.n; i += warps) hadamard_row(x.rows + i * x.stride, d, plan.signs, false, lane);
    __syncthreads();
    if (side.sketch == TQ_SKETCH_GAUSSIAN)
        multiply_rows<false>(sketch_of(side, d, h), side.sketch_rows, d, x.rows, x.stride, signs, x.stride, x.n,
                             x.blocks, warp, warps, lane);
    else if (side.sketch == TQ_SKETCH_SIGN)
        for (int i = threadIdx.x; i < x.n * d; i += blockDim.x)
            signs[i / d * x.stride + i % d] = x.rows[i / d * x.stride + i % d];
    __syncthreads();
}

/** The result of restore_rows: R^T (channels + S^T signs) of row i is at result + i * stride. The rows are lost. */
struct RestoredRows {
    float *result;
    int stride;
};

__device__ __forceinline__ RestoredRows restore_rows(const BaselinePlan &plan, const BaselineSide &side, int h,
                                                     const BaselineRows &x)
{
    const int d = plan.head_dim, warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    const float *signs = x.rows + TQ_TILE * plan.groups;
    const bool gaussian = side.sketch == TQ_SKETCH_GAUSSIAN;
    __syncthreads();
    if (gaussian) {
        multiply_rows<true>(sketch_of(side, d, h), d, side.sketch_rows, signs, x.stride, x.spare, d, x.n, x.blocks,
                            warp, warps, lane);
        __syncthreads();
    }
    if (side.sketch)
        for (int i = threadIdx.x; i < x.n * d; i += blockDim.x)
            x.rows[i / d * x.stride + i % d] += gaussian ? x.spare[i] : signs[i / d * x.stride + i % d];
    __syncthreads();
    if (side.rotation == TQ_ROTATION_DENSE)
        multiply_rows<true>(matrix_of(side, h), d, d, x.rows, x.stride, x.spare, d, x.n, x.blocks, warp, warps, lane);
    else if (side.rotation == TQ_ROTATION_HADAMARD)
        for (int i = warp; i < x.n; i += warps) hadamard_row(x.rows + i * x.stride, d, plan.signs, true, lane);
    __syncthreads();
    if (side.rotation == TQ_ROTATION_DENSE) return {x.spare, d};
    return {x.rows, x.stride};
}

} // namespace tq
#endif
