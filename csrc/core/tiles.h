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

/** The groups of a side that have bits, for a row of tiles that a product sums over. */
typedef struct {
    int32_t n;
    int32_t group[TQ_MAX_GROUPS], offset[TQ_MAX_GROUPS];
    uint8_t bits[TQ_MAX_GROUPS];
} tq_coded_groups;

static inline void tq_list_groups(const tq_plan *plan, const tq_side *side, tq_coded_groups *out)
{
    out->n = 0;
    for (int32_t g = 0; g < plan->groups; g++) {
        if (!side->bits[g]) continue;
        out->group[out->n] = g;
        out->offset[out->n] = side->offset[g];
        out->bits[out->n++] = side->bits[g];
    }
}
#endif
