/* Checks that the products of avx512_amx.c, built against amx_emulated.h, are those of avx512_vnni.c bit for bit: the
 * integers are the same, and so is the arithmetic behind them. Prints how many were compared. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/kernels.h"

enum { BLOCKS = 3, ROWS = 70, TILES_MOST = 9, WIDTHS = 7 };

static const int widths[WIDTHS] = {1, 2, 3, 4, 5, 6, TQ_WIDE_BITS};

static uint32_t next_random(void)
{
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

/** Lays out blocks of n tiles of `bits`, or of all widths in turn (0), with runs as in tq_tile. Returns their bytes. */
static int32_t lay_out(int bits, int32_t n, tq_tile *tiles)
{
    int32_t at = 0;
    for (int32_t i = 0; i < BLOCKS * n; i++) {
        tiles[i].bits = (int16_t)(bits ? bits : widths[i % n % WIDTHS]);
        tiles[i].offset = at;
        at += 128 * tiles[i].bits;
    }
    for (int32_t i = BLOCKS * n - 1; i >= 0; i--) {
        int alike = (i + 1) % n && tiles[i + 1].bits == tiles[i].bits && tiles[i + 1].run < TQ_MAX_RUN;
        tiles[i].run = (int16_t)(alike ? tiles[i + 1].run + 1 : 1);
    }
    return at;
}

static void fail(const char *what, int bits, int32_t n, int32_t rows, int precise)
{
    printf("%s: bits %d, %d tiles, %d rows, precise %d\n", what, bits, (int)n, (int)rows, precise);
    exit(1);
}

static int compare(int bits, int32_t n, int32_t rows, int precise, const tq_codebook *books)
{
    const tq_kernels *vnni = &tq_kernels_avx512_vnni, *amx = &tq_kernels_avx512_amx;
    static tq_tile tiles[BLOCKS * TILES_MOST];
    static uint8_t base[BLOCKS * TILES_MOST * 128 * TQ_WIDE_BITS + 64];
    static float x[ROWS * 32 * TILES_MOST], out[2][ROWS * 32 * BLOCKS];
    int32_t columns = 32 * n, stride = 32 * BLOCKS, bytes = lay_out(bits, n, tiles);
    for (int32_t i = 0; i < bytes; i++) base[i] = (uint8_t)(next_random() >> 24);
    for (int32_t i = 0; i < rows * columns; i++) x[i] = (float)(int32_t)next_random() * 0x1p-31f;
    for (int32_t i = 0; i < rows * stride; i++) out[0][i] = out[1][i] = (float)i;
    if (amx->operand_bytes(columns) != vnni->operand_bytes(columns)) fail("operands", bits, n, rows, precise);
    void *operands = aligned_alloc(64, (size_t)rows * vnni->operand_bytes(columns));
    if (!operands) abort();
    vnni->prepare(x, columns, rows, precise, operands);
    tq_tile_grid grid = {base, tiles, BLOCKS, n, TQ_WHOLE_TILES, books, base, bytes};
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        vnni->multiply(&grid, operands, rows, precise, accumulate, out[0], stride);
        amx->multiply(&grid, operands, rows, precise, accumulate, out[1], stride);
        if (memcmp(out[0], out[1], sizeof(float) * (size_t)(rows * stride))) fail("differs", bits, n, rows, precise);
    }
    free(operands);
    return 1;
}

int main(void)
{
    static const int32_t rows[] = {16, 17, 24, 31, 32, 33, 49, ROWS}, tiles[] = {1, 2, 3, 4, TQ_MAX_RUN, TILES_MOST};
    tq_codebook books[TQ_WIDE_BITS + 1] = {{0}};
    tq_error error;
    int compared = 0;
    books[TQ_WIDE_BITS] = (tq_codebook){.bits = TQ_WIDE_BITS, .n_levels = 256, .step = TQ_WIDE_STEP};
    for (int bits = 1; bits <= TQ_MAX_BITS; bits++)
        if (tq_get_codebook(TQ_CODEBOOK_NORMAL, 128, bits, &books[bits], &error)) return 2;
    for (int width = -1; width < WIDTHS; width++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
            for (size_t k = 0; k < sizeof tiles / sizeof *tiles; k++)
                for (int precise = 0; precise < 2; precise++)
                    compared += compare(width < 0 ? 0 : widths[width], tiles[k], rows[i], precise, books);
    printf("%d\n", compared);
    return 0;
}
