/* The facts about a GPU that the choice of a kernel depends on. */
#ifndef TQ_CUDA_ATTEND_CHOOSE_RULES_H
#define TQ_CUDA_ATTEND_CHOOSE_RULES_H
#include "cuda/device/host.h"

namespace tq
{

/** Thresholds of the choice, as measured on one kind of GPU. A half page is 64 tokens of one (sequence, KV head). Half
 *  pages of a warp are those that it processes one after the other. */
struct Rules {
    const char *gpu;
    /* SPLIT */
    int whole_from; /* with at least so many pages per multiprocessor, units are whole pages */
    /* FUSED */
    int clusters_of_11;  /* of 11 multiprocessors, so many can be in clusters of four or eight */
    int busy_warps;      /* the most warps of a block, if they have many units */
    int busy_of_20;      /* of 20 places for blocks, at least so many must be taken on average (keeps_busy) */
    int most_8_rows;     /* the most half pages of a warp: any widths, 8 rows, units of half pages */
    int most_any_4_rows; /* likewise: any widths, 4 rows, more than two blocks per multiprocessor */
    int most_any_8_rows; /* likewise: any widths, 8 or 16 rows, several blocks per multiprocessor */
    int long_wave_pages; /* above so many pages of a warp, with a wave, all schedulers have equally many warps */
    int most_in_turns;   /* the most half pages of a warp for which fewer blocks at once are tried, with exact tokens */
    /* sequences of any lengths; in segments per 100 multiprocessors */
    int ragged_many; /* without a wave, from so many on they run here even without exact tokens and not all at once */
    int ragged_few;  /* above so many, 8 rows of 2 bits with a wave and no exact tokens run in SPLIT */
    int ragged_two;  /* up to so many have two large blocks per multiprocessor, more have small ones */
    int half_cost, merge_cost; /* time of half a page for a warp, and of merge_parts, in any unit */
    int page_cost[2];          /* time of a page: head_dim up to 64, above */
    /* CHUNK */
    int chunk_rows;                          /* runs with more rows, unless FUSED_MANY_ROWS would */
    int chunk_fused_rows, chunk_fused_pages; /* instead of that, with more rows and at least so many pages */
    /* FUSED_MANY_ROWS */
    int most_turns;             /* the most blocks of a multiprocessor, one after the other */
    int most_pages_any_16_rows; /* the most pages of a team: any widths, tiles of 16 rows */
    int longer_32_rows[3];      /* pages that 32 rows cost more than 16 outside the loop: any widths, 2 bits, 3 and 4 */
};

/** A device, as far as the choice depends on it. */
struct Device : DeviceFacts {
    bool bulk;          /* bulk copies: 9.x, kernels compiled for it, and a TURBOQUANT_CUDA_PATH that allows them */
    bool never_fused;   /* TURBOQUANT_CUDA_PATH=hopper-line, for tests */
    int large_clusters; /* clusters of LARGE_CLUSTER blocks that can run at once */
    const Rules *rules;
};

/** Returns the rules for a device: always those of an H200, the only one that was measured. */
const Rules &rules_of(const DeviceFacts &device);

} // namespace tq
#endif
