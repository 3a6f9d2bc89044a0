// What the kernels that append tokens share. Contracts: tq_append in turboquant.h, tq_cuda_append in turboquant_cuda.h.
//
//   append/one_token.cu  one token per sequence (decode): one warp per (side, sequence, head), one launch
//   append/general.cu    anything, one warp per token: few tokens in one launch, many by token tiles and copy_exact
//   baselines/append.cu  the same for plans that are not plain
//   append/prefill.cuh   many tokens (prefill), usual shapes with tiles of 32: one warp per token tile, rotation on
//                        tensor cores, then copy_exact
//   append/append.cu     the choice between them, copy_exact, and the launcher
//
// A token that was stored before this append is encoded from the ring, any other from k or v. New tokens take the ring
// slots of packed ones, so the ring is read first. It is written afterwards by the same lane (append_one_token) or the
// same block (append_general, append_baseline), or in a later launch (copy_exact). A token tile has one writer, a block
// or a warp, so that merging the words of a partly filled tile needs no atomics.
#ifndef TQ_CUDA_APPEND_PARAMS_CUH
#define TQ_CUDA_APPEND_PARAMS_CUH
#include "cuda/device/launch.cuh"
#include "cuda/device/wave.cuh"
#include "cuda/tile/quantize.cuh"

namespace tq
{

/** Tokens of a tile. FINE: in tiles of 16 channels. */
template <bool FINE> constexpr int TILE_TOKENS = FINE ? TQ_TILE * TQ_TILE / TQ_FINE_GROUP : TQ_TILE;

/** Keys or values: tq_side, tq_transform and the arrays of tq_append_params. Strides in bytes. */
struct AppendSide {
    const char *fresh;
    char *ring, *sinks;
    int64_t stride_batch, stride_head, stride_token;
    const float *rotation, *centre, *steps;
    int64_t rotation_stride_head, numbers_stride_head; // in elements: of rotation; of centre and steps
    int32_t bits[PLAN_GROUPS], offset[PLAN_GROUPS];
    int32_t tile_bytes, codes_offset, scales_offset;
    uint32_t widths;   // bit b is set if some group has b bits
    int32_t one_width; // bit width of all groups; 0 if they differ or have more than 5, or with padding or steps
    float coded_channels;
};

/** Exact tokens by index; all 0 without them. With them sinks and window of AppendArgs are 0: every token is packed. */
struct ExactRows {
    const int32_t *sink_rows, *tail_rows;
    int32_t sinks, slots, n_sink_rows, n_tail_rows;
};

/** The arguments of the kernels, in constant memory. */
struct AppendArgs {
    static constexpr bool USUAL = false, SETTLED = false, SEARCHES = false; // UsualArgs, SettledArgs, SearchArgs: true
    int32_t batch, tokens, kv_heads, sinks, window, max_pages, dtype;       // tokens: the most new ones of a sequence
    int32_t total_tokens;                                                   // tokens of k and v, with query_start_loc
    int32_t head_dim, groups, rotation, scale, sides;                       // sides: 2, or 1 without values
    int32_t capacity;                                                       // the largest length
    int32_t tile_tokens;                                                    // 32, or 64 with groups of 16
    float factor;  // of a rotation in one pass; for settled rows (docs/rounding.md) of the scale instead
    int32_t tries; // docs/rounding.md, "Tries"; 0 unless SEARCHES
    float factors[7];
    Divisor heads, batches, window_slots, page_tokens;
    int64_t n_pages, page_bytes, record_bytes, row_bytes;
    const int32_t *lengths, *block_table, *query_start_loc, *position_offset;
    ExactRows rows;
    uint8_t *pages;
    int64_t *flag;
    AppendSide side[2]; // keys, values
    KeyMoments moments;
    HadamardSigns signs;
    Book books[TQ_MAX_BITS + 1];
};

/** For plans with settled rows (docs/rounding.md). */
struct SettledArgs : AppendArgs {
    static constexpr bool SETTLED = true;
};

/** For the usual plans of append_one_token. The constants hide fields of AppendArgs that have the same values. Besides,
 *  all groups of a side have one width of 2 to 4 bits, and numbers have 16 bits. */
template <int PER_LANE> struct UsualArgs : SettledArgs {
    static constexpr bool USUAL = true;
    static constexpr int32_t head_dim = 32 * PER_LANE, groups = PER_LANE, rotation = TQ_ROTATION_HADAMARD,
                             scale = TQ_SCALE_EDEN;
    static constexpr int64_t row_bytes = 2 * head_dim;
};

/** For batches that are not ragged, without exact tokens by index or position offsets: saves up to 20 registers. */
template <class Args> struct WholeArgs : Args {
    static constexpr const int32_t *query_start_loc = nullptr, *position_offset = nullptr;
    static constexpr ExactRows rows = {};
};

/** For plans with tries (docs/rounding.md). */
template <class Args> struct SearchArgs : Args {
    static constexpr bool SEARCHES = true;
};

tq_status launch_append_one_token(const AppendArgs &args, bool settled, cudaStream_t stream, tq_error *error);
/** one_block: one block per (side, sequence, head), which also copies what stays exact; else copy_exact must follow. */
tq_status launch_append_general(const AppendArgs &args, bool settled, bool one_block, cudaStream_t stream,
                                tq_error *error);
/** The same for plans that are not plain. */
tq_status launch_append_baseline(const AppendArgs &args, const tq_plan &plan, const tq_append_params &params,
                                 bool one_block, cudaStream_t stream, tq_error *error);
/** append_prefill, for rows with 16-bit numbers, aligned to 16 bytes, without steps. append/append.cu says which plans
 *  with settled rows it takes. SHARD: bit 0 is set for plans with tries, bit 1 for those with a wave or a metric. */
template <int SHARD> struct Prefill {
    static tq_status queue(const AppendArgs &args, cudaStream_t stream, tq_error *error);
};

/** Returns the most tiles along a sequence's tokens that an append touches: one range, which may start anywhere. */
inline int64_t append_tiles(const AppendArgs &args)
{
    return ((int64_t)args.tokens + args.tile_tokens - 2) / args.tile_tokens + 1;
}

// ---- one sequence: which tokens ----

/** length: after the append, 0 without new tokens. before: length before it, negative if new tokens begin with padding.
 *  first .. last - 1: packed indices (position - sinks) to encode. fresh: the first new token in k and v. */
struct Span {
    int32_t length, before, first, last, fresh;
};

template <class Args> __device__ __forceinline__ Span span_of(const Args &a, int b)
{
    Span s;
    int tokens = a.tokens;
    s.length = max(0, min(a.lengths[b], a.capacity));
    s.fresh = 0;
    if (a.query_start_loc) {
        s.fresh = min(max(a.query_start_loc[b], 0), a.total_tokens);
        tokens = min(min(max(a.query_start_loc[b + 1], s.fresh), a.total_tokens) - s.fresh, tokens);
        if (!tokens) s.length = 0;
    }
    s.before = s.length - tokens;
    const int exact = a.sinks + a.window;
    s.first = max(0, max(0, s.before) - exact);
    s.last = max(s.first, s.length - exact);
    return s;
}

// ---- one side of one KV head of one sequence: where its bytes are ----

struct Work {
    int side, b, h;
};

/** Returns item i of [sides][batch][kv_heads]: all keys come before all values. */
__device__ __forceinline__ Work work_of(const AppendArgs &a, uint32_t i)
{
    Work w;
    const uint32_t sequence = a.heads.quotient(i);
    w.h = (int)(i - sequence * (uint32_t)a.kv_heads);
    w.side = (int)a.batches.quotient(sequence);
    w.b = (int)(sequence - (uint32_t)w.side * (uint32_t)a.batch);
    return w;
}

/** Returns the position by which a key's wave is turned. */
template <class Args> __device__ __forceinline__ int wave_position(const Args &a, const Work &w, int position)
{
    return a.position_offset ? (int)((uint32_t)position + (uint32_t)a.position_offset[w.b]) : position;
}

/** Whether rows are keys with a wave or a metric: centre, wave and metric are then applied before the rotation. */
__device__ __forceinline__ bool has_moments(const AppendArgs &a, const Work &w)
{
    return w.side == 0 && a.moments.any();
}

struct Head {
    const char *fresh;  // new token i is at fresh + (span.fresh + i) * stride_token of the side
    char *ring, *sinks; // rows of row_bytes
    const float *matrix, *centre, *steps;
};

template <class Args> __device__ __forceinline__ Head head_of(const Args &a, const Work &w)
{
    const AppendSide &side = a.side[w.side];
    const int at = w.b * a.kv_heads + w.h; // of batch * kv_heads, which the launcher keeps below 2^31
    Head head;
    head.fresh = side.fresh + w.b * side.stride_batch + w.h * side.stride_head;
    head.ring = side.ring + a.row_bytes * at * a.window;
    head.sinks = side.sinks + a.row_bytes * at * a.sinks;
    head.matrix = side.rotation ? side.rotation + w.h * side.rotation_stride_head : nullptr;
    head.centre = side.centre ? side.centre + w.h * side.numbers_stride_head : nullptr;
    head.steps = side.steps ? side.steps + w.h * side.numbers_stride_head : nullptr;
    return head;
}

template <class Args> __device__ __forceinline__ char *ring_row(const Args &a, const Head &head, int position)
{
    return head.ring + a.window_slots.remainder((uint32_t)position) * a.row_bytes;
}

template <class Args>
__device__ __forceinline__ const char *fresh_row(const Args &a, const Work &w, const Head &head, const Span &s,
                                                 int position)
{
    return head.fresh + (s.fresh + position - s.before) * a.side[w.side].stride_token;
}

/** Return where the exact copy by index of a position is stored, in sinks or in tails; NULL if that row is absent. */
__device__ __forceinline__ char *sink_at(const AppendArgs &a, const Work &w, int position)
{
    const uint32_t row = (uint32_t)a.rows.sink_rows[w.b];
    if (row >= (uint32_t)a.rows.n_sink_rows) return nullptr;
    return a.side[w.side].sinks + (((int64_t)row * a.kv_heads + w.h) * a.rows.sinks + position) * a.row_bytes;
}

__device__ __forceinline__ char *tail_at(const AppendArgs &a, const Work &w, int position)
{
    const uint32_t row =
        (uint32_t)a.rows.tail_rows[2 * (int64_t)w.b + (a.page_tokens.quotient((uint32_t)position) & 1)];
    if (row >= (uint32_t)a.rows.n_tail_rows) return nullptr;
    return a.side[w.side].ring +
           (((int64_t)row * a.kv_heads + w.h) * a.rows.slots + a.window_slots.remainder((uint32_t)position)) *
               a.row_bytes;
}

/** Returns the row of a position; valid until this append writes to the ring. */
__device__ __forceinline__ const char *source_row(const AppendArgs &a, const Work &w, const Head &head, const Span &s,
                                                  int position)
{
    return position < s.before ? ring_row(a, head, position) : fresh_row(a, w, head, s, position);
}

/** Returns the block table's entry for packed index `index`. */
__device__ __forceinline__ int32_t page_of(const AppendArgs &a, const Work &w, int index)
{
    return a.block_table[(int64_t)w.b * a.max_pages + a.page_tokens.quotient((uint32_t)index)];
}

/** The record of a page, or NULL if the cache has no such page. */
__device__ __forceinline__ uint8_t *record_of_page(const AppendArgs &a, const Work &w, int32_t page)
{
    if (page < 0 || page >= a.n_pages) return nullptr;
    return a.pages + (int64_t)page * a.page_bytes + w.h * a.record_bytes;
}

/** The record of the page that holds packed index `index`, or NULL. */
__device__ __forceinline__ uint8_t *record_of(const AppendArgs &a, const Work &w, int index)
{
    return record_of_page(a, w, page_of(a, w, index));
}

/** Returns the tiles of a page's tokens tile_tokens * tile ..; that of a group is side.offset[group] bytes further. */
__device__ __forceinline__ uint8_t *tiles_of(const AppendSide &side, uint8_t *record, int tile)
{
    return record + side.codes_offset + tile * side.tile_bytes;
}

/** Returns the address of the scale of `token` of a page; scales are in column order. */
__device__ __forceinline__ __half *scale_at(const AppendSide &side, uint8_t *record, uint32_t token)
{
    return reinterpret_cast<__half *>(record + side.scales_offset) + (token & ~(TQ_TILE - 1)) + 4 * (token % 8) +
           token % TQ_TILE / 8;
}

// ---- rows: a lane has numbers lane, lane + 32, .. ----

/** Issues all loads of a row before it waits for any. A branch on the dtype at each number would wait for each load. */
template <class Args, int PER_LANE>
__device__ __forceinline__ void load_bits(const Args &a, const char *row, uint32_t (&bits)[PER_LANE], int lane)
{
    if (!Args::USUAL && a.dtype == TQ_F32) {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            bits[k] = lane + 32 * k < a.head_dim ? reinterpret_cast<const uint32_t *>(row)[lane + 32 * k] : 0;
    } else {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            bits[k] = lane + 32 * k < a.head_dim ? reinterpret_cast<const uint16_t *>(row)[lane + 32 * k] : 0;
    }
}

template <class Args, int PER_LANE>
__device__ __forceinline__ void store_bits(const Args &a, char *row, const uint32_t (&bits)[PER_LANE], int lane)
{
    if (!Args::USUAL && a.dtype == TQ_F32) {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            if (lane + 32 * k < a.head_dim) reinterpret_cast<uint32_t *>(row)[lane + 32 * k] = bits[k];
    } else {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            if (lane + 32 * k < a.head_dim) reinterpret_cast<uint16_t *>(row)[lane + 32 * k] = (uint16_t)bits[k];
    }
}

template <class Args, int PER_LANE>
__device__ __forceinline__ void numbers_of_bits(const Args &a, const uint32_t (&bits)[PER_LANE], float (&x)[PER_LANE])
{
    if (a.dtype == TQ_BF16) {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) x[k] = __uint_as_float(bits[k] << 16);
    } else if (Args::USUAL || a.dtype == TQ_F16) {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) x[k] = __half2float(__ushort_as_half((unsigned short)bits[k]));
    } else {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) x[k] = __uint_as_float(bits[k]);
    }
}

// ---- bad numbers: not finite, or larger than TQ_MAX_INPUT ----

__device__ __forceinline__ bool is_bad(float x) { return !(fabsf(x) <= TQ_MAX_INPUT); }

/** Returns what is stored for a bad number. */
__device__ __forceinline__ float mended(float x) { return isfinite(x) ? copysignf(TQ_MAX_INPUT, x) : 0.0f; }

/** Mends a row: its numbers and their bits. Returns whether any lane had a bad number. */
template <class Args, int PER_LANE>
__device__ __forceinline__ bool mend_numbers(const Args &a, float (&x)[PER_LANE], uint32_t (&bits)[PER_LANE])
{
    bool bad = false;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) bad |= is_bad(x[k]);
    if (!__any_sync(ALL_LANES, bad)) return false;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
        if (!is_bad(x[k])) continue;
        x[k] = mended(x[k]);
        const uint32_t single = __float_as_uint(x[k]); // 0 or +-2^14, whose bits need no rounding in any dtype
        bits[k] = a.dtype == TQ_F32    ? single
                  : a.dtype == TQ_BF16 ? single >> 16
                                       : __half_as_ushort(__float2half_rn(x[k]));
    }
    return true;
}

__device__ __forceinline__ void report_bad(int64_t *flag, const Work &w, int position)
{
    const unsigned long long value =
        1ull + position + ((unsigned long long)w.b << 32) + ((unsigned long long)w.side << 62);
    if (flag) atomicCAS(reinterpret_cast<unsigned long long *>(flag), 0ull, value);
}

/** Loads the row of packed index `index`, mends and centres it (centre: [head_dim], or NULL). Reports a bad number. */
template <int PER_LANE>
__device__ __forceinline__ void load_row(const AppendArgs &a, const Work &work, const Head &head, const float *centre,
                                         const Span &span, int index, float (&x)[PER_LANE], int lane)
{
    const int position = index + a.sinks;
    uint32_t bits[PER_LANE];
    load_bits(a, source_row(a, work, head, span, position), bits, lane);
    numbers_of_bits(a, bits, x);
    if (mend_numbers(a, x, bits) && lane == 0) report_bad(a.flag, work, position);
#pragma unroll
    for (int k = 0; k < PER_LANE; k++)
        if (centre && lane + 32 * k < a.head_dim) x[k] = __fsub_rn(x[k], centre[lane + 32 * k]);
}

/** Returns the bytes between the codes of two tokens: 16 times an odd number, against bank conflicts in packing. */
__host__ __device__ __forceinline__ int code_stride(int tiles) { return 32 * tiles + 16; }

// ---- tokens that stay exact ----

struct ExactCopy {
    int position; // -1: there is none
    char *to;     // NULL: its row is absent
};

/** Returns exact copy r by index: new sinks first, then the newest `slots` tokens of each of the last two pages. */
__device__ __forceinline__ ExactCopy copy_to_rows(const AppendArgs &a, const Work &w, const Span &s, int r)
{
    const int fresh = max(0, s.before), in_sinks = max(0, min(a.rows.sinks, s.length) - fresh);
    if (r < in_sinks) return {fresh + r, sink_at(a, w, fresh + r)};
    r -= in_sinks;
    int end = s.length;
#pragma unroll 1
    for (int page = 0; page < 2 && a.rows.slots && end > 0; page++) {
        const int begin = end - 1 - (int)a.page_tokens.remainder((uint32_t)(end - 1)),
                  first = max(max(begin, end - a.rows.slots), fresh);
        if (first + r < end) return {first + r, tail_at(a, w, first + r)};
        r -= max(end - first, 0);
        end = begin;
    }
    return {-1, nullptr};
}

/** Returns exact copy r of this append: by index, or new sinks first, then the ring, back from the newest token. */
__device__ __forceinline__ ExactCopy exact_copy(const AppendArgs &a, const Work &w, const Head &head, const Span &s,
                                                int r)
{
    if (a.rows.sinks || a.rows.slots) return copy_to_rows(a, w, s, r);
    const int fresh = max(0, s.before), in_sinks = max(0, min(a.sinks, s.length) - fresh);
    if (r < in_sinks) return {fresh + r, head.sinks + (fresh + r) * a.row_bytes};
    const int position = s.length - 1 - (r - in_sinks);
    if (position < max(max(fresh, a.sinks), s.length - a.window)) return {-1, nullptr};
    return {position, ring_row(a, head, position)};
}

/** Returns the most exact copies of a sequence. */
inline int64_t exact_rows(const AppendArgs &args)
{
    const int64_t in_sinks = args.sinks + args.rows.sinks, others = (int64_t)args.window + 2 * (int64_t)args.rows.slots,
                  tokens = args.tokens;
    return (in_sinks < tokens ? in_sinks : tokens) + (others < tokens ? others : tokens);
}

/** Makes exact copy r, by one warp. Returns false if there are fewer than r + 1. */
template <int PER_LANE>
__device__ __forceinline__ bool copy_exact_row(const AppendArgs &a, const Work &w, const Head &head, const Span &s,
                                               int r, int lane)
{
    const ExactCopy copy = exact_copy(a, w, head, s, r);
    if (copy.position < 0) return false;
    if (!copy.to) return true;
    uint32_t bits[PER_LANE];
    float x[PER_LANE];
    load_bits(a, fresh_row(a, w, head, s, copy.position), bits, lane);
    numbers_of_bits(a, bits, x);
    if (mend_numbers(a, x, bits) && lane == 0) report_bad(a.flag, w, copy.position);
    store_bits(a, copy.to, bits, lane);
    return true;
}

} // namespace tq
#endif
