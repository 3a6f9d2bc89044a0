/* Reads the arguments of a call from their list (binding.h, `argument`). */
#include "binding.h"

enum { MOST_ARGUMENTS = 24, MOST_NAME = 32 };

static int read_one(const char *op, const argument *a, PyObject *object)
{
    switch (a->kind) {
    case A_PLAN: return read_plan(op, object, a->to);
    case A_BOOL: return (*(int *)a->to = PyObject_IsTrue(object)) < 0 ? -1 : 0;
    case AN_I32: return read_i32(op, a->name, object, (int32_t)a->low, (int32_t)a->high, a->to);
    case AN_I64: return read_i64(op, a->name, object, a->low, a->high, a->to);
    case A_U64: return read_u64(op, a->name, object, a->to);
    case AN_F32: return read_f32(op, a->name, object, a->to);
    default: *(PyObject **)a->to = object; return 0;
    }
}

int read_arguments(const char *op, PyObject *args, PyObject *kwargs, const argument *arguments, int n, int required,
                   int keywords)
{
    char *names[MOST_ARGUMENTS + 1], format[MOST_ARGUMENTS + 3 + MOST_NAME], *at = format;
    PyObject *o[MOST_ARGUMENTS];
    for (int i = 0; i < n; i++) {
        o[i] = NULL;
        names[i] = (char *)arguments[i].name; /* Python takes char * and writes to none */
        if (i == required) *at++ = '|';
        if (i == keywords) *at++ = '$';
        *at++ = 'O';
    }
    names[n] = NULL;
    *at++ = ':';
    memcpy(at, op, strlen(op) + 1);
    /* Python ignores pointers beyond those that the format asks for. */
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, names, o, o + 1, o + 2, o + 3, o + 4, o + 5, o + 6, o + 7,
                                     o + 8, o + 9, o + 10, o + 11, o + 12, o + 13, o + 14, o + 15, o + 16, o + 17,
                                     o + 18, o + 19, o + 20, o + 21, o + 22, o + 23))
        return -1;
    for (int i = 0; i < n; i++)
        if (o[i] && read_one(op, &arguments[i], o[i]) < 0) return -1;
    return 0;
}
