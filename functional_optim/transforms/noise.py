"""Adding noise."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base, draws, randomness
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.noise import noise, words_of


class NoiseSlots(NamedTuple):
    noise_key: Tensor
    """A function of the seed and the leaf's path, 0-dim int64: a batch of states with different
    keys is an ensemble."""


@factory
def add_noise(eta: numeric.Hyper, gamma: numeric.Hyper, seed: int | Tensor) -> Leafwise:
    """Add normal noise of variance eta / tᵞ at step t = 1, 2, …

    The noise is a pure function of the seed, the step, the leaf's path and the element's place.
    Eager, compiled and resumed runs have the same noise (without a compiler, up to the rounding of
    logarithm and cosine), and no generator is used.

    Args:
        eta: variance at the first step, ≥ 0: a number, a 0-dim tensor, or a schedule. The paper
            uses 0.01, 0.3 and 1.
        gamma: decay exponent, ≥ 0: a number, a 0-dim tensor, or a schedule. The paper uses 0.55.
        seed: a Python integer, or a 0-dim tensor of integers; 64 bits.

    The two parts of a complex element get noise of that variance each. A sparse gradient becomes
    dense.

    State: `step`, and for each leaf `noise_key`, which `init` makes of the seed and the path.

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
    hyper = {"eta": eta, "gamma": gamma}
    numeric.check_range("add_noise", "of 0 or more", **hyper)
    randomness.seed_tensor("add_noise", seed, torch.device("cpu"))
    return leafwise(_Keys(seed), _noisy, _scalars, hyper=hyper, name="add_noise")


class _Keys:
    """`init`, which depends on the path of a leaf.

    All are equal, as their slots are alike: a seed is no reason to record the rule again.
    """

    __slots__ = ("seed",)
    draws = True

    def __init__(self, seed: int | Tensor) -> None:
        self.seed = seed

    def __call__(self, p: Tensor, path: str = "") -> NoiseSlots:
        seed = randomness.seed_tensor("add_noise", self.seed, p.device)
        return NoiseSlots(base.batched(draws.key_of(seed, path), [p]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keys)

    def __hash__(self) -> int:
        return hash(_Keys)


def _scalars(t, *, eta, gamma):
    return (numeric.sqrt(eta / numeric.power(t, gamma)), *words_of(t))


def _noisy(u: Tensor, slots: Any, p: Tensor, deviation: Any, low: Any, high: Any) -> Any:
    return u + deviation * noise(u, slots.noise_key, low, high), slots
