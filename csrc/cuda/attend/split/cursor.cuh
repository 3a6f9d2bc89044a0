/* The line of units, and each team's piece of it. */
#ifndef TQ_CUDA_ATTEND_SPLIT_CURSOR_CUH
#define TQ_CUDA_ATTEND_SPLIT_CURSOR_CUH
#include "cuda/attend/rows/sequence.cuh"

namespace tq
{

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
        return each * piece + divide(longer * piece, pieces); /* no overflow: a few thousand pieces at most */
    }
    __device__ __forceinline__ int32_t piece_of(int32_t at) const
    {
        int32_t piece = min((int32_t)__fdividef((float)at * (float)pieces, (float)total), pieces - 1); /* approximate */
        while (start(piece) > at) piece--;
        while (start(piece + 1) <= at) piece++;
        return piece;
    }
};

/** The units of one segment that are in a team's piece. */
struct Segment {
    int32_t b, h, index;
    int32_t first, count; /* units, counted from the sequence's first page; count 0: no row sees a unit */
    Range common;         /* packed indices that every row sees */
    bool there;
};

/** A team's position in its piece. Every warp of the team has its own copy. */
struct Cursor {
    Line line;
    int32_t piece, at, end; /* units at .. end - 1 of the line are left */
    int32_t b, sequence_at; /* the sequence at `at`, and its first unit in the line */
    PackedView view;        /* of sequence b */

    /** Finds the start of piece `piece_` of `teams`. A whole warp calls it. */
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
            view = view_packed(a, a.varies ? load_sequence<true>(a, b) : make_sequence(a, mine.z, mine.w));
            return;
        }
#pragma unroll 1
        for (int32_t first = 0;; first += 32) {
            int32_t all = total;
            if (a.p.layer.batch > 32)
                all = scan_lengths(a, first, per_unit, lane, upto); /* otherwise upto still holds it */
            if (sequence_at + all <= at) {
                sequence_at += all;
                continue;
            }
            int n = __popc(__ballot_sync(ALL_LANES, first + lane < a.p.layer.batch &&
                                                        sequence_at + upto <= at)); /* sequences that end before `at` */
            int32_t before = __shfl_sync(ALL_LANES, upto, max(n - 1, 0));
            sequence_at += n ? before : 0;
            b = first + n;
            break;
        }
        view = view_packed(a, load_sequence<true>(a, b));
    }

    /** Returns how many units sequences first .. first + 31 have. Sets upto to the sum up to the lane's sequence. */
    static __device__ __forceinline__ int32_t scan_lengths(const AttendArgs &a, int32_t first, int32_t per_unit,
                                                           int lane, int32_t &upto)
    {
        upto = first + lane < a.p.layer.batch ? view_packed(a, load_sequence<true>(a, first + lane)).length() * per_unit
                                              : 0;
#pragma unroll 1
        for (int k = 1; k < 32 && k < a.p.layer.batch; k *= 2) {
            int32_t before = __shfl_up_sync(ALL_LANES, upto, k);
            if (lane >= k) upto += before;
        }
        return __shfl_sync(ALL_LANES, upto, min(31, a.p.layer.batch - 1));
    }

    /** Returns the piece's units of the next segment, and moves past them. With `tell`, if the segment's first unit is
     *  among them, writes for combine which pieces share the segment. */
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
            view = view_packed(a, load_sequence<true>(a, ++b));
        }
        return s;
    }
};

} // namespace tq
#endif
