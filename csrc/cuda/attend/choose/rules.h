/* What the choice between kernels reads of a GPU. */
#ifndef TQ_CUDA_ATTEND_CHOOSE_RULES_H
#define TQ_CUDA_ATTEND_CHOOSE_RULES_H
#include "cuda/device/host.h"

namespace tq
{

/** Numbers that decide, as measured on one kind of GPU. A half page is 64 tokens of one (sequence, KV head); a warp's half pages are those
 *  that it has one after the other. */
struct Rules {
    const char *gpu;
    /* SPLIT */
    int whole_from; /* pages a multiprocessor from which units are whole pages */
    /* FUSED */
    int clusters_of_11;  /* multiprocessors of 11 that are in clusters of four or eight */
    int busy_warps;      /* of a block, where warps have many units */
    int busy_of_20;      /* blocks at work, on the average, of 20 that there is room for */
    int most_8_rows;     /* half pages of a warp: 8 rows, not 4 bits, by half pages */
    int most_any_4_rows; /* any widths, several blocks a multiprocessor (two: no limit) */
    int most_any_8_rows;
    int long_wave_pages; /* pages of a warp with a wave: with more, schedulers have equally many warps */
    int most_in_turns;   /* half pages of a warp: with exact tokens, and more blocks than there is room for at once */
    /* of any lengths; segments for 100 multiprocessors */
    int ragged_many; /* from so many on they run here without a wave, and any that are at work at once or have exact tokens */
    int ragged_few;            /* with a wave, up to so many run here whatever rows they have */
    int ragged_two;            /* up to so many have two large blocks a multiprocessor, more have small ones */
    int half_cost, merge_cost; /* what a warp takes for half a page, and what merge_parts takes; only ratios count */
    int page_cost[2];          /* for a page: head_dim up to 64, above */
    /* CHUNK */
    int chunk_rows;                          /* more rows than these, where FUSED_MANY_ROWS does not run */
    int chunk_fused_rows, chunk_fused_pages; /* instead of it, more rows than these with at least so many pages */
    /* FUSED_MANY_ROWS */
    int most_turns;             /* blocks of a multiprocessor, one after the other */
    int most_pages_any_16_rows; /* of a team, any widths */
    int longer_32_rows
        [3]; /* pages that 32 rows are longer before and behind the loop than 16: any widths, 2 bits, 3 and 4 bits */
};

/** The current device, as far as the choice depends on it. */
struct Device : DeviceFacts {
    bool bulk;          /* 9.x with kernels compiled for it */
    bool never_fused;   /* for tests */
    int large_clusters; /* clusters of LARGE_CLUSTER blocks at work at once */
    const Rules *rules;
};

/** The rules for a device. All have those of an H200, the only one that was measured. */
const Rules &rules_of(const DeviceFacts &device);

} // namespace tq
#endif
