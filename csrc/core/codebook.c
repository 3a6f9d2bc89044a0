/* Codebooks from their tables: int8 magnitudes and a step, expanded to levels by code and thresholds by rank. */
#include "codebook_tables.h"
#include "internal.h"
#include <math.h>
#include <pthread.h>

static const tq_codebook_row *codebook_row(int32_t law, int32_t head_dim, int32_t bits)
{
    if (law == TQ_CODEBOOK_SPHERE && head_dim <= TQ_MAX_SPHERE_DIM)
        return &tq_codebook_sphere[head_dim / 8 - 1][bits - 1];
    return &tq_codebook_normal[bits - 1];
}

/* Half the distance between levels of the best uniform quantisers of N(0, 1) with 8 to 64 levels (Max 1960, Table II,
 * which ends at 36); with 2 and 4 levels they are those of the normal law, which are uniform. tests/test_codebook.py
 * finds them again. */
static const float uniform_half_steps[TQ_MAX_BITS + 1] = {
    0, 0, 0, 0.293009721f, 0.167600307f, 0.0940693967f, 0.0520315039f};

static tq_codebook_row row_of(int32_t law, int32_t head_dim, int32_t bits)
{
    if (law != TQ_CODEBOOK_UNIFORM || bits <= 2) return *codebook_row(law, head_dim, bits);
    tq_codebook_row row = {uniform_half_steps[bits], {0}};
    for (int32_t m = 0; m < 1 << (bits - 1); m++) row.magnitudes[m] = (int8_t)(2 * m + 1);
    return row;
}

/* turboquant.h, "Codes": ranks themselves up to 3 bits, magnitude and sign above. */
static uint8_t code_of_rank(int32_t bits, int32_t rank)
{
    int32_t half = 1 << (bits - 1);
    if (bits <= 3) return (uint8_t)rank;
    int32_t negative = rank < half;
    int32_t magnitude = negative ? half - 1 - rank : rank - half;
    return (uint8_t)(magnitude | negative << (bits - 1));
}

static void expand(const tq_codebook_row *row, int32_t bits, tq_codebook *out)
{
    int32_t half = 1 << (bits - 1), n = 2 * half;
    int32_t level_of_rank[1 << TQ_MAX_BITS];
    *out = (tq_codebook){.bits = bits, .n_levels = n, .step = row->step};
    for (int32_t rank = 0; rank < n; rank++) {
        level_of_rank[rank] = rank < half ? -row->magnitudes[half - 1 - rank] : row->magnitudes[rank - half];
        out->code_of_rank[rank] = code_of_rank(bits, rank);
        out->levels[out->code_of_rank[rank]] = (int8_t)level_of_rank[rank];
    }
    float half_step = 0.5f * row->step; /* the middle between two levels: one rounding, the same everywhere */
    for (int32_t rank = 0; rank + 1 < n; rank++)
        out->thresholds[rank] = (float)(level_of_rank[rank] + level_of_rank[rank + 1]) * half_step;
}

tq_status tq_get_codebook(tq_codebook_law law, int32_t head_dim, int32_t bits, tq_codebook *out, tq_error *error)
{
    if (law != TQ_CODEBOOK_NORMAL && law != TQ_CODEBOOK_SPHERE && law != TQ_CODEBOOK_UNIFORM)
        return tq_refuse(error, "law", law, "0 (normal), 1 (sphere) or 2 (uniform)");
    if (bits < 1 || bits > TQ_MAX_BITS) return tq_refuse(error, "bits", bits, "in 1..6");
    if (law == TQ_CODEBOOK_SPHERE && (head_dim < 8 || head_dim > TQ_MAX_SPHERE_DIM || head_dim % 8))
        return tq_refuse(error, "head_dim", head_dim, "a multiple of 8 in 8..256 for the sphere law");
    if (!out) return tq_refuse(error, "out", 0, "a pointer, not NULL");
    tq_codebook_row row = row_of(law, head_dim, bits);
    expand(&row, bits, out);
    return TQ_OK;
}

static tq_cells cells_of(const tq_codebook *book)
{
    int32_t half = book->n_levels / 2, count[16] = {0};
    const float *thresholds = book->thresholds + half; /* the positive ones; the one before them is 0 */
    tq_cells cells = {.factor = 15.0f / thresholds[half - 2]};
    for (int32_t i = 0; i < 16; i++) cells.own[0][i] = cells.own[1][i] = INFINITY;
    for (int32_t k = 0; k + 1 < half; k++) {
        int32_t cell = (int32_t)(thresholds[k] * cells.factor);
        if (cell > 15) cell = 15;
        if (count[cell] == (book->bits == 4 ? 1 : 2)) return (tq_cells){0};
        cells.own[count[cell]++][cell] = thresholds[k];
    }
    for (int32_t i = 1; i < 16; i++) cells.below[i] = cells.below[i - 1] + (float)count[i - 1];
    return cells;
}

/* ---- codebooks of plans ---- One set for each law, and for each head_dim of the sphere; made when first needed. */

enum { SPHERES = TQ_MAX_SPHERE_DIM / 8 };

static tq_plan_tables normal_tables, uniform_tables, sphere_tables[SPHERES];

static void fill_tables(int32_t law, int32_t head_dim, tq_plan_tables *to)
{
    to->books[TQ_WIDE_BITS] = (tq_codebook){.bits = TQ_WIDE_BITS, .n_levels = 256, .step = TQ_WIDE_STEP};
    for (int32_t bits = 1; bits <= TQ_MAX_BITS; bits++) {
        tq_codebook_row row = row_of(law, head_dim, bits);
        expand(&row, bits, &to->books[bits]);
    }
    for (int32_t bits = 4; bits <= TQ_CELL_BITS; bits++) to->cells[bits] = cells_of(&to->books[bits]);
}

static void fill_normal(void) { fill_tables(TQ_CODEBOOK_NORMAL, 0, &normal_tables); }

static void fill_uniform(void) { fill_tables(TQ_CODEBOOK_UNIFORM, 0, &uniform_tables); }

static void fill_spheres(void)
{
    for (int32_t i = 0; i < SPHERES; i++) fill_tables(TQ_CODEBOOK_SPHERE, 8 * (i + 1), &sphere_tables[i]);
}

const tq_plan_tables *tq_plan_tables_of(const tq_plan *plan)
{
    static pthread_once_t normal = PTHREAD_ONCE_INIT, uniform = PTHREAD_ONCE_INIT, spheres = PTHREAD_ONCE_INIT;
    switch (plan->codebook) {
    case TQ_CODEBOOK_SPHERE: pthread_once(&spheres, fill_spheres); return &sphere_tables[plan->head_dim / 8 - 1];
    case TQ_CODEBOOK_UNIFORM: pthread_once(&uniform, fill_uniform); return &uniform_tables;
    default: pthread_once(&normal, fill_normal); return &normal_tables;
    }
}
