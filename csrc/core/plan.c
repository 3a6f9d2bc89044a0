/* Plans: checks their integers once and derives the sizes and offsets that every other file trusts. turboquant.h has
 * their order. */
#include "internal.h"
#include "turboquant_schemes.h"
#include "variance_table.h"
#include <math.h>
#include <string.h>

int32_t tq_scale_bytes(const tq_plan *plan, const tq_side *side) { return 2 * plan->page_tokens * side->scales; }

/* ---- one side ---- */

enum { KEY_WORDS = 7, VALUE_WORDS = 11 }; /* first word of a side: rotation, levels, sketch, sketch_rows */

/** Where the words of a side are and what they are called. */
typedef struct {
    int32_t at, groups_at;
    const char *rotation, *levels, *sketch, *sketch_rows, *bits;
} side_words;

static tq_status read_choice(int64_t word, int64_t last, int32_t *out, const char *name, const char *wants,
                             tq_error *error)
{
    if (word < 0 || word > last) return tq_refuse(error, name, word, wants);
    *out = (int32_t)word;
    return TQ_OK;
}

/** Checks the bits of one group; read_groups compares them within a block. */
static tq_status check_bits(int64_t bits, const tq_side *side, const char *name, int32_t g, tq_error *error)
{
    if (bits > TQ_MAX_BITS && bits != TQ_WIDE_BITS)
        return tq_fail(error, TQ_E_VALUE, name, g, (double)bits, "in 0..6 or 8");
    if (side->levels == TQ_LEVELS_TABLE && bits == TQ_WIDE_BITS)
        return tq_fail(error, TQ_E_VALUE, name, g, (double)bits, "in 0..6 with a table");
    if (side->levels == TQ_LEVELS_ABSMAX && bits == 1)
        return tq_fail(error, TQ_E_VALUE, name, g, 1, "at least 2 with absmax levels");
    return TQ_OK;
}

/** Reads the bits and block starts of the groups of a side. */
static tq_status read_groups(const int64_t *words, const char *name, const tq_plan *plan, tq_side *side,
                             tq_error *error)
{
    int is_codebook = side->levels == TQ_LEVELS_CODEBOOK, is_table = side->levels == TQ_LEVELS_TABLE;
    for (int32_t g = 0; g < plan->groups; g++) {
        int64_t bits = words[g] & (TQ_PLAN_NEW_BLOCK - 1);
        int begins = words[g] >= TQ_PLAN_NEW_BLOCK;
        if (words[g] < 0 || words[g] >= 2 * TQ_PLAN_NEW_BLOCK)
            return tq_fail(error, TQ_E_VALUE, name, g, (double)words[g], "bits, plus 16 where a block begins");
        TQ_TRY(check_bits(bits, side, name, g, error));
        if (!g && !begins)
            return tq_fail(error, TQ_E_VALUE, name, 0, (double)bits, "the beginning of a block: 16 + bits");
        if (g && begins && is_table)
            return tq_fail(error, TQ_E_VALUE, name, g, (double)words[g], "without 16: a table has one block");
        if (g && !is_codebook && !begins && bits != side->bits[g - 1])
            return tq_fail(error, TQ_E_VALUE, name, g, (double)bits,
                           "the bits of the group before it, in a block without a codebook");
        side->bits[g] = (uint8_t)bits;
        side->begins[g] = (uint8_t)begins;
    }
    return TQ_OK;
}

/** Finds the sizes that follow from rotation, levels, sketch and groups. step_columns is set later in a plain plan. */
static void lay_out_side(const tq_plan *plan, tq_side *side)
{
    int32_t blocks = 0, is_dense = side->rotation == TQ_ROTATION_DENSE, is_sign = side->sketch == TQ_SKETCH_SIGN;
    side->tiles = plan->groups + (side->sketch_rows + TQ_TILE - 1) / TQ_TILE;
    side->one_width = 1;
    for (int32_t t = 0; t < side->tiles; t++) {
        if (t >= plan->groups) side->bits[t] = 1;
        else if (side->bits[t]) side->coded_channels += tq_group_width(plan, t);
        blocks += t < plan->groups && side->begins[t];
        side->one_width &= t >= plan->groups || side->bits[t] == side->bits[0];
        side->offset[t] = side->tile_bytes;
        side->tile_bytes += 128 * side->bits[t];
    }
    int is_table = side->levels == TQ_LEVELS_TABLE;
    side->scales = is_table ? 0 : side->levels == TQ_LEVELS_AFFINE ? 2 * blocks : blocks;
    side->scales += side->sketch && !(is_table && is_sign);
    side->step_columns = is_table ? (1 << side->bits[0]) + is_sign : 0;
    side->matrix_rows = (is_dense ? plan->head_dim : 0) + (side->sketch == TQ_SKETCH_GAUSSIAN ? side->sketch_rows : 0);
}

static tq_status read_side(const int64_t *words, const side_words *where, const tq_plan *plan, tq_side *side,
                           tq_error *error)
{
    const int64_t *head = words + where->at, *groups = words + where->groups_at;
    TQ_TRY(read_choice(head[0], TQ_ROTATION_DENSE, &side->rotation, where->rotation,
                       "a rotation: 0 none, 1 Hadamard, 2 dense", error));
    TQ_TRY(read_choice(head[1], TQ_LEVELS_TABLE, &side->levels, where->levels,
                       "levels: 0 codebook, 1 affine, 2 absmax, 3 table", error));
    TQ_TRY(read_choice(head[2], TQ_SKETCH_SIGN, &side->sketch, where->sketch, "a sketch: 0 none, 1 Gaussian, 2 sign",
                       error));
    int is_gaussian = side->sketch == TQ_SKETCH_GAUSSIAN;
    if (head[3] < is_gaussian || head[3] > (is_gaussian ? plan->head_dim : 0))
        return tq_refuse(error, where->sketch_rows, head[3],
                         is_gaussian ? "in 1..head_dim" : "0 without a Gaussian sketch");
    side->sketch_rows = side->sketch == TQ_SKETCH_SIGN ? plan->head_dim : (int32_t)head[3];
    TQ_TRY(read_groups(groups, where->bits, plan, side, error));
    lay_out_side(plan, side);
    return TQ_OK;
}

/** Finds whether values have no codes. If so, checks that all their words are 0. */
static tq_status read_absence(const int64_t *words, const side_words *where, int32_t groups, int *absent,
                              tq_error *error)
{
    int64_t bits = 0, any = 0;
    const char *names[4] = {where->rotation, where->levels, where->sketch, where->sketch_rows};
    for (int32_t g = 0; g < groups; g++) {
        bits |= words[where->groups_at + g] & ~(int64_t)TQ_PLAN_NEW_BLOCK;
        any |= words[where->groups_at + g];
    }
    *absent = !bits;
    if (bits) return TQ_OK;
    if (any) return tq_fail(error, TQ_E_VALUE, where->bits, 0, (double)any, "0, because no group of values has bits");
    for (int32_t i = 0; i < 4; i++)
        if (words[where->at + i])
            return tq_refuse(error, names[i], words[where->at + i], "0, because no group of values has bits");
    return TQ_OK;
}

/* ---- both sides together ---- */

static int is_plain_side(const tq_plan *plan, const tq_side *side)
{
    for (int32_t g = 1; g < plan->groups; g++)
        if (side->begins[g]) return 0;
    return side->levels == TQ_LEVELS_CODEBOOK && side->sketch == TQ_SKETCH_NONE;
}

/** Checks that a plan that is not plain has neither groups without bits nor tiles of 16. */
static tq_status check_kind(const tq_plan *plan, tq_error *error)
{
    if (plan->is_plain) return TQ_OK;
    if (tq_tile_is_16(plan))
        return tq_refuse(error, "group", plan->group_channels,
                         "32 where there are blocks, levels without a codebook, sketches or two rotations");
    for (int32_t g = 0; g < plan->groups; g++)
        for (int i = 0; i < 1 + (plan->value.tile_bytes != 0); i++)
            if (!(i ? &plan->value : &plan->key)->bits[g])
                return tq_fail(
                    error, TQ_E_VALUE, i ? "value_bits" : "key_bits", g, 0,
                    "at least 1 where there are blocks, levels without a codebook, sketches or two rotations");
    return TQ_OK;
}

static tq_status read_sides(const int64_t *words, tq_plan *p, tq_error *error)
{
    const side_words key = {KEY_WORDS,    TQ_PLAN_HEADER_WORDS, "key_rotation", "key_levels",
                            "key_sketch", "key_sketch_rows",    "key_bits"};
    const side_words value = {VALUE_WORDS,      TQ_PLAN_HEADER_WORDS + p->groups,
                              "value_rotation", "value_levels",
                              "value_sketch",   "value_sketch_rows",
                              "value_bits"};
    int no_values;
    TQ_TRY(read_side(words, &key, p, &p->key, error));
    if (!p->key.tile_bytes) return tq_refuse(error, "key_bits", 0, "more than 0 in at least one group");
    TQ_TRY(read_absence(words, &value, p->groups, &no_values, error));
    if (!no_values) TQ_TRY(read_side(words, &value, p, &p->value, error));
    p->rotation = p->key.rotation;
    p->is_plain =
        is_plain_side(p, &p->key) && (no_values || (is_plain_side(p, &p->value) && p->value.rotation == p->rotation));
    if (p->is_plain) p->key.step_columns = p->value.step_columns = p->groups;
    if (no_values) p->value.tiles = p->groups, p->value.rotation = p->rotation;
    return check_kind(p, error);
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

/** Reads words[1 .. 6] and words[15 .. 17], and checks words[18]. */
static tq_status read_common(const int64_t *words, tq_plan *p, tq_error *error)
{
    if (words[1] < 8 || words[1] > TQ_MAX_DIM || words[1] % 8)
        return tq_refuse(error, "head_dim", words[1], "a multiple of 8 in 8..512 (8..4096 without values)");
    if (words[3] != TQ_TILE && words[3] != TQ_FINE_GROUP)
        return tq_refuse(error, "group", words[3], "32 or 16 channels");
    p->head_dim = (int32_t)words[1];
    p->group_channels = (int32_t)words[3];
    p->tile_tokens = TQ_TILE * TQ_TILE / p->group_channels;
    p->groups = (p->head_dim + p->group_channels - 1) / p->group_channels;
    if (tq_tile_is_16(p) && p->head_dim > TQ_MAX_SPHERE_DIM)
        return tq_refuse(error, "head_dim", p->head_dim, "at most 256 with tiles of 16 channels");
    if (words[2] < p->tile_tokens || words[2] > TQ_PAGE_TOKENS || words[2] % p->tile_tokens)
        return tq_refuse(error, "page_tokens", words[2],
                         tq_tile_is_16(p) ? "64 or 128 with tiles of 16 channels" : "32, 64, 96 or 128");
    p->page_tokens = (int32_t)words[2];
    TQ_TRY(read_choice(words[4], TQ_CODEBOOK_UNIFORM, &p->codebook, "codebook",
                       "a codebook law: 0 normal, 1 sphere, 2 uniform", error));
    TQ_TRY(read_choice(words[5], TQ_SCALE_LEAST_SQUARES, &p->scale, "scale",
                       "a scale: 0 eden, 1 norm, 2 norm_corrected, 3 least_squares", error));
    if (words[6] < 0) return tq_refuse(error, "seed", words[6], "in 0..2^63 - 1");
    p->seed = (uint64_t)words[6];
    int32_t most_pairs = p->head_dim > TQ_MAX_HEAD_DIM ? 0 : (int32_t)tq_round_up(p->head_dim / 2, 8);
    if (words[15] < 0 || words[15] > most_pairs || words[15] % 8)
        return tq_refuse(error, "wave_pairs", words[15],
                         "a multiple of 8 up to head_dim / 2 (rounded up), 0 above 512 channels");
    if (words[16] < 0 || words[16] > 1 + TQ_MAX_METRIC_RANK)
        return tq_refuse(error, "metric", words[16], "0 (none) or 1 + a rank in 0..4");
    if (words[17] && (words[17] < 3 || words[17] > 7 || words[17] % 2 == 0))
        return tq_refuse(error, "tries", words[17], "0, 3, 5 or 7");
    p->tries = (int32_t)words[17];
    if (words[18] < 0 || words[18] > 1) return tq_refuse(error, "variance_term", words[18], "0 or 1");
    p->wave_pairs = (int32_t)words[15];
    p->metric = (int32_t)words[16];
    p->moments = 2 * p->wave_pairs + (p->metric ? p->metric * p->head_dim + TQ_MAX_METRIC_RANK : 0);
    return TQ_OK;
}

/** Checks that a plan may have a variance term, and finds its K (turboquant.h, "Variance term"). */
static tq_status add_variance_term(tq_plan *p, tq_error *error)
{
    if (!p->is_plain || p->scale != TQ_SCALE_EDEN || p->codebook != TQ_CODEBOOK_NORMAL || !p->value.tile_bytes ||
        !p->key.one_width)
        return tq_refuse(error, "variance_term", 1,
                         "0 unless the plan is plain, its scale EDEN and its codebook normal, there are values, and "
                         "all groups of keys have the same bits");
    const int32_t bits = p->key.bits[0];
    const float *shares = tq_variance_table[bits == TQ_WIDE_BITS ? 6 : bits - 1][p->tries ? (p->tries - 1) / 2 : 0];
    int32_t low = 8, i = 0;
    while (2 * low <= p->head_dim) low *= 2, i++;
    float share = shares[i];
    if (low < p->head_dim) share += (shares[i + 1] - share) * ((float)(p->head_dim - low) / (float)low);
    p->variance = (float)p->head_dim * share;
    return TQ_OK;
}

tq_status tq_plan_init(tq_plan *plan, const int64_t *words, size_t n_words, tq_error *error)
{
    tq_plan p;
    memset(&p, 0, sizeof p);
    if (!plan) return tq_refuse(error, "plan", 0, "a pointer, not NULL");
    if (!words || n_words < TQ_PLAN_HEADER_WORDS + 2)
        return tq_refuse(error, "n_words", words ? (double)n_words : 0, "19 + 2 * groups plan words");
    if (words[0] != TQ_FORMAT_VERSION)
        return tq_fail(error, TQ_E_VALUE, "words", 0, (double)words[0], "format version 2");
    TQ_TRY(read_common(words, &p, error));
    if (n_words != (size_t)(TQ_PLAN_HEADER_WORDS + 2 * p.groups))
        return tq_refuse(error, "n_words", n_words, "19 + 2 * ceil(head_dim / group)");
    TQ_TRY(read_sides(words, &p, error));
    if (p.head_dim > TQ_MAX_HEAD_DIM && p.value.tile_bytes)
        return tq_refuse(error, "head_dim", p.head_dim, "at most 512 in a plan with values");
    if (p.head_dim > TQ_MAX_SPHERE_DIM && p.codebook == TQ_CODEBOOK_SPHERE)
        return tq_refuse(error, "head_dim", p.head_dim, "at most 256 with the sphere codebook");
    if (p.tries && (!p.is_plain || p.scale != TQ_SCALE_EDEN))
        return tq_refuse(error, "tries", p.tries, "0 unless the plan is plain and its scale EDEN");
    if (words[18]) TQ_TRY(add_variance_term(&p, error));
    lay_out_record(&p);
    draw_signs(&p);
    *plan = p;
    return TQ_OK;
}

tq_status tq_plan_check(const tq_plan *plan, tq_error *error)
{
    if (!plan) return tq_refuse(error, "plan", 0, "a pointer, not NULL");
    if (plan->head_dim < 8 || plan->head_dim > TQ_MAX_DIM || plan->group_channels < TQ_FINE_GROUP ||
        plan->groups != (plan->head_dim + plan->group_channels - 1) / plan->group_channels || !plan->record_bytes)
        return tq_refuse(error, "plan", plan->head_dim, "made by tq_plan_init");
    return TQ_OK;
}

/* ---- arrays of calls ---- */

tq_status tq_transform_numbers(const tq_plan *plan, int is_value, const float *numbers, int64_t columns,
                               tq_transform *t, tq_error *error)
{
    TQ_TRY(tq_plan_check(plan, error));
    TQ_NEED(error, {"transform", t, 0});
    const tq_side *side = is_value ? &plan->value : &plan->key;
    int64_t moments = is_value ? 0 : plan->moments, steps = tq_round_up(side->step_columns, 4),
            rest = columns - moments;
    t->centre = t->steps = t->moments = NULL;
    t->stride_head = columns;
    if (!numbers) return TQ_OK;
    int has_centre = rest >= plan->head_dim && (tq_is_plain(plan) || rest != steps);
    int64_t at = has_centre ? plan->head_dim : 0;
    int has_steps = side->tile_bytes && steps && rest == at + steps;
    if (rest < 0 || rest != at + (has_steps ? steps : 0))
        return tq_refuse(error, is_value ? "value_numbers" : "key_numbers", columns,
                         "as wide as its parts: a centre or none, steps or none, the plan's moments");
    t->centre = has_centre ? numbers : NULL;
    t->steps = has_steps ? numbers + at : NULL;
    t->moments = moments ? numbers + rest : NULL;
    return TQ_OK;
}

tq_status tq_fail_number(const tq_transform *t, int is_key, const float *at, const char *wants, tq_error *error)
{
    const float *first = t->centre ? t->centre : t->steps ? t->steps : t->moments;
    return tq_fail(error, TQ_E_VALUE, is_key ? "key_numbers" : "value_numbers", at - first, *at, wants);
}

tq_status tq_check_steps(const tq_plan *plan, const tq_transform *t, int32_t kv_heads, int is_key, tq_error *error)
{
    const tq_side *side = is_key ? &plan->key : &plan->value;
    int32_t n = side->step_columns, levels = n - (side->sketch == TQ_SKETCH_SIGN);
    for (int32_t h = 0; t->steps && h < kv_heads; h++) {
        const float *steps = tq_transform_steps(t, h);
        for (int32_t i = 0; i < n; i++) {
            float x = steps[i];
            if (tq_is_plain(plan)) {
                if (!(x >= 0x1p-40f && x <= 0x1p40f))
                    return tq_fail_number(t, is_key, steps + i, "a step in 2^-40..2^40", error);
                continue;
            }
            int ordered = i == levels ? x >= 0 : i == 0 || x >= steps[i - 1];
            if (!(fabsf(x) <= TQ_MAX_INPUT * 16) || !ordered)
                return tq_fail_number(t, is_key, steps + i, "finite and not below the level before it", error);
        }
    }
    return TQ_OK;
}
