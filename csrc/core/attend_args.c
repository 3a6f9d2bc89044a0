/* tq_attend's arguments: what is refused, and how scratch is cut. */
#include "attend.h"
#include <math.h>

/* ---- scratch ---- */

static int64_t take(int64_t *at, int64_t bytes)
{
    int64_t start = *at;
    *at += tq_round_up(bytes, 64);
    return start;
}

/** Cuts a worker's scratch at `base` (NULL: only the size); returns its bytes. */
static int64_t cut(const attend_job *job, uint8_t *base, attend_work *w)
{
    int64_t rows = job->chunk_rows, d = job->plan->head_dim, padded = TQ_TILE * (int64_t)job->plan->groups, at = 0;
    int64_t nv = TQ_TILE * (int64_t)job->value_groups.n, f = sizeof(float);
    int64_t tiles = job->key_groups.n > job->value_groups.n ? job->key_groups.n : job->value_groups.n;
    int64_t starts[16] = {take(&at, rows * job->query_operand_bytes),
                          take(&at, rows * job->weight_operand_bytes),
                          take(&at, rows * d * f),
                          take(&at, rows * job->plan->page_tokens * f),
                          take(&at, rows * nv * f),
                          take(&at, rows * d * f),
                          take(&at, TQ_TILE * d * f),
                          take(&at, TQ_TILE * d * f),
                          take(&at, padded * f),
                          take(&at, padded * f),
                          take(&at, (nv + d) * f),
                          take(&at, 2 * job->plan->page_tokens * f),
                          take(&at, rows * (int64_t)sizeof(tq_logit)),
                          take(&at, rows * (int64_t)sizeof(tq_softmax_state)),
                          take(&at, job->plan->page_tokens),
                          take(&at, tq_is_blocked(job->plan) ? TQ_TILE * TQ_TILE * tiles * f : 0)};
    if (!base) return at;
    *w = (attend_work){base + starts[0],
                       base + starts[1],
                       (float *)(base + starts[2]),
                       (float *)(base + starts[3]),
                       (float *)(base + starts[4]),
                       (float *)(base + starts[5]),
                       (float *)(base + starts[6]),
                       (float *)(base + starts[7]),
                       (float *)(base + starts[8]),
                       (float *)(base + starts[9]),
                       (float *)(base + starts[10]),
                       (float *)(base + starts[11]),
                       (tq_logit *)(base + starts[12]),
                       (tq_softmax_state *)(base + starts[13]),
                       base + starts[14],
                       (float *)(base + starts[15])};
    return at;
}

static int64_t partial_floats(const attend_job *job)
{
    return 4 + TQ_TILE * (int64_t)job->value_groups.n + job->plan->head_dim;
}

int64_t tq_attend_bytes(const attend_job *job)
{
    int64_t tasks = (int64_t)job->a->batch * job->a->kv_heads * job->chunks * job->splits;
    int64_t partials = job->splits > 1 ? tasks * job->chunk_rows * partial_floats(job) * (int64_t)sizeof(float) : 0;
    return job->threads * cut(job, NULL, NULL) + tq_round_up(partials, 64) + 64;
}

attend_work tq_attend_carve(const attend_job *job, int32_t worker)
{
    attend_work w;
    cut(job, job->scratch + worker * cut(job, NULL, NULL), &w);
    return w;
}

float *tq_attend_partial(const attend_job *job, int64_t task, int32_t row)
{
    float *partials = (float *)(job->scratch + job->threads * cut(job, NULL, NULL));
    return partials + (task * job->chunk_rows + row) * partial_floats(job);
}

/* ---- checks ---- */

tq_status tq_attend_check_sizes(const tq_plan *plan, const tq_attend_params *a, tq_error *error)
{
    TQ_TRY(tq_plan_check(plan, error));
    if (!a) return tq_fail(error, TQ_E_VALUE, "params", -1, 0, "a pointer, not NULL");
    if (!plan->value.tile_bytes) return tq_fail(error, TQ_E_VALUE, "plan", -1, 0, "one with value bits");
    const struct {
        const char *name;
        int64_t got;
    } sizes[] = {{"batch", a->batch},
                 {"query_tokens", a->query_tokens},
                 {"query_heads", a->query_heads},
                 {"kv_heads", a->kv_heads},
                 {"sinks", a->sinks},
                 {"window", a->window},
                 {"max_pages", a->max_pages},
                 {"sliding_window", a->sliding_window},
                 {"threads", a->threads},
                 {"n_pages", a->n_pages},
                 {"q_stride_batch", a->q_stride_batch},
                 {"q_stride_head", a->q_stride_head},
                 {"q_stride_token", a->q_stride_token},
                 {"fresh_k_stride_batch", a->fresh_k_stride_batch},
                 {"fresh_k_stride_head", a->fresh_k_stride_head},
                 {"fresh_k_stride_token", a->fresh_k_stride_token},
                 {"fresh_v_stride_batch", a->fresh_v_stride_batch},
                 {"fresh_v_stride_head", a->fresh_v_stride_head},
                 {"fresh_v_stride_token", a->fresh_v_stride_token}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].got < 0) return tq_fail(error, TQ_E_VALUE, sizes[i].name, -1, (double)sizes[i].got, "at least 0");
    if (a->dtype < TQ_F32 || a->dtype > TQ_BF16)
        return tq_fail(error, TQ_E_TYPE, "dtype", -1, a->dtype, "0 (float32), 1 (float16) or 2 (bfloat16)");
    if (a->kv_heads ? a->query_heads % a->kv_heads : a->query_heads)
        return tq_fail(error, TQ_E_VALUE, "query_heads", -1, a->query_heads, "a multiple of kv_heads");
    if (!isfinite(a->softmax_scale)) return tq_fail(error, TQ_E_VALUE, "softmax_scale", -1, a->softmax_scale, "finite");
    if (!isfinite(a->softcap) || a->softcap < 0)
        return tq_fail(error, TQ_E_VALUE, "softcap", -1, a->softcap, "finite and at least 0");
    if (!a->causal && a->sliding_window)
        return tq_fail(error, TQ_E_VALUE, "sliding_window", -1, a->sliding_window, "0 when attention is not causal");
    if (!a->causal && a->fresh_k)
        return tq_fail(error, TQ_E_VALUE, "fresh_k", -1, 1, "NULL when attention is not causal");
    int64_t n;
    TQ_TRY(tq_product(a->kv_heads, plan->record_bytes, &n, "kv_heads", error));
    TQ_TRY(tq_product(a->n_pages, n, &n, "n_pages", error));
    TQ_TRY(
        tq_product((int64_t)a->batch * a->query_heads, (int64_t)a->query_tokens * plan->head_dim, &n, "batch", error));
    return tq_product(n, 64, &n, "batch", error); /* scratch is at most a few dozen bytes a query number */
}

static tq_status check_pointers(const tq_attend_params *a, tq_error *error)
{
    const struct {
        const char *name;
        const void *at;
        int needed, may; /* must be there; may be there */
    } pointers[] = {{"q", a->q, a->batch && a->query_heads && a->query_tokens, 1},
                    {"out", a->out, a->batch && a->query_heads && a->query_tokens, 1},
                    {"lengths", a->lengths, a->batch > 0, 1},
                    {"block_table", a->block_table, a->batch && a->max_pages, 1},
                    {"pages", a->pages, a->n_pages && a->kv_heads, 1},
                    {"sink_k", a->sink_k, a->sinks > 0, a->sinks > 0},
                    {"sink_v", a->sink_v, a->sinks > 0, a->sinks > 0},
                    {"window_k", a->window_k, a->window > 0, a->window > 0},
                    {"window_v", a->window_v, a->window > 0, a->window > 0},
                    {"fresh_v", a->fresh_v, a->fresh_k != NULL, a->fresh_k != NULL}};
    for (size_t i = 0; i < sizeof pointers / sizeof *pointers; i++) {
        if (pointers[i].needed && !pointers[i].at)
            return tq_fail(error, TQ_E_VALUE, pointers[i].name, -1, 0, "a pointer, not NULL");
        if (!pointers[i].may && pointers[i].at)
            return tq_fail(error, TQ_E_VALUE, pointers[i].name, -1, 1, "NULL, because it has no tokens");
    }
    if ((uintptr_t)a->pages % 64)
        return tq_fail(error, TQ_E_VALUE, "pages", -1, (double)((uintptr_t)a->pages % 64), "64-byte aligned");
    return TQ_OK;
}

static tq_status check_overlap(const tq_plan *plan, const tq_attend_params *a, tq_error *error)
{
    int64_t d = plan->head_dim, e = tq_dtype_bytes(a->dtype),
            rows = (int64_t)a->batch * a->query_heads * a->query_tokens;
    int64_t token = (int64_t)a->batch * a->kv_heads * d * e;
    const tq_array written[] = {{"out", a->out, rows * d * e}, {"lse", a->lse, rows * (int64_t)sizeof *a->lse}};
    const struct {
        tq_array array;
        const char *wants;
    } read[] = {{{"pages", a->pages, a->n_pages * a->kv_heads * plan->record_bytes}, "apart from pages"},
                {{"q", a->q,
                  tq_span_bytes(e, a->batch, a->query_heads, a->query_tokens, d, a->q_stride_batch, a->q_stride_head,
                                a->q_stride_token)},
                 "apart from q"},
                {{"sink_k", a->sink_k, token * a->sinks}, "apart from sink_k"},
                {{"sink_v", a->sink_v, token * a->sinks}, "apart from sink_v"},
                {{"window_k", a->window_k, token * a->window}, "apart from window_k"},
                {{"window_v", a->window_v, token * a->window}, "apart from window_v"},
                {{"fresh_k", a->fresh_k,
                  tq_span_bytes(e, a->batch, a->kv_heads, a->query_tokens, d, a->fresh_k_stride_batch,
                                a->fresh_k_stride_head, a->fresh_k_stride_token)},
                 "apart from fresh_k"},
                {{"fresh_v", a->fresh_v,
                  tq_span_bytes(e, a->batch, a->kv_heads, a->query_tokens, d, a->fresh_v_stride_batch,
                                a->fresh_v_stride_head, a->fresh_v_stride_token)},
                 "apart from fresh_v"},
                {{"out", a->out, written[0].bytes}, "apart from out"}};
    for (int w = 0; w < 2; w++)
        for (size_t r = 0; r < sizeof read / sizeof *read - (w == 0); r++)
            if (tq_overlap(written[w].at, written[w].bytes, read[r].array.at, read[r].array.bytes))
                return tq_fail(error, TQ_E_VALUE, written[w].name, -1, 0, read[r].wants);
    return TQ_OK;
}

/** Lengths, starts and the table entries that a sequence's packed tokens need. */
static tq_status check_sequence(const tq_plan *plan, const tq_attend_params *a, int32_t b, tq_error *error)
{
    int64_t length = a->lengths[b],
            capacity = (int64_t)a->sinks + a->window + (int64_t)a->max_pages * plan->page_tokens;
    if (length < 0 || length > capacity)
        return tq_fail(error, TQ_E_VALUE, "lengths", b, (double)length,
                       "in 0..sinks + window + max_pages * page_tokens");
    if (a->causal && a->query_tokens > 1 && a->window && !a->fresh_k && length > (int64_t)a->sinks + a->window)
        return tq_fail(error, TQ_E_VALUE, "fresh_k", -1, 0,
                       "given: early queries need what the new tokens pushed out of the window");
    if (a->starts && (a->starts[b] < 0 || a->starts[b] > length))
        return tq_fail(error, TQ_E_VALUE, "starts", b, a->starts[b], "in 0..lengths");
    int64_t packed = length - a->sinks - a->window;
    for (int64_t page = 0; page * plan->page_tokens < packed; page++) {
        int64_t i = (int64_t)b * a->max_pages + page;
        /* pages wholly before `starts` or behind a sliding window may have been freed: only what will be read is checked */
        int64_t newest = (page + 1) * plan->page_tokens - 1 + a->sinks, first_query = length - a->query_tokens;
        if (a->starts && newest < a->starts[b]) continue;
        if (a->sliding_window && newest < (first_query > 0 ? first_query : 0) - a->sliding_window + 1) continue;
        if (a->block_table[i] < 0 || a->block_table[i] >= a->n_pages)
            return tq_fail(error, TQ_E_VALUE, "block_table", i, a->block_table[i], "in 0..n_pages - 1");
    }
    return TQ_OK;
}

tq_status tq_attend_check(const tq_plan *plan, const tq_attend_params *a, tq_error *error)
{
    TQ_TRY(tq_attend_check_sizes(plan, a, error));
    TQ_TRY(check_pointers(a, error));
    TQ_TRY(check_overlap(plan, a, error));
    TQ_TRY(tq_transform_check(plan, &a->key, a->kv_heads, 1, error));
    TQ_TRY(tq_transform_check(plan, &a->value, a->kv_heads, 0, error));
    for (int32_t b = 0; b < a->batch; b++) TQ_TRY(check_sequence(plan, a, b, error));
    return TQ_OK;
}
