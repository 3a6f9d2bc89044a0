/* tq_cuda_attend: checks the arguments that the host can see, chooses a kernel, cuts the work and queues it. */
#include <stdlib.h>
#include <string.h>

#include <new>
#include <type_traits>
#include <utility>

#include "cuda/attend/choose/cut.h"
#include "cuda/attend/choose/gpus.h"
#include "cuda/attend/chunk/chunk.h"
#include "cuda/attend/kernels.h"
#include "cuda/baselines/baselines.cuh"

namespace tq
{

/* ---- the kernels ---- */

template <int... SHARD>
static KernelChoice kernel_of_shards(int row, int row_quads, int tiles, std::integer_sequence<int, SHARD...>)
{
    KernelChoice (*const shards[])(int, int, int) = {Shard<SHARD>::kernel...};
    return shards[row % SHARDS](row, row_quads, tiles);
}

KernelChoice compiled_kernel(int row, int row_quads, int tiles)
{
    return kernel_of_shards(row, row_quads, tiles, std::make_integer_sequence<int, SHARDS>());
}

namespace
{

/* ---- the device ---- */

/** Returns the first row of KERNELS that has a FUSED kernel for four rows and half pages. */
constexpr int cluster_row()
{
    int row = 0;
    while (row < KERNEL_ROWS && (KERNELS[row].strategy != Strategy::FUSED || !(KERNELS[row].rows_by_half_page & R4)))
        row++;
    return row;
}
constexpr int CLUSTER_ROW = cluster_row(); /* any FUSED kernel serves to count clusters */
static_assert(CLUSTER_ROW < KERNEL_ROWS);

/** Returns how many clusters of LARGE_CLUSTER blocks, one block per multiprocessor, can run at once on the current
 *  device: 7 on an H200; 0 if that is unknown. Each thread caches the number, as in current_device. */
int count_large_clusters(const DeviceFacts &device)
{
    static thread_local int known = -1, count;
    if (device.id == known) return count;
    void (*kernel)(AttendArgs) = compiled_kernel(CLUSTER_ROW, 1, 2).kernel;
    const void *function = reinterpret_cast<const void *>(kernel);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {LARGE_CLUSTER, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(LARGE_CLUSTER);
    config.blockDim = dim3(32 * FUSED_WARPS);
    config.dynamicSmemBytes = device.shared_bytes_per_block / 4 * 3; /* no two blocks fit on a multiprocessor */
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (allow_shared(function, device, config.dynamicSmemBytes, true, nullptr) != TQ_OK ||
        allow_large_clusters(function, device, nullptr) != TQ_OK ||
        cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess) {
        cudaGetLastError();
        count = 0;
    }
    known = device.id;
    return count;
}

/** Returns the number of one or two digits that a text is; -1 if it is another text. */
int way_of(const char *text)
{
    const size_t digits = strspn(text, "0123456789");
    return digits == 0 || digits > 2 || text[digits] ? -1 : atoi(text);
}

/** Describes the current device in *d, limited to the path that TURBOQUANT_CUDA_PATH asks for. */
tq_status look_at_device(Device *d, tq_error *error)
{
    TQ_CUDA_TRY(current_device(d, error));
    d->bulk = d->never_fused = false;
    d->large_clusters = 0;
    if (d->major == 9)
        TQ_CUDA_TRY(is_hopper_code(reinterpret_cast<const void *>(attend_end_kernels(4).prepare), *d, &d->bulk, error));
    const char *path = getenv("TURBOQUANT_CUDA_PATH");
    if (!path || !*path) path = d->bulk ? "hopper" : "portable";
    bool portable = !strcmp(path, "portable");
    d->never_fused = !strcmp(path, "hopper-line");
    d->always_chunk = !strcmp(path, "hopper-chunk");
    d->wanted = !strncmp(path, "hopper-", 7) ? way_of(path + 7) : -1;
    if (!portable && !d->never_fused && !d->always_chunk && d->wanted < 0 && strcmp(path, "hopper"))
        return fail(error, TQ_E_UNSUPPORTED, "TURBOQUANT_CUDA_PATH", -1, 0,
                    "\"hopper\", \"hopper-line\", \"hopper-chunk\", \"hopper-0\", \"hopper-1\", .. or \"portable\"");
    if (!portable && !d->bulk)
        return fail(error, TQ_E_UNSUPPORTED, "TURBOQUANT_CUDA_PATH", -1, d->major,
                    "\"portable\" but on compute capability 9.0, with kernels compiled for it");
    d->bulk = !portable;
    if (d->bulk && !d->never_fused) d->large_clusters = count_large_clusters(*d);
    return TQ_OK;
}

/* ---- checks ---- */

/** Checks what CUDA alone requires: kernels read rows four numbers at a time. */
tq_status check_alignment(const tq_attend_params *p, tq_error *error)
{
    int64_t bytes = p->layer.dtype == TQ_F32 ? 4 : 2;
    const struct {
        const char *name;
        const void *at;
    } arrays[] = {{"q", p->q},
                  {"sink_k", p->layer.sink_k},
                  {"sink_v", p->layer.sink_v},
                  {"window_k", p->layer.window_k},
                  {"window_v", p->layer.window_v},
                  {"out", p->out},
                  {"fresh_k", p->fresh_k},
                  {"fresh_v", p->fresh_v}};
    if ((uintptr_t)p->layer.key.moments % 16)
        return fail(error, TQ_E_VALUE, "key_numbers", -1, (double)((uintptr_t)p->layer.key.moments % 16),
                    "with moments aligned to 16 bytes on CUDA (got: bytes behind)");
    for (auto &x : arrays)
        if ((uintptr_t)x.at % (4 * bytes))
            return fail(error, TQ_E_VALUE, x.name, -1, (double)((uintptr_t)x.at % (4 * bytes)),
                        "aligned to four of its numbers (got: bytes behind)");
    const struct {
        const char *name;
        const void *at;
        int64_t stride, length; /* of one dimension; the stride does not matter if length is 1 */
    } strides[] = {{"q", p->q, p->q_stride_batch, p->layer.batch},
                   {"q", p->q, p->q_stride_head, p->query_heads},
                   {"q", p->q, p->q_stride_token, p->query_start_loc ? p->total_tokens : p->query_tokens},
                   {"fresh_k", p->fresh_k, p->fresh_k_stride_batch, p->layer.batch},
                   {"fresh_k", p->fresh_k, p->fresh_k_stride_head, p->layer.kv_heads},
                   {"fresh_k", p->fresh_k, p->fresh_k_stride_token, p->query_tokens},
                   {"fresh_v", p->fresh_v, p->fresh_v_stride_batch, p->layer.batch},
                   {"fresh_v", p->fresh_v, p->fresh_v_stride_head, p->layer.kv_heads},
                   {"fresh_v", p->fresh_v, p->fresh_v_stride_token, p->query_tokens},
                   {"out", p->out, p->out_stride_batch, p->layer.batch},
                   {"out", p->out, p->out_stride_head, p->query_heads},
                   {"out", p->out, p->out_stride_token, p->query_start_loc ? p->total_tokens : p->query_tokens}};
    for (auto &x : strides)
        if (x.at && x.length > 1 && x.stride % 4)
            return fail(error, TQ_E_VALUE, x.name, -1, (double)x.stride, "of strides that are multiples of 4 on CUDA");
    return TQ_OK;
}

/* ---- the choice ---- */

bool is_fused(const Launch &launch) { return is_fused(KERNELS[launch.kernel.row].strategy); }

/** Lays the workspace out at `base` and returns its bytes. base NULL: only counts them. */
size_t lay_out(Launch *launch, char *base)
{
    return is_fused(*launch) ? lay_out_fused_workspace(launch, base) : lay_out_split_workspace(launch, base);
}

tq_status prepare(const tq_plan *plan, const tq_attend_params *p, const Device &device, Launch *l, tq_error *error)
{
    TQ_CUDA_TRY(fill_args(*plan, *p, l, error));
    if (!l->args.rows) return TQ_OK;
    TQ_CUDA_TRY(find_absent_record(device, *plan, &l->args.absent_record, error));
    return choose_kernel(*plan, device, l, error);
}

} // namespace
} // namespace tq

using namespace tq;

namespace
{

/** The contents of a tq_cuda_attend_call. */
struct Call {
    enum Route { PACKED, CHUNK, BASELINE } route; /* BASELINE: a plan that is not plain */
    Launch launch;                                /* for PACKED */
    tq_plan plan;                                 /* plan and params: for CHUNK and BASELINE */
    tq_attend_params params;
    size_t bytes;
};
static_assert(sizeof(Call) <= sizeof(tq_cuda_attend_call) && std::is_trivially_copyable_v<Call>);

tq_status queue(Launch &l, size_t needed, cudaStream_t s, tq_error *error)
{
    DeviceFacts device;
    TQ_CUDA_TRY(current_device(&device, error));
    if (is_fused(l)) {
        MergeKernel merge = attend_merge_parts();
        for (auto kernel : {l.kernel.kernel, merge.kernel})
            TQ_CUDA_TRY(allow_shared(reinterpret_cast<const void *>(kernel), device, 0, true, error));
        const FusedArgs &f = l.args.fused;
        if (f.ragged && !l.args.p.schedule)
            TQ_CUDA_TRY(
                write_shares(l.args, reinterpret_cast<int32_t *>(const_cast<int4 *>(l.args.schedule)), s, error));
        TQ_CUDA_TRY(launch_clusters(l.kernel.kernel, l.blocks, l.args.row_tiles, l.args.fused.cluster, l.threads,
                                    l.shared_bytes, s, error, l.args));
        if (!needed) return TQ_OK;
        int64_t merged = l.segments / l.args.row_tiles; /* segments that may have several blocks */
        if (f.ragged && merged > l.blocks - l.segments) merged = l.blocks - l.segments; /* each has a whole block */
        return launch(merge.kernel, merged * l.args.rows, merge.threads, 0, s, error, l.args);
    }
    EndKernels ends = attend_end_kernels(l.args.groups);
    /* All three kernels ask for the same split between cache and shared memory, because a multiprocessor changes it
     * only when it is idle. */
    for (auto kernel : {ends.prepare, l.kernel.kernel, ends.combine})
        TQ_CUDA_TRY(allow_shared(reinterpret_cast<const void *>(kernel), device, 0, true, error));
    TQ_CUDA_TRY(launch(ends.prepare, l.prepare_blocks, l.prepare_threads, l.prepare_bytes, s, error, l.args));
    TQ_CUDA_TRY(launch(l.kernel.kernel, l.blocks, l.threads, l.shared_bytes, s, error, l.args));
    return launch(ends.combine, l.combine_blocks, l.combine_threads, l.combine_bytes, s, error, l.args);
}

} // namespace

tq_status tq_cuda_attend_prepare(const tq_plan *plan, const tq_attend_params *params, tq_cuda_attend_call *call_,
                                 size_t *workspace_bytes, tq_error *error)
{
    TQ_CUDA_TRY(tq_check_attend(plan, params, error));
    TQ_CUDA_TRY(check_plan(*plan, error));
    TQ_CUDA_TRY(check_alignment(params, error));
    if (!call_) return fail(error, TQ_E_VALUE, "call", -1, 0, "a pointer, not NULL");
    if (!workspace_bytes) return fail(error, TQ_E_VALUE, "workspace_bytes", -1, 0, "a pointer, not NULL");
    Call &call = *new (call_) Call; /* filled in place, because it has thousands of bytes */
    call.route = tq_is_plain(plan) ? Call::PACKED : Call::BASELINE;
    if (call.route == Call::PACKED) {
        Device device;
        TQ_CUDA_TRY(look_at_device(&device, error));
        TQ_CUDA_TRY(prepare(plan, params, device, &call.launch, error));
        call.bytes = call.launch.blocks ? lay_out(&call.launch, nullptr) : 0;
        if (call.launch.blocks && chooses_chunk(*plan, *params, device, call.launch)) call.route = Call::CHUNK;
    }
    if (call.route != Call::PACKED) {
        call.plan = *plan;
        call.params = *params;
        TQ_CUDA_TRY((call.route == Call::CHUNK ? chunk_workspace_bytes : attend_baseline_bytes)(*plan, *params,
                                                                                                &call.bytes, error));
    }
    *workspace_bytes = call.bytes;
    return TQ_OK;
}

tq_status tq_cuda_attend_workspace_bound(const tq_plan *plan, const tq_attend_params *params, size_t *bytes,
                                         tq_error *error)
{
    TQ_CUDA_TRY(tq_check_attend_sizes(plan, params, error));
    TQ_CUDA_TRY(check_plan(*plan, error));
    if (!bytes) return fail(error, TQ_E_VALUE, "bytes", -1, 0, "a pointer, not NULL");
    if (!tq_is_plain(plan)) return attend_baseline_bound(*plan, *params, bytes, error);
    Device device;
    Launch launch;
    TQ_CUDA_TRY(look_at_device(&device, error));
    TQ_CUDA_TRY(fill_args(*plan, *params, &launch, error));
    const size_t packed = workspace_bound(launch.args, device);
    *bytes = 0;
    if (device.bulk && chunk_is_for(*plan, *params)) TQ_CUDA_TRY(chunk_workspace_bytes(*plan, *params, bytes, error));
    if (*bytes < packed) *bytes = packed;
    return TQ_OK;
}

tq_status tq_cuda_attend(const tq_cuda_attend_call *call_, void *workspace, size_t workspace_bytes, void *stream,
                         tq_error *error)
{
    if (!call_) return fail(error, TQ_E_VALUE, "call", -1, 0, "of tq_cuda_attend_prepare, not NULL");
    const Call &call = *reinterpret_cast<const Call *>(call_);
    if (call.route == Call::BASELINE)
        return attend_baseline(call.plan, call.params, workspace, workspace_bytes, static_cast<cudaStream_t>(stream),
                               error);
    if (call.route == Call::PACKED && !call.launch.blocks) return TQ_OK;
    if (call.bytes && (!workspace || (uintptr_t)workspace % 256 || workspace_bytes < call.bytes))
        return fail(error, TQ_E_VALUE, "workspace_bytes", -1, (double)workspace_bytes,
                    "at least what tq_cuda_attend_prepare says, 256-byte aligned");
    if (call.route == Call::CHUNK)
        return attend_chunk(call.plan, call.params, workspace, workspace_bytes, stream, error);
    Launch l = call.launch;
    lay_out(&l, static_cast<char *>(workspace));
    return queue(l, call.bytes, static_cast<cudaStream_t>(stream), error);
}

tq_status tq_cuda_attend_kernel(const tq_plan *plan, const tq_attend_params *params, const char *gpu, char *name,
                                tq_error *error)
{
    Device device;
    TQ_CUDA_TRY(tq_check_attend_sizes(plan, params, error));
    TQ_CUDA_TRY(check_plan(*plan, error));
    if (!name) return fail(error, TQ_E_VALUE, "name", -1, 0, "a pointer, not NULL");
    if (!gpu) {
        TQ_CUDA_TRY(look_at_device(&device, error));
        return name_of_choice(*plan, *params, device, name, error);
    }
    for (const Gpu &known : GPUS)
        if (!strcmp(known.name, gpu)) return name_of_choice(*plan, *params, device_of(known), name, error);
    return fail(error, TQ_E_VALUE, "gpu", -1, 0, TQ_CUDA_GPU_NAMES);
}

tq_status tq_cuda_schedule(const tq_plan *plan, const tq_attend_params *params, int32_t *schedule, int64_t rows,
                           void *stream, tq_error *error)
{
    TQ_CUDA_TRY(tq_check_attend_sizes(plan, params, error));
    TQ_CUDA_TRY(check_plan(*plan, error));
    if (params->layer.batch && !params->layer.lengths)
        return fail(error, TQ_E_VALUE, "lengths", -1, 0, "a pointer, not NULL");
    if (!schedule || (uintptr_t)schedule % 16)
        return fail(error, TQ_E_VALUE, "schedule", -1, 0, "a 16-byte aligned pointer, not NULL");
    DeviceFacts device;
    TQ_CUDA_TRY(current_device(&device, error));
    TQ_CUDA_TRY(check_schedule_rows(params->layer.batch, rows, device, error));
    Launch l = {};
    if (tq_is_plain(plan)) {
        tq_attend_params p = *params;
        p.schedule = nullptr;
        p.schedule_kind = TQ_SCHEDULE_LINE;
        Device chosen;
        TQ_CUDA_TRY(look_at_device(&chosen, error));
        TQ_CUDA_TRY(prepare(plan, &p, chosen, &l, error));
    }
    if (l.args.fused.ragged) return write_shares(l.args, schedule, static_cast<cudaStream_t>(stream), error);
    return write_schedule(l.args, schedule, static_cast<cudaStream_t>(stream), error);
}
