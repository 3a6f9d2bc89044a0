/* Tables of levels that the host passes to kernels, and the readings of codes that fragments.cuh explains. */
#ifndef TQ_CUDA_TILE_LEVELS_H
#define TQ_CUDA_TILE_LEVELS_H
#include "cuda/device/host.h"

namespace tq
{

enum class Reading { ROW_FACTOR, SCALED, OFFSET };

/** Codebook levels as prmt look-up tables: byte m of words 0, 1 is for selector m. */
struct LevelTables {
    uint32_t level3[2];  /* by code */
    uint32_t offset3[2]; /* 128 + level */
    uint32_t plus4[2];   /* magnitude + 1 */
    uint32_t minus4[2];  /* -magnitude, by the complement of the selector */
    uint32_t magnitude4[2];
    /* Magnitudes of codes 0..7, then 15..8, by the complement of the selector. change6: of m and m + 16, XORed. */
    uint32_t magnitude5[4], magnitude6[4], change6[4];
    /* Constants that the compiler must not know: it would turn products into shifts, and take immediate operands that
     * masks need. right: 2^16, then 2^31, 2^30 .. 2^25, the factors for right shifts by 16, 1, 2 .. 7. magic: MAGIC.
     * two: 2. ones: all bits. */
    uint32_t right[8], magic, two, ones;
};

/** 1024 in both fp16 halves: adding a small integer to a half's bits adds it to the number. */
constexpr uint32_t MAGIC = 0x64006400;

/** Whether codes have a magnitude and a sign. */
__host__ __device__ constexpr bool has_sign(int bits) { return bits >= 4 && bits <= 6; }

/** The result of unpack_half_exactly for a level of 1 at 4 to 6 bits: minus the smallest positive fp16 number. */
constexpr float LEVEL_UNIT = -0x1p-24f;

} // namespace tq
#endif
