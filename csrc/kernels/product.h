/* The product of packed tiles with operands, written once for the vector units.
 *
 * Four words t = 0..3 of one g are 16 bytes of one row of the tile (turboquant.h, "tile"), so a vector of 16 G bytes holds G
 * rows, and every width turns it into levels in the same order of columns, the nibbles' own:
 *   byte 4 t + i of a 16-byte lane      even: column n = 2 i of lane 4 g + t      odd: column n = 2 i + 1
 * An operand holds its numbers as integers in that order, once, and is broadcast to all lanes. A unit has PARTS vectors of levels
 * for a vector of words (bytes: even, odd; 16 bits: even and odd bytes of both) and a `multiply_add` that sums products over
 * the 32-bit words; the sums over t are left to the end.
 *
 * An operand of n tiles:
 *   | scale float, 60 bytes unused | sums int32 [n + 1][2]: of low and upper integers before tile k, padded to 64 |
 *   | integers [n tiles][low planes, then the upper one][PARTS][16 bytes] |
 * x = scale * (low + UPPER_UNIT * upper), low = plane 0 + 256 * plane 1; the upper plane is there only in precise operands.
 *
 * A unit defines before it includes this file:
 *   vec, VEC_BYTES                  its register
 *   PARTS, LOW_PLANES               2 and 2 (bytes) or 4 and 1 (16 bits)
 *   SUM_REGISTERS                   registers for sums, 8 or 16; an operand takes four a plane
 *   LEVEL_OFFSET                    128 if looked-up levels come as level + 128, else 0
 *   SHIFT_2, SHIFT_1                0, 2 ..: 2- and 1-bit codes of row r come as code << SHIFT[r]
 *   vec_load, vec_broadcast (16 bytes), vec_zero, multiply_add
 *   tables, tables_of(book)         a codebook in registers;   parts, levels(bits, words, r, tables)
 *   UNIT_STORES_PLANES              if it has its own store_planes, below
 *   add_lanes(v)                    number r of 16-byte lane g = the sum over t of 32-bit word t of 16-byte lane g of v[r]:
 *                                   column order, and as many numbers as there are in tq_floats */
#ifndef TQ_KERNELS_PRODUCT_H
#define TQ_KERNELS_PRODUCT_H
#include "vector.h"
#include <math.h>

#define VEC_GS (VEC_BYTES / 16) /* rows of a vector */
#define UPPER_UNIT (LOW_PLANES == 2 ? 65536.0f : 256.0f)
#define PLANES(precise) (LOW_PLANES + ((precise) ? 1 : 0))

static int64_t planes_at(int32_t n) { return 64 + (8 * ((int64_t)n + 1) + 63) / 64 * 64; }

static size_t operand_bytes_vector(int32_t columns)
{
    int32_t n = columns / TQ_TILE;
    return (size_t)(planes_at(n) + (int64_t)n * PLANES(1) * PARTS * 16);
}

/* ---- preparing ---- */

/* Integers of a tile in column order to the order of its parts.   bytes: word t of | even | = | b2 b0 | of both halves' words t
 * 16 bits: part 2 p + e has byte e and e + 2 of the nibbles of parity p: columns n = 2 e + p and n + 4, of four and four. */
#if PARTS == 2
typedef uint8_t plane_number;

TQ_INLINE void store_plane(const uint8_t *v, void *plane)
{
    typedef uint32_t words __attribute__((vector_size(16)));
    words half[2], even = {0}, odd = {0};
    memcpy(half, v, sizeof half);
    for (int h = 0; h < 2; h++) {
        words e = half[h] & 0x00ff00ff, o = half[h] >> 8 & 0x00ff00ff;
        even |= ((e | e >> 8) & 0xffff) << 16 * h;
        odd |= ((o | o >> 8) & 0xffff) << 16 * h;
    }
    memcpy(plane, &even, sizeof even);
    memcpy((char *)plane + 16, &odd, sizeof odd);
}
#else
typedef uint16_t plane_number;

TQ_INLINE void store_plane(const uint16_t *v, void *plane)
{
    typedef uint64_t fours __attribute__((vector_size(32)));
    typedef uint32_t words __attribute__((vector_size(16)));
    fours half[2];
    memcpy(half, v, sizeof half);
    for (int part = 0; part < 4; part++) {
        int shift = 16 * (2 * (part % 2) + part / 2);
        words w = __builtin_convertvector((half[0] >> shift & 0xffff) | (half[1] >> shift & 0xffff) << 16, words);
        memcpy((char *)plane + 16 * part, &w, sizeof w);
    }
}
#endif

typedef plane_number plane_numbers __attribute__((vector_size(TQ_LANES * sizeof(plane_number))));

/** Splits a tile's 32 integers into planes. Balanced digits: what is left after the lowest byte b, -128..127, is (v - b) / 256,
 *  which is (v + 128) >> 8. */
#if !defined(UNIT_STORES_PLANES)
TQ_INLINE void store_planes(const tq_ints *v, int precise, char *planes)
{
    for (int p = 0; p < PLANES(precise); p++) {
        plane_number digits[TQ_TILE];
        for (int32_t i = 0; i < TQ_TILE / TQ_LANES; i++) {
            tq_ints digit = v[i];
            if (precise && PARTS == 4 && p == 0)
                digit -= ((v[i] + 128) >> 8) * 256; /* the others lose it by their width */
            for (int lower = 0; lower < p; lower++) digit = (digit + 128) >> 8;
            plane_numbers stored = __builtin_convertvector(digit, plane_numbers);
            memcpy(digits + TQ_LANES * i, &stored, sizeof stored);
        }
        store_plane(digits, planes + PARTS * 16 * p);
    }
}
#endif

TQ_INLINE void prepare_planes(const float *x, int32_t columns, int precise, void *operand)
{
    int32_t n = columns / TQ_TILE, *sums = (int32_t *)((char *)operand + 64);
    char *planes = (char *)operand + planes_at(n);
    int32_t most = 0; /* as integers: what is not finite is largest */
    for (int32_t i = 0; i < TQ_TILE * n; i++) {
        int32_t magnitude = (int32_t)(tq_bits_of(x[i]) & 0x7fffffff);
        most = magnitude > most ? magnitude : most;
    }
    float limit = precise ? 4177920.0f : 32639.0f; /* 127.5 * 2^15, and what two balanced bytes hold */
    float max = tq_float_of((uint32_t)most), inverse = limit / max;
    *(float *)operand = max / limit;
    if (!(max >= 0x1p-100f && max <= 0x1.fffffep127f)) { /* nothing, or not finite */
        *(float *)operand = max < 1 ? 0.0f : NAN;
        memset(sums, 0, (size_t)(planes - (char *)sums) + (size_t)n * PLANES(precise) * PARTS * 16);
        return;
    }
    sums[0] = sums[1] = 0;
    for (int32_t k = 0; k < n; k++) {
        tq_ints v[TQ_TILE / TQ_LANES], all = {0}, uppers = {0};
        for (int32_t i = 0; i < TQ_TILE / TQ_LANES; i++) {
            tq_floats y = tq_load_floats(x + TQ_TILE * k + TQ_LANES * i) * inverse;
            v[i] = (tq_ints)(y + 12582912.0f) - 0x4b400000; /* rounds: 1.5 * 2^23 */
            all += v[i];
            uppers += LOW_PLANES == 2 ? (v[i] + 0x8080) >> 16 : (v[i] + 0x80) >> 8;
        }
        int32_t upper_sum = precise ? tq_sum_lanes_int(uppers) : 0;
        sums[2 * k + 2] = sums[2 * k] + tq_sum_lanes_int(all) - upper_sum * (int32_t)UPPER_UNIT;
        sums[2 * k + 3] = sums[2 * k + 1] + upper_sum;
        store_planes(v, precise, planes);
        planes += PLANES(precise) * PARTS * 16;
    }
}

static void prepare_vector(const float *x, int32_t columns, int precise, void *operand)
{
    if (precise) prepare_planes(x, columns, 1, operand);
    else prepare_planes(x, columns, 0, operand);
}

/* ---- multiplying ---- */

/** Runs of tiles of one width side by side in blocks, and some operands: where everything is. */
typedef struct {
    const uint8_t *base;
    const tq_tile *tiles; /* the first block's; the next block's are `of` further on */
    int32_t blocks, n;
    const tq_codebook *book;
    const char *operands;
    int64_t operand_stride;
    int32_t rows, first, of; /* the run's first tile in its block, tiles of the block */
    const uint8_t *ahead;    /* prefetched at `lines` of 64 bytes a step */
    int32_t lines;
    float *out;
    int32_t out_stride, accumulate;
} product_run;

/** What turns an operand's integer sums over a run into numbers. */
typedef struct {
    tq_floats unit;
    tq_ints low_offset, upper_offset; /* levels' offset times the sum of the operand */
} product_end;

TQ_INLINE product_end end_of(int bits, const product_run *run, int32_t q)
{
    const char *operand = run->operands + q * run->operand_stride;
    const int32_t *before = (const int32_t *)(operand + 64) + 2 * run->first, *behind = before + 2 * run->n;
    int32_t offset = bits == 1 ? 1 : bits == 2 ? 3 : LEVEL_OFFSET; /* level = 2 code - 1 or - 3 for one and two bits */
    return (product_end){tq_all(*(const float *)operand * run->book->step),
                         (tq_ints){0} + offset * (behind[0] - before[0]),
                         (tq_ints){0} + offset * (behind[1] - before[1])};
}

/** Sums over t in column order, to codes times operand, to levels times operand. */
TQ_INLINE tq_floats level_sums(int bits, const vec sums[4], tq_ints offset)
{
    static const int32_t shifts[2][16] = {{SHIFT_1, SHIFT_1, SHIFT_1, SHIFT_1}, {SHIFT_2, SHIFT_2, SHIFT_2, SHIFT_2}};
    tq_ints v = (tq_ints)add_lanes(sums), shift;
    if (bits <= 2) {
        memcpy(&shift, shifts[bits - 1], sizeof shift);
        v = (v >> shift) * 2;
    }
    return __builtin_convertvector(v - offset, tq_floats);
}

/** A step: `vectors` vectors of rows of one block times `rows` operands. Sums are registers once all of it is inlined. */
typedef struct {
    const product_run *run;
    const tables *t;
    const tq_tile *tiles; /* the block's */
    const char *operands; /* integers of the first one's first tile */
    int g;                /* first row of the first vector */
    int32_t lines;        /* to fetch for a vector of a tile, from `ahead` on */
    const uint8_t *ahead;
} product_step;

/** Adds the products with planes first .. first + planes - 1: sums[vector][operand][plane - first][r]. */
TQ_INLINE void add_products(int bits, int precise, int rows, int vectors, int first, int planes,
                            const product_step *step, vec sums[2][2][2][4])
{
    const char *x = step->operands + 16 * PARTS * first;
    const uint8_t *ahead = step->ahead;
    int32_t k = 0;
    do {
        TQ_UNROLL
        for (int h = 0; h < vectors; h++) {
            const uint8_t *tile = step->run->base + step->tiles[k].offset + 16 * (step->g + h * VEC_GS);
            vec words[TQ_MAX_BITS];
            TQ_UNROLL
            for (int i = 0; i < bits; i++) words[i] = vec_load(tile + 128 * i);
            for (int32_t i = 0; i < step->lines; i++, ahead += 64)
                __builtin_prefetch(ahead, 0, 2); /* to L2: more can be under way */
            TQ_UNROLL
            for (int r = 0; r < 4; r++) {
                parts level = levels(bits, words, r, step->t);
                TQ_UNROLL
                for (int i = 0; i < rows; i++) TQ_UNROLL
                for (int p = 0; p < planes; p++) TQ_UNROLL
                for (int j = 0; j < PARTS; j++) {
                    vec numbers = vec_broadcast(x + i * step->run->operand_stride + 16 * (p * PARTS + j));
                    sums[h][i][p][r] = multiply_add(sums[h][i][p][r], level.part[j], numbers);
                }
            }
        }
        x += 16 * PARTS * PLANES(precise);
    } while (++k < step->run->n);
}

TQ_INLINE void clear(int rows, int vectors, int planes, vec sums[2][2][2][4])
{
    TQ_UNROLL
    for (int h = 0; h < vectors; h++) TQ_UNROLL
    for (int i = 0; i < rows; i++) TQ_UNROLL
    for (int p = 0; p < planes; p++) TQ_UNROLL
    for (int r = 0; r < 4; r++) sums[h][i][p][r] = vec_zero();
}

/** One block times `rows` operands from q on. Two low planes are taken together if registers allow: that saves the second look-up;
 *  otherwise one after the other, which saves registers. */
TQ_INLINE void multiply_block(int bits, int precise, int rows, const product_run *run, const tables *t,
                              const product_end *ends, int32_t block, int32_t q)
{
    const int together = LOW_PLANES * rows * 4 <= SUM_REGISTERS ? LOW_PLANES : 1;
    const int vectors =
        2 * together * rows * 4 <= SUM_REGISTERS && VEC_GS < 8 ? 2 : 1; /* lone rows have registers to spare */
    int32_t lines = q ? 0 : run->lines;                                 /* once is enough */
    float *out = run->out + (int64_t)q * run->out_stride + TQ_TILE * block;
    product_step step = {run,
                         t,
                         run->tiles + (int64_t)block * run->of,
                         run->operands + q * run->operand_stride + planes_at(run->of) +
                             16 * PARTS * PLANES(precise) * (int64_t)run->first,
                         0,
                         lines,
                         run->ahead + 64 * (int64_t)lines * (8 / VEC_GS) * run->n * block};
    for (step.g = 0; step.g < 8; step.g += vectors * VEC_GS) {
        vec sums[2][2][2][4];
        tq_floats y[2][2];
        clear(rows, vectors, together, sums);
        add_products(bits, precise, rows, vectors, LOW_PLANES - together, together, &step, sums);
        step.ahead += 64 * (int64_t)step.lines * vectors * run->n;
        if (together < LOW_PLANES) {
            TQ_UNROLL
            for (int h = 0; h < vectors; h++) TQ_UNROLL
            for (int i = 0; i < rows; i++) TQ_UNROLL
            for (int r = 0; r < 4; r++) sums[h][i][0][r] = vec_times_256(sums[h][i][0][r]);
            step.lines = 0;
            add_products(bits, precise, rows, vectors, 0, 1, &step, sums);
        }
        TQ_UNROLL
        for (int h = 0; h < vectors; h++) TQ_UNROLL
        for (int i = 0; i < rows; i++) {
            vec low[4];
            TQ_UNROLL
            for (int r = 0; r < 4; r++)
                low[r] = together == 2 ? vec_add(vec_times_256(sums[h][i][1][r]), sums[h][i][0][r]) : sums[h][i][0][r];
            y[h][i] = level_sums(bits, low, ends[i].low_offset);
        }
        step.lines = 0;
        if (precise) {
            clear(rows, vectors, 1, sums);
            add_products(bits, precise, rows, vectors, LOW_PLANES, 1, &step, sums);
        }
        TQ_UNROLL
        for (int h = 0; h < vectors; h++) TQ_UNROLL
        for (int i = 0; i < rows; i++) {
            float *to = out + (int64_t)i * run->out_stride + 4 * (step.g + h * VEC_GS);
            vec upper[4];
            TQ_UNROLL
            for (int r = 0; r < 4; r++) upper[r] = sums[h][i][0][r];
            if (precise) y[h][i] = tq_fused(level_sums(bits, upper, ends[i].upper_offset), tq_all(UPPER_UNIT), y[h][i]);
            tq_floats sum = run->accumulate ? tq_load_floats(to) : tq_all(0);
            tq_store_floats(to, tq_fused(y[h][i], ends[i].unit, sum));
        }
        step.lines = lines;
    }
}

/** All blocks times `rows` operands from q on. */
TQ_INLINE void multiply_rows(int bits, int precise, int rows, const product_run *run, const tables *t, int32_t q)
{
    product_end ends[2];
    for (int i = 0; i < rows; i++) ends[i] = end_of(bits, run, q + i);
    for (int32_t block = 0; block < run->blocks; block++) multiply_block(bits, precise, rows, run, t, ends, block, q);
}

/** All blocks and all operands, two at a time: the look-up is shared, and sums still fit in registers. */
TQ_INLINE void multiply_width(int bits, int precise, const product_run *run)
{
    const tables t = tables_of(run->book);
    int32_t q = 0;
    for (; q + 2 <= run->rows; q += 2) multiply_rows(bits, precise, 2, run, &t, q);
    if (q < run->rows) multiply_rows(bits, precise, 1, run, &t, q);
}

#define WIDTH(bits)                                                                                                    \
    static void multiply_##bits(const product_run *run, int precise)                                                   \
    {                                                                                                                  \
        if (precise) multiply_width(bits, 1, run);                                                                     \
        else multiply_width(bits, 0, run);                                                                             \
    }
WIDTH(1)
WIDTH(2)
WIDTH(3)
WIDTH(4)
WIDTH(5)

/** Blocks from the first on whose tiles have the first one's widths. */
static int32_t blocks_alike(const tq_tile_grid *grid, int32_t first)
{
    const tq_tile *tiles = grid->tiles + (int64_t)first * grid->n;
    int32_t i = 1;
    for (; first + i < grid->blocks; i++)
        for (int32_t k = 0; k < grid->n; k += tiles[k].run)
            if (tiles[i * grid->n + k].bits != tiles[k].bits || tiles[i * grid->n + k].run != tiles[k].run) return i;
    return i;
}

static void multiply_vector(const tq_tile_grid *grid, const void *operands, int32_t rows, int precise, int accumulate,
                            float *out, int32_t out_stride)
{
    static void (*const widths[])(const product_run *, int) = {NULL,       multiply_1, multiply_2,
                                                               multiply_3, multiply_4, multiply_5};
    int32_t steps = grid->blocks * grid->n * (8 / VEC_GS), lines = ((grid->ahead_bytes + 63) / 64 + steps - 1) / steps;
    product_run run = {.base = grid->base,
                       .operands = operands,
                       .operand_stride = (int64_t)operand_bytes_vector(TQ_TILE * grid->n),
                       .rows = rows,
                       .of = grid->n,
                       .ahead = grid->ahead,
                       .lines = lines,
                       .out_stride = out_stride};
    for (int32_t i = 0; i < grid->blocks; i += run.blocks) {
        run.blocks = blocks_alike(grid, i);
        run.out = out + TQ_TILE * i;
        for (run.first = 0; run.first < grid->n; run.first += run.n) {
            run.tiles = grid->tiles + (int64_t)grid->n * i + run.first;
            run.n = run.tiles->run;
            run.book = &grid->books[run.tiles->bits];
            run.accumulate = accumulate || run.first;
            widths[run.tiles->bits](&run, precise);
            run.ahead += 64 * (int64_t)lines * (8 / VEC_GS) * run.n * run.blocks;
        }
    }
}
#endif
