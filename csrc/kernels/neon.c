/* NEON of every 64-bit Arm: multiplies signed bytes by signed bytes to 16 bits, adds pairs (127 * 128 * 2 fits), then
 * adds pairs to 32 bits.
 *
 *   instruction     Cortex-A72     Neoverse N1
 *   tbl, 1 register 3cy @ v01      2cy @ v01
 *   and, orr        3cy @ v01      2cy @ v01
 *   ushr            3cy @ v1       2cy @ v1
 *   smull           4cy @ v0       4cy @ v0
 *   addp            3cy @ v01      2cy @ v01
 *   sadalp          4cy @ v1       4cy @ v1
 *
 * For a vector of 4-bit words (32 codes, one row), unpacking to bytes takes four operations, transposing two, and each
 * operand sixteen (24 if precise). */
#include "neon.h"

static inline uint8x16_t multiply_add(uint8x16_t sum, uint8x16_t level_s8x16, uint8x16_t x_s8x16)
{
    int8x16_t level = vreinterpretq_s8_u8(level_s8x16), x = vreinterpretq_s8_u8(x_s8x16);
    int16x8_t low = vmull_s8(vget_low_s8(level), vget_low_s8(x)), high = vmull_high_s8(level, x);
    return vreinterpretq_u8_s32(vpadalq_s16(vreinterpretq_s32_u8(sum), vpaddq_s16(low, high)));
}

#include "table.h"

TQ_TABLE(neon, vector);
