/* From vectors to the codes of an index: centring, dense rotation, codes. Written once in GNU C vectors; the order of
 * every sum is part of the definition, so all units give the same bits. */
#ifndef TQ_SCAN_ENCODE_H
#define TQ_SCAN_ENCODE_H
#include "core/scan_kernels.h"
#include "vector.h"
#include <float.h>
#include <math.h>

enum { HALF = TQ_LANES / 2, SUM_LANES = 32, SUM_VECTORS = SUM_LANES / HALF };

typedef float half_floats __attribute__((vector_size(4 * HALF)));
typedef double half_doubles __attribute__((vector_size(8 * HALF)));

/** 32 sums in float64. Sum i is over channels i, i + 32, .. */
typedef struct {
    half_doubles v[SUM_VECTORS];
} lane_sums;

TQ_INLINE half_doubles load_doubles(const float *x)
{
    half_floats y;
    memcpy(&y, x, sizeof y);
    return __builtin_convertvector(y, half_doubles);
}

/** Adds up all sums by halves: sum i and sum i + 16, then 8, 4, 2, 1 apart. */
static inline double sum_lanes(const lane_sums *sums)
{
    double at[SUM_LANES];
    memcpy(at, sums->v, sizeof at);
    for (int32_t h = SUM_LANES / 2; h; h /= 2)
        for (int32_t i = 0; i < h; i++) at[i] += at[i + h];
    return at[0];
}

/** Returns lanes that are not 0 where a number is beyond TQ_INDEX_MAX_INPUT; with `any`, where one is not finite. */
TQ_INLINE tq_ints out_of_range(const float *x, int32_t n, int any)
{
    tq_ints bad = {0};
    int32_t most = any ? 0x7f7fffff : 0x5b000000;
    for (int32_t i = 0; i < n; i += TQ_LANES) bad |= tq_magnitude_bits(tq_load_floats(x + i)) > most;
    return bad;
}

/** Sums (x - mean)^2. mean NULL: 0. */
TQ_INLINE double sum_of_squares(const float *x, const float *mean, int32_t n)
{
    lane_sums sums = {0};
    for (int32_t at = 0; at < n; at += SUM_LANES) TQ_UNROLL
    for (int32_t k = 0; k < SUM_VECTORS; k++) {
        half_doubles v = load_doubles(x + at + HALF * k);
        if (mean) v -= load_doubles(mean + at + HALF * k);
        sums.v[k] += v * v;
    }
    return sum_lanes(&sums);
}

static int scan_centre(const float *x, const float *mean, int32_t n, int unit, float *out, double *offset,
                       double *squares)
{
    tq_ints bad = out_of_range(x, n, unit);
    for (int i = 0; i < TQ_LANES; i++)
        if (bad[i]) return 0;
    lane_sums products = {0};
    *squares = sum_of_squares(x, unit ? NULL : mean, n);
    *offset = 0;
    double length = unit ? sqrt(*squares) : 1;
    if (unit) {
        for (int32_t i = 0; i < n; i += HALF) {
            half_floats y = __builtin_convertvector(load_doubles(x + i) / length, half_floats);
            memcpy(out + i, &y, sizeof y);
        }
    } else memcpy(out, x, sizeof(float) * (size_t)n);
    if (!mean) return 1;
    for (int32_t at = 0; at < n; at += SUM_LANES) TQ_UNROLL
    for (int32_t k = 0; k < SUM_VECTORS; k++) {
        half_doubles y = load_doubles(out + at + HALF * k), m = load_doubles(mean + at + HALF * k);
        products.v[k] += (y - m) * m;
    }
    *offset = sum_lanes(&products);
    for (int32_t i = 0; i < n; i += TQ_LANES)
        tq_store_floats(out + i, tq_load_floats(out + i) - tq_load_floats(mean + i));
    return 1;
}

/* ---- dense rotation: 32 outputs of several rows at a time, in registers ---- */

enum { OUT_VECTORS = 32 / TQ_LANES, ROWS_TOGETHER = TQ_LANES == 16 ? 8 : 2 };

typedef float eight_floats __attribute__((vector_size(32)));

typedef uint16_t lane_bfloats __attribute__((vector_size(2 * TQ_LANES)));
typedef uint16_t eight_bfloats __attribute__((vector_size(16)));
typedef uint32_t eight_words __attribute__((vector_size(32)));

TQ_INLINE tq_floats load_bfloats(const uint16_t *p)
{
    lane_bfloats x;
    memcpy(&x, p, sizeof x);
    return (tq_floats)(__builtin_convertvector(x, tq_words) << 16);
}

/** sum += eight numbers times x. */
TQ_INLINE void add_eight_bfloats(eight_floats *sum, const uint16_t *p, float x)
{
    eight_bfloats eight;
    memcpy(&eight, p, sizeof eight);
    *sum += (eight_floats)(__builtin_convertvector(eight, eight_words) << 16) * x;
}

TQ_INLINE void rotate_tile(const uint16_t *matrix, int32_t n, const float *x, int32_t rows, int64_t stride, float *y)
{
    tq_floats sums[ROWS_TOGETHER][OUT_VECTORS];
    TQ_UNROLL
    for (int32_t r = 0; r < rows; r++) TQ_UNROLL
    for (int32_t v = 0; v < OUT_VECTORS; v++) sums[r][v] = tq_all(0);
    for (int32_t j = 0; j < n; j++) {
        tq_floats m[OUT_VECTORS];
        TQ_UNROLL
        for (int32_t v = 0; v < OUT_VECTORS; v++) m[v] = load_bfloats(matrix + (int64_t)j * n + TQ_LANES * v);
        TQ_UNROLL
        for (int32_t r = 0; r < rows; r++) TQ_UNROLL
        for (int32_t v = 0; v < OUT_VECTORS; v++) sums[r][v] += m[v] * x[r * stride + j];
    }
    TQ_UNROLL
    for (int32_t r = 0; r < rows; r++) TQ_UNROLL
    for (int32_t v = 0; v < OUT_VECTORS; v++) tq_store_floats(y + r * stride + TQ_LANES * v, sums[r][v]);
}

/** Computes outputs behind the last full 32, 8 at a time. */
static void rotate_eight(const uint16_t *matrix, int32_t n, const float *x, float *y)
{
    eight_floats sums = {0};
    for (int32_t j = 0; j < n; j++) add_eight_bfloats(&sums, matrix + (int64_t)j * n, x[j]);
    memcpy(y, &sums, sizeof sums);
}

/** Rotates one row. The matrix is read from memory only once, so in its own order, eight of its rows side by side. */
static void rotate_one(const uint16_t *matrix, int32_t n, const float *x, float *y)
{
    memset(y, 0, sizeof *y * (size_t)n);
    for (int32_t j = 0; j < n; j += 8, matrix += 8 * n) {
        int32_t i = 0;
        for (; i + TQ_LANES <= n; i += TQ_LANES) {
            tq_floats sum = tq_load_floats(y + i);
            TQ_UNROLL
            for (int32_t k = 0; k < 8; k++) sum += load_bfloats(matrix + (int64_t)k * n + i) * x[j + k];
            tq_store_floats(y + i, sum);
        }
        for (; i < n; i += 8) {
            eight_floats sum;
            memcpy(&sum, y + i, sizeof sum);
            TQ_UNROLL
            for (int32_t k = 0; k < 8; k++) add_eight_bfloats(&sum, matrix + (int64_t)k * n + i, x[j + k]);
            memcpy(y + i, &sum, sizeof sum);
        }
    }
}

static void scan_rotate(const uint16_t *matrix, int32_t n, const float *x, int32_t rows, int64_t stride, float *y)
{
    int32_t i = 0;
    if (rows == 1) {
        rotate_one(matrix, n, x, y);
        return;
    }
    for (; i + 32 <= n; i += 32) {
        int32_t r = 0;
        for (; r + ROWS_TOGETHER <= rows; r += ROWS_TOGETHER)
            rotate_tile(matrix + i, n, x + r * stride, ROWS_TOGETHER, stride, y + r * stride + i);
        for (; r < rows; r++) rotate_tile(matrix + i, n, x + r * stride, 1, stride, y + r * stride + i);
    }
    for (; i < n; i += 8)
        for (int32_t r = 0; r < rows; r++) rotate_eight(matrix + i, n, x + r * stride, y + r * stride + i);
}

/* ---- codes ---- */

/** Thresholds above the middle, and magnitudes: levels are symmetric. The magnitude of u has rank m if m thresholds are
 *  <= |u| (negative u: < |u|). */
typedef struct {
    int32_t half;           /* levels of one sign */
    int32_t thresholds[31]; /* the floats' bits, which are ordered as integers */
    float least, step;
    float more[31]; /* by how much the magnitude grows at each threshold */
} encode_book;

static inline void get_encode_book(const tq_index_book *book, encode_book *out)
{
    out->half = book->n_levels / 2;
    out->step = book->step;
    out->least = book->levels[out->half];
    for (int32_t k = 0; k + 1 < out->half; k++) {
        memcpy(&out->thresholds[k], &book->thresholds[out->half + k], sizeof(float));
        out->more[k] = (float)(book->levels[out->half + k + 1] - book->levels[out->half + k]);
    }
}

/** Returns the level of each x, in the book's steps, and its code. half is a constant where this is inlined. */
TQ_INLINE tq_floats level_of(const encode_book *book, int32_t half, tq_floats x, tq_ints *code)
{
    tq_floats magnitude = tq_all(book->least);
    tq_ints negative = x < 0.0f, key = tq_magnitude_bits(x) + negative, m = {0};
    TQ_UNROLL
    for (int32_t k = 0; k + 1 < half; k++) {
        tq_ints above = key >= book->thresholds[k];
        m -= above;
        magnitude += (tq_floats)(above & (tq_ints)tq_all(book->more[k]));
    }
    *code = half + (m ^ negative);
    return (tq_floats)((tq_ints)magnitude | (negative & INT32_MIN));
}

/** Encodes 32 channels: writes codes, and levels in place of u. half is a constant where this is inlined. */
TQ_INLINE void encode_ranks(const encode_book *book, int32_t half, float *u, uint8_t *codes)
{
    for (int32_t i = 0; i < 32; i += TQ_LANES) {
        tq_ints code;
        tq_store_floats(u + i, level_of(book, half, tq_load_floats(u + i), &code) * book->step);
        tq_bytes bytes = __builtin_convertvector(code, tq_bytes);
        memcpy(codes + i, &bytes, sizeof bytes);
    }
}

static void encode_group(const tq_scan_layout *layout, int32_t bits, float *u, uint8_t *codes)
{
    encode_book book;
    if (bits == TQ_WIDE_BITS) {
        tq_encode_wide(u, codes, u, 32);
        return;
    }
    get_encode_book(&layout->books[bits], &book);
    switch (bits) {
    case 1: encode_ranks(&book, 1, u, codes); return;
    case 2: encode_ranks(&book, 2, u, codes); return;
    case 3: encode_ranks(&book, 4, u, codes); return;
    case 4: encode_ranks(&book, 8, u, codes); return;
    case 5: encode_ranks(&book, 16, u, codes); return;
    default: encode_ranks(&book, 32, u, codes);
    }
}

/** Returns how well the codes c of size * u point along u: <c, u>^2 / <c, c>. u [32 groups] is 0 in the last `padding`
 *  numbers, behind the last channel. half is a constant where this is inlined. */
TQ_INLINE float gain_of(const encode_book *book, int32_t half, const float *u, int32_t n, int32_t padding, float size)
{
    tq_floats products[SUM_LANES / TQ_LANES], squares[SUM_LANES / TQ_LANES];
    float at[2][SUM_LANES];
    TQ_UNROLL
    for (int32_t v = 0; v < SUM_LANES / TQ_LANES; v++) products[v] = squares[v] = tq_all(0);
    for (int32_t i = 0; i < n; i += SUM_LANES) TQ_UNROLL
    for (int32_t v = 0; v < SUM_LANES / TQ_LANES; v++) {
        tq_ints code;
        tq_floats x = tq_load_floats(u + i + TQ_LANES * v), level = level_of(book, half, x * size, &code);
        products[v] += x * level;
        squares[v] += level * level; /* of integers */
    }
    memcpy(at[0], products, sizeof at[0]);
    memcpy(at[1], squares, sizeof at[1]);
    at[1][0] -= (float)padding * book->least * book->least;
    for (int32_t h = SUM_LANES / 2; h; h /= 2)
        for (int32_t i = 0; i < h; i++) at[0][i] += at[0][i + h], at[1][i] += at[1][i + h];
    return at[1][0] > 0 ? at[0][0] * (at[0][0] / at[1][0]) : 0;
}

TQ_INLINE int32_t best_size(const encode_book *book, int32_t half, const float *u, int32_t n, int32_t padding)
{
    enum { TRIES = 5 };
    static const float sizes[TQ_INDEX_N_SIZES] = TQ_INDEX_SIZES;
    int32_t best = 0;
    float most = 0;
    for (int32_t k = 0; k < TRIES; k++) {
        float gain = gain_of(book, half, u, n, padding, sizes[k]);
        if (gain > most) most = gain, best = k;
    }
    return best;
}

/** Returns which size is the largest that clamps nothing, at least 1. */
static int32_t widest_size(const float *u, int32_t n)
{
    static const float sizes[TQ_INDEX_N_SIZES] = TQ_INDEX_SIZES;
    float largest = tq_largest_magnitude(u, n);
    int32_t best = 0;
    for (int32_t k = 1; k < TQ_INDEX_N_SIZES; k++)
        if (sizes[k] > sizes[best] && largest * sizes[k] <= 127 * TQ_WIDE_STEP) best = k;
    return best;
}

/** Returns which of TQ_INDEX_SIZES multiplies u [32 groups] before it is encoded, if rows have sizes. */
static int32_t choose_size(const tq_scan_layout *layout, const float *u)
{
    encode_book book;
    int32_t n = 32 * layout->groups, padding = n - layout->layout->channels;
    if (layout->even_bits == TQ_WIDE_BITS) return widest_size(u, n);
    get_encode_book(&layout->books[layout->even_bits], &book);
    switch (layout->even_bits) {
    case 3: return best_size(&book, 4, u, n, padding);
    case 4: return best_size(&book, 8, u, n, padding);
    case 5: return best_size(&book, 16, u, n, padding);
    default: return best_size(&book, 32, u, n, padding);
    }
}

/** Returns what multiplies u = t * inverse, t [32 groups], before it is encoded, if rows have no sizes. If all groups
 *  that have bits have 8, none of which leads, it makes the largest |u| the largest level: steps are as fine as they
 *  can be without clamping. Otherwise it is 1, because a scan's estimate from leading bits would not follow. */
static float size_of_codes(const tq_scan_layout *layout, const float *t, float inverse)
{
    const tq_index_layout *groups = layout->layout;
    float largest = 0;
    for (int32_t g = 0; g < layout->groups; g++, t += 32) {
        if (!groups->bits[g]) continue;
        if (groups->bits[g] != TQ_WIDE_BITS || groups->lead[g]) return 1;
        float own = tq_largest_magnitude(t, 32);
        largest = own > largest ? own : largest;
    }
    largest *= inverse;
    return largest > 0 ? 127 * TQ_WIDE_STEP / largest : 1;
}

static float scan_encode(const tq_scan_layout *layout, const float *z, uint8_t *codes)
{
    static const float sizes[TQ_INDEX_N_SIZES] = TQ_INDEX_SIZES;
    const tq_index_layout *groups = layout->layout;
    float u[32], levels[32], t[TQ_MAX_DIM];
    lane_sums squares = {0}, exact = {0}, products = {0};
    for (int32_t g = 0; g < layout->groups; g++) {
        if (!groups->bits[g]) continue;
        for (int32_t i = 32 * g; i < 32 * g + 32; i += TQ_LANES)
            tq_store_floats(t + i, tq_load_floats(z + i) / groups->steps[g]);
        TQ_UNROLL
        for (int32_t k = 0; k < SUM_VECTORS; k++) {
            half_doubles v = load_doubles(t + 32 * g + HALF * k);
            squares.v[k] += v * v;
        }
    }
    double rms = sqrt(sum_lanes(&squares) / layout->coded);
    float inverse = rms >= FLT_MIN ? (float)(1 / rms) : 0; /* below it 1 / rms may be infinite */
    float size;
    if (layout->sized) {
        for (int32_t i = 0; i < 32 * layout->groups; i += TQ_LANES)
            tq_store_floats(t + i, tq_load_floats(t + i) * inverse);
        size = sizes[choose_size(layout, t)];
        inverse = 1;
    } else size = size_of_codes(layout, t, inverse);
    for (int32_t g = 0; g < layout->groups; g++, codes += 32) {
        if (!groups->bits[g]) {
            memset(codes, 0, 32);
            continue;
        }
        for (int32_t i = 0; i < 32; i += TQ_LANES) {
            tq_floats x = tq_load_floats(t + 32 * g + i) * inverse;
            tq_store_floats(u + i, x);
            tq_store_floats(levels + i, x * size);
        }
        encode_group(layout, groups->bits[g], levels, codes);
        double step = groups->steps[g];
        TQ_UNROLL
        for (int32_t k = 0; k < SUM_VECTORS; k++) {
            half_doubles a = load_doubles(u + HALF * k) * step;
            exact.v[k] += a * a;
            products.v[k] += a * (load_doubles(levels + HALF * k) * step);
        }
    }
    double product = sum_lanes(&products);
    return product > 0 ? (float)(rms * (sum_lanes(&exact) / product)) : 0;
}
#endif
