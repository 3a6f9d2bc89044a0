/* Attention over packed pages on CUDA: what its files share. In general three kernels, one behind the other:
 *
 *   prepare   rotates the queries and rounds them to tensor-core operands; attends to the exact tokens
 *   pages     attends to the packed pages; starts on the pages while prepare still runs
 *   combine   merges the parts that the other two left in the workspace, un-rotates, writes
 *
 * On Hopper, where sequences are about equally long or short, one kernel does all of that in shared memory: attend_few, which takes up to
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
 *   attend_fragments  codes to tensor-core operands         attend_query, attend_exact   the halves of prepare
 *   attend_schedule   who does which units                  attend_ends                  prepare and combine
 *   attend_pages      the loop over units                   attend_kernel                pages
 *   attend_wide       the same for many rows, on Hopper     warpgroup                    its products
 *   attend_few        all of it in one, on Hopper           attend_few_wide              the same for many rows
 *   attend_output     sums to results, for both             attend_cut_few               who does which units there
 *   attend.cu         checks, choices, launches */
#ifndef TQ_CUDA_ATTEND_CUH
#define TQ_CUDA_ATTEND_CUH
#include "attend_fragments.cuh"
#include "launch.cuh"

namespace tq
{

constexpr int GROUPS_MAX = TQ_MAX_HEAD_DIM / TQ_FINE_GROUP;
constexpr int FEW_ROWS = 128;     /* of a KV head at most that attend_few takes */
constexpr int LARGE_CLUSTER = 16; /* blocks that share a segment of attend_few where segments are few */
constexpr int FEW_WARPS = 16;     /* of a block of attend_few at most: two parts of each for the lanes of one */
constexpr int BUSY_WARPS = 12;    /* the same where warps have many units: 16 took up to 5 % longer */
constexpr int WIDE_WARPS = 4;     /* of a team of attend_wide */
/** Sets of rows of a tile for which warps of attend_few_wide take exact tokens: of 8 each; 1 in attend_few, where wide_rows is 0. */
constexpr int exact_sets(int wide_rows) { return wide_rows ? wide_rows / 8 : 1; }
constexpr int FEW_BLOCK_BYTES = 64; /* what a block of attend_few knows of its segment */
constexpr int END_ROWS = 16;        /* of a block of prepare or combine at most */
constexpr int QUERY_BASE = 254;     /* a query number is hi * 254 + lo, both in -127..127 */
constexpr int QUERY_LIMIT = 127 * QUERY_BASE + QUERY_BASE / 2 - 1; /* the largest whose hi rounds to 127 */
constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.69314718055994531f;

/** Threads that a multiprocessor has registers for, in whole warps of each of its four parts. */
constexpr int most_threads(int registers) { return 65536 / registers / 128 * 128; }

/** One compiled kernel. KEY_BITS = VALUE_BITS = 0: any plan, the width of each group looked up as it goes; tiles of 16, or of 32. */
template <int KEY_BITS_, int VALUE_BITS_, int GROUPS_, int BLOCKS_, int TILES_, bool BULK_, bool FINE_ = false>
struct Variant {
    static constexpr int KEY_BITS = KEY_BITS_, VALUE_BITS = VALUE_BITS_;
    static constexpr int GROUPS = GROUPS_; /* of 32 channels; the most there may be, if the plan is any */
    static constexpr int BLOCKS = BLOCKS_; /* of four rows, in one warp */
    static constexpr int ROWS = 4 * BLOCKS, TEAM_WARPS = 1;
    static constexpr int TILES = TILES_; /* token tiles of a unit: more for throughput, fewer for latency */
    static constexpr bool BULK = BULK_, FINE = FINE_;
    static constexpr bool UNIFORM = KEY_BITS != 0;
    static constexpr Reading KEY_READING = UNIFORM ? Reading::ROW_FACTOR : Reading::SCALED;
    static constexpr bool TWO_PRODUCTS = !FINE && BLOCKS == 1; /* of 4 and 5 bits */
    static constexpr bool MULTIPLY = UNIFORM && BLOCKS == 1;   /* instead of right shifts */
    static constexpr bool KEY_ROW_FACTOR = UNIFORM && KEY_BITS <= 2;
    static constexpr bool KEY_OFFSETS =
        !UNIFORM || (KEY_BITS == 4 && !TWO_PRODUCTS); /* ROW_FACTOR codes: after the product */
    /* the sum of the weights is needed beside the sum of weighted codes; otherwise the codes have no offset */
    static constexpr bool WEIGHT_SUMS = !UNIFORM || VALUE_BITS <= 2 || (VALUE_BITS == 4 && !TWO_PRODUCTS);
    /* where a warp reads its queries; from global memory with wide heads and on devices that may have little shared memory, where that
     * is what limits the warps */
    static constexpr bool QUERY_IN_REGISTERS = UNIFORM && BLOCKS == 1 && GROUPS <= 4;
    static constexpr bool QUERY_IN_SHARED = !QUERY_IN_REGISTERS && GROUPS <= 4 && BULK;
    /* so many that 12 warps (8 with 255) fit a multiprocessor, if they can with room beside them for a block of prepare; 16, which 128
     * registers would let in, took 1 to 3 % longer (H200) */
    static constexpr int MAX_REGISTERS = FINE                         ? (BLOCKS == 1 ? 168 : 255)
                                         : BLOCKS == 1                ? (GROUPS > 4   ? 168
                                                                         : TILES == 4 ? 144
                                                                                      : 128)
                                         : BLOCKS == 2 && GROUPS <= 4 ? (TILES == 4 ? 168 : 144)
                                                                      : 255;
    static constexpr int MAX_THREADS = MAX_REGISTERS > 168 ? 256 : 384;
};

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
    int32_t unused[2];
};

/** A row's part, base 2: the sums are of exp2(logit - max); rounded_sum = sum of value scale times weight as the products saw them. */
struct RowTotals {
    float max, sum, rounded_sum, unused;
};

/** attend_few; all 0 for other kernels. */
struct FewArgs {
    int32_t warps;   /* of a block */
    int32_t teams;   /* of a block: as many, or in attend_few_wide a quarter */
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
    int32_t exact_parts, exact_tokens;  /* parts of each KV head (attend_few: 1 if any), tokens of a part */
    int32_t prepare_rows, combine_rows; /* rows that a block takes of a tile; they divide tile_rows */
    int32_t wide_rows;                  /* attend_wide, attend_few_wide: rows of a team; 0 otherwise */
    int32_t at_teams;    /* shared memory, in bytes: what warps and teams have beside the stages (not in attend_few) */
    int32_t at_barriers; /* the same: barriers */
    FewArgs few;
    int32_t pitch; /* floats from one row to the next in shared memory of prepare, combine and attend_few */
    /* workspace */
    SegmentParts *segments;
    RowArgs *row_args;       /* [segments][tile_rows] */
    uint2 *queries;          /* [segments][tile_rows / 4][groups][32 lanes]: B operands; attend_wide: QueryPlace */
    RowTotals *totals;       /* [slots][tile_rows] */
    float *sums;             /* [slots][tile_rows][32 groups]; attend_few: [blocks][rows][part_floats] */
    RowTotals *exact_totals; /* [batch][kv_heads][exact_parts][row_tiles * tile_rows] */
    float *exact_sums;       /* the same, [32 groups]: not rotated */
};

/** What attend_few passes on of a row, in floats: {max, sum, sum of packed tokens, rounded_sum} as of RowTotals, packed sums, which are
 *  rotated, and exact sums. */
__host__ __device__ inline int part_floats(const AttendArgs &a) { return 4 + 2 * TQ_TILE * a.groups; }

/** The plan's group that a channel is in. */
__device__ __forceinline__ int group_of(const AttendArgs &a, int channel)
{
    return channel / (a.fine ? TQ_FINE_GROUP : TQ_TILE); /* of constants: shifts */
}

extern __shared__ __align__(128) uint8_t shared_bytes[];

} // namespace tq
#endif
