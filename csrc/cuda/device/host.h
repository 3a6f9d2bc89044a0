/* Definitions that need no CUDA compiler: the choice of kernels is tested without CUDA
 * (tests/cuda/dispatch_table.cpp). */
#ifndef TQ_CUDA_DEVICE_HOST_H
#define TQ_CUDA_DEVICE_HOST_H
#include <stddef.h>
#include <stdint.h>

#include "turboquant_cuda.h"

#if !defined(__CUDACC__)
#define __host__
#define __device__
#define __forceinline__ inline
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
#endif

namespace tq
{

constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.69314718055994531f;

/** Fills *error (may be NULL) and returns status, so that a check is one line. */
inline tq_status fail(tq_error *error, tq_status status, const char *argument, int64_t index, double got,
                      const char *wants)
{
    if (error) *error = tq_error{status, argument, wants, index, got};
    return status;
}

#define TQ_CUDA_TRY(call)                                                                                              \
    do {                                                                                                               \
        tq_status try_status = (call);                                                                                 \
        if (try_status != TQ_OK) return try_status;                                                                    \
    } while (0)

/** Properties of the current device, from the runtime. */
struct DeviceFacts {
    int id, major, processors, shared_bytes_per_processor, shared_bytes_per_block;
};

constexpr int PORTABLE_CLUSTER = 8; /* the most blocks of a cluster on every GPU with clusters */

/** The most groups of a plan: of 32 channels, or of 16 channels up to head_dim 256 (TQ_MAX_SPHERE_DIM). */
constexpr int PLAN_GROUPS = TQ_CUDA_MAX_HEAD_DIM / TQ_TILE;
static_assert(PLAN_GROUPS == TQ_MAX_SPHERE_DIM / TQ_FINE_GROUP);

/** tq_plan.signs. There is one pass over all channels if head_dim is a power of two, else two of at most 256 each. */
struct HadamardSigns {
    static constexpr int SECOND = TQ_CUDA_MAX_HEAD_DIM / 64; /* index of the first word of a second pass */
    uint32_t word[2][SECOND];                                /* by pass; a single pass may take both rows */

    __host__ __device__ const uint32_t *pass(int i) const { return &word[0][0] + SECOND * i; }
};

inline HadamardSigns signs_of(const tq_plan &plan)
{
    const bool one_pass = (plan.head_dim & (plan.head_dim - 1)) == 0;
    HadamardSigns signs;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < HadamardSigns::SECOND; i++)
            signs.word[pass][i] = one_pass ? plan.signs[0][HadamardSigns::SECOND * pass + i] : plan.signs[pass][i];
    return signs;
}

/** Divides 0 <= n < 2^31 by a product and a shift (Granlund and Montgomery 1994). */
struct Divisor {
    uint32_t divisor, magic, shift;

    __device__ __forceinline__ uint32_t quotient(uint32_t n) const { return (uint32_t)((uint64_t)n * magic >> shift); }
    __device__ __forceinline__ uint32_t remainder(uint32_t n) const { return n - quotient(n) * divisor; }
};

/** Returns the Divisor for 0 < divisor < 2^31. 0 counts as 1: nothing is divided by it. */
inline Divisor divisor_of(int64_t divisor)
{
    const uint32_t d = divisor > 0 ? (uint32_t)divisor : 1;
    uint32_t log = 0;
    while ((1u << log) < d) log++;
    return {d, (uint32_t)(((uint64_t)1 << (31 + log)) / d + 1), 31 + log};
}

/* ---- warpgroup.cuh ---- */

/* Operand B (k x N) of a product in shared memory, where k takes 32 bytes. It consists of core matrices of 8 columns x
 * 16 bytes, column after column. Neighbours are 128 bytes apart along the columns, and 128 * N / 8 bytes along k. */
constexpr int PIECE_BYTES = 128;
template <int N> constexpr int STEP_BYTES = 2 * (N / 8) * PIECE_BYTES; /* bytes of one B */

} // namespace tq
#endif
