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
    uint32_t complement5[4]; /* 255 - magnitude; words 2, 3: of magnitudes 8..15 */
    uint32_t complement6[8]; /* the same for 6 bits, eight magnitudes per two words */
    /* Constants that the compiler must not know: it would turn products into shifts, and use immediates where masks
     * need them. right:
     * 2^31, 2^30, 2^29, 2^16, the factors for right shifts by 1, 2, 3, 16. magic: MAGIC. two: 2. ones: all bits. */
    uint32_t right[4], magic, two, ones;
};

/** 1024 in both fp16 halves: adding a small integer to a half's bits adds it to the number. */
constexpr uint32_t MAGIC = 0x64006400;

/** Whether the low four bits of codes are nibbles with a sign and three bits of a magnitude. */
__host__ __device__ constexpr bool has_sign_nibbles(int bits) { return bits >= 4 && bits <= 6; }

/** The result of unpack_half_exactly for a level of 1 at 4 to 6 bits: minus the least fp16 number. */
constexpr float LEVEL_UNIT = -0x1p-24f;

} // namespace tq
#endif
