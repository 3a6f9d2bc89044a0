/* TurboQuant: the C ABI. Types, the byte format and every contract of the core; no code.
 *
 * The method (arXiv 2504.19874, with the EDEN scale of arXiv 2108.08842): a vector x of head_dim channels is centred,
 * rotated and scaled, z = R (x - mu) / step; each coordinate of u = z / rms(z) becomes a b-bit code, the nearest level
 * of a codebook made for the distribution of u; the codes and one binary16 scale s per token are stored. Decoding gives
 * mu + R^T (s * step * level).
 *
 * THE BYTE FORMAT, version 2. Everything is little-endian. One format for the CPU, CUDA, NumPy and disk.
 *
 *   page     page_tokens (128 in a cache) consecutive tokens of one layer, all KV heads:  uint8 [kv_heads,
 *            record_bytes]
 *   record   one page of one KV head:
 *            | key codes | value codes | key scales | value scales |
 *              codes         [token tiles of the page], each the tiles of the groups with bits > 0: tile_bytes
 *              scales        [page_tokens] binary16 in column order, s of each token; absent for a side without codes
 *   group    32 (or 16: below) consecutive rotated channels with one width; a group of 0 bits takes no space. head_dim
 *            is padded to whole groups: a padding channel has code 0 and is never read.
 *   tile     32 tokens x 32 channels of one group at b bits: uint32 [b][32], word w of lane l at index 32 w + l.
 *            Rows are tokens for keys and channels for values; columns are channels for keys and tokens for values.
 *            Lane l = 4 g + t holds rows g, g + 8, g + 16, g + 24 (r = 0..3, row = g + 8 r) and eight columns of each:
 *            n = 0..3 is column 4 t + n, n = 4..7 is column 16 + 4 t + n - 4. That is registers a0..a3 of two
 *            mma.m16n8k32 A fragments, and all codes that share a 32-bit word belong to one row wherever possible.
 *   column   token i of a token tile is column tq_column(i) = 4 (i % 8) + i / 8; column c is token 8 (c % 4) + c / 4.
 *            (The four scores a CUDA lane owns after Q K are the four bytes it needs for P V.)
 *
 *   Bits of the words of a lane; c(r, n) is the code of row g + 8 r, column n:
 *     4 bits   word r:        nibble n = c(r, n)                                          r = 0..3
 *     3 bits   word r:        nibble n = c(r, n) | bit r of c(3, n) << 3                  r = 0..2
 *     2 bits   word h:        byte i, bits 2 r and 2 r + 1 = c(r, 4 h + i)                h = 0, 1;  i = 0..3;  r = 0..3
 *     1 bit    word 0:        byte i, bit r + 4 h = c(r, 4 h + i)
 *     5 bits   words 0..3:    c & 15 as 4 bits;  word 4: c >> 4 as 1 bit, which is the sign
 *     6 bits   words 0..3:    c & 15 as 4 bits;  words 4, 5: c >> 4 as 2 bits, of which the upper one is the sign
 *     8 bits   words 0..3:    c & 15 as 4 bits;  words 4..7: c >> 4 as 4 bits
 *
 *   Codes of a codebook: rank k (0 = most negative level) of 2^b levels, L = 2^b:
 *     1, 2, 3 bits  the code is the rank.
 *     4, 5, 6 bits  magnitude m = k - L/2 and sign 0 if k >= L/2, else m = L/2 - 1 - k and sign 1 (negative);
 *                   code = m | sign << (b - 1).
 *     8 bits        equally spaced levels of any law: level (code - 128) * TQ_WIDE_STEP; code = 128 + u / TQ_WIDE_STEP
 *                   rounded half to even, at least 1 and at most 255.
 *
 * Groups of 16 channels let widths follow the variance more closely, and need less padding. They differ in:
 *   tile     64 tokens (token tiles h = 0, 1 of 32) x 16 channels of one group. Words, rows and columns as above, and
 *            in them
 *              keys     row i is token i of both token tiles; channel c of h is column (c & 7) | h << 3 | (c & 8) << 1
 *              values   row c | h << 4 is channel c of h; column tq_column(i) is token i of both
 *            so that lanes t = 2 h, 2 h + 1 have the keys of token tile h, and r = 2 h, 2 h + 1 its values: products of
 *            tiles keep their shape, and two token tiles never meet in one sum.
 *   codes    [page_tokens / 64], each [groups with bits > 0] tiles.
 *
 * docs/rounding.md has the order of operations that makes codes and scales, with a worked row. Decoding does not depend on it.
 *
 * turboquant_schemes.h has what quantisers of other papers add: other levels, several blocks, sketches.
 *
 * Rules that hold for every function: none prints, aborts, exits or allocates, except tq_set_num_threads and the first
 * parallel call, which start worker threads; nothing is kept after a call; a failed call has written nothing to any
 * output unless its comment says otherwise; `error` may be NULL. Pointers are to host memory. Dense means C-contiguous.
 */
#ifndef TURBOQUANT_H
#define TURBOQUANT_H
#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#if defined(__GNUC__)
#define TQ_API __attribute__((visibility("default")))
#else
#define TQ_API
#endif

#define TQ_VERSION "0.1.0"
#define TQ_FORMAT_VERSION 2
#define TQ_TILE 32         /* rows and columns of a tile; tokens of a token tile */
#define TQ_FINE_GROUP 16   /* channels of a group, if not 32 */
#define TQ_PAGE_TOKENS 128 /* tokens of a page in a cache */
#define TQ_MAX_BITS 6
#define TQ_WIDE_BITS 8 /* the one width above 6 */
#define TQ_WIDE_STEP 0.03125f
#define TQ_CODE_TOLERANCE 0x1p-17f /* 64 ulp of 1 */
#define TQ_SETTLED_UNITS 64.0f     /* cells per unit of u, in which codes of settled rows are searched */
#define TQ_MAX_HEAD_DIM 512        /* of a plan with values; key-only plans (vectors) go up to TQ_MAX_DIM */
#define TQ_MAX_SPHERE_DIM 256      /* of a plan with the sphere codebook, or with tiles of 16 channels */
#define TQ_MAX_DIM 4096
#define TQ_MAX_GROUPS (TQ_MAX_DIM / TQ_TILE)
#define TQ_MAX_TILES (2 * TQ_MAX_GROUPS) /* tiles of a token tile: of the groups, and of the rows of a sketch */
#define TQ_MAX_INPUT 16384.0f /* largest magnitude accepted in keys, values and vectors; scales are binary16 */

/* ---- status ---- Numbers are never reused. 1..9: the caller's arguments; 10..19: the machine. */
typedef enum {
    TQ_OK = 0,
    TQ_E_VALUE = 1,        /* a number, size, alignment or overlap */
    TQ_E_TYPE = 2,         /* a dtype */
    TQ_E_MEMORY = 10,      /* no memory or threads */
    TQ_E_UNSUPPORTED = 11, /* an instruction set or device that is not there */
    TQ_E_CUDA = 12         /* the CUDA runtime failed; `got` is its cudaError_t */
} tq_status;

/** What went wrong: "`argument[index]` must be `wants`, got `got`". Strings are static. */
typedef struct {
    tq_status status;
    const char *argument; /* the name of the argument as this header spells it */
    const char *wants;    /* what it should be, to follow "must be " */
    int64_t index;        /* element of the argument, or -1 for the argument itself */
    double got;           /* what it was; exact for integers below 2^53 */
} tq_error;

/** Returns a sentence for a status: static, never NULL. */
TQ_API const char *tq_status_message(tq_status status);

/* ---- dtypes ---- */
typedef enum { TQ_F32 = 0, TQ_F16 = 1, TQ_BF16 = 2 } tq_dtype;

/* ---- codebooks ---- */
typedef enum {
    TQ_CODEBOOK_NORMAL = 0, /* levels for N(0, 1) */
    TQ_CODEBOOK_SPHERE =
        1, /* levels for a coordinate of sqrt(d) times a uniform unit vector of d dimensions, d = head_dim <= TQ_MAX_SPHERE_DIM */
    TQ_CODEBOOK_UNIFORM = 2 /* equally spaced levels, the step that is best for N(0, 1) (Max 1960, Table II) */
} tq_codebook_law;

/** Levels are int8 times one step, so that every backend looks them up as bytes; Lloyd-Max (Max 1960, Lloyd 1982) at 3
 *  to 6 bits before rounding to int8, the best uniform quantiser at 1 and 2 bits (odd levels -1, 1 and -3, -1, 1, 3).
 *  Symmetric. */
typedef struct {
    int32_t bits, n_levels;                   /* n_levels = 1 << bits */
    float step;                               /* a decoded number is levels[code] * step, one rounded product */
    int8_t levels[1 << TQ_MAX_BITS];          /* by code */
    float thresholds[(1 << TQ_MAX_BITS) - 1]; /* ascending, n_levels - 1 of them; rank = how many thresholds are <= u */
    uint8_t code_of_rank[1 << TQ_MAX_BITS];
} tq_codebook;

/** Copies the codebook of `bits` (1..6) for a law; head_dim is used by TQ_CODEBOOK_SPHERE only. TQ_E_VALUE for a number
 *  that is out of range. The tables are constants made offline (csrc/core/codebook_tables.h names its generator). */
TQ_API tq_status tq_get_codebook(tq_codebook_law law, int32_t head_dim, int32_t bits, tq_codebook *out,
                                 tq_error *error);

/* ---- random numbers and rotations ---- */

/** Returns the four words of Philox4x32-10 (Salmon et al., SC11) for counter {block, stream, 0, 0} (64-bit block, low
 *  word first; then the 64-bit stream) and key seed (low word first). The one source of randomness of the project. */
TQ_API void tq_random(uint64_t seed, uint64_t stream, uint64_t block, uint32_t out[4]);

typedef enum {
    TQ_ROTATION_NONE = 0,
    TQ_ROTATION_HADAMARD = 1, /* random-sign Hadamard, below */
    TQ_ROTATION_DENSE = 2     /* a matrix that the caller passes with each call */
} tq_rotation;

/* The Hadamard rotation of head_dim = d channels (a multiple of 8), p = the largest power of two <= d. Pass 0 acts on
 * channels 0..p-1; when p < d, pass 1 then acts on channels d-p..d-1. A pass multiplies channel i of its p by the sign
 * of bit i of stream `pass` (bit i of the words of tq_random(seed, pass, i / 128): word i % 128 / 32, bit i % 32; 1 is
 * minus), runs the Walsh-Hadamard butterflies (a, b) -> (a + b, a - b) at distances 1, 2, 4 .. p/2 in that order, and
 * multiplies by fl(1 / sqrt(p)).
 * The inverse undoes the passes in reverse. All in float32, no contraction: bit-identical everywhere. */

/** Fills matrix [head_dim, head_dim] float32 row-major with a Haar-distributed rotation (Stewart 1980: Householder
 *  reflections of Gaussian vectors), computed in float64 without libm's transcendentals: the same on every machine.
 *  O(head_dim^3), offline.  head_dim: a multiple of 8 in 8..TQ_MAX_DIM.
 *  workspace  head_dim * (head_dim + 2) doubles, 8-byte aligned; contents lost. */
TQ_API tq_status tq_haar(uint64_t seed, int32_t head_dim, float *matrix, double *workspace, tq_error *error);

/* ---- plans ---- */
typedef enum {
    TQ_SCALE_EDEN = 0,           /* rms(z) <u,u> / <c,u>: <q, s c> unbiased over signs (EDEN, arXiv 2108.08842) */
    TQ_SCALE_NORM = 1,           /* ||z|| / sqrt(n) (TurboQuant mse) */
    TQ_SCALE_NORM_CORRECTED = 2, /* the decoded vector has the norm of z */
    TQ_SCALE_LEAST_SQUARES = 3   /* rms(z) <c,u> / <c,c>: least squared error */
} tq_scale;
/* u = z / rms(z) over the channels that have bits, c its decoded levels. With steps, products are in the units of x:
 * <a,b> is the sum of (step a)(step b). Otherwise the coarse codes of quiet channels would stretch the loud ones. */

/* A plan as integers, the form that files and operators carry (turboquant.Plan in Python):
 *   words[0]  TQ_FORMAT_VERSION
 *   words[1]  head_dim       a multiple of 8; 8..512, or 8..4096 without value bits; 8..256 with tiles of 16 channels
 *   words[2]  page_tokens    32, 64, 96 or 128; with tiles of 16 channels 64 or 128
 *   words[3]  group          channels of a group and of a tile, 32 or 16; groups = ceil(head_dim / group)
 *   words[4]  tq_codebook_law          words[5]  tq_scale          words[6]  seed, 0..2^63 - 1
 *   words[7 .. 10]           of keys: tq_rotation; then tq_levels, tq_sketch and sketch_rows of turboquant_schemes.h,
 *                            which are 0 in a plain plan
 *   words[11 .. 14]          the same of values
 *   words[15] wave_pairs     of keys: pairs of channels whose centre turns with the position. A multiple of 8, at most
 *                            head_dim / 2 rounded up to such a multiple; 0 above 512 channels
 *   words[16] metric         of keys: 0 none, else 1 + its rank, 0..4
 *   words[17] tries          how many factors encoding tries (docs/rounding.md): 0, 3, 5 or 7. 0 unless the plan is
 *                            plain, with the EDEN scale
 *   words[18] variance_term  of keys: 1 subtracts it from the logits of packed tokens ("Variance term" below). 0 unless
 *                            the plan is plain, with the EDEN scale, normal codebook, values, and keys of one width
 *   words[19 ..]             of each group of keys, then of values: bits, plus 16 where a block begins, as at group 0.
 *                            At least one group of keys has bits. Values without bits: all their words are 0.
 * A plan is PLAIN if both sides have codebook levels, one block, no sketch and the same rotation. The fast kernels run
 * plain plans.
 *   bits      0..6 or 8. A plan that is not plain has bits in every group, or in none of the values.
 *   group     16 in plain plans alone.
 *   A wave and a metric act on keys before their rotation, and their arrays come with each call (tq_transform). */
#define TQ_PLAN_HEADER_WORDS 19
/* Factors of u (docs/rounding.md), 1 first: close to the best ones for Gaussian rows of 128 numbers at 4 bits. */
#define TQ_TRIES_3 {1.0f, 0.9f, 1.125f}
#define TQ_TRIES_5 {1.0f, 0.84375f, 0.9375f, 1.0625f, 1.1875f}
#define TQ_TRIES_7 {1.0f, 0.84375f, 0.90625f, 0.953125f, 1.0625f, 1.125f, 1.21875f}
#define TQ_PLAN_NEW_BLOCK 16
#define TQ_MAX_METRIC_RANK 4
#define TQ_PLAN_MAX_WORDS (TQ_PLAN_HEADER_WORDS + 2 * TQ_MAX_GROUPS)

/** One side (keys or values) of a plan, read-only for callers. */
typedef struct {
    uint8_t bits[TQ_MAX_TILES];          /* by tile: groups, then the sketch's, of 1 bit */
    int32_t offset[TQ_MAX_TILES];        /* bytes from the first tile to each tile; in order, 0 bits skipped */
    int32_t tile_bytes;                  /* of the tiles of tile_tokens tokens: 128 * sum of bits */
    int32_t coded_channels;              /* real channels (below head_dim) in groups with bits */
    int32_t rotation, levels, sketch;    /* tq_rotation, tq_levels, tq_sketch */
    int32_t sketch_rows;                 /* signs of a token: head_dim for TQ_SKETCH_SIGN */
    int32_t one_width;                   /* 1 if all groups have the same bits */
    int32_t tiles;                       /* of tile_tokens tokens: groups + ceil(sketch_rows / 32) */
    int32_t scales;                      /* binary16 numbers of a token */
    int32_t matrix_rows;                 /* of tq_transform.rotation: head_dim if dense, and the Gaussian sketch's */
    int32_t step_columns;                /* of tq_transform.steps: groups in a plain plan, else the table's entries */
    uint8_t begins[TQ_MAX_GROUPS];       /* 1 where a block begins */
    int64_t codes_offset, scales_offset; /* bytes from a record's start */
} tq_side;

/** A checked plan: plain data without pointers, made by tq_plan_init and copied freely. Same for every KV head of a
 *  layer. */
typedef struct {
    int32_t is_plain, head_dim, groups, page_tokens, rotation, codebook, scale; /* rotation: the keys' */
    int32_t group_channels, tile_tokens;                                        /* of a tile: 32 and 32, or 16 and 64 */
    int32_t wave_pairs, metric, tries;                                          /* as the words */
    int32_t moments; /* numbers of a head in tq_transform.moments; a multiple of 4, 0 without a wave and a metric */
    float variance;  /* K of the variance term; 0: the plan has none */
    uint64_t seed;
    int64_t record_bytes; /* of one page of one KV head; a multiple of 64 (of 256 at 128 tokens) */
    tq_side key, value;
    uint32_t signs[2][TQ_MAX_DIM / 32]; /* of the Hadamard passes: bit i % 32 of word i / 32 */
} tq_plan;

TQ_API tq_status tq_plan_init(tq_plan *plan, const int64_t *words, size_t n_words, tq_error *error);

/* ---- transforms: what differs from layer to layer ---- */
/** How the vectors of one side are transformed, the same for all sequences. Zero-initialised: the plan's Hadamard, no
 *  centre, steps of 1. z = (R (x - centre)) / step, per group (docs/rounding.md has the order of operations).
 *  Operators take the float32 numbers of a side as one dense array [kv_heads, columns], `key_numbers` or
 *  `value_numbers`. Errors name that array too, with the flat index of a number in it. A row is
 *      | centre | steps | moments |      head_dim, step_columns rounded up to a multiple of 4, plan->moments columns
 *  without the parts that are absent. tq_transform_numbers points the fields of this struct into such an array. */
typedef struct {
    const float *rotation; /* [kv_heads or 1, head_dim, head_dim], y = R x; required by TQ_ROTATION_DENSE, else NULL.
                              With a Gaussian sketch [.., matrix_rows, head_dim]: R if it is dense, and S below it */
    int64_t rotation_stride_head; /* elements from one KV head's matrix to the next; 0 when one serves all heads */
    int64_t stride_head;          /* the same for the next three, which lie in one array in this order */
    const float *centre;          /* [head_dim], finite, at most TQ_MAX_INPUT; NULL: 0 */
    const float *steps;           /* of a plain plan [groups], in 2^-40..2^40; NULL: 1. Of others NULL, or the table of
                                     TQ_LEVELS_TABLE [step_columns]: levels, finite and ascending, and with
                                     TQ_SKETCH_SIGN the factor of its signs, at least 0 */
    /* Of keys of plans with a wave or a metric, NULL otherwise. */
    const float *moments; /* [plan->moments], 16-byte aligned on CUDA, in this order:
                                 amplitudes (a, b)   [wave_pairs, 2]     at most TQ_MAX_INPUT
                                 with a metric: S    [head_dim]          in 2^-10..2^10
                                 W^T                 [rank, head_dim]    orthonormal rows
                                 e                   [4]                 in 2^-10 - 1..2^10; 0 from the rank on */
    const int32_t *turns; /* [wave_pairs, 3]: the two channels of a pair, and how far it turns in one position, an
                             unsigned number in units of 2^-32 turns. Padding pairs have amplitudes of 0 */
} tq_transform;

/** Points stride_head, centre, steps and moments of a side's transform into numbers [kv_heads, columns], which it does
 *  not read. NULL: the side has none. TQ_E_VALUE if the plan has no parts that take so many columns. */
TQ_API tq_status tq_transform_numbers(const tq_plan *plan, int is_value, const float *numbers, int64_t columns,
                                      tq_transform *transform, tq_error *error);

/* Keys of a plan with a wave or a metric. With p the position of the token, y replaces x - centre above:
 *     c_p = centre + sum over pairs i of (a_i, b_i) turned by p * increment_i:   a cos - b sin in the first channel,
 *                                                                                a sin + b cos in the second
 *     y   = A (k - c_p),   A = S (I + W diag(e) W^T) S,   A^-1 = S^-1 (I + W diag(1 / (1 + e) - 1) W^T) S^-1
 * and a packed key is decoded to A^-1 R^T(s step level) + c_p. Scores are those of decoded keys: queries become A^-1 q,
 * and <q, c_p> is added. p is the number of tokens of the sequence before this one, its sinks included: packed index j
 * of a cache has position sinks + j. Every call that reads the token must have the same p and arrays. Codes are the
 * same on every instruction set. On CUDA a code may be that of a number that differs from the CPU's by a few ulp of k
 * and c_p. If many tokens are appended at once, it may differ by some 2^-12 rms(y), because products there keep 11 bits
 * of y. With amplitudes of norm 1,000 a logit is off by at most 2e-3, for queries of softmax_scale * |q| = 1. */

/* VARIANCE TERM, of plans with words[18]. A packed key's logit is right on average, its exponential is not: noise of
 * variance v makes it exp(v / 2) times as large. So tq_attend subtracts v / 2, before a soft-cap:
 *     logit = softcap(softmax_scale * <q, k_j> - r * K * s_j^2),     r = |softmax_scale * A^-1 q|^2 / (2 head_dim)
 * for packed tokens j alone. A is the metric, or the identity without one; s_j is the binary16 scale of key j. K s_j^2
 * is the mean of |y' - y|^2 for keys y = A (k - c_p) that are decoded to y' with that scale. K = tq_plan.variance is
 * channels times the table's number for these bits, tries and channels (csrc/core/variance_table.h; between powers of
 * two it lies on a line). Keys have no steps, since one number s would not tell the errors of groups with other steps.
 * The term belongs to attention: pages, decoded keys and tq_dot are those of the plan without it. */

/** Computes y = R x (or R^T x if inverse) for rows of head_dim float32, dense. matrix [head_dim, head_dim], without the
 *  rows of a sketch; NULL: the plan's Hadamard (or none). If values have another rotation than keys, R is the keys'.
 *  x and y may be the same array, otherwise they must not overlap. */
TQ_API tq_status tq_rotate(const tq_plan *plan, const float *matrix, int inverse, const float *x, float *y,
                           int64_t rows, tq_error *error);

/* ---- the cache ----
 * Tokens of sequence b have positions 0 .. lengths[b] - 1. Position and length alone decide where a token is stored:
 *     [ sinks | packed pages | window ]
 *     position < sinks                              sink_k/v[b, :, position]
 *     position >= max(sinks, length - window)       window_k/v[b, :, position % window]     (a ring)
 *     otherwise                                     packed index j = position - sinks: page block_table[b, j /
 *                                                   page_tokens], token j % page_tokens of it
 * Sinks and window are in the model's dtype; either may be 0. A token is quantised once, when it leaves the window.
 *
 * EXACT TOKENS BY INDEX, for engines whose pages belong to a pool. With sink_rows or tail_rows every token has a place in
 * the pages, and its packed index is its position. Exact copies of some tokens lie beside the pages, in rows that the
 * caller assigns to pages:
 *     position < sinks                row sink_rows[b] of sink_k/v, place `position` of it
 *     position >= length - window     row tail_rows[b, j % 2] of window_k/v, where j = position / page_tokens is the
 *                                     token's page; place position % tail_slots of it
 * The copies are read instead of the page. A row of -1 is absent: its tokens are read from the page, and tq_append does
 * not copy them. If the last page has no row, there is no tail; if only the page in front has none, the tail begins with
 * the last page. window <= tail_slots <= page_tokens, so a tail lies in two pages at most. All queries of a call have
 * the same tail, that of the length.
 * tq_append packs every new token, and copies new sinks to the sinks' row, and of the last two pages the newest
 * tail_slots each to their rows. The last tail_slots - window tokens of a page can therefore be taken back, which is to
 * say that other tokens are appended at the same positions. A page that is written without its row, by tq_append or by
 * anyone else, makes an old row of it stale: the caller must not name that row again.
 *
 * RAGGED BATCHES. With query_start_loc the new tokens, or the queries, of all sequences lie one after the other,
 * [total_tokens, heads, head_dim]. Those of sequence b are query_start_loc[b] .. query_start_loc[b + 1] - 1: at most
 * `tokens`, or `query_tokens`, perhaps none. A sequence without any is padding, and nothing else of it matters. A
 * sequence of length 0 is padding too: it sees nothing. No stride_batch is used. Tokens of the array that belong to no
 * sequence are neither read nor written. */

/** One layer's cache: its sizes, the arrays that store its tokens, and how their vectors are transformed. Zero-initialise
 *  it. A call names the fields that it writes; it leaves all others as they are. */
typedef struct {
    int32_t batch, kv_heads, max_pages, sinks, window;
    int32_t dtype;                                /* tq_dtype of sinks and window, and of all exact tokens of a call */
    int32_t n_sink_rows, n_tail_rows, tail_slots; /* with sink_rows, or with tail_rows; else 0 */
    int64_t n_pages;
    int64_t page_stride;        /* bytes from one page to the next, a multiple of 64; 0: kv_heads * record_bytes */
    uint8_t *pages;             /* [n_pages, kv_heads, record_bytes], 64-byte aligned; the records of a page dense */
    const int32_t *block_table; /* [batch, max_pages]: page indices; only entries of pages that a call needs are read */
    const int32_t *lengths;    /* [batch]: 0 <= length <= sinks + window + max_pages * page_tokens; with exact tokens by
                                   index at most max_pages * page_tokens */
    void *sink_k, *sink_v;     /* [batch, kv_heads, sinks, head_dim] dense; NULL iff sinks is 0.
                                   With sink_rows [n_sink_rows, kv_heads, sinks, head_dim] */
    void *window_k, *window_v; /* [batch, kv_heads, window, head_dim] dense; NULL iff window is 0.
                                   With tail_rows [n_tail_rows, kv_heads, tail_slots, head_dim]; window may be 0 */
    const int32_t *sink_rows;  /* [batch], each in -1..n_sink_rows - 1; or NULL: sinks are those of the sequence */
    const int32_t *tail_rows;  /* [batch, 2], each in -1..n_tail_rows - 1: of even pages, of odd pages; or NULL. If one
                                   of the two is given, the other kind of exact tokens is by index too, or absent */
    const int32_t *position_offset; /* [batch], or NULL: 0. Added to p in the wave of keys (above), modulo 2^32, and to
                                       nothing else: what a token sees and where it lies depend on positions alone */
    tq_transform key, value;
} tq_layer;

/** One append of `tokens` new tokens to each sequence of one layer. Token i of sequence b has position
 *  lengths[b] - tokens + i; a negative position is padding and is skipped, so left-padded batches store no padding. */
typedef struct {
    tq_layer layer; /* written: pages, sinks and window. lengths: after this append */
    int32_t tokens;
    int32_t threads;   /* the most to use; 0: tq_num_threads() */
    const void *k, *v; /* [batch, kv_heads, tokens, head_dim], last dimension dense; v NULL iff there are no values */
    int64_t k_stride_batch, k_stride_head, k_stride_token, v_stride_batch, v_stride_head, v_stride_token; /* elements */
    const int32_t *query_start_loc; /* [batch + 1], ascending, in 0..total_tokens; NULL: the batch is not ragged. Token
                                       i of sequence b has position lengths[b] - (its number of tokens) + i */
    int32_t total_tokens;           /* of k and v, with query_start_loc */
} tq_append_params;

TQ_API tq_status tq_append_workspace_bytes(const tq_plan *plan, const tq_append_params *params, size_t *bytes,
                                           tq_error *error);

/** Stores the new tokens. Those in the window go into the ring; those (old or new) that no longer fit there are
 *  rotated, quantised and packed into their pages. Bits of other tokens keep their values, so fill new pages with zeros
 *  if bytes are to be compared.
 *  Aliasing: no two arrays overlap; no page is written through two entries of block_table, and no row through two of
 *            sink_rows or tail_rows.
 *  Errors:   TQ_E_VALUE for a size, stride, alignment, length, page index (`block_table`, its flat index), row
 *            (`sink_rows`, `tail_rows`), query_start_loc, or a number in k or v that is not finite or exceeds
 *            TQ_MAX_INPUT (flat index as if dense; padding is not looked at). All are found before the first write. A
 *            scale that would exceed 65504 is stored as 65504.
 *  Cost:     O(batch * tokens * kv_heads * head_dim * log head_dim) for Hadamard.
 *  workspace   64-byte aligned, tq_append_workspace_bytes; contents lost.
 *  docs/rounding.md says where bytes are equal on all ISAs and on CUDA. */
TQ_API tq_status tq_append(const tq_plan *plan, const tq_append_params *params, void *workspace, size_t workspace_bytes,
                           tq_error *error);

/** How the pages of a batch are shared among a GPU's thread blocks. Results differ by rounding alone. */
typedef enum {
    TQ_SCHEDULE_LINE = 0,  /* the pages of all sequences in one line, cut into equal pieces: for any lengths */
    TQ_SCHEDULE_EQUAL = 1, /* equally many blocks for each sequence: faster if they are about equally long, else slow */
} tq_schedule_kind;

/** A schedule of tq_cuda_schedule is int32 [rows, 4], rows at least TQ_SCHEDULE_ROWS * multiprocessors + batch. */
#define TQ_SCHEDULE_ROWS 13

/** Attention of `query_tokens` queries per sequence over one layer. Query i of sequence b stands at position
 *  p = lengths[b] - query_tokens + i (causal), and sees key position j iff  starts[b] <= j <= p  and
 *  j > p - sliding_window (if sliding_window > 0). Sinks are exact, and so are the last `window` positions,
 *  p - window < j <= p, from the ring or from the fresh tokens; all others are packed. "The cache" above says which are
 *  exact by index. Not causal: every stored position from starts[b] on is seen.
 *  One softmax over all of it:
 *     logit = softcap(softmax_scale * <q, k_j>),  softcap(x) = cap * tanh(x / cap) if cap > 0 else x
 *             (less the variance term of a plan that has one, for packed tokens)
 *     out = sum_j softmax_j v_j
 *  where a packed k_j is mu + R^T(s step level); q is rotated once per call, values are un-rotated once per query. */
typedef struct {
    tq_layer layer; /* only read. lengths: stored tokens, the queries' own included */
    int32_t query_tokens, query_heads;
    int32_t causal;               /* 0: all queries see all tokens; then fresh must be NULL */
    int32_t sliding_window;       /* positions, 0: none */
    int32_t schedule_kind;        /* tq_schedule_kind; read by CUDA alone, as `schedule` is */
    int32_t threads;              /* the most to use; 0: tq_num_threads() */
    float softmax_scale, softcap; /* softcap 0: none */
    const void *q; /* [batch, query_heads, query_tokens, head_dim], last dimension dense; query_heads % kv_heads == 0:
                                          query head h reads KV head h / (query_heads / kv_heads) */
    int64_t q_stride_batch, q_stride_head, q_stride_token;
    const int32_t *starts;   /* [batch], or NULL: 0 */
    const int32_t *schedule; /* [schedule_rows, 4] of tq_cuda_schedule, or NULL: this call cuts the line itself */
    int64_t schedule_rows;
    const void *fresh_k, *fresh_v; /* NULL: the ring is as tq_append left it (right for query_tokens == 1, or window
                                      == 0). Otherwise the new tokens [batch, kv_heads, query_tokens, head_dim], and
                                      window_k/v is the ring as it was BEFORE they were appended: early queries need
                                      tokens that they pushed out. */
    int64_t fresh_k_stride_batch, fresh_k_stride_head, fresh_k_stride_token;
    int64_t fresh_v_stride_batch, fresh_v_stride_head, fresh_v_stride_token;
    void *out;  /* [batch, query_heads, query_tokens, head_dim], last dimension dense; 0 where nothing was attended */
    float *lse; /* [batch, query_heads, query_tokens], natural log, -inf if nothing attended; may be NULL */
    int64_t out_stride_batch, out_stride_head, out_stride_token; /* elements; all three 0: dense, and ragged ones
                                                                    [total_tokens, query_heads, head_dim] */
    int64_t lse_stride_batch, lse_stride_head, lse_stride_token; /* the same; ragged [total_tokens, query_heads] */
    const int32_t *ends; /* [batch], in 0..lengths[b], or NULL. Queries see only positions below ends[b], such as those
                            in front of the sequence's first query */
    const int32_t *query_start_loc; /* [batch + 1], ascending, in 0..total_tokens, or NULL. Query i of sequence b stands
                                       at position lengths[b] - (its number of queries) + i. Then fresh must be NULL,
                                       and with window_k either tail_rows is given or query_tokens is 1 */
    int32_t total_tokens;           /* of q, out and lse, with query_start_loc */
} tq_attend_params;

TQ_API tq_status tq_attend_workspace_bytes(const tq_plan *plan, const tq_attend_params *params, size_t *bytes,
                                           tq_error *error);
/** Finds how many bytes are enough for any call with these params, or with a smaller batch, fewer query_tokens,
 *  total_tokens or max_pages: for memory that is reserved before the first batch is known. They depend on
 *  tq_num_threads(). */
TQ_API tq_status tq_attend_workspace_bound(const tq_plan *plan, const tq_attend_params *params, size_t *bytes,
                                           tq_error *error);

/** Errors: TQ_E_VALUE for a size, stride, alignment, a length that is negative or exceeds the capacity, a start outside
 *  0..length, several causal queries without `fresh` over a window that has overflowed, a page index outside
 *  0..n_pages-1 among the entries needed, a softmax_scale or softcap that is not finite. The plan must have values.
 *  Hostile block tables and lengths cannot make it read outside the named arrays or write outside out, lse and
 *  workspace.
 *  Aliasing: TQ_E_VALUE if out or lse overlaps the other, the pages, or one of q, sinks, window and fresh tokens. The
 *            arrays that are only read may overlap. workspace overlaps nothing (not checked).
 *  Accuracy: relative to the largest output, within 2e-5 of float64 over the same bytes for float32 queries and within
 *            1e-3 for 16-bit ones, whose kernels may keep 15 bits of a query, for logits up to 400 in magnitude (above,
 *            in proportion to them); plus the rounding of `out`. A value centre far from the mean of the values
 *            cancels in the output, and its rounding stays: 1.2e-4 at 20,000 tokens with a random centre. */
TQ_API tq_status tq_attend(const tq_plan *plan, const tq_attend_params *params, void *workspace, size_t workspace_bytes,
                           tq_error *error);

/** Merges `parts` partial results over disjoint tokens:
 *     lse = log sum_i exp(lse_i),  out = sum_i exp(lse_i - lse) out_i
 *  outs [parts, rows, head_dim], lses [parts, rows] float32 -> out [rows, head_dim], lse [rows]; dense; out may not
 *  overlap. */
TQ_API tq_status tq_merge(const float *outs, const float *lses, int32_t parts, int64_t rows, int32_t head_dim,
                          float *out, float *lse, tq_error *error);

/** Decodes packed tokens, for debugging and for NumPy users: k, v [batch, kv_heads, max_tokens, head_dim] float32 dense
 *  get mu + R^T(s step level) of packed index 0 .. lengths[b] - 1, then zeros; v NULL iff the plan has no values.
 *  layer: only read. Here lengths are those of packed tokens, <= max_tokens <= max_pages * page_tokens; `sinks`, the
 *  position of packed index 0, is used only with a wave; window, dtype and exact tokens are not looked at. */
TQ_API tq_status tq_dequantize(const tq_plan *plan, const tq_layer *layer, int32_t max_tokens, float *k, float *v,
                               tq_error *error);

/** Recodes pages to fewer bits, without the vectors: pages of `plan` -> out, pages of `target`, both [n_pages,
 *  kv_heads, record_bytes] dense. A code of b bits becomes one of b' bits whose cell is 2^(b - b') cells of the old
 *  codebook: ranks are divided by that. The new scale makes the recoded row unbiased for the old one, as EDEN's does
 *  for the vector:  s' = s <y,y> / <y,y'>
 *  with y the old levels and y' the new ones (docs/rounding.md, "Recoding"). Centre, rotation, wave and metric stay
 *  those of the vectors.
 *  Plans:    both are plain, with groups of 32 channels and EDEN scales; they differ only in widths, tries and
 *            variance_term. A group of `target` has 1..6 bits and no more than that of `plan`, or 0 where that has 0.
 *            Steps count as 1, whatever calls pass: with other steps the scale is not the best.
 *  Errors:   TQ_E_VALUE for any other target (`target`; index: the group), a size, an alignment, an overlap of pages
 *            and out.
 *  Cost:     reads every byte once; no allocation. Same bytes on every ISA and on CUDA. Tokens with scale 0 and padding
 *            get code 0.
 *  threads   the most to use; 0: tq_num_threads() */
TQ_API tq_status tq_recode(const tq_plan *plan, const tq_plan *target, const uint8_t *pages, int64_t n_pages,
                           int32_t kv_heads, uint8_t *out, int32_t threads, tq_error *error);

/** Computes inner products <q, x> with packed vectors, without decoding them: queries [n_queries, head_dim] float32
 *  dense, one KV head; page i of pages [ceil(n / page_tokens), 1, record_bytes] holds vectors page_tokens * i ..; out
 *  [n_queries, n] float32 dense. Vectors have no position: a plan with a wave is refused.
 *  workspace  tq_dot_workspace_bytes bytes, 64-byte aligned. */
TQ_API tq_status tq_dot_workspace_bytes(const tq_plan *plan, int64_t n_queries, size_t *bytes, tq_error *error);
TQ_API tq_status tq_dot(const tq_plan *plan, const tq_transform *key, const float *queries, int64_t n_queries,
                        const uint8_t *pages, int64_t n, float *out, int32_t threads, void *workspace,
                        size_t workspace_bytes, tq_error *error);

/* ---- instruction sets and threads ---- */
/** Returns the levels compiled in and supported by this CPU, best first, as a static string such as "avx2 scalar". */
TQ_API const char *tq_isa_available(void);
/** Returns the level in use: the best, or the one that the environment variable TURBOQUANT_ISA names (read once, on
 *  first use); "none" if that names no available level: then every call that runs a kernel fails. */
TQ_API const char *tq_isa(void);
/** Forces a level by name; NULL: back to the default. TQ_E_UNSUPPORTED (wants lists the levels) if it is misspelt or
 *  absent. Not safe beside other calls. */
TQ_API tq_status tq_set_isa(const char *name, tq_error *error);
/** Returns the kernel that an operation ("rotate", "append", "attend", "dequantize", "dot") of a plan runs, e.g.
 *  "attend_avx2", or "attend_baseline" for the portable code of plans that are not plain; NULL for an unknown
 *  operation. */
TQ_API const char *tq_kernel_name(const char *operation, const tq_plan *plan);

/** Returns the most threads used: the environment variable TURBOQUANT_NUM_THREADS (read once, on first use), else the
 *  CPUs this process may run on; 0 if the variable is no integer in 1..256: then every call that runs a kernel fails
 *  until tq_set_num_threads. */
TQ_API int32_t tq_num_threads(void);
/** n: 1..256. Workers are started on first use and live until the process ends; a forked child starts its own. */
TQ_API tq_status tq_set_num_threads(int32_t n, tq_error *error);

#if defined(__cplusplus)
}
#endif
#endif
