/* Levels of packed codes in 128-bit registers: for neon.c and neon_dot.c.
 *
 * A 16-byte load of word w of a tile is row g (of r), four lanes t; nibble n of a word is column 4 t + n (n < 4) or
 * 16 + 4 t + n - 4. Every width gives two vectors of bytes in one order:
 *   even, byte i of a word    column n = 2 i          n: 0 2 4 6
 *   odd,  byte i of a word    column n = 2 i + 1      n: 1 3 5 7
 * Bytes are signed here, levels as they are. */
#ifndef TQ_KERNELS_NEON_H
#define TQ_KERNELS_NEON_H
#include "vector.h"
#include <arm_neon.h>

typedef struct {
    uint8x16_t even, odd;
} bytes_u8x16;

/** A codebook as look-up tables by the low four bits of a code: codes 0..15 and 16..31. */
typedef struct {
    uint8x16_t s8x16[2];
} tables;

static inline tables tables_of(const tq_codebook *book)
{
    uint8_t levels[32];
    memcpy(levels, book->levels, sizeof levels);
    if (book->bits == 3) memcpy(levels + 8, levels, 8); /* ignores a nibble's top bit, which is another code's */
    return (tables){{vld1q_u8(levels), vld1q_u8(levels + 16)}};
}

/* 4 bits   word r: the eight codes of row g + 8 r
 * 3 bits   nibble n, bit       3           2 1 0
 *            w[0]           | h bit 0 | row g      |   h: code n of row g + 24, one bit in each spare place
 *            w[1]           | h bit 1 | row g + 8  |
 *            w[2]           | h bit 2 | row g + 16 |   r < 3 needs no mask: the table repeats */
static inline uint8x16_t fourth_row_3_u8x16(const uint8x16_t *w)
{
    return vorrq_u8(
        vandq_u8(vshrq_n_u8(w[0], 3), vdupq_n_u8(0x11)),
        vorrq_u8(vandq_u8(vshrq_n_u8(w[1], 2), vdupq_n_u8(0x22)), vandq_u8(vshrq_n_u8(w[2], 1), vdupq_n_u8(0x44))));
}

/* Words by row to words by lane (and sums likewise):
 *   v[r]  | t = 3 | t = 2 | t = 1 | t = 0 |   ->   v[t]  | r = 3 | r = 2 | r = 1 | r = 0 |  */
static inline void vec_transpose(uint8x16_t v[4])
{
    uint32x4x2_t r01 = vtrnq_u32(vreinterpretq_u32_u8(v[0]), vreinterpretq_u32_u8(v[1])); /* t = 0 and 2, t = 1 and 3 */
    uint32x4x2_t r23 = vtrnq_u32(vreinterpretq_u32_u8(v[2]), vreinterpretq_u32_u8(v[3]));
    for (int t = 0; t < 2; t++) {
        uint64x2_t low = vreinterpretq_u64_u32(r01.val[t]), high = vreinterpretq_u64_u32(r23.val[t]);
        v[t] = vreinterpretq_u8_u64(vtrn1q_u64(low, high));
        v[t + 2] = vreinterpretq_u8_u64(vtrn2q_u64(low, high));
    }
}

/* Bytes to nibble order:   w0 | c3 c2 c1 c0 |  w1 | c7 c6 c5 c4 |  ->  even | c6 c4 c2 c0 |  odd | c7 c5 c3 c1 |
 * (each byte holds code n of several rows, in bits of their own). */
static inline bytes_u8x16 interleave_u8x16(uint8x16_t w0, uint8x16_t w1)
{
    static const uint8_t even[16] = {0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30};
    const uint8x16_t order = vld1q_u8(even);
    const uint8x16x2_t both = {{w0, w1}};
    return (bytes_u8x16){vqtbl2q_u8(both, order), vqtbl2q_u8(both, vaddq_u8(order, vdupq_n_u8(1)))};
}

/** Words of one value of g of a tile before the look-up: nibbles (3 to 8 bits; at 8 of both tiles) by row r or by lane
 *  t, and bytes in nibble order with bits of all four rows (1, 2, 5 and 6 bits). */
typedef struct {
    uint8x16_t nibbles[4], high[4];
    bytes_u8x16 bytes;
} tile_words;

TQ_INLINE tile_words load_words(int bits, int by_lane, const uint8_t *at)
{
    tile_words words = {0};
    uint8x16_t w[TQ_WIDE_BITS] = {{0}};
    TQ_UNROLL
    for (int i = 0; i < bits; i++) w[i] = vld1q_u8(at + 128 * i);
    if (bits == 1) words.bytes = interleave_u8x16(w[0], vshrq_n_u8(w[0], 4));
    if (bits == 2) words.bytes = interleave_u8x16(w[0], w[1]);
    if (bits == 5) words.bytes = interleave_u8x16(w[4], vshrq_n_u8(w[4], 4));
    if (bits == 6) words.bytes = interleave_u8x16(w[4], w[5]);
    if (bits == 3) w[3] = fourth_row_3_u8x16(w);
    if (bits >= 3 && by_lane) vec_transpose(w);
    if (bits == TQ_WIDE_BITS && by_lane) vec_transpose(w + 4);
    TQ_UNROLL
    for (int i = 0; i < 4 && bits >= 3; i++) words.nibbles[i] = w[i];
    TQ_UNROLL
    for (int i = 0; i < 4 && bits == TQ_WIDE_BITS; i++) words.high[i] = w[4 + i];
    return words;
}

static inline bytes_u8x16 look_up_u8x16(uint8x16_t nibbles, uint8x16_t table)
{
    return (bytes_u8x16){vqtbl1q_u8(table, vandq_u8(nibbles, vdupq_n_u8(15))),
                         vqtbl1q_u8(table, vshrq_n_u8(nibbles, 4))};
}

/** Word t four times. */
TQ_INLINE uint8x16_t repeat_u32x4(uint8x16_t x, int t)
{
    uint32x4_t words = vreinterpretq_u32_u8(x);
    switch (t) {
    case 0: return vreinterpretq_u8_u32(vdupq_laneq_u32(words, 0));
    case 1: return vreinterpretq_u8_u32(vdupq_laneq_u32(words, 1));
    case 2: return vreinterpretq_u8_u32(vdupq_laneq_u32(words, 2));
    default: return vreinterpretq_u8_u32(vdupq_laneq_u32(words, 3));
    }
}

/** -level where the bit of the mask is set in x. */
TQ_INLINE uint8x16_t negate_u8x16(uint8x16_t levels, uint8x16_t x, uint8x16_t mask)
{
    const uint8x16_t negative = vtstq_u8(x, mask);
    return vsubq_u8(veorq_u8(levels, negative), negative);
}

/** Levels of 6 bits; twos: the upper two bits of codes, in bits of their own (`mask`). */
TQ_INLINE uint8x16_t look_up_6_u8x16(const uint8x16_t tables[2], uint8x16_t nibbles, uint8x16_t twos, uint8x16_t mask)
{
    const uint8x16_t fifth = vandq_u8(mask, vdupq_n_u8(0x55));
    uint8x16_t levels = vbslq_u8(vtstq_u8(twos, fifth), vqtbl1q_u8(tables[1], nibbles), vqtbl1q_u8(tables[0], nibbles));
    return negate_u8x16(levels, twos, vbicq_u8(mask, fifth));
}

/* 2 bits   word h, byte i: code n = 4 h + i of rows g + 8 r in bits 2 r and 2 r + 1; comes as
 *          code << 0, 2, 4, 4: a signed byte
 * 1 bit    byte i: code n = 4 h + i of row g + 8 r in bit r + 4 h; comes as code << r
 * 5 bits   the magnitude as 4 bits, the sign as 1 bit
 * 6 bits   the low four of the magnitude as 4 bits; its fifth, which chooses the table, and the sign as 2 bits
 * 8 bits   the low four and the upper four as 4 bits: level + 128, the sign bit flipped */
TQ_INLINE bytes_u8x16 levels_u8x16(int bits, int by_lane, const tile_words *words, int m, const tables *t)
{
    if (bits == 3 || bits == 4) return look_up_u8x16(words->nibbles[m], t->s8x16[0]);
    if (bits == TQ_WIDE_BITS) {
        const uint8x16_t low = words->nibbles[m], high = words->high[m], sign = vdupq_n_u8(128);
        return (bytes_u8x16){veorq_u8(vsliq_n_u8(low, high, 4), sign), veorq_u8(vsriq_n_u8(high, low, 4), sign)};
    }
    uint8x16_t even = words->bytes.even, odd = words->bytes.odd;
    if (by_lane) even = repeat_u32x4(even, m), odd = repeat_u32x4(odd, m);
    if (bits == 6) {
        const uint32x4_t twos = {0x03030303, 0x0c0c0c0c, 0x30303030, 0xc0c0c0c0};
        const uint8x16_t mask = by_lane ? vreinterpretq_u8_u32(twos) : vdupq_n_u8((uint8_t)(3 << 2 * m)),
                         nibbles = words->nibbles[m];
        return (bytes_u8x16){look_up_6_u8x16(t->s8x16, vandq_u8(nibbles, vdupq_n_u8(15)), even, mask),
                             look_up_6_u8x16(t->s8x16, vshrq_n_u8(nibbles, 4), odd, mask)};
    }
    if (bits == 2) {
        const uint32x4_t twos = {0x03030303, 0x0c0c0c0c, 0x30303030, 0x30303030}, row_3 = {0, 0, 0, 0xfefefefe};
        const uint8x16_t mask = by_lane ? vreinterpretq_u8_u32(twos) : vdupq_n_u8((uint8_t)(3 << (m < 3 ? 2 * m : 4)));
        const int8x16_t shift = by_lane ? vreinterpretq_s8_u32(row_3) : vdupq_n_s8(m < 3 ? 0 : -2);
        return (bytes_u8x16){vandq_u8(vshlq_u8(even, shift), mask), vandq_u8(vshlq_u8(odd, shift), mask)};
    }
    const uint32x4_t ones = {0x01010101, 0x02020202, 0x04040404, 0x08080808};
    const uint8x16_t mask = by_lane ? vreinterpretq_u8_u32(ones) : vdupq_n_u8((uint8_t)(1 << m));
    if (bits == 1) return (bytes_u8x16){vandq_u8(even, mask), vandq_u8(odd, mask)};
    bytes_u8x16 levels = look_up_u8x16(words->nibbles[m], t->s8x16[0]);
    return (bytes_u8x16){negate_u8x16(levels.even, even, mask), negate_u8x16(levels.odd, odd, mask)};
}

/* ---- definitions for product.h ---- Words, bytes and sums (four integers) are all uint8x16_t. */

typedef uint8x16_t vec;
#define VEC_BYTES 16
#define PARTS 2
#define LOW_PLANES 2
#define SUM_REGISTERS 16
#define LEVEL_OFFSET 0
#define SHIFT_2 0, 2, 4, 4
#define SHIFT_1 0, 1, 2, 3

typedef struct {
    uint8x16_t part[PARTS];
} parts;

TQ_INLINE parts levels(int bits, int by_lane, const tile_words *words, int m, const tables *t)
{
    bytes_u8x16 l = levels_u8x16(bits, by_lane, words, m, t);
    return (parts){{l.even, l.odd}};
}

static inline uint8x16_t vec_load(const void *at) { return vld1q_u8(at); }

static inline uint8x16_t vec_broadcast_u32x4(const void *at) { return vld1q_u8(at); }

static inline uint8x16_t vec_broadcast_u32(const void *at)
{
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return vreinterpretq_u8_u32(vdupq_n_u32(word));
}

static inline uint8x16_t vec_broadcast_u32_twice(const void *a, const void *b)
{
    return vcombine_u8(vget_low_u8(vec_broadcast_u32(a)), vget_low_u8(vec_broadcast_u32(b)));
}

static inline uint8x16_t vec_zero(void) { return vdupq_n_u8(0); }

static inline uint8x16_t vec_add(uint8x16_t a, uint8x16_t b)
{
    return vreinterpretq_u8_s32(vaddq_s32(vreinterpretq_s32_u8(a), vreinterpretq_s32_u8(b)));
}

static inline uint8x16_t vec_times_256(uint8x16_t a)
{
    return vreinterpretq_u8_s32(vshlq_n_s32(vreinterpretq_s32_u8(a), 8));
}

/* ---- definitions for codes.h ---- */

TQ_INLINE tq_floats tq_swap(tq_floats x, int h) { return h == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2); }

static inline tq_floats tq_pick(const float *table, tq_ints m)
{
    const uint8_t *bytes = (const uint8_t *)table;
    const uint8x16x4_t all = {{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
    return vreinterpretq_f32_u8(vqtbl4q_u8(all, vreinterpretq_u8_s32(m * 0x04040404 + 0x03020100)));
}

/** n numbers of a dtype to float32. */
static void load_vector(int32_t dtype, const void *x, float *y, int64_t n)
{
    const uint16_t *u = x;
    int64_t i = 0;
    if (dtype == TQ_F32) memcpy(y, x, sizeof(float) * (size_t)n);
    if (dtype == TQ_F16)
        for (; i + 4 <= n; i += 4) vst1q_f32(y + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(u + i))));
    for (; i < n && dtype == TQ_F16; i++) y[i] = tq_f32_from_f16(u[i]);
    for (; i < n && dtype == TQ_BF16; i++) y[i] = tq_f32_from_bf16(u[i]);
}
#endif
