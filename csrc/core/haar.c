/* Gaussian matrices, and Haar-distributed rotations made of them (Stewart, SIAM J. Numer. Anal. 17, 1980): a product of
 * Householder reflections of Gaussian vectors.
 * Everything is float64 +, -, *, /, sqrt and frexp in a fixed order, so that a seed gives the same matrix on every
 * machine. libm's log would not. */
#include "internal.h"
#include "turboquant_schemes.h"
#include <math.h>

#define HAAR_STREAM ((uint64_t)1 << 32)   /* apart from the streams of the Hadamard signs */
#define SKETCH_STREAM ((uint64_t)1 << 33) /* apart from the rotation of the same seed */

/* ln r = 2 artanh((m - 1) / (m + 1)) + e ln 2 with r = m 2^e, sqrt(1/2) <= m < sqrt(2); the series to t^41 is exact to
 * rounding. */
static double fixed_log(double r)
{
    int e;
    double m = frexp(r, &e);
    if (m < 0.70710678118654752440) {
        m = m + m;
        e = e - 1;
    }
    double t = (m - 1.0) / (m + 1.0), s = t * t, p = 1.0 / 41.0;
    for (int k = 39; k >= 1; k -= 2) p = p * s + 1.0 / k;
    return (2.0 * t) * p + e * 0.693147180559945309417232;
}

/** Gaussians by Marsaglia's polar method, in pairs from the words of tq_random. */
typedef struct {
    uint64_t seed, stream, block;
    uint32_t words[4];
    int next_word; /* 0, 2, or 4: draw the next block */
    double spare;
    int has_spare;
} gaussian_source;

static double signed_unit(uint32_t word) { return ((double)word + 0.5) / 4294967296.0 * 2.0 - 1.0; }

static double next_gaussian(gaussian_source *s)
{
    if (s->has_spare) {
        s->has_spare = 0;
        return s->spare;
    }
    for (;;) {
        if (s->next_word == 4) {
            tq_random(s->seed, s->stream, s->block++, s->words);
            s->next_word = 0;
        }
        double a = signed_unit(s->words[s->next_word]), b = signed_unit(s->words[s->next_word + 1]), r = a * a + b * b;
        s->next_word += 2;
        if (r >= 1.0) continue;
        double f = sqrt((-2.0 * fixed_log(r)) / r);
        s->spare = b * f;
        s->has_spare = 1;
        return a * f;
    }
}

/** Reflects the trailing k x k block of m [head_dim, head_dim] by a new Gaussian vector. v and w [k] are workspace. */
static void reflect_block(double *block, int64_t head_dim, int32_t k, gaussian_source *source, double *v, double *w)
{
    double norm2 = 0.0;
    for (int32_t i = 0; i < k; i++) v[i] = next_gaussian(source);
    for (int32_t i = 0; i < k; i++) norm2 = norm2 + v[i] * v[i];
    double norm = sqrt(norm2), sign = v[0] >= 0 ? 1.0 : -1.0, beta = 1.0 / (norm2 + fabs(v[0]) * norm);
    v[0] = v[0] + sign * norm;
    for (int32_t j = 0; j < k; j++) w[j] = 0.0;
    for (int32_t i = 0; i < k; i++)
        for (int32_t j = 0; j < k; j++) w[j] = w[j] + v[i] * block[i * head_dim + j];
    for (int32_t j = 0; j < k; j++) w[j] = beta * w[j];
    for (int32_t i = 0; i < k; i++)
        for (int32_t j = 0; j < k; j++) block[i * head_dim + j] = sign * (v[i] * w[j] - block[i * head_dim + j]);
}

tq_status tq_haar(uint64_t seed, int32_t head_dim, float *matrix, double *workspace, tq_error *error)
{
    if (head_dim < 8 || head_dim > TQ_MAX_DIM || head_dim % 8)
        return tq_refuse(error, "head_dim", head_dim, "a multiple of 8 in 8..4096");
    if (!matrix || !workspace) return tq_refuse(error, matrix ? "workspace" : "matrix", 0, "a pointer, not NULL");
    int64_t n = head_dim;
    double *m = workspace, *v = workspace + n * n, *w = v + n;
    gaussian_source source = {.seed = seed, .stream = HAAR_STREAM, .next_word = 4};
    for (int64_t i = 0; i < n * n; i++) m[i] = i % (n + 1) == 0;
    for (int32_t k = 1; k <= head_dim; k++) reflect_block(m + (n - k) * (n + 1), n, k, &source, v, w);
    for (int64_t i = 0; i < n * n; i++) matrix[i] = (float)m[i];
    return TQ_OK;
}

tq_status tq_gaussian(uint64_t seed, int32_t rows, int32_t head_dim, float *matrix, tq_error *error)
{
    if (rows < 1 || rows > TQ_MAX_DIM) return tq_refuse(error, "rows", rows, "in 1..4096");
    if (head_dim < 1 || head_dim > TQ_MAX_DIM) return tq_refuse(error, "head_dim", head_dim, "in 1..4096");
    if (!matrix) return tq_refuse(error, "matrix", 0, "a pointer, not NULL");
    gaussian_source source = {.seed = seed, .stream = SKETCH_STREAM, .next_word = 4};
    for (int64_t i = 0; i < (int64_t)rows * head_dim; i++) matrix[i] = (float)next_gaussian(&source);
    return TQ_OK;
}
