/* Where tokens lie in pages, and the codes of one tile: shared by the files that read or write packed bytes. */
#ifndef TQ_TILES_H
#define TQ_TILES_H
#include "internal.h"

#define TQ_TILE_CODES (TQ_TILE * TQ_TILE)

/** A side's part of one record: its codes by token tile, its scales by token tile and column. */
static inline int64_t tq_tile_offset(const tq_side *side, int32_t token_tile, int32_t group)
{
    return side->codes_offset + (int64_t)token_tile * side->tile_bytes + side->offset[group];
}

static inline int64_t tq_scale_offset(const tq_side *side, int32_t token)
{
    return side->scales_offset + 2 * (TQ_TILE * (token / TQ_TILE) + tq_column(token % TQ_TILE));
}

/** A tile of any width of a plan; turboquant.h, "8 bits". */
static inline void tq_pack_tile(const tq_kernels *kernels, int32_t bits, const uint8_t *codes, uint32_t *words)
{
    if (bits <= TQ_MAX_BITS) {
        kernels->pack(bits, codes, words);
        return;
    }
    uint8_t half[TQ_TILE_CODES];
    for (int32_t k = 0; k < 2; k++) {
        for (int32_t i = 0; i < TQ_TILE_CODES; i++) half[i] = codes[i] >> 4 * k & 15;
        kernels->pack(4, half, words + 4 * TQ_TILE * k);
    }
}

static inline void tq_unpack_tile(const tq_kernels *kernels, int32_t bits, const uint32_t *words, uint8_t *codes)
{
    if (bits <= TQ_MAX_BITS) {
        kernels->unpack(bits, words, codes);
        return;
    }
    uint8_t high[TQ_TILE_CODES];
    kernels->unpack(4, words, codes);
    kernels->unpack(4, words + 4 * TQ_TILE, high);
    for (int32_t i = 0; i < TQ_TILE_CODES; i++) codes[i] = (uint8_t)(codes[i] | high[i] << 4);
}

/** The tiles of a side that have bits (groups, and in version 2 a sketch), for a row of tiles that a product sums over. */
typedef struct {
    int32_t n;
    int32_t group[TQ_MAX_TILES], offset[TQ_MAX_TILES];
    uint8_t bits[TQ_MAX_TILES];
} tq_coded_groups;

static inline void tq_list_groups(const tq_side *side, tq_coded_groups *out)
{
    out->n = 0;
    for (int32_t g = 0; g < side->tiles; g++) {
        if (!side->bits[g]) continue;
        out->group[out->n] = g;
        out->offset[out->n] = side->offset[g];
        out->bits[out->n++] = side->bits[g];
    }
}

/** Fills in `run` of n tiles that one product sums over. */
static inline void tq_mark_runs(tq_tile *tiles, int32_t n)
{
    for (int32_t k = n - 1; k >= 0; k--) {
        int continues = k + 1 < n && tiles[k + 1].bits == tiles[k].bits;
        tiles[k].run = (int16_t)(continues && tiles[k + 1].run < TQ_MAX_RUN ? tiles[k + 1].run + 1 : 1);
    }
}

/** Tiles of a page's keys: a block is a token tile, summed over groups. tiles [page_tokens / 32][groups->n]. */
static inline void tq_key_tiles(const tq_plan *plan, const tq_coded_groups *groups, tq_tile *tiles)
{
    for (int32_t i = 0; i < plan->page_tokens / TQ_TILE; i++, tiles += groups->n) {
        for (int32_t k = 0; k < groups->n; k++)
            tiles[k] = (tq_tile){(int32_t)plan->key.codes_offset + i * plan->key.tile_bytes + groups->offset[k],
                                 groups->bits[k], 1};
        tq_mark_runs(tiles, groups->n);
    }
}

/** Tiles of a page's values: a block is a group, summed over token tiles. tiles [groups->n][page_tokens / 32]. */
static inline void tq_value_tiles(const tq_plan *plan, const tq_coded_groups *groups, tq_tile *tiles)
{
    int32_t n = plan->page_tokens / TQ_TILE;
    for (int32_t i = 0; i < groups->n; i++, tiles += n) {
        for (int32_t k = 0; k < n; k++)
            tiles[k] = (tq_tile){(int32_t)plan->value.codes_offset + k * plan->value.tile_bytes + groups->offset[i],
                                 groups->bits[i], 1};
        tq_mark_runs(tiles, n);
    }
}
#endif
