/* Shared by attend.c (the algorithm) and attend_args.c (checks, tasks and workspace). attend_args.c calls nothing in
 * attend.c. */
#ifndef TQ_ATTEND_H
#define TQ_ATTEND_H
#include "baselines.h"
#include "wave.h"

#define CHUNK_ROWS 32 /* the most query rows of a task: their operands and sums stay in a core's L2 */

typedef struct {
    const tq_plan *plan;
    const tq_attend_params *a;
    const tq_kernels *kernels;
    const tq_codebook *books; /* [TQ_WIDE_BITS + 1], by bits */
    tq_coded_groups key_groups, value_groups;
    tq_tile key_tiles[TQ_PAGE_TOKENS / TQ_TILE * TQ_MAX_HEAD_DIM / TQ_TILE],
        value_tiles[TQ_PAGE_TOKENS / TQ_TILE * TQ_MAX_HEAD_DIM / TQ_TILE];
    int64_t query_operand_bytes, weight_operand_bytes; /* of one row */
    int precise;                                       /* 1: 22-bit operands, for float32 queries or tiles of 16 */
    int32_t heads_per_kv, chunks, chunk_rows, splits, threads;
    tq_row_strides out_strides, lse_strides;
    tq_wave wave;
    uint8_t *workspace;
} attend_job;

/** Rows first_row .. first_row + rows - 1 of sequence b, KV head h, for one split of the pages. Rows are (query token,
 *  query head of the KV head), token by token. */
typedef struct {
    int32_t b, h, split, rows;
    int64_t first_row;
} attend_task;

/* Workspace:  | worker 0 | worker 1 | ..  each:
 *              | query operands | weight operands | q | scores | packed | exact | tile_k | tile_v | rotated | coded |
 *              merged | scales | logits | states | visible | decoded | wave rows |
 *           | partial rows [tasks * splits][chunk_rows] of | max, sum, packed_sum, unused | packed | exact |, if splits
 *           > 1 | the wave's table | nodes | turns [max_pages] | */
typedef struct {
    uint8_t *query_operands, *weight_operands;
    float *q;                 /* [rows][head_dim], not rotated */
    float *scores;            /* [rows][page_tokens]; weights after the softmax step */
    float *packed;            /* [rows][32 * value groups], rotated sums; plain plans: each group in column order */
    float *exact;             /* [rows][head_dim] */
    float *tile_k, *tile_v;   /* [32][head_dim] */
    float *rotated, *coded;   /* [32 * groups] */
    float *merged;            /* [32 * value groups + head_dim] */
    float *scales;            /* [2][page_tokens], of a page's keys and values */
    tq_logit *logits;         /* [rows] */
    tq_softmax_state *states; /* [rows] */
    uint8_t *visible;         /* [page_tokens] */
    float *decoded;           /* [32][32 * tiles], rows of a token tile; for plans that are not plain */
    float *wave_rows;         /* [rows][2][pairs][2] */
} attend_work;

/** Does tq_check_attend, and checks what the arrays hold: lengths, starts, block table, transforms. */
tq_status tq_attend_check(const tq_plan *plan, const tq_attend_params *params, tq_error *error);
/** Cuts the job into tasks: fills in everything but plan, a, kernels, books, strides, wave and workspace. */
void tq_attend_lay_out(attend_job *job);
int64_t tq_attend_bytes(const attend_job *job);
/** Returns at least tq_attend_bytes of any smaller job. */
int64_t tq_attend_bytes_bound(const attend_job *job);
attend_work tq_attend_carve(const attend_job *job, int32_t worker);
float *tq_attend_partial(const attend_job *job, int64_t task, int32_t row);
/** Returns the memory of the wave's table, then its nodes and turns. */
float *tq_attend_wave(const attend_job *job);
#endif
