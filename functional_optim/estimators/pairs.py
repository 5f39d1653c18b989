"""Estimates from the loss on both sides of the parameters: ± a step along random directions.

Perturbed parameters may be computed when they are read, so that only one is stored at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.core import modes
from functional_optim.core.base import Tree
from functional_optim.estimators.protocol import (
    Estimator,
    EstimatorState,
    Rays,
    key_ahead,
    number,
    shared,
)
from functional_optim.kernels import private
from functional_optim.search.base import check_losses, evaluate
from functional_optim.search.shaping import finite, seen

LOOKS = {
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "is_leaf",
        "ndim",
        "grad_fn",
    )
} | {
    getattr(Tensor, name)
    for name in ("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "__len__")
}
"""Functions that need no values of a tensor."""


class Lazy(Tensor):
    """A tensor like p, with values that `make` returns, each time that an operation reads them.

    It has no memory. Tied parameters are computed at each use. Operations of torch get plain
    tensors: `__torch_function__` sees most calls, and `__torch_dispatch__` those of torch.func and
    of other code below Python.
    """

    make: Callable[[], Tensor]
    looks: Tensor
    kept: Tensor | None = None
    """The values of which `data_ptr` has returned the address."""

    @staticmethod
    def __new__(cls, p: Tensor, make: Callable[[], Tensor]) -> Lazy:
        plain = p.detach()
        self = private.without_memory(cls, plain)
        self.make, self.looks = make, plain
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.data_ptr:
            (self,) = args
            self.kept = self.make() if self.kept is None else self.kept
            return self.kept.data_ptr()
        return _called(func, looks if func in LOOKS else made, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, made, args, kwargs)


def _called(func: Any, seen: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
    """Call a function of torch. seen: what it gets of a lazy tensor.

    Raises:
        RuntimeError: if it writes into such values, which only this call has.
    """
    given: list[Tensor] = []
    lazy: list[Lazy] = []

    def plain(x: Any) -> Any:
        if not isinstance(x, Lazy):
            return x
        lazy.append(x)
        given.append(seen(x))
        return given[-1]

    before = tree.map(plain, (args, kwargs or {}))
    counts = [0 if x.is_inference() else x._version for x in given]
    found = func(*before[0], **before[1])
    after = [0 if x.is_inference() else x._version for x in given]
    if counts != after and func not in (F.embedding, F.embedding_bag):  # whose rows it reads itself
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} writes into a parameter inside the loss, which is "
            "computed again each time that the loss reads it; write into a copy, p.clone()."
        )
    for x, values, count, now in zip(lazy, given, counts, after, strict=True):
        if now != count:  # later reads find the rows that an embedding has limited, as in torch
            x.make = partial(_same, values)
    return found


def _same(x: Tensor) -> Tensor:
    return x


def looks(x: Any) -> Any:
    """A plain tensor like a lazy one; anything else as it is."""
    return x.looks if isinstance(x, Lazy) else x


def made(x: Any) -> Any:
    """A lazy tensor's values; anything else as it is."""
    return x.make() if isinstance(x, Lazy) else x


def can_be_lazy(p: Tensor) -> bool:
    """Is a leaf a plain tensor, and does torch have some without memory?"""
    plain = type(p) in (Tensor, torch.nn.Parameter) and p.layout is torch.strided
    return plain and private.without_memory is not None


Weigh = Callable[[Tensor, Tensor], Tensor]
"""Losses on the one side and on the other, (n,) each → a factor for each direction, (n,)."""


def pairs(name: str, rays: Rays, reach: numeric.Hyper, weigh: Weigh) -> Estimator:
    """An estimator from central differences: Σ weigh(f⁺, f⁻) / (2 c) · z, f± = f(p ± c z).

    Args:
        name: for error messages.
        rays: the distribution of the directions z.
        reach: c, a hyperparameter.
        weigh: the weights of two losses. For a difference quotient, (f⁺ − f⁻) / n.
    """
    n = rays.number

    def at(state: EstimatorState) -> tuple[Any, Any]:
        key, t = key_ahead(state)
        return key, numeric.at(reach, t)

    def moved(p: Tensor, z: Tensor, c: Any, sign: int) -> Tensor:
        width = c.to(z.device, z.dtype) if isinstance(c, Tensor) else c
        return (p.detach() + sign * width * z).to(p.dtype)

    def candidates(state: EstimatorState, params: Tree) -> Tree:
        key, c = at(state)

        def both(path: str, p: Tensor) -> Tensor:
            z = rays.all(key, path, p)
            return torch.cat([moved(p, z, c, 1), moved(p, z, c, -1)])

        return tree.map_with_path(both, params)

    def one_by_one(fn: Callable[..., Any], state: EstimatorState, params: Tree) -> Tensor:
        key, c = at(state)
        plain = not torch.compiler.is_compiling() and not modes.transformed()

        def value(i: int, sign: int) -> Tensor:
            def leaf(path: str, p: Tensor) -> Tensor:
                def make() -> Tensor:
                    return moved(p, rays.one(key, i, path, p), c, sign)

                return Lazy(p, make) if plain and can_be_lazy(p) else make()

            # a copy: a CUDA graph returns the same memory each time
            return fn(tree.map_with_path(leaf, params)).clone()

        every = [value(i, sign) for sign in (1, -1) for i in range(n)]
        return torch.stack([x.to(state.weights) for x in every])

    def measure(loss_fn: Callable[..., Any]) -> Callable[..., tuple[Tensor, EstimatorState]]:
        def one(moved: Tree, *args: Any) -> Tensor:
            return number(name, loss_fn(moved, *args)).detach()

        def measured(
            state: EstimatorState, params: Tree, *args: Any
        ) -> tuple[Tensor, EstimatorState]:
            with torch.no_grad():
                if rays.batched:
                    losses = evaluate(one, candidates(state, params), *args, randomness="different")
                else:
                    losses = one_by_one(lambda moved: one(moved, *args), state, params)
            return read(losses, state)

        return measured

    def read(losses: Tensor, state: EstimatorState) -> tuple[Tensor, EstimatorState]:
        check_losses(name, 2 * n, losses)
        _, c = at(state)
        losses = losses.detach().to(state.weights)
        weights = finite(weigh(losses[:n], losses[n:]) / (2 * c))  # c may have fallen to 0
        return seen(losses), rays.state(state.step + 1, state.seed, weights)

    return Estimator(rays.start(name), measure, rays.gradient, candidates, read, name)


def differences(plus: Tensor, minus: Tensor) -> Tensor:
    """f⁺ − f⁻, divided by the number of finite ones; 0 where it is not finite."""
    return shared(plus - minus)
