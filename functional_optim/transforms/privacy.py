"""Gradients that reveal little about single examples."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.core import base, draws, randomness
from functional_optim.core.factory import factory
from functional_optim.core.storage import as_real, as_update, compute_dtype


class NoiseState(NamedTuple):
    step: Tensor
    """Number of finished steps, 0-dim int64."""
    seed: Tensor
    """The seed, 0-dim int64: a batch of states with different seeds is an ensemble."""


@factory
def differentially_private_aggregate(
    l2_norm_clip: numeric.Hyper, noise_multiplier: numeric.Hyper, seed: int | Tensor
) -> base.GradientTransformation:
    """Clip the gradient of each example, add them up, add noise, and divide by their number.

    With C = `l2_norm_clip` and σ = `noise_multiplier`, from B gradients to one::

        (Σᵢ gᵢ / max(1, ‖gᵢ‖ / C) + σ C z) / B,    z standard normal

    The norm covers all parameters of an example, so one example changes the sum by C at most.
    Gradients have the examples in the first dimension, (B, *shape of the parameter), as
    `torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)` returns them. The
    updates have the parameters' shapes, for any transformation after it. It acts on all parameters
    at once, so it does not fuse with its neighbours, and must be first in a chain. Noise is a
    function of the seed, the step, the leaf's path and the element's place, as in `add_noise`.

    An example whose norm is not finite counts as zero, because its influence would be unbounded. It
    still counts in B. Use a privacy accountant to compute the (ε, δ) of a run from σ, the share of
    the data in a batch and the number of steps; they assume that the seed is secret. If batches
    have a varying number of examples (Poisson sampling), add `scale(B / expected)` after this
    transform, to divide by the expected number.

    Args:
        l2_norm_clip: C, > 0: a number, a 0-dim tensor, or a schedule. The paper uses 4 for MNIST
            and 3 for CIFAR-10.
        noise_multiplier: σ, ≥ 0: a number, a 0-dim tensor, or a schedule. The paper uses 2 to 8 for
            MNIST, 6 for CIFAR-10.
        seed: a Python integer, or a 0-dim tensor of integers; 64 bits.

    State: `step` and `seed`. The seed of the state is the one that counts.

    Raises:
        ValueError: if a hyperparameter is out of range or the seed has more than 64 bits; from
            `update`, for gradients without a dimension of examples, or with different numbers of
            examples.
        TypeError: if the seed is not an integer.

    Paper: Abadi et al., "Deep Learning with Differential Privacy",
    https://arxiv.org/abs/1607.00133, Algorithm 1.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.differentially_private_aggregate(1.0, 0.0, seed=0), fo.sgd(1.0))
        >>> w = torch.zeros(2)
        >>> each = torch.tensor([[3.0, 4.0], [0.0, 0.5], [0.0, -1e30], [torch.inf, 0.0]])
        >>> u, state = tx.update(each, tx.init(w), w)
        >>> u  # -(0.6, 0.8 + 0.5 - 1) / 4
        tensor([-0.1500, -0.0750])
    """
    me = "differentially_private_aggregate"
    numeric.check_range(me, "above 0", l2_norm_clip=l2_norm_clip)
    numeric.check_range(me, "of 0 or more", noise_multiplier=noise_multiplier)
    randomness.seed_tensor(me, seed, torch.device("cpu"))

    def init(params: Any) -> NoiseState:
        base.check_params(params)
        leaves = tree.leaves(params)
        device = base.default_device(leaves)
        return NoiseState(base.first_step(leaves), randomness.seed_tensor(me, seed, device))

    def update(grads: Any, state: NoiseState, params: Any = None) -> tuple[Any, NoiseState]:
        base.check_passed(params)
        given = [row for row in tree.rows(params, grads) if row[1] is not None]
        if not given:
            return grads, base.replaced(state, step=state.step + 1)
        count = _examples(params, grads)
        t = (state.step + 1).to(torch.float64)
        clip = numeric.at(l2_norm_clip, t)
        deviation = clip * numeric.at(noise_multiplier, t)
        norms = torch.stack([_norms(g) for _, g in given]).square().sum(0).sqrt()
        shares = torch.where(norms.isfinite(), (clip / norms).clamp(max=1.0), 0.0)
        key = draws.stream(state.seed, state.step + 1)

        def mean(p: Tensor, g: Tensor | None, z: Tensor | None) -> Tensor | None:
            if g is None or z is None:
                return None
            x = as_real(g, compute_dtype(p))
            weights = shares.to(x.device, x.dtype)
            kept = torch.where(weights.reshape(-1, *[1] * (x.dim() - 1)) > 0, x, 0.0)
            noise = numeric.float64(deviation) * as_real(z, x.dtype).to(x.device, torch.float64)
            return as_update(((torch.tensordot(weights, kept, 1) + noise) / count).to(x.dtype), p)

        noised = tree.map(lambda p, g: None if g is None else p, params, grads)
        drawn = draws.like(key, noised)
        return tree.map(mean, params, grads, drawn), NoiseState(state.step + 1, state.seed)

    return base.GradientTransformation(init, update)


def _norms(g: Tensor) -> Tensor:
    """The norm of each example, summed in float64."""
    x = torch.view_as_real(g.resolve_conj()) if g.is_complex() else g
    flat = x.reshape(len(x), math.prod(x.shape[1:]))
    return torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)


def _examples(params: Any, grads: Any) -> int:
    """The number of examples; raises an error if they are not the first dimension of all
    gradients."""
    counts: dict[int, str] = {}
    for (path, p), (_, g) in zip(tree.items(params), tree.rows(params, grads), strict=True):
        if g is None:
            continue
        if g.dim() == 0 or g.shape[1:] != p.shape or len(g) == 0:
            raise ValueError(
                f"differentially_private_aggregate got a gradient of shape {tuple(g.shape)} for "
                f"{path!r} of shape {tuple(p.shape)}; it needs one gradient per example, the "
                "examples first, as torch.vmap(torch.func.grad(loss), in_dims=(None, 0)) makes "
                "them."
            )
        counts.setdefault(len(g), path)
    if len(counts) > 1:
        (m, a), (n, b) = list(counts.items())[:2]
        raise ValueError(
            f"differentially_private_aggregate got {m} examples for {a!r} and {n} for {b!r}; pass "
            "the gradients of one batch."
        )
    return next(iter(counts))
