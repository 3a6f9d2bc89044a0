/* Search: one pass over the leading bits of all rows. Rows that may be among the best are scored from all bits right
 * away. Which scores count depends on the rows alone (tq_index_search), so results do not depend on the order of the
 * pass. */
#include "index_scan.h"
#include <math.h>
#include <string.h>

enum {
    BLOCK = TQ_SCAN_ROWS,
    RUN = TQ_INDEX_RUN,
    NOTED = 16, /* rows that are prefetched before they are scored */
};

/** Returns which of 8 bytes are not 0, as bits. */
static uint64_t set_bytes(const uint8_t bytes[8])
{
    uint64_t x, low = 0x7f7f7f7f7f7f7f7f;
    memcpy(&x, bytes, sizeof x);
    x = (((x & low) + low) | x) & ~low;          /* bit 7 of each byte that is not 0 */
    return (x >> 7) * 0x0102040810204080u >> 56; /* gathered in the top byte */
}

/** Returns the rows of a block that are allowed, as bits. */
uint64_t tq_index_allowed(const tq_index_rows *rows, int64_t block)
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

/** Finds for each of n blocks from `first` on, at most RUN, the sum below which none of its rows reaches the limit,
 *  slightly lowered for float32 rounding. */
static void least_sums(const tq_index_rows *rows, int64_t first, int32_t n, const tq_sign_query *b, float limit,
                       uint16_t least[RUN])
{
    const float *factors = rows->factors + 2 * first;
    float sums[RUN] = {0};
    for (int32_t i = 0; i < n; i++) {
        float above = limit - factors[2 * i + 1]; /* not above 0: any row may reach it */
        sums[i] = above > 0 ? (above * factors[2 * i] - b->margin) * b->inverse_unit : 0;
    }
    for (int32_t i = 0; i < RUN; i++) {
        float sum = sums[i] * (1 - 1e-5f) - 2;
        sum = sum > 0 ? sum : 0;
        least[i] = (uint16_t)(int32_t)(sum < 65535 ? sum : 65535);
    }
}

/** Returns the allowed rows of a block whose bounds reach the limit, as bits. */
static uint64_t passing_rows(const tq_index_job *job, const tq_index_rows *rows, int64_t q, int64_t block,
                             uint64_t allowed, const uint16_t sums[BLOCK], float limit)
{
    const tq_sign_query *b = job->bounds + q;
    int64_t first = BLOCK * block, n = rows->n - first;
    const float *scales = rows->scales + first, *offsets = rows->offsets ? rows->offsets + first : NULL;
    float padded[2][BLOCK];
    if (n < BLOCK) { /* the kernel reads whole blocks */
        memset(padded, 0, sizeof padded);
        scales = memcpy(padded[0], scales, (size_t)n * sizeof *scales);
        if (offsets) offsets = memcpy(padded[1], offsets, (size_t)n * sizeof *offsets);
    }
    return allowed & job->use.scan->above(sums, scales, offsets, b->unit, b->margin, limit);
}

static void leading_bits(const tq_index_job *job, const tq_index_rows *rows, int64_t row, uint8_t *lead)
{
    const uint8_t *at = rows->signs + row / BLOCK * BLOCK * job->use.planes + row % BLOCK;
    int32_t p = 0, n = job->use.planes;
    for (; p + 4 <= n; p += 4, at += 4 * BLOCK) {
        uint8_t four[4] = {at[0], at[BLOCK], at[2 * BLOCK], at[3 * BLOCK]};
        memcpy(lead + p, four, 4);
    }
    for (; p < n; p++, at += BLOCK) lead[p] = at[0];
}

/** Returns what the list of a row adds to its score. */
static double list_value(const tq_index_job *job, const tq_index_rows *rows, int64_t q, int64_t row)
{
    if (!job->values) return 0;
    const int32_t list = rows->lists ? rows->lists[row] : rows->list, last = job->use.space->n_lists - 1;
    /* Another thread of the caller may have written to lists since they were checked. */
    return job->values[q * job->use.list_stride + ((uint32_t)list < (uint32_t)last ? list : last)];
}

/** Returns the limit for scores without what lists add, slightly lowered for float32 rounding. */
static float limit_in_lists(const tq_index_job *job, const tq_index_rows *rows, int64_t q, float limit)
{
    if (!job->values) return limit;
    float value = (float)(rows->lists ? job->most[q] : list_value(job, rows, q, 0));
    return limit - value - 4e-7f * (fabsf(limit) + fabsf(value));
}

/** Returns the score without the query's constant. */
static double part_of_score(const tq_index_job *job, const tq_index_rows *rows, int64_t q, int64_t row,
                            const uint8_t *lead)
{
    const tq_index_use *use = &job->use;
    const int16_t *query = job->queries.q + q * use->padded;
    int32_t product = use->scan->score(&use->layout, rows->codes + row * use->row_bytes, lead, query);
    double v = job->queries.units[q] * rows->scales[row] * product;
    if (rows->offsets) v += rows->offsets[row];
    return job->values ? v + list_value(job, rows, q, row) : v;
}

static float score_of(const tq_index_job *job, int64_t q, double part)
{
    double v = part + job->queries.constants[q];
    if (job->use.space->metric != TQ_INDEX_L2) return (float)v;
    double distance = job->queries.squared[q] - 2 * v;
    return distance > 0 ? (float)-distance : 0.0f;
}

static void take_score(const tq_index_job *job, const tq_index_rows *rows, pool *p, int64_t q, int64_t row, double part,
                       float upper)
{
    if ((float)part < p->limit) return; /* k rows have better scores and bounds */
    int64_t id = rows->ids ? rows->ids[row] : rows->first_id + row;
    push_candidate(p, (candidate){{score_of(job, q, part), id}, upper});
    push_low(p, job->k, part < upper ? (float)part : upper);
}

static void take_row(const tq_index_job *job, const tq_index_rows *rows, int32_t worker, int64_t q, int64_t row,
                     float upper)
{
    uint8_t lead[TQ_INDEX_MAX_PLANES];
    leading_bits(job, rows, row, lead);
    take_score(job, rows, job->pools + worker * job->n + q, q, row, part_of_score(job, rows, q, row, lead), upper);
}

/** Returns the smaller of a row's two bounds. upper: the first one; sum: of the row's leading bits. */
static float smaller_bound(const tq_index_job *job, const tq_index_rows *rows, int64_t q, int64_t row, uint16_t sum,
                           float upper)
{
    const tq_index_use *use = &job->use;
    if (!use->layout.next) return upper;
    const tq_sign_query *b = job->bounds + q;
    int32_t next =
        use->scan->next_sum(&use->layout, rows->codes + row * use->row_bytes, job->queries.q + q * use->padded);
    float both = ((float)sum * b->both_unit + (float)next * b->next_unit + b->both_margin);
    both *= rows->scales[row] * tq_index_next_factor(use->layout.even_bits, rows->scales[row]);
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

/** Returns the first bound of a row's score, without the query's constant. sums: of the row's block. */
static float upper_bound(const tq_index_job *job, const tq_index_rows *rows, int64_t q, int64_t row,
                         const uint16_t sums[BLOCK])
{
    const tq_sign_query *b = job->bounds + q;
    float upper = ((float)sums[row % BLOCK] * b->unit + b->margin) * tq_leading_scale(rows->scales[row]);
    if (rows->offsets) upper += rows->offsets[row];
    return job->values ? upper + (float)list_value(job, rows, q, row) : upper;
}

/** Notes the rows of block `i` of a run that pass, and prefetches them. */
static void note(const tq_index_job *job, const tq_index_rows *rows, int64_t q, float limit, int64_t run, int64_t i,
                 uint64_t allowed, const uint16_t sums[BLOCK], pending_rows *out)
{
    float least = limit_in_lists(job, rows, q, limit);
    uint64_t mask = passing_rows(job, rows, q, RUN * run + i, allowed, sums, least);
    for (; mask; mask &= mask - 1) {
        int32_t lane = __builtin_ctzll(mask), row = (int32_t)(BLOCK * i) + lane;
        float upper = upper_bound(job, rows, q, RUN * BLOCK * run + row, sums);
        if (upper < limit) continue;
        out->rows[out->n].row = row;
        out->rows[out->n].sum = sums[lane];
        out->rows[out->n++].upper = upper;
        const uint8_t *codes = rows->codes + (RUN * BLOCK * run + row) * job->use.row_bytes;
        for (int64_t at = 0; at < job->use.row_bytes; at += 64) __builtin_prefetch(codes + at);
    }
}

/** Scores the noted rows whose first and second bounds both still reach the limit. */
static void score_noted(const tq_index_job *job, const tq_index_rows *rows, int32_t worker, int64_t q, int64_t run,
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

static int64_t reader(const tq_index_readers *readers, int64_t i) { return readers->numbers ? readers->numbers[i] : i; }

static void take_all(const tq_index_job *job, const tq_index_rows *rows, int32_t worker, int64_t block,
                     uint64_t allowed)
{
    for (int64_t q = 0; q < job->n; q++)
        for (uint64_t mask = allowed; mask; mask &= mask - 1)
            take_row(job, rows, worker, q, BLOCK * block + __builtin_ctzll(mask), INFINITY);
}

/** Scores all rows of a block from all bits: their levels are unpacked once for all queries. */
static void score_block(const tq_index_job *job, const tq_index_rows *rows, int32_t worker, int64_t block,
                        uint64_t allowed)
{
    const tq_index_use *use = &job->use;
    const tq_index_readers readers = tq_index_readers_of(job, rows);
    const uint8_t *signs = rows->signs + block * BLOCK * use->planes;
    int64_t first = BLOCK * block, n = rows->n - first < BLOCK ? rows->n - first : BLOCK;
    int16_t *levels = job->levels + (int64_t)worker * BLOCK * use->padded;
    uint8_t lead[BLOCK][TQ_INDEX_MAX_PLANES];
    int32_t products[BLOCK];
    for (int32_t p = 0; p < use->planes; p++)
        for (int32_t i = 0; i < BLOCK; i++) lead[i][p] = signs[p * BLOCK + i];
    for (int64_t i = 0; i < n; i++)
        use->scan->unpack(&use->layout, rows->codes + (first + i) * use->row_bytes, lead[i], levels + i * use->padded);
    /* products reads all rows of a block */
    memset(levels + n * use->padded, 0, (size_t)((BLOCK - n) * use->padded) * sizeof *levels);
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

/** Returns the segment s with first[s] <= at < first[s + 1]. first: [n_segments + 1] */
static int64_t find_segment(const tq_index_job *job, const int64_t *first, int64_t at)
{
    int64_t low = 0, high = job->n_segments;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (first[middle] <= at) low = middle;
        else high = middle;
    }
    return low;
}

/** Returns the segment of a task of a pass; *run: the task's run of blocks in it. */
static const tq_index_rows *task_run(const tq_index_job *job, int64_t task, int64_t *run)
{
    int64_t segment = find_segment(job, job->first_task, task);
    *run = task - job->first_task[segment];
    return job->rows + segment;
}

/** Scans a run's blocks for the n readers from `at` on, TQ_SCAN_QUERIES or 1, and scores rows that may be among their
 *  best. */
static void scan_queries(const tq_index_job *job, const tq_index_rows *rows, int64_t run, int64_t blocks,
                         int32_t worker, const uint64_t allowed[RUN], const tq_index_readers *readers, int64_t at,
                         int32_t n)
{
    const pool *pools = job->pools + worker * job->n;
    const tq_scan_kernels *kernels = job->use.scan;
    const uint8_t *signs = rows->signs + RUN * run * job->use.planes * BLOCK;
    const uint8_t *tables[TQ_SCAN_QUERIES];
    uint16_t sums[TQ_SCAN_QUERIES][BLOCK], least[TQ_SCAN_QUERIES][RUN], its_least[TQ_SCAN_QUERIES];
    int32_t reach;
    pending_rows noted[TQ_SCAN_QUERIES];
    for (int32_t k = 0; k < n; k++) { /* limits only rise, so these stay low enough */
        int64_t q = reader(readers, at + k);
        float limit = limit_in_lists(job, rows, q, pools[q].limit);
        tables[k] = job->tables + q * job->table_bytes;
        least_sums(rows, RUN * run, (int32_t)blocks, job->bounds + q, limit, least[k]);
        noted[k].n = 0;
    }
    for (int64_t i = 0; i < blocks; i++) {
        const uint8_t *block = signs + i * job->use.planes * BLOCK;
        if (!allowed[i]) continue;
        for (int32_t k = 0; k < n; k++) its_least[k] = least[k][i];
        if (n > 1) reach = kernels->sums_many(block, job->use.planes, tables, its_least, sums);
        else reach = kernels->sums(block, job->use.planes, tables[0], its_least[0], sums[0]);
        for (int32_t k = 0; reach >> k; k++) {
            if (!(reach >> k & 1)) continue;
            int64_t q = reader(readers, at + k);
            note(job, rows, q, pools[q].limit, run, i, allowed[i], sums[k], &noted[k]);
            if (noted[k].n >= NOTED) score_noted(job, rows, worker, q, run, &noted[k]);
        }
    }
    for (int32_t k = 0; k < n; k++) score_noted(job, rows, worker, reader(readers, at + k), run, &noted[k]);
}

void tq_index_scan_run(void *context, int64_t task, int32_t worker)
{
    const tq_index_job *job = context;
    int64_t run;
    const tq_index_rows *rows = task_run(job, task, &run);
    const tq_index_readers readers = tq_index_readers_of(job, rows);
    int64_t first = RUN * run, blocks = tq_index_blocks(rows) - first;
    if (blocks > RUN) blocks = RUN;
    uint64_t allowed[RUN];
    for (int64_t i = 0; i < blocks; i++) {
        allowed[i] = tq_index_allowed(rows, first + i);
        if (job->rare) take_all(job, rows, worker, first + i, allowed[i]);
        else if (job->every) score_block(job, rows, worker, first + i, allowed[i]);
    }
    if (job->rare || job->every) return;
    for (int64_t at = 0, n; at < readers.n; at += n) {
        n = readers.n - at >= TQ_SCAN_QUERIES ? TQ_SCAN_QUERIES : 1;
        scan_queries(job, rows, run, blocks, worker, allowed, &readers, at, (int32_t)n);
    }
}

/* ---- a first limit ---- One pass alone would score many rows that are good only among the first ones. So a sample is
 * scanned before. The k-th largest lower bound of its rows with the highest upper bounds is the first limit. This only
 * saves work: no row that counts is below it. */

typedef struct {
    heap best[TQ_SCAN_QUERIES]; /* of upper bounds; ids are segment << 32 | row */
    hit hits[TQ_SCAN_QUERIES][TQ_INDEX_SAMPLED];
    int64_t n; /* hits of each */
} sample;

static void look_at_block(const tq_index_job *job, int64_t q, int32_t n, int64_t segment, int64_t block, sample *out)
{
    const tq_scan_kernels *kernels = job->use.scan;
    const tq_index_rows *rows = job->rows + segment;
    const uint8_t *signs = rows->signs + block * job->use.planes * BLOCK, *tables[TQ_SCAN_QUERIES];
    uint16_t sums[TQ_SCAN_QUERIES][BLOCK], least[TQ_SCAN_QUERIES], run[RUN];
    float limits[TQ_SCAN_QUERIES]; /* of scores without what lists add */
    uint64_t allowed = tq_index_allowed(rows, block);
    if (!allowed) return;
    for (int32_t i = 0; i < n; i++) {
        float limit = out->best[i].n == out->n ? (float)out->hits[i][0].score : -INFINITY;
        limits[i] = limit_in_lists(job, rows, q + i, limit);
        tables[i] = job->tables + (q + i) * job->table_bytes;
        least_sums(rows, block, 1, job->bounds + q + i, limits[i], run);
        least[i] = run[0];
    }
    int32_t reach = n > 1 ? kernels->sums_many(signs, job->use.planes, tables, least, sums)
                          : kernels->sums(signs, job->use.planes, tables[0], least[0], sums[0]);
    for (int32_t i = 0; i < n; i++) {
        if (!(reach >> i & 1)) continue;
        uint64_t mask = passing_rows(job, rows, q + i, block, allowed, sums[i], limits[i]);
        for (; mask; mask &= mask - 1) {
            int64_t row = BLOCK * block + __builtin_ctzll(mask);
            keep(&out->best[i], out->n, (hit){upper_bound(job, rows, q + i, row, sums[i]), segment << 32 | row});
        }
    }
}

/** Returns the k-th largest lower bound of the rows in a heap, or -inf. */
static float limit_of(const tq_index_job *job, int64_t q, const heap *best, float *lows)
{
    pool p = {.lows = lows, .limit = -INFINITY};
    for (int64_t i = 0; i < best->n; i++) {
        const tq_index_rows *rows = job->rows + (best->hits[i].id >> 32);
        int64_t row = best->hits[i].id & UINT32_MAX;
        uint8_t lead[TQ_INDEX_MAX_PLANES];
        leading_bits(job, rows, row, lead);
        double part = part_of_score(job, rows, q, row, lead);
        uint16_t sum = tq_sign_sum(job->tables + q * job->table_bytes, job->use.planes, lead);
        float upper = smaller_bound(job, rows, q, row, sum, (float)best->hits[i].score);
        push_low(&p, job->k, part < upper ? (float)part : upper);
    }
    return p.limit;
}

/** Looks at blocks of the lists nearest to a query: 1 in 8 of the blocks that it reads. */
static void look_at_lists(const tq_index_job *job, int64_t q, sample *out)
{
    const int32_t *probes = job->probes + q * job->probe;
    int64_t blocks = 0;
    for (int32_t i = 0; i < job->probe; i++) blocks += tq_index_blocks(job->rows + job->segment_of[probes[i]]);
    int64_t left = (blocks + TQ_INDEX_SAMPLE - 1) / TQ_INDEX_SAMPLE;
    for (int32_t i = 0; i < job->probe && left > 0; i++) {
        int64_t s = job->segment_of[probes[i]], n = tq_index_blocks(job->rows + s);
        for (int64_t block = 0; block < n && left > 0; block++, left--) look_at_block(job, q, 1, s, block, out);
    }
}

void tq_index_find_limits(void *context, int64_t group, int32_t worker)
{
    const tq_index_job *job = context;
    int64_t q = TQ_SCAN_QUERIES * group, left;
    int32_t n = job->n - q >= TQ_SCAN_QUERIES && !job->probes ? TQ_SCAN_QUERIES : 1, count = (int32_t)(job->n - q);
    float lows[TQ_INDEX_SAMPLED];
    sample found;
    (void)worker;
    if (count > TQ_SCAN_QUERIES) count = TQ_SCAN_QUERIES;
    for (int64_t first = q; first < q + count; first += n) {
        found.n = job->k + 10;
        for (int32_t i = 0; i < n; i++) found.best[i] = (heap){found.hits[i], 0};
        left = job->probes ? 0 : job->sampled;
        if (job->probes) look_at_lists(job, first, &found);
        for (int64_t s = 0; left > 0; s++) {
            int64_t blocks = tq_index_blocks(job->rows + s);
            for (int64_t block = 0; block < blocks && left > 0; block++, left--)
                look_at_block(job, first, n, s, block, &found);
        }
        for (int32_t i = 0; i < n; i++) {
            float limit = limit_of(job, first + i, &found.best[i], lows);
            for (int32_t t = 0; t < job->threads; t++) job->pools[t * job->n + first + i].limit = limit;
        }
    }
}

void tq_index_score_run(void *context, int64_t task, int32_t worker)
{
    const tq_index_job *job = context;
    int64_t run;
    const tq_index_rows *rows = task_run(job, task, &run);
    int64_t start = job->first_row[rows - job->rows], all = job->first_row[job->n_segments];
    int64_t end = RUN * BLOCK * (run + 1) < rows->n ? RUN * BLOCK * (run + 1) : rows->n;
    uint8_t lead[TQ_INDEX_MAX_PLANES];
    (void)worker;
    for (int64_t i = RUN * BLOCK * run; i < end; i++) {
        leading_bits(job, rows, i, lead);
        for (int64_t q = 0; q < job->n; q++)
            job->out_scores[q * all + start + i] = score_of(job, q, part_of_score(job, rows, q, i, lead));
    }
}

/** Returns the segment of *row, and changes *row to the row's number in it. */
static const tq_index_rows *segment_of(const tq_index_job *job, int64_t *row)
{
    int64_t segment = find_segment(job, job->first_row, *row);
    *row -= job->first_row[segment];
    return job->rows + segment;
}

void tq_index_score_wanted(void *context, int64_t query, int32_t worker)
{
    enum { AHEAD = 8 };
    const tq_index_job *job = context;
    const int64_t *wanted = job->wanted + query * job->m;
    uint8_t lead[TQ_INDEX_MAX_PLANES];
    (void)worker;
    for (int64_t i = 0; i < job->m + AHEAD; i++) {
        int64_t row = i < job->m ? wanted[i] : -1, late = i < AHEAD ? -1 : wanted[i - AHEAD];
        if (row >= 0) {
            const tq_index_rows *rows = segment_of(job, &row);
            for (int64_t at = 0; at < job->use.row_bytes; at += 64)
                __builtin_prefetch(rows->codes + row * job->use.row_bytes + at);
        }
        if (i < AHEAD) continue;
        float *score = job->out_scores + query * job->m + i - AHEAD;
        *score = -INFINITY;
        if (late < 0) continue;
        const tq_index_rows *rows = segment_of(job, &late);
        leading_bits(job, rows, late, lead);
        *score = score_of(job, query, part_of_score(job, rows, query, late, lead));
    }
}
