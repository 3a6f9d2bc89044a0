// torch.ops.turboquant.*: the core (and CUDA) behind LibTorch's stable ABI; no Python, one binary for torch >= 2.10.
// Contracts: turboquant.h. Documentation for users and fake kernels: turboquant/operators.py.
//
// Every operator has the same five steps on one screen: checks, device guard and stream, workspace, call, status to
// error. A Call (checks.h) checks and throws; a Backend has the functions of a device under common names, so that
// operators do not branch. Layout is [batch, heads, tokens, head_dim], as in SDPA, or [tokens, heads, head_dim] with
// query_start_loc. An empty optional tensor counts as absent, except integers, flag, and v of a plan without values.
#include "arguments.h"
#include "turboquant_checks.h"
#if defined(TURBOQUANT_WITH_CUDA)
#include "turboquant_cuda.h"
// Only libtorch_cuda has it: weak, so that the same file loads into a torch without CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void **stream);
#endif

namespace turboquant
{
namespace
{
// ---- backends: the functions of a device, each with its stream as first argument (NULL on a CPU) ----

#if defined(TURBOQUANT_WITH_CUDA)
using AttendCall = tq_cuda_attend_call;
#else
struct AttendCall {};
#endif

struct Backend {
    bool rotates_any_dtype; // or float32 alone
    tq_status (*rotate)(void *stream, const tq_plan *, const float *matrix, bool inverse, tq_dtype, const void *x,
                        void *y, int64_t rows, tq_error *);
    decltype(&tq_append_workspace_bytes) append_workspace_bytes;
    tq_status (*append)(void *stream, const tq_plan *, const tq_append_params *, int64_t *flag, void *workspace,
                        size_t bytes, tq_error *);
    tq_status (*attend_workspace)(const tq_plan *, const tq_attend_params *, size_t *bytes, tq_error *);
    tq_status (*attend_prepare)(const tq_plan *, const tq_attend_params *, AttendCall *, size_t *bytes, tq_error *);
    tq_status (*attend)(void *stream, const tq_plan *, const tq_attend_params *, const AttendCall *, void *workspace,
                        size_t bytes, tq_error *);
    tq_status (*schedule)(void *stream, const tq_plan *, const tq_attend_params *, int32_t *schedule, int64_t rows,
                          tq_error *);
    tq_status (*append_kernel)(const tq_plan *, const tq_append_params *, char *name, tq_error *);
    tq_status (*attend_kernel)(const tq_plan *, const tq_attend_params *, char *name, tq_error *);
    bool dequantizes_any_dtype; // or to float32 alone
    tq_status (*dequantize_workspace_bytes)(const tq_plan *, int32_t kv_heads, tq_dtype, size_t *bytes, tq_error *);
    tq_status (*dequantize)(void *stream, const tq_plan *, const tq_layer *, int32_t max_tokens, tq_dtype, void *k,
                            void *v, void *workspace, size_t bytes, tq_error *);
    tq_status (*recode)(void *stream, const tq_plan *, const tq_plan *target, const uint8_t *pages, int64_t n_pages,
                        int32_t kv_heads, uint8_t *out, int32_t threads, tq_error *);
    tq_status (*merge)(void *stream, const float *outs, const float *lses, int32_t parts, int64_t rows,
                       int32_t head_dim, float *out, float *lse, tq_error *);
};

template <auto function, class... Arguments> tq_status on_cpu(void *, Arguments... arguments)
{
    return function(arguments...);
}

constexpr size_t NAME_BYTES = 64; // of a kernel, with a final 0

/** Writes the kernel's name. On a CPU it depends on the plan alone. */
tq_status name_of(const char *operation, const tq_plan *plan, char *name, tq_error *error)
{
    const char *kernel = tq_kernel_name(operation, plan);
    std::snprintf(name, NAME_BYTES, "%s", kernel ? kernel : "");
    size_t bytes;
    return kernel ? TQ_OK : tq_dot_workspace_bytes(plan, 0, &bytes, error); // fails where TURBOQUANT_ISA names no level
}

const Backend cpu = {
    false,
    [](void *, auto plan, auto matrix, bool inverse, tq_dtype, auto x, auto y, int64_t rows, auto error) {
        return tq_rotate(plan, matrix, inverse, static_cast<const float *>(x), static_cast<float *>(y), rows, error);
    },
    tq_append_workspace_bytes,
    [](void *, auto plan, auto params, int64_t *, void *workspace, size_t bytes, auto error) {
        return tq_append(plan, params, workspace, bytes, error);
    },
    tq_attend_workspace_bound,
    [](auto plan, auto params, AttendCall *, size_t *bytes, auto error) {
        return tq_attend_workspace_bytes(plan, params, bytes, error);
    },
    [](void *, auto plan, auto params, const AttendCall *, void *workspace, size_t bytes, auto error) {
        return tq_attend(plan, params, workspace, bytes, error);
    },
    [](void *, auto plan, auto params, auto, int64_t, auto error) { // threads take sequences as they come
        size_t bytes;
        return tq_attend_workspace_bytes(plan, params, &bytes, error); // checks the sizes
    },
    [](auto plan, auto, char *name, auto error) { return name_of("append", plan, name, error); },
    [](auto plan, auto params, char *name, auto error) {
        size_t bytes;
        tq_status status = tq_attend_workspace_bytes(plan, params, &bytes, error); // checks the sizes
        return status == TQ_OK ? name_of("attend", plan, name, error) : status;
    },
    false,
    [](auto, auto, auto, size_t *bytes, auto) {
        *bytes = 0;
        return TQ_OK;
    },
    [](void *, auto plan, auto layer, int32_t max_tokens, tq_dtype, void *k, void *v, void *, size_t, auto error) {
        return tq_dequantize(plan, layer, max_tokens, static_cast<float *>(k), static_cast<float *>(v), error);
    },
    on_cpu<tq_recode>,
    on_cpu<tq_merge>,
};

#if defined(TURBOQUANT_WITH_CUDA)
static_assert(NAME_BYTES == TQ_CUDA_KERNEL_NAME_BYTES);

/** Calls a launcher with the stream in its place, before the error. */
template <auto function, class... Arguments> tq_status on_stream(void *stream, Arguments... arguments)
{
    auto all = std::make_tuple(arguments...);
    constexpr size_t last = sizeof...(Arguments) - 1;
    return [&]<size_t... i>(std::index_sequence<i...>) {
        return function(std::get<i>(all)..., stream, std::get<last>(all));
    }(std::make_index_sequence<last>());
}

const Backend cuda = {
    true,
    on_stream<tq_cuda_rotate>,
    [](auto, auto, size_t *bytes, auto) {
        *bytes = 0; // everything happens in registers and shared memory
        return TQ_OK;
    },
    [](void *stream, auto plan, auto params, int64_t *flag, void *, size_t, auto error) {
        return tq_cuda_append(plan, params, flag, stream, error);
    },
    tq_cuda_attend_workspace_bound,
    tq_cuda_attend_prepare,
    [](void *stream, auto, auto, const AttendCall *call, void *workspace, size_t bytes, auto error) {
        return tq_cuda_attend(call, workspace, bytes, stream, error);
    },
    on_stream<tq_cuda_schedule>,
    tq_cuda_append_kernel,
    [](auto plan, auto params, char *name, auto error) {
        return tq_cuda_attend_kernel(plan, params, nullptr, name, error);
    },
    true,
    tq_cuda_dequantize_workspace_bytes,
    on_stream<tq_cuda_dequantize>,
    [](void *stream, auto plan, auto target, auto pages, int64_t n_pages, int32_t kv_heads, auto out, int32_t,
       auto error) { return tq_cuda_recode(plan, target, pages, n_pages, kv_heads, out, stream, error); },
    on_stream<tq_cuda_merge>,
};
#endif

/** Made after the checks. Keeps the call's device current while it lives, and has the backend and the stream. */
class Launch
{
public:
    const Backend *backend = &cpu;
    void *stream = nullptr;

    explicit Launch(const Call &call) : call_(call)
    {
#if defined(TURBOQUANT_WITH_CUDA)
        if (!call.on_cuda()) return;
        guard_.emplace(call.device_index);
        torch_check(aoti_torch_get_current_cuda_stream(call.device_index, &stream), "get_current_cuda_stream");
        backend = &cuda;
#endif
    }
    const Backend *operator->() const { return backend; }

    /** Allocates memory for the call. Torch aligns it to 64 bytes on a CPU and to 512 on CUDA, and knows the stream. */
    Tensor workspace(size_t bytes) const
    {
        return call_.allocate({std::max<int64_t>(static_cast<int64_t>(bytes), 64)}, aoti_torch_dtype_uint8());
    }

private:
    const Call &call_;
    std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

void run_append(const Call &call, const tq_append_params &p, int64_t *flag)
{
    Launch launch(call);
    size_t bytes = 0;
    call.check(launch->append_workspace_bytes(&call.plan(), &p, &bytes, &call.error));
    std::optional<Tensor> workspace; // CUDA needs none
    if (bytes) workspace = launch.workspace(bytes);
    void *at = workspace ? workspace->mutable_data_ptr() : nullptr;
    call.check(launch->append(launch.stream, &call.plan(), &p, flag, at, bytes, &call.error));
}

/** Returns a contiguous copy in another (or the same) dtype. */
Tensor converted(const Call &call, const Tensor &t, int32_t dtype)
{
    auto sizes = t.sizes();
    Tensor out = call.allocate({sizes.begin(), sizes.end()}, dtype);
    torch::stable::copy_(out, t);
    return out;
}

/** Copies a and b, of the same sizes and dtype, one behind the other, in one launch. */
Tensor joined(const Call &call, const Tensor &a, const Tensor &b)
{
    auto sizes = a.sizes();
    std::vector<int64_t> both(sizes.begin(), sizes.end());
    both[0] *= 2;
    Tensor out = call.allocate(both, dtype_of(a));
    std::array<StableIValue, 3> stack{torch::stable::detail::from(std::vector<Tensor>{a, b}),
                                      torch::stable::detail::from(int64_t{0}), torch::stable::detail::from(out)};
    torch_check(torch_call_dispatcher("aten::cat", "out", stack.data(), TORCH_ABI_VERSION), "cat");
    return torch::stable::detail::to<Tensor>(stack[0]);
}

/** Returns t, or a copy if it is not contiguous and float32. */
Tensor dense_f32(const Call &call, const Tensor &t)
{
    int32_t f32 = aoti_torch_dtype_float32();
    return dtype_of(t) == f32 && t.is_contiguous() ? t : converted(call, t, f32);
}

// ---- the operators ----

Tensor rotate(const Words &words, const Tensor &x, const Maybe &matrix, bool inverse)
{
    Call call("rotate", words, x, "x");
    tq_dtype dtype = call.read_dtype(x);
    call.placed("x", x, Strides::FREE);
    check_head_dim(call, "x", x);
    int64_t dim = call.plan().head_dim;
    if (given(matrix)) call.tensor("matrix", *matrix, aoti_torch_dtype_float32(), {dim, dim}, Strides::DENSE);

    Launch launch(call);
    Tensor y = converted(call, x, launch->rotates_any_dtype ? dtype_of(x) : aoti_torch_dtype_float32());
    void *at = y.mutable_data_ptr();
    call.check(launch->rotate(launch.stream, &call.plan(), static_cast<const float *>(data_of(matrix)), inverse, dtype,
                              at, at, y.numel() / dim, &call.error));
    return dtype_of(x) == dtype_of(y) ? y : converted(call, y, dtype_of(x));
}

/** Checks and reads the arguments of `append` besides the plan. */
tq_append_params read_append(const Call &call, const Tensor &k, const Maybe &v, const Tensor &lengths,
                             const Tensor &pages, const Tensor &block_table, const Exact &exact,
                             const Transforms &transforms, const Maybe &flag, const Ragged &ragged)
{
    tq_append_params p = read_new_tokens(call, k, v, ragged.query_start_loc, ragged.max_query_len);
    read_layer(call, k, pages, block_table, lengths, exact, transforms, ragged, 0, p.layer.kv_heads, true, &p.layer);
    if (flag) call.tensor("flag", *flag, aoti_torch_dtype_int64(), {1}, Strides::DENSE);
    return p;
}

int64_t *flag_of(const Maybe &flag) { return given(flag) ? static_cast<int64_t *>(flag->mutable_data_ptr()) : nullptr; }

// Parameters that several operators have, in the order of their schemas below.
#define EXACT const Maybe &sink_k, const Maybe &sink_v, const Maybe &window_k, const Maybe &window_v
#define TRANSFORMS const Maybe &key_numbers, const Maybe &value_numbers, const Maybe &key_turns, const Maybe &rotation
#define RAGGED                                                                                                         \
    const Maybe &query_start_loc, int64_t max_query_len, const Maybe &sink_rows, const Maybe &tail_rows,               \
        const Maybe &position_offset
#define APPEND                                                                                                         \
    const Words &words, const Tensor &k, const Maybe &v, const Tensor &lengths, const Tensor &pages,                   \
        const Tensor &block_table, EXACT, TRANSFORMS, const Maybe &flag, RAGGED
#define ATTEND                                                                                                         \
    const Words &words, const Tensor &q, const Tensor &pages, const Tensor &block_table, const Tensor &lengths,        \
        const Maybe &starts, EXACT, const Maybe &fresh_k, const Maybe &fresh_v, TRANSFORMS,                            \
        std::optional<double> softmax_scale, bool causal, int64_t sliding_window, double softcap,                      \
        const Maybe &schedule, RAGGED, int64_t window, const Maybe &ends
#define GIVEN_ATTEND                                                                                                   \
    words, q, pages, block_table, lengths, starts, sink_k, sink_v, window_k, window_v, fresh_k, fresh_v, key_numbers,  \
        value_numbers, key_turns, rotation, softmax_scale, causal, sliding_window, softcap, schedule, query_start_loc, \
        max_query_len, sink_rows, tail_rows, position_offset, window, ends
#define GIVEN_EXACT                                                                                                    \
    Exact { sink_k, sink_v, window_k, window_v }
#define GIVEN_TRANSFORMS                                                                                               \
    Transforms { key_numbers, value_numbers, key_turns, rotation }
#define GIVEN_RAGGED                                                                                                   \
    Ragged { query_start_loc, sink_rows, tail_rows, position_offset, max_query_len }

void append(APPEND)
{
    Call call("append", words, k, "k");
    run_append(call,
               read_append(call, k, v, lengths, pages, block_table, GIVEN_EXACT, GIVEN_TRANSFORMS, flag, GIVEN_RAGGED),
               flag_of(flag));
}

std::string append_kernel(APPEND)
{
    Call call("append_kernel", words, k, "k");
    tq_append_params p =
        read_append(call, k, v, lengths, pages, block_table, GIVEN_EXACT, GIVEN_TRANSFORMS, flag, GIVEN_RAGGED);
    char name[NAME_BYTES];
    call.check(Launch(call)->append_kernel(&call.plan(), &p, name, &call.error));
    return name;
}

/** Reads the queries of an attention call, and its scale, mask, soft-cap and schedule. */
tq_attend_params read_queries(const Call &call, const Tensor &q, std::optional<double> softmax_scale, bool causal,
                              int64_t sliding_window, double softcap, const Maybe &schedule, const Layout &layout)
{
    tq_attend_params p{};
    int64_t dim = call.plan().head_dim;
    p.layer.dtype = call.read_dtype(q);
    p.layer.batch = layout.batch, p.query_heads = layout.heads, p.query_tokens = layout.tokens;
    p.query_start_loc = layout.query_start_loc, p.total_tokens = layout.total_tokens;
    p.causal = causal, p.sliding_window = call.narrow("sliding_window", sliding_window), p.threads = call.threads();
    p.softmax_scale = static_cast<float>(softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(dim))));
    p.softcap = static_cast<float>(softcap);
    if (schedule) {
        call.tensor("schedule", *schedule, aoti_torch_dtype_int32(), {ANY, 4}, Strides::DENSE);
        p.schedule_rows = schedule->size(0);
        p.schedule_kind = p.schedule_rows ? TQ_SCHEDULE_LINE : TQ_SCHEDULE_EQUAL;
        p.schedule = p.schedule_rows ? data_as<int32_t>(*schedule) : nullptr;
    }
    p.q = q.const_data_ptr();
    layout.read_strides(q, &p.q_stride_batch, &p.q_stride_head, &p.q_stride_token);
    return p;
}

/** Reads one side of the new tokens beside the window: [batch, kv_heads, query_tokens, head_dim]. */
const void *read_fresh(const Call &call, const char *name, const Maybe &t, const tq_attend_params &p, int32_t dtype,
                       int64_t *batch, int64_t *head, int64_t *token)
{
    if (!given(t)) return nullptr;
    call.tensor(name, *t, dtype, {p.layer.batch, p.layer.kv_heads, p.query_tokens, call.plan().head_dim},
                Strides::ROWS);
    *batch = t->stride(0), *head = t->stride(1), *token = t->stride(2);
    return t->const_data_ptr();
}

/** Checks and reads the arguments of `attend`, or of an operator with the same arguments. */
tq_attend_params read_attend(const Call &call, const Layout &layout, ATTEND)
{
    (void)words;                                // read by the call
    (void)query_start_loc, (void)max_query_len; // read by the layout
    tq_attend_params p = read_queries(call, q, softmax_scale, causal, sliding_window, softcap, schedule, layout);
    read_layer(call, q, pages, block_table, lengths, GIVEN_EXACT, GIVEN_TRANSFORMS, GIVEN_RAGGED, window, ANY, false,
               &p.layer);
    p.starts = read_integers(call, "starts", starts, {p.layer.batch});
    p.ends = read_integers(call, "ends", ends, {p.layer.batch});
    p.fresh_k = read_fresh(call, "fresh_k", fresh_k, p, dtype_of(q), &p.fresh_k_stride_batch, &p.fresh_k_stride_head,
                           &p.fresh_k_stride_token);
    p.fresh_v = read_fresh(call, "fresh_v", fresh_v, p, dtype_of(q), &p.fresh_v_stride_batch, &p.fresh_v_stride_head,
                           &p.fresh_v_stride_token);
    return p;
}

void run_attend(const Call &call, const Launch &launch, const tq_attend_params &p, const Maybe &given_workspace)
{
    AttendCall prepared;
    size_t bytes = 0;
    call.check(launch->attend_prepare(&call.plan(), &p, &prepared, &bytes, &call.error));
    if (given_workspace) {
        const size_t there = static_cast<size_t>(given_workspace->numel());
        const uintptr_t to = call.on_cuda() ? 256 : 64,
                        behind = reinterpret_cast<uintptr_t>(given_workspace->const_data_ptr()) % to;
        if (there < bytes)
            call.refuse("workspace", "of at least " + std::to_string(bytes) + " bytes", std::to_string(there));
        if (behind)
            call.refuse("workspace", "aligned to " + std::to_string(to) + " bytes (got: bytes behind)",
                        std::to_string(behind));
    }
    Tensor workspace = given_workspace ? *given_workspace : launch.workspace(bytes);
    call.check(
        launch->attend(launch.stream, &call.plan(), &p, &prepared, workspace.mutable_data_ptr(), bytes, &call.error));
}

std::tuple<Tensor, Tensor> attend(ATTEND)
{
    Call call("attend", words, q, "q");
    const Layout layout(call, "q", q, query_start_loc, max_query_len);
    tq_attend_params p = read_attend(call, layout, GIVEN_ATTEND);
    Launch launch(call);
    Tensor out = call.allocate(layout.sizes(call.plan().head_dim), dtype_of(q));
    Tensor lse = call.allocate(layout.sizes(ANY), aoti_torch_dtype_float32());
    if (query_start_loc)
        torch::stable::zero_(out), torch::stable::fill_(lse, -INFINITY); // of tokens without a sequence
    p.out = out.mutable_data_ptr();
    p.lse = static_cast<float *>(lse.mutable_data_ptr());
    run_attend(call, launch, p, std::nullopt);
    return {out, lse};
}

/** Refuses strides of 0 in an array that is written. To the core they mean a dense array; it checks all others. */
void check_is_apart(const Call &call, const char *name, const Tensor &t)
{
    for (int64_t i = 0; i < t.dim(); i++)
        if (t.size(i) > 1 && t.stride(i) == 0)
            call.refuse(name, "of strides that keep its rows apart", "a stride of 0");
}

void attend_out(ATTEND, const Tensor &out, const Maybe &lse, const Maybe &workspace)
{
    Call call("attend", words, q, "q");
    const Layout layout(call, "q", q, query_start_loc, max_query_len);
    tq_attend_params p = read_attend(call, layout, GIVEN_ATTEND);
    call.tensor("out", out, dtype_of(q), layout.sizes(call.plan().head_dim), Strides::ROWS);
    check_is_apart(call, "out", out);
    layout.read_strides(out, &p.out_stride_batch, &p.out_stride_head, &p.out_stride_token);
    if (lse) {
        call.tensor("lse", *lse, aoti_torch_dtype_float32(), layout.sizes(ANY), Strides::FREE);
        check_is_apart(call, "lse", *lse);
        layout.read_strides(*lse, &p.lse_stride_batch, &p.lse_stride_head, &p.lse_stride_token);
    }
    if (workspace) call.tensor("workspace", *workspace, aoti_torch_dtype_uint8(), {ANY}, Strides::DENSE);
    Launch launch(call);
    p.out = out.mutable_data_ptr();
    p.lse = lse ? static_cast<float *>(lse->mutable_data_ptr()) : nullptr;
    run_attend(call, launch, p, workspace);
}

/** Returns the most bytes of workspace that `attend` needs with these arguments or smaller ones. */
int64_t attend_workspace(ATTEND)
{
    Call call("attend_workspace", words, q, "q");
    tq_attend_params p = read_attend(call, Layout(call, "q", q, query_start_loc, max_query_len), GIVEN_ATTEND);
    size_t bytes = 0;
    call.check(Launch(call)->attend_workspace(&call.plan(), &p, &bytes, &call.error));
    return static_cast<int64_t>(bytes);
}

std::string attend_kernel(ATTEND)
{
    Call call("attend_kernel", words, q, "q");
    tq_attend_params p = read_attend(call, Layout(call, "q", q, query_start_loc, max_query_len), GIVEN_ATTEND);
    char name[NAME_BYTES];
    call.check(Launch(call)->attend_kernel(&call.plan(), &p, name, &call.error));
    return name;
}

/** Writes one schedule for all layers of a step (tq_cuda_schedule). Uses only the sizes of q, pages and block_table. */
void schedule(const Words &words, const Tensor &schedule, const Tensor &q, const Tensor &pages,
              const Tensor &block_table, const Tensor &lengths, const Maybe &starts, int64_t sinks, int64_t window,
              bool causal, int64_t sliding_window, const Maybe &query_start_loc, int64_t max_query_len,
              const Maybe &sink_rows, const Maybe &tail_rows, const Maybe &ends)
{
    Call call("schedule", words, q, "q");
    tq_attend_params p = read_queries(call, q, std::nullopt, causal, sliding_window, 0, std::nullopt,
                                      Layout(call, "q", q, query_start_loc, max_query_len));
    call.tensor("schedule", schedule, aoti_torch_dtype_int32(), {ANY, 4}, Strides::DENSE);
    const Maybe none;
    read_packed(call, pages, block_table, lengths, {none, none, none, none}, ANY, false, &p.layer);
    p.layer.sinks = call.narrow("sinks", sinks), p.layer.window = call.narrow("window", window);
    p.layer.sink_rows = read_integers(call, "sink_rows", sink_rows, {p.layer.batch});
    p.layer.tail_rows = read_integers(call, "tail_rows", tail_rows, {p.layer.batch, 2});
    p.layer.n_sink_rows = p.layer.n_tail_rows = INT32_MAX; // the rows are not read
    p.layer.tail_slots = tail_rows ? call.plan().page_tokens : 0;
    p.starts = read_integers(call, "starts", starts, {p.layer.batch});
    p.ends = read_integers(call, "ends", ends, {p.layer.batch});
    Launch launch(call);
    call.check(launch->schedule(launch.stream, &call.plan(), &p, static_cast<int32_t *>(schedule.mutable_data_ptr()),
                                schedule.size(0), &call.error));
}

/** Appends and attends in one call, because torch's overhead for an operator takes longer than a decode step's kernels.
 *  The first of several queries see tokens that the last ones push out of the window, so `attend` gets a copy of it. */
Tensor append_attend(const Words &words, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &lengths,
                     const Tensor &pages, const Tensor &block_table, EXACT, TRANSFORMS, const Maybe &flag,
                     std::optional<double> softmax_scale, int64_t sliding_window, double softcap, const Maybe &schedule,
                     const Maybe &lse, const Maybe &position_offset)
{
    Call call("append_attend", words, q, "q");
    int32_t dtype = dtype_of(q);
    int64_t dim = call.plan().head_dim;
    const Maybe none;
    tq_attend_params p =
        read_queries(call, q, softmax_scale, true, sliding_window, softcap, schedule, Layout(call, "q", q, none, 0));
    call.tensor("k", k, dtype, {p.layer.batch, ANY, p.query_tokens, dim}, Strides::ROWS);
    tq_append_params a = read_append(call, k, v, lengths, pages, block_table, GIVEN_EXACT, GIVEN_TRANSFORMS, flag,
                                     Ragged{none, none, none, position_offset, 0});
    if (lse) {
        call.tensor("lse", *lse, aoti_torch_dtype_float32(), {p.layer.batch, p.query_heads, p.query_tokens},
                    Strides::DENSE);
        p.lse = static_cast<float *>(lse->mutable_data_ptr());
    }
    p.layer = a.layer;

    Launch launch(call);
    Maybe earlier;
    if (given(window_k) && given(window_v) && a.tokens > 1) {
        earlier = joined(call, *window_k, *window_v);
        p.layer.window_k = earlier->mutable_data_ptr();
        p.layer.window_v =
            static_cast<char *>(p.layer.window_k) + window_k->numel() * static_cast<int64_t>(window_k->element_size());
        p.fresh_k = a.k, p.fresh_v = a.v;
        p.fresh_k_stride_batch = a.k_stride_batch, p.fresh_v_stride_batch = a.v_stride_batch;
        p.fresh_k_stride_head = a.k_stride_head, p.fresh_v_stride_head = a.v_stride_head;
        p.fresh_k_stride_token = a.k_stride_token, p.fresh_v_stride_token = a.v_stride_token;
    }
    Tensor out = call.allocate({p.layer.batch, p.query_heads, p.query_tokens, dim}, dtype);
    p.out = out.mutable_data_ptr();
    AttendCall prepared;
    size_t append_bytes = 0, attend_bytes = 0;
    call.check(launch->append_workspace_bytes(&call.plan(), &a, &append_bytes, &call.error));
    call.check(launch->attend_prepare(&call.plan(), &p, &prepared, &attend_bytes, &call.error));
    Tensor workspace = launch.workspace(std::max(append_bytes, attend_bytes));
    void *at = workspace.mutable_data_ptr();
    call.check(launch->append(launch.stream, &call.plan(), &a, flag_of(flag), append_bytes ? at : nullptr, append_bytes,
                              &call.error));
    call.check(launch->attend(launch.stream, &call.plan(), &p, &prepared, at, attend_bytes, &call.error), true);
    return out;
}

/** Returns an int32 tensor on the call's device. On CUDA the call waits for the copy from host memory. */
Tensor integers(const Call &call, const std::vector<int64_t> &shape, const std::vector<int32_t> &numbers)
{
    Call host = call;
    host.device_type = aoti_torch_device_type_cpu(), host.device_index = 0;
    Tensor t = host.allocate(shape, aoti_torch_dtype_int32());
    std::copy(numbers.begin(), numbers.end(), static_cast<int32_t *>(t.mutable_data_ptr()));
    return call.on_cuda() ? converted(call, t, aoti_torch_dtype_int32()) : t;
}

Tensor quantize(const Words &words, const Tensor &k, const Maybe &v, TRANSFORMS)
{
    Call call("quantize", words, k, "k");
    tq_append_params p = read_new_tokens(call, k, v, std::nullopt, 0);
    read_transforms(call, GIVEN_TRANSFORMS, &p.layer);

    int64_t page_tokens = call.plan().page_tokens;
    p.layer.max_pages = static_cast<int32_t>((p.tokens + page_tokens - 1) / page_tokens);
    p.layer.n_pages = static_cast<int64_t>(p.layer.batch) * p.layer.max_pages;
    std::vector<int32_t> table(static_cast<size_t>(call.length("k", p.layer.n_pages)));
    for (size_t i = 0; i < table.size(); i++) table[i] = static_cast<int32_t>(i);
    Tensor lengths =
        integers(call, {p.layer.batch}, std::vector<int32_t>(static_cast<size_t>(p.layer.batch), p.tokens));
    Tensor block_table = integers(call, {p.layer.batch, p.layer.max_pages}, table);
    Tensor pages =
        call.allocate({p.layer.n_pages, p.layer.kv_heads, call.plan().record_bytes}, aoti_torch_dtype_uint8());
    torch::stable::zero_(pages);
    p.layer.lengths = data_as<int32_t>(lengths), p.layer.block_table = data_as<int32_t>(block_table);
    p.layer.pages = static_cast<uint8_t *>(pages.mutable_data_ptr());
    run_append(call, p, nullptr);
    return pages;
}

std::tuple<Tensor, Tensor> dequantize(const Words &words, const Tensor &pages, const Tensor &block_table,
                                      const Tensor &lengths, int64_t max_tokens, TRANSFORMS, int64_t sinks,
                                      std::optional<torch::headeronly::ScalarType> dtype, const Maybe &position_offset)
{
    Call call("dequantize", words, pages, "pages");
    tq_layer layer{};
    check_integers(call, "block_table", block_table, {ANY, ANY});
    layer.batch = call.length("block_table", block_table, 0);
    read_packed(call, pages, block_table, lengths, GIVEN_TRANSFORMS, ANY, false, &layer);
    layer.sinks = call.narrow("sinks", sinks);
    layer.position_offset = read_integers(call, "position_offset", position_offset, {layer.batch});
    int32_t tokens = call.narrow("max_tokens", max_tokens);
    call.check(tq_check_dequantize_sizes(&call.plan(), &layer, tokens, &call.error));
    int32_t f32 = aoti_torch_dtype_float32(), wanted = dtype ? static_cast<int32_t>(*dtype) : f32;
    tq_dtype number = call.dtype_named("dtype", wanted);

    Launch launch(call);
    int32_t output_dtype = launch->dequantizes_any_dtype ? wanted : f32, value_tokens = call.has_values() ? tokens : 0;
    Tensor k = call.allocate({layer.batch, layer.kv_heads, tokens, call.plan().head_dim}, output_dtype);
    Tensor v = call.allocate({layer.batch, layer.kv_heads, value_tokens, call.plan().head_dim}, output_dtype);
    size_t bytes = 0;
    call.check(launch->dequantize_workspace_bytes(&call.plan(), layer.kv_heads, number, &bytes, &call.error));
    std::optional<Tensor> workspace;
    if (bytes) workspace = launch.workspace(bytes);
    call.check(launch->dequantize(launch.stream, &call.plan(), &layer, tokens, number, k.mutable_data_ptr(),
                                  call.has_values() ? v.mutable_data_ptr() : nullptr,
                                  workspace ? workspace->mutable_data_ptr() : nullptr, bytes, &call.error));
    if (output_dtype == wanted) return {k, v};
    return {converted(call, k, wanted), converted(call, v, wanted)};
}

Tensor recode(const Words &words, const Tensor &pages, const Words &target)
{
    Call call("recode", words, pages, "pages");
    std::shared_ptr<const tq_plan> fewer = call.other_plan(target);
    call.tensor("pages", pages, aoti_torch_dtype_uint8(), {ANY, ANY, call.plan().record_bytes}, Strides::DENSE);
    int64_t n_pages = pages.size(0);
    int32_t kv_heads = call.length("pages", pages, 1);
    call.check(tq_check_recode(&call.plan(), fewer.get(), nullptr, 0, 0, nullptr, &call.error));

    Launch launch(call);
    Tensor out = call.allocate({n_pages, kv_heads, fewer->record_bytes}, aoti_torch_dtype_uint8());
    call.check(launch->recode(launch.stream, &call.plan(), fewer.get(), data_as<uint8_t>(pages), n_pages, kv_heads,
                              static_cast<uint8_t *>(out.mutable_data_ptr()), call.threads(), &call.error));
    return out;
}

std::tuple<Tensor, Tensor> merge(const Tensor &outs, const Tensor &lses)
{
    Call call("merge", outs, "outs");
    call.read_dtype(outs);
    call.placed("outs", outs, Strides::FREE);
    auto sizes = outs.sizes();
    if (sizes.size() < 2)
        call.refuse("outs", "of at least two dimensions, [parts, ..., head_dim]", join(sizes.data(), sizes.size()));
    int32_t f32 = aoti_torch_dtype_float32(), head_dim = call.length("outs", sizes[sizes.size() - 1]);
    if (dtype_of(lses) != f32 || lses.dim() != outs.dim() - 1 ||
        !std::equal(sizes.begin(), sizes.end() - 1, lses.sizes().begin()))
        call.refuse("lses", "float32 " + join(sizes.data(), sizes.size() - 1) + ", `outs` without its last dimension",
                    dtype_name(dtype_of(lses)) + " " + join(lses.sizes().data(), lses.sizes().size()),
                    dtype_of(lses) == f32 ? Error::VALUE : Error::TYPE);
    call.placed("lses", lses, Strides::FREE);

    Launch launch(call);
    std::vector<int64_t> shape(sizes.begin() + 1, sizes.end());
    Tensor from = dense_f32(call, outs), from_lses = dense_f32(call, lses);
    Tensor out = call.allocate(shape, f32);
    shape.pop_back();
    Tensor lse = call.allocate(shape, f32);
    call.check(launch->merge(launch.stream, data_as<float>(from), data_as<float>(from_lses),
                             call.length("outs", sizes[0]), lse.numel(), head_dim,
                             static_cast<float *>(out.mutable_data_ptr()), static_cast<float *>(lse.mutable_data_ptr()),
                             &call.error));
    return {dtype_of(outs) == f32 ? out : converted(call, out, dtype_of(outs)), lse};
}

void implement(torch::stable::detail::StableLibrary &m)
{
    m.impl("rotate", TORCH_BOX(&rotate));
    m.impl("append", TORCH_BOX(&append));
    m.impl("attend", TORCH_BOX(&attend));
    m.impl("attend.out", TORCH_BOX(&attend_out));
    m.impl("attend_workspace", TORCH_BOX(&attend_workspace));
    m.impl("append_kernel", TORCH_BOX(&append_kernel));
    m.impl("attend_kernel", TORCH_BOX(&attend_kernel));
    m.impl("schedule", TORCH_BOX(&schedule));
    m.impl("append_attend", TORCH_BOX(&append_attend));
    m.impl("quantize", TORCH_BOX(&quantize));
    m.impl("dequantize", TORCH_BOX(&dequantize));
    m.impl("recode", TORCH_BOX(&recode));
    m.impl("merge", TORCH_BOX(&merge));
}
} // namespace
} // namespace turboquant

/** Names the CUDA toolkit and the architectures of this library's kernels, "13.0: 80+PTX 90a"; empty without CUDA.
 *  For `turboquant info`, which needs no device for it. */
extern "C" TQ_API const char *tq_torch_cuda_build(void);
const char *tq_torch_cuda_build(void)
{
#if defined(TURBOQUANT_WITH_CUDA)
    return TURBOQUANT_WITH_CUDA;
#else
    return "";
#endif
}

/** Names the kernels on a GPU that need not be there (tq_cuda_attend_kernel), for `turboquant info --kernels --gpu`.
 *  sizes  batch, KV heads, query heads of each, tokens of each sequence, and how many of them a prompt appends at once
 *  names  [3][64], written: attention of a step (bfloat16, sequences of one length), append of a token, of a prompt
 *  Returns "", or a sentence that says what is wrong and is valid until the thread's next call. */
extern "C" TQ_API const char *tq_torch_kernels_on(const char *gpu, const int64_t *words, size_t n_words,
                                                  const int32_t *sizes, char *names);
const char *tq_torch_kernels_on(const char *gpu, const int64_t *words, size_t n_words, const int32_t *sizes,
                                char *names)
{
#if defined(TURBOQUANT_WITH_CUDA)
    static thread_local std::string wrong;
    tq_plan plan;
    tq_error error = {};
    tq_attend_params attend{};
    tq_append_params append{};
    const int32_t kv_heads = sizes[1], tokens = sizes[3];
    const int64_t query_heads = (int64_t)kv_heads * sizes[2];
    if (query_heads > INT32_MAX) return "KV heads times heads for each must be below 2^31";
    tq_status status = tq_plan_init(&plan, words, n_words, &error);
    if (status == TQ_OK) {
        tq_layer layer{};
        layer.batch = sizes[0], layer.kv_heads = kv_heads, layer.dtype = TQ_BF16;
        layer.max_pages = tokens / plan.page_tokens + (tokens % plan.page_tokens != 0), layer.n_pages = 1;
        attend.layer = append.layer = layer;
        attend.query_heads = (int32_t)query_heads, attend.query_tokens = 1, attend.causal = 1;
        attend.softmax_scale = 1, attend.schedule_kind = TQ_SCHEDULE_EQUAL;
        status = tq_cuda_attend_kernel(&plan, &attend, gpu, names, &error);
    }
    for (int i = 1; i < 3 && status == TQ_OK; i++) {
        append.tokens = i == 1 ? 1 : sizes[4];
        status = tq_cuda_append_kernel(&plan, &append, names + i * turboquant::NAME_BYTES, &error);
    }
    wrong = status == TQ_OK ? ""
            : error.wants   ? std::string(error.argument) + " must be " + error.wants
                            : tq_status_message(status);
    return wrong.c_str();
#else
    (void)gpu, (void)words, (void)n_words, (void)sizes, (void)names;
    return "this build has no CUDA kernels to choose from: install a wheel, or build with nvcc on the PATH";
#endif
}

/** Returns whether words are a plan. info: the bytes of one page of one KV head, whether the plan is plain, and the
 *  numbers of a KV head's moments. Python without _core calls it. */
extern "C" TQ_API int32_t tq_torch_plan_info(const int64_t *words, size_t n_words, int64_t info[3]);
int32_t tq_torch_plan_info(const int64_t *words, size_t n_words, int64_t info[3])
{
    tq_plan plan;
    tq_error error = {};
    if (tq_plan_init(&plan, words, n_words, &error) != TQ_OK) return 0;
    info[0] = plan.record_bytes, info[1] = plan.is_plain, info[2] = plan.moments;
    return 1;
}

#define TRANSFORMS_SCHEMA                                                                                              \
    "Tensor? key_numbers=None, Tensor? value_numbers=None, Tensor? key_turns=None, Tensor? rotation=None"
#define EXACT_SCHEMA "Tensor? sink_k=None, Tensor? sink_v=None, Tensor? window_k=None, Tensor? window_v=None"
#define WRITTEN_EXACT_SCHEMA                                                                                           \
    "Tensor(b!)? sink_k=None, Tensor(c!)? sink_v=None, Tensor(d!)? window_k=None, Tensor(e!)? window_v=None"
#define RAGGED_SCHEMA                                                                                                  \
    "Tensor? query_start_loc=None, SymInt max_query_len=0, Tensor? sink_rows=None, Tensor? tail_rows=None, "           \
    "Tensor? position_offset=None"
#define ATTEND_SCHEMA                                                                                                  \
    "(int[] plan, Tensor q, Tensor pages, Tensor block_table, Tensor lengths, *, Tensor? starts=None, " EXACT_SCHEMA   \
    ", Tensor? fresh_k=None, Tensor? fresh_v=None, " TRANSFORMS_SCHEMA ", float? softmax_scale=None, "                 \
    "bool causal=True, int sliding_window=0, float softcap=0.0, Tensor? schedule=None, " RAGGED_SCHEMA                 \
    ", int window=0, Tensor? ends=None"

#ifndef TQ_OPERATORS
#define TQ_OPERATORS turboquant /* their namespace in torch.ops; setup.py, BuildHubKernel, has others */
#endif
#define OPERATORS(name, m) STABLE_TORCH_LIBRARY(name, m)
#define OPERATORS_IMPL(name, device, m) STABLE_TORCH_LIBRARY_IMPL(name, device, m)

OPERATORS(TQ_OPERATORS, m)
{
    m.def("rotate(int[] plan, Tensor x, Tensor? matrix=None, bool inverse=False) -> Tensor");
    m.def("append(int[] plan, Tensor k, Tensor? v, Tensor lengths, Tensor(a!) pages, Tensor block_table, "
          "*, " WRITTEN_EXACT_SCHEMA ", " TRANSFORMS_SCHEMA ", Tensor(f!)? flag=None, " RAGGED_SCHEMA ") -> ()");
    m.def("attend" ATTEND_SCHEMA ") -> (Tensor out, Tensor lse)");
    m.def("attend.out" ATTEND_SCHEMA ", Tensor(a!) out, Tensor(b!)? lse=None, Tensor(c!)? workspace=None) -> ()");
    m.def("attend_workspace" ATTEND_SCHEMA ") -> int");
    m.def("append_attend(int[] plan, Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor(a!) pages, "
          "Tensor block_table, *, " WRITTEN_EXACT_SCHEMA ", " TRANSFORMS_SCHEMA
          ", Tensor(f!)? flag=None, float? softmax_scale=None, int sliding_window=0, float softcap=0.0, "
          "Tensor? schedule=None, Tensor(g!)? lse=None, Tensor? position_offset=None) -> Tensor");
    m.def("append_kernel(int[] plan, Tensor k, Tensor? v, Tensor lengths, Tensor pages, Tensor block_table, "
          "*, " EXACT_SCHEMA ", " TRANSFORMS_SCHEMA ", Tensor? flag=None, " RAGGED_SCHEMA ") -> str");
    m.def("attend_kernel" ATTEND_SCHEMA ") -> str");
    m.def("schedule(int[] plan, Tensor(a!) schedule, Tensor q, Tensor pages, Tensor block_table, Tensor lengths, *, "
          "Tensor? starts=None, int sinks=0, int window=0, bool causal=True, int sliding_window=0, "
          "Tensor? query_start_loc=None, SymInt max_query_len=0, Tensor? sink_rows=None, Tensor? tail_rows=None, "
          "Tensor? ends=None) -> ()");
    m.def("quantize(int[] plan, Tensor k, Tensor? v, *, " TRANSFORMS_SCHEMA ") -> Tensor");
    m.def("dequantize(int[] plan, Tensor pages, Tensor block_table, Tensor lengths, SymInt max_tokens, "
          "*, " TRANSFORMS_SCHEMA ", int sinks=0, ScalarType? dtype=None, Tensor? position_offset=None) "
          "-> (Tensor k, Tensor v)");
    m.def("recode(int[] plan, Tensor pages, int[] target) -> Tensor");
    m.def("merge(Tensor outs, Tensor lses) -> (Tensor out, Tensor lse)");
}

OPERATORS_IMPL(TQ_OPERATORS, CPU, m) { turboquant::implement(m); }
OPERATORS_IMPL(TQ_OPERATORS, CUDA, m) { turboquant::implement(m); }
