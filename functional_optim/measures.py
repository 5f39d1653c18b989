"""Measurements of trees, for `functional_optim.monitor`.

A measurement processes one parameter at a time. Its results are summed over the tree, or kept per
parameter, and a final function turns the sums into one scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric

Place = Literal["gradients", "updates", "params"]
"""The tensors that a measurement takes: the gradients that enter the transformation of
`monitor(around=...)`, the updates, or the parameters before the step."""


class Measure(NamedTuple):
    """A measurement.

    part: from a tensor to a 0-dim tensor, or a tuple of some; they are summed over the tree. It
        must be a sum of a function of single elements: a tensor may be passed flattened, and in
        pieces. Use tensor operations only, as in the rules of `leafwise`. Half types are passed as
        float32, complex tensors as real pairs.
    finish: from the sums, floats or 0-dim float64 tensors, to the scalar; use
        `functional_optim.numeric`. Default: the single sum.
    of: the names of the tensors that `part` takes, in this order: "gradients", "updates", "params".
        Default: one tensor, which `monitor` selects.
    steps: the number of steps to average over, ≥ 1; see `averaged`. Default: 1, the value of the
        last step.

    Example::

        >>> import torch, functional_optim as fo
        >>> l1 = fo.measures.Measure(lambda x: x.abs().sum())
        >>> tx = fo.monitor({"l1": l1})
        >>> w = torch.zeros(2)
        >>> u, state = tx.update(torch.tensor([1.0, -2.0]), tx.init(w), w)
        >>> fo.get(state, "l1")
        tensor(3.)
    """

    part: Callable[..., Any]
    finish: Callable[..., Any] = numeric.float64
    of: tuple[Place, ...] = ()
    steps: int = 1


def averaged(measure: Measure, steps: int) -> Measure:
    """A measurement as an average over steps.

    The result is the mean m of all steps for the first `steps` steps, and an exponential moving
    average after that: m ← m + (x − m) / min(t, steps) at step t. A NaN stays in the average.

    Args:
        measure: the measurement of each step.
        steps: the number of steps, ≥ 1.

    Raises:
        ValueError: for a number of steps below 1.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.monitor({"norm": fo.measures.averaged(fo.measures.global_norm, 100)})
        >>> w = torch.zeros(1)
        >>> state = tx.init(w)
        >>> for g in (1.0, 3.0):
        ...     _, state = tx.update(torch.tensor([g]), state, w)
        >>> fo.get(state, "norm")
        tensor(2.)
    """
    numeric.check_count("averaged", 1, steps=steps)
    return measure._replace(steps=steps)


def _square(x: Tensor) -> Tensor:
    return (x * x).sum()


def _nans(x: Tensor) -> Tensor:
    return x.isnan().to(x.dtype).sum()


def _sum_and_size(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(), torch.ones_like(x).sum()


def _square_and_size(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * x).sum(), torch.ones_like(x).sum()


def _two_squares(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x * x).sum(), (y * y).sum()


def _products(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (g * u).sum(), (g * g).sum(), (u * u).sum()


def _differences(g: Tensor, u: Tensor) -> Tensor:
    return (~(g == u)).to(u.dtype).sum()


def _ratio(over: Any, under: Any) -> Any:
    """The root of a quotient; 0 if the divisor is 0."""
    return numeric.where(under == 0, 0.0, numeric.sqrt(numeric.divide(over, under)))


def _cosine(product: Any, g: Any, u: Any) -> Any:
    size = numeric.sqrt(g) * numeric.sqrt(u)
    return numeric.where(size == 0, 0.0, numeric.divide(-product, size))


def _is_any(count: Any) -> Any:
    return numeric.where(count > 0, 1.0, 0.0)


def _quotient(total: Any, size: Any) -> Any:
    return total / numeric.maximum(size, 1.0)


def _root(total: Any, size: Any) -> Any:
    return numeric.sqrt(_quotient(total, size))


global_norm = Measure(_square, numeric.sqrt)
"""The Euclidean norm of all elements."""

nan_count = Measure(_nans)
"""The number of NaN elements."""

mean = Measure(_sum_and_size, _quotient)
"""The mean of all elements; a complex element counts as two."""

rms = Measure(_square_and_size, _root)
"""The root mean square of all elements; a complex element counts as two."""

grad_norm = global_norm._replace(of=("gradients",))
"""The Euclidean norm of the gradients."""

update_norm = global_norm._replace(of=("updates",))
"""The Euclidean norm of the updates."""

param_norm = global_norm._replace(of=("params",))
"""The Euclidean norm of the parameters before the step."""

update_ratio = Measure(_two_squares, _ratio, ("updates", "params"))
"""The norm of the updates over that of the parameters, ‖u‖ / ‖p‖; equal to the quotient of their
root mean squares. 0 if all parameters are 0."""

cosine = Measure(_products, _cosine, ("gradients", "updates"))
"""The cosine of the angle between the step and steepest descent, −⟨g, u⟩ / (‖g‖ ‖u‖): 1 if the
updates have the direction of −g, 0 if they are orthogonal to it or one of the two is 0, below 0 if
they point uphill. Both parts of a complex element count."""

effective_lr = Measure(_two_squares, _ratio, ("updates", "gradients"))
"""The norm of the updates over that of the gradients, ‖u‖ / ‖g‖: the learning rate with which plain
SGD would take a step of the same length. For SGD it is the learning rate; for Adam, whose steps do
not depend on the size of gradients, it includes the division by their size. 0 if all gradients are
0."""

changed = Measure(_differences, _is_any, ("gradients", "updates"))
"""1 if the transformation has changed an element in this step, such as a clip that has clipped;
else 0. A NaN counts as changed."""

clip_share = averaged(changed, 100)
"""The share of the steps in which the transformation has changed an element, over 100 steps: around
`clip_by_global_norm` or another clip, how often it clips."""

diagnostics: Mapping[str, Measure] = {
    "grad_norm": grad_norm,
    "update_norm": update_norm,
    "param_norm": param_norm,
    "update_ratio": update_ratio,
    "effective_lr": effective_lr,
    "cosine": cosine,
}
"""The usual measures for diagnosing failed training, by the names that `report` reads, for
`monitor(diagnostics, around=tx, per_tensor=True)`."""
