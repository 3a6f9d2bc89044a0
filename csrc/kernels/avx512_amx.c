/* AVX-512 as in avx512_vnni.c, and AMX for the products of many operands (Sapphire Rapids on): a matrix of operands
 * times a matrix of levels. It multiplies 16 operand planes x 64 columns x 16 rows of a tile in as many cycles as there
 * are planes; vpdpbusd takes one cycle for each plane and 64 levels. In return, levels have to go through memory.
 *
 *   tmm4      operand planes   row m: 64 bytes of plane p of operand i, m = planes i + p:
 *               | even t = 0..3 | odd t = 0..3 | of one tile | even t = 0..3 | odd t = 0..3 | of the next |
 *   tmm5..7   levels           row of the same order, a vector of levels by lane each (avx512.h): 16 times four bytes,
 *               word 4 G + r being row g + G + 8 r, which is their order in the product
 *   tmm0..3   sums             row m: 16 words in that order, as the vectors that product.h has in registers
 *
 * A product waits some 50 cycles for the previous one with the same sums, and for its levels to reach the cache. So few
 * operands, whose sums need one or two matrices, are multiplied by four or two strips of 16 rows in turn. */
#include "avx512_vnni.h"

#define UNIT_MANY_ROWS 16 /* measured: 8 operands gain nothing where all cores are at work, 4 lose a third */
#include "table.h"

enum {
    MATRIX_ROWS = 16,
    SUM_MATRICES = 4,            /* tmm0 .. tmm3 */
    PAIRS_MOST = TQ_MAX_RUN / 2, /* of tiles of a run */
};

typedef struct {
    uint8_t palette, start_row, zero[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} matrix_shapes;

_Static_assert(sizeof(matrix_shapes) == 64, "what ldtilecfg reads");

/** The matrices of a pass in memory. */
typedef struct {
    int8_t planes[PAIRS_MOST][SUM_MATRICES][MATRIX_ROWS][64];
    uint8_t levels[2][SUM_MATRICES][MATRIX_ROWS][64]; /* by strip; one half is filled while the other is read */
    int32_t sums[SUM_MATRICES][MATRIX_ROWS][16];
} pass_memory;

/** Some operands of a run, `each` of them in each matrix, which are multiplied by several strips at once. */
typedef struct {
    int32_t q, rows, each, matrices, strips;
} pass;

/** The compiler does not know that tileload and tilestore use memory. */
static inline void memory_is_used(void) { __asm__ volatile("" ::: "memory"); }

static void shape_matrices(int32_t rows)
{
    matrix_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = 64;
        shapes.rows[i] = i < 5 ? (uint8_t)rows : MATRIX_ROWS;
    }
    memory_is_used();
    _tile_loadconfig(&shapes);
}

/** Returns how many of the pass's operands a matrix has. */
static inline int32_t rows_of(const pass *p, int32_t matrix)
{
    int32_t left = p->rows - matrix * p->each;
    return left < p->each ? left : p->each;
}

/** Copies the operands' planes into matrices, by pairs of tiles, with zeros where there are no more. */
TQ_INLINE void gather_planes(const product_run *run, const int planes, const pass *p, pass_memory *memory)
{
    const char *first =
        run->operands + p->q * run->operand_stride + planes_at(run->operand_tiles) + 32 * (int64_t)planes * run->first;
    for (int32_t k = 0; k < run->n; k += 2)
        for (int32_t matrix = 0; matrix < p->matrices; matrix++) {
            int8_t (*to)[64] = memory->planes[k / 2][matrix];
            int32_t rows = rows_of(p, matrix);
            for (int32_t i = 0; i < rows; i++) {
                const char *from = first + (matrix * p->each + i) * run->operand_stride + 32 * (int64_t)k * planes;
                TQ_UNROLL
                for (int plane = 0; plane < planes; plane++, from += 32, to++) {
                    const __m256i zero = _mm256_setzero_si256();
                    __m256i low = _mm256_loadu_si256((const __m256i *)from),
                            high = k + 1 < run->n ? _mm256_loadu_si256((const __m256i *)(from + 32 * planes)) : zero;
                    _mm256_store_si256((__m256i *)*to, low);
                    _mm256_store_si256((__m256i *)*to + 1, high);
                }
            }
            memset(to, 0, sizeof *to * (size_t)((p->each - rows) * planes));
        }
}

/** Stores the levels of four g of tiles k and k + 1 (if there is one) of a block, by lane. */
TQ_INLINE void store_levels(int bits, const product_run *run, const tq_tile *tiles, int32_t k, int32_t g,
                            const tables *t, uint8_t (*to)[64])
{
    for (int32_t i = 0; i < 2 && k + i < run->n; i++) {
        tile_words words = load_words(bits, 1, run->base + tiles[k + i].offset + 16 * g);
        TQ_UNROLL
        for (int lane = 0; lane < 4; lane++) {
            parts l = levels(bits, 1, &words, lane, t);
            _mm512_store_si512(to[8 * i + lane], l.part[0]);
            _mm512_store_si512(to[8 * i + 4 + lane], l.part[1]);
        }
    }
}

/* An AMX tile can be named by a constant only. */

TQ_INLINE void load_matrix_of_levels(int strip, const void *levels)
{
    switch (strip) {
    case 1: _tile_loadd(6, levels, 64); break;
    case 2: _tile_loadd(7, levels, 64); break;
    default: _tile_loadd(5, levels, 64); break;
    }
}

TQ_INLINE void multiply_matrix(int sums, int strip)
{
    switch (4 * strip + sums) {
    case 0: _tile_dpbsud(0, 4, 5); break;
    case 1: _tile_dpbsud(1, 4, 5); break;
    case 2: _tile_dpbsud(2, 4, 5); break;
    case 3: _tile_dpbsud(3, 4, 5); break;
    case 4 + 1: _tile_dpbsud(1, 4, 6); break;
    case 4 + 2: _tile_dpbsud(2, 4, 6); break;
    case 4 + 3: _tile_dpbsud(3, 4, 6); break;
    case 8 + 2: _tile_dpbsud(2, 4, 7); break;
    default: _tile_dpbsud(3, 4, 5); break; /* the fourth strip */
    }
}

TQ_INLINE void clear_sums(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

TQ_INLINE void store_sums(int32_t matrices, pass_memory *memory)
{
    _tile_stored(0, memory->sums[0], 64);
    if (matrices > 1) _tile_stored(1, memory->sums[1], 64);
    if (matrices > 2) _tile_stored(2, memory->sums[2], 64);
    if (matrices > 3) _tile_stored(3, memory->sums[3], 64);
    memory_is_used();
}

/** Multiplies strips from `first` on of a run, two in each block, by the pass's operands. Levels are stored one pair of
 *  tiles before they are needed, because a load waits for stores that have not reached the cache. */
TQ_INLINE void multiply_strips(int bits, const product_run *run, int32_t first, int32_t strips, const uint8_t *ahead,
                               int32_t lines, const tables *t, const pass *p, pass_memory *memory)
{
    clear_sums();
    for (int32_t k = 0; k < run->n + 2; k += 2) {
        for (int32_t s = 0; s < strips && k < run->n; s++) {
            int32_t block = (first + s) / 2, g = (first + s) % 2 * VEC_GS;
            store_levels(bits, run, run->tiles + (int64_t)block * run->of, k, g, t, memory->levels[k / 2 % 2][s]);
            for (int32_t i = 0; i < 2 * lines && k * lines + i < run->n * lines; i++)
                __builtin_prefetch(ahead + 64 * (int64_t)((s * run->n + k) * lines + i), 0, 2);
        }
        memory_is_used();
        for (int32_t s = 0; s < strips && k >= 2; s++) {
            load_matrix_of_levels(s, memory->levels[(k - 2) / 2 % 2][s]);
            for (int32_t i = 0; i < p->matrices; i++) {
                if (s == 0 || p->matrices > 1) _tile_loadd(4, memory->planes[(k - 2) / 2][i], 64);
                multiply_matrix(s * p->matrices + i, s);
            }
        }
    }
    store_sums(strips * p->matrices, memory);
}

/** Turns the sums of a strip into floats at `out`. */
TQ_INLINE void store_products(int bits, int precise, const product_run *run, const product_end *ends, const pass *p,
                              const int32_t (*sums)[MATRIX_ROWS][16], float *out)
{
    const int planes = PLANES(precise);
    for (int32_t matrix = 0; matrix < p->matrices; matrix++) {
        const int32_t (*row)[16] = sums[matrix];
        for (int32_t i = rows_of(p, matrix); i > 0; i--, row += planes, ends++, out += run->out_stride)
            store_product(bits, precise, (vec[]){vec_load(row[0]), vec_load(row[1]), vec_load(row[planes - 1])}, ends,
                          run->accumulate, out);
    }
}

TQ_INLINE void multiply_pass(int bits, int precise, const product_run *run, const tables *t, const pass *p,
                             pass_memory *memory)
{
    const int planes = PLANES(precise);
    product_end ends[SUM_MATRICES * MATRIX_ROWS / LOW_PLANES];
    for (int32_t i = 0; i < p->rows; i++) ends[i] = end_of(bits, TQ_WHOLE_TILES, run, p->q + i);
    gather_planes(run, planes, p, memory);
    shape_matrices(p->each * planes);
    int32_t lines = p->q ? 0 : run->lines; /* once is enough */
    for (int32_t first = 0; first < 2 * run->blocks; first += p->strips) {
        int32_t strips = 2 * run->blocks - first < p->strips ? 2 * run->blocks - first : p->strips;
        multiply_strips(bits, run, first, strips, run->ahead + 64 * (int64_t)lines * run->n * first, lines, t, p,
                        memory);
        for (int32_t s = 0; s < strips; s++)
            store_products(bits, precise, run, ends, p, memory->sums + s * p->matrices,
                           run->out + (int64_t)p->q * run->out_stride + TQ_TILE / 2 * (first + s));
    }
}

TQ_INLINE void multiply_many(int bits, int precise, const product_run *run, const tables *t)
{
    _Alignas(64) pass_memory memory;
    const int32_t most = MATRIX_ROWS / PLANES(precise);             /* operands of a matrix */
    if (run->n % 2) memset(memory.levels, 0, sizeof memory.levels); /* a lone tile's second half is read, times zeros */
    for (int32_t q = 0; q < run->rows;) {
        int32_t rows = run->rows - q < SUM_MATRICES * most ? run->rows - q : SUM_MATRICES * most;
        int32_t matrices = (rows + most - 1) / most;
        pass p = {q, rows, (rows + matrices - 1) / matrices, matrices, SUM_MATRICES / matrices};
        multiply_pass(bits, precise, run, t, &p, &memory);
        q += rows;
    }
    _tile_release();
}

TQ_TABLE(avx512_amx, vector);
