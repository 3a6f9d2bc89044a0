/* A program that uses the core as a C library: turboquant.h and libc, no Python. Built with sanitizers and run by
 * tests/test_c_consumer.py; also an example of size -> pack -> use.
 *
 * Whatever is handed to the library lies in a heap block of exactly its size, so that a sanitizer sees the first byte
 * read or written beside it. Ends with 0 and "ok", or with 1 and the line that failed. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "checksum.h"
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <turboquant.h>
#include <unistd.h>

static const char *state = ""; /* what was going on, for messages */

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "consumer.c:%d: %s (%s, %s)\n", __LINE__, #condition, state, tq_isa());                    \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        tq_error ok_error = {0};                                                                                       \
        error = &ok_error;                                                                                             \
        tq_status ok_status = (call);                                                                                  \
        if (ok_status != TQ_OK) {                                                                                      \
            fprintf(stderr, "consumer.c:%d: %s: `%s[%lld]` must be %s, got %g (%s)\n", __LINE__, #call,                \
                    ok_error.argument, (long long)ok_error.index, ok_error.wants, ok_error.got, state);                \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static tq_error *error; /* where the call inside OK reports */

/* ---- memory and numbers ---- */

static void *zeros(size_t bytes) /* 64-byte aligned, of exactly this size */
{
    void *block = NULL;
    CHECK(posix_memalign(&block, 64, bytes ? bytes : 1) == 0);
    memset(block, 0, bytes);
    return block;
}

static uint64_t random_state = 1;
static float uniform(void) /* -1 .. 1 */
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)(random_state >> 40) / 8388608.0f - 1.0f;
}

static float *random_floats(size_t n)
{
    float *x = zeros(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = uniform() + uniform() + uniform();
    return x;
}

static double distance(const float *a, const float *b, size_t n, double *largest)
{
    double worst = 0;
    *largest = 0;
    for (size_t i = 0; i < n; i++) {
        worst = fmax(worst, fabs((double)a[i] - b[i]));
        *largest = fmax(*largest, fabs((double)b[i]));
    }
    return worst;
}

/* ---- a cache ---- */

typedef struct {
    tq_plan plan;
    int32_t batch, heads, tokens, sinks, window, max_pages, length; /* `length` of each sequence */
    int64_t n_pages;
    uint8_t *pages;
    int32_t *table, *lengths;
    float *k, *v; /* [batch, heads, tokens, head_dim]: all there ever was */
    float *sink_k, *sink_v, *window_k, *window_v;
} cache;

/* Returns a plan with groups of 32 or 16 channels; with 16, every third group has 8 bits. */
static tq_plan make_plan_of(int32_t group, int32_t rotation, int32_t head_dim, int32_t key_bits, int32_t value_bits,
                            int32_t page_tokens)
{
    int32_t groups = (head_dim + group - 1) / group;
    size_t n = (size_t)(TQ_PLAN_HEADER_WORDS + 2 * groups);
    int64_t *words = zeros(n * sizeof *words);
    int64_t header[TQ_PLAN_HEADER_WORDS] = {TQ_FORMAT_VERSION, head_dim, page_tokens, group, 0, TQ_SCALE_EDEN, 42};
    memcpy(words, header, sizeof header);
    words[7] = rotation, words[11] = value_bits || group == 16 ? rotation : 0;
    for (int32_t g = 0; g < groups; g++) {
        int other = group == 16 && g % 3 == 1;
        words[TQ_PLAN_HEADER_WORDS + g] = other ? 8 : key_bits;
        words[TQ_PLAN_HEADER_WORDS + groups + g] = other ? 8 : value_bits;
    }
    words[TQ_PLAN_HEADER_WORDS] += TQ_PLAN_NEW_BLOCK;
    if (value_bits) words[TQ_PLAN_HEADER_WORDS + groups] += TQ_PLAN_NEW_BLOCK;
    tq_plan plan;
    OK(tq_plan_init(&plan, words, n, error));
    free(words);
    return plan;
}

static tq_plan make_plan_with(int32_t rotation, int32_t head_dim, int32_t key_bits, int32_t value_bits,
                              int32_t page_tokens)
{
    return make_plan_of(32, rotation, head_dim, key_bits, value_bits, page_tokens);
}

static tq_plan make_plan(int32_t head_dim, int32_t key_bits, int32_t value_bits, int32_t page_tokens)
{
    return make_plan_with(TQ_ROTATION_HADAMARD, head_dim, key_bits, value_bits, page_tokens);
}

static cache new_cache(tq_plan plan, int32_t batch, int32_t heads, int32_t tokens, int32_t sinks, int32_t window)
{
    cache c = {.plan = plan, .batch = batch, .heads = heads, .tokens = tokens, .sinks = sinks, .window = window};
    size_t d = (size_t)plan.head_dim, rows = (size_t)batch * (size_t)heads;
    int32_t packed = tokens > sinks + window ? tokens - sinks - window : 0;
    c.max_pages = (packed + plan.page_tokens - 1) / plan.page_tokens;
    c.n_pages = (int64_t)batch * c.max_pages;
    c.pages = zeros((size_t)(c.n_pages * heads * plan.record_bytes));
    c.table = zeros((size_t)c.n_pages * sizeof *c.table);
    for (int64_t i = 0; i < c.n_pages; i++) c.table[i] = (int32_t)(c.n_pages - 1 - i);
    c.lengths = zeros((size_t)batch * sizeof *c.lengths);
    c.k = random_floats(rows * (size_t)tokens * d);
    c.v = random_floats(rows * (size_t)tokens * d);
    c.sink_k = sinks ? zeros(rows * (size_t)sinks * d * 4) : NULL;
    c.sink_v = sinks ? zeros(rows * (size_t)sinks * d * 4) : NULL;
    c.window_k = window ? zeros(rows * (size_t)window * d * 4) : NULL;
    c.window_v = window ? zeros(rows * (size_t)window * d * 4) : NULL;
    return c;
}

static void free_cache(cache *c)
{
    void *blocks[] = {c->pages, c->table, c->lengths, c->k, c->v, c->sink_k, c->sink_v, c->window_k, c->window_v};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) free(blocks[i]);
}

static tq_layer layer_of(const cache *c)
{
    tq_layer l = {.batch = c->batch, .kv_heads = c->heads, .max_pages = c->max_pages, .n_pages = c->n_pages};
    l.sinks = c->sinks, l.window = c->window, l.pages = c->pages, l.block_table = c->table, l.lengths = c->lengths;
    l.sink_k = c->sink_k, l.window_k = c->window_k;
    if (c->plan.value.tile_bytes) l.sink_v = c->sink_v, l.window_v = c->window_v;
    return l;
}

static tq_append_params append_params(cache *c, int32_t tokens)
{
    int64_t d = c->plan.head_dim, at = c->length * d;
    for (int32_t b = 0; b < c->batch; b++) c->lengths[b] = c->length + tokens;
    tq_append_params p = {.layer = layer_of(c), .tokens = tokens, .k = c->k + at};
    if (c->plan.value.tile_bytes) p.v = c->v + at;
    p.k_stride_batch = p.v_stride_batch = c->heads * c->tokens * d;
    p.k_stride_head = p.v_stride_head = c->tokens * d, p.k_stride_token = p.v_stride_token = d;
    return p;
}

static void append(cache *c, int32_t tokens)
{
    tq_append_params p = append_params(c, tokens);
    size_t bytes = 0;
    OK(tq_append_workspace_bytes(&c->plan, &p, &bytes, error));
    void *workspace = zeros(bytes);
    OK(tq_append(&c->plan, &p, workspace, bytes, error));
    free(workspace);
    c->length += tokens;
}

static tq_attend_params attend_params(const cache *c, const float *q, int32_t query_heads, int32_t query_tokens,
                                      float *out, float *lse)
{
    int64_t d = c->plan.head_dim;
    return (tq_attend_params){.layer = layer_of(c),
                              .query_tokens = query_tokens,
                              .query_heads = query_heads,
                              .causal = 1,
                              .softmax_scale = 1 / sqrtf((float)d),
                              .q = q,
                              .q_stride_batch = query_heads * query_tokens * d,
                              .q_stride_head = query_tokens * d,
                              .q_stride_token = d,
                              .out = out,
                              .lse = lse};
}

static void attend(const cache *c, const tq_attend_params *p)
{
    size_t bytes = 0;
    OK(tq_attend_workspace_bytes(&c->plan, p, &bytes, error));
    void *workspace = zeros(bytes);
    OK(tq_attend(&c->plan, p, workspace, bytes, error));
    free(workspace);
}

/* Writes everything stored, in float32 [batch, heads, length, head_dim]: sinks and window exact, the rest decoded. */
static void stored(const cache *c, float *k, float *v)
{
    size_t d = (size_t)c->plan.head_dim, n = (size_t)c->length;
    int32_t packed = c->length - c->sinks - c->window, room = packed > 0 ? packed : 0;
    size_t decoded = (size_t)(c->batch * c->heads) * (size_t)room * d;
    float *dk = zeros(decoded * 4), *dv = zeros(decoded * 4);
    int32_t *counts = zeros((size_t)c->batch * 4);
    for (int32_t b = 0; b < c->batch; b++) counts[b] = room;
    tq_layer layer = layer_of(c);
    layer.lengths = counts;
    OK(tq_dequantize(&c->plan, &layer, room, dk, dv, error));
    for (size_t row = 0; row < (size_t)(c->batch * c->heads); row++)
        for (size_t j = 0; j < n; j++) {
            int exact = (int32_t)j < c->sinks || (int32_t)j >= c->length - c->window;
            size_t to = (row * n + j) * d,
                   from = exact ? (row * (size_t)c->tokens + j) * d : (row * (size_t)room + j - (size_t)c->sinks) * d;
            memcpy(k + to, (exact ? c->k : dk) + from, d * 4);
            memcpy(v + to, (exact ? c->v : dv) + from, d * 4);
        }
    free(dk), free(dv), free(counts);
}

/* Attends by the definition, in double: one query to tokens first .. seen - 1. */
static void attend_plainly(const float *q, const float *k, const float *v, int32_t d, int32_t first, int32_t seen,
                           double scale, float *out, double *lse)
{
    double *weights = zeros((size_t)seen * sizeof *weights), *sum = zeros((size_t)d * sizeof *sum), most = -INFINITY,
           total = 0;
    for (int32_t j = first; j < seen; j++) {
        for (int32_t i = 0; i < d; i++) weights[j] += (double)q[i] * k[(int64_t)j * d + i];
        weights[j] *= scale;
        most = fmax(most, weights[j]);
    }
    for (int32_t j = first; j < seen; j++) {
        double w = exp(weights[j] - most);
        total += w;
        for (int32_t i = 0; i < d; i++) sum[i] += w * v[(int64_t)j * d + i];
    }
    for (int32_t i = 0; i < d; i++) out[i] = (float)(sum[i] / total);
    *lse = most + log(total);
    free(weights), free(sum);
}

/* ---- what it does right ---- */

static void check_quantise(void)
{
    static const double distortion[] = {0, 0.3634, 0.1188, 0.0345, 0.0095, 0.0025};
    for (int32_t bits = 1; bits <= 5; bits++)
        for (int32_t head_dim = 8; head_dim <= 256; head_dim += bits == 4 ? 8 : 62 / 8 * 8) {
            cache c = new_cache(make_plan(head_dim, bits, 1 + bits % 5, 32), 2, 2, 70, 0, 0);
            append(&c, 40);
            append(&c, 30);
            size_t n = (size_t)(2 * 2 * 70 * head_dim);
            float *k = zeros(n * 4), *v = zeros(n * 4);
            double error_sum = 0, sum = 0;
            stored(&c, k, v);
            for (size_t i = 0; i < n; i++) {
                error_sum += pow((double)k[i] - c.k[i], 2);
                sum += pow(c.k[i], 2);
            }
            CHECK(error_sum / sum < 1.8 * distortion[bits]); /* 1 bit with the unbiased scale: 0.57 */
            free(k), free(v), free_cache(&c);
        }
}

static void check_attend(tq_plan plan, int32_t sinks, int32_t window, int32_t query_tokens)
{
    int32_t batch = 2, heads = 2, query_heads = 6, tokens = 150, head_dim = plan.head_dim;
    cache c = new_cache(plan, batch, heads, tokens, sinks, window);
    size_t d = (size_t)head_dim, n = (size_t)(batch * query_heads * query_tokens),
           all = (size_t)(batch * heads * tokens) * d;
    float *q = random_floats(n * d), *out = zeros(n * d * 4), *lse = zeros(n * 4), *want = zeros(n * d * 4);
    append(&c, 100);
    for (int32_t i = 0; i < 49; i++) append(&c, 1);
    append(&c, 1);
    tq_attend_params p = attend_params(&c, q, query_heads, query_tokens, out, lse);
    attend(&c, &p);
    float *k = zeros(all * 4), *v = zeros(all * 4);
    stored(&c, k, v);
    for (int32_t row = 0; row < batch * query_heads; row++)
        for (int32_t i = 0; i < query_tokens; i++) {
            size_t kv =
                (size_t)(row / query_heads * heads + row % query_heads / (query_heads / heads)) * (size_t)tokens * d;
            size_t at = (size_t)(row * query_tokens + i);
            double want_lse;
            attend_plainly(q + at * d, k + kv, v + kv, head_dim, 0, tokens - query_tokens + i + 1, p.softmax_scale,
                           want + at * d, &want_lse);
            CHECK(fabs(lse[at] - want_lse) < 1e-4);
        }
    double largest, worst = distance(out, want, n * d, &largest);
    CHECK(worst < 2e-5 * largest + 1e-6);
    free(q), free(out), free(lse), free(want), free(k), free(v), free_cache(&c);
}

/* Checks that attention to two parts of a sequence, merged, is attention to the whole. */
static void check_merge(void)
{
    enum { TOKENS = 96, HEADS = 2, D = 40 };
    cache c = new_cache(make_plan(D, 3, 4, 32), 1, HEADS, TOKENS, 0, 0);
    append(&c, TOKENS);
    float *q = random_floats(HEADS * D), *whole = zeros(HEADS * D * 4), *whole_lse = zeros(HEADS * 4);
    float *outs = zeros(2 * HEADS * D * 4), *lses = zeros(2 * HEADS * 4), *out = zeros(HEADS * D * 4),
          *lse = zeros(HEADS * 4);
    int32_t *length = zeros(4), *start = zeros(4);
    tq_attend_params p = attend_params(&c, q, HEADS, 1, whole, whole_lse);
    attend(&c, &p);
    p.layer.lengths = length;
    p.starts = start;
    for (int part = 0; part < 2; part++) {
        *start = part ? 50 : 0;
        *length = part ? TOKENS : 50;
        p.out = outs + part * HEADS * D;
        p.lse = lses + part * HEADS;
        attend(&c, &p);
    }
    OK(tq_merge(outs, lses, 2, HEADS, D, out, lse, error));
    double largest, worst = distance(out, whole, HEADS * D, &largest);
    CHECK(worst < 2e-5 * largest);
    for (int h = 0; h < HEADS; h++) CHECK(fabs(lse[h] - whole_lse[h]) < 1e-4);
    free(q), free(whole), free(whole_lse), free(outs), free(lses), free(out), free(lse), free(length), free(start),
        free_cache(&c);
}

static void check_vectors(void)
{
    enum { D = 1000, N = 70, QUERIES = 9 };
    cache c = new_cache(make_plan(D, 4, 0, 32), 1, 1, N, 0, 0);
    append(&c, N);
    float *q = random_floats(QUERIES * D), *x = zeros(N * D * 4), *out = zeros(QUERIES * N * 4);
    int32_t *counts = zeros(4), *table = zeros((size_t)c.max_pages * 4);
    *counts = N;
    /* tq_dot takes pages in the order of the vectors; those of new_cache are in reverse */
    uint8_t *pages = zeros((size_t)(c.max_pages * c.plan.record_bytes));
    for (int32_t i = 0; i < c.max_pages; i++)
        memcpy(pages + (table[i] = i) * c.plan.record_bytes, c.pages + c.table[i] * c.plan.record_bytes,
               (size_t)c.plan.record_bytes);
    tq_layer layer = layer_of(&c);
    layer.pages = pages, layer.block_table = table, layer.lengths = counts;
    OK(tq_dequantize(&c.plan, &layer, N, x, NULL, error));
    CHECK(tq_dequantize(&c.plan, &layer, N, NULL, NULL, NULL) == TQ_E_VALUE);
    layer.pages = NULL;
    CHECK(tq_dequantize(&c.plan, &layer, N, x, NULL, NULL) == TQ_E_VALUE);
    size_t bytes = 0;
    OK(tq_dot_workspace_bytes(&c.plan, QUERIES, &bytes, error));
    void *workspace = zeros(bytes);
    OK(tq_dot(&c.plan, NULL, q, QUERIES, pages, N, out, 0, workspace, bytes, error));
    for (int i = 0; i < QUERIES; i++)
        for (int j = 0; j < N; j++) {
            double want = 0, size = 0;
            for (int k = 0; k < D; k++) {
                want += (double)q[i * D + k] * x[j * D + k];
                size += fabs((double)q[i * D + k] * x[j * D + k]);
            }
            CHECK(fabs(out[i * N + j] - want) < 1e-4 * size);
        }
    free(q), free(x), free(out), free(counts), free(table), free(pages), free(workspace), free_cache(&c);
}

static void check_rotations(void)
{
    enum { D = 56 };
    float *matrix = zeros(D * D * 4), *x = random_floats(3 * D), *y = zeros(3 * D * 4), *back = zeros(3 * D * 4);
    double *workspace = zeros(D * (D + 2) * sizeof *workspace), largest;
    OK(tq_haar(1, D, matrix, workspace, error));
    tq_plan plan;
    for (int dense = 1; dense >= 0; dense--) {
        plan = make_plan_with(dense ? TQ_ROTATION_DENSE : TQ_ROTATION_HADAMARD, D, 4, 0, 32);
        OK(tq_rotate(&plan, dense ? matrix : NULL, 0, x, y, 3, error));
        OK(tq_rotate(&plan, dense ? matrix : NULL, 1, y, back, 3, error));
        CHECK(distance(back, x, 3 * D, &largest) < 1e-5);
        CHECK(distance(y, x, 3 * D, &largest) > 0.1);
    }
    memcpy(y, x, 3 * D * 4);
    OK(tq_rotate(&plan, NULL, 0, y, y, 3, error)); /* in place */
    OK(tq_rotate(&plan, NULL, 1, y, y, 3, error));
    CHECK(distance(y, x, 3 * D, &largest) < 1e-5);
    free(matrix), free(x), free(y), free(back), free(workspace);
}

static void check_tables(void)
{
    uint32_t words[4]; /* the known answer of Random123 for counter 0 under key 0 */
    tq_random(0, 0, 0, words);
    CHECK(words[0] == 0x6627e8d5 && words[1] == 0xe169c58d && words[2] == 0xbc57ac4c && words[3] == 0x9b00dbd8);
    for (int law = 0; law < 2; law++)
        for (int32_t bits = 1; bits <= TQ_MAX_BITS; bits++)
            for (int32_t d = 8; d <= 256; d += 8) {
                tq_codebook book;
                OK(tq_get_codebook((tq_codebook_law)law, d, bits, &book, error));
                CHECK(book.bits == bits && book.n_levels == 1 << bits);
                for (int32_t r = 0; r < book.n_levels; r++)
                    CHECK(book.levels[book.code_of_rank[r]] == -book.levels[book.code_of_rank[book.n_levels - 1 - r]]);
                for (int32_t r = 1; r < book.n_levels; r++)
                    CHECK(book.levels[book.code_of_rank[r]] > book.levels[book.code_of_rank[r - 1]]);
                for (int32_t r = 1; r < book.n_levels - 1; r++) CHECK(book.thresholds[r] > book.thresholds[r - 1]);
            }
}

/* ---- what it refuses ---- */

/* Whether a call failed with this status about this argument. */
static int refused(tq_status status, tq_status wanted, const tq_error *e, const char *argument)
{
    if (status == wanted && e->status == wanted && strcmp(e->argument, argument) == 0 && e->wants && *e->wants)
        return 1;
    fprintf(stderr, "status %d, argument %s\n", status, e->argument ? e->argument : "NULL");
    return 0;
}

typedef int64_t change[2]; /* a word's index, its value */

/* Checks that plans of too few words are refused, and those of good words with one of them changed. */
static void check_words_refused(const int64_t *good, size_t n, const change *bad, size_t n_bad, tq_plan *plan)
{
    for (size_t i = 0; i < n + n_bad; i++) {
        size_t given = i < n ? i : n;
        int64_t *words = memcpy(zeros(given * 8), good, given * 8);
        if (i >= n) words[bad[i - n][0]] = bad[i - n][1];
        CHECK(tq_plan_init(plan, words, given, NULL) == TQ_E_VALUE);
        free(words);
    }
}

static void check_plans_refused(void)
{
    const int64_t good[] = {2, 64, 128, 32, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 20, 4, 19, 3};
    const int64_t fine[] = {2, 64, 128, 16, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 20, 3, 2, 1, 20, 3, 2, 1};
    const change bad[] = {{0, 0},    {0, 1},   {0, 3},   {1, 12},  {1, 0},   {1, -8},  {1, 8192}, {1, INT64_MAX},
                          {1, 4096}, {1, 128}, {2, 16},  {2, 127}, {2, 256}, {3, 16},  {3, 0},    {3, 64},
                          {4, 3},    {5, 4},   {6, -1},  {7, 3},   {7, -1},  {8, 4},   {9, 3},    {10, 1},
                          {12, 4},   {14, 1},  {15, 1},  {15, 33}, {16, -1}, {16, 6},  {17, -1},  {18, 2},
                          {19, 4},   {19, 23}, {19, 25}, {19, 32}, {20, 7},  {20, -1}, {22, 7},   {22, INT64_MIN}};
    const change no_fine[] = {{2, 96}, {1, 264}, {11, 0}, {9, 2}, {8, 1}, {20, 19}, {20, 7}};
    tq_plan kept, plan;
    memset(&plan, 7, sizeof plan);
    const tq_plan untouched = plan;
    check_words_refused(good, sizeof good / sizeof *good, bad, sizeof bad / sizeof *bad, &plan);
    check_words_refused(fine, sizeof fine / sizeof *fine, no_fine, sizeof no_fine / sizeof *no_fine, &plan);
    CHECK(tq_plan_init(&kept, fine, 27, NULL) == TQ_OK && kept.groups == 4 && kept.record_bytes == 128 * 44);
    CHECK(tq_plan_init(&plan, NULL, 23, NULL) == TQ_E_VALUE && !memcmp(&plan, &untouched, sizeof plan));
}

/* Checks that each change to a good append fails, names its argument and leaves all memory as it was. */
static void check_append_refused(void)
{
    cache c = new_cache(make_plan(64, 4, 3, 32), 2, 2, 120, 2, 8);
    append(&c, 50);
    tq_append_params good = append_params(&c, 20), p;
    size_t bytes = 0, page_bytes = (size_t)(c.n_pages * c.heads * c.plan.record_bytes), ring_bytes = 2 * 2 * 8 * 64 * 4;
    OK(tq_append_workspace_bytes(&c.plan, &good, &bytes, error));
    void *workspace = zeros(bytes);
    uint8_t *pages = zeros(page_bytes), *ring = zeros(ring_bytes);
    memcpy(pages, c.pages, page_bytes);
    memcpy(ring, c.window_k, ring_bytes);
    tq_error e;
#define REFUSES(argument_, change)                                                                                     \
    do {                                                                                                               \
        p = good;                                                                                                      \
        memset(&e, 0, sizeof e);                                                                                       \
        change;                                                                                                        \
        CHECK(refused(tq_append(&c.plan, &p, workspace, bytes, &e), TQ_E_VALUE, &e, argument_));                       \
        CHECK(!memcmp(pages, c.pages, page_bytes) && !memcmp(ring, c.window_k, ring_bytes));                           \
    } while (0)
    REFUSES("tokens", p.tokens = -1);
    REFUSES("batch", p.layer.batch = -1);
    REFUSES("k_stride_token", p.k_stride_token = -64);
    REFUSES("v_stride_batch", p.v_stride_batch = INT64_MAX / 8);
    REFUSES("k", p.k = NULL);
    REFUSES("v", p.v = NULL);
    REFUSES("pages", p.layer.pages = c.pages + 4);
    REFUSES("pages", p.layer.pages = NULL);
    REFUSES("page_stride", p.layer.page_stride = 2 * c.plan.record_bytes - 64);
    REFUSES("page_stride", p.layer.page_stride = 2 * c.plan.record_bytes + 32);
    REFUSES("window_v", p.layer.window_v = NULL);
    REFUSES("sink_k", p.layer.sink_k = NULL);
    REFUSES("window_v", p.layer.window_v = p.layer.window_k);
    REFUSES("block_table", p.layer.n_pages = 2);
    REFUSES("lengths", c.lengths[1] = -3);
    REFUSES("lengths", c.lengths[1] = INT32_MIN);
    REFUSES("lengths", c.lengths[1] = INT32_MAX);
    c.lengths[1] = 70;
    REFUSES("block_table", c.table[1] = -1);
    CHECK(e.index == 1 && e.got == -1);
    REFUSES("block_table", c.table[1] = (int32_t)c.n_pages);
    c.table[1] = (int32_t)c.n_pages - 2;
    float *bad = c.k + 50 * 64 + 3, kept = *bad;
    REFUSES("k", *bad = NAN);
    CHECK(e.index == 3);
    REFUSES("k", *bad = -INFINITY);
    REFUSES("k", *bad = 16385);
    *bad = kept;
    float *steps = zeros(2 * 4 * 4);
    REFUSES("key_numbers", (p.layer.key.steps = steps, p.layer.key.stride_head = 4));
    REFUSES("key_numbers", (p.layer.key.moments = steps, p.layer.key.stride_head = 4));
    REFUSES("stride_head", p.layer.key.stride_head = -4);
    REFUSES("rotation_stride_head", p.layer.key.rotation_stride_head = -4);
    REFUSES("rotation", p.layer.value.rotation = c.k);
    free(steps);
    p = good;
    p.layer.dtype = 9;
    CHECK(refused(tq_append(&c.plan, &p, workspace, bytes, &e), TQ_E_TYPE, &e, "dtype"));
    CHECK(tq_append(&c.plan, &good, workspace, bytes - 1, &e) == TQ_E_VALUE);
    CHECK(tq_append(&c.plan, &good, NULL, bytes, &e) == TQ_E_VALUE);
    CHECK(tq_append(&c.plan, &good, (char *)workspace + 4, bytes, &e) == TQ_E_VALUE);
    CHECK(tq_append(NULL, &good, workspace, bytes, &e) == TQ_E_VALUE);
    CHECK(tq_append(&c.plan, NULL, workspace, bytes, &e) == TQ_E_VALUE);
    CHECK(tq_append_workspace_bytes(&c.plan, &good, NULL, NULL) == TQ_E_VALUE);
    CHECK(!memcmp(pages, c.pages, page_bytes) && !memcmp(ring, c.window_k, ring_bytes));
    CHECK(tq_append(&c.plan, &good, workspace, bytes, NULL) == TQ_OK);
    CHECK(memcmp(pages, c.pages, page_bytes) && memcmp(ring, c.window_k, ring_bytes));
    free(workspace), free(pages), free(ring), free_cache(&c);
#undef REFUSES
}

static void check_attend_refused(void)
{
    cache c = new_cache(make_plan(64, 4, 3, 32), 2, 2, 120, 2, 8);
    append(&c, 100);
    size_t n = 2 * 4 * 64, bytes = 0;
    float *q = random_floats(n), *out = zeros(n * 4), *lse = zeros(8 * 4);
    int32_t *starts = zeros(2 * 4);
    tq_attend_params good = attend_params(&c, q, 4, 1, out, lse), p;
    OK(tq_attend_workspace_bytes(&c.plan, &good, &bytes, error));
    void *workspace = zeros(bytes);
    tq_error e;
#define REFUSES(argument_, change)                                                                                     \
    do {                                                                                                               \
        p = good;                                                                                                      \
        memset(&e, 0, sizeof e);                                                                                       \
        change;                                                                                                        \
        CHECK(refused(tq_attend(&c.plan, &p, workspace, bytes, &e), TQ_E_VALUE, &e, argument_));                       \
        for (size_t i = 0; i < n; i++) CHECK(out[i] == 0);                                                             \
    } while (0)
    REFUSES("query_heads", p.query_heads = 3);
    REFUSES("query_tokens", p.query_tokens = -1);
    REFUSES("q", p.q = NULL);
    REFUSES("out", p.out = NULL);
    REFUSES("pages", p.layer.pages = c.pages + 1);
    REFUSES("window_k", p.layer.window_k = NULL);
    REFUSES("out", p.out = c.window_k);
    REFUSES("out_stride_batch", p.out_stride_batch = (int64_t)1 << 62);
    CHECK(e.got == 0x1p62);
    REFUSES("lse", p.lse = out);
    REFUSES("softmax_scale", p.softmax_scale = NAN);
    REFUSES("softcap", p.softcap = INFINITY);
    REFUSES("lengths", c.lengths[0] = -1);
    REFUSES("lengths", c.lengths[0] = INT32_MAX);
    c.lengths[0] = 100;
    REFUSES("starts", (p.starts = starts, starts[1] = 101));
    REFUSES("starts", (p.starts = starts, starts[1] = -1));
    REFUSES("block_table", c.table[0] = INT32_MAX);
    REFUSES("block_table", c.table[0] = INT32_MIN);
    REFUSES("block_table", (c.table[0] = 0, p.layer.n_pages = 1));
    c.table[0] = (int32_t)c.n_pages - 1;
    size_t own, bound;
    p = good, p.query_tokens = 1 << 12, p.threads = 200; /* more than there are */
    OK(tq_attend_workspace_bytes(&c.plan, &p, &own, error));
    OK(tq_attend_workspace_bound(&c.plan, &p, &bound, error));
    CHECK(own <= bound);
    CHECK(tq_attend(&c.plan, &good, workspace, bytes - 1, NULL) == TQ_E_VALUE);
    CHECK(tq_attend(NULL, &good, workspace, bytes, NULL) == TQ_E_VALUE);
    tq_plan vectors = make_plan(64, 4, 0, 32);
    CHECK(tq_attend(&vectors, &good, workspace, bytes, NULL) == TQ_E_VALUE);
    CHECK(tq_attend(&c.plan, &good, workspace, bytes, NULL) == TQ_OK);
    CHECK(out[0] != 0);
    free(q), free(out), free(lse), free(starts), free(workspace), free_cache(&c);
#undef REFUSES
}

static void check_others_refused(void)
{
    tq_codebook book;
    tq_error e;
    CHECK(refused(tq_get_codebook(TQ_CODEBOOK_NORMAL, 64, 0, &book, &e), TQ_E_VALUE, &e, "bits"));
    CHECK(refused(tq_get_codebook(TQ_CODEBOOK_NORMAL, 64, 7, &book, &e), TQ_E_VALUE, &e, "bits"));
    CHECK(refused(tq_get_codebook(TQ_CODEBOOK_SPHERE, 264, 4, &book, &e), TQ_E_VALUE, &e, "head_dim"));
    CHECK(refused(tq_get_codebook((tq_codebook_law)3, 64, 4, &book, &e), TQ_E_VALUE, &e, "law"));
    float *matrix = zeros(24 * 24 * 4);
    double *workspace = zeros(24 * 26 * 8);
    CHECK(refused(tq_haar(0, 20, matrix, workspace, &e), TQ_E_VALUE, &e, "head_dim"));
    CHECK(refused(tq_haar(0, 0, matrix, workspace, &e), TQ_E_VALUE, &e, "head_dim"));
    tq_plan plan = make_plan(24, 4, 0, 32);
    CHECK(tq_rotate(&plan, NULL, 0, matrix, matrix + 4, 2, NULL) == TQ_E_VALUE); /* overlap */
    CHECK(tq_rotate(&plan, NULL, 0, matrix, matrix + 24 * 12, -1, NULL) == TQ_E_VALUE);
    CHECK(tq_merge(matrix, matrix, -1, 1, 24, matrix, matrix, NULL) == TQ_E_VALUE);
    CHECK(refused(tq_merge(matrix, NULL, 1, 1, 24, matrix + 24, matrix + 48, &e), TQ_E_VALUE, &e, "lses"));
    CHECK(refused(tq_merge(matrix, matrix, 1, 1, 24, NULL, matrix + 48, &e), TQ_E_VALUE, &e, "out"));
    CHECK(refused(tq_merge(matrix, matrix + 24, 1, 1, 24, matrix + 48, matrix + 3, &e), TQ_E_VALUE, &e, "lse"));
    CHECK(refused(tq_merge(matrix, matrix + 50, 1, 1, 24, matrix + 48, matrix + 24, &e), TQ_E_VALUE, &e, "out"));
    CHECK(refused(tq_merge(matrix, matrix + 24, 1, 1, 24, matrix + 48, matrix + 50, &e), TQ_E_VALUE, &e, "lse"));
    const int32_t count = 1, page = 0;
    void *bytes = zeros((size_t)plan.record_bytes);
    tq_layer good = {.batch = 1, .kv_heads = 1, .max_pages = 1, .n_pages = 1, .pages = bytes}, layer;
    good.block_table = &page, good.lengths = &count;
#define REFUSES(argument_, change)                                                                                     \
    do {                                                                                                               \
        layer = good;                                                                                                  \
        change;                                                                                                        \
        CHECK(refused(tq_dequantize(&plan, &layer, 1, matrix, NULL, &e), TQ_E_VALUE, &e, argument_));                  \
    } while (0)
    CHECK(tq_recode(&plan, &plan, bytes, 1, 1, bytes, 1, NULL) == TQ_E_VALUE);
    CHECK(refused(tq_recode(&plan, &plan, bytes, 1, 1, bytes, 1, &e), TQ_E_VALUE, &e, "out"));
    CHECK(refused(tq_recode(&plan, NULL, bytes, 1, 1, NULL, 1, &e), TQ_E_VALUE, &e, "plan"));
    CHECK(tq_dequantize(&plan, &good, 1, matrix, NULL, &e) == TQ_OK);
    CHECK(refused(tq_dequantize(&plan, &good, 1, NULL, NULL, &e), TQ_E_VALUE, &e, "k"));
    CHECK(refused(tq_dequantize(&plan, NULL, 1, matrix, NULL, &e), TQ_E_VALUE, &e, "layer"));
    REFUSES("lengths", layer.lengths = NULL);
    REFUSES("block_table", layer.block_table = NULL);
    REFUSES("kv_heads", layer.kv_heads = -1);
    REFUSES("sinks", layer.sinks = -1);
#undef REFUSES
    size_t room = 0;
    CHECK(tq_dot_workspace_bytes(&plan, 1, &room, &e) == TQ_OK);
    void *operands = zeros(room);
#define DOT(pages, out, workspace, room) tq_dot(&plan, NULL, matrix, 1, pages, 1, out, 1, workspace, room, &e)
    CHECK(refused(DOT(NULL, matrix + 24, operands, room), TQ_E_VALUE, &e, "pages"));
    CHECK(refused(DOT(bytes, NULL, operands, room), TQ_E_VALUE, &e, "out"));
    CHECK(refused(DOT(bytes, matrix + 24, NULL, room), TQ_E_VALUE, &e, "workspace"));
    CHECK(refused(DOT(bytes, matrix + 24, operands, room - 1), TQ_E_VALUE, &e, "workspace_bytes"));
    CHECK(DOT(bytes, matrix + 24, operands, room) == TQ_OK);
#undef DOT
    free(bytes), free(operands);
    CHECK(refused(tq_set_num_threads(0, &e), TQ_E_VALUE, &e, "n"));
    CHECK(refused(tq_set_isa("sse9", &e), TQ_E_UNSUPPORTED, &e, "isa"));
    CHECK(strncmp(e.wants, "one of: ", 8) == 0 && strcmp(e.wants + 8, tq_isa_available()) == 0);
    CHECK(tq_kernel_name("divide", &plan) == NULL && strstr(tq_kernel_name("rotate", &plan), tq_isa()));
    for (int status = -1; status < 100; status++) CHECK(tq_status_message((tq_status)status)[0]);
    free(matrix), free(workspace);
}

/* ---- levels, threads, forks ---- */

/* Returns a checksum of bytes that must be the same on every level and with any number of threads. */
static uint64_t bytes_of_everything(void)
{
    uint64_t sum = 0;
    random_state = 1;
    for (int32_t bits = 1; bits <= 5; bits++)
        for (int32_t head_dim = 8; head_dim <= 256; head_dim += 8 * (2 * bits + 1)) {
            cache c = new_cache(make_plan(head_dim, bits, 6 - bits, 96), 3, 2, 111, 3, 5);
            append(&c, 60);
            for (int i = 0; i < 40; i++) append(&c, 1);
            append(&c, 11);
            sum = 31 * sum + checksum(c.pages, (size_t)(c.n_pages * c.heads * c.plan.record_bytes));
            sum = 31 * sum + checksum(c.window_v, (size_t)(3 * 2 * 5 * head_dim) * 4);
            free_cache(&c);
        }
    for (int32_t head_dim = 8; head_dim <= 256; head_dim += 24) {
        int32_t bits = 1 + head_dim % 5;
        cache c = new_cache(make_plan_of(16, TQ_ROTATION_HADAMARD, head_dim, bits, 6 - bits, 128), 2, 2, 211, 3, 5);
        append(&c, 50);
        for (int i = 0; i < 40; i++) append(&c, 1);
        append(&c, 121);
        sum = 31 * sum + checksum(c.pages, (size_t)(c.n_pages * c.heads * c.plan.record_bytes));
        free_cache(&c);
    }
    return sum;
}

static void check_everything_attended(void)
{
    for (int32_t bits = 1; bits <= 5; bits++) {
        int32_t head_dim = 8 * (5 * bits + 3);
        check_attend(make_plan(head_dim, bits, 6 - bits, 64), 2, 16, 1);
        check_attend(make_plan_of(16, TQ_ROTATION_HADAMARD, head_dim, bits, 6 - bits, 64), 2, 16, 1);
    }
    check_attend(make_plan(128, 4, 4, 64), 4, 0, 1);
    check_attend(make_plan(64, 3, 2, 64), 0, 0, 5);
    check_attend(make_plan(200, 2, 5, 64), 0, 32, 1);
    check_attend(make_plan(256, 5, 1, 64), 150, 0, 2);
    check_attend(make_plan(80, 1, 1, 64), 0, 150, 1);
    check_attend(make_plan_of(16, TQ_ROTATION_HADAMARD, 16, 4, 3, 128), 0, 0, 5);
    check_attend(make_plan_of(16, TQ_ROTATION_NONE, 256, 2, 1, 128), 0, 9, 1);
}

int main(int argc, char **argv)
{
    const char *text = tq_isa_available();
    char list[128], *rest = list;
    CHECK(strlen(text) < sizeof list);
    memcpy(list, text, strlen(text) + 1);
    uint64_t first = 0;
    check_tables();
    check_plans_refused();
    for (char *name; (name = strsep(&rest, " ")) != NULL;) {
        if (argc > 1 && !strcmp(argv[1], "default-isa")) name = NULL; /* keep what the environment says */
        state = "forcing a level";
        OK(tq_set_isa(name, error));
        CHECK(!name || strcmp(tq_isa(), name) == 0);
        for (int32_t threads = 1; threads <= 4; threads += 3) {
            state = threads == 1 ? "one thread" : "four threads";
            OK(tq_set_num_threads(threads, error));
            uint64_t sum = bytes_of_everything();
            if (!first) first = sum;
            CHECK(sum == first);
            if (threads == 1) check_quantise(); /* four threads pack the same bytes */
            check_everything_attended();
            check_merge();
            check_vectors();
            check_rotations();
            check_append_refused();
            check_attend_refused();
            check_others_refused();
        }
        printf("%s: %016llx\n", tq_isa(), (unsigned long long)first);
        if (!name) break;
    }
    OK(tq_set_isa(NULL, error));
    if (argc < 3 || strcmp(argv[2], "no-fork")) {
        state = "in a forked child"; /* which has none of its parent's worker threads */
        fflush(stdout);
        pid_t child = fork();
        CHECK(child >= 0);
        if (!child) {
            check_everything_attended();
            _exit(0);
        }
        int status = 1;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        check_everything_attended();
    }
    printf("ok\n");
    return 0;
}
