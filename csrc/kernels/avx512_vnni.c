/* AVX-512 with VNNI and VBMI (Ice Lake, Sapphire Rapids, Zen 4 on). */
#include "avx512_vnni.h"
#include "codes.h"
#include "product.h"
#include "softmax.h"
#include "wave.h"

const tq_kernels tq_kernels_avx512_vnni = {
    .isa = "avx512_vnni",
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
    .names = {"rotate_avx512_vnni", "append_avx512_vnni", "attend_avx512_vnni", "dequantize_avx512_vnni",
              "dot_avx512_vnni"},
};
