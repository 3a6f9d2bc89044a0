/* tq_attend's arguments: checks, the cut into tasks, and the layout of workspace. */
#include "attend.h"

#define LEAST_WORK (1 << 18) /* the fewest products of a key number and a query number that a thread gets */
#define SPLIT_PAGES 4        /* the fewest pages of a split, at full length */

/* ---- tasks ---- */

static int32_t ceil_div(int64_t a, int64_t b) { return (int32_t)((a + b - 1) / b); }

void tq_attend_lay_out(attend_job *job)
{
    const tq_attend_params *a = job->a;
    job->heads_per_kv = a->layer.kv_heads ? a->query_heads / a->layer.kv_heads : 1;
    job->chunks = ceil_div((int64_t)job->heads_per_kv * a->query_tokens, CHUNK_ROWS);
    int64_t tasks = (int64_t)a->layer.batch * a->layer.kv_heads * job->chunks;
    int64_t tokens = tq_capacity(job->plan, &a->layer); /* of a sequence, at most */
    double work = (double)tokens * a->layer.batch * a->query_heads * a->query_tokens * job->plan->head_dim;
    job->threads = tq_threads_for(a->threads, work < 1e15 ? (int64_t)work : (int64_t)1e15, LEAST_WORK);
    int32_t wanted = tasks ? ceil_div(job->threads, tasks) : 1,
            possible = a->layer.max_pages / SPLIT_PAGES > 1 ? a->layer.max_pages / SPLIT_PAGES : 1;
    job->splits = wanted < possible ? wanted : possible;
    tq_list_groups(&job->plan->key, &job->key_groups);
    tq_list_groups(&job->plan->value, &job->value_groups);
    if (!tq_is_plain(job->plan)) {
        job->query_operand_bytes = (int64_t)sizeof(float) * TQ_TILE * job->key_groups.n;
    } else {
        job->query_operand_bytes = (int64_t)job->kernels->operand_bytes(TQ_TILE * job->key_groups.n);
        job->weight_operand_bytes = (int64_t)job->kernels->operand_bytes(job->plan->page_tokens);
        tq_key_tiles(job->plan, &job->key_groups, job->key_tiles);
        tq_value_tiles(job->plan, &job->value_groups, job->value_tiles);
    }
    job->precise = a->layer.dtype == TQ_F32 || tq_tile_is_16(job->plan);
    int64_t rows = (int64_t)job->heads_per_kv * a->query_tokens;
    job->chunk_rows = rows < CHUNK_ROWS ? (int32_t)rows : CHUNK_ROWS;
    int64_t tasks_in_flight = tasks * job->splits;
    if (tasks_in_flight < job->threads) job->threads = tasks_in_flight > 1 ? (int32_t)tasks_in_flight : 1;
}

/* ---- workspace ---- */

/** Returns the next array of a worker's workspace, 64-byte aligned; NULL without `base`. */
static void *take(uint8_t *base, int64_t *at, int64_t bytes)
{
    uint8_t *array = base ? base + *at : NULL;
    *at += tq_round_up(bytes, 64);
    return array;
}

/** Lays out a worker's workspace at `base` (NULL: finds only its size). Returns its bytes. */
static int64_t cut(const attend_job *job, uint8_t *base, attend_work *w)
{
    int64_t rows = job->chunk_rows, d = job->plan->head_dim, padded = TQ_TILE * (int64_t)job->plan->groups, at = 0;
    int64_t nv = TQ_TILE * (int64_t)job->value_groups.n, f = sizeof(float);
    int64_t tiles = job->key_groups.n > job->value_groups.n ? job->key_groups.n : job->value_groups.n;
    w->query_operands = take(base, &at, rows * job->query_operand_bytes);
    w->weight_operands = take(base, &at, rows * job->weight_operand_bytes);
    w->q = take(base, &at, rows * d * f);
    w->scores = take(base, &at, rows * job->plan->page_tokens * f);
    w->packed = take(base, &at, rows * nv * f);
    w->exact = take(base, &at, rows * d * f);
    w->tile_k = take(base, &at, TQ_TILE * d * f);
    w->tile_v = take(base, &at, TQ_TILE * d * f);
    w->rotated = take(base, &at, padded * f);
    w->coded = take(base, &at, padded * f);
    w->merged = take(base, &at, (nv + d) * f);
    w->scales = take(base, &at, 2 * job->plan->page_tokens * f);
    w->logits = take(base, &at, rows * (int64_t)sizeof(tq_logit));
    w->states = take(base, &at, rows * (int64_t)sizeof(tq_softmax_state));
    w->visible = take(base, &at, job->plan->page_tokens);
    w->decoded = take(base, &at, tq_is_plain(job->plan) ? 0 : TQ_TILE * TQ_TILE * tiles * f);
    w->wave_rows = take(base, &at, rows * tq_wave_turn_floats(job->plan) * f);
    return at;
}

static int64_t worker_bytes(const attend_job *job)
{
    attend_work unused;
    return cut(job, NULL, &unused);
}

static int64_t partial_floats(const attend_job *job)
{
    return 4 + TQ_TILE * (int64_t)job->value_groups.n + job->plan->head_dim;
}

/** Returns the bytes of workers and partial rows. */
static int64_t bytes_of_rows(const attend_job *job)
{
    int64_t tasks = (int64_t)job->a->layer.batch * job->a->layer.kv_heads * job->chunks * job->splits;
    int64_t partials = job->splits > 1 ? tasks * job->chunk_rows * partial_floats(job) * (int64_t)sizeof(float) : 0;
    return job->threads * worker_bytes(job) + tq_round_up(partials, 64);
}

int64_t tq_attend_bytes(const attend_job *job)
{
    int64_t floats = tq_wave_table_floats(job->plan) + tq_wave_node_floats(job->plan) +
                     job->a->layer.max_pages * tq_wave_turn_floats(job->plan);
    return bytes_of_rows(job) + floats * (int64_t)sizeof(float) + 64;
}

int64_t tq_attend_bytes_bound(const attend_job *job)
{
    attend_job most = *job;
    int64_t floats = tq_wave_table_floats(job->plan) + tq_wave_node_floats(job->plan) +
                     job->a->layer.max_pages * tq_wave_turn_floats(job->plan);
    most.threads = tq_threads_for(job->a->threads, INT64_MAX, 1); /* as in tq_attend_lay_out, for any work */
    /* Tasks are split only if they are fewer than the threads, and then into at most two parts for each thread. */
    int64_t partials = 2 * (int64_t)most.threads * job->chunk_rows * partial_floats(job) * (int64_t)sizeof(float);
    return most.threads * worker_bytes(&most) + tq_round_up(partials, 64) + floats * (int64_t)sizeof(float) + 64;
}

float *tq_attend_wave(const attend_job *job) { return (float *)(job->workspace + bytes_of_rows(job)); }

attend_work tq_attend_carve(const attend_job *job, int32_t worker)
{
    attend_work w;
    cut(job, job->workspace + worker * worker_bytes(job), &w);
    return w;
}

float *tq_attend_partial(const attend_job *job, int64_t task, int32_t row)
{
    float *partials = (float *)(job->workspace + job->threads * worker_bytes(job));
    return partials + (task * job->chunk_rows + row) * partial_floats(job);
}

tq_status tq_attend_workspace_bytes(const tq_plan *plan, const tq_attend_params *params, size_t *bytes, tq_error *error)
{
    TQ_TRY(tq_check_attend_sizes(plan, params, error));
    if (!bytes) return tq_refuse(error, "bytes", 0, "a pointer, not NULL");
    attend_job job = {.plan = plan, .a = params, .kernels = tq_get_kernels(error)};
    if (!job.kernels) return TQ_E_UNSUPPORTED;
    tq_attend_lay_out(&job);
    *bytes = (size_t)tq_attend_bytes(&job);
    return TQ_OK;
}

tq_status tq_attend_workspace_bound(const tq_plan *plan, const tq_attend_params *params, size_t *bytes, tq_error *error)
{
    TQ_TRY(tq_attend_workspace_bytes(plan, params, bytes, error));
    attend_job job = {.plan = plan, .a = params, .kernels = tq_get_kernels(error)};
    tq_attend_lay_out(&job);
    *bytes = (size_t)tq_attend_bytes_bound(&job);
    return TQ_OK;
}

/* ---- checks ---- */

/** Checks a sequence's length, start, end and rows, and the table entries that its packed tokens need. */
static tq_status check_sequence(const tq_plan *plan, const tq_attend_params *a, int32_t b, tq_error *error)
{
    const tq_layer *l = &a->layer;
    const int32_t queries = tq_new_tokens_of(a->query_start_loc, a->query_tokens, b).tokens;
    int64_t length = l->lengths[b];
    if (a->query_start_loc && !queries) return TQ_OK; /* padding */
    if (length < 0 || length > tq_capacity(plan, l))
        return tq_fail(error, TQ_E_VALUE, "lengths", b, (double)length,
                       tq_is_indexed(l) ? "in 0..max_pages * page_tokens"
                                        : "in 0..sinks + window + max_pages * page_tokens");
    if (length) TQ_TRY(tq_check_rows(l, b, error));
    if (a->causal && a->query_tokens > 1 && tq_unpacked_window(l) && !a->fresh_k &&
        length > (int64_t)a->layer.sinks + a->layer.window)
        return tq_refuse(error, "q", a->query_tokens,
                         "of one token a sequence: with a window, several causal queries need append_attend "
                         "(operators: fresh_k)");
    if (a->starts && (a->starts[b] < 0 || a->starts[b] > length))
        return tq_fail(error, TQ_E_VALUE, "starts", b, a->starts[b], "in 0..lengths");
    if (a->ends && (a->ends[b] < 0 || a->ends[b] > length))
        return tq_fail(error, TQ_E_VALUE, "ends", b, a->ends[b], "in 0..lengths");
    int64_t sinks = tq_unpacked_sinks(l), first = 0, packed = length - sinks - tq_unpacked_window(l);
    if (tq_is_indexed(l)) {
        tq_in_pages in = tq_positions_in_pages(plan, l, b);
        first = in.first / plan->page_tokens, packed = in.last > in.first ? in.last : 0;
    }
    if (a->ends && a->ends[b] - sinks < packed) packed = a->ends[b] - sinks;
    for (int64_t page = first; page * plan->page_tokens < packed; page++) {
        int64_t i = (int64_t)b * l->max_pages + page;
        /* pages before `starts` or outside a sliding window may have been freed: only entries that are read are
         * checked */
        int64_t newest = (page + 1) * plan->page_tokens - 1 + sinks, first_query = length - queries;
        if (a->starts && newest < a->starts[b]) continue;
        if (a->sliding_window && newest < (first_query > 0 ? first_query : 0) - a->sliding_window + 1) continue;
        if (a->layer.block_table[i] < 0 || a->layer.block_table[i] >= a->layer.n_pages)
            return tq_fail(error, TQ_E_VALUE, "block_table", i, a->layer.block_table[i], "in 0..n_pages - 1");
    }
    return TQ_OK;
}

tq_status tq_attend_check(const tq_plan *plan, const tq_attend_params *a, tq_error *error)
{
    TQ_TRY(tq_check_attend(plan, a, error));
    TQ_TRY(tq_wave_check_channels(plan, &a->layer.key, error));
    TQ_TRY(tq_check_steps(plan, &a->layer.key, a->layer.kv_heads, 1, error));
    TQ_TRY(tq_check_steps(plan, &a->layer.value, a->layer.kv_heads, 0, error));
    TQ_TRY(tq_check_query_start_loc(a->query_start_loc, a->layer.batch, a->query_tokens, a->total_tokens, error));
    for (int32_t b = 0; b < a->layer.batch; b++) TQ_TRY(check_sequence(plan, a, b, error));
    return TQ_OK;
}
