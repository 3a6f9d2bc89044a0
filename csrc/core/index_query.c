/* A query for the scan over leading bits: lookup tables, and a bound on the difference between a sum and the score.
 *
 * The leading fields of a code (2 bits each, from the highest on; the last may have 1) estimate its level c by a sum
 * with one value for each field. The values are the best additive fit to c under N(0, 1), times a factor that makes
 * E[estimate u] = E[c u]. Without the factor, neighbours, whose u resemble the query's, would be estimated too low. */
#include "index_internal.h"
#include <math.h>
#include <pthread.h>
#include <string.h>

enum { FIELDS = TQ_SCAN_BITS / 2 };

typedef struct {
    float values[FIELDS][4]; /* by field and its bits; a field of 1 bit has two */
    double error;            /* E[(estimate - c)^2] */
} lead_fit;

static lead_fit fits[TQ_WIDE_BITS + 1][TQ_SCAN_BITS + 1]; /* by bits, lead */
static pthread_once_t fits_once = PTHREAD_ONCE_INIT;

/** Returns exp(-y), 0 <= y <= 18, by sums and products alone, so that it is the same on every machine. */
static double exp_minus(double y)
{
    double x = -y / 1024, term = 1, sum = 1;
    for (int32_t k = 1; k < 7; k++) sum += term *= x / k;
    for (int32_t k = 0; k < 10; k++) sum *= sum;
    return sum;
}

/** For each code of a width, under N(0, 1): probability, level, and probability * E[u | code]. */
typedef struct {
    int32_t n;
    double p[256], level[256], first[256];
} code_law;

static void make_law(int32_t bits, code_law *law)
{
    const tq_index_book *book = &tq_index_books()[bits];
    memset(law, 0, sizeof *law);
    law->n = 1 << bits;
    for (int32_t code = 0; code < law->n; code++)
        law->level[code] = (book->n_levels ? book->levels[code] : code - 128) * (double)book->step;
    double all = 0;
    for (int32_t i = 0; i < 12 * 512; i++) {
        double u = (i + 0.5) / 512 - 6, weight = exp_minus(u * u / 2);
        int32_t code = 0;
        if (book->n_levels)
            for (int32_t k = 0; k + 1 < book->n_levels; k++) code += u >= book->thresholds[k];
        else code = (int32_t)rint(u / TQ_WIDE_STEP) + 128;
        if (!book->n_levels) code = code < 1 ? 1 : code > 255 ? 255 : code;
        law->p[code] += weight;
        law->first[code] += weight * u;
        all += weight;
    }
    for (int32_t code = 0; code < law->n; code++) {
        law->p[code] /= all;
        law->first[code] /= all;
    }
}

/** Returns the bits of field f of a code. Fields have two bits; the last may have one. */
static int32_t field_of(int32_t code, int32_t bits, int32_t lead, int32_t f)
{
    int32_t width = lead - 2 * f > 1 ? 2 : 1;
    return code >> (bits - 2 * f - width) & ((1 << width) - 1);
}

static void fit(const code_law *law, int32_t bits, int32_t lead, lead_fit *out)
{
    double values[FIELDS][4] = {{0}}, slope = 0, wanted = 0;
    int32_t n = (lead + 1) / 2;
    for (int32_t round = 0; round < 40; round++) /* each field in turn fits what the others leave */
        for (int32_t f = 0; f < n; f++) {
            double p[4] = {0}, sum[4] = {0};
            for (int32_t code = 0; code < law->n; code++) {
                double rest = law->level[code];
                for (int32_t h = 0; h < n; h++) rest -= h == f ? 0 : values[h][field_of(code, bits, lead, h)];
                p[field_of(code, bits, lead, f)] += law->p[code];
                sum[field_of(code, bits, lead, f)] += law->p[code] * rest;
            }
            for (int32_t k = 0; k < 4; k++) values[f][k] = p[k] > 0 ? sum[k] / p[k] : 0;
        }
    for (int32_t code = 0; code < law->n; code++) {
        for (int32_t f = 0; f < n; f++) slope += law->first[code] * values[f][field_of(code, bits, lead, f)];
        wanted += law->first[code] * law->level[code];
    }
    double factor = slope > 0 ? wanted / slope : 0;
    out->error = 0;
    for (int32_t code = 0; code < law->n; code++) {
        double miss = -law->level[code];
        for (int32_t f = 0; f < n; f++) miss += factor * values[f][field_of(code, bits, lead, f)];
        out->error += law->p[code] * miss * miss;
    }
    for (int32_t f = 0; f < n; f++)
        for (int32_t k = 0; k < 4; k++) out->values[f][k] = (float)(factor * values[f][k]);
}

static void make_fits(void)
{
    static code_law law;
    for (int32_t bits = 1; bits <= TQ_WIDE_BITS; bits++) {
        if (bits == TQ_WIDE_BITS - 1) continue;
        make_law(bits, &law);
        for (int32_t lead = 0; lead <= bits && lead <= TQ_SCAN_BITS; lead++) fit(&law, bits, lead, &fits[bits][lead]);
    }
}

double tq_index_lead_error(int32_t bits, int32_t lead)
{
    if (bits < 0 || bits > TQ_WIDE_BITS || bits == TQ_WIDE_BITS - 1 || lead < 0 || lead > bits || lead > TQ_SCAN_BITS)
        return NAN;
    pthread_once(&fits_once, make_fits);
    return fits[bits][lead].error;
}

void tq_index_estimates(int32_t bits, int32_t lead, float *levels, float *estimates)
{
    const tq_index_book *book = &tq_index_books()[bits];
    memset(levels, 0, 256 * sizeof *levels);
    memset(estimates, 0, 256 * sizeof *estimates);
    pthread_once(&fits_once, make_fits);
    for (int32_t code = 0; bits && code < 1 << bits; code++) {
        levels[code] = (float)(book->n_levels ? book->levels[code] : code - 128) * book->step;
        for (int32_t f = 0; 2 * f < lead; f++)
            estimates[code] += fits[bits][lead].values[f][field_of(code, bits, lead, f)];
    }
}

/* ---- tables ---- */

int32_t tq_sign_tables(int32_t planes) { return (planes + 2) / 3 * 4; }

/** What each pair of bits of a plane adds to a query's estimate, by pair and value. */
typedef struct {
    float at[4][4];
} plane_values;

/* n: bytes of a field of 1 bit: 4 in a group of 32 channels, 1 in a group of 8. */

static void plane_of_two(const float *z, int32_t n, const float values[4], int32_t i, plane_values *out)
{
    for (int32_t k = 0; k < 4; k++)
        for (int32_t e = 0; e < 4; e++) out->at[k][e] = z[2 * n * k + i] * values[e];
}

static void plane_of_one(const float *z, int32_t n, const float values[4], int32_t i, plane_values *out)
{
    for (int32_t k = 0; k < 4; k++)
        for (int32_t e = 0; e < 4; e++)
            out->at[k][e] = z[2 * n * k + i] * values[e & 1] + z[2 * n * k + n + i] * values[e >> 1];
}

/** Shifts the values of each pair so that the least is 0. Returns the sum of the shifts. */
static float from_zero(plane_values *plane)
{
    float taken = 0;
    for (int32_t k = 0; k < 4; k++) {
        float *v = plane->at[k], a = v[0] < v[1] ? v[0] : v[1], b = v[2] < v[3] ? v[2] : v[3], least = a < b ? a : b;
        for (int32_t e = 0; e < 4; e++) v[e] -= least;
        taken += least;
    }
    return taken;
}

static float largest_of(const float v[4])
{
    float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
}

/** Finds the three pairs of bits that index table t (kernels/scan_signs.h). */
static void pairs_of(const plane_values *planes, int32_t t, const float *pairs[3])
{
    const plane_values *first = planes + t / 4 * 3;
    for (int32_t k = 0; k < 3; k++) pairs[k] = t % 4 < 3 ? first[t % 4].at[k] : first[k].at[3];
}

/** The second bound is this much wider, so that hardly a row is lost whose first bound holds. */
static const double WIDER = 1.2;

/** Adds the second bound. A level is about s a + t b, with s and t the signs of the leading bit and of the next; `sum`
 *  has s with another factor. squares: sum of q^2; rounding: variance of `sum` by rounding, in the query's units. */
static void add_next(const tq_index_use *use, double squares, double unit, double rounding, float least,
                     tq_sign_query *out)
{
    int32_t bits = use->layout.even_bits;
    const float *own = fits[bits][1].values[0], *both = fits[bits][2].values[0];
    double ratio = (both[3] + both[2]) / 2 / own[1], level = unit / tq_index_step(bits);
    double variance = level * level * squares * fits[bits][2].error + ratio * ratio * rounding;
    out->both_unit = (float)(ratio * out->unit);
    out->next_unit = (float)(level * (both[3] - both[2]) / 2);
    out->both_margin = (float)(WIDER * use->space->sigmas * sqrt(variance > 0 ? variance : 0) + ratio * least);
}

uint16_t tq_sign_sum(const uint8_t *tables, int32_t planes, const uint8_t *lead)
{
    int32_t sum = 0;
    for (int32_t p = 0; p < planes; p += 3, tables += 256) {
        int32_t rest = 0;
        for (int32_t i = 0; i < 3 && p + i < planes; i++) {
            sum += tables[64 * i + (lead[p + i] & 63)];
            rest |= lead[p + i] >> 6 << 2 * i;
        }
        for (int32_t i = planes - p; i < 3; i++) sum += tables[64 * i];
        sum += tables[192 + rest];
    }
    return (uint16_t)sum;
}

void tq_sign_query_make(const tq_index_use *use, const int16_t *q, double unit, uint8_t *tables, tq_sign_query *out)
{
    const tq_index_layout *layout = use->layout.layout;
    plane_values planes[TQ_INDEX_MAX_PLANES + 2];
    float least = 0, largest = 0;
    double variance = 0, squares = 0;
    int32_t n = 0;
    pthread_once(&fits_once, make_fits);
    for (int32_t at = 0, size; at < layout->channels; at += size) {
        int32_t bits = layout->bits[at / 32], lead = layout->lead[at / 32];
        size = layout->channels - at / 32 * 32 < 32 ? 8 : 32;
        if (!bits) continue;
        const lead_fit *its = &fits[bits][lead];
        float z[32];
        double level = unit / tq_index_step(bits);
        for (int32_t j = 0; j < size; j++) {
            z[j] = (float)(level * q[at + j]);
            variance += (double)z[j] * z[j] * its->error;
            squares += (double)q[at + j] * q[at + j];
        }
        for (int32_t f = 0; 2 * f < lead; f++)
            for (int32_t width = lead - 2 * f > 1 ? 2 : 1, i = 0; i < size / 8 * width; i++, n++) {
                if (width == 2) plane_of_two(z, size / 8, its->values[f], i, &planes[n]);
                else plane_of_one(z, size / 8, its->values[f], i, &planes[n]);
                least += from_zero(&planes[n]);
            }
    }
    memset(planes + n, 0, 2 * sizeof *planes);
    int32_t count = tq_sign_tables(n);
    const float *pairs[3];
    for (int32_t t = 0; t < count; t++) {
        pairs_of(planes, t, pairs);
        float own = largest_of(pairs[0]) + largest_of(pairs[1]) + largest_of(pairs[2]);
        if (own > largest) largest = own;
    }
    float factor = largest > 0 ? 63.0f / largest : 0;
    for (int32_t t = 0; t < count; t++) {
        pairs_of(planes, t, pairs);
        use->scan->fill_table(pairs, factor, tables + 64 * t);
    }
    out->unit = largest / 63.0f;
    out->inverse_unit = largest > 0 ? 63.0f / largest : 0;
    double rounding = count * (double)out->unit * out->unit / 12; /* of the entries */
    variance += rounding;
    out->margin = (float)(use->space->sigmas * sqrt(variance > 0 ? variance : 0) + least);
    if (use->layout.next) add_next(use, squares, unit, rounding, least, out);
}
