/* Search: one pass over the leading bits of all rows. Rows that may be among the best are scored from all bits at once.
 * Which rows are scored depends on the rows alone (tq_index_search), so results do not depend on the order of the
 * pass. */
#include "index_internal.h"
#include "index_pool.h"
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    BLOCK = TQ_SCAN_ROWS,
    RUN = 16,           /* blocks of a task */
    RARE = 50,          /* if at most 1 row in 50 is allowed, all are scored */
    NOTED = 16,         /* rows that are being prefetched */
    SAMPLE = 8,         /* 1 block in 8 is sampled for a first limit */
    TOGETHER = 64,      /* queries that are rotated together */
    MOST_SAMPLED = 512, /* the most rows that are scored for it */
};

typedef struct {
    tq_index_use use;
    int32_t threads;
    int rare, every;           /* rare: few rows are allowed; every: there is no bound */
    int64_t n, k, table_bytes; /* n queries */
    int64_t sampled;           /* blocks of the sample */
    const float *x;            /* queries as they were given */
    int32_t together;          /* queries that are made together: a matrix and centres are read once for all of them */
    float *workspace;          /* [threads, 2, together, padded] */
    int16_t *levels;           /* [threads, BLOCK, padded], if `every` */
    tq_index_queries queries;
    const tq_index_rows *rows; /* [n_segments] */
    int64_t n_segments;
    int64_t *first_task;   /* [n_segments + 1]: how many tasks come before each segment */
    double *values, *most; /* with lists: what each adds to scores [n, list_stride], and the largest of them [n] */
    int32_t probe;         /* lists that are taken for each query */
    int32_t *probes;       /* [n, probe], the best first */
    uint8_t *skipped;      /* [n_lists]: lists without allowed rows */
    int64_t *segment_of;   /* [n_lists]: the first segment whose rows are all of the list */
    int64_t *first_reader; /* [n_lists + 1] of readers, or NULL: all queries read all segments */
    int32_t *readers;      /* queries that read each list, ascending */
    uint8_t *gathered;     /* [threads, TQ_SCAN_QUERIES, table_bytes] */
    uint8_t *tables;       /* [n, table_bytes] */
    tq_sign_query *bounds; /* [n] */
    atomic_int refused;    /* whether a query was refused */
    pool *pools;           /* [threads, n] */
    hit *hits;             /* [threads, k]: of the query that a thread finishes */
    float *out_scores;
    int64_t *out_ids;
} scan_job;

/** Which of 8 bytes are not 0, as bits. */
static uint64_t set_bytes(const uint8_t bytes[8])
{
    uint64_t x, low = 0x7f7f7f7f7f7f7f7f;
    memcpy(&x, bytes, sizeof x);
    x = (((x & low) + low) | x) & ~low;          /* bit 7 of each byte that is not 0 */
    return (x >> 7) * 0x0102040810204080u >> 56; /* gathered in the top byte */
}

/** The rows of a block that are allowed, as bits. */
static uint64_t allowed_rows(const tq_index_rows *rows, int64_t block)
{
    int64_t first = BLOCK * block, n = rows->n - first;
    uint64_t mask = n >= BLOCK ? UINT64_MAX : ((uint64_t)1 << n) - 1, allowed = 0;
    if (!rows->allowed) return mask;
    if (n >= BLOCK)
        for (int32_t i = 0; i < BLOCK; i += 8) allowed |= set_bytes(rows->allowed + first + i) << i;
    else
        for (int32_t i = 0; i < n; i++) allowed |= (uint64_t)(rows->allowed[first + i] != 0) << i;
    return allowed;
}

/** Scales and offsets of a block, padded to the numbers that a kernel reads. */
typedef struct {
    const float *scales, *offsets;
    float inverse_scale, most_offset; /* of the largest scale */
    float padded[2][BLOCK];
} block_factors;

static void get_factors(const tq_scan_kernels *kernels, const tq_index_rows *rows, int64_t block, block_factors *out)
{
    int64_t first = BLOCK * block, n = rows->n - first;
    out->scales = rows->scales + first;
    out->offsets = rows->offsets ? rows->offsets + first : NULL;
    if (n < BLOCK) {
        for (int32_t i = 0; i < BLOCK; i++) { /* repeats the last row, which does not change the largest */
            out->padded[0][i] = out->scales[i < n ? i : n - 1];
            out->padded[1][i] = out->offsets ? out->offsets[i < n ? i : n - 1] : 0;
        }
        out->scales = out->padded[0];
        out->offsets = out->offsets ? out->padded[1] : NULL;
    }
    float most = kernels->largest(out->scales);
    out->inverse_scale = most > 0 ? 1 / most : 0;
    out->most_offset = out->offsets ? kernels->largest(out->offsets) : 0;
}

/** Sums below which no row of a block reaches the limit, slightly lowered for float32 rounding. n: blocks, at most
 *  RUN. */
static void least_sums(const block_factors *f, int32_t n, const tq_sign_query *b, float limit, uint16_t least[RUN])
{
    float sums[RUN] = {0};
    for (int32_t i = 0; i < n; i++) {
        float above = limit - f[i].most_offset; /* not above 0: any row may reach it */
        sums[i] = above > 0 ? (above * f[i].inverse_scale - b->margin) * b->inverse_unit : 0;
    }
    for (int32_t i = 0; i < RUN; i++) {
        float sum = sums[i] * (1 - 1e-5f) - 2;
        sum = sum > 0 ? sum : 0;
        least[i] = (uint16_t)(int32_t)(sum < 65535 ? sum : 65535);
    }
}

static void leading_bits(const scan_job *job, const tq_index_rows *rows, int64_t row, uint8_t *lead)
{
    const uint8_t *at = rows->signs + row / BLOCK * BLOCK * job->use.planes + row % BLOCK;
    int32_t p = 0, n = job->use.planes;
    for (; p + 4 <= n; p += 4, at += 4 * BLOCK) {
        uint8_t four[4] = {at[0], at[BLOCK], at[2 * BLOCK], at[3 * BLOCK]};
        memcpy(lead + p, four, 4);
    }
    for (; p < n; p++, at += BLOCK) lead[p] = at[0];
}

/** What the list of a row adds to its score. */
static double list_value(const scan_job *job, const tq_index_rows *rows, int64_t q, int64_t row)
{
    if (!job->values) return 0;
    return job->values[q * job->use.list_stride + (rows->lists ? rows->lists[row] : rows->list)];
}

/** A limit for scores without what lists add, slightly lowered for float32 rounding. */
static float limit_in_lists(const scan_job *job, const tq_index_rows *rows, int64_t q, float limit)
{
    if (!job->values) return limit;
    float value = (float)(rows->lists ? job->most[q] : list_value(job, rows, q, 0));
    return limit - value - 4e-7f * (fabsf(limit) + fabsf(value));
}

/** The score without the query's constant. */
static double part_of_score(const scan_job *job, const tq_index_rows *rows, int64_t q, int64_t row, const uint8_t *lead)
{
    const tq_index_use *use = &job->use;
    const int16_t *query = job->queries.q + q * use->padded;
    int32_t product = use->scan->score(&use->layout, rows->codes + row * use->row_bytes, lead, query);
    double v = job->queries.units[q] * rows->scales[row] * product;
    if (rows->offsets) v += rows->offsets[row];
    return job->values ? v + list_value(job, rows, q, row) : v;
}

static float score_of(const scan_job *job, int64_t q, double part)
{
    double v = part + job->queries.constants[q];
    if (job->use.space->metric != TQ_INDEX_L2) return (float)v;
    double distance = job->queries.squared[q] - 2 * v;
    return distance > 0 ? (float)-distance : 0.0f;
}

static void take_score(const scan_job *job, const tq_index_rows *rows, pool *p, int64_t q, int64_t row, double part,
                       float upper)
{
    if ((float)part < p->limit) return; /* k rows are better, and so are their bounds */
    int64_t id = rows->ids ? rows->ids[row] : rows->first_id + row;
    push_candidate(p, (candidate){{score_of(job, q, part), id}, upper});
    push_low(p, job->k, part < upper ? (float)part : upper);
}

static void take_row(const scan_job *job, const tq_index_rows *rows, int32_t worker, int64_t q, int64_t row,
                     float upper)
{
    uint8_t lead[TQ_INDEX_MAX_PLANES];
    leading_bits(job, rows, row, lead);
    take_score(job, rows, job->pools + worker * job->n + q, q, row, part_of_score(job, rows, q, row, lead), upper);
}

/** The smaller of a row's bounds, of which `upper` is the first. sum: of its leading bits. */
static float smaller_bound(const scan_job *job, const tq_index_rows *rows, int64_t q, int64_t row, uint16_t sum,
                           float upper)
{
    const tq_index_use *use = &job->use;
    if (!use->layout.next) return upper;
    const tq_sign_query *b = job->bounds + q;
    int32_t next =
        use->scan->next_sum(&use->layout, rows->codes + row * use->row_bytes, job->queries.q + q * use->padded);
    float both = ((float)sum * b->both_unit + (float)next * b->next_unit + b->both_margin) * rows->scales[row];
    if (rows->offsets) both += rows->offsets[row];
    if (job->values) both += (float)list_value(job, rows, q, row);
    return both < upper ? both : upper;
}

/** Rows of a run whose bounds passed, before they are scored. */
typedef struct {
    int32_t n;
    struct {
        int32_t row; /* from the first of the run */
        float upper;
        uint16_t sum; /* of its leading bits */
    } rows[NOTED + BLOCK];
} pending_rows;

/** The bound of a row's score, without the query's constant. lane: of the row in its block. */
static float upper_bound(const scan_job *job, const tq_index_rows *rows, int64_t q, int64_t row, const block_factors *f,
                         const uint16_t sums[BLOCK], int32_t lane)
{
    const tq_sign_query *b = job->bounds + q;
    float upper = ((float)sums[lane] * b->unit + b->margin) * f->scales[lane];
    if (f->offsets) upper += f->offsets[lane];
    return job->values ? upper + (float)list_value(job, rows, q, row) : upper;
}

/** Notes the rows of block `i` of a run that pass, and prefetches them. */
static void note(const scan_job *job, const tq_index_rows *rows, int64_t q, float limit, int64_t run, int64_t i,
                 uint64_t allowed, const block_factors *f, const uint16_t sums[BLOCK], pending_rows *out)
{
    const tq_sign_query *b = job->bounds + q;
    float least = limit_in_lists(job, rows, q, limit);
    uint64_t mask = allowed & job->use.scan->above(sums, f->scales, f->offsets, b->unit, b->margin, least);
    for (; mask; mask &= mask - 1) {
        int32_t lane = __builtin_ctzll(mask), row = (int32_t)(BLOCK * i) + lane;
        float upper = upper_bound(job, rows, q, RUN * BLOCK * run + row, f, sums, lane);
        if (upper < limit) continue;
        out->rows[out->n].row = row;
        out->rows[out->n].sum = sums[lane];
        out->rows[out->n++].upper = upper;
        const uint8_t *codes = rows->codes + (RUN * BLOCK * run + row) * job->use.row_bytes;
        for (int64_t at = 0; at < job->use.row_bytes; at += 64) __builtin_prefetch(codes + at);
    }
}

/** Scores the noted rows whose first and second bounds both still reach the limit. */
static void score_noted(const scan_job *job, const tq_index_rows *rows, int32_t worker, int64_t q, int64_t run,
                        pending_rows *noted)
{
    const pool *p = job->pools + worker * job->n + q;
    for (int32_t i = 0; i < noted->n; i++) {
        float upper = noted->rows[i].upper;
        int64_t row = RUN * BLOCK * run + noted->rows[i].row;
        if (upper >= p->limit) upper = smaller_bound(job, rows, q, row, noted->rows[i].sum, upper);
        if (upper >= p->limit) take_row(job, rows, worker, q, row, upper);
    }
    noted->n = 0;
}

/** The queries that read a segment. */
typedef struct {
    const int32_t *numbers; /* NULL: all, from 0 on */
    int64_t n;
} reader_list;

static int64_t blocks_of(const tq_index_rows *rows) { return (rows->n + BLOCK - 1) / BLOCK; }

static int64_t reader(const reader_list *readers, int64_t i) { return readers->numbers ? readers->numbers[i] : i; }

static reader_list readers_of(const scan_job *job, const tq_index_rows *rows)
{
    if (!job->first_reader || rows->lists) return (reader_list){NULL, job->n};
    const int64_t *first = job->first_reader + rows->list;
    return (reader_list){job->readers + first[0], first[1] - first[0]};
}

static void take_all(const scan_job *job, const tq_index_rows *rows, int32_t worker, int64_t block, uint64_t allowed)
{
    for (int64_t q = 0; q < job->n; q++)
        for (uint64_t mask = allowed; mask; mask &= mask - 1)
            take_row(job, rows, worker, q, BLOCK * block + __builtin_ctzll(mask), INFINITY);
}

/** Scores all rows of a block from all bits: their levels are unpacked once for all queries. */
static void score_block(const scan_job *job, const tq_index_rows *rows, int32_t worker, int64_t block, uint64_t allowed)
{
    const tq_index_use *use = &job->use;
    const reader_list readers = readers_of(job, rows);
    const uint8_t *signs = rows->signs + block * BLOCK * use->planes;
    int64_t first = BLOCK * block, n = rows->n - first < BLOCK ? rows->n - first : BLOCK;
    int16_t *levels = job->levels + (int64_t)worker * BLOCK * use->padded;
    uint8_t lead[BLOCK][TQ_INDEX_MAX_PLANES];
    int32_t products[BLOCK];
    for (int32_t p = 0; p < use->planes; p++)
        for (int32_t i = 0; i < BLOCK; i++) lead[i][p] = signs[p * BLOCK + i];
    for (int64_t i = 0; i < n; i++)
        use->scan->unpack(&use->layout, rows->codes + (first + i) * use->row_bytes, lead[i], levels + i * use->padded);
    for (int64_t at = 0; at < readers.n; at++) {
        int64_t q = reader(&readers, at);
        pool *p = job->pools + worker * job->n + q;
        use->scan->products(levels, use->padded, job->queries.q + q * use->padded, products);
        for (uint64_t mask = allowed; mask; mask &= mask - 1) {
            int64_t i = __builtin_ctzll(mask), row = first + i;
            double part = job->queries.units[q] * rows->scales[row] * products[i];
            if (rows->offsets) part += rows->offsets[row];
            if (job->values) part += list_value(job, rows, q, row);
            take_score(job, rows, p, q, row, part, INFINITY);
        }
    }
}

/** A task of a pass: a run of blocks of a segment. */
static const tq_index_rows *task_run(const scan_job *job, int64_t task, int64_t *run)
{
    int64_t low = 0, high = job->n_segments; /* first_task[low] <= task < first_task[high] */
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (job->first_task[middle] <= task) low = middle;
        else high = middle;
    }
    *run = task - job->first_task[low];
    return job->rows + low;
}

/** The tables of some queries, `table_bytes` apart. */
static const uint8_t *tables_of(const scan_job *job, int32_t worker, const reader_list *readers, int64_t at, int32_t n)
{
    int64_t first = reader(readers, at);
    if (reader(readers, at + n - 1) - first == n - 1) return job->tables + first * job->table_bytes;
    uint8_t *to = job->gathered + worker * TQ_SCAN_QUERIES * job->table_bytes;
    for (int32_t k = 0; k < n; k++)
        memcpy(to + k * job->table_bytes, job->tables + reader(readers, at + k) * job->table_bytes,
               (size_t)job->table_bytes);
    return to;
}

/** The rows of a run's blocks that may be among the best of `n` queries, TQ_SCAN_QUERIES or 1. */
static void scan_queries(const scan_job *job, const tq_index_rows *rows, int64_t run, int64_t blocks, int32_t worker,
                         const uint64_t allowed[RUN], const block_factors factors[RUN], const reader_list *readers,
                         int64_t at, int32_t n)
{
    const pool *pools = job->pools + worker * job->n;
    const tq_scan_kernels *kernels = job->use.scan;
    const uint8_t *signs = rows->signs + RUN * run * job->use.planes * BLOCK;
    const uint8_t *tables = tables_of(job, worker, readers, at, n);
    uint16_t sums[TQ_SCAN_QUERIES][BLOCK], least[TQ_SCAN_QUERIES][RUN], its_least[TQ_SCAN_QUERIES];
    int32_t reach;
    pending_rows noted[TQ_SCAN_QUERIES];
    for (int32_t k = 0; k < n; k++) { /* limits only rise: these stay low enough */
        int64_t q = reader(readers, at + k);
        float limit = limit_in_lists(job, rows, q, pools[q].limit);
        least_sums(factors, (int32_t)blocks, job->bounds + q, limit, least[k]);
        noted[k].n = 0;
    }
    for (int64_t i = 0; i < blocks; i++) {
        const uint8_t *block = signs + i * job->use.planes * BLOCK;
        if (!allowed[i]) continue;
        for (int32_t k = 0; k < n; k++) its_least[k] = least[k][i];
        if (n > 1) reach = kernels->sums_many(block, job->use.planes, tables, job->table_bytes, its_least, sums);
        else reach = kernels->sums(block, job->use.planes, tables, its_least[0], sums[0]);
        for (int32_t k = 0; reach >> k; k++) {
            if (!(reach >> k & 1)) continue;
            int64_t q = reader(readers, at + k);
            note(job, rows, q, pools[q].limit, run, i, allowed[i], &factors[i], sums[k], &noted[k]);
            if (noted[k].n >= NOTED) score_noted(job, rows, worker, q, run, &noted[k]);
        }
    }
    for (int32_t k = 0; k < n; k++) score_noted(job, rows, worker, reader(readers, at + k), run, &noted[k]);
}

static void scan_run(void *context, int64_t task, int32_t worker)
{
    const scan_job *job = context;
    int64_t run;
    const tq_index_rows *rows = task_run(job, task, &run);
    const reader_list readers = readers_of(job, rows);
    int64_t first = RUN * run, blocks = blocks_of(rows) - first;
    if (blocks > RUN) blocks = RUN;
    uint64_t allowed[RUN];
    block_factors factors[RUN];
    for (int64_t i = 0; i < blocks; i++) {
        allowed[i] = allowed_rows(rows, first + i);
        if (job->rare) take_all(job, rows, worker, first + i, allowed[i]);
        else if (job->every) score_block(job, rows, worker, first + i, allowed[i]);
        else get_factors(job->use.scan, rows, first + i, &factors[i]);
    }
    if (job->rare || job->every) return;
    for (int64_t at = 0, n; at < readers.n; at += n) {
        n = readers.n - at >= TQ_SCAN_QUERIES ? TQ_SCAN_QUERIES : 1;
        scan_queries(job, rows, run, blocks, worker, allowed, factors, &readers, at, (int32_t)n);
    }
}

/* ---- a first limit ---- One pass alone would score many rows that are good only among the first ones. So a sample is
 * scanned before: k lower bounds of its rows with the highest bounds give a limit for all. This only saves work: no row
 * that counts is below the limit. */

typedef struct {
    heap best[TQ_SCAN_QUERIES]; /* of upper bounds; ids are segment << 32 | row */
    hit hits[TQ_SCAN_QUERIES][MOST_SAMPLED];
    int64_t n; /* hits of each */
} sample;

static void look_at_block(const scan_job *job, int64_t q, int32_t n, int64_t segment, int64_t block, sample *out)
{
    const tq_scan_kernels *kernels = job->use.scan;
    const tq_index_rows *rows = job->rows + segment;
    const uint8_t *signs = rows->signs + block * job->use.planes * BLOCK, *tables = job->tables + q * job->table_bytes;
    uint16_t sums[TQ_SCAN_QUERIES][BLOCK], least[TQ_SCAN_QUERIES], run[RUN];
    float limits[TQ_SCAN_QUERIES]; /* of scores without what lists add */
    block_factors f;
    uint64_t allowed = allowed_rows(rows, block);
    if (!allowed) return;
    get_factors(kernels, rows, block, &f);
    for (int32_t i = 0; i < n; i++) {
        float limit = out->best[i].n == out->n ? out->hits[i][0].score : -INFINITY;
        limits[i] = limit_in_lists(job, rows, q + i, limit);
        least_sums(&f, 1, job->bounds + q + i, limits[i], run);
        least[i] = run[0];
    }
    int32_t reach = n > 1 ? kernels->sums_many(signs, job->use.planes, tables, job->table_bytes, least, sums)
                          : kernels->sums(signs, job->use.planes, tables, least[0], sums[0]);
    for (int32_t i = 0; i < n; i++) {
        const tq_sign_query *b = job->bounds + q + i;
        if (!(reach >> i & 1)) continue;
        uint64_t mask = allowed & kernels->above(sums[i], f.scales, f.offsets, b->unit, b->margin, limits[i]);
        for (; mask; mask &= mask - 1) {
            int32_t lane = __builtin_ctzll(mask);
            float upper = upper_bound(job, rows, q + i, BLOCK * block + lane, &f, sums[i], lane);
            keep(&out->best[i], out->n, (hit){upper, segment << 32 | (BLOCK * block + lane)});
        }
    }
}

/** The k-th largest lower bound of the rows in a heap, or -inf. */
static float limit_of(const scan_job *job, int64_t q, const heap *best, float *lows)
{
    pool p = {.lows = lows, .limit = -INFINITY};
    for (int64_t i = 0; i < best->n; i++) {
        const tq_index_rows *rows = job->rows + (best->hits[i].id >> 32);
        int64_t row = best->hits[i].id & UINT32_MAX;
        uint8_t lead[TQ_INDEX_MAX_PLANES];
        leading_bits(job, rows, row, lead);
        double part = part_of_score(job, rows, q, row, lead);
        uint16_t sum = tq_sign_sum(job->tables + q * job->table_bytes, job->use.planes, lead);
        float upper = smaller_bound(job, rows, q, row, sum, best->hits[i].score);
        push_low(&p, job->k, part < upper ? (float)part : upper);
    }
    return p.limit;
}

/** Blocks of the lists that are nearest to a query, 1 in 8 of those that it reads. */
static void look_at_lists(const scan_job *job, int64_t q, sample *out)
{
    const int32_t *probes = job->probes + q * job->probe;
    int64_t blocks = 0;
    for (int32_t i = 0; i < job->probe; i++) blocks += blocks_of(job->rows + job->segment_of[probes[i]]);
    int64_t left = (blocks + SAMPLE - 1) / SAMPLE;
    for (int32_t i = 0; i < job->probe && left > 0; i++) {
        int64_t s = job->segment_of[probes[i]], n = blocks_of(job->rows + s);
        for (int64_t block = 0; block < n && left > 0; block++, left--) look_at_block(job, q, 1, s, block, out);
    }
}

static void find_limits(void *context, int64_t group, int32_t worker)
{
    const scan_job *job = context;
    int64_t q = TQ_SCAN_QUERIES * group, left;
    int32_t n = job->n - q >= TQ_SCAN_QUERIES && !job->probes ? TQ_SCAN_QUERIES : 1, count = (int32_t)(job->n - q);
    float lows[MOST_SAMPLED];
    sample found;
    (void)worker;
    if (count > TQ_SCAN_QUERIES) count = TQ_SCAN_QUERIES;
    for (int64_t first = q; first < q + count; first += n) {
        found.n = job->k + 10;
        for (int32_t i = 0; i < n; i++) found.best[i] = (heap){found.hits[i], 0};
        left = job->probes ? 0 : job->sampled;
        if (job->probes) look_at_lists(job, first, &found);
        for (int64_t s = 0; left > 0; s++) {
            int64_t blocks = blocks_of(job->rows + s);
            for (int64_t block = 0; block < blocks && left > 0; block++, left--)
                look_at_block(job, first, n, s, block, &found);
        }
        for (int32_t i = 0; i < n; i++) {
            float limit = limit_of(job, first + i, &found.best[i], lows);
            for (int32_t t = 0; t < job->threads; t++) job->pools[t * job->n + first + i].limit = limit;
        }
    }
}

/** Writes the best results of all threads for query q. */
static void finish_query(void *context, int64_t q, int32_t worker)
{
    const scan_job *job = context;
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
        scores[i] = best.hits[0].score;
        ids[i] = best.hits[0].id;
        best.hits[0] = best.hits[--best.n];
        sift_down(best.hits, best.n, 0);
    }
}

/** What lists add to the scores of some queries, centred in x, and the best lists. */
static void value_lists(const scan_job *job, const float *x, int64_t first, int32_t rows)
{
    const tq_index_use *use = &job->use;
    tq_index_list_values(use, x, rows, job->values + first * use->list_stride);
    for (int64_t q = first; q < first + rows; q++) {
        double *values = job->values + q * use->list_stride, most = -INFINITY;
        if (job->probes)
            tq_index_best_lists(values, job->skipped, use->space->n_lists, job->probe, job->probes + q * job->probe);
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
    scan_job *job = context;
    const tq_index_use *use = &job->use;
    int64_t first = task * job->together;
    int32_t rows = job->n - first < job->together ? (int32_t)(job->n - first) : job->together;
    float *workspace = job->workspace + (int64_t)worker * 2 * job->together * use->padded;
    if (!tq_index_fix(use, job->x, first, rows, workspace, &job->queries)) {
        atomic_store(&job->refused, 1);
        return;
    }
    if (job->values) value_lists(job, workspace, first, rows);
    if (!job->tables) return;
    for (int64_t q = first; q < first + rows; q++)
        tq_sign_query_make(use, job->queries.q + q * use->padded, job->queries.units[q],
                           job->tables + q * job->table_bytes, &job->bounds[q]);
}

static tq_status make_queries(scan_job *job, tq_error *error)
{
    int32_t threads = job->n > 3 ? job->threads : 1; /* one query is made before another thread wakes up */
    atomic_init(&job->refused, 0);
    tq_parallel((job->n + job->together - 1) / job->together, threads, make_some, job);
    if (!atomic_load(&job->refused)) return TQ_OK;
    float centred[TQ_MAX_DIM];
    double offset, squares;
    for (int64_t q = 0;; q++)
        if (!tq_index_centre(&job->use, job->x + q * job->use.space->dim, centred, &offset, &squares)) {
            tq_index_refused(&job->use, job->x, q, error);
            if (error) error->argument = "queries";
            return TQ_E_VALUE;
        }
}

static tq_status start(scan_job *job, const tq_index_space *space, const float *x, int64_t n,
                       const tq_index_rows *segments, int64_t n_segments, int32_t threads, tq_error *error)
{
    int64_t work = 0;
    for (int64_t s = 0; s < n_segments; s++) work += segments[s].n;
    threads = tq_effective_threads(tq_threads_for(threads, work, RUN * BLOCK));
    memset(job, 0, sizeof *job);
    job->rows = segments;
    job->n_segments = n_segments;
    TQ_TRY(tq_index_begin(space, &job->use, error));
    int64_t numbers;
    TQ_TRY(tq_product(n, 2 * job->use.padded + 24, &numbers, "queries", error));
    job->n = n;
    job->x = x;
    job->threads = threads;
    job->table_bytes = 64 * tq_sign_tables(job->use.planes);
    job->queries.units = malloc((size_t)numbers + 1);
    int64_t share = space->matrix || space->n_lists ? (n + threads - 1) / threads : 1;
    job->together = share > TOGETHER ? TOGETHER : share > 1 ? (int32_t)share : 1;
    job->workspace = malloc(sizeof(float) * 2 * (size_t)threads * (size_t)job->together * (size_t)job->use.padded);
    if (space->n_lists) {
        TQ_TRY(tq_product(n, (job->use.list_stride + 1) * (int64_t)sizeof(double), &numbers, "queries", error));
        job->values = malloc((size_t)numbers + 1);
        job->most = job->values ? job->values + n * job->use.list_stride : NULL;
    }
    job->first_task = malloc(((size_t)n_segments + 1) * sizeof *job->first_task);
    if (!job->first_task || !job->queries.units || !job->workspace || (space->n_lists && !job->values))
        return tq_fail(error, TQ_E_MEMORY, "queries", -1, (double)n, "few enough for the memory there is");
    job->queries.constants = job->queries.units + n;
    job->queries.squared = job->queries.constants + n;
    job->queries.q = (int16_t *)(job->queries.squared + n);
    return TQ_OK;
}

static int64_t count_allowed(const tq_index_rows *rows)
{
    int64_t allowed = 0;
    if (!rows->allowed) return rows->n;
    for (int64_t block = 0; BLOCK * block < rows->n; block++)
        allowed += __builtin_popcountll(allowed_rows(rows, block));
    return allowed;
}

/** Whether few rows are allowed, and which lists have any. */
static tq_status look_at_rows(scan_job *job, tq_error *error)
{
    int32_t n_lists = job->use.space->n_lists, there = 0;
    int64_t all = 0, allowed = 0;
    if (n_lists) {
        job->skipped = malloc((size_t)n_lists);
        job->segment_of = malloc((size_t)n_lists * sizeof *job->segment_of);
        if (!job->skipped || !job->segment_of)
            return tq_fail(error, TQ_E_MEMORY, "n_lists", -1, n_lists, "few enough for the memory there is");
        memset(job->skipped, 1, (size_t)n_lists);
    }
    for (int64_t s = job->n_segments; s-- > 0;) {
        const tq_index_rows *rows = job->rows + s;
        int64_t own = count_allowed(rows);
        all += rows->n;
        allowed += own;
        if (!n_lists || rows->lists || !own) continue;
        there += job->skipped[rows->list];
        job->skipped[rows->list] = 0;
        job->segment_of[rows->list] = s;
    }
    job->rare = allowed <= all / RARE;
    if (job->probe > there) job->probe = there;
    return TQ_OK;
}

/** Memory for the lists that each query reads. */
static tq_status get_probes(scan_job *job, tq_error *error)
{
    int32_t n_lists = job->use.space->n_lists;
    int64_t probes;
    if (!n_lists || job->rare || !job->probe) return TQ_OK;
    TQ_TRY(tq_product(job->n, job->probe * (int64_t)sizeof(int32_t), &probes, "queries", error));
    job->probes = malloc((size_t)probes + 1);
    job->readers = malloc((size_t)probes + 1);
    job->first_reader = calloc((size_t)n_lists + 1, sizeof *job->first_reader);
    job->gathered = malloc((size_t)(job->threads * TQ_SCAN_QUERIES * job->table_bytes));
    if (!job->probes || !job->readers || !job->first_reader || !job->gathered)
        return tq_fail(error, TQ_E_MEMORY, "probe", -1, job->probe, "small enough for the memory there is");
    return TQ_OK;
}

/** Sorts queries by the lists that they read. */
static void find_readers(scan_job *job)
{
    int64_t *first = job->first_reader, n = job->n * job->probe, before = 0;
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
static int64_t find_tasks(scan_job *job)
{
    int64_t tasks = 0;
    for (int64_t s = 0; s < job->n_segments; s++) {
        job->first_task[s] = tasks;
        if (readers_of(job, job->rows + s).n) tasks += (blocks_of(job->rows + s) + RUN - 1) / RUN;
    }
    return job->first_task[job->n_segments] = tasks;
}

static void free_job(scan_job *job)
{
    int64_t pools = job->pools ? job->threads * job->n : 0;
    for (int64_t i = 0; i < pools; i++) free(job->pools[i].candidates);
    if (pools) free(job->pools[0].lows);
    free(job->pools);
    free(job->queries.units);
    free(job->workspace);
    free(job->levels);
    free(job->tables);
    free(job->bounds);
    free(job->hits);
    free(job->first_task);
    free(job->values);
    free(job->probes);
    free(job->skipped);
    free(job->segment_of);
    free(job->first_reader);
    free(job->readers);
    free(job->gathered);
}

static tq_status get_memory(scan_job *job, tq_error *error)
{
    int64_t n = job->n, pools = job->threads * n, bytes, hits, tables = 0;
    TQ_TRY(tq_product(pools, job->k * (int64_t)sizeof(float), &bytes, "k", error));
    TQ_TRY(tq_product(job->threads, job->k * (int64_t)sizeof(hit), &hits, "k", error));
    TQ_TRY(tq_product(n, job->table_bytes, &tables, "queries", error));
    int bounded = !job->rare && !job->every;
    if (job->every && !job->rare)
        job->levels = calloc((size_t)job->threads * BLOCK, sizeof(int16_t) * (size_t)job->use.padded);
    job->tables = bounded ? malloc((size_t)tables + 1) : NULL;
    job->bounds = malloc((size_t)n * sizeof *job->bounds + 1);
    job->hits = malloc((size_t)hits);
    job->pools = calloc((size_t)pools + 1, sizeof *job->pools);
    float *lows = malloc((size_t)bytes + 1);
    if (job->pools) job->pools[0].lows = lows;
    else free(lows);
    if ((bounded && !job->tables) || (job->every && !job->rare && !job->levels) || !job->bounds || !job->hits ||
        !job->pools || !lows)
        return tq_fail(error, TQ_E_MEMORY, "k", -1, (double)job->k, "small enough for the memory there is");
    for (int64_t i = 0; i < pools; i++) {
        job->pools[i].lows = lows + i * job->k;
        job->pools[i].limit = -INFINITY;
    }
    return TQ_OK;
}

static tq_status search(scan_job *job, tq_error *error)
{
    TQ_TRY(look_at_rows(job, error));
    TQ_TRY(get_probes(job, error));
    job->every = isinf(job->use.space->sigmas);
    TQ_TRY(get_memory(job, error));
    TQ_TRY(make_queries(job, error));
    if (job->probes) find_readers(job);
    int64_t all = 0;
    for (int64_t s = 0; s < job->n_segments; s++) all += blocks_of(job->rows + s);
    job->sampled = job->rare || job->every || job->k + 10 > MOST_SAMPLED ? 0 : all / SAMPLE;
    if (job->sampled > INT32_MAX / BLOCK) job->sampled = INT32_MAX / BLOCK;
    if (job->sampled > RUN)
        tq_parallel((job->n + TQ_SCAN_QUERIES - 1) / TQ_SCAN_QUERIES, job->threads, find_limits, job);
    tq_parallel(find_tasks(job), job->threads, scan_run, job);
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
    scan_job job;
    if (k < 1 || k > INT64_MAX / 64) return tq_fail(error, TQ_E_VALUE, "k", -1, (double)k, "at least 1");
    if (space->n_lists && probe < 1) return tq_fail(error, TQ_E_VALUE, "probe", -1, probe, "at least 1");
    tq_status status = start(&job, space, queries, n, segments, n_segments, threads, error);
    job.k = k;
    job.probe = probe;
    job.out_scores = scores;
    job.out_ids = ids;
    if (status == TQ_OK) status = search(&job, error);
    free_job(&job);
    return status;
}

/** Scores of a run, in out_scores [n, all rows]; out_ids holds the first row of each segment. */
static void score_run(void *context, int64_t task, int32_t worker)
{
    const scan_job *job = context;
    int64_t run;
    const tq_index_rows *rows = task_run(job, task, &run);
    const int64_t *starts = job->out_ids, start = starts[rows - job->rows], all = starts[job->n_segments];
    int64_t end = RUN * BLOCK * (run + 1) < rows->n ? RUN * BLOCK * (run + 1) : rows->n;
    uint8_t lead[TQ_INDEX_MAX_PLANES];
    (void)worker;
    for (int64_t i = RUN * BLOCK * run; i < end; i++) {
        leading_bits(job, rows, i, lead);
        for (int64_t q = 0; q < job->n; q++)
            job->out_scores[q * all + start + i] = score_of(job, q, part_of_score(job, rows, q, i, lead));
    }
}

tq_status tq_index_scores(const tq_index_space *space, const float *queries, int64_t n, const tq_index_rows *segments,
                          int64_t n_segments, float *scores, int32_t threads, tq_error *error)
{
    scan_job job;
    int64_t *starts = calloc((size_t)n_segments + 1, sizeof *starts);
    tq_status status = start(&job, space, queries, n, segments, n_segments, threads, error);
    job.out_scores = scores;
    job.out_ids = starts;
    if (status == TQ_OK && !starts)
        status = tq_fail(error, TQ_E_MEMORY, "segments", -1, (double)n_segments, "few enough for the memory there is");
    if (status == TQ_OK) status = make_queries(&job, error);
    if (status == TQ_OK) {
        for (int64_t s = 0; s < n_segments; s++) starts[s + 1] = starts[s] + segments[s].n;
        tq_parallel(find_tasks(&job), job.threads, score_run, &job);
    }
    free_job(&job);
    free(starts);
    return status;
}
