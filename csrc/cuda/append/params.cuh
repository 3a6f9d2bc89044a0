// Appending on the device: what its kernels share. Contracts: turboquant.h and turboquant_cuda.h, tq_append.
//
//   append/one_token.cu   one token a sequence (decode): a warp a (side, sequence, head), everything in one launch
//   append/general.cu   anything: a block a token tile, a warp a token; few tokens in one launch, many with copy_exact behind it
//   baselines/append.cu the same for plans that are not plain
//   append/prefill.cuh  many tokens, usual shapes with tiles of 32 (prefill): a warp a token tile, rotated by tensor cores; copy_exact
//                    behind it
//   append/append.cu        the choice between them, copy_exact, and the launcher
//
// A token is encoded from the ring if it was stored before this append, from k or v if not, and the ring slot it leaves is taken
// by a new token: so whoever packs reads first, and writes to the ring afterwards (append_one_token: the same lane; append_general: the
// same block) or in a later launch (copy_exact). A token tile has one writer, a block or a warp, so that merging words of a tile
// that is filled in part needs no atomics.
#ifndef TQ_CUDA_APPEND_PARAMS_CUH
#define TQ_CUDA_APPEND_PARAMS_CUH
#include "cuda/device/launch.cuh"
#include "cuda/device/wave.cuh"
#include "cuda/tile/quantize.cuh"

namespace tq
{

/** Of a tile. FINE: of 16 channels. */
template <bool FINE> constexpr int TILE_TOKENS = FINE ? TQ_TILE * TQ_TILE / TQ_FINE_GROUP : TQ_TILE;

/** Keys or values: tq_side, tq_transform and the arrays of tq_append_params. Strides in bytes. */
struct AppendSide {
    const char *fresh;
    char *ring, *sinks;
    int64_t stride_batch, stride_head, stride_token;
    const float *rotation, *centre, *steps;
    int64_t rotation_stride_head, numbers_stride_head; // elements; the second of centre and steps
    int32_t bits[PLAN_GROUPS], offset[PLAN_GROUPS];
    int32_t tile_bytes, codes_offset, scales_offset;
    uint32_t widths;   // bit b: some group has b bits
    int32_t one_width; // the bits of all groups, if they are the same and at most 5, without padding and steps; else 0
    float coded_channels;
};

/** Exact tokens by index; all 0 without. Then AppendArgs has no sinks and no window, because every token is packed. */
struct ExactRows {
    const int32_t *sink_rows, *tail_rows;
    int32_t sinks, slots, n_sink_rows, n_tail_rows;
};

/** Everything a block knows when it starts; in constant memory. */
struct AppendArgs {
    static constexpr bool USUAL = false, SETTLED = false, SEARCHES = false; // or UsualArgs, SettledArgs, SearchArgs
    int32_t batch, tokens, kv_heads, sinks, window, max_pages, dtype;       // tokens: of a sequence, at most
    int32_t total_tokens;                                                   // of k and v, with query_start_loc
    int32_t head_dim, groups, rotation, scale, sides;                       // sides: 1 without values
    int32_t capacity;                                                       // the largest length
    int32_t tile_tokens;                                                    // 32, or 64 with groups of 16
    float factor;  // of a rotation of one pass; of settled rows (docs/rounding.md, "Settled rows") of the scale
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

/** Of a plan of settled rows. */
struct SettledArgs : AppendArgs {
    static constexpr bool SETTLED = true;
};

/** What is usual at one token a sequence, known to the compiler: what it hides has the same value in AppendArgs. Besides, all
 *  groups of a side have one width of 2 to 4 bits, and numbers have 16 bits. */
template <int PER_LANE> struct UsualArgs : SettledArgs {
    static constexpr bool USUAL = true;
    static constexpr int32_t head_dim = 32 * PER_LANE, groups = PER_LANE, rotation = TQ_ROTATION_HADAMARD,
                             scale = TQ_SCALE_EDEN;
    static constexpr int64_t row_bytes = 2 * head_dim;
};

/** Of a batch that is not ragged, without exact tokens by index and offsets. What the compiler then leaves out takes up to 20 registers. */
template <class Args> struct WholeArgs : Args {
    static constexpr const int32_t *query_start_loc = nullptr, *position_offset = nullptr;
    static constexpr ExactRows rows = {};
};

/** Of a plan with tries. */
template <class Args> struct SearchArgs : Args {
    static constexpr bool SEARCHES = true;
};

tq_status launch_append_one_token(const AppendArgs &args, bool settled, cudaStream_t stream, tq_error *error);
/** one_block: of each (side, sequence, head), which then copies what stays exact too; otherwise copy_exact has to follow. */
tq_status launch_append_general(const AppendArgs &args, bool settled, bool one_block, cudaStream_t stream,
                                tq_error *error);
/** The same of plans that are not plain. */
tq_status launch_append_baseline(const AppendArgs &args, const tq_plan &plan, const tq_append_params &params,
                                 bool one_block, cudaStream_t stream, tq_error *error);
/** Rows of 16 bits, aligned to 16 bytes, without steps. Plans of settled rows: append/append.cu says which. */
/** append_prefill. SHARD: 1 for plans with tries, and 2 more for those with a wave or a metric. */
template <int SHARD> struct Prefill {
    static tq_status queue(const AppendArgs &args, cudaStream_t stream, tq_error *error);
};

/** How many tiles along the tokens of a sequence an append can touch: its tokens are packed in one range that may start anywhere. */
inline int64_t append_tiles(const AppendArgs &args)
{
    return ((int64_t)args.tokens + args.tile_tokens - 2) / args.tile_tokens + 1;
}

// ---- one sequence: which tokens ----

/** length: after the append, and 0 for a sequence without new tokens; before: of it, negative where the new tokens start with padding;
 *  packed indices first .. last - 1 (position - sinks) are to be encoded. fresh: the first new token in k and v. */
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

/** Item i of sides x batch x kv_heads, the side outermost: keys and values run the same code, but in turn. */
__device__ __forceinline__ Work work_of(const AppendArgs &a, uint32_t i)
{
    Work w;
    const uint32_t sequence = a.heads.quotient(i);
    w.h = (int)(i - sequence * (uint32_t)a.kv_heads);
    w.side = (int)a.batches.quotient(sequence);
    w.b = (int)(sequence - (uint32_t)w.side * (uint32_t)a.batch);
    return w;
}

/** The position that a key's wave is turned by. */
template <class Args> __device__ __forceinline__ int wave_position(const Args &a, const Work &w, int position)
{
    return a.position_offset ? (int)((uint32_t)position + (uint32_t)a.position_offset[w.b]) : position;
}

/** Whether rows become residuals, their centre subtracted, before they are rotated. */
__device__ __forceinline__ bool has_moments(const AppendArgs &a, const Work &w)
{
    return w.side == 0 && a.moments.any();
}

struct Head {
    const char *fresh;  // new token i of the sequence at fresh + (span.fresh + i) * stride_token of the side
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

/** Where the exact copy of a position is stored, of those by index; NULL if its row is absent. */
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

/** The row of a position, before this append has written anything. */
__device__ __forceinline__ const char *source_row(const AppendArgs &a, const Work &w, const Head &head, const Span &s,
                                                  int position)
{
    return position < s.before ? ring_row(a, head, position) : fresh_row(a, w, head, s, position);
}

/** What the block table has for packed index `index`. */
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

/** Tiles of a page's tokens tile_tokens * tile ..: that of a group lies side.offset[group] bytes further. */
__device__ __forceinline__ uint8_t *tiles_of(const AppendSide &side, uint8_t *record, int tile)
{
    return record + side.codes_offset + tile * side.tile_bytes;
}

/** `token` of a page. */
__device__ __forceinline__ __half *scale_at(const AppendSide &side, uint8_t *record, uint32_t token)
{
    return reinterpret_cast<__half *>(record + side.scales_offset) + (token & ~(TQ_TILE - 1)) + 4 * (token % 8) +
           token % TQ_TILE / 8;
}

// ---- rows, a lane the numbers lane, lane + 32, .. ----

/** Queues all loads of a row before the first is waited for: a dtype looked at number by number would wait for each. */
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

// ---- numbers that are no numbers ----

__device__ __forceinline__ bool is_bad(float x) { return !(fabsf(x) <= TQ_MAX_INPUT); }

/** What is stored for a bad number. */
__device__ __forceinline__ float mended(float x) { return isfinite(x) ? copysignf(TQ_MAX_INPUT, x) : 0.0f; }

/** Mends a row, the numbers and their bits; whether any lane had something to mend. */
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

/** Row of packed index `index`, mended and centred (centre: [head_dim], or NULL); a bad number is reported. */
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

/** Bytes between the codes of two tokens: 16 modulo 128 for an even number of tiles, so that packing finds no bank twice. */
__host__ __device__ __forceinline__ int code_stride(int tiles) { return 32 * tiles + 16; }

// ---- tokens that stay exact ----

struct ExactCopy {
    int position; // -1: there is none
    char *to;     // NULL: its row is absent
};

/** Copy r of those that an append makes in rows: new sinks, then of the last two pages the newest `slots` each. */
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

/** Row r of those that this append adds to sinks and ring, or to rows. Sinks first, then backwards from the newest. */
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

/** The most copies of a sequence. */
inline int64_t exact_rows(const AppendArgs &args)
{
    const int64_t in_sinks = args.sinks + args.rows.sinks, others = (int64_t)args.window + 2 * (int64_t)args.rows.slots,
                  tokens = args.tokens;
    return (in_sinks < tokens ? in_sinks : tokens) + (others < tokens ? others : tokens);
}

/** One warp copies one row; false if there are fewer than r + 1. */
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
