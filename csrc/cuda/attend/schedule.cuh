/* Which team processes which units: what each sequence's rows see, the line of units, and each team's piece of it. */
#ifndef TQ_CUDA_ATTEND_SCHEDULE_CUH
#define TQ_CUDA_ATTEND_SCHEDULE_CUH
#include "cuda/attend/params.h"
#include "cuda/device/launch.cuh"

namespace tq
{

/** The plan's group of a channel. */
__device__ __forceinline__ int group_of(const AttendArgs &a, int channel)
{
    return channel / (a.fine ? TQ_FINE_GROUP : TQ_TILE); /* of constants: shifts */
}

extern __shared__ __align__(128) uint8_t shared_bytes[];

/* ---- what a query sees ---- */

struct Range {
    int32_t lo, hi;
    __device__ __forceinline__ int32_t count() const { return max(hi - lo, 0); }
};

/** A sequence, with its lengths clamped to valid ones. */
struct Sequence {
    int32_t length, start, first_position; /* of query token 0; may be negative */
};

/** A schedule is rows of four numbers: {key, units of the line, 0, 0}; for each team {b, sequence_at, length, start} of
 *  the sequence in which its piece begins (Cursor); {length, start} of each sequence, two in a row. */
__device__ __forceinline__ bool is_schedule_of(const AttendArgs &a, const int4 &head)
{
    return head.x == a.schedule_key;
}

__device__ __forceinline__ const int2 *scheduled_sequences(const AttendArgs &a, const int4 *schedule)
{
    return reinterpret_cast<const int2 *>(schedule + 1 + a.schedule_teams);
}

__device__ __forceinline__ Sequence make_sequence(const AttendArgs &a, int32_t length, int32_t start)
{
    Sequence s;
    s.length = min(max(length, 0), a.capacity);
    s.start = min(max(start, 0), s.length);
    s.first_position = s.length - a.p.query_tokens;
    return s;
}

__device__ __forceinline__ Sequence load_sequence(const AttendArgs &a, int32_t b)
{
    int32_t length = a.p.layer.lengths[b], start = a.p.starts ? a.p.starts[b] : 0;
    if (a.schedule) {
        int4 head = __ldcg(a.schedule);
        int2 then = __ldcg(scheduled_sequences(a, a.schedule) + b);
        if (is_schedule_of(a, head)) length = then.x, start = then.y;
    }
    return make_sequence(a, length, start);
}

/** Positions that a query at position p may see at all. */
__device__ __forceinline__ Range seen(const AttendArgs &a, const Sequence &s, int32_t p)
{
    Range r = {s.start, a.p.causal ? p + 1 : s.length};
    if (a.p.sliding_window) r.lo = max(r.lo, p - a.p.sliding_window + 1);
    return r;
}

/** The packed tokens among them, as packed indices. */
__device__ __forceinline__ Range seen_packed(const AttendArgs &a, const Sequence &s, int32_t p)
{
    Range r = seen(a, s, p);
    return {max(r.lo - a.p.layer.sinks, 0), r.hi - a.p.layer.window - a.p.layer.sinks};
}

/** The unit of a packed token, if all units have the same size. */
__device__ __forceinline__ int32_t equal_unit_of(const AttendArgs &a, int32_t packed_index)
{
    return packed_index >> (a.unit_tokens == 4 * TQ_TILE ? 7 : 6);
}

/** The unit of a packed token; a page has 1 to 4 tiles. */
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
    __device__ __forceinline__ int32_t length() const
    {
        return max(units.hi - units.lo, 1);
    } /* without any, a block still leaves a part */
};

__device__ __forceinline__ PackedView view_packed(const AttendArgs &a, const Sequence &s)
{
    if (a.sees_all) { /* as below, with a fifth of the instructions, which delay a block's first page */
        int32_t end = s.length - a.p.layer.window - a.p.layer.sinks;
        return {{0, end > 0 ? equal_unit_of(a, end - 1) + 1 : 0}, {0, a.p.causal ? end - (a.p.query_tokens - 1) : end}};
    }
    Range first = seen_packed(a, s, s.first_position), last = seen_packed(a, s, s.length - 1);
    PackedView v = {{0, 0}, {last.lo, first.hi}};
    if (first.lo < last.hi) v.units = {unit_of(a, first.lo), unit_of(a, last.hi - 1) + 1};
    return v;
}

/** The units that are entirely in the range; none if a unit may have fewer tiles than the kernel's. */
__device__ __forceinline__ Range whole_units(const AttendArgs &a, Range tokens)
{
    if (a.last_is_short) return {0, 0};
    int32_t lo = equal_unit_of(a, max(tokens.lo, 0));
    return {lo * a.unit_tokens < tokens.lo ? lo + 1 : lo, tokens.hi > 0 ? equal_unit_of(a, tokens.hi) : 0};
}

/* ---- the line of units ---- */

/** x / y for x >= 0, y > 0 and a quotient below 2^22. Integer division takes four times as long. */
__device__ __forceinline__ int32_t divide(int32_t x, int32_t y)
{
    int32_t q = (int32_t)__fdividef((float)x, (float)y), rest = x - q * y;
    return rest < 0 ? q - 1 : rest >= y ? q + 1 : q;
}

/** The line, cut into pieces of `each` or `each` + 1 units. None is empty, and the longer ones are spread evenly. */
struct Line {
    int32_t total, pieces, each, longer;

    __device__ __forceinline__ Line(int32_t total_, int32_t teams) : total(total_), pieces(min(teams, total_))
    {
        each = divide(total, pieces);
        longer = total - each * pieces;
    }
    __device__ __forceinline__ int32_t start(int32_t piece) const
    {
        return each * piece + divide(longer * piece, pieces); /* at most a few thousand pieces */
    }
    __device__ __forceinline__ int32_t piece_of(int32_t at) const
    {
        int32_t piece = min((int32_t)__fdividef((float)at * (float)pieces, (float)total), pieces - 1); /* nearly */
        while (start(piece) > at) piece--;
        while (start(piece + 1) <= at) piece++;
        return piece;
    }
};

/** A team's part of one segment. */
struct Segment {
    int32_t b, h, index;
    int32_t first, count; /* units, counted from the sequence's first page; count 0: the segment sees none */
    Range common;         /* packed indices that every row sees */
    bool there;
};

/** A team's place in its piece. Every warp of the team has its own copy. */
struct Cursor {
    Line line;
    int32_t piece, at, end; /* units at .. end - 1 of the line are left */
    int32_t b, sequence_at; /* the sequence at `at`, and its first unit in the line */
    PackedView view;        /* of sequence b */

    /** By a whole warp. */
    __device__ __forceinline__ Cursor(const AttendArgs &a, int32_t piece_, int32_t teams, int lane)
        : line(1, 1), piece(piece_), b(0), sequence_at(0)
    {
        int32_t per_unit = a.p.layer.kv_heads * a.row_tiles, total = 0, upto = 0;
        bool scheduled = false;
        int4 mine = {};
        if (a.schedule) {
            int4 head = __ldcg(a.schedule);
            mine = __ldcg(a.schedule + 1 + piece);
            scheduled = is_schedule_of(a, head);
            total = head.y;
        }
        if (!scheduled) {
            total = 0;
#pragma unroll 1
            for (int32_t first = 0; first < a.p.layer.batch; first += 32)
                total += scan_lengths(a, first, per_unit, lane, upto);
        }
        line = Line(total, teams);
        at = piece < line.pieces ? line.start(piece) : total;
        end = piece < line.pieces ? line.start(piece + 1) : total;
        if (at >= end) return;
        if (scheduled) {
            b = mine.x, sequence_at = mine.y;
            view = view_packed(a, make_sequence(a, mine.z, mine.w));
            return;
        }
#pragma unroll 1
        for (int32_t first = 0;; first += 32) {
            int32_t all = total;
            if (a.p.layer.batch > 32)
                all = scan_lengths(a, first, per_unit, lane, upto); /* otherwise the lanes still have it */
            if (sequence_at + all <= at) {
                sequence_at += all;
                continue;
            }
            int n = __popc(__ballot_sync(ALL_LANES, first + lane < a.p.layer.batch &&
                                                        sequence_at + upto <= at)); /* sequences before `at` */
            int32_t before = __shfl_sync(ALL_LANES, upto, max(n - 1, 0));
            sequence_at += n ? before : 0;
            b = first + n;
            break;
        }
        view = view_packed(a, load_sequence(a, b));
    }

    /** Units of sequences first .. first + 31. upto: their sum up to the lane's sequence. */
    static __device__ __forceinline__ int32_t scan_lengths(const AttendArgs &a, int32_t first, int32_t per_unit,
                                                           int lane, int32_t &upto)
    {
        upto = first + lane < a.p.layer.batch ? view_packed(a, load_sequence(a, first + lane)).length() * per_unit : 0;
#pragma unroll 1
        for (int k = 1; k < 32 && k < a.p.layer.batch; k *= 2) {
            int32_t before = __shfl_up_sync(ALL_LANES, upto, k);
            if (lane >= k) upto += before;
        }
        return __shfl_sync(ALL_LANES, upto, min(31, a.p.layer.batch - 1));
    }

    /** The part of the next segment. With `tell`, the team with a segment's first unit tells combine which pieces share
     *  it. */
    __device__ __forceinline__ Segment next(const AttendArgs &a, bool tell)
    {
        Segment s = {};
        if (at >= end) return s;
        int32_t length = view.length(), per_sequence = a.p.layer.kv_heads * a.row_tiles, offset = at - sequence_at;
        int32_t k = divide(offset, length), unit = offset - k * length, segment_at = at - unit,
                stop = min(end, segment_at + length);
        s = {b,
             a.row_tiles == 1 ? k : k / a.row_tiles,
             b * per_sequence + k,
             view.units.lo + unit,
             min(view.units.count() - unit, stop - at),
             view.common,
             true};
        if (tell && unit == 0)
            a.segments[s.index] = {piece, stop == segment_at + length ? piece : line.piece_of(segment_at + length - 1)};
        at = stop;
        if (at - sequence_at == length * per_sequence && at < end) {
            sequence_at = at;
            view = view_packed(a, load_sequence(a, ++b));
        }
        return s;
    }
};

} // namespace tq
#endif
