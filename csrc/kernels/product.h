/* Multiplies packed tiles by operands. Written once for the vector units.
 *
 * The four words t = 0..3 of one g are 16 bytes of one row of the tile (turboquant.h, "tile"), so a vector of 16 G
 * bytes holds G rows. Every width becomes levels in the same order of columns, that of the nibbles:
 *   byte 4 t + i of a 16-byte lane      even: column n = 2 i of lane 4 g + t      odd: column n = 2 i + 1
 * An operand stores its numbers as integers in that order. A unit turns a vector of words into PARTS vectors of levels
 * (bytes: even, odd; 16 bits: even and odd bytes of both). Its `multiply_add` sums products within each 32-bit word.
 *
 * The sums of a row's four words must still be added. Several operands read a tile by lane: the words of rows g, g + 8,
 * g + 16, g + 24 are transposed once, before the look-up, so that word r of a vector is row r of lane t. Every word of
 * it is multiplied by the operand's word t, and sums are in the order in which they are stored (column order). The
 * transposition costs little beside the products. It leaves almost nothing to do after them, when the multipliers would
 * wait. A single operand reads the tile by row, and its sums by row are transposed and added at the end.
 *
 * With half tiles (kernels.h, tq_halves), each lane t or row r, and so each word, belongs to one of two token tiles. So
 * a word of levels is multiplied by the numbers of one operand tile or the other (TQ_HALF_ROWS), or is added to one sum
 * or the other (TQ_HALF_COLUMNS). Nothing is computed twice.
 *
 * An operand of n tiles:
 *   | scale float, 60 bytes unused | sums int32 [n + 1][2][4]: of low and upper integers before tile k, in four parts |
 *   | integers [n tiles][low planes, then the upper one][PARTS][16 bytes] |
 * The sums are padded to 64 bytes. x = scale * (low + UPPER_UNIT * upper), low = plane 0 + 256 * plane 1; the upper
 * plane is there only in precise operands.
 *
 * A unit defines before it includes this file, with what levels.h needs:
 *   vec, byte_pair                  its register, and two: even and odd
 *   PARTS, LOW_PLANES               2 and 2 (bytes) or 4 and 1 (16 bits)
 *   SUM_REGISTERS                   registers for sums, 8 or 16
 *   LEVEL_OFFSET                    128 if looked-up levels come as level + 128, else 0
 *   ROW_3_SHIFT                     levels of 2 bits are code << 0, 2, 4, ROW_3_SHIFT in row r; of 1 bit code << r
 *   multiply_add, vec_broadcast_u32x4 (16 bytes)
 *   vec_two_of_each(a, b)           words a, a, b, b in each 16-byte lane, of vectors that repeat one word
 *   UNIT_STORES_PLANES              if it has its own store_planes, below
 *   UNIT_MANY_ROWS                  from this many operands on, whole tiles use the unit's own product,
 *                                   multiply_many */
#ifndef TQ_KERNELS_PRODUCT_H
#define TQ_KERNELS_PRODUCT_H
#include "levels.h"
#include <math.h>

#define VEC_GS (TQ_LANES / 4) /* rows of a vector */
#define MAX_ROWS 4            /* operands that share a look-up */
#define UPPER_UNIT (LOW_PLANES == 2 ? 65536.0f : 256.0f)
#define PLANES(precise) (LOW_PLANES + ((precise) ? 1 : 0))
#define LIMIT(precise) ((precise) ? 4177920.0f : 32639.0f) /* 127.5 * 2^15; two balanced bytes: the largest */

static int64_t planes_at(int32_t n) { return 64 + (32 * ((int64_t)n + 1) + 63) / 64 * 64; }

static size_t operand_bytes_vector(int32_t columns)
{
    int32_t n = columns / TQ_TILE;
    return (size_t)(planes_at(n) + ((int64_t)n * PLANES(1) * PARTS * 16 + 63) / 64 * 64);
}

/* ---- preparing ---- */

/* Moves a tile's 32 integers from column order to the order of the parts.
 *   bytes     word t of `even` has bytes 0 and 2 of word t of both halves (16 columns each), `odd` has bytes 1 and 3
 *   16 bits   word t of part 2 p + e has columns n = 2 e + p and n + 4 of lane t */
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

/** Splits a tile's 32 integers into planes of balanced digits: the lowest byte b is in -128..127, and the rest is
 *  (v - b) / 256 = (v + 128) >> 8. */
#if !defined(UNIT_STORES_PLANES)
TQ_INLINE void store_planes(const tq_ints *v, int precise, char *planes)
{
    for (int p = 0; p < PLANES(precise); p++) {
        plane_number digits[TQ_TILE];
        for (int32_t i = 0; i < TQ_TILE / TQ_LANES; i++) {
            tq_ints digit = v[i];
            if (precise && PARTS == 4 && p == 0)
                digit -= ((v[i] + 128) >> 8) * 256; /* narrowing does this for the other planes */
            for (int lower = 0; lower < p; lower++) digit = (digit + 128) >> 8;
            plane_numbers stored = __builtin_convertvector(digit, plane_numbers);
            memcpy(digits + TQ_LANES * i, &stored, sizeof stored);
        }
        store_plane(digits, planes + PARTS * 16 * p);
    }
}
#endif

/** Makes an operand of row x [32 n], whose largest magnitude is `max`; inverse = LIMIT(precise) / max. */
TQ_INLINE void prepare_planes(const float *x, float max, float inverse, int32_t n, int precise, void *operand)
{
    tq_ints4 *sums = (tq_ints4 *)((char *)operand + 64);
    char *planes = (char *)operand + planes_at(n);
    *(float *)operand = max * (1 / LIMIT(precise));
    if (!(max >= 0x1p-100f && max <= 0x1.fffffep127f)) { /* as good as zero, or not finite */
        *(float *)operand = max < 1 ? 0.0f : NAN;
        memset(sums, 0, (size_t)(planes - (char *)sums) + (size_t)n * PLANES(precise) * PARTS * 16);
        return;
    }
    sums[0] = sums[1] = (tq_ints4){0};
    for (int32_t k = 0; k < n; k++) {
        tq_ints v[TQ_TILE / TQ_LANES], all = {0}, uppers = {0};
        for (int32_t i = 0; i < TQ_TILE / TQ_LANES; i++) {
            tq_floats y = tq_load_floats(x + TQ_TILE * k + TQ_LANES * i) * inverse;
            v[i] = (tq_ints)(y + 12582912.0f) - 0x4b400000; /* rounds: 1.5 * 2^23 */
            all += v[i];
            uppers += LOW_PLANES == 2 ? (v[i] + 0x8080) >> 16 : (v[i] + 0x80) >> 8;
        }
        tq_ints4 upper = precise ? tq_fold_ints(uppers) : (tq_ints4){0};
        sums[2 * k + 2] = sums[2 * k] + tq_fold_ints(all) - upper * (int32_t)UPPER_UNIT;
        sums[2 * k + 3] = sums[2 * k + 1] + upper;
        store_planes(v, precise, planes);
        planes += PLANES(precise) * PARTS * 16;
    }
}

/** Prepares MAX_ROWS rows at a time: first the largest magnitude of each, so that rows do not wait for one another. */
static void prepare_vector(const float *x, int32_t columns, int32_t rows, int precise, void *operands)
{
    int64_t stride = (int64_t)operand_bytes_vector(columns);
    for (int32_t first = 0; first < rows; first += MAX_ROWS) {
        int32_t n = rows - first < MAX_ROWS ? rows - first : MAX_ROWS;
        float max[MAX_ROWS], inverse[MAX_ROWS];
        for (int32_t i = 0; i < n; i++) {
            max[i] = tq_largest_magnitude(x + (int64_t)(first + i) * columns, columns);
            inverse[i] = LIMIT(precise) / max[i];
        }
        for (int32_t i = 0; i < n; i++) {
            const float *row = x + (int64_t)(first + i) * columns;
            void *operand = (char *)operands + (first + i) * stride;
            if (precise) prepare_planes(row, max[i], inverse[i], columns / TQ_TILE, 1, operand);
            else prepare_planes(row, max[i], inverse[i], columns / TQ_TILE, 0, operand);
        }
    }
}

/* ---- multiplying ---- */

/** A run: adjacent tiles of one width in each of some blocks, and the operands that they are multiplied by. */
typedef struct {
    const uint8_t *base;
    const tq_tile *tiles; /* of the first block; those of the next one are `of` further on */
    int32_t blocks, n;
    const tq_codebook *book;
    const char *operands;
    int64_t operand_stride;
    int32_t rows, first, of; /* the run's first tile in its block, tiles of the block */
    int32_t operand_tiles;   /* of a whole operand */
    const uint8_t *ahead;    /* to prefetch: `lines` cache lines of 64 bytes for each vector of a tile */
    int32_t lines;
    float *out;
    int32_t out_stride, accumulate;
} product_run;

/** How an operand's integer sums over a run become floats. */
typedef struct {
    tq_floats unit;
    tq_ints low_offset, upper_offset; /* offset of the levels times the sum of the operand's integers */
} product_end;

/** Returns, for each word of a vector of sums, the sum of the operand's integers (low or upper) that it was multiplied
 *  by. Word i is of row r = i % 4. before: the operand's sums before the run's first tile. */
TQ_INLINE tq_ints met_sums(tq_halves halves, const tq_ints4 *before, int32_t n)
{
    if (halves == TQ_HALF_ROWS) { /* rows r = 0, 1 use the operand's even tiles, r = 2, 3 its odd ones */
        int32_t even = 0, odd = 0;
        for (int32_t k = 0; k < n; k++, before += 4) {
            even += tq_sum_ints4(before[2] - before[0]);
            odd += tq_sum_ints4(before[4] - before[2]);
        }
        tq_ints by_row;
        for (int32_t i = 0; i < TQ_LANES; i++) by_row[i] = i & 2 ? odd : even;
        return by_row;
    }
    int32_t sum = tq_sum_ints4(before[2 * n] - before[0]);
    return (tq_ints){0} + (halves == TQ_HALF_COLUMNS ? sum / 2 : sum); /* an operand has each number twice */
}

TQ_INLINE product_end end_of(int bits, tq_halves halves, const product_run *run, int32_t q)
{
    const char *operand = run->operands + q * run->operand_stride;
    const tq_ints4 *before = (const tq_ints4 *)(operand + 64) + 2 * (run->first << (halves == TQ_HALF_ROWS));
    int32_t offset = bits == 1 ? 1 : bits == 2 ? 3 : LEVEL_OFFSET; /* level = 2 code - 1 or - 3 for one and two bits */
    return (product_end){tq_all(*(const float *)operand * run->book->step), offset * met_sums(halves, before, run->n),
                         offset * met_sums(halves, before + 1, run->n)};
}

/** Turns sums of codes times operand into sums of levels times operand. */
TQ_INLINE tq_floats level_sums(int bits, vec sums, tq_ints offset)
{
    static const int32_t shifts[2][4] = {{0, 1, 2, 3}, {0, 2, 4, ROW_3_SHIFT}};
    tq_ints v = (tq_ints)sums;
    if (bits <= 2) v = (v >> (tq_ints)vec_broadcast_u32x4(shifts[bits - 1])) * 2;
    return __builtin_convertvector(v - offset, tq_floats);
}

/** Turns a vector of integer sums, by plane (the last is the upper one), into floats at `to`. */
TQ_INLINE void store_product(int bits, int precise, const vec plane[3], const product_end *end, int accumulate,
                             float *to)
{
    vec low = LOW_PLANES == 2 ? vec_add(vec_times_256(plane[1]), plane[0]) : plane[0];
    tq_floats y = level_sums(bits, low, end->low_offset);
    if (precise) y = tq_fused(level_sums(bits, plane[2], end->upper_offset), tq_all(UPPER_UNIT), y);
    tq_floats sum = accumulate ? tq_load_floats(to) : tq_all(0);
    tq_store_floats(to, tq_fused(y, end->unit, sum));
}

/** load_words for `bits` that need not be a constant. */
TQ_INLINE tile_words words_of(int bits, int by_lane, const uint8_t *at)
{
    switch (bits) {
    case 1: return load_words(1, by_lane, at);
    case 2: return load_words(2, by_lane, at);
    case 3: return load_words(3, by_lane, at);
    case 4: return load_words(4, by_lane, at);
    case 5: return load_words(5, by_lane, at);
    case 6: return load_words(6, by_lane, at);
    default: return load_words(TQ_WIDE_BITS, by_lane, at);
    }
}

TQ_INLINE parts levels_of(int bits, int by_lane, const tile_words *words, int m, const tables *t)
{
    switch (bits) {
    case 1: return levels(1, by_lane, words, m, t);
    case 2: return levels(2, by_lane, words, m, t);
    case 3: return levels(3, by_lane, words, m, t);
    case 4: return levels(4, by_lane, words, m, t);
    case 5: return levels(5, by_lane, words, m, t);
    case 6: return levels(6, by_lane, words, m, t);
    default: return levels(TQ_WIDE_BITS, by_lane, words, m, t);
    }
}

/** A step: multiplies `vectors` vectors of rows of one block by `rows` operands. */
typedef struct {
    const product_run *run;
    const tables *t;
    const tq_tile *tiles; /* of the block */
    const char *operands; /* integers of the first operand at the run's first tile */
    int g;                /* first row of the first vector */
    int32_t lines;        /* to prefetch for a vector of a tile, from `ahead` on */
    const uint8_t *ahead;
} product_step;

/** Sums [vector or token tile][operand][plane][row r, or 0 by lane]: registers once everything is inlined. */
typedef vec (*product_sums)[MAX_ROWS][3][4];

/** Returns the operand's numbers for levels of lane t = m or row r = m. The operand's next tile is `next` bytes on. */
TQ_INLINE vec met_numbers(tq_halves halves, int by_lane, int m, const char *part, int next)
{
    if (halves != TQ_HALF_ROWS) return by_lane ? vec_broadcast_u32(part + 4 * m) : vec_broadcast_u32x4(part);
    return by_lane ? vec_two_of_each(vec_broadcast_u32(part + 4 * m), vec_broadcast_u32(part + next + 4 * m))
                   : vec_broadcast_u32x4(m < 2 ? part : part + next);
}

/** Multiplies `vectors` vectors of words of a tile by its numbers in `rows` operands, those of the first at x. */
TQ_INLINE void add_tile(int bits, tq_halves halves, int precise, int rows, int vectors, int by_lane,
                        const tile_words *words, const char *x, const product_step *step, product_sums sums)
{
    const int planes = PLANES(precise), of_lanes = halves == TQ_HALF_COLUMNS && by_lane;
    TQ_UNROLL
    for (int m = 0; m < 4; m++) { /* lane t or row r */
        parts level[2];
        TQ_UNROLL
        for (int h = 0; h < vectors; h++) level[h] = levels_of(bits, by_lane, &words[h], m, step->t);
        TQ_UNROLL
        for (int j = 0; j < PARTS; j++) TQ_UNROLL
        for (int i = 0; i < rows; i++) TQ_UNROLL
        for (int p = 0; p < planes; p++) {
            const char *part = x + i * step->run->operand_stride + 16 * (p * PARTS + j);
            vec numbers = met_numbers(halves, by_lane, m, part, 16 * PARTS * planes);
            TQ_UNROLL
            for (int h = 0; h < vectors; h++) {
                vec *sum = &sums[of_lanes ? m / 2 : h][i][p][by_lane ? 0 : m];
                *sum = multiply_add(*sum, level[h].part[j], numbers);
            }
        }
    }
}

TQ_INLINE void add_products(int bits, tq_halves halves, int precise, int rows, int vectors, int by_lane,
                            const product_step *step, product_sums sums)
{
    const char *x = step->operands;
    const uint8_t *ahead = step->ahead;
    int32_t k = 0;
    do {
        const uint8_t *tile = step->run->base + step->tiles[k].offset + 16 * step->g;
        tile_words words[2];
        TQ_UNROLL
        for (int h = 0; h < vectors; h++) {
            words[h] = words_of(bits, by_lane, tile + 16 * VEC_GS * h);
            for (int32_t i = 0; i < step->lines; i++, ahead += 64)
                __builtin_prefetch(ahead, 0, 2); /* to L2, which allows more prefetches at once */
            if (!by_lane) add_tile(bits, halves, precise, rows, 1, by_lane, words + h, x, step, sums + h);
        }
        if (by_lane) add_tile(bits, halves, precise, rows, vectors, by_lane, words, x, step, sums);
        x += 16 * PARTS * PLANES(precise) << (halves == TQ_HALF_ROWS);
    } while (++k < step->run->n);
}

/** Adds up one plane's sums, which are by row: first[0] gets them in column order. TQ_HALF_COLUMNS: first[0] gets those
 *  of one token tile, second[0] those of the other. */
TQ_INLINE void gather_sums(tq_halves halves, vec *first, vec *second)
{
    vec_transpose(first);
    vec low = vec_add(first[0], first[1]), high = vec_add(first[2], first[3]);
    first[0] = halves == TQ_HALF_COLUMNS ? low : vec_add(low, high);
    if (halves == TQ_HALF_COLUMNS) second[0] = high;
}

/** Multiplies one block by `rows` operands from q on. */
TQ_INLINE void multiply_block(int bits, tq_halves halves, int precise, int rows, const product_run *run,
                              const tables *t, const product_end *ends, int32_t block, int32_t q)
{
    const int planes = PLANES(precise), two = halves == TQ_HALF_COLUMNS;
    const int by_lane = rows > 1 || 4 * planes > SUM_REGISTERS, sums_each = rows * planes * (by_lane ? 1 : 4);
    const int vectors = !two && 2 * sums_each <= SUM_REGISTERS ? 2 : 1; /* two share a broadcast if registers allow */
    const int outputs = two ? 2 : vectors;                              /* vectors of sums */
    int32_t lines = q ? 0 : run->lines;                                 /* prefetch once */
    float *out = run->out + (int64_t)q * run->out_stride + (TQ_TILE << two) * block;
    product_step step = {run,
                         t,
                         run->tiles + (int64_t)block * run->of,
                         run->operands + q * run->operand_stride + planes_at(run->operand_tiles) +
                             16 * PARTS * planes * ((int64_t)run->first << (halves == TQ_HALF_ROWS)),
                         0,
                         lines,
                         run->ahead + 64 * (int64_t)lines * (8 / VEC_GS) * run->n * block};
    for (step.g = 0; step.g < 8; step.g += vectors * VEC_GS) {
        vec sums[2][MAX_ROWS][3][4];
        TQ_UNROLL
        for (int h = 0; h < outputs; h++) TQ_UNROLL
        for (int i = 0; i < rows; i++) TQ_UNROLL
        for (int p = 0; p < planes; p++) TQ_UNROLL
        for (int r = 0; r < 4; r++) sums[h][i][p][r] = vec_zero();
        add_products(bits, halves, precise, rows, vectors, by_lane, &step, sums);
        step.ahead += 64 * (int64_t)lines * vectors * run->n;
        TQ_UNROLL
        for (int h = 0; h < vectors && !by_lane; h++) TQ_UNROLL
        for (int p = 0; p < planes; p++) gather_sums(halves, sums[h][0][p], sums[1][0][p]);
        TQ_UNROLL
        for (int h = 0; h < outputs; h++) TQ_UNROLL
        for (int i = 0; i < rows; i++) {
            vec(*plane)[4] = sums[h][i];
            store_product(bits, precise, (vec[]){plane[0][0], plane[LOW_PLANES - 1][0], plane[PLANES(precise) - 1][0]},
                          &ends[i], run->accumulate,
                          out + (int64_t)i * run->out_stride + 4 * step.g + h * (two ? TQ_TILE : 4 * VEC_GS));
        }
    }
}

/** Multiplies all blocks by `rows` operands from q on. */
TQ_INLINE void multiply_rows(int bits, tq_halves halves, int precise, int rows, const product_run *run, const tables *t,
                             int32_t q)
{
    product_end ends[MAX_ROWS];
    for (int i = 0; i < rows; i++) ends[i] = end_of(bits, halves, run, q + i);
    for (int32_t block = 0; block < run->blocks; block++)
        multiply_block(bits, halves, precise, rows, run, t, ends, block, q);
}

#if defined(UNIT_MANY_ROWS)
/** Multiplies all blocks of whole tiles by all operands, which are UNIT_MANY_ROWS or more. */
TQ_INLINE void multiply_many(int bits, int precise, const product_run *run, const tables *t);
#endif

/** Multiplies all blocks by all operands. Four at a time share a look-up, and their sums still fit in registers. */
TQ_INLINE void multiply_width(int bits, tq_halves halves, int precise, const product_run *run)
{
    const tables t = tables_of(run->book);
    int32_t q = 0;
#if defined(UNIT_MANY_ROWS)
    if (halves == TQ_WHOLE_TILES && run->rows >= UNIT_MANY_ROWS) {
        multiply_many(bits, precise, run, &t);
        return;
    }
#endif
    for (; q + 4 <= run->rows; q += 4) multiply_rows(bits, halves, precise, 4, run, &t, q);
    for (; halves == TQ_WHOLE_TILES && q + 2 <= run->rows; q += 2) multiply_rows(bits, halves, precise, 2, run, &t, q);
    for (; q < run->rows; q++) multiply_rows(bits, halves, precise, 1, run, &t, q);
}

#define WIDTH(bits)                                                                                                    \
    static void multiply_##bits(const product_run *run, int precise)                                                   \
    {                                                                                                                  \
        if (precise) multiply_width(bits, TQ_WHOLE_TILES, 1, run);                                                     \
        else multiply_width(bits, TQ_WHOLE_TILES, 0, run);                                                             \
    }
WIDTH(1)
WIDTH(2)
WIDTH(3)
WIDTH(4)
WIDTH(5)
WIDTH(6)
WIDTH(8)

/* One function for all widths, with precise operands only. Runs of mixed widths are short, and a function for each
 * width would be most of the compiled code. */
static void multiply_half_columns(const product_run *run) { multiply_width(run->tiles->bits, TQ_HALF_COLUMNS, 1, run); }

static void multiply_half_rows(const product_run *run) { multiply_width(run->tiles->bits, TQ_HALF_ROWS, 1, run); }

/** Returns how many blocks, from `first` on, have tiles of the same widths and runs. */
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
    static void (*const widths[TQ_WIDE_BITS + 1])(const product_run *, int) = {
        NULL, multiply_1, multiply_2, multiply_3, multiply_4, multiply_5, multiply_6, NULL, multiply_8};
    int32_t steps = grid->blocks * grid->n * (8 / VEC_GS), lines = ((grid->ahead_bytes + 63) / 64 + steps - 1) / steps;
    int32_t operand_tiles = grid->n << (grid->halves == TQ_HALF_ROWS);
    product_run run = {.base = grid->base,
                       .operands = operands,
                       .operand_stride = (int64_t)operand_bytes_vector(TQ_TILE * operand_tiles),
                       .operand_tiles = operand_tiles,
                       .rows = rows,
                       .of = grid->n,
                       .ahead = grid->ahead,
                       .lines = lines,
                       .out_stride = out_stride};
    for (int32_t i = 0; i < grid->blocks; i += run.blocks) {
        run.blocks = blocks_alike(grid, i);
        run.out = out + (TQ_TILE << (grid->halves == TQ_HALF_COLUMNS)) * i;
        for (run.first = 0; run.first < grid->n; run.first += run.n) {
            run.tiles = grid->tiles + (int64_t)grid->n * i + run.first;
            run.n = run.tiles->run;
            run.book = &grid->books[run.tiles->bits];
            run.accumulate = accumulate || run.first;
            if (grid->halves == TQ_HALF_COLUMNS) multiply_half_columns(&run);
            else if (grid->halves == TQ_HALF_ROWS) multiply_half_rows(&run);
            else widths[run.tiles->bits](&run, precise);
            run.ahead += 64 * (int64_t)lines * (8 / VEC_GS) * run.n * run.blocks;
        }
    }
}
#endif
