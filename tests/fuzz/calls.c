/* libFuzzer target: append, attend and dequantize with hostile sizes, lengths, tables and pages.
 *
 * The input is read as a stream of small numbers, now and then a whole 32-bit one. Zeros follow its end. Every array is
 * a heap block of exactly the size that the contract in turboquant.h requires, so that a sanitizer sees the first byte
 * read or written beside it. A call either works, or names an argument and has written nothing to its outputs. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* posix_memalign */
#endif
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <turboquant_schemes.h>

typedef struct {
    const uint8_t *at, *end;
} stream;

static uint8_t byte(stream *s) { return s->at < s->end ? *s->at++ : 0; }

/** Reads 0..most or, for one byte in 32, any number. */
static int32_t number(stream *s, int32_t most)
{
    uint8_t first = byte(s);
    if (first >= 248) {
        uint32_t any = 0;
        for (int i = 0; i < 4; i++) any = any << 8 | byte(s);
        return (int32_t)any;
    }
    return first % (most + 1);
}

/** Reads a size of an allocation: always 0..most. */
static int32_t size(stream *s, int32_t most) { return byte(s) % (most + 1); }

static void *block(stream *s, int64_t bytes, int ordinary)
{
    void *made = NULL;
    if (posix_memalign(&made, 64, bytes ? (size_t)bytes : 1)) abort();
    uint8_t *out = made;
    uint32_t state = 1 + byte(s);
    for (int64_t i = 0; i < bytes; i++) out[i] = (uint8_t)((state = state * 1664525u + 1013904223u) >> 24);
    if (ordinary) /* floats of moderate size, in 16 bits and in 32: the high byte is 0x3c or 0x3d, and a sign */
        for (int64_t i = 0; i + 1 < bytes; i += 2) out[i + 1] = (uint8_t)((out[i + 1] & 0x81) | 0x3c);
    int64_t raw = byte(s);
    for (int64_t i = 0; i < raw && i < bytes && s->at < s->end; i++) out[i] = byte(s);
    return made;
}

static int32_t *integers(stream *s, int64_t n, int32_t most)
{
    int32_t *out = malloc(n ? (size_t)n * sizeof *out : 1);
    for (int64_t i = 0; i < n; i++) out[i] = number(s, most);
    return out;
}

static tq_status read_plan(stream *s, tq_plan *plan)
{
    int64_t words[TQ_PLAN_MAX_WORDS];
    int32_t head_dim = 8 * (1 + size(s, 11)), fine = size(s, 3) == 3, groups = (head_dim + 31) / 32;
    if (fine) groups = (head_dim + 15) / 16;
    words[0] = TQ_FORMAT_VERSION;
    words[1] = head_dim;
    words[2] = fine ? 128 : 32 * (1 + size(s, 3));
    words[3] = fine ? 16 : 32;
    for (int i = 4; i < 7; i++) words[i] = number(s, i == 6 ? 200 : 3);
    int is_plain = fine || size(s, 1);
    words[7] = words[11] = number(s, 2);
    for (int i = 8; i < 15; i++)
        if (!is_plain) words[i] = number(s, i % 4 == 2 ? head_dim : i % 4 == 0 ? 3 : 2);
        else if (i != 11) words[i] = 0;
    words[15] = size(s, 1) ? 8 * (int64_t)number(s, 6) : 0;
    words[16] = size(s, 1) ? number(s, 5) : 0;
    words[17] = words[18] = 0;
    for (int i = 0; i < 2 * groups; i++) {
        words[TQ_PLAN_HEADER_WORDS + i] = number(s, is_plain ? 5 : 31);
        if (i % groups == 0) words[TQ_PLAN_HEADER_WORDS + i] |= TQ_PLAN_NEW_BLOCK;
    }
    tq_error error = {0};
    return tq_plan_init(plan, words, (size_t)(TQ_PLAN_HEADER_WORDS + 2 * groups), &error);
}

typedef struct {
    tq_plan plan;
    int32_t batch, kv_heads, tokens, group, sinks, window, max_pages, n_pages, dtype;
    int64_t element;
    int32_t *lengths, *table, *starts;
    uint8_t *pages;
    void *k, *v, *sink_k, *sink_v, *window_k, *window_v, *matrix[2], *numbers[2]; /* of keys, of values */
    void *turns;
    int32_t columns[2];
} cache;

static void *exact(stream *s, const cache *c, int64_t heads, int64_t tokens)
{
    return tokens ? block(s, c->batch * heads * tokens * c->plan.head_dim * c->element, 1) : NULL;
}

/* Reads centre, steps and moments of a side, some of them as they should be. */
static void read_numbers(stream *s, cache *c, int i, int centred, int stepped)
{
    const tq_side *side = i ? &c->plan.value : &c->plan.key;
    int32_t steps = stepped && side->tile_bytes ? (side->step_columns + 3) / 4 * 4 : 0;
    int32_t centre = centred && side->tile_bytes ? c->plan.head_dim : 0, moments = i ? 0 : c->plan.moments;
    int is_table = side->levels == TQ_LEVELS_TABLE, right = size(s, 3) > 0;
    c->columns[i] = centre + steps + moments;
    int64_t n = (int64_t)c->kv_heads * c->columns[i];
    float *x = n ? block(s, 4 * n, size(s, 3) > 0) : NULL;
    for (int64_t k = 0; right && k < n; k++) {
        int32_t column = (int32_t)(k % c->columns[i]) - centre;
        if (column >= steps) x[k] = 0.5f; /* which is right for every number of a head's moments */
        else if (column >= 0 && is_table) x[k] = (float)column;
    }
    c->numbers[i] = x;
}

static void read_cache(stream *s, cache *c)
{
    c->batch = size(s, 3), c->kv_heads = size(s, 2), c->tokens = size(s, 40), c->group = 1 + size(s, 3);
    c->sinks = size(s, 3) * size(s, 3), c->window = size(s, 3) * size(s, 20), c->max_pages = size(s, 3);
    c->n_pages = size(s, 5), c->dtype = size(s, 2), c->element = c->dtype == TQ_F32 ? 4 : 2;
    int has_values = c->plan.value.tile_bytes != 0;
    c->lengths = integers(s, c->batch, 200), c->starts = integers(s, c->batch, 60);
    c->table = integers(s, (int64_t)c->batch * c->max_pages, c->n_pages > 0 ? c->n_pages - 1 : 0);
    c->pages = block(s, c->n_pages * c->kv_heads * c->plan.record_bytes, 0);
    c->k = block(s, c->batch * c->kv_heads * (int64_t)c->tokens * c->plan.head_dim * c->element, 1);
    c->v = has_values ? block(s, c->batch * c->kv_heads * (int64_t)c->tokens * c->plan.head_dim * c->element, 1) : NULL;
    c->sink_k = exact(s, c, c->kv_heads, c->sinks), c->sink_v = has_values ? exact(s, c, c->kv_heads, c->sinks) : NULL;
    c->window_k = exact(s, c, c->kv_heads, c->window);
    c->window_v = has_values ? exact(s, c, c->kv_heads, c->window) : NULL;
    const tq_side *sides[2] = {&c->plan.key, &c->plan.value};
    for (int i = 0; i < 2; i++)
        c->matrix[i] =
            sides[i]->matrix_rows ? block(s, 4 * (int64_t)sides[i]->matrix_rows * c->plan.head_dim, 1) : NULL;
    int centred = size(s, 1), stepped = size(s, 1);
    for (int i = 0; i < 2; i++) read_numbers(s, c, i, centred, stepped);
    c->turns = c->plan.wave_pairs ? integers(s, 3 * (int64_t)c->plan.wave_pairs, c->plan.head_dim - 1) : NULL;
}

static void free_cache(cache *c)
{
    void *all[] = {c->lengths,   c->table,     c->starts,     c->pages,      c->k,
                   c->v,         c->sink_k,    c->sink_v,     c->window_k,   c->window_v,
                   c->matrix[0], c->matrix[1], c->numbers[0], c->numbers[1], c->turns};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void check(tq_status status, const tq_error *error)
{
    if (status != TQ_OK && (!error->argument || !error->wants || error->status != status)) abort();
}

static tq_transform transform(const cache *c, int side)
{
    tq_transform t = {.rotation = c->matrix[side], .turns = side ? NULL : c->turns};
    tq_error error = {0};
    check(tq_transform_numbers(&c->plan, side, c->numbers[side], c->columns[side], &t, &error), &error);
    return t;
}

static tq_layer layer_of(const cache *c)
{
    return (tq_layer){.batch = c->batch,
                      .kv_heads = c->kv_heads,
                      .max_pages = c->max_pages,
                      .sinks = c->sinks,
                      .window = c->window,
                      .dtype = c->dtype,
                      .n_pages = c->n_pages,
                      .pages = c->pages,
                      .block_table = c->table,
                      .lengths = c->lengths,
                      .sink_k = c->sink_k,
                      .sink_v = c->sink_v,
                      .window_k = c->window_k,
                      .window_v = c->window_v,
                      .key = transform(c, 0),
                      .value = transform(c, 1)};
}

static void try_append(stream *s, cache *c)
{
    int64_t d = c->plan.head_dim, row = c->tokens * d, pages = c->n_pages * c->kv_heads * c->plan.record_bytes;
    tq_append_params p = {.layer = layer_of(c), .tokens = c->tokens, .threads = 1, .k = c->k, .v = c->v};
    p.k_stride_batch = p.v_stride_batch = c->kv_heads * row, p.k_stride_head = p.v_stride_head = row;
    p.k_stride_token = p.v_stride_token = d;
    if (!c->v) p.v_stride_batch = p.v_stride_head = p.v_stride_token = 0;
    tq_error error = {0};
    size_t bytes = 0;
    tq_status status = tq_append_workspace_bytes(&c->plan, &p, &bytes, &error);
    check(status, &error);
    if (status != TQ_OK) return;
    for (int32_t i = 0; i < c->batch * c->max_pages; i++) /* the contract: no page through two entries */
        for (int32_t j = 0; j < i; j++)
            if (c->table[i] == c->table[j]) return;
    void *workspace = block(s, (int64_t)bytes, 0);
    uint8_t *before = malloc((size_t)pages + 1);
    memcpy(before, c->pages, (size_t)pages);
    status = tq_append(&c->plan, &p, workspace, bytes, &error);
    check(status, &error);
    if (status != TQ_OK && memcmp(before, c->pages, (size_t)pages)) abort();
    free(before), free(workspace);
}

static void try_attend(stream *s, cache *c)
{
    int64_t d = c->plan.head_dim;
    int32_t queries = size(s, 5), heads = c->kv_heads * c->group, fresh = size(s, 1);
    int64_t n = (int64_t)c->batch * heads * queries;
    tq_attend_params p = {.layer = layer_of(c),
                          .query_tokens = queries,
                          .query_heads = heads,
                          .causal = size(s, 3) > 0,
                          .sliding_window = number(s, 0),
                          .threads = 1,
                          .softmax_scale = (float)number(s, 3) / 4,
                          .softcap = (float)number(s, 0),
                          .starts = size(s, 1) ? c->starts : NULL};
    void *q = block(s, n * d * c->element, 1), *out = block(s, n * d * c->element, 0);
    float *lse = block(s, n * 4, 0);
    void *fresh_k = fresh ? exact(s, c, c->kv_heads, queries) : NULL,
         *fresh_v = fresh ? exact(s, c, c->kv_heads, queries) : NULL;
    p.q = q, p.out = out, p.lse = size(s, 1) ? lse : NULL, p.fresh_k = fresh_k, p.fresh_v = fresh_v;
    p.q_stride_batch = heads * queries * d, p.q_stride_head = queries * d, p.q_stride_token = d;
    p.fresh_k_stride_batch = p.fresh_v_stride_batch = c->kv_heads * queries * d;
    p.fresh_k_stride_head = p.fresh_v_stride_head = queries * d, p.fresh_k_stride_token = p.fresh_v_stride_token = d;
    tq_error error = {0};
    size_t bytes = 0;
    tq_status status = tq_attend_workspace_bytes(&c->plan, &p, &bytes, &error);
    check(status, &error);
    if (status == TQ_OK && bytes < (64u << 20)) {
        void *workspace = block(s, (int64_t)bytes, 0), *before = malloc((size_t)(n * d * c->element) + 1);
        memcpy(before, out, (size_t)(n * d * c->element));
        status = tq_attend(&c->plan, &p, workspace, bytes, &error);
        check(status, &error);
        if (status != TQ_OK && memcmp(before, out, (size_t)(n * d * c->element))) abort();
        free(before), free(workspace);
    }
    free(q), free(out), free(lse), free(fresh_k), free(fresh_v);
}

static void try_dequantize(stream *s, cache *c)
{
    int32_t most = size(s, 80);
    int64_t n = (int64_t)c->batch * c->kv_heads * most * c->plan.head_dim;
    float *k = block(s, n * 4, 0), *v = c->plan.value.tile_bytes ? block(s, n * 4, 0) : NULL;
    tq_layer layer = layer_of(c);
    tq_error error = {0};
    check(tq_dequantize(&c->plan, &layer, most, k, v, &error), &error);
    free(k), free(v);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    stream s = {data, data + bytes};
    cache c;
    memset(&c, 0, sizeof c);
    uint8_t what = byte(&s);
    if (tq_set_isa(what & 8 ? "scalar" : NULL, NULL) != TQ_OK) abort();
    if (read_plan(&s, &c.plan) != TQ_OK) return 0;
    read_cache(&s, &c);
    if (what & 1) try_append(&s, &c);
    if (what & 2) try_attend(&s, &c);
    if (what & 4) try_dequantize(&s, &c);
    free_cache(&c);
    return 0;
}
