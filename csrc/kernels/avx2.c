/* AVX2 without VNNI: levels as 16-bit numbers, operands as 16-bit numbers, vpmaddwd + vpaddd.
 * (vpmaddubsw saturates at 16 bits. It would need operands of 7 bits, and so two to three times as many products.)
 *
 *   instruction              Haswell      Skylake      Zen 4
 *   vpshufb ymm              1cy @ p5     1cy @ p15*   1cy @ p12       * p5 until Ice Lake
 *   vpand, vpor ymm          1cy @ p015   1cy @ p015   1cy @ p0123
 *   vpsrlw ymm, imm          1cy @ p0     1cy @ p01    1cy @ p12
 *   vpmaddwd ymm             5cy @ p0     5cy @ p01    3cy @ p03
 *   vpaddd ymm               1cy @ p15    1cy @ p015   1cy @ p0123
 *   vbroadcasti128 ymm, mem  loads only
 *
 * For a vector of 4-bit words (64 codes, two rows), unpacking to bytes takes five operations, transposing two, widening
 * to 16 bits four, and each operand eight. */
#include "avx2.h"

#define PARTS 4
#define LOW_PLANES 1

static inline __m256i multiply_add(__m256i sum, __m256i level_s16x16, __m256i x_s16x16)
{
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(level_s16x16, x_s16x16));
    __asm__("" : "+x"(sum)); /* without it gcc reorders the sums of a whole tile and keeps its products in memory */
    return sum;
}

#include "table.h"

TQ_TABLE(avx2, vector);
