/* Rotation, quantisation and packing. Written once for the vector units; scalar.c is the definition, and results have
 * the same bits.
 * A unit defines before it includes this file:
 *   tq_swap(x, h)        lane i becomes lane i ^ h, h a constant power of two below TQ_LANES
 *   tq_pick(table, m)    table[m] per lane, float table[16], m in 0..15
 *   tq_load_halves(x)    TQ_LANES numbers of float16 as float32 */
#ifndef TQ_KERNELS_CODES_H
#define TQ_KERNELS_CODES_H
#include "vector.h"
#include <float.h>
#include <math.h>

/* ---- rotation ---- */

/** Does a butterfly at distance h inside a vector: lane i without bit h gets a + b, its partner i + h gets a + -b. */
TQ_INLINE tq_floats butterfly(tq_floats x, int h)
{
    tq_ints flip;
    for (int i = 0; i < TQ_LANES; i++) flip[i] = i & h ? INT32_MIN : 0;
    return tq_swap(x, h) + (tq_floats)((tq_ints)x ^ flip);
}

/** Negates the lanes of x whose bit of `signs` is set. Lane 0 has bit `first`. */
TQ_INLINE tq_floats flip_signs(tq_floats x, const uint32_t *signs, int32_t first)
{
    tq_ints lane, bits = (tq_ints){0} + (int32_t)(signs[first / 32] >> first % 32);
    for (int i = 0; i < TQ_LANES; i++) lane[i] = 31 - i;
    return (tq_floats)((tq_ints)x ^ ((bits << lane) & INT32_MIN));
}

/** Loads x [n] into v: registers, or memory if they do not fit. The loops are unrolled where n is a constant. */
TQ_INLINE void load_in(tq_floats *v, const float *x, int32_t n)
{
    TQ_UNROLL
    for (int32_t i = 0; i < n / TQ_LANES; i++) v[i] = tq_load_floats(x + TQ_LANES * i);
}

/** Same as hadamard_scalar (scalar.c), from v to x. */
TQ_INLINE void hadamard_in(tq_floats *v, float *x, int32_t n, float factor, const uint32_t *before,
                           const uint32_t *after)
{
    int32_t vectors = n / TQ_LANES;
    TQ_UNROLL
    for (int32_t i = 0; i < vectors; i++) {
        if (before) v[i] = flip_signs(v[i], before, TQ_LANES * i);
        v[i] = butterfly(butterfly(v[i], 1), 2);
#if TQ_LANES >= 8
        v[i] = butterfly(v[i], 4);
#endif
#if TQ_LANES >= 16
        v[i] = butterfly(v[i], 8);
#endif
    }
    TQ_UNROLL
    for (int32_t h = 1; h < vectors; h *= 2) TQ_UNROLL
    for (int32_t i = 0; i < vectors; i += 2 * h) TQ_UNROLL
    for (int32_t j = i; j < i + h; j++) {
        tq_floats a = v[j], b = v[j + h];
        v[j] = a + b;
        v[j + h] = a - b;
    }
    TQ_UNROLL
    for (int32_t i = 0; i < vectors; i++) {
        v[i] *= factor;
        tq_store_floats(x + TQ_LANES * i, after ? flip_signs(v[i], after, TQ_LANES * i) : v[i]);
    }
}

TQ_INLINE void rotate_in(float *x, int32_t n, float factor, const uint32_t *before, const uint32_t *after)
{
    tq_floats v[TQ_MAX_DIM / TQ_LANES];
    load_in(v, x, n);
    hadamard_in(v, x, n, factor, before, after);
}

static void hadamard_vector(float *x, int32_t n, float factor, const uint32_t *before, const uint32_t *after)
{
    if (n < TQ_LANES) tq_kernels_scalar.hadamard(x, n, factor, before, after);
    else if (n == 8 * TQ_LANES) rotate_in(x, 8 * TQ_LANES, factor, before, after);
    else if (n == 4 * TQ_LANES) rotate_in(x, 4 * TQ_LANES, factor, before, after);
    else rotate_in(x, n, factor, before, after);
}

/** Same as settle_scalar (scalar.c). */
TQ_INLINE void settle_in(float *x, int32_t n, const uint32_t *before)
{
    tq_floats v[TQ_MAX_DIM / TQ_LANES];
    tq_ints largest = {0};
    load_in(v, x, n);
    TQ_UNROLL
    for (int32_t i = 0; i < n / TQ_LANES; i++) largest = tq_max_ints(largest, tq_magnitude_bits(v[i]));
    const uint32_t exponent = tq_bits_of(tq_max_lanes((tq_floats)largest)) >> 23;
    const int32_t least = exponent > 11 ? (int32_t)((exponent - 11) << 23) : 0;
    const tq_floats round = tq_all(tq_float_of((exponent + 5) << 23 | 0x400000));
    TQ_UNROLL
    for (int32_t i = 0; i < n / TQ_LANES; i++)
        v[i] = (tq_floats)((tq_ints)((v[i] + round) - round) & (tq_magnitude_bits(v[i]) >= least));
    hadamard_in(v, x, n, 1.0f, before, NULL);
}

static void settle_vector(float *x, int32_t n, const uint32_t *before)
{
    if (n == 8 * TQ_LANES) settle_in(x, 8 * TQ_LANES, before);
    else if (n == 4 * TQ_LANES) settle_in(x, 4 * TQ_LANES, before);
    else settle_in(x, n, before);
}

/* ---- quantisation ---- Rows of TQ_MAX_DIM floats, zero in padding channels and in groups without bits. */

/** Sums a_i b_i, i < n, as tree_sum (scalar.c) does; n is a power of two. */
TQ_INLINE float tree_dot(const float *a, const float *b, int32_t n)
{
    tq_floats v[TQ_MAX_DIM / TQ_LANES];
    if (n <= TQ_LANES) {
        v[0] = tq_load_floats(a) * tq_load_floats(b);
    } else {
        int32_t half = n / 2 / TQ_LANES;
        TQ_UNROLL
        for (int32_t i = 0; i < half; i++)
            v[i] = tq_load_floats(a + TQ_LANES * i) * tq_load_floats(b + TQ_LANES * i) +
                   tq_load_floats(a + n / 2 + TQ_LANES * i) * tq_load_floats(b + n / 2 + TQ_LANES * i);
        TQ_UNROLL
        for (int32_t h = half / 2; h; h /= 2) TQ_UNROLL
        for (int32_t i = 0; i < h; i++) v[i] = v[i] + v[i + h];
    }
#if TQ_LANES >= 16
    if (n >= 16) v[0] += tq_swap(v[0], 8);
#endif
#if TQ_LANES >= 8
    if (n >= 8) v[0] += tq_swap(v[0], 4);
#endif
    v[0] += tq_swap(v[0], 2);
    v[0] += tq_swap(v[0], 1);
    return v[0][0];
}

/** Same as settled_sum (scalar.c). n: a multiple of 64. */
TQ_INLINE float settled_dot(const float *a, const float *b, int32_t n)
{
    enum { VECTORS = TQ_TILE / TQ_LANES };
    tq_floats v[VECTORS];
    TQ_UNROLL
    for (int32_t i = 0; i < VECTORS; i++) v[i] = tq_load_floats(a + TQ_LANES * i) * tq_load_floats(b + TQ_LANES * i);
    TQ_UNROLL
    for (int32_t k = TQ_TILE; k < n; k += TQ_TILE) TQ_UNROLL
    for (int32_t i = 0; i < VECTORS; i++)
        v[i] = tq_fused(tq_load_floats(a + k + TQ_LANES * i), tq_load_floats(b + k + TQ_LANES * i), v[i]);
    TQ_UNROLL
    for (int32_t h = VECTORS / 2; h * TQ_LANES >= 8; h /= 2) TQ_UNROLL
    for (int32_t i = 0; i < h; i++) v[i] += v[i + h];
#if TQ_LANES >= 16
    v[0] += tq_swap(v[0], 8);
#endif
    TQ_UNROLL
    for (int32_t i = 0; i < (TQ_LANES >= 8 ? 1 : 2); i++) {
        v[i] += tq_swap(v[i], 2);
        v[i] += tq_swap(v[i], 1);
    }
#if TQ_LANES >= 8
    v[0] += tq_swap(v[0], 4);
#else
    v[0] += v[1];
#endif
    return v[0][0];
}

/** Lists the positive levels in ascending order. Their codes are consecutive (turboquant.h, "Codes"). */
static inline void list_magnitudes(const tq_codebook *book, float magnitudes[32])
{
    const int8_t *levels = book->levels + (book->bits <= 3 ? book->n_levels / 2 : 0);
    for (int32_t m = 0; m < 32; m++) magnitudes[m] = (float)levels[m] * book->step;
}

/** Counts which of the `half` - 1 positive thresholds are <= the non-negative float with the bits `key`. (A binary
 *  search is slower: each step waits for the one before.) */
TQ_INLINE tq_ints thresholds_below(int32_t half, const tq_codebook *book, const tq_cells *cells, tq_ints key)
{
    tq_ints m = {0};
    if (half > 4 && half <= 16 && cells->factor != 0) {
        tq_ints cell = __builtin_convertvector((tq_floats)key * cells->factor, tq_ints);
        cell = tq_min_ints(cell, (tq_ints){0} + 15);
        m = __builtin_convertvector(tq_pick(cells->below, cell), tq_ints);
        m -= key >= (tq_ints)tq_pick(cells->own[0], cell);
        return half > 8 ? m - (key >= (tq_ints)tq_pick(cells->own[1], cell)) : m;
    }
    TQ_UNROLL
    for (int32_t k = 0; k + 1 < half; k++) m -= key >= (int32_t)tq_bits_of(book->thresholds[half + k]);
    return m;
}

/** Writes codes and decoded levels of n channels. By symmetry only magnitudes are searched: m counts the positive
 *  thresholds t <= u or, if u is negative, t < -u. t < v means t <= the float below v, whose bits are one less. */
TQ_INLINE void encode_levels(int32_t half, const tq_codebook *book, const tq_cells *its_cells,
                             const float magnitudes[32], const float *u, uint8_t *codes, float *c, int32_t n)
{
    const tq_cells cells =
        half == 8 || half == 16 ? *its_cells : (tq_cells){0}; /* a copy: writing to codes cannot change it */
    for (int32_t i = 0; i < n; i += TQ_LANES) {
        tq_floats x = tq_load_floats(u + i);
        tq_ints negative = x < 0.0f, m = thresholds_below(half, book, &cells, tq_magnitude_bits(x) + negative);
        tq_ints code = half > 4 ? m | (negative & half) : half + (m ^ negative);
        tq_floats magnitude = tq_pick(magnitudes, m & 15);
        if (half > 16) magnitude = tq_select(m > 15, tq_pick(magnitudes + 16, m & 15), magnitude);
        tq_store_floats(c + i, (tq_floats)((tq_ints)magnitude | (negative & INT32_MIN)));
        tq_bytes bytes = __builtin_convertvector(code, tq_bytes);
        memcpy(codes + i, &bytes, sizeof bytes);
    }
}

/** Writes codes and decoded levels of n channels, in groups with the same codebook. */
TQ_INLINE void encode_groups(const tq_codebook *book, const tq_cells *cells, const float *u, uint8_t *codes, float *c,
                             int32_t n)
{
    float magnitudes[32];
    if (book->bits == TQ_WIDE_BITS) {
        tq_encode_wide(u, codes, c, n);
        return;
    }
    list_magnitudes(book, magnitudes);
    switch (book->bits) {
    case 1: encode_levels(1, book, cells, magnitudes, u, codes, c, n); return;
    case 2: encode_levels(2, book, cells, magnitudes, u, codes, c, n); return;
    case 3: encode_levels(4, book, cells, magnitudes, u, codes, c, n); return;
    case 4: encode_levels(8, book, cells, magnitudes, u, codes, c, n); return;
    case 5: encode_levels(16, book, cells, magnitudes, u, codes, c, n); return;
    default: encode_levels(32, book, cells, magnitudes, u, codes, c, n);
    }
}

/** Same as coded_dot (scalar.c), for rows that are 0 where they have no code. */
TQ_INLINE float coded_dot(const tq_encoder *e, const float *a, const float *b, int32_t n)
{
    return e->settled ? settled_dot(a, b, n) : tree_dot(a, b, n);
}

/** Same as quotient (scalar.c), or settled_factor for settled rows. Computes only the sums that the scale needs. */
TQ_INLINE float scale_factor(const tq_encoder *e, float r, const float *u, const float *c, int32_t n)
{
    const int least_squares = e->scale == TQ_SCALE_LEAST_SQUARES, eden = e->scale == TQ_SCALE_EDEN;
    if (e->scale == TQ_SCALE_NORM) return e->factor;
    float cu = least_squares || eden ? coded_dot(e, c, u, n) : 0.0f, uu = 0.0f;
    if (e->settled && !e->steps) uu = (float)e->side->coded_channels;
    else if (!least_squares) uu = coded_dot(e, u, u, n);
    if (e->settled) {
        cu *= r;
        if (e->steps) uu = uu * r * r;
    }
    if (eden) return uu / cu * e->factor;
    float cc = coded_dot(e, c, c, n);
    return (least_squares ? cu / cc : sqrtf(uu / cc)) * e->factor;
}

/** Same as middle_of_cell (scalar.c). */
TQ_INLINE tq_floats middle_of_cell(tq_floats z, tq_floats units)
{
    const tq_floats round = tq_all(TQ_ROUND), unit = tq_all(1.0f / TQ_SETTLED_UNITS);
#if defined(__AVX512F__)
    tq_floats below = _mm512_fmadd_round_ps(z, units, round, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC) - round;
    return (below + 0.5f) * unit;
#else
    tq_floats whole = tq_fused(z, units, round) - round;
    tq_ints is_above = tq_fused(z, units, -whole) < 0.0f;
    return (whole + tq_select(is_above, tq_all(-0.5f), tq_all(0.5f))) * unit;
#endif
}

/** Writes the numbers to compare with thresholds to u, for n channels of z that have `bits` bits. */
TQ_INLINE void search_numbers(const tq_encoder *e, int32_t bits, float r, const float *z, float *u, int32_t n)
{
    if (e->settled && tq_is_searched_by_cells(bits)) {
        TQ_UNROLL
        for (int32_t i = 0; i < n; i += TQ_LANES)
            tq_store_floats(u + i, middle_of_cell(tq_load_floats(z + i), tq_all(r * TQ_SETTLED_UNITS)));
    } else {
        TQ_UNROLL
        for (int32_t i = 0; i < n; i += TQ_LANES) tq_store_floats(u + i, tq_load_floats(z + i) * r);
    }
}

/** Encodes the numbers of all groups times `factor`. Writes codes, to u what is compared with thresholds, and to c the
 *  decoded levels. */
TQ_INLINE void encode_row(const tq_encoder *e, float factor, const float *numbers, float *u, uint8_t *codes, float *c,
                          int32_t groups, int32_t channels)
{
    for (int32_t g = 0, next; g < groups; g = next) {
        int32_t at = channels * g, bits = e->side->bits[g];
        for (next = g + 1; next < groups && e->side->bits[next] == bits;) next++;
        int32_t run = channels * next - at;
        search_numbers(e, bits, factor, numbers + at, u + at, run);
        if (bits) {
            encode_groups(&e->books[bits], &e->cells[bits <= TQ_CELL_BITS ? bits : 0], u + at, codes + at, c + at, run);
        } else {
            memset(codes + at, 0, (size_t)run);
            memset(c + at, 0, sizeof(float) * (size_t)run);
        }
    }
}

/** Replaces the codes of the first factor by those of the best one (docs/rounding.md, "Tries"). Returns their scale in
 *  units of rms(z). kept: as in encode_in; in settled rows with steps it is multiplied by them, so z has the numbers.
 *  c: levels in the units of in_units, overwritten. */
TQ_INLINE float search_scale(const tq_encoder *e, float r, const float *kept, const float *z, const float *in_units,
                             uint8_t *codes, float *c, int32_t head_dim, int32_t channels, int32_t n)
{
    const int32_t groups = (head_dim + channels - 1) / channels;
    const float *factors = tq_tries(e->tries), *numbers = e->steps && e->settled ? z : kept;
    float x[TQ_MAX_DIM], cu = coded_dot(e, c, in_units, n), uu = (float)e->side->coded_channels;
    uint8_t tried[TQ_MAX_DIM];
    if (!e->settled || e->steps) uu = coded_dot(e, in_units, in_units, n);
    if (e->settled) cu *= r;
    if (e->settled && e->steps) uu = uu * r * r;
    float best = cu * (cu / coded_dot(e, c, c, n)), factor = uu / cu * e->factor;
    for (int32_t k = 1; k < e->tries; k++) {
        encode_row(e, r * factors[k], numbers, x, tried, c, groups, channels);
        memset(c + head_dim, 0, sizeof(float) * (size_t)(channels * groups - head_dim));
        for (int32_t i = 0; e->steps && i < head_dim; i++) c[i] *= e->steps[i / channels];
        cu = coded_dot(e, c, in_units, n);
        if (e->settled) cu *= r;
        float gain = cu * (cu / coded_dot(e, c, c, n));
        if (!(gain > best)) continue;
        best = gain, factor = uu / cu * e->factor;
        memcpy(codes, tried, (size_t)head_dim);
    }
    return factor;
}

/** Same as encode_scalar (scalar.c), for head_dim channels in groups of `channels`, padded to n, a power of two. Loops
 *  are unrolled if these are constants. */
TQ_INLINE void encode_in(const tq_encoder *e, const float *z, uint8_t *codes, uint16_t *scale, int32_t head_dim,
                         int32_t channels, int32_t n)
{
    float kept[TQ_MAX_DIM], u[TQ_MAX_DIM], c[TQ_MAX_DIM];
    const int32_t groups = (head_dim + channels - 1) / channels, padded = channels * groups;
    memset(kept + head_dim, 0, sizeof(float) * (size_t)((n < padded ? padded : n) - head_dim));
    memset(u + padded, 0, n > padded ? sizeof(float) * (size_t)(n - padded) : 0);
    memset(c + padded, 0, n > padded ? sizeof(float) * (size_t)(n - padded) : 0);
    memcpy(kept, z, sizeof(float) * (size_t)head_dim);
    for (int32_t g = 0; g < groups; g++)
        if (!e->side->bits[g]) memset(kept + channels * g, 0, sizeof(float) * (size_t)channels);
    float ss = coded_dot(e, kept, kept, n);
    if (!(ss >= FLT_MIN && ss <= FLT_MAX)) { /* all zero, or not finite */
        tq_kernels_scalar.encode(e, z, codes, scale);
        return;
    }
    float s0 = sqrtf(ss / (float)e->side->coded_channels), r = 1.0f / s0;
    encode_row(e, r, kept, u, codes, c, groups, channels);
    memset(codes + head_dim, 0, (size_t)(padded - head_dim));
    memset(c + head_dim, 0, sizeof(float) * (size_t)(padded - head_dim));
    float *in_units = e->settled ? kept : u;
    for (int32_t i = 0; e->steps && i < head_dim; i++) {
        in_units[i] *= e->steps[i / channels];
        c[i] *= e->steps[i / channels];
    }
    float s = e->tries ? s0 * search_scale(e, r, kept, z, in_units, codes, c, head_dim, channels, n)
                       : s0 * scale_factor(e, r, in_units, c, n);
    *scale = tq_f16_from_f32(s < 65504.0f ? s : 65504.0f);
}

static void encode_vector(const tq_encoder *e, const float *z, uint8_t *codes, uint16_t *scale)
{
    int32_t n = TQ_LANES;
    while (n < e->head_dim) n *= 2;
    if (e->group_channels != TQ_TILE) encode_in(e, z, codes, scale, e->head_dim, TQ_FINE_GROUP, n);
    else if (e->head_dim == 128) encode_in(e, z, codes, scale, 128, TQ_TILE, 128);
    else if (e->head_dim == 64) encode_in(e, z, codes, scale, 64, TQ_TILE, 64);
    else encode_in(e, z, codes, scale, e->head_dim, TQ_TILE, n);
}

/* ---- tiles ---- A row of codes is eight little-endian words: word t has columns 4 t .. 4 t + 3, word 4 + t columns 16
 * + 4 t .., so low[t] = (c(r, 0) .. c(r, 3)) and high[t] = (c(r, 4) .. c(r, 7)) of lane 4 g + t. Four lanes, those
 * of one g, are handled at a time. */

typedef uint32_t lanes_u32x4 __attribute__((vector_size(16)));

TQ_INLINE lanes_u32x4 load_u32x4(const void *at)
{
    lanes_u32x4 x;
    memcpy(&x, at, sizeof x);
    return x;
}

TQ_INLINE void store_u32x4(void *at, lanes_u32x4 x) { memcpy(at, &x, sizeof x); }

/** Packs four bytes b0..b3 below 16 into nibbles 0..3; bytes_of_nibbles unpacks them. */
TQ_INLINE lanes_u32x4 nibbles_of_bytes(lanes_u32x4 x)
{
    x = (x | x >> 4) & 0x00ff00ff;
    return (x | x >> 8) & 0xffff;
}

TQ_INLINE lanes_u32x4 bytes_of_nibbles(lanes_u32x4 x)
{
    x = (x | x << 8) & 0x00ff00ff;
    return (x | x << 4) & 0x0f0f0f0f;
}

static void pack_vector(int32_t bits, const uint8_t *codes, uint32_t *words)
{
    for (int32_t g = 0; g < 8; g++) {
        lanes_u32x4 low[4], high[4], nibbles[4], plane = {0}, *w = nibbles;
        for (int32_t r = 0; r < 4; r++) {
            low[r] = load_u32x4(codes + TQ_TILE * (g + 8 * r));
            high[r] = load_u32x4(codes + TQ_TILE * (g + 8 * r) + 16);
            if (bits >= 3)
                nibbles[r] = nibbles_of_bytes(low[r] & 0x0f0f0f0f) | nibbles_of_bytes(high[r] & 0x0f0f0f0f) << 16;
            int shift = bits == 5 ? 4 : 0;
            plane |= ((low[r] >> shift & 0x01010101) << r) | ((high[r] >> shift & 0x01010101) << (r + 4));
        }
        if (bits == 6)
            for (int32_t r = 0; r < 4; r++) low[r] = low[r] >> 4 & 0x03030303, high[r] = high[r] >> 4 & 0x03030303;
        lanes_u32x4 twos[2] = {low[0] | low[1] << 2 | low[2] << 4 | low[3] << 6,
                               high[0] | high[1] << 2 | high[2] << 4 | high[3] << 6};
        if (bits == 3)
            for (int32_t r = 0; r < 3; r++) nibbles[r] |= (nibbles[3] >> r & 0x11111111) << 3;
        if (bits == 2) w = twos;
        for (int32_t i = 0; i < (bits >= 5 ? 4 : bits == 1 ? 0 : bits); i++) store_u32x4(words + 32 * i + 4 * g, w[i]);
        for (int32_t h = 0; h < 2 && bits == 6; h++) store_u32x4(words + 32 * (4 + h) + 4 * g, twos[h]);
        if (bits == 1 || bits == 5) store_u32x4(words + 32 * (bits - 1) + 4 * g, plane);
    }
}

static void unpack_vector(int32_t bits, const uint32_t *words, uint8_t *codes)
{
    for (int32_t g = 0; g < 8; g++) {
        lanes_u32x4 w[TQ_MAX_BITS] = {{0}};
        for (int32_t i = 0; i < bits; i++) w[i] = load_u32x4(words + 32 * i + 4 * g);
        lanes_u32x4 plane = w[bits - 1], *twos = bits == 6 ? w + 4 : w;
        if (bits == 3) w[3] = (w[0] >> 3 & 0x11111111) | (w[1] >> 2 & 0x22222222) | (w[2] >> 1 & 0x44444444);
        for (int32_t r = 0; r < 4; r++) {
            lanes_u32x4 nibbles = bits == 3 ? w[r] & 0x77777777 : w[r];
            lanes_u32x4 low = bytes_of_nibbles(nibbles & 0xffff), high = bytes_of_nibbles(nibbles >> 16);
            lanes_u32x4 low_bit = plane >> r & 0x01010101, high_bit = plane >> (r + 4) & 0x01010101;
            if (bits == 1) low = low_bit, high = high_bit;
            lanes_u32x4 low_two = twos[0] >> 2 * r & 0x03030303, high_two = twos[1] >> 2 * r & 0x03030303;
            if (bits == 2) low = low_two, high = high_two;
            if (bits == 6) low |= low_two << 4, high |= high_two << 4;
            if (bits == 5) low |= low_bit << 4, high |= high_bit << 4;
            store_u32x4(codes + TQ_TILE * (g + 8 * r), low);
            store_u32x4(codes + TQ_TILE * (g + 8 * r) + 16, high);
        }
    }
}

/* ---- exact tokens ---- */

/** Converts n numbers of a dtype to float32. */
static void load_vector(int32_t dtype, const void *x, float *y, int64_t n)
{
    const uint16_t *u = x;
    int64_t i = 0;
    if (dtype == TQ_F32) memcpy(y, x, sizeof(float) * (size_t)n);
    for (; i + TQ_LANES <= n && dtype == TQ_F16; i += TQ_LANES) tq_store_floats(y + i, tq_load_halves(u + i));
    for (; i < n && dtype == TQ_F16; i++) y[i] = tq_f32_from_f16(u[i]);
    for (; i < n && dtype == TQ_BF16; i++) y[i] = tq_f32_from_bf16(u[i]);
}

#endif
