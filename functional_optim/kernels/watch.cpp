/* What a step does with Python objects apart from arithmetic: seeing that they are those of the last
   step, and handing their memory to a kernel. Identity and addresses only; no tensor is computed. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <vector>

typedef void* (*Reader)(void*);
typedef void (*Sweep)(const int64_t*);

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

/* known: the addresses of a list of tensor objects and of where their data lay, how many there are,
   and the address of torch's function from one to the other. */
static int same_places(PyObject* known)
{
    const int64_t* tensors = (const int64_t*)PyLong_AsLongLong(PyTuple_GET_ITEM(known, 0));
    const int64_t* places = (const int64_t*)PyLong_AsLongLong(PyTuple_GET_ITEM(known, 1));
    const int64_t count = PyLong_AsLongLong(PyTuple_GET_ITEM(known, 2));
    Reader read = (Reader)PyLong_AsLongLong(PyTuple_GET_ITEM(known, 3));
    for (int64_t i = 0; i < count; ++i)
        if ((int64_t)read((void*)tensors[i]) != places[i]) return 0;
    return 1;
}

static PyObject* stays(PyObject*, PyObject* known) { return PyBool_FromLong(same_places(known)); }

/* The gradients among `given`, a list of tensors and None, appended to a list; what `same_look` says.
   kinds: their types; seen: strides, sizes and dtypes of the gradients at 0, 1 and 2. */
static int same_gradient(PyObject* grad, PyObject* kind, PyObject* const* looks, PyObject* grads)
{
    if ((PyObject*)Py_TYPE(grad) != kind) return 0;
    if (grad == Py_None) return 1;
    Py_ssize_t at = PyList_GET_SIZE(grads);
    int same = same_look(grad, PyTuple_GET_ITEM(looks[0], at), PyTuple_GET_ITEM(looks[1], at),
                         PyTuple_GET_ITEM(looks[2], at));
    return same == 1 && PyList_Append(grads, grad) < 0 ? -1 : same;
}

/* wide: strides of tensors; known: as in `same_places`. */
static int same_memory(PyObject* wide, PyObject* strides, PyObject* known)
{
    int same = 1;
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_GET_SIZE(wide); ++i)
        same = same_stride(PyTuple_GET_ITEM(wide, i), PyTuple_GET_ITEM(strides, i));
    return same == 1 ? same_places(known) : same;
}

/* `grads` if all was the same, None if not, NULL for an exception that is no answer. */
static PyObject* answer(int same, PyObject* grads)
{
    if (same == 1) return grads;
    Py_DECREF(grads);
    if (same < 0) {
        /* a sparse gradient has no strides */
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return NULL;
        PyErr_Clear();
    }
    Py_RETURN_NONE;
}

/* From a list of gradients or None, a list of other tensors, and `seen`: the gradients that are
   there; None if anything differs from `seen`, a tuple: types of gradients; strides, sizes and dtypes
   of gradients; the other tensors; further tensors, their strides; what `stays` gets. */
static PyObject* given_gradients(PyObject*, PyObject* const* given, Py_ssize_t)
{
    PyObject *found = given[0], *others = given[1], *const* seen = PySequence_Fast_ITEMS(given[2]);
    if (PyList_GET_SIZE(found) != PyTuple_GET_SIZE(seen[0]) ||
        PyList_GET_SIZE(others) != PyTuple_GET_SIZE(seen[4]))
        Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(others); ++i)
        if (PyList_GET_ITEM(others, i) != PyTuple_GET_ITEM(seen[4], i)) Py_RETURN_NONE;
    PyObject* grads = PyList_New(0);
    if (!grads) return NULL;
    int same = 1;
    for (Py_ssize_t i = 0; same == 1 && i < PyList_GET_SIZE(found); ++i)
        same = same_gradient(PyList_GET_ITEM(found, i), PyTuple_GET_ITEM(seen[0], i), seen + 1, grads);
    if (same == 1) same = same_memory(seen[5], seen[6], seen[7]);
    return answer(same, grads);
}

/* Have two dicts the very same keys and values, in the same order? */
static PyObject* same_entries(PyObject*, PyObject* const* given, Py_ssize_t)
{
    PyObject *key, *value, *other_key, *other_value;
    Py_ssize_t at = 0, other_at = 0;
    if (PyDict_GET_SIZE(given[0]) != PyDict_GET_SIZE(given[1])) Py_RETURN_FALSE;
    while (PyDict_Next(given[0], &at, &key, &value))
        if (!PyDict_Next(given[1], &other_at, &other_key, &other_value) || key != other_key ||
            value != other_value)
            Py_RETURN_FALSE;
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

/* From groups, state and `seen`: the gradients of all parameters that have one; None if anything
   differs from `seen`, a tuple of tuples: types of gradients; strides, sizes and dtypes of gradients;
   parameters of each group; further tensors, their strides; what `stays` gets; values of the state,
   their values. */
static PyObject* gradients(PyObject*, PyObject* const* given, Py_ssize_t)
{
    PyObject *groups = given[0], *state = given[1], *const* seen = PySequence_Fast_ITEMS(given[2]);
    PyObject *kinds = seen[0], *params = seen[4];
    if (!PyList_Check(groups) || PyList_GET_SIZE(groups) != PyTuple_GET_SIZE(params))
        Py_RETURN_NONE;
    PyObject* grads = PyList_New(0);
    if (!grads) return NULL;
    Py_ssize_t k = 0;
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
            same = same_gradient(grad, PyTuple_GET_ITEM(kinds, k), seen + 1, grads);
            Py_DECREF(grad);
        }
    }
    if (same == 1) same = same_state(state, seen[8], seen[9]);
    if (same == 1) same = same_memory(seen[5], seen[6], seen[7]);
    return answer(same, grads);
}

template <typename T>
static int unpack(PyObject* numbers, std::vector<T>& out)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(numbers); ++i) {
        PyObject* own = PyList_GET_ITEM(numbers, i);
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(own); ++j) {
            double x = PyFloat_AsDouble(PyTuple_GET_ITEM(own, j));
            if (x == -1.0 && PyErr_Occurred()) return -1;
            out.push_back((T)x);
        }
    }
    return 0;
}

/* Run a kernel's `sweep`. Of its function and its record of a call, the addresses; gradients, a list
   of tensors that nobody else changes; numbers, a list of tuples; are these read as doubles? */
static PyObject* launch(PyObject*, PyObject* const* given, Py_ssize_t)
{
    Sweep run = (Sweep)PyLong_AsLongLong(given[0]);
    int64_t* call = (int64_t*)PyLong_AsLongLong(given[1]);
    std::vector<double> wide;
    std::vector<float> narrow;
    if (given[4] == Py_True) {
        if (unpack(given[3], wide) < 0) return NULL;
        call[5] = (int64_t)wide.data();
    } else {
        if (unpack(given[3], narrow) < 0) return NULL;
        call[5] = (int64_t)narrow.data();
    }
    call[3] = (int64_t)((PyListObject*)given[2])->ob_item;
    Py_BEGIN_ALLOW_THREADS
    run(call);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"given_gradients", (PyCFunction)(void*)given_gradients, METH_FASTCALL, NULL},
    {"gradients", (PyCFunction)(void*)gradients, METH_FASTCALL, NULL},
    {"same_entries", (PyCFunction)(void*)same_entries, METH_FASTCALL, NULL},
    {"launch", (PyCFunction)(void*)launch, METH_FASTCALL, NULL},
    {"stays", stays, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "functional_optim_watch", NULL, -1, methods};

PyMODINIT_FUNC PyInit_functional_optim_watch(void)
{
    GRAD = PyUnicode_InternFromString("grad");
    STRIDE = PyUnicode_InternFromString("stride");
    NUMEL = PyUnicode_InternFromString("numel");
    DTYPE = PyUnicode_InternFromString("dtype");
    PARAMS = PyUnicode_InternFromString("params");
    return PyModule_Create(&definition);
}
