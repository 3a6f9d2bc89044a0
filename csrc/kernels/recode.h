/* Recodes tiles to fewer bits (tq_recode). Written once for the vector units; recode_scalar (scalar.c) is the
 * definition. The vector code goes from 3, 4 and 5 bits to 2, 3 and 4. Other widths, and the few tiles with padding or
 * unused tokens, go to the scalar code.
 *
 * A word has eight codes of one row. Its even and odd nibbles are two vectors of bytes, in the order of levels.h.
 * Besides what levels.h needs, a unit defines:
 *   vec_zip_low_u8, vec_zip_high_u8, vec_zip_low_u16, vec_zip_high_u16 (a, b)   like those of 32 bits
 *   vec_add_dots(sums, a, b)   adds to each word of sums the products of its four bytes; bytes are at most 127 */
#ifndef TQ_KERNELS_RECODE_H
#define TQ_KERNELS_RECODE_H
#include "levels.h"

enum { LANE_VECTORS = TQ_TILE / TQ_LANES };

TQ_INLINE void vec_store(uint32_t *at, vec x) { memcpy(at, &x, sizeof x); }

/** Packs four bytes below 16 into nibbles 0..3. */
TQ_INLINE tq_words four_nibbles(tq_words x)
{
    x = (x | x >> 4) & 0x00ff00ff;
    return (x | x >> 8) & 0xffff;
}

/** Reads the nibbles of the four rows of a lane and, at 5 bits, the signs: bit r of nibble n is of row r, column n. */
TQ_INLINE void recode_read(int from, const uint32_t *words, vec rows[4], tq_words *signs)
{
    TQ_UNROLL
    for (int r = 0; r < 4; r++)
        if (from > 3 || r < 3) rows[r] = vec_load(words + TQ_TILE * r);
    if (from == 3) rows[3] = fourth_row_3(rows);
    if (from < 5) return;
    const tq_words plane = (tq_words)vec_load(words + TQ_TILE * 4);
    *signs = four_nibbles(plane & 0x0f0f0f0f) | four_nibbles(plane >> 4 & 0x0f0f0f0f) << 16;
}

TQ_INLINE void recode_write(int to, const tq_words rows[4], uint32_t *out)
{
    if (to == 2) { /* byte n of a lane's two words: four rows of column n */
        const tq_words low = rows[0] | rows[1] << 2, high = rows[2] | rows[3] << 2, nibble = (tq_words){0} + 0x0f0f0f0f;
        const vec even = (vec)((low & nibble) | (high & nibble) << 4),
                  odd = (vec)((low >> 4 & nibble) | (high & ~nibble));
        const vec lanes_01 = vec_zip_low_u8(even, odd), lanes_23 = vec_zip_high_u8(even, odd);
        const vec lanes_02 = vec_zip_low_u32(lanes_01, lanes_23), lanes_13 = vec_zip_high_u32(lanes_01, lanes_23);
        vec_store(out, vec_zip_low_u32(lanes_02, lanes_13));
        vec_store(out + TQ_TILE, vec_zip_high_u32(lanes_02, lanes_13));
        return;
    }
    TQ_UNROLL
    for (int r = 0; r < to; r++)
        vec_store(out + TQ_TILE * r, (vec)(to == 4 ? rows[r] : rows[r] | (rows[3] >> r & 0x11111111) << 3));
}

/** Transposes bytes by row to bytes by column, in each 16-byte lane: byte i of word t of rows[r] becomes byte r of word
 *  i of columns[t]. */
TQ_INLINE void transpose_bytes(const vec rows[4], vec columns[4])
{
    const vec t01_r01 = vec_zip_low_u8(rows[0], rows[1]), t23_r01 = vec_zip_high_u8(rows[0], rows[1]);
    const vec t01_r23 = vec_zip_low_u8(rows[2], rows[3]), t23_r23 = vec_zip_high_u8(rows[2], rows[3]);
    columns[0] = vec_zip_low_u16(t01_r01, t01_r23);
    columns[1] = vec_zip_high_u16(t01_r01, t01_r23);
    columns[2] = vec_zip_low_u16(t23_r01, t23_r23);
    columns[3] = vec_zip_high_u16(t23_r01, t23_r23);
}

/** Keys: adds up the sums of each token, whose words are in four lanes, from lane `first` on. rows [r]; row g + 8 r is
 *  token 4 g + r in column order. */
TQ_INLINE void fold_keys(vec rows[4], int32_t first, uint32_t *sums)
{
    vec_transpose(rows);
    vec_store(sums + first, vec_add(vec_add(rows[0], rows[1]), vec_add(rows[2], rows[3])));
}

/** Values: adds up the sums of each column over all g. columns [t][even, odd], a word for each column. */
TQ_INLINE void fold_values(const vec columns[4][2], uint32_t *sums)
{
    for (int32_t t = 0; t < 4; t++) {
        const tq_ints4 low = tq_fold_ints((tq_ints)vec_zip_low_u32(columns[t][0], columns[t][1])),
                       high = tq_fold_ints((tq_ints)vec_zip_high_u32(columns[t][0], columns[t][1]));
        memcpy(sums + 4 * t, &low, sizeof low);
        memcpy(sums + 16 + 4 * t, &high, sizeof high);
    }
}

/** Prefetches part i, of `share` words, of what is AHEAD words further on. Rows are not read in order, so the CPU's own
 *  prefetchers do not follow. */
TQ_INLINE void ask_for(const uint32_t *words, int32_t share, int32_t i, int to_write)
{
    enum { AHEAD = 1024, LINE = 16 };
    TQ_UNROLL
    for (int32_t j = 0; j < share; j += LINE) {
        if (to_write) __builtin_prefetch(words + AHEAD + share * i + j, 1);
        else __builtin_prefetch(words + AHEAD + share * i + j, 0);
    }
}

TQ_INLINE void recode_in(int from, int to, int is_key, const tq_recoding *recoding, int32_t n, const uint32_t *words,
                         uint32_t *out, uint32_t *sums)
{
    const vec code = vec_broadcast_u32x4(recoding->code), before = vec_broadcast_u32x4(recoding->before),
              after = vec_broadcast_u32x4(recoding->after);
    /* At 5 bits tables are by magnitude, and a negative code is the positive one with these bits changed. */
    const uint32_t flip = to == 4 ? 8 : (1u << to) - 1;
    vec columns[2][4][2] = {{{{0}}}};
    for (int32_t lane = 0; lane < TQ_TILE; lane += TQ_LANES) {
        vec tokens[2][4] = {{{0}}};
        for (int32_t k = 0; k < n; k++) {
            vec rows[4], turned[4];
            tq_words signs, fewer[4];
            ask_for(words, TQ_LANES * from, lane / TQ_LANES * n + k, 0);
            ask_for(out, TQ_LANES * to, lane / TQ_LANES * n + k, 1);
            recode_read(from, words + TQ_TILE * from * k + lane, rows, &signs);
            TQ_UNROLL
            for (int r = 0; r < 4; r++) {
                const vec even = vec_low_nibbles(rows[r]), odd = vec_high_nibbles(rows[r]);
                fewer[r] = (tq_words)vec_look_up(code, even) | (tq_words)vec_look_up(code, odd) << 4;
                if (from == 5) fewer[r] ^= (signs >> r & 0x11111111) * flip;
                if (!is_key) continue;
                const vec even_before = vec_look_up(before, even), odd_before = vec_look_up(before, odd);
                tokens[0][r] = vec_add_dots(tokens[0][r], even_before, even_before);
                tokens[0][r] = vec_add_dots(tokens[0][r], odd_before, odd_before);
                tokens[1][r] = vec_add_dots(tokens[1][r], even_before, vec_look_up(after, even));
                tokens[1][r] = vec_add_dots(tokens[1][r], odd_before, vec_look_up(after, odd));
            }
            recode_write(to, fewer, out + TQ_TILE * to * k + lane);
            if (is_key) continue;
            transpose_bytes(rows, turned);
            TQ_UNROLL
            for (int t = 0; t < 4; t++) {
                const vec nibbles[2] = {vec_low_nibbles(turned[t]), vec_high_nibbles(turned[t])};
                TQ_UNROLL
                for (int i = 0; i < 2; i++) {
                    const vec levels = vec_look_up(before, nibbles[i]);
                    columns[0][t][i] = vec_add_dots(columns[0][t][i], levels, levels);
                    columns[1][t][i] = vec_add_dots(columns[1][t][i], levels, vec_look_up(after, nibbles[i]));
                }
            }
        }
        for (int i = 0; i < 2 && is_key; i++) fold_keys(tokens[i], lane, sums + TQ_TILE * i);
    }
    for (int i = 0; i < 2 && !is_key; i++) fold_values(columns[i], sums + TQ_TILE * i);
}

#define RECODE_WIDTHS(FROM, TO)                                                                                        \
    if (recoding->from == FROM && recoding->to == TO) {                                                                \
        if (is_key) recode_in(FROM, TO, 1, recoding, n, words, out, sums);                                             \
        else recode_in(FROM, TO, 0, recoding, n, words, out, sums);                                                    \
        return;                                                                                                        \
    }

static void recode_vector(const tq_recoding *recoding, int is_key, const uint8_t *live, int32_t n,
                          const uint32_t *words, uint32_t *out, uint32_t *sums)
{
    if (!live) {
        RECODE_WIDTHS(5, 4)
        RECODE_WIDTHS(5, 3)
        RECODE_WIDTHS(5, 2)
        RECODE_WIDTHS(4, 3)
        RECODE_WIDTHS(4, 2)
        RECODE_WIDTHS(3, 2)
    }
    tq_kernels_scalar.recode(recoding, is_key, live, n, words, out, sums);
}
#endif
