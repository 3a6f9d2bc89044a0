/* Where tokens lie in pages, and the codes of one tile: shared by the files that read or write packed bytes. */
#ifndef TQ_TILES_H
#define TQ_TILES_H
#include "internal.h"

/** Returns the bytes from a record's start to a tile of a side. */
static inline int64_t tq_tile_offset(const tq_side *side, int32_t tile, int32_t group) /* tile: of tile_tokens tokens */
{
    return side->codes_offset + (int64_t)tile * side->tile_bytes + side->offset[group];
}

/** Returns the place of channel c of a group of keys in its tile. Channels c .. c + 7 are neighbours if c is a multiple
 *  of 8. token: 0 .. tile_tokens - 1. */
static inline int32_t tq_key_cell(const tq_plan *plan, int32_t token, int32_t c)
{
    int32_t column = tq_tile_is_16(plan) ? token / TQ_TILE << 3 | c << 1 : c;
    return TQ_TILE * (token % TQ_TILE) + column;
}

/** Returns the place of channel c of a group of values in its tile. */
static inline int32_t tq_value_cell(int32_t token, int32_t c)
{
    return TQ_TILE * (c | token / TQ_TILE << 4) + tq_column(token % TQ_TILE);
}

/** Returns the bytes from a record's start to the first stored number of a token of the page. */
static inline int64_t tq_scale_offset(const tq_side *side, int32_t token)
{
    return side->scales_offset + 2 * (TQ_TILE * (token / TQ_TILE) + tq_column(token % TQ_TILE));
}

/** The tiles of a side that have bits, groups and sketch, in the order in which a product takes them. */
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

/** Fills in `run` of the n tiles of a block. */
static inline void tq_mark_runs(tq_tile *tiles, int32_t n)
{
    for (int32_t k = n - 1; k >= 0; k--) {
        int continues = k + 1 < n && tiles[k + 1].bits == tiles[k].bits;
        tiles[k].run = (int16_t)(continues && tiles[k + 1].run < TQ_MAX_RUN ? tiles[k + 1].run + 1 : 1);
    }
}

/** Lists the tiles of a page's keys: a block is summed over groups. tiles [page_tokens / tile_tokens][groups->n]. */
static inline void tq_key_tiles(const tq_plan *plan, const tq_coded_groups *groups, tq_tile *tiles)
{
    for (int32_t i = 0; i < plan->page_tokens / plan->tile_tokens; i++, tiles += groups->n) {
        for (int32_t k = 0; k < groups->n; k++)
            tiles[k] = (tq_tile){(int32_t)plan->key.codes_offset + i * plan->key.tile_bytes + groups->offset[k],
                                 groups->bits[k], 1};
        tq_mark_runs(tiles, groups->n);
    }
}

/** The same for values: a block is a group, summed over tokens. tiles [groups->n][page_tokens / tile_tokens]. */
static inline void tq_value_tiles(const tq_plan *plan, const tq_coded_groups *groups, tq_tile *tiles)
{
    int32_t n = plan->page_tokens / plan->tile_tokens;
    for (int32_t i = 0; i < groups->n; i++, tiles += n) {
        for (int32_t k = 0; k < n; k++)
            tiles[k] = (tq_tile){(int32_t)plan->value.codes_offset + k * plan->value.tile_bytes + groups->offset[i],
                                 groups->bits[i], 1};
        tq_mark_runs(tiles, n);
    }
}

/** Arranges a rotated query as columns for the product with key codes: times the steps (NULL: 1), 32 columns a group.
 *  rotated: zero from head_dim up to a whole group. */
static inline void tq_arrange_query(const tq_plan *plan, const tq_coded_groups *groups, const float *steps,
                                    const float *rotated, float *columns)
{
    for (int32_t i = 0; i < groups->n; i++) {
        int32_t g = groups->group[i];
        for (int32_t c = 0; c < plan->group_channels; c++) {
            float x = rotated[plan->group_channels * g + c] * (steps ? steps[g] : 1.0f);
            int32_t at = TQ_TILE * i + tq_key_cell(plan, 0, c & ~7) + (c & 7);
            columns[at] = x;
            if (tq_tile_is_16(plan)) columns[at + 8] = x; /* of the other token tile */
        }
    }
}
#endif
