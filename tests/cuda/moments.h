/* A wave and a metric of keys for the CUDA harnesses, and in float64 what they turn a decoded key into. */
#ifndef TQ_TESTS_CUDA_MOMENTS_H
#define TQ_TESTS_CUDA_MOMENTS_H
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <random>
#include <vector>

#include "turboquant.h"

struct MomentSizes {
    int dim, heads, pairs, metric; /* metric: 1 + its rank, or 0 */
    float wave_size = 5;           /* norm of the amplitudes of a head */
    bool neighbours = false;       /* pairs are channels 2 i and 2 i + 1, not i and i + dim / 2 */
};

/** Joins a side's numbers by head, as in turboquant.h (tq_transform). Centres, steps and moments are [heads][n] each,
 *  or empty. */
inline std::vector<float> join_numbers(int heads, const std::vector<float> &centre, const std::vector<float> &steps,
                                       const std::vector<float> &moments = {})
{
    std::vector<float> out;
    for (int h = 0; h < heads; h++)
        for (const std::vector<float> *part : {&centre, &steps, &moments}) {
            const size_t n = part->size() / heads;
            out.insert(out.end(), part->begin() + h * n, part->begin() + (h + 1) * n);
            if (part == &steps) out.insert(out.end(), -n % 4, 1.0f);
        }
    return out;
}

/** Points a transform into n such numbers at `at`, which is NULL if there are none. */
inline void use_numbers(const tq_plan &plan, bool is_value, int heads, size_t n, const void *at, tq_transform *t)
{
    tq_error error;
    if (tq_transform_numbers(&plan, is_value, (const float *)at, n / heads, t, &error) == TQ_OK) return;
    fprintf(stderr, "%s: %s, got %g\n", error.argument, error.wants, error.got);
    exit(2);
}

/** The turns and moments of a tq_transform. Pairs turn as in models, but pair 3 backwards, pair 5 by half a turn. */
struct Moments {
    MomentSizes sizes;
    std::vector<int32_t> turns;
    std::vector<float> numbers;
    int stride; /* numbers of a head */

    Moments(const MomentSizes &s, const tq_plan &plan, std::mt19937 &random) : sizes(s), stride(plan.moments)
    {
        const int half = s.dim / 2;
        for (int i = 0; i < s.pairs; i++) {
            const int pair = i < half ? i : 0; /* padding pairs have amplitudes of 0 */
            const double turn = pow(s.dim == 64 ? 1e6 : 1e4, -2.0 * pair / s.dim) * pow(2, 32) / (2 * M_PI);
            turns.push_back(s.neighbours ? 2 * pair : pair);
            turns.push_back(s.neighbours ? 2 * pair + 1 : pair + half);
            turns.push_back(i == 5 ? INT32_MIN : (int32_t)llround(i == 3 ? -turn : turn));
        }
        for (int h = 0; stride && h < s.heads; h++) add_head(random);
    }

    /** Replaces x by A^-1 x, with the metric A of a head. */
    void undo_metric(int h, double *x) const
    {
        if (!sizes.metric) return;
        const int d = sizes.dim;
        const float *scale = &numbers[(size_t)h * stride] + 2 * sizes.pairs, *directions = scale + d,
                    *stretch = scale + (size_t)sizes.metric * d;
        double along[TQ_MAX_METRIC_RANK] = {};
        for (int i = 0; i < d; i++) x[i] /= scale[i];
        for (int r = 0; r + 1 < sizes.metric; r++)
            for (int i = 0; i < d; i++) along[r] += directions[r * d + i] * x[i];
        for (int r = 0; r + 1 < sizes.metric; r++)
            for (int i = 0; i < d; i++) x[i] += (1 / (1.0 + stretch[r]) - 1) * along[r] * directions[r * d + i];
        for (int i = 0; i < d; i++) x[i] /= scale[i];
    }

    /** Replaces a decoded residual x by the key less its constant centre: A^-1 x + wave. */
    void apply(int h, int position, double *x) const
    {
        if (!stride) return;
        const float *wave = &numbers[(size_t)h * stride];
        undo_metric(h, x);
        for (int i = 0; i < sizes.pairs; i++) {
            const uint32_t phase = (uint32_t)turns[3 * i + 2] * (uint32_t)position;
            const double angle = phase * (2 * M_PI / 4294967296.0), a = wave[2 * i], b = wave[2 * i + 1];
            x[turns[3 * i]] += a * cos(angle) - b * sin(angle);
            x[turns[3 * i + 1]] += a * sin(angle) + b * cos(angle);
        }
    }

private:
    void add_head(std::mt19937 &random)
    {
        std::normal_distribution<float> normal;
        const int d = sizes.dim, rank = sizes.metric - 1;
        const size_t first = numbers.size(), at_directions = first + 2 * sizes.pairs + d;
        double norm = 0;
        for (int i = 0; i < 2 * sizes.pairs; i++) {
            numbers.push_back(i / 2 < d / 2 ? normal(random) : 0);
            norm += numbers.back() * numbers.back();
        }
        for (int i = 0; i < 2 * sizes.pairs; i++) numbers[first + i] *= sizes.wave_size / (float)sqrt(norm);
        for (int i = 0; sizes.metric && i < d; i++) numbers.push_back(expf(0.4f * normal(random)));
        for (int r = 0; r < rank; r++) { /* orthonormal */
            std::vector<double> w(d);
            for (double &x : w) x = normal(random);
            for (int before = 0; before <= r; before++) {
                const float *other = before < r ? &numbers[at_directions + before * d] : nullptr;
                double dot = 0;
                for (int i = 0; i < d; i++) dot += w[i] * (other ? (double)other[i] : w[i]);
                for (int i = 0; i < d; i++) w[i] = other ? w[i] - dot * other[i] : w[i] / sqrt(dot);
            }
            numbers.insert(numbers.end(), w.begin(), w.end());
        }
        for (int r = 0; sizes.metric && r < TQ_MAX_METRIC_RANK; r++)
            numbers.push_back(r < rank ? (r % 2 ? 3.0f : -0.6f) : 0.0f);
        if ((int)(numbers.size() - first) == stride) return;
        printf("a head has %d numbers, not %d\n", stride, (int)(numbers.size() - first));
        exit(2);
    }
};

#endif
