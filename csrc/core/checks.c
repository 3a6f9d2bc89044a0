/* Checks that read no array: turboquant_checks.h. */
#include "internal.h"
#include <math.h>

typedef struct {
    const char *name;
    int64_t got;
} size;

/** A stride of an array, and the length of its dimension. */
typedef struct {
    const char *name;
    int64_t got, length;
} stride;

/** The strides `name`_stride_batch, .. of params for an array [batch, heads, tokens, head_dim]. */
/* clang-format off */
#define STRIDES(params, name, heads, tokens)                                                                           \
    {#name "_stride_batch", params->name##_stride_batch, params->layer.batch},                                         \
    {#name "_stride_head", params->name##_stride_head, heads},                                                         \
    {#name "_stride_token", params->name##_stride_token, tokens}
/* clang-format on */

/** A pointer argument. given: what it must be if it may not be NULL; absent: what it must be if it may only be NULL. */
typedef struct {
    const char *name;
    const void *at;
    const char *given, *absent;
} pointer;

static const char a_pointer[] = "a pointer, not NULL", no_values[] = "absent, because the plan has no values";

static tq_status check_sizes(const size *sizes, size_t n, tq_error *error)
{
    for (size_t i = 0; i < n; i++)
        if (sizes[i].got < 0) return tq_refuse(error, sizes[i].name, sizes[i].got, "at least 0");
    return TQ_OK;
}

static tq_status check_strides(const stride *strides, size_t n, tq_error *error)
{
    for (size_t i = 0; i < n; i++) {
        int64_t span; /* times 16, so that the bytes of an array with three such strides fit */
        TQ_TRY(check_sizes(&(size){strides[i].name, strides[i].got}, 1, error));
        if (strides[i].length > 1)
            TQ_TRY(tq_product(strides[i].got, 16 * strides[i].length, &span, strides[i].name, error));
    }
    return TQ_OK;
}

static tq_status check_pointers(const pointer *pointers, size_t n, tq_error *error)
{
    for (size_t i = 0; i < n; i++) {
        const char *wants = pointers[i].at ? pointers[i].absent : pointers[i].given;
        if (wants) return tq_refuse(error, pointers[i].name, pointers[i].at != NULL, wants);
    }
    return TQ_OK;
}

#define LENGTH(array) (sizeof(array) / sizeof *(array))

/** Checks a pair of arrays such as sink_k, sink_v that holds n tokens. v is given only if the plan has values. */
static tq_status check_pair(const char *k_name, const char *v_name, const void *k, const void *v, int32_t n,
                            int has_values, tq_error *error)
{
    const pointer both[] = {{k_name, k, n ? a_pointer : NULL, n ? NULL : "absent, because it has no tokens"},
                            {v_name, v, n && has_values ? "given, because its keys are" : NULL,
                             !has_values ? no_values
                             : n         ? NULL
                                         : "absent, because its keys are"}};
    return check_pointers(both, 2, error);
}

static tq_status check_pages(const uint8_t *pages, int64_t n_pages, int32_t kv_heads, tq_error *error)
{
    if (n_pages && kv_heads) TQ_NEED(error, {"pages", pages, 0});
    if (!((uintptr_t)pages % 64)) return TQ_OK;
    return tq_refuse(error, "pages", (uintptr_t)pages % 64, "64-byte aligned (got: bytes behind)");
}

static tq_status check_dtype(int32_t dtype, tq_error *error)
{
    if (dtype >= TQ_F32 && dtype <= TQ_BF16) return TQ_OK;
    return tq_fail(error, TQ_E_TYPE, "dtype", -1, dtype, "0 (float32), 1 (float16) or 2 (bfloat16)");
}

tq_status tq_check_transform(const tq_plan *plan, const tq_transform *t, int is_key, tq_error *error)
{
    static const tq_transform none;
    const char *numbers = is_key ? "key_numbers" : "value_numbers";
    const tq_side *side = is_key ? &plan->key : &plan->value;
    if (!t) t = &none;
    pointer rotation = {"rotation", t->rotation, NULL, NULL}, centre = {numbers, t->centre, NULL, NULL};
    pointer steps = {numbers, t->steps, NULL, NULL}, moments = {numbers, t->moments, NULL, NULL};
    pointer turns = {"key_turns", t->turns, NULL, NULL};
    if (!side->tile_bytes) rotation.absent = centre.absent = no_values;
    else if (!side->matrix_rows) rotation.absent = "absent, because the plan's rotation is not dense";
    else if (side->rotation == TQ_ROTATION_DENSE) rotation.given = "given, because the plan's rotation is dense";
    else rotation.given = "given: the rows of the plan's sketch";
    if (!side->step_columns) steps.absent = "without steps, because the plan has neither steps nor a table";
    else if (!tq_is_plain(plan)) steps.given = "given: the plan's table";
    else if (is_key && plan->variance) steps.absent = "without steps, because the plan has a variance term";
    if (is_key && plan->moments) moments.given = "given, because the plan has a wave or a metric";
    else moments.absent = "without moments, because the plan has neither a wave nor a metric";
    if (is_key && plan->wave_pairs) turns.given = "given, because the plan has a wave";
    else turns.absent = "absent, because the plan has no wave";
    const pointer all[] = {rotation, centre, steps, turns, moments};
    TQ_TRY(check_pointers(all, LENGTH(all), error));
    const size sizes[] = {{"stride_head", t->stride_head}, {"rotation_stride_head", t->rotation_stride_head}};
    return check_sizes(sizes, LENGTH(sizes), error);
}

/* ---- layer ---- */

/** Checks the sizes of exact tokens by index. */
static tq_status check_rows(const tq_plan *plan, const tq_layer *l, tq_error *error)
{
    if (!tq_is_indexed(l)) return TQ_OK;
    if (l->sinks && !l->sink_rows) return tq_refuse(error, "sink_rows", 0, "given, because tail_rows is");
    if (!l->tail_rows) return l->window ? tq_refuse(error, "tail_rows", 0, "given, because sink_rows is") : TQ_OK;
    if (l->tail_slots > plan->page_tokens)
        return tq_refuse(error, "window_k", l->tail_slots, "of at most page_tokens tokens a row");
    if (l->window > l->tail_slots)
        return tq_refuse(error, "window", l->window, "at most the tokens of a row of window_k");
    return TQ_OK;
}

static tq_status check_layer_sizes(const tq_plan *plan, const tq_layer *l, tq_error *error)
{
    const size sizes[] = {{"batch", l->batch},
                          {"kv_heads", l->kv_heads},
                          {"sinks", l->sinks},
                          {"window", l->window},
                          {"max_pages", l->max_pages},
                          {"n_pages", l->n_pages},
                          {"n_sink_rows", l->n_sink_rows},
                          {"n_tail_rows", l->n_tail_rows},
                          {"tail_slots", l->tail_slots}};
    TQ_TRY(check_sizes(sizes, LENGTH(sizes), error));
    TQ_TRY(check_rows(plan, l, error));
    int64_t bytes;
    TQ_TRY(tq_product(l->kv_heads, plan->record_bytes, &bytes, "kv_heads", error));
    if (l->page_stride && (l->page_stride < bytes || l->page_stride % 64))
        return tq_refuse(error, "page_stride", l->page_stride,
                         "0, or a multiple of 64 and at least kv_heads * record_bytes");
    if (l->page_stride) bytes = l->page_stride;
    return tq_product(l->n_pages, bytes, &bytes, "n_pages", error);
}

/** Checks that lengths, block table, pages and transforms are there. */
static tq_status check_packed(const tq_plan *plan, const tq_layer *l, tq_error *error)
{
    const pointer pointers[] = {{"lengths", l->lengths, l->batch ? a_pointer : NULL, NULL},
                                {"block_table", l->block_table, l->batch && l->max_pages ? a_pointer : NULL, NULL}};
    TQ_TRY(check_pointers(pointers, LENGTH(pointers), error));
    TQ_TRY(check_pages(l->pages, l->n_pages, l->kv_heads, error));
    TQ_TRY(tq_check_transform(plan, &l->key, 1, error));
    return tq_check_transform(plan, &l->value, 0, error);
}

static tq_status check_layer(const tq_plan *plan, const tq_layer *l, tq_error *error)
{
    int has_values = plan->value.tile_bytes != 0;
    TQ_TRY(check_packed(plan, l, error));
    TQ_TRY(check_pair("sink_k", "sink_v", l->sink_k, l->sink_v, l->sinks && tq_sink_rows(l), has_values, error));
    return check_pair("window_k", "window_v", l->window_k, l->window_v, tq_window_slots(l) && tq_window_rows(l),
                      has_values, error);
}

tq_status tq_check_rows(const tq_layer *l, int32_t b, tq_error *error)
{
    if (l->sink_rows && (l->sink_rows[b] < -1 || l->sink_rows[b] >= l->n_sink_rows))
        return tq_fail(error, TQ_E_VALUE, "sink_rows", b, l->sink_rows[b], "-1 or a row of sink_k");
    for (int64_t i = 2 * (int64_t)b; l->tail_rows && i < 2 * (int64_t)b + 2; i++)
        if (l->tail_rows[i] < -1 || l->tail_rows[i] >= l->n_tail_rows)
            return tq_fail(error, TQ_E_VALUE, "tail_rows", i, l->tail_rows[i], "-1 or a row of window_k");
    return TQ_OK;
}

tq_status tq_check_query_start_loc(const int32_t *loc, int32_t batch, int32_t most, int32_t total, tq_error *error)
{
    for (int32_t b = 0; loc && b <= batch; b++) {
        if (loc[b] < 0 || loc[b] > total)
            return tq_fail(error, TQ_E_VALUE, "query_start_loc", b, loc[b], "in 0..tokens of the batch");
        if (b && loc[b] < loc[b - 1])
            return tq_fail(error, TQ_E_VALUE, "query_start_loc", b, loc[b], "no less than the number in front of it");
        if (b && loc[b] - loc[b - 1] > most)
            return tq_fail(error, TQ_E_VALUE, "query_start_loc", b, loc[b],
                           "at most max_query_len above the number in front of it");
    }
    return TQ_OK;
}

/* ---- rotate ---- */

tq_status tq_check_rotate(const tq_plan *plan, const float *matrix, int32_t dtype, const void *x, const void *y,
                          int64_t rows, tq_error *error)
{
    TQ_TRY(tq_plan_check(plan, error));
    TQ_TRY(check_dtype(dtype, error));
    int dense = plan->rotation == TQ_ROTATION_DENSE;
    int64_t bytes;
    TQ_TRY(check_sizes(&(size){"rows", rows}, 1, error));
    TQ_TRY(tq_product(rows, (int64_t)tq_dtype_bytes(dtype) * plan->head_dim, &bytes, "rows", error));
    const pointer pointers[] = {{"matrix", matrix, dense ? "given, because the plan's rotation is dense" : NULL,
                                 dense ? NULL : "absent, because the plan's rotation is not dense"},
                                {"x", x, rows ? a_pointer : NULL, NULL},
                                {"y", y, rows ? a_pointer : NULL, NULL}};
    TQ_TRY(check_pointers(pointers, LENGTH(pointers), error));
    if (x != y && tq_overlap(x, bytes, y, bytes))
        return tq_refuse(error, "y", 0, "the array x itself or apart from it");
    return TQ_OK;
}

/** Returns the bytes from the first to the last one of the pages. */
static int64_t pages_bytes(const tq_plan *plan, const tq_layer *l)
{
    return l->n_pages ? (l->n_pages - 1) * tq_page_stride(plan, l) + l->kv_heads * plan->record_bytes : 0;
}

/** An array of rows, [batch, heads, tokens]. */
typedef struct {
    int64_t batch, heads, tokens;
} row_sizes;

/** Returns the bytes from its first to its last element. Strides may leave gaps. */
static int64_t rows_bytes(row_sizes n, int64_t element_bytes, int64_t row, tq_row_strides s)
{
    if (!n.batch || !n.heads || !n.tokens) return 0;
    return element_bytes * ((n.batch - 1) * s.batch + (n.heads - 1) * s.head + (n.tokens - 1) * s.token + row);
}

/* ---- append ---- */

tq_status tq_check_append_sizes(const tq_plan *plan, const tq_append_params *p, tq_error *error)
{
    TQ_TRY(tq_plan_check(plan, error));
    TQ_NEED(error, {"params", p, 0});
    TQ_TRY(check_layer_sizes(plan, &p->layer, error));
    const int64_t tokens = p->query_start_loc ? p->total_tokens : p->tokens;
    const size sizes[] = {{"tokens", p->tokens}, {"threads", p->threads}, {"total_tokens", p->total_tokens}};
    TQ_TRY(check_sizes(sizes, LENGTH(sizes), error));
    const stride strides[] = {STRIDES(p, k, p->layer.kv_heads, tokens), STRIDES(p, v, p->layer.kv_heads, tokens)};
    TQ_TRY(check_strides(strides, LENGTH(strides), error));
    return check_dtype(p->layer.dtype, error);
}

/** Return the bytes of sink_k or sink_v, and of window_k or window_v. */
static int64_t sink_bytes(const tq_plan *plan, const tq_layer *l)
{
    return (int64_t)tq_sink_rows(l) * l->kv_heads * l->sinks * plan->head_dim * tq_dtype_bytes(l->dtype);
}

static int64_t window_bytes(const tq_plan *plan, const tq_layer *l)
{
    return (int64_t)tq_window_rows(l) * l->kv_heads * tq_window_slots(l) * plan->head_dim * tq_dtype_bytes(l->dtype);
}

static tq_status check_append_overlap(const tq_plan *plan, const tq_append_params *p, tq_error *error)
{
    if (!p->layer.batch || !p->layer.kv_heads || !p->tokens) return TQ_OK;
    const tq_layer *l = &p->layer;
    tq_array written[5] = {{"pages", l->pages, pages_bytes(plan, l)},
                           {"sink_k", l->sink_k, sink_bytes(plan, l)},
                           {"sink_v", l->sink_v, sink_bytes(plan, l)},
                           {"window_k", l->window_k, window_bytes(plan, l)},
                           {"window_v", l->window_v, window_bytes(plan, l)}};
    const int ragged = p->query_start_loc != NULL;
    const row_sizes n = {ragged ? 1 : l->batch, l->kv_heads, ragged ? p->total_tokens : p->tokens};
    const tq_row_strides of_k = {p->k_stride_batch, p->k_stride_head, p->k_stride_token},
                         of_v = {p->v_stride_batch, p->v_stride_head, p->v_stride_token};
    const int64_t e = tq_dtype_bytes(l->dtype), k_bytes = rows_bytes(n, e, plan->head_dim, of_k),
                  v_bytes = rows_bytes(n, e, plan->head_dim, of_v);
    for (int i = 0; i < 5; i++) {
        if (tq_overlap(written[i].at, written[i].bytes, p->k, k_bytes) ||
            tq_overlap(written[i].at, written[i].bytes, p->v, v_bytes))
            return tq_refuse(error, written[i].name, 0, "apart from k and v");
        for (int j = 0; j < i; j++)
            if (tq_overlap(written[i].at, written[i].bytes, written[j].at, written[j].bytes))
                return tq_refuse(error, written[i].name, 0, "apart from the other arrays written");
    }
    return TQ_OK;
}

tq_status tq_check_append(const tq_plan *plan, const tq_append_params *p, tq_error *error)
{
    TQ_TRY(tq_check_append_sizes(plan, p, error));
    int has_values = plan->value.tile_bytes != 0, any = p->layer.batch && p->layer.kv_heads && p->tokens;
    const pointer pointers[] = {
        {"k", p->k, any ? a_pointer : NULL, NULL},
        {"v", p->v, any && has_values ? "given, because the plan has values" : NULL, has_values ? NULL : no_values}};
    TQ_TRY(check_pointers(pointers, LENGTH(pointers), error));
    TQ_TRY(check_layer(plan, &p->layer, error));
    return check_append_overlap(plan, p, error);
}

/* ---- attend ---- */

tq_status tq_check_attend_sizes(const tq_plan *plan, const tq_attend_params *a, tq_error *error)
{
    TQ_TRY(tq_plan_check(plan, error));
    TQ_NEED(error, {"params", a, 0});
    if (!plan->value.tile_bytes) return tq_refuse(error, "plan", 0, "one with value bits");
    TQ_TRY(check_layer_sizes(plan, &a->layer, error));
    const int64_t tokens = a->query_start_loc ? a->total_tokens : a->query_tokens;
    const size sizes[] = {{"query_tokens", a->query_tokens},
                          {"query_heads", a->query_heads},
                          {"sliding_window", a->sliding_window},
                          {"threads", a->threads},
                          {"total_tokens", a->total_tokens}};
    TQ_TRY(check_sizes(sizes, LENGTH(sizes), error));
    const stride strides[] = {STRIDES(a, q, a->query_heads, tokens), STRIDES(a, fresh_k, a->layer.kv_heads, tokens),
                              STRIDES(a, fresh_v, a->layer.kv_heads, tokens), STRIDES(a, out, a->query_heads, tokens),
                              STRIDES(a, lse, a->query_heads, tokens)};
    TQ_TRY(check_strides(strides, LENGTH(strides), error));
    TQ_TRY(check_dtype(a->layer.dtype, error));
    if (a->layer.kv_heads ? a->query_heads % a->layer.kv_heads : a->query_heads)
        return tq_refuse(error, "query_heads", a->query_heads, "a multiple of kv_heads");
    if (!isfinite(a->softmax_scale)) return tq_refuse(error, "softmax_scale", a->softmax_scale, "finite");
    if (!isfinite(a->softcap) || a->softcap < 0)
        return tq_refuse(error, "softcap", a->softcap, "finite and at least 0");
    if (!a->causal && a->sliding_window)
        return tq_refuse(error, "sliding_window", a->sliding_window, "0 when attention is not causal");
    if (!a->causal && a->fresh_k) return tq_refuse(error, "fresh_k", 1, "absent when attention is not causal");
    if (a->fresh_k && (a->query_start_loc || tq_is_indexed(&a->layer)))
        return tq_refuse(error, "fresh_k", 1, "absent with query_start_loc, sink_rows and tail_rows");
    if (a->query_start_loc && a->query_tokens > 1 && a->layer.window && !a->layer.tail_rows)
        return tq_refuse(error, "tail_rows", 0,
                         "given: with query_start_loc and several queries there is no window without it");
    int64_t n;
    TQ_TRY(tq_product((int64_t)a->layer.batch * a->query_heads, (int64_t)a->query_tokens * plan->head_dim, &n, "batch",
                      error));
    return tq_product(n, 64, &n, "batch", error); /* workspace: at most a few dozen bytes for a number of q */
}

tq_row_strides tq_strides_of_out(const tq_plan *plan, const tq_attend_params *a)
{
    if (a->out_stride_batch || a->out_stride_head || a->out_stride_token)
        return (tq_row_strides){a->out_stride_batch, a->out_stride_head, a->out_stride_token};
    const int64_t d = plan->head_dim;
    if (a->query_start_loc) return (tq_row_strides){0, d, a->query_heads * d};
    return (tq_row_strides){a->query_heads * (int64_t)a->query_tokens * d, a->query_tokens * d, d};
}

tq_row_strides tq_strides_of_lse(const tq_attend_params *a)
{
    if (a->lse_stride_batch || a->lse_stride_head || a->lse_stride_token)
        return (tq_row_strides){a->lse_stride_batch, a->lse_stride_head, a->lse_stride_token};
    if (a->query_start_loc) return (tq_row_strides){0, 1, a->query_heads};
    return (tq_row_strides){a->query_heads * (int64_t)a->query_tokens, a->query_tokens, 1};
}

/** Rows of q, out and lse; a ragged batch counts as one sequence of all tokens. */
static row_sizes rows_of(const tq_attend_params *a)
{
    if (a->query_start_loc) return (row_sizes){a->layer.batch != 0, a->query_heads, a->total_tokens};
    return (row_sizes){a->layer.batch, a->query_heads, a->query_tokens};
}

/** Whether no two rows of an array overlap, whatever the order of its dimensions. */
static int rows_are_apart(row_sizes n, int64_t row, tq_row_strides s)
{
    int64_t sizes[3] = {n.batch, n.heads, n.tokens}, strides[3] = {s.batch, s.head, s.token};
    if (!n.batch || !n.heads || !n.tokens) return 1;
    for (int i = 0; i < 3; i++)
        if (sizes[i] <= 1) strides[i] = INT64_MAX; /* does not matter */
    for (int done = 0; done < 3; done++) {         /* the smallest stride that is left must span everything inside it */
        int least = 0;
        for (int i = 1; i < 3; i++)
            if (strides[i] < strides[least]) least = i;
        if (strides[least] == INT64_MAX) return 1;
        if (strides[least] < row) return 0;
        row += strides[least] * (sizes[least] - 1);
        strides[least] = INT64_MAX;
    }
    return 1;
}

static tq_status check_attend_overlap(const tq_plan *plan, const tq_attend_params *a, tq_error *error)
{
    int64_t d = plan->head_dim, e = tq_dtype_bytes(a->layer.dtype), sinks = sink_bytes(plan, &a->layer),
            window = window_bytes(plan, &a->layer);
    const row_sizes n = rows_of(a), fresh = {a->layer.batch, a->layer.kv_heads, a->query_tokens};
    const tq_row_strides of_q = {a->q_stride_batch, a->q_stride_head, a->q_stride_token},
                         of_fresh_k = {a->fresh_k_stride_batch, a->fresh_k_stride_head, a->fresh_k_stride_token},
                         of_fresh_v = {a->fresh_v_stride_batch, a->fresh_v_stride_head, a->fresh_v_stride_token},
                         of_out = tq_strides_of_out(plan, a), of_lse = tq_strides_of_lse(a);
    if (!rows_are_apart(n, d, of_out) || (a->lse && !rows_are_apart(n, 1, of_lse)))
        return tq_refuse(error, rows_are_apart(n, d, of_out) ? "lse" : "out", 0, "of strides that keep its rows apart");
    const tq_array written[] = {{"out", a->out, rows_bytes(n, e, d, of_out)},
                                {"lse", a->lse, rows_bytes(n, (int64_t)sizeof *a->lse, 1, of_lse)}};
    const struct {
        tq_array array;
        const char *wants;
    } read[] = {{{"pages", a->layer.pages, pages_bytes(plan, &a->layer)}, "apart from pages"},
                {{"q", a->q, rows_bytes(n, e, d, of_q)}, "apart from q"},
                {{"sink_k", a->layer.sink_k, sinks}, "apart from sink_k"},
                {{"sink_v", a->layer.sink_v, sinks}, "apart from sink_v"},
                {{"window_k", a->layer.window_k, window}, "apart from window_k"},
                {{"window_v", a->layer.window_v, window}, "apart from window_v"},
                {{"fresh_k", a->fresh_k, rows_bytes(fresh, e, d, of_fresh_k)}, "apart from fresh_k"},
                {{"fresh_v", a->fresh_v, rows_bytes(fresh, e, d, of_fresh_v)}, "apart from fresh_v"},
                {{"out", a->out, written[0].bytes}, "apart from out"}};
    for (int w = 0; w < 2; w++)
        for (size_t r = 0; r < LENGTH(read) - (w == 0); r++)
            if (tq_overlap(written[w].at, written[w].bytes, read[r].array.at, read[r].array.bytes))
                return tq_refuse(error, written[w].name, 0, read[r].wants);
    return TQ_OK;
}

tq_status tq_check_attend(const tq_plan *plan, const tq_attend_params *a, tq_error *error)
{
    TQ_TRY(tq_check_attend_sizes(plan, a, error));
    int queries = a->layer.batch && a->query_heads && a->query_tokens;
    const pointer pointers[] = {{"q", a->q, queries ? a_pointer : NULL, NULL},
                                {"out", a->out, queries ? a_pointer : NULL, NULL},
                                {"fresh_v", a->fresh_v, a->fresh_k ? "given, because its keys are" : NULL,
                                 a->fresh_k ? NULL : "absent, because its keys are"}};
    TQ_TRY(check_pointers(pointers, LENGTH(pointers), error));
    TQ_TRY(check_layer(plan, &a->layer, error));
    return check_attend_overlap(plan, a, error);
}

/* ---- dequantize ---- */

tq_status tq_check_dequantize_sizes(const tq_plan *plan, const tq_layer *l, int32_t max_tokens, tq_error *error)
{
    TQ_TRY(tq_plan_check(plan, error));
    TQ_NEED(error, {"layer", l, 0});
    TQ_TRY(check_layer_sizes(plan, l, error));
    TQ_TRY(check_sizes(&(size){"max_tokens", max_tokens}, 1, error));
    if ((int64_t)l->max_pages * plan->page_tokens < max_tokens)
        return tq_refuse(error, "max_tokens", max_tokens, "at most max_pages * page_tokens");
    int64_t n;
    TQ_TRY(tq_product((int64_t)l->batch * l->kv_heads, (int64_t)max_tokens * plan->head_dim, &n, "max_tokens", error));
    return tq_product(n, sizeof(float), &n, "max_tokens", error);
}

tq_status tq_check_dequantize(const tq_plan *plan, const tq_layer *l, int32_t max_tokens, const float *k,
                              const float *v, tq_error *error)
{
    TQ_TRY(tq_check_dequantize_sizes(plan, l, max_tokens, error));
    int any = l->batch && l->kv_heads && max_tokens, has_values = plan->value.tile_bytes != 0;
    const pointer pointers[] = {{"k", k, any ? a_pointer : NULL, NULL},
                                {"v", v, any && has_values ? a_pointer : NULL, has_values ? NULL : no_values}};
    TQ_TRY(check_packed(plan, l, error));
    return check_pointers(pointers, LENGTH(pointers), error);
}

/* ---- recode ---- */

static const char a_target[] = "like the plan of the pages in all but bits, tries and variance_term";

static tq_status check_fewer_bits(const tq_side *from, const tq_side *to, int32_t groups, tq_error *error)
{
    for (int32_t g = 0; g < groups; g++) {
        int32_t a = from->bits[g], b = to->bits[g];
        if (b > a || (a && !b))
            return tq_fail(error, TQ_E_VALUE, "target", g, b, "1 to as many bits as the plan of the pages has");
        if (a > TQ_MAX_BITS) return tq_fail(error, TQ_E_VALUE, "plan", g, a, "at most 6 bits a group");
    }
    return TQ_OK;
}

tq_status tq_check_recode(const tq_plan *plan, const tq_plan *target, const uint8_t *pages, int64_t n_pages,
                          int32_t kv_heads, const uint8_t *out, tq_error *error)
{
    TQ_TRY(tq_plan_check(plan, error));
    TQ_TRY(tq_plan_check(target, error));
    if (plan->head_dim > TQ_MAX_HEAD_DIM) return tq_refuse(error, "plan", plan->head_dim, "of at most 512 channels");
    if (!plan->is_plain || plan->group_channels != TQ_TILE || plan->scale != TQ_SCALE_EDEN)
        return tq_refuse(error, "plan", plan->scale,
                         "plain, with groups of 32 channels and EDEN scales (got: its scale)");
    const int32_t ours[] = {plan->head_dim, plan->page_tokens, plan->group_channels, plan->codebook, plan->scale,
                            plan->rotation, plan->wave_pairs,  plan->metric,         plan->is_plain},
                  theirs[] = {target->head_dim,   target->page_tokens, target->group_channels,
                              target->codebook,   target->scale,       target->rotation,
                              target->wave_pairs, target->metric,      target->is_plain};
    for (size_t i = 0; i < LENGTH(ours); i++)
        if (ours[i] != theirs[i]) return tq_refuse(error, "target", theirs[i], a_target);
    if (plan->seed != target->seed) return tq_refuse(error, "target", target->seed, a_target);
    TQ_TRY(check_fewer_bits(&plan->key, &target->key, plan->groups, error));
    TQ_TRY(check_fewer_bits(&plan->value, &target->value, plan->groups, error));
    const size sizes[] = {{"n_pages", n_pages}, {"kv_heads", kv_heads}};
    TQ_TRY(check_sizes(sizes, LENGTH(sizes), error));
    int64_t records, bytes, smaller;
    TQ_TRY(tq_product(n_pages, kv_heads, &records, "n_pages", error));
    TQ_TRY(tq_product(records, plan->record_bytes, &bytes, "n_pages", error));
    TQ_TRY(tq_product(records, target->record_bytes, &smaller, "n_pages", error));
    TQ_TRY(check_pages(pages, n_pages, kv_heads, error));
    if (records) TQ_NEED(error, {"out", out, 0});
    if ((uintptr_t)out % 64) return tq_refuse(error, "out", (uintptr_t)out % 64, "64-byte aligned (got: bytes behind)");
    if (tq_overlap(out, smaller, pages, bytes)) return tq_refuse(error, "out", 0, "apart from pages");
    return TQ_OK;
}

/* ---- merge ---- */

tq_status tq_check_merge(const float *outs, const float *lses, int32_t parts, int64_t rows, int32_t head_dim,
                         const float *out, const float *lse, tq_error *error)
{
    if (parts < 1) return tq_refuse(error, "parts", parts, "at least 1");
    if (head_dim < 1) return tq_refuse(error, "head_dim", head_dim, "at least 1");
    TQ_TRY(check_sizes(&(size){"rows", rows}, 1, error));
    if (!rows) return TQ_OK;
    TQ_NEED(error, {"outs", outs, 0}, {"lses", lses, 0}, {"out", out, 0}, {"lse", lse, 0});
    int64_t row_bytes, bytes;
    TQ_TRY(tq_product(rows, (int64_t)sizeof(float) * head_dim, &row_bytes, "rows", error));
    TQ_TRY(tq_product(parts, row_bytes, &bytes, "parts", error));
    const int64_t lse_bytes = (int64_t)sizeof(float) * rows;
    const tq_array written[] = {{"out", out, row_bytes}, {"lse", lse, lse_bytes}};
    for (int i = 0; i < 2; i++) {
        if (tq_overlap(written[i].at, written[i].bytes, outs, bytes))
            return tq_refuse(error, written[i].name, 0, "apart from outs");
        if (tq_overlap(written[i].at, written[i].bytes, lses, lse_bytes * parts))
            return tq_refuse(error, written[i].name, 0, "apart from lses");
    }
    if (tq_overlap(out, row_bytes, lse, lse_bytes)) return tq_refuse(error, "lse", 0, "apart from out");
    return TQ_OK;
}
