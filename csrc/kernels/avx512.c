/* AVX-512 without VNNI (Skylake-X): levels as 16-bit numbers, operands as 16-bit numbers, vpmaddwd + vpaddd, as in
 * avx2.c.
 *
 *   instruction                Skylake-X
 *   vpshufb zmm                1cy @ p5
 *   vpandd, vpternlogd zmm     1cy @ p05
 *   vpsrlw zmm, imm            1cy @ p0
 *   vpmaddwd zmm               5cy @ p05
 *   vpaddd zmm                 1cy @ p05
 *   vbroadcasti32x4 zmm, mem   loads only
 *
 * For a vector of 4-bit words (128 codes, four rows), unpacking to bytes takes five operations, transposing two,
 * widening to 16 bits four, and each operand eight. */
#include "avx512.h"

#define PARTS 4
#define LOW_PLANES 1

static inline __m512i multiply_add(__m512i sum, __m512i level_s16x32, __m512i x_s16x32)
{
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(level_s16x32, x_s16x32));
    __asm__("" : "+v"(sum)); /* without it gcc reorders the sums of a whole tile and keeps its products in memory */
    return sum;
}

#include "table.h"

TQ_TABLE(avx512, vector);
