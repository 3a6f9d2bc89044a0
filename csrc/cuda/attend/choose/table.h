/* Table of all attention kernels of plain plans. choose.cu chooses one, instances.cu compiles all. Needs no CUDA. */
#ifndef TQ_CUDA_ATTEND_CHOOSE_TABLE_H
#define TQ_CUDA_ATTEND_CHOOSE_TABLE_H
#include "cuda/attend/variant.h"

namespace tq
{

/** Two ways to cut the work into thread blocks, each with two loops over pages: for few rows and for many. */
enum class Strategy {
    SPLIT,     /* prepare, pages, combine; the line of all pages is cut into equal pieces (split/); loop/warp.cuh */
    MANY_ROWS, /* the same, but four warps share a page and unpack it once for 16 or 32 rows; loop/team.cuh */
    FUSED,     /* one kernel; each (sequence, KV head) has thread blocks of its own (fused/); loop/warp.cuh */
    FUSED_MANY_ROWS, /* the same with loop/team.cuh */
};
constexpr bool has_many_rows(Strategy s) { return s == Strategy::MANY_ROWS || s == Strategy::FUSED_MANY_ROWS; }
constexpr bool is_fused(Strategy s) { return s == Strategy::FUSED || s == Strategy::FUSED_MANY_ROWS; }

/** A compiled kernel. */
struct KernelChoice {
    void (*kernel)(AttendArgs); /* NULL: there is none */
    void (*ragged)(AttendArgs); /* the same for sequences of any lengths; NULL: there is none */
    bool is_ragged;             /* whether `kernel` is `ragged` */
    int bits;                   /* the width of all groups; or BY_SIDE, or BY_GROUP */
    int row_quads;              /* a warp's rows / 4; 0 with many rows */
    int tiles;                  /* token tiles of a unit: 2 (half a page) or 4 (a page) */
    int run;                    /* neighbouring units that a warp processes in turn: 1, or 2 for the halves of a page */
    int max_threads, ragged_threads;
    bool two_products;
    int own_bytes; /* shared memory beside the stages, in bytes: of a warp; with many rows, of a team */
    int team_rows; /* with many rows: rows of a team; 0 otherwise */
    int row;       /* of KERNELS */
    int rows;      /* that the kernel takes at once */
};

constexpr unsigned R4 = 1, R8 = 2, R16 = 4, R32 = 8; /* numbers of rows / 4, bits of a set */

/** Kernels that differ only in the rows they take at once and in the size of their units. */
struct KernelRow {
    Strategy strategy;
    bool hopper;                   /* bulk copies (TMA), for 9.x; otherwise cp.async, for 8.0 and newer */
    int width;                     /* of all groups of keys and values; or BY_SIDE, or BY_GROUP: any widths */
    bool tile_16;                  /* tiles of 16 channels, of any widths */
    int first_groups, last_groups; /* head_dim / 32, rounded up; compiled for the last */
    unsigned rows_by_half_page, rows_by_page; /* sets of R4 .. R32: kernels with such units */
    bool wave = false; /* fused strategies: takes only plans with a wave or a metric (false: only plans without) */
};

/** All attention kernels of plain plans. To add or remove one, change this table alone: instances.cu compiles it.
 *  Of the rows of a strategy that take a plan, the first is chosen: those of one width, then BY_SIDE, then BY_GROUP. No
 *  two rows are for the same case (tests/test_dispatch.py). Several warps share query rows that a kernel cannot take at
 *  once. csrc/cuda/README.md has the reasons for which a kernel is here. */
constexpr KernelRow KERNELS[] = {
    /* strategy     hopper width tile_16 groups  half pages  whole pages */
    {Strategy::SPLIT, true, 2, false, 2, 2, 0, R4 | R8},
    {Strategy::SPLIT, true, 3, false, 2, 2, 0, R4 | R16},
    {Strategy::SPLIT, true, 4, false, 2, 2, 0, R4 | R16},
    {Strategy::SPLIT, true, 2, false, 4, 4, 0, R4 | R8},
    {Strategy::SPLIT, true, 3, false, 4, 4, 0, R4 | R8},
    {Strategy::SPLIT, true, 4, false, 4, 4, R4 | R8, 0},
    {Strategy::SPLIT, true, 2, false, 8, 8, R4 | R8, 0},
    {Strategy::SPLIT, true, 3, false, 8, 8, R4 | R8, 0},
    {Strategy::SPLIT, true, 4, false, 8, 8, R4 | R8, 0},
    {Strategy::SPLIT, true, BY_GROUP, false, 1, 4, R4, R4 | R8 | R16},
    {Strategy::SPLIT, true, BY_GROUP, false, 5, 8, R4 | R8, 0},
    {Strategy::SPLIT, true, BY_GROUP, false, 9, 16, R4, 0},
    {Strategy::SPLIT, true, BY_GROUP, true, 1, 8, R4 | R8, 0},
    {Strategy::SPLIT, false, 2, false, 4, 4, R4, 0},
    {Strategy::SPLIT, false, 3, false, 4, 4, R4, 0},
    {Strategy::SPLIT, false, 4, false, 4, 4, R4, 0},
    {Strategy::SPLIT, false, BY_GROUP, false, 1, 4, R4 | R8, 0},
    {Strategy::SPLIT, false, BY_GROUP, false, 5, 8, R4 | R8, 0},
    {Strategy::SPLIT, false, BY_GROUP, false, 9, 16, R4, 0},
    {Strategy::SPLIT, false, BY_GROUP, true, 1, 8, R4 | R8, 0},
    {Strategy::FUSED, true, 2, false, 2, 2, 0, R4},
    {Strategy::FUSED, true, 3, false, 2, 2, 0, R4},
    {Strategy::FUSED, true, 4, false, 2, 2, R4, 0},
    {Strategy::FUSED, true, 2, false, 4, 4, R4, R4 | R8},
    {Strategy::FUSED, true, 3, false, 4, 4, R4, R8},
    {Strategy::FUSED, true, 4, false, 4, 4, R4 | R8, 0},
    {Strategy::FUSED, true, BY_GROUP, false, 1, 4, R4 | R8, R4 | R8 | R16},
    /* Waves have kernels of their own here, because their code would slow plans without a wave (measured.md). */
    {Strategy::FUSED, true, 2, false, 2, 2, 0, R4, true},
    {Strategy::FUSED, true, 3, false, 2, 2, 0, R4, true},
    {Strategy::FUSED, true, 4, false, 2, 2, 0, R4, true},
    {Strategy::FUSED, true, 2, false, 4, 4, R4, R4 | R8, true},
    {Strategy::FUSED, true, 3, false, 4, 4, R4 | R8, R4, true},
    {Strategy::FUSED, true, 4, false, 4, 4, R4 | R8, R4, true},
    {Strategy::FUSED, true, BY_SIDE, false, 2, 2, 0, R4, true},
    {Strategy::FUSED, true, BY_SIDE, false, 4, 4, R4 | R8, R4, true},
    {Strategy::FUSED, true, BY_GROUP, false, 1, 4, R4 | R8, 0, true},
    {Strategy::MANY_ROWS, true, 2, false, 4, 4, 0, R16 | R32},
    {Strategy::MANY_ROWS, true, 3, false, 4, 4, 0, R16 | R32},
    {Strategy::MANY_ROWS, true, 4, false, 4, 4, 0, R16 | R32},
    {Strategy::MANY_ROWS, true, BY_GROUP, false, 4, 4, 0, R32},
    {Strategy::FUSED_MANY_ROWS, true, 2, false, 4, 4, 0, R16 | R32},
    {Strategy::FUSED_MANY_ROWS, true, 3, false, 4, 4, 0, R16 | R32},
    {Strategy::FUSED_MANY_ROWS, true, 4, false, 4, 4, 0, R16 | R32},
    {Strategy::FUSED_MANY_ROWS, true, BY_GROUP, false, 4, 4, 0, R16 | R32},
    {Strategy::FUSED_MANY_ROWS, true, BY_GROUP, false, 4, 4, 0, R16, true}, /* shared memory has no room for 32 rows */
};
constexpr int KERNEL_ROWS = sizeof KERNELS / sizeof *KERNELS;

/** Returns a row's kernel for 4 * row_quads rows and units of `tiles` token tiles. `kernel` is NULL if it has none. */
KernelChoice compiled_kernel(int row, int row_quads, int tiles);

/** Writes attend_<strategy>_<width>_d<head_dim>_<rows>x<tokens of a unit>[_wave][_ragged][_portable], at most
 *  TQ_CUDA_KERNEL_NAME_BYTES. */
void name_kernel(const KernelChoice &kernel, char *name);

} // namespace tq
#endif
