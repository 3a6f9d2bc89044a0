/* Attention over packed pages on CUDA: what all its kernels and the host share. In general three kernels, one behind the other:
 *
 *   prepare   rotates the queries and rounds them to tensor-core operands; attends to the exact tokens
 *   pages     attends to the packed pages; starts on the pages while prepare still runs
 *   combine   merges the parts that the other two left in the workspace, un-rotates, writes
 *
 * On Hopper, where sequences are about equally long or short, one kernel does all of that in shared memory: attend_fused, which takes up to
 * 128 rows.
 *
 * How the work on pages is cut:
 *   row       (query token, query head) that reads one KV head: row = token * group + head. Row r of a tile of rows is column pair
 *             (2 (r % 4), 2 (r % 4) + 1) of block r / 4 of the tensor-core products: its high and its low 8 bits.
 *   unit      half a page or a page: two or four token tiles (fewer where a page has no more)
 *   segment   (sequence, KV head, tile of rows): the units that some of its rows see
 * In the three kernels all units of all segments stand in one line, cut into as many equal pieces as there are teams of warps: equal
 * work whatever the lengths are, all of it found from the lengths on the device. A team works through its piece alone, through a ring
 * of stages in shared memory of its own, each warp of it with its own rows, and leaves a part in the workspace for each segment it
 * meets. Mostly a team is one warp; where there are many rows, several share the pages.
 *
 *   query.cuh, exact.cuh   the two halves of prepare        output.cuh     sums to results
 *   schedule.cuh           who does which units             wave.cuh       what the wave of keys adds to scores
 *   ../README.md           which kernel runs, and where it is */
#ifndef TQ_CUDA_ATTEND_PARAMS_H
#define TQ_CUDA_ATTEND_PARAMS_H
#include "cuda/tile/levels.h"

namespace tq
{

constexpr int GROUPS_MAX = TQ_MAX_HEAD_DIM / TQ_FINE_GROUP;
constexpr int FUSED_ROWS = 128;      /* of a KV head at most that attend_fused takes */
constexpr int LARGE_CLUSTER = 16;    /* blocks that share a segment of attend_fused where segments are few */
constexpr int FUSED_WARPS = 16;      /* of a block of attend_fused at most: two parts of each for the lanes of one */
constexpr int TEAM_OF_MANY_ROWS = 4; /* of a team of attend_many_rows */
/** Sets of rows of a tile for which warps of attend_fused_many_rows take exact tokens: of 8 each; 1 in attend_fused, where team_rows is 0. */
constexpr int exact_sets(int team_rows) { return team_rows ? team_rows / 8 : 1; }
constexpr int FUSED_BLOCK_BYTES = 64; /* what a block of attend_fused knows of its segment */
constexpr int END_ROWS = 16;          /* of a block of prepare or combine at most */
constexpr int QUERY_BASE = 254;       /* a query number is hi * 254 + lo, both in -127..127 */
constexpr int QUERY_LIMIT = 127 * QUERY_BASE + QUERY_BASE / 2 - 1; /* the largest whose hi rounds to 127 */
constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.69314718055994531f;

struct SideArgs {
    int32_t bits[GROUPS_MAX], offset[GROUPS_MAX];
    uint32_t width[GROUPS_MAX];                      /* 1 << bits: with_width */
    int32_t tile_bytes, codes_offset, scales_offset; /* tile_bytes: of 32 tokens */
    int32_t at_codes, at_scales;                     /* of this side in a stage */
    float factor[TQ_WIDE_BITS + 1];                  /* of a code byte, by width */
    float offset_factor[TQ_WIDE_BITS + 1];           /* values: of the sum of weights */
    int32_t offset_levels[TQ_WIDE_BITS + 1];         /* keys: of the sum of the query */
    bool row_factor; /* values: sums of 1 and 2 bits have the factor of Reading::ROW_FACTOR */
};

/** A piece of a record on its way into a stage. */
struct CopyArgs {
    int32_t from, to, bytes, unused;
};

/** What fills a stage: first key codes and all scales, for one barrier, then value codes, for another. */
enum Copies { COPY_KEYS, COPY_SCALES, COPY_VALUES, COPIES };

/** The pieces that hold a segment's units, for combine. Piece p's part of segment s is in slot p + s: along the line one of the two
 *  grows from part to part, so that no two share a slot. */
struct SegmentParts {
    int32_t first, last;
};

/** What the multiplying warps know of a row. */
struct RowArgs {
    float scale, bias;            /* base-2 logit = scale * (integer product * key scale) + bias; scale > 0 */
    int32_t offset_hi, offset_lo; /* what the codes' offset adds to the integer products */
    int32_t packed_lo, packed_hi; /* packed indices seen */
    float wave;                   /* a sum of what put_wave left, as a score */
    int32_t unused;
};

/** A row's part, base 2: the sums are of exp2(logit - max); rounded_sum = sum of value scale times weight as the products saw them. */
struct RowTotals {
    float max, sum, rounded_sum, unused;
};

constexpr int WAVE_STEP = 16; /* pairs that products take at once */

/** The wave and the metric of keys; all 0 without. */
struct WaveArgs {
    int32_t pairs, metric, numbers; /* of the plan; numbers: of a head in tq_transform.moments */
    int32_t steps;                  /* pairs / WAVE_STEP, rounded up to an even number */
    int32_t at_table, at_polynomials, at_increments, at_rows, at_warps,
        warp_bytes; /* shared memory of kernels on pages, in bytes: WaveSpace; at_rows: what put_wave leaves, if it is there */
    float2 *rows; /* workspace: the same, [segments][tile_rows][16 steps] */
};

/** attend_fused; all 0 for other kernels. */
struct FusedArgs {
    int32_t warps;   /* of a block */
    int32_t teams;   /* of a block: as many, or in attend_fused_many_rows a quarter */
    int32_t sharing; /* blocks that share a segment */
    int32_t cluster; /* as many, if they are a cluster; otherwise 1: then several leave their parts for merge_parts */
    int32_t stride;  /* teams of a segment: each takes every stride-th unit */
    int32_t exact_warps; /* of a block that share exact tokens for the same rows */
    int32_t team_bytes;  /* shared memory of a team: its stage, then its sums */
    int32_t rows, queries, spare, value_scale, totals, exact, slots,
        block; /* where things are behind those, in bytes */
};

/** Everything a block knows when it starts; in constant memory. Segment s = ((sequence * kv_heads) + head) * row_tiles + tile. */
struct AttendArgs {
    tq_attend_params p;
    /* of the plan */
    float rotation_factor; /* head_dim^-1/2 */
    int32_t head_dim, groups, page_tokens,
        rotation;        /* groups: of 32 channels; tiles of 16 have two of their own in each */
    int32_t plan_groups; /* the plan's own */
    bool fine;           /* groups of 16 channels */
    int64_t record_bytes;
    SideArgs key, value;
    CopyArgs copies[2][COPIES]; /* of a page's first and second unit */
    int32_t copy_bytes[2][2];   /* the same: key codes and all scales, value codes */
    HadamardSigns signs;
    LevelTables tables;
    /* the cut */
    int32_t capacity;                /* a sequence's tokens at most */
    int32_t unit_tokens, page_units; /* units of a page: 1 or 2 */
    bool last_is_short;              /* the last unit of a page has fewer tiles than the others, or than its kernel's */
    bool sees_all;                   /* units are of one size, and nothing but causality hides tokens */
    uint32_t page_limit;             /* pages that an entry of a block table can name */
    uint32_t page_bytes;             /* from one to the next */
    Divisor by_group, by_window; /* query heads of a KV head, slots of a ring: what rows and positions are divided by */
    int32_t group, rows, tile_rows, row_tiles, team_warps, teams, stages, stage_bytes;
    int32_t exact_parts, exact_tokens;  /* parts of each KV head (attend_fused: 1 if any), tokens of a part */
    int32_t prepare_rows, combine_rows; /* rows that a block takes of a tile; they divide tile_rows */
    int32_t team_rows;                  /* attend_many_rows, attend_fused_many_rows: rows of a team; 0 otherwise */
    int32_t at_teams; /* shared memory, in bytes: what warps and teams have beside the stages (not in attend_fused) */
    int32_t at_barriers; /* the same: barriers */
    FusedArgs fused;
    WaveArgs wave;
    const int4 *schedule;                 /* schedule.cu; NULL: there is none, or the kernel has no line */
    int32_t schedule_key, schedule_teams; /* what a schedule must be made for; teams of all blocks */
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

/** What attend_fused passes on of a row, in floats: {max, sum, sum of packed tokens, rounded_sum} as of RowTotals, packed sums, which are
 *  rotated, and exact sums. */
__host__ __device__ inline int part_floats(const AttendArgs &a) { return 4 + 2 * TQ_TILE * a.groups; }

} // namespace tq
#endif
