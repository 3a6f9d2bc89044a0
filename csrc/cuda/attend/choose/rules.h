/* What the cuts depend on: thresholds, and facts about a GPU. */
#ifndef TQ_CUDA_ATTEND_CHOOSE_RULES_H
#define TQ_CUDA_ATTEND_CHOOSE_RULES_H
#include "cuda/device/host.h"

namespace tq
{

/** Thresholds of the cuts, for every GPU, as measured on an H200. */
struct Rules {
    /* SPLIT */
    int whole_from = 3; /* with at least so many pages per multiprocessor, units are whole pages */
    /* FUSED */
    int clusters_of_11 = 10; /* of 11 multiprocessors, so many can be in clusters of four or eight */
    int busy_warps = 12;     /* the most warps of a block, if they have many units */
    /* with a wave, above so many pages of a warp, or units of half pages, all schedulers have equally many warps */
    int long_wave_pages = 8, long_wave_units = 2;
    int ragged_two = 400; /* any lengths: up to so many segments per 100 multiprocessors, two large blocks share one */
    /* CHUNK */
    int chunk_rows = 32; /* takes more rows than these; with fewer, at least half of a tile of rows would be empty */
};
constexpr Rules RULES = {};

/** A device, as far as the choice depends on it. */
struct Device : DeviceFacts {
    bool bulk;          /* bulk copies: 9.x, kernels compiled for it, and a TURBOQUANT_CUDA_PATH that allows them */
    bool never_fused;   /* TURBOQUANT_CUDA_PATH=hopper-line, for tests */
    int large_clusters; /* clusters of LARGE_CLUSTER blocks that can run at once */
    bool always_chunk;  /* TURBOQUANT_CUDA_PATH=hopper-chunk, for measurements: CHUNK for all calls that it can take */
    int wanted; /* TURBOQUANT_CUDA_PATH=hopper-N, for tests and measurements: the offer to take; -1: the cheapest */
};

} // namespace tq
#endif
