/* The wave and the metric of keys (turboquant.h, tq_transform): the transform of a key before its rotation, and the
 * wave's part of the scores of packed tokens. */
#ifndef TQ_WAVE_H
#define TQ_WAVE_H
#include "internal.h"

/** Computes cosine and sine of a phase in units of 2^-32 turns, within 1e-7. */
static inline void tq_turn(uint32_t phase, float *cosine, float *sine)
{
    uint32_t quarter = (phase + 0x20000000u) >> 30;                       /* the nearest quarter turn */
    float x = (float)(int32_t)(phase - (quarter << 30)) * 1.46291808e-9f; /* 2 pi / 2^32: -pi/4 .. pi/4 */
    float z = x * x; /* minimax polynomials of Cephes' sinf and cosf */
    float s = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * x + x;
    float c =
        ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z - 0.5f * z + 1.0f;
    float along = quarter & 1 ? s : c, across = quarter & 1 ? c : s;
    *cosine = (quarter + 1) & 2 ? -along : along;
    *sine = quarter & 2 ? -across : across;
}

/** Returns the phase of an increment at a position. */
static inline uint32_t tq_phase(uint32_t increment, int64_t position)
{
    return (uint32_t)((uint64_t)increment * (uint64_t)position);
}

/** Checks the channels of pairs, after tq_check_transform. */
tq_status tq_wave_check_channels(const tq_plan *plan, const tq_transform *t, tq_error *error);
/** Checks the numbers of moments, before anything is stored. */
tq_status tq_wave_check_numbers(const tq_plan *plan, const tq_transform *t, int32_t kv_heads, const tq_kernels *kernels,
                                tq_error *error);

/* ---- keys to residuals ----
 * c_p = centre + along cos + across sin, channel by channel. (along, across) are (a, -b) in the first channel of a pair
 * and (b, a) in the second. They are turned to a multiple of TQ_WAVE_RUN positions, and from there by angles that all
 * heads share. The bits of the result depend on the position alone. */

/** State of a call. */
typedef struct {
    const tq_plan *plan;
    const tq_transform *transform;
    const tq_kernels *kernels;
    float *turns;         /* [TQ_WAVE_RUN][2][head_dim, padded to 16]; bit i of `turned`: whether entry i is filled */
    float *start;         /* [2][padded]: cosines and sines at the start of run start_run, for all heads */
    int64_t start_run;    /* the first run of the first sequence that packs tokens; -1: none yet */
    uint32_t *increments; /* of each channel */
    uint32_t turned;
    uint8_t shared[TQ_MAX_HEAD_DIM / 2]; /* pairs that share a channel with an earlier one: subtracted one by one */
} tq_keys;

/** State of one head; `turned` is at the start of run `run`. */
typedef struct {
    const tq_keys *keys;
    tq_residual residual;
    float *amplitudes, *turned; /* [2][padded]: along and across; after `turned`: cosines and sines */
    int64_t run;
    int32_t head, sums; /* sums: whether a shared pair has an amplitude other than 0 */
} tq_head_keys;

/** Return the floats of `memory` below. */
int64_t tq_keys_floats(const tq_plan *plan);
int64_t tq_head_keys_floats(const tq_plan *plan);
void tq_keys_begin(const tq_plan *plan, const tq_transform *t, const tq_kernels *kernels, float *memory, tq_keys *keys);
/** Fills in the angles for positions first .. last - 1. */
void tq_keys_turn(tq_keys *keys, int64_t first, int64_t last);
/** `centre` [head_dim] or NULL. */
void tq_head_keys_begin(const tq_keys *keys, int32_t head, const float *centre, float *memory, tq_head_keys *h);
/** Changes k, at a position, to A (k - c_p). k has room for head_dim padded to a multiple of 16. */
void tq_key_to_residual(tq_head_keys *h, int64_t position, float *k);
/** Does the inverse, for k [head_dim]. */
void tq_residual_to_key(const tq_plan *plan, const tq_transform *t, int32_t head, int64_t position, const float *centre,
                        float *k);
/** Changes q to A^-1 q; does nothing without a metric. */
void tq_metric_query(const tq_plan *plan, const tq_transform *t, int32_t head, float *q);

/* ---- the wave's part of scores: tq_wave in kernels.h ---- */

/** Return the floats of a wave's arrays, of `turns` for one page. */
int64_t tq_wave_table_floats(const tq_plan *plan);
int64_t tq_wave_node_floats(const tq_plan *plan);
int64_t tq_wave_turn_floats(const tq_plan *plan);
/** Fills everything but first_page and the pointers: turns for pages first_page .. last_page - 1 of sequences whose
 *  packed tokens begin at position `sinks`. */
void tq_wave_fill(const tq_plan *plan, const tq_transform *t, int32_t sinks, int64_t last_page, tq_wave *wave);
/** Finds the coefficients of a query q, before metric and rotation: x of the cosine and y of the sine of position p's
 *  phase, for a token at p + origin. row, by `place`: (x, y) [pairs][2], then (y, -x) [pairs][2]. */
void tq_wave_row(const tq_plan *plan, const tq_transform *t, int32_t head, const tq_wave *wave, const float *q,
                 int64_t origin, float *row);
#endif
