/* Decoding without attention: tq_dequantize for debugging and NumPy, tq_dot for inner products with packed vectors. */
#include "baselines.h"
#include "wave.h"
#include <math.h>
#include <string.h>

/* ---- dequantise ---- */

typedef struct {
    const tq_kernels *kernels;
    const tq_plan *plan;
    const tq_codebook *books;
    const tq_transform *transform;
    int is_key;
    int32_t b, h;
    int64_t origin; /* the phase position of packed index 0, for the wave */
} decode_side;

/** Decodes the first count <= 32 tokens of a token tile into x [count][head_dim], without scale and rotation. */
static void decode_tile(const decode_side *s, const uint8_t *record, int32_t token_tile, int32_t count, float *x)
{
    const tq_plan *plan = s->plan;
    const tq_side *side = s->is_key ? &plan->key : &plan->value;
    const float *steps = tq_transform_steps(s->transform, s->h);
    uint8_t codes[TQ_TILE_CODES];
    int32_t tile = TQ_TILE * token_tile / plan->tile_tokens, first = TQ_TILE * token_tile % plan->tile_tokens;
    for (int32_t g = 0; g < plan->groups; g++) {
        const tq_codebook *book = &s->books[side->bits[g]];
        float step = side->bits[g] ? book->step * (steps ? steps[g] : 1.0f) : 0.0f;
        if (side->bits[g])
            tq_unpack_tile(s->kernels, side->bits[g], (const uint32_t *)(record + tq_tile_offset(side, tile, g)),
                           codes);
        for (int32_t i = 0; i < count; i++)
            for (int32_t c = 0; c < tq_group_width(plan, g); c++) {
                int32_t at = s->is_key ? tq_key_cell(plan, first + i, c & ~7) + (c & 7) : tq_value_cell(first + i, c);
                x[(int64_t)i * plan->head_dim + plan->group_channels * g + c] =
                    side->bits[g] ? step * (float)tq_level(book, codes[at]) : 0.0f;
            }
    }
}

/** Undoes the metric and adds the wave, or adds the centre alone, for the token of packed index `index`, in place. */
static void add_centre(const decode_side *s, int64_t index, float *x)
{
    const tq_plan *plan = s->plan;
    const float *centre = tq_transform_centre(s->transform, s->h);
    if (s->is_key && tq_has_moments(plan)) tq_residual_to_key(plan, s->transform, s->h, s->origin + index, centre, x);
    else
        for (int32_t i = 0; centre && i < plan->head_dim; i++) x[i] += centre[i];
}

/** Applies the scale and the inverse rotation to one decoded token, in place. */
static void restore_token(const decode_side *s, const uint8_t *record, int32_t token, float *x)
{
    const tq_plan *plan = s->plan;
    const tq_side *side = s->is_key ? &plan->key : &plan->value;
    float y[TQ_MAX_DIM];
    uint16_t half;
    memcpy(&half, record + tq_scale_offset(side, token), sizeof half);
    float scale = tq_f32_from_f16(half);
    for (int32_t i = 0; i < plan->head_dim; i++) y[i] = x[i] * scale;
    tq_rotate_vector(s->kernels, plan, plan->rotation, tq_transform_matrix(s->transform, s->h), 1, y, x);
}

#define ROWS_AT_ONCE (4 * TQ_MAX_DIM) /* numbers of decoded rows on the stack */

/** Returns how many tokens' rows fit: 2 to 32. */
static int32_t tokens_at_once(const tq_side *side)
{
    int32_t n = ROWS_AT_ONCE / (TQ_TILE * side->tiles);
    return n < TQ_TILE ? n : TQ_TILE;
}

/** Does what decode_tile and restore_token do, for plans that are not plain. */
static void decode_baseline_tile(const decode_side *s, const uint8_t *record, int32_t token_tile, int32_t count,
                                 float *x)
{
    tq_baseline_coder coder = tq_baseline_coder_of(s->kernels, s->plan, s->books, s->transform, s->is_key, s->h);
    int32_t step = tokens_at_once(coder.side), d = s->plan->head_dim;
    float rows[ROWS_AT_ONCE];
    for (int32_t i = 0; i < count; i++) {
        int32_t last = i + step < count ? i + step : count;
        if (i % step == 0) tq_baseline_decode(&coder, record, token_tile, i, last, rows);
        tq_baseline_restore(&coder, rows + i % step * TQ_TILE * coder.side->tiles, x + (int64_t)i * d);
    }
}

tq_status tq_dequantize(const tq_plan *plan, const tq_layer *layer, int32_t max_tokens, float *k, float *v,
                        tq_error *error)
{
    TQ_TRY(tq_check_dequantize(plan, layer, max_tokens, k, v, error));
    int has_values = plan->value.tile_bytes != 0;
    const tq_kernels *kernels = tq_get_kernels(error);
    if (!kernels) return TQ_E_UNSUPPORTED;
    TQ_TRY(tq_wave_check_channels(plan, &layer->key, error));
    TQ_TRY(tq_check_steps(plan, &layer->key, layer->kv_heads, 1, error));
    TQ_TRY(tq_check_steps(plan, &layer->value, layer->kv_heads, 0, error));
    for (int32_t b = 0; b < layer->batch; b++) {
        if (layer->lengths[b] < 0 || layer->lengths[b] > max_tokens)
            return tq_fail(error, TQ_E_VALUE, "lengths", b, layer->lengths[b], "in 0..max_tokens");
        for (int64_t i = 0; i * plan->page_tokens < layer->lengths[b]; i++) {
            int64_t at = (int64_t)b * layer->max_pages + i;
            if (layer->block_table[at] < 0 || layer->block_table[at] >= layer->n_pages)
                return tq_fail(error, TQ_E_VALUE, "block_table", at, layer->block_table[at], "in 0..n_pages - 1");
        }
    }
    const tq_codebook *books = tq_plan_tables_of(plan)->books;
    for (int side = 0; side < 1 + has_values; side++)
        for (int32_t b = 0; b < layer->batch; b++)
            for (int32_t h = 0; h < layer->kv_heads; h++) {
                const tq_transform *transform = side ? &layer->value : &layer->key;
                decode_side s = {kernels, plan, books, transform,
                                 !side,   b,    h,     tq_wave_position(layer, b, layer->sinks)};
                float *out = (side ? v : k) + ((int64_t)b * layer->kv_heads + h) * max_tokens * plan->head_dim;
                if (max_tokens) memset(out, 0, sizeof(float) * (size_t)max_tokens * (size_t)plan->head_dim);
                for (int64_t i = 0; i < layer->lengths[b]; i += TQ_TILE) {
                    int64_t page = layer->block_table[(int64_t)b * layer->max_pages + i / plan->page_tokens];
                    const uint8_t *record = layer->pages + page * tq_page_stride(plan, layer) + h * plan->record_bytes;
                    int32_t n = (int32_t)(layer->lengths[b] - i < TQ_TILE ? layer->lengths[b] - i : TQ_TILE);
                    int32_t first = (int32_t)(i % plan->page_tokens);
                    float *x = out + i * plan->head_dim;
                    if (tq_is_plain(plan)) {
                        decode_tile(&s, record, first / TQ_TILE, n, x);
                        for (int32_t j = 0; j < n; j++)
                            restore_token(&s, record, first + j, x + (int64_t)j * plan->head_dim);
                    } else {
                        decode_baseline_tile(&s, record, first / TQ_TILE, n, x);
                    }
                    for (int32_t j = 0; j < n; j++) add_centre(&s, i + j, x + (int64_t)j * plan->head_dim);
                }
            }
    return TQ_OK;
}

/* ---- inner products ---- */

#define DOT_QUERIES 8 /* operands that share one pass over the bytes */

typedef struct {
    const tq_kernels *kernels;
    const tq_plan *plan;
    const tq_codebook *books;
    const tq_coded_groups *groups;
    const tq_tile *tiles;
    const uint8_t *operands;
    const tq_transform *key;
    const float *biases; /* <q, mu> of each query */
    int64_t operand_bytes, n_queries, n;
    const uint8_t *pages;
    float *out;
} dot_job;

/** Computes product * scale + bias of a token tile's columns, and puts them in the order of its tokens. */
static void scale_tile(const float *products, const float *scales, float bias, float *in_order)
{
    float by_column[TQ_TILE];
    for (int32_t c = 0; c < TQ_TILE; c++) by_column[c] = scales[c] * products[c] + bias;
    for (int32_t i = 0; i < TQ_TILE; i++) in_order[i] = by_column[tq_column(i)];
}

/* Multiplies one page of vectors by all queries, and prefetches the next page. */
static void dot_page(void *context, int64_t page, int32_t worker_index)
{
    const dot_job *job = context;
    const tq_plan *plan = job->plan;
    const uint8_t *record = job->pages + page * plan->record_bytes;
    int32_t tokens = plan->page_tokens;
    int64_t first = page * tokens;
    int32_t count = job->n - first < tokens ? (int32_t)(job->n - first) : tokens;
    float products[DOT_QUERIES * TQ_PAGE_TOKENS], scales[TQ_PAGE_TOKENS];
    (void)worker_index;
    job->kernels->load(TQ_F16, record + plan->key.scales_offset, scales, tokens);
    tq_tile_grid grid = {record,
                         job->tiles,
                         tokens / plan->tile_tokens,
                         job->groups->n,
                         tq_tile_is_16(plan) ? TQ_HALF_COLUMNS : TQ_WHOLE_TILES,
                         job->books,
                         record + plan->record_bytes,
                         first + tokens < job->n ? (int32_t)plan->record_bytes : 0};
    for (int64_t q = 0; q < job->n_queries; q += DOT_QUERIES) {
        int32_t rows = job->n_queries - q < DOT_QUERIES ? (int32_t)(job->n_queries - q) : DOT_QUERIES;
        job->kernels->multiply(&grid, job->operands + q * job->operand_bytes, rows, 1, 0, products, tokens);
        grid.ahead_bytes = 0;
        for (int32_t r = 0; r < rows; r++) {
            for (int32_t tile = 0; tile < count; tile += TQ_TILE) {
                int32_t here = count - tile < TQ_TILE ? count - tile : TQ_TILE;
                float in_order[TQ_TILE];
                scale_tile(products + tokens * r + tile, scales + tile, job->biases[q + r], in_order);
                memcpy(job->out + (q + r) * job->n + first + tile, in_order, sizeof(float) * (size_t)here);
            }
        }
    }
}

/** dot_page for plans that are not plain: decodes a few tokens at a time and multiplies them by the projected
 *  queries. */
static void dot_baseline_page(void *context, int64_t page, int32_t worker_index)
{
    const dot_job *job = context;
    const tq_plan *plan = job->plan;
    tq_baseline_coder coder = tq_baseline_coder_of(job->kernels, plan, job->books, job->key, 1, 0);
    const uint8_t *record = job->pages + page * plan->record_bytes;
    int64_t first = page * plan->page_tokens;
    int32_t count = job->n - first < plan->page_tokens ? (int32_t)(job->n - first) : plan->page_tokens;
    int32_t row = TQ_TILE * coder.side->tiles, step = tokens_at_once(coder.side);
    float rows[ROWS_AT_ONCE];
    (void)worker_index;
    for (int32_t i = 0; i < count; i++) {
        int32_t in_tile = i % TQ_TILE, last = in_tile + step < TQ_TILE ? in_tile + step : TQ_TILE;
        if (in_tile % step == 0) tq_baseline_decode(&coder, record, i / TQ_TILE, in_tile, last, rows);
        for (int64_t q = 0; q < job->n_queries; q++) {
            const float *query = (const float *)(job->operands + q * job->operand_bytes);
            job->out[q * job->n + first + i] =
                job->kernels->dot(query, rows + in_tile % step * row, row) + job->biases[q];
        }
    }
}

static int64_t dot_operand_bytes(const tq_kernels *kernels, const tq_plan *plan)
{
    if (!tq_is_plain(plan)) return (int64_t)sizeof(float) * TQ_TILE * plan->key.tiles;
    tq_coded_groups groups;
    tq_list_groups(&plan->key, &groups);
    return (int64_t)kernels->operand_bytes(TQ_TILE * groups.n);
}

tq_status tq_dot_workspace_bytes(const tq_plan *plan, int64_t n_queries, size_t *bytes, tq_error *error)
{
    TQ_TRY(tq_plan_check(plan, error));
    const tq_kernels *kernels = tq_get_kernels(error);
    if (!kernels) return TQ_E_UNSUPPORTED;
    if (n_queries < 0) return tq_refuse(error, "n_queries", n_queries, "at least 0");
    if (!bytes) return tq_refuse(error, "bytes", 0, "a pointer, not NULL");
    int64_t total;
    TQ_TRY(tq_product(n_queries, dot_operand_bytes(kernels, plan) + 64, &total, "n_queries", error));
    *bytes = (size_t)total + 64;
    return TQ_OK;
}

/** Turns one query into its operand, by metric, rotation and steps. Returns its bias, <q, centre>. */
static float dot_operand(const dot_job *job, const tq_transform *key, const float *query, void *operand)
{
    const tq_plan *plan = job->plan;
    const float *centre = tq_transform_centre(key, 0), *steps = tq_transform_steps(key, 0);
    float x[TQ_MAX_DIM + TQ_TILE] = {0}, coded[TQ_MAX_DIM], metric_query[TQ_MAX_DIM], bias = 0.0f;
    if (centre) bias = job->kernels->dot(query, centre, plan->head_dim);
    if (plan->metric) {
        query = memcpy(metric_query, query, sizeof(float) * (size_t)plan->head_dim);
        tq_metric_query(plan, key, 0, metric_query);
    }
    if (!tq_is_plain(plan)) {
        tq_baseline_coder coder = tq_baseline_coder_of(job->kernels, plan, job->books, key, 1, 0);
        tq_baseline_project(&coder, query, operand);
        return bias;
    }
    tq_rotate_vector(job->kernels, plan, plan->rotation, key->rotation, 0, query, x);
    tq_arrange_query(plan, job->groups, steps, x, coded);
    job->kernels->prepare(coded, TQ_TILE * job->groups->n, 1, 1, operand);
    return bias;
}

tq_status tq_dot(const tq_plan *plan, const tq_transform *key, const float *queries, int64_t n_queries,
                 const uint8_t *pages, int64_t n, float *out, int32_t threads, void *workspace, size_t workspace_bytes,
                 tq_error *error)
{
    size_t wanted;
    TQ_TRY(tq_dot_workspace_bytes(plan, n_queries, &wanted, error));
    static const tq_transform plain;
    if (!key) key = &plain;
    if (plan->wave_pairs)
        return tq_refuse(error, "plan", plan->wave_pairs, "one without a wave, since vectors have no position");
    TQ_TRY(tq_check_transform(plan, key, 1, error));
    TQ_TRY(tq_wave_check_channels(plan, key, error));
    TQ_TRY(tq_check_steps(plan, key, 1, 1, error));
    if (n < 0) return tq_refuse(error, "n", n, "at least 0");
    if (!n || !n_queries) return TQ_OK;
    TQ_NEED(error, {"queries", queries, 0}, {"pages", pages, 0}, {"out", out, 0}, {"workspace", workspace, 0});
    if (workspace_bytes < wanted)
        return tq_refuse(error, "workspace_bytes", workspace_bytes, "at least tq_dot_workspace_bytes");
    if ((uintptr_t)workspace % 64) return tq_refuse(error, "workspace", (uintptr_t)workspace % 64, "64-byte aligned");
    if ((uintptr_t)pages % 64) return tq_refuse(error, "pages", (uintptr_t)pages % 64, "64-byte aligned");
    const tq_codebook *books = tq_plan_tables_of(plan)->books;
    tq_coded_groups groups;
    tq_list_groups(&plan->key, &groups);
    tq_tile tiles[TQ_PAGE_TOKENS / TQ_TILE * TQ_MAX_GROUPS];
    if (tq_is_plain(plan)) tq_key_tiles(plan, &groups, tiles);
    const tq_kernels *kernels = tq_get_kernels(error);
    dot_job job = {.kernels = kernels,
                   .plan = plan,
                   .books = books,
                   .groups = &groups,
                   .key = key,
                   .tiles = tiles,
                   .operands = workspace,
                   .n_queries = n_queries,
                   .n = n,
                   .pages = pages,
                   .out = out,
                   .operand_bytes = dot_operand_bytes(kernels, plan)};
    float *biases = (float *)((uint8_t *)workspace + n_queries * job.operand_bytes);
    job.biases = biases;
    for (int64_t q = 0; q < n_queries; q++)
        biases[q] = dot_operand(&job, key, queries + q * plan->head_dim, (uint8_t *)workspace + q * job.operand_bytes);
    tq_parallel((n + plan->page_tokens - 1) / plan->page_tokens, threads,
                tq_is_plain(plan) ? dot_page : dot_baseline_page, &job);
    return TQ_OK;
}
