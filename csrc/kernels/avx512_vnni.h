/* The products of avx512_vnni.c and avx512_amx.c: levels + 128 as unsigned bytes times operands of two or three signed
 * bytes. vpdpbusd does not saturate: 255 * 128 * 4 a step, and product.h starts new sums every 256 columns.
 *
 *   instruction                Ice Lake     Sapphire Rapids   Zen 4 (each takes a pipe twice)
 *   vpermb zmm                 3cy @ p5     3cy @ p5          4cy @ p12
 *   vpshufb zmm                1cy @ p5     1cy @ p5          2cy @ p12
 *   vpandd, vpternlogd zmm     1cy @ p05    1cy @ p05         1cy @ p0123
 *   vpsrlw zmm, imm            1cy @ p0     1cy @ p0          2cy @ p12
 *   vpdpbusd zmm               5cy @ p0     5cy @ p05         4cy @ p01
 *   vbroadcasti32x4 zmm, mem   loads only
 *
 * For a vector of 4-bit words (128 codes, four rows), unpacking to bytes takes three operations, transposing two, and
 * each operand four (six if precise). From two operands on, vpdpbusd is the limit, one a cycle on Zen 4: 32 shuffles
 * beside 64 of them cost nothing. */
#ifndef TQ_KERNELS_AVX512_VNNI_H
#define TQ_KERNELS_AVX512_VNNI_H
#include "avx512.h"

#define PARTS 2
#define LOW_PLANES 2

static inline __m512i multiply_add(__m512i sum, __m512i level_u8x64, __m512i x_s8x64)
{
    return _mm512_dpbusd_epi32(sum, level_u8x64, x_s8x64);
}

/** Same as store_planes of product.h. Of u = v + 0x8080, bytes 0 and 1 are the two low digits + 128, and byte 2 is the
 *  upper digit. vpermt2b takes them from 2 x 16 integers in the order of the parts: the even columns n = 0 2 4 6 of
 *  t = 0, of t = 1 .., then the odd ones. */
#define UNIT_STORES_PLANES
#define COLUMN_WORD(t, byte, odd)                                                                                      \
    16 * (t) + 4 * (odd) + (byte), 16 * (t) + 8 + 4 * (odd) + (byte), 64 + 16 * (t) + 4 * (odd) + (byte),              \
        72 + 16 * (t) + 4 * (odd) + (byte)
#define COLUMN_PART(byte, odd)                                                                                         \
    COLUMN_WORD(0, byte, odd), COLUMN_WORD(1, byte, odd), COLUMN_WORD(2, byte, odd), COLUMN_WORD(3, byte, odd)

TQ_INLINE void store_planes(const tq_ints *v, int precise, char *planes)
{
    static const uint8_t low[64] = {COLUMN_PART(0, 0), COLUMN_PART(0, 1), COLUMN_PART(1, 0), COLUMN_PART(1, 1)};
    static const uint8_t upper[64] = {COLUMN_PART(2, 0), COLUMN_PART(2, 1)};
    __m512i a = (__m512i)(v[0] + 0x8080), b = (__m512i)(v[1] + 0x8080);
    __m512i digits_u8x64 = _mm512_permutex2var_epi8(a, _mm512_loadu_si512(low), b);
    _mm512_storeu_si512(planes, _mm512_xor_si512(digits_u8x64, _mm512_set1_epi8(-128)));
    if (precise)
        _mm256_storeu_si256((__m256i *)(planes + 64),
                            _mm512_castsi512_si256(_mm512_permutex2var_epi8(a, _mm512_loadu_si512(upper), b)));
}
#endif
