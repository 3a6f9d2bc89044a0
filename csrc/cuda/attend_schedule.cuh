/* Who does which units: what each sequence's rows see, the line of units, and each block's stretch of it. */
#ifndef TQ_CUDA_ATTEND_SCHEDULE_CUH
#define TQ_CUDA_ATTEND_SCHEDULE_CUH
#include "attend.cuh"

namespace tq
{

/* ---- what a query sees ---- */

struct Range {
    int32_t lo, hi;
    __device__ __forceinline__ int32_t count() const { return max(hi - lo, 0); }
};

/** A sequence: its lengths as far as they can be true. */
struct Sequence {
    int32_t length, start, first_position; /* of query token 0; may be negative */
};

__device__ __forceinline__ Sequence load_sequence(const AttendArgs &a, int32_t b)
{
    Sequence s;
    s.length = min(max(a.p.lengths[b], 0), a.capacity);
    s.start = a.p.starts ? min(max(a.p.starts[b], 0), s.length) : 0;
    s.first_position = s.length - a.p.query_tokens;
    return s;
}

/** Positions that a query at position p may see at all. */
__device__ __forceinline__ Range seen(const AttendArgs &a, const Sequence &s, int32_t p)
{
    Range r = {s.start, a.p.causal ? p + 1 : s.length};
    if (a.p.sliding_window) r.lo = max(r.lo, p - a.p.sliding_window + 1);
    return r;
}

/** Of those the packed ones, as packed indices. */
__device__ __forceinline__ Range seen_packed(const AttendArgs &a, const Sequence &s, int32_t p)
{
    Range r = seen(a, s, p);
    return {max(r.lo - a.p.sinks, 0), r.hi - a.p.window - a.p.sinks};
}

/** The unit of a packed token; a page has 1 to 4 tiles. */
__device__ __forceinline__ int32_t unit_of(const AttendArgs &a, int32_t packed_index)
{
    uint32_t tile = packed_index / TQ_TILE, tiles = a.page_tokens / TQ_TILE;
    uint32_t page = tiles == 3 ? __umulhi(tile, 0xAAAAAAABu) >> 1 : tile >> (tiles >> 1); /* tile / tiles */
    return a.page_units == 1 ? page : 2 * page + (tile - tiles * page) / 2;
}

/** The units that the rows of a sequence see, taken together, and the packed indices that all of them see. */
struct PackedView {
    Range units, common;
    __device__ __forceinline__ int32_t length() const
    {
        return max(units.hi - units.lo, 1);
    } /* without any, a block still leaves a part */
};

__device__ __forceinline__ PackedView view_packed(const AttendArgs &a, const Sequence &s)
{
    Range first = seen_packed(a, s, s.first_position), last = seen_packed(a, s, s.length - 1);
    PackedView v = {{0, 0}, {last.lo, first.hi}};
    if (first.lo < last.hi) v.units = {unit_of(a, first.lo), unit_of(a, last.hi - 1) + 1};
    return v;
}

/* ---- the line of units ---- */

/** The line, cut into a stretch for each of `blocks` blocks, none of them empty; the first `longer` have `each` + 1 units. */
struct Line {
    int32_t total, blocks, each, longer;

    __device__ __forceinline__ int32_t start(int32_t block) const { return each * block + min(block, longer); }
    __device__ __forceinline__ int32_t block_of(int32_t at) const
    {
        int32_t in_longer = longer * (each + 1);
        return at < in_longer ? at / (each + 1) : longer + (at - in_longer) / each;
    }
};

/** x / y for 0 <= x < 2^24 y, y > 0. Integer division takes four times as long. */
__device__ __forceinline__ int32_t divide(int32_t x, int32_t y)
{
    int32_t q = (int32_t)__fdividef((float)x, (float)y);
    int32_t rest = x - q * y;
    return rest < 0 ? q - 1 : rest >= y ? q + 1 : q;
}

__device__ __forceinline__ Line divide_line(int32_t total)
{
    int32_t blocks = min((int32_t)gridDim.x, total), each = divide(total, blocks);
    return {total, blocks, each, total - each * blocks};
}

/** A block's place in the line, kept by its scheduling warp. */
struct Cursor {
    Line line;
    int32_t at, end;        /* of the block's stretch */
    int32_t b, sequence_at; /* the sequence there, and its first unit in the line */
    PackedView view;        /* of sequence b */
};

/** A block's part of one segment. Written by one lane, read by all from shared memory. */
struct Work {
    int32_t there; /* 0: the block has no more */
    int32_t b, h, segment;
    Range units,
        common; /* the block's units, counted in the sequence from its first page on; packed indices that every row sees */
};

/** Counts all units and finds the block's first. By one whole warp. */
__device__ __forceinline__ Cursor find_start(const AttendArgs &a, int lane)
{
    Cursor c = {};
    int32_t per_unit = a.p.kv_heads * a.row_tiles, passes = a.p.batch > 32 ? 2 : 1;
    PackedView view = {};
    if (a.p.batch == 1) { /* nothing to search, and short contexts feel it */
        c.view = view_packed(a, load_sequence(a, 0));
        c.line = divide_line(c.view.length() * per_unit);
        c.at = c.line.start(blockIdx.x);
        c.end = c.line.start(blockIdx.x + 1);
        return c;
    }
#pragma unroll 1
    for (int32_t pass = 0, first = 0;;) {
        int32_t upto = 0;
        if (first + lane < a.p.batch) {
            view = view_packed(a, load_sequence(a, first + lane));
            upto = view.length() * per_unit;
        }
#pragma unroll 1
        for (int k = 1; k < 32 && k < a.p.batch; k *= 2) {
            int32_t before = __shfl_up_sync(ALL_LANES, upto, k);
            if (lane >= k) upto += before;
        }
        if (pass == 0) {
            c.line.total += __shfl_sync(ALL_LANES, upto, min(31, a.p.batch - 1));
            first += 32;
            if (first < a.p.batch) continue;
            c.line = divide_line(c.line.total);
            c.at = c.line.start(blockIdx.x);
            c.end = c.line.start(blockIdx.x + 1);
            pass = 1;
            first = 0;
            if (passes > 1) continue; /* otherwise what the lanes hold is still right */
        }
        /* lanes whose sequence lies before the stretch */
        int n = __popc(__ballot_sync(ALL_LANES, first + lane < a.p.batch && c.sequence_at + upto <= c.at));
        int32_t before = __shfl_sync(ALL_LANES, upto, max(n - 1, 0));
        c.sequence_at += n ? before : 0;
        c.b += n;
        first += 32;
        if (n < 32 || first >= a.p.batch) break;
    }
    int from = c.b % 32;
    c.view.units = {__shfl_sync(ALL_LANES, view.units.lo, from), __shfl_sync(ALL_LANES, view.units.hi, from)};
    c.view.common = {__shfl_sync(ALL_LANES, view.common.lo, from), __shfl_sync(ALL_LANES, view.common.hi, from)};
    return c;
}

/** The next part of the block's stretch. By one lane, which keeps the cursor. Tells combine who shares the segment. */
__device__ __forceinline__ void next_work(const AttendArgs &a, Cursor &c, Work &to)
{
    if ((int32_t)blockIdx.x >= c.line.blocks || c.at >= c.end) {
        to.there = 0;
        return;
    }
    int32_t length = c.view.length(), per_sequence = a.p.kv_heads * a.row_tiles, offset = c.at - c.sequence_at;
    int32_t segment = divide(offset, length), unit = offset - segment * length, at = c.at - unit,
            end = min(c.end, at + length);
    Work w;
    w.there = 1;
    w.b = c.b;
    w.h = a.row_tiles == 1 ? segment : segment / a.row_tiles;
    w.segment = c.b * per_sequence + segment;
    w.units = {c.view.units.lo + unit, min(c.view.units.hi, c.view.units.lo + end - at)};
    w.common = c.view.common;
    to = w;
    if (unit == 0)
        a.segments[w.segment] = {(int32_t)blockIdx.x,
                                 end == at + length ? (int32_t)blockIdx.x : c.line.block_of(at + length - 1)};
    c.at = end;
    if (end - c.sequence_at == length * per_sequence) {
        c.sequence_at = end;
        c.b++;
        if (c.at < c.end) c.view = view_packed(a, load_sequence(a, c.b));
    }
}

} // namespace tq
#endif
