/* The vector index over NumPy arrays. Owns scratch and the list of segments of one search. */
#include "binding.h"
#include <turboquant_index.h>

typedef struct {
    tq_index_layout layout;
    int64_t row_bytes;
    int32_t planes;
    npy_intp channels;
} read_layout;

static int get_layout(const char *op, PyObject *bits_object, PyObject *steps_object, read_layout *out)
{
    npy_intp any = ANY;
    PyArrayObject *bits = read_array(op, "bits", bits_object, NPY_UINT8, DENSE, 1, &any);
    if (!bits) return -1;
    npy_intp groups = PyArray_DIM(bits, 0);
    PyArrayObject *steps = read_array(op, "steps", steps_object, NPY_FLOAT32, DENSE, 1, &groups);
    if (!steps) return -1;
    out->layout.groups = groups > TQ_MAX_GROUPS ? TQ_MAX_GROUPS + 1 : (int32_t)groups;
    out->layout.bits = PyArray_DATA(bits);
    out->layout.steps = PyArray_DATA(steps);
    out->channels = 32 * groups;
    tq_error error = {0};
    tq_status status = tq_index_row_bytes(&out->layout, &out->row_bytes, &out->planes, &error);
    if (status == TQ_OK) return 0;
    raise_status(op, status, &error, NULL);
    return -1;
}

const char doc_index_encode[] = PyDoc_STR(
    "index_encode(bits, steps, z, threads=0)\n--\n\n"
    "(codes, signs, scales) of rotated rows z, float32 [n, 32 groups]: uint8 [n, row bytes] and [blocks, planes, 64], "
    "float32 [n].\nbits: uint8 [groups], each 0..6 or 8; steps: float32 [groups]. turboquant_index.h has the layout.");
PyObject *py_index_encode(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"bits", "steps", "z", "threads", NULL};
    PyObject *bits, *steps, *z_object, *threads_object = NULL, *codes = NULL, *signs = NULL, *scales = NULL,
                                       *result = NULL;
    read_layout read;
    int32_t threads = 0;
    const char *op = "index_encode";
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|O:index_encode", names, &bits, &steps, &z_object,
                                     &threads_object) ||
        (threads_object && read_i32(op, "threads", threads_object, 0, INT32_MAX, &threads) < 0) ||
        get_layout(op, bits, steps, &read) < 0)
        return NULL;
    npy_intp dims[2] = {ANY, read.channels};
    PyArrayObject *z = read_array(op, "z", z_object, NPY_FLOAT32, DENSE, 2, dims);
    if (!z) return NULL;
    npy_intp shape[2] = {PyArray_DIM(z, 0), (npy_intp)read.row_bytes};
    npy_intp blocks[3] = {(shape[0] + TQ_INDEX_BLOCK - 1) / TQ_INDEX_BLOCK, read.planes, TQ_INDEX_BLOCK};
    codes = PyArray_SimpleNew(2, shape, NPY_UINT8);
    scales = PyArray_SimpleNew(1, shape, NPY_FLOAT32);
    signs = PyArray_SimpleNew(3, blocks, NPY_UINT8);
    if (!codes || !signs || !scales) goto done;
    const float *from = PyArray_DATA(z);
    uint8_t *to = PyArray_DATA((PyArrayObject *)codes), *leading = PyArray_DATA((PyArrayObject *)signs);
    float *factors = PyArray_DATA((PyArrayObject *)scales);
    tq_error error = {0};
    tq_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = tq_index_encode(&read.layout, from, shape[0], to, leading, factors, threads, &error);
    Py_END_ALLOW_THREADS;
    if (status == TQ_OK) result = PyTuple_Pack(3, codes, signs, scales);
    else raise_status(op, status, &error, NULL);
done:
    Py_XDECREF(codes);
    Py_XDECREF(signs);
    Py_XDECREF(scales);
    return result;
}

const char doc_index_step[] =
    PyDoc_STR("index_step(bits)\n--\n\nWhat a level of a width of 0..6 or 8 bits counts, in units of u.");
PyObject *py_index_step(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"bits", NULL};
    PyObject *object;
    int32_t bits;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:index_step", names, &object) ||
        read_i32("index_step", "bits", object, 0, TQ_WIDE_BITS, &bits) < 0)
        return NULL;
    return PyFloat_FromDouble(tq_index_step(bits));
}

const char doc_index_decode[] =
    PyDoc_STR("index_decode(bits, steps, codes, signs, scales)\n--\n\n"
              "The rotated rows that codes and their leading bits, uint8 [n, planes], stand for: "
              "float32 [n, 32 groups].");
PyObject *py_index_decode(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"bits", "steps", "codes", "signs", "scales", NULL};
    PyObject *bits, *steps, *codes_object, *signs_object, *scales_object, *z;
    read_layout read;
    const char *op = "index_decode";
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO:index_decode", names, &bits, &steps, &codes_object,
                                     &signs_object, &scales_object) ||
        get_layout(op, bits, steps, &read) < 0)
        return NULL;
    npy_intp dims[2] = {ANY, (npy_intp)read.row_bytes};
    PyArrayObject *codes = read_array(op, "codes", codes_object, NPY_UINT8, DENSE, 2, dims);
    if (!codes) return NULL;
    dims[0] = PyArray_DIM(codes, 0);
    dims[1] = read.planes;
    PyArrayObject *signs = read_array(op, "signs", signs_object, NPY_UINT8, DENSE, 2, dims);
    if (!signs) return NULL;
    PyArrayObject *scales = read_array(op, "scales", scales_object, NPY_FLOAT32, DENSE, 1, dims);
    if (!scales) return NULL;
    dims[1] = read.channels;
    z = PyArray_SimpleNew(2, dims, NPY_FLOAT32);
    if (!z) return NULL;
    tq_error error = {0};
    tq_status status = tq_index_decode(&read.layout, PyArray_DATA(codes), PyArray_DATA(signs), PyArray_DATA(scales),
                                       dims[0], PyArray_DATA((PyArrayObject *)z), &error);
    if (status == TQ_OK) return z;
    Py_DECREF(z);
    return raise_status(op, status, &error, NULL);
}

static int get_queries(const char *op, PyObject *tuple, const read_layout *read, tq_index_queries *out)
{
    PyObject *q_object, *units_object, *constants_object, *squared_object;
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 4) {
        raise_type(op, "queries", "a tuple (q, units, constants, squared)", tuple);
        return -1;
    }
    q_object = PyTuple_GET_ITEM(tuple, 0);
    units_object = PyTuple_GET_ITEM(tuple, 1);
    constants_object = PyTuple_GET_ITEM(tuple, 2);
    squared_object = PyTuple_GET_ITEM(tuple, 3);
    npy_intp dims[2] = {ANY, read->channels};
    PyArrayObject *q = read_array(op, "q", q_object, NPY_INT16, DENSE, 2, dims);
    if (!q) return -1;
    dims[0] = PyArray_DIM(q, 0);
    PyArrayObject *units = read_array(op, "units", units_object, NPY_FLOAT64, DENSE, 1, dims);
    PyArrayObject *constants =
        units ? read_array(op, "constants", constants_object, NPY_FLOAT64, DENSE, 1, dims) : NULL;
    PyArrayObject *squared = NULL;
    if (!constants) return -1;
    if (squared_object != Py_None &&
        !(squared = read_array(op, "squared", squared_object, NPY_FLOAT64, DENSE, 1, dims)))
        return -1;
    *out = (tq_index_queries){dims[0], PyArray_DATA(q), PyArray_DATA(units), PyArray_DATA(constants),
                              squared ? PyArray_DATA(squared) : NULL};
    return 0;
}

/* (codes, signs, scales, offsets or None, ids or first id, allowed or None) */
static int get_rows(const char *op, PyObject *tuple, const read_layout *read, tq_index_rows *out)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 6) {
        raise_type(op, "segments", "tuples (codes, signs, scales, offsets, ids, allowed)", tuple);
        return -1;
    }
    PyObject *const *item = PySequence_Fast_ITEMS(tuple);
    npy_intp dims[2] = {ANY, (npy_intp)read->row_bytes};
    PyArrayObject *codes = read_array(op, "codes", item[0], NPY_UINT8, DENSE, 2, dims);
    if (!codes) return -1;
    npy_intp n = PyArray_DIM(codes, 0);
    npy_intp blocks[3] = {(n + TQ_INDEX_BLOCK - 1) / TQ_INDEX_BLOCK, read->planes, TQ_INDEX_BLOCK};
    PyArrayObject *signs = read_array(op, "signs", item[1], NPY_UINT8, DENSE, 3, blocks);
    if (!signs) return -1;
    PyArrayObject *scales = read_array(op, "scales", item[2], NPY_FLOAT32, DENSE, 1, &n), *array;
    if (!scales) return -1;
    *out = (tq_index_rows){
        .n = n, .codes = PyArray_DATA(codes), .signs = PyArray_DATA(signs), .scales = PyArray_DATA(scales)};
    if (item[3] != Py_None) {
        if (!(array = read_array(op, "offsets", item[3], NPY_FLOAT32, DENSE, 1, &n))) return -1;
        out->offsets = PyArray_DATA(array);
    }
    if (PyArray_Check(item[4])) {
        if (!(array = read_array(op, "ids", item[4], NPY_INT64, DENSE, 1, &n))) return -1;
        out->ids = PyArray_DATA(array);
    } else if (read_i64(op, "ids", item[4], 0, INT64_MAX - n, &out->first_id) < 0) return -1;
    if (item[5] != Py_None) {
        if (!(array = read_array(op, "allowed", item[5], NPY_UINT8, DENSE, 1, &n))) return -1;
        out->allowed = PyArray_DATA(array);
    }
    return 0;
}

const char doc_index_search[] = PyDoc_STR(
    "index_search(bits, steps, queries, segments, k, threads=0)\n--\n\n"
    "(scores, ids) of the k best rows a query, float32 and int64 [queries, k], larger first, ties by ascending id; -inf "
    "and -1 behind\nthe last. queries: (q int16 [n, 32 groups], units, constants float64 [n], squared float64 [n] or None). "
    "segments: a tuple of (codes, signs,\nscales, offsets float32 or None, ids int64 or the first id, allowed uint8 or None). "
    "Contracts: tq_index_search.");
PyObject *py_index_search(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"bits", "steps", "queries", "segments", "k", "threads", NULL};
    PyObject *bits, *steps, *queries_object, *segments_object, *k_object, *threads_object = NULL;
    PyObject *scores = NULL, *ids = NULL, *result = NULL;
    tq_index_rows *segments = NULL;
    tq_index_queries queries;
    read_layout read;
    int64_t k;
    int32_t threads = 0;
    const char *op = "index_search";
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO|O:index_search", names, &bits, &steps, &queries_object,
                                     &segments_object, &k_object, &threads_object) ||
        (threads_object && read_i32(op, "threads", threads_object, 0, INT32_MAX, &threads) < 0) ||
        read_i64(op, "k", k_object, 1, INT64_MAX / 64, &k) < 0 || get_layout(op, bits, steps, &read) < 0 ||
        get_queries(op, queries_object, &read, &queries) < 0)
        return NULL;
    if (!PyTuple_Check(segments_object)) return raise_type(op, "segments", "a tuple of segments", segments_object);
    Py_ssize_t n_segments = PyTuple_GET_SIZE(segments_object);
    segments = PyMem_RawCalloc((size_t)n_segments + 1, sizeof *segments);
    if (!segments) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n_segments; i++)
        if (get_rows(op, PyTuple_GET_ITEM(segments_object, i), &read, &segments[i]) < 0) goto done;
    npy_intp dims[2] = {queries.n, k};
    scores = PyArray_SimpleNew(2, dims, NPY_FLOAT32);
    ids = PyArray_SimpleNew(2, dims, NPY_INT64);
    if (!scores || !ids) goto done;
    float *score = PyArray_DATA((PyArrayObject *)scores);
    int64_t *id = PyArray_DATA((PyArrayObject *)ids);
    tq_error error = {0};
    tq_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = tq_index_search(&read.layout, &queries, segments, n_segments, k, score, id, threads, &error);
    Py_END_ALLOW_THREADS;
    if (status == TQ_OK) result = PyTuple_Pack(2, scores, ids);
    else raise_status(op, status, &error, NULL);
done:
    PyMem_RawFree(segments);
    Py_XDECREF(scores);
    Py_XDECREF(ids);
    return result;
}

const char doc_index_scores[] = PyDoc_STR(
    "index_scores(bits, steps, queries, segment, threads=0)\n--\n\n"
    "The score of every row of a segment, allowed or not: float32 [queries, rows]. Arguments as in index_search.");
PyObject *py_index_scores(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"bits", "steps", "queries", "segment", "threads", NULL};
    PyObject *bits, *steps, *queries_object, *segment_object, *threads_object = NULL, *scores;
    tq_index_rows segment;
    tq_index_queries queries;
    read_layout read;
    int32_t threads = 0;
    const char *op = "index_scores";
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO|O:index_scores", names, &bits, &steps, &queries_object,
                                     &segment_object, &threads_object) ||
        (threads_object && read_i32(op, "threads", threads_object, 0, INT32_MAX, &threads) < 0) ||
        get_layout(op, bits, steps, &read) < 0 || get_queries(op, queries_object, &read, &queries) < 0 ||
        get_rows(op, segment_object, &read, &segment) < 0)
        return NULL;
    npy_intp dims[2] = {queries.n, segment.n};
    scores = PyArray_SimpleNew(2, dims, NPY_FLOAT32);
    if (!scores) return NULL;
    float *score = PyArray_DATA((PyArrayObject *)scores);
    tq_error error = {0};
    tq_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = tq_index_scores(&read.layout, &queries, &segment, score, threads, &error);
    Py_END_ALLOW_THREADS;
    if (status == TQ_OK) return scores;
    Py_DECREF(scores);
    return raise_status(op, status, &error, NULL);
}
