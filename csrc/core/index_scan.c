/* Search: one pass over the rows, several queries at a time, the best kept in one heap a query and thread. Every allowed row is
 * scored from all its bits, so the result is the order of (score, id) alone. */
#include "index_internal.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TILE = 32, RUN = 1024 }; /* rows that are decoded together; rows of a task */

const tq_scan_kernels *tq_get_scan_kernels(tq_error *error)
{
    const tq_kernels *kernels = tq_get_kernels(error);
    if (!kernels) return NULL;
#if defined(TQ_HAVE_AVX512_SCAN)
    if (strncmp(kernels->isa, "avx512", 6) == 0) return &tq_scan_avx512;
#endif
#if defined(TQ_HAVE_AVX2_SCAN)
    if (strncmp(kernels->isa, "avx2", 4) == 0) return &tq_scan_avx2;
#endif
#if defined(TQ_HAVE_NEON_SCAN)
    if (strncmp(kernels->isa, "neon", 4) == 0) return &tq_scan_neon;
#endif
    return &tq_scan_scalar;
}

typedef struct {
    float score;
    int64_t id;
} hit;

static int better(hit a, hit b) { return a.score > b.score || (a.score == b.score && a.id < b.id); }

/** A heap whose root is the worst of the best. */
typedef struct {
    hit *hits;
    int64_t n;
} heap;

static void sift_down(hit *hits, int64_t n, int64_t at)
{
    hit moved = hits[at];
    for (int64_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && better(hits[child], hits[child + 1])) child++;
        if (!better(moved, hits[child])) break;
        hits[at] = hits[child];
    }
    hits[at] = moved;
}

static void keep(heap *h, int64_t k, hit new_hit)
{
    if (h->n == k) {
        if (!better(new_hit, h->hits[0])) return;
        h->hits[0] = new_hit;
        sift_down(h->hits, k, 0);
        return;
    }
    int64_t at = h->n++;
    for (; at && better(h->hits[(at - 1) / 2], new_hit); at = (at - 1) / 2) h->hits[at] = h->hits[(at - 1) / 2];
    h->hits[at] = new_hit;
}

typedef struct {
    const tq_scan_kernels *kernels;
    tq_scan_layout layout;
    int32_t channels;
    int64_t row_bytes, k;
    const tq_index_queries *queries;
    const tq_index_rows *rows; /* of the segment being read */
    int16_t *levels;           /* [threads][TILE][channels] */
    heap *heaps;               /* [threads][queries], for a search */
    float *scores;             /* [queries][rows], for scores */
} scan_job;

static float score_of(const scan_job *job, int64_t q, int64_t row, int32_t product)
{
    double v = job->queries->units[q] * job->rows->scales[row] * product;
    if (job->rows->offsets) v += job->rows->offsets[row];
    v += job->queries->constants[q];
    if (!job->queries->squared) return (float)v;
    double distance = job->queries->squared[q] - 2 * v;
    return distance > 0 ? (float)-distance : 0.0f;
}

static void take(const scan_job *job, int32_t worker, int64_t q, int64_t row, int32_t product)
{
    float score = score_of(job, q, row, product);
    if (job->scores) {
        job->scores[q * job->rows->n + row] = score;
        return;
    }
    heap *h = job->heaps + worker * job->queries->n + q;
    if (h->n == job->k && score < h->hits[0].score) return;
    int64_t id = job->rows->ids ? job->rows->ids[row] : job->rows->first_id + row;
    keep(h, job->k, (hit){score, id});
}

static void scan_tile(const scan_job *job, int32_t worker, const int16_t *levels, const int64_t *rows, int32_t n)
{
    int32_t channels = job->channels;
    int64_t q = 0;
    for (; q + TQ_SCAN_QUERIES <= job->queries->n; q += TQ_SCAN_QUERIES)
        for (int32_t i = 0; i < n; i++) {
            int32_t sums[TQ_SCAN_QUERIES];
            job->kernels->products(levels + i * channels, job->queries->q + q * channels, channels, sums);
            for (int32_t k = 0; k < TQ_SCAN_QUERIES; k++) take(job, worker, q + k, rows[i], sums[k]);
        }
    for (; q < job->queries->n; q++)
        for (int32_t i = 0; i < n; i++)
            take(job, worker, q, rows[i],
                 job->kernels->product(levels + i * channels, job->queries->q + q * channels, channels));
}

static void scan_run(void *context, int64_t run, int32_t worker)
{
    const scan_job *job = context;
    const tq_index_rows *segment = job->rows;
    int64_t end = RUN * (run + 1) < segment->n ? RUN * (run + 1) : segment->n, rows[TILE];
    int16_t *levels = job->levels + (int64_t)worker * TILE * job->channels;
    int32_t n = 0;
    for (int64_t i = RUN * run; i < end; i++) {
        if (segment->allowed && !segment->allowed[i] && !job->scores) continue;
        job->kernels->unpack(&job->layout, segment->codes + i * job->row_bytes, levels + n * job->channels);
        rows[n++] = i;
        if (n < TILE) continue;
        scan_tile(job, worker, levels, rows, n);
        n = 0;
    }
    scan_tile(job, worker, levels, rows, n);
}

static tq_status start(scan_job *job, const tq_index_layout *layout, const tq_index_queries *queries, int32_t threads,
                       tq_error *error)
{
    memset(job, 0, sizeof *job);
    TQ_TRY(tq_index_row_bytes(layout, &job->row_bytes, error));
    if (!(job->kernels = tq_get_scan_kernels(error))) return TQ_E_UNSUPPORTED;
    tq_index_levels(layout, &job->layout);
    job->channels = 32 * layout->groups;
    job->queries = queries;
    for (int64_t q = 0; q < queries->n; q++) {
        int64_t sum = 0;
        for (int32_t j = 0; j < job->channels; j++) sum += abs(queries->q[q * job->channels + j]);
        if (sum > 1 << 24)
            return tq_fail(error, TQ_E_VALUE, "q", q, (double)sum, "of magnitudes that sum to at most 2^24");
    }
    job->levels = malloc(sizeof *job->levels * TILE * (size_t)job->channels * (size_t)threads);
    if (!job->levels) return tq_fail(error, TQ_E_MEMORY, "threads", -1, threads, "few enough for the memory there is");
    return TQ_OK;
}

static tq_status get_heaps(scan_job *job, int32_t threads, hit **hits, tq_error *error)
{
    int64_t heaps = threads * job->queries->n, n;
    tq_status status = tq_product(heaps, job->k * (int64_t)sizeof **hits, &n, "k", error);
    if (status != TQ_OK) return status;
    *hits = malloc(n > 0 ? (size_t)n : 1);
    job->heaps = calloc(heaps > 0 ? (size_t)heaps : 1, sizeof *job->heaps);
    if (!*hits || !job->heaps)
        return tq_fail(error, TQ_E_MEMORY, "k", -1, (double)job->k, "small enough for the memory there is");
    for (int64_t i = 0; i < heaps; i++) job->heaps[i].hits = *hits + i * job->k;
    return TQ_OK;
}

/** Merges a query's heaps into the first and empties that, worst first. */
static void finish_query(const scan_job *job, int32_t threads, int64_t q, float *scores, int64_t *ids)
{
    heap *best = job->heaps + q;
    for (int32_t t = 1; t < threads; t++) {
        const heap *other = best + t * job->queries->n;
        for (int64_t i = 0; i < other->n; i++) keep(best, job->k, other->hits[i]);
    }
    for (int64_t i = job->k; i-- > 0;) {
        scores[i] = -INFINITY;
        ids[i] = -1;
        if (i >= best->n) continue;
        scores[i] = best->hits[0].score;
        ids[i] = best->hits[0].id;
        best->hits[0] = best->hits[--best->n];
        sift_down(best->hits, best->n, 0);
    }
}

tq_status tq_index_search(const tq_index_layout *layout, const tq_index_queries *queries, const tq_index_rows *segments,
                          int64_t n_segments, int64_t k, float *scores, int64_t *ids, int32_t threads, tq_error *error)
{
    scan_job job;
    hit *hits = NULL;
    int64_t work = 0;
    for (int64_t s = 0; s < n_segments; s++) work += segments[s].n;
    if (k < 1 || k > INT64_MAX / 64) return tq_fail(error, TQ_E_VALUE, "k", -1, (double)k, "at least 1");
    threads = tq_effective_threads(tq_threads_for(threads, work, RUN));
    tq_status status = start(&job, layout, queries, threads, error);
    job.k = k;
    if (status == TQ_OK) status = get_heaps(&job, threads, &hits, error);
    for (int64_t s = 0; s < n_segments && status == TQ_OK; s++) {
        job.rows = segments + s;
        tq_parallel((segments[s].n + RUN - 1) / RUN, threads, scan_run, &job);
    }
    for (int64_t q = 0; q < queries->n && status == TQ_OK; q++)
        finish_query(&job, threads, q, scores + q * k, ids + q * k);
    free(job.levels);
    free(job.heaps);
    free(hits);
    return status;
}

tq_status tq_index_scores(const tq_index_layout *layout, const tq_index_queries *queries, const tq_index_rows *rows,
                          float *scores, int32_t threads, tq_error *error)
{
    scan_job job;
    threads = tq_effective_threads(tq_threads_for(threads, rows->n, RUN));
    tq_status status = start(&job, layout, queries, threads, error);
    job.rows = rows;
    job.scores = scores;
    if (status == TQ_OK) tq_parallel((rows->n + RUN - 1) / RUN, threads, scan_run, &job);
    free(job.levels);
    return status;
}
