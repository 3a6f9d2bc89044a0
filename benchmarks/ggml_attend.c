/* One decoding step of ggml's attention on a CPU, for benchmarks/cpu_attend.py --ggml.
 *
 *   ggml_attend TYPE KV_HEADS GROUP TOKENS HEAD_DIM THREADS     TYPE: q4_0, q8_0 or f16, of keys and values
 *
 * ggml_flash_attn_ext over one sequence, one query token in float32, an empty mask, random numbers. Caches take turns, so that
 * they never come from the last-level cache. Prints one line of JSON: median, 10th and 90th percentile in microseconds. */
#define _POSIX_C_SOURCE 199309L
#include "ggml-cpu.h"
#include "ggml.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROTATE_BYTES 150000000
#define MOST_CACHES 256
#define RUNS 30

static double microseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static float *random_floats(int64_t n)
{
    float *x = malloc(sizeof(float) * (size_t)n);
    for (int64_t i = 0; x && i < n; i++) x[i] = 2.0f * (float)rand() / (float)RAND_MAX - 1.0f;
    return x;
}

static enum ggml_type type_of(const char *name)
{
    return strcmp(name, "q4_0") == 0 ? GGML_TYPE_Q4_0 : strcmp(name, "q8_0") == 0 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
}

/** [head_dim, tokens, kv_heads] of a type, from as many floats. */
static struct ggml_tensor *tensor_of(struct ggml_context *context, enum ggml_type type, const float *x, int64_t d,
                                     int64_t tokens, int64_t heads)
{
    struct ggml_tensor *t = ggml_new_tensor_4d(context, type, d, tokens, heads, 1);
    ggml_quantize_chunk(type, x, t->data, 0, tokens * heads, d, NULL);
    return t;
}

int main(int argc, char **argv)
{
    if (argc != 7) {
        fprintf(stderr, "usage: ggml_attend TYPE KV_HEADS GROUP TOKENS HEAD_DIM THREADS\n");
        return 2;
    }
    enum ggml_type type = type_of(argv[1]);
    int64_t heads = atoi(argv[2]), group = atoi(argv[3]), tokens = atoi(argv[4]), d = atoi(argv[5]);
    int threads = atoi(argv[6]);
    size_t bytes = 2 * (size_t)(tokens * heads) * ggml_row_size(type, d);
    size_t caches = 1 + ROTATE_BYTES / bytes < MOST_CACHES ? 1 + ROTATE_BYTES / bytes : MOST_CACHES;
    struct ggml_context *context = ggml_init((struct ggml_init_params){
        .mem_size = caches * (bytes + (1 << 20)) + (size_t)(1 << 24) + 8 * (size_t)(d * heads * group + tokens)});
    float *x = random_floats(d * tokens * heads), *y = random_floats(d * heads * group);
    if (!context || !x || !y) return 1;
    struct ggml_tensor *q = ggml_new_tensor_4d(context, GGML_TYPE_F32, d, 1, heads * group, 1);
    struct ggml_tensor *mask = ggml_new_tensor_4d(context, GGML_TYPE_F16, tokens, 1, 1, 1), *out = NULL;
    memcpy(q->data, y, ggml_nbytes(q));
    memset(mask->data, 0, ggml_nbytes(mask));
    struct ggml_cgraph *graphs[MOST_CACHES];
    for (size_t i = 0; i < caches; i++) {
        struct ggml_tensor *k = tensor_of(context, type, x, d, tokens, heads);
        struct ggml_tensor *v = tensor_of(context, type, x, d, tokens, heads);
        out = ggml_flash_attn_ext(context, q, k, v, mask, 1.0f / sqrtf((float)d), 0, 0);
        graphs[i] = ggml_new_graph_custom(context, 8, false);
        ggml_build_forward_expand(graphs[i], out);
    }
    struct ggml_threadpool_params pool = ggml_threadpool_params_default(threads);
    struct ggml_cplan plan = ggml_graph_plan(graphs[0], threads, ggml_threadpool_new(&pool));
    plan.work_data = malloc(plan.work_size + 1);
    double times[RUNS];
    for (int i = -(int)caches; i < RUNS; i++) { /* each once to warm up */
        double start = microseconds();
        if (ggml_graph_compute(graphs[(size_t)(i + (int)caches) % caches], &plan) != GGML_STATUS_SUCCESS) return 1;
        if (i >= 0) times[i] = microseconds() - start;
    }
    if (!isfinite(((const float *)out->data)[0])) return 1;
    qsort(times, RUNS, sizeof *times, ascending);
    printf("{\"us\": %.1f, \"us_p10\": %.1f, \"us_p90\": %.1f, \"bytes\": %zu, \"ggml\": \"%s\"}\n", times[RUNS / 2],
           times[RUNS / 10], times[RUNS - 1 - RUNS / 10], bytes, ggml_version());
    return 0;
}
