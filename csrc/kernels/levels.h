/* Turns packed codes into levels, which product.h multiplies. Written once for the vector units.
 *
 * A vector of 16 G bytes holds word w of lanes 4 g + t of a tile, for G values of g and t = 0..3. Nibble n of a word is
 * column 4 t + n (n < 4) or 16 + 4 t + n - 4. Every width becomes two vectors of bytes in one order:
 *   even, byte i of a word    column n = 2 i          n: 0 2 4 6
 *   odd,  byte i of a word    column n = 2 i + 1      n: 1 3 5 7
 *
 * A unit defines what product.h lists and, for the functions here:
 *   vec_zip_low_u32, vec_zip_high_u32, vec_zip_low_u64, vec_zip_high_u64 (a, b)
 *                                     a[0] b[0] a[1] b[1] .. of the lower or upper half of each 16-byte lane
 *   vec_repeat_u32(x, t)              word t of each 16-byte lane four times, t a constant
 *   vec_low_nibbles, vec_high_nibbles (x)   of each byte, as vec_look_up takes them
 *   vec_look_up(table, nibbles)       table[nibble] by byte, a table of 16 in each 16-byte lane
 *   vec_choose_set(x, mask, a, b)     a in the bytes where x has the mask's bit, else b
 *   vec_negate_set(levels, x, mask)   LEVEL_OFFSET + level to LEVEL_OFFSET - level in those bytes
 *   vec_align_twos(x, by_lane, m)     2-bit codes of row 3 shifted from bit 6 to ROW_3_SHIFT
 *   interleave, fourth_row_3, join_nibbles   below                                                              */
#ifndef TQ_KERNELS_LEVELS_H
#define TQ_KERNELS_LEVELS_H
#include "vector.h"

/* ---- operations that GNU C can express ---- */

TQ_INLINE vec vec_load(const void *at)
{
    vec x;
    memcpy(&x, at, sizeof x);
    return x;
}

TQ_INLINE vec vec_all_u8(int byte) { return (vec)((tq_words){0} + 0x01010101u * (uint32_t)byte); }

TQ_INLINE vec vec_broadcast_u32(const void *at)
{
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return (vec)((tq_words){0} + word);
}

TQ_INLINE vec vec_zero(void) { return (vec){0}; }

TQ_INLINE vec vec_add(vec a, vec b) { return (vec)((tq_words)a + (tq_words)b); }

TQ_INLINE vec vec_times_256(vec a) { return (vec)((tq_words)a << 8); }

/* Transposes words by row to words by lane, in each 16-byte lane (and sums likewise):
 *   v[r]  | t = 3 | t = 2 | t = 1 | t = 0 |   ->   v[t]  | r = 3 | r = 2 | r = 1 | r = 0 |  */
TQ_INLINE void vec_transpose(vec v[4])
{
    vec t01_r01 = vec_zip_low_u32(v[0], v[1]), t23_r01 = vec_zip_high_u32(v[0], v[1]);
    vec t01_r23 = vec_zip_low_u32(v[2], v[3]), t23_r23 = vec_zip_high_u32(v[2], v[3]);
    v[0] = vec_zip_low_u64(t01_r01, t01_r23);
    v[1] = vec_zip_high_u64(t01_r01, t01_r23);
    v[2] = vec_zip_low_u64(t23_r01, t23_r23);
    v[3] = vec_zip_high_u64(t23_r01, t23_r23);
}

/* ---- words to levels ---- */

/** A codebook as look-up tables of LEVEL_OFFSET + level, by the low four bits of a code: codes 0..15 and 16..31. */
typedef struct {
    vec table[2];
} tables;

TQ_INLINE tables tables_of(const tq_codebook *book)
{
    uint8_t levels[32];
    memcpy(levels, book->levels, sizeof levels);
    if (book->bits == 3) memcpy(levels + 8, levels, 8); /* a nibble's top bit is another code's: ignored */
    const vec offset = vec_all_u8(LEVEL_OFFSET);
    return (tables){{vec_broadcast_u32x4(levels) ^ offset, vec_broadcast_u32x4(levels + 16) ^ offset}};
}

/** The words of one vector of a tile before the look-up. `nibbles` are by row r or by lane t (3 bits and more), `high`
 *  has the upper nibbles at 8 bits, and `bytes`, in nibble order, have bits of all four rows (1, 2, 5 and 6 bits).
 *    4 bits   word r: the eight codes of row g + 8 r
 *    3 bits   nibble n, bit       3           2 1 0
 *               w[0]           | h bit 0 | row g      |   h: code n of row g + 24, one bit in each spare place
 *               w[1]           | h bit 1 | row g + 8  |   (fourth_row_3)
 *               w[2]           | h bit 2 | row g + 16 |   r < 3 needs no mask: the table repeats
 *    interleave: puts bytes into nibble order; each byte has code n of several rows, each row in bits of its own
 *               w0 | c3 c2 c1 c0 |  w1 | c7 c6 c5 c4 |  ->  even | c6 c4 c2 c0 |  odd | c7 c5 c3 c1 |          */
typedef struct {
    vec nibbles[4], high[4];
    byte_pair bytes;
} tile_words;

TQ_INLINE tile_words load_words(int bits, int by_lane, const uint8_t *at)
{
    tile_words words = {0};
    vec w[TQ_WIDE_BITS] = {{0}};
    TQ_UNROLL
    for (int i = 0; i < bits; i++) w[i] = vec_load(at + 128 * i);
    if (bits == 2 || bits == 6) words.bytes = interleave(w[bits - 2], w[bits - 1]);
    if (bits == 1 || bits == 5) words.bytes = interleave(w[bits - 1], (vec)((tq_words)w[bits - 1] >> 4));
    if (bits == 3) w[3] = fourth_row_3(w);
    if (bits >= 3 && by_lane) vec_transpose(w);
    if (bits == TQ_WIDE_BITS && by_lane) vec_transpose(w + 4);
    TQ_UNROLL
    for (int i = 0; i < 4 && bits >= 3; i++) words.nibbles[i] = w[i];
    TQ_UNROLL
    for (int i = 0; i < 4 && bits == TQ_WIDE_BITS; i++) words.high[i] = w[4 + i];
    return words;
}

TQ_INLINE vec repeat_word(vec x, int t)
{
    switch (t) {
    case 0: return vec_repeat_u32(x, 0);
    case 1: return vec_repeat_u32(x, 1);
    case 2: return vec_repeat_u32(x, 2);
    default: return vec_repeat_u32(x, 3);
    }
}

TQ_INLINE byte_pair look_up_both(vec nibbles, vec table)
{
    return (byte_pair){vec_look_up(table, vec_low_nibbles(nibbles)), vec_look_up(table, vec_high_nibbles(nibbles))};
}

/** Returns the levels of 6-bit codes. twos: their upper two bits, in the bits of `mask`. */
TQ_INLINE vec look_up_6(const tables *t, vec nibbles, vec twos, vec mask)
{
    const vec fifth = mask & vec_all_u8(0x55);
    vec levels = vec_choose_set(twos, fifth, vec_look_up(t->table[1], nibbles), vec_look_up(t->table[0], nibbles));
    return vec_negate_set(levels, twos, mask & ~fifth);
}

/* Turns words into LEVEL_OFFSET + level, 1 and 2 bits into shifted codes. How each width is stored:
 * 2 bits   word h, byte i: code n = 4 h + i of rows g + 8 r in bits 2 r and 2 r + 1; becomes code << 0, 2, 4,
 *          ROW_3_SHIFT: 6, or 4 where bytes are signed
 * 1 bit    byte i: code n = 4 h + i of row g + 8 r in bit r + 4 h; becomes code << r
 * 5 bits   the magnitude as 4 bits, the sign as 1 bit
 * 6 bits   the low four bits of the magnitude as 4 bits; its fifth bit, which chooses the table, and the sign as 2 bits
 * 8 bits   the low four and the upper four as 4 bits each: level + 128 (join_nibbles: less 128 if LEVEL_OFFSET is 0) */
TQ_INLINE byte_pair byte_levels(int bits, int by_lane, const tile_words *words, int m, const tables *t)
{
    const vec nibbles = words->nibbles[m];
    if (bits == TQ_WIDE_BITS) return join_nibbles(nibbles, words->high[m]);
    if (bits == 3 || bits == 4) return look_up_both(nibbles, t->table[0]);
    static const uint32_t masks[3][4] = {{0x01010101, 0x02020202, 0x04040404, 0x08080808},
                                         {0x03030303, 0x0c0c0c0c, 0x30303030, 0xc0c0c0c0},
                                         {0x03030303, 0x0c0c0c0c, 0x30303030, 0x03030303u << ROW_3_SHIFT}};
    const uint32_t *by_row = masks[bits == 2 ? 2 : bits == 6 ? 1 : 0];
    const vec mask = by_lane ? vec_broadcast_u32x4(by_row) : vec_broadcast_u32(by_row + m);
    vec even = words->bytes.even, odd = words->bytes.odd;
    if (by_lane) even = repeat_word(even, m), odd = repeat_word(odd, m);
    if (bits == 2) even = vec_align_twos(even, by_lane, m), odd = vec_align_twos(odd, by_lane, m);
    if (bits <= 2) return (byte_pair){even & mask, odd & mask};
    if (bits == 6)
        return (byte_pair){look_up_6(t, vec_low_nibbles(nibbles), even, mask),
                           look_up_6(t, vec_high_nibbles(nibbles), odd, mask)};
    byte_pair levels = look_up_both(nibbles, t->table[0]);
    return (byte_pair){vec_negate_set(levels.even, even, mask), vec_negate_set(levels.odd, odd, mask)};
}

/** What multiply_add takes: two vectors of bytes, or the even and the odd bytes of each as 16-bit numbers. */
typedef struct {
    vec part[PARTS];
} parts;

TQ_INLINE parts levels(int bits, int by_lane, const tile_words *words, int m, const tables *t)
{
    byte_pair l = byte_levels(bits, by_lane, words, m, t);
#if PARTS == 2
    return (parts){{l.even, l.odd}};
#else
    typedef uint16_t halves __attribute__((vector_size(sizeof(vec))));
    return (parts){{(vec)((halves)l.even & 255), (vec)((halves)l.even >> 8), (vec)((halves)l.odd & 255),
                    (vec)((halves)l.odd >> 8)}};
#endif
}
#endif
