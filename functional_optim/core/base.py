"""The protocol: a gradient transformation is a pair of pure functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.core import memory, modes, sharding
from functional_optim.core.factory import Reconstructible
from functional_optim.kernels.private import set_grad_enabled

if TYPE_CHECKING:
    from functional_optim.core.rule import Placement

Tree: TypeAlias = Any
"""Any optree pytree of tensors: a dict of parameters, a list, a tensor, or nested containers."""

Record = TypeVar("Record")


class Functions(NamedTuple):
    """The fields of `GradientTransformation`."""

    init: Callable[[Tree], Tree]
    update: Callable[..., tuple[Tree, Tree]]


class Plain:
    """The result of `_replace`: not a subclass, which has the rules or parts of other functions."""

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Any:
        return GradientTransformation(*iterable)


class _OfObjects:
    """An attribute that optimizer objects have and transformations do not."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, tx: Any, owner: Any = None) -> Any:
        if tx is None:
            return self
        raise AttributeError(
            f"a transformation has no {self.name}, since it keeps no parameters: call "
            "update(grads, state, params) and apply_updates(params, updates), or make an optimizer "
            "object, e.g. functional_optim.adapters.AdamW(params).",
            name=self.name,
            obj=tx,
        )


class GradientTransformation(Reconstructible, Plain, Functions):
    """A pair of pure functions, `init` and `update`, that turns gradients into updates.

    ::

        state = tx.init(params)
        updates, state = tx.update(grads, state, params, **extra)
        params = apply_updates(params, updates)

    Neither function modifies its arguments. `params`, `grads` and `updates` are pytrees of one
    structure; `state` is a pytree of tensors. Extra arguments that `update` takes are its
    keyword-only parameters; `chain` routes each to the parts that declare it.

    `copy`, `copy.deepcopy` and `pickle` support the results of factories such as `adamw`, by the
    factory and its arguments (see `factory`). A transformation built from two functions is pickled
    by their names. `_replace` returns a plain pair of functions, which does not fuse.

    Example::

        >>> import torch, functional_optim as fo
        >>> def init(params):
        ...     return fo.EmptyState()
        >>> def update(grads, state, params=None):
        ...     return fo.tree.map(torch.sign, grads), state
        >>> sign = fo.GradientTransformation(init, update)
        >>> sign.update({"w": torch.tensor([-2.0, 3.0])}, sign.init(None))[0]
        {'w': tensor([-1.,  1.])}
    """

    step, zero_grad, param_groups, add_param_group = (_OfObjects() for _ in range(4))
    state_dict, load_state_dict = _OfObjects(), _OfObjects()

    # torch 2.12 cannot trace the fields of a NamedTuple whose subclass has its own `__new__`.
    @property
    def init(self) -> Callable[[Tree], Tree]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """From parameters to the first state."""
        return self[0]

    @property
    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
    ) -> Callable[..., tuple[Tree, Tree]]:
        """From gradients, a state and parameters to updates and the next state."""
        return self[1]

    # Pytrees copy a NamedTuple by `type(tx)(init, update)`. One whose class has no such method is a
    # leaf: torch.export copies all that a module holds.
    @property
    def _asdict(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super()._asdict

    @property
    def children(self) -> tuple[GradientTransformation, ...]:
        """The transformations that this one consists of."""
        return ()

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The one-tensor rules inside, as far as they are known, in order of execution."""
        return tuple([x for child in self.children for x in child.placements])

    @property
    def extra(self) -> tuple[str, ...]:
        """The extra arguments that `update` takes."""
        return self._gathered(required=False)

    @property
    def required(self) -> tuple[str, ...]:
        """The extra arguments without which `update` raises."""
        return self._gathered(required=True)

    def _gathered(self, *, required: bool) -> tuple[str, ...]:
        inner = [name for child in self.children for name in child._gathered(required=required)]
        return (*self._own_extra(required=required), *inner)

    def _own_extra(self, *, required: bool) -> tuple[str, ...]:
        """The extra arguments of this transformation, without those of its children."""
        return extra_names(self.update, required=required)

    @property
    def reads_gradients(self) -> bool:
        """Whether `update` does nothing if all gradients are None."""
        return all(child.reads_gradients for child in self.children)

    @property
    def communicates(self) -> bool:
        """Whether it sums over processes, so that each must step even without gradients."""
        return any(child.communicates for child in self.children)


class EmptyState(NamedTuple):
    """The state of a transformation without state.

    Example::

        >>> import torch, functional_optim as fo
        >>> def update(grads, state, params=None):
        ...     return fo.tree.map(torch.neg, grads), state
        >>> uphill = fo.GradientTransformation(lambda params: fo.EmptyState(), update)
        >>> w = {"w": torch.ones(2)}
        >>> fo.chain(uphill, fo.sgd(0.1)).init(w)[0]
        EmptyState()
    """


def replaced(record: Record, **fields: Any) -> Record:
    """A NamedTuple with some fields replaced, for states that an update returns.

    torch 2.11's compiler returns an empty tuple for the result of `_replace`.
    """
    known: Any = record
    return type(known)(**{**known._asdict(), **fields})


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Return `params + updates`, each sum rounded once to its parameter's dtype.

    Args:
        params: pytree of tensors.
        updates: pytree of the same structure, from a transformation's `update`. Its tensors may
            have a wider dtype than the parameters'; `None` leaves a parameter unchanged.

    Returns:
        A pytree like `params`. No argument is modified.

    Raises:
        ValueError: if the two structures differ.
        TypeError: for a transformation as one of them, and for an update that the dtype of its
            parameter would truncate: a complex one of a real parameter, or one of an integer.

    Example::

        >>> import torch, functional_optim as fo
        >>> fo.apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([0.5, -1.0])})
        {'w': tensor([1.5000, 0.0000])}
    """
    _check_tree(params)
    _check_tree(updates)
    tree.check_same(params, updates, "params", "updates", "pass the updates computed for these")
    return tree.map(_updated, params, updates)


def _updated(p: Tensor, u: Tensor | None) -> Tensor:
    if u is None:
        return p
    if isinstance(u, Tensor) and _rank(u) > _rank(p):
        raise TypeError(
            f"a parameter of dtype {p.dtype} cannot take an update of dtype {u.dtype}, which would "
            "be truncated; pass the updates computed for these parameters."
        )
    if u.shape != p.shape:  # in a trace, which does not compare trees before
        raise ValueError(
            f"an update of shape {tuple(u.shape)} is not that of a parameter of shape "
            f"{tuple(p.shape)}; pass the updates computed for these parameters."
        )
    return add(p, u)


def _rank(x: Tensor) -> int:
    """2 for complex numbers, 1 for floating-point ones, 0 for integers and bools."""
    return 2 if x.is_complex() else int(x.is_floating_point())


def add(p: Tensor, u: Tensor) -> Tensor:
    """`p + u` in the wider of the two dtypes, rounded once to p's.

    Real and imaginary parts separately: torch multiplies u by 1 + 0j, which turns -0.0 into 0.0.
    Not those of a sparse u: of one with a single row, torch adds what lies next to its numbers.
    """
    if p.is_complex() and u.is_complex() and u.layout is torch.strided:
        if sharding.is_sharded(p):  # torch 2.11 has no complex() for DTensors
            own = add(sharding.part(p), sharding.part(sharding.placed_like(u, p)))
            return sharding.from_part(own, p)
        return torch.complex(p.real + u.real, p.imag + u.imag).to(p.dtype)
    x = p + u
    return x if x.dtype is p.dtype else x.to(p.dtype)


def check_transformation(name: str, tx: Any, example: str) -> None:
    """Raise TypeError unless tx is a transformation. name: the caller."""
    if not isinstance(tx, GradientTransformation):
        advice = f"call the factory, e.g. {example}"
        if isinstance(tx, torch.optim.Optimizer):
            advice = f"pass e.g. {example}, in the recipe of adapters.Optimizer(params, recipe)"
        if type(tx) in (list, tuple):
            advice = "join several by chain(*transformations)"
        raise TypeError(f"{name} takes a transformation, but got a {type(tx).__name__}; {advice}.")


def check_returned(who: str, found: Any, what: str, kind: type = GradientTransformation) -> None:
    """Raise TypeError unless a function has returned an object of some kind, which `what` names."""
    if not isinstance(found, kind):
        raise TypeError(f"{who} returned a {type(found).__name__}; it must return {what}.")


def check_passed(params: Tree) -> None:
    """Raise ValueError if `update` was called without the parameters."""
    if params is None:
        raise ValueError("update needs the parameters: call update(grads, state, params).")
    _check_tree(params)


def _check_tree(params: Tree) -> None:
    """Raise TypeError for a transformation, which is a NamedTuple, as a tree."""
    if isinstance(params, GradientTransformation):
        raise TypeError(
            f"expected a tree of parameters, but got a {type(params).__name__}; pass a pytree "
            "of tensors such as dict(model.named_parameters())."
        )


def check_params(params: Tree) -> None:
    """Raise TypeError unless every leaf is a floating-point or complex tensor."""
    _check_tree(params)
    for path, p in tree.items(params):
        if not isinstance(p, Tensor):
            named = f"parameter {path!r} is" if path else "the parameters are"
            raise TypeError(
                f"{named} a {type(p).__name__}, not a tensor; pass a pytree of tensors such as "
                "dict(model.named_parameters()), or torch.from_numpy(x) for an array."
            )
        if not (p.is_floating_point() or p.is_complex()):
            raise TypeError(
                f"parameter {path!r} has dtype {p.dtype}; only floating-point and complex tensors "
                "can be optimized. Leave it out of the tree that you pass to init."
            )


def real_only(name: str) -> Callable[[Tensor], EmptyState]:
    """`init` of a rule without slots that refuses complex parameters."""

    def init(p: Tensor) -> EmptyState:
        if p.is_complex():
            raise TypeError(
                f"{name} takes real parameters, but got one of dtype {p.dtype}; leave it out with "
                "masked or partition."
            )
        return EmptyState()

    return init


def check_grads(params: Tree, grads: Tree) -> None:
    """Raise an error unless each parameter has one matching gradient, or None."""
    check_structure(params, grads, shapes=True)
    for (path, p), (_, g) in zip(tree.items(params), tree.rows(params, grads), strict=True):
        if g is not None:
            check_gradient(path, g, p)


def check_structure(params: Tree, grads: Tree, *, shapes: bool = False) -> None:
    """Raise ValueError unless each parameter has one gradient, or None. shapes: of its shape."""
    advice = "pass one gradient (or None) per parameter"
    tree.check_same(params, grads, "params", "grads", advice, shapes=shapes)


def check_gradient(path: str, g: Any, p: Tensor) -> None:
    """Raise TypeError or ValueError unless a gradient matches its parameter."""
    if not isinstance(p, Tensor):
        check_params({path: p})
    if not isinstance(g, Tensor):
        raise TypeError(
            f"the gradient of {path!r} is a {type(g).__name__}, not a tensor; pass tensors, e.g. "
            "torch.from_numpy(x) of a numpy array, and None where there is no gradient."
        )
    if g.is_complex() != p.is_complex():
        raise TypeError(
            f"the gradient of {path!r} has dtype {g.dtype} and the parameter {p.dtype}; pass a "
            "complex gradient for a complex parameter, and a real one for a real one."
        )
    _check_layout(g, f"the gradient of parameter {path!r}", (torch.strided, torch.sparse_coo))
    _check_layout(p, f"parameter {path!r}")
    _check_beside(path, g, "the gradient", p)
    _check_memory(p, f"parameter {path!r}")


def check_slot(path: str, key: str, slot: Any, p: Tensor, *, away: bool = False) -> None:
    """Raise TypeError or ValueError unless a slot of p's shape matches p, which is checked.

    away: whether it may be in other memory.
    """
    if not isinstance(slot, Tensor):
        raise TypeError(
            f"the slot {key!r} of parameter {path!r} is a {type(slot).__name__}, not a tensor; "
            "pass the state that this transformation's own init returned."
        )
    if slot.is_complex() != p.is_complex():
        raise TypeError(
            f"the slot {key!r} of parameter {path!r} has dtype {slot.dtype} and the parameter "
            f"{p.dtype}; pass the state that this transformation's own init returned for it. In a "
            "custom rule, let init make slots of the parameter's shape complex if it is; update "
            "gets them as pairs of real numbers, which may also be a slot of shape (*p.shape, 2)."
        )
    _check_layout(slot, f"the slot {key!r} of parameter {path!r}")
    _check_beside(path, slot, f"the slot {key!r}", p, away=away)


def _check_layout(
    x: Tensor, named: str, layouts: tuple[torch.layout, ...] = (torch.strided,)
) -> None:
    if x.is_nested or x.layout not in layouts:
        layout = "nested" if x.is_nested else str(x.layout)
        known = " or ".join(map(str, layouts))
        raise TypeError(f"{named} is {layout}, but must be {known}; pass a dense tensor.")


def _check_beside(path: str, x: Tensor, what: str, p: Tensor, *, away: bool = False) -> None:
    """Raise TypeError or ValueError unless x is on p's device, and has all its memory.

    away: whether x may be on another device.
    """
    sharding.check_beside(path, x, what, p)
    if x.device != p.device and not away and not sharding.is_sharded(p):
        raise ValueError(
            f"{what} of parameter {path!r} is on {x.device}, but the parameter is on {p.device}; "
            "move one of them with .to(device)."
        )
    if torch.compiler.is_compiling():
        return
    if hasattr(x, "fake_mode") != hasattr(p, "fake_mode") and not modes.intercepted():
        raise TypeError(
            f"{what} of parameter {path!r} is a {type(x).__name__}, and the parameter a "
            f"{type(p).__name__}; a tensor without data cannot be combined with one with data."
        )
    _check_memory(x, f"{what} of parameter {path!r}")


def _check_memory(x: Tensor, named: str) -> None:
    why = None if torch.compiler.is_compiling() else memory.shortage(x)
    if why is not None:
        raise ValueError(f"{named} {why}; restore its storage, or pass another tensor.")


def extra_names(update: Callable[..., Any], *, required: bool = False) -> tuple[str, ...]:
    """Names of the keyword-only parameters of a plain Python function.

    Read from the code object, because `inspect.signature` cannot be traced by torch.compile.

    required: without those that have a default.
    """
    code = getattr(update, "__code__", None)
    if code is None:
        return ()
    start = code.co_argcount
    names = code.co_varnames[start : start + code.co_kwonlyargcount]
    known = (getattr(update, "__kwdefaults__", None) or {}) if required else {}
    return tuple([name for name in names if known.get(name, NEEDED) is NEEDED])


NEEDED: Any = type("Needed", (), {"__repr__": lambda self: "needed"})()
"""The default of an extra argument that must be passed."""


def check_needed(name: str, **given: Any) -> None:
    """Raise TypeError for extra arguments that were not passed. name: of the transformation."""
    missing = [key for key, x in given.items() if x is NEEDED]
    if missing:
        words, call = " and ".join(missing), ", ".join([f"{key}=..." for key in given])
        raise TypeError(
            f"{name} needs the extra argument{'s' * (len(missing) > 1)} {words}: call "
            f"update(grads, state, params, {call})."
        )


def takes_any(function: Callable[..., Any]) -> bool:
    """Whether a plain Python function takes keyword arguments of any name."""
    code = getattr(function, "__code__", None)
    return code is not None and bool(code.co_flags & inspect.CO_VARKEYWORDS)


def one_number(value: Any, like: Tensor) -> Tensor:
    """A value as a tensor like another; raises ValueError if it is more than one."""
    x = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if x.numel() != 1:
        raise ValueError(
            f"the value must be one number, but got one of shape {tuple(x.shape)}; for many "
            "problems call update under torch.vmap."
        )
    return x


def check_extra(extra: dict[str, Any], known: tuple[str, ...]) -> None:
    """Raise TypeError for an extra argument that no part of a transformation declares."""
    unknown = [name for name in extra if name not in known]
    if unknown:
        takes = ", ".join(known) if known else "none"
        raise TypeError(
            f"update got the extra argument {', '.join(unknown)}, which no part of this "
            f"transformation takes (it takes: {takes}). Check the spelling, or leave it out."
        )


def unrecorded(fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function as under `torch.no_grad()`, for 0.2 µs instead of 1.3.

    An interrupt could leave torch's context manager before it restores the mode.
    """
    return _with_grad(False, fn, args)


def recorded(fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function as under `torch.enable_grad()`."""
    return _with_grad(True, fn, args)


def _with_grad(wanted: bool, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    recording = torch.is_grad_enabled()
    try:  # before the change: interrupts occur after calls
        set_grad_enabled(wanted)
        return fn(*args)
    finally:
        set_grad_enabled(recording)


def default_device(leaves: list[Tensor]) -> torch.device:
    """The device of a tree's step count: that of its first leaf."""
    return leaves[0].device if leaves else torch.get_default_device()


def batched(x: Tensor, leaves: list[Tensor]) -> Tensor:
    """A scalar of a new state; under vmap batched like the first leaf.

    So it has the layout of later steps: the step of an ensemble is compiled once, and a donating
    one can write into it.
    """
    inside = torch.compiler.is_compiling() or modes.transformed()
    if leaves and inside and not sharding.is_sharded(leaves[0]):
        return leaves[0].new_ones((), dtype=x.dtype, device=x.device) * x
    return x


def first_step(leaves: list[Tensor]) -> Tensor:
    """The step count of a new state: 0-dim int64, with the first leaf."""
    return batched(torch.zeros((), dtype=torch.int64, device=default_device(leaves)), leaves)
