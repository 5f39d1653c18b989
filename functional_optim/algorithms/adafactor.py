"""Adafactor: second moments kept as one row and one column.

Shazeer, Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
https://arxiv.org/abs/1804.04235, Algorithms 4 and 5, with torch.optim's relative step
min(lr, 1/√t).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import sharding
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.storage import Storage
from functional_optim.transforms.rules import root
from functional_optim.transforms.scaling import check_lr, scale, signed


class AdafactorSlots(NamedTuple):
    row_var: Tensor | None
    """Average R of the rows' mean squares, (…, m, 1); None for fewer than two dimensions."""
    col_var: Tensor | None
    """Average C of the columns' mean squares, (…, 1, n); None for fewer than two dimensions."""
    variance: Tensor | None
    """Average V of g², like p; None for two or more dimensions."""


@factory
def scale_by_adafactor(
    lr: numeric.Hyper = 1e-2,
    beta2_decay: numeric.Hyper = -0.8,
    eps: tuple[float | None, numeric.Hyper] = (None, 1e-3),
    d: numeric.Hyper = 1.0,
    weight_decay: numeric.Hyper = 0.0,
) -> Leafwise:
    """All of Adafactor, up to the sign: its step sizes depend on the parameter itself.

    Args:
        lr: largest relative step size ρ, ≥ 0.
        beta2_decay: γ ≤ 0 in β₂(t) = 1 − t^γ.
        eps: (ε₁, ε₂): lower bound of the root of the second moment (None: the machine epsilon of
            the compute dtype), and lower bound of the scale of a parameter.
        d: clipping threshold, ≥ 1.
        weight_decay: decoupled decay, ≥ 0.

    State: `row_var` and `col_var`, or `variance`, see `AdafactorSlots`.

    Raises:
        ValueError: torch.optim.Adafactor's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_adafactor()
        >>> state = tx.init({"w": torch.zeros(3, 2), "b": torch.zeros(2)})
        >>> state.slots["row_var"]["w"].shape, state.slots["row_var"]["b"]
        (torch.Size([3, 1]), None)
    """
    eps1, eps2 = numeric.pair(eps, "eps", "(None, 1e-3)")
    check_lr(lr, "Learning rate should be >= 0 but is: {}")
    numeric.check(lambda x: x <= 0.0, beta2_decay, "beta2_decay should be <= 0 but is: {}")
    if eps1 is not None:
        numeric.check(lambda x: x >= 0.0, eps1, "epsilon1 should be >= 0 but is: {}")
    numeric.check(lambda x: x >= 0.0, eps2, "epsilon2 should be >= 0 but is: {}")
    numeric.check(lambda x: x >= 1.0, d, "Clipping threshold d should be >= 1 but is: {}")
    numeric.check(lambda x: x >= 0.0, weight_decay, "weight_decay should be >= 0 but is: {}")

    def init(p: Tensor) -> AdafactorSlots:
        if p.is_complex():
            raise RuntimeError("Adafactor does not support complex parameters")
        if p.dim() < 2:
            return AdafactorSlots(None, None, torch.zeros_like(p))
        zero = torch.zeros_like(p)  # averaged, so that shards and strides are those of later steps
        return AdafactorSlots(mean(zero, -1), mean(zero, -2), None)

    def scalars(t, *, lr, beta2_decay, weight_decay, d):
        rho = numeric.minimum(lr, 1 / numeric.sqrt(t))
        weight = numeric.power(t, beta2_decay)
        return weight, rho, lr * weight_decay, numeric.at(eps2, t), d

    def update(g: Tensor, slots: AdafactorSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        a, rho, decay, min_scale, threshold = numbers
        least = torch.finfo(p.dtype).eps if eps1 is None else eps1
        R, C, v = slots
        if R is not None and C is not None:
            R = R.lerp(mean(g * g, -1), a)
            C = C.lerp(mean(g * g, -2), a)
            U = g * inverse_root(R, C, least).clamp(max=1 / least if least else math.inf)
        else:
            assert v is not None
            v = v.lerp(g * g, a)
            U = g * v.clamp(min=least * least).rsqrt()
        alpha = rms(p).clamp(min=min_scale) * rho / (rms(U) / threshold).clamp(min=1.0)
        return decay * p + U * alpha, AdafactorSlots(R, C, v)

    hyper = {"lr": lr, "beta2_decay": beta2_decay, "eps.1": eps2}
    hyper |= {"weight_decay": weight_decay, "d": d}
    storage = Storage(nonnegative=AdafactorSlots._fields)
    return leafwise(init, update, scalars, hyper=hyper, storage=storage, name="scale_by_adafactor")


def mean(x: Tensor, dim: int) -> Tensor:
    """The mean along one dimension, which is kept; 0 if it is empty."""
    return sharding.complete(x.sum(dim, keepdim=True)) / max(x.shape[dim], 1)


def inverse_root(R: Tensor, C: Tensor, least: float = 0.0) -> Tensor:
    """1 / √V of the matrix V with these means of rows and of columns.

    It takes m + n roots, not m · n, and the product of two small means would be 0. Means of 0 count
    as the smallest normal number. least: lower bound of the common mean.
    """
    tiny = torch.finfo(R.dtype).tiny
    rows = R / mean(R, -2).clamp(min=max(least, tiny))
    return rows.clamp(min=tiny).rsqrt() * C.clamp(min=tiny).rsqrt()


def rms(x: Tensor) -> Tensor:
    """The root of the mean square; 0 for an empty tensor."""
    return root((x * x).sum() / max(x.numel(), 1))


@factory
def adafactor(
    lr: numeric.Hyper = 1e-2,
    beta2_decay: numeric.Hyper = -0.8,
    eps: tuple[float | None, numeric.Hyper] = (None, 1e-3),
    d: numeric.Hyper = 1.0,
    weight_decay: numeric.Hyper = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adafactor, with torch.optim.Adafactor's arguments and defaults.

    Args:
        lr: largest relative step size, ≥ 0; the step is relative to the parameter's scale.
        beta2_decay: γ ≤ 0 in β₂(t) = 1 − t^γ.
        eps: (ε₁, ε₂): lower bound of the root of the second moment (None: the machine epsilon of
            the compute dtype), and lower bound of the scale of a parameter.
        d: clipping threshold, ≥ 1.
        weight_decay: decoupled decay, ≥ 0.
        maximize: ascend instead of descend.

    State: `row_var` (…, m, 1) and `col_var` (…, 1, n) for a parameter of two or more dimensions,
    `variance`, like it, for others.

    Raises:
        ValueError: torch.optim.Adafactor's messages, for hyperparameters out of range.
        RuntimeError: for complex parameters.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.adafactor(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    return chain(
        signed(maximize), scale_by_adafactor(lr, beta2_decay, eps, d, weight_decay), scale(-1)
    )
