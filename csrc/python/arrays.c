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
 * A dimension of one element may have any stride. */
static int has_rows(PyArrayObject *array)
{
    int last = PyArray_NDIM(array) - 1;
    for (int i = 0; i <= last; i++) {
        npy_intp stride = PyArray_STRIDE(array, i);
        if (PyArray_DIM(array, i) > 1 && (stride < 0 || (i == last && stride != PyArray_ITEMSIZE(array)))) return 0;
    }
    return 1;
}

PyArrayObject *read_array(const char *op, const char *name, PyObject *object, int type, int flags, int ndim,
                          const npy_intp *dims)
{
    char want_shape[160], got_shape[160], wants[64];
    PyOS_snprintf(wants, sizeof wants, "an array of %s", type_name(type));
    if (!PyArray_Check(object)) return (PyArrayObject *)raise_type(op, name, wants, object);
    PyArrayObject *array = (PyArrayObject *)object;
    if (!is_type(array, type)) return (PyArrayObject *)raise_type(op, name, wants, (PyObject *)PyArray_DESCR(array));
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
        if (__builtin_mul_overflow(*strides[i], length > 1 ? length : 1, &dense)) {
            raise_value(op, name, "addressable, got strides beyond 63 bits");
            return -1;
        }
        if (dense < PyArray_DIM(array, 3)) dense = PyArray_DIM(array, 3); /* behind a stride of 0 */
    }
    return 0;
}

int read_length(const char *op, const char *name, PyArrayObject *array, int dim, int32_t *out)
{
    npy_intp length = PyArray_DIM(array, dim);
    if (length > INT32_MAX) {
        raise_value(op, name, "at most 2**31 - 1 long in every dimension, got %lld", (long long)length);
        return -1;
    }
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
    if (!PyArray_Check(first)) {
        raise_type(op, name, "an array of float32, float16 or bfloat16", first);
        return -1;
    }
    if (dtype != Py_None && !PyUnicode_Check(dtype)) {
        raise_type(op, "dtype", "None, \"float32\", \"float16\" or \"bfloat16\"", dtype);
        return -1;
    }
    for (int i = 0; i < 3; i++) {
        int named = dtype != Py_None && PyUnicode_CompareWithASCIIString(dtype, known[i].name) == 0;
        int found = dtype == Py_None && known[i].dtype != TQ_BF16 && is_type((PyArrayObject *)first, known[i].type);
        if (!named && !found) continue;
        *out = (int32_t)known[i].dtype;
        *type = known[i].type;
        return 0;
    }
    if (dtype != Py_None) raise_value(op, "dtype", "None, \"float32\", \"float16\" or \"bfloat16\", got %R", dtype);
    else raise_type(op, name, wants, (PyObject *)PyArray_DESCR((PyArrayObject *)first));
    return -1;
}

/* [rows, head_dim], or [n, rows, head_dim] with n = 1 or kv_heads. */
static int read_rotation(const char *op, const char *name, PyObject *object, npy_intp kv_heads, npy_intp rows,
                         npy_intp head_dim, tq_transform *out)
{
    npy_intp dims[3] = {kv_heads, rows, head_dim};
    int shared = 0;
    if (object == Py_None) return 0;
    if (PyArray_Check(object)) {
        PyArrayObject *given = (PyArrayObject *)object;
        shared = PyArray_NDIM(given) == 2;
        if (PyArray_NDIM(given) == 3 && PyArray_DIM(given, 0) == 1) dims[0] = 1;
    }
    PyArrayObject *array = read_array(op, name, object, NPY_FLOAT32, DENSE, 3 - shared, dims + shared);
    if (!array) return -1;
    out->rotation = PyArray_DATA(array);
    out->rotation_stride_head = shared || dims[0] == 1 ? 0 : (int64_t)rows * head_dim;
    return 0;
}

/* float32 [kv_heads, columns]. */
static int read_of_heads(const char *op, const char *name, PyObject *object, npy_intp kv_heads, npy_intp columns,
                         const float **data)
{
    npy_intp dims[2] = {kv_heads, columns};
    if (object == Py_None) return 0;
    PyArrayObject *array = read_array(op, name, object, NPY_FLOAT32, DENSE, 2, dims);
    if (!array) return -1;
    *data = PyArray_DATA(array);
    return 0;
}

/* turns [wave_pairs, 3] and moments [kv_heads, plan->moments]; whether they must be there is the core's to say. */
static int read_moments(const char *op, const tq_plan *plan, npy_intp kv_heads, const transform_arguments *arguments,
                        tq_transform *out)
{
    npy_intp turns[2] = {plan->wave_pairs, 3};
    if (arguments->turns != Py_None) {
        PyArrayObject *array = read_array(op, "key_turns", arguments->turns, NPY_INT32, DENSE, 2, turns);
        if (!array) return -1;
        out->turns = PyArray_DATA(array);
    }
    return read_of_heads(op, "key_moments", arguments->moments, kv_heads, plan->moments, &out->moments);
}

int read_transform(const char *op, int side, const tq_plan *plan, npy_intp kv_heads,
                   const transform_arguments *arguments, tq_transform *out)
{
    static const char *const names[2][3] = {{"key_rotation", "key_centre", "key_steps"},
                                            {"value_rotation", "value_centre", "value_steps"}};
    const char *const *name = names[side];
    memset(out, 0, sizeof *out);
    /* arrays that the plan does not take are converted too: the core refuses them */
    const tq_side *of = side == KEY ? &plan->key : &plan->value;
    npy_intp rows = of->matrix_rows ? of->matrix_rows : plan->head_dim;
    npy_intp columns = of->step_columns ? of->step_columns : ANY;
    if (read_rotation(op, name[0], arguments->rotation, kv_heads, rows, plan->head_dim, out) < 0 ||
        read_of_heads(op, name[1], arguments->centre, kv_heads, plan->head_dim, &out->centre) < 0 ||
        read_of_heads(op, name[2], arguments->steps, kv_heads, columns, &out->steps) < 0)
        return -1;
    return read_moments(op, plan, kv_heads, arguments, out);
}

int workspace_get(workspace_memory *workspace, size_t bytes)
{
    workspace->block = bytes <= PY_SSIZE_T_MAX - 64 ? PyMem_Malloc(bytes + 64) : NULL;
    if (!workspace->block) {
        PyErr_NoMemory();
        return -1;
    }
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
