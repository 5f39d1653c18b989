/* What a step does with Python objects apart from arithmetic: seeing that they are those of the last
   step, and handing their memory to a kernel. Identity and addresses only; no tensor is computed. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h> /* headers of C++ would take longer to compile than all of this */

typedef void* (*Reader)(void*);
typedef void (*Kernel)(const int64_t*);

/* Integers that an object owns. */
struct Column {
    int64_t* x;
    Py_ssize_t count;
};

static PyObject *GRAD, *OFFSET, *PARAMS, *FUNC, *PARTIAL, *VERSION;

/* An address below this may be an offset from 0; no storage is so large that one above it is. */
static const int64_t LOWEST = (int64_t)1 << 40;

/* An address below this is an offset from 0: a number's, whose storage was freed. */
static const int64_t FIRST = 1 << 20;

/* The tensors of a step as they were; `guards.TensorGuard` says what its arguments are. */
struct Guard {
    PyObject_HEAD
    PyObject* given;  /* a dict of the arguments, which owns all objects below */
    PyObject *kinds, *checker, *compared, *tensors, *params, *states, *values, *numbers, *quiet;
    PyCFunctionWithKeywords check;
    Column places, reaches, starts, stops;
    Column spans;     /* the bytes of each tensor that holds numbers; 0 if the host cannot read them */
    Column versions;  /* of those that it cannot read */
    char* seen;       /* the bytes of all others, one after another */
    Column last;      /* where the gradients lay when they were last found to be apart */
    Reader read;
};

static int copied(PyObject* array, Column* out)
{
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_SIMPLE) < 0) return -1;
    PyMem_Free(out->x);
    out->x = (int64_t*)PyMem_Malloc(view.len);
    out->count = out->x ? view.len / (Py_ssize_t)sizeof(int64_t) : 0;
    if (out->x) memcpy(out->x, view.buf, view.len);
    PyBuffer_Release(&view);
    return out->x ? 0 : (PyErr_NoMemory(), -1);
}

/* How often torch has counted writes into a tensor; -1 for an inference tensor, which counts none. */
static int64_t version(PyObject* tensor)
{
    PyObject* found = PyObject_GetAttr(tensor, VERSION);
    if (!found) return PyErr_Clear(), -1;
    const int64_t count = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return count;
}

/* Where a tensor's data lie; 0 for one without a storage, for which torch throws. */
static int64_t place(Reader read, PyObject* tensor)
{
    try {
        return (int64_t)read((void*)tensor);
    } catch (...) {
        return 0;
    }
}

/* Note how the numbers are. Collectives, x.data and other processes write to memory without raising a
   version, so memory is compared where it can be read. */
static void look_at_numbers(Guard* self)
{
    char* next = self->seen;
    for (Py_ssize_t i = 0; i < self->spans.count; ++i) {
        PyObject* x = PyTuple_GET_ITEM(self->numbers, i);
        const int64_t size = self->spans.x[i], now = size ? place(self->read, x) : version(x);
        if (!size) self->versions.x[i] = now;
        else if (now >= FIRST) memcpy(next, (void*)now, size);
        next += size;
    }
}

/* Has nobody written to the numbers since then? Nobody knows of those of inference tensors that only
   have a version. */
static int unwritten(Guard* self)
{
    const char* next = self->seen;
    for (Py_ssize_t i = 0; i < self->spans.count; ++i) {
        PyObject* x = PyTuple_GET_ITEM(self->numbers, i);
        const int64_t size = self->spans.x[i], now = size ? place(self->read, x) : version(x);
        if (size ? now < FIRST || memcmp(next, (void*)now, size)
                 : now < 0 || now != self->versions.x[i])
            return 0;
        next += size;
    }
    return 1;
}

static int guard_init(Guard* self, PyObject*, PyObject* named)
{
    static const char* names[] = {"kinds", "check", "compared", "tensors", "places", "reaches",
                                  "starts", "stops", "read", "params", "states", "values",
                                  "numbers", "spans", "quiet", NULL};
    PyObject *none = PyTuple_New(0), *check, *places, *reaches, *starts, *stops, *spans;
    long long read;
    PyObject* given = named ? PyDict_Copy(named) : PyDict_New();
    int done = none && given &&
        PyArg_ParseTupleAndKeywords(
            none, given, "$O!O!O!O!OOOOLO!O!O!O!OO!", (char**)names, &PyTuple_Type, &self->kinds,
            &PyCFunction_Type, &check, &PyTuple_Type, &self->compared, &PyTuple_Type,
            &self->tensors, &places, &reaches, &starts, &stops, &read, &PyTuple_Type,
            &self->params, &PyTuple_Type, &self->states, &PyTuple_Type, &self->values,
            &PyTuple_Type, &self->numbers, &spans, &PyTuple_Type, &self->quiet);
    Py_XDECREF(none);
    Py_XSETREF(self->given, given);
    if (!done || copied(places, &self->places) < 0 || copied(reaches, &self->reaches) < 0 ||
        copied(starts, &self->starts) < 0 || copied(stops, &self->stops) < 0 ||
        copied(reaches, &self->last) < 0 || copied(spans, &self->spans) < 0 ||
        copied(spans, &self->versions) < 0)
        return -1;
    memset(self->last.x, 0, self->last.count * sizeof(int64_t));
    int64_t bytes = 0;
    for (Py_ssize_t i = 0; i < self->spans.count; ++i) bytes += self->spans.x[i];
    PyMem_Free(self->seen);
    self->seen = (char*)PyMem_Malloc(bytes);
    if (!self->seen) return PyErr_NoMemory(), -1;
    self->read = (Reader)read;
    look_at_numbers(self);
    self->checker = PyCFunction_GET_SELF(check); /* one without keywords ignores the third argument */
    self->check = (PyCFunctionWithKeywords)(void*)PyCFunction_GET_FUNCTION(check);
    return 0;
}

static int guard_traverse(Guard* self, visitproc visit, void* arg)
{
    Py_VISIT(self->given);
    return 0;
}

static int guard_clear(Guard* self)
{
    Py_CLEAR(self->given);
    return 0;
}

static void guard_dealloc(Guard* self)
{
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->given);
    PyMem_Free(self->places.x);
    PyMem_Free(self->reaches.x);
    PyMem_Free(self->starts.x);
    PyMem_Free(self->stops.x);
    PyMem_Free(self->last.x);
    PyMem_Free(self->spans.x);
    PyMem_Free(self->versions.x);
    PyMem_Free(self->seen);
    Py_TYPE(self)->tp_free((PyObject*)self);
}

/* How many of ascending integers are below x, or, if `equal`, not above it. */
static Py_ssize_t below(const Column& column, int64_t x, bool equal)
{
    Py_ssize_t first = 0, last = column.count;
    while (first < last) {
        const Py_ssize_t middle = (first + last) / 2;
        if (column.x[middle] < x || (equal && column.x[middle] == x)) first = middle + 1;
        else last = middle;
    }
    return first;
}

/* Has a gradient memory, of its own? 1, 0, or -1 for an exception. */
static int is_apart(Guard* self, PyObject* grad, Py_ssize_t at)
{
    const int64_t reach = self->reaches.x[at];
    if (!reach) return 1; /* its address means nothing */
    const int64_t start = place(self->read, grad);
    if (!start) return 0;
    if (start == self->last.x[at]) return 1;
    if (start < LOWEST) { /* of a storage that was freed, there is the offset left */
        PyObject* found = PyObject_CallMethodNoArgs(grad, OFFSET);
        if (!found) return -1;
        int64_t offset = PyLong_AsLongLong(found);
        Py_DECREF(found);
        if (offset && start <= 16 * offset) return 0;
    }
    if (below(self->starts, start + reach, false) != below(self->stops, start, true)) return 0;
    self->last.x[at] = start;
    return 1;
}

/* Append a gradient, if it is one, to those that were found; 0 if it is not like the k-th was. */
static int append(Guard* self, PyObject* grad, Py_ssize_t k, PyObject* grads)
{
    if ((PyObject*)Py_TYPE(grad) != PyTuple_GET_ITEM(self->kinds, k)) return 0;
    if (grad == Py_None) return 1;
    const int same = is_apart(self, grad, PyList_GET_SIZE(grads));
    return same == 1 && PyList_Append(grads, grad) < 0 ? -1 : same;
}

/* Do gradients, parameters, and slots of more than one dimension look as they did, to torch's own
   guards? These are called as a C function, since they throw at a tensor that has no strides. */
static int look_same(Guard* self, PyObject* grads)
{
    const Py_ssize_t n = PyList_GET_SIZE(grads), more = PyTuple_GET_SIZE(self->compared);
    PyObject* all = PyTuple_New(n + more);
    if (!all) return -1;
    for (Py_ssize_t i = 0; i < n + more; ++i) {
        PyObject* x = i < n ? PyList_GET_ITEM(grads, i) : PyTuple_GET_ITEM(self->compared, i - n);
        PyTuple_SET_ITEM(all, i, Py_NewRef(x));
    }
    PyObject* found;
    try {
        found = self->check(self->checker, all, NULL);
    } catch (...) {
        found = Py_NewRef(Py_False);
    }
    Py_DECREF(all);
    Py_XDECREF(found);
    return found ? found == Py_True : -1;
}

/* The gradients that were found, if `same` and all tensors are where they were; else None. */
static PyObject* answer(Guard* self, int same, PyObject* grads)
{
    if (same == 1) same = look_same(self, grads);
    for (Py_ssize_t i = 0; same == 1 && i < self->places.count; ++i)
        same = place(self->read, PyTuple_GET_ITEM(self->tensors, i)) == self->places.x[i];
    if (same == 1) return grads;
    Py_DECREF(grads);
    return same < 0 ? NULL : Py_NewRef(Py_None);
}

/* Go over what stands where a tree of this outline (see `tree.outline`) has its leaves: gradients are
   appended to `grads`, and without that other objects compared. at: how many were met before. */
static int walk(Guard* self, PyObject* tree, PyObject* outline, PyObject* grads, Py_ssize_t* at)
{
    if (outline == Py_None) {
        const Py_ssize_t i = (*at)++;
        return grads ? append(self, tree, i, grads) : tree == PyTuple_GET_ITEM(self->params, i);
    }
    PyObject *keys = PyTuple_GET_ITEM(outline, 1), *inner = PyTuple_GET_ITEM(outline, 2);
    const Py_ssize_t n = PyTuple_GET_SIZE(inner);
    if ((PyObject*)Py_TYPE(tree) != PyTuple_GET_ITEM(outline, 0)) return 0;
    if (n && (keys == Py_None ? PySequence_Fast_GET_SIZE(tree) : PyDict_GET_SIZE(tree)) != n) return 0;
    int same = 1;
    for (Py_ssize_t i = 0; same == 1 && i < n; ++i) {
        PyObject* x = keys == Py_None
            ? PySequence_Fast_GET_ITEM(tree, i)
            : PyDict_GetItemWithError(tree, PyTuple_GET_ITEM(keys, i));
        if (!x) return PyErr_Occurred() ? -1 : 0;
        same = walk(self, x, PyTuple_GET_ITEM(inner, i), grads, at);
    }
    return same;
}

/* Does nobody see operations? Functions tell, each by None or a count of 0. */
static int unseen(Guard* self)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->quiet); ++i) {
        PyObject* found = PyObject_CallNoArgs(PyTuple_GET_ITEM(self->quiet, i));
        if (!found) return -1;
        const int none = found == Py_None || PyObject_Not(found);
        Py_DECREF(found);
        if (none != 1) return none;
    }
    return 1;
}

/* From an outline, a tree of gradients or None, and more trees, all of that outline: the gradients
   that are there; None if anything is not as it was. */
static PyObject* guard_trees(Guard* self, PyObject* const* given, Py_ssize_t n)
{
    PyObject* grads = PyList_New(0);
    if (!grads) return NULL;
    Py_ssize_t at = 0;
    int same = unseen(self);
    if (same == 1) same = walk(self, given[1], given[0], grads, &at);
    at = 0;
    for (Py_ssize_t k = 2; same == 1 && k < n; ++k) same = walk(self, given[k], given[0], NULL, &at);
    return answer(self, same, grads);
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

/* Note how the numbers are, after a step has written them. */
static PyObject* guard_settle(Guard* self, PyObject*)
{
    look_at_numbers(self);
    Py_RETURN_NONE;
}

/* Have two dicts the very same keys and values, in the same order? */
static int same_entries(PyObject* a, PyObject* b)
{
    PyObject *key, *value, *other_key, *other_value;
    Py_ssize_t at = 0, other_at = 0;
    if (!PyDict_Check(b) || PyDict_GET_SIZE(a) != PyDict_GET_SIZE(b)) return 0;
    while (PyDict_Next(a, &at, &key, &value))
        if (!PyDict_Next(b, &other_at, &other_key, &other_value) || key != other_key ||
            value != other_value)
            return 0;
    return 1;
}

/* From an optimizer's groups and state, and the entries that the groups had: the gradients of all
   parameters that have one, and the indices of groups with other entries; None if anything else is
   not as it was. */
static PyObject* guard_gradients(Guard* self, PyObject* const* given, Py_ssize_t)
{
    PyObject *groups = given[0], *state = given[1], *entries = given[2], *params = self->params;
    if (!PyList_Check(groups) || PyList_GET_SIZE(groups) != PyTuple_GET_SIZE(params))
        Py_RETURN_NONE;
    PyObject* grads = PyList_New(0);
    if (!grads) return NULL;
    Py_ssize_t k = 0;
    int same = unseen(self);
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_GET_SIZE(params); ++i) {
        PyObject* group = PyList_GET_ITEM(groups, i);
        PyObject* known = PyTuple_GET_ITEM(params, i);
        PyObject* list = PyDict_Check(group) ? PyDict_GetItem(group, PARAMS) : NULL;
        same = list && PyList_Check(list) && PyList_GET_SIZE(list) == PyTuple_GET_SIZE(known);
        for (Py_ssize_t j = 0; same == 1 && j < PyTuple_GET_SIZE(known); ++j, ++k) {
            PyObject* p = PyTuple_GET_ITEM(known, j);
            if (p != PyList_GET_ITEM(list, j)) { same = 0; break; }
            PyObject* grad = PyObject_GetAttr(p, GRAD);
            same = grad ? append(self, grad, k, grads) : -1;
            Py_XDECREF(grad);
        }
    }
    if (same == 1) same = same_state(state, self->states, self->values) && unwritten(self);
    grads = answer(self, same, grads);
    if (!grads || grads == Py_None) return grads;
    PyObject *changed = PyList_New(0), *pair = changed ? PyTuple_New(2) : NULL;
    for (Py_ssize_t i = 0; pair && i < PyList_GET_SIZE(groups); ++i)
        if (!same_entries(PyList_GET_ITEM(groups, i), PyList_GET_ITEM(entries, i))) {
            PyObject* at = PyLong_FromSsize_t(i);
            if (!at || PyList_Append(changed, at) < 0) Py_CLEAR(pair);
            Py_XDECREF(at);
        }
    if (!pair) {
        Py_DECREF(grads);
        Py_XDECREF(changed);
        return NULL;
    }
    PyTuple_SET_ITEM(pair, 0, grads);
    PyTuple_SET_ITEM(pair, 1, changed);
    return pair;
}

static PyMethodDef guard_methods[] = {
    {"trees", (PyCFunction)(void*)guard_trees, METH_FASTCALL, NULL},
    {"gradients", (PyCFunction)(void*)guard_gradients, METH_FASTCALL, NULL},
    {"settle", (PyCFunction)guard_settle, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject guard_type = {PyVarObject_HEAD_INIT(NULL, 0)};

/* How many numbers nested tuples hold. */
static Py_ssize_t count_of(PyObject* own)
{
    if (!PyTuple_Check(own)) return 1;
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(own); ++i) count += count_of(PyTuple_GET_ITEM(own, i));
    return count;
}

/* Put the numbers of nested tuples one after another; where the next one goes, NULL for an
   exception. */
static double* unpack(PyObject* own, double* next)
{
    if (!PyTuple_Check(own)) {
        *next = PyFloat_AsDouble(own);
        return *next == -1.0 && PyErr_Occurred() ? NULL : next + 1;
    }
    for (Py_ssize_t i = 0; next && i < PyTuple_GET_SIZE(own); ++i)
        next = unpack(PyTuple_GET_ITEM(own, i), next);
    return next;
}

/* The numbers of all rules, one after another, which the caller frees; NULL for an exception. */
static double* unpacked(PyObject* numbers)
{
    Py_ssize_t count = 0;
    const Py_ssize_t rules = PyList_GET_SIZE(numbers);
    for (Py_ssize_t i = 0; i < rules; ++i) count += count_of(PyList_GET_ITEM(numbers, i));
    double *found = (double*)PyMem_Malloc(8 * count), *next = found;
    if (!found) return (double*)PyErr_NoMemory();
    for (Py_ssize_t i = 0; next && i < rules; ++i) next = unpack(PyList_GET_ITEM(numbers, i), next);
    if (!next) PyMem_Free(found);
    return next ? found : NULL;
}

/* Run a library; the sums that it returns. Of its function and its record of a call, the addresses;
   gradients, a list of tensors that nobody else changes; numbers, a list of tuples; how many sums. */
static PyObject* launch(PyObject*, PyObject* const* given, Py_ssize_t)
{
    Kernel run = (Kernel)PyLong_AsLongLong(given[0]);
    int64_t* call = (int64_t*)PyLong_AsLongLong(given[1]);
    double* numbers = unpacked(given[3]);
    if (!numbers) return NULL;
    call[3] = (int64_t)((PyListObject*)given[2])->ob_item;
    call[5] = (int64_t)numbers;
    const Py_ssize_t outputs = PyLong_AsSsize_t(given[4]);
    double* totals = (double*)call[7];
    memset(totals, 0, 8 * outputs);
    Py_BEGIN_ALLOW_THREADS
    run(call);
    Py_END_ALLOW_THREADS
    PyMem_Free(numbers);
    PyObject* sums = PyTuple_New(outputs);
    for (Py_ssize_t i = 0; sums && i < outputs; ++i)
        PyTuple_SET_ITEM(sums, i, PyFloat_FromDouble(totals[i]));
    return sums;
}

/* Call functions in order, if all are C functions, or partials of some: Python runs no signal handler
   in between. False, and nothing done, if one is not. */
static PyObject* run_all(PyObject*, PyObject* functions)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(functions); ++i) {
        PyObject* one = PyList_GET_ITEM(functions, i);
        if ((PyObject*)Py_TYPE(one) == PARTIAL) {
            PyObject* inner = PyObject_GetAttr(one, FUNC);
            if (!inner) return NULL;
            Py_DECREF(inner); /* the partial keeps it */
            one = inner;
        }
        if (!PyCFunction_Check(one)) Py_RETURN_FALSE;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(functions); ++i) {
        PyObject* result = PyObject_CallNoArgs(PyList_GET_ITEM(functions, i));
        if (!result) return NULL;
        Py_DECREF(result);
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"launch", (PyCFunction)(void*)launch, METH_FASTCALL, NULL},
    {"run_all", run_all, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "functional_optim_watch", NULL, -1, methods};

PyMODINIT_FUNC PyInit_functional_optim_watch(void)
{
    GRAD = PyUnicode_InternFromString("grad");
    OFFSET = PyUnicode_InternFromString("storage_offset");
    PARAMS = PyUnicode_InternFromString("params");
    FUNC = PyUnicode_InternFromString("func");
    VERSION = PyUnicode_InternFromString("_version");
    PyObject* functools = PyImport_ImportModule("functools");
    if (!functools) return NULL;
    PARTIAL = PyObject_GetAttrString(functools, "partial");
    Py_DECREF(functools);
    guard_type.tp_name = "functional_optim_watch.Guard";
    guard_type.tp_basicsize = sizeof(Guard);
    guard_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    guard_type.tp_new = PyType_GenericNew;
    guard_type.tp_init = (initproc)guard_init;
    guard_type.tp_traverse = (traverseproc)guard_traverse;
    guard_type.tp_clear = (inquiry)guard_clear;
    guard_type.tp_dealloc = (destructor)guard_dealloc;
    guard_type.tp_methods = guard_methods;
    PyObject* module = PyModule_Create(&definition);
    if (!PARTIAL || !module || PyModule_AddType(module, &guard_type) < 0) return NULL;
    return module;
}
