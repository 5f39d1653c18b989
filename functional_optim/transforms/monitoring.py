"""Measurements on the way, kept in the state."""

from __future__ import annotations

import keyword
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.measures import Measure

_records: dict[tuple[str, ...], Any] = {}


@factory
def monitor(
    measures: Mapping[str, Measure | Callable[[Tensor], Tensor]],
    *,
    of: Literal["updates", "params"] = "updates",
) -> Leafwise:
    """Measure the updates at this place of a chain, and keep the numbers in the state.

    The updates stay as they are. The whole tree is measured, in an optimizer object over all
    parameter groups; inside `masked` or `partition`, the leaves that it acts on.

    Args:
        measures: by name: those of `functional_optim.measures`, or your own. A plain function of
            one tensor is a `Measure` that is summed over the tree.
        of: "params" to measure the parameters before the step instead.

    State: a number under each name: that of the last step, 0 before the first. Read it with
    `fo.get(state, name)`.

    Raises:
        ValueError: for a name that is no identifier, or starts with an underscore; for another
            `of`.
        TypeError: for a measure that is no function.

    Example::

        >>> import torch, functional_optim as fo
        >>> watch = fo.monitor({"grad_norm": fo.measures.global_norm})
        >>> tx = fo.chain(watch, fo.clip_by_global_norm(1.0), fo.adam(0.1))
        >>> w = {"a": torch.zeros(1), "b": torch.zeros(1)}
        >>> grads = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
        >>> u, state = tx.update(grads, tx.init(w), w)
        >>> fo.get(state, "grad_norm")
        tensor(5.)
    """
    if of not in ("updates", "params"):
        raise ValueError(f'monitor measures "updates" or "params", but got of={of!r}.')
    names = tuple(measures)
    chosen = [_measure(name, measure) for name, measure in measures.items()]
    parts = tuple([measure.part for measure in chosen])
    sizes = [len(_row(part(torch.zeros((1, 1), device="cpu")))) for part in parts]
    record = _record(names)
    looks_at_params = of == "params"

    def reduce(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor, ...]:
        x = p if looks_at_params else u
        return tuple([value for part in parts for value in _row(part(x))])

    def scalars(t: Any, carry: Any, total: tuple[Any, ...]) -> tuple[tuple[()], Any]:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        rows = [total[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return (), record(*[m.finish(*row) for m, row in zip(chosen, rows, strict=True)])

    def update(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor, Any]:
        return u, slots

    first = record(*[0.0] * len(names))
    return leafwise(None, update, scalars, reduce=reduce, carry=first, shared=True, name="monitor")


@factory
def snapshot(
    name: str,
    measure: Measure | Callable[[Tensor], Tensor],
    *,
    of: Literal["updates", "params"] = "updates",
) -> Leafwise:
    """`monitor` for one measurement.

    Args:
        name: under which the state has the number.
        measure: as in `monitor`.
        of: as in `monitor`.

    Raises:
        ValueError, TypeError: as `monitor` does.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.trace(0.9), fo.snapshot("norm", fo.measures.global_norm), fo.scale(-1))
        >>> w = torch.zeros(2)
        >>> u, state = tx.update(torch.tensor([3.0, 4.0]), tx.init(w), w)
        >>> fo.get(state, "norm")
        tensor(5.)
    """
    return monitor({name: measure}, of=of)


def _measure(name: str, measure: Any) -> Measure:
    if isinstance(measure, Measure):
        return measure
    if not callable(measure):
        raise TypeError(
            f"the measure {name!r} is a {type(measure).__name__}; pass one of fo.measures, or a "
            "function of one tensor."
        )
    return Measure(measure)


def _row(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def _record(names: tuple[str, ...]) -> Any:
    """The type of what is carried under these names, one for each set of them."""
    found = _records.get(names)
    if found is None:
        for name in names:
            if not name.isidentifier() or name.startswith("_") or keyword.iskeyword(name):
                raise ValueError(
                    f"a measurement cannot be called {name!r}; take letters, digits and "
                    "underscores, e.g. grad_norm."
                )
        found = _records[names] = namedtuple("Measured", names)
    return found
