/* The vector index over NumPy arrays. Owns workspace and the list of segments of one search. */
#include "binding.h"
#include <turboquant_index.h>

#define THREADS(to) INT32("threads", to, 0, INT32_MAX)

typedef struct {
    read_plan_result plan;
    tq_index_space space;
    int64_t row_bytes;
    int32_t planes;
} read_space;

/** Reads a layout. dim: numbers of a vector; channels are dim rounded up to a multiple of 8. */
static int get_layout(const char *op, int32_t dim, PyObject *bits, PyObject *lead, PyObject *steps,
                      tq_index_layout *layout, int64_t *row_bytes, int32_t *planes)
{
    npy_intp groups = (dim + 31) / 32;
    layout->channels = (dim + 7) / 8 * 8;
    if (read_data(op, "bits", bits, NPY_UINT8, 1, &groups, &layout->bits) < 0 ||
        read_data(op, "lead", lead, NPY_UINT8, 1, &groups, &layout->lead) < 0 ||
        read_data(op, "steps", steps, NPY_FLOAT32, 1, &groups, &layout->steps) < 0)
        return -1;
    tq_error error = {0};
    tq_status status = tq_index_row_bytes(layout, row_bytes, planes, &error);
    if (status == TQ_OK) return 0;
    return failed(raise_status(op, status, &error, NULL));
}

/* Reads (directions [n_lists / 16 rounded up, dim, 16], lengths [n_lists]). */
static int get_lists(const char *op, PyObject *tuple, tq_index_space *space)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 2)
        return failed(raise_type(op, "lists", "a tuple (directions, lengths)", tuple));
    npy_intp n = ANY;
    PyArrayObject *lengths = read_array(op, "lengths", PyTuple_GetItem(tuple, 1), NPY_FLOAT32, DENSE, 1, &n);
    if (!lengths) return -1;
    n = PyArray_DIM(lengths, 0);
    npy_intp shape[3] = {(n + TQ_INDEX_CENTRES - 1) / TQ_INDEX_CENTRES, space->dim, TQ_INDEX_CENTRES};
    space->n_lists = n > TQ_INDEX_MAX_LISTS ? TQ_INDEX_MAX_LISTS + 1 : (int32_t)n; /* the core refuses more */
    space->lengths = PyArray_DATA(lengths);
    return read_data(op, "directions", PyTuple_GetItem(tuple, 0), NPY_FLOAT32, 3, shape, &space->directions);
}

/* Reads (plan, dim, metric, bits, lead, steps, mean or None, matrix or None, sigmas[, lists]). */
static int get_space(const char *op, PyObject *tuple, read_space *out)
{
    tq_index_space *space = &out->space;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) < 9 || PyTuple_Size(tuple) > 10)
        return failed(raise_type(
            op, "space", "a tuple (plan, dim, metric, bits, lead, steps, mean, matrix, sigmas[, lists])", tuple));
    PyObject *item[9];
    for (int i = 0; i < 9; i++) item[i] = PyTuple_GetItem(tuple, i);
    if (read_plan(op, item[0], &out->plan) < 0 || read_i32(op, "dim", item[1], 1, TQ_MAX_DIM, &space->dim) < 0 ||
        read_i32(op, "metric", item[2], TQ_INDEX_IP, TQ_INDEX_L2, &space->metric) < 0 ||
        read_f64(op, "sigmas", item[8], &space->sigmas) < 0 ||
        get_layout(op, space->dim, item[3], item[4], item[5], &space->layout, &out->row_bytes, &out->planes) < 0)
        return -1;
    space->plan = &out->plan.plan;
    npy_intp dim = space->dim, square[2] = {space->layout.channels, space->layout.channels};
    space->mean = NULL;
    space->matrix = NULL;
    if (read_optional(op, "mean", item[6], NPY_FLOAT32, 1, &dim, &space->mean) < 0 ||
        read_optional(op, "matrix", item[7], NPY_UINT16, 2, square, &space->matrix) < 0)
        return -1;
    space->n_lists = 0;
    space->directions = space->lengths = NULL;
    return PyTuple_Size(tuple) == 10 ? get_lists(op, PyTuple_GetItem(tuple, 9), space) : 0;
}

/* Reads the list of each row, int32 [n], or None if the space has no lists. */
static int get_row_lists(const char *op, PyObject *object, npy_intp n, const tq_index_space *space,
                         const int32_t **lists)
{
    *lists = NULL;
    if (object == Py_None && !space->n_lists) return 0;
    if (!space->n_lists) return failed(raise_type(op, "lists", "None, because the space has no lists", object));
    if (read_data(op, "lists", object, NPY_INT32, 1, &n, lists) < 0) return -1;
    for (npy_intp i = 0; i < n; i++)
        if ((*lists)[i] < 0 || (*lists)[i] >= space->n_lists)
            return failed(raise_value(op, "lists", "in 0..%d, got %d", space->n_lists - 1, (*lists)[i]));
    return 0;
}

const char doc_index_assign[] =
    PyDoc_STR("index_assign(space, x, threads=0)\n--\n\n"
              "The list of each of x, float32 [n, dim]: int32 [n]. space: as in index_encode, with lists.");
FUNCTION(index_assign)
{
    PyObject *space, *x_object;
    read_space read;
    int32_t threads = 0;
    const char *op = "index_assign";
    const argument arguments[] = {OBJECT("space", &space), OBJECT("x", &x_object), THREADS(&threads)};
    if (READ_ARGUMENTS(op, arguments, 2, 3) < 0 || get_space(op, space, &read) < 0) return NULL;
    npy_intp dims[2] = {ANY, read.space.dim};
    PyArrayObject *x = read_array(op, "x", x_object, NPY_FLOAT32, DENSE, 2, dims);
    if (!x) return NULL;
    dims[0] = PyArray_DIM(x, 0);
    PyObject *lists = PyArray_SimpleNew(1, dims, NPY_INT32);
    if (!lists) return NULL;
    const float *from = PyArray_DATA(x);
    int32_t *to = PyArray_DATA((PyArrayObject *)lists);
    tq_error error = {0};
    tq_status status;
    WITHOUT_GIL(status = tq_index_assign(&read.space, from, dims[0], to, threads, &error));
    return result_of(op, status, &error, lists);
}

const char doc_index_encode[] = PyDoc_STR(
    "index_encode(space, x, threads=0, lists=None)\n--\n\n"
    "(codes, signs, scales, offsets) of vectors x, float32 [n, dim]: uint8 [n, row bytes] and [blocks, planes, 64], "
    "float32 [n] and [n] or\nNone. space: (plan, dim, metric: 0 ip, 1 cosine, 2 l2, bits, lead: uint8 [groups], steps: "
    "float32 [groups], mean: float32 [dim] or\nNone, matrix: bfloat16 as uint16 [channels, channels] or\nNone, sigmas[, (directions: float32 [n_lists / 16 "
    "rounded up, dim, 16],\nlengths: float32 [n_lists])]); with lists, `lists` is the list of each row, int32 [n]. "
    "Contracts: turboquant_index.h.");
FUNCTION(index_encode)
{
    PyObject *space, *x_object, *lists_object = Py_None;
    PyObject *codes = NULL, *signs = NULL, *scales = NULL, *offsets = NULL, *result = NULL;
    read_space read;
    int32_t threads = 0;
    const char *op = "index_encode";
    const argument arguments[] = {OBJECT("space", &space), OBJECT("x", &x_object), THREADS(&threads),
                                  OBJECT("lists", &lists_object)};
    if (READ_ARGUMENTS(op, arguments, 2, 4) < 0 || get_space(op, space, &read) < 0) return NULL;
    npy_intp dims[2] = {ANY, read.space.dim};
    PyArrayObject *x = read_array(op, "x", x_object, NPY_FLOAT32, DENSE, 2, dims);
    if (!x) return NULL;
    npy_intp shape[2] = {PyArray_DIM(x, 0), (npy_intp)read.row_bytes};
    const int32_t *lists;
    if (get_row_lists(op, lists_object, shape[0], &read.space, &lists) < 0) return NULL;
    npy_intp blocks[3] = {(shape[0] + TQ_INDEX_BLOCK - 1) / TQ_INDEX_BLOCK, read.planes, TQ_INDEX_BLOCK};
    int has_offsets = read.space.mean || lists || read.space.metric == TQ_INDEX_L2;
    codes = PyArray_SimpleNew(2, shape, NPY_UINT8);
    scales = PyArray_SimpleNew(1, shape, NPY_FLOAT32);
    signs = PyArray_SimpleNew(3, blocks, NPY_UINT8);
    offsets = has_offsets ? PyArray_SimpleNew(1, shape, NPY_FLOAT32) : Py_NewRef(Py_None);
    if (!codes || !signs || !scales || !offsets) goto done;
    const float *from = PyArray_DATA(x);
    uint8_t *to = PyArray_DATA((PyArrayObject *)codes), *leading = PyArray_DATA((PyArrayObject *)signs);
    float *factors = PyArray_DATA((PyArrayObject *)scales);
    float *exact = has_offsets ? PyArray_DATA((PyArrayObject *)offsets) : NULL;
    tq_error error = {0};
    tq_status status;
    WITHOUT_GIL(status =
                    tq_index_encode(&read.space, from, shape[0], lists, to, leading, factors, exact, threads, &error));
    result = status == TQ_OK ? PyTuple_Pack(4, codes, signs, scales, offsets) : raise_status(op, status, &error, NULL);
done:
    Py_XDECREF(codes);
    Py_XDECREF(signs);
    Py_XDECREF(scales);
    Py_XDECREF(offsets);
    return result;
}

const char doc_index_lead_error[] = PyDoc_STR(
    "index_lead_error(bits, lead)\n--\n\n"
    "The expected squared error of a level of N(0, 1) in 0..6 or 8 bits, if only the first `lead` of them are known.");
FUNCTION(index_lead_error)
{
    PyObject *lead_object;
    int32_t bits, lead;
    const argument arguments[] = {INT32("bits", &bits, 0, TQ_WIDE_BITS), OBJECT("lead", &lead_object)};
    if (READ_ARGUMENTS("index_lead_error", arguments, 2, 2) < 0 ||
        read_i32("index_lead_error", "lead", lead_object, 0, bits < 6 ? bits : 6, &lead) < 0)
        return NULL;
    return PyFloat_FromDouble(tq_index_lead_error(bits, lead));
}

const char doc_index_step[] =
    PyDoc_STR("index_step(bits)\n--\n\nThe step between levels of 0..6 or 8 bits, in units of u.");
FUNCTION(index_step)
{
    int32_t bits;
    const argument arguments[] = {INT32("bits", &bits, 0, TQ_WIDE_BITS)};
    if (READ_ARGUMENTS("index_step", arguments, 1, 1) < 0) return NULL;
    return PyFloat_FromDouble(tq_index_step(bits));
}

const char doc_index_decode[] =
    PyDoc_STR("index_decode(dim, bits, lead, steps, codes, signs, scales)\n--\n\n"
              "The rotated rows that codes and their leading bits, uint8 [n, planes], stand for: "
              "float32 [n, dim rounded up to a multiple of 8].");
FUNCTION(index_decode)
{
    PyObject *bits, *lead, *steps, *codes_object, *signs_object, *scales_object, *z;
    tq_index_layout layout;
    int64_t row_bytes;
    int32_t dim, planes;
    const char *op = "index_decode";
    const argument arguments[] = {
        INT32("dim", &dim, 1, TQ_MAX_DIM), OBJECT("bits", &bits),          OBJECT("lead", &lead),
        OBJECT("steps", &steps),           OBJECT("codes", &codes_object), OBJECT("signs", &signs_object),
        OBJECT("scales", &scales_object)};
    if (READ_ARGUMENTS(op, arguments, 7, 7) < 0 ||
        get_layout(op, dim, bits, lead, steps, &layout, &row_bytes, &planes) < 0)
        return NULL;
    npy_intp dims[2] = {ANY, (npy_intp)row_bytes};
    PyArrayObject *codes = read_array(op, "codes", codes_object, NPY_UINT8, DENSE, 2, dims);
    if (!codes) return NULL;
    dims[0] = PyArray_DIM(codes, 0);
    dims[1] = planes;
    const uint8_t *signs;
    const float *scales;
    if (read_data(op, "signs", signs_object, NPY_UINT8, 2, dims, &signs) < 0 ||
        read_data(op, "scales", scales_object, NPY_FLOAT32, 1, dims, &scales) < 0)
        return NULL;
    dims[1] = layout.channels;
    z = PyArray_SimpleNew(2, dims, NPY_FLOAT32);
    if (!z) return NULL;
    tq_error error = {0};
    tq_status status;
    WITHOUT_GIL(status = tq_index_decode(&layout, PyArray_DATA(codes), signs, scales, dims[0],
                                         PyArray_DATA((PyArrayObject *)z), &error));
    return result_of(op, status, &error, z);
}

static PyArrayObject *get_queries(const char *op, PyObject *object, const read_space *read)
{
    npy_intp dims[2] = {ANY, read->space.dim};
    return read_array(op, "queries", object, NPY_FLOAT32, DENSE, 2, dims);
}

/* Reads where each list starts in a segment that is sorted by lists: int64 [count], from 0 to n; count may be ANY. The
 * leading bits of each list begin a new block. blocks: how many blocks all lists have. */
static PyArrayObject *get_starts(const char *op, PyObject *object, npy_intp n, npy_intp count, npy_intp *blocks)
{
    PyArrayObject *array = read_array(op, "lists", object, NPY_INT64, DENSE, 1, &count);
    if (!array) return NULL;
    const int64_t *at = PyArray_DATA(array);
    count = PyArray_DIM(array, 0);
    int good = count > 0 && at[0] == 0 && at[count - 1] == n;
    *blocks = 0;
    for (npy_intp i = 0; i + 1 < count && good; i++) {
        good = at[i] <= at[i + 1] && at[i + 1] <= n;
        if (good) *blocks += (npy_intp)((at[i + 1] - at[i] + TQ_INDEX_BLOCK - 1) / TQ_INDEX_BLOCK);
    }
    if (good) return array;
    raise_value(op, "lists", "rows at which lists start, ascending from 0 to %zd, got others", n);
    return NULL;
}

const char doc_index_factors[] = PyDoc_STR(
    "index_factors(scales, offsets, starts=None)\n--\n\n"
    "What a search wants to know of each block of rows, float32 [blocks, 2]. scales: float32 [n]; offsets: float32 [n] or "
    "None; starts:\nwhere each list starts, int64 [n_lists + 1], if a list begins a new block. Contracts: tq_index_factors.");
FUNCTION(index_factors)
{
    PyObject *scales_object, *offsets_object, *starts_object = Py_None;
    PyObject *factors = NULL, *copy = NULL;
    PyArrayObject *scales, *starts = NULL;
    const float *offset = NULL;
    const char *op = "index_factors";
    npy_intp n = ANY, dims[2] = {0, 2};
    const argument arguments[] = {OBJECT("scales", &scales_object), OBJECT("offsets", &offsets_object),
                                  OBJECT("starts", &starts_object)};
    if (READ_ARGUMENTS(op, arguments, 2, 3) < 0 ||
        !(scales = read_array(op, "scales", scales_object, NPY_FLOAT32, DENSE, 1, &n)))
        return NULL;
    n = PyArray_DIM(scales, 0);
    if (read_optional(op, "offsets", offsets_object, NPY_FLOAT32, 1, &n, &offset) < 0) return NULL;
    dims[0] = (n + TQ_INDEX_BLOCK - 1) / TQ_INDEX_BLOCK;
    if (starts_object != Py_None) {
        if (!(starts = get_starts(op, starts_object, n, ANY, &dims[0]))) return NULL;
        if (!(copy = PyArray_NewCopy(starts, NPY_CORDER))) return NULL; /* as for copy_tables */
    }
    if (!(factors = PyArray_SimpleNew(2, dims, NPY_FLOAT32))) goto done;
    const int64_t whole[2] = {0, n}, *at = copy ? PyArray_DATA((PyArrayObject *)copy) : whole;
    const float *scale = PyArray_DATA(scales);
    float *to = PyArray_DATA((PyArrayObject *)factors);
    npy_intp parts = starts ? PyArray_DIM(starts, 0) - 1 : 1;
    Py_BEGIN_ALLOW_THREADS;
    for (npy_intp i = 0; i < parts; i++) {
        int64_t rows = at[i + 1] - at[i];
        tq_index_factors(scale + at[i], offset ? offset + at[i] : NULL, rows, to);
        to += 2 * ((rows + TQ_INDEX_BLOCK - 1) / TQ_INDEX_BLOCK);
    }
    Py_END_ALLOW_THREADS;
done:
    Py_XDECREF(copy);
    return factors;
}

/* Returns how many tq_index_rows a segment becomes: one, or one for each list if it is sorted by lists. */
static Py_ssize_t parts_of(PyObject *tuple, const tq_index_space *space)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 8) return 1;
    PyObject *lists = PyTuple_GetItem(tuple, 7);
    int sorted = PyArray_Check(lists) && PyArray_TYPE((PyArrayObject *)lists) == NPY_INT64;
    return sorted && space->n_lists ? space->n_lists : 1;
}

/* Cuts a segment that is sorted by lists into its lists. */
static void cut(const tq_index_rows *all, const int64_t *starts, const read_space *read, tq_index_rows *out)
{
    int64_t block = 0;
    for (int32_t list = 0; list < read->space.n_lists; list++) {
        int64_t at = starts[list], n = starts[list + 1] - at;
        out[list] = (tq_index_rows){.n = n,
                                    .codes = all->codes + at * read->row_bytes,
                                    .signs = all->signs + block * read->planes * TQ_INDEX_BLOCK,
                                    .scales = all->scales + at,
                                    .offsets = all->offsets + at,
                                    .factors = all->factors + 2 * block,
                                    .ids = all->ids ? all->ids + at : NULL,
                                    .first_id = all->first_id + at,
                                    .allowed = all->allowed ? all->allowed + at : NULL,
                                    .list = list};
        block += (n + TQ_INDEX_BLOCK - 1) / TQ_INDEX_BLOCK;
    }
}

/* Reads a segment into its parts_of parts: (codes, signs, scales, offsets or None, ids or first id, allowed or None,
 * factors), with lists also the list of each row or where each list starts. */
static int get_rows(const char *op, PyObject *tuple, const read_space *read, tq_index_rows *parts)
{
    Py_ssize_t items = read->space.n_lists ? 8 : 7;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != items)
        return failed(raise_type(
            op, "segments",
            "tuples (codes, signs, scales, offsets, ids, allowed, factors), with lists also (.., lists)", tuple));
    PyObject *item[8];
    for (Py_ssize_t i = 0; i < items; i++) item[i] = PyTuple_GetItem(tuple, i);
    tq_index_rows rows, *out = &rows;
    npy_intp dims[2] = {ANY, (npy_intp)read->row_bytes};
    PyArrayObject *starts = NULL, *codes = read_array(op, "codes", item[0], NPY_UINT8, DENSE, 2, dims);
    if (!codes) return -1;
    npy_intp n = PyArray_DIM(codes, 0);
    npy_intp blocks[3] = {(n + TQ_INDEX_BLOCK - 1) / TQ_INDEX_BLOCK, read->planes, TQ_INDEX_BLOCK};
    int sorted = read->space.n_lists && PyArray_Check(item[7]) && PyArray_TYPE((PyArrayObject *)item[7]) == NPY_INT64;
    if (sorted && !(starts = get_starts(op, item[7], n, read->space.n_lists + 1, &blocks[0]))) return -1;
    *out = (tq_index_rows){.n = n, .codes = PyArray_DATA(codes)};
    if (read_data(op, "signs", item[1], NPY_UINT8, 3, blocks, &out->signs) < 0 ||
        read_data(op, "scales", item[2], NPY_FLOAT32, 1, &n, &out->scales) < 0 ||
        read_optional(op, "offsets", item[3], NPY_FLOAT32, 1, &n, &out->offsets) < 0)
        return -1;
    if (PyArray_Check(item[4])) {
        if (read_data(op, "ids", item[4], NPY_INT64, 1, &n, &out->ids) < 0) return -1;
    } else if (!PyLong_Check(item[4])) { /* another object's __index__ might change arrays that are checked already */
        return failed(raise_type(op, "ids", "an array of int64 or an int", item[4]));
    } else if (read_i64(op, "ids", item[4], 0, INT64_MAX - (n > 0 ? n - 1 : 0), &out->first_id) < 0) return -1;
    npy_intp pairs[2] = {blocks[0], 2};
    if (read_optional(op, "allowed", item[5], NPY_UINT8, 1, &n, &out->allowed) < 0 ||
        read_data(op, "factors", item[6], NPY_FLOAT32, 2, pairs, &out->factors) < 0)
        return -1;
    if (starts && !out->offsets) return failed(raise_type(op, "offsets", "an array, with lists", item[3]));
    if (starts) cut(out, PyArray_DATA(starts), read, parts);
    else if (read->space.n_lists && get_row_lists(op, item[7], n, &read->space, &out->lists) < 0) return -1;
    else *parts = *out;
    return 0;
}

/* Reads all segments. The caller frees the result; NULL with an exception set if it fails. */
static tq_index_rows *get_segments(const char *op, PyObject *object, const read_space *read, Py_ssize_t *n_segments)
{
    if (!PyTuple_Check(object)) {
        raise_type(op, "segments", "a tuple of segments", object);
        return NULL;
    }
    Py_ssize_t n = 0, items = PyTuple_Size(object);
    for (Py_ssize_t i = 0; i < items; i++) n += parts_of(PyTuple_GetItem(object, i), &read->space);
    tq_index_rows *segments = PyMem_Calloc((size_t)n + 1, sizeof *segments);
    if (!segments) {
        PyErr_NoMemory();
        return NULL;
    }
    *n_segments = 0;
    for (Py_ssize_t i = 0; i < items; i++) {
        PyObject *own = PyTuple_GetItem(object, i);
        if (get_rows(op, own, read, &segments[*n_segments]) < 0) {
            PyMem_Free(segments);
            return NULL;
        }
        *n_segments += parts_of(own, &read->space);
    }
    return segments;
}

const char doc_index_search[] = PyDoc_STR(
    "index_search(space, queries, segments, k, threads=0, probe=2147483647)\n--\n\n"
    "(scores, ids) of the k best rows a query, float32 and int64 [queries, k], larger first, ties by ascending id; -inf "
    "and -1 behind\nthe last. space: as in index_encode. queries: float32 [n, dim]. segments: a tuple of (codes, signs, "
    "scales, offsets float32 or None,\nids int64 or the first id, allowed uint8 or None, factors of index_factors),\nwith lists also the list of each row, "
    "int32, or where each list starts, int64 [n_lists + 1]; then `signs` have new blocks\nfor each list. probe: lists that "
    "a query reads. Contracts: tq_index_search.");
FUNCTION(index_search)
{
    PyObject *space, *queries_object, *segments_object;
    PyObject *scores = NULL, *ids = NULL, *result = NULL;
    PyArrayObject *queries;
    tq_index_rows *segments = NULL;
    read_space read;
    int64_t k;
    int32_t threads = 0, probe = INT32_MAX;
    const char *op = "index_search";
    const argument arguments[] = {OBJECT("space", &space),
                                  OBJECT("queries", &queries_object),
                                  OBJECT("segments", &segments_object),
                                  INT64("k", &k, 1, INT64_MAX / 64),
                                  THREADS(&threads),
                                  INT32("probe", &probe, 1, INT32_MAX)};
    if (READ_ARGUMENTS(op, arguments, 4, 6) < 0 || get_space(op, space, &read) < 0 ||
        !(queries = get_queries(op, queries_object, &read)))
        return NULL;
    Py_ssize_t n_segments;
    if (!(segments = get_segments(op, segments_object, &read, &n_segments))) return NULL;
    npy_intp dims[2] = {PyArray_DIM(queries, 0), k};
    scores = PyArray_SimpleNew(2, dims, NPY_FLOAT32);
    ids = PyArray_SimpleNew(2, dims, NPY_INT64);
    if (!scores || !ids) goto done;
    const float *x = PyArray_DATA(queries);
    float *score = PyArray_DATA((PyArrayObject *)scores);
    int64_t *id = PyArray_DATA((PyArrayObject *)ids);
    tq_error error = {0};
    tq_status status;
    WITHOUT_GIL(
        status = tq_index_search(&read.space, x, dims[0], segments, n_segments, k, probe, score, id, threads, &error));
    result = status == TQ_OK ? PyTuple_Pack(2, scores, ids) : raise_status(op, status, &error, NULL);
done:
    PyMem_Free(segments);
    Py_XDECREF(scores);
    Py_XDECREF(ids);
    return result;
}

const char doc_index_scores_of[] = PyDoc_STR(
    "index_scores_of(space, queries, segments, rows, threads=0)\n--\n\n"
    "The scores of some rows for each query, float32 [queries, m]. rows: int64 [queries, m], counted over all segments, or "
    "-1: none, with\nthe score -inf. rows None: of all rows, allowed or not. Other arguments as in index_search.");
FUNCTION(index_scores_of)
{
    PyObject *space, *queries_object, *segments_object, *rows_object, *copy = NULL, *scores = NULL;
    PyArrayObject *queries, *rows = NULL;
    tq_index_rows *segments = NULL;
    Py_ssize_t n_segments;
    read_space read;
    int32_t threads = 0;
    const char *op = "index_scores_of";
    const argument arguments[] = {OBJECT("space", &space), OBJECT("queries", &queries_object),
                                  OBJECT("segments", &segments_object), OBJECT("rows", &rows_object),
                                  THREADS(&threads)};
    if (READ_ARGUMENTS(op, arguments, 4, 5) < 0 || get_space(op, space, &read) < 0 ||
        !(queries = get_queries(op, queries_object, &read)))
        return NULL;
    npy_intp dims[2] = {PyArray_DIM(queries, 0), ANY};
    if (rows_object != Py_None && !(rows = read_array(op, "rows", rows_object, NPY_INT64, DENSE, 2, dims))) return NULL;
    if (!(segments = get_segments(op, segments_object, &read, &n_segments))) return NULL;
    const float *x = PyArray_DATA(queries);
    const int64_t *wanted = rows ? PyArray_DATA(rows) : NULL;
    int64_t all = 0;
    for (Py_ssize_t i = 0; i < n_segments; i++) all += segments[i].n;
    dims[1] = rows ? PyArray_DIM(rows, 1) : (npy_intp)all;
    for (npy_intp i = 0; rows && i < dims[0] * dims[1]; i++)
        if (wanted[i] < -1 || wanted[i] >= all) {
            raise_value(op, "rows", "in -1..%lld, got %lld", (long long)all - 1, (long long)wanted[i]);
            goto done;
        }
    if (rows && !(copy = PyArray_NewCopy(rows, NPY_CORDER))) goto done; /* as for copy_tables */
    if (rows) wanted = PyArray_DATA((PyArrayObject *)copy);
    scores = PyArray_SimpleNew(2, dims, NPY_FLOAT32);
    if (!scores) goto done;
    float *score = PyArray_DATA((PyArrayObject *)scores);
    tq_error error = {0};
    tq_status status;
    WITHOUT_GIL(status = rows ? tq_index_scores_of(&read.space, x, dims[0], segments, n_segments, wanted, dims[1],
                                                   score, threads, &error)
                              : tq_index_scores(&read.space, x, dims[0], segments, n_segments, score, threads, &error));
    scores = result_of(op, status, &error, scores);
done:
    PyMem_Free(segments);
    Py_XDECREF(copy);
    return scores;
}
