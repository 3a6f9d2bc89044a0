/* Numbers as arguments: range checks that name the argument and what it was. They may run the caller's __index__. */
#include "binding.h"

/* Returns the Python integer that an object stands for (owned), or NULL with an exception set. */
static PyObject *as_integer(const char *op, const char *name, PyObject *object)
{
    PyObject *number = PyNumber_Index(object);
    if (number || !PyErr_ExceptionMatches(PyExc_TypeError)) return number;
    PyErr_Clear();
    return raise_type(op, name, "an integer", object);
}

int read_i64(const char *op, const char *name, PyObject *object, int64_t low, int64_t high, int64_t *out)
{
    int overflow;
    char got[32] = "a number of more than 64 bits"; /* printing a huge one may fail, or take very long */
    PyObject *number = as_integer(op, name, object);
    if (!number) return -1;
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (!overflow && value >= low && value <= high) {
        *out = value;
        return 0;
    }
    if (!overflow) PyOS_snprintf(got, sizeof got, "%lld", value);
    if (low == INT64_MIN) raise_value(op, name, "in -2**63..2**63 - 1, got %s", got);
    else if (high == INT64_MAX) raise_value(op, name, "in %lld..2**63 - 1, got %s", (long long)low, got);
    else raise_value(op, name, "in %lld..%lld, got %s", (long long)low, (long long)high, got);
    return -1;
}

int read_i32(const char *op, const char *name, PyObject *object, int32_t low, int32_t high, int32_t *out)
{
    int64_t value;
    if (read_i64(op, name, object, low, high, &value) < 0) return -1;
    *out = (int32_t)value;
    return 0;
}

int read_u64(const char *op, const char *name, PyObject *object, uint64_t *out)
{
    PyObject *number = as_integer(op, name, object);
    if (!number) return -1;
    unsigned long long value = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        PyErr_Clear();
        return failed(raise_value(op, name, "in 0..2**64 - 1, got one outside"));
    }
    *out = value;
    return 0;
}

int read_f64(const char *op, const char *name, PyObject *object, double *out)
{
    *out = PyFloat_AsDouble(object);
    if (*out != -1.0 || !PyErr_Occurred()) return 0;
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
    PyErr_Clear();
    return failed(raise_type(op, name, "a number", object));
}

int read_f32(const char *op, const char *name, PyObject *object, float *out)
{
    double value;
    if (read_f64(op, name, object, &value) < 0) return -1;
    *out = (float)value;
    return 0;
}
