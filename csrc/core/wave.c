/* The wave and the metric of keys. Everything is float32 with exact phases, each operation rounded, the same on every machine;
 * what attention adds up is not (csrc/kernels/wave.h). */
#include "wave.h"
#include <math.h>
#include <string.h>

#define LEAST_SCALE 0x1p-10f
#define MOST_SCALE 0x1p10f

/* ---- the numbers of a head ---- */

typedef struct {
    const float *wave, *scale, *directions, *stretch; /* [wave_pairs, 2], [head_dim], [rank, head_dim], [rank] */
} head_moments;

static head_moments moments_of(const tq_plan *plan, const tq_transform *t, int32_t head)
{
    const float *at = t->moments + (int64_t)head * plan->moments, *scale = at + 2 * plan->wave_pairs;
    return (head_moments){at, scale, scale + plan->head_dim, scale + (int64_t)plan->metric * plan->head_dim};
}

static int32_t rank_of(const tq_plan *plan) { return plan->metric ? plan->metric - 1 : 0; }

/* ---- checks ---- */

/** "given" or "absent" if an array is not as it should be, else NULL. */
static const char *presence(const void *array, int wanted, const char *given, const char *absent)
{
    if (wanted) return array ? NULL : given;
    return array ? absent : NULL;
}

tq_status tq_wave_check(const tq_plan *plan, const tq_transform *t, tq_error *error)
{
    const char *turns = presence(t->turns, plan->wave_pairs, "given, because the plan has a wave",
                                 "absent, because the plan has no wave");
    if (turns) return tq_fail(error, TQ_E_VALUE, "key_turns", -1, t->turns != NULL, turns);
    const char *moments = presence(t->moments, plan->moments, "given, because the plan has a wave or a metric",
                                   "absent, because the plan has neither a wave nor a metric");
    if (moments) return tq_fail(error, TQ_E_VALUE, "key_moments", -1, t->moments != NULL, moments);
    for (int32_t i = 0; i < 3 * plan->wave_pairs; i++)
        if (i % 3 != 2 && (t->turns[i] < 0 || t->turns[i] >= plan->head_dim))
            return tq_fail(error, TQ_E_VALUE, "key_turns", i, t->turns[i], "a channel in 0..head_dim - 1");
    return TQ_OK;
}

tq_status tq_wave_check_numbers(const tq_plan *plan, const tq_transform *t, int32_t kv_heads, tq_error *error)
{
    int32_t d = plan->head_dim, pairs = 2 * plan->wave_pairs, stretch = pairs + plan->metric * d;
    for (int64_t i = 0; i < (int64_t)kv_heads * plan->moments; i++) {
        int32_t at = (int32_t)(i % plan->moments);
        float x = t->moments[i];
        int in_wave = at < pairs, in_scale = at < pairs + d, in_directions = at < stretch;
        int right = in_wave         ? fabsf(x) <= TQ_MAX_INPUT
                    : in_scale      ? x >= LEAST_SCALE && x <= MOST_SCALE
                    : in_directions ? fabsf(x) <= 1.001f
                                    : x >= LEAST_SCALE - 1.0f && x <= MOST_SCALE;
        if (!right)
            return tq_fail(error, TQ_E_VALUE, "key_moments", i, x,
                           in_wave         ? "an amplitude, finite and at most 16384 in magnitude"
                           : in_scale      ? "a scale in 2^-10..2^10"
                           : in_directions ? "a number of a unit vector"
                                           : "a stretch in 2^-10 - 1..2^10");
    }
    return TQ_OK;
}

/* ---- one vector ---- */

/** x += sign * c_p. */
static void add_centre(const tq_plan *plan, const tq_transform *t, int32_t head, int64_t position, const float *centre,
                       float sign, float *x)
{
    for (int32_t i = 0; centre && i < plan->head_dim; i++) x[i] += sign * centre[i];
    if (!plan->wave_pairs) return;
    const float *wave = moments_of(plan, t, head).wave;
    for (int32_t i = 0; i < plan->wave_pairs; i++) {
        const int32_t *turn = t->turns + 3 * i;
        float a = wave[2 * i], b = wave[2 * i + 1], cosine, sine;
        tq_turn(tq_phase((uint32_t)turn[2], position), &cosine, &sine);
        x[turn[0]] += sign * (a * cosine - b * sine);
        x[turn[1]] += sign * (a * sine + b * cosine);
    }
}

static float dot(const float *a, const float *b, int32_t n)
{
    float sums[8] = {0};
    for (int32_t i = 0; i < n; i += 8)
        for (int32_t j = 0; j < 8; j++) sums[j] += a[i + j] * b[i + j];
    for (int32_t h = 4; h; h /= 2)
        for (int32_t j = 0; j < h; j++) sums[j] += sums[j + h];
    return sums[0];
}

/** x = A x, or A^-1 x if inverse. */
static void apply_metric(const tq_plan *plan, const tq_transform *t, int32_t head, int inverse, float *x)
{
    if (!plan->metric) return;
    int32_t d = plan->head_dim, rank = rank_of(plan);
    head_moments m = moments_of(plan, t, head);
    float along[TQ_MAX_METRIC_RANK];
    for (int32_t i = 0; i < d; i++) x[i] = inverse ? x[i] / m.scale[i] : x[i] * m.scale[i];
    for (int32_t r = 0; r < rank; r++) {
        float e = inverse ? 1.0f / (1.0f + m.stretch[r]) - 1.0f : m.stretch[r];
        along[r] = e * dot(m.directions + r * d, x, d);
    }
    for (int32_t r = 0; r < rank; r++)
        for (int32_t i = 0; i < d; i++) x[i] += along[r] * m.directions[r * d + i];
    for (int32_t i = 0; i < d; i++) x[i] = inverse ? x[i] / m.scale[i] : x[i] * m.scale[i];
}

void tq_key_to_residual(const tq_plan *plan, const tq_transform *t, int32_t head, int64_t position, const float *centre,
                        float *k)
{
    add_centre(plan, t, head, position, centre, -1.0f, k);
    apply_metric(plan, t, head, 0, k);
}

void tq_residual_to_key(const tq_plan *plan, const tq_transform *t, int32_t head, int64_t position, const float *centre,
                        float *k)
{
    apply_metric(plan, t, head, 1, k);
    add_centre(plan, t, head, position, centre, 1.0f, k);
}

void tq_metric_query(const tq_plan *plan, const tq_transform *t, int32_t head, float *q)
{
    apply_metric(plan, t, head, 1, q);
}

/* ---- what attention adds ---- */

static int32_t padded_pairs(const tq_plan *plan) { return (int32_t)tq_round_up(plan->wave_pairs, 16); }

int64_t tq_wave_table_floats(const tq_plan *plan) { return (int64_t)plan->wave_pairs * plan->page_tokens; }

int64_t tq_wave_turn_floats(const tq_plan *plan) { return 2 * (int64_t)padded_pairs(plan); }

void tq_wave_fill(const tq_plan *plan, const tq_transform *t, int32_t sinks, int64_t last_page, tq_wave *wave)
{
    int32_t tokens = plan->page_tokens, half = tokens / 2, pairs = plan->wave_pairs;
    wave->pairs = pairs;
    wave->padded = padded_pairs(plan);
    wave->half = half;
    for (int32_t i = 0; i < pairs; i++) {
        uint64_t increment = (uint32_t)t->turns[3 * i + 2];
        float *cosines = wave->table + (int64_t)i * half, *sines = cosines + (int64_t)pairs * half;
        for (int32_t c = 0; c < half; c++) {
            int32_t column = half + c, token = column / TQ_TILE * TQ_TILE + tq_token(column % TQ_TILE);
            int64_t twice = 2 * token - (tokens - 1); /* positions from the middle of the page, times 2 */
            tq_turn((uint32_t)((int64_t)increment * twice >> 1), &cosines[c], &sines[c]);
        }
    }
    for (int64_t page = wave->first_page; page < last_page; page++) {
        float *cosines = wave->turns + (page - wave->first_page) * 2 * wave->padded, *sines = cosines + wave->padded;
        int64_t twice = 2 * (sinks + page * tokens) + tokens - 1;
        memset(cosines, 0, sizeof(float) * 2 * (size_t)wave->padded);
        for (int32_t i = 0; i < pairs; i++)
            tq_turn((uint32_t)((uint64_t)(uint32_t)t->turns[3 * i + 2] * (uint64_t)twice >> 1), &cosines[i], &sines[i]);
    }
}

void tq_wave_row(const tq_plan *plan, const tq_transform *t, int32_t head, const float *q, float *row)
{
    const float *wave = moments_of(plan, t, head).wave;
    int32_t padded = padded_pairs(plan);
    memset(row, 0, sizeof(float) * 2 * (size_t)padded);
    for (int32_t i = 0; i < plan->wave_pairs; i++) {
        float a = wave[2 * i], b = wave[2 * i + 1], x = q[t->turns[3 * i]], y = q[t->turns[3 * i + 1]];
        row[i] = x * a + y * b;
        row[padded + i] = y * a - x * b;
    }
}
