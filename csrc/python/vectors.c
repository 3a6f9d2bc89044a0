/* Functions on vectors rather than on a cache: codebooks, random numbers, rotations and inner products. */
#include "binding.h"
#include "turboquant_schemes.h"

static PyObject *copied(int type, npy_intp n, const void *data)
{
    PyObject *array = PyArray_SimpleNew(1, &n, type);
    if (array) memcpy(PyArray_DATA((PyArrayObject *)array), data, (size_t)PyArray_NBYTES((PyArrayObject *)array));
    return array;
}

const char doc_codebook[] = PyDoc_STR(
    "codebook(law, head_dim, bits)\n--\n\n"
    "The codebook of `bits` (1..6) for a law (turboquant.plan.Codebook; head_dim matters to SPHERE alone), as a "
    "dict.\nA decoded number is levels[code] * step, one rounded product in float32; the rank of a number u is "
    "how many thresholds are <= u,\nand code_of_rank[rank] its code. Lloyd-Max (Max 1960, Lloyd 1982) at 3 to 6 "
    "bits, uniform at 1 and 2.");
FUNCTION(codebook)
{
    int32_t law, head_dim, bits;
    const char *op = "codebook";
    const argument arguments[] = {ANY_INT32("law", &law), ANY_INT32("head_dim", &head_dim), ANY_INT32("bits", &bits)};
    if (READ_ARGUMENTS(op, arguments, 3, 3) < 0) return NULL;
    tq_codebook book;
    tq_error error = {0};
    tq_status status = tq_get_codebook((tq_codebook_law)law, head_dim, bits, &book, &error);
    if (status != TQ_OK) return raise_status(op, status, &error, NULL);
    return Py_BuildValue("{s:i,s:i,s:d,s:N,s:N,s:N}", "bits", book.bits, "n_levels", book.n_levels, "step",
                         (double)book.step, "levels", copied(NPY_INT8, book.n_levels, book.levels), "thresholds",
                         copied(NPY_FLOAT32, book.n_levels - 1, book.thresholds), "code_of_rank",
                         copied(NPY_UINT8, book.n_levels, book.code_of_rank));
}

const char doc_random[] =
    PyDoc_STR("random(seed, stream, block)\n--\n\n"
              "Four uint32 of Philox4x32-10 (Salmon et al., SC11) for a key, a stream and a counter "
              "of 64 bits each.");
FUNCTION(random)
{
    uint64_t numbers[3];
    uint32_t words[4];
    const argument arguments[] = {UINT64("seed", numbers), UINT64("stream", numbers + 1), UINT64("block", numbers + 2)};
    if (READ_ARGUMENTS("random", arguments, 3, 3) < 0) return NULL;
    tq_random(numbers[0], numbers[1], numbers[2], words);
    return copied(NPY_UINT32, 4, words);
}

const char doc_gaussian[] = PyDoc_STR(
    "gaussian(seed, rows, head_dim)\n--\n\n"
    "Independent draws of N(0, 1), float32 [rows, head_dim], the same on every machine: the sketch of a quantised "
    "Johnson-\nLindenstrauss transform. rows and head_dim are in 1..4096.");
FUNCTION(gaussian)
{
    uint64_t seed;
    int32_t rows, head_dim;
    const char *op = "gaussian";
    const argument arguments[] = {UINT64("seed", &seed), INT32("rows", &rows, 1, TQ_MAX_DIM),
                                  INT32("head_dim", &head_dim, 1, TQ_MAX_DIM)};
    if (READ_ARGUMENTS(op, arguments, 3, 3) < 0) return NULL;
    npy_intp dims[2] = {rows, head_dim};
    PyObject *matrix = PyArray_SimpleNew(2, dims, NPY_FLOAT32);
    if (!matrix) return NULL;
    tq_error error = {0};
    tq_status status = tq_gaussian(seed, rows, head_dim, PyArray_DATA((PyArrayObject *)matrix), &error);
    return result_of(op, status, &error, matrix);
}

const char doc_haar[] =
    PyDoc_STR("haar(seed, head_dim)\n--\n\n"
              "A Haar-distributed rotation, float32 [head_dim, head_dim], by Householder reflections (Stewart "
              "1980); the same on every machine.\nhead_dim is a multiple of 8 in 8..4096. Takes O(head_dim^3) "
              "time.");
FUNCTION(haar)
{
    PyObject *matrix = NULL;
    workspace_memory workspace = {NULL, NULL};
    uint64_t seed;
    int32_t head_dim;
    const char *op = "haar";
    const argument arguments[] = {UINT64("seed", &seed), INT32("head_dim", &head_dim, 8, TQ_MAX_DIM)};
    if (READ_ARGUMENTS(op, arguments, 2, 2) < 0) return NULL;
    npy_intp dims[2] = {head_dim, head_dim};
    matrix = PyArray_SimpleNew(2, dims, NPY_FLOAT32);
    if (!matrix || workspace_get(&workspace, (size_t)head_dim * ((size_t)head_dim + 2) * sizeof(double)) < 0) goto done;
    tq_error error = {0};
    tq_status status;
    float *data = PyArray_DATA((PyArrayObject *)matrix);
    WITHOUT_GIL(status = tq_haar(seed, head_dim, data, workspace.aligned, &error));
    workspace_free(&workspace);
    return result_of(op, status, &error, matrix);
done:
    Py_XDECREF(matrix);
    workspace_free(&workspace);
    return NULL;
}

const char doc_rotate[] = PyDoc_STR(
    "rotate(plan, x, matrix=None, inverse=False)\n--\n\n"
    "R x, or R^T x if inverse, for every row of x, float32 [..., head_dim], C-contiguous; a new array of the same "
    "shape.\nR is the plan's rotation: matrix, float32 [head_dim, head_dim], if that is dense, else matrix is None.");
FUNCTION(rotate)
{
    PyObject *x_object, *matrix_object = Py_None, *y = NULL;
    read_plan_result read;
    int inverse = 0;
    const float *matrix = NULL;
    const char *op = "rotate";
    const argument arguments[] = {PLAN(&read), OBJECT("x", &x_object), OBJECT("matrix", &matrix_object),
                                  BOOL("inverse", &inverse)};
    if (READ_ARGUMENTS(op, arguments, 2, 4) < 0) return NULL;
    npy_intp dims[NPY_MAXDIMS], square[2] = {read.plan.head_dim, read.plan.head_dim};
    int ndim = 1;
    if (PyArray_Check(x_object)) ndim = PyArray_NDIM((PyArrayObject *)x_object);
    if (ndim < 1) ndim = 1;
    for (int i = 0; i < ndim - 1; i++) dims[i] = ANY;
    dims[ndim - 1] = read.plan.head_dim;
    PyArrayObject *x = read_array(op, "x", x_object, NPY_FLOAT32, DENSE, ndim, dims);
    if (!x || read_optional(op, "matrix", matrix_object, NPY_FLOAT32, 2, square, &matrix) < 0) return NULL;
    y = PyArray_SimpleNew(ndim, PyArray_DIMS(x), NPY_FLOAT32);
    if (!y) return NULL;
    const float *from = PyArray_DATA(x);
    float *to = PyArray_DATA((PyArrayObject *)y);
    int64_t rows = PyArray_SIZE(x) / read.plan.head_dim;
    tq_error error = {0};
    tq_status status;
    WITHOUT_GIL(status = tq_rotate(&read.plan, matrix, inverse, from, to, rows, &error));
    return result_of(op, status, &error, y);
}

const char doc_dot[] = PyDoc_STR(
    "dot(plan, queries, pages, n, *, key_numbers=None, rotation=None, threads=0)\n--\n\n"
    "<q, x> for every query and each of the first n packed vectors, which are not decoded: float32 [queries, n].\n"
    "queries: float32 [queries, head_dim] in the units of the vectors, not rotated. pages: uint8 [at least "
    "ceil(n / page_tokens), 1, record_bytes].");
FUNCTION(dot)
{
    PyObject *queries_object, *pages_object, *out = NULL, *result = NULL;
    transform_arguments transform = NO_TRANSFORM;
    workspace_memory workspace = {NULL, NULL};
    read_plan_result read;
    int64_t n;
    int32_t threads = 0;
    tq_layer layer = {.kv_heads = 1};
    const char *op = "dot";
    const argument arguments[] = {PLAN(&read),
                                  OBJECT("queries", &queries_object),
                                  OBJECT("pages", &pages_object),
                                  INT64("n", &n, 0, INT64_MAX),
                                  OBJECT("key_numbers", &transform.numbers[KEY]),
                                  OBJECT("rotation", &transform.rotation),
                                  INT32("threads", &threads, 0, INT32_MAX)};
    if (READ_ARGUMENTS(op, arguments, 4, 4) < 0) return NULL;
    npy_intp dims[2] = {ANY, read.plan.head_dim};
    PyArrayObject *queries = read_array(op, "queries", queries_object, NPY_FLOAT32, DENSE, 2, dims);
    PyArrayObject *pages = queries ? read_pages(op, &read.plan, pages_object, DENSE, 1) : NULL;
    if (!pages || read_transforms(op, &read.plan, &transform, &layer) < 0) return NULL;
    int64_t room = (int64_t)PyArray_DIM(pages, 0) * read.plan.page_tokens, n_queries = PyArray_DIM(queries, 0);
    if (n > room)
        return raise_value(op, "n", "in 0..%lld, what the pages hold, got %lld", (long long)room, (long long)n);
    dims[0] = (npy_intp)n_queries;
    dims[1] = (npy_intp)n;
    out = PyArray_SimpleNew(2, dims, NPY_FLOAT32);
    if (!out) goto done;
    const float *q = PyArray_DATA(queries);
    const uint8_t *bytes = pages_data(pages);
    float *to = PyArray_DATA((PyArrayObject *)out);
    size_t workspace_bytes = 0;
    tq_error error = {0};
    tq_status status = tq_dot_workspace_bytes(&read.plan, n_queries, &workspace_bytes, &error);
    if (status == TQ_OK) {
        if (workspace_get(&workspace, workspace_bytes) < 0) goto done;
        WITHOUT_GIL(status = tq_dot(&read.plan, &layer.key, q, n_queries, bytes, n, to, threads, workspace.aligned,
                                    workspace_bytes, &error));
    }
    result = result_of(op, status, &error, Py_NewRef(out));
done:
    Py_XDECREF(out);
    workspace_free(&workspace);
    return result;
}
