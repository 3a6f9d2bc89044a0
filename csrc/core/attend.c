/* tq_attend: one online softmax over sinks, packed pages, window and fresh tokens.
 *
 * A task is (sequence, KV head, chunk of query rows, split of the pages). Its rows are the queries that share the KV
 * head, token by token, so that neighbouring rows see nearly the same tokens. Packed pages are not decoded: per page
 * and row, the kernel's tile product gives the scores, one softmax step follows, and the same product gives the
 * weighted sum of value tiles. The sums stay rotated until a row is finished. Split 0 also takes the exact tokens. With
 * one split the task finishes its rows itself; with more, a second pass merges the partial rows in workspace. */
#include "attend.h"
#include <math.h>
#include <string.h>

/* ---- which tokens a query sees ---- */

/** Positions, or packed indices, lo .. hi - 1. */
typedef struct {
    int64_t lo, hi;
} range;

/** Returns the positions that a query at position p may see at all. */
static range seen(const tq_attend_params *a, int32_t b, int64_t p)
{
    range r = {a->starts ? a->starts[b] : 0, a->causal ? p + 1 : a->layer.lengths[b]};
    if (a->sliding_window && p - a->sliding_window + 1 > r.lo) r.lo = p - a->sliding_window + 1;
    if (r.lo < 0) r.lo = 0;
    if (a->ends && a->ends[b] < r.hi) r.hi = a->ends[b];
    return r;
}

static range clip(range r, int64_t lo, int64_t hi) { return (range){r.lo > lo ? r.lo : lo, r.hi < hi ? r.hi : hi}; }

/** Returns the packed tokens among them, as packed indices. */
static range seen_packed(const tq_plan *plan, const tq_attend_params *a, int32_t b, int64_t p)
{
    if (tq_is_indexed(&a->layer)) {
        tq_in_pages in = tq_positions_in_pages(plan, &a->layer, b);
        return clip(seen(a, b, p), in.first, in.last);
    }
    int64_t length = a->layer.lengths[b], newest = (a->causal ? p + 1 : length) - a->layer.window;
    range r =
        clip(seen(a, b, p), a->layer.sinks, newest < length - a->layer.window ? newest : length - a->layer.window);
    return (range){r.lo - a->layer.sinks, r.hi - a->layer.sinks};
}

static tq_new_tokens queries_of(const tq_attend_params *a, int32_t b)
{
    return tq_new_tokens_of(a->query_start_loc, a->query_tokens, b);
}

static int64_t row_position(const attend_job *job, int32_t b, int64_t row)
{
    return (int64_t)job->a->layer.lengths[b] - queries_of(job->a, b).tokens + row / job->heads_per_kv;
}

static int is_empty(range r) { return r.lo >= r.hi; }

/** Finds which of the tokens first .. first + n - 1 lie in r. Returns 0: none; 1: some, marked in visible[n]; 2: all.
 *  columns: whether `visible` is in column order. */
static int mark_visible(range r, int64_t first, int32_t n, int columns, uint8_t *visible)
{
    r = clip(r, first, first + n);
    if (is_empty(r)) return 0;
    if (r.lo == first && r.hi == first + n) return 2;
    for (int32_t i = 0; i < n; i++) {
        int64_t token = first + (columns ? i / TQ_TILE * TQ_TILE + tq_token(i % TQ_TILE) : i);
        visible[i] = token >= r.lo && token < r.hi;
    }
    return 1;
}

/* ---- query rows ---- */

/** Returns the elements from the start of q, out or lse to a row. */
static int64_t place_of(const attend_job *job, const attend_task *t, int64_t row, tq_row_strides s)
{
    int64_t head = (int64_t)t->h * job->heads_per_kv + row % job->heads_per_kv, token = row / job->heads_per_kv;
    if (!job->a->query_start_loc) return t->b * s.batch + head * s.head + token * s.token;
    return head * s.head + (queries_of(job->a, t->b).first + token) * s.token;
}

static const char *query_row(const attend_job *job, const attend_task *t, int64_t row)
{
    const tq_attend_params *a = job->a;
    int64_t at = place_of(job, t, row, (tq_row_strides){a->q_stride_batch, a->q_stride_head, a->q_stride_token});
    return (const char *)a->q + at * tq_dtype_bytes(a->layer.dtype);
}

static tq_baseline_coder coder_of(const attend_job *job, const attend_task *t, int is_key)
{
    return tq_baseline_coder_of(job->kernels, job->plan, job->books, is_key ? &job->a->layer.key : &job->a->layer.value,
                                is_key, t->h);
}

/** Turns a query into the operand of the product with key codes. */
static void prepare_operand(const attend_job *job, const attend_task *t, attend_work *w, const float *q, void *operand)
{
    const tq_plan *plan = job->plan;
    const tq_transform *key = &job->a->layer.key;
    if (!tq_is_plain(plan)) {
        tq_baseline_coder coder = coder_of(job, t, 1);
        tq_baseline_project(&coder, q, operand);
        return;
    }
    const float *steps = tq_transform_steps(key, t->h);
    memset(w->rotated, 0, sizeof(float) * TQ_TILE * (size_t)plan->groups);
    tq_rotate_vector(job->kernels, plan, plan->rotation, tq_transform_matrix(key, t->h), 0, q, w->rotated);
    tq_arrange_query(plan, &job->key_groups, steps, w->rotated, w->coded);
    job->kernels->prepare(w->coded, TQ_TILE * job->key_groups.n, 1, job->precise, operand);
}

static void prepare_rows(const attend_job *job, const attend_task *t, attend_work *w)
{
    const tq_plan *plan = job->plan;
    const tq_transform *key = &job->a->layer.key;
    const float *centre = tq_transform_centre(key, t->h);
    float metric_q[TQ_MAX_HEAD_DIM];
    for (int32_t r = 0; r < t->rows; r++) {
        float *q = w->q + (int64_t)r * plan->head_dim, *coded_q = q;
        job->kernels->load(job->a->layer.dtype, query_row(job, t, t->first_row + r), q, plan->head_dim);
        if (plan->wave_pairs)
            tq_wave_row(plan, key, t->h, &job->wave, q, tq_wave_position(&job->a->layer, t->b, 0),
                        w->wave_rows + (int64_t)r * tq_wave_turn_floats(plan));
        if (plan->metric) {
            coded_q = memcpy(metric_q, q, sizeof(float) * (size_t)plan->head_dim);
            tq_metric_query(plan, key, t->h, coded_q);
        }
        prepare_operand(job, t, w, coded_q, w->query_operands + r * job->query_operand_bytes);
        float scale = job->a->softmax_scale;
        w->logits[r] = (tq_logit){.scale = scale,
                                  .bias = centre ? scale * job->kernels->dot(q, centre, plan->head_dim) : 0.0f,
                                  .softcap = job->a->softcap};
        if (plan->variance) {
            float square = job->kernels->dot(coded_q, coded_q, plan->head_dim);
            w->logits[r].variance = -(scale * scale) * square / (2.0f * (float)plan->head_dim) * plan->variance;
            w->logits[r].scales = w->scales;
        }
        w->states[r] = (tq_softmax_state){-INFINITY, 0, 0};
    }
    memset(w->packed, 0, sizeof(float) * TQ_TILE * (size_t)(job->value_groups.n * t->rows));
    memset(w->exact, 0, sizeof(float) * (size_t)(plan->head_dim * t->rows));
}

static void rescale(float *x, int32_t n, float factor)
{
    for (int32_t i = 0; i < n; i++) x[i] *= factor;
}

/** Multiplies a row's sums so far by the factor of an online softmax step. */
static void rescale_row(const attend_job *job, attend_work *w, int32_t r, float factor)
{
    if (factor == 1.0f) return;
    rescale(w->packed + (int64_t)r * TQ_TILE * job->value_groups.n, TQ_TILE * job->value_groups.n, factor);
    rescale(w->exact + (int64_t)r * job->plan->head_dim, job->plan->head_dim, factor);
}

/** Turns the scores of n tokens into weights, in place. */
static void softmax_step(const attend_job *job, attend_work *w, int32_t r, float *scores, const float *key_scales,
                         const float *value_scales, const uint8_t *visible, int32_t n, const tq_logit *logit)
{
    float max = job->kernels->logits(scores, key_scales, visible, n, logit, w->states[r].max);
    rescale_row(job, w, r, job->kernels->weights(scores, value_scales, visible != NULL, n, max, &w->states[r]));
}

/* ---- packed tokens ---- */

static const uint8_t *record_of(const attend_job *job, const attend_task *t, int64_t page)
{
    int64_t id = job->a->layer.block_table[(int64_t)t->b * job->a->layer.max_pages + page];
    return job->a->layer.pages + id * tq_page_stride(job->plan, &job->a->layer) + t->h * job->plan->record_bytes;
}

/** Does mark_visible for the packed tokens of a page that a row sees, in column order. common: what every row sees. */
static int mark_page(const attend_job *job, const attend_task *t, attend_work *w, int32_t r, int64_t page, range common)
{
    int32_t tokens = job->plan->page_tokens;
    if (common.lo <= page * tokens && common.hi >= (page + 1) * tokens) return 2;
    return mark_visible(seen_packed(job->plan, job->a, t->b, row_position(job, t->b, t->first_row + r)), page * tokens,
                        tokens, 1, w->visible);
}

/** Does attend_page for plans that are not plain: decodes each token tile to rows, keys first. Decoded rows include
 *  their scales, so the softmax step gets scales of 1. */
static void attend_baseline_page(const attend_job *job, const attend_task *t, attend_work *w, int64_t page,
                                 range common)
{
    const tq_kernels *kernels = job->kernels;
    const uint8_t *record = record_of(job, t, page);
    int32_t tokens = job->plan->page_tokens, key_row = TQ_TILE * job->key_groups.n,
            value_row = TQ_TILE * job->value_groups.n;
    tq_baseline_coder keys = coder_of(job, t, 1), values = coder_of(job, t, 0);
    for (int32_t i = 0; i < tokens; i++) w->scales[i] = 1.0f;
    for (int32_t tile = 0; tile < tokens / TQ_TILE; tile++) {
        tq_baseline_decode(&keys, record, tile, 0, TQ_TILE, w->decoded);
        for (int32_t r = 0; r < t->rows; r++) {
            const float *query = (const float *)(w->query_operands + r * job->query_operand_bytes);
            for (int32_t i = 0; i < TQ_TILE; i++)
                w->scores[(int64_t)r * tokens + TQ_TILE * tile + tq_column(i)] =
                    kernels->dot(query, w->decoded + (int64_t)i * key_row, key_row);
        }
    }
    if (job->plan->wave_pairs) kernels->add_wave(&job->wave, page, w->wave_rows, t->rows, w->scales, w->scores, tokens);
    for (int32_t r = 0; r < t->rows; r++) {
        float *scores = w->scores + (int64_t)r * tokens;
        int some = mark_page(job, t, w, r, page, common);
        if (some)
            softmax_step(job, w, r, scores, w->scales, w->scales, some == 2 ? NULL : w->visible, tokens, &w->logits[r]);
        else memset(scores, 0, sizeof(float) * (size_t)tokens);
    }
    for (int32_t tile = 0; tile < tokens / TQ_TILE; tile++) {
        tq_baseline_decode(&values, record, tile, 0, TQ_TILE, w->decoded);
        for (int32_t r = 0; r < t->rows; r++)
            for (int32_t i = 0; i < TQ_TILE; i++) {
                float weight = w->scores[(int64_t)r * tokens + TQ_TILE * tile + tq_column(i)];
                if (weight != 0.0f) /* hidden tokens may hold any bytes */
                    kernels->axpy(weight, w->decoded + (int64_t)i * value_row, w->packed + (int64_t)r * value_row,
                                  value_row);
            }
    }
}

/** Turns the scores of a page into weights, and these into operands. Each step runs over all rows before the next step,
 *  because the steps of one row depend on each other. */
static void weigh_page(const attend_job *job, const attend_task *t, attend_work *w, int64_t page, range common)
{
    const tq_kernels *kernels = job->kernels;
    int32_t tokens = job->plan->page_tokens;
    const float *key_scales = job->plan->wave_pairs ? NULL : w->scales; /* add_wave has applied them */
    float max[CHUNK_ROWS];
    int some[CHUNK_ROWS];
    for (int32_t r = 0; r < t->rows; r++) {
        some[r] = mark_page(job, t, w, r, page, common);
        if (some[r])
            max[r] = kernels->logits(w->scores + (int64_t)r * tokens, key_scales, some[r] == 2 ? NULL : w->visible,
                                     tokens, &w->logits[r], w->states[r].max);
        else memset(w->scores + (int64_t)r * tokens, 0, sizeof(float) * (size_t)tokens);
    }
    for (int32_t r = 0; r < t->rows; r++)
        if (some[r])
            rescale_row(job, w, r,
                        kernels->weights(w->scores + (int64_t)r * tokens, w->scales + tokens, some[r] == 1, tokens,
                                         max[r], &w->states[r]));
    kernels->prepare(w->scores, tokens, t->rows, job->precise, w->weight_operands);
}

/** Attends to one page for all rows of the task: scores, softmax step, weighted values. Meanwhile prefetches the record
 *  `next` (NULL after the last page). All rows see the tokens in `common`. */
static void attend_page(const attend_job *job, const attend_task *t, attend_work *w, int64_t page, const uint8_t *next,
                        range common)
{
    const tq_plan *plan = job->plan;
    const tq_kernels *kernels = job->kernels;
    const uint8_t *record = record_of(job, t, page);
    int32_t tokens = plan->page_tokens, tiles = tokens / plan->tile_tokens,
            key_bytes = (int32_t)plan->value.codes_offset;
    float *key_scales = w->scales, *value_scales = w->scales + tokens;
    tq_tile_grid keys = {record,
                         job->key_tiles,
                         tiles,
                         job->key_groups.n,
                         tq_tile_is_16(plan) ? TQ_HALF_COLUMNS : TQ_WHOLE_TILES,
                         job->books,
                         next,
                         next ? key_bytes : 0};
    tq_tile_grid values = {record,
                           job->value_tiles,
                           job->value_groups.n,
                           tiles,
                           tq_tile_is_16(plan) ? TQ_HALF_ROWS : TQ_WHOLE_TILES,
                           job->books,
                           next ? next + key_bytes : NULL,
                           next ? (int32_t)plan->record_bytes - key_bytes : 0};
    kernels->multiply(&keys, w->query_operands, t->rows, job->precise, 0, w->scores, tokens);
    kernels->load(TQ_F16, record + plan->key.scales_offset, key_scales, tokens);
    kernels->load(TQ_F16, record + plan->value.scales_offset, value_scales, tokens);
    if (plan->wave_pairs) kernels->add_wave(&job->wave, page, w->wave_rows, t->rows, key_scales, w->scores, tokens);
    weigh_page(job, t, w, page, common);
    kernels->multiply(&values, w->weight_operands, t->rows, job->precise, 1, w->packed, TQ_TILE * job->value_groups.n);
}

static void attend_packed(const attend_job *job, const attend_task *t, attend_work *w)
{
    range all = {INT64_MAX, 0}, common = {0, INT64_MAX}; /* what some row sees; what every row sees */
    for (int32_t r = 0; r < t->rows; r++) {
        range in = seen_packed(job->plan, job->a, t->b, row_position(job, t->b, t->first_row + r));
        common = clip(common, in.lo, in.hi);
        if (is_empty(in)) continue;
        all = (range){in.lo < all.lo ? in.lo : all.lo, in.hi > all.hi ? in.hi : all.hi};
    }
    if (is_empty(all)) return;
    int64_t first = all.lo / job->plan->page_tokens, n = (all.hi - 1) / job->plan->page_tokens + 1 - first;
    int64_t last = first + n * (t->split + 1) / job->splits;
    for (int64_t page = first + n * t->split / job->splits; page < last; page++)
        if (!tq_is_plain(job->plan)) attend_baseline_page(job, t, w, page, common);
        else attend_page(job, t, w, page, page + 1 < last ? record_of(job, t, page + 1) : NULL, common);
}

/* ---- exact tokens ---- */

/** Exact tokens of one array. Position p is its token p - first, or token p % ring if it is a ring. Strides: elements
 *  from token to token. */
typedef struct {
    const void *k, *v;
    int64_t k_stride, v_stride, first, ring;
    range positions;
    int all; /* 0: a causal query sees only the last `window` of them */
} exact_part;

static const char *exact_token(const attend_job *job, const exact_part *part, int is_key, int64_t position)
{
    int64_t i = part->ring ? position % part->ring : position - part->first;
    return (const char *)(is_key ? part->k : part->v) +
           tq_dtype_bytes(job->a->layer.dtype) * i * (is_key ? part->k_stride : part->v_stride);
}

/** Returns the positions of a part that a query at position p sees. */
static range seen_exact(const attend_job *job, const attend_task *t, const exact_part *part, int64_t p)
{
    range r = clip(seen(job->a, t->b, p), part->positions.lo, part->positions.hi);
    if (!part->all && job->a->causal && p - job->a->layer.window + 1 > r.lo) r.lo = p - job->a->layer.window + 1;
    return r;
}

/** Attends to n tokens, at most 32, from position `first` on, for all rows. */
static void attend_exact_tile(const attend_job *job, const attend_task *t, attend_work *w, const exact_part *part,
                              int64_t first, int32_t n)
{
    int32_t d = job->plan->head_dim;
    for (int32_t i = 0; i < n; i++) {
        job->kernels->load(job->a->layer.dtype, exact_token(job, part, 1, first + i), w->tile_k + (int64_t)i * d, d);
        job->kernels->load(job->a->layer.dtype, exact_token(job, part, 0, first + i), w->tile_v + (int64_t)i * d, d);
    }
    for (int32_t r = 0; r < t->rows; r++) {
        float scores[TQ_TILE] = {0};
        tq_logit logit = {.scale = job->a->softmax_scale, .softcap = job->a->softcap};
        range in = clip(seen_exact(job, t, part, row_position(job, t->b, t->first_row + r)), first, first + n);
        if (!mark_visible(in, first, TQ_TILE, 0, w->visible)) continue;
        if (in.lo == first && in.hi == first + TQ_TILE) memset(w->visible, 1, TQ_TILE);
        for (int64_t i = in.lo - first; i < in.hi - first; i++)
            scores[i] = job->kernels->dot(w->q + (int64_t)r * d, w->tile_k + i * d, d);
        softmax_step(job, w, r, scores, NULL, NULL, w->visible, TQ_TILE, &logit);
        for (int64_t i = in.lo - first; i < in.hi - first; i++)
            job->kernels->axpy(scores[i], w->tile_v + i * d, w->exact + (int64_t)r * d, d);
    }
}

static void attend_part(const attend_job *job, const attend_task *t, attend_work *w, const exact_part *part)
{
    range all = {INT64_MAX, 0};
    for (int32_t r = 0; r < t->rows; r++) {
        range in = seen_exact(job, t, part, row_position(job, t->b, t->first_row + r));
        if (is_empty(in)) continue;
        all = (range){in.lo < all.lo ? in.lo : all.lo, in.hi > all.hi ? in.hi : all.hi};
    }
    for (int64_t i = all.lo; i < all.hi; i += TQ_TILE)
        attend_exact_tile(job, t, w, part, i, all.hi - i < TQ_TILE ? (int32_t)(all.hi - i) : TQ_TILE);
}

/** Returns the sinks in row `row` of sink_k, those below position hi. */
static exact_part sinks_at(const attend_job *job, const attend_task *t, int64_t row, int64_t hi)
{
    const tq_layer *l = &job->a->layer;
    int64_t d = job->plan->head_dim, at = tq_dtype_bytes(l->dtype) * (row * l->kv_heads + t->h) * l->sinks * d;
    return (exact_part){.k = (const char *)l->sink_k + at,
                        .v = (const char *)l->sink_v + at,
                        .k_stride = d,
                        .v_stride = d,
                        .positions = {0, l->sinks < hi ? l->sinks : hi},
                        .all = 1};
}

/** Returns positions lo .. hi - 1, which lie in row `row` of window_k. */
static exact_part ring_at(const attend_job *job, const attend_task *t, int64_t row, int64_t lo, int64_t hi)
{
    const tq_layer *l = &job->a->layer;
    int64_t d = job->plan->head_dim, slots = tq_window_slots(l),
            at = tq_dtype_bytes(l->dtype) * (row * l->kv_heads + t->h) * slots * d;
    return (exact_part){.k = (const char *)l->window_k + at,
                        .v = (const char *)l->window_v + at,
                        .k_stride = d,
                        .v_stride = d,
                        .ring = slots,
                        .positions = {lo, hi},
                        .all = l->tail_rows != NULL};
}

/** Attends to exact tokens by index: sinks, then the part of the tail in each page. */
static void attend_rows(const attend_job *job, const attend_task *t, attend_work *w)
{
    const tq_layer *l = &job->a->layer;
    tq_in_pages in = tq_positions_in_pages(job->plan, l, t->b);
    if (in.first) {
        exact_part sinks = sinks_at(job, t, l->sink_rows[t->b], l->lengths[t->b]);
        attend_part(job, t, w, &sinks);
    }
    int64_t from = in.last > in.first ? in.last : in.first, tokens = job->plan->page_tokens;
    for (int64_t page = from / tokens; from < l->lengths[t->b]; from = ++page * tokens) {
        int64_t end = (page + 1) * tokens < l->lengths[t->b] ? (page + 1) * tokens : l->lengths[t->b];
        exact_part tail = ring_at(job, t, tq_tail_row(l, t->b, page), from, end);
        attend_part(job, t, w, &tail);
    }
}

static void attend_exact(const attend_job *job, const attend_task *t, attend_work *w)
{
    const tq_attend_params *a = job->a;
    int64_t length = a->layer.lengths[t->b];
    int64_t before = a->fresh_k ? length - a->query_tokens : length; /* the length when the ring was written */
    int32_t bytes = tq_dtype_bytes(a->layer.dtype);
    if (tq_is_indexed(&a->layer)) {
        attend_rows(job, t, w);
        return;
    }
    if (before < 0) before = 0;
    if (a->layer.sinks) {
        exact_part sinks = sinks_at(job, t, t->b, length);
        attend_part(job, t, w, &sinks);
    }
    if (!a->layer.window) return;
    int64_t oldest = before - a->layer.window > a->layer.sinks ? before - a->layer.window : a->layer.sinks;
    exact_part ring = ring_at(job, t, t->b, oldest, before);
    attend_part(job, t, w, &ring);
    if (!a->fresh_k) return;
    const char *k = (const char *)a->fresh_k + bytes * (t->b * a->fresh_k_stride_batch + t->h * a->fresh_k_stride_head);
    const char *v = (const char *)a->fresh_v + bytes * (t->b * a->fresh_v_stride_batch + t->h * a->fresh_v_stride_head);
    exact_part fresh = {.k = k,
                        .v = v,
                        .k_stride = a->fresh_k_stride_token,
                        .v_stride = a->fresh_v_stride_token,
                        .first = length - a->query_tokens,
                        .positions = {before > a->layer.sinks ? before : a->layer.sinks, length}};
    attend_part(job, t, w, &fresh);
}

/* ---- finishing rows ---- */

static void store_row(int32_t dtype, const float *x, void *out, int64_t at, int32_t n)
{
    if (dtype == TQ_F32) memcpy((float *)out + at, x, sizeof(float) * (size_t)n);
    for (int32_t i = 0; i < n && dtype == TQ_F16; i++) ((uint16_t *)out)[at + i] = tq_f16_from_f32(x[i]);
    for (int32_t i = 0; i < n && dtype == TQ_BF16; i++) ((uint16_t *)out)[at + i] = tq_bf16_from_f32(x[i]);
}

/** Turns a row's packed sums back into the space of values, by steps and inverse rotation: out [head_dim]. */
static void restore_values(const attend_job *job, const attend_task *t, attend_work *w, const float *packed, float *out)
{
    const tq_plan *plan = job->plan;
    const tq_transform *value = &job->a->layer.value;
    if (!tq_is_plain(plan)) {
        tq_baseline_coder coder = coder_of(job, t, 0);
        memcpy(w->decoded, packed, sizeof(float) * TQ_TILE * (size_t)job->value_groups.n);
        tq_baseline_restore(&coder, w->decoded, out);
        return;
    }
    const float *steps = tq_transform_steps(value, t->h);
    memset(w->rotated, 0, sizeof(float) * TQ_TILE * (size_t)plan->groups);
    for (int32_t i = 0; i < job->value_groups.n; i++) {
        int32_t g = job->value_groups.group[i];
        const float *sums = packed + TQ_TILE * i;
        for (int32_t c = 0; c < plan->group_channels; c++) {
            float sum = sums[tq_column(c)];
            if (tq_tile_is_16(plan)) sum += sums[tq_column(c + TQ_FINE_GROUP)]; /* of the other token tile */
            w->rotated[plan->group_channels * g + c] = sum * (steps ? steps[g] : 1.0f);
        }
    }
    tq_rotate_vector(job->kernels, plan, plan->rotation, tq_transform_matrix(value, t->h), 1, w->rotated, out);
}

/** Un-rotates and stores one row; packed [value groups * 32] in column order, exact [head_dim]. */
static void finish_row(const attend_job *job, const attend_task *t, attend_work *w, int32_t r,
                       const tq_softmax_state *state, const float *packed, const float *exact)
{
    const tq_plan *plan = job->plan;
    const tq_attend_params *a = job->a;
    const float *centre = tq_transform_centre(&a->layer.value, t->h);
    int64_t row = t->first_row + r;
    float *out = w->coded;
    restore_values(job, t, w, packed, out);
    float inverse = state->max == -INFINITY ? 0.0f : 1.0f / state->sum;
    for (int32_t i = 0; i < plan->head_dim; i++)
        out[i] = (out[i] + exact[i] + (centre ? centre[i] * state->packed_sum : 0.0f)) * inverse;
    store_row(a->layer.dtype, out, a->out, place_of(job, t, row, job->out_strides), plan->head_dim);
    float lse = state->max == -INFINITY ? -INFINITY : state->max + logf(state->sum);
    if (a->lse) a->lse[place_of(job, t, row, job->lse_strides)] = lse;
}

/* ---- tasks ---- */

/** Returns task i. It has no rows if a sequence of a ragged batch has fewer than others. */
static attend_task task_at(const attend_job *job, int64_t i)
{
    attend_task t;
    t.split = (int32_t)(i % job->splits);
    i /= job->splits;
    t.first_row = i % job->chunks * CHUNK_ROWS;
    t.h = (int32_t)(i / job->chunks % job->a->layer.kv_heads);
    t.b = (int32_t)(i / job->chunks / job->a->layer.kv_heads);
    int64_t rows = (int64_t)job->heads_per_kv * queries_of(job->a, t.b).tokens - t.first_row;
    t.rows = rows < 0 ? 0 : rows < CHUNK_ROWS ? (int32_t)rows : CHUNK_ROWS;
    return t;
}

static void run_task(void *context, int64_t i, int32_t worker)
{
    const attend_job *job = context;
    attend_task t = task_at(job, i);
    if (!t.rows) return;
    attend_work w = tq_attend_carve(job, worker);
    prepare_rows(job, &t, &w);
    attend_packed(job, &t, &w);
    if (t.split == 0) attend_exact(job, &t, &w);
    int32_t nv = TQ_TILE * job->value_groups.n, d = job->plan->head_dim;
    for (int32_t r = 0; r < t.rows; r++) {
        if (job->splits == 1) {
            finish_row(job, &t, &w, r, &w.states[r], w.packed + (int64_t)r * nv, w.exact + (int64_t)r * d);
            continue;
        }
        float *partial = tq_attend_partial(job, i, r);
        memcpy(partial, &w.states[r], sizeof w.states[r]);
        memcpy(partial + 4, w.packed + (int64_t)r * nv, sizeof(float) * (size_t)nv);
        memcpy(partial + 4 + nv, w.exact + (int64_t)r * d, sizeof(float) * (size_t)d);
    }
}

/** Merges the splits of one task's rows, in a fixed order, so that sums do not depend on threads. */
static void merge_task(void *context, int64_t i, int32_t worker)
{
    const attend_job *job = context;
    attend_task t = task_at(job, i * job->splits);
    attend_work w = tq_attend_carve(job, worker);
    int32_t n = TQ_TILE * job->value_groups.n + job->plan->head_dim;
    for (int32_t r = 0; r < t.rows; r++) {
        tq_softmax_state total = {-INFINITY, 0, 0};
        memset(w.merged, 0, sizeof(float) * (size_t)n);
        for (int32_t s = 0; s < job->splits; s++) {
            tq_softmax_state part;
            memcpy(&part, tq_attend_partial(job, i * job->splits + s, r), sizeof part);
            if (part.max > total.max || isnan(part.max)) total.max = part.max;
        }
        for (int32_t s = 0; s < job->splits; s++) {
            const float *partial = tq_attend_partial(job, i * job->splits + s, r);
            tq_softmax_state part;
            memcpy(&part, partial, sizeof part);
            if (part.max == -INFINITY) continue;
            float factor = expf(part.max - total.max);
            total.sum += factor * part.sum;
            total.packed_sum += factor * part.packed_sum;
            job->kernels->axpy(factor, partial + 4, w.merged, n);
        }
        finish_row(job, &t, &w, r, &total, w.merged, w.merged + TQ_TILE * job->value_groups.n);
    }
}

/* ---- entry points ---- */

/** Fills the wave's table, nodes and turns for the pages that any row sees. */
static void turn_pages(attend_job *job)
{
    const tq_attend_params *a = job->a;
    range all = {INT64_MAX, 0};
    for (int32_t b = 0; b < a->layer.batch; b++) { /* the first row sees the earliest token, the last row the latest */
        if (!queries_of(a, b).tokens) continue;
        range first = seen_packed(job->plan, a, b, row_position(job, b, 0));
        range last = seen_packed(job->plan, a, b, (int64_t)a->layer.lengths[b] - 1);
        if (first.lo < 0) first.lo = 0;
        if (last.hi <= first.lo) continue;
        all = (range){first.lo < all.lo ? first.lo : all.lo, last.hi > all.hi ? last.hi : all.hi};
    }
    if (is_empty(all)) return;
    int32_t tokens = job->plan->page_tokens;
    job->wave.first_page = all.lo / tokens;
    job->wave.table = tq_attend_wave(job);
    job->wave.nodes = job->wave.table + tq_wave_table_floats(job->plan);
    job->wave.turns = job->wave.nodes + tq_wave_node_floats(job->plan);
    tq_wave_fill(job->plan, &a->layer.key, tq_unpacked_sinks(&a->layer), (all.hi - 1) / tokens + 1, &job->wave);
}

tq_status tq_attend(const tq_plan *plan, const tq_attend_params *params, void *workspace, size_t workspace_bytes,
                    tq_error *error)
{
    TQ_TRY(tq_attend_check(plan, params, error));
    attend_job job = {.plan = plan,
                      .a = params,
                      .kernels = tq_get_kernels(error),
                      .workspace = workspace,
                      .out_strides = tq_strides_of_out(plan, params),
                      .lse_strides = tq_strides_of_lse(params)};
    if (!job.kernels) return TQ_E_UNSUPPORTED;
    tq_attend_lay_out(&job);
    TQ_NEED(error, {"workspace", workspace, 0});
    if (workspace_bytes < (size_t)tq_attend_bytes(&job))
        return tq_refuse(error, "workspace_bytes", workspace_bytes, "at least tq_attend_workspace_bytes");
    if ((uintptr_t)workspace % 64) return tq_refuse(error, "workspace", (uintptr_t)workspace % 64, "64-byte aligned");
    job.books = tq_plan_tables_of(plan)->books;
    if (plan->wave_pairs && params->query_tokens) turn_pages(&job);
    int64_t tasks = (int64_t)params->layer.batch * params->layer.kv_heads * job.chunks;
    tq_parallel(tasks * job.splits, job.threads, run_task, &job);
    if (job.splits > 1) tq_parallel(tasks, job.threads, merge_task, &job);
    return TQ_OK;
}
