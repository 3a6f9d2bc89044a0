/* The core under several callers at once, for ThreadSanitizer (tests/test_c_consumer.py). Four threads append to and
 * attend over caches of their own while a fifth changes the number of threads. Each answer must be that of one thread
 * alone. One caller at a time has the pool, the others work alone. Ends with 0 and "ok", or with 1 and the line. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* posix_memalign */
#endif
#include "checksum.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <turboquant.h>

enum {
    CALLERS = 4,
    ROUNDS = 5,
    BATCH = 4,
    HEADS = 2,
    TOKENS = 1024,
    DIM = 64,
    PAGE = 128,
    PAGES = BATCH * TOKENS / PAGE
};

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "threads.c:%d: %s\n", __LINE__, #condition);                                               \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static atomic_int callers_left;

static void *zeros(size_t bytes)
{
    void *block = NULL;
    CHECK(posix_memalign(&block, 64, bytes ? bytes : 1) == 0);
    memset(block, 0, bytes);
    return block;
}

static float *numbers(size_t n, uint32_t state)
{
    float *x = zeros(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = (float)((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f;
    return x;
}

static tq_plan make_plan(int32_t bits)
{
    int64_t words[TQ_PLAN_HEADER_WORDS + 4] = {TQ_FORMAT_VERSION, DIM, PAGE, TQ_TILE, 0, TQ_SCALE_EDEN, 7};
    words[7] = words[11] = TQ_ROTATION_HADAMARD;
    for (int i = 0; i < 4; i++) words[TQ_PLAN_HEADER_WORDS + i] = bits + (i % 2 ? 0 : TQ_PLAN_NEW_BLOCK);
    tq_plan plan;
    tq_error error = {0};
    CHECK(tq_plan_init(&plan, words, TQ_PLAN_HEADER_WORDS + 4, &error) == TQ_OK);
    return plan;
}

/** Returns a checksum of the pages after an append of TOKENS tokens, and of attention over them by two query tokens. */
static uint64_t life(int32_t bits, int32_t threads)
{
    tq_plan plan = make_plan(bits);
    tq_error error = {0};
    int32_t lengths[BATCH], table[PAGES];
    for (int i = 0; i < BATCH; i++) lengths[i] = TOKENS;
    for (int i = 0; i < PAGES; i++) table[i] = PAGES - 1 - i;
    int64_t head = (int64_t)TOKENS * DIM;
    size_t n = (size_t)(BATCH * HEADS * head), page_bytes = (size_t)(PAGES * HEADS * plan.record_bytes), bytes = 0;
    float *k = numbers(n, 1), *v = numbers(n, 2), *q = numbers(BATCH * 2 * HEADS * 2 * DIM, 3);
    float *out = zeros(BATCH * 2 * HEADS * 2 * DIM * sizeof *out);
    uint8_t *pages = zeros(page_bytes);
    const tq_layer layer = {.batch = BATCH,
                            .kv_heads = HEADS,
                            .max_pages = TOKENS / PAGE,
                            .dtype = TQ_F32,
                            .n_pages = PAGES,
                            .pages = pages,
                            .block_table = table,
                            .lengths = lengths};
    tq_append_params a = {.layer = layer,
                          .tokens = TOKENS,
                          .threads = threads,
                          .k = k,
                          .v = v,
                          .k_stride_batch = HEADS * head,
                          .k_stride_head = head,
                          .k_stride_token = DIM,
                          .v_stride_batch = HEADS * head,
                          .v_stride_head = head,
                          .v_stride_token = DIM};
    CHECK(tq_append_workspace_bytes(&plan, &a, &bytes, &error) == TQ_OK);
    void *workspace = zeros(bytes);
    CHECK(tq_append(&plan, &a, workspace, bytes, &error) == TQ_OK);
    free(workspace);
    tq_attend_params p = {.layer = layer,
                          .query_tokens = 2,
                          .query_heads = 2 * HEADS,
                          .causal = 1,
                          .threads = threads,
                          .softmax_scale = 0.125f,
                          .q = q,
                          .q_stride_batch = 2 * HEADS * 2 * DIM,
                          .q_stride_head = 2 * DIM,
                          .q_stride_token = DIM,
                          .out = out};
    CHECK(tq_attend_workspace_bytes(&plan, &p, &bytes, &error) == TQ_OK);
    workspace = zeros(bytes);
    CHECK(tq_attend(&plan, &p, workspace, bytes, &error) == TQ_OK);
    uint64_t sum = 31 * checksum(pages, page_bytes) + checksum(out, BATCH * 2 * HEADS * 2 * DIM * sizeof *out);
    free(workspace), free(pages), free(out), free(q), free(v), free(k);
    return sum;
}

static uint64_t alone[CALLERS];

static void *caller(void *argument)
{
    int32_t me = (int32_t)(intptr_t)argument;
    for (int i = 0; i < ROUNDS; i++) CHECK(life(me + 1, 3) == alone[me]);
    atomic_fetch_sub(&callers_left, 1);
    return NULL;
}

/** Sets fewer threads than callers ask for, or more, at any time: their workspace must stay large enough. */
static void *changer(void *argument)
{
    (void)argument;
    for (int32_t i = 0; atomic_load(&callers_left); i++) {
        tq_error error = {0};
        CHECK(tq_set_num_threads(i % 2 ? 8 : 1, &error) == TQ_OK && tq_num_threads() >= 1 && tq_isa());
    }
    return NULL;
}

int main(void)
{
    tq_error error = {0};
    CHECK(tq_set_num_threads(4, &error) == TQ_OK);
    for (int32_t i = 0; i < CALLERS; i++) alone[i] = life(i + 1, 1);
    pthread_t threads[CALLERS + 1];
    callers_left = CALLERS;
    for (int i = 0; i < CALLERS; i++) CHECK(!pthread_create(&threads[i], NULL, caller, (void *)(intptr_t)i));
    CHECK(!pthread_create(&threads[CALLERS], NULL, changer, NULL));
    for (int i = 0; i <= CALLERS; i++) CHECK(!pthread_join(threads[i], NULL));
    printf("ok\n");
    return 0;
}
