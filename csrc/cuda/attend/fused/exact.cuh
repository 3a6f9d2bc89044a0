/* Exact tokens of FUSED. A warp multiplies eight at a time with up to eight rows, on tensor cores, in the model's fp16
 * or bf16. A weight is the sum of two such numbers, so that it keeps 16 bits or more. float32 has a loop of its own. */
#ifndef TQ_CUDA_ATTEND_FUSED_EXACT_CUH
#define TQ_CUDA_ATTEND_FUSED_EXACT_CUH
#include "cuda/attend/rows/exact.cuh"
#include "cuda/attend/rows/output.cuh"

namespace tq
{

/** The exact tokens of one warp; fused.exact_warps warps of each block share those of the segment. Lane 4 g + t has the
 *  address of token g of the next eight. */
struct ExactTokens {
    ExactView view;
    int32_t next, end, stride; /* indices into the tokens of view */
    ExactToken token;          /* position INT32_MAX: none */

    /** part: the warp's, of fused.exact_warps in the block; rank: the block's, of `sharing` blocks of the segment. */
    __device__ __forceinline__ ExactTokens(const AttendArgs &a, const RowSet &s, const Sequence &seq, int32_t rank,
                                           int32_t part, int32_t sharing, int lane)
        : view(view_exact(a, seq, s.b)), next(EXACT_TILE * (rank + part * sharing)),
          end(view.sinks.count() + view.recent.count()), stride(EXACT_TILE * a.fused.exact_warps * sharing)
    {
        find(a, s, seq, lane);
    }
    __device__ __forceinline__ bool more() const { return next < end; }
    __device__ __forceinline__ void step_on(const AttendArgs &a, const RowSet &s, const Sequence &seq, int lane)
    {
        next += stride;
        find(a, s, seq, lane);
    }

private:
    /** Finds the lane's token, and prefetches it to L2 only, because registers are short. */
    __device__ __forceinline__ void find(const AttendArgs &a, const RowSet &s, const Sequence &seq, int lane)
    {
        constexpr int LINE_BYTES = 128;
        if (!more()) return;
        const int32_t own = next + lane / 4;
        token = exact_token(a, s, seq, view, min(own, end - 1));
        const void *row = lane & 1 ? token.v : token.k;
        const int32_t at = lane & 2 ? LINE_BYTES : 0;
        if (at < a.head_dim * dtype_bytes(a.p.layer.dtype))
            asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char *>(row) + at));
        if (own >= end) token.position = INT32_MAX;
    }
};

/** Loads four 16-bit numbers of a row, from `channel` on; zeros if channel >= end. */
__device__ __forceinline__ uint2 load_halves(const void *row, int channel, int end)
{
    uint2 x = make_uint2(0, 0);
    if (channel < end)
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                     : "=r"(x.x), "=r"(x.y)
                     : "l"(static_cast<const uint16_t *>(row) + channel));
    return x;
}

/** c += a b, laid out as in mma_halves, in fp16 or bf16; a has eight rows, and rows 8 .. 15 count as 0. */
__device__ __forceinline__ void multiply_eight(float (&c)[4], uint2 a, uint2 b, bool bf16)
{
#define TQ_MMA(type)                                                                                                   \
    "mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%9,%5,%9}, {%6,%7}, "              \
    "{%0,%1,%2,%3};\n"
    asm volatile("{ .reg .pred p;\nsetp.ne.u32 p, %8, 0;\n@p " TQ_MMA("bf16") "@!p " TQ_MMA("f16") "}"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.x), "r"(a.y), "r"(b.x), "r"(b.y), "r"((uint32_t)bf16), "r"(0));
#undef TQ_MMA
}

/** c (16 x 8) += a (16 x 8) b (8 x 8), fp16 or bf16. Lane 4 g + t holds a.x: row g, columns 2 t ..; a.y: row g + 8; b:
 *  rows 2 t .. of column g; c: as in mma_halves. */
__device__ __forceinline__ void multiply_by_eight(float (&c)[4], uint2 a, uint32_t b, bool bf16)
{
#define TQ_MMA(type)                                                                                                   \
    "mma.sync.aligned.m16n8k8.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
    asm volatile("{ .reg .pred p;\nsetp.ne.u32 p, %7, 0;\n@p " TQ_MMA("bf16") "@!p " TQ_MMA("f16") "}"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.x), "r"(a.y), "r"(b), "r"((uint32_t)bf16));
#undef TQ_MMA
}

/** Returns two weights as two pairs of 16-bit numbers, high and low parts, whose sums keep 16 bits or more. */
__device__ __forceinline__ uint2 split_weights(float2 w, int dtype)
{
    const uint32_t high = pack_halves(w.x, w.y, dtype);
    const float4 rounded = to_float4(Quad{make_uint4(high, 0, 0, 0)}, dtype);
    return make_uint2(high, pack_halves(w.x - rounded.x, w.y - rounded.y, dtype));
}

/** Running softmax of one row: its largest logit, and the sum of this lane's weights. */
struct RunningWeights {
    float top = -INFINITY, sum = 0;

    /** Turns logits into weights; returns the factor for earlier sums. largest: of the row's logits in all lanes. */
    __device__ __forceinline__ float weigh(float2 *x, float largest)
    {
        const float before = top;
        top = fmaxf(before, largest);
        const float factor = moved(before, top);
        *x = make_float2(moved(x->x, top), moved(x->y, top));
        sum = fmaf(sum, factor, x->x + x->y);
        return factor;
    }
};

/** A warp's sums of weighted 16-bit values for ROWS rows of the set, from first_row on. GROUPS: of 32 channels. Lane
 *  4 g + t loads channels 16 c + 4 t .. of a key, and channels 32 c + 4 g .. of a value. */
template <int GROUPS, int ROWS> struct ExactSums {
    static_assert(ROWS <= EXACT_ROWS);
    /* Lane 4 g + t, [c][i]: channel 32 c + 4 g + 2 i of rows 2 t and 2 t + 1, then the next channel. */
    float o[GROUPS][2][4];
    RunningWeights weights;

    __device__ __forceinline__ void attend(const AttendArgs &a, const RowSet &s, const Sequence &seq,
                                           ExactTokens &tokens, int first_row, int lane)
    {
        const int g = lane / 4, t = lane % 4, dtype = a.p.layer.dtype;
        const bool bf16 = dtype == TQ_BF16;
        RowPlace place = find_row(a, s, first_row + g);
        if (g >= ROWS) place.real = false;
        const ExactSight sight(a, seq, s.b, place);
        const uint16_t *row = static_cast<const uint16_t *>(a.p.q) + (place.real ? query_at(a, s, first_row + g) : 0);
        const int end_of_row = place.real ? a.head_dim : 0; /* q may be empty */
#pragma unroll
        for (int c = 0; c < GROUPS; c++)
#pragma unroll
            for (int i = 0; i < 8; i++) o[c][i / 4][i % 4] = 0;
#pragma unroll 1
        do {
            const ExactToken token = tokens.token;
            uint2 q[2 * GROUPS], k[2 * GROUPS], v[2][GROUPS];
#pragma unroll /* loaded again for each tile, because registers are short */
            for (int c = 0; c < 2 * GROUPS; c++) q[c] = load_halves(row, 16 * c + 4 * t, end_of_row);
#pragma unroll
            for (int c = 0; c < 2 * GROUPS; c++) k[c] = load_halves(token.k, 16 * c + 4 * t, a.head_dim);
            float dots[2][4] = {};
#pragma unroll
            for (int c = 0; c < 2 * GROUPS; c++) multiply_eight(dots[c % 2], q[c], k[c], bf16);
            int32_t position[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int from = 4 * (2 * t + j);
                const auto *at = reinterpret_cast<const void *>(
                    __shfl_sync(ALL_LANES, reinterpret_cast<unsigned long long>(token.v), from));
                position[j] = __shfl_sync(ALL_LANES, token.position, from);
#pragma unroll
                for (int c = 0; c < GROUPS; c++) v[j][c] = load_halves(at, 32 * c + 4 * g, a.head_dim);
            }
            tokens.step_on(a, s, seq, lane);
            float2 x = make_float2(sight.logit(a, position[0], dots[0][0] + dots[1][0]),
                                   sight.logit(a, position[1], dots[0][1] + dots[1][1]));
            float largest = fmaxf(x.x, x.y);
#pragma unroll
            for (int d = 1; d < 4; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, d));
            const float factor = weights.weigh(&x, largest);
            if (__any_sync(ALL_LANES, factor != 1)) {
                const float f[2] = {__shfl_sync(ALL_LANES, factor, 8 * t), __shfl_sync(ALL_LANES, factor, 8 * t + 4)};
#pragma unroll
                for (int c = 0; c < GROUPS; c++)
#pragma unroll
                    for (int i = 0; i < 8; i++) o[c][i / 4][i % 4] *= f[i % 2];
            }
            const uint2 w = split_weights(x, dtype);
#pragma unroll
            for (int c = 0; c < GROUPS; c++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint32_t first = i ? v[0][c].y : v[0][c].x, second = i ? v[1][c].y : v[1][c].x;
                    const uint2 pair = make_uint2(prmt(first, second, 0x5410), prmt(first, second, 0x7632));
                    multiply_by_eight(o[c][i], pair, w.x, bf16);
                    multiply_by_eight(o[c][i], pair, w.y, bf16);
                }
        } while (tokens.more());
#pragma unroll
        for (int d = 1; d < 4; d *= 2) weights.sum += __shfl_xor_sync(ALL_LANES, weights.sum, d);
    }
};

/** Sums each of the first N x[i] over all lanes; lanes 32 / N * i .. get the sum of x[i]. Lanes exchange halves until
 *  each has one sum. */
template <int N, int D = 16, int SIZE> __device__ __forceinline__ float sum_to_lanes(float (&x)[SIZE], int lane)
{
    if constexpr (N > 1) {
        bool upper = lane & D;
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            float sent = upper ? x[i] : x[i + N / 2], kept = upper ? x[i + N / 2] : x[i];
            x[i] = kept + __shfl_xor_sync(ALL_LANES, sent, D);
        }
        return sum_to_lanes<N / 2, D / 2>(x, lane);
    } else {
#pragma unroll
        for (int d = D; d; d /= 2) x[0] += __shfl_xor_sync(ALL_LANES, x[0], d);
        return x[0];
    }
}

/** ExactSums for float32. Lane l has channels 4 l .. of rows and tokens; lanes 32 / ROWS * r .. weights of row r. */
template <int ROWS> struct ExactSumsOfFloats {
    static constexpr int LANES = 32 / ROWS;
    float4 o[ROWS];
    RunningWeights weights;

    __device__ __forceinline__ void attend(const AttendArgs &a, const RowSet &s, const Sequence &seq,
                                           ExactTokens &tokens, int first_row, int lane)
    {
        const int own = first_row + lane / LANES;
        const int64_t at = query_at(a, s, own);
        const ExactSight sight(a, seq, s.b, find_row(a, s, own));
        float4 q[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const Quad raw = QueryLoad<4>(a, __shfl_sync(ALL_LANES, at, LANES * r), lane).raw[0];
            q[r] = to_float4(raw, TQ_F32), o[r] = make_float4(0, 0, 0, 0);
        }
        const bool has = 4 * lane < a.head_dim;
        auto load = [&](const void *row, int from) {
            row =
                reinterpret_cast<const void *>(__shfl_sync(ALL_LANES, reinterpret_cast<unsigned long long>(row), from));
            return has ? reinterpret_cast<const float4 *>(row)[lane] : make_float4(0, 0, 0, 0);
        };
#pragma unroll 1
        do {
            const ExactToken token = tokens.token;
            tokens.step_on(a, s, seq, lane);
#pragma unroll 1
            for (int from = 0; from < 32; from += 4) {
                const float4 key = load(token.k, from), value = load(token.v, from);
                const int32_t position = __shfl_sync(ALL_LANES, token.position, from);
                float dot[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; r++) dot[r] = dot_quads(q[r], key, 0);
                float2 x = make_float2(sight.logit(a, position, sum_to_lanes<ROWS>(dot, lane)), -INFINITY);
                const float factor = weights.weigh(&x, x.x);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float f = __shfl_sync(ALL_LANES, factor, LANES * r),
                                w = __shfl_sync(ALL_LANES, x.x, LANES * r);
                    o[r] = make_float4(fmaf(o[r].x, f, w * value.x), fmaf(o[r].y, f, w * value.y),
                                       fmaf(o[r].z, f, w * value.z), fmaf(o[r].w, f, w * value.w));
                }
            }
        } while (tokens.more());
    }
};

} // namespace tq
#endif
