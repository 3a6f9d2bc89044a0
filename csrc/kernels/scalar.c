/* The scalar kernels: complete, plain, and the definition that every other ISA quotes and is tested against. */
#include "softmax.h"
#include "wave.h"
#include <math.h>
#include <string.h>

/* ---- rotation ---- */

static void flip_signs(const uint32_t *signs, float *x, int32_t n)
{
    for (int32_t i = 0; signs && i < n; i++)
        if (signs[i / 32] >> (i % 32) & 1) x[i] = -x[i];
}

static void hadamard_scalar(float *x, int32_t n, float factor, const uint32_t *before, const uint32_t *after)
{
    flip_signs(before, x, n);
    for (int32_t h = 1; h < n; h *= 2)
        for (int32_t i = 0; i < n; i += 2 * h)
            for (int32_t j = i; j < i + h; j++) {
                float a = x[j], b = x[j + h];
                x[j] = a + b;
                x[j + h] = a - b;
            }
    for (int32_t i = 0; i < n; i++) x[i] *= factor;
    flip_signs(after, x, n);
}

static void settle_scalar(float *x, int32_t n, const uint32_t *before)
{
    uint32_t largest = 0; /* magnitudes are ordered as their bits */
    for (int32_t i = 0; i < n; i++) {
        uint32_t bits = tq_bits_of(x[i]) & 0x7fffffff;
        if (bits > largest) largest = bits;
    }
    uint32_t exponent = largest >> 23;
    float least = tq_float_of(exponent > 11 ? (exponent - 11) << 23 : 0); /* 2^(E - 11) */
    float round = tq_float_of((exponent + 5) << 23 | 0x400000);           /* 1.5 * 2^(E - 18 + 23) */
    for (int32_t i = 0; i < n; i++) x[i] = fabsf(x[i]) < least ? 0.0f : (x[i] + round) - round;
    hadamard_scalar(x, n, 1.0f, before, NULL);
}

/* ---- quantisation ---- */

/** Sums v in the order of encoding: v[i] += v[i + h] for h = n/2, n/4 .. 1, n a power of two. Overwrites v. */
static float tree_sum(float *v, int32_t n)
{
    for (int32_t h = n / 2; h; h /= 2)
        for (int32_t i = 0; i < h; i++) v[i] = v[i] + v[i + h];
    return v[0];
}

/** Sums a_i b_i in the order for settled rows: channels i, i + 32, .. in turn by fused multiply-adds, then
 *  v[i] += v[i ^ h] for h = 16, 8, 2, 1, 4. n: a multiple of 64; numbers without a code are 0. */
static float settled_sum(const float *a, const float *b, int32_t n)
{
    float v[TQ_TILE], sums[TQ_TILE];
    for (int32_t i = 0; i < TQ_TILE; i++) {
        v[i] = a[i] * b[i];
        for (int32_t k = TQ_TILE; k < n; k += TQ_TILE) v[i] = fmaf(a[i + k], b[i + k], v[i]);
    }
    const int32_t order[] = {16, 8, 2, 1, 4};
    for (int32_t k = 0; k < 5; k++) {
        for (int32_t i = 0; i < TQ_TILE; i++) sums[i] = v[i] + v[i ^ order[k]];
        memcpy(v, sums, sizeof v);
    }
    return v[0];
}

/** Sums a_i b_i over the coded channels. */
static float coded_dot(const tq_encoder *e, const float *a, const float *b)
{
    float x[TQ_MAX_DIM], y[TQ_MAX_DIM];
    int32_t n = 1;
    while (n < e->head_dim) n *= 2;
    for (int32_t i = 0; i < n; i++) {
        int coded = i < e->head_dim && e->side->bits[i / e->group_channels];
        x[i] = coded ? a[i] : 0.0f;
        y[i] = coded ? b[i] : 0.0f;
    }
    if (e->settled) return settled_sum(x, y, n);
    for (int32_t i = 0; i < n; i++) x[i] *= y[i];
    return tree_sum(x, n);
}

/** Returns the middle of the cell [k, k + 1) that holds the exact product z * units, divided by TQ_SETTLED_UNITS. */
static float middle_of_cell(float z, float units)
{
    float whole = fmaf(z, units, TQ_ROUND) - TQ_ROUND; /* the nearest number */
    if (fmaf(z, units, -whole) < 0) whole -= 1.0f;     /* the one below */
    return (whole + 0.5f) * (1.0f / TQ_SETTLED_UNITS);
}

/* Returns a scale (turboquant.h, tq_scale) in units of rms(z). u has rms 1, and c are its decoded levels. */
static float quotient(int32_t scale, float uu, float cu, float cc)
{
    switch (scale) {
    case TQ_SCALE_EDEN: return uu / cu;
    case TQ_SCALE_NORM_CORRECTED: return sqrtf(uu / cc);
    case TQ_SCALE_LEAST_SQUARES: return cu / cc;
    default: return 1.0f;
    }
}

/* Returns the scale of a settled row in units of rms(z). r: 1 / rms(z); z and c are in the units of x. */
static float settled_factor(const tq_encoder *e, float r, const float *z, const float *c)
{
    float uu = e->steps ? coded_dot(e, z, z) * r * r : (float)e->side->coded_channels;
    return quotient(e->scale, uu, coded_dot(e, c, z) * r, coded_dot(e, c, c)) * e->factor;
}

/** Encodes z * factor: writes codes, and decoded levels to c, in the units of x. Both are 0 in groups without bits. */
static void encode_row(const tq_encoder *e, float factor, const float *z, uint8_t *codes, float *c)
{
    for (int32_t i = 0; i < e->head_dim; i++) {
        int32_t g = i / e->group_channels, bits = e->side->bits[g];
        codes[i] = 0, c[i] = 0.0f;
        if (!bits) continue;
        const tq_codebook *book = &e->books[bits];
        int by_cells = e->settled && tq_is_searched_by_cells(bits);
        codes[i] = tq_nearest_code(book, by_cells ? middle_of_cell(z[i], factor * TQ_SETTLED_UNITS) : z[i] * factor);
        c[i] = (float)tq_level(book, codes[i]) * book->step;
        if (e->steps) c[i] *= e->steps[g];
    }
}

static void encode_scalar(const tq_encoder *e, const float *z, uint8_t *codes, uint16_t *scale)
{
    float u[TQ_MAX_DIM], c[TQ_MAX_DIM]; /* settled: u is z; the scale is found in the units of x */
    float ss = coded_dot(e, z, z);
    int is_zero = ss < 0x1p-126f; /* FLT_MIN: nothing to normalise */
    float s0 = sqrtf(ss / (float)e->side->coded_channels), r = is_zero ? 0.0f : 1.0f / s0;
    memset(codes, 0, (size_t)((e->head_dim + e->group_channels - 1) / e->group_channels * e->group_channels));
    encode_row(e, r, z, codes, c);
    for (int32_t i = 0; i < e->head_dim; i++) {
        u[i] = e->settled ? z[i] : z[i] * r;
        if (e->steps) u[i] *= e->steps[i / e->group_channels];
    }
    float s = 0.0f, best = 0.0f;
    for (int32_t k = 0; !is_zero && k < e->tries; k++) {
        uint8_t tried[TQ_MAX_DIM];
        encode_row(e, r * tq_tries(e->tries)[k], z, tried, c);
        float cu = coded_dot(e, c, u), gain = 0.0f;
        if (e->settled) cu *= r;
        gain = cu * (cu / coded_dot(e, c, c));
        if (!(gain > best)) continue;
        best = gain;
        memcpy(codes, tried, (size_t)e->head_dim);
        float uu = coded_dot(e, u, u);
        if (e->settled) uu = e->steps ? uu * r * r : (float)e->side->coded_channels;
        s = s0 * (uu / cu * e->factor);
    }
    if (e->tries) is_zero |= best > 0;
    if (!is_zero && e->settled) s = s0 * settled_factor(e, r, u, c);
    else if (!is_zero) s = s0 * quotient(e->scale, coded_dot(e, u, u), coded_dot(e, c, u), coded_dot(e, c, c));
    *scale = tq_f16_from_f32(s < 65504.0f ? s : 65504.0f);
}

/* ---- tiles ---- The drawing is in turboquant.h; lane = 4 g + t, code (r, n) of a lane is row g + 8 r, column of n. */

static int32_t tile_index(int32_t lane, int32_t r, int32_t n)
{
    int32_t row = lane / 4 + 8 * r, column = 16 * (n / 4) + 4 * (lane % 4) + n % 4;
    return TQ_TILE * row + column;
}

static uint32_t pack_lane_word(int32_t bits, const uint8_t c[4][8], int32_t w)
{
    uint32_t word = 0;
    if (bits >= 4 && w < 4)
        for (int32_t n = 0; n < 8; n++) word |= (uint32_t)(c[w][n] & 15) << 4 * n;
    else if (bits == 3)
        for (int32_t n = 0; n < 8; n++) word |= (uint32_t)(c[w][n] | (c[3][n] >> w & 1) << 3) << 4 * n;
    else if (bits == 2 || bits == 6) /* 2 bits, or the upper two of 6 */
        for (int32_t i = 0; i < 16; i++)
            word |= (uint32_t)(c[i / 4][4 * (w & 1) + i % 4] >> (bits - 2)) << (8 * (i % 4) + 2 * (i / 4));
    else /* 1 bit, or the fifth bit of 5 */
        for (int32_t i = 0; i < 32; i++)
            word |= (uint32_t)(c[i / 8][i % 8] >> (bits - 1) & 1) << (8 * (i % 4) + i / 8 + 4 * (i % 8 / 4));
    return word;
}

static void pack_scalar(int32_t bits, const uint8_t *codes, uint32_t *words)
{
    for (int32_t lane = 0; lane < 32; lane++) {
        uint8_t c[4][8];
        for (int32_t i = 0; i < 32; i++) c[i / 8][i % 8] = codes[tile_index(lane, i / 8, i % 8)];
        for (int32_t w = 0; w < bits; w++) words[32 * w + lane] = pack_lane_word(bits, (const uint8_t (*)[8])c, w);
    }
}

/** Returns code (r, n) of a lane, whose word w is words[32 w]. */
static uint8_t unpack_code(int32_t bits, const uint32_t *words, int32_t r, int32_t n)
{
    int32_t h = n / 4, i = n % 4;
    switch (bits) {
    case 1: return words[0] >> (8 * i + r + 4 * h) & 1;
    case 2: return words[32 * h] >> (8 * i + 2 * r) & 3;
    case 3:
        if (r < 3) return words[32 * r] >> 4 * n & 7;
        return (uint8_t)((words[0] >> (4 * n + 3) & 1) | (words[32] >> (4 * n + 3) & 1) << 1 |
                         (words[64] >> (4 * n + 3) & 1) << 2);
    case 4: return words[32 * r] >> 4 * n & 15;
    case 5: return (uint8_t)((words[32 * r] >> 4 * n & 15) | (words[128] >> (8 * i + r + 4 * h) & 1) << 4);
    default: return (uint8_t)((words[32 * r] >> 4 * n & 15) | (words[128 + 32 * h] >> (8 * i + 2 * r) & 3) << 4);
    }
}

static void unpack_scalar(int32_t bits, const uint32_t *words, uint8_t *codes)
{
    for (int32_t lane = 0; lane < 32; lane++)
        for (int32_t i = 0; i < 32; i++)
            codes[tile_index(lane, i / 8, i % 8)] = unpack_code(bits, words + lane, i / 8, i % 8);
}

static void recode_scalar(const tq_recoding *recoding, int is_key, const uint8_t *live, int32_t n,
                          const uint32_t *words, uint32_t *out, uint32_t *sums)
{
    uint8_t codes[TQ_TILE_CODES];
    memset(sums, 0, sizeof(uint32_t) * 2 * TQ_TILE);
    for (int32_t k = 0; k < n; k++) {
        unpack_scalar(recoding->from, words + TQ_TILE * recoding->from * k, codes);
        for (int32_t i = 0; i < TQ_TILE_CODES; i++) {
            int32_t column = is_key ? tq_column(i / TQ_TILE) : i % TQ_TILE, code = codes[i], is_live = !live || live[i];
            codes[i] = is_live ? recoding->code[code] : 0;
            if (!is_live) continue;
            sums[column] += (uint32_t)(recoding->before[code] * recoding->before[code]);
            sums[TQ_TILE + column] += (uint32_t)(recoding->before[code] * recoding->after[code]);
        }
        pack_scalar(recoding->to, codes, out + TQ_TILE * recoding->to * k);
    }
}

/* ---- attention ---- An operand is the row itself. */

static size_t operand_bytes_scalar(int32_t columns) { return (size_t)(columns * 4 + 63) / 64 * 64; }

static void prepare_scalar(const float *x, int32_t columns, int32_t rows, int precise, void *operands)
{
    (void)precise;
    for (int32_t q = 0; q < rows; q++)
        memcpy((char *)operands + (size_t)q * operand_bytes_scalar(columns), x + (int64_t)q * columns,
               sizeof(float) * (size_t)columns);
}

/** Adds one tile's products for one operand. x: operand numbers of its columns; out: 32 or two times 32 numbers
 *  (kernels.h, tq_halves). */
static void multiply_tile(tq_halves halves, const float levels[256], const uint8_t *codes, const float *x, float *out)
{
    for (int32_t row = 0; row < TQ_TILE; row++) {
        const float *numbers = halves == TQ_HALF_ROWS ? x + row / 16 * TQ_TILE : x;
        float sums[2] = {0};
        for (int32_t c = 0; c < TQ_TILE; c++)
            sums[halves == TQ_HALF_COLUMNS && c & 8] += levels[codes[TQ_TILE * row + c]] * numbers[c];
        out[tq_column(row)] += sums[0];
        if (halves == TQ_HALF_COLUMNS) out[TQ_TILE + tq_column(row)] += sums[1];
    }
}

static void multiply_scalar(const tq_tile_grid *grid, const void *operands, int32_t rows, int precise, int accumulate,
                            float *out, int32_t out_stride)
{
    (void)precise;
    int32_t block_numbers = TQ_TILE << (grid->halves == TQ_HALF_COLUMNS),
            tile_columns = TQ_TILE << (grid->halves == TQ_HALF_ROWS);
    for (int32_t q = 0; q < rows && !accumulate; q++)
        memset(out + (int64_t)q * out_stride, 0, sizeof(float) * (size_t)(block_numbers * grid->blocks));
    size_t operand_stride = operand_bytes_scalar(tile_columns * grid->n);
    for (int32_t i = 0; i < grid->blocks * grid->n; i++) {
        uint8_t codes[TQ_TILE * TQ_TILE];
        float levels[256];
        const tq_tile *tile = &grid->tiles[i];
        const tq_codebook *book = &grid->books[tile->bits];
        for (int32_t code = 0; code < book->n_levels; code++)
            levels[code] = (float)tq_level(book, (uint8_t)code) * book->step;
        tq_unpack_tile(&tq_kernels_scalar, tile->bits, (const uint32_t *)(grid->base + tile->offset), codes);
        for (int32_t q = 0; q < rows; q++) {
            const float *x =
                (const float *)((const char *)operands + (size_t)q * operand_stride) + tile_columns * (i % grid->n);
            multiply_tile(grid->halves, levels, codes, x,
                          out + (int64_t)q * out_stride + block_numbers * (i / grid->n));
        }
    }
}

static void load_scalar(int32_t dtype, const void *x, float *y, int64_t n)
{
    if (dtype == TQ_F32) {
        memcpy(y, x, sizeof(float) * (size_t)n);
        return;
    }
    const uint16_t *u = x;
    for (int64_t i = 0; i < n; i++) y[i] = dtype == TQ_F16 ? tq_f32_from_f16(u[i]) : tq_f32_from_bf16(u[i]);
}

TQ_TABLE(scalar, scalar);
