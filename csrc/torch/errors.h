// Turns an operator's exception into Python's TypeError, ValueError, MemoryError or RuntimeError, with fields for code
// to read.
//
// The stable ABI does not define this: the dispatcher lets C++ exceptions pass, and torch's binding translates them.
// Until torch 2.14, pybind11 did so, and std::invalid_argument became a ValueError; 2.15 makes a RuntimeError of every
// standard exception.
// Both let pybind11's builtin_exception set the error itself, so the operators throw that. Its declaration is repeated
// here (the same since pybind11 2.2), because pybind11's headers need those of one Python, and the operators need none.
// To C++ it is a std::runtime_error.
#pragma once
#include <optional>
#include <stdexcept>
#include <string>

namespace pybind11
{
class __attribute__((visibility("default"))) builtin_exception : public std::runtime_error
{
public:
    using std::runtime_error::runtime_error;
    virtual void set_error() const = 0; // called with the interpreter's lock held
};
} // namespace pybind11

// Weak: a process without Python has none of them and never calls set_error. All are in Python's stable ABI.
extern "C" {
__attribute__((weak)) void *PyObject_CallFunction(void *callable, const char *format, ...);
__attribute__((weak)) int PyObject_SetAttrString(void *object, const char *name, void *value);
__attribute__((weak)) void *PyUnicode_FromString(const char *text);
__attribute__((weak)) void *PyFloat_FromDouble(double number);
__attribute__((weak)) void *PyBool_FromLong(long number);
__attribute__((weak)) void PyErr_SetObject(void *type, void *value);
__attribute__((weak)) void Py_DecRef(void *object);
extern __attribute__((weak)) void *PyExc_TypeError;
extern __attribute__((weak)) void *PyExc_ValueError;
extern __attribute__((weak)) void *PyExc_MemoryError;
extern __attribute__((weak)) void *PyExc_RuntimeError;
extern __attribute__((weak)) char _Py_NoneStruct; // Py_None is its address
}

namespace turboquant
{

/** A refused or failed call. Python's exception has the fields `argument`, None if it is about no argument; `got`, None
 *  if it was not a number; and `stored`, whether append_attend had stored the tokens before it failed. */
class Error final : public pybind11::builtin_exception
{
public:
    enum Kind { TYPE, VALUE, MEMORY, MACHINE };

    Error(Kind kind, const std::string &text, std::string argument = "", std::optional<double> got = std::nullopt,
          bool stored = false)
        : builtin_exception(text), kind_(kind), argument_(std::move(argument)), got_(got), stored_(stored)
    {
    }

    void set_error() const override
    {
        void *type = kind_ == TYPE     ? PyExc_TypeError
                     : kind_ == VALUE  ? PyExc_ValueError
                     : kind_ == MEMORY ? PyExc_MemoryError
                                       : PyExc_RuntimeError;
        void *error = PyObject_CallFunction(type, "s", what());
        if (error && set(error, "argument", argument_.empty() ? nullptr : PyUnicode_FromString(argument_.c_str())) &&
            set(error, "got", got_ ? PyFloat_FromDouble(*got_) : nullptr) &&
            set(error, "stored", PyBool_FromLong(stored_)))
            PyErr_SetObject(type, error);
        if (error) Py_DecRef(error);
    }

private:
    Kind kind_;
    std::string argument_;
    std::optional<double> got_;
    bool stored_;

    /** Sets a field. Takes ownership of the value; nullptr stands for None. */
    static bool set(void *error, const char *name, void *value)
    {
        bool done = PyObject_SetAttrString(error, name, value ? value : &_Py_NoneStruct) == 0;
        if (value) Py_DecRef(value);
        return done;
    }
};

} // namespace turboquant
