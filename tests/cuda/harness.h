// What the CUDA harnesses share: memory on the device, random numbers, plans, and rows in the model's dtype. A harness
// is a program without Python that compares the launchers with the C core or with float64. Most also time them.
#ifndef TQ_TESTS_CUDA_HARNESS_H
#define TQ_TESTS_CUDA_HARNESS_H
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/convert.h"
#include "turboquant_cuda.h"
#include "turboquant_schemes.h"

inline void check(cudaError_t e, const char *what)
{
    if (e == cudaSuccess) return;
    printf("FAILED: %s: %s\n", what, cudaGetErrorString(e));
    exit(1);
}

inline void check(tq_status status, const tq_error &error, const char *what)
{
    if (status == TQ_OK) return;
    printf("FAILED: %s: `%s`[%ld] must be %s, got %g\n", what, error.argument, (long)error.index, error.wants,
           error.got);
    exit(1);
}

/** An array on the host and its copy on the device. */
template <class T> struct Array {
    std::vector<T> host;
    T *device = nullptr;

    explicit Array(size_t n = 0) : host(n) { check(cudaMalloc((void **)&device, n * sizeof(T) + 256), "cudaMalloc"); }
    ~Array() { cudaFree(device); }
    Array(const Array &) = delete;
    Array &operator=(const Array &) = delete;
    size_t bytes() const { return host.size() * sizeof(T); }
    void up() { check(cudaMemcpy(device, host.data(), bytes(), cudaMemcpyHostToDevice), "copy to the device"); }
    std::vector<T> down() const
    {
        std::vector<T> got(host.size());
        check(cudaMemcpy(got.data(), device, bytes(), cudaMemcpyDeviceToHost), "copy from the device");
        return got;
    }
    T *or_null() { return host.empty() ? nullptr : device; }
    T *host_or_null() { return host.empty() ? nullptr : host.data(); }
};

/** The project's own generator, so that a seed names the same numbers everywhere. */
struct Random {
    uint64_t seed, block = 0;
    uint32_t words[4];
    int used = 4;

    explicit Random(uint64_t s) : seed(s) {}
    uint32_t word()
    {
        if (used == 4) tq_random(seed, 77, block++, words), used = 0;
        return words[used++];
    }
    int below(int n) { return (int)(word() % (uint32_t)n); }
    float uniform() { return ((float)(word() >> 8) + 0.5f) * 0x1p-24f; }
    float normal() { return sqrtf(-2 * logf(uniform())) * cosf(6.2831853f * uniform()); }
};

inline int dtype_size(int dtype) { return dtype == TQ_F32 ? 4 : 2; }

inline void store(std::vector<uint8_t> &to, size_t i, int dtype, float x)
{
    uint16_t half = dtype == TQ_F16 ? tq_f16_from_f32(x) : tq_bf16_from_f32(x);
    if (dtype == TQ_F32) memcpy(&to[4 * i], &x, 4);
    else memcpy(&to[2 * i], &half, 2);
}

inline float load(const std::vector<uint8_t> &from, size_t i, int dtype)
{
    float x;
    uint16_t half;
    if (dtype == TQ_F32) return memcpy(&x, &from[4 * i], 4), x;
    memcpy(&half, &from[2 * i], 2);
    return dtype == TQ_F16 ? tq_f32_from_f16(half) : tq_f32_from_bf16(half);
}

inline tq_plan plan_of(const std::vector<int64_t> &words)
{
    tq_plan plan;
    tq_error error;
    check(tq_plan_init(&plan, words.data(), words.size(), &error), error, "tq_plan_init");
    return plan;
}

/** group: channels, 32 or 16. */
inline tq_plan make_plan(int dim, int page_tokens, int rotation, int law, int scale, const std::vector<int> &key_bits,
                         const std::vector<int> &value_bits, int group = TQ_TILE, int wave_pairs = 0, int metric = 0,
                         int tries = 0, bool variance = false)
{
    const int groups = (dim + group - 1) / group;
    bool has_values = false;
    for (int g = 0; g < groups; g++) has_values |= value_bits[g % value_bits.size()] != 0;
    std::vector<int64_t> words = {TQ_FORMAT_VERSION, dim, page_tokens, group, law, scale, 1234567 + dim};
    for (int rotates : {rotation, has_values ? rotation : 0}) words.insert(words.end(), {rotates, 0, 0, 0});
    words.insert(words.end(), {wave_pairs, metric, tries, variance});
    for (int g = 0; g < groups; g++) words.push_back(key_bits[g % key_bits.size()] + (g ? 0 : TQ_PLAN_NEW_BLOCK));
    for (int g = 0; g < groups; g++)
        words.push_back(value_bits[g % value_bits.size()] + (has_values && !g ? TQ_PLAN_NEW_BLOCK : 0));
    return plan_of(words);
}

/** Fills [matrix_rows][dim]: R if the side's rotation is dense, and below it S if its sketch is Gaussian. */
inline void fill_matrix(float *matrix, const tq_side &side, int dim, Random &random)
{
    const int rotation = side.rotation == TQ_ROTATION_DENSE ? dim : 0;
    std::vector<double> workspace((size_t)dim * (dim + 2));
    tq_error error;
    if (rotation) check(tq_haar(random.word(), dim, matrix, workspace.data(), &error), error, "tq_haar");
    if (side.matrix_rows > rotation)
        check(tq_gaussian(random.word(), side.matrix_rows - rotation, dim, matrix + (size_t)rotation * dim, &error),
              error, "tq_gaussian");
}

/** Fills the levels of one head in ascending order, and what the signs of a residual are multiplied by. */
inline void fill_table(float *table, const tq_side &side, Random &random)
{
    const int levels = 1 << side.bits[0];
    for (int i = 0; i < side.step_columns; i++) table[i] = i < levels ? 2 * random.normal() : 0.25f;
    std::sort(table, table + levels);
}

/** Fills rows like a model's. Each channel has its own spread, few a large one; some rows are zeros, tiny or large. */
inline void fill_rows(std::vector<uint8_t> &to, size_t rows, int dim, int dtype, Random &random)
{
    std::vector<float> spread(dim);
    static const float ties[] = {3, -17, 51, -55, 61, 63, -77, 115};
    for (float &s : spread) s = expf(random.normal()) * (random.below(16) ? 1.0f : 10.0f);
    for (size_t row = 0; row < rows; row++) {
        const int kind = random.below(24);
        const float factor = kind == 0 ? 0.0f : kind == 1 ? 1e-25f : kind == 2 ? 100.0f : kind == 3 ? 1e-20f : 1.0f;
        for (int c = 0; c < dim; c++) {
            float x = random.normal() * spread[c] * factor;
            if (kind == 4) x = random.below(8) ? 0.0f : x; // sparse: sums of equal numbers and of zeros, ties
            if (kind == 5) x = random.below(2) ? 1.0f : -1.0f;
            if (kind == 6) x = ties[c % 8] / 64; // their rms is 1, and without rotation codes of 8 bits are ties
            store(to, row * dim + c, dtype, fminf(fmaxf(x, -TQ_MAX_INPUT), TQ_MAX_INPUT));
        }
    }
}

constexpr int HARD_ROWS = 11;

/** Fills rows of one kind: normal, of any size, few large or few different numbers, tiny, of wide range, ties .. */
inline void fill_hard_rows(std::vector<uint8_t> &to, size_t rows, int dim, int dtype, int kind, Random &random)
{
    for (size_t row = 0; row < rows; row++) {
        const int hot = random.below(dim);
        const float size = kind == 1   ? expf(3 * random.normal())
                           : kind == 4 ? 1e-12f
                           : kind == 8 ? 3 + 20 * random.normal()
                                       : 1;
        for (int c = 0; c < dim; c++) {
            float x = random.normal();
            const bool is_hot = c == hot, in_column = c % 16 == hot % 16;
            switch (kind) {
            case 1:
            case 4: x *= size; break;
            case 2: x = is_hot ? 50 : x * 0.01f; break;
            case 3: x = (float)random.below(3) - 1; break;
            case 5: x = in_column ? 1.0f : ldexpf(1.99f, -24); break; // below the last bit of sums of 16
            case 6: x *= expf(2 * random.normal()); break;
            case 7: x = is_hot ? 3.0f : 0; break;
            case 8: x += size; break;
            case 9:
                x = in_column ? 1 + fabsf(x) : ldexpf(1 + fabsf(x), -random.below(26)) * (c % 32 > 15 ? 0.5f : 1.0f);
                break;
            case 10: // ties of settled rows (docs/rounding.md), and numbers beside the least one that stays
                x = is_hot       ? 1.5f
                    : c % 3 == 0 ? ldexpf((float)(random.below(513) - 256), -19)
                    : c % 3 == 1 ? ldexpf(1 + ldexpf((float)(random.below(5) - 2), -7), -11 - random.below(2))
                                 : ldexpf((float)(2 * random.below(1024) - 1023), -19);
                break;
            }
            store(to, row * dim + c, dtype, fminf(fmaxf(x, -TQ_MAX_INPUT), TQ_MAX_INPUT));
        }
    }
}

#endif
