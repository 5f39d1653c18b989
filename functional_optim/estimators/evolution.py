"""Evolution strategies as an estimator of gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core.factory import factory
from functional_optim.estimators.pairs import differences, pairs
from functional_optim.estimators.protocol import Estimator, Rays
from functional_optim.search.shaping import centered_ranks


@factory
def es_gradient(
    population: int = 64, sigma: numeric.Hyper = 0.02, *, ranks: bool = True, batched: bool = True
) -> Estimator:
    """Estimate the gradient of the loss smoothed by normal noise, from antithetic pairs.

    With directions zᵢ of normal numbers and n candidates p ± σ zᵢ, half of them on each side:
    1 / (n σ) Σ (F(p + σ zᵢ) − F(p − σ zᵢ)) zᵢ, where F is the loss or its centred rank.

    Args:
        population: number of candidates, even, ≥ 2. Default 64; more for many parameters.
        sigma: their standard deviation, > 0: a number, a 0-dim tensor, or a schedule. Default 0.02,
            as in the authors' code (https://github.com/openai/evolution-strategies-starter).
        ranks: replace the losses by their ranks, evenly from −0.5 for the best to 0.5 for the
            worst: outliers and the scale of the loss then have no effect, and NaN and infinite
            losses rank last. The estimate has the gradient's direction, not its length. False:
            use the losses; this is unbiased for the smoothed loss, and ignores a pair with a NaN
            or an infinite loss.
        batched: evaluate all at once, under torch.vmap. False: one after the other, each leaf
            perturbed when it is read.

    Raises:
        ValueError: for hyperparameters out of range.

    Papers: Salimans et al., "Evolution Strategies as a Scalable Alternative to Reinforcement
    Learning", https://arxiv.org/abs/1703.03864; for the pairs, Brockhoff et al., "Mirrored
    Sampling and Sequential Selection for Evolution Strategies",
    https://doi.org/10.1007/978-3-642-15844-5_2.

    Example::

        >>> import torch, functional_optim as fo
        >>> est, tx = fo.estimators.es_gradient(population=16, sigma=0.1), fo.adam(0.1)
        >>> w = torch.tensor([3.0, -2.0])
        >>> state, opt_state = est.init(w, seed=0), tx.init(w)
        >>> for _ in range(100):
        ...     (value, grads), state = est.value_and_grad(lambda w: w @ w)(state, w)
        ...     updates, opt_state = tx.update(grads, opt_state, w)
        ...     w = fo.apply_updates(w, updates)
        >>> bool(w.norm() < 0.2)
        True
    """
    numeric.check_range("es_gradient", "positive", sigma=sigma)
    numeric.check_count("es_gradient", 1, population=population)
    if population % 2:
        raise ValueError(
            f"es_gradient evaluates pairs, so it needs an even population, but got {population}."
        )
    weigh = by_rank if ranks else differences
    return pairs("es_gradient", Rays(population // 2, False, batched), sigma, weigh)


def by_rank(plus: Tensor, minus: Tensor) -> Tensor:
    """The differences of centred ranks in the whole population, divided by the number of pairs."""
    n = plus.shape[0]
    shaped = centered_ranks(torch.cat([plus, minus]))
    return (shaped[:n] - shaped[n:]) / n
