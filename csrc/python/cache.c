/* append, attend, merge and dequantize: functions on pages of a cache. */
#include "binding.h"
#include <math.h>
#include <turboquant_checks.h>

/* Rows of the lists of arguments below. */
#define TRANSFORMS(t)                                                                                                  \
    OBJECT("key_numbers", &(t).numbers[KEY]), OBJECT("value_numbers", &(t).numbers[VALUE]),                            \
        OBJECT("key_turns", &(t).turns), OBJECT("rotation", &(t).rotation)
#define EXACT(layer)                                                                                                   \
    OBJECT("sink_k", &(layer).sinks[0]), OBJECT("sink_v", &(layer).sinks[1]), OBJECT("window_k", &(layer).windows[0]), \
        OBJECT("window_v", &(layer).windows[1])

/* Reads tokens, [batch, heads, tokens, head_dim] in rows: their data and strides. */
static PyArrayObject *read_tokens(const char *op, const char *name, PyObject *object, int type, const npy_intp dims[4],
                                  const void **data, int64_t *batch, int64_t *head, int64_t *token)
{
    PyArrayObject *array = read_array(op, name, object, type, ROWS, 4, dims);
    if (!array || read_strides(op, name, array, batch, head, token) < 0) return NULL;
    *data = PyArray_DATA(array);
    return array;
}

static int has_values(const tq_plan *plan) { return plan->value.tile_bytes != 0; }

const char doc_append[] = PyDoc_STR(
    "append(plan, k, v, lengths, pages, block_table, *, sink_k=None, sink_v=None, window_k=None, window_v=None, "
    "key_numbers=None, value_numbers=None, key_turns=None, rotation=None, dtype=None, threads=0)\n--\n\n"
    "Stores new tokens k, v [batch, kv_heads, tokens, head_dim]: exact ones go to the sinks and the ring, those "
    "that no longer fit\nare rotated, quantised and packed into pages. lengths: int32 [batch], the length of each "
    "sequence after this call; token i of\nsequence b stands at lengths[b] - tokens + i, a negative position is "
    "padding. pages, sinks and window are changed in place.\nArrays: see _core.pyi; contract: tq_append in "
    "turboquant.h.");
FUNCTION(append)
{
    PyObject *k_object, *v_object, *dtype = Py_None, *result = NULL;
    layer_arguments objects = NO_LAYER;
    read_plan_result read;
    const tq_plan *plan = &read.plan;
    tq_append_params p;
    workspace_memory workspace = {NULL, NULL}, tables = {NULL, NULL};
    int type;
    const char *op = "append";
    memset(&p, 0, sizeof p);
    const argument arguments[] = {PLAN(&read),
                                  OBJECT("k", &k_object),
                                  OBJECT("v", &v_object),
                                  OBJECT("lengths", &objects.lengths),
                                  OBJECT("pages", &objects.pages),
                                  OBJECT("block_table", &objects.table),
                                  EXACT(objects),
                                  TRANSFORMS(objects.transforms),
                                  OBJECT("dtype", &dtype),
                                  ANY_INT32("threads", &p.threads)};
    if (READ_ARGUMENTS(op, arguments, 6, 6) < 0 || read_dtype(op, dtype, "k", k_object, &p.layer.dtype, &type) < 0)
        return NULL;
    if (!p.threads) p.threads = tq_num_threads(); /* so that the workspace fits if another thread changes the number */

    npy_intp dims[4] = {ANY, ANY, ANY, plan->head_dim};
    PyArrayObject *k =
        read_tokens(op, "k", k_object, type, dims, &p.k, &p.k_stride_batch, &p.k_stride_head, &p.k_stride_token);
    if (!k || read_length(op, "k", k, 0, &p.layer.batch) < 0 || read_length(op, "k", k, 1, &p.layer.kv_heads) < 0 ||
        read_length(op, "k", k, 2, &p.tokens) < 0 ||
        (v_object != Py_None && !read_tokens(op, "v", v_object, type, PyArray_DIMS(k), &p.v, &p.v_stride_batch,
                                             &p.v_stride_head, &p.v_stride_token)) ||
        read_layer(op, plan, &objects, type, WRITE, p.layer.kv_heads, &p.layer) < 0)
        return NULL;

    const size_t batch = (size_t)p.layer.batch;
    const table_argument copied[] = {{&p.layer.lengths, batch},
                                     {&p.layer.block_table, batch * (size_t)p.layer.max_pages}};
    if (copy_tables(&tables, copied, 2) < 0) goto done;
    size_t workspace_bytes = 0;
    tq_error error = {0};
    tq_status status = tq_append_workspace_bytes(plan, &p, &workspace_bytes, &error);
    if (status == TQ_OK) {
        if (workspace_get(&workspace, workspace_bytes) < 0) goto done;
        WITHOUT_GIL(status = tq_append(plan, &p, workspace.aligned, workspace_bytes, &error));
    }
    result = result_of(op, status, &error, Py_NewRef(Py_None));
done:
    workspace_free(&workspace);
    workspace_free(&tables);
    return result;
}

const char doc_attend[] = PyDoc_STR(
    "attend(plan, q, pages, block_table, lengths, *, starts=None, sink_k=None, sink_v=None, window_k=None, "
    "window_v=None, fresh_k=None, fresh_v=None, key_numbers=None, value_numbers=None, key_turns=None, rotation=None, "
    "causal=True, sliding_window=0, "
    "softmax_scale=None, softcap=0.0, dtype=None, out=None, threads=0)\n--\n\n"
    "(out, lse): softmax attention of q [batch, query_heads, query_tokens, head_dim] over sinks, packed tokens and "
    "window. out has\nthe shape and dtype of q, lse is the natural log of the softmax's denominator, float32 "
    "[batch, query_heads, query_tokens]; where\nnothing may be seen out is 0 and lse -inf. lengths: int32 [batch], "
    "stored tokens, those of the queries included. softmax_scale:\n1 / sqrt(head_dim) by default. out=: an array "
    "to write to, C-contiguous.\nArrays: see _core.pyi; contract: tq_attend in turboquant.h.");
FUNCTION(attend)
{
    PyObject *q_object, *starts = Py_None, *fresh[2] = {Py_None, Py_None}, *scale = Py_None, *dtype = Py_None;
    PyObject *out_object = Py_None, *out = NULL, *lse = NULL, *result = NULL;
    layer_arguments objects = NO_LAYER;
    read_plan_result read;
    const tq_plan *plan = &read.plan;
    tq_attend_params p;
    workspace_memory workspace = {NULL, NULL}, tables = {NULL, NULL};
    int type, causal = 1;
    const char *op = "attend";
    memset(&p, 0, sizeof p);
    const argument arguments[] = {PLAN(&read),
                                  OBJECT("q", &q_object),
                                  OBJECT("pages", &objects.pages),
                                  OBJECT("block_table", &objects.table),
                                  OBJECT("lengths", &objects.lengths),
                                  OBJECT("starts", &starts),
                                  EXACT(objects),
                                  OBJECT("fresh_k", &fresh[0]),
                                  OBJECT("fresh_v", &fresh[1]),
                                  TRANSFORMS(objects.transforms),
                                  BOOL("causal", &causal),
                                  ANY_INT32("sliding_window", &p.sliding_window),
                                  OBJECT("softmax_scale", &scale),
                                  FLOAT32("softcap", &p.softcap),
                                  OBJECT("dtype", &dtype),
                                  OBJECT("out", &out_object),
                                  ANY_INT32("threads", &p.threads)};
    if (READ_ARGUMENTS(op, arguments, 5, 5) < 0 ||
        (scale != Py_None && read_f32(op, "softmax_scale", scale, &p.softmax_scale) < 0) ||
        read_dtype(op, dtype, "q", q_object, &p.layer.dtype, &type) < 0)
        return NULL;
    if (!p.threads) p.threads = tq_num_threads(); /* so that the workspace fits if another thread changes the number */
    if (scale == Py_None) p.softmax_scale = (float)(1.0 / sqrt((double)plan->head_dim));
    p.causal = causal;

    npy_intp dims[4] = {ANY, ANY, ANY, plan->head_dim};
    PyArrayObject *q =
        read_tokens(op, "q", q_object, type, dims, &p.q, &p.q_stride_batch, &p.q_stride_head, &p.q_stride_token);
    if (!q || read_length(op, "q", q, 0, &p.layer.batch) < 0 || read_length(op, "q", q, 1, &p.query_heads) < 0 ||
        read_length(op, "q", q, 2, &p.query_tokens) < 0 ||
        read_layer(op, plan, &objects, type, DENSE, ANY, &p.layer) < 0)
        return NULL;

    npy_intp batch = p.layer.batch, of_fresh[4] = {batch, p.layer.kv_heads, p.query_tokens, plan->head_dim};
    if (read_optional(op, "starts", starts, NPY_INT32, 1, &batch, &p.starts) < 0 ||
        (fresh[0] != Py_None &&
         !read_tokens(op, "fresh_k", fresh[0], type, of_fresh, &p.fresh_k, &p.fresh_k_stride_batch,
                      &p.fresh_k_stride_head, &p.fresh_k_stride_token)) ||
        (fresh[1] != Py_None && !read_tokens(op, "fresh_v", fresh[1], type, of_fresh, &p.fresh_v,
                                             &p.fresh_v_stride_batch, &p.fresh_v_stride_head, &p.fresh_v_stride_token)))
        return NULL;

    if (out_object == Py_None) out = PyArray_SimpleNew(4, PyArray_DIMS(q), type);
    else out = Py_XNewRef((PyObject *)read_array(op, "out", out_object, type, WRITE, 4, PyArray_DIMS(q)));
    if (out) lse = PyArray_SimpleNew(3, PyArray_DIMS(q), NPY_FLOAT32);
    if (!lse) goto done;
    p.out = PyArray_DATA((PyArrayObject *)out);
    p.lse = PyArray_DATA((PyArrayObject *)lse);
    const table_argument copied[] = {{&p.layer.lengths, (size_t)batch},
                                     {&p.starts, (size_t)batch},
                                     {&p.layer.block_table, (size_t)batch * (size_t)p.layer.max_pages}};
    if (copy_tables(&tables, copied, 3) < 0) goto done;
    size_t workspace_bytes = 0;
    tq_error error = {0};
    tq_status status = tq_attend_workspace_bytes(plan, &p, &workspace_bytes, &error);
    if (status == TQ_OK) {
        if (workspace_get(&workspace, workspace_bytes) < 0) goto done;
        WITHOUT_GIL(status = tq_attend(plan, &p, workspace.aligned, workspace_bytes, &error));
    }
    result = status == TQ_OK ? PyTuple_Pack(2, out, lse) : raise_status(op, status, &error, NULL);
done:
    Py_XDECREF(out);
    Py_XDECREF(lse);
    workspace_free(&workspace);
    workspace_free(&tables);
    return result;
}

const char doc_merge[] = PyDoc_STR(
    "merge(outs, lses)\n--\n\n"
    "(out, lse) of partial results over disjoint tokens: lse = log sum_i exp(lses[i]), out = sum_i exp(lses[i] - "
    "lse) outs[i].\nouts: float32 [parts, ..., head_dim]; lses: float32 [parts, ...], natural log; both "
    "C-contiguous. The results lack the first dimension.");
FUNCTION(merge)
{
    PyObject *outs_object, *lses_object, *out = NULL, *lse = NULL, *result = NULL;
    npy_intp any[NPY_MAXDIMS];
    int ndim = 2;
    int32_t parts, head_dim;
    const char *op = "merge";
    const argument arguments[] = {OBJECT("outs", &outs_object), OBJECT("lses", &lses_object)};
    if (READ_ARGUMENTS(op, arguments, 2, 2) < 0) return NULL;
    if (PyArray_Check(outs_object) && PyArray_NDIM((PyArrayObject *)outs_object) > 2)
        ndim = PyArray_NDIM((PyArrayObject *)outs_object);
    for (int i = 0; i < ndim; i++) any[i] = ANY;
    PyArrayObject *outs = read_array(op, "outs", outs_object, NPY_FLOAT32, DENSE, ndim, any);
    PyArrayObject *lses =
        outs ? read_array(op, "lses", lses_object, NPY_FLOAT32, DENSE, ndim - 1, PyArray_DIMS(outs)) : NULL;
    if (!lses || read_length(op, "outs", outs, 0, &parts) < 0 || read_length(op, "outs", outs, ndim - 1, &head_dim) < 0)
        return NULL;
    out = PyArray_SimpleNew(ndim - 1, PyArray_DIMS(outs) + 1, NPY_FLOAT32);
    lse = out ? PyArray_SimpleNew(ndim - 2, PyArray_DIMS(outs) + 1, NPY_FLOAT32) : NULL;
    if (!lse) goto done;
    const float *from = PyArray_DATA(outs), *from_lse = PyArray_DATA(lses);
    float *to = PyArray_DATA((PyArrayObject *)out), *to_lse = PyArray_DATA((PyArrayObject *)lse);
    int64_t rows = PyArray_SIZE((PyArrayObject *)lse);
    tq_error error = {0};
    tq_status status;
    WITHOUT_GIL(status = tq_merge(from, from_lse, parts, rows, head_dim, to, to_lse, &error));
    result = status == TQ_OK ? PyTuple_Pack(2, out, lse) : raise_status(op, status, &error, NULL);
done:
    Py_XDECREF(out);
    Py_XDECREF(lse);
    return result;
}

const char doc_dequantize[] = PyDoc_STR(
    "dequantize(plan, pages, block_table, lengths, max_tokens, *, key_numbers=None, value_numbers=None, "
    "key_turns=None, rotation=None, sinks=0)\n--\n\n"
    "(k, v): packed tokens decoded, float32 [batch, kv_heads, max_tokens, head_dim] each, 0 behind lengths[b]; v is "
    "None if the plan has\nno values. lengths: int32 [batch], packed tokens of each sequence, <= max_tokens <= "
    "max_pages * page_tokens.");
FUNCTION(dequantize)
{
    PyObject *k = NULL, *v = NULL, *result = NULL;
    layer_arguments objects = NO_LAYER;
    read_plan_result read;
    const tq_plan *plan = &read.plan;
    tq_layer layer;
    workspace_memory tables = {NULL, NULL};
    int32_t max_tokens, sinks = 0;
    const char *op = "dequantize";
    memset(&layer, 0, sizeof layer);
    const argument arguments[] = {PLAN(&read),
                                  OBJECT("pages", &objects.pages),
                                  OBJECT("block_table", &objects.table),
                                  OBJECT("lengths", &objects.lengths),
                                  ANY_INT32("max_tokens", &max_tokens),
                                  TRANSFORMS(objects.transforms),
                                  ANY_INT32("sinks", &sinks)};
    if (READ_ARGUMENTS(op, arguments, 5, 5) < 0) return NULL;
    npy_intp dims[2] = {ANY, ANY};
    PyArrayObject *table = read_array(op, "block_table", objects.table, NPY_INT32, DENSE, 2, dims);
    if (!table || read_length(op, "block_table", table, 0, &layer.batch) < 0 ||
        read_layer(op, plan, &objects, NPY_FLOAT32, DENSE, ANY, &layer) < 0)
        return NULL;
    layer.sinks = sinks;
    tq_error error = {0};
    tq_status status = tq_check_dequantize_sizes(plan, &layer, max_tokens, &error);
    if (status != TQ_OK) return raise_status(op, status, &error, NULL); /* before memory is allocated */
    npy_intp shape[4] = {layer.batch, layer.kv_heads, max_tokens, plan->head_dim};
    k = PyArray_SimpleNew(4, shape, NPY_FLOAT32);
    v = !k ? NULL : has_values(plan) ? PyArray_SimpleNew(4, shape, NPY_FLOAT32) : Py_NewRef(Py_None);
    if (!v) goto done;
    float *to_k = PyArray_DATA((PyArrayObject *)k), *to_v = has_values(plan) ? PyArray_DATA((PyArrayObject *)v) : NULL;
    const table_argument copied[] = {{&layer.block_table, (size_t)PyArray_SIZE(table)},
                                     {&layer.lengths, (size_t)layer.batch}};
    if (copy_tables(&tables, copied, 2) < 0) goto done;
    WITHOUT_GIL(status = tq_dequantize(plan, &layer, max_tokens, to_k, to_v, &error));
    result = status == TQ_OK ? PyTuple_Pack(2, k, v) : raise_status(op, status, &error, NULL);
done:
    Py_XDECREF(k);
    Py_XDECREF(v);
    workspace_free(&tables);
    return result;
}
