/* Shared by the files of this binding, which includes turboquant.h, CPython and NumPy and nothing else of the project.
 *
 * Every function of the module has the same steps: parse the arguments; check the numbers, which may run Python code of
 * the caller (__index__, __float__); check the arrays, which runs none, so that checked arrays stay valid; allocate;
 * call the core without the GIL; turn its status into an exception. Arrays are borrowed from the call's arguments,
 * which outlive it.
 * Everything that a function owns is declared on top, starts as NULL and is released under its one label, done. */
#ifndef TURBOQUANT_BINDING_H
#define TURBOQUANT_BINDING_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL turboquant_core_array_api
#ifndef TURBOQUANT_IMPORTS_NUMPY /* module.c alone fills NumPy's table */
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>
#include <turboquant.h>

/* ---- errors.c ---- */
/** Raises for a status that is not TQ_OK and returns NULL; got_text, if not NULL, replaces error->got. All three give
 *  the exception the fields `argument` and `got` (errors.c), unless the status is about no argument. */
PyObject *raise_status(const char *op, tq_status status, const tq_error *error, const char *got_text);
/** Raises "op: `name` must be <format ...>", for what this binding itself found; returns NULL. */
PyObject *raise_value(const char *op, const char *name, const char *format, ...);
/** Raises TypeError and returns NULL. got: the object, or the dtype of an array. */
PyObject *raise_type(const char *op, const char *name, const char *wants, PyObject *got);
/** Returns -1, for a function that returns an int, after one of these or PyErr_NoMemory. */
static inline int failed(PyObject *null __attribute__((unused))) { return -1; }
/** Returns `result` if the status is TQ_OK; else releases it, raises and returns NULL. */
PyObject *result_of(const char *op, tq_status status, const tq_error *error, PyObject *result);

/** Runs a call of the core, one statement, while other threads may run Python. */
#define WITHOUT_GIL(call)                                                                                              \
    Py_BEGIN_ALLOW_THREADS call;                                                                                       \
    Py_END_ALLOW_THREADS

/* ---- numbers.c: 0, or -1 with an exception set ---- */
int read_i64(const char *op, const char *name, PyObject *object, int64_t low, int64_t high, int64_t *out);
int read_i32(const char *op, const char *name, PyObject *object, int32_t low, int32_t high, int32_t *out);
int read_u64(const char *op, const char *name, PyObject *object, uint64_t *out);
int read_f32(const char *op, const char *name, PyObject *object, float *out);
int read_f64(const char *op, const char *name, PyObject *object, double *out);

/* ---- arrays.c ---- */
enum { DENSE = 0, ROWS = 1, WRITE = 2 }; /* ROWS: only the last dimension must be dense */
#define ANY (-1)                         /* a dimension of any length */

/** Returns the array `object` (borrowed) if it has the given type and shape, else NULL with an exception set. Runs no
 *  Python code. */
PyArrayObject *read_array(const char *op, const char *name, PyObject *object, int type, int flags, int ndim,
                          const npy_intp *dims);
/** Reads pages, uint8 [any, kv_heads or ANY, record_bytes]. */
PyArrayObject *read_pages(const char *op, const tq_plan *plan, PyObject *object, int flags, npy_intp kv_heads);
/** Returns the bytes of pages, or NULL if there are no pages: NumPy does not align an empty array. */
uint8_t *pages_data(PyArrayObject *pages);
/** Points `data` to the numbers of a DENSE array. 0, or -1 and an exception. */
int read_data(const char *op, const char *name, PyObject *object, int type, int ndim, const npy_intp *dims, void *data);
/** The same, but does nothing for NULL and None. */
int read_optional(const char *op, const char *name, PyObject *object, int type, int ndim, const npy_intp *dims,
                  void *data);
/** Reads the strides, in elements, of a ROWS array of four dimensions. */
int read_strides(const char *op, const char *name, PyArrayObject *array, int64_t *batch, int64_t *head, int64_t *token);
/** Reads a length as int32. */
int read_length(const char *op, const char *name, PyArrayObject *array, int dim, int32_t *out);
/** Reads the tq_dtype of a call and NumPy's type of its arrays, from the keyword `dtype` or from the first array. */
int read_dtype(const char *op, PyObject *dtype, const char *name, PyObject *first, int32_t *out, int *type);

enum { KEY = 0, VALUE = 1 };

/** The arguments of a layer's transforms: float32 [kv_heads, columns] of each side, turns, rotation. */
typedef struct {
    PyObject *numbers[2], *turns, *rotation;
} transform_arguments;
#define NO_TRANSFORM {{Py_None, Py_None}, Py_None, Py_None}
/** Reads them for layer->kv_heads heads. What the plan does not take is read too: the core refuses it. */
int read_transforms(const char *op, const tq_plan *plan, const transform_arguments *arguments, tq_layer *layer);

/** The arguments of a layer's cache; sinks and windows: of keys and values. */
typedef struct {
    PyObject *pages, *table, *lengths, *sinks[2], *windows[2];
    transform_arguments transforms;
} layer_arguments;
#define NO_LAYER {NULL, NULL, NULL, {Py_None, Py_None}, {Py_None, Py_None}, NO_TRANSFORM}
/** Reads the layer of a call with layer->batch sequences. type: NumPy's of exact tokens; flags: WRITE or DENSE;
 *  kv_heads ANY: as many as the pages have. */
int read_layer(const char *op, const tq_plan *plan, const layer_arguments *arguments, int type, int flags,
               npy_intp kv_heads, tq_layer *layer);

/** Memory for a call's workspace, 64-byte aligned. */
typedef struct {
    void *block, *aligned;
} workspace_memory;
int workspace_get(workspace_memory *workspace, size_t bytes);
void workspace_free(workspace_memory *workspace);
/** Copies n tables of int32, any of them NULL, into `copies` and points the arguments there. Without the GIL another
 *  thread may write to the caller's tables, but numbers that the core has checked must not change before it reads
 *  them. */
typedef struct {
    const int32_t **table;
    size_t entries;
} table_argument;
int copy_tables(workspace_memory *copies, const table_argument *tables, int n);

/* ---- plans.c ---- */
typedef struct {
    int64_t words[TQ_PLAN_MAX_WORDS];
    size_t n_words;
    tq_plan plan;
} read_plan_result;
int read_plan(const char *op, PyObject *object, read_plan_result *out);

/* ---- calls.c ---- */
/** An argument of a call: its name, how it is read, and where it goes. *to stays as it is if the caller gave none. An
 *  object is borrowed; low and high are the bounds of an integer. */
typedef struct {
    const char *name;
    enum { AN_OBJECT, A_PLAN, A_BOOL, AN_I32, AN_I64, A_U64, AN_F32 } kind;
    void *to;
    int64_t low, high;
} argument;
#define OBJECT(name, to) {name, AN_OBJECT, to, 0, 0}
#define PLAN(to) {"plan", A_PLAN, to, 0, 0}
#define BOOL(name, to) {name, A_BOOL, to, 0, 0}
#define INT32(name, to, low, high) {name, AN_I32, to, low, high}
#define INT64(name, to, low, high) {name, AN_I64, to, low, high}
#define UINT64(name, to) {name, A_U64, to, 0, 0}
#define FLOAT32(name, to) {name, AN_F32, to, 0, 0}
#define ANY_INT32(name, to) INT32(name, to, INT32_MIN, INT32_MAX) /* the core checks its bounds */
/** Reads the n arguments of a call. The first `required` must be given; those from `keywords` on are given by name. 0,
 *  or -1 and an exception. */
int read_arguments(const char *op, PyObject *args, PyObject *kwargs, const argument *arguments, int n, int required,
                   int keywords);
#define READ_ARGUMENTS(op, list, required, keywords)                                                                   \
    read_arguments(op, args, kwargs, list, (int)(sizeof(list) / sizeof *(list)), required, keywords)

/* ---- the functions of the module; PyDoc texts stand with them ---- */
/** Heads the declaration or definition of a function. */
#define FUNCTION(name) PyObject *py_##name(PyObject *module __attribute__((unused)), PyObject *args, PyObject *kwargs)
/** Writes _(name) for each function of the module: below for its declaration, in module.c for its row of methods. */
/* clang-format off */
#define EACH_FUNCTION(_)                                                                                               \
    _(status_message) _(codebook) _(random) _(haar) _(gaussian) _(record_bytes) _(plan_info) _(new_pages)              \
    _(rotate) _(append) _(attend) _(merge) _(dequantize) _(dot) _(index_assign) _(index_encode)                        \
    _(index_decode) _(index_step) _(index_lead_error) _(index_factors) _(index_search) _(index_scores_of)              \
    _(isa) _(isa_available) _(set_isa) _(kernel_name) _(num_threads) _(set_num_threads)
/* clang-format on */
#define DECLARE(name)                                                                                                  \
    FUNCTION(name);                                                                                                    \
    extern const char doc_##name[];
EACH_FUNCTION(DECLARE)
#endif
