/* The wave and the metric of keys. Encoding is float32 with exact phases, each operation rounded, the same on every
 * machine; the sums of attention are not (csrc/kernels/wave.h). */
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
    const float *at = t->moments + head * t->stride_head, *scale = at + 2 * plan->wave_pairs;
    return (head_moments){at, scale, scale + plan->head_dim, scale + (int64_t)plan->metric * plan->head_dim};
}

static int32_t rank_of(const tq_plan *plan) { return plan->metric ? plan->metric - 1 : 0; }

/* ---- checks ---- */

tq_status tq_wave_check_channels(const tq_plan *plan, const tq_transform *t, tq_error *error)
{
    for (int32_t i = 0; i < 3 * plan->wave_pairs; i++)
        if (i % 3 != 2 && (t->turns[i] < 0 || t->turns[i] >= plan->head_dim))
            return tq_fail(error, TQ_E_VALUE, "key_turns", i, t->turns[i], "a channel in 0..head_dim - 1");
    return TQ_OK;
}

tq_status tq_wave_check_numbers(const tq_plan *plan, const tq_transform *t, int32_t kv_heads, const tq_kernels *kernels,
                                tq_error *error)
{
    const struct {
        int32_t n;
        float low, high;
        const char *wants;
    } parts[] = {
        {2 * plan->wave_pairs, -TQ_MAX_INPUT, TQ_MAX_INPUT, "an amplitude, finite and at most 16384 in magnitude"},
        {plan->metric ? plan->head_dim : 0, LEAST_SCALE, MOST_SCALE, "a scale in 2^-10..2^10"},
        {rank_of(plan) * plan->head_dim, -1.001f, 1.001f, "a number of a unit vector"},
        {plan->metric ? TQ_MAX_METRIC_RANK : 0, LEAST_SCALE - 1.0f, MOST_SCALE, "a stretch in 2^-10 - 1..2^10"},
    };
    for (int32_t head = 0; plan->moments && head < kv_heads; head++) {
        const float *at = moments_of(plan, t, head).wave;
        for (int32_t part = 0; part < 4; at += parts[part++].n) {
            if (kernels->within(at, parts[part].n, parts[part].low, parts[part].high)) continue;
            int32_t i = 0; /* bounded: the caller may change the array meanwhile */
            while (i < parts[part].n - 1 && at[i] >= parts[part].low && at[i] <= parts[part].high) i++;
            return tq_fail_number(t, 1, at + i, parts[part].wants, error);
        }
    }
    return TQ_OK;
}

/* ---- keys to residuals ---- */

static int32_t padded(const tq_plan *plan) { return (int32_t)tq_round_up(plan->head_dim, 16); }

int64_t tq_keys_floats(const tq_plan *plan)
{
    return tq_has_moments(plan) ? (2 * TQ_WAVE_RUN + 3) * (int64_t)padded(plan) : 0;
}

int64_t tq_head_keys_floats(const tq_plan *plan)
{
    return tq_has_moments(plan) ? (8 + rank_of(plan)) * (int64_t)padded(plan) : 0;
}

void tq_keys_begin(const tq_plan *plan, const tq_transform *t, const tq_kernels *kernels, float *memory, tq_keys *keys)
{
    int32_t n = padded(plan);
    uint8_t taken[TQ_MAX_HEAD_DIM] = {0};
    *keys = (tq_keys){.plan = plan, .transform = t, .kernels = kernels, .turns = memory};
    keys->start = memory + 2 * TQ_WAVE_RUN * (int64_t)n;
    keys->increments = (uint32_t *)(keys->start + 2 * (int64_t)n);
    keys->start_run = -1;
    if (plan->wave_pairs) memset(keys->increments, 0, sizeof(uint32_t) * (size_t)n);
    for (int32_t i = 0; i < plan->wave_pairs; i++) {
        const int32_t *turn = t->turns + 3 * i;
        keys->shared[i] = turn[0] == turn[1] || taken[turn[0]] || taken[turn[1]];
        if (keys->shared[i]) continue;
        taken[turn[0]] = taken[turn[1]] = 1;
        keys->increments[turn[0]] = keys->increments[turn[1]] = (uint32_t)turn[2];
    }
}

/** Computes cosines and sines of every channel at a position. */
static void turn_channels(const tq_keys *keys, int64_t position, float *cosines, float *sines)
{
    int32_t n = padded(keys->plan);
    uint32_t phases[TQ_MAX_HEAD_DIM];
    for (int32_t i = 0; i < n; i++) phases[i] = tq_phase(keys->increments[i], position);
    keys->kernels->turn(phases, n, cosines, sines);
}

void tq_keys_turn(tq_keys *keys, int64_t first, int64_t last)
{
    int64_t n = padded(keys->plan);
    for (int64_t p = first; p < last && p < first + TQ_WAVE_RUN && keys->plan->wave_pairs; p++) {
        int32_t step = (int32_t)(p % TQ_WAVE_RUN);
        if (keys->turned >> step & 1) continue;
        turn_channels(keys, step, keys->turns + 2 * n * step, keys->turns + 2 * n * step + n);
        keys->turned |= 1u << step;
    }
    if (first >= last || !keys->plan->wave_pairs || keys->start_run >= 0) return;
    keys->start_run = first / TQ_WAVE_RUN;
    turn_channels(keys, keys->start_run * TQ_WAVE_RUN, keys->start, keys->start + n);
}

/** Copies row * factor (NULL: 1) to an array that is padded with zeros. */
static const float *padded_row(const tq_plan *plan, const float *row, const float *factor, float *to)
{
    int32_t d = plan->head_dim;
    for (int32_t i = 0; i < d; i++) to[i] = factor ? row[i] * factor[i] : row[i];
    memset(to + d, 0, sizeof(float) * (size_t)(padded(plan) - d));
    return to;
}

void tq_head_keys_begin(const tq_keys *keys, int32_t head, const float *centre, float *memory, tq_head_keys *h)
{
    const tq_plan *plan = keys->plan;
    int32_t n = padded(plan), d = plan->head_dim, rank = rank_of(plan);
    head_moments m = moments_of(plan, keys->transform, head);
    *h = (tq_head_keys){.keys = keys, .head = head, .run = -1, .amplitudes = memory, .turned = memory + 2 * n};
    h->residual = (tq_residual){.n = n, .rank = rank, .turns = keys->turns, .stretch = m.stretch};
    if (centre) h->residual.centre = padded_row(plan, centre, NULL, memory + 6 * n);
    if (plan->metric) {
        h->residual.scales = padded_row(plan, m.scale, m.scale, memory + 7 * n);
        h->residual.directions = memory + 8 * n;
        for (int32_t r = 0; r < rank; r++) padded_row(plan, m.directions + r * d, m.scale, memory + (8 + r) * n);
    }
    if (!plan->wave_pairs) return;
    h->residual.along = h->turned;
    h->residual.across = h->turned + n;
    memset(h->amplitudes, 0, sizeof(float) * 2 * (size_t)n);
    for (int32_t i = 0; i < plan->wave_pairs; i++) {
        const int32_t *turn = keys->transform->turns + 3 * i;
        float a = m.wave[2 * i], b = m.wave[2 * i + 1];
        if (keys->shared[i]) {
            h->sums |= a != 0 || b != 0;
            continue;
        }
        h->amplitudes[turn[0]] = h->amplitudes[n + turn[1]] = a;
        h->amplitudes[turn[1]] = b;
        h->amplitudes[n + turn[0]] = -b;
    }
}

static void add_pair(const tq_transform *t, int32_t i, const float *wave, int64_t position, float sign, float *x)
{
    const int32_t *turn = t->turns + 3 * i;
    float a = wave[2 * i], b = wave[2 * i + 1], cosine, sine;
    tq_turn(tq_phase((uint32_t)turn[2], position), &cosine, &sine);
    x[turn[0]] += sign * (a * cosine - b * sine);
    x[turn[1]] += sign * (a * sine + b * cosine);
}

/** Turns the amplitudes of a head to the start of a run. */
static void turn_head(tq_head_keys *h, int64_t run)
{
    int32_t n = h->residual.n;
    const float *along = h->amplitudes, *across = along + n;
    float *own = h->turned + 2 * n;
    if (run != h->keys->start_run) turn_channels(h->keys, run * TQ_WAVE_RUN, own, own + n);
    const float *cosines = run == h->keys->start_run ? h->keys->start : own, *sines = cosines + n;
    for (int32_t i = 0; i < n; i++) {
        h->turned[i] = along[i] * cosines[i] + across[i] * sines[i];
        h->turned[n + i] = across[i] * cosines[i] - along[i] * sines[i];
    }
    h->run = run;
}

void tq_key_to_residual(tq_head_keys *h, int64_t position, float *k)
{
    const tq_plan *plan = h->keys->plan;
    const float *wave = moments_of(plan, h->keys->transform, h->head).wave;
    for (int32_t i = plan->head_dim; i < h->residual.n; i++) k[i] = 0;
    if (plan->wave_pairs && position / TQ_WAVE_RUN != h->run) turn_head(h, position / TQ_WAVE_RUN);
    for (int32_t i = 0; h->sums && i < plan->wave_pairs; i++)
        if (h->keys->shared[i]) add_pair(h->keys->transform, i, wave, position, -1.0f, k);
    h->keys->kernels->subtract(&h->residual, (int32_t)(position % TQ_WAVE_RUN), k);
}

/* ---- one vector ---- */

/** Adds c_p to x. */
static void add_centre(const tq_plan *plan, const tq_transform *t, int32_t head, int64_t position, const float *centre,
                       float *x)
{
    for (int32_t i = 0; centre && i < plan->head_dim; i++) x[i] += centre[i];
    if (!plan->wave_pairs) return;
    const float *wave = moments_of(plan, t, head).wave;
    for (int32_t i = 0; i < plan->wave_pairs; i++) add_pair(t, i, wave, position, 1.0f, x);
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

void tq_metric_query(const tq_plan *plan, const tq_transform *t, int32_t head, float *x)
{
    if (!plan->metric) return;
    int32_t d = plan->head_dim, rank = rank_of(plan);
    head_moments m = moments_of(plan, t, head);
    float along[TQ_MAX_METRIC_RANK];
    for (int32_t i = 0; i < d; i++) x[i] = x[i] / m.scale[i];
    for (int32_t r = 0; r < rank; r++)
        along[r] = (1.0f / (1.0f + m.stretch[r]) - 1.0f) * dot(m.directions + r * d, x, d);
    for (int32_t r = 0; r < rank; r++)
        for (int32_t i = 0; i < d; i++) x[i] += along[r] * m.directions[r * d + i];
    for (int32_t i = 0; i < d; i++) x[i] = x[i] / m.scale[i];
}

void tq_residual_to_key(const tq_plan *plan, const tq_transform *t, int32_t head, int64_t position, const float *centre,
                        float *k)
{
    tq_metric_query(plan, t, head, k);
    add_centre(plan, t, head, position, centre, k);
}

/* ---- the wave's part of scores ---- */

int64_t tq_wave_table_floats(const tq_plan *plan) { return (int64_t)plan->wave_pairs * plan->page_tokens; }

int64_t tq_wave_node_floats(const tq_plan *plan) { return 2 * TQ_WAVE_NODES * (int64_t)plan->wave_pairs; }

int64_t tq_wave_turn_floats(const tq_plan *plan) { return 4 * (int64_t)plan->wave_pairs; }

/** The positive Chebyshev nodes cos(pi (2 n + 1) / 32): distances from the middle of a page; its last token is at 1. */
static const double node_at[TQ_WAVE_NODES] = {0.99518472667219688624, 0.95694033573220886494, 0.88192126434835502971,
                                              0.77301045336273696081, 0.63439328416364549822, 0.47139673682599764856,
                                              0.29028467725446236764, 0.09801714032956060199};

/** Computes cosine and sine of a pair's angle over `twice` / 2 positions. */
static void turn_by_halves(int32_t increment, int64_t twice, float *cosine, float *sine)
{
    tq_turn((uint32_t)(increment * twice >> 1), cosine, sine); /* wraps: only the low 32 bits matter */
}

/** Evaluates the Lagrange polynomials of the nodes at x in -1..1. Even ones are 1 at +-node n and 0 at the others; odd
 *  ones are 1 at the node and -1 at its mirror image. */
static void fill_polynomials(double x, float *even, float *odd, int32_t stride)
{
    for (int32_t n = 0; n < TQ_WAVE_NODES; n++) {
        double at = node_at[n], product = 1;
        for (int32_t m = 0; m < TQ_WAVE_NODES; m++)
            if (m != n) product *= (x * x - node_at[m] * node_at[m]) / (at * at - node_at[m] * node_at[m]);
        even[n * stride] = (float)product;
        odd[n * stride] = (float)(product * x / at);
    }
}

/** Orders pairs: fast ones first. */
static void place_pairs(const tq_plan *plan, const tq_transform *t, tq_wave *wave)
{
    double slowest = 2 * TQ_SLOW_RADIANS / (plan->page_tokens - 1) * (4294967296.0 / 6.283185307179586);
    int32_t fast = 0, slow = 0;
    for (int32_t i = 0; i < plan->wave_pairs; i++) slow += fabs((double)t->turns[3 * i + 2]) <= slowest;
    slow = slow >= TQ_WAVE_NODES ? slow & ~1 : 0;
    wave->pairs = plan->wave_pairs;
    wave->fast = plan->wave_pairs - slow;
    wave->terms = wave->fast + (slow ? TQ_WAVE_NODES : 0);
    wave->half = plan->page_tokens / 2;
    for (int32_t i = 0, next = wave->fast; i < plan->wave_pairs; i++) {
        int is_slow = next < plan->wave_pairs && fabs((double)t->turns[3 * i + 2]) <= slowest;
        wave->place[i] = (int16_t)(is_slow ? next++ : fast++);
    }
}

static void fill_table(const tq_plan *plan, const tq_transform *t, tq_wave *wave)
{
    int32_t half = wave->half, last = plan->page_tokens - 1;
    float *of_nodes = wave->table + (int64_t)wave->fast * half, *sines = wave->table + (int64_t)wave->terms * half;
    for (int32_t c = 0; c < half; c++) {
        int32_t column = half + c, token = column / TQ_TILE * TQ_TILE + tq_token(column % TQ_TILE);
        int64_t twice = 2 * token - last; /* positions from the middle of the page, times 2 */
        for (int32_t i = 0; i < plan->wave_pairs; i++) {
            int64_t at = (int64_t)wave->place[i] * half + c;
            if (wave->place[i] < wave->fast) turn_by_halves(t->turns[3 * i + 2], twice, &wave->table[at], &sines[at]);
        }
        if (wave->fast < wave->pairs)
            fill_polynomials((double)twice / last, of_nodes + c, of_nodes + (int64_t)wave->terms * half + c, half);
    }
    for (int32_t i = 0; i < plan->wave_pairs; i++) {
        float *at = wave->nodes + (int64_t)(wave->place[i] - wave->fast) * 2 * TQ_WAVE_NODES;
        for (int32_t n = 0; n < TQ_WAVE_NODES && wave->place[i] >= wave->fast; n++) {
            double phase = t->turns[3 * i + 2] * (node_at[n] * last / 2);
            tq_turn((uint32_t)(int64_t)phase, &at[2 * n], &at[2 * n + 1]);
        }
    }
}

enum { STRIDE = 16 }; /* pages */

/** Computes every sixteenth page from its phases, and turns it by shared angles for the pages after it. */
static void fill_turns(const tq_plan *plan, const tq_transform *t, int32_t sinks, int64_t pages, tq_wave *wave)
{
    float steps[STRIDE][TQ_MAX_HEAD_DIM / 2][2], start[TQ_MAX_HEAD_DIM / 2][2];
    int32_t tokens = plan->page_tokens, pairs = plan->wave_pairs;
    for (int32_t i = 0; i < pairs; i++)
        for (int32_t k = 1; k < STRIDE && k < pages; k++)
            tq_turn(tq_phase((uint32_t)t->turns[3 * i + 2], k * (int64_t)tokens), &steps[k][wave->place[i]][0],
                    &steps[k][wave->place[i]][1]);
    for (int64_t page = 0; page < pages; page++) {
        float *cosines = wave->turns + page * tq_wave_turn_floats(plan), *sines = cosines + 2 * pairs;
        int64_t twice = 2 * (sinks + (wave->first_page + page) * tokens) + tokens - 1;
        const float (*step)[2] = (const float (*)[2])steps[page % STRIDE];
        for (int32_t i = 0; i < pairs && page % STRIDE == 0; i++)
            turn_by_halves(t->turns[3 * i + 2], twice, &start[wave->place[i]][0], &start[wave->place[i]][1]);
        for (int32_t i = 0; i < pairs; i++) {
            float c = start[i][0], s = start[i][1];
            if (page % STRIDE) {
                c = start[i][0] * step[i][0] - start[i][1] * step[i][1];
                s = start[i][0] * step[i][1] + start[i][1] * step[i][0];
            }
            cosines[2 * i] = cosines[2 * i + 1] = c;
            sines[2 * i] = sines[2 * i + 1] = s;
        }
    }
}

void tq_wave_fill(const tq_plan *plan, const tq_transform *t, int32_t sinks, int64_t last_page, tq_wave *wave)
{
    place_pairs(plan, t, wave);
    fill_table(plan, t, wave);
    fill_turns(plan, t, sinks, last_page - wave->first_page, wave);
}

void tq_wave_row(const tq_plan *plan, const tq_transform *t, int32_t head, const tq_wave *wave, const float *q,
                 int64_t origin, float *row)
{
    const float *of_head = moments_of(plan, t, head).wave;
    float *crossed = row + 2 * plan->wave_pairs;
    for (int32_t i = 0; i < plan->wave_pairs; i++) {
        float a = of_head[2 * i], b = of_head[2 * i + 1], x = q[t->turns[3 * i]], y = q[t->turns[3 * i + 1]];
        int32_t at = 2 * wave->place[i];
        float along = x * a + y * b, across = y * a - x * b;
        if (origin) {
            float cosine, sine, unturned = along;
            tq_turn(tq_phase((uint32_t)t->turns[3 * i + 2], origin), &cosine, &sine);
            along = unturned * cosine + across * sine;
            across = across * cosine - unturned * sine;
        }
        row[at] = crossed[at + 1] = along;
        row[at + 1] = crossed[at] = across;
        crossed[at + 1] = -crossed[at + 1];
    }
}
