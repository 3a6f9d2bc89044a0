/* The AMX instructions of csrc/kernels/avx512_amx.c in plain C, for CPUs without them. It is compiled in front of that
 * file. As in Intel's manual (volume 2, LDTILECFG, TILELOADD, TDPBSUD ..), there are eight tiles of 16 rows of 64
 * bytes. A configuration says how many of these are used; the others read as zero. */
#ifndef TQ_AMX_EMULATED_H
#define TQ_AMX_EMULATED_H
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static struct {
    int rows[8], row_bytes[8]; /* 0: not configured */
    uint8_t at[8][16][64];
} amx;

static void amx_configure(const void *config)
{
    const uint8_t *bytes = config;
    if (bytes[0] != 1) abort();
    memset(&amx, 0, sizeof amx);
    for (int i = 0; i < 8; i++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
        amx.row_bytes[i] = row_bytes;
        amx.rows[i] = bytes[48 + i];
        if (amx.rows[i] > 16 || row_bytes > 64) abort();
    }
}

static void amx_zero(int tile)
{
    if (!amx.rows[tile]) abort();
    memset(amx.at[tile], 0, sizeof amx.at[tile]);
}

static void amx_load(int tile, const void *from, long stride)
{
    amx_zero(tile);
    for (int m = 0; m < amx.rows[tile]; m++)
        memcpy(amx.at[tile][m], (const char *)from + m * stride, (size_t)amx.row_bytes[tile]);
}

static void amx_store(int tile, void *to, long stride)
{
    if (!amx.rows[tile]) abort();
    for (int m = 0; m < amx.rows[tile]; m++)
        memcpy((char *)to + m * stride, amx.at[tile][m], (size_t)amx.row_bytes[tile]);
}

/* c[m][n] += a[m][4 k + i] * b[k][4 n + i], a signed and b unsigned; sizes have to fit. */
static void amx_multiply(int c, int a, int b)
{
    if (amx.rows[c] != amx.rows[a] || amx.row_bytes[c] != amx.row_bytes[b] || amx.row_bytes[a] != 4 * amx.rows[b])
        abort();
    for (int m = 0; m < amx.rows[c]; m++)
        for (int n = 0; n < amx.row_bytes[c] / 4; n++) {
            int32_t sum;
            memcpy(&sum, amx.at[c][m] + 4 * n, 4);
            for (int k = 0; k < amx.rows[b]; k++)
                for (int i = 0; i < 4; i++) sum += (int8_t)amx.at[a][m][4 * k + i] * amx.at[b][k][4 * n + i];
            memcpy(amx.at[c][m] + 4 * n, &sum, 4);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#define _tile_loadconfig(config) amx_configure(config)
#define _tile_release() memset(&amx, 0, sizeof amx)
#define _tile_zero(tile) amx_zero(tile)
#define _tile_loadd(tile, from, stride) amx_load(tile, from, stride)
#define _tile_stored(tile, to, stride) amx_store(tile, to, stride)
#define _tile_dpbsud(c, a, b) amx_multiply(c, a, b)
#endif
