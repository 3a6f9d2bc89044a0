/* Tables of a plan's codebooks. Not in host.h, because compiling <mutex> takes as long as compiling a small kernel. */
#ifndef TQ_CUDA_TILE_CODEBOOKS_H
#define TQ_CUDA_TILE_CODEBOOKS_H
#include <string.h>

#include <mutex>

#include "cuda/tile/levels.h"

namespace tq
{

/** Returns the tables T of a plan's codebooks. The first call of the process that needs them fills them, for all
 *  threads and devices: kernels get them as arguments, so none are on a device. There is one for each law, and for each
 *  head_dim of the sphere. */
template <class T> const T &of_codebooks(const tq_plan &plan, void (*fill)(const tq_codebook *books, T *to))
{
    constexpr int SPHERES = TQ_MAX_SPHERE_DIM / 8;
    static T tables[2 + SPHERES];
    static std::once_flag once[2 + SPHERES];
    const int i = plan.codebook == TQ_CODEBOOK_SPHERE ? 1 + plan.head_dim / 8 : plan.codebook == TQ_CODEBOOK_UNIFORM;
    std::call_once(once[i], [&] {
        tq_codebook books[TQ_WIDE_BITS + 1] = {};
        books[TQ_WIDE_BITS].step = TQ_WIDE_STEP;
        for (int bits = 1; bits <= TQ_MAX_BITS; bits++) /* cannot fail for a checked plan */
            tq_get_codebook((tq_codebook_law)plan.codebook, plan.head_dim, bits, &books[bits], nullptr);
        fill(books, &tables[i]);
    });
    return tables[i];
}

/** Steps by width, and levels by width and code. Levels are in units of the step. */
struct LevelsByCode {
    float step[TQ_WIDE_BITS + 1];
    int8_t levels[TQ_MAX_BITS + 1][1 << TQ_MAX_BITS];
};

inline void fill_levels_by_code(const tq_codebook *books, LevelsByCode *to)
{
    for (int bits = 1; bits <= TQ_WIDE_BITS; bits++) to->step[bits] = books[bits].step;
    for (int bits = 1; bits <= TQ_MAX_BITS; bits++)
        for (int code = 0; code < books[bits].n_levels; code++) to->levels[bits][code] = books[bits].levels[code];
}

inline void fill_level_tables(const tq_codebook *books, LevelTables *tables)
{
    const auto bytes = [](uint32_t *words) { return reinterpret_cast<uint8_t *>(words); };
    for (int m = 0; m < 8; m++) {
        const int8_t magnitude = books[4].levels[m];
        bytes(tables->level3)[m] = (uint8_t)books[3].levels[m];
        bytes(tables->offset3)[m] = (uint8_t)(128 + books[3].levels[m]);
        bytes(tables->magnitude4)[m] = (uint8_t)magnitude;
        bytes(tables->plus4)[m] = (uint8_t)(magnitude + 1); /* 127 at most: tests/test_codebook.py */
        bytes(tables->minus4)[7 - m] = (uint8_t)-magnitude;
    }
    for (int m = 0; m < 16; m++) {
        const int at = m < 8 ? m : 23 - m;
        bytes(tables->magnitude5)[at] = (uint8_t)books[5].levels[m];
        bytes(tables->magnitude6)[at] = (uint8_t)books[6].levels[m];
        bytes(tables->change6)[at] = (uint8_t)(books[6].levels[m] ^ books[6].levels[16 + m]);
    }
    for (int by = 1; by < 8; by++) tables->right[by] = 1u << (32 - by);
    tables->right[0] = 1u << 16;
    tables->magic = MAGIC;
    tables->two = 2;
    tables->ones = ~0u;
}

} // namespace tq
#endif
