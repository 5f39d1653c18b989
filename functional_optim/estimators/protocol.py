"""The protocol of gradient estimators, and their random directions.

Every estimate is a sum of random directions, each times a weight. The directions are a pure
function of seed and count, so an estimate has to store only these weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.core import base, draws, randomness
from functional_optim.core.base import Tree
from functional_optim.core.factory import Reconstructible
from functional_optim.core.numbers import tensor_of
from functional_optim.kernels.interrupts import held
from functional_optim.search.shaping import finite


class EstimatorState(NamedTuple):
    """The state of an estimator, from which its last estimate can be recomputed, bitwise.

    step: 0-dim int64, the number of estimates.
    seed: 0-dim int64.
    weights: (directions,) float64, the factor of each direction in the last estimate.

    With random signs as directions, as in `spsa`, it is a `SignsState`, with the same fields.

    Example::

        >>> import torch, functional_optim as fo
        >>> est, w = fo.estimators.mezo(), torch.ones(1000)
        >>> value, state = est.measure(lambda w: w @ w)(est.init(w, seed=7), w)
        >>> int(state.step), int(state.seed), state.weights.shape  # all that a log has to keep
        (1, 7, torch.Size([1]))
    """

    step: Tensor
    seed: Tensor
    weights: Tensor


class SignsState(NamedTuple):
    """The fields of `EstimatorState`: its weights belong to random signs, not to normal numbers."""

    step: Tensor
    seed: Tensor
    weights: Tensor


class EstimatorFunctions(NamedTuple):
    """The fields of `Estimator`."""

    init: Callable[..., EstimatorState]
    measure: Callable[..., Any]
    """measure(loss_fn)(state, params, *args) → value, state: everything except the gradient."""
    gradient: Callable[[EstimatorState, Tree], Tree]
    candidates: Callable[[EstimatorState, Tree], Tree]
    read: Callable[[Tensor, EstimatorState], tuple[Tensor, EstimatorState]]
    """Losses of the candidates, and the state before them → value, state."""
    name: str = ""
    """Its name in checkpoints of `adapters.GradientFree`."""


class Estimator(Reconstructible, EstimatorFunctions):
    """Pure functions that estimate gradients, for any transformation.

    ::

        state = est.init(params, seed=0)
        (value, grads), state = est.value_and_grad(loss_fn)(state, params, *args)
        updates, opt_state = tx.update(grads, opt_state, params)

    `loss_fn(params, *args)` returns one number. It is evaluated without recording gradients.
    `value` is the mean of the finite losses, 0-dim float64; infinite if none is finite. `grads` is
    a tree like params in compute dtype (float32, or float64 for doubles).

    Methods that use only values of the loss also have `ask` and `tell`, if you compute the losses
    separately; the candidates have a leading dimension::

        candidates, state = est.ask(state, params)
        (value, grads), state = est.tell(candidates, losses, state)

    A direction along which the loss is NaN or infinite is ignored.

    `init(params, seed)` takes a Python integer or a 0-dim tensor as its seed; `torch.vmap` over it
    makes an ensemble. `gradient(state, params)` recomputes the estimate of a state, for `replay`.

    Example::

        >>> import torch, functional_optim as fo
        >>> est, tx = fo.estimators.spsa(c=0.1), fo.sgd(0.05)
        >>> w = torch.tensor([3.0, -2.0])
        >>> state, opt_state = est.init(w, seed=0), tx.init(w)
        >>> for _ in range(200):
        ...     (value, grads), state = est.value_and_grad(lambda w: w @ w)(state, w)
        ...     updates, opt_state = tx.update(grads, opt_state, w)
        ...     w = fo.apply_updates(w, updates)
        >>> bool(w.norm() < 0.1)
        True
    """

    def value_and_grad(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function (state, params, *args) → ((value, grads), state)."""
        measured = self.measure(loss_fn)

        def estimate(state: EstimatorState, params: Tree, *args: Any) -> Any:
            value, state = measured(state, params, *args)
            return (value, self.gradient(state, params)), state

        return estimate

    def ask(self, state: EstimatorState, params: Tree) -> tuple[Tree, EstimatorState]:
        """The points to evaluate the loss at: a tree like params with a leading dimension."""
        return self.candidates(state, params), state

    def tell(
        self, candidates: Tree, losses: Tensor, state: EstimatorState
    ) -> tuple[tuple[Tensor, Tree], EstimatorState]:
        """The estimate from the losses of all candidates: ((value, grads), state).

        Example::

            >>> import torch, functional_optim as fo
            >>> est, tx, w = fo.estimators.spsa(c=0.1), fo.sgd(0.05), torch.tensor([3.0, -2.0])
            >>> state, opt_state = est.init(w, seed=0), tx.init(w)
            >>> for _ in range(200):
            ...     candidates, state = est.ask(state, w)
            ...     losses = torch.tensor([float(x @ x) for x in candidates])  # from anywhere
            ...     (value, grads), state = est.tell(candidates, losses, state)
            ...     updates, opt_state = tx.update(grads, opt_state, w)
            ...     w = fo.apply_updates(w, updates)
            >>> bool(w.norm() < 0.1)
            True
        """
        value, state = self.read(losses, state)
        return (value, self.gradient(state, tree.map(lambda x: x[0], candidates))), state


def replay(
    estimator: Estimator,
    tx: base.GradientTransformation,
    params: Tree,
    log: Iterable[EstimatorState],
    opt_state: Tree | None = None,
) -> tuple[Tree, Tree]:
    """Replay a run from its log of scalars, bitwise, without a loss or data.

    Args:
        estimator: that of the run.
        tx: the transformation of the run. It follows its schedules; if hyperparameters were changed
            at some step, replay the parts before and after it separately.
        params: the parameters at the start of the log.
        log: the states after each estimate. One takes 24 bytes, more with several directions.
        opt_state: of tx at the start of the log. Default: `tx.init(params)`.

    Returns:
        Parameters and the transformation's state at the end.

    Example::

        >>> import torch, functional_optim as fo
        >>> est, tx = fo.estimators.mezo(), fo.adam(0.1)
        >>> start = torch.ones(3)
        >>> w, state, opt_state, log = start, est.init(start, seed=0), tx.init(start), []
        >>> for _ in range(5):
        ...     (_, grads), state = est.value_and_grad(lambda w: w @ w)(state, w)
        ...     updates, opt_state = tx.update(grads, opt_state, w)
        ...     w = fo.apply_updates(w, updates)
        ...     log.append(state)
        >>> torch.equal(fo.estimators.replay(est, tx, start, log)[0], w)
        True
    """
    base.check_transformation("replay", tx, "adam(lr=1e-3)")
    if not isinstance(estimator, Estimator):
        raise TypeError(
            f"replay takes an estimator first, but got a {type(estimator).__name__}; pass e.g. "
            "mezo()."
        )
    if not isinstance(log, Iterable):
        raise TypeError(f"replay takes a list of states as log, but got {log!r}.")
    opt_state = tx.init(params) if opt_state is None else opt_state
    for state in log:
        updates, opt_state = tx.update(estimator.gradient(state, params), opt_state, params)
        params = base.apply_updates(params, updates)
    return params, opt_state


def check_some(who: str, params: Tree) -> None:
    """Raise an error unless this is a tree of parameters, and not an empty one."""
    base.check_params(params)
    if not tree.leaves(params):
        raise ValueError(
            f"{who} got a tree without parameters, so there is nothing to estimate; pass a pytree "
            "of tensors such as dict(model.named_parameters())."
        )


def check_estimate(who: str, state: Any) -> None:
    """Raise TypeError unless this is the state of an estimator."""
    if not isinstance(state, (EstimatorState, SignsState)):
        raise TypeError(
            f"{who} needs the state of an estimator, but got a {type(state).__name__}; pass what "
            "its init or measure returned."
        )


def check_normal(who: str, state: Any) -> None:
    """Raise TypeError unless the weights of this state belong to normal numbers."""
    check_estimate(who, state)
    if isinstance(state, SignsState):
        raise TypeError(
            f"{who} got the state of an estimator with random signs, such as spsa, and would take "
            "its weights for those of normal numbers; pass a state of mezo, or use the gradient of "
            "the estimator that made the state."
        )


class Rays(NamedTuple):
    """The directions of an estimate.

    number: of directions. signs: whether to use random signs instead of normal numbers. batched:
    whether to compute all at once; otherwise one leaf of one direction at a time.
    """

    number: int
    signs: bool
    batched: bool

    def start(self, name: str) -> Callable[..., EstimatorState]:
        """`init` of an estimator with these directions."""

        def init(params: Tree, seed: int | Tensor = 0) -> EstimatorState:
            check_some(name, params)
            own = randomness.seed_tensor(name, seed, base.default_device(tree.leaves(params)))
            weights = torch.zeros(self.number, dtype=torch.float64, device=own.device)
            return self.state(torch.zeros_like(own), own, weights)

        return init

    def state(self, step: Tensor, seed: Tensor, weights: Tensor) -> EstimatorState:
        """A state whose weights belong to these directions."""
        kind: Any = SignsState if self.signs else EstimatorState
        return kind(step, seed, weights)

    def one(self, key: Tensor, i: Any, path: str, p: Tensor) -> Tensor:
        """A leaf of direction i."""
        mine = randomness.derived(key, i)
        return draws.leaf(mine, path, p, signs=self.signs)

    def all(self, key: Tensor, path: str, p: Tensor) -> Tensor:
        """A leaf of every direction, stacked."""
        every = torch.arange(self.number, dtype=torch.int64, device=key.device)
        draw = torch.vmap(lambda i: self.one(key, i, path, p))
        return held(draw, every)  # an interrupt could leave torch's vmap active

    def gradient(self, state: EstimatorState, params: Tree) -> Tree:
        """The sum of directions times weights of a state."""
        check = check_estimate if self.signs else check_normal
        check("an estimate", state)
        if len(state.weights) != self.number:
            raise ValueError(
                f"the estimator has {self.number} directions, but the state has "
                f"{len(state.weights)}; use the estimator that made the state."
            )
        key = draws.stream(state.seed, state.step)
        return tree.map_with_path(lambda path, p: self.sum(key, state.weights, path, p), params)

    def sum(self, key: Tensor, weights: Tensor, path: str, p: Tensor) -> Tensor:
        """One leaf of this sum."""
        if self.batched:
            z = self.all(key, path, p)
            own = weights.to(z.device, z.dtype)
            return (own.reshape(-1, *[1] * p.dim()) * z).sum(0)
        total: Any = 0
        for i in range(self.number):
            z = self.one(key, i, path, p)
            total = weights[i].to(z.device, z.dtype) * z + total
        return total


def key_ahead(state: EstimatorState) -> tuple[Tensor, Tensor]:
    """The key of the next estimate, and its index t = 1, 2, … in float64."""
    check_estimate("an estimate", state)
    step = state.step + 1
    return draws.stream(state.seed, step), step.to(torch.float64)


def shared(x: Tensor) -> Tensor:
    """Finite values divided by their number, so that the sum is a mean; 0 for the others."""
    return finite(x) / x.isfinite().sum().clamp(min=1)


def number(name: str, value: Any) -> Tensor:
    """The return value of a loss function, 0-dim."""
    if value is None or isinstance(value, (str, bytes, dict, set)):
        raise TypeError(
            f"{name} needs a loss function that returns one real number, but it returned "
            f"{value if value is None else f'a {type(value).__name__}'}; end it with e.g. return "
            "loss."
        )
    x = tensor_of(value)
    if x.numel() != 1 or x.is_complex():
        raise ValueError(
            f"{name} needs a loss function that returns one real number, but got a tensor of "
            f"{x.dtype} and shape {tuple(x.shape)}; take e.g. its mean."
        )
    return x.reshape(())
