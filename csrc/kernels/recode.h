/* Tiles to fewer bits (tq_recode), written once for the vector units; scalar.c: recode_scalar is the definition.
 * A word has eight codes of one row; its even and odd nibbles are two vectors of bytes. From 3, 4 and 5 bits to 2, 3 and
 * 4: other widths, and tiles with padding or unused tokens, which are few, go to the scalar code. */
#ifndef TQ_KERNELS_RECODE_H
#define TQ_KERNELS_RECODE_H
#include "vector.h"

typedef uint16_t tq_halves16 __attribute__((vector_size(4 * TQ_LANES)));

enum { LANE_VECTORS = TQ_TILE / TQ_LANES, LOW_BYTES = 0x00ff00ff };

/** Tables by the low four bits of a code; at 5 bits by magnitude, and a negative code is the positive one ^ flip. */
typedef struct {
    uint8_t code[16], before[16], after[16];
    uint32_t flip;
} recode_tables;

static inline recode_tables recode_tables_of(const tq_recoding *recoding)
{
    recode_tables t = {.flip = recoding->from < 5 ? 0 : recoding->to == 4 ? 8 : (1u << recoding->to) - 1};
    for (int32_t i = 0; i < 16; i++) {
        int32_t code = recoding->from == 3 ? i & 7 : i; /* bit 3 of a nibble is another code's */
        t.code[i] = recoding->code[code], t.before[i] = recoding->before[code], t.after[i] = recoding->after[code];
    }
    return t;
}

TQ_INLINE tq_words recode_load(const uint32_t *at)
{
    tq_words x;
    memcpy(&x, at, sizeof x);
    return x;
}

TQ_INLINE void recode_store(uint32_t *at, tq_words x) { memcpy(at, &x, sizeof x); }

/** Four bytes below 16 to nibbles 0..3, and back. */
TQ_INLINE tq_words four_nibbles(tq_words x)
{
    x = (x | x >> 4) & LOW_BYTES;
    return (x | x >> 8) & 0xffff;
}

TQ_INLINE tq_words four_bytes(tq_words x)
{
    x = (x | x << 8) & LOW_BYTES;
    return (x | x << 4) & 0x0f0f0f0f;
}

/** Nibbles of the four rows of a lane, and the signs of 5 bits in nibbles of their own. */
TQ_INLINE void recode_read(int from, const uint32_t *words, tq_words rows[4], tq_words signs[4])
{
    TQ_UNROLL
    for (int r = 0; r < 4; r++) {
        signs[r] = (tq_words){0};
        if (from > 3 || r < 3) rows[r] = recode_load(words + TQ_TILE * r);
    }
    if (from == 3) rows[3] = (rows[0] >> 3 & 0x11111111) | (rows[1] >> 2 & 0x22222222) | (rows[2] >> 1 & 0x44444444);
    if (from < 5) return;
    const tq_words plane = recode_load(words + TQ_TILE * 4);
    TQ_UNROLL
    for (int r = 0; r < 4; r++)
        signs[r] = four_nibbles(plane >> r & 0x01010101) | four_nibbles(plane >> (r + 4) & 0x01010101) << 16;
}

TQ_INLINE void recode_write(int to, tq_words rows[4], uint32_t *out)
{
    if (to == 2) {
        const tq_words low = rows[0] | rows[1] << 2, high = rows[2] | rows[3] << 2;
        recode_store(out, four_bytes(low & 0xffff) | four_bytes(high & 0xffff) << 4);
        recode_store(out + TQ_TILE, four_bytes(low >> 16) | four_bytes(high >> 16) << 4);
        return;
    }
    TQ_UNROLL
    for (int r = 0; r < to; r++)
        recode_store(out + TQ_TILE * r, to == 4 ? rows[r] : rows[r] | (rows[3] >> r & 0x11111111) << 3);
}

/** Products of bytes 0 and 2, and of 1 and 3, of each word. */
TQ_INLINE tq_halves16 products_of_even(tq_words a, tq_words b)
{
    return (tq_halves16)(a & LOW_BYTES) * (tq_halves16)(b & LOW_BYTES);
}

TQ_INLINE tq_halves16 products_of_odd(tq_words a, tq_words b)
{
    return (tq_halves16)(a >> 8 & LOW_BYTES) * (tq_halves16)(b >> 8 & LOW_BYTES);
}

/** Sums of keys: of the eight columns of a word, four products of at most 127 * 127 in 16 bits. */
TQ_INLINE void add_columns(tq_words *sum, const tq_words a[2], const tq_words b[2])
{
    const tq_words four = (tq_words)(products_of_even(a[0], b[0]) + products_of_odd(a[0], b[0]) +
                                     products_of_even(a[1], b[1]) + products_of_odd(a[1], b[1]));
    *sum += (four & 0xffff) + (four >> 16);
}

/** Sums of values: of the four rows of each column n, in the order 0 4 2 6 1 5 3 7. */
TQ_INLINE void add_rows(tq_words sums[8], const tq_words a[4][2], const tq_words b[4][2])
{
    TQ_UNROLL
    for (int odd = 0; odd < 2; odd++) {
        tq_halves16 even_bytes = {0}, odd_bytes = {0};
        TQ_UNROLL
        for (int r = 0; r < 4; r++) {
            even_bytes += products_of_even(a[r][odd], b[r][odd]);
            odd_bytes += products_of_odd(a[r][odd], b[r][odd]);
        }
        sums[4 * odd] += (tq_words)even_bytes & 0xffff;
        sums[4 * odd + 1] += (tq_words)even_bytes >> 16;
        sums[4 * odd + 2] += (tq_words)odd_bytes & 0xffff;
        sums[4 * odd + 3] += (tq_words)odd_bytes >> 16;
    }
}

/** Keys: sums [4 rows] of lanes first .. to those of tokens. */
TQ_INLINE void fold_keys(const tq_words rows[4], int32_t first, uint32_t *sums)
{
    uint32_t lanes[TQ_LANES];
    for (int32_t r = 0; r < 4; r++) {
        memcpy(lanes, &rows[r], sizeof lanes);
        for (int32_t i = 0; i < TQ_LANES; i += 4)
            sums[8 * r + (first + i) / 4] = lanes[i] + lanes[i + 1] + lanes[i + 2] + lanes[i + 3];
    }
}

/** Values: sums [8 columns of a lane, as add_rows has them] to those of columns. */
TQ_INLINE void fold_values(const tq_words columns[8], uint32_t *sums)
{
    static const int32_t column[8] = {0, 4, 2, 6, 1, 5, 3, 7};
    for (int32_t i = 0; i < 8; i++) {
        const tq_ints4 lanes = tq_fold_ints((tq_ints)columns[i]);
        for (int32_t t = 0; t < 4; t++) sums[16 * (column[i] / 4) + 4 * t + column[i] % 4] = (uint32_t)lanes[t];
    }
}

TQ_INLINE void recode_in(int from, int to, int is_key, const recode_tables *t, int32_t n, const uint32_t *words,
                         uint32_t *out, uint32_t *sums)
{
    tq_words columns[2][8] = {{{0}}};
    for (int32_t v = 0; v < LANE_VECTORS; v++) {
        tq_words key_sums[2][4] = {{{0}}};
        for (int32_t k = 0; k < n; k++) {
            const int32_t lane = TQ_LANES * v;
            tq_words rows[4], signs[4], before[4][2], after[4][2];
            recode_read(from, words + TQ_TILE * from * k + lane, rows, signs);
            TQ_UNROLL
            for (int r = 0; r < 4; r++) {
                const tq_words nibbles[2] = {rows[r] & 0x0f0f0f0f, rows[r] >> 4 & 0x0f0f0f0f};
                TQ_UNROLL
                for (int i = 0; i < 2; i++) {
                    before[r][i] = tq_look_up(t->before, nibbles[i]);
                    after[r][i] = tq_look_up(t->after, nibbles[i]);
                }
                rows[r] = tq_look_up(t->code, nibbles[0]) | tq_look_up(t->code, nibbles[1]) << 4;
                if (from == 5) rows[r] ^= signs[r] * t->flip;
                if (is_key) {
                    add_columns(&key_sums[0][r], before[r], before[r]);
                    add_columns(&key_sums[1][r], before[r], after[r]);
                }
            }
            if (!is_key) {
                add_rows(columns[0], before, before);
                add_rows(columns[1], before, after);
            }
            recode_write(to, rows, out + TQ_TILE * to * k + lane);
        }
        for (int i = 0; i < 2 && is_key; i++) fold_keys(key_sums[i], TQ_LANES * v, sums + TQ_TILE * i);
    }
    for (int i = 0; i < 2 && !is_key; i++) fold_values(columns[i], sums + TQ_TILE * i);
}

#define RECODE_WIDTHS(FROM, TO)                                                                                        \
    if (recoding->from == FROM && recoding->to == TO) {                                                                \
        if (is_key) recode_in(FROM, TO, 1, &t, n, words, out, sums);                                                   \
        else recode_in(FROM, TO, 0, &t, n, words, out, sums);                                                          \
        return;                                                                                                        \
    }

static void recode_vector(const tq_recoding *recoding, int is_key, const uint8_t *live, int32_t n,
                          const uint32_t *words, uint32_t *out, uint32_t *sums)
{
    const recode_tables t = recode_tables_of(recoding);
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
