"""Measurements in a chain, stored in the state."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base, sharding
from functional_optim.core.calls import check_choice
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise, made_of_rules
from functional_optim.core.numbers import record_of
from functional_optim.core.rule import Runs, unchanged
from functional_optim.core.storage import compute_dtype
from functional_optim.measures import Measure, Place

PLACES: tuple[Place, ...] = get_args(Place)


@factory
def monitor(
    measures: Mapping[str, Measure | Callable[[Tensor], Tensor]],
    *,
    of: Place = "updates",
    around: base.GradientTransformation | None = None,
    per_tensor: bool = False,
) -> Leafwise:
    """Measure the updates at this place of a chain, and store the results in the state.

    The updates pass unchanged. Measurements cover all parameters, in an optimizer object those of
    all parameter groups; inside `masked` or `partition`, they cover the selected leaves.

    Args:
        measures: a dict from names to measures of `functional_optim.measures`, or custom ones. A
            plain function of one tensor is a `Measure` that is summed over the tree.
        of: the input of measures of one tensor that do not set it: "updates", "params" for the
            parameters before the step, or "gradients", as they enter `around`.
        around: a transformation that consists of one-tensor rules, which runs first. Measures then
            also see the gradients that enter it: `monitor(..., around=adamw())` compares the
            gradients with the step, `monitor(..., around=clip_by_global_norm(1.0))` shows whether
            it clips.
        per_tensor: whether to measure each parameter separately. The sums are then part of the step
            itself. A measure of all parameters needs a separate pass, which repeats `around` and
            everything before it in the chain.

    Returns:
        A transformation that measures, after `around` if that is passed. It fuses as other rules
        do.

    State: a scalar under each name: the value of the last step, 0 before the first. With
    `per_tensor` it is a slot: one scalar for each parameter, of the last step in which it had a
    gradient. Read them with `fo.numbers(state)` or `fo.get(state, name)`.

    With `per_tensor`, parameters that FullyShardedDataParallel has flattened and sparse gradients
    raise an error: a rule sees only a part of these.

    Raises:
        ValueError: for a name that is not an identifier, or starts with an underscore; for an
            unknown `of`; for gradients without `around`.
        TypeError: for a measure that is not a function; for an `around` that does not consist of
            one-tensor rules.
        RuntimeError: from a step, for a sparse gradient that is measured per tensor.

    Example::

        >>> import torch, functional_optim as fo
        >>> watch = fo.monitor({"grad_norm": fo.measures.global_norm})
        >>> tx = fo.chain(watch, fo.clip_by_global_norm(1.0), fo.adam(0.1))
        >>> w = {"a": torch.zeros(1), "b": torch.zeros(1)}
        >>> grads = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
        >>> u, state = tx.update(grads, tx.init(w), w)
        >>> fo.get(state, "grad_norm")
        tensor(5.)
        >>> each = {"cosine": fo.measures.cosine, "effective_lr": fo.measures.effective_lr}
        >>> tx = fo.monitor(each, around=fo.sgd(0.5, momentum=0.9), per_tensor=True)
        >>> u, state = tx.update(grads, tx.init(w), w)
        >>> fo.numbers(state, "cosine")
        {'cosine/a': 1.0, 'cosine/b': 1.0}
    """
    check_choice("monitor", PLACES, of=of)
    if not isinstance(measures, Mapping):
        raise TypeError(
            f"monitor takes a dict from names to measures, but got {measures!r}; pass e.g. "
            "{'grad_norm': fo.measures.global_norm}."
        )
    if around is not None:
        advice = "put it around those parts of the chain that do"
        made_of_rules("monitor", around, advice, "monitor({...}, around=adamw())")
    if not measures:
        raise ValueError(
            "monitor got no measure; pass e.g. {'grad_norm': fo.measures.global_norm}, or leave it "
            "out."
        )
    names = tuple(measures)
    chosen = [_measure(name, x, of) for name, x in measures.items()]
    if around is None:
        _check_no_gradients(names, chosen)
    record = _record(names)
    if per_tensor:
        rule = _of_each(chosen, record, looks_back=around is not None)
    else:
        rule = _of_all(chosen, record, looks_back=around is not None)
    if around is None:
        return rule
    before = around.placements
    return Leafwise((*before, *[x._replace(lookback=len(before)) for x in rule.placements]))


@factory
def snapshot(
    name: str, measure: Measure | Callable[[Tensor], Tensor], *, of: Place = "updates"
) -> Leafwise:
    """`monitor` for one measurement.

    Args:
        name: the name of the scalar in the state.
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


def _of_all(measures: Sequence[Measure], record: Any, *, looks_back: bool) -> Leafwise:
    """The rule that measures all parameters."""
    sums = _sums_of(measures, looks_back=looks_back)
    sizes = _sizes(measures)
    averages = tuple([measure.steps > 1 for measure in measures])

    def reduce(u: Tensor, slots: Any, p: Tensor, *g: Tensor) -> tuple[Tensor, ...]:
        return tuple([x for row in sums(u, p, *g) for x in row])

    def scalars(t, carry, total):
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        rows = [total[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        found = [m.finish(*row) for m, row in zip(measures, rows, strict=True)]
        return (), record(*_averaged(averages, carry, found, _weights(measures, t)))

    first = record(*[0.0] * len(measures))
    runs = Runs(shared=True)
    return leafwise(None, unchanged, scalars, reduce=reduce, carry=first, runs=runs, name="monitor")


def _of_each(measures: Sequence[Measure], record: Any, *, looks_back: bool) -> Leafwise:
    """The rule that measures each tensor separately."""
    sums = _sums_of(measures, looks_back=looks_back)
    finish = tuple([measure.finish for measure in measures])
    averages = tuple([measure.steps > 1 for measure in measures])

    def init(p: Tensor) -> Any:
        return record(*[torch.zeros((), dtype=compute_dtype(p), device=p.device) for _ in finish])

    def scalars(t):
        return tuple(_weights(measures, t))

    def update(u: Tensor, slots: Any, p: Tensor, *given: Any) -> tuple[Tensor, Any]:
        g, weights = (given[:1], given[1:]) if looks_back else ((), given)
        rows = [[numeric.float64(sharding.whole(x)) for x in row] for row in sums(u, p, *g)]
        found = [last(*row) for last, row in zip(finish, rows, strict=True)]
        return u, record(*_averaged(averages, slots, found, weights))

    return leafwise(init, update, scalars, name="monitor")


def _sums_of(measures: Sequence[Measure], *, looks_back: bool) -> Callable[..., Any]:
    """The function of updates, parameters and gradients that computes the sums of each measure."""
    parts = tuple([(measure.part, measure.of) for measure in measures])

    def sums(u: Tensor, p: Tensor, *g: Tensor) -> list[tuple[Tensor, ...]]:
        seen = {"updates": u, "params": p}
        if looks_back:
            seen["gradients"] = g[0]
        return [_row(part(*[seen[place] for place in of])) for part, of in parts]

    return sums


def _sizes(measures: Sequence[Measure]) -> list[int]:
    """The number of sums of each measure."""
    x = torch.zeros((1, 1), device="cpu")
    return [len(_row(measure.part(*[x for _ in measure.of]))) for measure in measures]


def _weights(measures: Sequence[Measure], t: Any) -> list[Any]:
    """The weight of step t in each averaged measure."""
    return [1.0 / numeric.minimum(t, float(m.steps)) for m in measures if m.steps > 1]


def _averaged(
    averages: Sequence[bool], old: Sequence[Any], new: Sequence[Any], weights: Sequence[Any]
) -> list[Any]:
    """The values after a step. averages: which of them are averaged, with these weights."""
    share = iter(weights)
    rows = zip(averages, old, new, strict=True)
    return [m + next(share) * (x - m) if is_mean else x for is_mean, m, x in rows]


def _measure(name: str, measure: Any, of: Place) -> Measure:
    """A measure with its inputs."""
    if not isinstance(measure, Measure):
        if not callable(measure):
            raise TypeError(
                f"the measure {name!r} is a {type(measure).__name__}; pass one of fo.measures, or "
                "a function of one tensor."
            )
        measure = Measure(measure)
    numeric.check_count(f"the measure {name!r}", 1, steps=measure.steps)
    measure = measure if measure.of else measure._replace(of=(of,))
    if unknown := [place for place in measure.of if place not in PLACES]:
        raise ValueError(
            f"the measure {name!r} has the inputs {', '.join(map(repr, unknown))}; its `of` may "
            f"name {', '.join(map(repr, PLACES))}."
        )
    return measure


def _check_no_gradients(names: Sequence[str], measures: Sequence[Measure]) -> None:
    """Raise ValueError for a measure of gradients without `around`."""
    for name, measure in zip(names, measures, strict=True):
        if "gradients" in measure.of:
            raise ValueError(
                f"the measure {name!r} takes the gradients that enter a transformation; pass "
                "that transformation, e.g. monitor({...}, around=adamw(1e-3))."
            )


def _row(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def _record(names: tuple[str, ...]) -> Any:
    """The type of the slots with these names."""
    for name in names:
        if not name.isidentifier() or name.startswith("_") or keyword.iskeyword(name):
            raise ValueError(
                f"a measurement cannot be called {name!r}; use letters, digits and "
                "underscores, e.g. grad_norm."
            )
    return record_of("Measured", names)
