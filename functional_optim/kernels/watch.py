"""Looking over an optimizer's objects in C: are they the ones of the last step?

The comparison is by identity and costs Python 60 µs for 148 tensors. Nobody has to have the
library: where it cannot be built, the caller compares in Python.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from functional_optim.kernels import store

SOURCE = r"""
#include <Python.h>

static PyObject *GRAD, *STRIDE, *NUMEL, *DTYPE, *PARAMS;

static int same_stride(PyObject* tensor, PyObject* known)
{
    PyObject* found = PyObject_CallMethodNoArgs(tensor, STRIDE);
    if (!found) return -1;
    int same = PyObject_RichCompareBool(found, known, Py_EQ);
    Py_DECREF(found);
    return same;
}

/* 1: dtype, size and strides are those; 0: they are not; -1: an exception. */
static int same_look(PyObject* tensor, PyObject* stride, PyObject* numel, PyObject* dtype)
{
    int same = same_stride(tensor, stride);
    if (same != 1) return same;
    PyObject* found = PyObject_CallMethodNoArgs(tensor, NUMEL);
    if (!found) return -1;
    same = PyObject_RichCompareBool(found, numel, Py_EQ);
    Py_DECREF(found);
    if (same != 1) return same;
    found = PyObject_GetAttr(tensor, DTYPE);
    if (!found) return -1;
    same = found == dtype;
    Py_DECREF(found);
    return same;
}

/* 1 if these tensors, a list, have those strides, sizes and dtypes, 0 if not. */
extern "C" PyObject* functional_optim_alike(
    PyObject* tensors, PyObject* strides, PyObject* sizes, PyObject* dtypes)
{
    if (PyList_GET_SIZE(tensors) != PyTuple_GET_SIZE(strides)) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(strides); ++i) {
        int same = same_look(PyList_GET_ITEM(tensors, i), PyTuple_GET_ITEM(strides, i),
                             PyTuple_GET_ITEM(sizes, i), PyTuple_GET_ITEM(dtypes, i));
        if (same < 0) return NULL;
        if (!same) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static int same_state(PyObject* state, PyObject* states, PyObject* values)
{
    PyObject *key, *value, *entry;
    Py_ssize_t at = 0, i = 0;
    if (PyDict_Size(state) != PyTuple_GET_SIZE(states)) return 0;
    while (PyDict_Next(state, &at, &key, &value)) {
        if (value != PyTuple_GET_ITEM(states, i)) return 0;
        PyObject* known = PyTuple_GET_ITEM(values, i++);
        if (!PyDict_Check(value)) continue;
        if (PyDict_Size(value) != PyTuple_GET_SIZE(known)) return 0;
        Py_ssize_t inner = 0, j = 0;
        while (PyDict_Next(value, &inner, &key, &entry))
            if (entry != PyTuple_GET_ITEM(known, j++)) return 0;
    }
    return 1;
}

/* The gradients of all parameters that have one; None if anything differs from `seen`, a tuple of
   tuples: parameters of each group, types of gradients; strides, sizes and dtypes of gradients;
   values of the state, their values; further tensors, their strides. */
extern "C" PyObject* functional_optim_gradients(PyObject* groups, PyObject* state, PyObject* seen)
{
    PyObject *params = PyTuple_GET_ITEM(seen, 0), *kinds = PyTuple_GET_ITEM(seen, 1);
    PyObject *strides = PyTuple_GET_ITEM(seen, 2), *sizes = PyTuple_GET_ITEM(seen, 3);
    PyObject* dtypes = PyTuple_GET_ITEM(seen, 4);
    PyObject *wide = PyTuple_GET_ITEM(seen, 7), *wide_strides = PyTuple_GET_ITEM(seen, 8);
    if (!PyList_Check(groups) || PyList_GET_SIZE(groups) != PyTuple_GET_SIZE(params))
        Py_RETURN_NONE;
    PyObject* grads = PyList_New(0);
    if (!grads) return NULL;
    Py_ssize_t k = 0, live = 0;
    int same = 1;
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_GET_SIZE(params); ++i) {
        PyObject* group = PyList_GET_ITEM(groups, i);
        PyObject* known = PyTuple_GET_ITEM(params, i);
        PyObject* list = PyDict_Check(group) ? PyDict_GetItem(group, PARAMS) : NULL;
        same = list && PyList_Check(list) && PyList_GET_SIZE(list) == PyTuple_GET_SIZE(known);
        for (Py_ssize_t j = 0; same == 1 && j < PyTuple_GET_SIZE(known); ++j, ++k) {
            PyObject* p = PyTuple_GET_ITEM(known, j);
            if (p != PyList_GET_ITEM(list, j)) { same = 0; break; }
            PyObject* grad = PyObject_GetAttr(p, GRAD);
            if (!grad) { same = -1; break; }
            same = (PyObject*)Py_TYPE(grad) == PyTuple_GET_ITEM(kinds, k);
            if (same == 1 && grad != Py_None) {
                same = same_look(grad, PyTuple_GET_ITEM(strides, live),
                                 PyTuple_GET_ITEM(sizes, live), PyTuple_GET_ITEM(dtypes, live));
                if (same == 1 && PyList_Append(grads, grad) < 0) same = -1;
                ++live;
            }
            Py_DECREF(grad);
        }
    }
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_GET_SIZE(wide); ++i)
        same = same_stride(PyTuple_GET_ITEM(wide, i), PyTuple_GET_ITEM(wide_strides, i));
    if (same == 1) same = same_state(state, PyTuple_GET_ITEM(seen, 5), PyTuple_GET_ITEM(seen, 6));
    if (same == 1) return grads;
    Py_DECREF(grads);
    if (same < 0) {
        /* a sparse gradient has no strides */
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return NULL;
        PyErr_Clear();
    }
    Py_RETURN_NONE;
}

extern "C" void functional_optim_watch(void)
{
    GRAD = PyUnicode_InternFromString("grad");
    STRIDE = PyUnicode_InternFromString("stride");
    NUMEL = PyUnicode_InternFromString("numel");
    DTYPE = PyUnicode_InternFromString("dtype");
    PARAMS = PyUnicode_InternFromString("params");
}
"""

gradients: Any = None
"""`gradients(param_groups, state, seen)`, once the library is there."""

alike: Any = None
"""`alike(tensors, strides, sizes, dtypes)`, once the library is there."""


class Build:
    """A build that runs beside another one."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.folder: str | None = None

    def start(self, compiler: str) -> None:
        """Begin, if there is anything to build."""
        if gradients is not None or load():
            return
        self.folder = tempfile.mkdtemp(prefix="functional_optim-")
        source = Path(self.folder) / "watch.cpp"
        source.write_text(SOURCE)
        include = sysconfig.get_paths()["include"]
        command = [compiler, "-O2", "-shared", "-fPIC", f"-I{include}", str(source)]
        self.process = subprocess.Popen(
            [*command, "-o", str(self.output())],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def output(self) -> Path:
        """Where the library will be."""
        assert self.folder is not None
        return Path(self.folder) / "watch.so"

    def finish(self) -> None:
        """Wait, load the library and keep it; nothing happens if there is none."""
        if self.process is None or self.folder is None:
            return
        try:
            if self.process.wait() == 0:
                store.keep(name(), self.output())
                _take(self.output())
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def name() -> str:
    """The library's name in the folder of kernels."""
    return "watch-" + store.name_of(SOURCE, sys.version)


def load() -> bool:
    """Take the library that an earlier process kept; False if there is none."""
    kept = store.find(name()) if gradients is None else None
    if kept is not None:
        _take(kept)
    return gradients is not None


def _take(path: Path) -> None:
    global alike, gradients
    try:
        library = ctypes.PyDLL(str(path))
        library.functional_optim_watch()
        functions = library.functional_optim_alike, library.functional_optim_gradients
    except (OSError, AttributeError):
        return
    for function, count in zip(functions, (4, 3), strict=True):
        function.restype = ctypes.py_object
        function.argtypes = [ctypes.py_object] * count
    alike, gradients = functions
