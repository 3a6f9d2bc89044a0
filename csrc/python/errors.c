/* The only place of this binding that raises for a status or for an argument (torch/ops.cpp has its own one).
 *   append: `block_table[3]` must be in 0..7, got 8
 *   attend: `q` must be of shape [*, *, *, 64], got [2, 8, 64]
 *   set_isa: `name` must be one of: avx2 scalar, got 'sse' */
#include "binding.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static PyObject *exception_of(tq_status status)
{
    switch (status) {
    case TQ_E_TYPE: return PyExc_TypeError;
    case TQ_E_MEMORY: return PyExc_MemoryError;
    case TQ_E_UNSUPPORTED:
    case TQ_E_CUDA: return PyExc_RuntimeError;
    default: return PyExc_ValueError;
    }
}

/* The core counts in terms of its C arguments; Python callers know the same thing by another name. */
static const char *python_name(const char *argument)
{
    if (!strcmp(argument, "words")) return "plan";
    if (!strcmp(argument, "n_words")) return "len(plan)";
    if (!strcmp(argument, "isa")) return "name";
    return argument;
}

static void print_number(char *text, size_t size, double x)
{
    if (isfinite(x) && x == floor(x) && fabs(x) < 9007199254740992.0) PyOS_snprintf(text, size, "%lld", (long long)x);
    else PyOS_snprintf(text, size, "%.9g", x);
}

PyObject *raise_status(const char *op, tq_status status, const tq_error *error, const char *got_text)
{
    PyObject *type = exception_of(status);
    if (error->status != status || !error->argument || !error->wants)
        return PyErr_Format(type, "%s: %s", op, tq_status_message(status));
    char got[40], index[32] = "";
    print_number(got, sizeof got, error->got);
    if (error->index >= 0) PyOS_snprintf(index, sizeof index, "[%lld]", (long long)error->index);
    if (!got_text && !strncmp(error->argument, "TURBOQUANT_", 11)) got_text = getenv(error->argument);
    const char *one_of = status == TQ_E_UNSUPPORTED ? "one of: " : ""; /* the core lists what there is */
    return PyErr_Format(type, "%s: `%s%s` must be %s%s, got %s", op, python_name(error->argument), index, one_of,
                        error->wants, got_text ? got_text : got);
}

PyObject *raise_value(const char *op, const char *name, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    PyObject *wants = PyUnicode_FromFormatV(format, list);
    va_end(list);
    if (wants) PyErr_Format(PyExc_ValueError, "%s: `%s` must be %U", op, name, wants);
    Py_XDECREF(wants);
    return NULL;
}

PyObject *raise_type(const char *op, const char *name, const char *wants, PyObject *got)
{
    return PyErr_Format(PyExc_TypeError, "%s: `%s` must be %s, got %.100s", op, name, wants, Py_TYPE(got)->tp_name);
}
