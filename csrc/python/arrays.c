/* Arrays as arguments: checks dtype, byte order, shape, memory order, alignment and writability, and never copies to
 * repair them. Owns workspace memory only; every array here is borrowed. */
#include "binding.h"

static const char *type_name(int type)
{
    switch (type) {
    case NPY_FLOAT32: return "float32";
    case NPY_FLOAT16: return "float16";
    case NPY_UINT16: return "uint16 (bfloat16)";
    case NPY_UINT8: return "uint8";
    case NPY_INT32: return "int32";
    case NPY_INT16: return "int16";
    case NPY_INT64: return "int64";
    case NPY_FLOAT64: return "float64";
    default: return "another type";
    }
}

/* "[2, *, 64]" */
static void print_shape(char *text, size_t size, const npy_intp *dims, int ndim)
{
    size_t at = 0;
    text[at++] = '[';
    for (int i = 0; i < ndim && at + 32 < size; i++) {
        const char *comma = i ? ", " : "";
        if (dims[i] == ANY) at += (size_t)PyOS_snprintf(text + at, size - at, "%s*", comma);
        else at += (size_t)PyOS_snprintf(text + at, size - at, "%s%lld", comma, (long long)dims[i]);
    }
    PyOS_snprintf(text + at, size - at, "]");
}

static int same_shape(PyArrayObject *array, int ndim, const npy_intp *dims)
{
    if (PyArray_NDIM(array) != ndim) return 0;
    for (int i = 0; i < ndim; i++)
        if (dims[i] != ANY && dims[i] != PyArray_DIM(array, i)) return 0;
    return 1;
}

static int is_type(PyArrayObject *array, int type)
{
    return PyArray_EquivTypenums(PyArray_TYPE(array), type) && PyArray_ISNOTSWAPPED(array);
}

/* Whether an aligned array, whose strides are whole elements, has no negative stride and a last stride of one element.
 * A dimension of length 1 may have any stride. */
static int has_rows(PyArrayObject *array)
{
    int last = PyArray_NDIM(array) - 1;
    for (int i = 0; i <= last; i++) {
        npy_intp stride = PyArray_STRIDE(array, i);
        if (PyArray_DIM(array, i) > 1 && (stride < 0 || (i == last && stride != PyArray_ITEMSIZE(array)))) return 0;
    }
    return 1;
}

static PyArrayObject *raise_no_array(const char *op, const char *name, int type, PyObject *got)
{
    char wants[64];
    PyOS_snprintf(wants, sizeof wants, "an array of %s", type_name(type));
    return (PyArrayObject *)raise_type(op, name, wants, got);
}

PyArrayObject *read_array(const char *op, const char *name, PyObject *object, int type, int flags, int ndim,
                          const npy_intp *dims)
{
    char want_shape[160], got_shape[160];
    if (!PyArray_Check(object)) return raise_no_array(op, name, type, object);
    PyArrayObject *array = (PyArrayObject *)object;
    if (!is_type(array, type)) return raise_no_array(op, name, type, (PyObject *)PyArray_DESCR(array));
    if (!same_shape(array, ndim, dims)) {
        print_shape(want_shape, sizeof want_shape, dims, ndim);
        print_shape(got_shape, sizeof got_shape, PyArray_DIMS(array), PyArray_NDIM(array));
        return (PyArrayObject *)raise_value(op, name, "of shape %s, got %s", want_shape, got_shape);
    }
    if (!PyArray_ISALIGNED(array))
        return (PyArrayObject *)raise_value(op, name, "aligned to its elements, got one that is not");
    if (PyArray_SIZE(array) && !(flags & ROWS ? has_rows(array) : PyArray_IS_C_CONTIGUOUS(array))) {
        const char *order = flags & ROWS ? "an array of dense rows in ascending order" : "C-contiguous";
        return (PyArrayObject *)raise_value(op, name, "%s, got other strides; numpy.ascontiguousarray copies", order);
    }
    if (flags & WRITE && !PyArray_ISWRITEABLE(array))
        return (PyArrayObject *)raise_value(op, name, "writable, got a read-only array");
    return array;
}

int read_data(const char *op, const char *name, PyObject *object, int type, int ndim, const npy_intp *dims, void *data)
{
    PyArrayObject *array = read_array(op, name, object, type, DENSE, ndim, dims);
    if (!array) return -1;
    const void *numbers = PyArray_DATA(array);
    memcpy(data, &numbers, sizeof numbers);
    return 0;
}

int read_optional(const char *op, const char *name, PyObject *object, int type, int ndim, const npy_intp *dims,
                  void *data)
{
    return !object || object == Py_None ? 0 : read_data(op, name, object, type, ndim, dims, data);
}

PyArrayObject *read_pages(const char *op, const tq_plan *plan, PyObject *object, int flags, npy_intp kv_heads)
{
    npy_intp dims[3] = {ANY, kv_heads, (npy_intp)plan->record_bytes};
    return read_array(op, "pages", object, NPY_UINT8, flags, 3, dims);
}

uint8_t *pages_data(PyArrayObject *pages) { return PyArray_DIM(pages, 0) ? PyArray_DATA(pages) : NULL; }

int read_strides(const char *op, const char *name, PyArrayObject *array, int64_t *batch, int64_t *head, int64_t *token)
{
    int64_t *strides[3] = {batch, head, token}, dense = PyArray_DIM(array, 3);
    int empty = PyArray_SIZE(array) == 0;
    for (int i = 2; i >= 0; i--) {
        int64_t length = PyArray_DIM(array, i);
        /* NumPy leaves the strides of such dimensions undefined; the core reads them. */
        int undefined = empty || length <= 1;
        *strides[i] = undefined ? dense : PyArray_STRIDE(array, i) / PyArray_ITEMSIZE(array);
        if (__builtin_mul_overflow(*strides[i], length > 1 ? length : 1, &dense))
            return failed(raise_value(op, name, "addressable, got strides beyond 63 bits"));
        if (dense < PyArray_DIM(array, 3)) dense = PyArray_DIM(array, 3); /* after a stride of 0 */
    }
    return 0;
}

int read_length(const char *op, const char *name, PyArrayObject *array, int dim, int32_t *out)
{
    npy_intp length = PyArray_DIM(array, dim);
    if (length > INT32_MAX)
        return failed(raise_value(op, name, "at most 2**31 - 1 long in every dimension, got %lld", (long long)length));
    *out = (int32_t)length;
    return 0;
}

int read_dtype(const char *op, PyObject *dtype, const char *name, PyObject *first, int32_t *out, int *type)
{
    static const struct {
        const char *name;
        int type;
        tq_dtype dtype;
    } known[] = {
        {"float32", NPY_FLOAT32, TQ_F32},
        {"float16", NPY_FLOAT16, TQ_F16},
        {"bfloat16", NPY_UINT16, TQ_BF16},
    };
    const char *wants = "float32 or float16, or uint16 with dtype=\"bfloat16\"";
    if (!PyArray_Check(first)) return failed(raise_type(op, name, "an array of float32, float16 or bfloat16", first));
    if (dtype != Py_None && !PyUnicode_Check(dtype))
        return failed(raise_type(op, "dtype", "None, \"float32\", \"float16\" or \"bfloat16\"", dtype));
    for (int i = 0; i < 3; i++) {
        int is_named = dtype != Py_None && PyUnicode_CompareWithASCIIString(dtype, known[i].name) == 0;
        int is_of_type =
            dtype == Py_None && known[i].dtype != TQ_BF16 && is_type((PyArrayObject *)first, known[i].type);
        if (!is_named && !is_of_type) continue;
        *out = (int32_t)known[i].dtype;
        *type = known[i].type;
        return 0;
    }
    if (dtype != Py_None) raise_value(op, "dtype", "None, \"float32\", \"float16\" or \"bfloat16\", got %R", dtype);
    else raise_type(op, name, wants, (PyObject *)PyArray_DESCR((PyArrayObject *)first));
    return -1;
}

static int read_numbers(const char *op, int side, const tq_plan *plan, PyObject *object, int32_t kv_heads,
                        tq_transform *out)
{
    static const char *const names[2] = {"key_numbers", "value_numbers"};
    npy_intp dims[2] = {kv_heads, ANY};
    tq_error error = {0};
    if (object == Py_None) return 0;
    PyArrayObject *array = read_array(op, names[side], object, NPY_FLOAT32, DENSE, 2, dims);
    if (!array) return -1;
    tq_status status =
        tq_transform_numbers(plan, side == VALUE, PyArray_DATA(array), PyArray_DIM(array, 1), out, &error);
    if (status == TQ_OK) return 0;
    return failed(raise_status(op, status, &error, NULL));
}

/* Reads the rotation, [kv_heads or 1, rows of the keys and then of the values, head_dim]. */
static int read_rotation(const char *op, const tq_plan *plan, PyObject *object, tq_layer *layer)
{
    int64_t key_rows = plan->key.matrix_rows, rows = key_rows + plan->value.matrix_rows;
    npy_intp dims[3] = {layer->kv_heads, rows ? (npy_intp)rows : ANY, plan->head_dim};
    if (object == Py_None) return 0;
    if (PyArray_Check(object) && PyArray_NDIM((PyArrayObject *)object) == 3 &&
        PyArray_DIM((PyArrayObject *)object, 0) == 1)
        dims[0] = 1;
    PyArrayObject *array = read_array(op, "rotation", object, NPY_FLOAT32, DENSE, 3, dims);
    if (!array) return -1;
    const float *matrix = PyArray_DATA(array);
    layer->key.rotation_stride_head = layer->value.rotation_stride_head = dims[0] == 1 ? 0 : rows * plan->head_dim;
    if (key_rows || !rows) layer->key.rotation = matrix;
    if (plan->value.matrix_rows) layer->value.rotation = matrix + key_rows * plan->head_dim;
    return 0;
}

int read_transforms(const char *op, const tq_plan *plan, const transform_arguments *arguments, tq_layer *layer)
{
    npy_intp turns[2] = {plan->wave_pairs, 3};
    if (read_numbers(op, KEY, plan, arguments->numbers[KEY], layer->kv_heads, &layer->key) < 0 ||
        read_numbers(op, VALUE, plan, arguments->numbers[VALUE], layer->kv_heads, &layer->value) < 0)
        return -1;
    if (read_optional(op, "key_turns", arguments->turns, NPY_INT32, 2, turns, &layer->key.turns) < 0) return -1;
    return read_rotation(op, plan, arguments->rotation, layer);
}

/* Reads exact tokens, sinks or a window, [batch, kv_heads, n, head_dim]: their number n, left at 0 without keys, and
 * their data, NULL where there are none. */
static int read_exact(const char *op, const tq_plan *plan, const char *const names[2], PyObject *const objects[2],
                      int type, int flags, const tq_layer *layer, int32_t *n, void **k, void **v)
{
    npy_intp dims[4] = {layer->batch, layer->kv_heads, ANY, plan->head_dim};
    void **data[2] = {k, v};
    for (int i = 0; i < 2; i++) {
        if (objects[i] == Py_None) continue;
        PyArrayObject *array = read_array(op, names[i], objects[i], type, flags, 4, dims);
        if (!array) return -1;
        if (i == 0 && read_length(op, names[0], array, 2, n) < 0) return -1;
        if (i == 0) dims[2] = *n;
        *data[i] = PyArray_DIM(array, 2) ? PyArray_DATA(array) : NULL;
    }
    return 0;
}

int read_layer(const char *op, const tq_plan *plan, const layer_arguments *arguments, int type, int flags,
               npy_intp kv_heads, tq_layer *layer)
{
    static const char *const sinks[2] = {"sink_k", "sink_v"}, *const windows[2] = {"window_k", "window_v"};
    npy_intp batch = layer->batch, table_dims[2] = {batch, ANY};
    PyArrayObject *lengths = read_array(op, "lengths", arguments->lengths, NPY_INT32, DENSE, 1, &batch);
    PyArrayObject *pages = lengths ? read_pages(op, plan, arguments->pages, flags, kv_heads) : NULL;
    PyArrayObject *table =
        pages ? read_array(op, "block_table", arguments->table, NPY_INT32, DENSE, 2, table_dims) : NULL;
    if (!table || read_length(op, "pages", pages, 1, &layer->kv_heads) < 0 ||
        read_length(op, "block_table", table, 1, &layer->max_pages) < 0)
        return -1;
    layer->n_pages = PyArray_DIM(pages, 0);
    layer->pages = pages_data(pages);
    layer->block_table = PyArray_DATA(table);
    layer->lengths = PyArray_DATA(lengths);
    if (read_exact(op, plan, sinks, arguments->sinks, type, flags, layer, &layer->sinks, &layer->sink_k,
                   &layer->sink_v) < 0 ||
        read_exact(op, plan, windows, arguments->windows, type, flags, layer, &layer->window, &layer->window_k,
                   &layer->window_v) < 0)
        return -1;
    return read_transforms(op, plan, &arguments->transforms, layer);
}

int workspace_get(workspace_memory *workspace, size_t bytes)
{
    workspace->block = bytes <= PY_SSIZE_T_MAX - 64 ? PyMem_Malloc(bytes + 64) : NULL;
    if (!workspace->block) return failed(PyErr_NoMemory());
    workspace->aligned = (void *)(((uintptr_t)workspace->block + 63) & ~(uintptr_t)63);
    return 0;
}

int copy_tables(workspace_memory *copies, const table_argument *tables, int n)
{
    size_t entries = 0;
    for (int i = 0; i < n; i++) entries += *tables[i].table ? tables[i].entries : 0;
    if (workspace_get(copies, entries * sizeof(int32_t)) < 0) return -1;
    int32_t *at = copies->aligned;
    for (int i = 0; i < n; i++) {
        if (!*tables[i].table) continue;
        memcpy(at, *tables[i].table, tables[i].entries * sizeof(int32_t));
        *tables[i].table = at;
        at += tables[i].entries;
    }
    return 0;
}

void workspace_free(workspace_memory *workspace)
{
    PyMem_Free(workspace->block);
    workspace->block = NULL;
}
