"""Muon: momentum, orthogonalized.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon/. The factors of shapes: the same, and Liu et al., "Muon
is Scalable for LLM Training", https://arxiv.org/abs/2502.16982, section 2.2.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core.base import EmptyState, GradientTransformation
from functional_optim.core.calls import check_choice
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.linalg import Coefficients
from functional_optim.transforms.descent import descent
from functional_optim.transforms.orthogonal import Scale, orthogonalize
from functional_optim.transforms.rules import zeros
from functional_optim.transforms.scaling import check_lr

Accumulator = Literal["ema", "sum"]
"""The kind of momentum: the average m ← μ m + (1 − μ) g, or the sum m ← μ m + g."""

Nesterov = bool | Literal["classic", "grokfast"]
"""The direction of a step: m; or for True and "classic" m after one more step with the same
gradient; or for "grokfast" g + m."""


class MuonSlots(NamedTuple):
    momentum_buffer: Tensor
    """Momentum m, like p."""


@factory
def scale_by_muon(
    momentum: numeric.Hyper = 0.95,
    nesterov: Nesterov = True,
    ns_coefficients: Coefficients = "jordan",
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    *,
    scale: Scale = "original",
    accumulator: Accumulator = "ema",
    ns_dtype: torch.dtype = torch.bfloat16,
) -> Leafwise:
    """The nearest orthogonal matrix to the momentum, times a factor of its shape.

    Args:
        momentum: decay rate μ of the momentum m, ≥ 0.
        nesterov: True, or "classic": orthogonalize m after one more step with the same gradient;
            "grokfast": g + m; False: m.
        ns_coefficients: of the Newton–Schulz quintic: "jordan", "leloykun", "polar_express", a
            custom (a, b, c), or one such triple for each step. Constants of the kernel.
        eps: lower bound of the norm in its division.
        ns_steps: number of its repetitions, below 100.
        adjust_lr_fn: torch's name for `scale`: "original", "match_rms_adamw", "spectral_unclamped".
            None: use `scale`.
        scale: factor for an m × n matrix (out, in). "original": √max(1, m/n); "match_rms_adamw":
            0.2 √max(m, n); "spectral": √(m/n); None: 1.
        accumulator: "ema": m ← μ m + (1 − μ) g, torch's; "sum": m ← μ m + g, the article's.
        ns_dtype: dtype of its products: torch.bfloat16, float32, or float64.

    State: `momentum_buffer`, like the parameters.

    Raises:
        ValueError: torch.optim.Muon's messages; for an unknown option; for a parameter that is not
            a matrix.
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
    if adjust_lr_fn is not None:
        if adjust_lr_fn not in TORCHS:
            raise ValueError(f"Adjust learning rate function {adjust_lr_fn} is not supported")
        scale = TORCHS[adjust_lr_fn]
    turn = orthogonalize(ns_coefficients, eps, ns_steps, scale, ns_dtype=ns_dtype)
    mix = matrix_momentum("scale_by_muon", momentum, nesterov, accumulator)
    return Leafwise((*mix.placements, *[x.initialized(_checked) for x in turn.placements]))


TORCHS: dict[str, Scale] = {
    "original": "original",
    "match_rms_adamw": "match_rms_adamw",
    "spectral_unclamped": "spectral",
}
"""torch.optim.Muon's names of scales; the last one was added in torch 2.14."""


def _checked(p: Tensor) -> EmptyState:
    """Raise torch.optim.Muon's errors for an unsupported parameter."""
    if p.is_complex():
        raise RuntimeError("Muon does not support complex parameters")
    if p.dim() != 2:
        raise ValueError(
            f"Muon only supports 2D parameters whereas we found a parameter with size: {p.size()}; "
            "use muon_adamw, or adapters.MuonAdamW, which step other parameters by AdamW."
        )
    return EmptyState()


def matrix_momentum(
    name: str, momentum: numeric.Hyper, nesterov: Nesterov, accumulator: Accumulator = "ema"
) -> Leafwise:
    """The momentum of a matrix optimizer.

    Raises:
        ValueError: for an unknown option.
    """
    check_choice(name, ("ema", "sum"), accumulator=accumulator)
    check_choice(name, (True, False, "classic", "grokfast"), nesterov=nesterov)

    init = zeros(MuonSlots)

    def scalars(t, *, momentum):
        return momentum, 1 - momentum

    def update(g: Tensor, slots: MuonSlots, p: Tensor, mu: Any, a: Any) -> tuple[Tensor, MuonSlots]:
        def after(m: Tensor) -> Tensor:
            return m.lerp(g, a) if accumulator == "ema" else mu * m + g

        m = after(slots.momentum_buffer)
        if nesterov == "grokfast":
            return g + m, MuonSlots(m)
        return after(m) if nesterov else m, MuonSlots(m)

    return leafwise(init, update, scalars, name=name, hyper={"momentum": momentum})


@factory
def muon(
    lr: numeric.Hyper = 1e-3,
    weight_decay: numeric.Hyper = 0.1,
    momentum: numeric.Hyper = 0.95,
    nesterov: Nesterov = True,
    ns_coefficients: Coefficients = "jordan",
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    *,
    scale: Scale = "original",
    accumulator: Accumulator = "ema",
    ns_dtype: torch.dtype = torch.bfloat16,
) -> GradientTransformation:
    """Muon, with torch.optim.Muon's arguments and defaults. For matrices of hidden layers only.

    Use another optimizer, such as `adamw`, for embeddings, heads, biases and norms: `muon_adamw`
    combines the two. Use `as_matrix` to describe stacks of matrices and fused projections.

    Args:
        lr: learning rate, ≥ 0.
        weight_decay: decoupled decay, ≥ 0.
        momentum: decay rate μ of the momentum m, ≥ 0.
        nesterov: True, or "classic": orthogonalize m after one more step with the same gradient;
            "grokfast": g + m; False: m.
        ns_coefficients: of the Newton–Schulz quintic: "jordan", "leloykun", "polar_express", a
            custom (a, b, c), or one such triple for each step.
        eps: lower bound of the norm in its division.
        ns_steps: number of its repetitions, below 100.
        adjust_lr_fn: torch's name for `scale`: "original", "match_rms_adamw", "spectral_unclamped".
            None: use `scale`.
        scale: factor for an m × n matrix (out, in). "original": √max(1, m/n); "match_rms_adamw":
            0.2 √max(m, n), for lr and decay tuned for AdamW; "spectral": √(m/n);
            None: 1.
        accumulator: "ema": m ← μ m + (1 − μ) g, torch's; "sum": m ← μ m + g, the article's.
        ns_dtype: dtype of its products: torch.bfloat16, float32, or float64.

    State: `momentum_buffer`, like the parameters.

    Raises:
        ValueError: torch.optim.Muon's messages; for an unknown option; for a parameter that is not
            a matrix.
        RuntimeError: for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.muon(lr=0.1)
        >>> w = torch.eye(2)
        >>> updates, state = tx.update(torch.tensor([[1.0, 0.0], [0.0, 5.0]]), tx.init(w), w)
        >>> bool((fo.apply_updates(w, updates).diag() < 0.95).all())
        True
    """
    adapt = scale_by_muon(
        momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn,
        scale=scale, accumulator=accumulator, ns_dtype=ns_dtype,
    )  # fmt: skip
    return matrix_chain(adapt, lr, weight_decay)


def matrix_chain(
    adapt: GradientTransformation, lr: numeric.Hyper, weight_decay: numeric.Hyper
) -> GradientTransformation:
    """The transform of a matrix optimizer with decoupled decay and a learning rate.

    Raises:
        ValueError: for hyperparameters out of range.
    """
    check_lr(lr, "Learning rate should be >= 0 but is: {}")
    numeric.check(lambda x: x >= 0.0, weight_decay, "weight decay should be >= 0 but is: {}")
    return descent(adapt, lr, weight_decay, decoupled=True)
