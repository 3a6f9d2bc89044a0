/* AVX2 with AVX-VNNI (Alder Lake, Sierra Forest, Zen 5 on): levels + 128 as unsigned bytes times operands of two or
 * three signed bytes. vpdpbusd does not saturate: 255 * 128 * 4 a step, and product.h starts new sums each 256 columns.
 *
 *   instruction              Alder Lake P   Zen 5
 *   vpshufb ymm              1cy @ p15      1cy @ p12
 *   vpand, vpor ymm          1cy @ p015     1cy @ p0123
 *   vpsrlw ymm, imm          1cy @ p01      1cy @ p12
 *   vpdpbusd ymm             5cy @ p01      4cy @ p01
 *   vbroadcasti128 ymm, mem  loads only
 *
 * For a vector of 4-bit words (64 codes, two rows), unpacking to bytes takes five operations, transposing two, and each
 * operand four (six if precise). */
#include "avx2.h"

#define PARTS 2
#define LOW_PLANES 2

static inline __m256i multiply_add(__m256i sum, __m256i level_u8x32, __m256i x_s8x32)
{
    return _mm256_dpbusd_avx_epi32(sum, level_u8x32, x_s8x32);
}

#include "table.h"

TQ_TABLE(avx2_vnni, vector);
