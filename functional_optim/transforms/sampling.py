"""Propose, accept, or go back.

Metropolis, Rosenbluth, Rosenbluth, Teller, Teller, "Equation of State Calculations by Fast
Computing Machines", https://doi.org/10.1063/1.1699114; with a temperature that falls, Kirkpatrick,
Gelatt, Vecchi, "Optimization by Simulated Annealing", https://doi.org/10.1126/science.220.4598.671.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.core import base, draws, randomness
from functional_optim.core.base import Tree
from functional_optim.core.calls import takes
from functional_optim.core.chain import WithoutGradients
from functional_optim.core.factory import factory


class MetropolisState(NamedTuple):
    """The current sample of the chain; the parameters are the proposal.

    step: 0-dim int64, number of evaluated points, including the first one.
    seed: 0-dim int64.
    accepted: 0-dim int64, number of accepted proposals.
    value: 0-dim float64, the energy of `params`; infinite before the first evaluation.
    params: a tree like the parameters: the current sample, exactly as it was evaluated.
    """

    step: Tensor
    seed: Tensor
    accepted: Tensor
    value: Tensor
    params: Tree


@factory
def metropolis(
    propose: Callable[[Tree, Tree], Tree], temperature: numeric.Hyper = 1.0, seed: int | Tensor = 0
) -> base.GradientTransformation:
    """Sample from exp(−f / temperature), or anneal, by accepting or rejecting proposals.

    Each update accepts the evaluated point with probability min(1, exp(−(new − old) /
    temperature)); otherwise it returns to the old point. It then moves to the next proposal, which
    is computed from the current sample::

        updates, state = tx.update(None, state, params, value=f(params))  # no gradients
        params = fo.apply_updates(params, updates)  # the next proposal, not yet evaluated

    **`state.params` is the sample**; the parameters are the proposal. Read samples, and the result
    of annealing, from `state.params`.

    Args:
        propose: `propose(params, noise)` returns a tree like params. `noise` is a tree of
            independent standard normal values in the compute dtype; complex elements have two such
            parts. A proposal must be as likely as the reverse proposal. Use tensor operations only,
            and no other random numbers.
        temperature: ≥ 0: a number, a 0-dim tensor, or a schedule from the number of evaluations so
            far. At 0 no point with a higher value is accepted. Default 1.
        seed: a Python integer, or a 0-dim tensor of integers; 64 bits. Chains with different seeds
            are independent; `torch.vmap` runs them in parallel.

    Extra argument of `update`: `value`, the energy of `params`. A NaN counts as infinite, and is
    not accepted once there is a finite value. Gradients are ignored.

    The update to a proposal is computed in float64, so float32 and narrower parameters reach the
    proposal exactly. Doubles may have a rounding error; the state stores the point that was
    evaluated.

    State: a `MetropolisState`. In an optimizer object, call `step(closure)`; gradients are not
    needed.

    Raises:
        ValueError: for a negative temperature; from update, without params, for a value that is not
            a single number, and for a proposal of another structure.
        TypeError: if `propose` does not take two arguments, or the seed is not an integer; from
            update, without value.

    Example::

        >>> import torch, functional_optim as fo
        >>> def jump(w, z):
        ...     return w + 2 * z
        >>> tx = fo.metropolis(jump, temperature=1.0, seed=0)  # f(w) = w²/2: a standard normal
        >>> w = torch.zeros(500)
        >>> one_chain = lambda w, state: tx.update(None, state, w, value=w * w / 2)
        >>> seeds = torch.arange(500)
        >>> state = torch.vmap(lambda w, s: fo.metropolis(jump, 1.0, s).init(w))(w, seeds)
        >>> for _ in range(30):
        ...     u, state = torch.vmap(one_chain)(w, state)
        ...     w = fo.apply_updates(w, u)
        >>> bool(abs(state.params.var() - 1) < 0.3)
        True
    """
    if not callable(propose) or not takes(propose, None, None):
        raise TypeError(
            f"metropolis needs a function propose(params, noise), but got a "
            f"{type(propose).__name__}{' of other arguments' * callable(propose)}; pass e.g. "
            "lambda p, z: fo.tree.map(torch.add, p, z)."
        )
    numeric.check_range("metropolis", "of 0 or more", temperature=temperature)
    randomness.seed_tensor("metropolis", seed, torch.device("cpu"))

    def init(params: Tree) -> MetropolisState:
        base.check_params(params)
        device = base.default_device(tree.leaves(params))
        own = randomness.seed_tensor("metropolis", seed, device)
        step = torch.zeros_like(own)
        value = torch.full_like(step, torch.inf, dtype=torch.float64)
        kept = tree.map(lambda p: p.detach().clone(), params)
        return MetropolisState(step, own, torch.zeros_like(step), value, kept)

    def update(
        grads: Tree, state: MetropolisState, params: Tree = None, *, value: Any = base.NEEDED
    ) -> tuple[Tree, MetropolisState]:
        base.check_needed("metropolis", value=value)
        base.check_passed(params)
        tree.check_same(
            params, state.params, "params", "those of the state", "pass what init was called with"
        )
        step = state.step + 1
        key = draws.stream(state.seed, step)
        new = energy(value, state.value)
        chance = randomness.uniform(key, (), new.device)
        degrees = numeric.at(temperature, step.to(torch.float64))
        # chance < exp(−(new − old) / T), without dividing by a temperature of 0
        taken = (new <= state.value) | (chance.log() * degrees < state.value - new)
        kept = tree.map(lambda p, old: torch.where(taken, p.detach(), old), params, state.params)
        proposal = propose(kept, draws.like(key, params))
        tree.check_same(params, proposal, "params", "the proposal", "return one tensor for each")
        after = MetropolisState(
            step,
            state.seed,
            state.accepted + (taken & (state.step > 0)),
            torch.where(taken, new, state.value),
            kept,
        )
        return tree.map(way, params, proposal), after

    return WithoutGradients(init, update)


def energy(value: Any, like: Tensor) -> Tensor:
    """A value as a 0-dim tensor like another, infinite if it is NaN."""
    x = base.one_number(value, like).detach()
    return x.reshape(()).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)


def way(p: Tensor, to: Tensor) -> Tensor:
    """The update from p to another tensor."""
    wide = torch.complex128 if p.is_complex() else torch.float64
    return to.to(p.dtype).to(wide) - p.detach().to(wide)
