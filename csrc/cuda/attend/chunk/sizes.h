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
constexpr int TEAM_ROWS = 64;  /* rows of a consumer team (kernel.cuh) */
constexpr int MOST_GROUPS = 4; /* groups of 32 channels of a head */
constexpr int MOST_BITS = 5;   /* bit width of a group */

/* ---- the wave (wave.cuh) ---- */
constexpr int MOST_PAIRS = TQ_TILE * MOST_GROUPS / 2;
constexpr int STEP_PAIRS = 8; /* pairs in a k16 step of a product; each has two rows, for cosine and sine */
constexpr int MOST_STEPS = MOST_PAIRS / STEP_PAIRS;
constexpr size_t MOST_WAVE_BYTES = 128 << 20; /* the most that wave_bytes may be */

/** Return the size of one step of one page and KV head, in 16-byte words and in bytes. */
__host__ __device__ constexpr int wave_step_words(int groups) { return groups * 32 * 2; }
__host__ __device__ constexpr int wave_step_bytes(int groups) { return 16 * wave_step_words(groups); }
/** Returns the most steps that a page can have: those of the pairs, if all are fast, and one for nodes. */
__host__ __device__ constexpr int most_wave_steps(int pairs) { return pairs / STEP_PAIRS + 1; }

/** Returns an upper bound of the bytes that the wave's rows of all pages of a call take. */
inline size_t wave_bytes(const tq_plan &plan, const tq_layer &layer)
{
    if (!plan.wave_pairs) return 0;
    const size_t sets = layer.position_offset ? layer.batch : 1;
    return sets * layer.max_pages * layer.kv_heads * most_wave_steps(plan.wave_pairs) * wave_step_bytes(plan.groups);
}

} // namespace chunk
} // namespace tq
#endif
