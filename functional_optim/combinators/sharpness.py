"""Sharpness-aware minimization around any transformation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.chain import Wrapped, freezing_rules, ignores_gradients, without
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.rule import squares, times

GradFn = Callable[[Any], Any]
"""From a tree of parameters to their gradients, a tree of the same structure."""


class SamState(NamedTuple):
    """ascent: state of the ascent step, which has a count and rho. inner: that of the
    transformation."""

    ascent: Any
    inner: Any


class SharpnessAware(Wrapped):
    """A transformation made by `sam` or `asam`. ascent: the ascent step. inner: the wrapped
    transformation."""

    ascent: Leafwise
    inner: base.GradientTransformation

    def __new__(cls, ascent: Leafwise, inner: base.GradientTransformation) -> SharpnessAware:
        if ignores_gradients(inner):
            raise TypeError(
                f"{ascent.placements[0].name} changes gradients, but a method for residuals or "
                "values reads none; leave it out."
            )
        if "grad_fn" in inner.extra:
            raise TypeError(
                f"{ascent.placements[0].name} does not pass grad_fn on, but the transformation "
                "inside takes it, too; leave out one of them, such as the inner of two sam."
            )
        ascent = without(freezing_rules(inner), ascent)

        def init(params: Any) -> SamState:
            return SamState(ascent.init(params), inner.init(params))

        def update(
            grads: Any,
            state: SamState,
            params: Any = None,
            *,
            grad_fn: GradFn = base.NEEDED,
            **extra: Any,
        ) -> tuple[Any, SamState]:
            base.check_extra(extra, inner.extra)
            base.check_passed(params)
            check_grad_fn(grad_fn)
            uphill, climbed = ascent.update(grads, state.ascent, params)
            grads = grad_fn(base.apply_updates(params, uphill))
            updates, after = inner.update(grads, state.inner, params, **extra)
            return updates, SamState(climbed, after)

        self = super().__new__(cls, init, update, inner)
        self.ascent, self.inner = ascent, inner
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.ascent, self.inner


def check_grad_fn(grad_fn: Any) -> None:
    """Raise TypeError unless it can be called."""
    base.check_needed("sam", grad_fn=grad_fn)
    if not callable(grad_fn):
        raise TypeError(
            f"grad_fn must be a function from parameters to their gradients, but got a "
            f"{type(grad_fn).__name__}; pass e.g. torch.func.grad(loss_fn)."
        )


@factory
def sam(
    tx: base.GradientTransformation, rho: numeric.Hyper = 0.05, eps: numeric.Hyper = 1e-12
) -> SharpnessAware:
    """Take the gradient at w + rho·g / ‖g‖ instead of w, to find flat minima.

    `update(grads, state, params, grad_fn=grad_fn)` calls `grad_fn` once, after the ascent step;
    grads are those at params. So a step takes two gradients. The norm covers all parameters that
    tx does not freeze; frozen ones do not climb. A gate such as `apply_if_finite` belongs inside,
    around tx: around `sam` it would check grads, and not those that tx receives.

    Args:
        tx: the transformation that receives these gradients.
        rho: the length of the ascent step, ≥ 0: a number, a 0-dim tensor, or a schedule. The paper
            uses 0.05 for CIFAR-10 and ImageNet.
        eps: added to the norm, ≥ 0. Default 1e-12, as in the most common implementation,
            https://github.com/davda54/sam.

    State: `ascent`, a count of steps and rho; `inner`, that of tx.

    Raises:
        ValueError: for a negative number.
        TypeError: if tx takes `grad_fn`, too, as another `sam` does; from update, without a
            `grad_fn`.

    `compile_train_step` provides `grad_fn`, and `adapters.SAM` calls a closure twice.
    Statistics of batch norm are updated at both points.

    Paper: Foret, Kleiner, Mobahi, Neyshabur, "Sharpness-Aware Minimization for Efficiently
    Improving Generalization", https://arxiv.org/abs/2010.01412, Algorithm 1.

    Example::

        >>> import torch, functional_optim as fo
        >>> grad_fn = torch.func.grad(lambda w: w.square().sum())
        >>> tx = fo.sam(fo.sgd(0.5), rho=0.1)
        >>> w = torch.tensor([3.0, 4.0])
        >>> updates, state = tx.update(grad_fn(w), tx.init(w), w, grad_fn=grad_fn)
        >>> updates  # the gradient where w is 0.1 longer
        tensor([-3.0600, -4.0800])
    """
    base.check_transformation("sam", tx, "sam(sgd(0.1, momentum=0.9))")
    hyper = {"rho": rho, "eps": eps}
    numeric.check_range("sam", "of 0 or more", **hyper)

    def scalars(t, total, *, rho, eps):
        return (_over(rho, numeric.sqrt(total[0]) + eps),)

    ascent = leafwise(None, times, scalars, reduce=squares, hyper=hyper, name="sam")
    return SharpnessAware(ascent, tx)


@factory
def asam(
    tx: base.GradientTransformation,
    rho: numeric.Hyper = 0.5,
    eta: numeric.Hyper = 0.01,
    eps: numeric.Hyper = 1e-16,
) -> SharpnessAware:
    """`sam` with an ascent step in proportion to each weight's size: ASAM.

    The gradient is taken at w + rho·T²g / ‖T g‖, where T = |w| + eta. Rescaling a layer then does
    not change what counts as flat.

    Args:
        tx: the transformation that receives these gradients.
        rho: the length of the ascent step, in units of the weights, ≥ 0. Default: the authors'.
        eta: added to a weight's size, ≥ 0. Default: the authors'.
        eps: added to the norm, ≥ 0.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: as that of `sam`.

    Raises:
        ValueError: for a negative number.
        TypeError: from update, without a `grad_fn`; from init, for a complex parameter.

    The authors' code, https://github.com/SamsungLabs/ASAM, has T = 1 for parameters that are not
    called weight; here all parameters are treated in the same way.

    Paper: Kwon, Kim, Park, Choi, "ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant
    Learning of Deep Neural Networks", https://arxiv.org/abs/2102.11600, Algorithm 1.

    Example::

        >>> import torch, functional_optim as fo
        >>> grad_fn = torch.func.grad(lambda w: w.square().sum())
        >>> tx = fo.asam(fo.sgd(0.5), rho=0.1, eta=0.0)
        >>> w = torch.tensor([1.0, 0.0])
        >>> tx.update(grad_fn(w), tx.init(w), w, grad_fn=grad_fn)[0]
        tensor([-1.1000, -0.0000])
    """
    base.check_transformation("asam", tx, "asam(sgd(0.1, momentum=0.9))")
    hyper = {"rho": rho, "eps": eps, "eta": eta}
    numeric.check_range("asam", "of 0 or more", **hyper)

    def before(t, *, eta):
        return (eta,)

    def reduce(g: Tensor, slots: Any, p: Tensor, eta: Any) -> tuple[Tensor]:
        scaled = (p.abs() + eta) * g
        return ((scaled * scaled).sum(),)

    def scalars(t, total, *, rho, eta, eps):
        return _over(rho, numeric.sqrt(total[0]) + eps), eta

    def update(g: Tensor, slots: Any, p: Tensor, factor: Any, eta: Any) -> tuple[Tensor, Any]:
        size = p.abs() + eta
        return factor * size * size * g, slots

    ascent = leafwise(
        base.real_only("asam"), update, scalars, reduce=reduce, before=before, hyper=hyper,
        name="asam",
    )  # fmt: skip
    return SharpnessAware(ascent, tx)


def _over(rho: Any, norm: Any) -> Any:
    """rho / norm; 0 if all gradients are 0."""
    null = norm == 0
    return numeric.where(null, 0.0, rho / numeric.where(null, 1.0, norm))
