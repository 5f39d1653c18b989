"""Drivers of gradient-free methods for `GradientFree`.

A population method (`fo.search`) computes new parameters; an estimator (`fo.estimators`) passes
gradients to a transformation. Both become a driver: `init` creates the state, `ask` returns the
number of candidates and a function for a leaf of all of them, and `tell` returns new parameters and
the new state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from functional_optim import search, tree
from functional_optim.adapters.state.recipes import (
    ByReference,
    recipe_defaults,
    takes_any,
    warn_of_unread_lr,
)
from functional_optim.core import base
from functional_optim.estimators import Estimator, EstimatorState
from functional_optim.estimators.forward import refuse
from functional_optim.search import Search

Leaf: TypeAlias = Callable[[int], Tensor]
"""From the index of a leaf to that leaf of all candidates, with a leading dimension."""

FEW = 2
"""Up to this number, candidates of an estimator are drawn leaf by leaf and never stored as a
whole."""


class Searching(NamedTuple):
    """A population method."""

    method: Search

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def size(self) -> int:
        """The values, besides the parameters, on which the shapes in its state depend."""
        return self.method.population

    def init(self, params: Any, seed: int) -> Any:
        home = tree.leaves(params)[0].device
        return self.method.init(tree.map(lambda p: p.to(home), params), seed)

    def ask(self, state: Any, params: Any) -> tuple[int, Leaf, Any]:
        candidates, state = self.method.ask(state)
        return self.method.population, tree.leaves(candidates).__getitem__, (candidates, state)

    def tell(self, fitness: Tensor, asked: Any, params: Any) -> tuple[Any, Any]:
        candidates, state = asked
        state = self.method.tell(candidates, fitness, state)
        return search.center(state), state


class EstimatingState(NamedTuple):
    """The state of an estimator and of the transformation."""

    step: Tensor
    """Estimates made so far, 0-dim int64."""
    seed: Tensor
    """The seed, 0-dim int64."""
    weights: Tensor
    """The factor of each direction in the last estimate, (directions,) float64."""
    tx: Any
    """The state of the transformation."""

    def own(self) -> EstimatorState:
        """The state of the estimator."""
        return EstimatorState(*self[:3])


class Estimating(NamedTuple):
    """An estimator of gradients, and the transformation of these."""

    estimator: Estimator
    tx: base.GradientTransformation
    size: int | None = None

    @property
    def name(self) -> str:
        return self.estimator.name

    def init(self, params: Any, seed: int) -> EstimatingState:
        return EstimatingState(*self.estimator.init(params, seed), tx=self.tx.init(params))

    def ask(self, state: EstimatingState, params: Any) -> tuple[int, Leaf, Any]:
        own = state.own()
        items = list(tree.items(params))

        def alone(i: int) -> Tensor:
            path, p = items[i]
            return self.estimator.candidates(own, {path: p})[path]

        n = 2 * state.weights.shape[0]
        if n <= FEW:
            return n, alone, state
        return n, tree.leaves(self.estimator.candidates(own, params)).__getitem__, state

    def tell(self, fitness: Tensor, asked: Any, params: Any) -> tuple[Any, EstimatingState]:
        value, own = self.estimator.read(fitness, asked.own())
        extra = {"value": value} if "value" in self.tx.extra else {}
        grads = self.estimator.gradient(own, params)
        updates, tx = self.tx.update(grads, asked.tx, params, **extra)
        return base.apply_updates(params, updates), EstimatingState(*own, tx=tx)


Driver: TypeAlias = Searching | Estimating


class Recipe:
    """From a parameter group to a driver.

    Args:
        method: a Search, an Estimator, or a function from hyperparameters to one of them.
        tx: a transformation, a function from hyperparameters to one, or None.
        given: values for the hyperparameters of both.

    defaults: all hyperparameters of both. takes_any: whether one of them has `**kwargs`.

    Raises:
        TypeError: for another type, for a hyperparameter that neither takes, that is missing, or
            that both take.
    """

    def __init__(self, method: Any, tx: Any, given: dict[str, Any]) -> None:
        finished = isinstance(method, Search | Estimator)
        if not finished and not callable(method):
            raise TypeError(
                f"method must be a population method or an estimator, but got a "
                f"{type(method).__name__}; pass e.g. fo.search.cma_es with its hyperparameters."
            )
        made = isinstance(tx, base.GradientTransformation)
        if not (tx is None or made or callable(tx)):
            raise TypeError(
                f"tx must be a transformation or a function from hyperparameters to one, but got a "
                f"{type(tx).__name__}; pass e.g. tx=fo.adam, lr=0.01."
            )
        make_method: Callable[..., Any] = Always(method) if finished else method
        make_tx: Callable[..., Any] = Always(tx) if tx is None or made else tx
        taken = names_of(make_tx)
        both = sorted(set(taken) & set(names_of(make_method)))
        if both:
            raise TypeError(
                f"the method and tx both take {', '.join(both)}; call one of them yourself, e.g. "
                "GradientFree(params, fo.mezo(eps=1e-3), tx=fo.adam, lr=1e-3)."
            )
        self.passes_on = "tx" in names_of(make_method)
        rest = {name: value for name, value in given.items() if name not in taken}
        own = recipe_defaults(make_method, {**rest, **({"tx": None} if self.passes_on else {})})
        self.method = ByReference(make_method, tuple(own))
        own.pop("tx", None)
        theirs = recipe_defaults(make_tx, {n: value for n, value in given.items() if n in taken})
        self.defaults = {**own, **theirs}
        self.takes_any = takes_any(make_method) or takes_any(make_tx)
        self.tx = ByReference(make_tx, tuple(theirs))
        warn_of_unread_lr(make_tx)

    def __call__(self, group: dict[str, Any]) -> Driver:
        tx = self.tx(group)
        if tx is not None:
            what = "a transformation, such as fo.adam(lr) or fo.chain(...)"
            base.check_returned("tx", tx, what)
        if self.passes_on and tx is None:
            raise TypeError(
                "the method passes gradients to a transformation; pass tx=fo.adam, lr=…."
            )
        method = self.method({**group, "tx": tx})
        if isinstance(method, Estimator):
            return estimating(method, tx)
        some = "a population method or an estimator, such as fo.search.cma_es(8, 0.5) or fo.mezo()"
        base.check_returned("the method", method, some, Search)
        if tx is not None and not self.passes_on:
            raise TypeError(
                "this population method computes its own steps and uses no transformation; "
                "leave tx out. (openai_es and pgpe take one: pass the function, not its "
                "result.)"
            )
        return Searching(method)


def estimating(estimator: Estimator, tx: base.GradientTransformation | None) -> Estimating:
    """The driver of an estimator; raises TypeError if it cannot be driven."""
    if estimator.candidates is refuse:
        raise TypeError(
            "forward_gradient differentiates the loss, but a closure cannot be differentiated; "
            "call its value_and_grad(loss_fn) in a loop, or use spsa, es_gradient or mezo."
        )
    if tx is None:
        raise TypeError("an estimator passes gradients to a transformation; pass tx=fo.sgd, lr=….")
    missing = sorted(set(tx.required) - {"value"})
    if missing:
        raise TypeError(
            f"tx's update needs {' and '.join(missing)}, which an optimizer object does not have; "
            "call the estimator and the transformation yourself."
        )
    return Estimating(estimator, tx)


class Always:
    """A recipe without hyperparameters."""

    def __init__(self, made: Any) -> None:
        self.made = made
        self.__qualname__ = type(made).__name__

    def __call__(self) -> Any:
        return self.made


def names_of(recipe: Callable[..., Any]) -> list[str]:
    """The hyperparameters of a recipe."""
    parameters = inspect.signature(recipe).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
