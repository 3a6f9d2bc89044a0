/* Waves and metrics, written once for every unit: the wave's part of the scores of a page (see tq_wave in
 * core/kernels.h), and the transform of a key in append (tq_residual). */
#ifndef TQ_KERNELS_WAVE_H
#define TQ_KERNELS_WAVE_H
#include "vector.h"

enum {
    TQ_WAVE_COLUMNS = TQ_LANES == 8 ? 2 : 4,        /* vectors of columns at once: their sums stay in registers */
    TQ_NODE_VECTORS = 2 * TQ_WAVE_NODES / TQ_LANES, /* even and odd parts at the nodes, interleaved */
    TQ_PARTS = TQ_MAX_HEAD_DIM + 16, /* floats of a row: two for each pair; 16 more put rows into other cache sets */
};

typedef uint64_t tq_longs __attribute__((vector_size(4 * TQ_LANES)));

TQ_INLINE tq_floats tq_reversed(tq_floats x)
{
    tq_floats y;
    for (int i = 0; i < TQ_LANES; i++) y[i] = x[TQ_LANES - 1 - i];
    return y;
}

/* These broadcast as integers: in floats, GNU C would really compute the sum 0 + x, because x may be -0. */

TQ_INLINE tq_floats tq_all_of(const float *x)
{
    int32_t bits;
    memcpy(&bits, x, sizeof bits);
    return (tq_floats)((tq_ints){0} + bits);
}

/** Returns x[0], x[1], x[0], x[1] .. */
TQ_INLINE tq_floats tq_all_of_two(const float *x)
{
    uint64_t bits;
    memcpy(&bits, x, sizeof bits);
    return (tq_floats)((tq_longs){0} + bits);
}

/** Turns rows' coefficients from position 0 to the middle of a page, into even and odd parts [rows][pairs][2]. */
TQ_INLINE void tq_turn_rows(const int rows, const tq_wave *wave, const float *coefficients, const float *turn,
                            float (*parts)[TQ_PARTS])
{
    int32_t n = 2 * wave->pairs;
    for (int32_t i = 0; i < n; i += TQ_LANES) {
        tq_floats cosine = tq_load_floats(turn + i), sine = tq_load_floats(turn + n + i);
        TQ_UNROLL
        for (int r = 0; r < rows; r++) {
            const float *row = coefficients + 2 * (int64_t)n * r + i;
            tq_store_floats(parts[r] + i, tq_fused(tq_load_floats(row), cosine, tq_load_floats(row + n) * sine));
        }
    }
}

/** Replaces the rows' coefficients of slow pairs by the even and odd parts of their sum at the nodes. */
TQ_INLINE void tq_sum_slow(const int rows, const tq_wave *wave, float (*parts)[TQ_PARTS])
{
    tq_floats sums[4][2][TQ_NODE_VECTORS] = {0}; /* two sums for each row, of every other pair, for a shorter chain */
    const float *node = wave->nodes;
    for (int32_t i = wave->fast; i < wave->pairs; i += 2) {
        TQ_UNROLL
        for (int k = 0; k < 2; k++, node += 2 * TQ_WAVE_NODES) TQ_UNROLL
        for (int r = 0; r < rows; r++) {
            tq_floats part = tq_all_of_two(parts[r] + 2 * (i + k));
            TQ_UNROLL
            for (int v = 0; v < TQ_NODE_VECTORS; v++)
                sums[r][k][v] = tq_fused(part, tq_load_floats(node + TQ_LANES * v), sums[r][k][v]);
        }
    }
    TQ_UNROLL
    for (int r = 0; r < rows; r++) TQ_UNROLL
    for (int v = 0; v < TQ_NODE_VECTORS; v++)
        tq_store_floats(parts[r] + 2 * wave->fast + TQ_LANES * v, sums[r][0][v] + sums[r][1][v]);
}

/** Sums the even parts (with `odd` the odd parts) of `columns` vectors of columns. */
TQ_INLINE void tq_sum_terms(const int rows, const int columns, const tq_wave *wave, const float *table,
                            float (*parts)[TQ_PARTS], const int odd, tq_floats (*sums)[TQ_WAVE_COLUMNS])
{
    TQ_UNROLL
    for (int r = 0; r < rows; r++) TQ_UNROLL
    for (int v = 0; v < columns; v++) sums[r][v] = (tq_floats){0};
    for (int32_t i = 0; i < wave->terms; i++, table += wave->half) {
        tq_floats term[TQ_WAVE_COLUMNS];
        TQ_UNROLL
        for (int v = 0; v < columns; v++) term[v] = tq_load_floats(table + TQ_LANES * v);
        TQ_UNROLL
        for (int r = 0; r < rows; r++) {
            tq_floats part = tq_all_of(parts[r] + 2 * i + odd);
            TQ_UNROLL
            for (int v = 0; v < columns; v++) sums[r][v] = tq_fused(part, term[v], sums[r][v]);
        }
    }
}

/** Multiplies scores by key scales and adds the wave, in columns half + c .. and in their mirror images. */
TQ_INLINE void tq_add_columns(const int rows, const int columns, const tq_wave *wave, int32_t c,
                              float (*parts)[TQ_PARTS], const float *key_scales, float *scores, int32_t stride)
{
    tq_floats even[4][TQ_WAVE_COLUMNS], odd[4][TQ_WAVE_COLUMNS];
    tq_sum_terms(rows, columns, wave, wave->table + c, parts, 0, even);
    tq_sum_terms(rows, columns, wave, wave->table + (int64_t)wave->terms * wave->half + c, parts, 1, odd);
    TQ_UNROLL
    for (int v = 0; v < columns; v++) {
        int32_t right = wave->half + c + TQ_LANES * v, left = wave->half - c - TQ_LANES * (v + 1);
        tq_floats right_scale = tq_load_floats(key_scales + right), left_scale = tq_load_floats(key_scales + left);
        TQ_UNROLL
        for (int r = 0; r < rows; r++) {
            float *of_row = scores + (int64_t)r * stride;
            tq_floats plus = even[r][v] + odd[r][v], minus = tq_reversed(even[r][v] - odd[r][v]);
            tq_store_floats(of_row + right, tq_fused(tq_load_floats(of_row + right), right_scale, plus));
            tq_store_floats(of_row + left, tq_fused(tq_load_floats(of_row + left), left_scale, minus));
        }
    }
}

/** `rows` is a constant once inlined, at most 4. */
TQ_INLINE void tq_add_wave_rows(const int rows, const tq_wave *wave, const float *coefficients, const float *turn,
                                const float *key_scales, float *scores, int32_t stride)
{
    _Alignas(64) float parts[4][TQ_PARTS];
    int32_t c = 0;
    tq_turn_rows(rows, wave, coefficients, turn, parts);
    if (wave->fast < wave->pairs) tq_sum_slow(rows, wave, parts);
    for (; c + TQ_LANES * TQ_WAVE_COLUMNS <= wave->half; c += TQ_LANES * TQ_WAVE_COLUMNS)
        tq_add_columns(rows, TQ_WAVE_COLUMNS, wave, c, parts, key_scales, scores, stride);
    for (; c < wave->half; c += TQ_LANES) tq_add_columns(rows, 1, wave, c, parts, key_scales, scores, stride);
}

static inline void tq_add_wave(const tq_wave *wave, int64_t page, const float *coefficients, int32_t rows,
                               const float *key_scales, float *scores, int32_t stride)
{
    const float *turn = wave->turns + 4 * (page - wave->first_page) * wave->pairs;
    for (int32_t r = 0; r < rows;) {
        const float *of_row = coefficients + 4 * (int64_t)wave->pairs * r;
        float *to = scores + (int64_t)stride * r;
        switch (rows - r) {
        case 1: tq_add_wave_rows(1, wave, of_row, turn, key_scales, to, stride); break;
        case 2: tq_add_wave_rows(2, wave, of_row, turn, key_scales, to, stride); break;
        case 3: tq_add_wave_rows(3, wave, of_row, turn, key_scales, to, stride); break;
        default: tq_add_wave_rows(4, wave, of_row, turn, key_scales, to, stride);
        }
        r += rows - r < 4 ? rows - r : 4;
    }
}

/* ---- keys: each operation is the same on every unit ---- */

/** tq_turn of core/wave.h. */
static inline void tq_turn_vector(const uint32_t *phases, int32_t n, float *cosines, float *sines)
{
    for (int32_t i = 0; i < n; i += TQ_LANES) {
        tq_words phase, quarter;
        memcpy(&phase, phases + i, sizeof phase);
        quarter = (phase + 0x20000000u) >> 30;
        tq_floats x = __builtin_convertvector((tq_ints)(phase - (quarter << 30)), tq_floats) * 1.46291808e-9f,
                  z = x * x;
        tq_floats s = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * x + x;
        tq_floats c =
            ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z - 0.5f * z + 1.0f;
        tq_ints swapped = -(tq_ints)(quarter & 1);
        tq_floats along = tq_select(swapped, s, c), across = tq_select(swapped, c, s);
        tq_store_floats(cosines + i, (tq_floats)((tq_words)along ^ ((quarter + 1) & 2) << 30));
        tq_store_floats(sines + i, (tq_floats)((tq_words)across ^ (quarter & 2) << 30));
    }
}

enum { TQ_DOT_VECTORS = 16 / TQ_LANES }; /* dot products have sixteen sums */

TQ_INLINE float tq_sum_sixteen(const tq_floats *sums)
{
    tq_floats4 quarters[4];
    memcpy(quarters, sums, sizeof quarters);
    tq_floats4 sum = (quarters[0] + quarters[1]) + (quarters[2] + quarters[3]);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/** Turns k into x = k - c_p, with a metric into S S x + S W e (S W)^T x. rank: constant once inlined, -1: no metric. */
TQ_INLINE void tq_subtract_rank(const int rank, const tq_residual r, int32_t step, float *k)
{
    const float *cosines = r.turns + 2 * (int64_t)step * r.n, *sines = cosines + r.n;
    tq_floats sums[4][TQ_DOT_VECTORS] = {0};
    for (int32_t i = 0; i < r.n; i += 16) {
        TQ_UNROLL
        for (int v = 0; v < TQ_DOT_VECTORS; v++) {
            int32_t at = i + TQ_LANES * v;
            tq_floats x = tq_load_floats(k + at);
            if (r.centre) x -= tq_load_floats(r.centre + at);
            if (r.along)
                x -= tq_fused(tq_load_floats(r.along + at), tq_load_floats(cosines + at),
                              tq_load_floats(r.across + at) * tq_load_floats(sines + at));
            tq_store_floats(k + at, x);
            TQ_UNROLL
            for (int j = 0; j < rank; j++)
                sums[j][v] = tq_fused(x, tq_load_floats(r.directions + (int64_t)j * r.n + at), sums[j][v]);
        }
    }
    if (rank < 0) return;
    tq_floats along[4];
    TQ_UNROLL
    for (int j = 0; j < rank; j++) along[j] = tq_all(r.stretch[j] * tq_sum_sixteen(sums[j]));
    for (int32_t i = 0; i < r.n; i += TQ_LANES) {
        tq_floats x = tq_load_floats(k + i) * tq_load_floats(r.scales + i);
        TQ_UNROLL
        for (int j = 0; j < rank; j++) x = tq_fused(along[j], tq_load_floats(r.directions + (int64_t)j * r.n + i), x);
        tq_store_floats(k + i, x);
    }
}

static inline void tq_subtract(const tq_residual *residual, int32_t step, float *k)
{
    switch (residual->scales ? residual->rank : -1) {
    case -1: tq_subtract_rank(-1, *residual, step, k); break;
    case 0: tq_subtract_rank(0, *residual, step, k); break;
    case 1: tq_subtract_rank(1, *residual, step, k); break;
    case 2: tq_subtract_rank(2, *residual, step, k); break;
    case 3: tq_subtract_rank(3, *residual, step, k); break;
    default: tq_subtract_rank(4, *residual, step, k);
    }
}

static inline int tq_within(const float *x, int32_t n, float low, float high)
{
    tq_ints all = {0};
    int32_t i = 0;
    all -= 1;
    for (; i + TQ_LANES <= n; i += TQ_LANES) {
        tq_floats y = tq_load_floats(x + i);
        all &= (y >= low) & (y <= high);
    }
    int right = 1;
    for (int j = 0; j < TQ_LANES; j++) right &= all[j] != 0;
    for (; i < n; i++) right &= x[i] >= low && x[i] <= high;
    return right;
}
#endif
