"""The result of a sweep over one hyperparameter: a table, a curve, and a suggestion."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_optim.tuning.tables import Table, drawn, plain

TOLERANCE = 0.02
"""The share of the best value's progress that a value may lack to count as equally good."""


@dataclass(frozen=True, eq=False, repr=False)
class LRSweep:
    """The losses of runs that differ in one hyperparameter, usually the learning rate; `print` it.

    Attributes:
        name: the name of the hyperparameter.
        values: its values, in the order in which they were passed.
        losses: a row for each value, a column for each step, on the CPU in float64. Each is the
            loss of the step's batch, before the step.

    Example::

        >>> import torch, functional_optim as fo
        >>> losses = torch.tensor([[4.0, 3.9], [4.0, 1.0], [4.0, 9.0], [4.0, torch.nan]])
        >>> found = fo.LRSweep("lr", (0.01, 0.1, 1.0, 10.0), losses)
        >>> found.final
        tensor([3.9000, 1.0000, 9.0000,    inf])
        >>> found.diverged
        tensor([False, False, False,  True])
        >>> found.best, found.suggestion
        (0.1, 0.1)
        >>> found
          lr  final loss
        0.01         3.9
         0.1           1  best, suggestion
           1           9
          10         inf  diverged
        <BLANKLINE>
        The first loss is 4; the final loss is the last loss.
    """

    name: str
    values: tuple[float, ...]
    losses: Tensor

    def __post_init__(self) -> None:
        count, x = len(self.values), self.losses
        shape = tuple(x.shape) if isinstance(x, Tensor) and x.is_floating_point() else ()
        if len(shape) != 2 or shape[0] != count or 0 in shape:
            of = f" of {x.dtype} and shape {tuple(x.shape)}" if isinstance(x, Tensor) else ""
            raise ValueError(
                f"LRSweep needs a tensor of losses with a row for each of its {count} values and a "
                f"column for each step, in float64, but got a {type(x).__name__}{of}."
            )

    @property
    def last(self) -> int:
        """Number of steps in the median of the final loss: the last tenth of them, rounded up."""
        return math.ceil(self.losses.shape[1] / 10)

    @property
    def start(self) -> float:
        """The median over the values of the first step's loss, which is the same for all."""
        return self.losses[:, 0].median().item()

    @property
    def final(self) -> Tensor:
        """The median loss of the last tenth of the steps; inf if one of them is not finite."""
        end = self.losses[:, -self.last :]
        end = end.to(torch.promote_types(end.dtype, torch.float32))  # quantile takes no half types
        return torch.where(end.isfinite().all(1), end.quantile(0.5, dim=1), torch.inf)

    @property
    def diverged(self) -> Tensor:
        """Whether the losses of the last tenth of the steps are not all finite; bool."""
        return self.final.isinf()

    @property
    def best(self) -> float:
        """The value with the smallest final loss.

        Raises:
            ValueError: if all have diverged.
        """
        if self.diverged.all():
            raise ValueError(
                f"all runs have diverged, at every {self.name} from {_number(min(self.values))} to "
                f"{_number(max(self.values))}; try smaller values, or look at the loss at the "
                "parameters themselves."
            )
        return self.values[int(self.final.argmin())]

    @property
    def suggestion(self) -> float:
        """The smallest value that is about as good as the best.

        Going down from the best, it is the last whose loss has decreased by at least 98% of the
        best value's decrease. The best value may be so by accident, is closer to diverging values,
        and often does less well in a longer run. This is the "one standard error" rule of Breiman,
        Friedman, Olshen, Stone, "Classification and Regression Trees" (1984), with a part of the
        progress instead of the error: of the values that are about as good as the best, take the
        safest.

        Raises:
            ValueError: if all have diverged.
        """
        ordered = self._sorted()
        place = [value for value, _ in ordered].index(self.best)
        least = ordered[place][1]
        most = least + TOLERANCE * max(self.start - least, 0.0)
        while place > 0 and ordered[place - 1][1] <= most:
            place -= 1
        return ordered[place][0]

    def _sorted(self) -> list[tuple[float, float]]:
        """Values and final losses, by value."""
        return sorted(zip(self.values, self.final.tolist(), strict=True))

    def plot(self, axes: Any = None) -> Any:
        """Draw the final loss against the value, with matplotlib.

        Values that have diverged, or ended far above the first loss, are crosses at the top.

        Args:
            axes: matplotlib's axes. Default: those of a new figure of pyplot.

        Returns:
            The axes.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        if axes is None:
            try:
                from matplotlib import pyplot
            except ImportError:
                raise ImportError(
                    "LRSweep.plot draws with matplotlib, which is not installed; install it with "
                    "`pip install matplotlib`, or read the attributes values and final."
                ) from None
            axes = pyplot.subplots()[1]
        ordered = self._sorted()
        x = [value for value, _ in ordered]
        finite = [loss for _, loss in ordered if math.isfinite(loss)]
        if x[0] > 0 and x[-1] >= 10 * x[0]:
            axes.set_xscale("log")
        top = self._top(min(finite, default=math.nan), axes)
        inside = [loss if loss <= top else math.nan for _, loss in ordered]
        axes.plot(x, inside, marker="o", markersize=4)
        outside = [value for value, loss in ordered if not loss <= top]
        if outside:
            label, place = "diverged, or far above the first loss", axes.get_xaxis_transform()
            axes.plot(outside, [0.97] * len(outside), "x", color="C3", transform=place, label=label)
        axes.axhline(self.start, color="0.6", linestyle=":", linewidth=1, label="first loss")
        if finite:
            chosen = (("suggestion", self.suggestion, "oC2"), ("best", self.best, "*C1"))
            for text, value, look in chosen:
                loss, label = self.final[self.values.index(value)].item(), _number(value)
                axes.plot(value, loss, look, markersize=10, label=f"{text}: {label}")
        axes.set_xlabel(self.name)
        axes.set_ylabel(f"final loss: the {self._of}")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
        return axes

    def _top(self, least: float, axes: Any) -> float:
        """The loss above which a value is drawn as a cross; scales the axis of losses."""
        if 0 < 10 * least < self.start:
            axes.set_yscale("log")
            return self.start * (self.start / least) ** 0.15
        return max(self.start, least) + 0.5 * (abs(self.start - least) or 1.0)

    def __str__(self) -> str:
        return drawn(*self._parts())

    def __repr__(self) -> str:
        return plain(*self._parts())

    @property
    def _of(self) -> str:
        """The steps of the final loss."""
        steps = self.losses.shape[1]
        if self.last == 1:
            return "last loss"
        return f"median of the last {self.last} of {steps} losses"

    def _parts(self) -> tuple[list[list[Table]], list[str]]:
        """The table and the notes below it."""
        rows = [
            (_number(value), _number(loss), ", ".join(self._remarks(value, loss)))
            for value, loss in self._sorted()
        ]
        notes = [f"The first loss is {_number(self.start)}; the final loss is the {self._of}."]
        if not self.diverged.all():
            if self.final.min().item() >= self.start:
                notes.append("No value has lowered the loss.")
            for side, edge in (("smallest", min(self.values)), ("largest", max(self.values))):
                if self.best == edge and len(self.values) > 1:
                    kind = side.replace("est", "er")
                    notes.append(f"The best value is the {side} of all; try {kind} ones, too.")
        return [[Table((self.name, "final loss", ""), tuple(rows), right=(0, 1))]], notes

    def _remarks(self, value: float, loss: float) -> list[str]:
        if math.isinf(loss):
            return ["diverged"]
        chosen = (("best", self.best), ("suggestion", self.suggestion))
        return [text for text, x in chosen if x == value]


def _number(x: float) -> str:
    return f"{x:.4g}"
