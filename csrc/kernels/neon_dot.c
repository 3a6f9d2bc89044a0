/* NEON with the dot-product extension (Armv8.4, optional from 8.2: Neoverse N1, Apple M1, Cortex-A76 on): signed bytes
 * by signed bytes, four products to a 32-bit sum.
 *
 *   instruction     Neoverse N1     Neoverse V1    Apple M1
 *   tbl, 1 register 2cy @ v01       2cy @ v01      2cy @ v0123
 *   tbl, 2          2cy @ v01       2cy @ v01      4cy @ v0123, twice
 *   and, orr        2cy @ v01       2cy @ v0123    2cy @ v0123
 *   ushr            2cy @ v1        2cy @ v13      2cy @ v0123
 *   sdot            2cy @ v01       3cy @ v0123    3cy @ v0123
 *
 * A vector of 4-bit words (32 codes, one row) costs four operations to bytes, two to be transposed, and four per
 * operand (six if precise). */
#include "neon.h"

static inline uint8x16_t multiply_add(uint8x16_t sum, uint8x16_t level_s8x16, uint8x16_t x_s8x16)
{
    return vreinterpretq_u8_s32(
        vdotq_s32(vreinterpretq_s32_u8(sum), vreinterpretq_s8_u8(level_s8x16), vreinterpretq_s8_u8(x_s8x16)));
}

#include "codes.h"
#include "product.h"
#include "softmax.h"
#include "wave.h"

const tq_kernels tq_kernels_neon_dot = {
    .isa = "neon_dot",
    .hadamard = hadamard_vector,
    .settle = settle_vector,
    .encode = encode_vector,
    .pack = pack_vector,
    .unpack = unpack_vector,
    .operand_bytes = operand_bytes_vector,
    .prepare = prepare_vector,
    .multiply = multiply_vector,
    .logits = tq_logits,
    .weights = tq_weights,
    .add_wave = tq_add_wave,
    .turn = tq_turn_vector,
    .subtract = tq_subtract,
    .within = tq_within,
    .load = load_vector,
    .dot = dot_vector,
    .axpy = axpy_vector,
    .names = {"rotate_neon_dot", "append_neon_dot", "attend_neon_dot", "dequantize_neon_dot", "dot_neon_dot"},
};
