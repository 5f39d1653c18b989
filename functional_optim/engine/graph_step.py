"""One step as one graph of torch.compile: `update` and `apply_updates`, through its public API.

It runs transformations that do not consist of one-tensor rules, and all of them with
`backend="torch"`, or on devices without our kernels. A graph is valid for one structure of trees,
for shapes and dtypes, and for all scalars: floats among the arguments of the transformation's
factories become inputs of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from functional_optim import kernels, tree
from functional_optim.core import base, memory, modes, sharding
from functional_optim.core.factory import Call, Reconstructible
from functional_optim.engine.graphs import Variant, can_be_written, stepped
from functional_optim.kernels.interrupts import held
from functional_optim.kernels.keys import Keep


class TracePlan(NamedTuple):
    """The construction of a transformation from its floats.

    key: the transformation without the floats. build: from floats to the transformation. numbers:
    the floats. shared: whether other transformations of the same key may use the same graph.
    """

    key: Any
    build: Callable[[list[Any]], Any]
    numbers: list[float]
    shared: bool


def plans_of(tx: base.GradientTransformation) -> list[TracePlan]:
    """Ways to trace a transformation, best first: the last one takes all numbers as constants."""
    found = []
    call = tx.made
    while call is not None:
        plan = _plan(call, lift=True)
        if plan.numbers:
            found.append(plan)
        call = call.inner
    constant = TracePlan(("object", Keep(tx)), lambda numbers: tx, [], False)
    if tx.made is not None:
        constant = _plan(tx.made, lift=False)._replace(build=constant.build)
    return [*(found or [constant]), constant]  # extra arguments may be numbers


def _plan(call: Call, *, lift: bool) -> TracePlan:
    numbers: list[float] = []
    known: list[bool] = []

    def of(x: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
        call = _call_of(x)
        if call is not None:
            return of_call(call)
        kind: Any = type(x)
        if kind is tuple or kind is list:
            keys, builds = _columns([of(y) for y in x])
            return (kind, keys), lambda given: kind([build(given) for build in builds])
        if type(x) is dict:
            names = tuple(x)
            keys, builds = _columns([of(y) for y in x.values()])
            pairs = tuple(zip(names, builds, strict=True))
            key = (dict, tuple([_name(name) for name in names]), keys)
            return key, lambda given: {name: build(given) for name, build in pairs}
        if lift and type(x) is float and _may_change(x):
            i = len(numbers)
            numbers.append(x)
            return float, lambda given: given[i]
        known.append(_is_constant(x))
        return _name(x), lambda given: x

    def of_call(call: Call) -> tuple[Any, Callable[[list[Any]], Any]]:
        make = call.factory
        known.append(_is_constant(make))
        keys, build_args = of(call.args)
        named, build_kwargs = of(call.kwargs)
        key = (_name(make), keys, named)
        return key, lambda given: make(*build_args(given), **build_kwargs(given))

    key, build = of_call(call)
    return TracePlan((lift, key), build, numbers, all(known))


def _call_of(x: Any) -> Call | None:
    return x.made if isinstance(x, Reconstructible) else None


def _columns(pairs: list[tuple[Any, Any]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple([key for key, _ in pairs]), tuple([build for _, build in pairs])


def _may_change(x: float) -> bool:
    """Whether a float is an input: 0 and 1 may disable a rule or a branch."""
    return math.isfinite(x) and x not in (0.0, 1.0, -1.0)


CONSTANTS = (bool, int, str, bytes, type(None), torch.dtype, torch.device)


def _is_constant(x: Any) -> bool:
    """Whether the name identifies an object, as for functions at the top level."""
    if isinstance(x, FunctionType):
        return "<" not in x.__qualname__
    return isinstance(x, (float, type, *CONSTANTS))


def _name(x: Any) -> Any:
    """A hashable key of a constant."""
    if isinstance(x, float):
        return (type(x), repr(x))  # 0.0 and -0.0 are equal
    return (type(x), x) if isinstance(x, CONSTANTS) else Keep(x)


_shared: dict[Any, Variant] = {}
"""The graphs that all steps of one key use, the newest last."""

MOST = 256
"""Graphs that are kept for steps that may not exist yet."""


class Seen(NamedTuple):
    """The donated tensors of a step, where they are, and what follows: the kind of the trees, the
    first places of each tensor, and whether a graph can write into all of them."""

    kept: Sequence[Any] = ()
    places: Sequence[int] = ()
    look: Any = None
    firsts: Any = None
    writable: bool = False


class WholeStep:
    """A step that is compiled as a whole; the pure update, with a warning, if that fails.

    check: called with new tensors (gradients, state, parameters), to raise an error if they cannot
    be stepped in place.
    """

    def __init__(
        self,
        tx: base.GradientTransformation,
        donate: bool,
        strict: bool,
        check: Callable[[Any, Any, Any], None],
    ) -> None:
        self.tx = tx
        self.donate = donate
        self.strict = strict
        self.check = check
        self.plans = plans_of(tx)
        self.own: dict[Any, Variant] = {}
        self.tensors: dict[torch.device, list[list[Tensor]]] = {}
        self.seen = Seen()

    def __call__(
        self, grads: Any, state: Any, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Step; `extra` are the extra arguments of update."""
        leaves, look, seen = self._look(grads, state, params)
        donated = (params, state, seen.firsts) if self.donate else None
        if any(isinstance(x, Tensor) and x.layout is not torch.strided for x in leaves):
            return self._by_update(grads, state, params, extra, donated)
        if any(map(sharding.is_sharded, leaves)):
            if self.strict:
                raise kernels.refusal(SHARED)
            kernels.warn_once(f"{SHARED}; the steps of this transformation run eagerly")
            return self._by_update(grads, state, params, extra, donated)
        device = base.default_device([x for x in tree.leaves(params) if isinstance(x, Tensor)])
        failure: Exception | None = None
        for i, plan in enumerate(self.plans):
            lifted = i + 1 < len(self.plans)
            given = {k: _number(x, device) for k, x in extra.items()} if lifted else extra
            kinds = tuple([(k, _kind(x)) for k, x in sorted(given.items())])
            variant = self._variant(plan, (look, kinds), params, lifted)
            if not variant.fits or (variant.broken and not self.strict):
                continue
            try:
                if not variant.ran:
                    kernels.require_compiler(device)
                args = self._numbers(device)[i], grads, state, params, given
                if seen.writable and variant.inside is None:
                    variant.inside = variant.try_writing(self.tx, *args)
                if seen.writable and variant.inside:
                    held(variant.write, args[0], _readable(grads, seen.kept), *args[2:])
                    return params, state
                moved, new = variant(*args)
                return _settled(donated, moved, new)
            except Exception as error:
                if variant.ran and not kernels.is_compile_error(error):
                    raise
                failure, variant.broken = error, True
        if failure is None:
            return self._by_update(grads, state, params, extra, donated)
        # wrong arguments raise an error here
        found = stepped(self.tx, grads, state, params, extra)
        if self.strict:
            raise kernels.refusal(kernels.cause("torch.compile failed", failure)) from failure
        kernels.warn_failed(
            "torch.compile failed",
            failure,
            "; the steps of this transformation run eagerly",
        )
        return _settled(donated, *found)

    def _by_update(
        self, grads: Any, state: Any, params: Any, extra: dict[str, Any], donated: Any
    ) -> tuple[Any, Any]:
        return _settled(donated, *stepped(self.tx, grads, state, params, extra))

    def _look(self, grads: Any, state: Any, params: Any) -> tuple[list[Any], Any, Seen]:
        """All tensors, what a graph depends on besides the transformation, and what is known of the
        trees.

        Of a donated tree the tensors are those of the last step, so what they are like is known.
        """
        both: Any = (state, params)
        kept, structure = optree.tree_flatten(both)
        given, outline = optree.tree_flatten(grads)
        places = [x.data_ptr() for x in kept if memory.has_address(x)] if self.donate else []
        seen = self.seen  # which a step in another thread may replace
        same = len(kept) == len(seen.kept) and all(map(is_, kept, seen.kept))
        if not same or places != seen.places or (structure, outline) != seen.look[:2]:
            if self.donate:
                self.check(grads, state, params)
            firsts = first_places(params, state)
            look = (structure, outline, tuple(map(_kind, kept)), tuple(tree.leaves(firsts)))
            own = self.donate and all(tree.leaves(firsts))
            writable = own and all(map(can_be_written, kept))
            seen = Seen(kept if self.donate else [], places, look, firsts, writable)
            self.seen = seen
        look = (seen.look, tuple(map(_kind, given)), torch.get_default_dtype())
        return [*kept, *given], look, seen

    def _variant(self, plan: TracePlan, look: Any, params: Any, lifted: bool) -> Variant:
        key = (plan.key, lifted, look)
        found = self.own.get(key)
        if found is None:
            found = _shared.get(key) if plan.shared else None
            if found is None:
                fits = not (lifted and plan.numbers) or _same_state(self.tx, plan, params)
                found = Variant(plan.build, fits)
            self.own[key] = found
            if plan.shared:
                _shared[key] = found
                for old in [*_shared][:-MOST]:
                    _shared.pop(old, None)
        return found

    def _numbers(self, device: torch.device) -> list[list[Tensor]]:
        """The floats of each plan as inputs of a graph."""
        found = self.tensors.get(device)
        if found is None:
            found = self.tensors[device] = [
                [torch.full((), x, dtype=torch.float64, device=device) for x in plan.numbers]
                for plan in self.plans
            ]
        return found


def _settled(donated: tuple[Any, Any, Any] | None, moved: Any, new: Any) -> tuple[Any, Any]:
    """The results of a step. donated: parameters and state into which they are written, and the
    first places of their tensors."""
    if donated is None:
        return moved, new
    params, state, firsts = donated
    return held(written, params, state, moved, new, firsts)


def _readable(grads: Any, kept: Sequence[Any]) -> Any:
    """Gradients, copied if they overlap memory that is written, that of the tensors kept."""
    places = {x.untyped_storage().data_ptr() for x in kept}
    return tree.map(lambda g: g.clone() if g.untyped_storage().data_ptr() in places else g, grads)


def _number(x: Any, device: torch.device) -> Any:
    """A float among the extra arguments, as an input of a graph."""
    return torch.full((), x, dtype=torch.float64, device=device) if type(x) is float else x


def _kind(x: Any) -> Any:
    """The part of an argument that a graph depends on; the compiler's guards check the rest."""
    if isinstance(x, Tensor):
        return (type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
    if isinstance(x, FunctionType):
        return Keep(x.__code__)
    return _name(x) if isinstance(x, (float, *CONSTANTS)) else type(x)


def _same_state(tx: base.GradientTransformation, plan: TracePlan, params: Any) -> bool:
    """Whether a transformation built with tensors instead of floats is the same."""
    try:
        like = tree.map(lambda p: torch.empty_like(p, device="meta"), params)
        given = [torch.full((), x, dtype=torch.float64, device="cpu") for x in plan.numbers]
        a, b = tx.init(like), plan.build(given).init(like)
        return optree.tree_structure(a) == optree.tree_structure(b)
    except Exception:  # factories may be user code
        return False


def first_places(params: Any, state: Any) -> Any:
    """For each leaf of (params, state), whether it is the first with its memory.

    A state may have a parameter, or one tensor twice; only one of these can be written in place.
    """
    known: set[Any] = set()
    traced = modes.traced()
    before: list[Any] = []

    def first(x: Any) -> bool:
        if traced:  # without memory
            found = any(x is y for y in before)
            before.append(x)
            return not found
        if not isinstance(x, Tensor) or not x.numel():
            return True
        where = (x.device, x.data_ptr() or id(x))
        found = where in known
        known.add(where)
        return not found

    return tree.map(first, (params, state))


SHARED = (
    "torch.compile is not used for DTensors, since its graphs on disk are found by the shape of "
    "the whole, so that a process may get the graph of another one"
)
"""As of torch 2.13, that graph may cut another part out of a tensor, or is for a larger part, and
reads and writes memory outside of the tensor."""


def written(params: Any, state: Any, moved: Any, new: Any, firsts: Any) -> tuple[Any, Any]:
    """New parameters and state in the tensors of the old ones.

    Leaves that are not the first with their memory, or have another shape or dtype, are new
    tensors.
    """

    traced = modes.traced()  # tensors without addresses
    olds = [x for x in tree.leaves((params, state)) if isinstance(x, Tensor)]
    memory = set() if traced else set(map(_address, olds))

    def fits(old: Any, now: Any) -> bool:
        if not isinstance(old, Tensor) or (now.shape, now.dtype) != (old.shape, old.dtype):
            return False
        return traced or 0 not in old.stride() or old.numel() < 2  # not expanded

    def apart(old: Any, now: Any, first: bool) -> Any:
        if not isinstance(now, Tensor) or (now is old and first):
            return now
        read = traced or _address(now) in memory
        return now.clone() if read or not (first and fits(old, now)) else now

    def write(old: Any, now: Any, first: bool) -> Any:
        if now is old or not isinstance(now, Tensor) or not (first and fits(old, now)):
            return now
        return old.copy_(now)

    # first all values, then all writes: a result may be an old tensor, or a view of one
    results = tree.map(apart, (params, state), (moved, new), firsts)
    return tree.map(write, (params, state), results, firsts)


def _address(x: Tensor) -> int:
    """The address of a tensor; for a DTensor that of the local shard."""
    return sharding.shard(x).untyped_storage().data_ptr()
