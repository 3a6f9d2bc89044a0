/* The only place of this binding that raises for a status or for an argument. torch/checks.h has its own.
 *   append: `block_table[3]` must be in 0..7, got 8
 *   attend: `q` must be of shape [*, *, *, 64], got [2, 8, 64]
 *   `key_bits[0]` must be in 0..6 or 8, got 9     (errors of Plan itself name no operation)
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

/* Returns Python's name of an argument of the core. */
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

/* Raises "op: `label` must be <wants>" with two fields: `argument`, the label without index or "len(..)", and `got`,
 * None if it was not a number. Takes ownership of wants and got; if either is NULL, an exception is set already.
 * Returns NULL. */
static PyObject *raise_argument(PyObject *type, const char *op, const char *label, PyObject *wants, PyObject *got)
{
    PyObject *text =
        wants && got ? PyUnicode_FromFormat("%s%s`%s` must be %U", op, *op ? ": " : "", label, wants) : NULL;
    PyObject *error = text ? PyObject_CallFunctionObjArgs(type, text, NULL) : NULL;
    const char *name = strncmp(label, "len(", 4) ? label : label + 4;
    PyObject *argument = error ? PyUnicode_FromStringAndSize(name, (Py_ssize_t)strcspn(name, "[)")) : NULL;
    if (argument && PyObject_SetAttrString(error, "argument", argument) == 0 &&
        PyObject_SetAttrString(error, "got", got) == 0)
        PyErr_SetObject(type, error);
    Py_XDECREF(argument);
    Py_XDECREF(error);
    Py_XDECREF(text);
    Py_XDECREF(got);
    Py_XDECREF(wants);
    return NULL;
}

PyObject *raise_status(const char *op, tq_status status, const tq_error *error, const char *got_text)
{
    PyObject *type = exception_of(status);
    if (error->status != status || !error->argument || !error->wants)
        return PyErr_Format(type, "%s: %s", op, tq_status_message(status));
    char got[40], label[96];
    print_number(got, sizeof got, error->got);
    const char *name = python_name(error->argument);
    if (error->index >= 0) PyOS_snprintf(label, sizeof label, "%s[%lld]", name, (long long)error->index);
    else PyOS_snprintf(label, sizeof label, "%s", name);
    if (!strncmp(error->argument, "TURBOQUANT_", 11)) got_text = getenv(error->argument);
    if (!strncmp(error->wants, "given", 5)) got_text = "None";
    if (!strncmp(error->wants, "absent", 6)) got_text = "an array";
    PyObject *wants = PyUnicode_FromFormat("%s, got %s", error->wants, got_text ? got_text : got);
    return raise_argument(type, op, label, wants, got_text ? Py_NewRef(Py_None) : PyFloat_FromDouble(error->got));
}

PyObject *result_of(const char *op, tq_status status, const tq_error *error, PyObject *result)
{
    if (status == TQ_OK) return result;
    Py_XDECREF(result);
    return raise_status(op, status, error, NULL);
}

PyObject *raise_value(const char *op, const char *name, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    PyObject *wants = PyUnicode_FromFormatV(format, list);
    va_end(list);
    return raise_argument(PyExc_ValueError, op, name, wants, Py_NewRef(Py_None));
}

PyObject *raise_type(const char *op, const char *name, const char *wants, PyObject *got)
{
    PyObject *type = PyType_GetName(Py_TYPE(got)), *text = NULL;
    if (type) text = PyUnicode_FromFormat("%s, got %S", wants, PyArray_DescrCheck(got) ? got : type);
    Py_XDECREF(type);
    return raise_argument(PyExc_TypeError, op, name, text, Py_NewRef(Py_None));
}
