/* What the rows of a sequence see: positions, packed indices, units. */
#ifndef TQ_CUDA_ATTEND_ROWS_SEQUENCE_CUH
#define TQ_CUDA_ATTEND_ROWS_SEQUENCE_CUH
#include "cuda/attend/params.h"
#include "cuda/device/launch.cuh"

namespace tq
{

/** The plan's group of a channel. */
__device__ __forceinline__ int group_of(const AttendArgs &a, int channel)
{
    return channel / (a.fine ? TQ_FINE_GROUP : TQ_TILE); /* by constants: shifts */
}

extern __shared__ __align__(128) uint8_t shared_bytes[];

struct Range {
    int32_t lo, hi;
    __device__ __forceinline__ int32_t count() const { return max(hi - lo, 0); }
};

/** A sequence's query tokens: index of the first in q, out and lse, and how many there are. */
struct Queries {
    int32_t first, count;
};

__device__ __forceinline__ Queries queries_of(const AttendArgs &a, int32_t b)
{
    if (!a.p.query_start_loc) return {0, a.p.query_tokens};
    const int32_t first = min(max(a.p.query_start_loc[b], 0), a.p.total_tokens),
                  end = min(max(a.p.query_start_loc[b + 1], first), a.p.total_tokens);
    return {first, min(end - first, a.p.query_tokens)};
}

/** A sequence, with its lengths clamped to valid ones. Without query tokens it is empty. */
struct Sequence {
    int32_t length, start, first_position; /* of query token 0; may be negative */
    Range packed;                          /* packed indices that are read from pages, as far as a row sees them */
};

/** The rows of a schedule, of four numbers each, in order:
 *    SPLIT  {key, units of the line, 0, 0}; for each team {b, sequence_at, length, start} of the sequence in which its
 *           piece begins (Cursor); for each sequence what sequence_of reads
 *    FUSED  {key, whole blocks of all segments, runs of each, n}; for each sequence, those with long last blocks first,
 *           {its first whole block, whole blocks of each of its segments | sequence << 16, length, start} (BlockShare);
 *           for each sequence what sequence_of reads; which n of the BlockShare rows have whole blocks, 4 to a row */
__device__ __forceinline__ bool is_schedule_of(const AttendArgs &a, const int4 &head)
{
    return head.x == a.schedule_key;
}

__device__ __forceinline__ const int4 *scheduled_sequences(const AttendArgs &a, const int4 *schedule)
{
    return schedule + 1 + a.schedule_teams;
}

/** Returns which rows of a schedule of FUSED have whole blocks. */
__device__ __forceinline__ const int32_t *scheduled_wholes(const AttendArgs &a, const int4 *schedule)
{
    return reinterpret_cast<const int32_t *>(scheduled_sequences(a, schedule) + a.p.layer.batch);
}

/** Makes a sequence of a call in which nothing `varies`. */
__device__ __forceinline__ Sequence make_sequence(const AttendArgs &a, int32_t length, int32_t start)
{
    Sequence s;
    s.length = min(max(length, 0), a.capacity);
    s.start = min(max(start, 0), s.length);
    s.first_position = s.length - a.p.query_tokens;
    s.packed = {0, INT32_MAX};
    return s;
}

/** Makes a sequence from what schedules have of it: {length, start, query tokens, 2 * packed.hi + has_sinks}. */
__device__ __forceinline__ Sequence sequence_of(const AttendArgs &a, const int4 &scheduled)
{
    Sequence s = make_sequence(a, scheduled.x, scheduled.y);
    if (!a.varies) return s;
    s.first_position = s.length - scheduled.z;
    s.packed = {scheduled.w & 1 ? a.p.layer.sinks : 0, scheduled.w >> 1};
    return s;
}

__device__ __forceinline__ bool has_sinks(const AttendArgs &a, int32_t b)
{
    return a.p.layer.sink_rows && (uint32_t)a.p.layer.sink_rows[b] < (uint32_t)a.p.layer.n_sink_rows;
}

/** Returns the first position of a sequence that is in a row of tails; the sequence's length if none is. */
__device__ __forceinline__ int32_t tail_begin(const AttendArgs &a, int32_t b, int32_t length)
{
    const tq_layer &l = a.p.layer;
    if (!l.tail_rows || !l.window || !length) return length;
    const auto has_row = [&](int32_t page) {
        return (uint32_t)l.tail_rows[2 * (int64_t)b + (page & 1)] < (uint32_t)l.n_tail_rows;
    };
    const int32_t page = a.by_page.quotient(length - 1), begin = max(length - l.window, 0),
                  last_page = page * a.page_tokens;
    if (!has_row(page)) return length;
    return begin < last_page && !has_row(page - 1) ? last_page : begin;
}

/** Returns the end of what a sequence's queries see, in a call with `ends`. At least 0: the length of a range from a
 *  start to a negative end could wrap. */
__device__ __forceinline__ int32_t end_of(const AttendArgs &a, int32_t b) { return max(a.p.ends[b], 0); }

/** Looks up what a schedule has of a sequence (sequence_of), in a call that `varies`. */
__device__ __forceinline__ int4 look_up_varying(const AttendArgs &a, int32_t b, int32_t length, int32_t start)
{
    const int32_t queries = queries_of(a, b).count;
    length = queries ? min(max(length, 0), a.capacity) : 0;
    int32_t end = tail_begin(a, b, length);
    if (a.p.ends) end = min(end, max(end_of(a, b) - a.unpacked_sinks, 0));
    return make_int4(length, start, queries, 2 * end + has_sinks(a, b));
}
static __device__ __noinline__ int4 look_up_apart(const AttendArgs &a, int32_t b, int32_t length, int32_t start)
{
    return look_up_varying(a, b, length, start);
}

/** The same for any call. APART: not inlined, for loops over pages, which would be short of registers with it. */
template <bool APART = false> __device__ __forceinline__ int4 look_up_sequence(const AttendArgs &a, int32_t b)
{
    const int32_t length = a.p.layer.lengths[b], start = a.p.starts ? a.p.starts[b] : 0;
    if (!a.varies) return make_int4(length, start, a.p.query_tokens, 0);
    return APART ? look_up_apart(a, b, length, start) : look_up_varying(a, b, length, start);
}

template <bool APART = false> __device__ __forceinline__ Sequence load_sequence(const AttendArgs &a, int32_t b)
{
    int4 sequence = look_up_sequence<APART>(a, b);
    if (a.schedule) {
        int4 head = __ldcg(a.schedule), then = __ldcg(scheduled_sequences(a, a.schedule) + b);
        if (is_schedule_of(a, head)) sequence = then;
    }
    return sequence_of(a, sequence);
}

/** Returns the positions that a query at position p may see, exact or packed; `ends` is left out. */
__device__ __forceinline__ Range seen(const AttendArgs &a, const Sequence &s, int32_t p)
{
    Range r = {s.start, a.p.causal ? p + 1 : s.length};
    if (a.p.sliding_window) r.lo = max(r.lo, p - a.p.sliding_window + 1);
    return r;
}

/** Returns the packed indices that a query at position p sees. */
__device__ __forceinline__ Range seen_packed(const AttendArgs &a, const Sequence &s, int32_t p)
{
    Range r = seen(a, s, p);
    return {max(r.lo - a.unpacked_sinks, s.packed.lo), min(r.hi - a.unpacked_window - a.unpacked_sinks, s.packed.hi)};
}

/** Returns the unit of a packed token, if all units have the same size. */
__device__ __forceinline__ int32_t equal_unit_of(const AttendArgs &a, int32_t packed_index)
{
    return packed_index >> (a.unit_tokens == 4 * TQ_TILE ? 7 : 6);
}

/** Returns the unit of a packed token. A page has 1 to 4 tiles. */
__device__ __forceinline__ int32_t unit_of(const AttendArgs &a, int32_t packed_index)
{
    if (!a.last_is_short) return equal_unit_of(a, packed_index);
    uint32_t tile = packed_index / TQ_TILE, tiles = a.page_tokens / TQ_TILE;
    uint32_t page = tiles == 3 ? __umulhi(tile, 0xAAAAAAABu) >> 1 : tile >> (tiles >> 1); /* tile / tiles */
    return a.page_units == 1 ? page : 2 * page + (tile - tiles * page) / 2;
}

/** The units that any row of a sequence sees, and the packed indices that all rows see. */
struct PackedView {
    Range units, common;
    /** At least 1: without units, a team still leaves a part. */
    __device__ __forceinline__ int32_t length() const { return max(units.hi - units.lo, 1); }
};

__device__ __forceinline__ PackedView view_packed(const AttendArgs &a, const Sequence &s)
{
    if (a.sees_all) { /* as below, with a fifth of the instructions, which delay a block's first page */
        int32_t end = s.length - a.unpacked_window - a.unpacked_sinks;
        return {{0, end > 0 ? equal_unit_of(a, end - 1) + 1 : 0}, {0, a.p.causal ? end - (a.p.query_tokens - 1) : end}};
    }
    Range first = seen_packed(a, s, s.first_position), last = seen_packed(a, s, s.length - 1);
    PackedView v = {{0, 0}, {last.lo, first.hi}};
    if (first.lo < last.hi) v.units = {unit_of(a, first.lo), unit_of(a, last.hi - 1) + 1};
    return v;
}

/** Returns the units that are entirely in the range; none if a unit may have fewer tiles than the kernel's. */
__device__ __forceinline__ Range whole_units(const AttendArgs &a, Range tokens)
{
    if (a.last_is_short) return {0, 0};
    int32_t lo = equal_unit_of(a, max(tokens.lo, 0));
    return {lo * a.unit_tokens < tokens.lo ? lo + 1 : lo, tokens.hi > 0 ? equal_unit_of(a, tokens.hi) : 0};
}

/** Returns x / y for x >= 0, y > 0 and a quotient below 2^22. Integer division takes four times as long. */
__device__ __forceinline__ int32_t divide(int32_t x, int32_t y)
{
    int32_t q = (int32_t)__fdividef((float)x, (float)y), rest = x - q * y;
    return rest < 0 ? q - 1 : rest >= y ? q + 1 : q;
}

} // namespace tq
#endif
