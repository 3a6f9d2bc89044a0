/* NEON with the dot-product extension (Armv8.4, optional from 8.2: Neoverse N1, Apple M1, Cortex-A76 on): multiplies
 * signed bytes by signed bytes and adds four products to a 32-bit sum.
 *
 *   instruction     Neoverse N1     Neoverse V1    Apple M1
 *   tbl, 1 register 2cy @ v01       2cy @ v01      2cy @ v0123
 *   tbl, 2          2cy @ v01       2cy @ v01      4cy @ v0123, twice
 *   and, orr        2cy @ v01       2cy @ v0123    2cy @ v0123
 *   ushr            2cy @ v1        2cy @ v13      2cy @ v0123
 *   sdot            2cy @ v01       3cy @ v0123    3cy @ v0123
 *
 * For a vector of 4-bit words (32 codes, one row), unpacking to bytes takes four operations, transposing two, and each
 * operand four (six if precise). */
#include "neon.h"

static inline uint8x16_t multiply_add(uint8x16_t sum, uint8x16_t level_s8x16, uint8x16_t x_s8x16)
{
    return vreinterpretq_u8_s32(
        vdotq_s32(vreinterpretq_s32_u8(sum), vreinterpretq_s8_u8(level_s8x16), vreinterpretq_s8_u8(x_s8x16)));
}

#include "table.h"

TQ_TABLE(neon_dot, vector);
