/* GPUs by name, for the choice of kernels where they are not there (turboquant info --kernels --gpu). */
#ifndef TQ_CUDA_ATTEND_CHOOSE_GPUS_H
#define TQ_CUDA_ATTEND_CHOOSE_GPUS_H
#include "cuda/attend/choose/rules.h"

namespace tq
{

/** Multiprocessors are from NVIDIA's page or white paper of the product, or the CUDA cores given there / 128. Shared
 *  memory is that of the compute capability (CUDA C++ Programming Guide, "Technical Specifications per Compute
 *  Capability"). Large clusters were counted on an H200 (attend.cu, count_large_clusters). */
struct Gpu {
    const char *name;
    int major, processors, shared_kb, large_clusters;
};

constexpr Gpu GPUS[] = {
    /* name     major  SMs  KB   large clusters */
    {"a100", 8, 108, 164, 0},    /* NVIDIA A100 white paper; 8.0 */
    {"l4", 8, 58, 100, 0},       /* L4: 7,424 cores; 8.9 */
    {"l40s", 8, 142, 100, 0},    /* L40S: 18,176 cores; 8.9 */
    {"rtx4090", 8, 128, 100, 0}, /* GeForce RTX 4090: 16,384 cores; 8.9 */
    {"h100", 9, 132, 228, 7},    /* NVIDIA H100 white paper, SXM5; 9.0 */
    {"h200", 9, 132, 228, 7},    /* the same chip; 9.0 */
    {"b200", 10, 148, 228, 0},   /* B200: 18,944 cores; 10.0 */
    {"rtx5090", 12, 170, 100, 0} /* GeForce RTX 5090: 21,760 cores; 12.0 */
};
#define TQ_CUDA_GPU_NAMES "a100, l4, l40s, rtx4090, h100, h200, b200 or rtx5090"

/** Returns the GPU as the choice of a kernel sees it, with kernels compiled for it. */
inline Device device_of(const Gpu &gpu)
{
    Device d = {};
    d.major = gpu.major, d.processors = gpu.processors;
    d.shared_bytes_per_processor = gpu.shared_kb * 1024;
    d.shared_bytes_per_block = d.shared_bytes_per_processor - 1024;
    d.bulk = gpu.major == 9, d.large_clusters = gpu.large_clusters, d.wanted = -1;
    return d;
}

} // namespace tq
#endif
