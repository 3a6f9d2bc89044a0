/* Search. One pass over the leading bits of all rows; those that may be among the best are scored from all bits at once. What is kept
 * depends on nothing but the rows (tq_index_search), so neither do the results on the order of the pass. */
#include "index_internal.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    BLOCK = TQ_SCAN_ROWS,
    RUN = 16,   /* blocks of a task */
    RARE = 50,  /* one allowed row in so many is rare */
    NOTED = 16, /* rows that wait for their memory */
};

const tq_scan_kernels *tq_get_scan_kernels(tq_error *error)
{
    const tq_kernels *kernels = tq_get_kernels(error);
    if (!kernels) return NULL;
#if defined(TQ_HAVE_AVX512_VNNI_SCAN)
    if (strcmp(kernels->isa, "avx512_vnni") == 0 || strcmp(kernels->isa, "avx512_amx") == 0)
        return &tq_scan_avx512_vnni;
#endif
#if defined(TQ_HAVE_AVX512_SCAN)
    if (strcmp(kernels->isa, "avx512") == 0) return &tq_scan_avx512;
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
    hit hit;
    float upper;
} candidate;

/** What one thread found for one query. */
typedef struct {
    float *lows; /* the k largest lower bounds, the least first, as a heap */
    int64_t n_lows, n, room;
    candidate *candidates;
    float limit; /* of upper bounds: the k-th largest lower bound so far */
    int failed;  /* no memory */
} pool;

typedef struct {
    const tq_scan_kernels *kernels;
    tq_scan_layout layout;
    int32_t channels, planes, threads, segment; /* the segment being read */
    int rare;
    int64_t row_bytes, k, table_bytes;
    const tq_index_queries *queries;
    const tq_index_rows *rows; /* all segments */
    uint8_t *tables;           /* [queries, table_bytes] */
    tq_sign_query *bounds;     /* [queries] */
    pool *pools;               /* [threads, queries] */
    hit *hits;                 /* [threads, k]: of the query that a thread finishes */
    float *scores, *out_scores;
    int64_t *out_ids;
} scan_job;

static void push_low(pool *p, int64_t k, float low)
{
    float *lows = p->lows;
    int64_t at = 0;
    if (p->n_lows < k) {
        for (at = p->n_lows++; at && lows[(at - 1) / 2] > low; at = (at - 1) / 2) lows[at] = lows[(at - 1) / 2];
    } else {
        if (low <= lows[0]) return;
        for (int64_t child; (child = 2 * at + 1) < k; at = child) {
            if (child + 1 < k && lows[child + 1] < lows[child]) child++;
            if (low <= lows[child]) break;
            lows[at] = lows[child];
        }
    }
    lows[at] = low;
    if (p->n_lows == k) p->limit = lows[0];
}

/** Room for one more: candidates that fell below the limit go first. */
static int make_room(pool *p)
{
    int64_t n = 0;
    for (int64_t i = 0; i < p->n; i++)
        if (p->candidates[i].upper >= p->limit) p->candidates[n++] = p->candidates[i];
    p->n = n;
    if (2 * n < p->room) return 1;
    int64_t room = p->room ? 2 * p->room : 256;
    candidate *larger = realloc(p->candidates, (size_t)room * sizeof *larger);
    if (!larger) {
        p->failed = 1;
        return 0;
    }
    p->candidates = larger;
    p->room = room;
    return 1;
}

static void push_candidate(pool *p, candidate c)
{
    if (p->n < p->room || make_room(p)) p->candidates[p->n++] = c;
}

/** The rows of a block that are allowed, as bits. */
static uint64_t allowed_rows(const tq_index_rows *rows, int64_t block)
{
    int64_t first = BLOCK * block, n = rows->n - first;
    uint64_t mask = n >= BLOCK ? UINT64_MAX : ((uint64_t)1 << n) - 1;
    if (!rows->allowed) return mask;
    uint64_t allowed = 0;
    for (int32_t i = 0; i < (n < BLOCK ? (int32_t)n : BLOCK); i++)
        allowed |= (uint64_t)(rows->allowed[first + i] != 0) << i;
    return allowed & mask;
}

/** scales and offsets of a block, with as many numbers as a kernel reads. */
typedef struct {
    const float *scales, *offsets;
    float padded[2][BLOCK];
} block_factors;

static void get_factors(const tq_index_rows *rows, int64_t block, block_factors *out)
{
    int64_t first = BLOCK * block, n = rows->n - first;
    out->scales = rows->scales + first;
    out->offsets = rows->offsets ? rows->offsets + first : NULL;
    if (n >= BLOCK) return;
    memset(out->padded, 0, sizeof out->padded);
    memcpy(out->padded[0], out->scales, (size_t)n * sizeof(float));
    if (out->offsets) memcpy(out->padded[1], out->offsets, (size_t)n * sizeof(float));
    out->scales = out->padded[0];
    out->offsets = out->offsets ? out->padded[1] : NULL;
}

static void unpack_row(const scan_job *job, const tq_index_rows *rows, int64_t row, int16_t *levels)
{
    uint8_t signs[TQ_MAX_DIM / 8];
    const uint8_t *at = rows->signs + row / BLOCK * BLOCK * job->planes + row % BLOCK;
    for (int32_t p = 0; p < job->planes; p++) signs[p] = at[p * BLOCK];
    job->kernels->unpack(&job->layout, rows->codes + row * job->row_bytes, signs, levels);
}

/** The score but for the query's constant. */
static double part_of_score(const scan_job *job, const tq_index_rows *rows, int64_t q, int64_t row,
                            const int16_t *levels)
{
    int32_t product = job->kernels->product(levels, job->queries->q + q * job->channels, job->channels);
    double v = job->queries->units[q] * rows->scales[row] * product;
    return rows->offsets ? v + rows->offsets[row] : v;
}

static float score_of(const scan_job *job, int64_t q, double part)
{
    double v = part + job->queries->constants[q];
    if (!job->queries->squared) return (float)v;
    double distance = job->queries->squared[q] - 2 * v;
    return distance > 0 ? (float)-distance : 0.0f;
}

static void take_row(const scan_job *job, int32_t worker, int64_t q, int64_t row, float upper)
{
    const tq_index_rows *rows = job->rows + job->segment;
    pool *p = job->pools + worker * job->queries->n + q;
    int16_t levels[TQ_MAX_DIM];
    unpack_row(job, rows, row, levels);
    double part = part_of_score(job, rows, q, row, levels);
    int64_t id = rows->ids ? rows->ids[row] : rows->first_id + row;
    push_candidate(p, (candidate){{score_of(job, q, part), id}, upper});
    push_low(p, job->k, part < upper ? (float)part : upper);
}

/** Rows of a run whose bounds passed, before they are scored. */
typedef struct {
    int32_t n;
    struct {
        int32_t row; /* from the first of the run */
        float upper;
    } rows[NOTED + BLOCK];
} pending_rows;

/** Notes the rows of block `i` of a run that pass, and asks for their memory. */
static void note(const scan_job *job, const pool *p, const tq_sign_query *b, int64_t run, int64_t i, uint64_t allowed,
                 const block_factors *f, const uint16_t sums[BLOCK], pending_rows *out)
{
    const tq_index_rows *rows = job->rows + job->segment;
    uint64_t mask = allowed & job->kernels->above(sums, f->scales, f->offsets, b->unit, b->margin, p->limit);
    for (; mask; mask &= mask - 1) {
        int32_t lane = __builtin_ctzll(mask), row = (int32_t)(BLOCK * i) + lane;
        float upper = ((float)sums[lane] * b->unit + b->margin) * f->scales[lane];
        if (f->offsets) upper += f->offsets[lane];
        out->rows[out->n].row = row;
        out->rows[out->n++].upper = upper;
        const uint8_t *codes = rows->codes + (RUN * BLOCK * run + row) * job->row_bytes;
        for (int64_t at = 0; at < job->row_bytes; at += 64) __builtin_prefetch(codes + at);
    }
}

/** Scores what was noted, unless the limit has risen above it. */
static void score_noted(const scan_job *job, int32_t worker, int64_t q, int64_t run, pending_rows *noted)
{
    const pool *p = job->pools + worker * job->queries->n + q;
    for (int32_t i = 0; i < noted->n; i++)
        if (noted->rows[i].upper >= p->limit)
            take_row(job, worker, q, RUN * BLOCK * run + noted->rows[i].row, noted->rows[i].upper);
    noted->n = 0;
}

static void take_all(const scan_job *job, int32_t worker, int64_t block, uint64_t allowed)
{
    for (int64_t q = 0; q < job->queries->n; q++)
        for (uint64_t mask = allowed; mask; mask &= mask - 1)
            take_row(job, worker, q, BLOCK * block + __builtin_ctzll(mask), INFINITY);
}

static void scan_run(void *context, int64_t run, int32_t worker)
{
    const scan_job *job = context;
    const tq_index_rows *rows = job->rows + job->segment;
    int64_t first = RUN * run, blocks = (rows->n + BLOCK - 1) / BLOCK - first, q = 0;
    if (blocks > RUN) blocks = RUN;
    uint64_t allowed[RUN];
    block_factors factors[RUN];
    for (int64_t i = 0; i < blocks; i++) {
        allowed[i] = allowed_rows(rows, first + i);
        if (job->rare) take_all(job, worker, first + i, allowed[i]);
        else get_factors(rows, first + i, &factors[i]);
    }
    if (job->rare) return;
    const uint8_t *signs = rows->signs + first * job->planes * BLOCK;
    const pool *pools = job->pools + worker * job->queries->n;
    uint16_t sums[TQ_SCAN_QUERIES][BLOCK];
    pending_rows noted[TQ_SCAN_QUERIES];
    for (int32_t n; q < job->queries->n; q += n) {
        n = job->queries->n - q >= TQ_SCAN_QUERIES ? TQ_SCAN_QUERIES : 1;
        const uint8_t *tables = job->tables + q * job->table_bytes;
        for (int32_t k = 0; k < n; k++) noted[k].n = 0;
        for (int64_t i = 0; i < blocks; i++) {
            const uint8_t *block = signs + i * job->planes * BLOCK;
            if (!allowed[i]) continue;
            if (n > 1) job->kernels->sums_many(block, job->planes, tables, job->table_bytes, sums);
            else job->kernels->sums(block, job->planes, tables, sums[0]);
            for (int32_t k = 0; k < n; k++) {
                note(job, pools + q + k, job->bounds + q + k, run, i, allowed[i], &factors[i], sums[k], &noted[k]);
                if (noted[k].n >= NOTED) score_noted(job, worker, q + k, run, &noted[k]);
            }
        }
        for (int32_t k = 0; k < n; k++) score_noted(job, worker, q + k, run, &noted[k]);
    }
}

/** Writes the best of what all threads found for query q. */
static void finish_query(void *context, int64_t q, int32_t worker)
{
    const scan_job *job = context;
    pool *all = job->pools + q;
    heap best = {job->hits + worker * job->k, 0};
    for (int32_t t = 1; t < job->threads; t++) {
        const pool *other = all + t * job->queries->n;
        for (int64_t i = 0; i < other->n_lows; i++) push_low(all, job->k, other->lows[i]);
    }
    for (int32_t t = 0; t < job->threads; t++) {
        const pool *p = all + t * job->queries->n;
        for (int64_t i = 0; i < p->n; i++)
            if (p->candidates[i].upper >= all->limit) keep(&best, job->k, p->candidates[i].hit);
    }
    float *scores = job->out_scores + q * job->k;
    int64_t *ids = job->out_ids + q * job->k;
    for (int64_t i = job->k; i-- > 0;) {
        scores[i] = -INFINITY;
        ids[i] = -1;
        if (i >= best.n) continue;
        scores[i] = best.hits[0].score;
        ids[i] = best.hits[0].id;
        best.hits[0] = best.hits[--best.n];
        sift_down(best.hits, best.n, 0);
    }
}

static tq_status start(scan_job *job, const tq_index_layout *layout, const tq_index_queries *queries, tq_error *error)
{
    memset(job, 0, sizeof *job);
    TQ_TRY(tq_index_row_bytes(layout, &job->row_bytes, &job->planes, error));
    if (!(job->kernels = tq_get_scan_kernels(error))) return TQ_E_UNSUPPORTED;
    tq_index_levels(layout, &job->layout);
    job->channels = 32 * layout->groups;
    job->table_bytes = 64 * tq_sign_tables(job->planes);
    job->queries = queries;
    for (int64_t q = 0; q < queries->n; q++) {
        int64_t sum = 0;
        for (int32_t j = 0; j < job->channels; j++) sum += abs(queries->q[q * job->channels + j]);
        if (sum > 1 << 24)
            return tq_fail(error, TQ_E_VALUE, "q", q, (double)sum, "of magnitudes that sum to at most 2^24");
    }
    return TQ_OK;
}

static int is_rare(const tq_index_rows *segments, int64_t n_segments)
{
    int64_t all = 0, allowed = 0;
    for (int64_t s = 0; s < n_segments; s++) {
        all += segments[s].n;
        if (!segments[s].allowed) allowed += segments[s].n;
        else
            for (int64_t i = 0; i < segments[s].n; i++) allowed += segments[s].allowed[i] != 0;
    }
    return allowed <= all / RARE;
}

static void free_job(scan_job *job)
{
    int64_t pools = job->pools ? job->threads * job->queries->n : 0;
    for (int64_t i = 0; i < pools; i++) free(job->pools[i].candidates);
    if (pools) free(job->pools[0].lows);
    free(job->pools);
    free(job->tables);
    free(job->bounds);
    free(job->hits);
}

static tq_status get_memory(scan_job *job, tq_error *error)
{
    int64_t n = job->queries->n, pools = job->threads * n, bytes, hits, tables;
    TQ_TRY(tq_product(pools, job->k * (int64_t)sizeof(float), &bytes, "k", error));
    TQ_TRY(tq_product(job->threads, job->k * (int64_t)sizeof(hit), &hits, "k", error));
    TQ_TRY(tq_product(n, job->table_bytes, &tables, "queries", error));
    job->tables = malloc((size_t)tables + 1);
    job->bounds = malloc((size_t)n * sizeof *job->bounds + 1);
    job->hits = malloc((size_t)hits);
    job->pools = calloc((size_t)pools + 1, sizeof *job->pools);
    float *lows = malloc((size_t)bytes + 1);
    if (job->pools) job->pools[0].lows = lows;
    else free(lows);
    if (!job->tables || !job->bounds || !job->hits || !job->pools || !lows)
        return tq_fail(error, TQ_E_MEMORY, "k", -1, (double)job->k, "small enough for the memory there is");
    for (int64_t i = 0; i < pools; i++) {
        job->pools[i].lows = lows + i * job->k;
        job->pools[i].limit = -INFINITY;
    }
    return TQ_OK;
}

static void make_query(void *context, int64_t q, int32_t worker)
{
    const scan_job *job = context;
    (void)worker;
    tq_sign_query_make(job->layout.layout, job->queries->q + q * job->channels, job->queries->units[q],
                       job->tables + q * job->table_bytes, &job->bounds[q]);
}

static tq_status search(scan_job *job, int64_t n_segments, tq_error *error)
{
    TQ_TRY(get_memory(job, error));
    job->rare = is_rare(job->rows, n_segments);
    tq_parallel(job->rare ? 0 : job->queries->n, job->threads, make_query, job);
    for (job->segment = 0; job->segment < n_segments; job->segment++) {
        int64_t blocks = (job->rows[job->segment].n + BLOCK - 1) / BLOCK;
        tq_parallel((blocks + RUN - 1) / RUN, job->threads, scan_run, job);
    }
    for (int64_t i = 0; i < job->threads * job->queries->n; i++)
        if (job->pools[i].failed)
            return tq_fail(error, TQ_E_MEMORY, "queries", -1, (double)job->queries->n,
                           "few enough for the memory there is");
    tq_parallel(job->queries->n, job->threads, finish_query, job);
    return TQ_OK;
}

tq_status tq_index_search(const tq_index_layout *layout, const tq_index_queries *queries, const tq_index_rows *segments,
                          int64_t n_segments, int64_t k, float *scores, int64_t *ids, int32_t threads, tq_error *error)
{
    scan_job job;
    int64_t work = 0;
    if (k < 1 || k > INT64_MAX / 64) return tq_fail(error, TQ_E_VALUE, "k", -1, (double)k, "at least 1");
    for (int64_t s = 0; s < n_segments; s++) work += segments[s].n;
    TQ_TRY(start(&job, layout, queries, error));
    job.threads = tq_effective_threads(tq_threads_for(threads, work, RUN * BLOCK));
    job.rows = segments;
    job.k = k;
    job.out_scores = scores;
    job.out_ids = ids;
    tq_status status = search(&job, n_segments, error);
    free_job(&job);
    return status;
}

static void score_run(void *context, int64_t run, int32_t worker)
{
    const scan_job *job = context;
    int64_t n = job->rows->n, end = RUN * BLOCK * (run + 1) < n ? RUN * BLOCK * (run + 1) : n;
    int16_t levels[TQ_MAX_DIM];
    (void)worker;
    for (int64_t i = RUN * BLOCK * run; i < end; i++) {
        unpack_row(job, job->rows, i, levels);
        for (int64_t q = 0; q < job->queries->n; q++) {
            job->scores[q * n + i] = score_of(job, q, part_of_score(job, job->rows, q, i, levels));
        }
    }
}

tq_status tq_index_scores(const tq_index_layout *layout, const tq_index_queries *queries, const tq_index_rows *rows,
                          float *scores, int32_t threads, tq_error *error)
{
    scan_job job;
    TQ_TRY(start(&job, layout, queries, error));
    job.rows = rows;
    job.scores = scores;
    threads = tq_effective_threads(tq_threads_for(threads, rows->n, RUN * BLOCK));
    tq_parallel((rows->n + RUN * BLOCK - 1) / (RUN * BLOCK), threads, score_run, &job);
    return TQ_OK;
}
