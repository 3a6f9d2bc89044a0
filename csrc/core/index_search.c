/* A search: its memory, its queries, the pass over the rows (index_scan.c), and what the threads found, together. */
#include "index_memory.h"
#include "index_scan.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    RARE = 50,                 /* if at most 1 row in 50 is allowed, all are scored */
    TOGETHER = 64,             /* queries that are rotated together */
    NEAR = 32,                 /* if at most 1 list in 32 is read, rough values first take less time */
    CANDIDATE_BYTES = 1 << 20, /* initial candidates of all pools; pools that need more allocate */
    LEAST_ROOM = 16,           /* initial candidates of a pool */
    MOST_ROOM = 1024,
};

/** Writes the best results of all threads for query q. */
static void finish_query(void *context, int64_t q, int32_t worker)
{
    const tq_index_job *job = context;
    pool *all = job->pools + q;
    heap best = {job->hits + worker * job->k, 0};
    for (int32_t t = 1; t < job->threads; t++) {
        const pool *other = all + t * job->n;
        for (int64_t i = 0; i < other->n_lows; i++) push_low(all, job->k, other->lows[i]);
    }
    for (int32_t t = 0; t < job->threads; t++) {
        const pool *p = all + t * job->n;
        for (int64_t i = 0; i < p->n; i++)
            if (p->candidates[i].upper >= all->limit) keep(&best, job->k, p->candidates[i].hit);
    }
    float *scores = job->out_scores + q * job->k;
    int64_t *ids = job->out_ids + q * job->k;
    for (int64_t i = job->k; i-- > 0;) {
        scores[i] = -INFINITY;
        ids[i] = -1;
        if (i >= best.n) continue;
        hit worst = take_worst(&best);
        scores[i] = (float)worst.score;
        ids[i] = worst.id;
    }
}

/** Finds what lists add to the scores of some queries, whose centred vectors are x, and the best lists. */
static void value_lists(const tq_index_job *job, const float *x, int64_t first, int32_t rows, int32_t worker)
{
    const tq_index_use *use = &job->use;
    hit *hits = job->probes ? job->best_lists + (int64_t)worker * job->probe : NULL;
    if (job->near) {
        tq_index_near_lists(use, x, rows, job->skipped, job->probe, job->values + first * use->list_stride, hits,
                            job->probes + first * job->probe);
        for (int64_t q = first; q < first + rows; q++)
            for (int32_t i = 0; i < job->probe; i++) {
                int32_t list = job->probes[q * job->probe + i];
                job->values[q * use->list_stride + list] *= use->space->lengths[list];
            }
        return;
    }
    tq_index_list_values(use, x, rows, job->values + first * use->list_stride);
    for (int64_t q = first; q < first + rows; q++) {
        double *values = job->values + q * use->list_stride, most = -INFINITY;
        if (job->probes)
            tq_index_best_lists(values, job->skipped, use->space->n_lists, job->probe, hits,
                                job->probes + q * job->probe);
        for (int32_t list = 0; list < use->space->n_lists; list++) {
            values[list] = values[list] * use->space->lengths[list] - job->queries.squared[q] / 2;
            if (values[list] > most) most = values[list];
        }
        job->most[q] = most;
        job->queries.squared[q] = 0;
    }
}

/** Converts `together` queries to fixed point and, if there are tables, fills them. */
static void make_some(void *context, int64_t task, int32_t worker)
{
    tq_index_job *job = context;
    const tq_index_use *use = &job->use;
    int64_t first = task * job->together;
    int32_t rows = job->n - first < job->together ? (int32_t)(job->n - first) : job->together;
    float *workspace = job->workspace + (int64_t)worker * 2 * job->together * use->padded;
    if (!tq_index_fix(use, job->x, first, rows, workspace, &job->queries)) {
        atomic_store(&job->refused, 1);
        return;
    }
    if (job->values) value_lists(job, workspace, first, rows, worker);
    if (!job->tables) return;
    for (int64_t q = first; q < first + rows; q++)
        tq_sign_query_make(use, job->queries.q + q * use->padded, job->queries.units[q],
                           job->tables + q * job->table_bytes, &job->bounds[q]);
}

static tq_status make_queries(tq_index_job *job, tq_error *error)
{
    int32_t threads = job->n > 3 ? job->threads : 1; /* one query is made before another thread wakes up */
    atomic_init(&job->refused, 0);
    tq_parallel((job->n + job->together - 1) / job->together, threads, make_some, job);
    if (!atomic_load(&job->refused)) return TQ_OK;
    float centred[TQ_MAX_DIM];
    double offset, squares;
    for (int64_t q = 0; q < job->n; q++)
        if (!tq_index_centre(&job->use, job->x + q * job->use.space->dim, centred, &offset, &squares)) {
            tq_index_refused(&job->use, job->x, q, error);
            if (error) error->argument = "queries";
            return TQ_E_VALUE;
        }
    return tq_refuse(error, "queries", 0, "left alone during the call");
}

/** Gives each array its place. Called without memory first, then with it. */
static void place_arrays(tq_index_job *job, tq_index_arrays *arrays)
{
    int64_t n = job->n, threads = job->threads, padded = job->use.padded, n_lists = job->use.space->n_lists;
    job->first_task = tq_index_array(arrays, job->n_segments + 1, 1, sizeof *job->first_task);
    job->workspace = tq_index_array(arrays, threads * 2 * job->together, padded, sizeof *job->workspace);
    job->queries.q = tq_index_array(arrays, n, padded, sizeof *job->queries.q);
    job->queries.units = tq_index_array(arrays, n, 1, sizeof *job->queries.units);
    job->queries.constants = tq_index_array(arrays, n, 1, sizeof *job->queries.constants);
    job->queries.squared = tq_index_array(arrays, n, 1, sizeof *job->queries.squared);
    if (n_lists) {
        job->values = tq_index_array(arrays, n, job->use.list_stride, sizeof *job->values);
        job->most = tq_index_array(arrays, n, 1, sizeof *job->most);
    }
    if (!job->k) {
        job->first_row = tq_index_array(arrays, job->n_segments + 1, 1, sizeof *job->first_row);
        return;
    }
    if (n_lists) {
        job->skipped = tq_index_array(arrays, n_lists, 1, 1);
        job->best_lists = tq_index_array(arrays, n < threads ? n : threads, job->probe, sizeof *job->best_lists);
        job->segment_of = tq_index_array(arrays, n_lists, 1, sizeof *job->segment_of);
        job->probes = tq_index_array(arrays, n, job->probe, sizeof *job->probes);
        job->readers = tq_index_array(arrays, n, job->probe, sizeof *job->readers);
        job->first_reader = tq_index_array(arrays, n_lists + 1, 1, sizeof *job->first_reader);
    }
    if (job->every) job->levels = tq_index_array(arrays, threads * TQ_INDEX_BLOCK, padded, sizeof *job->levels);
    else job->tables = tq_index_array(arrays, n, job->table_bytes, 1);
    job->bounds = tq_index_array(arrays, n, 1, sizeof *job->bounds);
    job->hits = tq_index_array(arrays, threads, job->k, sizeof *job->hits);
    job->pools = tq_index_array(arrays, threads, n, sizeof *job->pools);
    job->lows = tq_index_array(arrays, threads * n, job->k, sizeof *job->lows);
    job->candidates = tq_index_array(arrays, threads * n, job->room, sizeof *job->candidates);
}

static void make_pools(tq_index_job *job)
{
    for (int64_t i = 0; i < job->threads * job->n; i++) {
        candidate *first = job->candidates + i * job->room;
        job->pools[i] = (pool){
            .lows = job->lows + i * job->k, .candidates = first, .first = first, .room = job->room, .limit = -INFINITY};
    }
}

/** Sets up a job and its memory. k: 0 where scores of rows are wanted. */
static tq_status start(tq_index_job *job, const tq_index_space *space, const float *x, int64_t n,
                       const tq_index_rows *segments, int64_t n_segments, int64_t k, int32_t probe, int32_t threads,
                       tq_error *error)
{
    int64_t work = 0;
    for (int64_t s = 0; s < n_segments; s++) work += segments[s].n;
    threads = tq_effective_threads(tq_threads_for(threads, work, TQ_INDEX_RUN * TQ_INDEX_BLOCK));
    *job = (tq_index_job){.rows = segments, .n_segments = n_segments, .x = x, .n = n, .k = k, .threads = threads};
    TQ_TRY(tq_index_begin(space, &job->use, error));
    int64_t share = space->matrix || space->n_lists ? (n + threads - 1) / threads : 1;
    job->together = share > TOGETHER ? TOGETHER : share > 1 ? (int32_t)share : 1;
    job->table_bytes = 64 * tq_sign_tables(job->use.planes);
    job->every = isinf(space->sigmas);
    job->probe = probe < space->n_lists ? probe : space->n_lists;
    job->room = CANDIDATE_BYTES / (int64_t)sizeof(candidate) / (threads * (n + 1)); /* n + 1: n may be 0 */
    job->room = job->room < LEAST_ROOM ? LEAST_ROOM : job->room > MOST_ROOM ? MOST_ROOM : job->room;
    tq_index_arrays arrays = {0};
    place_arrays(job, &arrays);
    if (!arrays.overflow) arrays.memory = job->memory = tq_index_borrow(arrays.bytes);
    if (!arrays.memory) {
        const char *name = n < k ? "k" : "queries";
        return tq_fail(error, TQ_E_MEMORY, name, -1, (double)(n < k ? k : n), "few enough for the memory there is");
    }
    arrays.bytes = 0;
    place_arrays(job, &arrays);
    if (k) make_pools(job);
    return TQ_OK;
}

static void finish(tq_index_job *job)
{
    for (int64_t i = 0; job->memory && job->k && i < job->threads * job->n; i++) free_candidates(&job->pools[i]);
    tq_index_return(job->memory);
}

static int64_t count_allowed(const tq_index_rows *rows)
{
    int64_t allowed = 0;
    if (!rows->allowed) return rows->n;
    for (int64_t block = 0; TQ_INDEX_BLOCK * block < rows->n; block++)
        allowed += __builtin_popcountll(tq_index_allowed(rows, block));
    return allowed;
}

/** Finds whether few rows are allowed, and which lists have any. */
static void look_at_rows(tq_index_job *job)
{
    int32_t n_lists = job->use.space->n_lists, there = 0;
    int64_t all = 0, allowed = 0, tails = 0;
    if (n_lists) memset(job->skipped, 1, (size_t)n_lists);
    for (int64_t s = job->n_segments; s-- > 0;) {
        const tq_index_rows *rows = job->rows + s;
        int64_t own = count_allowed(rows);
        all += rows->n;
        allowed += own;
        tails += rows->lists != NULL;
        if (!n_lists || rows->lists || !own) continue;
        there += job->skipped[rows->list];
        job->skipped[rows->list] = 0;
        job->segment_of[rows->list] = s;
    }
    job->rare = allowed <= all / RARE;
    if (job->probe > there) job->probe = there;
    if (job->rare || !job->probe) job->probes = NULL;
    job->near = job->probes && !tails && job->use.space->metric != TQ_INDEX_L2 && NEAR * job->probe <= n_lists;
    if (job->rare) job->tables = NULL;
}

/** Sorts queries by the lists that they read. */
static void find_readers(tq_index_job *job)
{
    int64_t *first = job->first_reader, n = job->n * job->probe, before = 0;
    memset(first, 0, ((size_t)job->use.space->n_lists + 1) * sizeof *first);
    for (int64_t i = 0; i < n; i++) first[job->probes[i]]++;
    for (int32_t list = 0; list <= job->use.space->n_lists; list++) {
        int64_t own = first[list];
        first[list] = before;
        before += own;
    }
    for (int64_t i = 0; i < n; i++) job->readers[first[job->probes[i]]++] = (int32_t)(i / job->probe);
    for (int32_t list = job->use.space->n_lists; list > 0; list--) first[list] = first[list - 1]; /* ends to starts */
    first[0] = 0;
}

/** Returns how many tasks there are. */
static int64_t find_tasks(tq_index_job *job)
{
    int64_t tasks = 0;
    for (int64_t s = 0; s < job->n_segments; s++) {
        job->first_task[s] = tasks;
        if (tq_index_readers_of(job, job->rows + s).n)
            tasks += (tq_index_blocks(job->rows + s) + TQ_INDEX_RUN - 1) / TQ_INDEX_RUN;
    }
    return job->first_task[job->n_segments] = tasks;
}

static tq_status search(tq_index_job *job, tq_error *error)
{
    if (!job->use.planes) return tq_refuse(error, "lead", 0, "above 0 in a group, for a search");
    look_at_rows(job);
    TQ_TRY(make_queries(job, error));
    if (job->probes) find_readers(job);
    int64_t all = 0;
    for (int64_t s = 0; s < job->n_segments; s++) all += tq_index_blocks(job->rows + s);
    job->sampled = job->rare || job->every || job->k + 10 > TQ_INDEX_SAMPLED ? 0 : all / TQ_INDEX_SAMPLE;
    if (job->sampled > INT32_MAX / TQ_INDEX_BLOCK) job->sampled = INT32_MAX / TQ_INDEX_BLOCK;
    if (job->sampled > TQ_INDEX_RUN)
        tq_parallel((job->n + TQ_SCAN_QUERIES - 1) / TQ_SCAN_QUERIES, job->threads, tq_index_find_limits, job);
    tq_parallel(find_tasks(job), job->threads, tq_index_scan_run, job);
    for (int64_t i = 0; i < job->threads * job->n; i++)
        if (job->pools[i].failed)
            return tq_fail(error, TQ_E_MEMORY, "queries", -1, (double)job->n, "few enough for the memory there is");
    tq_parallel(job->n, job->threads, finish_query, job);
    return TQ_OK;
}

tq_status tq_index_search(const tq_index_space *space, const float *queries, int64_t n, const tq_index_rows *segments,
                          int64_t n_segments, int64_t k, int32_t probe, float *scores, int64_t *ids, int32_t threads,
                          tq_error *error)
{
    tq_index_job job;
    if (k < 1 || k > INT64_MAX / 64) return tq_refuse(error, "k", k, "at least 1");
    if (space->n_lists && probe < 1) return tq_refuse(error, "probe", probe, "at least 1");
    tq_status status = start(&job, space, queries, n, segments, n_segments, k, probe, threads, error);
    job.out_scores = scores;
    job.out_ids = ids;
    if (status == TQ_OK) status = search(&job, error);
    finish(&job);
    return status;
}

/** Computes the scores of the wanted rows, or of all. */
static tq_status score(tq_index_job *job, tq_error *error)
{
    TQ_TRY(make_queries(job, error));
    job->first_row[0] = 0;
    for (int64_t s = 0; s < job->n_segments; s++) job->first_row[s + 1] = job->first_row[s] + job->rows[s].n;
    if (job->wanted) tq_parallel(job->n, job->threads, tq_index_score_wanted, job);
    else tq_parallel(find_tasks(job), job->threads, tq_index_score_run, job);
    return TQ_OK;
}

tq_status tq_index_scores_of(const tq_index_space *space, const float *queries, int64_t n,
                             const tq_index_rows *segments, int64_t n_segments, const int64_t *rows, int64_t m,
                             float *scores, int32_t threads, tq_error *error)
{
    tq_index_job job;
    tq_status status = start(&job, space, queries, n, segments, n_segments, 0, 1, threads, error);
    job.wanted = rows;
    job.m = m;
    job.out_scores = scores;
    if (status == TQ_OK) status = score(&job, error);
    finish(&job);
    return status;
}

tq_status tq_index_scores(const tq_index_space *space, const float *queries, int64_t n, const tq_index_rows *segments,
                          int64_t n_segments, float *scores, int32_t threads, tq_error *error)
{
    return tq_index_scores_of(space, queries, n, segments, n_segments, NULL, 0, scores, threads, error);
}
