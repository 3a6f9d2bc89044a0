/* Which kernel runs: the compiled variants, one translation unit per width. */
#ifndef TQ_CUDA_ATTEND_LAUNCH_CUH
#define TQ_CUDA_ATTEND_LAUNCH_CUH
#include "attend.cuh"

namespace tq
{

constexpr int END_THREADS = 512; /* of a block of prepare or combine at most */

struct EndKernels {
    void (*prepare)(AttendArgs), (*combine)(AttendArgs);
};

EndKernels attend_end_kernels(int groups);

/** What a compiled kernel is; key_bits 0: any plan, of the groups it was asked for. */
struct KernelChoice {
    void (*kernel)(AttendArgs); /* NULL: not compiled */
    int key_bits, blocks, tiles, max_threads;
    bool two_products;
    int own_bytes; /* shared memory beside the stages: of a warp, in attend_wide and attend_few_wide of a team */
    int wide_rows; /* of those two: rows of a team; 0 otherwise */
};

/** Whether there is a kernel for whole pages. At 4 bits of 128 channels half pages were faster: with few rows when there were 16 warps (not
 *  measured again with 12), with more because the loop fits the instruction cache. */
constexpr bool takes_whole_pages(int bits, int groups) { return bits != 4 || groups != 4; }

/** The kernel for units of `tiles` token tiles, 2 or 4, and 1, 2 or 4 blocks of rows a warp, keys and values of that many bits throughout;
 *  head_dim 32 * groups or a little less. */
KernelChoice attend_kernel_2(int groups, int blocks, int tiles, bool bulk);
KernelChoice attend_kernel_3(int groups, int blocks, int tiles, bool bulk);
KernelChoice attend_kernel_4(int groups, int blocks, int tiles, bool bulk);
/** The kernel for every plain plan with tiles of 32. */
KernelChoice attend_kernel_mixed(int groups, int blocks, int tiles, bool bulk);
/** The kernel for every plan with tiles of 16; groups of 32 channels, 1 or 2 blocks. */
KernelChoice attend_kernel_fine(int groups, int blocks, int tiles, bool bulk);
/** The kernel for many rows: 16 or 32 of them at once, of plans with four groups and four tiles a page; bits 0: 32 rows of any
 *  widths. */
KernelChoice attend_kernel_wide(int bits, int rows);
/** attend_few for many rows: of the same plans, at bits 0 also 16 rows. */
KernelChoice attend_kernel_few_wide(int bits, int rows);
/** The kernel for few rows, 1, 2 or 4 blocks of them, of at most four groups; bits 0: of any widths. Four tiles: where takes_whole_pages.
 *  high_occupancy: for so many segments that 20 warps of each multiprocessor take all at once, but not 16; two groups and up to two
 *  blocks have kernels of their own for that (whole pages: of one block at 2 and 3 bits), others are the same. */
KernelChoice attend_kernel_few(int bits, int groups, int blocks, int tiles, bool high_occupancy);

/** Adds up the parts of its blocks where they are not clusters: a block of `threads` per row. */
struct MergeKernel {
    void (*kernel)(AttendArgs);
    int threads;
};
MergeKernel attend_merge_parts();

} // namespace tq
#endif
