/* Plans of version 2: what their words say about each side, and the tables that come with calls. */
#include "internal.h"
#include <math.h>

static tq_status refuse(int32_t at, const int64_t *words, const char *wants, tq_error *error)
{
    return tq_fail(error, TQ_E_VALUE, "words", at, (double)words[at], wants);
}

/** Bits and block starts of the groups of a side whose words begin at `first`. */
static tq_status read_groups(const int64_t *words, int32_t first, const tq_plan *plan, tq_side *side, tq_error *error)
{
    for (int32_t g = 0; g < plan->groups; g++) {
        int64_t word = words[first + g], bits = word & (TQ_PLAN_NEW_BLOCK - 1);
        int wide = side->levels == TQ_LEVELS_AFFINE || side->levels == TQ_LEVELS_ABSMAX;
        if (word < 0 || word >= 2 * TQ_PLAN_NEW_BLOCK || !((bits >= 1 && bits <= TQ_MAX_BITS) || (bits == 8 && wide)))
            return refuse(first + g, words, "bits 1..5 (or 8 with affine or absmax), plus 16 where a block begins",
                          error);
        if (side->levels == TQ_LEVELS_ABSMAX && bits == 1)
            return refuse(first + g, words, "at least 2 bits with absmax", error);
        side->begins[g] = (word & TQ_PLAN_NEW_BLOCK) != 0;
        if (g && wide && !side->begins[g] && bits != side->bits[g - 1])
            return refuse(first + g, words, "the width of the group before it, in a block of affine or absmax", error);
        if (g == 0 && !side->begins[0]) return refuse(first, words, "the beginning of a block: 16 + bits", error);
        if (g && side->levels == TQ_LEVELS_TABLE && word != (words[first] & (TQ_PLAN_NEW_BLOCK - 1)))
            return refuse(first + g, words, "the width of group 0, without 16: a table has one width and one block",
                          error);
        side->bits[g] = (uint8_t)bits;
    }
    return TQ_OK;
}

static int is_absent(const int64_t *words, int32_t header, int32_t first, int32_t groups)
{
    int64_t any = 0;
    for (int32_t i = 0; i < 4; i++) any |= words[header + i];
    for (int32_t g = 0; g < groups; g++) any |= words[first + g];
    return !any;
}

/** Sizes that follow from levels, sketch and bits. */
static void lay_out_side(const tq_plan *plan, tq_side *side)
{
    int32_t blocks = 0, dense = side->rotation == TQ_ROTATION_DENSE, is_sign = side->sketch == TQ_SKETCH_SIGN;
    for (int32_t g = 0; g < plan->groups; g++) blocks += side->begins[g];
    side->tiles = plan->groups + (side->sketch_rows + TQ_TILE - 1) / TQ_TILE;
    for (int32_t t = 0; t < side->tiles; t++) {
        if (t >= plan->groups) side->bits[t] = 1;
        side->offset[t] = side->tile_bytes;
        side->tile_bytes += 128 * side->bits[t];
    }
    int is_table = side->levels == TQ_LEVELS_TABLE;
    side->scales = is_table ? 0 : side->levels == TQ_LEVELS_AFFINE ? 2 * blocks : blocks;
    side->scales += side->sketch && !(is_table && is_sign);
    side->step_columns = is_table ? (1 << side->bits[0]) + is_sign : 0;
    side->matrix_rows = (dense ? plan->head_dim : 0) + (side->sketch == TQ_SKETCH_GAUSSIAN ? side->sketch_rows : 0);
    side->coded_channels = plan->head_dim;
}

static tq_status read_side(const int64_t *words, int32_t header, int32_t first, const tq_plan *plan, tq_side *side,
                           tq_error *error)
{
    const struct {
        int64_t last;
        const char *wants;
    } choices[3] = {{TQ_ROTATION_DENSE, "a rotation: 0 none, 1 Hadamard, 2 dense"},
                    {TQ_LEVELS_TABLE, "levels: 0 codebook, 1 affine, 2 absmax, 3 table"},
                    {TQ_SKETCH_SIGN, "a sketch: 0 none, 1 Gaussian, 2 sign"}};
    int32_t *fields[3] = {&side->rotation, &side->levels, &side->sketch};
    for (int32_t i = 0; i < 3; i++) {
        if (words[header + i] < 0 || words[header + i] > choices[i].last)
            return refuse(header + i, words, choices[i].wants, error);
        *fields[i] = (int32_t)words[header + i];
    }
    int64_t rows = words[header + 3], is_gaussian = side->sketch == TQ_SKETCH_GAUSSIAN;
    if (rows < is_gaussian || rows > (is_gaussian ? plan->head_dim : 0))
        return refuse(header + 3, words, is_gaussian ? "sketch rows in 1..head_dim" : "0 without a Gaussian sketch",
                      error);
    side->sketch_rows = side->sketch == TQ_SKETCH_SIGN ? plan->head_dim : (int32_t)rows;
    TQ_TRY(read_groups(words, first, plan, side, error));
    lay_out_side(plan, side);
    return TQ_OK;
}

tq_status tq_plan_read_blocked(tq_plan *plan, const int64_t *words, tq_error *error)
{
    int32_t first = TQ_PLAN_BLOCKED_HEADER_WORDS;
    TQ_TRY(read_side(words, TQ_PLAN_HEADER_WORDS, first, plan, &plan->key, error));
    plan->rotation = plan->key.rotation;
    if (is_absent(words, TQ_PLAN_HEADER_WORDS + 4, first + plan->groups, plan->groups)) return TQ_OK;
    return read_side(words, TQ_PLAN_HEADER_WORDS + 4, first + plan->groups, plan, &plan->value, error);
}

tq_status tq_table_check(const tq_side *side, const tq_transform *t, int32_t kv_heads, const char *name,
                         tq_error *error)
{
    int32_t n = side->step_columns, levels = n - (side->sketch == TQ_SKETCH_SIGN);
    if (!n && t->steps)
        return tq_fail(error, TQ_E_VALUE, name, -1, 1,
                       "absent: in format version 2 steps are the table of a plan that has one");
    if (n && !t->steps) return tq_fail(error, TQ_E_VALUE, name, -1, 0, "given: the plan's table");
    for (int64_t i = 0; i < (int64_t)kv_heads * n; i++) {
        float x = t->steps[i];
        int32_t column = (int32_t)(i % n);
        int ordered = column == levels ? x >= 0 : column == 0 || x >= t->steps[i - 1];
        if (!(fabsf(x) <= TQ_MAX_INPUT * 16) || !ordered)
            return tq_fail(error, TQ_E_VALUE, name, i, x, "finite and not below the level before it");
    }
    return TQ_OK;
}
