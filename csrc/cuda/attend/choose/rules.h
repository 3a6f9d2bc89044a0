/* What the choice of a kernel depends on: thresholds, and facts about a GPU. */
#ifndef TQ_CUDA_ATTEND_CHOOSE_RULES_H
#define TQ_CUDA_ATTEND_CHOOSE_RULES_H
#include "cuda/device/host.h"

namespace tq
{

/** Thresholds of the choice, for every GPU, as measured on an H200. A half page is 64 tokens of one (sequence, KV head).
 *  Half pages of a warp are those that it processes one after the other. */
struct Rules {
    /* SPLIT */
    int whole_from = 3; /* with at least so many pages per multiprocessor, units are whole pages */
    /* FUSED */
    int clusters_of_11 = 10;  /* of 11 multiprocessors, so many can be in clusters of four or eight */
    int busy_warps = 12;      /* the most warps of a block, if they have many units */
    int busy_of_20 = 17;      /* of 20 places for blocks, at least so many must be taken on average (keeps_busy) */
    int most_8_rows = 24;     /* the most half pages of a warp: any widths, 8 rows, units of half pages */
    int most_any_4_rows = 32; /* likewise: any widths, 4 rows, more than two blocks per multiprocessor */
    int most_any_8_rows = 24; /* likewise: any widths, 8 or 16 rows, several blocks per multiprocessor */
    int long_wave_pages = 8;  /* above so many pages of a warp, with a wave, all schedulers have equally many warps */
    /* the most half pages of a warp for which fewer blocks at once are tried, with exact tokens */
    int most_in_turns = 32;
    /* sequences of any lengths; in segments per 100 multiprocessors */
    int ragged_many = 300; /* from so many on, all without a wave run here, with or without exact tokens */
    int ragged_few = 50;   /* above so many, 8 rows of 2 bits with a wave and no exact tokens run in SPLIT */
    int ragged_two = 400;  /* up to so many have two large blocks per multiprocessor, more have small ones */
    int half_cost = 10, merge_cost = 10; /* time of half a page for a warp, and of merge_parts, in any unit */
    int page_cost[2] = {15, 18};         /* time of a page: head_dim up to 64, above */
    /* CHUNK */
    int chunk_rows = 32;                                /* runs with more rows, unless FUSED_MANY_ROWS would */
    int chunk_fused_rows = 64, chunk_fused_pages = 128; /* instead of that, with more rows and at least so many pages */
    /* FUSED_MANY_ROWS */
    int most_turns = 3;              /* the most blocks of a multiprocessor, one after the other */
    int most_pages_any_16_rows = 16; /* the most pages of a team: any widths, tiles of 16 rows */
    /* pages that 32 rows cost more than 16 outside the loop: any widths, 2 bits, 3 and 4 */
    int longer_32_rows[3] = {0, 4, 2};
};
constexpr Rules RULES = {};

/** A device, as far as the choice depends on it. */
struct Device : DeviceFacts {
    bool bulk;          /* bulk copies: 9.x, kernels compiled for it, and a TURBOQUANT_CUDA_PATH that allows them */
    bool never_fused;   /* TURBOQUANT_CUDA_PATH=hopper-line, for tests */
    int large_clusters; /* clusters of LARGE_CLUSTER blocks that can run at once */
};

} // namespace tq
#endif
