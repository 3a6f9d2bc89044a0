/* Instruction sets, threads and statuses. */
#include "binding.h"

const char doc_status_message[] = PyDoc_STR("status_message(status)\n--\n\n"
                                            "A sentence for a tq_status.");
FUNCTION(status_message)
{
    int32_t status;
    const argument arguments[] = {ANY_INT32("status", &status)};
    if (READ_ARGUMENTS("status_message", arguments, 1, 1) < 0) return NULL;
    return PyUnicode_FromString(tq_status_message((tq_status)status));
}

const char doc_isa[] = PyDoc_STR("isa()\n--\n\n"
                                 "The instruction set in use: the best one, or what TURBOQUANT_ISA or set_isa names; "
                                 "\"none\" if there is no such, and then\ncalls that compute say so.");
FUNCTION(isa)
{
    if (read_arguments("isa", args, kwargs, NULL, 0, 0, 0) < 0) return NULL;
    return PyUnicode_FromString(tq_isa());
}

const char doc_isa_available[] = PyDoc_STR("isa_available()\n--\n\n"
                                           "The instruction sets compiled in that this CPU has, best first.");
FUNCTION(isa_available)
{
    PyObject *text = NULL, *list = NULL, *tuple = NULL;
    if (read_arguments("isa_available", args, kwargs, NULL, 0, 0, 0) < 0) return NULL;
    text = PyUnicode_FromString(tq_isa_available());
    if (!text) goto done;
    list = PyUnicode_Split(text, NULL, -1);
    if (list) tuple = PyList_AsTuple(list);
done:
    Py_XDECREF(text);
    Py_XDECREF(list);
    return tuple;
}

const char doc_set_isa[] =
    PyDoc_STR("set_isa(name)\n--\n\n"
              "Forces an instruction set by name, for the whole process; None: back to the default. "
              "Not safe beside other calls.\nRuntimeError, which lists the names, if the CPU has no "
              "such level.");
FUNCTION(set_isa)
{
    PyObject *object, *shown = NULL, *result = NULL;
    const char *name = NULL;
    const argument arguments[] = {OBJECT("name", &object)};
    if (READ_ARGUMENTS("set_isa", arguments, 1, 1) < 0) return NULL;
    if (object != Py_None && !PyUnicode_Check(object)) return raise_type("set_isa", "name", "a str or None", object);
    Py_ssize_t bytes = 0;
    if (object != Py_None && !(name = PyUnicode_AsUTF8AndSize(object, &bytes))) return NULL;
    tq_error error = {0};
    /* a name with a NUL is unknown */
    tq_status status = tq_set_isa(name && (size_t)bytes != strlen(name) ? "" : name, &error);
    if (status == TQ_OK) Py_RETURN_NONE;
    shown = name ? PyObject_ASCII(object) : NULL;
    if (!name || shown)
        result = raise_status("set_isa", status, &error, shown ? PyUnicode_AsUTF8AndSize(shown, NULL) : NULL);
    Py_XDECREF(shown);
    return result;
}

const char doc_kernel_name[] = PyDoc_STR(
    "kernel_name(operation, plan)\n--\n\n"
    "The kernel that an operation (\"rotate\", \"append\", \"attend\", \"dequantize\", \"dot\") of a plan runs, such as "
    "\"attend_avx2\".");
FUNCTION(kernel_name)
{
    PyObject *operation_object, *plan_object;
    read_plan_result read;
    const char *op = "kernel_name";
    const argument arguments[] = {OBJECT("operation", &operation_object), OBJECT("plan", &plan_object)};
    if (READ_ARGUMENTS(op, arguments, 2, 2) < 0) return NULL;
    if (!PyUnicode_Check(operation_object)) return raise_type(op, "operation", "a str", operation_object);
    const char *operation = PyUnicode_AsUTF8AndSize(operation_object, NULL);
    if (!operation || read_plan(op, plan_object, &read) < 0) return NULL;
    const char *kernel = tq_kernel_name(operation, &read.plan);
    if (kernel) return PyUnicode_FromString(kernel);
    size_t bytes;
    tq_error error = {0};
    tq_status status =
        tq_dot_workspace_bytes(&read.plan, 0, &bytes, &error); /* fails where TURBOQUANT_ISA names no level */
    if (status != TQ_OK) return raise_status(op, status, &error, NULL);
    return raise_value(op, "operation", "rotate, append, attend, dequantize or dot, got %A", operation_object);
}

const char doc_num_threads[] =
    PyDoc_STR("num_threads()\n--\n\n"
              "Threads used at most by one call: set_num_threads, else "
              "TURBOQUANT_NUM_THREADS, else the CPUs this process may run on.\n0 if that variable is no integer in "
              "1..256: every call that computes fails until set_num_threads.");
FUNCTION(num_threads)
{
    if (read_arguments("num_threads", args, kwargs, NULL, 0, 0, 0) < 0) return NULL;
    return PyLong_FromLong(tq_num_threads());
}

const char doc_set_num_threads[] =
    PyDoc_STR("set_num_threads(n)\n--\n\n"
              "Sets the most threads that one call uses, 1 to 256, for the whole process.");
FUNCTION(set_num_threads)
{
    int32_t n;
    tq_status status;
    tq_error error = {0};
    const argument arguments[] = {ANY_INT32("n", &n)};
    if (READ_ARGUMENTS("set_num_threads", arguments, 1, 1) < 0) return NULL;
    WITHOUT_GIL(status = tq_set_num_threads(n, &error));
    return result_of("set_num_threads", status, &error, Py_NewRef(Py_None));
}
