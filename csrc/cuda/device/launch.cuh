// Shared by launchers: checks, and launches with programmatic dependent launch, if the device supports it.
#ifndef TQ_CUDA_DEVICE_LAUNCH_CUH
#define TQ_CUDA_DEVICE_LAUNCH_CUH
#include "core/plan_kind.h"
#include "cuda/device/device.cuh"
#include "turboquant_checks.h"

namespace tq
{

// ---- checks ----

/** Checks what CUDA alone demands of a plan. To be called after tq_check_.. of turboquant_checks.h. */
inline tq_status check_plan(const tq_plan &plan, tq_error *error)
{
    if (plan.head_dim > TQ_CUDA_MAX_HEAD_DIM)
        return fail(error, TQ_E_UNSUPPORTED, "head_dim", -1, plan.head_dim, "at most 512 channels on CUDA");
    if (!tq_is_plain(&plan) && plan.head_dim > TQ_CUDA_MAX_BASELINE_DIM)
        return fail(error, TQ_E_UNSUPPORTED, "head_dim", -1, plan.head_dim,
                    "at most 256 channels on CUDA in plans that are not plain; CPUs take 512");
    return TQ_OK;
}

// ---- launching ----

/** A kernel may start before the previous one in the stream has ended (`launch`). It must not access that kernel's
 *  memory before this call. Every block must call it, also one with nothing to do. */
__device__ __forceinline__ void wait_for_stream()
{
    let_next_start();
    wait_for_previous();
}

// Properties of a device, and attributes set for a kernel, are cached in each thread: a call of the runtime takes up to
// a microsecond, and the CPU limits decoding steps without graphs.

/** Looks up the current device, which must be of compute capability 8.0 or newer. */
inline tq_status current_device(DeviceFacts *facts, tq_error *error)
{
    static thread_local DeviceFacts known = {-1, 0, 0, 0, 0};
    int id;
    TQ_CUDA_TRY(check_cuda(cudaGetDevice(&id), "device", error));
    if (id != known.id) {
        DeviceFacts now = {id, 0, 0, 0, 0};
        const struct {
            int *to;
            cudaDeviceAttr attribute;
        } wanted[] = {{&now.major, cudaDevAttrComputeCapabilityMajor},
                      {&now.processors, cudaDevAttrMultiProcessorCount},
                      {&now.shared_bytes_per_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
                      {&now.shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin}};
        for (auto &w : wanted) TQ_CUDA_TRY(check_cuda(cudaDeviceGetAttribute(w.to, w.attribute, id), "device", error));
        if (now.major < 8)
            return fail(error, TQ_E_UNSUPPORTED, "device", -1, now.major, "of compute capability 8.0 or newer");
        known = now;
    }
    *facts = known;
    return TQ_OK;
}

/** Attributes set for a kernel on a device, and the PTX version that its code came from (0: not known yet). */
struct Told {
    const void *kernel;
    int device, ptx;
    bool much, most_shared, large_clusters;
};

inline Told &told(const void *kernel, const DeviceFacts &device)
{
    static thread_local Told kernels[64];
    Told &t = kernels[((uintptr_t)kernel >> 4) % 64];
    if (t.kernel != kernel || t.device != device.id) t = {kernel, device.id, 0, false, false, false};
    return t;
}

/** Sets *is to whether a kernel was compiled for compute capability 9.0 or newer. On such a device it may also come
 *  from older PTX, which lacks everything that needs 9.0 (device/device.cuh): the wait for the previous kernel, and all
 *  kernels for Hopper. */
inline tq_status is_hopper_code(const void *kernel, const DeviceFacts &device, bool *is, tq_error *error)
{
    Told &t = told(kernel, device);
    if (!t.ptx) {
        cudaFuncAttributes attributes;
        TQ_CUDA_TRY(check_cuda(cudaFuncGetAttributes(&attributes, kernel), "device", error));
        t.ptx = attributes.ptxVersion;
    }
    *is = t.ptx >= 90;
    return TQ_OK;
}

/** Allows a kernel all dynamic shared memory of the current device if it needs much, and with `most_shared` asks for
 *  the largest carveout of shared memory on a multiprocessor. Both hold for all threads: none may ask for less. */
inline tq_status allow_shared(const void *kernel, const DeviceFacts &device, size_t shared_bytes, bool most_shared,
                              tq_error *error)
{
    Told &t = told(kernel, device);
    if (shared_bytes > (size_t)device.shared_bytes_per_block)
        return fail(error, TQ_E_UNSUPPORTED, "device", -1, (double)shared_bytes,
                    "a GPU with more shared memory of a thread block (got: the bytes that the call needs)");
    if (shared_bytes > 40 * 1024 && !t.much) { // with static shared memory this may exceed 48 KB
        cudaFuncAttributes fixed;
        TQ_CUDA_TRY(check_cuda(cudaFuncGetAttributes(&fixed, kernel), "kernel", error));
        TQ_CUDA_TRY(check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    device.shared_bytes_per_block - (int)fixed.sharedSizeBytes),
                               "shared memory", error));
        t.much = true;
    }
    if (most_shared && !t.most_shared) {
        TQ_CUDA_TRY(check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                    cudaSharedmemCarveoutMaxShared),
                               "device", error));
        t.most_shared = true;
    }
    return TQ_OK;
}

/** Allows clusters of more than PORTABLE_CLUSTER blocks for a kernel, in all threads. */
inline tq_status allow_large_clusters(const void *kernel, const DeviceFacts &device, tq_error *error)
{
    Told &t = told(kernel, device);
    if (t.large_clusters) return TQ_OK;
    TQ_CUDA_TRY(
        check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cluster", error));
    t.large_clusters = true;
    return TQ_OK;
}

/** Queues a kernel on a grid of blocks x layers. It may start early, so it must call wait_for_stream, or at least
 *  wait_for_previous, before it accesses memory of the previous kernel. cluster: blocks of a cluster, 1 for none. */
template <class... Params, class... Args>
tq_status launch_clusters(void (*kernel)(Params...), int64_t blocks, int layers, int cluster, int threads,
                          size_t shared_bytes, cudaStream_t stream, tq_error *error, const Args &...args)
{
    if (!blocks) return TQ_OK;
    if (blocks > INT32_MAX)
        return fail(error, TQ_E_VALUE, "batch", -1, (double)blocks, "small enough for a grid of 2^31 - 1 blocks");
    DeviceFacts device;
    TQ_CUDA_TRY(current_device(&device, error));
    bool waits = false;
    if (device.major >= 9) TQ_CUDA_TRY(is_hopper_code(reinterpret_cast<const void *>(kernel), device, &waits, error));
    TQ_CUDA_TRY(allow_shared(reinterpret_cast<const void *>(kernel), device, shared_bytes, false, error));
    if (cluster > PORTABLE_CLUSTER)
        TQ_CUDA_TRY(allow_large_clusters(reinterpret_cast<const void *>(kernel), device, error));
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {(unsigned)cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks, layers);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = !waits ? 0 : cluster > 1 ? 2 : 1; // no early start or clusters for code that does not wait
    return check_cuda(cudaLaunchKernelEx(&config, kernel, args...), "kernel", error);
}

template <class... Params, class... Args>
tq_status launch(void (*kernel)(Params...), int64_t blocks, int threads, size_t shared_bytes, cudaStream_t stream,
                 tq_error *error, const Args &...args)
{
    return launch_clusters(kernel, blocks, 1, 1, threads, shared_bytes, stream, error, args...);
}

} // namespace tq
#endif
