/* Sizes that the host and the kernels of CHUNK share. */
#ifndef TQ_CUDA_ATTEND_CHUNK_SIZES_H
#define TQ_CUDA_ATTEND_CHUNK_SIZES_H
#include <stddef.h>

#include "cuda/device/host.h"

namespace tq
{
namespace chunk
{

constexpr int PAGE = TQ_PAGE_TOKENS;
constexpr int TEAM_ROWS = 64;  /* rows of four warps that multiply */
constexpr int MOST_GROUPS = 4; /* of 32 channels */
constexpr int MOST_BITS = 5;   /* of a group */

/* ---- the wave (wave.cuh) ---- */
constexpr int MOST_PAIRS = TQ_TILE * MOST_GROUPS / 2;
constexpr int STEP_PAIRS = 8; /* of a step of a product, 16 rows: cosines and sines */
constexpr int MOST_STEPS = MOST_PAIRS / STEP_PAIRS;
constexpr size_t MOST_WAVE_BYTES = 128 << 20; /* rows of pages, with as many steps as there could be */

/** 16-byte words, and bytes, that a step of a page has. */
__host__ __device__ constexpr int wave_step_words(int groups) { return groups * 32 * 2; }
__host__ __device__ constexpr int wave_step_bytes(int groups) { return 16 * wave_step_words(groups); }
/** Steps of a page where all pairs are fast. */
__host__ __device__ constexpr int most_wave_steps(int pairs) { return pairs / STEP_PAIRS + 1; }

/** Of the rows of all pages that may be there. */
inline size_t wave_bytes(const tq_plan &plan, const tq_layer &layer)
{
    if (!plan.wave_pairs) return 0;
    const size_t sets = layer.position_offset ? layer.batch : 1;
    return sets * layer.max_pages * layer.kv_heads * most_wave_steps(plan.wave_pairs) * wave_step_bytes(plan.groups);
}

} // namespace chunk
} // namespace tq
#endif
