/* The lists of an index: which list a vector belongs to, and which a query reads. Rules: turboquant_index.h. */
#include "index_internal.h"
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

void tq_index_list_values(const tq_index_use *use, const float *x, int32_t rows, double *values)
{
    const tq_index_space *space = use->space;
    int64_t tile = (int64_t)space->dim * TQ_INDEX_CENTRES;
    for (int64_t i = 0; i < use->list_stride; i += TQ_INDEX_CENTRES)
        use->scan->values(space->directions + i / TQ_INDEX_CENTRES * tile, space->dim, x, rows, use->padded,
                          space->metric == TQ_INDEX_L2, values + i, use->list_stride);
}

/** Returns the value of one list, the same bits as from tq_index_list_values. Not for l2. */
static double value_of(const tq_index_space *space, const float *x, int32_t list)
{
    const float *own = space->directions + (int64_t)(list / TQ_INDEX_CENTRES) * space->dim * TQ_INDEX_CENTRES;
    double sum = 0;
    own += list % TQ_INDEX_CENTRES;
    for (int32_t j = 0; j < space->dim; j++) sum += (double)own[TQ_INDEX_CENTRES * j] * (double)x[j];
    return sum;
}

/** Finds the n best lists. Computes exact values only for lists that the rough values do not rule out. */
static int32_t best_by_rough(const tq_index_use *use, const float *x, double *values, const uint8_t *skipped, int32_t n,
                             hit *hits, int32_t *lists)
{
    const tq_index_space *space = use->space;
    double squares = 0;
    int32_t count = tq_index_best_lists(values, skipped, space->n_lists, n, hits, lists);
    if (!count) return 0;
    for (int32_t j = 0; j < space->dim; j++) squares += (double)x[j] * x[j];
    double wrong = (space->dim + 2) * 0x1p-24 * 1.001 * sqrt(squares) + 1e-30; /* |c| is 1, to rounding */
    double least = values[lists[count - 1]] - 2 * wrong;
    for (int32_t list = 0; list < space->n_lists; list++)
        values[list] = values[list] >= least && !(skipped && skipped[list]) ? value_of(space, x, list) : -INFINITY;
    return tq_index_best_lists(values, skipped, space->n_lists, n, hits, lists);
}

void tq_index_near_lists(const tq_index_use *use, const float *x, int32_t rows, const uint8_t *skipped, int32_t n,
                         double *values, hit *hits, int32_t *lists)
{
    use->scan->rough_values(use->space->directions, (int32_t)(use->list_stride / TQ_INDEX_CENTRES), use->space->dim, x,
                            rows, use->padded, values, use->list_stride);
    for (int32_t r = 0; r < rows; r++, values += use->list_stride, lists += n)
        best_by_rough(use, x + (int64_t)r * use->padded, values, skipped, n, hits, lists);
}

void tq_index_centre_on_list(const tq_index_use *use, const float *x, int32_t list, float *centred, double *offset,
                             double *squares, float *centre)
{
    const tq_index_space *space = use->space;
    const float *own = space->directions + (int64_t)(list / TQ_INDEX_CENTRES) * space->dim * TQ_INDEX_CENTRES;
    own += list % TQ_INDEX_CENTRES;
    for (int32_t j = 0; j < space->dim; j++) centre[j] = own[TQ_INDEX_CENTRES * j] * space->lengths[list];
    for (int32_t j = space->dim; j < use->padded; j++) centre[j] = 0;
    use->scan->centre(x, centre, use->padded, 0, centred, offset, squares);
}

int32_t tq_index_best_lists(const double *values, const uint8_t *skipped, int32_t n_lists, int32_t n, hit *hits,
                            int32_t *lists)
{
    heap best = {hits, 0};
    for (int32_t list = 0; list < n_lists; list++)
        if (!skipped || !skipped[list]) keep(&best, n, (hit){values[list], list});
    int32_t count = (int32_t)best.n;
    for (int32_t i = count; i-- > 0;) lists[i] = (int32_t)take_worst(&best).id;
    return count;
}

typedef struct {
    tq_index_use use;
    const float *x;
    int64_t n;
    int32_t *lists;
    float *workspace;       /* [threads, 64, padded] */
    double *values;         /* [threads, 64, list_stride] */
    atomic_llong first_bad; /* the first row that is refused, or n */
} assign_job;

static void assign_block(void *context, int64_t block, int32_t worker)
{
    assign_job *job = context;
    const tq_index_use *use = &job->use;
    int64_t first = TQ_INDEX_BLOCK * block;
    int32_t rows = job->n - first < TQ_INDEX_BLOCK ? (int32_t)(job->n - first) : TQ_INDEX_BLOCK;
    float *x = job->workspace + (int64_t)worker * TQ_INDEX_BLOCK * use->padded;
    double *values = job->values + worker * TQ_INDEX_BLOCK * use->list_stride, offset, squares;
    for (int32_t i = 0; i < rows; i++)
        if (!tq_index_centre(use, job->x + (first + i) * use->space->dim, x + (int64_t)i * use->padded, &offset,
                             &squares)) {
            long long bad = first + i, known = atomic_load(&job->first_bad);
            while (bad < known && !atomic_compare_exchange_weak(&job->first_bad, &known, bad)) {}
            return;
        }
    tq_index_list_values(use, x, rows, values);
    for (int32_t i = 0; i < rows; i++) {
        const double *own = values + i * use->list_stride;
        int32_t best = 0;
        for (int32_t list = 1; list < use->space->n_lists; list++) best = own[list] > own[best] ? list : best;
        job->lists[first + i] = best;
    }
}

tq_status tq_index_assign(const tq_index_space *space, const float *x, int64_t n, int32_t *lists, int32_t threads,
                          tq_error *error)
{
    assign_job job = {.x = x, .n = n, .lists = lists};
    TQ_TRY(tq_index_begin(space, &job.use, error));
    if (!space->n_lists) return tq_refuse(error, "n_lists", 0, "above 0");
    threads = tq_effective_threads(tq_threads_for(threads, n, TQ_INDEX_BLOCK));
    size_t rows = (size_t)threads * TQ_INDEX_BLOCK;
    job.workspace = malloc(sizeof(float) * rows * (size_t)job.use.padded);
    job.values = malloc(sizeof(double) * rows * (size_t)job.use.list_stride);
    atomic_init(&job.first_bad, n);
    tq_status status = TQ_OK;
    if (job.workspace && job.values)
        tq_parallel((n + TQ_INDEX_BLOCK - 1) / TQ_INDEX_BLOCK, threads, assign_block, &job);
    else status = tq_fail(error, TQ_E_MEMORY, "threads", -1, threads, "few enough for the memory there is");
    int64_t bad = atomic_load(&job.first_bad);
    if (status == TQ_OK && bad < n) status = tq_index_refused(&job.use, x, bad, error);
    free(job.workspace);
    free(job.values);
    return status;
}
