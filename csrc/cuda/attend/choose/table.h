/* The table of all attention kernels of plain plans. choose.cu chooses one; instances.cu compiles them. Nothing here needs CUDA. */
#ifndef TQ_CUDA_ATTEND_CHOOSE_TABLE_H
#define TQ_CUDA_ATTEND_CHOOSE_TABLE_H
#include "cuda/attend/variant.h"

namespace tq
{

/** Two ways to cut the work into thread blocks, each with two loops over pages. */
enum class Strategy {
    SPLIT, /* prepare, pages, combine: all pages of all sequences in one line, cut into equal pieces (split/); loop/warp.cuh */
    MANY_ROWS,       /* the same, where four warps share a page and unpack it once for 16 or 32 rows; loop/team.cuh */
    FUSED,           /* one kernel; every (sequence, KV head) has equally many thread blocks (fused/); loop/warp.cuh */
    FUSED_MANY_ROWS, /* the same with loop/team.cuh */
};
constexpr bool has_many_rows(Strategy s) { return s == Strategy::MANY_ROWS || s == Strategy::FUSED_MANY_ROWS; }
constexpr bool is_fused(Strategy s) { return s == Strategy::FUSED || s == Strategy::FUSED_MANY_ROWS; }

/** A compiled kernel. */
struct KernelChoice {
    void (*kernel)(AttendArgs); /* NULL: there is none */
    void (*ragged)(AttendArgs); /* the same for sequences of any lengths; NULL: there is none */
    bool is_ragged;             /* `kernel` is that one */
    int bits;                   /* the width of all groups; or BY_SIDE, or BY_GROUP */
    int row_quads;              /* groups of four rows that a warp has; 0 with many rows */
    int tiles;                  /* token tiles of a unit: 2 (half a page) or 4 (a page) */
    int run; /* neighbouring units that a warp has one after the other: 1, or 2 for the halves of a page */
    int max_threads, ragged_threads;
    bool two_products;
    int own_bytes; /* shared memory beside the stages: of a warp, with many rows of a team */
    int team_rows; /* with many rows: rows of a team; 0 otherwise */
    int row;       /* of KERNELS */
    int rows;      /* that it takes at once */
};

constexpr unsigned R4 = 1, R8 = 2, R16 = 4, R32 = 8; /* sets of numbers of rows, in units of four */

/** Kernels that differ only in the rows they take at once and in the size of their units. */
struct KernelRow {
    Strategy strategy;
    bool hopper;                   /* bulk copies (TMA), for 9.x; otherwise cp.async, for 8.0 and newer */
    int width;                     /* of all groups of keys and values; or BY_SIDE, or BY_GROUP: any widths */
    bool tile_16;                  /* tiles of 16 channels, of any widths */
    int first_groups, last_groups; /* head_dim / 32, rounded up; code is for the last */
    unsigned rows_by_half_page, rows_by_page; /* numbers of rows for which there are kernels with such units */
    bool wave =
        false; /* fused: for plans with a wave or a metric, and only for those. The others take plans with and without */
};

/** All attention kernels of plain plans. Adding one, or taking one away, is a change here alone: instances.cu compiles what is listed.
 *  Of the rows of a strategy that take a plan, the first is chosen: those of one width, then BY_SIDE, then BY_GROUP.
 *  No two rows are for one case (tests/test_dispatch.py). Several warps share the query rows that one kernel cannot take at once.
 *  README.md says why a kernel is here. */
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
    /* Waves have kernels of their own here, because their code would slow plans without one down (measured.md). */
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
    {Strategy::FUSED_MANY_ROWS, true, BY_GROUP, false, 4, 4, 0, R16, true}, /* 32 lack the memory */
};
constexpr int KERNEL_ROWS = sizeof KERNELS / sizeof *KERNELS;

/** The kernel of a row of KERNELS for 4 * row_quads rows and units of so many tiles; its `kernel` is NULL if the row has none. */
KernelChoice compiled_kernel(int row, int row_quads, int tiles);

/** Writes attend_<strategy>_<width>_d<head_dim>_<rows>x<tokens of a unit>[_wave][_ragged][_portable], TQ_CUDA_KERNEL_NAME_BYTES at most. */
void name_kernel(const KernelChoice &kernel, char *name);

} // namespace tq
#endif
