/* The interface between the core and the instruction sets: one table of functions per ISA, filled by
 * csrc/kernels/<isa>.c. The scalar table is the definition.
 * Everything that decides a code or a byte is bit-identical in all tables; sums in attention and products with a matrix
 * (`dot`, `axpy`) are not. */
#ifndef TQ_KERNELS_H
#define TQ_KERNELS_H
#include "convert.h"
#include "plan_kind.h"
#include "turboquant.h"

/** Returns the level of a code, in steps. */
static inline int32_t tq_level(const tq_codebook *book, uint8_t code)
{
    return book->bits == TQ_WIDE_BITS ? code - 128 : book->levels[code];
}

#define TQ_ROUND 12582912.0f /* 1.5 * 2^23: x + TQ_ROUND - TQ_ROUND is x rounded to an integer */

/** Returns the code of u at 8 bits; turboquant.h, "8 bits". */
static inline uint8_t tq_wide_code(float u)
{
    float x = u * (1 / TQ_WIDE_STEP);
    x = x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x == x ? x : 0.0f; /* NaN has no integer */
    return (uint8_t)(128 + (int32_t)((x + TQ_ROUND) - TQ_ROUND));
}

/** Returns the code of the level that is nearest to u. */
static inline uint8_t tq_nearest_code(const tq_codebook *book, float u)
{
    int32_t rank = 0;
    if (book->bits == TQ_WIDE_BITS) return tq_wide_code(u);
    for (int32_t k = 0; k + 1 < book->n_levels; k++) rank += book->thresholds[k] <= u;
    return book->code_of_rank[rank];
}

/** The positive thresholds of a codebook of 4 or 5 bits, by cell: cell(x) = min(15, (int)(x * factor)), x >= 0. cell()
 *  is monotonic, so all thresholds in lower cells are below x, and only the cell's own thresholds need a comparison. */
typedef struct {
    float factor;     /* 0: no table, since a cell would have more than one threshold (4 bits) or two (5) */
    float below[16];  /* how many thresholds are in lower cells */
    float own[2][16]; /* thresholds of the cell, infinite where there are fewer */
} tq_cells;

enum { TQ_CELL_BITS = 5 };

/** Whether codes of settled rows are searched from the middle of a cell of u (docs/rounding.md, "Settled rows"). */
static inline int tq_is_searched_by_cells(int32_t bits) { return bits <= 5; }

/** How to encode the vectors of one side. */
typedef struct {
    const tq_side *side;
    const tq_codebook *books; /* [TQ_WIDE_BITS + 1], by bits; entries 0 and 7 unused */
    const tq_cells *cells;    /* [TQ_CELL_BITS + 1], by bits; only 4 and 5 are used */
    int32_t head_dim, scale;  /* scale: tq_scale */
    int32_t group_channels;
    int32_t settled;    /* whether the row is settled: docs/rounding.md, "Settled rows" */
    int32_t tries;      /* factors to try; 0: none */
    float factor;       /* of the scale: tq_hadamard_factor if settled, else 1 */
    const float *steps; /* [groups], or NULL: 1; z is divided by them already */
} tq_encoder;

/** One tile of a grid: where it is and its bits. `run` tiles from it on have the same bits (1 .. TQ_MAX_RUN). */
typedef struct {
    int32_t offset;
    int16_t bits, run;
} tq_tile;

#define TQ_MAX_RUN 8 /* 256 columns: 32-bit sums of 16-bit operands times 8-bit levels do not overflow */

/** What the halves of a tile are; turboquant.h, "tile". If they are separate, operands are precise. */
typedef enum {
    TQ_WHOLE_TILES,  /* 32 rows and 32 columns that belong together */
    TQ_HALF_COLUMNS, /* columns with and without bit 3 are of two token tiles: a block's product is 2 x 32 numbers */
    TQ_HALF_ROWS     /* rows 0..15 and 16..31 are of two token tiles: each half is multiplied by its own operand tile */
} tq_halves;

/** How codes of `from` bits become codes of `to` bits: for each code the new one, and the magnitudes of both levels in
 *  steps. Entries repeat every 2^from codes: unpacked nibbles of 3 bits have bit 3 of another code. */
typedef struct {
    int32_t from, to; /* 1 <= to <= from <= TQ_MAX_BITS */
    uint8_t code[1 << TQ_MAX_BITS], before[1 << TQ_MAX_BITS], after[1 << TQ_MAX_BITS];
} tq_recoding;

/** Tiles that products are made of: tiles[n * i + k] is tile k of block i. A block's tiles lie side by side (its 32
 *  rows times 32 n columns), its product is 32 numbers. For keys a block is a token tile (two with tiles of 16), for
 *  values a group of channels. */
typedef struct {
    const uint8_t *base;
    const tq_tile *tiles;     /* [blocks][n], offsets from base */
    int32_t blocks, n;        /* n: 1 .. TQ_MAX_GROUPS */
    tq_halves halves;         /* of every tile */
    const tq_codebook *books; /* [TQ_WIDE_BITS + 1], by bits */
    const uint8_t *ahead;     /* bytes to prefetch; never dereferenced */
    int32_t ahead_bytes;
} tq_tile_grid;

/** The online softmax of one query row (Milakov and Gimelshein, arXiv 1805.02867). */
typedef struct {
    float max, sum;   /* of all logits seen; sum of exp(logit - max) */
    float packed_sum; /* the part of sum that packed tokens have: the weight of the value centre */
} tq_softmax_state;

typedef struct {
    float scale, bias, softcap; /* logit = softcap(scale * (score * key_scale) + bias); softcap 0: none */
    float variance;             /* -r K of turboquant.h, "VARIANCE TERM": */
    const float *scales;        /* [n], of keys: variance * scale^2 is added before the soft-cap. NULL: no term */
} tq_logit;

/** The wave's part of the scores of a page: <q, c_p>. The columns of a page (tq_column in each token tile) are mirrored
 *  around its middle: columns c and page_tokens - 1 - c are u and -u positions away from it. With the pairs'
 *  coefficients turned to the middle, the sum over pairs has an even part, of cosines of u, and an odd part, of sines.
 *  So half of the columns give all. Pairs are fast or slow. Slow ones turn by at most TQ_SLOW_RADIANS from the middle
 *  of a page to its end. Both parts of their sum are polynomials of u, to float32's precision. They are interpolated
 *  from TQ_WAVE_NODES positions, however many pairs there are. */
typedef struct {
    int32_t pairs, fast; /* fast ones come first; slow ones: none, or an even number, at least TQ_WAVE_NODES */
    int32_t terms;       /* of a column's sum: fast pairs, then nodes */
    int32_t half;        /* page_tokens / 2 */
    int64_t first_page;  /* the first page in turns */
    int16_t place[TQ_MAX_HEAD_DIM / 2]; /* index of each pair of the plan in that order */
    float *table; /* [2][terms][half], at column half + c: cosines and sines; for a node its even and odd polynomial */
    float *nodes; /* [slow pairs][TQ_WAVE_NODES][2]: cosine and sine at a node */
    float *turns; /* [pages][2][pairs][2]: cosines and sines of the phase at the middle of a page, each twice */
} tq_wave;

#define TQ_WAVE_NODES 8
#define TQ_SLOW_RADIANS 5.0 /* the polynomials of degree 15 are off by 5^16 / (2^15 16!) = 2e-7 of an amplitude */

enum { TQ_WAVE_RUN = 16 }; /* positions */

/** The wave and the metric of a head, for encoding keys. Arrays are float32, padded with zeros to `n`. */
typedef struct {
    int32_t n, rank;             /* n: a multiple of 16 */
    const float *centre;         /* [n], or NULL */
    const float *along, *across; /* [n]: factors of cosine and sine of a channel's angle, turned to a position that is a
                                    multiple of TQ_WAVE_RUN; NULL without a wave */
    const float *turns;          /* [TQ_WAVE_RUN][2][n]: cosines and sines of channels, by positions after that one */
    const float *scales, *directions, *stretch; /* [n] S S, [rank][n] S W, [rank]; scales NULL: no metric */
} tq_residual;

typedef struct {
    const char *isa;
    /** Transforms n floats (a power of two, 8 or more) in place: changes the sign of number i if bit i of `before` is
     *  set (bit i % 32 of word i / 32; NULL: none), runs butterflies at distances 1, 2, 4 .. n/2, multiplies by factor,
     *  and changes signs by `after`. Bit-exact. */
    void (*hadamard)(float *x, int32_t n, float factor, const uint32_t *before, const uint32_t *after);
    /** Settles n floats (a power of two, 64 or more) in place (docs/rounding.md, "Settled rows"). Then does hadamard
     *  with factor 1 and signs `before`. Bit-exact. */
    void (*settle)(float *x, int32_t n, const uint32_t *before);
    /** Encodes a rotated vector z [head_dim] to codes [groups * group_channels] (0 where padded or without bits) and
     *  one binary16 scale. Bit-exact. */
    void (*encode)(const tq_encoder *encoder, const float *z, uint8_t *codes, uint16_t *scale);
    /** Packs codes [32 rows][32 columns] to words [bits][32], in the orders that turboquant.h draws; unpack does the
     *  reverse. Codes are in range. */
    void (*pack)(int32_t bits, const uint8_t *codes, uint32_t *words);
    void (*unpack)(int32_t bits, const uint32_t *words, uint8_t *codes);
    /** Recodes n tiles, words [n][from][32] -> out [n][to][32]. Writes sums [2][32]: for each token, in column order,
     *  the sums of before * before and of before * after. live [32][32], the same for every tile: a cell with 0 gets
     *  code 0 and is in no sum; NULL: all are live. Bit-exact. */
    void (*recode)(const tq_recoding *recoding, int is_key, const uint8_t *live, int32_t n, const uint32_t *words,
                   uint32_t *out, uint32_t *sums);
    /** Returns the bytes of an operand of `columns` (a multiple of 32) numbers, a multiple of 64. Each kernel has its
     *  own layout. */
    size_t (*operand_bytes)(int32_t columns);
    /** Turns x [rows][columns] float32 into operands, operand_bytes(columns) apart, 64-byte aligned. Each row is
     *  rounded to 22 bits of its largest number if precise, else to 15. */
    void (*prepare)(const float *x, int32_t columns, int32_t rows, int precise, void *operands);
    /** Multiplies tiles by operands q = 0 .. rows - 1, which lie at operands + q * operand_bytes(32 n), prepared alike:
     *      out[q * out_stride + 32 i + tq_column(row)] = (or +=, if accumulate) the sum over tiles k and columns c of
     *      block i of level(tile, row, c) * step(bits) * x_q[32 k + c]
     *  An operand with a number that is not finite gives NaN. Column order is the order of scales and of value columns,
     *  so that scores become an operand without a permutation.
     *  TQ_HALF_COLUMNS: out[.. + 64 i + 32 h + ..] is the sum over columns c of token tile h; x has the same number at
     *  c and at c ^ 8.  TQ_HALF_ROWS: operands have 64 n columns; rows of h = row / 16 are multiplied by
     *  x_q[64 k + 32 h + c]. */
    void (*multiply)(const tq_tile_grid *grid, const void *operands, int32_t rows, int precise, int accumulate,
                     float *out, int32_t out_stride);
    /** A softmax step over n tokens (a multiple of 32) has two parts, so that one may run over several rows before the
     *  other. The first turns scores into logits, in place. It returns the largest of them and `max`. Tokens that are
     *  not visible [n] (bytes, NULL: all are) become -inf, whatever their score and scale. key_scales NULL: 1. */
    float (*logits)(float *scores, const float *key_scales, const uint8_t *visible, int32_t n, const tq_logit *logit,
                    float max);
    /** Turns logits into weights exp(logit - max) * value_scale, in place, with the `max` that `logits` returned.
     *  Returns the factor for earlier sums. hidden: whether some tokens are not visible; their weight is 0, whatever
     *  their scale. value_scales NULL: 1, and the tokens are exact. */
    float (*weights)(float *logits, const float *value_scales, int hidden, int32_t n, float max,
                     tq_softmax_state *state);
    /** Changes the scores of a page, [rows][stride] in column order, to score * key_scale + the wave's part.
     *  coefficients: [rows][2][pairs][2] of tq_wave_row. */
    void (*add_wave)(const tq_wave *wave, int64_t page, const float *coefficients, int32_t rows,
                     const float *key_scales, float *scores, int32_t stride);
    /** Computes cosines and sines of n phases (a multiple of 16) in units of 2^-32 turns, within 1e-7. Bit-exact. */
    void (*turn)(const uint32_t *phases, int32_t n, float *cosines, float *sines);
    /** Changes k [n] to A (k - c_p), where p is `step` positions after that of the residual. Bit-exact. */
    void (*subtract)(const tq_residual *residual, int32_t step, float *k);
    /** Whether low <= x <= high holds for all of n numbers. */
    int (*within)(const float *x, int32_t n, float low, float high);
    /** Converts n numbers of a dtype to float32. */
    void (*load)(int32_t dtype, const void *x, float *y, int64_t n);
    float (*dot)(const float *x, const float *y, int32_t n);
    void (*axpy)(float a, const float *x, float *y, int32_t n); /* y += a x */
    const char *names[5]; /* for tq_kernel_name: of rotate, append, attend, dequantize and dot, such as "rotate_avx2" */
} tq_kernels;

extern const tq_kernels tq_kernels_scalar, tq_kernels_avx2, tq_kernels_avx2_vnni, tq_kernels_avx512,
    tq_kernels_avx512_vnni, tq_kernels_avx512_amx, tq_kernels_neon,
    tq_kernels_neon_dot; /* scalar always, the others where setup.py says TQ_HAVE_<ISA> */

/** Returns the column of token i of a token tile (turboquant.h, "column"); tq_token is its inverse. */
static inline int32_t tq_column(int32_t i) { return 4 * (i % 8) + i / 8; }

static inline int32_t tq_token(int32_t c) { return 8 * (c % 4) + c / 4; }

#define TQ_TILE_CODES (TQ_TILE * TQ_TILE)

/** Do pack and unpack for any width of a plan; turboquant.h, "8 bits". */
static inline void tq_pack_tile(const tq_kernels *kernels, int32_t bits, const uint8_t *codes, uint32_t *words)
{
    if (bits <= TQ_MAX_BITS) {
        kernels->pack(bits, codes, words);
        return;
    }
    uint8_t half[TQ_TILE_CODES];
    for (int32_t k = 0; k < 2; k++) {
        for (int32_t i = 0; i < TQ_TILE_CODES; i++) half[i] = codes[i] >> 4 * k & 15;
        kernels->pack(4, half, words + 4 * TQ_TILE * k);
    }
}

static inline void tq_unpack_tile(const tq_kernels *kernels, int32_t bits, const uint32_t *words, uint8_t *codes)
{
    if (bits <= TQ_MAX_BITS) {
        kernels->unpack(bits, words, codes);
        return;
    }
    uint8_t high[TQ_TILE_CODES];
    kernels->unpack(4, words, codes);
    kernels->unpack(4, words + 4 * TQ_TILE, high);
    for (int32_t i = 0; i < TQ_TILE_CODES; i++) codes[i] = (uint8_t)(codes[i] | high[i] << 4);
}
#endif
