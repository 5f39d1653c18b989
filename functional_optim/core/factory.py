"""Objects that record the call that created them, so that they can be copied and pickled.

A transformation consists of closures, which pickle cannot store. It can store the factory's name
and the arguments.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import threading
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from functional_optim.core import calls

P = ParamSpec("P")
T = TypeVar("T")


class Call(NamedTuple):
    """The call that created an object.

    number: increases from call to call. inner: the nested call that created the same object, if
    any.
    """

    factory: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int
    inner: Call | None


_numbers = itertools.count()


class Reconstructible:
    """An object created by a factory. made: the call; None for one that was built directly."""

    made: Call | None = None
    stateful = False
    """Whether calls change it, so that copies must be new objects."""

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Call the factory again, with copied arguments; the object if there is nothing to copy."""
        make, *given = self._call()
        args, kwargs = new = copied(given, memo)
        return make(*args, **kwargs) if self.stateful or _differs(new, given) else self

    def __reduce__(self) -> tuple[Any, ...]:
        make, args, kwargs = self._call()
        name = getattr(make, "__qualname__", repr(make))
        check_named(f"{name}(…)", make)
        for where, x in [*enumerate(args), *kwargs.items()]:
            check_named(f"{name}(…), whose argument {where!r}", x)
        return again, (make, args, kwargs)

    def _call(self) -> tuple[Any, Any, Any]:
        if self.made is None:
            return type(self), cast(Any, self).__getnewargs__(), {}
        return self.made.factory, self.made.args, self.made.kwargs


class ReconstructibleFunction(Reconstructible):
    """A function created by a factory, such as a schedule.

    Its `__dict__` is empty, like a function's: torch's LambdaLR puts that of a callable object into
    its state_dict.
    """

    __slots__ = ("__wrapped__", "made")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__wrapped__ = function
        self.made = None

    def __getattr__(self, name: str) -> Any:
        """Those of the function: what `functools.update_wrapper` copies."""
        if name.startswith("__") and name not in functools.WRAPPER_ASSIGNMENTS:
            raise AttributeError(f"{self!r} has no attribute {name!r}.")
        return getattr(self.__wrapped__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.__wrapped__) if self.made is None else text_of(self.made)


def factory(make: Callable[P, T]) -> Callable[P, T]:
    """Make results of a function copyable and picklable, by the function's name and its arguments.

    All factories of this package have this decorator. Decorate your recipe if it calls
    `leafwise`, or builds a `GradientTransformation`, with functions that are defined inside it.

    Args:
        make: a function that returns a transformation, a function such as a schedule, or anything
            else. Only the first two are recorded. To be pickled by name it must be defined at the
            top level of a module.

    Returns:
        A function with the same signature. `copy.deepcopy` and `pickle` of its result call it
        again, with copied or unpickled arguments. Nested calls of other factories are not recorded.

    Example::

        >>> import copy, torch, functional_optim as fo
        >>> @fo.factory
        ... def half(lr):
        ...     def update(u, slots, p, a):
        ...         return -0.5 * a * u, slots
        ...     return fo.leafwise(None, update, lambda t: (lr,), name="half")
        >>> lr = torch.tensor(0.5)
        >>> own_lr, tx = copy.deepcopy((lr, half(lr)))
        >>> own_lr.fill_(2.0)
        tensor(2.)
        >>> tx.update(torch.ones(1), tx.init(torch.ones(1)), torch.ones(1))[0]
        tensor([-1.])
    """
    is_compiling, begun, local = torch.compiler.is_compiling, _numbers.__next__, _local
    remember, read, are_constants = _remember, _read, CONSTANTS.issuperset
    checks, annotations = calls, getattr(make, "__annotations__", {})
    code = getattr(make, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]

    def recording(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or getattr(local, "forgetting", False):
            return make(*args, **kwargs)
        number = begun()
        plain = are_constants(map(type, args)) and are_constants(map(type, kwargs.values()))
        if not plain:
            args = tuple([read(x) for x in args])
            kwargs = {name: read(x) for name, x in kwargs.items()}
            checks.check_first(make, args)
        try:
            made = make(*args, **kwargs)
        except TypeError as error:
            raise checks.explained(error, make, names, args, kwargs) from error.__cause__
        checks.check_numbers(make, names, args, kwargs)
        checks.check_flags(annotations, kwargs)  # a factory may have a more specific error
        return remember(made, recorder, args, kwargs, number, plain)

    # with the globals of its module, where doctest looks for it
    own = getattr(make, "__globals__", recording.__globals__)
    recorder: Any = FunctionType(recording.__code__, own, closure=recording.__closure__)
    functools.update_wrapper(recorder, make)
    if str(getattr(make, "__annotations__", {}).get("return", "")) in TRANSFORMATIONS:
        recorder.init = recorder.update = calls.not_called(make)
    return recorder


def forgetting_calls(on: bool, fn: Callable[..., T], *args: Any) -> T:
    """Call a function; if `on`, factories do not record calls meanwhile.

    For a transformation that is neither copied nor pickled: recording takes longer than building.
    Not a context manager: an interrupt could leave its `__exit__` before the first line.
    """
    before = getattr(_local, "forgetting", False)
    try:
        _local.forgetting = on or before
        return fn(*args)
    finally:
        _local.forgetting = before


_local = threading.local()

CONSTANTS = frozenset((float, int, bool, str, type(None), FunctionType))
"""Types of arguments that are recorded without a copy."""

TRANSFORMATIONS = frozenset(
    ("GradientTransformation", "base.GradientTransformation", "Leafwise", "CommitIf")
)
"""Return annotations of factories whose results have `init` and `update`."""

CONTAINERS = frozenset((tuple, list, dict))


def _remember(
    made: Any,
    make: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    number: int,
    plain: bool,
) -> Any:
    """The result of a factory, with its call, unless it existed before the call.

    plain: whether all arguments are constants or functions.
    """
    if type(made) is FunctionType and not _holds((args, kwargs), made):
        made = ReconstructibleFunction(made)
    if isinstance(made, Reconstructible):
        inner = made.made
        if inner is not None:
            known = inner.number < number
        else:
            known = not plain and _holds((args, kwargs), made)
        if not known:
            if not plain:
                args, kwargs = _kept(args), _kept(kwargs)
            made.made = Call(make, args, kwargs, number, inner)
    return made


def _read(x: Any) -> Any:
    """An argument that can be read more than once."""
    return tuple(x) if hasattr(type(x), "__next__") else x


def _kept(x: Any) -> Any:
    """A copy of an argument, since the caller may modify a list or dict later."""
    kind = type(x)
    if kind is dict:
        return {key: _kept(y) if type(y) in CONTAINERS else y for key, y in x.items()}
    return kind([_kept(y) if type(y) in CONTAINERS else y for y in x])


def _holds(container: Any, wanted: Any) -> bool:
    for x in container.values() if isinstance(container, dict) else container:
        if x is wanted:
            return True
        nested = isinstance(x, (tuple, list, dict)) and not isinstance(x, Reconstructible)
        if nested and _holds(x, wanted):
            return True
    return False


def again(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Unpickle the result of a factory."""
    return make(*args, **kwargs)


def text_of(call: Call) -> str:
    """The source text of a call."""
    given = [*map(repr, call.args), *[f"{name}={x!r}" for name, x in call.kwargs.items()]]
    return f"{getattr(call.factory, '__name__', '?')}({', '.join(given)})"


def check_named(what: str, x: Any) -> None:
    """Raise PicklingError for a function, or a container of one, that cannot be found by name."""
    if isinstance(x, Reconstructible):
        return
    if isinstance(x, (tuple, list, dict)):
        for y in x.values() if isinstance(x, dict) else x:
            check_named(what, y)
    elif isinstance(x, functools.partial):
        check_named(what, (x.func, x.args, x.keywords))
    elif isinstance(x, FunctionType):
        try:
            pickle.dumps(x)
        except Exception as error:
            holds = "holds" if "argument" in what else "was made by"
            raise pickle.PicklingError(
                f"{what} {holds} the function {x.__qualname__}, cannot be pickled ({error}); "
                "define this function at the top level of a module, or decorate the recipe that "
                "makes it with functional_optim.factory, at the top level of a module, too."
            ) from None


def copied(x: Any, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy` that also copies tensors in closures.

    They are hyperparameters: the copy of a module that has such a tensor, and a transformation made
    with it, must have a transformation made with the copied tensor.
    """
    if type(x) is FunctionType:
        return _copied_function(x, memo)
    if type(x) is tuple or type(x) is list:
        return type(x)([copied(y, memo) for y in x])
    if type(x) is dict:
        return {key: copied(y, memo) for key, y in x.items()}
    return copy.deepcopy(x, memo)


def _copied_function(f: FunctionType, memo: dict[int, Any]) -> FunctionType:
    if f.__closure__ is None or id(f) in memo:
        return memo.get(id(f), f)
    cells = tuple([CellType() for _ in f.__closure__])
    made = FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, cells)
    made.__kwdefaults__, made.__qualname__ = f.__kwdefaults__, f.__qualname__
    made.__dict__.update(f.__dict__)
    memo[id(f)] = made
    changed = False
    for cell, old in zip(cells, f.__closure__, strict=True):
        try:
            value = old.cell_contents
        except ValueError:  # never set
            continue
        kept = isinstance(value, (Tensor, Reconstructible, FunctionType, tuple))
        cell.cell_contents = copied(value, memo) if kept else value
        changed |= _differs(cell.cell_contents, value)
    if not changed:
        memo[id(f)] = f
    return memo[id(f)]


def _differs(a: Any, b: Any) -> bool:
    if type(a) in (tuple, list):
        return any(map(_differs, a, b))
    if type(a) is dict:
        return any(map(_differs, a.values(), b.values()))
    return a is not b
