/* Plans: integers checked once, turned into sizes and offsets that every other file trusts. */
#include "internal.h"
#include <math.h>
#include <string.h>

int32_t tq_scale_bytes(const tq_plan *plan, const tq_side *side) { return 2 * plan->page_tokens * side->scales; }

static tq_status read_bits(const int64_t *words, int32_t first, tq_plan *plan, tq_side *side, tq_error *error)
{
    int32_t offset = 0;
    for (int32_t g = 0; g < plan->groups; g++) {
        int64_t bits = words[first + g];
        if (bits < 0 || (bits > TQ_MAX_BITS && !(tq_is_fine(plan) && bits == TQ_WIDE_BITS)))
            return tq_fail(error, TQ_E_VALUE, "words", first + g, (double)bits,
                           tq_is_fine(plan) ? "bits of a group, 0..5 or 8" : "bits of a group, 0..5");
        side->bits[g] = (uint8_t)bits;
        side->offset[g] = offset;
        offset += 128 * (int32_t)bits;
        if (bits) side->coded_channels += tq_group_width(plan, g);
    }
    side->tile_bytes = offset;
    side->tiles = side->step_columns = plan->groups;
    side->scales = offset ? 1 : 0;
    side->rotation = plan->rotation;
    side->matrix_rows = plan->rotation == TQ_ROTATION_DENSE ? plan->head_dim : 0;
    return TQ_OK;
}

static tq_status read_choice(const int64_t *words, int32_t i, int64_t last, int32_t *out, const char *wants,
                             tq_error *error)
{
    if (words[i] < 0 || words[i] > last) return tq_fail(error, TQ_E_VALUE, "words", i, (double)words[i], wants);
    *out = (int32_t)words[i];
    return TQ_OK;
}

/* |key codes|value codes|key scales|value scales| */
static void lay_out_record(tq_plan *plan)
{
    int64_t tiles = plan->page_tokens / plan->tile_tokens, at = 0;
    tq_side *sides[2] = {&plan->key, &plan->value};
    for (int i = 0; i < 2; i++) {
        sides[i]->codes_offset = at;
        at += tiles * sides[i]->tile_bytes;
    }
    for (int i = 0; i < 2; i++) {
        sides[i]->scales_offset = at;
        at += tq_scale_bytes(plan, sides[i]);
    }
    plan->record_bytes = at;
}

static void draw_signs(tq_plan *plan)
{
    for (int32_t pass = 0; pass < 2; pass++)
        for (int32_t block = 0; block < (plan->head_dim + 127) / 128; block++)
            tq_random(plan->seed, (uint64_t)pass, (uint64_t)block, &plan->signs[pass][4 * block]);
}

/** The words that all versions share, but for the rotation. */
static tq_status read_common(const int64_t *words, tq_plan *p, tq_error *error)
{
    if (words[2] < p->tile_tokens || words[2] > TQ_PAGE_TOKENS || words[2] % p->tile_tokens)
        return tq_fail(error, TQ_E_VALUE, "page_tokens", -1, (double)words[2],
                       tq_is_fine(p) ? "64 or 128 in format version 3" : "32, 64, 96 or 128");
    p->page_tokens = (int32_t)words[2];
    TQ_TRY(read_choice(words, 4, TQ_CODEBOOK_UNIFORM, &p->codebook, "a codebook law: 0 normal, 1 sphere, 2 uniform",
                       error));
    TQ_TRY(read_choice(words, 5, TQ_SCALE_LEAST_SQUARES, &p->scale,
                       "a scale: 0 eden, 1 norm, 2 norm_corrected, 3 least_squares", error));
    if (words[6] < 0) return tq_fail(error, TQ_E_VALUE, "seed", -1, (double)words[6], "in 0..2^63 - 1");
    p->seed = (uint64_t)words[6];
    return TQ_OK;
}

tq_status tq_plan_init(tq_plan *plan, const int64_t *words, size_t n_words, tq_error *error)
{
    tq_plan p;
    memset(&p, 0, sizeof p);
    if (!plan) return tq_fail(error, TQ_E_VALUE, "plan", -1, 0, "a pointer, not NULL");
    if (!words || n_words < TQ_PLAN_HEADER_WORDS + 2)
        return tq_fail(error, TQ_E_VALUE, "n_words", -1, words ? (double)n_words : 0, "7 + 2 * groups plan words");
    if (words[0] < TQ_FORMAT_VERSION || words[0] > TQ_FORMAT_FINE)
        return tq_fail(error, TQ_E_VALUE, "words", 0, (double)words[0], "format version 1, 2 or 3");
    if (words[1] < 8 || words[1] > TQ_MAX_DIM || words[1] % 8)
        return tq_fail(error, TQ_E_VALUE, "head_dim", -1, (double)words[1],
                       "a multiple of 8 in 8..256 (8..4096 without values)");
    p.version = (int32_t)words[0];
    p.head_dim = (int32_t)words[1];
    if (tq_is_fine(&p) && p.head_dim > TQ_MAX_HEAD_DIM)
        return tq_fail(error, TQ_E_VALUE, "head_dim", -1, p.head_dim, "at most 256 in format version 3");
    p.group_channels = tq_is_fine(&p) ? TQ_FINE_GROUP : TQ_TILE;
    p.tile_tokens = TQ_TILE * TQ_TILE / p.group_channels;
    p.groups = (p.head_dim + p.group_channels - 1) / p.group_channels;
    int32_t header = tq_is_blocked(&p) ? TQ_PLAN_BLOCKED_HEADER_WORDS : TQ_PLAN_HEADER_WORDS;
    if (n_words != (size_t)(header + 2 * p.groups))
        return tq_fail(error, TQ_E_VALUE, "n_words", -1, (double)n_words,
                       tq_is_blocked(&p) ? "15 + 2 * ceil(head_dim / 32)"
                       : tq_is_fine(&p)  ? "7 + 2 * ceil(head_dim / 16)"
                                         : "7 + 2 * ceil(head_dim / 32)");
    int32_t last_rotation = tq_is_blocked(&p) ? 0 : TQ_ROTATION_DENSE;
    TQ_TRY(read_choice(words, 3, last_rotation, &p.rotation,
                       last_rotation ? "a rotation: 0 none, 1 Hadamard, 2 dense"
                                     : "0 in format version 2, where each side has its own rotation",
                       error));
    TQ_TRY(read_common(words, &p, error));
    if (tq_is_blocked(&p)) {
        TQ_TRY(tq_plan_read_blocked(&p, words, error));
    } else {
        TQ_TRY(read_bits(words, TQ_PLAN_HEADER_WORDS, &p, &p.key, error));
        TQ_TRY(read_bits(words, TQ_PLAN_HEADER_WORDS + p.groups, &p, &p.value, error));
    }
    if (!p.key.tile_bytes) return tq_fail(error, TQ_E_VALUE, "key_bits", -1, 0, "more than 0 in at least one group");
    if (p.head_dim > TQ_MAX_HEAD_DIM && p.value.tile_bytes)
        return tq_fail(error, TQ_E_VALUE, "head_dim", -1, p.head_dim, "at most 256 in a plan with values");
    if (p.head_dim > TQ_MAX_HEAD_DIM && p.codebook == TQ_CODEBOOK_SPHERE)
        return tq_fail(error, TQ_E_VALUE, "head_dim", -1, p.head_dim, "at most 256 with the sphere codebook");
    lay_out_record(&p);
    draw_signs(&p);
    *plan = p;
    return TQ_OK;
}

tq_status tq_plan_check(const tq_plan *plan, tq_error *error)
{
    if (!plan) return tq_fail(error, TQ_E_VALUE, "plan", -1, 0, "a pointer, not NULL");
    if (plan->head_dim < 8 || plan->head_dim > TQ_MAX_DIM || plan->group_channels < TQ_FINE_GROUP ||
        plan->groups != (plan->head_dim + plan->group_channels - 1) / plan->group_channels || !plan->record_bytes)
        return tq_fail(error, TQ_E_VALUE, "plan", -1, plan->head_dim, "made by tq_plan_init");
    return TQ_OK;
}

tq_status tq_transform_check(const tq_plan *plan, const tq_transform *t, int32_t kv_heads, int is_key, tq_error *error)
{
    const tq_side *side = is_key ? &plan->key : &plan->value;
    const char *rotation = is_key ? "key_rotation" : "value_rotation", *steps = is_key ? "key_steps" : "value_steps";
    if (is_key || plan->value.tile_bytes) {
        if (side->matrix_rows && !t->rotation)
            return tq_fail(error, TQ_E_VALUE, rotation, -1, 0,
                           side->rotation == TQ_ROTATION_DENSE ? "given, because the plan's rotation is dense"
                                                               : "given: the rows of the plan's sketch");
        if (!side->matrix_rows && t->rotation)
            return tq_fail(error, TQ_E_VALUE, rotation, -1, side->rotation,
                           "absent, because the plan's rotation is not dense");
        if (tq_is_blocked(plan)) return tq_table_check(side, t, kv_heads, steps, error);
    }
    for (int64_t i = 0; t->steps && i < (int64_t)kv_heads * plan->groups; i++)
        if (!(t->steps[i] >= 0x1p-40f && t->steps[i] <= 0x1p40f))
            return tq_fail(error, TQ_E_VALUE, steps, i, t->steps[i], "in 2^-40..2^40");
    return TQ_OK;
}
