/* The functions of a vector instruction set, and their table. codes.h and product.h say what a unit defines before it
 * includes this file. */
#ifndef TQ_KERNELS_TABLE_H
#define TQ_KERNELS_TABLE_H
#include "codes.h"
#include "product.h"
#include "recode.h"
#include "softmax.h"
#include "wave.h"

#define TQ_VECTOR_TABLE(ISA)                                                                                           \
    const tq_kernels tq_kernels_##ISA = {                                                                              \
        .isa = #ISA,                                                                                                   \
        .hadamard = hadamard_vector,                                                                                   \
        .settle = settle_vector,                                                                                       \
        .encode = encode_vector,                                                                                       \
        .pack = pack_vector,                                                                                           \
        .unpack = unpack_vector,                                                                                       \
        .recode = recode_vector,                                                                                       \
        .operand_bytes = operand_bytes_vector,                                                                         \
        .prepare = prepare_vector,                                                                                     \
        .multiply = multiply_vector,                                                                                   \
        .logits = tq_logits,                                                                                           \
        .weights = tq_weights,                                                                                         \
        .add_wave = tq_add_wave,                                                                                       \
        .turn = tq_turn_vector,                                                                                        \
        .subtract = tq_subtract,                                                                                       \
        .within = tq_within,                                                                                           \
        .load = load_vector,                                                                                           \
        .dot = dot_vector,                                                                                             \
        .axpy = axpy_vector,                                                                                           \
        .names = {"rotate_" #ISA, "append_" #ISA, "attend_" #ISA, "dequantize_" #ISA, "dot_" #ISA},                    \
    }
#endif
