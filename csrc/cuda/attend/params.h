/* Attention over packed pages on CUDA: definitions that all its kernels and the host share. In general three kernels
 * run in sequence:
 *
 *   prepare   rotates the queries and rounds them to tensor-core operands; attends to the exact tokens
 *   pages     attends to the packed pages; starts to load pages while prepare still runs
 *   combine   merges the parts that the other two left in the workspace, un-rotates, writes
 *
 * On Hopper, if sequences are short or about equally long, one kernel does all of this in shared memory: attend_fused
 * for up to 16 rows, attend_fused_many_rows for up to 128.
 *
 * How the work on pages is cut:
 *   row       (query token, query head) that reads one KV head: row = token * heads_per_kv + head. Row r of a tile of rows is
 *             column pair (2 (r % 4), 2 (r % 4) + 1) of block r / 4 of the tensor-core products: its high and its low 8
 *             bits.
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
constexpr int MOST_RAGGED = 1024; /* sequences of attend_fused if they differ in length */
/** The most whole blocks that it gives segments, of the blocks at work at once (fused/share.cu). */
constexpr int MOST_WHOLE_OF_SHARE = 2;
/** Rows of its schedule for so many sequences (rows/sequence.cuh). */
constexpr int64_t fused_schedule_rows(int64_t batch) { return 1 + 2 * batch + (batch + 3) / 4; }
constexpr int FUSED_WARPS = 16;      /* the most warps of a block of attend_fused: a lane for each of 32 parts */
constexpr int TEAM_OF_MANY_ROWS = 4; /* warps of a team of attend_many_rows */
/** Sets of 8 rows of a tile for which warps of attend_fused_many_rows attend to exact tokens; 1 in attend_fused
 *  (team_rows 0). */
constexpr int exact_sets(int team_rows) { return team_rows ? team_rows / 8 : 1; }
constexpr int EXACT_TILE = 8,
              EXACT_ROWS = 8;         /* exact tokens that a warp of attend_fused has at a time, and rows at most */
constexpr int FUSED_BLOCK_BYTES = 64; /* shared memory for the segment of a block of attend_fused */
constexpr int END_ROWS = 16;          /* the most rows of a block of prepare or combine */
constexpr int QUERY_BASE = 254;       /* a query number is hi * 254 + lo, both in -127..127 */
constexpr int QUERY_LIMIT = 127 * QUERY_BASE + QUERY_BASE / 2 - 1; /* the largest whose hi rounds to 127 */
constexpr int32_t FAR_BACK = 1 << 30;                              /* as many positions as there can be */

/** Small types: a multiprocessor's first cache of constants has 2 KB, for all arguments together. */
struct SideArgs {
    uint8_t bits[PLAN_GROUPS];
    uint16_t offset[PLAN_GROUPS], width[PLAN_GROUPS]; /* width: 1 << bits, for with_width */
    int32_t tile_bytes, codes_offset, scales_offset;  /* tile_bytes: of 32 tokens */
    int32_t at_codes, at_scales;                      /* offsets of this side in a stage, bytes */
    float factor[TQ_WIDE_BITS + 1];                   /* of a code byte, by width */
    float offset_factor[TQ_WIDE_BITS + 1];            /* values: factor of the sum of weights */
    int32_t offset_levels[TQ_WIDE_BITS + 1];          /* keys: factor of the sum of the query */
    bool row_factor; /* values: sums of 1 and 2 bits have the factor of Reading::ROW_FACTOR */
};

/** Two value scales, both NaN, which no page has. Tokens of a unit with these are hidden. */
constexpr uint32_t NO_PAGE = 0xfeedfeed;

/** A copy of a part of a record into a stage. */
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
    int32_t packed_lo, packed_hi; /* packed indices seen */
    float wave;                   /* factor from sums over put_wave's results to scores */
    float variance; /* of the variance term, which makes a score s (x - variance s): s the key scale, x the product */
};

/** A row's part, base 2: sums of exp2(logit - max); rounded_sum = sum of value scale times weight, as rounded for the
 *  products. */
struct RowTotals {
    float max, sum, rounded_sum, unused;
};

constexpr int WAVE_STEP = 16; /* pairs of one tensor-core product */

/** The wave and the metric of keys, and the variance term; all 0 without. */
struct WaveArgs {
    int32_t pairs, metric; /* of the plan */
    int32_t steps;         /* pairs / WAVE_STEP, rounded up to an even number */
    int32_t at_table, at_polynomials, at_increments, at_rows, at_warps,
        warp_bytes; /* shared memory of kernels on pages, bytes: WaveSpace; at_rows: put_wave's results, if there */
    float2 *rows;   /* workspace: the same, [segments][tile_rows][16 steps] */
    float
        variance; /* of the variance term: its factor for a query of norm 1 and a key scale of 1, in base-2 logits; 0 without */
};

/** attend_fused; all 0 for other kernels. */
struct FusedArgs {
    int32_t warps;   /* of a block */
    int32_t teams;   /* of a block: as many as warps, or a quarter in attend_fused_many_rows */
    int32_t sharing; /* blocks that share a segment */
    int32_t cluster; /* the same number if they are a cluster, else 1: then merge_parts merges their parts */
    int32_t stride;  /* teams of a segment, or of a share: each has every stride-th unit */
    bool ragged;     /* a schedule says how many blocks share a segment, each with a piece of its units; sharing is 1 */
    int32_t run;     /* of the kernel's Variant */
    int32_t at_once; /* ragged: blocks that there is room for at once */
    int32_t exact_warps; /* of a block, the last ones, that share exact tokens for the same rows */
    int32_t team_bytes;  /* shared memory of a team: its stage, then its sums, packed and exact */
    int32_t rows, queries, spare, value_scale, totals, exact, slots,
        block; /* offsets in shared memory after the teams', in bytes */
};

/** The kernels' arguments, in constant memory. Segment s = ((sequence * kv_heads) + head) * row_tiles + tile. */
struct AttendArgs {
    tq_attend_params p; /* strides as they are; of ragged arrays those of `batch` are 0 */
    /* of the plan */
    float rotation_factor; /* head_dim^-1/2 */
    int32_t head_dim, groups, page_tokens,
        rotation;        /* groups: of 32 channels; with tiles of 16 each is two groups of the plan */
    int32_t plan_groups; /* the plan's own */
    bool fine;           /* groups of 16 channels */
    int64_t record_bytes;
    SideArgs key, value;
    CopyArgs copies[2][COPIES]; /* of a page's first and second unit */
    int32_t copy_bytes[2][2];   /* the same: key codes and all scales, value codes */
    HadamardSigns signs;
    LevelTables tables;
    /* the cut */
    int32_t capacity;                /* the most tokens of a sequence */
    int32_t unit_tokens, page_units; /* units of a page: 1 or 2 */
    bool last_is_short;              /* the last unit of a page has fewer tiles than the others, or than its kernel's */
    bool sees_all;                   /* units have one size, and only causality hides tokens */
    bool varies;                     /* what rows see follows from more arrays than lengths and starts */
    int32_t unpacked_sinks, unpacked_window; /* positions before and behind the packed ones: tq_unpacked_sinks */
    int32_t recent;               /* exact positions up to its own that a row sees, sinks apart; FAR_BACK: all */
    const uint8_t *absent_record; /* read where an entry of a block table names no page: NO_PAGE everywhere */
    uint32_t page_limit;          /* pages that an entry of a block table can name */
    uint32_t page_bytes;          /* stride of pages */
    Divisor by_heads_per_kv, by_slots,
        by_page; /* divisions by query heads per KV head, slots of a ring, tokens of a page */
    int32_t heads_per_kv, rows, tile_rows, row_tiles, team_warps, teams, stages, stage_bytes;
    int32_t exact_parts, exact_tokens;  /* parts of each KV head (attend_fused: 1 if any), tokens of a part */
    int32_t prepare_rows, combine_rows; /* rows of a block; they divide tile_rows */
    int32_t team_rows;                  /* attend_many_rows, attend_fused_many_rows: rows of a team; 0 otherwise */
    int32_t at_teams; /* offset in shared memory: memory of warps and teams beside the stages (not in attend_fused) */
    int32_t at_barriers; /* the same for barriers */
    FusedArgs fused;
    WaveArgs wave;
    const int4 *schedule;                 /* schedule.cu; NULL: there is none, or the kernel has no line */
    int32_t schedule_key, schedule_teams; /* key of a schedule that fits; teams of all blocks */
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
