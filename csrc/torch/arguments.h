// Arguments that several operators share: checks tensors and fills the structs of turboquant.h with them.
#pragma once
#include "checks.h"

namespace turboquant
{
namespace
{
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

/** Integers of each sequence, besides lengths. */
struct Ragged {
    const Maybe &query_start_loc, &sink_rows, &tail_rows, &position_offset;
    int64_t max_query_len;
};

void read_numbers(const Call &call, const char *name, const Maybe &numbers, bool is_value, int64_t kv_heads,
                  tq_transform *out)
{
    if (!given(numbers)) return;
    call.tensor(name, *numbers, aoti_torch_dtype_float32(), {kv_heads, ANY}, Strides::DENSE);
    call.check(
        tq_transform_numbers(&call.plan(), is_value, data_as<float>(*numbers), numbers->size(1), out, &call.error));
}

/** Reads key_numbers and value_numbers, float32 [kv_heads, columns], key_turns, int32 [wave_pairs, 3], and rotation,
 *  float32 [kv_heads or 1, rows of the keys and then of the values, head_dim]. What the plan does not take is read too:
 *  the core refuses it. */
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

/** Returns the data of an int32 tensor: NULL if there is no tensor, but not if it is empty. */
const int32_t *read_integers(const Call &call, const char *name, const Maybe &t, std::initializer_list<int64_t> shape)
{
    static const int32_t none = 0;
    if (!t) return nullptr;
    check_integers(call, name, *t, shape);
    return t->numel() ? data_as<int32_t>(*t) : &none;
}

/** The sizes of a pair such as sink_k, sink_v: dense [rows, kv_heads, tokens, head_dim]. rows: the batch, or any number
 *  if sink_rows or tail_rows name rows. 0 without keys. */
struct PairSizes {
    int32_t rows, tokens;
};

PairSizes read_pair(const Call &call, const char *k_name, const char *v_name, const Maybe &k, const Maybe &v,
                    int32_t dtype, int64_t rows, const tq_layer &layer)
{
    int64_t dim = call.plan().head_dim;
    if (given(k)) call.tensor(k_name, *k, dtype, {rows, layer.kv_heads, ANY, dim}, Strides::DENSE);
    if (given(v))
        call.tensor(v_name, *v, dtype, {given(k) ? k->size(0) : rows, layer.kv_heads, given(k) ? k->size(2) : ANY, dim},
                    Strides::DENSE);
    return given(k) ? PairSizes{call.length(k_name, *k, 0), call.length(k_name, *k, 2)} : PairSizes{0, 0};
}

/** Returns the data of a tensor, which the call writes to or only reads. */
void *data_for(bool writes, const Tensor &t)
{
    return writes ? t.mutable_data_ptr() : const_cast<void *>(t.const_data_ptr());
}

/** Reads pages, table and lengths of layer->batch sequences, and transforms. kv_heads ANY: as many as pages have. */
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

/** Refuses the call's first tensor, rather than sinks and window, if all of these agree on another dtype. */
void check_exact_dtype(const Call &call, int32_t dtype, const Exact &exact)
{
    int32_t exact_dtype = dtype;
    for (const Maybe *t : {&exact.sink_k, &exact.sink_v, &exact.window_k, &exact.window_v}) {
        if (!given(*t)) continue;
        if (dtype_of(**t) == dtype || (exact_dtype != dtype && dtype_of(**t) != exact_dtype)) return;
        exact_dtype = dtype_of(**t);
    }
    const bool can_be = exact_dtype == aoti_torch_dtype_float32() || exact_dtype == aoti_torch_dtype_float16() ||
                        exact_dtype == aoti_torch_dtype_bfloat16();
    if (can_be && exact_dtype != dtype)
        call.refuse_first(dtype_name(exact_dtype) + " like sinks and window", dtype_name(dtype), Error::TYPE);
}

/** Reads a call's layer; layer->batch is set. like: has the dtype of exact tokens. window: 0 without tail_rows. */
void read_layer(const Call &call, const Tensor &like, const Tensor &pages, const Tensor &block_table,
                const Tensor &lengths, const Exact &exact, const Transforms &transforms, const Ragged &ragged,
                int64_t window, int64_t kv_heads, bool writes, tq_layer *layer)
{
    read_packed(call, pages, block_table, lengths, transforms, kv_heads, writes, layer);
    int32_t dtype = dtype_of(like);
    layer->dtype = call.read_dtype(like);
    check_exact_dtype(call, dtype, exact);
    layer->sink_rows = read_integers(call, "sink_rows", ragged.sink_rows, {layer->batch});
    layer->tail_rows = read_integers(call, "tail_rows", ragged.tail_rows, {layer->batch, 2});
    layer->position_offset = read_integers(call, "position_offset", ragged.position_offset, {layer->batch});
    if (!layer->tail_rows && window)
        call.refuse("window", "0 without tail_rows: then it is the tokens of window_k", std::to_string(window));
    PairSizes sinks = read_pair(call, "sink_k", "sink_v", exact.sink_k, exact.sink_v, dtype,
                                layer->sink_rows ? ANY : layer->batch, *layer),
              recent = read_pair(call, "window_k", "window_v", exact.window_k, exact.window_v, dtype,
                                 layer->tail_rows ? ANY : layer->batch, *layer);
    layer->sinks = sinks.tokens, layer->window = recent.tokens;
    if (layer->sink_rows) layer->n_sink_rows = sinks.rows;
    if (layer->tail_rows) {
        layer->n_tail_rows = recent.rows, layer->tail_slots = recent.tokens;
        layer->window = call.narrow("window", window);
    }
    auto at = [&](const Maybe &t) { return given(t) ? data_for(writes, *t) : nullptr; };
    layer->sink_k = at(exact.sink_k), layer->sink_v = at(exact.sink_v);
    layer->window_k = at(exact.window_k), layer->window_v = at(exact.window_v);
}

/** How k, v, q and out of a call are laid out: [batch, heads, tokens, head_dim], or [tokens, heads, head_dim]. */
struct Layout {
    const int32_t *query_start_loc;             // NULL: the first layout
    int32_t batch, heads, tokens, total_tokens; // tokens: the most of a sequence; total_tokens: of a ragged batch

    Layout(const Call &call, const char *name, const Tensor &like, const Maybe &loc, int64_t max_query_len)
        : query_start_loc(nullptr)
    {
        const int64_t dim = call.plan().head_dim;
        if (!loc) {
            if (max_query_len) call.refuse("max_query_len", "0 without query_start_loc", std::to_string(max_query_len));
            call.tensor(name, like, dtype_of(like), {ANY, ANY, ANY, dim}, Strides::ROWS);
            batch = call.length(name, like, 0), tokens = call.length(name, like, 2), total_tokens = 0;
        } else {
            call.tensor(name, like, dtype_of(like), {ANY, ANY, dim}, Strides::ROWS);
            query_start_loc = read_integers(call, "query_start_loc", loc, {ANY});
            if (!loc->numel()) call.refuse("query_start_loc", "of batch + 1 numbers", "none");
            batch = call.length("query_start_loc", loc->numel() - 1), total_tokens = call.length(name, like, 0);
            tokens = call.narrow("max_query_len", max_query_len);
            if (tokens < 0) call.refuse("max_query_len", "at least 0", std::to_string(max_query_len));
            if (tokens > total_tokens) tokens = total_tokens;
        }
        heads = call.length(name, like, 1);
    }

    /** Returns the sizes of an array in this layout. row: head_dim, or ANY if the array has no such dimension. */
    std::vector<int64_t> sizes(int64_t row) const
    {
        std::vector<int64_t> all =
            query_start_loc ? std::vector<int64_t>{total_tokens, heads} : std::vector<int64_t>{batch, heads, tokens};
        if (row != ANY) all.push_back(row);
        return all;
    }

    void read_strides(const Tensor &t, int64_t *of_batch, int64_t *of_head, int64_t *of_token) const
    {
        *of_batch = query_start_loc ? 0 : t.stride(0), *of_head = t.stride(1);
        *of_token = t.stride(query_start_loc ? 0 : 2);
    }
};

/** Reads k and v, whose last dimension must be dense. The core checks that v is given iff the plan has values. */
tq_append_params read_new_tokens(const Call &call, const Tensor &k, const Maybe &v, const Maybe &query_start_loc,
                                 int64_t max_query_len)
{
    tq_append_params p{};
    p.layer.dtype = call.read_dtype(k);
    const Layout layout(call, "k", k, query_start_loc, max_query_len);
    call.new_tokens.assign(k.sizes().begin(), k.sizes().end());
    if (v) call.tensor("v", *v, dtype_of(k), layout.sizes(call.plan().head_dim), Strides::ROWS);
    p.layer.batch = layout.batch, p.layer.kv_heads = layout.heads, p.tokens = layout.tokens;
    p.query_start_loc = layout.query_start_loc, p.total_tokens = layout.total_tokens;
    p.threads = call.threads();
    p.k = k.const_data_ptr(), p.v = v ? v->const_data_ptr() : nullptr;
    layout.read_strides(k, &p.k_stride_batch, &p.k_stride_head, &p.k_stride_token);
    if (v) layout.read_strides(*v, &p.v_stride_batch, &p.v_stride_head, &p.v_stride_token);
    return p;
}
} // namespace
} // namespace turboquant
