/* Rotations: the plan's random-sign Hadamard, and dense matrices. */
#include "internal.h"
#include <math.h>
#include <string.h>

static int32_t power_of_two_at_most(int32_t n)
{
    int32_t p = 1;
    while (2 * p <= n) p *= 2;
    return p;
}

float tq_hadamard_factor(int32_t p) { return (float)(1.0 / sqrt((double)p)); }

/* turboquant.h, "The Hadamard rotation": one pass, or two that overlap. H is its own inverse, so the inverse changes
 * signs last. */
static void rotate_hadamard(const tq_kernels *kernels, const tq_plan *plan, int inverse, float *x)
{
    int32_t p = power_of_two_at_most(plan->head_dim), passes = p < plan->head_dim ? 2 : 1;
    float factor = tq_hadamard_factor(p);
    for (int32_t i = 0; i < passes; i++) {
        int32_t pass = inverse ? passes - 1 - i : i;
        float *part = pass ? x + plan->head_dim - p : x;
        kernels->hadamard(part, p, factor, inverse ? NULL : plan->signs[pass], inverse ? plan->signs[pass] : NULL);
    }
}

/** Computes y = M x, or M^T x if transposed. M is n x n, row-major; y may not overlap x. */
static void multiply(const tq_kernels *kernels, const float *matrix, int transposed, const float *x, float *y,
                     int32_t n)
{
    if (transposed) memset(y, 0, sizeof(float) * (size_t)n);
    for (int64_t i = 0; i < n; i++)
        if (transposed) kernels->axpy(x[i], matrix + i * n, y, n);
        else y[i] = kernels->dot(matrix + i * n, x, n);
}

void tq_rotate_vector(const tq_kernels *kernels, const tq_plan *plan, int32_t rotation, const float *matrix,
                      int inverse, const float *x, float *y)
{
    if (matrix) {
        multiply(kernels, matrix, inverse, x, y, plan->head_dim);
        return;
    }
    if (y != x) memcpy(y, x, sizeof(float) * (size_t)plan->head_dim);
    if (rotation == TQ_ROTATION_HADAMARD) rotate_hadamard(kernels, plan, inverse, y);
}

tq_status tq_rotate(const tq_plan *plan, const float *matrix, int inverse, const float *x, float *y, int64_t rows,
                    tq_error *error)
{
    TQ_TRY(tq_check_rotate(plan, matrix, TQ_F32, x, y, rows, error));
    const tq_kernels *kernels = tq_get_kernels(error);
    if (!kernels) return TQ_E_UNSUPPORTED;
    float row[TQ_MAX_DIM]; /* a dense product cannot work in place */
    for (int64_t i = 0; i < rows; i++) {
        memcpy(row, x + i * plan->head_dim, sizeof(float) * (size_t)plan->head_dim);
        tq_rotate_vector(kernels, plan, plan->rotation, matrix, inverse, row, y + i * plan->head_dim);
    }
    return TQ_OK;
}
