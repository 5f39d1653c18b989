"""Adding noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.core import base, draws, randomness, sharding
from functional_optim.core.factory import factory
from functional_optim.core.storage import as_real, as_update, compute_dtype


class NoiseState(NamedTuple):
    step: Tensor
    """Number of finished steps, 0-dim int64."""
    seed: Tensor
    """The seed, 0-dim int64: a batch of states with different seeds is an ensemble."""


@factory
def add_noise(
    eta: numeric.Hyper, gamma: numeric.Hyper, seed: int | Tensor
) -> base.GradientTransformation:
    """Add normal noise of variance eta / tᵞ at step t = 1, 2, …

    The noise is a pure function of the seed, the step, the leaf's path and the element's place.
    Eager, compiled and resumed runs have the same noise (up to the rounding of logarithm and
    cosine), and no generator is used. It acts on all parameters at once, so it does not fuse with
    its neighbours.

    Args:
        eta: variance at the first step, ≥ 0: a number, a 0-dim tensor, or a schedule. The paper
            uses 0.01, 0.3 and 1.
        gamma: decay exponent, ≥ 0: a number, a 0-dim tensor, or a schedule. The paper uses 0.55.
        seed: a Python integer, or a 0-dim tensor of integers; 64 bits.

    The two parts of a complex element get noise of that variance each.

    State: `step` and `seed`. A step uses the seed of the state.

    Raises:
        ValueError: if eta or gamma is a negative number, or the seed has more than 64 bits.
        TypeError: if the seed is not an integer.

    Paper: Neelakantan et al., "Adding Gradient Noise Improves Learning for Very Deep Networks",
    https://arxiv.org/abs/1511.06807, equation 1.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.add_noise(eta=0.01, gamma=0.55, seed=0), fo.sgd(0.1))
        >>> w = torch.zeros(1000)
        >>> u, state = tx.update(torch.zeros(1000), tx.init(w), w)
        >>> round(float(u.std()), 3)  # 0.1 · √0.01
        0.01
    """
    for name, value in (("eta", eta), ("gamma", gamma)):
        numeric.check(
            lambda x: x >= 0.0, value, f"add_noise needs {name} of 0 or more, but got {{}}."
        )
    init = seeded("add_noise", seed)

    def update(grads: Any, state: NoiseState, params: Any = None) -> tuple[Any, NoiseState]:
        step = state.step + 1
        t = step.to(torch.float64)
        deviation = numeric.sqrt(numeric.at(eta, t) / numeric.power(t, numeric.at(gamma, t)))
        key = draws.stream(state.seed, step)

        def dense(g: Tensor) -> Tensor:
            return sharding.complete(g if g.layout is torch.strided else g.to_dense())

        def noisy(g: Tensor) -> Tensor:
            x = as_real(g.resolve_conj(), compute_dtype(g))
            width = deviation.to(x.device, x.dtype)
            return as_update(x + width * sharding.placed_like(next(drawn), x), g)

        grads = tree.map(dense, grads)
        wanted: list[draws.Wanted] = []
        tree.map_with_path(lambda path, g: wanted.append(draws.wanted_for(path, g)), grads)
        drawn = iter(draws.for_paths(key, wanted))
        return tree.map(noisy, grads), NoiseState(step, state.seed)

    return base.GradientTransformation(init, update)


def seeded(name: str, seed: int | Tensor) -> Callable[[Any], NoiseState]:
    """`init` of a transformation that draws noise; errors name it. An invalid seed raises an error
    at once."""
    randomness.seed_tensor(name, seed, torch.device("cpu"))

    def init(params: Any) -> NoiseState:
        base.check_params(params)
        leaves = tree.leaves(params)
        device = base.default_device(leaves)
        return NoiseState(base.first_step(leaves), randomness.seed_tensor(name, seed, device))

    return init
