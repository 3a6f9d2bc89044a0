/* The constants that a kernel is compiled for: template arguments of loop/, split/ and fused/. */
#ifndef TQ_CUDA_ATTEND_VARIANT_H
#define TQ_CUDA_ATTEND_VARIANT_H
#include "cuda/attend/params.h"

namespace tq
{

constexpr int BETWEEN_BYTES = 128; /* shared memory of a warp for Between (split/kernel.cuh) */

/** Returns how many threads a multiprocessor has registers for, with equally many warps in each of its four parts. */
constexpr int most_threads(int registers) { return 65536 / registers / 128 * 128; }

constexpr int BY_GROUP = 0, BY_SIDE = -1; /* in place of a bit width: the kernel looks it up */
constexpr int MOST_BY_SIDE = 5;           /* for sides of more bits BY_GROUP is faster: measured.md */

/** One compiled kernel. BITS: the bit width of all groups of keys and values. BY_SIDE: keys have one width and values
 *  another; the kernel has code for every width, and looks both up for each unit. BY_GROUP: any plan; the kernel looks
 *  the width up for each group of a unit. FINE: tiles of 16 channels, not of 32. RUN: neighbouring units that a warp
 *  processes one after the other: 2 for the halves of a page, whose wave terms it computes together. */
template <int BITS_, int GROUPS_, int ROW_QUADS_, int TILES_, bool BULK_, bool FINE_ = false, bool WAVE_ = true,
          int RUN_ = 1>
struct Variant {
    static constexpr int BITS = BITS_;
    static constexpr int GROUPS = GROUPS_;       /* of 32 channels; BY_GROUP: the most that a plan may have */
    static constexpr int ROW_QUADS = ROW_QUADS_; /* a warp's rows / 4 */
    static constexpr int ROWS = 4 * ROW_QUADS, TEAM_WARPS = 1;
    static constexpr int TILES = TILES_; /* token tiles of a unit: more for throughput, fewer for latency */
    static constexpr int RUN = RUN_;
    static constexpr bool RAGGED = false; /* attend_fused: a schedule says which units a block has */
    static constexpr bool BULK = BULK_, FINE = FINE_;
    static constexpr bool WAVE = WAVE_;    /* whether it also takes plans with a wave or a metric (rows/wave.cuh) */
    static constexpr bool VARIANCE = WAVE; /* the same for the variance term, which costs a multiply-add per score */
    static constexpr bool ONE_WIDTH = BITS != BY_GROUP;           /* all groups of a side have one width */
    static constexpr bool TWO_PRODUCTS = !FINE && ROW_QUADS == 1; /* for 4 and 5 bits (tile/fragments.cuh) */
    static constexpr bool MULTIPLY = ONE_WIDTH && ROW_QUADS == 1; /* shifts right by products */
    /* Whether the bytes of a side of SIDE bits (BY_GROUP: of any) are levels plus an offset, from which the sums of key
     * products start. Codes of Reading::ROW_FACTOR have an offset that is added after the product. */
    template <int SIDE> static constexpr bool HAS_OFFSET = !ONE_WIDTH || SIDE > 5 || (SIDE > 3 && !TWO_PRODUCTS);
    template <int SIDE> static constexpr bool HAS_ROW_FACTOR = ONE_WIDTH && SIDE <= 2;
    /* whether value codes have an offset, so that the sum of the weights is needed beside the sum of weighted codes */
    template <int SIDE> static constexpr bool NEEDS_WEIGHT_SUMS = HAS_OFFSET<SIDE> || HAS_ROW_FACTOR<SIDE>;
    /* Where a warp reads its queries. Neither: from global memory, with wide heads and on devices without bulk copies,
     * because there shared memory limits the number of warps. */
    static constexpr bool QUERY_IN_REGISTERS = ONE_WIDTH && ROW_QUADS == 1 && GROUPS <= 4;
    static constexpr bool QUERY_IN_SHARED = !QUERY_IN_REGISTERS && GROUPS <= 4 && BULK;
    /* Limits registers so that 12 warps (8 with 255 registers) and, where possible, one block of prepare fit on a
     * multiprocessor. 16 warps, for which 128 registers would leave room, are slower (measured.md). */
    static constexpr int MAX_REGISTERS = GROUPS > 8       ? 255
                                         : GROUPS > 4     ? (ROW_QUADS == 1 ? 168 : 255)
                                         : ROW_QUADS == 1 ? (TILES == 4 ? 144 : 128)
                                         : ROW_QUADS == 2 ? (TILES == 4 ? 168 : 144)
                                                          : 255;
    static constexpr int MAX_THREADS = MAX_REGISTERS > 168 ? 256 : 384;
    /* The same for attend_fused: 96, 128, 168 or 255 registers for 20, 16, 12 or 8 warps on a multiprocessor. Kernels
     * for any widths and whole pages run in several blocks there, faster with 16 warps than with 12 (measured.md). */
    static constexpr int FUSED_REGISTERS = ROW_QUADS > 2       ? 255
                                           : ROW_QUADS == 2    ? 168
                                           : GROUPS > 2        ? (TILES > 2 && ONE_WIDTH ? 168 : 128)
                                           : TILES > 2 && WAVE ? 128
                                                               : 96;
    /* shared memory of a warp beside the stages of its team */
    static constexpr int WARP_BYTES = BETWEEN_BYTES + (QUERY_IN_SHARED ? ROW_QUADS * GROUPS * 256 : 0);
};

/** A kernel of attend_fused for sequences of any lengths. Its code would slow kernels for equal ones (measured.md). */
template <class V> struct Ragged : V {
    static constexpr bool RAGGED = true;
    /* Without a wave 16 warps of whole pages on a multiprocessor are faster than 12 (measured.md). */
    static constexpr int FUSED_REGISTERS = V::ROW_QUADS == 1 && !V::WAVE ? 128 : V::FUSED_REGISTERS;
};

/* ---- for loop/team.cuh ---- */

constexpr int ROW_SCALES_BYTES = 32;

template <int BITS_, int ROWS_, bool WAVE_ = true> struct ManyRows {
    static constexpr int BITS = BITS_;       /* a width, or BY_GROUP */
    static constexpr int ROWS = ROWS_;       /* of a team, and of a tile of rows */
    static constexpr int COLUMNS = ROWS / 4; /* rows of a lane: 4 c + t */
    static constexpr int GROUPS = 4, TILES = 4;
    /* halves of a token tile whose scores are computed together, as registers allow */
    static constexpr int HALVES = ROWS == 16 ? 2 : 1;
    static constexpr int TEAM_WARPS = TEAM_OF_MANY_ROWS, RUN = 1;
    static constexpr bool RAGGED = false;
    static constexpr bool BULK = true, ONE_WIDTH = BITS != BY_GROUP, WAVE = WAVE_, VARIANCE = true;
    /* As in Variant, for keys. With 32 rows two products are slower than one (measured.md). */
    static constexpr bool TWO_PRODUCTS = ROWS == 16;
    static constexpr Reading KEY_READING = ONE_WIDTH ? Reading::ROW_FACTOR : Reading::SCALED;
    /* Batches of products that may still run while the next one is unpacked. A running batch reads operand A from
     * registers: unrolled code gives the next batch other registers, a loop would not. */
    static constexpr int BATCHES_LEFT = ONE_WIDTH ? 1 : 0;
    /* For 16 warps on a multiprocessor, or 12 with 32 rows and one width, where more gain nothing (measured.md). */
    static constexpr int MAX_REGISTERS = ROWS == 16 || !ONE_WIDTH ? 128 : 168,
                         MAX_THREADS = most_threads(MAX_REGISTERS);
    /* Shared memory of a team: two buffers of weights, which pages use in turn; four numbers for each row; RowScales,
     * which would take too many registers; in attend_many_rows also queries and each warp's Between. Steps of weights
     * are 16 bytes further apart than necessary, so that a warp's stores go to different banks. */
    static constexpr int WEIGHT_STEP = STEP_BYTES<ROWS> + 16, WEIGHT_BYTES = 8 * WEIGHT_STEP; /* 16 tokens; a page */
    static constexpr int QUERY_STEP = STEP_BYTES<2 * ROWS>, QUERY_BYTES = GROUPS * QUERY_STEP;
    static constexpr int AT_NUMBERS = 2 * WEIGHT_BYTES, AT_SCALES = AT_NUMBERS + 4 * ROWS * 4,
                         SHARING_BYTES = AT_SCALES + ROWS * ROW_SCALES_BYTES, AT_QUERIES = SHARING_BYTES,
                         AT_BETWEEN = AT_QUERIES + QUERY_BYTES, TEAM_BYTES = AT_BETWEEN + TEAM_WARPS * BETWEEN_BYTES;
};

} // namespace tq
#endif
