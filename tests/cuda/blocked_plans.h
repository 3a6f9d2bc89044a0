// Plans that are not plain for the CUDA harnesses, of any head_dim: what the presets ask for, and what they do not.
#ifndef TQ_TESTS_CUDA_BLOCKED_PLANS_H
#define TQ_TESTS_CUDA_BLOCKED_PLANS_H
#include "harness.h"

/** One side. bits: of each group, the last one repeated; none: no values. block: groups of a block; 0: one block. */
struct BlockedSide {
    std::vector<int> bits;
    int block = 0, rotation = TQ_ROTATION_HADAMARD, levels = TQ_LEVELS_CODEBOOK, sketch = TQ_SKETCH_NONE,
        sketch_part = 1; // rows of a Gaussian sketch: head_dim divided by that
};

struct BlockedPlan {
    std::string name;
    BlockedSide key, value;
    int law = TQ_CODEBOOK_NORMAL, scale = TQ_SCALE_EDEN;
};

inline std::vector<BlockedPlan> blocked_plans()
{
    const int none = TQ_ROTATION_NONE, hadamard = TQ_ROTATION_HADAMARD, dense = TQ_ROTATION_DENSE;
    const int codebook = TQ_LEVELS_CODEBOOK, affine = TQ_LEVELS_AFFINE, absmax = TQ_LEVELS_ABSMAX,
              table = TQ_LEVELS_TABLE;
    const int gaussian = TQ_SKETCH_GAUSSIAN, sign = TQ_SKETCH_SIGN;
    return {
        {"prod", {{3}, 0, hadamard, codebook, gaussian}, {{4}}, TQ_CODEBOOK_NORMAL, TQ_SCALE_NORM},
        {"prod of 1 bit", {{1}, 0, hadamard, codebook, gaussian}, {{2}, 0, hadamard, codebook, gaussian, 2}},
        {"blocks of 32", {{3}, 1}, {{2}, 1}, TQ_CODEBOOK_SPHERE, TQ_SCALE_LEAST_SQUARES},
        {"blocks of mixed groups", {{5, 2, 4}, 3}, {{1, 5, 3}, 2}, TQ_CODEBOOK_NORMAL, TQ_SCALE_EDEN},
        {"split", {{4, 2}, 1, dense}, {{3}, 0, dense}, TQ_CODEBOOK_NORMAL, TQ_SCALE_NORM_CORRECTED},
        {"affine, plain", {{4}, 2, none, affine}, {{8}, 2, none, affine}},
        {"affine, dense, qjl", {{3}, 2, dense, affine, gaussian}, {{3}, 2, dense, affine}},
        {"affine of 1 and 5 bits", {{1}, 3, hadamard, affine, sign}, {{5}, 0, none, affine, gaussian, 4}},
        {"q8_0 keys", {{8}, 1, none, absmax}, {{4}, 1, hadamard, absmax}},
        {"absmax, sign", {{2}, 1, hadamard, absmax, sign}, {{5}, 0, none, absmax, sign}},
        {"codebooks of 6 and 8 bits", {{6, 8, 3}, 1, hadamard, codebook}, {{8, 6}, 0, hadamard, codebook, sign}},
        {"a table of 6 bits", {{6}, 0, none, table}, {{6}, 0, none, affine}},
        {"8 bits, dense, qjl", {{8}, 0, dense, absmax, gaussian}, {{8}, 1, dense, absmax, gaussian}},
        {"uniform, quarter sketch",
         {{3}, 0, hadamard, codebook, gaussian, 4},
         {{5}},
         TQ_CODEBOOK_UNIFORM,
         TQ_SCALE_NORM},
        {"tables, sign", {{3}, 0, dense, table, sign}, {{3}, 0, none, table}},
        {"table, qjl", {{2}, 0, hadamard, table, gaussian, 2}, {{4}, 0, hadamard, table}},
    };
}

inline std::vector<int64_t> words_of(const BlockedPlan &plan, int dim, int page_tokens, int wave_pairs = 0,
                                     int metric = 0)
{
    const int groups = (dim + 31) / 32;
    std::vector<int64_t> words = {TQ_FORMAT_VERSION, dim, page_tokens, TQ_TILE, plan.law, plan.scale, 1234567 + dim};
    for (const BlockedSide *side : {&plan.key, &plan.value}) {
        const int rows = side->sketch == TQ_SKETCH_GAUSSIAN ? std::max(1, dim / side->sketch_part) : 0;
        const bool absent = side->bits.empty();
        for (int word : {side->rotation, side->levels, side->sketch, rows}) words.push_back(absent ? 0 : word);
    }
    words.insert(words.end(), {wave_pairs, metric, 0, 0});
    for (const BlockedSide *side : {&plan.key, &plan.value})
        for (int group = 0; group < groups; group++) {
            if (side->bits.empty()) {
                words.push_back(0);
                continue;
            }
            const bool begins = group == 0 || (side->block && group % side->block == 0);
            const size_t last = side->bits.size() - 1;
            words.push_back(side->bits[std::min<size_t>(group, last)] + (begins ? TQ_PLAN_NEW_BLOCK : 0));
        }
    return words;
}

#endif
