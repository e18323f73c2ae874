/* Put before every file of the debug build (-include). An exception in a `noexcept` function, an index out of bounds
 * say, would be printed and forgotten, and the function would return as if nothing had happened: here it ends the
 * process. Cython reports such exceptions through PyErr_WriteUnraisable. */
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdio.h>
#include <stdlib.h>

__attribute__((noreturn, unused)) static void mi_unraisable(PyObject *where) {
    (void)where;
    PyErr_Print();
    fputs("an exception in a function that cannot raise\n", stderr);
    fflush(stderr);
    abort();
}
#define PyErr_WriteUnraisable mi_unraisable
