"""Measurements of trees, for `functional_optim.monitor`.

A measurement looks at one parameter at a time. Its results are summed over the tree, or kept for
each parameter, and a last function turns the sums into one number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric

Place = Literal["gradients", "updates", "params"]
"""What a measurement looks at: the gradients that the transformation of `monitor(around=...)` got,
the updates, or the parameters before the step."""


class Measure(NamedTuple):
    """A measurement.

    part: from a tensor to a 0-dim tensor, or a tuple of some; they are summed over the tree. It
        must be a sum over elements, each taken by itself: a tensor may come as 1-D, and in pieces.
        Tensor operations only, as in the rules of `leafwise`. Half types arrive as float32, complex
        tensors as real pairs.
    finish: from the sums, floats or 0-dim float64 tensors, to the number; use
        `functional_optim.numeric`. Default: the one sum itself.
    of: the tensors that `part` takes, by name and in this order: "gradients", "updates", "params".
        Default: one tensor, which `monitor` chooses.
    steps: over how many steps the number is averaged, ≥ 1; see `averaged`. Default: 1, the number
        of the last step.

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

    It is the mean m of all steps as long as there are fewer than `steps`, and an exponential mean
    after that: m ← m + (x − m) / min(t, steps) at step t. A NaN stays in it.

    Args:
        measure: what is measured in each step.
        steps: over how many steps, ≥ 1.

    Raises:
        ValueError: for another number of steps.

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
    """The root of a quotient; 0 where there is nothing to divide by."""
    return numeric.where(under == 0, 0.0, numeric.sqrt(numeric.divide(over, under)))


def _ratio_to_first(under: Any, over: Any) -> Any:
    return _ratio(over, under)


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
"""The Euclidean norm of all elements together."""

nan_count = Measure(_nans)
"""How many elements are NaN."""

mean = Measure(_sum_and_size, _quotient)
"""The mean of all elements; a complex one counts as two."""

rms = Measure(_square_and_size, _root)
"""The root of the mean square of all elements; a complex one counts as two."""

grad_norm = global_norm._replace(of=("gradients",))
"""The Euclidean norm of the gradients."""

update_norm = global_norm._replace(of=("updates",))
"""The Euclidean norm of the updates."""

param_norm = global_norm._replace(of=("params",))
"""The Euclidean norm of the parameters before the step."""

update_ratio = Measure(_two_squares, _ratio, ("updates", "params"))
"""The norm of the updates over that of the parameters, ‖u‖ / ‖p‖; the quotient of their root mean
squares is the same number. 0 where all parameters are 0."""

cosine = Measure(_products, _cosine, ("gradients", "updates"))
"""The cosine of the angle between the step and steepest descent, −⟨g, u⟩ / (‖g‖ ‖u‖): 1 where the
updates have the direction of −g, 0 where they are orthogonal to it or one of the two is 0, below 0
where they lead uphill. Of a complex element both parts count."""

effective_lr = Measure(_two_squares, _ratio_to_first, ("gradients", "updates"))
"""The norm of the updates over that of the gradients, ‖u‖ / ‖g‖: the learning rate with which plain
SGD would go as far in this step. For SGD it is the learning rate; for Adam, whose steps do not
depend on the size of gradients, it says what the division by their size comes to. 0 where all
gradients are 0."""

changed = Measure(_differences, _is_any, ("gradients", "updates"))
"""1 where the transformation has changed an element in this step, such as a clip that has clipped;
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
"""What people look at when a training goes wrong, by the names that `report` reads, for
`monitor(diagnostics, around=tx, per_tensor=True)`."""
