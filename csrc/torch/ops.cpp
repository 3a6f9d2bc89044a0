// torch.ops.turboquant.*: the core (and CUDA) behind LibTorch's stable ABI; no Python, one binary for torch >= 2.10.
// Contracts: turboquant.h. Documentation for users and fake kernels: turboquant/operators.py.
//
// Every operator has the same five steps on one screen: checks, device guard and stream, workspace, call, status to
// error. A Call (checks.h) checks and throws; a Backend has the functions of a device under common names, so that
// operators do not branch. Layout is [batch, heads, tokens, head_dim] everywhere, as in SDPA. An empty optional tensor
// counts as absent, except starts, flag, and v of a plan without values.
#include "checks.h"
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
    tq_status (*merge)(void *stream, const float *outs, const float *lses, int32_t parts, int64_t rows,
                       int32_t head_dim, float *out, float *lse, tq_error *);
};

template <auto function, class... Arguments> tq_status on_cpu(void *, Arguments... arguments)
{
    return function(arguments...);
}

constexpr size_t NAME_BYTES = 64; // of a kernel, with a final 0

/** On a CPU the kernel depends on the plan alone. */
tq_status name_of(const char *operation, const tq_plan *plan, char *name, tq_error *error)
{
    const char *found = tq_kernel_name(operation, plan);
    std::snprintf(name, NAME_BYTES, "%s", found ? found : "");
    size_t bytes;
    return found ? TQ_OK
                 : tq_dot_workspace_bytes(plan, 0, &bytes, error); // which fails where TURBOQUANT_ISA names no level
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
    on_cpu<tq_merge>,
};

#if defined(TURBOQUANT_WITH_CUDA)
static_assert(NAME_BYTES == TQ_CUDA_KERNEL_NAME_BYTES);

/** Moves the stream to its place in the launchers, before the error. */
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
    tq_cuda_attend_prepare,
    [](void *stream, auto, auto, const AttendCall *call, void *workspace, size_t bytes, auto error) {
        return tq_cuda_attend(call, workspace, bytes, stream, error);
    },
    on_stream<tq_cuda_schedule>,
    tq_cuda_append_kernel,
    tq_cuda_attend_kernel,
    true,
    tq_cuda_dequantize_workspace_bytes,
    on_stream<tq_cuda_dequantize>,
    on_stream<tq_cuda_merge>,
};
#endif

/** After the checks: makes the call's device current for its lifetime, and has its backend and stream. */
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

    /** Memory for the call. Torch's allocators align to 64 bytes on a CPU and to 512 on CUDA, and know the stream. */
    Tensor workspace(size_t bytes) const
    {
        return call_.allocate({std::max<int64_t>(static_cast<int64_t>(bytes), 64)}, aoti_torch_dtype_uint8());
    }

private:
    const Call &call_;
    std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// ---- arguments that several operators share ----

bool given(const Maybe &t) { return t && t->numel() > 0; }

const void *data_of(const Maybe &t) { return given(t) ? t->const_data_ptr() : nullptr; }

template <class T> const T *data_as(const Tensor &t) { return static_cast<const T *>(t.const_data_ptr()); }

void check_head_dim(const Call &call, const char *name, const Tensor &t)
{
    if (t.dim() < 1 || t.size(t.dim() - 1) != call.plan().head_dim)
        call.refuse(name, "of head_dim " + std::to_string(call.plan().head_dim) + ", the plan's, in its last dimension",
                    join(t.sizes().data(), t.sizes().size()));
}

void check_integers(const Call &call, const char *name, const Tensor &t, std::initializer_list<int64_t> shape)
{
    call.tensor(name, t, aoti_torch_dtype_int32(), shape, Strides::DENSE);
}

struct Transforms {
    const Maybe &key_numbers, &value_numbers, &key_turns, &rotation;
};

struct Exact {
    const Maybe &sink_k, &sink_v, &window_k, &window_v;
};

void read_numbers(const Call &call, const char *name, const Maybe &numbers, bool is_value, int64_t kv_heads,
                  tq_transform *out)
{
    if (!given(numbers)) return;
    call.tensor(name, *numbers, aoti_torch_dtype_float32(), {kv_heads, ANY}, Strides::DENSE);
    call.check(
        tq_transform_numbers(&call.plan(), is_value, data_as<float>(*numbers), numbers->size(1), out, &call.error));
}

/** key_numbers and value_numbers float32 [kv_heads, columns], key_turns int32 [wave_pairs, 3], rotation float32
 *  [kv_heads or 1, rows of the keys and then of the values, head_dim]. What the plan does not take is read too: the core
 *  refuses it. */
void read_transforms(const Call &call, const Transforms &from, tq_layer *layer)
{
    const tq_side &key = call.plan().key, &value = call.plan().value;
    read_numbers(call, "key_numbers", from.key_numbers, false, layer->kv_heads, &layer->key);
    read_numbers(call, "value_numbers", from.value_numbers, true, layer->kv_heads, &layer->value);
    if (given(from.key_turns)) {
        check_integers(call, "key_turns", *from.key_turns, {call.plan().wave_pairs, 3});
        layer->key.turns = data_as<int32_t>(*from.key_turns);
    }
    if (!given(from.rotation)) return;
    int64_t dim = call.plan().head_dim, rows = key.matrix_rows + value.matrix_rows;
    bool one = from.rotation->dim() == 3 && from.rotation->size(0) == 1;
    call.tensor("rotation", *from.rotation, aoti_torch_dtype_float32(),
                {one ? 1 : layer->kv_heads, rows ? rows : ANY, dim}, Strides::DENSE);
    const float *matrix = data_as<float>(*from.rotation);
    layer->key.rotation_stride_head = layer->value.rotation_stride_head = one ? 0 : rows * dim;
    if (key.matrix_rows || !rows) layer->key.rotation = matrix;
    if (value.matrix_rows) layer->value.rotation = matrix + key.matrix_rows * dim;
}

/** How many tokens a pair such as sink_k, sink_v holds: [batch, kv_heads, tokens, head_dim], dense; 0 without keys. */
int32_t read_pair(const Call &call, const char *k_name, const char *v_name, const Maybe &k, const Maybe &v,
                  int32_t dtype, const tq_layer &layer)
{
    int64_t dim = call.plan().head_dim;
    if (given(k)) call.tensor(k_name, *k, dtype, {layer.batch, layer.kv_heads, ANY, dim}, Strides::DENSE);
    if (given(v))
        call.tensor(v_name, *v, dtype, {layer.batch, layer.kv_heads, given(k) ? k->size(2) : ANY, dim}, Strides::DENSE);
    return given(k) ? call.length(k_name, *k, 2) : 0;
}

/** The data of a tensor that this call may write to, or only reads. */
void *data_for(bool writes, const Tensor &t)
{
    return writes ? t.mutable_data_ptr() : const_cast<void *>(t.const_data_ptr());
}

/** Pages, table and lengths of layer->batch sequences, and the transforms. kv_heads ANY: as many as pages have. */
void read_packed(const Call &call, const Tensor &pages, const Tensor &block_table, const Tensor &lengths,
                 const Transforms &transforms, int64_t kv_heads, bool writes, tq_layer *layer)
{
    call.tensor("pages", pages, aoti_torch_dtype_uint8(), {ANY, kv_heads, call.plan().record_bytes}, Strides::PAGES);
    check_integers(call, "block_table", block_table, {layer->batch, ANY});
    check_integers(call, "lengths", lengths, {layer->batch});
    layer->kv_heads = call.length("pages", pages, 1), layer->n_pages = pages.size(0);
    if (pages.numel() && layer->n_pages > 1) {
        layer->page_stride = pages.stride(0);
        if (layer->page_stride < pages.size(1) * pages.size(2) || layer->page_stride % 64)
            call.refuse("pages", "of a stride between pages that is a multiple of 64 and no less than a page",
                        std::to_string(layer->page_stride));
    }
    layer->max_pages = call.length("block_table", block_table, 1);
    layer->pages = static_cast<uint8_t *>(data_for(writes, pages));
    layer->block_table = data_as<int32_t>(block_table), layer->lengths = data_as<int32_t>(lengths);
    read_transforms(call, transforms, layer);
}

/** The layer of a call whose batch is known. like: gives the dtype of exact tokens. */
void read_layer(const Call &call, const Tensor &like, const Tensor &pages, const Tensor &block_table,
                const Tensor &lengths, const Exact &exact, const Transforms &transforms, int64_t kv_heads, bool writes,
                tq_layer *layer)
{
    read_packed(call, pages, block_table, lengths, transforms, kv_heads, writes, layer);
    int32_t dtype = dtype_of(like);
    layer->dtype = call.read_dtype(like);
    layer->sinks = read_pair(call, "sink_k", "sink_v", exact.sink_k, exact.sink_v, dtype, *layer);
    layer->window = read_pair(call, "window_k", "window_v", exact.window_k, exact.window_v, dtype, *layer);
    auto at = [&](const Maybe &t) { return given(t) ? data_for(writes, *t) : nullptr; };
    layer->sink_k = at(exact.sink_k), layer->sink_v = at(exact.sink_v);
    layer->window_k = at(exact.window_k), layer->window_v = at(exact.window_v);
}

/** k and v: [batch, kv_heads, tokens, head_dim] with free leading strides; v absent iff the plan has no values. */
tq_append_params read_new_tokens(const Call &call, const Tensor &k, const Maybe &v)
{
    tq_append_params p{};
    p.layer.dtype = call.read_dtype(k);
    call.tensor("k", k, dtype_of(k), {ANY, ANY, ANY, call.plan().head_dim}, Strides::ROWS);
    if (v) call.tensor("v", *v, dtype_of(k), {k.size(0), k.size(1), k.size(2), k.size(3)}, Strides::ROWS);
    p.layer.batch = call.length("k", k, 0), p.layer.kv_heads = call.length("k", k, 1),
    p.tokens = call.length("k", k, 2);
    p.threads = call.threads();
    p.k = k.const_data_ptr(), p.v = v ? v->const_data_ptr() : nullptr;
    p.k_stride_batch = k.stride(0), p.k_stride_head = k.stride(1), p.k_stride_token = k.stride(2);
    if (v) p.v_stride_batch = v->stride(0), p.v_stride_head = v->stride(1), p.v_stride_token = v->stride(2);
    return p;
}

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

/** A contiguous copy in another (or the same) dtype. */
Tensor converted(const Call &call, const Tensor &t, int32_t dtype)
{
    auto sizes = t.sizes();
    Tensor out = call.allocate({sizes.begin(), sizes.end()}, dtype);
    torch::stable::copy_(out, t);
    return out;
}

/** Copies of both, which are alike, one behind the other, in one launch. */
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

/** Contiguous and float32, copied only if it is not. */
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

/** The arguments of `append` beside the plan, checked. */
tq_append_params read_append(const Call &call, const Tensor &k, const Maybe &v, const Tensor &lengths,
                             const Tensor &pages, const Tensor &block_table, const Exact &exact,
                             const Transforms &transforms, const Maybe &flag)
{
    tq_append_params p = read_new_tokens(call, k, v);
    read_layer(call, k, pages, block_table, lengths, exact, transforms, p.layer.kv_heads, true, &p.layer);
    if (flag) call.tensor("flag", *flag, aoti_torch_dtype_int64(), {1}, Strides::DENSE);
    return p;
}

int64_t *flag_of(const Maybe &flag) { return given(flag) ? static_cast<int64_t *>(flag->mutable_data_ptr()) : nullptr; }

// Parameters that several operators have, in the order of their schemas below.
#define EXACT const Maybe &sink_k, const Maybe &sink_v, const Maybe &window_k, const Maybe &window_v
#define TRANSFORMS const Maybe &key_numbers, const Maybe &value_numbers, const Maybe &key_turns, const Maybe &rotation
#define APPEND                                                                                                         \
    const Words &words, const Tensor &k, const Maybe &v, const Tensor &lengths, const Tensor &pages,                   \
        const Tensor &block_table, EXACT, TRANSFORMS, const Maybe &flag
#define ATTEND                                                                                                         \
    const Words &words, const Tensor &q, const Tensor &pages, const Tensor &block_table, const Tensor &lengths,        \
        const Maybe &starts, EXACT, const Maybe &fresh_k, const Maybe &fresh_v, TRANSFORMS,                            \
        std::optional<double> softmax_scale, bool causal, int64_t sliding_window, double softcap,                      \
        const Maybe &schedule
#define GIVEN_EXACT                                                                                                    \
    Exact { sink_k, sink_v, window_k, window_v }
#define GIVEN_TRANSFORMS                                                                                               \
    Transforms { key_numbers, value_numbers, key_turns, rotation }

void append(APPEND)
{
    Call call("append", words, k, "k");
    run_append(call, read_append(call, k, v, lengths, pages, block_table, GIVEN_EXACT, GIVEN_TRANSFORMS, flag),
               flag_of(flag));
}

std::string append_kernel(APPEND)
{
    Call call("append_kernel", words, k, "k");
    tq_append_params p = read_append(call, k, v, lengths, pages, block_table, GIVEN_EXACT, GIVEN_TRANSFORMS, flag);
    char name[NAME_BYTES];
    call.check(Launch(call)->append_kernel(&call.plan(), &p, name, &call.error));
    return name;
}

/** The queries of an attention call, and its scale, mask and soft-cap. */
tq_attend_params read_queries(const Call &call, const Tensor &q, std::optional<double> softmax_scale, bool causal,
                              int64_t sliding_window, double softcap, const Maybe &schedule)
{
    tq_attend_params p{};
    int64_t dim = call.plan().head_dim;
    p.layer.dtype = call.read_dtype(q);
    call.tensor("q", q, dtype_of(q), {ANY, ANY, ANY, dim}, Strides::ROWS);
    p.layer.batch = call.length("q", q, 0), p.query_heads = call.length("q", q, 1),
    p.query_tokens = call.length("q", q, 2);
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
    p.q_stride_batch = q.stride(0), p.q_stride_head = q.stride(1), p.q_stride_token = q.stride(2);
    return p;
}

/** New tokens beside the window: [batch, kv_heads, query_tokens, head_dim]. */
const void *read_fresh(const Call &call, const char *name, const Maybe &t, const tq_attend_params &p, int32_t dtype,
                       int64_t *batch, int64_t *head, int64_t *token)
{
    if (!given(t)) return nullptr;
    call.tensor(name, *t, dtype, {p.layer.batch, p.layer.kv_heads, p.query_tokens, call.plan().head_dim},
                Strides::ROWS);
    *batch = t->stride(0), *head = t->stride(1), *token = t->stride(2);
    return t->const_data_ptr();
}

/** Checks the arguments of `attend` or `attend_kernel`. */
tq_attend_params read_attend(const Call &call, ATTEND)
{
    (void)words; // of the call
    tq_attend_params p = read_queries(call, q, softmax_scale, causal, sliding_window, softcap, schedule);
    read_layer(call, q, pages, block_table, lengths, GIVEN_EXACT, GIVEN_TRANSFORMS, ANY, false, &p.layer);
    if (starts) check_integers(call, "starts", *starts, {p.layer.batch});
    p.starts = starts ? data_as<int32_t>(*starts) : nullptr;
    p.fresh_k = read_fresh(call, "fresh_k", fresh_k, p, dtype_of(q), &p.fresh_k_stride_batch, &p.fresh_k_stride_head,
                           &p.fresh_k_stride_token);
    p.fresh_v = read_fresh(call, "fresh_v", fresh_v, p, dtype_of(q), &p.fresh_v_stride_batch, &p.fresh_v_stride_head,
                           &p.fresh_v_stride_token);
    return p;
}

std::tuple<Tensor, Tensor> attend(ATTEND)
{
    Call call("attend", words, q, "q");
    tq_attend_params p = read_attend(call, words, q, pages, block_table, lengths, starts, sink_k, sink_v, window_k,
                                     window_v, fresh_k, fresh_v, key_numbers, value_numbers, key_turns, rotation,
                                     softmax_scale, causal, sliding_window, softcap, schedule);
    Launch launch(call);
    Tensor out = call.allocate({p.layer.batch, p.query_heads, p.query_tokens, call.plan().head_dim}, dtype_of(q));
    Tensor lse = call.allocate({p.layer.batch, p.query_heads, p.query_tokens}, aoti_torch_dtype_float32());
    p.out = out.mutable_data_ptr();
    p.lse = static_cast<float *>(lse.mutable_data_ptr());
    AttendCall prepared;
    size_t bytes = 0;
    call.check(launch->attend_prepare(&call.plan(), &p, &prepared, &bytes, &call.error));
    Tensor workspace = launch.workspace(bytes);
    call.check(
        launch->attend(launch.stream, &call.plan(), &p, &prepared, workspace.mutable_data_ptr(), bytes, &call.error));
    return {out, lse};
}

std::string attend_kernel(ATTEND)
{
    Call call("attend_kernel", words, q, "q");
    tq_attend_params p = read_attend(call, words, q, pages, block_table, lengths, starts, sink_k, sink_v, window_k,
                                     window_v, fresh_k, fresh_v, key_numbers, value_numbers, key_turns, rotation,
                                     softmax_scale, causal, sliding_window, softcap, schedule);
    char name[NAME_BYTES];
    call.check(Launch(call)->attend_kernel(&call.plan(), &p, name, &call.error));
    return name;
}

/** One schedule for the layers of a step: tq_cuda_schedule. Only the sizes of q, pages and block_table are used. */
void schedule(const Words &words, const Tensor &schedule, const Tensor &q, const Tensor &pages,
              const Tensor &block_table, const Tensor &lengths, const Maybe &starts, int64_t sinks, int64_t window,
              bool causal, int64_t sliding_window)
{
    Call call("schedule", words, q, "q");
    tq_attend_params p = read_queries(call, q, std::nullopt, causal, sliding_window, 0, std::nullopt);
    call.tensor("schedule", schedule, aoti_torch_dtype_int32(), {ANY, 4}, Strides::DENSE);
    const Maybe none;
    read_packed(call, pages, block_table, lengths, {none, none, none, none}, ANY, false, &p.layer);
    if (starts) check_integers(call, "starts", *starts, {p.layer.batch});
    p.layer.sinks = call.narrow("sinks", sinks), p.layer.window = call.narrow("window", window);
    p.starts = starts ? data_as<int32_t>(*starts) : nullptr;
    Launch launch(call);
    call.check(launch->schedule(launch.stream, &call.plan(), &p, static_cast<int32_t *>(schedule.mutable_data_ptr()),
                                schedule.size(0), &call.error));
}

/** append and attend in one call, because torch's overhead of an operator is longer than a decode step's kernels. The
 *  first of several queries see tokens that the last ones push out of the window, so `attend` gets a copy of it. */
Tensor append_attend(const Words &words, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &lengths,
                     const Tensor &pages, const Tensor &block_table, EXACT, TRANSFORMS, const Maybe &flag,
                     std::optional<double> softmax_scale, int64_t sliding_window, double softcap, const Maybe &schedule,
                     const Maybe &lse)
{
    Call call("append_attend", words, q, "q");
    int32_t dtype = dtype_of(q);
    int64_t dim = call.plan().head_dim;
    tq_attend_params p = read_queries(call, q, softmax_scale, true, sliding_window, softcap, schedule);
    call.tensor("k", k, dtype, {p.layer.batch, ANY, p.query_tokens, dim}, Strides::ROWS);
    tq_append_params a = read_append(call, k, v, lengths, pages, block_table, GIVEN_EXACT, GIVEN_TRANSFORMS, flag);
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

/** An int32 tensor on the call's device; from host memory, so CUDA waits for it. */
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
    tq_append_params p = read_new_tokens(call, k, v);
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
                                      std::optional<torch::headeronly::ScalarType> dtype)
{
    Call call("dequantize", words, pages, "pages");
    tq_layer layer{};
    check_integers(call, "block_table", block_table, {ANY, ANY});
    layer.batch = call.length("block_table", block_table, 0);
    read_packed(call, pages, block_table, lengths, GIVEN_TRANSFORMS, ANY, false, &layer);
    layer.sinks = call.narrow("sinks", sinks);
    int32_t tokens = call.narrow("max_tokens", max_tokens);
    call.check(tq_check_dequantize_sizes(&call.plan(), &layer, tokens, &call.error));
    int32_t f32 = aoti_torch_dtype_float32(), wanted = dtype ? static_cast<int32_t>(*dtype) : f32;
    tq_dtype number = call.dtype_named("dtype", wanted);

    Launch launch(call);
    int32_t made = launch->dequantizes_any_dtype ? wanted : f32, value_tokens = call.has_values() ? tokens : 0;
    Tensor k = call.allocate({layer.batch, layer.kv_heads, tokens, call.plan().head_dim}, made);
    Tensor v = call.allocate({layer.batch, layer.kv_heads, value_tokens, call.plan().head_dim}, made);
    size_t bytes = 0;
    call.check(launch->dequantize_workspace_bytes(&call.plan(), layer.kv_heads, number, &bytes, &call.error));
    std::optional<Tensor> workspace;
    if (bytes) workspace = launch.workspace(bytes);
    call.check(launch->dequantize(launch.stream, &call.plan(), &layer, tokens, number, k.mutable_data_ptr(),
                                  call.has_values() ? v.mutable_data_ptr() : nullptr,
                                  workspace ? workspace->mutable_data_ptr() : nullptr, bytes, &call.error));
    if (made == wanted) return {k, v};
    return {converted(call, k, wanted), converted(call, v, wanted)};
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
    m.impl("append_kernel", TORCH_BOX(&append_kernel));
    m.impl("attend_kernel", TORCH_BOX(&attend_kernel));
    m.impl("schedule", TORCH_BOX(&schedule));
    m.impl("append_attend", TORCH_BOX(&append_attend));
    m.impl("quantize", TORCH_BOX(&quantize));
    m.impl("dequantize", TORCH_BOX(&dequantize));
    m.impl("merge", TORCH_BOX(&merge));
}
} // namespace
} // namespace turboquant

/** The CUDA toolkit and the architectures of this library's kernels, "13.0: 80+PTX 90a"; empty in a build without CUDA.
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

#define TRANSFORMS_SCHEMA                                                                                              \
    "Tensor? key_numbers=None, Tensor? value_numbers=None, Tensor? key_turns=None, Tensor? rotation=None"
#define EXACT_SCHEMA "Tensor? sink_k=None, Tensor? sink_v=None, Tensor? window_k=None, Tensor? window_v=None"
#define WRITTEN_EXACT_SCHEMA                                                                                           \
    "Tensor(b!)? sink_k=None, Tensor(c!)? sink_v=None, Tensor(d!)? window_k=None, Tensor(e!)? window_v=None"
#define ATTEND_SCHEMA                                                                                                  \
    "(int[] plan, Tensor q, Tensor pages, Tensor block_table, Tensor lengths, *, Tensor? starts=None, " EXACT_SCHEMA   \
    ", Tensor? fresh_k=None, Tensor? fresh_v=None, " TRANSFORMS_SCHEMA ", float? softmax_scale=None, "                 \
    "bool causal=True, int sliding_window=0, float softcap=0.0, Tensor? schedule=None) -> "

STABLE_TORCH_LIBRARY(turboquant, m)
{
    m.def("rotate(int[] plan, Tensor x, Tensor? matrix=None, bool inverse=False) -> Tensor");
    m.def("append(int[] plan, Tensor k, Tensor? v, Tensor lengths, Tensor(a!) pages, Tensor block_table, "
          "*, " WRITTEN_EXACT_SCHEMA ", " TRANSFORMS_SCHEMA ", Tensor(f!)? flag=None) -> ()");
    m.def("attend" ATTEND_SCHEMA "(Tensor out, Tensor lse)");
    m.def("append_attend(int[] plan, Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor(a!) pages, "
          "Tensor block_table, *, " WRITTEN_EXACT_SCHEMA ", " TRANSFORMS_SCHEMA
          ", Tensor(f!)? flag=None, float? softmax_scale=None, int sliding_window=0, float softcap=0.0, "
          "Tensor? schedule=None, Tensor(g!)? lse=None) -> Tensor");
    m.def("append_kernel(int[] plan, Tensor k, Tensor? v, Tensor lengths, Tensor pages, Tensor block_table, "
          "*, " EXACT_SCHEMA ", " TRANSFORMS_SCHEMA ", Tensor? flag=None) -> str");
    m.def("attend_kernel" ATTEND_SCHEMA "str");
    m.def("schedule(int[] plan, Tensor(a!) schedule, Tensor q, Tensor pages, Tensor block_table, Tensor lengths, *, "
          "Tensor? starts=None, int sinks=0, int window=0, bool causal=True, int sliding_window=0) -> ()");
    m.def("quantize(int[] plan, Tensor k, Tensor? v, *, " TRANSFORMS_SCHEMA ") -> Tensor");
    m.def("dequantize(int[] plan, Tensor pages, Tensor block_table, Tensor lengths, SymInt max_tokens, "
          "*, " TRANSFORMS_SCHEMA ", int sinks=0, ScalarType? dtype=None) -> (Tensor k, Tensor v)");
    m.def("merge(Tensor outs, Tensor lses) -> (Tensor out, Tensor lse)");
}

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) { turboquant::implement(m); }
STABLE_TORCH_LIBRARY_IMPL(turboquant, CUDA, m) { turboquant::implement(m); }
