/* Attention over packed pages on CUDA: definitions that all its kernels and the host share. In general three kernels
 * run in sequence:
 *
 *   prepare   rotates the queries and rounds them to tensor-core operands; attends to the exact tokens
 *   pages     attends to the packed pages; starts to load pages while prepare still runs
 *   combine   merges the parts that the other two left in the workspace, un-rotates, writes
 *
 * On Hopper, where that is faster, one kernel does all of this in shared memory: attend_fused for up to 16 rows,
 * attend_fused_many_rows for up to 128.
 *
 * How the work on pages is cut:
 *   row       (query token, query head) that reads one KV head: row = token * heads_per_kv + head. Row r of a tile of
 *             rows is column pair (2 (r % 4), 2 (r % 4) + 1) of block r / 4 of the tensor-core products: its high and
 *             its low 8 bits.
 *   unit      half a page or a page: two or four token tiles (fewer where a page has no more)
 *   segment   (sequence, KV head, tile of rows): the units that some of its rows see
 *   line      the units of all segments, one after the other
 *   team      warps that share loaded pages, each with its own rows: usually one warp, with many rows several
 *   piece     a team's share of the line
 *   stage     shared memory for one unit; a team has a ring of them
 * The three kernels cut the line into equal pieces, one per team: equal work whatever the lengths are, found from the
 * lengths on the device. A team writes a part (maximum, sums) to the workspace for each segment in its piece.
 *
 *   rows/query.cuh, rows/exact.cuh   the two halves of prepare      rows/output.cuh   sums to results
 *   split/cursor.cuh                 which team has which units      rows/wave.cuh     the wave's part of scores
 *   ../README.md                     which kernel runs, and where it is */
#ifndef TQ_CUDA_ATTEND_PARAMS_H
#define TQ_CUDA_ATTEND_PARAMS_H
#include "cuda/tile/levels.h"

namespace tq
{

constexpr int FUSED_ROWS = 128;   /* the most rows of a KV head in attend_fused_many_rows */
constexpr int LARGE_CLUSTER = 16; /* blocks that share a segment of attend_fused if segments are few */
constexpr int MOST_RAGGED = 1024; /* the most sequences of attend_fused if they differ in length */
/** The most whole blocks of such a batch, for each block that can run at once (fused/share.cu). */
constexpr int MOST_WHOLE_OF_SHARE = 2;
/** Returns the rows of its schedule for `batch` sequences (rows/sequence.cuh). */
constexpr int64_t fused_schedule_rows(int64_t batch) { return 1 + 2 * batch + (batch + 3) / 4; }
constexpr int FUSED_WARPS = 16;      /* the most warps of a block of attend_fused: one lane for each of 32 parts */
constexpr int TEAM_OF_MANY_ROWS = 4; /* warps of a team of attend_many_rows */
/** Returns how many sets of rows a tile is cut into for exact tokens: sets of 8 in attend_fused_many_rows, one set in
 *  attend_fused, where team_rows is 0. A warp attends to exact tokens for one set. */
constexpr int exact_sets(int team_rows) { return team_rows ? team_rows / 8 : 1; }
constexpr int EXACT_TILE = 8,
              EXACT_ROWS = 8;         /* exact tokens that a warp of attend_fused takes at a time, and the most rows */
constexpr int FUSED_BLOCK_BYTES = 64; /* shared memory for the segment of a block of attend_fused */
constexpr int END_ROWS = 16;          /* the most rows of a block of prepare or combine */
constexpr int QUERY_BASE = 254;       /* a query number is hi * 254 + lo, both in -127..127 */
constexpr int QUERY_LIMIT = 127 * QUERY_BASE + QUERY_BASE / 2 - 1; /* the largest whose hi rounds to 127 */
constexpr int32_t FAR_BACK = 1 << 30;                              /* at least as many as a sequence can have */

/** The plan's keys or values. Types are small, because all arguments share an SM's 2 KB L1 constant cache. */
struct SideArgs {
    uint8_t bits[PLAN_GROUPS];
    uint16_t offset[PLAN_GROUPS], width[PLAN_GROUPS]; /* width: 1 << bits, for with_width */
    int32_t tile_bytes, codes_offset, scales_offset;  /* tile_bytes: of 32 tokens, all groups */
    int32_t at_codes, at_scales;                      /* offsets of this side in a stage, bytes */
    float factor[TQ_WIDE_BITS + 1];                   /* of a code byte, by width */
    float offset_factor[TQ_WIDE_BITS + 1];            /* values: factor of the sum of weights */
    int32_t offset_levels[TQ_WIDE_BITS + 1];          /* keys: factor of the sum of the query */
    bool row_factor; /* values: sums of 1 and 2 bits still have the factor of Reading::ROW_FACTOR */
};

/** The bits of two value scales, both NaN, which no page in the cache has. A unit with these scales is hidden. */
constexpr uint32_t NO_PAGE = 0xfeedfeed;

/** A copy of a part of a record into a stage; offsets in bytes. */
struct CopyArgs {
    int32_t from, to, bytes, unused;
};

/** Copies that fill a stage: key codes and all scales complete one barrier, value codes another. */
enum Copies { COPY_KEYS, COPY_SCALES, COPY_VALUES, COPIES };

/** The pieces that have a segment's units, for combine. Piece p's part of segment s is in slot p + s: from part to part
 *  along the line, one of the two grows, so no two parts share a slot. */
struct SegmentParts {
    int32_t first, last;
};

/** The arguments of a row for the kernels on pages. */
struct RowArgs {
    float scale, bias;            /* base-2 logit = scale * (integer product * key scale) + bias; scale > 0 */
    int32_t offset_hi, offset_lo; /* added to the integer products for the codes' offset */
    int32_t packed_lo, packed_hi; /* the row sees the packed indices lo .. hi - 1 */
    float wave;                   /* factor that turns sums over put_wave's results into scores */
    float variance;               /* variance term: a score is s (x - variance s), with key scale s and product x */
};

/** A row's part, base 2. sum: of the weights exp2(logit - max); rounded_sum: of value scale times weight, as rounded
 *  for the products. */
struct RowTotals {
    float max, sum, rounded_sum, unused;
};

constexpr int WAVE_STEP = 16; /* pairs of one tensor-core product */

/** The wave and the metric of keys, and the variance term; what the plan does not have is 0. */
struct WaveArgs {
    int32_t pairs, metric; /* of the plan */
    int32_t steps;         /* pairs / WAVE_STEP, rounded up to an even number */
    int32_t at_table, at_polynomials, at_increments, at_rows, at_warps,
        warp_bytes; /* shared memory of kernels on pages, in bytes (WaveSpace); at_rows: put_wave's results in FUSED */
    float2 *rows;   /* put_wave's results in the workspace of SPLIT, [segments][tile_rows][16 steps] */
    float variance; /* variance term for a query of norm 1 and a key scale of 1, in base-2 logits */
};

/** attend_fused; all 0 for other kernels. */
struct FusedArgs {
    int32_t warps;   /* of a block */
    int32_t teams;   /* of a block: warps, or a quarter of them in attend_fused_many_rows */
    int32_t sharing; /* blocks that share a segment */
    int32_t cluster; /* sharing if these form a cluster, else 1; merge_parts runs if the two differ, or if ragged */
    int32_t stride;  /* teams of a segment (ragged: of a block); each has every stride-th unit */
    bool ragged;     /* a schedule says how many blocks share a segment, each with a piece of its units; sharing = 1 */
    int32_t run;     /* ragged: RUN of the kernel's Variant */
    int32_t at_once; /* ragged: blocks that can run at once */
    int32_t exact_warps; /* how many of a block's last warps share the exact tokens of one set of rows */
    int32_t team_bytes;  /* shared memory of a team: its stage, later its sums */
    int32_t rows, queries, spare, value_scale, totals, exact, slots,
        block; /* offsets in shared memory after the teams', in bytes */
};

/** The kernels' arguments, in constant memory. Segment s = ((sequence * kv_heads) + head) * row_tiles + tile. */
struct AttendArgs {
    tq_attend_params p; /* strides of out and lse are filled in; in ragged batches those of `batch` are 0 */
    /* of the plan */
    float rotation_factor; /* head_dim^-1/2 */
    int32_t head_dim, groups, page_tokens,
        rotation;        /* groups: of 32 channels; each is two groups of a plan with tiles of 16 */
    int32_t plan_groups; /* the plan's own */
    bool fine;           /* groups of 16 channels */
    int64_t record_bytes;
    SideArgs key, value;
    CopyArgs copies[2][COPIES]; /* of a page's first and second unit */
    int32_t copy_bytes[2][2];   /* their bytes: key codes and all scales, value codes */
    HadamardSigns signs;
    LevelTables tables;
    /* the cut */
    int32_t capacity;                /* the most tokens of a sequence */
    int32_t unit_tokens, page_units; /* units of a page: 1 or 2 */
    bool last_is_short;              /* the last unit of a page has fewer tiles than the others, or than its kernel's */
    bool sees_all;                   /* units have one size, and only causality hides tokens */
    bool varies;                     /* what rows see depends on more arrays than lengths and starts */
    int32_t unpacked_sinks, unpacked_window; /* positions before and behind the packed ones: tq_unpacked_sinks */
    int32_t recent;               /* how many exact positions a row sees up to its own, beside sinks; FAR_BACK: all */
    const uint8_t *absent_record; /* read where an entry of a block table names no page: NO_PAGE everywhere */
    uint32_t page_limit;          /* an entry of a block table below this names a page */
    uint32_t page_bytes;          /* stride of pages */
    Divisor by_heads_per_kv, by_slots,
        by_page; /* divide by query heads per KV head, slots of a ring, tokens of a page */
    int32_t heads_per_kv, rows, tile_rows, row_tiles, team_warps, teams, stages, stage_bytes;
    int32_t exact_parts, exact_tokens;  /* parts of a KV head's exact tokens (attend_fused: 0 or 1), tokens of each */
    int32_t prepare_rows, combine_rows; /* rows of a block; they divide tile_rows */
    int32_t team_rows;                  /* rows of a team in attend_many_rows and attend_fused_many_rows; 0 otherwise */
    int32_t at_teams; /* offset in shared memory of what warps and teams have beside stages (attend_fused: nothing) */
    int32_t at_barriers; /* offset of their barriers */
    FusedArgs fused;
    WaveArgs wave;
    const int4 *schedule;                 /* split/schedule.cu, fused/share.cu; NULL: none, or the kernel uses none */
    int32_t schedule_key, schedule_teams; /* key of a schedule that fits; teams of all blocks (ragged: sequences) */
    int32_t pitch; /* floats from one row to the next in shared memory of prepare, combine and attend_fused */
    /* workspace */
    SegmentParts *segments;
    RowArgs *row_args;       /* [segments][tile_rows] */
    uint2 *queries;          /* [segments][tile_rows / 4][groups][32 lanes]: B operands; attend_many_rows: QueryPlace */
    RowTotals *totals;       /* [slots][tile_rows] */
    float *sums;             /* [slots][tile_rows][32 groups]; attend_fused: [blocks][rows][part_floats] */
    RowTotals *exact_totals; /* [batch][kv_heads][exact_parts][row_tiles * tile_rows] */
    float *exact_sums;       /* the same, [32 groups]: not rotated */
};

/** Floats of a row's part in attend_fused: {max, sum, sum of packed tokens, rounded_sum} as in RowTotals, packed sums,
 *  which are rotated, and exact sums. */
__host__ __device__ inline int part_floats(const AttendArgs &a)
{
    return 4 + (a.exact_parts ? 2 : 1) * TQ_TILE * a.groups;
}

} // namespace tq
#endif
