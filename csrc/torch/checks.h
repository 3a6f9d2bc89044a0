// One operator call: checks its tensors. The only place of this binding that throws.
//   append: `v` must be float32 [2, 4, 7, 64] like `k`, got bfloat16 [2, 4, 7, 64]
//   attend: `pages` must be on cuda:0 like `q`, got cpu
//   append: `k[1, 0, 5, 3]` must be finite and at most 16384 in magnitude, got nan
//   attend: `block_table[3]` must be in 0..n_pages - 1, got 8
// A tensor's dtype, shape, device, strides and requires_grad are checked here, numbers and sizes by the core. Errors in
// Python (errors.h says how):
//   TypeError    an argument of another dtype
//   ValueError   all else about an argument
//   MemoryError  no memory
//   RuntimeError the machine: CUDA, an instruction set, the build, memory that torch could not get
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "errors.h"
#include "turboquant.h"

namespace turboquant
{
using torch::stable::Tensor;
using Words = std::vector<int64_t>;
using Maybe = std::optional<Tensor>;

inline constexpr int64_t ANY = -1; // a dimension of any length

enum class Strides {
    DENSE, // contiguous
    ROWS,  // only the last dimension must be
    PAGES, // all but the first dimension must be
    FREE
};

/** Throws if a call into libtorch failed. Its message is on stderr: the stable ABI of 2.10 does not return it. */
inline void torch_check(AOTITorchError error, const char *call)
{
    if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error(std::string("turboquant: torch failed in ") + call);
}

inline int32_t dtype_of(const Tensor &t)
{
    int32_t dtype;
    torch_check(aoti_torch_get_dtype(t.get(), &dtype), "get_dtype");
    return dtype;
}

inline std::string dtype_name(int32_t dtype)
{
    if (dtype == aoti_torch_dtype_float32()) return "float32";
    if (dtype == aoti_torch_dtype_float16()) return "float16";
    if (dtype == aoti_torch_dtype_bfloat16()) return "bfloat16";
    if (dtype == aoti_torch_dtype_float64()) return "float64";
    if (dtype == aoti_torch_dtype_uint8()) return "uint8";
    if (dtype == aoti_torch_dtype_int32()) return "int32";
    if (dtype == aoti_torch_dtype_int64()) return "int64";
    if (dtype == aoti_torch_dtype_bool()) return "bool";
    return "another dtype";
}

/** "[2, *, 64]". No streams in this file: they break where libstdc++ is linked statically beside torch's own. */
inline std::string join(const int64_t *numbers, size_t n)
{
    std::string text = "[";
    for (size_t i = 0; i < n; i++) text += (i ? ", " : "") + (numbers[i] == ANY ? "*" : std::to_string(numbers[i]));
    return text + "]";
}

/** Calls one of torch's operators. Its results replace its arguments on the stack. */
template <size_t N> void call_torch(const char *op, std::array<StableIValue, N> *stack)
{
    torch_check(torch_call_dispatcher(op, "", stack->data(), TORCH_ABI_VERSION), op);
}

/** Returns the first result of one of torch's operators with one argument. */
template <class T> T ask_torch(const char *op, const Tensor &of)
{
    std::array<StableIValue, 1> stack{torch::stable::detail::from(of)};
    call_torch(op, &stack);
    return torch::stable::detail::to<T>(stack[0]);
}

/** Returns a tensor that requires grad, the same in all calls. NULL in inference mode, if no call has made it: torch
 *  would never follow a tensor of inference mode. */
inline const Tensor *autograd_probe()
{
    static std::atomic<const Tensor *> probe{nullptr}; // never freed: torch may be gone at exit
    if (const Tensor *known = probe) return known;
    const int64_t size = 1;
    AtenTensorHandle handle;
    torch_check(
        aoti_torch_empty_strided(1, &size, &size, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, &handle),
        "empty_strided");
    auto tensor = std::make_unique<Tensor>(handle);
    if (ask_torch<bool>("aten::is_inference", *tensor)) return nullptr;
    torch_check(torch_set_requires_grad(handle, true), "set_requires_grad");
    const Tensor *first = nullptr;
    return probe.compare_exchange_strong(first, tensor.get()) ? tensor.release() : first;
}

/** Whether a view of a tensor that requires grad would have a grad_fn. It has none without grad mode, none in inference
 *  mode, and none under a dispatch mode in Python, such as FlopCounterMode, before which autograd has already run. */
inline bool autograd_is_active()
{
    const Tensor *probe = aoti_torch_grad_mode_is_enabled() ? autograd_probe() : nullptr;
    return probe && !ask_torch<bool>("aten::is_leaf", ask_torch<Tensor>("aten::alias", *probe));
}

/** How autograd follows a tensor. */
enum class Derivative { NONE, BACKWARD, FORWARD };

/** Returns how autograd follows t, while autograd is active. */
inline Derivative derivative_of(const Tensor &t)
{
    // The stable ABI has no query for it. A tensor of forward mode has a tangent. The primal of a tensor that requires
    // grad has a grad_fn, so it is not a leaf.
    std::array<StableIValue, 2> stack{torch::stable::detail::from(t), torch::stable::detail::from<int64_t>(0)};
    call_torch("aten::_unpack_dual", &stack);
    const bool forward = torch::stable::detail::to<Tensor>(stack[1]).defined();
    call_torch("aten::is_leaf", &stack);
    const bool leaf = torch::stable::detail::to<bool>(stack[0]);
    return forward ? Derivative::FORWARD : leaf ? Derivative::NONE : Derivative::BACKWARD;
}

/** Checked plans by their words: each is made once and shared by all threads, because layers of a cache may have
 *  different plans and checking one in each call would slow down decode steps. At most MOST are kept, some 4 MB;
 *  running calls keep theirs. */
class KnownPlans
{
public:
    static constexpr size_t MOST = 1024;

    /** Returns NULL and fills *status and *error if the words are not a plan. */
    std::shared_ptr<const tq_plan> find(const Words &words, tq_status *status, tq_error *error)
    {
        {
            std::shared_lock lock(mutex_);
            auto entry = plans_.find(words);
            if (entry != plans_.end()) return entry->second;
        }
        auto plan = std::make_shared<tq_plan>();
        *status = tq_plan_init(plan.get(), words.data(), words.size(), error);
        if (*status != TQ_OK) return nullptr;
        std::unique_lock lock(mutex_);
        if (plans_.size() >= MOST) plans_.clear();
        return plans_.emplace(words, plan).first->second;
    }

    static KnownPlans &of_process()
    {
        static KnownPlans *plans = new KnownPlans; // other threads may need it until the process ends
        return *plans;
    }

private:
    std::shared_mutex mutex_;
    std::map<Words, std::shared_ptr<const tq_plan>> plans_;
};

/** The plan, device and dtype of a call, and checks against them. The first tensor, `like`, gives device and dtype. */
class Call
{
public:
    const char *op;
    int32_t device_type, device_index;
    mutable tq_error error{};
    mutable std::vector<int64_t> new_tokens; // sizes of k and v, to name a number in them

    Call(const char *op_name, const Words &words, const Tensor &like, const char *name) : Call(op_name, like, name)
    {
        tq_status status = TQ_OK;
        plan_ = KnownPlans::of_process().find(words, &status, &error);
        check(status);
    }

    /** Returns a second plan of the call, its argument `target`. */
    std::shared_ptr<const tq_plan> other_plan(const Words &words) const
    {
        tq_status status = TQ_OK;
        auto plan = KnownPlans::of_process().find(words, &status, &error);
        if (!plan)
            refuse("target", "the words of a turboquant.Plan",
                   std::string("none: ") + error.argument + " must be " + error.wants);
        return plan;
    }

    /** For an operator without a plan. */
    Call(const char *op_name, const Tensor &like, const char *name)
        : op(op_name), like_name_(name), differentiates_(autograd_is_active())
    {
        read_device(like, &device_type, &device_index);
#if !defined(TURBOQUANT_WITH_CUDA)
        if (on_cuda())
            throw std::runtime_error(std::string(op) +
                                     ": this build of turboquant has no CUDA kernels: rebuild with TURBOQUANT_CUDA=1");
#endif
    }

    bool on_cuda() const { return device_type == aoti_torch_device_type_cuda(); }
    /** Not for `merge`, which has no plan. */
    const tq_plan &plan() const { return *plan_; }
    bool has_values() const { return plan_->value.tile_bytes != 0; }

    [[noreturn]] void refuse(const std::string &name, const std::string &wants, const std::string &got,
                             Error::Kind kind = Error::VALUE) const
    {
        throw Error(kind, std::string(op) + ": `" + name + "` must be " + wants + ", got " + got, name);
    }

    /** Refuses the first tensor. */
    [[noreturn]] void refuse_first(const std::string &wants, const std::string &got, Error::Kind kind) const
    {
        refuse(like_name_, wants, got, kind);
    }

    /** Turns a status into an exception. `error` is the one that was passed to the core. stored: whether the call has
     *  already stored its tokens. */
    void check(tq_status status, bool stored = false) const
    {
        if (status == TQ_OK) return;
        Error::Kind kind = status == TQ_E_TYPE                                 ? Error::TYPE
                           : status == TQ_E_MEMORY                             ? Error::MEMORY
                           : status == TQ_E_UNSUPPORTED || status == TQ_E_CUDA ? Error::MACHINE
                                                                               : Error::VALUE;
        std::string text = std::string(op) + (stored ? ": stored the tokens; " : ": "), name;
        std::optional<double> number;
        if (error.status == status && error.argument && error.wants) {
            name = error.argument; // the core's names are the operator's, but for the plan
            if (name == "words") name = "plan";
            if (name.starts_with("fresh_") && op == std::string_view("append_attend")) name.erase(0, 6); // its k and v
            std::string label = error.index >= 0 ? name + place_of(name) : name;
            if (name == "n_words") name = "plan", label = "len(plan)";
            std::optional<std::string> words = got_words();
            if (!words) number = error.got;
            text += "`" + label + "` must be " + error.wants + ", got " + (words ? *words : print(error.got));
        } else {
            text += tq_status_message(status);
        }
        throw Error(kind, text, name, number, stored);
    }

    /** Returns the model's dtype, that of the call's first tensor. */
    tq_dtype read_dtype(const Tensor &like) const { return dtype_named(like_name_, dtype_of(like)); }

    tq_dtype dtype_named(const char *name, int32_t dtype) const
    {
        if (dtype == aoti_torch_dtype_float32()) return TQ_F32;
        if (dtype == aoti_torch_dtype_float16()) return TQ_F16;
        if (dtype == aoti_torch_dtype_bfloat16()) return TQ_BF16;
        refuse(name, "float32, float16 or bfloat16", dtype_name(dtype), Error::TYPE);
    }

    /** Checks dtype and shape (ANY: any length), and what `placed` checks. */
    void tensor(const char *name, const Tensor &t, int32_t dtype, std::initializer_list<int64_t> shape,
                Strides strides) const
    {
        tensor(name, t, dtype, std::span(shape.begin(), shape.size()), strides);
    }

    void tensor(const char *name, const Tensor &t, int32_t dtype, std::span<const int64_t> shape, Strides strides) const
    {
        auto sizes = t.sizes();
        bool fits = dtype_of(t) == dtype && sizes.size() == shape.size();
        for (size_t i = 0; fits && i < shape.size(); i++) fits = shape[i] == ANY || shape[i] == sizes[i];
        if (!fits)
            refuse(name, dtype_name(dtype) + " " + join(shape.data(), shape.size()),
                   dtype_name(dtype_of(t)) + " " + join(sizes.data(), sizes.size()),
                   dtype_of(t) == dtype ? Error::VALUE : Error::TYPE);
        placed(name, t, strides);
    }

    /** Checks device, strides and that autograd does not follow the tensor. */
    void placed(const char *name, const Tensor &t, Strides strides) const
    {
        int32_t type, index;
        read_device(t, &type, &index);
        if (type != device_type || index != device_index)
            refuse(name, "on " + device_name(device_type, device_index) + " like `" + like_name_ + "`",
                   device_name(type, index));
        if (strides == Strides::DENSE && !t.is_contiguous()) refuse(name, "contiguous", "strides " + join_strides(t));
        if (strides == Strides::PAGES && t.numel() > 0 && !is_dense_behind(t))
            refuse(name, "dense in all but its first dimension", "strides " + join_strides(t));
        if (strides == Strides::ROWS && t.stride(t.dim() - 1) != 1 && t.size(t.dim() - 1) > 1 && t.numel() > 0)
            refuse(name, "dense in its last dimension", "strides " + join_strides(t));
        if (!differentiates_ || !is_float(dtype_of(t))) return;
        const Derivative derivative = derivative_of(t);
        if (derivative == Derivative::BACKWARD)
            refuse(name, "without requires_grad (inference only: call under torch.no_grad() or detach it)",
                   "a tensor that requires grad");
        if (derivative == Derivative::FORWARD)
            refuse(name, "without a tangent (inference only: detach it)", "a tensor of forward-mode differentiation");
    }

    /** Returns a length as int32, in which the core counts. */
    int32_t length(const char *name, const Tensor &t, int64_t dim) const { return length(name, t.size(dim)); }

    int32_t length(const char *name, int64_t n) const
    {
        return narrow(name, n, "smaller than 2^31 in every dimension");
    }

    int32_t narrow(const char *name, int64_t n, const char *wants = "in -2^31..2^31 - 1") const
    {
        if (n < INT32_MIN || n > INT32_MAX) refuse(name, wants, std::to_string(n));
        return static_cast<int32_t>(n);
    }

    /** Allocates an uninitialised, contiguous tensor on the call's device. */
    Tensor allocate(const std::vector<int64_t> &sizes, int32_t dtype) const
    {
        std::vector<int64_t> strides(sizes.size());
        int64_t stride = 1;
        for (size_t i = sizes.size(); i-- > 0;) {
            strides[i] = stride;
            stride *= std::max<int64_t>(sizes[i], 1);
        }
        AtenTensorHandle handle;
        if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                                     device_type, device_index, &handle) != AOTI_TORCH_SUCCESS)
            throw std::runtime_error(std::string(op) + (on_cuda() ? ": CUDA out of memory" : ": out of memory") +
                                     " for " + dtype_name(dtype) + " " + join(sizes.data(), sizes.size()));
        return Tensor(handle);
    }

    /** Returns torch.get_num_threads() or tq_num_threads(), whichever is smaller. */
    int32_t threads() const
    {
        uint32_t torch_threads = 1;
        torch_check(torch_get_num_threads(&torch_threads), "get_num_threads");
        return static_cast<int32_t>(std::min<int64_t>(torch_threads, tq_num_threads()));
    }

private:
    std::shared_ptr<const tq_plan> plan_;

    /** Returns "[3]", or "[1, 0, 5, 3]" in k and v, where the core gives a flat index. */
    std::string place_of(std::string_view name) const
    {
        std::vector<int64_t> place{error.index};
        if (name == "k" || name == "v")
            for (size_t i = new_tokens.size(); i-- > 1;) {
                place.insert(place.begin() + 1, place[0] % new_tokens[i]);
                place[0] /= new_tokens[i];
            }
        return join(place.data(), place.size());
    }

    /** Returns the text for an error's "got" if that is not a number. */
    std::optional<std::string> got_words() const
    {
        std::string_view wants = error.wants;
        std::string_view name = error.argument;
        const char *set = name.starts_with("TURBOQUANT_") ? std::getenv(error.argument) : nullptr;
        if (set) return set;
        if (wants.starts_with("given")) return "None";
        if (wants.starts_with("absent")) return "a tensor";
        return std::nullopt;
    }

    static std::string print(double number)
    {
        bool whole = number == std::floor(number) && std::fabs(number) < 9007199254740992.0;
        char text[32];
        std::snprintf(text, sizeof text, whole ? "%.0f" : "%.9g", number);
        return text;
    }

    const char *like_name_;
    bool differentiates_;

    static void read_device(const Tensor &t, int32_t *type, int32_t *index)
    {
        torch_check(aoti_torch_get_device_type(t.get(), type), "get_device_type");
        torch_check(aoti_torch_get_device_index(t.get(), index), "get_device_index");
        if (*type == aoti_torch_device_type_cpu()) *index = 0;
    }

    static std::string device_name(int32_t type, int32_t index)
    {
        if (type == aoti_torch_device_type_cpu()) return "cpu";
        if (type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(index);
        return "another device";
    }

    /** Whether all dimensions behind the first one are contiguous. */
    static bool is_dense_behind(const Tensor &t)
    {
        int64_t dense = 1;
        for (int64_t i = t.dim() - 1; i > 0; dense *= t.size(i--))
            if (t.size(i) > 1 && t.stride(i) != dense) return false;
        return true;
    }

    static std::string join_strides(const Tensor &t)
    {
        auto strides = t.strides();
        return join(strides.data(), strides.size());
    }

    static bool is_float(int32_t dtype)
    {
        return dtype == aoti_torch_dtype_float32() || dtype == aoti_torch_dtype_float16() ||
               dtype == aoti_torch_dtype_bfloat16() || dtype == aoti_torch_dtype_float64();
    }
};

} // namespace turboquant
