// How what an operator throws becomes Python's ValueError or MemoryError.
//
// The stable ABI has no word for it: the dispatcher lets C++ exceptions pass, and torch's binding translates them. Until torch 2.14
// that was pybind11's own translation, by which std::invalid_argument is a ValueError; 2.15 makes a RuntimeError of every standard
// exception. Both let pybind11's builtin_exception set the error itself, so that is what is thrown: its declaration, which has been
// the same since pybind11 2.2, stands here, because pybind11's headers want those of one Python, and the operators want none.
// It is a std::runtime_error to C++.
#pragma once
#include <stdexcept>

namespace pybind11
{
class __attribute__((visibility("default"))) builtin_exception : public std::runtime_error
{
public:
    using std::runtime_error::runtime_error;
    virtual void set_error() const = 0; // called with the interpreter's lock held
};
} // namespace pybind11

// Weak: a process without Python has none of them, and nobody who calls set_error.
extern "C" __attribute__((weak)) void PyErr_SetString(void *type, const char *message);
extern "C" __attribute__((weak)) void *PyExc_ValueError;
extern "C" __attribute__((weak)) void *PyExc_MemoryError;

namespace turboquant
{

/** Anything about an argument. */
class ArgumentError final : public pybind11::builtin_exception
{
public:
    using builtin_exception::builtin_exception;
    void set_error() const override { PyErr_SetString(PyExc_ValueError, what()); }
};

/** No memory. */
class MemoryFailure final : public pybind11::builtin_exception
{
public:
    using builtin_exception::builtin_exception;
    void set_error() const override { PyErr_SetString(PyExc_MemoryError, what()); }
};

} // namespace turboquant
