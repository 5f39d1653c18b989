"""A learning rate tuner for any transformation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise, made_of_rules
from functional_optim.core.numbers import record_of
from functional_optim.core.rule import Runs
from functional_optim.core.storage import Storage, wide_dtype

BETAS = (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)


class MechanicSlots(NamedTuple):
    p_ref: Tensor
    """The initial parameters, like p; float32 for half types."""
    delta: Tensor
    """Δ, the sum of the updates so far, like p; float32 for half types."""


@factory
def mechanize(
    tx: base.GradientTransformation,
    s_decay: numeric.Hyper = 0.01,
    betas: tuple[numeric.Hyper, ...] = BETAS,
    s_init: numeric.Hyper = 1e-8,
    eps: numeric.Hyper = 1e-8,
) -> Leafwise:
    """Tune the scale of the accumulated update of

    tx: Mechanic, a learning rate tuner. tx steps with its learning rate; the parameters are p_ref +
    s·Δ, where Δ is the sum of its updates. s increases if gradients show that a larger displacement
    would have been better. Use tx with its usual schedule, relative to a learning rate of 1.

    Args:
        tx: a transformation that consists of one-tensor rules, e.g. `adamw(warmup_cosine(0.0, 1.0,
            ...))`.
        s_decay: λ, strength of the pull back to p_ref, ≥ 0.
        betas: decay rates of the sums that determine s, each in (0, 1); s is the sum of one part
            for each of them.
        s_init: the initial scale, > 0; it need only be right within a factor of about 100.
        eps: added to divisors, > 0.

        Hyperparameters may also be 0-dim tensors or schedules. All defaults are the authors'.

    State: that of tx; `p_ref` and `delta`, like the parameters; four scalars for each of the betas:
    `s_0`, `v_0`, `r_0`, `m_0` and so on. They are computed over all parameters, in an optimizer
    object over all groups.

    Raises:
        TypeError: if tx does not consist of one-tensor rules.
        ValueError: for hyperparameters out of range, or no betas.

    The authors' code, https://github.com/optimizedlearning/mechanic (4a037bc), is followed with
    `store_delta=True`: computing Δ from the parameters, its default, loses all digits while s is
    small. Its decay uses the point that tx alone would have reached; optax's `mechanize` differs
    from it in several ways.

    Paper: Cutkosky, Defazio, Mehta, "Mechanic: A Learning Rate Tuner",
    https://arxiv.org/abs/2306.00144, Algorithm 1.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.mechanize(fo.sgd(1.0), s_init=1e-4)
        >>> w = torch.tensor([3.0, 4.0])
        >>> state = tx.init(w)
        >>> for _ in range(100):
        ...     u, state = tx.update(w, state, w)  # the gradient of |w|² / 2
        ...     w = fo.apply_updates(w, u)
        >>> bool(w.norm() < 1.0)
        True
    """
    advice = "put other transformations around mechanize"
    tx = made_of_rules("mechanize", tx, advice, "mechanize(adamw(1.0))")
    if not isinstance(betas, tuple) or not betas:
        raise ValueError(f"mechanize needs a tuple of at least one beta, but got {betas!r}.")
    for beta in betas:
        numeric.check(lambda x: 0 < x < 1, beta, "mechanize needs betas in (0, 1), but got {}.")
    numeric.check_range("mechanize", "of 0 or more", s_decay=s_decay)
    numeric.check_range("mechanize", "above 0", s_init=s_init, eps=eps)
    count = len(betas)
    first = {"s": 0.0, "v": 0.0, "r": 0.0, "m": 1e-6}
    names = tuple([f"{letter}_{i}" for letter in first for i in range(count)])
    carry = record_of("carry", names)(*[x for x in first.values() for _ in range(count)])

    def init(p: Tensor) -> MechanicSlots:
        ref = p.to(wide_dtype(p), copy=True)
        return MechanicSlots(ref, torch.zeros_like(ref))

    def reduce(u: Tensor, slots: MechanicSlots, p: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        d, there = slots.delta, p + u
        return (d * g).sum(), (d * there).sum(), (there * there).sum(), (g * g).sum()

    def scalars(t, carry, total, *, s_decay, betas, s_init, eps):
        s, v, r, m = (carry[i * count : (i + 1) * count] for i in range(4))
        scale = sum(s)
        forward, back, there, gradient = total
        drawn = s_decay * scale * numeric.sqrt(gradient) / (numeric.sqrt(there) + eps)
        h = forward + drawn * back
        m = [numeric.maximum(b * x, numeric.maximum(h, -h)) for b, x in zip(betas, m, strict=True)]
        v = [b * b * x + h * h for b, x in zip(betas, v, strict=True)]
        gains = zip(betas, r, s, strict=True)
        r = [numeric.maximum(b * x - own * h, 0.0) for b, x, own in gains]
        wealth = [x * s_init / count + y for x, y in zip(m, r, strict=True)]
        s = [x / (numeric.sqrt(y) + eps) for x, y in zip(wealth, v, strict=True)]
        new = type(carry)(*s, *v, *r, *m)
        return (numeric.maximum(sum(s), 0.0),), new

    def update(
        u: Tensor, slots: MechanicSlots, p: Tensor, g: Tensor, scale: Any
    ) -> tuple[Tensor, MechanicSlots]:
        d = slots.delta + u
        return slots.p_ref + scale * d - p, MechanicSlots(slots.p_ref, d)

    hyper = {"s_decay": s_decay, "betas": betas, "s_init": s_init, "eps": eps}
    runs, storage = Runs(shared=True, after="lr"), Storage(weights=("p_ref",))
    (tuner,) = leafwise(
        init, update, scalars, reduce=reduce, carry=carry, hyper=hyper,
        runs=runs, storage=storage, name="mechanize",
    ).placements  # fmt: skip
    return Leafwise((*tx.placements, tuner._replace(lookback=len(tx.placements))))
