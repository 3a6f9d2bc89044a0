/* Shared by the files of the core; nothing here is visible outside. */
#ifndef TQ_INTERNAL_H
#define TQ_INTERNAL_H
#include "kernels.h"
#include "plan_kind.h"
#include "turboquant_checks.h"

/* ---- status.c ---- */
/** Fills *error (may be NULL) and returns status, so that a check is one line. index -1: the argument itself. */
tq_status tq_fail(tq_error *error, tq_status status, const char *argument, int64_t index, double got,
                  const char *wants);
/** Does so with TQ_E_VALUE, for an argument itself. */
static inline tq_status tq_refuse(tq_error *error, const char *argument, double got, const char *wants)
{
    return tq_fail(error, TQ_E_VALUE, argument, -1, got, wants);
}
/** Multiplies sizes a, b >= 0. Fails with TQ_E_VALUE, naming `argument`, if the product does not fit int64. */
tq_status tq_product(int64_t a, int64_t b, int64_t *out, const char *argument, tq_error *error);
int tq_overlap(const void *a, int64_t a_bytes, const void *b, int64_t b_bytes);
/** A pointer argument, and the bytes of its array where they matter. */
typedef struct {
    const char *name;
    const void *at;
    int64_t bytes;
} tq_array;
/** Fails with TQ_E_VALUE for the first of n arrays that is NULL. */
tq_status tq_need(const tq_array *arrays, int32_t n, tq_error *error);
#define TQ_NEED(error, ...)                                                                                            \
    TQ_TRY(tq_need((const tq_array[]){__VA_ARGS__}, sizeof (const tq_array[]){__VA_ARGS__} / sizeof(tq_array), error))

/* ---- dispatch.c ---- */
/** Returns the table in use. Returns NULL and fills *error (TQ_E_UNSUPPORTED) if TURBOQUANT_ISA names none, or
 *  TURBOQUANT_NUM_THREADS is no number of threads. */
const tq_kernels *tq_get_kernels(tq_error *error);

/* ---- codebook.c ---- */
/** The codebooks of a plan, for encoding and decoding. */
typedef struct {
    tq_codebook
        books[TQ_WIDE_BITS + 1]; /* by bits: 1..TQ_MAX_BITS, and TQ_WIDE_BITS, whose levels are not listed (tq_level) */
    tq_cells cells[TQ_CELL_BITS + 1]; /* of books[4] and books[5] */
} tq_plan_tables;

/** Returns the tables of a checked plan. They are made once in a process and never freed: at most 200 kB in all. */
const tq_plan_tables *tq_plan_tables_of(const tq_plan *plan);

/* ---- plan.c ---- */
int32_t tq_scale_bytes(const tq_plan *plan, const tq_side *side); /* of one record: 2 for each token and number */
/** Returns the real channels of a group. */
static inline int32_t tq_group_width(const tq_plan *plan, int32_t g)
{
    int32_t real = plan->head_dim - plan->group_channels * g;
    return real < plan->group_channels ? real : plan->group_channels;
}
/** Fails with TQ_E_VALUE unless the plan looks like one that tq_plan_init made. */
tq_status tq_plan_check(const tq_plan *plan, tq_error *error);
/** Checks the numbers of a transform's steps, or of its table. */
tq_status tq_check_steps(const tq_plan *plan, const tq_transform *transform, int32_t kv_heads, int is_key,
                         tq_error *error);

/* ---- checks.c ---- */
/** Checks what sink_rows and tail_rows hold for sequence b, where they are given. */
tq_status tq_check_rows(const tq_layer *layer, int32_t b, tq_error *error);
/** Checks query_start_loc (NULL: nothing to check). most: tokens of a sequence; total: tokens of the batch. */
tq_status tq_check_query_start_loc(const int32_t *loc, int32_t batch, int32_t most, int32_t total, tq_error *error);
/** Checks that a transform has the arrays that the plan needs, and no others; NULL: it has none. */
tq_status tq_check_transform(const tq_plan *plan, const tq_transform *transform, int is_key, tq_error *error);

/* ---- one sequence ---- */
/** The number of new tokens or queries of a sequence, and the index of the first in a ragged batch (0 in others). */
typedef struct {
    int32_t tokens, first;
} tq_new_tokens;

/** tokens: those of each sequence, if the batch is not ragged. */
static inline tq_new_tokens tq_new_tokens_of(const int32_t *query_start_loc, int32_t tokens, int32_t b)
{
    if (!query_start_loc) return (tq_new_tokens){tokens, 0};
    return (tq_new_tokens){query_start_loc[b + 1] - query_start_loc[b], query_start_loc[b]};
}

/** Returns the row of window_k for a page of sequence b, or -1. */
static inline int32_t tq_tail_row(const tq_layer *l, int32_t b, int64_t page)
{
    return l->tail_rows ? l->tail_rows[2 * (int64_t)b + page % 2] : -1;
}

/** With exact tokens by index: positions first .. last - 1 of sequence b are read from its pages. */
typedef struct {
    int64_t first, last;
} tq_in_pages;

static inline tq_in_pages tq_positions_in_pages(const tq_plan *plan, const tq_layer *l, int32_t b)
{
    int64_t length = l->lengths[b], page = (length - 1) / plan->page_tokens * plan->page_tokens;
    tq_in_pages in = {l->sink_rows && l->sink_rows[b] >= 0 ? l->sinks : 0, length};
    if (!l->window || length <= 0 || tq_tail_row(l, b, page / plan->page_tokens) < 0) return in;
    in.last = length > l->window ? length - l->window : 0;
    if (in.last < page && tq_tail_row(l, b, page / plan->page_tokens - 1) < 0) in.last = page;
    return in;
}

/** Returns the phase position of a token: its position plus the offset of its sequence, modulo 2^32. */
static inline int64_t tq_wave_position(const tq_layer *l, int32_t b, int64_t position)
{
    return l->position_offset ? (int64_t)(uint32_t)(position + l->position_offset[b]) : position;
}

/* ---- rotation.c ---- */
/** Computes y = R x, or R^T x if inverse, for one vector of head_dim floats. matrix NULL: the plan's Hadamard or none,
 *  as `rotation` says (tq_side's). y may be x without a matrix. */
void tq_rotate_vector(const tq_kernels *kernels, const tq_plan *plan, int32_t rotation, const float *matrix,
                      int inverse, const float *x, float *y);

/** Returns 1 / sqrt(p), the factor of a Hadamard pass over p channels. */
float tq_hadamard_factor(int32_t p);

static inline const float *tq_transform_matrix(const tq_transform *t, int32_t head)
{
    return t->rotation ? t->rotation + head * t->rotation_stride_head : NULL;
}

static inline const float *tq_transform_centre(const tq_transform *t, int32_t head)
{
    return t->centre ? t->centre + head * t->stride_head : NULL;
}

static inline const float *tq_transform_steps(const tq_transform *t, int32_t head)
{
    return t->steps ? t->steps + head * t->stride_head : NULL;
}

/** Returns TQ_E_VALUE for the number at `at` of a side's centre, steps or moments. */
tq_status tq_fail_number(const tq_transform *t, int is_key, const float *at, const char *wants, tq_error *error);

/* ---- parallel.c ---- */
/** Runs task(context, i, worker) for i in 0..n-1 on at most `threads` threads (0: tq_num_threads()), the caller among
 *  them; 0 <= worker < threads, one task at a time per worker. Falls back to the caller alone if threads cannot be
 *  started. */
void tq_parallel(int64_t n, int32_t threads, void (*task)(void *context, int64_t i, int32_t worker), void *context);
/** Returns tq_num_threads(), or `requested` if that is less and not 0; at least 1. */
int32_t tq_effective_threads(int32_t requested);
/** Returns how many threads to divide work for: `requested`, or tq_num_threads() if it is 0, or so few that each gets at
 *  least `least` of `work`, because waking one costs some 10 us. May be more than tq_parallel starts. */
int32_t tq_threads_for(int32_t requested, int64_t work, int64_t least);

static inline int32_t tq_dtype_bytes(int32_t dtype) { return dtype == TQ_F32 ? 4 : 2; }

static inline int64_t tq_round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

#define TQ_TRY(call)                                                                                                   \
    do {                                                                                                               \
        tq_status try_status = (call);                                                                                 \
        if (try_status != TQ_OK) return try_status;                                                                    \
    } while (0)
#endif
