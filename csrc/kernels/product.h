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
 *   SUM_REGISTERS                   registers for sums; a row takes four a plane
 *   LEVEL_OFFSET                    128 if looked-up levels come as level + 128, else 0
 *   SHIFT_2, SHIFT_1                0, 2 ..: 2- and 1-bit codes of row r come as code << SHIFT[r]
 *   vec_load, vec_broadcast (16 bytes), vec_zero, multiply_add
 *   tables, tables_of(book)         a codebook in registers;   parts, levels(bits, words, r, tables)
 *   UNIT_STORES_PLANES              if it has its own store_planes, below
 *   add_lanes(v, out)               out[4 g + r] = the sum over t of 32-bit word t of 16-byte lane g of v[r] */
#ifndef TQ_KERNELS_PRODUCT_H
#define TQ_KERNELS_PRODUCT_H
#include <math.h>
#include "vector.h"

#define VEC_GS (VEC_BYTES / 16)                             /* rows of a vector */
#define UPPER_UNIT (LOW_PLANES == 2 ? 65536.0f : 256.0f)
#define PLANES(precise) (LOW_PLANES + ((precise) ? 1 : 0))
#define ROWS_FIT(precise) (SUM_REGISTERS / (4 * PLANES(precise)))
#define ROWS_AT_ONCE(precise) (ROWS_FIT(precise) >= 4 ? 4 : ROWS_FIT(precise) >= 2 ? 2 : 1)

static int64_t planes_at(int32_t n)
{
    return 64 + (8 * ((int64_t)n + 1) + 63) / 64 * 64;
}

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
            tq_ints rest = p == 2 ? ((v[i] + 128) >> 8) + 128 >> 8 : p == 1 ? (v[i] + 128) >> 8 : v[i];
            if (precise && PARTS == 4 && p == 0) rest -= (v[i] + 128) >> 8 << 8;
            plane_numbers stored = __builtin_convertvector(rest, plane_numbers);
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
    if (precise)
        prepare_planes(x, columns, 1, operand);
    else
        prepare_planes(x, columns, 0, operand);
}

/* ---- multiplying ---- */

/** Runs of tiles of one width side by side in blocks, and some operands: where everything is. */
typedef struct {
    const uint8_t *base;
    const tq_tile *tiles;        /* the first block's; the next block's are `of` further on */
    int32_t blocks, n;
    const tq_codebook *book;
    const char *operands;
    int64_t operand_stride;
    int32_t rows, first, of;     /* the run's first tile in its block, tiles of the block */
    const uint8_t *ahead;        /* prefetched at `lines` of 64 bytes a step */
    int32_t lines;
    float *out;
    int32_t out_stride, accumulate;
} product_run;

/** Integer sums of a block for one operand, in column order, to numbers. */
TQ_INLINE void finish(int bits, int precise, const product_run *run, int32_t block, int32_t q, const int32_t *low, const int32_t *upper)
{
    static const int32_t shifts[2][16] = {{SHIFT_1, SHIFT_1, SHIFT_1, SHIFT_1}, {SHIFT_2, SHIFT_2, SHIFT_2, SHIFT_2}};
    const char *operand = run->operands + q * run->operand_stride;
    const int32_t *before = (const int32_t *)(operand + 64) + 2 * run->first, *behind = before + 2 * run->n;
    int32_t offset = bits == 1 ? 1 : bits == 2 ? 3 : LEVEL_OFFSET;
    int32_t low_offset = offset * (behind[0] - before[0]), upper_offset = offset * (behind[1] - before[1]);
    float unit = *(const float *)operand * run->book->step, *out = run->out + (int64_t)q * run->out_stride + TQ_TILE * block;
    for (int32_t i = 0; i < TQ_TILE; i += TQ_LANES) {
        tq_ints v, w = {0}, shift;
        memcpy(&v, low + i, sizeof v);
        if (precise) memcpy(&w, upper + i, sizeof w);
        if (bits <= 2) { /* level = 2 code - 1 or - 3 */
            memcpy(&shift, shifts[bits - 1], sizeof shift);
            v = (v >> shift) * 2;
            w = (w >> shift) * 2;
        }
        tq_floats y = __builtin_convertvector(v - low_offset, tq_floats), sum = run->accumulate ? tq_load_floats(out + i) : tq_all(0);
        if (precise) y = tq_fused(__builtin_convertvector(w - upper_offset, tq_floats), tq_all(UPPER_UNIT), y);
        tq_store_floats(out + i, tq_fused(y, tq_all(unit), sum));
    }
}

/** One block times `rows` operands from q on; fetches its share of what is ahead. */
TQ_INLINE void multiply_block(int bits, int precise, int rows, const product_run *run, const tables *t, int32_t block, int32_t q)
{
    int32_t low[4][TQ_TILE], upper[4][TQ_TILE];
    const int planes = PLANES(precise), vectors = rows == 1 && 8 * planes <= SUM_REGISTERS ? 2 : 1; /* a lone row has sums to spare */
    const tq_tile *tiles = run->tiles + (int64_t)block * run->of;
    const char *operands = run->operands + q * run->operand_stride + planes_at(run->of) + (int64_t)run->first * planes * PARTS * 16;
    int32_t lines = q ? 0 : run->lines; /* once is enough */
    const uint8_t *ahead = run->ahead + 64 * (int64_t)lines * (8 / VEC_GS) * run->n * block;
    for (int g = 0; g < 8; g += vectors * VEC_GS) {
        vec sums[2][4][3][4];
        for (int h = 0; h < vectors; h++)
            for (int i = 0; i < rows; i++)
                for (int p = 0; p < planes; p++)
                    for (int r = 0; r < 4; r++) sums[h][i][p][r] = vec_zero();
        const char *x = operands;
        int32_t k = 0;
        do {
            for (int h = 0; h < vectors; h++) {
                const uint8_t *tile = run->base + tiles[k].offset + 16 * (g + h * VEC_GS);
                vec words[TQ_MAX_BITS];
                for (int i = 0; i < bits; i++) words[i] = vec_load(tile + 128 * i);
                for (int32_t i = 0; i < lines; i++, ahead += 64) __builtin_prefetch(ahead);
                for (int r = 0; r < 4; r++) {
                    parts level = levels(bits, words, r, t);
                    for (int i = 0; i < rows; i++)
                        for (int p = 0; p < planes; p++)
                            for (int j = 0; j < PARTS; j++) {
                                vec numbers = vec_broadcast(x + i * run->operand_stride + 16 * (p * PARTS + j));
                                sums[h][i][p][r] = multiply_add(sums[h][i][p][r], level.part[j], numbers);
                            }
                }
            }
            x += planes * PARTS * 16;
        } while (++k < run->n);
        for (int h = 0; h < vectors; h++)
            for (int i = 0; i < rows; i++) {
                vec lows[4], (*s)[4] = sums[h][i];
                for (int r = 0; r < 4; r++) lows[r] = LOW_PLANES == 2 ? vec_add(vec_times_256(s[1][r]), s[0][r]) : s[0][r];
                add_lanes(lows, low[i] + 4 * (g + h * VEC_GS));
                if (precise) add_lanes(s[LOW_PLANES], upper[i] + 4 * (g + h * VEC_GS));
            }
    }
    for (int i = 0; i < rows; i++) finish(bits, precise, run, block, q + i, low[i], upper[i]);
}

/** All blocks and all operands, as many at a time as registers allow. */
TQ_INLINE void multiply_width(int bits, int precise, const product_run *run)
{
    const tables t = tables_of(run->book);
    for (int32_t block = 0; block < run->blocks; block++) {
        int32_t q = 0;
        if (ROWS_AT_ONCE(precise) > 1)
            for (; q + ROWS_AT_ONCE(precise) <= run->rows; q += ROWS_AT_ONCE(precise))
                multiply_block(bits, precise, ROWS_AT_ONCE(precise), run, &t, block, q);
        for (; q < run->rows; q++) multiply_block(bits, precise, 1, run, &t, block, q);
    }
}

#define WIDTH(bits)                                                                                                                   \
    static void multiply_##bits(const product_run *run, int precise)                                                                  \
    {                                                                                                                                 \
        if (precise)                                                                                                                  \
            multiply_width(bits, 1, run);                                                                                             \
        else                                                                                                                          \
            multiply_width(bits, 0, run);                                                                                             \
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

static void multiply_vector(const tq_tile_grid *grid, const void *operands, int32_t rows, int precise, int accumulate, float *out,
                            int32_t out_stride)
{
    static void (*const widths[])(const product_run *, int) = {NULL, multiply_1, multiply_2, multiply_3, multiply_4, multiply_5};
    int32_t steps = grid->blocks * grid->n * (8 / VEC_GS), lines = ((grid->ahead_bytes + 63) / 64 + steps - 1) / steps;
    product_run run = {.base = grid->base, .operands = operands, .operand_stride = (int64_t)operand_bytes_vector(TQ_TILE * grid->n),
                       .rows = rows, .of = grid->n, .ahead = grid->ahead, .lines = lines, .out_stride = out_stride};
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
