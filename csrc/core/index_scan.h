/* The state of a search, or of a call for the scores of rows. index_search.c sets it up, index_scan.c reads rows. */
#ifndef TQ_INDEX_SCAN_H
#define TQ_INDEX_SCAN_H
#include "index_internal.h"
#include <stdatomic.h>

enum {
    TQ_INDEX_RUN = 16,      /* blocks of a task */
    TQ_INDEX_SAMPLE = 8,    /* 1 block in 8 is sampled for a first limit */
    TQ_INDEX_SAMPLED = 512, /* the most rows that are scored for it */
};

typedef struct {
    tq_index_use use;
    void *memory; /* of all arrays that are not the caller's */
    int32_t threads;
    int rare, every;           /* rare: few rows are allowed; every: there is no bound */
    int64_t n, k, table_bytes; /* n queries; k: 0 where scores of rows are wanted */
    int64_t sampled;           /* blocks of the sample */
    const float *x;            /* queries as they were given */
    int32_t together;          /* queries that are converted together: a matrix and centres are read once for them */
    float *workspace;          /* [threads, 2, together, padded] */
    int16_t *levels;           /* [threads, TQ_INDEX_BLOCK, padded], if `every` */
    tq_index_queries queries;
    const tq_index_rows *rows; /* [n_segments] */
    int64_t n_segments;
    int64_t *first_task;   /* [n_segments + 1]: how many tasks come before each segment */
    double *values, *most; /* with lists: what each adds to scores [n, list_stride], and the largest of them [n] */
    int32_t probe;         /* lists that each query reads */
    int near;              /* whether only the lists that a query reads have values, and `most` has none */
    int32_t *probes;       /* [n, probe], the best first; NULL: all queries read all segments */
    uint8_t *skipped;      /* [n_lists]: lists without allowed rows */
    hit *best_lists;       /* [min(threads, n), probe]: of the query that a thread makes */
    int64_t *segment_of;   /* [n_lists]: the first segment whose rows are all of the list */
    int64_t *first_reader; /* [n_lists + 1]: the first of each list in `readers` */
    int32_t *readers;      /* queries that read each list, ascending */
    uint8_t *tables;       /* [n, table_bytes], or NULL */
    tq_sign_query *bounds; /* [n] */
    atomic_int refused;    /* whether a query was refused */
    pool *pools;           /* [threads, n] */
    float *lows;           /* [threads, n, k], of the pools */
    candidate *candidates; /* [threads, n, room], the initial arrays of the pools */
    int64_t room;
    hit *hits;             /* [threads, k]: of the query that a thread finishes */
    float *out_scores;     /* [n, k], or [n, m], or [n, all rows] */
    int64_t *out_ids;      /* [n, k] */
    int64_t *first_row;    /* [n_segments + 1]: how many rows come before each segment; where scores are wanted */
    const int64_t *wanted; /* [n, m]: the rows whose scores are wanted, or NULL: all */
    int64_t m;
} tq_index_job;

static inline int64_t tq_index_blocks(const tq_index_rows *rows)
{
    return (rows->n + TQ_INDEX_BLOCK - 1) / TQ_INDEX_BLOCK;
}

/** The queries that read a segment. */
typedef struct {
    const int32_t *numbers; /* NULL: all, from 0 on */
    int64_t n;
} tq_index_readers;

static inline tq_index_readers tq_index_readers_of(const tq_index_job *job, const tq_index_rows *rows)
{
    if (!job->probes || rows->lists) return (tq_index_readers){NULL, job->n};
    const int64_t *first = job->first_reader + rows->list;
    return (tq_index_readers){job->readers + first[0], first[1] - first[0]};
}

/** Returns the rows of a block that are allowed, as bits. */
uint64_t tq_index_allowed(const tq_index_rows *rows, int64_t block);

/* Tasks for tq_parallel; context: the job. */

/** Finds a first limit for TQ_SCAN_QUERIES queries from a sample of the rows. */
void tq_index_find_limits(void *context, int64_t task, int32_t worker);
/** Reads a run of blocks for all queries that read its segment. */
void tq_index_scan_run(void *context, int64_t task, int32_t worker);
/** Scores all rows of a run, for all queries. */
void tq_index_score_run(void *context, int64_t task, int32_t worker);
/** Scores the wanted rows of a query. */
void tq_index_score_wanted(void *context, int64_t query, int32_t worker);
#endif
