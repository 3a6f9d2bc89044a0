/* Launches on the simulated GPU: blocks run one after the other. */
#ifndef TQ_CUDA_DEVICE_LAUNCH_CUH
#define TQ_CUDA_DEVICE_LAUNCH_CUH
#include "core/plan_kind.h"
#include "cuda/device/device.cuh"
#include "turboquant_checks.h"

namespace tq
{

inline void wait_for_stream() {}

inline tq_status current_device(DeviceFacts *facts, tq_error *)
{
    const char *processors = getenv("TQ_SIMULATED_PROCESSORS");
    *facts = {0, 9, processors ? atoi(processors) : 5, 233472, 232448};
    return TQ_OK;
}

constexpr uint32_t SIMULATED_SHARED = 232448;
uint8_t *simulated_shared_memory();

template <class... Params, class... Args>
tq_status launch(void (*kernel)(Params...), int64_t blocks, int threads, size_t shared_bytes, cudaStream_t, tq_error *,
                 const Args &...args)
{
    if (shared_bytes > SIMULATED_SHARED) printf("%zu bytes of shared memory\n", shared_bytes), exit(3);
    const auto run = [=] {
        simulated::block.grid.x = (unsigned)blocks;
        simulated::block.body = [=] { kernel(args...); };
        for (int64_t i = 0; i < blocks; i++) {
            simulated::block.index.x = (unsigned)i;
            simulated::block.shared = simulated_shared_memory();
            memset(simulated::block.shared, 0xff, SIMULATED_SHARED);
            simulated::run_block(threads);
        }
    };
    if (simulated_capture) simulated_capture->push_back(run);
    else run();
    return TQ_OK;
}

} // namespace tq
#endif
