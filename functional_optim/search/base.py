"""The protocol of population methods, and their common parts.

A method has three functions of vectors: its start, its sampling, and its update. `method` makes
them a `Search` over any pytree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.core import base, draws, randomness
from functional_optim.core.factory import Reconstructible
from functional_optim.core.ravel import Ravel
from functional_optim.search.shaping import worst_if_not_finite


class SearchFunctions(NamedTuple):
    """The fields of `Search`."""

    init: Callable[..., Any]
    ask: Callable[[Any], tuple[Any, Any]]
    tell: Callable[[Any, Tensor, Any], Any]
    population: int
    name: str = ""
    """Its name in checkpoints of `adapters.GradientFree`."""


class Search(Reconstructible, SearchFunctions):
    """Three pure functions that search for the parameters with the smallest loss.

    ::

        state = method.init(params, seed=0)
        for _ in range(generations):
            candidates, state = method.ask(state)
            fitness = fo.search.evaluate(loss_fn, candidates, x, y)
            state = method.tell(candidates, fitness, state)
        params = fo.search.center(state)

    `params` is a pytree of floating-point or complex tensors (a complex element is searched as two
    numbers). `candidates` is one of the same structure and dtypes, with a leading dimension of
    `population`. `fitness` has shape (population,): losses, smaller is better, and values that are
    not finite are worst. `tell` accepts any candidates: it computes the noise from them, so you may
    replace some by better guesses.

    `state` is a NamedTuple of tensors. It has at least

    * `step`: number of finished generations, 0-dim int64;
    * `seed`: 0-dim int64. All noise is a pure function of seed, step and index: `ask` returns the
      same for the same state, a run continues bitwise equal from a saved state, and torch.vmap over
      states of different seeds runs several searches;
    * `best`: the best candidate so far, a tree like params (at first they themselves);
    * `best_fitness`: its loss, 0-dim float64 (at first ∞).

    No function modifies its arguments, branches on values or calls a generator, so
    ask, evaluation and tell together are one graph under torch.compile(fullgraph=True).

    The state has vectors in float32, or in float64 if any parameter is double. Only candidates are
    rounded to the dtypes of the parameters, so rounding errors do not accumulate.

    A generation without a finite loss does not change the distribution (except in `one_plus_one`,
    where the child counts as worse than its parent). Nor does a step that would make a scalar of
    the state infinite.

    Raises:
        TypeError: from `init`, for a leaf that is not a floating-point or complex tensor.
        ValueError: from `tell`, unless there is one real loss for each of `population` candidates;
            for a state of another population.

    Example::

        >>> import torch, functional_optim as fo
        >>> method = fo.search.cma_es(population=8, sigma=0.5)
        >>> state = method.init({"w": torch.tensor([3.0, -2.0])})
        >>> def loss_fn(params):
        ...     return params["w"].square().sum()
        >>> for _ in range(60):
        ...     candidates, state = method.ask(state)
        ...     state = method.tell(candidates, fo.search.evaluate(loss_fn, candidates), state)
        >>> bool(loss_fn(fo.search.center(state)) < 1e-6)
        True
    """


class Start(NamedTuple):
    """The initial values of a method's state."""

    flat: Ravel
    mean: Tensor
    """The parameters as one vector, (d,)."""
    step: Tensor
    seed: Tensor

    def number(self, x: Any) -> Tensor:
        """A new 0-dim float64 tensor."""
        if isinstance(x, Tensor):
            return x.detach().to(device=self.mean.device, dtype=torch.float64).reshape(()).clone()
        return torch.full((), x, dtype=torch.float64, device=self.mean.device)

    def deviations(self, sigma: Any) -> Tensor:
        """One deviation for each element, (d,), initially equal."""
        return self.number(sigma).to(self.mean.dtype).expand_as(self.mean).clone()


def method(
    name: str,
    population: int,
    State: Callable[..., Any],
    start: Callable[[Start], dict[str, Any]],
    sample: Callable[[Any], Tensor],
    learn: Callable[[Any, Tensor, Tensor], dict[str, Any]],
    *,
    least: int = 1,
    dtype: torch.dtype | None = None,
) -> Search:
    """A method from its functions of vectors.

    Args:
        name: for error messages.
        population: number of candidates of a generation.
        State: the type of the state: step, seed, best, best_fitness, and the values of `start`.
        start: the initial values of the method's fields.
        sample: state → (n, d), the candidates.
        learn: state, (n, d) candidates, (n,) losses in float64 → the fields that change. Losses
            that are not finite are ∞ here. Fields with "fitness" in their names may be infinite; a
            generation that makes another field infinite is ignored.
        least: the smallest valid population.
        dtype: of the vectors. Default: as `Ravel` chooses.
    """
    check_population(name, population, least)
    kind: Any = State

    def init(params: Any, seed: int | Tensor = 0) -> Any:
        base.check_params(params)
        best = tree.map(lambda p: p.detach().clone(), params)
        flat = Ravel(best, dtype=dtype)
        number = randomness.seed_tensor(name, seed, flat.device)
        begun = Start(flat, flat.vector(best), torch.zeros_like(number), number)
        return State(
            step=begun.step,
            seed=number,
            best=best,
            best_fitness=begun.number(float("inf")),
            **start(begun),
        )

    def check(state: Any) -> None:
        if not isinstance(state, kind):
            raise TypeError(
                f"{name} takes the state that its init or tell returned, but got a "
                f"{type(state).__name__}."
            )
        for field, x in zip(state._fields, state, strict=True):
            if "fitness" in field and x.dim() and len(x) != population:
                raise ValueError(
                    f"{name} has a population of {population}, but the state has {len(x)} "
                    f"{field.removesuffix('_fitness')}; use the method that made the state, or "
                    "start with init."
                )

    def ask(state: Any) -> tuple[Any, Any]:
        check(state)
        return spread(state.best, population, dtype).tree(sample(state)), state

    def tell(candidates: Any, fitness: Tensor, state: Any) -> Any:
        check(state)
        check_told(name, population, candidates, fitness, state.best)
        losses = worst_if_not_finite(fitness.detach().to(state.best_fitness))
        x = spread(state.best, population, dtype).vector(candidates).detach()
        learned = settled(state, losses, learn(state, x, losses))
        best = best_of(candidates, losses, state)
        return base.replaced(state, **learned, **best, step=state.step + 1)

    return Search(init, ask, tell, population, name)


def settled(state: Any, losses: Tensor, new: dict[str, Any]) -> dict[str, Any]:
    """The new fields, or the old ones if the generation has no information.

    Losses are compared with each other, and with those of members or a parent in the state.
    """
    known = [getattr(state, name).reshape(-1) for name in new if "fitness" in name]
    ok = torch.cat([losses, *known]).isfinite().any()
    for name, field in new.items():
        if isinstance(field, Tensor) and "fitness" not in name:
            ok = ok & field.isfinite().all()

    def chosen(fresh: Tensor, old: Tensor) -> Tensor:
        return torch.where(ok, fresh.to(old.dtype), old)

    return {name: tree.map(chosen, field, getattr(state, name)) for name, field in new.items()}


def best_of(candidates: Any, losses: Tensor, state: Any) -> dict[str, Any]:
    """The best candidate so far, and its loss; the older one if two are equal."""
    winner = losses.argmin().reshape(1)
    least = losses.gather(0, winner).reshape(())
    better = least < state.best_fitness

    def chosen(old: Tensor, x: Tensor) -> Tensor:
        return torch.where(better, x.detach().index_select(0, winner)[0].to(old.dtype), old)

    return {
        "best": tree.map(chosen, state.best, candidates),
        "best_fitness": torch.where(better, least, state.best_fitness),
    }


def spread(like: Any, n: int, dtype: torch.dtype | None = None) -> Ravel:
    """Conversion between trees with a leading dimension of n and matrices (n, d)."""
    many = tree.map(lambda p: p.expand(n, *p.shape), like)
    return Ravel(many, batched=True, dtype=dtype)


def key(state: Any, what: str) -> Tensor:
    """The key of a state's noise for one purpose."""
    return draws.stream(state.seed, state.step, randomness.named(what))


def now(hyper: numeric.Hyper, state: Any, like: Tensor) -> Tensor:
    """The value of a hyperparameter in this generation, 0-dim, otherwise like a tensor."""
    t = (state.step + 1).to(torch.float64)
    return numeric.like(numeric.at(hyper, t), t).to(like)


def normal(state: Any, n: int, like: Tensor) -> Tensor:
    """This generation's standard normal numbers, (n, d) for a vector of d."""
    return randomness.normal(key(state, "normal"), (n, *like.shape), like.dtype, like.device)


def antithetic(state: Any, n: int, like: Tensor) -> Tensor:
    """Normal numbers in pairs of opposite sign: k of them, then their negatives; with an odd n, the
    last of the first half has no partner."""
    z = normal(state, n - n // 2, like)
    return torch.cat([z, -z[: n // 2]])


def evaluate(
    loss_fn: Callable[..., Tensor],
    candidates: Any,
    *args: Any,
    chunk_size: int | None = None,
    randomness: str = "error",
) -> Tensor:
    """The loss of each candidate, all at once: `loss_fn(candidate, *args)` under torch.func.vmap.

    Args:
        loss_fn: from one candidate (a tree like params) and the other arguments to a 0-dim tensor.
        candidates: from `ask`.
        args: passed unchanged to every call, e.g. a batch of data.
        chunk_size: candidates that are evaluated at a time, to limit memory. Default: all.
        randomness: that of torch.func.vmap, for random operations in `loss_fn`: "error", "same"
            (one dropout mask for all) or "different".

    Returns:
        (n,) losses.

    For a module, `torch.func.functional_call`::

        >>> import torch, functional_optim as fo
        >>> model = torch.nn.Linear(3, 1)
        >>> def loss_fn(params, x, y):
        ...     return (torch.func.functional_call(model, params, (x,)) - y).square().mean()

    Example::

        >>> method = fo.search.openai_es(population=16, sigma=0.1, tx=fo.adam(0.05))
        >>> state = method.init(dict(model.named_parameters()))
        >>> candidates, state = method.ask(state)
        >>> x, y = torch.ones(4, 3), torch.zeros(4, 1)
        >>> fo.search.evaluate(loss_fn, candidates, x, y).shape
        torch.Size([16])
    """

    if not callable(loss_fn):
        raise TypeError(
            f"evaluate takes a function as loss_fn, but got a {type(loss_fn).__name__}; call "
            "evaluate(loss_fn, candidates, ...)."
        )

    def one(*leaves: Tensor) -> Tensor:
        return loss_fn(tree.with_leaves(candidates, list(leaves)), *args)

    mapped = torch.func.vmap(one, chunk_size=chunk_size, randomness=randomness)
    return mapped(*tree.leaves(candidates))


def center(state: Any) -> Any:
    """The parameters to use now: the mean of the distribution, or the best if there is none.

    Returns:
        A tree like params, in their dtypes. For a batch of states, use torch.vmap.

    Example::

        >>> import torch, functional_optim as fo
        >>> method = fo.search.snes(population=8, sigma=0.1)
        >>> fo.search.center(method.init(torch.tensor([1.0, 2.0])))
        tensor([1., 2.])
    """
    if not hasattr(_searched("center", state), "mean"):
        return state.best
    return Ravel(state.best, dtype=state.mean.dtype).tree(state.mean)


def best(state: Any) -> Any:
    """The best candidate so far; before the first generation, the parameters at the start.

    With noisy losses this is the candidate with the luckiest noise: prefer `center`.

    Example::

        >>> import torch, functional_optim as fo
        >>> method = fo.search.random_search(population=2, sigma=1.0)
        >>> state = method.init(torch.zeros(1))
        >>> state = method.tell(torch.tensor([[5.0], [4.0]]), torch.tensor([5.0, 4.0]), state)
        >>> fo.search.best(state)
        tensor([4.])
    """
    return _searched("best", state).best


def _searched(who: str, state: Any) -> Any:
    if not hasattr(state, "best_fitness"):
        raise TypeError(
            f"{who} takes the state of a search method, which its init or tell returned, but got a "
            f"{type(state).__name__}."
        )
    return state


def check_population(name: str, population: Any, least: int) -> None:
    if not isinstance(population, Integral) or isinstance(population, bool):
        raise TypeError(f"{name} needs an integer as its population, but got {population!r}.")
    if population < least:
        raise ValueError(
            f"{name} needs a population of {least} or more, but got {population}; fewer candidates "
            "contain no information about the direction."
        )


def check_positive(name: str, **values: Any) -> None:
    """Raise ValueError for a Python number that is not above 0; tensors and schedules pass."""
    for what, value in values.items():
        numeric.check(
            lambda x: 0.0 < x < float("inf"),
            value,
            f"{name} needs a finite {what} above 0, but got {{}}.",
        )


def check_losses(who: str, n: int, losses: Any) -> None:
    """Raise ValueError unless there is a tensor with a real loss for each of n candidates."""
    if not isinstance(losses, Tensor) or tuple(losses.shape) != (n,):
        found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"{who} needs the losses of its {n} candidates as a tensor of shape ({n},), but got "
            f"{found}; fo.search.evaluate returns one."
        )
    if losses.is_complex():
        raise ValueError(
            f"{who} compares losses, which must be real, but got {losses.dtype}; take e.g. their "
            "absolute values."
        )


def check_told(name: str, n: int, candidates: Any, fitness: Any, like: Any) -> None:
    check_losses(f"{name} with a population of {n}", n, fitness)
    many = tree.map(lambda p: p.expand(n, *p.shape), like)
    tree.check_same(many, candidates, "params × population", "candidates", "pass what ask returned")


def default_population(params: Any) -> int:
    """4 + ⌊3 ln d⌋ for d numbers: the default of CMA-ES and its relatives if evaluations are
    expensive.

    Hansen, "The CMA Evolution Strategy: A Tutorial", https://arxiv.org/abs/1604.00772, table 1.
    Larger ones search more globally, and use hardware better.

    Example::

        >>> import torch, functional_optim as fo
        >>> fo.search.default_population({"w": torch.zeros(10)})
        10
    """
    base.check_params(params)
    return 4 + int(3 * math.log(Ravel(params).size))
