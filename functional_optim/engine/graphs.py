"""A graph of torch.compile that returns new parameters and a new state, and one that writes them.

Written inside the graph, a result needs no additional memory: a step takes a third of the time.
But torch 2.13 then writes some results wrongly, so the graph is tried before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_optim import kernels, tree
from functional_optim.core import base, memory


class Variant:
    """The graphs for one kind of arguments.

    fits: whether what is built has the state of the transformation. ran: has one been compiled?
    broken: can none be? inside: whether a graph may write; None if that is not known yet.
    """

    def __init__(self, build: Callable[[list[Any]], Any], fits: bool) -> None:
        def step(
            numbers: list[Tensor], grads: Any, state: Any, params: Any, extra: dict[str, Any]
        ) -> Any:
            return stepped(build(numbers), grads, state, params, extra)

        def writing(
            numbers: list[Tensor], grads: Any, state: Any, params: Any, extra: dict[str, Any]
        ) -> Any:
            """The same in place; returns what is left to be written, and where: torch 2.13 drops
            writes into 0-dim float64 tensors of the CPU."""
            results = step(numbers, grads, state, params, extra)
            results = tree.map(_apart, (params, state), results)
            left: list[tuple[Tensor, Tensor]] = []

            def put(old: Tensor, now: Tensor) -> None:
                if now is old:
                    return
                if old.dim():
                    old.copy_(now)
                else:
                    left.append((old, now))

            tree.map(put, (params, state), results)
            return left

        self.step = TorchCompiled(step)
        self.writing = TorchCompiled(writing)
        self.fits = fits
        self.ran = False
        self.broken = False
        self.inside: bool | None = None

    def __call__(self, *args: Any) -> Any:
        """New parameters and a new state."""
        result = self.step(*args)
        self.ran, self.broken = True, False
        return result

    def write(self, *args: Any) -> None:
        """Step in place."""
        for old, now in self.writing(*args):
            old.copy_(now)
        self.ran, self.broken = True, False

    def try_writing(self, tx: Any, *args: Any) -> bool:
        """Whether a graph may write, tried on other tensors with other numbers.

        It may not if a result is an old tensor, for which Inductor (as of torch 2.13) writes
        what has already been overwritten, or if a function might fail after the first write.
        """
        numbers, grads, state, params, extra = args
        copies = tree.map(_other_numbers, (params, state))
        try:
            with Called() as called:
                updates, new = tx.update(grads, copies[1], copies[0], **extra)
                wanted: Any = (base.apply_updates(copies[0], updates), new)
        except Exception:  # of wrong arguments, of which the step itself will speak
            return False
        olds, results = optree.tree_flatten(copies), optree.tree_flatten(wanted)
        if olds[1] != results[1] or any(map(_may_fail, called.names)):
            return False
        places = {x.untyped_storage().data_ptr(): x for x in olds[0] if x.numel()}
        for old, now in zip(olds[0], results[0], strict=True):
            if now is old:
                continue
            if not isinstance(now, Tensor) or (now.shape, now.dtype) != (old.shape, old.dtype):
                return False
            if now.numel() and now.untyped_storage().data_ptr() in places:
                return False
        wanted = [x.clone() if x is old else x for x, old in zip(results[0], olds[0], strict=True)]
        self.write(numbers, grads, copies[1], copies[0], extra)
        return all(map(_close, olds[0], wanted))


def check_updates(params: Any, updates: Any) -> None:
    """Raise ValueError, also in a trace, for an update of a whole tree that does not fit its
    parameter: a sum would spread it over all entries."""

    def check(p: Tensor, u: Any) -> None:
        if isinstance(u, Tensor) and u.shape != p.shape:
            raise ValueError(
                f"the update of a transformation of trees returned a tensor of shape "
                f"{tuple(u.shape)} for a parameter of shape {tuple(p.shape)}; return one of the "
                "same shape, e.g. by expand_as, or None for a parameter that is to stay."
            )

    advice = "pass the updates computed for these"
    tree.check_same(params, updates, "params", "updates", advice, shapes=False)
    tree.map(check, params, updates)


def stepped(tx: Any, grads: Any, state: Any, params: Any, extra: dict[str, Any]) -> Any:
    """New parameters and a new state, by the pure update."""
    updates, new = tx.update(grads, state, params, **extra)
    check_updates(params, updates)
    return base.apply_updates(params, updates), new


class TorchCompiled:
    """A function, compiled by torch.compile when it is first called."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.compiled: Any = None

    def renew(self) -> Any:
        """A graph that is recompiled; all older ones are forgotten."""
        own = kernels.own_code(self.function)
        self.compiled = torch.compile(own, fullgraph=True, dynamic=False)
        return self.compiled

    def __call__(self, *args: Any) -> Any:
        compiled = self.compiled or self.renew()
        try:
            return compiled(*args)
        except Exception as error:
            if not kernels.is_limit(error):
                raise
            return self.renew()(*args)


def _apart(old: Tensor, now: Tensor) -> Tensor:
    return now if now is old else now.clone()


def _other_numbers(x: Tensor) -> Tensor:
    """A tensor that torch.compile takes for the same, but with other numbers if it has many: all
    positive, as second moments are."""
    with torch.no_grad():
        other = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        if x.dim() and (x.is_floating_point() or x.is_complex()):
            n = torch.arange(x.numel(), dtype=torch.float32, device=x.device)
            other.copy_((n * GOLDEN + 0.1).frac().reshape(x.shape) + 0.1)
        else:
            other.copy_(x)
    if type(x) is torch.nn.Parameter:
        return torch.nn.Parameter(other, x.requires_grad)
    return other.requires_grad_(x.requires_grad)


GOLDEN = 0.6180339887


def _close(x: Tensor, y: Tensor) -> bool:
    """Whether a graph has written what the rule says, but for roundings."""
    if not (x.is_floating_point() or x.is_complex()):
        return bool((x != y).float().mean() < 0.02) if x.numel() else True  # codes, now and then
    loose = 1e-2 if x.element_size() == 2 else 1e-4
    return torch.allclose(x, y, rtol=loose, atol=loose, equal_nan=True)


def can_be_written(x: Any) -> bool:
    """Whether a graph may write into a leaf: a plain tensor that autograd has not recorded."""
    if not isinstance(x, Tensor) or not memory.has_address(x) or not x.is_leaf:
        return False
    return not (x.is_conj() or x.is_neg()) and (0 not in x.stride() or x.numel() < 2)


class Called(TorchFunctionMode):
    """Notes the names of torch's functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def _may_fail(name: str) -> bool:
    """Whether a function of torch may raise for some values: decompositions, and what needs one."""
    return name.startswith(FAILING) and not name.endswith("_norm")


FAILING = ("linalg_", "cholesky", "inverse", "pinverse", "svd", "qr", "geqrf", "lu", "lstsq")
"""How names of torch's functions begin that may raise for some values."""
