/* turboquant._core: the table of functions and the module itself. It owns no state: threads and the instruction set
 * belong to the C core. */
#define TURBOQUANT_IMPORTS_NUMPY
#include "binding.h"

#define ROW(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_VARARGS | METH_KEYWORDS, doc_##name},
static PyMethodDef methods[] = {EACH_FUNCTION(ROW){NULL, NULL, 0, NULL}};

static int execute(PyObject *module)
{
    import_array1(-1);
    if (PyModule_AddStringConstant(module, "__version__", TQ_VERSION) < 0) return -1;
    if (PyModule_AddIntConstant(module, "FORMAT_VERSION", TQ_FORMAT_VERSION) < 0) return -1;
    if (PyModule_AddIntConstant(module, "SCHEDULE_ROWS", TQ_SCHEDULE_ROWS) < 0) return -1;
    PyObject *limit = PyFloat_FromDouble(TQ_MAX_INPUT);
    int failed = PyModule_AddObjectRef(module, "MAX_INPUT", limit); /* NULL is passed on as an error */
    Py_XDECREF(limit);
    return failed;
}

/* Sub-interpreters are not supported, because NumPy's C API does not support them. Free-threaded builds use the GIL
 * too, until the suite has run on one; nothing here is known to need it. */
static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)execute},
#ifdef Py_mod_multiple_interpreters /* not in the limited API of 3.11; NumPy refuses them by itself */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

PyDoc_STRVAR(doc_module, "The C core of TurboQuant over NumPy arrays; _core.pyi and turboquant.h describe it.");

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "turboquant._core", .m_doc = doc_module,
    .m_size = 0,           .m_methods = methods,         .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
