/* The arithmetic of plans that are not plain: portable, the same on every machine. turboquant_schemes.h has the
 * formulas (tq_levels, tq_sketch). */
#include "baselines.h"
#include "turboquant_schemes.h"
#include <math.h>
#include <string.h>

#define MAX_LEVELS 256

tq_baseline_coder tq_baseline_coder_of(const tq_kernels *kernels, const tq_plan *plan, const tq_codebook *books,
                                       const tq_transform *t, int is_key, int32_t head)
{
    tq_baseline_coder c = {
        .kernels = kernels, .plan = plan, .side = is_key ? &plan->key : &plan->value, .books = books};
    const float *rows = tq_transform_matrix(t, head);
    int dense = c.side->rotation == TQ_ROTATION_DENSE;
    c.matrix = dense ? rows : NULL;
    if (c.side->sketch == TQ_SKETCH_GAUSSIAN) c.sketch = dense ? rows + plan->head_dim * plan->head_dim : rows;
    if (c.side->levels == TQ_LEVELS_TABLE) c.table = tq_transform_steps(t, head);
    return c;
}

/** Sums n numbers in the order of csrc/kernels/scalar.c: v[i] += v[i + h] for h = m/2, m/4 .. 1, with m the next power
 *  of two and zeros from n on. Overwrites v [m]. */
static float tree_sum(float *v, int32_t n)
{
    int32_t size = 1;
    while (size < n) size *= 2;
    for (int32_t i = n; i < size; i++) v[i] = 0.0f;
    for (int32_t h = size / 2; h; h /= 2)
        for (int32_t i = 0; i < h; i++) v[i] = v[i] + v[i + h];
    return v[0];
}

static float dot(const float *a, const float *b, int32_t n)
{
    float products[TQ_MAX_DIM];
    for (int32_t i = 0; i < n; i++) products[i] = a[i] * b[i];
    return tree_sum(products, n);
}

static uint16_t stored(float x) { return tq_f16_from_f32(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x); }

/** Fills in the levels of a width by code, before scale and zero point. */
static void fill_levels(const tq_baseline_coder *c, int32_t bits, float levels[MAX_LEVELS])
{
    for (int32_t code = 0; code < 1 << bits; code++) switch (c->side->levels) {
        case TQ_LEVELS_AFFINE: levels[code] = (float)code; break;
        case TQ_LEVELS_ABSMAX: levels[code] = (float)(code - (1 << (bits - 1))); break;
        case TQ_LEVELS_TABLE: levels[code] = c->table[code]; break;
        default: levels[code] = (float)tq_level(&c->books[bits], (uint8_t)code) * c->books[bits].step;
        }
}

/** The two numbers that decode a block: s * level + o. */
typedef struct {
    float s, o;
} affine;

/** Reads number i that is stored for a token; they are `stride` bytes apart. */
static float read_number(const void *numbers, int64_t stride, int32_t i)
{
    uint16_t half;
    memcpy(&half, (const uint8_t *)numbers + stride * i, sizeof half);
    return tq_f32_from_f16(half);
}

static affine read_scales(const tq_baseline_coder *c, const void *numbers, int64_t stride, int32_t block)
{
    switch (c->side->levels) {
    case TQ_LEVELS_TABLE: return (affine){1.0f, 0.0f};
    case TQ_LEVELS_AFFINE:
        return (affine){read_number(numbers, stride, 2 * block), read_number(numbers, stride, 2 * block + 1)};
    default: return (affine){read_number(numbers, stride, block), 0.0f};
    }
}

/** Reads the factor of the signs of a token's sketch, without sketch_factor. */
static affine read_sketch_scale(const tq_baseline_coder *c, const void *numbers, int64_t stride)
{
    int is_static = c->table && c->side->sketch == TQ_SKETCH_SIGN;
    return (affine){is_static ? c->table[c->side->step_columns - 1] : read_number(numbers, stride, c->side->scales - 1),
                    0.0f};
}

/* ---- encoding a block: n channels of z, from channel `first` on ---- */

static int32_t bits_of(const tq_baseline_coder *c, int32_t channel) { return c->side->bits[channel / TQ_TILE]; }

/** Encodes with a codebook; returns the scale (turboquant.h, tq_scale) of the block alone. */
static float encode_codebook(const tq_baseline_coder *c, int32_t first, int32_t n, const float *z, uint8_t *codes)
{
    float u[TQ_MAX_DIM], d[TQ_MAX_DIM];
    float ss = dot(z, z, n);
    int is_zero = ss < 0x1p-126f; /* FLT_MIN: nothing to normalise */
    float s0 = sqrtf(ss / (float)n), r = 1.0f / s0;
    for (int32_t i = 0; i < n; i++) {
        const tq_codebook *book = &c->books[bits_of(c, first + i)];
        u[i] = is_zero ? 0.0f : z[i] * r;
        codes[i] = tq_nearest_code(book, u[i]);
        d[i] = (float)tq_level(book, codes[i]) * book->step;
    }
    if (is_zero) return 0.0f;
    switch (c->plan->scale) {
    case TQ_SCALE_EDEN: return s0 * (dot(u, u, n) / dot(d, u, n));
    case TQ_SCALE_NORM_CORRECTED: return s0 * sqrtf(dot(u, u, n) / dot(d, d, n));
    case TQ_SCALE_LEAST_SQUARES: return s0 * (dot(d, u, n) / dot(d, d, n));
    default: return s0;
    }
}

/** Encodes with a scale and a zero point; codes are chosen for both as they are stored. All groups of a block have the
 *  bits of the first. */
static void encode_affine(int32_t bits, int32_t n, const float *z, uint8_t *codes, uint16_t *scale, uint16_t *zero)
{
    float low = z[0], high = z[0], top = (float)((1 << bits) - 1);
    for (int32_t i = 1; i < n; i++) {
        low = z[i] < low ? z[i] : low;
        high = z[i] > high ? z[i] : high;
    }
    *zero = stored(low);
    *scale = stored((high - low) / top);
    float s = tq_f32_from_f16(*scale), o = tq_f32_from_f16(*zero);
    for (int32_t i = 0; i < n; i++) {
        float code = s > 0.0f ? rintf((z[i] - o) / s) : 0.0f;
        codes[i] = (uint8_t)(code > 0.0f ? (code < top ? code : top) : 0.0f); /* 0 for NaN, which a matrix may make */
    }
}

static float encode_absmax(int32_t bits, int32_t n, const float *z, uint8_t *codes)
{
    float most = 0.0f, top = (float)((1 << (bits - 1)) - 1);
    for (int32_t i = 0; i < n; i++) most = fabsf(z[i]) > most ? fabsf(z[i]) : most;
    float s = most / top, inverse = s > 0.0f ? 1.0f / s : 0.0f;
    for (int32_t i = 0; i < n; i++) {
        float code = roundf(z[i] * inverse);
        code = code > top ? top : code < -top ? -top : code; /* a subnormal scale has an inverse that overflows */
        codes[i] = (uint8_t)((int32_t)(code == code ? code : 0.0f) + (1 << (bits - 1)));
    }
    return s;
}

/** Encodes each number as the nearest entry; of two that are equally near, the lower. */
static void encode_table(const float *table, int32_t n_levels, int32_t n, const float *z, uint8_t *codes)
{
    for (int32_t i = 0; i < n; i++) {
        int32_t best = 0;
        for (int32_t k = 1; k < n_levels; k++)
            if (fabsf(z[i] - table[k]) < fabsf(z[i] - table[best])) best = k;
        codes[i] = (uint8_t)best;
    }
}

static void encode_block(const tq_baseline_coder *c, int32_t block, int32_t first, int32_t n, const float *z,
                         uint8_t *codes, uint16_t *scales)
{
    int32_t bits = bits_of(c, first);
    switch (c->side->levels) {
    case TQ_LEVELS_AFFINE:
        encode_affine(bits, n, z, codes, &scales[TQ_TILE * 2 * block], &scales[TQ_TILE * (2 * block + 1)]);
        break;
    case TQ_LEVELS_ABSMAX: scales[TQ_TILE * block] = stored(encode_absmax(bits, n, z, codes)); break;
    case TQ_LEVELS_TABLE: encode_table(c->table, 1 << bits, n, z, codes); break;
    default: scales[TQ_TILE * block] = stored(encode_codebook(c, first, n, z, codes));
    }
}

/* ---- the sketch of the quantisation error ---- */

/** Returns the constant factor of decoded signs: sqrt(pi / 2) / m for a Gaussian sketch, 1 for signs of the error. */
static float sketch_factor(const tq_side *side)
{
    return side->sketch == TQ_SKETCH_GAUSSIAN ? 1.25331414f / (float)side->sketch_rows : 1.0f;
}

/** Encodes the sketch of the quantisation error r [head_dim]. */
static void encode_sketch(const tq_baseline_coder *c, float *r, uint8_t *codes, uint16_t *scales)
{
    int32_t d = c->plan->head_dim;
    float squares[TQ_MAX_DIM];
    for (int32_t j = 0; j < c->side->sketch_rows; j++) {
        float sum = c->sketch ? c->kernels->dot(c->sketch + (int64_t)j * d, r, d) : r[j];
        codes[j] = sum >= 0.0f;
    }
    if (c->table && c->side->sketch == TQ_SKETCH_SIGN) return;
    int is_norm = c->side->sketch == TQ_SKETCH_GAUSSIAN;
    for (int32_t i = 0; i < d; i++) squares[i] = is_norm ? r[i] * r[i] : fabsf(r[i]);
    float sum = tree_sum(squares, d);
    scales[TQ_TILE * (c->side->scales - 1)] = stored(is_norm ? sqrtf(sum) : sum / (float)d);
}

/* ---- one vector ---- */

void tq_baseline_encode(const tq_baseline_coder *c, float *x, float *z, uint8_t *codes, uint16_t *scales)
{
    const tq_plan *plan = c->plan;
    const tq_side *side = c->side;
    int32_t d = plan->head_dim, block = 0;
    float levels[MAX_LEVELS];
    tq_rotate_vector(c->kernels, plan, side->rotation, c->matrix, 0, x, z);
    memset(codes, 0, (size_t)(TQ_TILE * side->tiles));
    for (int32_t g = 0, end; g < plan->groups; g = end, block++) {
        for (end = g + 1; end < plan->groups && !side->begins[end];) end++;
        int32_t first = TQ_TILE * g, last = TQ_TILE * end < d ? TQ_TILE * end : d;
        encode_block(c, block, first, last - first, z + first, codes + first, scales);
        if (!side->sketch) continue;
        affine a = read_scales(c, scales, TQ_TILE * sizeof *scales, block);
        for (int32_t i = first; i < last; i++) {
            if (i % TQ_TILE == 0) fill_levels(c, bits_of(c, i), levels);
            z[i] = z[i] - (a.s * levels[codes[i]] + a.o);
        }
    }
    if (side->sketch) encode_sketch(c, z, codes + TQ_TILE * plan->groups, scales);
}

/** Decodes tile `tile` of a token tile, part of block `block`, into 32 columns, from 32 * tile on, of the rows of
 *  tokens first .. last - 1. */
static void decode_tile(const tq_baseline_coder *c, const uint8_t *record, int32_t token_tile, int32_t tile,
                        int32_t block, int32_t first, int32_t last, float *rows)
{
    const tq_side *side = c->side;
    int32_t bits = side->bits[tile], is_key = side == &c->plan->key, is_sketch = tile >= c->plan->groups;
    int32_t begin = TQ_TILE * (is_sketch ? tile - c->plan->groups : tile),
            real = (is_sketch ? side->sketch_rows : c->plan->head_dim) - begin;
    float levels[MAX_LEVELS], factor = sketch_factor(side);
    uint8_t codes[TQ_TILE_CODES];
    if (is_sketch) levels[0] = -factor, levels[1] = factor;
    else fill_levels(c, bits, levels);
    tq_unpack_tile(c->kernels, bits, (const uint32_t *)(record + tq_tile_offset(side, token_tile, tile)), codes);
    for (int32_t i = first; i < last; i++) {
        float *row = rows + (int64_t)(i - first) * TQ_TILE * side->tiles + TQ_TILE * tile;
        const uint8_t *numbers = record + tq_scale_offset(side, TQ_TILE * token_tile + i);
        int64_t stride = 2 * (int64_t)c->plan->page_tokens;
        affine a = is_sketch ? read_sketch_scale(c, numbers, stride) : read_scales(c, numbers, stride, block);
        for (int32_t j = 0; j < TQ_TILE; j++) {
            int32_t code = codes[is_key ? TQ_TILE * i + j : TQ_TILE * j + tq_column(i)];
            row[j] = j < real ? a.s * levels[code] + a.o : 0.0f;
        }
    }
}

void tq_baseline_decode(const tq_baseline_coder *c, const uint8_t *record, int32_t token_tile, int32_t first,
                        int32_t last, float *rows)
{
    int32_t block = -1;
    for (int32_t t = 0; t < c->side->tiles; t++) {
        if (t < c->plan->groups) block += c->side->begins[t];
        decode_tile(c, record, token_tile, t, block, first, last, rows);
    }
}

void tq_baseline_project(const tq_baseline_coder *c, const float *x, float *row)
{
    int32_t d = c->plan->head_dim, groups = c->plan->groups;
    float *signs = row + TQ_TILE * groups;
    memset(row, 0, sizeof(float) * TQ_TILE * (size_t)c->side->tiles);
    tq_rotate_vector(c->kernels, c->plan, c->side->rotation, c->matrix, 0, x, row);
    for (int32_t j = 0; j < c->side->sketch_rows; j++)
        signs[j] = c->sketch ? c->kernels->dot(c->sketch + (int64_t)j * d, row, d) : row[j];
}

void tq_baseline_restore(const tq_baseline_coder *c, float *row, float *x)
{
    int32_t d = c->plan->head_dim;
    const float *signs = row + TQ_TILE * c->plan->groups;
    for (int32_t j = 0; j < c->side->sketch_rows; j++)
        if (c->sketch) c->kernels->axpy(signs[j], c->sketch + (int64_t)j * d, row, d);
        else row[j] += signs[j];
    tq_rotate_vector(c->kernels, c->plan, c->side->rotation, c->matrix, 1, row, x);
}
