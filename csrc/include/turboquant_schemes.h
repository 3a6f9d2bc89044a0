/* What quantisers of other papers add to turboquant.h: levels that are no codebook, several blocks a side, sketches of
 * the error. Plans with any of it are not plain; the same functions run them, with slower code.
 *
 * THE BYTE FORMAT of sides that are not plain. Codes are as in turboquant.h, with the tiles of the sketch after those
 * of the groups. Scales are
 *   | numbers of block 0 | of block 1 | .. | of the sketch |, each [page_tokens] binary16 in column order.
 *   block    consecutive groups that share their per-token numbers: one scale, or a scale and then a zero point
 *            (TQ_LEVELS_AFFINE).
 *   sketch   one sign for each row of a matrix S applied to the quantisation error r = z - decoded z: tiles of 1 bit
 *            after the groups' tiles, 32 rows each, code 1 for (S r) >= 0; and one number per token, the norm of r or
 *            its mean magnitude.
 *
 * PLANS.
 *   sketch_rows  1..head_dim with a Gaussian sketch, else 0
 *   bits         one width per block with affine or absmax levels or a table; absmax: at least 2; table: at most 6
 *   blocks       one with a table */
#ifndef TURBOQUANT_SCHEMES_H
#define TURBOQUANT_SCHEMES_H
#include "turboquant.h"

#if defined(__cplusplus)
extern "C" {
#endif

/** What the codes of a side stand for; z is the rotated vector, s and o are stored per token and block. */
typedef enum {
    TQ_LEVELS_CODEBOOK = 0, /* s * level of the plan's codebook law, s by tq_scale over the block's channels alone */
    TQ_LEVELS_AFFINE =
        1, /* o + s * code: o = min z, s = (max z - min z) / (2^bits - 1); code = round to even (z - o) / s */
    TQ_LEVELS_ABSMAX =
        2, /* s * (code - 2^(bits-1)): s = max |z| / (2^(bits-1) - 1); z / s rounded half away from 0 (q8_0) */
    TQ_LEVELS_TABLE =
        3 /* table[code], in the units of z: ascending levels that come with each call; nothing stored per token */
} tq_levels;

/** Which signs are stored of the quantisation error r, a vector of d = head_dim numbers. m = sketch_rows. */
typedef enum {
    TQ_SKETCH_NONE = 0,
    TQ_SKETCH_GAUSSIAN =
        1, /* signs of S r, S [m, d] comes with each call; r is decoded as sqrt(pi/2) / m * ||r|| * S^T sign(S r),
              which makes <q, z> unbiased over a Gaussian S (QJL; TurboQuant prod, arXiv 2504.19874, Algorithm 2) */
    TQ_SKETCH_SIGN = 2 /* m = d signs of r itself, times the mean |r| of the token, or times a table's last entry */
} tq_sketch;

/** Fills matrix [rows, head_dim] float32 row-major with independent draws of N(0, 1), the same on every machine: the
 *  sketch S of a quantised Johnson-Lindenstrauss transform (QJL, arXiv 2406.03482).  rows, head_dim: 1..TQ_MAX_DIM. */
TQ_API tq_status tq_gaussian(uint64_t seed, int32_t rows, int32_t head_dim, float *matrix, tq_error *error);

#if defined(__cplusplus)
}
#endif
#endif
