/* The vector index as a C library, on every level: codes, scores and results against a few lines of C. Bytes must be
 * the same on all levels, with one and four threads. Whatever is handed to the library lies in a heap block of exactly
 * its size, so that a sanitizer sees the first byte read or written beside it. Run by tests/test_c_consumer.py and,
 * under emulation, tests/test_neon.py. Ends with 0 and "ok", or with 1 and the line that failed. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* fork */
#endif
#include "checksum.h"
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <turboquant_index.h>
#include <unistd.h>

static const char *state = "";

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "index.c:%d: %s (%s, %s)\n", __LINE__, #condition, state, tq_isa());                       \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { N = 1200, FIRST = 700, QUERIES = 6, K = 15, LISTS = 21 };

static void *zeros(size_t bytes)
{
    void *block = malloc(bytes ? bytes : 1);
    CHECK(block);
    return memset(block, 0, bytes);
}

static uint64_t random_state;
static float normal(void) /* approximately */
{
    double sum = 0;
    for (int i = 0; i < 6; i++) {
        random_state = random_state * 6364136223846793005u + 1442695040888963407u;
        sum += (double)(random_state >> 11) / 9007199254740992.0 - 0.5;
    }
    return (float)(sum * 1.414);
}

static float *numbers(size_t n)
{
    float *x = zeros(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = normal();
    return x;
}

typedef struct {
    const char *name;
    int32_t dim, channels, metric, with_mean, rotation;
    uint8_t bits[4], lead[4];
    double error; /* largest error of decoded vectors, in squares over squares, checked without a rotation; 0: not */
    int32_t n_lists;
} example;

static const example EXAMPLES[] = {
    {"1 bit", 128, 128, TQ_INDEX_IP, 0, TQ_ROTATION_NONE, {1, 1, 1, 1}, {1, 1, 1, 1}, 0.6, 0},
    {"2 bits, both lead", 100, 104, TQ_INDEX_L2, 1, TQ_ROTATION_HADAMARD, {2, 2, 2, 2}, {2, 2, 2, 2}, 0.2, 0},
    {"3 bits", 70, 72, TQ_INDEX_COSINE, 1, TQ_ROTATION_HADAMARD, {3, 3, 3}, {1, 1, 1}, 0.06, 0},
    {"4 bits, two lead", 32, 32, TQ_INDEX_IP, 1, TQ_ROTATION_NONE, {4}, {2}, 0.02, 0},
    {"4 bits", 128, 128, TQ_INDEX_L2, 0, TQ_ROTATION_NONE, {4, 4, 4, 4}, {1, 1, 1, 1}, 0.02, 0},
    {"5 bits", 33, 40, TQ_INDEX_IP, 0, TQ_ROTATION_HADAMARD, {5, 5}, {1, 1}, 0.005, 0},
    {"8 bits", 128, 128, TQ_INDEX_COSINE, 0, TQ_ROTATION_NONE, {8, 8, 8, 8}, {1, 1, 1, 1}, 0.001, 0},
    {"mixed", 128, 128, TQ_INDEX_IP, 1, TQ_ROTATION_DENSE, {8, 6, 3, 0}, {5, 2, 1, 0}, 0, 0},
    {"few lead", 120, 120, TQ_INDEX_L2, 1, TQ_ROTATION_DENSE, {5, 4, 2, 1}, {3, 0, 0, 0}, 0, 0},
    {"8 numbers", 8, 8, TQ_INDEX_IP, 0, TQ_ROTATION_NONE, {6}, {1}, 0.02, 0},
    {"8 in the last group", 104, 104, TQ_INDEX_IP, 1, TQ_ROTATION_NONE, {4, 4, 4, 4}, {1, 1, 1, 1}, 0.02, 0},
    {"8 bits in a last group of 16", 112, 112, TQ_INDEX_COSINE, 0, TQ_ROTATION_DENSE, {0, 3, 2, 8}, {0, 3, 1, 5}, 0, 0},
    {"lists", 100, 104, TQ_INDEX_IP, 0, TQ_ROTATION_HADAMARD, {2, 2, 2, 2}, {1, 1, 1, 1}, 0, LISTS},
    {"lists, cosine", 70, 72, TQ_INDEX_COSINE, 0, TQ_ROTATION_HADAMARD, {8, 8, 8}, {1, 1, 1}, 0, LISTS},
    {"lists, l2", 33, 40, TQ_INDEX_L2, 0, TQ_ROTATION_NONE, {4, 4}, {2, 2}, 0, LISTS},
    {"24 in the last group, both lead", 88, 88, TQ_INDEX_L2, 0, TQ_ROTATION_NONE, {2, 2, 2}, {2, 2, 2}, 0.2, 0},
};

static tq_plan make_plan(int32_t dim, int32_t rotation)
{
    int64_t words[TQ_PLAN_HEADER_WORDS + 8] = {TQ_FORMAT_VERSION, dim, 128, 32, 0, TQ_SCALE_EDEN, 7};
    int32_t groups = (dim + 31) / 32;
    words[7] = rotation, words[11] = rotation;
    for (int i = 0; i < 2 * groups; i++) words[TQ_PLAN_HEADER_WORDS + i] = 2 + (i % groups ? 0 : TQ_PLAN_NEW_BLOCK);
    tq_plan plan;
    tq_error error = {0};
    CHECK(tq_plan_init(&plan, words, (size_t)(TQ_PLAN_HEADER_WORDS + 2 * groups), &error) == TQ_OK);
    return plan;
}

static float *exact_bytes(const float *x, size_t n)
{
    float *copy = zeros(n * sizeof *copy);
    return memcpy(copy, x, n * sizeof *copy);
}

static uint16_t bfloat(double x)
{
    float rounded = (float)x;
    uint32_t word;
    memcpy(&word, &rounded, sizeof word);
    return (uint16_t)((word + 0x8000) >> 16);
}

/** Returns the rotation of a dense plan, which turns each pair of neighbours by an angle of its own. */
static uint16_t *make_matrix(int32_t n)
{
    uint16_t *m = zeros(sizeof *m * (size_t)n * (size_t)n);
    for (int32_t i = 0; i < n; i += 2) {
        double angle = 0.3 + i;
        m[(int64_t)i * n + i] = m[(int64_t)(i + 1) * n + i + 1] = bfloat(cos(angle));
        m[(int64_t)i * n + i + 1] = bfloat(sin(angle));
        m[(int64_t)(i + 1) * n + i] = bfloat(-sin(angle));
    }
    return m;
}

typedef struct {
    tq_index_rows rows;
    uint8_t *codes, *signs, *allowed;
    float *scales, *offsets, *factors;
    int32_t *lists;
} segment;

static segment make_segment(const tq_index_space *space, const float *x, int64_t n, int64_t first_id)
{
    segment s;
    memset(&s, 0, sizeof s);
    tq_error error = {0};
    int64_t row_bytes;
    int32_t planes;
    CHECK(tq_index_row_bytes(&space->layout, &row_bytes, &planes, &error) == TQ_OK);
    s.codes = zeros((size_t)(n * row_bytes));
    s.signs = zeros((size_t)((n + 63) / 64 * planes * 64));
    s.scales = zeros((size_t)n * sizeof(float));
    if (space->mean || space->n_lists || space->metric == TQ_INDEX_L2) s.offsets = zeros((size_t)n * sizeof(float));
    if (space->n_lists) {
        s.lists = zeros((size_t)n * sizeof *s.lists);
        CHECK(tq_index_assign(space, x, n, s.lists, 0, &error) == TQ_OK);
        for (int64_t i = 0; i < n; i++) CHECK(s.lists[i] >= 0 && s.lists[i] < space->n_lists);
    }
    CHECK(tq_index_encode(space, x, n, s.lists, s.codes, s.signs, s.scales, s.offsets, 0, &error) == TQ_OK);
    s.allowed = zeros((size_t)n);
    for (int64_t i = 0; i < n; i++) s.allowed[i] = i % 7 != 3;
    s.factors = zeros((size_t)((n + 63) / 64) * 2 * sizeof(float));
    tq_index_factors(s.scales, s.offsets, n, s.factors);
    s.rows = (tq_index_rows){n, s.codes, s.signs, s.scales, s.offsets, s.factors, NULL, first_id, NULL, s.lists, 0};
    return s;
}

static void free_segment(segment s)
{
    free(s.codes), free(s.signs), free(s.allowed), free(s.scales), free(s.offsets), free(s.factors), free(s.lists);
}

static void check_decoded(const example *e, const tq_index_space *space, const segment *s, const float *x, int64_t n)
{
    int64_t row_bytes;
    int32_t planes, channels = e->channels;
    tq_error error = {0};
    CHECK(tq_index_row_bytes(&space->layout, &row_bytes, &planes, &error) == TQ_OK);
    uint8_t *rows = zeros((size_t)(n * planes));
    for (int64_t i = 0; i < n; i++)
        for (int32_t p = 0; p < planes; p++) rows[i * planes + p] = s->signs[(i / 64 * planes + p) * 64 + i % 64];
    float *z = zeros(sizeof *z * (size_t)n * (size_t)channels);
    CHECK(tq_index_decode(&space->layout, s->codes, rows, s->scales, n, z, &error) == TQ_OK);
    double missed = 0, all = 0;
    for (int64_t i = 0; i < n; i++) {
        double length = 0;
        for (int32_t j = 0; j < e->dim; j++) length += (double)x[i * e->dim + j] * x[i * e->dim + j];
        for (int32_t j = 0; j < e->dim; j++) {
            double own = x[i * e->dim + j] / (e->metric == TQ_INDEX_COSINE ? sqrt(length) : 1);
            if (space->mean) own -= space->mean[j];
            double miss = z[i * channels + j] - own;
            missed += miss * miss;
            all += own * own;
        }
    }
    if (e->error > 0 && e->rotation == TQ_ROTATION_NONE) CHECK(missed < e->error * all);
    free(rows), free(z);
}

typedef struct {
    float score;
    int64_t id;
} hit;

static int better_first(const void *a, const void *b)
{
    const hit *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/** Checks that scores of some rows are those of all rows. each: [QUERIES, FIRST], then [QUERIES, N - FIRST]. */
static void check_scores_of(const tq_index_space *space, const float *queries, const tq_index_rows *rows,
                            const float *each)
{
    enum { M = 11 };
    int64_t *wanted = zeros(sizeof *wanted * QUERIES * M);
    float *scores = zeros(sizeof *scores * QUERIES * M);
    tq_error error = {0};
    for (int i = 0; i < QUERIES * M; i++) wanted[i] = i % 5 == 4 ? -1 : i == 0 ? N - 1 : i * 7919 % N;
    CHECK(tq_index_scores_of(space, queries, QUERIES, rows, 2, wanted, M, scores, 0, &error) == TQ_OK);
    for (int i = 0; i < QUERIES * M; i++) {
        int64_t q = i / M, row = wanted[i];
        float known = row < 0       ? -INFINITY
                      : row < FIRST ? each[q * FIRST + row]
                                    : each[QUERIES * FIRST + q * (N - FIRST) + row - FIRST];
        CHECK(scores[i] == known);
    }
    free(wanted), free(scores);
}

/** Checks that the results of a bound that misses nothing are those of sorting all scores. */
static void check_search(const tq_index_space *space, const segment *parts, const float *queries, float *scores,
                         int64_t *ids)
{
    tq_index_rows rows[2] = {parts[0].rows, parts[1].rows};
    tq_error error = {0};
    float *each = zeros(sizeof *each * QUERIES * N);
    hit *all = zeros(sizeof *all * N);
    for (int filtered = 0; filtered < 2; filtered++) {
        for (int p = 0; p < 2; p++) rows[p].allowed = filtered ? parts[p].allowed : NULL;
        CHECK(tq_index_scores(space, queries, QUERIES, &rows[0], 1, each, 0, &error) == TQ_OK);
        CHECK(tq_index_scores(space, queries, QUERIES, &rows[1], 1, each + QUERIES * FIRST, 0, &error) == TQ_OK);
        check_scores_of(space, queries, rows, each);
        CHECK(tq_index_search(space, queries, QUERIES, rows, 2, K, LISTS, scores, ids, 0, &error) == TQ_OK);
        for (int q = 0; q < QUERIES; q++) {
            int64_t n = 0;
            for (int64_t i = 0; i < N; i++) {
                int64_t row = i < FIRST ? i : i - FIRST;
                if (filtered && !parts[i >= FIRST].allowed[row]) continue;
                float score = i < FIRST ? each[q * FIRST + row] : each[QUERIES * FIRST + q * (N - FIRST) + row];
                all[n++] = (hit){score, i < FIRST ? 5 + row : 4000 + row};
            }
            qsort(all, (size_t)n, sizeof *all, better_first);
            for (int i = 0; i < K; i++) CHECK(ids[q * K + i] == all[i].id && scores[q * K + i] == all[i].score);
        }
    }
    free(each), free(all);
}

/* A search with known results, which new threads and a child process repeat. It is the first search there. */
typedef struct {
    const tq_index_space *space;
    const tq_index_rows *rows;
    const float *queries, *scores;
    const int64_t *ids;
    int n; /* queries */
} known_search;

static void *search_again(void *context)
{
    const known_search *known = context;
    float scores[QUERIES * K];
    int64_t ids[QUERIES * K];
    tq_error error = {0};
    for (int n = 1; n <= known->n; n++) {
        size_t found = (size_t)(n * K);
        CHECK(tq_index_search(known->space, known->queries, n, known->rows, 2, K, 1, scores, ids, 1, &error) == TQ_OK);
        CHECK(!memcmp(scores, known->scores, found * sizeof *scores) && !memcmp(ids, known->ids, found * sizeof *ids));
    }
    return NULL;
}

static void check_threads_and_forks(known_search *known)
{
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) CHECK(pthread_create(&threads[i], NULL, search_again, known) == 0);
    for (int i = 0; i < 3; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    fflush(stdout);
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        search_again(known);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
    search_again(known);
}

static uint64_t check_example(const example *e)
{
    state = e->name;
    random_state = 1;
    int32_t channels = e->channels, groups = (channels + 31) / 32;
    tq_plan plan = make_plan(channels, e->rotation);
    float *steps = zeros(sizeof *steps * (size_t)groups), *mean = numbers((size_t)e->dim);
    for (int32_t g = 0; g < groups; g++) steps[g] = e->rotation == TQ_ROTATION_DENSE ? 1 / (1 + (float)g) : 1;
    for (int32_t j = 0; j < e->dim; j++) mean[j] *= 0.02f;
    float *x = numbers((size_t)N * (size_t)e->dim), *queries = numbers((size_t)QUERIES * (size_t)e->dim);
    uint16_t *matrix = e->rotation == TQ_ROTATION_DENSE ? make_matrix(channels) : NULL;
    tq_index_space space = {
        {e->channels, e->bits, e->lead, steps}, &plan, e->dim, e->metric, 60, NULL, matrix, 0, NULL, NULL};
    if (e->with_mean) space.mean = mean;
    float *directions = numbers((size_t)((e->n_lists + 15) / 16) * 16 * (size_t)e->dim);
    float *lengths = zeros(sizeof *lengths * (size_t)e->n_lists);
    for (int32_t i = 0; i < e->n_lists; i++) lengths[i] = e->metric == TQ_INDEX_L2 ? 1 : 0.1f + 0.01f * (float)i;
    if (e->n_lists) space.n_lists = e->n_lists, space.directions = directions, space.lengths = lengths;
    float *later = exact_bytes(x + (int64_t)FIRST * e->dim, (size_t)(N - FIRST) * (size_t)e->dim);
    segment parts[2] = {make_segment(&space, x, FIRST, 5), make_segment(&space, later, N - FIRST, 4000)};
    if (!e->n_lists) check_decoded(e, &space, &parts[0], x, FIRST);
    float *scores = zeros(sizeof *scores * QUERIES * K);
    int64_t *ids = zeros(sizeof *ids * QUERIES * K), row_bytes;
    check_search(&space, parts, queries, scores, ids);
    space.sigmas = 2.5;
    tq_index_rows rows[2] = {parts[0].rows, parts[1].rows};
    tq_error error = {0};
    CHECK(tq_index_search(&space, queries, QUERIES, rows, 2, K, 1, scores, ids, 0, &error) == TQ_OK);
    check_threads_and_forks(&(known_search){&space, rows, queries, scores, ids, QUERIES});
    int32_t planes;
    CHECK(tq_index_row_bytes(&space.layout, &row_bytes, &planes, &error) == TQ_OK);
    uint64_t sum = checksum(scores, sizeof *scores * QUERIES * K);
    sum = 31 * sum + checksum(ids, sizeof *ids * QUERIES * K);
    for (int p = 0; p < 2; p++) {
        size_t n = (size_t)parts[p].rows.n;
        sum = 31 * sum + checksum(parts[p].codes, n * (size_t)row_bytes);
        sum = 31 * sum + checksum(parts[p].signs, (n + 63) / 64 * 64 * (size_t)planes);
        sum = 31 * sum + checksum(parts[p].scales, n * sizeof(float));
        if (parts[p].offsets) sum = 31 * sum + checksum(parts[p].offsets, n * sizeof(float));
    }
    x[17 * e->dim + 1] = NAN;
    CHECK(tq_index_encode(&space, x, FIRST, parts[0].lists, parts[0].codes, parts[0].signs, parts[0].scales,
                          parts[0].offsets, 0, &error) == TQ_E_VALUE);
    CHECK(error.index == 17 * e->dim + 1 && !strcmp(error.argument, "x"));
    free(directions), free(lengths), free(steps), free(mean), free(x), free(queries), free(matrix), free(later),
        free(scores), free(ids);
    free_segment(parts[0]), free_segment(parts[1]);
    return sum;
}

/** Checks that a search finds the same with and without a tail. If it reads few of many lists, it looks for them in
 *  float32 first; with a tail, even an empty one, it does not. Returns a checksum of results. */
static uint64_t check_few_of_many_lists(void)
{
    enum { DIM = 70, MANY = 72, EACH = 9, TILE = 16 };
    state = "few of many lists";
    random_state = 1;
    tq_plan plan = make_plan(72, TQ_ROTATION_HADAMARD);
    const uint8_t bits[3] = {3, 3, 3}, lead[3] = {1, 1, 1};
    const float steps[3] = {1, 1, 1};
    float *centres = numbers(MANY * DIM), *near = numbers(MANY * EACH * DIM), *queries = numbers(QUERIES * DIM);
    float *directions = zeros(sizeof *directions * (MANY + TILE - 1) / TILE * TILE * DIM), lengths[MANY];
    for (int i = 0; i < MANY; i++) {
        double squares = 0;
        for (int j = 0; j < DIM; j++) squares += (double)centres[i * DIM + j] * centres[i * DIM + j];
        for (int j = 0; j < DIM; j++) {
            centres[i * DIM + j] /= (float)sqrt(squares);
            directions[(i / TILE * DIM + j) * TILE + i % TILE] = centres[i * DIM + j];
            for (int k = 0; k < EACH; k++) {
                float *x = near + ((i * EACH + k) * DIM + j);
                *x = centres[i * DIM + j] + *x / 100;
            }
        }
        lengths[i] = 0.9f;
    }
    tq_index_space space = {{72, bits, lead, steps}, &plan, DIM, TQ_INDEX_IP, 3, NULL, NULL, MANY, directions, lengths};
    segment parts[MANY];
    tq_index_rows rows[MANY + 1];
    memset(rows, 0, sizeof rows);
    for (int i = 0; i < MANY; i++) {
        float *own = exact_bytes(near + i * EACH * DIM, EACH * DIM);
        parts[i] = make_segment(&space, own, EACH, 100 * i);
        for (int k = 0; k < EACH; k++) CHECK(parts[i].lists[k] == i);
        rows[i] = parts[i].rows;
        rows[i].lists = NULL;
        rows[i].list = i;
        free(own);
    }
    rows[MANY].lists = parts[0].lists; /* of no rows */
    float scores[QUERIES * K], known_scores[QUERIES * K];
    int64_t ids[QUERIES * K], known_ids[QUERIES * K];
    tq_error error = {0};
    for (int n = 1; n <= QUERIES; n += QUERIES - 1) {
        size_t found = (size_t)(n * K);
        CHECK(tq_index_search(&space, queries, n, rows, MANY, K, 2, scores, ids, 0, &error) == TQ_OK);
        CHECK(tq_index_search(&space, queries, n, rows, MANY + 1, K, 2, known_scores, known_ids, 0, &error) == TQ_OK);
        CHECK(!memcmp(scores, known_scores, found * sizeof *scores) && !memcmp(ids, known_ids, found * sizeof *ids));
        CHECK(ids[0] >= 0);
    }
    for (int i = 0; i < MANY; i++) free_segment(parts[i]);
    free(centres), free(near), free(queries), free(directions);
    return 31 * checksum(scores, sizeof scores) + checksum(ids, sizeof ids);
}

int main(int argc, char **argv)
{
    char list[128];
    uint64_t first = 0;
    CHECK(strlen(tq_isa_available()) < sizeof list);
    memcpy(list, tq_isa_available(), strlen(tq_isa_available()) + 1);
    for (char *name = strtok(list, " "); name; name = strtok(NULL, " ")) {
        tq_error error = {0};
        if (argc > 1 && strcmp(argv[1], name)) continue;
        CHECK(tq_set_isa(name, &error) == TQ_OK);
        for (int32_t threads = 1; threads <= 4; threads += 3) {
            uint64_t sum = 0;
            CHECK(tq_set_num_threads(threads, &error) == TQ_OK);
            for (size_t i = 0; i < sizeof EXAMPLES / sizeof *EXAMPLES; i++)
                sum = 31 * sum + check_example(&EXAMPLES[i]);
            sum = 31 * sum + check_few_of_many_lists();
            if (!first) first = sum;
            CHECK(sum == first);
        }
        printf("%s: %016llx\n", tq_isa(), (unsigned long long)first);
    }
    printf("ok\n");
    return 0;
}
