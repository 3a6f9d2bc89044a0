/* tq_append: new tokens go to sinks and window; tokens that no longer fit there are rotated, quantised and packed.
 *
 * Threads share the work by (sequence, KV head). A thread encodes the tokens of one tile at a time: 32 tokens, or 64
 * with tiles of 16 channels. It finds their codes and scales. Then it unpacks the tile of each group, merges the new
 * codes and packs it again; a tile whose tokens are all new is only packed. */
#include "baselines.h"
#include "wave.h"
#include <math.h>
#include <string.h>

#define LEAST_VECTORS 32 /* the fewest that a thread gets */

typedef struct {
    const tq_plan *plan;
    const tq_append_params *p;
    const tq_kernels *kernels;
    const tq_plan_tables *tables;
    uint8_t *workspace; /* [threads][worker_bytes], then the memory of `keys` */
    int64_t worker_bytes;
    tq_keys keys; /* used by plans with a wave or a metric */
} append_job;

/** Workspace of a worker. */
typedef struct {
    float *x, *y;     /* [head_dim] each */
    float *centre;    /* [head_dim], settled plans: the centre after the butterflies, subtracted there */
    uint8_t *codes;   /* [tile_tokens][tiles * group_channels] */
    uint8_t *tile;    /* [32][32] */
    uint16_t *scales; /* [scales][tile_tokens] */
    float *head_memory;
    tq_head_keys head; /* used by plans with a wave or a metric */
} worker;

static int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

static int64_t worker_bytes(const tq_plan *plan)
{
    int64_t codes = TQ_TILE_CODES * (int64_t)larger(plan->key.tiles, plan->value.tiles);
    int64_t scales = 2 * plan->tile_tokens * (int64_t)larger(plan->key.scales, plan->value.scales);
    return tq_round_up(3 * tq_round_up(4 * plan->head_dim, 64) + codes + TQ_TILE_CODES, 64) + tq_round_up(scales, 64) +
           4 * tq_head_keys_floats(plan);
}

static worker carve(const tq_plan *plan, uint8_t *at)
{
    int64_t row = tq_round_up(4 * plan->head_dim, 64);
    worker w;
    w.x = (float *)at;
    w.y = (float *)(at + row);
    w.centre = (float *)(at + 2 * row);
    w.codes = at + 3 * row;
    w.tile = w.codes + TQ_TILE_CODES * larger(plan->key.tiles, plan->value.tiles);
    w.scales = (uint16_t *)(w.tile + TQ_TILE_CODES);
    w.head_memory = (float *)(at + worker_bytes(plan)) - tq_head_keys_floats(plan);
    return w;
}

static tq_new_tokens tokens_of(const tq_append_params *p, int32_t b)
{
    return tq_new_tokens_of(p->query_start_loc, p->tokens, b);
}

/** Returns the length before the append. It is negative if the new tokens begin with padding. */
static int64_t length_before(const tq_append_params *p, int32_t b)
{
    return (int64_t)p->layer.lengths[b] - tokens_of(p, b).tokens;
}

/** Returns the elements from the start of k or v to new token i of a sequence. */
static int64_t place_of(const tq_append_params *p, int32_t b, int32_t h, int64_t i, tq_row_strides s)
{
    const int64_t first = tokens_of(p, b).first;
    return (p->query_start_loc ? 0 : b * s.batch) + h * s.head + (first + i) * s.token;
}

static tq_row_strides strides_of(const tq_append_params *p, int is_key)
{
    if (is_key) return (tq_row_strides){p->k_stride_batch, p->k_stride_head, p->k_stride_token};
    return (tq_row_strides){p->v_stride_batch, p->v_stride_head, p->v_stride_token};
}

/* ---- checks ---- */

static int is_bad(float x) { return !(fabsf(x) <= TQ_MAX_INPUT); }

/** Whether a row has a bad number. The bits of magnitudes are ordered as integers; infinity and NaN come last. */
static int has_bad(int32_t dtype, const void *x, int32_t n)
{
    const uint16_t *halves = x;
    int16_t limit = dtype == TQ_F16 ? 0x7400 : 0x4680; /* 2^14 in either */
    uint32_t words[TQ_MAX_DIM];
    int bad = 0;
    if (dtype != TQ_F32) {
        for (int32_t i = 0; i < n; i++) bad |= (int16_t)(halves[i] & 0x7fff) > limit;
        return bad;
    }
    memcpy(words, x, sizeof(float) * (size_t)n);
    for (int32_t i = 0; i < n; i++) bad |= (int32_t)(words[i] & 0x7fffffff) > (int32_t)tq_bits_of(TQ_MAX_INPUT);
    return bad;
}

/** Returns the flat index of a token's row in k or v, as if they were dense. */
static int64_t flat_row(const tq_append_params *p, int32_t b, int32_t h, int32_t i)
{
    if (p->query_start_loc) return (int64_t)(tokens_of(p, b).first + i) * p->layer.kv_heads + h;
    return ((int64_t)b * p->layer.kv_heads + h) * p->tokens + i;
}

static tq_status check_numbers(const append_job *job, int is_key, tq_error *error)
{
    const tq_append_params *p = job->p;
    const char *x = is_key ? p->k : p->v;
    int32_t d = job->plan->head_dim, bytes = tq_dtype_bytes(p->layer.dtype);
    float row[TQ_MAX_DIM];
    for (int32_t b = 0; b < p->layer.batch; b++)
        for (int32_t h = 0; h < p->layer.kv_heads; h++) {
            int32_t tokens = tokens_of(p, b).tokens, padding = tokens - p->layer.lengths[b];
            for (int32_t i = padding > 0 ? padding : 0; i < tokens; i++) {
                const char *from = x + bytes * place_of(p, b, h, i, strides_of(p, is_key));
                if (!has_bad(p->layer.dtype, from, d)) continue;
                job->kernels->load(p->layer.dtype, from, row, d);
                int32_t c = 0;
                while (c < d - 1 && !is_bad(row[c])) c++; /* bounded: the caller may change the array meanwhile */
                return tq_fail(error, TQ_E_VALUE, is_key ? "k" : "v", flat_row(p, b, h, i) * d + c, row[c],
                               "finite and at most 16384 in magnitude");
            }
        }
    return TQ_OK;
}

/** Finds the positions of sequence b that this append packs: [*first, *last). */
static void packed_range(const tq_append_params *p, int32_t b, int64_t *first, int64_t *last)
{
    int64_t window = tq_unpacked_window(&p->layer), sinks = tq_unpacked_sinks(&p->layer);
    int64_t from = length_before(p, b) - window; /* the oldest position that was still in the window */
    *first = from > sinks ? from : sinks;
    *last = tokens_of(p, b).tokens ? p->layer.lengths[b] - window : *first;
}

static tq_status check_centre(const tq_plan *plan, const tq_layer *l, int is_key, tq_error *error)
{
    const tq_transform *t = is_key ? &l->key : &l->value;
    for (int32_t h = 0; t->centre && h < l->kv_heads; h++) {
        const float *centre = tq_transform_centre(t, h);
        for (int32_t i = 0; i < plan->head_dim; i++)
            if (is_bad(centre[i]))
                return tq_fail_number(t, is_key, centre + i, "a centre, finite and at most 16384 in magnitude", error);
    }
    return TQ_OK;
}

static tq_status check_tables(const tq_plan *plan, const tq_append_params *p, tq_error *error)
{
    const int64_t capacity = tq_capacity(plan, &p->layer), sinks = tq_unpacked_sinks(&p->layer);
    TQ_TRY(tq_check_query_start_loc(p->query_start_loc, p->layer.batch, p->tokens, p->total_tokens, error));
    for (int32_t b = 0; b < p->layer.batch; b++) {
        if (p->query_start_loc && !tokens_of(p, b).tokens) continue; /* padding */
        if (p->layer.lengths[b] < 0 || p->layer.lengths[b] > capacity)
            return tq_fail(error, TQ_E_VALUE, "lengths", b, p->layer.lengths[b],
                           tq_is_indexed(&p->layer) ? "in 0..max_pages * page_tokens"
                                                    : "in 0..sinks + window + max_pages * page_tokens");
        if (p->layer.lengths[b]) TQ_TRY(tq_check_rows(&p->layer, b, error));
        int64_t first, last;
        packed_range(p, b, &first, &last);
        if (first >= last) continue;
        for (int64_t page = (first - sinks) / plan->page_tokens; page <= (last - 1 - sinks) / plan->page_tokens;
             page++) {
            int64_t i = (int64_t)b * p->layer.max_pages + page;
            if (p->layer.block_table[i] < 0 || p->layer.block_table[i] >= p->layer.n_pages)
                return tq_fail(error, TQ_E_VALUE, "block_table", i, p->layer.block_table[i], "in 0..n_pages - 1");
        }
    }
    return TQ_OK;
}

static int32_t thread_count(const tq_append_params *p)
{
    int64_t tasks = (int64_t)p->layer.batch * p->layer.kv_heads;
    int32_t threads = tq_threads_for(p->threads, tasks * p->tokens, LEAST_VECTORS);
    return tasks < threads ? (tasks > 0 ? (int32_t)tasks : 1) : threads;
}

tq_status tq_append_workspace_bytes(const tq_plan *plan, const tq_append_params *params, size_t *bytes, tq_error *error)
{
    TQ_TRY(tq_check_append_sizes(plan, params, error));
    if (!bytes) return tq_refuse(error, "bytes", 0, "a pointer, not NULL");
    *bytes = (size_t)(worker_bytes(plan) * thread_count(params) + 4 * tq_keys_floats(plan));
    return TQ_OK;
}

/* ---- one token, one tile ---- */

static const char *token_source(const append_job *job, int is_key, int32_t b, int32_t h, int64_t position)
{
    const tq_append_params *p = job->p;
    int64_t before = length_before(p, b);
    int32_t bytes = tq_dtype_bytes(p->layer.dtype), d = job->plan->head_dim;
    if (position < before) {
        const char *ring = (const char *)(is_key ? p->layer.window_k : p->layer.window_v);
        return ring +
               bytes * ((((int64_t)b * p->layer.kv_heads + h) * p->layer.window + position % p->layer.window) * d);
    }
    const char *x = is_key ? p->k : p->v;
    return x + bytes * place_of(p, b, h, position - before, strides_of(p, is_key));
}

/** Centres and rotates w->x [head_dim]. Returns z before it is divided by the steps, in w->x or w->y. */
static float *rotate_token(const append_job *job, worker *w, const float *centre, const float *matrix)
{
    const tq_plan *plan = job->plan;
    if (tq_is_settled(plan)) {
        job->kernels->settle(w->x, plan->head_dim, plan->signs[0]);
        for (int32_t i = 0; centre && i < plan->head_dim; i++) w->x[i] -= w->centre[i];
        return w->x;
    }
    for (int32_t i = 0; centre && i < plan->head_dim; i++) w->x[i] -= centre[i];
    float *z = matrix ? w->y : w->x; /* in place without a matrix */
    tq_rotate_vector(job->kernels, plan, plan->rotation, matrix, 0, w->x, z);
    return z;
}

/** Loads, centres, rotates, scales and encodes one vector. Number i that is stored for it goes to scale[32 * i]. */
static void encode_token(const append_job *job, worker *w, int is_key, int32_t b, int32_t h, int64_t position,
                         uint8_t *codes, uint16_t *scale)
{
    const tq_plan *plan = job->plan;
    const tq_transform *t = is_key ? &job->p->layer.key : &job->p->layer.value;
    const float *centre = tq_transform_centre(t, h), *steps = tq_transform_steps(t, h);
    job->kernels->load(job->p->layer.dtype, token_source(job, is_key, b, h, position), w->x, plan->head_dim);
    if (is_key && tq_has_moments(plan)) {
        tq_key_to_residual(&w->head, tq_wave_position(&job->p->layer, b, position), w->x);
        centre = NULL;
    }
    if (!tq_is_plain(plan)) {
        for (int32_t i = 0; centre && i < plan->head_dim; i++) w->x[i] -= centre[i];
        tq_baseline_coder coder = tq_baseline_coder_of(job->kernels, plan, job->tables->books, t, is_key, h);
        tq_baseline_encode(&coder, w->x, w->y, codes, scale);
        return;
    }
    float *z = rotate_token(job, w, centre, tq_transform_matrix(t, h));
    for (int32_t g = 0; steps && g < plan->groups; g++) {
        float inverse = 1.0f / steps[g], *of_group = z + plan->group_channels * g;
        for (int32_t i = 0; i < tq_group_width(plan, g); i++) of_group[i] *= inverse;
    }
    const int settled = tq_is_settled(plan);
    tq_encoder encoder = {.side = is_key ? &plan->key : &plan->value,
                          .books = job->tables->books,
                          .cells = job->tables->cells,
                          .head_dim = plan->head_dim,
                          .scale = plan->scale,
                          .group_channels = plan->group_channels,
                          .settled = settled,
                          .tries = plan->tries,
                          .factor = settled ? tq_hadamard_factor(plan->head_dim) : 1.0f,
                          .steps = steps};
    job->kernels->encode(&encoder, z, codes, scale);
}

/** Transposes the codes of 32 tokens, `channels` each (at most 32), to a row for each channel, in column order: tokens
 *  j, j + 8, j + 16 and j + 24 are neighbours. */
static void transpose_codes(const uint8_t *codes, int32_t stride, int32_t channels, uint8_t *tile)
{
    for (int32_t j = 0; j < 8; j++) {
        const uint8_t *a = codes + j * stride, *b = a + 8 * stride, *c = b + 8 * stride, *d = c + 8 * stride;
        uint32_t fours[TQ_TILE];
        for (int32_t i = 0; i < channels; i++)
            fours[i] = a[i] | (uint32_t)b[i] << 8 | (uint32_t)c[i] << 16 | (uint32_t)d[i] << 24;
        for (int32_t i = 0; i < channels; i++) memcpy(tile + TQ_TILE * i + 4 * j, &fours[i], sizeof fours[i]);
    }
}

/** Copies the codes of tokens first .. last - 1 of one group into the group's tile. codes: those of token 0. */
static void place_keys(const tq_plan *plan, const uint8_t *codes, int32_t stride, int32_t first, int32_t last,
                       uint8_t *tile)
{
    for (int32_t i = first; i < last; i++)
        if (tq_tile_is_16(plan)) {
            memcpy(tile + tq_key_cell(plan, i, 0), codes + i * stride, 8);
            memcpy(tile + tq_key_cell(plan, i, 8), codes + i * stride + 8, 8);
        } else {
            memcpy(tile + TQ_TILE * i, codes + i * stride, TQ_TILE);
        }
}

static void place_values(const tq_plan *plan, const uint8_t *codes, int32_t stride, int32_t first, int32_t last,
                         uint8_t *tile)
{
    if (last - first < plan->tile_tokens)
        for (int32_t i = first; i < last; i++)
            for (int32_t c = 0; c < plan->group_channels; c++) tile[tq_value_cell(i, c)] = codes[i * stride + c];
    else if (!tq_tile_is_16(plan)) transpose_codes(codes, stride, TQ_TILE, tile);
    else
        for (int32_t half = 0; half < 2; half++)
            transpose_codes(codes + half * TQ_TILE * stride, stride, TQ_FINE_GROUP, tile + half * TQ_TILE_CODES / 2);
}

/** Writes tokens first .. last - 1 (of 0 .. tile_tokens - 1) to the page's tile `index`. w->codes: a row per token. */
static void store_tile(const append_job *job, worker *w, int is_key, uint8_t *record, int32_t index, int32_t first,
                       int32_t last)
{
    const tq_plan *plan = job->plan;
    const tq_side *side = is_key ? &plan->key : &plan->value;
    int32_t stride = plan->group_channels * side->tiles;
    for (int32_t g = 0; g < side->tiles; g++) {
        if (!side->bits[g]) continue;
        uint32_t *words = (uint32_t *)(record + tq_tile_offset(side, index, g));
        if (last - first < plan->tile_tokens) tq_unpack_tile(job->kernels, side->bits[g], words, w->tile);
        (is_key ? place_keys : place_values)(plan, w->codes + plan->group_channels * g, stride, first, last, w->tile);
        tq_pack_tile(job->kernels, side->bits[g], w->tile, words);
    }
    for (int32_t k = 0; k < side->scales; k++, record += 2 * plan->page_tokens)
        for (int32_t i = first; i < last; i++)
            memcpy(record + tq_scale_offset(side, plan->tile_tokens * index + i), &w->scales[plan->tile_tokens * k + i],
                   sizeof(uint16_t));
}

/* ---- one sequence and head ---- */

static void pack_side(const append_job *job, worker *w, int is_key, int32_t b, int32_t h)
{
    const tq_plan *plan = job->plan;
    const tq_append_params *p = job->p;
    int32_t stride = plan->group_channels * (is_key ? plan->key.tiles : plan->value.tiles);
    const float *centre = tq_transform_centre(is_key ? &p->layer.key : &p->layer.value, h);
    int64_t position, last;
    packed_range(p, b, &position, &last);
    if (centre && tq_is_settled(plan) && !(is_key && tq_has_moments(plan)) && position < last) {
        memcpy(w->centre, centre, sizeof(float) * (size_t)plan->head_dim);
        job->kernels->hadamard(w->centre, plan->head_dim, 1.0f, plan->signs[0], NULL);
    }
    if (is_key && tq_has_moments(plan)) tq_head_keys_begin(&job->keys, h, centre, w->head_memory, &w->head);
    while (position < last) {
        int64_t index = position - tq_unpacked_sinks(&p->layer);
        int32_t begin = (int32_t)(index % plan->tile_tokens), end = plan->tile_tokens;
        if (last - position < end - begin) end = begin + (int32_t)(last - position);
        for (int32_t i = begin; i < end; i++)
            encode_token(job, w, is_key, b, h, position + i - begin, w->codes + i * stride, &w->scales[i]);
        int64_t page = p->layer.block_table[(int64_t)b * p->layer.max_pages + index / plan->page_tokens];
        uint8_t *record = p->layer.pages + page * tq_page_stride(plan, &p->layer) + h * plan->record_bytes;
        store_tile(job, w, is_key, record, (int32_t)(index % plan->page_tokens / plan->tile_tokens), begin, end);
        position += end - begin;
    }
}

/** Copies the new tokens that stay exact: the first `sinks` positions and the last `window`. */
static void copy_exact(const append_job *job, int is_key, int32_t b, int32_t h)
{
    const tq_append_params *p = job->p;
    int64_t length = p->layer.lengths[b], first = length_before(p, b);
    int64_t bytes = (int64_t)tq_dtype_bytes(p->layer.dtype) * job->plan->head_dim,
            head = (int64_t)b * p->layer.kv_heads + h;
    char *sinks = (char *)(is_key ? p->layer.sink_k : p->layer.sink_v),
         *ring = (char *)(is_key ? p->layer.window_k : p->layer.window_v);
    for (int64_t i = first > 0 ? first : 0; i < length; i++) {
        const char *from = token_source(job, is_key, b, h, i);
        if (i < p->layer.sinks) memcpy(sinks + bytes * (head * p->layer.sinks + i), from, (size_t)bytes);
        else if (i >= length - p->layer.window)
            memcpy(ring + bytes * (head * p->layer.window + i % p->layer.window), from, (size_t)bytes);
    }
}

/** With exact tokens by index: copies new sinks, and of each of the last two pages the newest tail_slots. */
static void copy_to_rows(const append_job *job, int is_key, int32_t b, int32_t h)
{
    const tq_layer *l = &job->p->layer;
    int64_t length = l->lengths[b], first = length_before(job->p, b), tokens = job->plan->page_tokens;
    int64_t bytes = (int64_t)tq_dtype_bytes(l->dtype) * job->plan->head_dim, last_page = (length - 1) / tokens;
    char *sinks = is_key ? l->sink_k : l->sink_v, *tails = is_key ? l->window_k : l->window_v;
    for (int64_t i = first > 0 ? first : 0; i < length; i++) {
        const char *from = token_source(job, is_key, b, h, i);
        int64_t page = i / tokens, end = (page + 1) * tokens < length ? (page + 1) * tokens : length;
        if (i < l->sinks && l->sink_rows[b] >= 0)
            memcpy(sinks + bytes * (((int64_t)l->sink_rows[b] * l->kv_heads + h) * l->sinks + i), from, (size_t)bytes);
        int32_t row = page >= last_page - 1 && i >= end - l->tail_slots ? tq_tail_row(l, b, page) : -1;
        if (row >= 0)
            memcpy(tails + bytes * (((int64_t)row * l->kv_heads + h) * l->tail_slots + i % l->tail_slots), from,
                   (size_t)bytes);
    }
}

static void append_head(void *context, int64_t i, int32_t worker_index)
{
    const append_job *job = context;
    int32_t b = (int32_t)(i / job->p->layer.kv_heads), h = (int32_t)(i % job->p->layer.kv_heads);
    worker w = carve(job->plan, job->workspace + job->worker_bytes * worker_index);
    for (int is_key = 1; is_key >= 0; is_key--) {
        if (!is_key && !job->plan->value.tile_bytes) continue;
        pack_side(job, &w, is_key, b, h); /* first: it reads tokens in the ring that copy_exact overwrites */
        if (tq_is_indexed(&job->p->layer)) copy_to_rows(job, is_key, b, h);
        else copy_exact(job, is_key, b, h);
    }
}

static void begin_keys(append_job *job, int32_t threads)
{
    const tq_append_params *p = job->p;
    tq_keys_begin(job->plan, &p->layer.key, job->kernels, (float *)(job->workspace + job->worker_bytes * threads),
                  &job->keys);
    for (int32_t b = 0; b < p->layer.batch; b++) {
        int64_t first, last;
        packed_range(p, b, &first, &last);
        int64_t from = tq_wave_position(&p->layer, b, first);
        tq_keys_turn(&job->keys, from, from + last - first);
    }
}

tq_status tq_append(const tq_plan *plan, const tq_append_params *params, void *workspace, size_t workspace_bytes,
                    tq_error *error)
{
    TQ_TRY(tq_check_append(plan, params, error));
    append_job job = {.plan = plan,
                      .p = params,
                      .kernels = tq_get_kernels(error),
                      .workspace = workspace,
                      .worker_bytes = worker_bytes(plan)};
    if (!job.kernels) return TQ_E_UNSUPPORTED;
    TQ_TRY(tq_wave_check_channels(plan, &params->layer.key, error));
    TQ_TRY(tq_check_steps(plan, &params->layer.key, params->layer.kv_heads, 1, error));
    TQ_TRY(tq_check_steps(plan, &params->layer.value, params->layer.kv_heads, 0, error));
    TQ_TRY(tq_wave_check_numbers(plan, &params->layer.key, params->layer.kv_heads, job.kernels, error));
    TQ_TRY(check_centre(plan, &params->layer, 1, error));
    TQ_TRY(check_centre(plan, &params->layer, 0, error));
    TQ_TRY(check_tables(plan, params, error));
    int32_t threads = thread_count(params); /* once: another thread may change tq_num_threads meanwhile */
    TQ_NEED(error, {"workspace", workspace, 0});
    if (workspace_bytes < (size_t)(job.worker_bytes * threads + 4 * tq_keys_floats(plan)))
        return tq_refuse(error, "workspace_bytes", workspace_bytes, "at least tq_append_workspace_bytes");
    if ((uintptr_t)workspace % 64) return tq_refuse(error, "workspace", (uintptr_t)workspace % 64, "64-byte aligned");
    TQ_TRY(check_numbers(&job, 1, error));
    if (plan->value.tile_bytes) TQ_TRY(check_numbers(&job, 0, error));
    job.tables = tq_plan_tables_of(plan);
    if (tq_has_moments(plan)) begin_keys(&job, threads);
    tq_parallel((int64_t)params->layer.batch * params->layer.kv_heads, threads, append_head, &job);
    return TQ_OK;
}
