"""Muon: momentum, orthogonalized.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon/. The factors of `adjust_lr_fn`: the same, and Liu et al.,
"Muon is Scalable for LLM Training", https://arxiv.org/abs/2502.16982, section 2.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.linalg import MUON_COEFFICIENTS
from functional_optim.transforms import add_decayed_weights, scale_by_lr
from functional_optim.transforms.normalizing import orthogonal
from functional_optim.transforms.scaling import check_lr


class MuonSlots(NamedTuple):
    momentum_buffer: Tensor
    """Average m of the gradient, like p."""


@factory
def scale_by_muon(
    momentum: numeric.Hyper = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = MUON_COEFFICIENTS,
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> Leafwise:
    """The nearest orthogonal matrix to the average gradient, times a factor of its shape.

    Args:
        momentum: decay rate of the average, ≥ 0.
        nesterov: orthogonalize the average of g and m instead of m.
        ns_coefficients: of the Newton–Schulz quintic. Python numbers, fixed in the kernel.
        eps: least norm to divide by in it.
        ns_steps: its repetitions, below 100.
        adjust_lr_fn: factor for an m × n matrix. "original", or None: √max(1, m/n);
            "match_rms_adamw": 0.2 √max(m, n).

    State: `momentum_buffer`, like the parameters.

    Raises:
        ValueError: torch.optim.Muon's messages; for a parameter that is not a matrix.
        RuntimeError: for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_muon()
        >>> w = torch.zeros(2, 2)
        >>> u, state = tx.update(torch.diag(torch.tensor([1.0, 100.0])), tx.init(w), w)
        >>> bool((torch.linalg.svdvals(u) > 0.6).all())
        True
    """
    numeric.check(lambda x: x >= 0.0, momentum, "momentum should be >= 0 but is: {}")
    turned = orthogonal(ns_coefficients, eps, ns_steps, adjust_lr_fn or "original")

    def init(p: Tensor) -> MuonSlots:
        if p.is_complex():
            raise RuntimeError("Muon does not support complex parameters")
        if p.dim() != 2:
            raise ValueError(
                "Muon only supports 2D parameters whereas we found a parameter with size: "
                f"{p.size()}"
            )
        return MuonSlots(torch.zeros_like(p))

    def scalars(t: Any, *, momentum: Any) -> tuple[Any]:
        return (1 - momentum,)

    def average(g: Tensor, slots: MuonSlots, p: Tensor, a: Any) -> tuple[Tensor, MuonSlots]:
        m = slots.momentum_buffer.lerp(g, a)
        return m.lerp(g, a) if nesterov else m, MuonSlots(m)

    mix = leafwise(init, average, scalars, name="scale_by_muon", hyper={"momentum": momentum})
    turn = leafwise(None, turned, elementwise=False, batched=True, name="orthogonalize")
    return Leafwise((*mix.placements, *turn.placements))


@factory
def muon(
    lr: numeric.Hyper = 1e-3,
    weight_decay: numeric.Hyper = 0.1,
    momentum: numeric.Hyper = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = MUON_COEFFICIENTS,
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> GradientTransformation:
    """Muon, with torch.optim.Muon's arguments and defaults. For matrices of hidden layers only.

    Embeddings, heads, biases and norms want another optimizer, such as `adamw`.

    Args:
        lr: learning rate, ≥ 0.
        weight_decay: decoupled decay, ≥ 0.
        momentum: decay rate of the average gradient, ≥ 0.
        nesterov: orthogonalize the average of g and m instead of m.
        ns_coefficients: of the Newton–Schulz quintic.
        eps: least norm to divide by in it.
        ns_steps: its repetitions, below 100.
        adjust_lr_fn: factor for an m × n matrix. "original", or None: √max(1, m/n);
            "match_rms_adamw": 0.2 √max(m, n), so that lr and decay tuned for AdamW can stay.

    State: `momentum_buffer`, like the parameters.

    Raises:
        ValueError: torch.optim.Muon's messages; for a parameter that is not a matrix.
        RuntimeError: for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.muon(lr=0.1)
        >>> w = torch.eye(2)
        >>> updates, state = tx.update(torch.tensor([[1.0, 0.0], [0.0, 5.0]]), tx.init(w), w)
        >>> bool((fo.apply_updates(w, updates).diag() < 0.95).all())
        True
    """
    check_lr(lr, "Learning rate should be >= 0 but is: {}")
    numeric.check(lambda x: x >= 0.0, weight_decay, "weight decay should be >= 0 but is: {}")
    return chain(
        scale_by_muon(momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn),
        add_decayed_weights(weight_decay),
        scale_by_lr(lr),
    )
