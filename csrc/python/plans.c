/* Plans as arguments, and functions on plans. */
#include "binding.h"

/* Reads from a tuple, because items may call back into Python, which could change a list. */
int read_plan(const char *op, PyObject *object, read_plan_result *out)
{
    int result = -1;
    PyObject *tuple = NULL;
    Py_ssize_t n = PySequence_Check(object) ? PySequence_Size(object) : -1;
    if (n < 0) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) goto done;
        PyErr_Clear(); /* raised by an array without dimensions */
        raise_type(op, "plan", "a sequence of integers, the words of a turboquant.Plan", object);
        goto done;
    }
    if (n > TQ_PLAN_MAX_WORDS) {
        raise_value(op, "len(plan)", "at most %d, got %zd", TQ_PLAN_MAX_WORDS, n);
        goto done;
    }
    tuple = PySequence_Tuple(object);
    if (!tuple) goto done;
    out->n_words = (size_t)PyTuple_Size(tuple);
    if (out->n_words > TQ_PLAN_MAX_WORDS) { /* its length was wrong */
        raise_value(op, "len(plan)", "at most %d, got more", TQ_PLAN_MAX_WORDS);
        goto done;
    }
    for (size_t i = 0; i < out->n_words; i++) {
        char name[32];
        PyOS_snprintf(name, sizeof name, "plan[%zu]", i);
        if (read_i64(op, name, PyTuple_GetItem(tuple, (Py_ssize_t)i), INT64_MIN, INT64_MAX, &out->words[i]) < 0)
            goto done;
    }
    tq_error error = {0};
    tq_status status = tq_plan_init(&out->plan, out->words, out->n_words, &error);
    if (status != TQ_OK) raise_status(op, status, &error, NULL);
    else result = 0;
done:
    Py_XDECREF(tuple);
    return result;
}

const char doc_record_bytes[] = PyDoc_STR("record_bytes(plan)\n--\n\n"
                                          "Bytes of one page of one KV head.");
FUNCTION(record_bytes)
{
    PyObject *object;
    read_plan_result read;
    const argument arguments[] = {OBJECT("plan", &object)};
    if (READ_ARGUMENTS("record_bytes", arguments, 1, 1) < 0) return NULL;
    if (read_plan("", object, &read) < 0) return NULL; /* called by Plan: its errors name no operation */
    return PyLong_FromLongLong(read.plan.record_bytes);
}

/* Returns the offsets of all groups, or their bits if offsets is NULL. */
static PyObject *group_tuple(const tq_plan *plan, const uint8_t *bits, const int32_t *offsets)
{
    PyObject *tuple = PyTuple_New(plan->groups);
    if (!tuple) return NULL;
    for (int32_t g = 0; g < plan->groups; g++) {
        PyObject *number = PyLong_FromLong(offsets ? offsets[g] : bits[g]);
        if (!number) {
            Py_DECREF(tuple);
            return NULL;
        }
        PyTuple_SetItem(tuple, g, number);
    }
    return tuple;
}

const char doc_plan_info[] =
    PyDoc_STR("plan_info(plan)\n--\n\n"
              "What a plan says and the sizes and offsets, in bytes, of the records it makes, as "
              "a dict.");
FUNCTION(plan_info)
{
    read_plan_result read;
    const tq_plan *plan = &read.plan;
    const argument arguments[] = {PLAN(&read)};
    if (READ_ARGUMENTS("plan_info", arguments, 1, 1) < 0) return NULL;
    /* N takes over a new object; NULL is passed on as an error */
    return Py_BuildValue(
        "{s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:K,s:L,s:N,s:N,s:i,s:i,s:N,s:N,s:L,s:L,s:L,s:L,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:f}",
        "is_plain", plan->is_plain, "head_dim", plan->head_dim, "groups", plan->groups, "group_channels",
        plan->group_channels, "tile_tokens", plan->tile_tokens, "page_tokens", plan->page_tokens, "rotation",
        plan->rotation, "codebook", plan->codebook, "scale", plan->scale, "seed", (unsigned long long)plan->seed,
        "record_bytes", (long long)plan->record_bytes, "key_bits", group_tuple(plan, plan->key.bits, NULL),
        "value_bits", group_tuple(plan, plan->value.bits, NULL), "key_tile_bytes", plan->key.tile_bytes,
        "value_tile_bytes", plan->value.tile_bytes, "key_tile_offsets", group_tuple(plan, NULL, plan->key.offset),
        "value_tile_offsets", group_tuple(plan, NULL, plan->value.offset), "key_codes_offset",
        (long long)plan->key.codes_offset, "value_codes_offset", (long long)plan->value.codes_offset,
        "key_scales_offset", (long long)plan->key.scales_offset, "value_scales_offset",
        (long long)plan->value.scales_offset, "key_coded_channels", plan->key.coded_channels, "value_coded_channels",
        plan->value.coded_channels, "key_scales", plan->key.scales, "value_scales", plan->value.scales,
        "key_matrix_rows", plan->key.matrix_rows, "value_matrix_rows", plan->value.matrix_rows, "key_step_columns",
        plan->key.step_columns, "value_step_columns", plan->value.step_columns, "key_moments", plan->moments,
        "variance", (double)plan->variance);
}

const char doc_new_pages[] =
    PyDoc_STR("new_pages(plan, n_pages, kv_heads)\n--\n\n"
              "Zeroed pages, uint8 [n_pages, kv_heads, record_bytes], 64-byte aligned. The array "
              "owns 63 bytes more than it shows.");
FUNCTION(new_pages)
{
    PyObject *memory = NULL, *pages = NULL;
    read_plan_result read;
    int64_t n_pages, bytes;
    int32_t kv_heads;
    const char *op = "new_pages";
    const argument arguments[] = {PLAN(&read), INT64("n_pages", &n_pages, 0, INT64_MAX),
                                  INT32("kv_heads", &kv_heads, 1, INT32_MAX)};
    if (READ_ARGUMENTS(op, arguments, 3, 3) < 0) return NULL;
    if (__builtin_mul_overflow(n_pages, kv_heads * read.plan.record_bytes, &bytes) || bytes > NPY_MAX_INTP - 63)
        return raise_value(op, "n_pages", "small enough to be addressed, got %lld", (long long)n_pages);
    npy_intp room = (npy_intp)bytes + 63, dims[3] = {(npy_intp)n_pages, kv_heads, (npy_intp)read.plan.record_bytes};
    memory = PyArray_ZEROS(1, &room, NPY_UINT8, 0);
    if (!memory) goto done;
    uintptr_t aligned = ((uintptr_t)PyArray_DATA((PyArrayObject *)memory) + 63) & ~(uintptr_t)63;
    pages = PyArray_SimpleNewFromData(3, dims, NPY_UINT8, (void *)aligned);
    if (!pages) goto done;
    PyObject *owner = memory;
    memory = NULL; /* PyArray_SetBaseObject takes it, even if it fails */
    if (PyArray_SetBaseObject((PyArrayObject *)pages, owner) < 0) Py_CLEAR(pages);
done:
    Py_XDECREF(memory);
    return pages;
}
