/* tq_recode: pages to fewer bits. Codes are nested: new codes and levels are looked up by the old codes, and nothing is
 * decoded or rotated. Only scales are computed. */
#include "tiles.h"
#include <string.h>

/** Makes the recoding between two codebooks: the cell of a new code is a union of cells of old codes. */
static tq_recoding recoding_of(const tq_codebook *from, const tq_codebook *to)
{
    tq_recoding r = {.from = from->bits, .to = to->bits};
    for (int32_t rank = 0; rank < from->n_levels; rank++) {
        int32_t code = from->code_of_rank[rank], fewer = to->code_of_rank[rank >> (from->bits - to->bits)];
        int32_t before = from->levels[code], after = to->levels[fewer];
        for (int32_t i = code; i < 1 << TQ_MAX_BITS; i += from->n_levels) {
            r.code[i] = (uint8_t)fewer;
            r.before[i] = (uint8_t)(before < 0 ? -before : before);
            r.after[i] = (uint8_t)(after < 0 ? -after : after);
        }
    }
    return r;
}

/** Groups with the same widths, old and new, whose tiles lie side by side. A group with padding is a run of its own. */
typedef struct {
    tq_recoding recoding;
    int32_t n, width, from, to; /* groups, real channels of each, offsets in the tiles of a token tile */
    float before, after;        /* factors of the sums: old step * old step, old step * new step */
} run;

typedef struct {
    const tq_kernels *kernels;
    const tq_plan *plan, *target;
    const uint8_t *pages;
    uint8_t *out;
    int32_t n_runs[2];
    run runs[2][TQ_MAX_HEAD_DIM / TQ_TILE]; /* of keys, of values */
} recode_job;

static void list_runs(recode_job *job, int is_value, const tq_codebook *books)
{
    const tq_plan *plan = job->plan;
    const tq_side *from = is_value ? &plan->value : &plan->key;
    const tq_side *to = is_value ? &job->target->value : &job->target->key;
    run *runs = job->runs[is_value];
    int32_t n = 0;
    for (int32_t g = 0; g < plan->groups; g++) {
        if (!from->bits[g]) continue;
        int32_t width = tq_group_width(plan, g);
        run *last = n ? &runs[n - 1] : NULL;
        if (last && last->recoding.from == from->bits[g] && last->recoding.to == to->bits[g] && width == TQ_TILE) {
            last->n++;
            continue;
        }
        const tq_codebook *before = &books[from->bits[g]], *after = &books[to->bits[g]];
        runs[n++] = (run){.recoding = recoding_of(before, after),
                          .n = 1,
                          .width = width,
                          .from = from->offset[g],
                          .to = to->offset[g],
                          .before = before->step * before->step,
                          .after = before->step * after->step};
    }
    job->n_runs[is_value] = n;
}

/** Marks the live cells of a tile: real channels of tokens whose scale is not 0. If all are live, only returns 1. */
static int list_live(const uint16_t scales[TQ_TILE], int is_key, int32_t width, uint8_t live[TQ_TILE_CODES])
{
    int all = width == TQ_TILE;
    for (int32_t c = 0; c < TQ_TILE; c++) all &= (scales[c] & 0x7fff) != 0;
    for (int32_t i = 0; i < TQ_TILE_CODES && !all; i++) {
        int32_t row = i / TQ_TILE, column = i % TQ_TILE;
        int32_t token = is_key ? tq_column(row) : column, channel = is_key ? column : row;
        live[i] = (scales[token] & 0x7fff) != 0 && channel < width;
    }
    return all;
}

/** Multiplies scales that are not 0 by before / between. */
static void rescale(uint16_t scales[TQ_TILE], const float before[TQ_TILE], const float between[TQ_TILE])
{
    float s[TQ_TILE];
    uint16_t made[TQ_TILE];
    uint32_t is_unusual = 0;
    /* Numbers that are normal as binary16, before and after, need no branch, so that the loops vectorise. */
    for (int32_t c = 0; c < TQ_TILE; c++) {
        uint32_t half = scales[c];
        is_unusual |= ((half - 0x400) | (0x7bff - half)) >> 31;
        s[c] = tq_float_of((half << 13) + 0x38000000);
    }
    for (int32_t c = 0; c < TQ_TILE; c++) s[c] *= before[c] / between[c];
    for (int32_t c = 0; c < TQ_TILE; c++) {
        uint32_t u = tq_bits_of(s[c]);
        is_unusual |= (u - 0x38800000) >> 28 | (s[c] > 65504.0f);
        u -= 0x38000000;
        made[c] = (uint16_t)((u + 0xfff + (u >> 13 & 1)) >> 13);
    }
    for (int32_t c = 0; c < TQ_TILE && is_unusual; c++) {
        float x = tq_f32_from_f16(scales[c]) * (before[c] / between[c]);
        made[c] = scales[c] & 0x7fff ? tq_f16_from_f32(x < 65504.0f ? x : 65504.0f) : scales[c];
    }
    memcpy(scales, made, sizeof made);
}

/** Recodes 32 tokens of one side of a record. */
static void recode_tokens(const recode_job *job, int is_key, const uint8_t *codes, uint8_t *out,
                          const uint8_t *scales_at, uint8_t *scales_out)
{
    float before[TQ_TILE] = {0}, between[TQ_TILE] = {0};
    uint16_t scales[TQ_TILE];
    memcpy(scales, scales_at, sizeof scales);
    for (int32_t i = 0; i < job->n_runs[!is_key]; i++) {
        const run *r = &job->runs[!is_key][i];
        uint8_t live[TQ_TILE_CODES];
        uint32_t sums[2 * TQ_TILE];
        int all = list_live(scales, is_key, r->width, live);
        job->kernels->recode(&r->recoding, is_key, all ? NULL : live, r->n, (const uint32_t *)(codes + r->from),
                             (uint32_t *)(out + r->to), sums);
        for (int32_t c = 0; c < TQ_TILE; c++) { /* sums are below 2^31: signed ones convert faster */
            before[c] += r->before * (float)(int32_t)sums[c];
            between[c] += r->after * (float)(int32_t)sums[TQ_TILE + c];
        }
    }
    rescale(scales, before, between);
    memcpy(scales_out, scales, sizeof scales);
}

static void recode_record(void *context, int64_t i, int32_t worker)
{
    const recode_job *job = context;
    const uint8_t *record = job->pages + i * job->plan->record_bytes;
    uint8_t *out = job->out + i * job->target->record_bytes;
    (void)worker;
    for (int is_value = 0; is_value < 1 + (job->plan->value.tile_bytes != 0); is_value++) {
        const tq_side *from = is_value ? &job->plan->value : &job->plan->key;
        const tq_side *to = is_value ? &job->target->value : &job->target->key;
        int32_t tiles = job->plan->page_tokens / TQ_TILE;
        if (!memcmp(from->bits, to->bits, sizeof from->bits)) {
            memcpy(out + to->codes_offset, record + from->codes_offset, (size_t)tiles * (size_t)from->tile_bytes);
            memcpy(out + to->scales_offset, record + from->scales_offset, 2 * (size_t)job->plan->page_tokens);
            continue;
        }
        for (int32_t t = 0; t < tiles; t++)
            recode_tokens(job, !is_value, record + tq_tile_offset(from, t, 0) - from->offset[0],
                          out + tq_tile_offset(to, t, 0) - to->offset[0],
                          record + from->scales_offset + 2 * TQ_TILE * t, out + to->scales_offset + 2 * TQ_TILE * t);
    }
}

tq_status tq_recode(const tq_plan *plan, const tq_plan *target, const uint8_t *pages, int64_t n_pages, int32_t kv_heads,
                    uint8_t *out, int32_t threads, tq_error *error)
{
    TQ_TRY(tq_check_recode(plan, target, pages, n_pages, kv_heads, out, error));
    recode_job job = {.kernels = tq_get_kernels(error), .plan = plan, .target = target, .pages = pages, .out = out};
    if (!job.kernels) return TQ_E_UNSUPPORTED;
    for (int is_value = 0; is_value < 2; is_value++) list_runs(&job, is_value, tq_plan_tables_of(plan)->books);
    int64_t records = n_pages * kv_heads;
    tq_parallel(records, tq_threads_for(threads, records * plan->record_bytes, 1 << 16), recode_record, &job);
    return TQ_OK;
}
