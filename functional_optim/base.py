"""The protocol: a gradient transformation is a pair of pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_optim import kernels, sharded, tree

Tree: TypeAlias = Any
"""Any optree pytree of tensors: a dict of parameters, a list, a tensor, nested as you like."""


class GradientTransformation(NamedTuple):
    """A pair of pure functions, `init` and `update`, that turns gradients into updates.

    ::

        state = tx.init(params)
        updates, state = tx.update(grads, state, params, **extra)
        params = apply_updates(params, updates)

    Neither function touches its arguments. `params`, `grads` and `updates` are pytrees of one
    structure; `state` is a pytree of tensors. Extra arguments that `update` takes are its
    keyword-only parameters; `chain` routes each to the parts that declare it.

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

    init: Callable[[Tree], Tree]
    update: Callable[..., tuple[Tree, Tree]]


class EmptyState(NamedTuple):
    """The state of a transformation that remembers nothing."""


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Return `params + updates`, each sum rounded once to its parameter's dtype.

    Args:
        params: pytree of tensors.
        updates: pytree of the same structure, from a transformation's `update`. Its tensors may
            have a wider dtype than the parameters'; `None` leaves a parameter as it is.

    Returns:
        A pytree like `params`. Nothing is changed in place.

    Raises:
        ValueError: if the two structures differ.

    Example::

        >>> import torch, functional_optim as fo
        >>> fo.apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([0.5, -1.0])})
        {'w': tensor([1.5000, 0.0000])}
    """
    tree.check_same(params, updates, "params", "updates", "pass the updates computed for these")
    return tree.map(lambda p, u: p if u is None else add(p, u), params, updates)


def add(p: Tensor, u: Tensor) -> Tensor:
    """`p + u` in the wider of the two dtypes, rounded once to p's.

    Part by part for complex ones: torch multiplies u by 1 + 0j, which turns -0.0 into 0.0.
    """
    if p.is_complex() and u.is_complex():
        return torch.complex(p.real + u.real, p.imag + u.imag).to(p.dtype)
    return (p + u).to(p.dtype)


def check_transformation(name: str, tx: Any, example: str) -> None:
    """Raise TypeError, in the name of who takes it, for what is no transformation."""
    if not isinstance(tx, GradientTransformation):
        raise TypeError(
            f"{name} takes a transformation, but got a {type(tx).__name__}; call the factory, "
            f"e.g. {example}."
        )


def check_params(params: Tree) -> None:
    """Raise TypeError unless every leaf is a floating-point or complex tensor."""
    for path, p in tree.items(params):
        if not isinstance(p, Tensor):
            raise TypeError(
                f"parameter {path!r} is a {type(p).__name__}, not a tensor; pass a pytree of "
                "tensors such as dict(model.named_parameters())."
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
    """Raise unless there is one gradient (or None) of the right kind for each parameter."""
    tree.check_same(params, grads, "params", "grads", "pass one gradient (or None) per parameter")
    for (path, p), (_, g) in zip(tree.items(params), tree.rows(params, grads), strict=True):
        if g is not None and g.is_complex() != p.is_complex():
            raise TypeError(
                f"the gradient of {path!r} has dtype {g.dtype} and the parameter {p.dtype}; pass a "
                "complex gradient for a complex parameter, and a real one for a real one."
            )
        if g is not None:
            sharded.check_beside(path, g, "the gradient", p)


def extra_names(update: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the keyword-only parameters of a plain Python function.

    Read from the code object, because `inspect.signature` cannot be traced by torch.compile.
    """
    code = getattr(update, "__code__", None)
    if code is None:
        return ()
    start = code.co_argcount
    return tuple(code.co_varnames[start : start + code.co_kwonlyargcount])


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
    """Call a function as under `torch.no_grad()`, for 0.2 µs instead of 1.3."""
    recording = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        return fn(*args)
    finally:
        torch._C._set_grad_enabled(recording)


def default_device(leaves: list[Tensor]) -> torch.device:
    """Where the step count of a tree lives: with its first leaf."""
    return leaves[0].device if leaves else torch.get_default_device()


def first_step(leaves: list[Tensor]) -> Tensor:
    """The step count of a new state: 0-dim int64, with the first leaf.

    Under vmap it is batched as that leaf is, and so laid out as the count of every later step: a
    compiled step of an ensemble is then compiled once, not twice.
    """
    batched = torch.compiler.is_compiling() or kernels.transformed()
    if leaves and batched and not sharded.is_sharded(leaves[0]):
        return leaves[0].new_zeros((), dtype=torch.int64)
    return torch.zeros((), dtype=torch.int64, device=default_device(leaves))
