"""Properties of a rule from its graph: whether it is element-wise, and whether it is supported."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from functional_optim.core import modes, sharding
from functional_optim.core.calls import takes
from functional_optim.core.first_slots import init_slots_as
from functional_optim.core.modes import with_cpu_as_default
from functional_optim.core.numbers import (
    Numbers,
    Own,
    as_args,
    flat_numbers,
    form_of,
    parts_of,
    with_forms,
)
from functional_optim.core.recording import Body, key_of
from functional_optim.core.rule import Goal, Placement, Rule
from functional_optim.core.scalars import StepScalars
from functional_optim.core.small import filled, small_shapes
from functional_optim.core.storage import SMALL, Slots
from functional_optim.core.totals import nothing_measured
from functional_optim.kernels import ops
from functional_optim.kernels.graph import Graph
from functional_optim.kernels.node import RuleError, Unsuitable

ANOTHER_RULE = (
    "give it another rule by functional_optim.partition, for an optimizer object in the recipe of "
    "adapters.Optimizer(model.named_parameters(), recipe)"
)


class _Anything(dict[str, Any]):
    """Extra arguments of any name, for a rule whose scalars have no effect."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> float:
        return 1.0


@with_cpu_as_default
def _alone(
    placement: Placement, p: Tensor, numbers: Numbers | None = None, least: int = 1
) -> tuple[Body, Tensor, Slots]:
    """A single rule, for any scalars, with a small tensor like p and its slots.

    numbers: example scalars; None: those of a first step in which all measurements are 1.
    least: the least number of dimensions of the small tensor.

    Raises:
        Unsuitable: if it does not support this tensor, or these scalars.
    """
    rule = placement.rule.without_codecs().stored_by(home=None)
    lookback = None if placement.lookback is None else 0
    alone = Placement(rule, placement.name, lookback=lookback)
    try:
        if numbers is None:
            step = StepScalars([alone], 1.0, [tuple(rule.carry or ())], _Anything())
            (numbers,) = trial_of(step)
        tiny = filled(small_shapes(max(p.dim(), least))[0], p.dtype)
        slots = init_slots_as(rule, tiny, ())
    except Exception as error:
        raise Unsuitable(f"{type(error).__name__}: {error}") from error
    missing = [tuple([x is None for x in slots])]
    return Body([alone], missing, (form_of(numbers),), "step"), tiny, slots


def trial_of(step: StepScalars) -> list[Numbers]:
    """The scalars of a step in which all measurements are 1."""
    while step.proceed():
        placement = step.placements[len(step.numbers)]
        step.advance(None if step.is_shut() else tuple([1.0 for _ in nothing_measured(placement)]))
    return step.numbers


def graph_of(placement: Placement, p: Tensor) -> Graph:
    """The graph of a single rule for a parameter like p, for any scalars.

    Raises:
        Unsuitable: if it has no graph.
        RuleError: if it does something that steps do not support.
    """
    body, tiny, slots = _alone(placement, p)
    return body.find(tiny, tiny, [slots]).graph


def variants(placement: Placement) -> list[Placement]:
    """A rule with each of its variants separately."""
    count = len(placement.rule.updates)
    return [placement] if count < 2 else [placement.variant(k + 1) for k in range(count)]


_elementwise: dict[Any, bool] = {}


def is_elementwise(placement: Placement, p: Tensor) -> bool:
    """Whether a rule is element-wise. p: a parameter.

    Inside a transform of torch.func, and where torch.compile is tracing, rules are not recorded:
    one that was not recorded before is assumed to be element-wise.
    """
    if placement.rule.runs.batched or torch.compiler.is_compiling():
        return not placement.rule.runs.batched
    key = (key_of(placement), p.dim(), p.dtype)
    if key not in _elementwise:
        if modes.traced():
            return True
        _elementwise[key] = all(_is_flat(x, p) for x in variants(placement) if x.rule.updates)
    return _elementwise[key]


def _is_flat(placement: Placement, p: Tensor) -> bool:
    try:
        body, tiny, slots = _alone(placement, p)
    except Unsuitable:
        return False
    return body.is_flat(tiny, tiny, [slots])


_whole: dict[Any, bool] = {}


def for_shards(placements: Sequence[Placement], params: Sequence[Tensor]) -> Sequence[Placement]:
    """The rules for some parameters: those that DTensors may not compute get whole tensors.

    Rules of this package are written for DTensors.
    """
    kinds = {(p.dim(), p.dtype): p for p in params if sharding.is_sharded(p)}
    if not kinds or modes.traced():
        return placements
    return tuple(
        [_gathered(x) if any(_needs_whole(x, p) for p in kinds.values()) else x for x in placements]
    )


def _gathered(placement: Placement) -> Placement:
    """A rule that gets whole tensors for DTensors."""
    rule = placement.rule
    start, reduce = rule.runs.start, rule.reduce
    runs = rule.runs._replace(start=start and (sharding.on_whole(start[0]), start[1]))
    updates = tuple(map(sharding.on_whole, rule.updates))
    reduce = reduce and sharding.on_whole(reduce)
    return placement._replace(rule=rule._replace(updates=updates, reduce=reduce, runs=runs))


def _needs_whole(placement: Placement, p: Tensor) -> bool:
    """Whether a rule of others does something that DTensors refuse or compute wrongly: torch 2.13
    takes a cumulative sum over each shard, and finds no maximum of an empty one."""
    if placement.rule.own or placement.rule.runs.batched:
        return False
    key = _looks(placement, p)
    if key not in _whole:
        _whole[key] = not all(_is_shardable(x, p) for x in variants(placement))
    return _whole[key]


def _is_shardable(placement: Placement, p: Tensor) -> bool:
    flat = is_elementwise(placement, p)
    try:
        nodes = graph_of(placement, p).nodes
    except Unsuitable:
        return False
    return adds_up(placement, p) and all(ops.is_shardable(x, flat=flat) for x in nodes)


_additive: dict[Any, bool] = {}


def adds_up(placement: Placement, p: Tensor) -> bool:
    """Whether what a rule measures on a tensor is the sum of what it measures on its parts."""
    rule = placement.rule
    if rule.own or rule.reduce is None:
        return True
    key = _looks(placement, p)
    if key not in _additive:
        if modes.traced():
            return True
        _additive[key] = _is_sum(placement, p)
    return _additive[key]


def _is_sum(placement: Placement, p: Tensor) -> bool:
    given = form_of(placement.rule.numbers_before(1.0, placement.rule.carry or ()))
    try:
        body, tiny, slots = _alone(placement, p)
        measures = Body(body.placements, body.missing, (given,), "reduce")
        return measures.find(tiny, tiny, [slots]).graph.by_element()
    except Unsuitable:
        return False


def check_part(placement: Placement, path: str, p: Tensor, *, flat: bool) -> None:
    """Raise ValueError if a rule would treat a shard as the whole model, or sum it twice.

    flat: whether p is a local shard of parameters that FSDP1 has flattened.
    """
    rule, name = placement.rule, placement.name or "a rule"
    if flat and not (is_elementwise(placement, p) and adds_up(placement, p)):
        raise ValueError(
            f"{name} looks at whole tensors, but FullyShardedDataParallel has flattened the "
            f"parameter {path!r}, and this process has a part of it; use fully_shard, which leaves "
            "shapes as they are."
        )
    if flat and rule.reduce is not None and not placement.reduce_groups:
        raise ValueError(
            f"{name} measures the whole model, but FullyShardedDataParallel has left this process "
            f"a part of it (parameter {path!r}); put the recipe into fo.sharded_over(...), which "
            "sums over the processes, or use fully_shard."
        )
    if placement.reduce_groups and rule.reduce is not None and sharding.is_sharded(p):
        raise ValueError(
            f"{name} is inside of sharded_over, but the parameter {path!r} is a DTensor, which is "
            "measured as a whole in every process; leave sharded_over out."
        )


_checked: set[Any] = set()


def of_package(placements: Sequence[Placement]) -> bool:
    """Whether all rules are this package's, which its tests check."""
    return all(x.rule.own for x in placements if x.rule.updates)


def unchecked(placements: Sequence[Placement], p: Tensor) -> list[int]:
    """The rules that were not checked on a parameter like p, by their indices.

    The tests check rules of this package.
    """
    others = [k for k, x in enumerate(placements) if x.rule.updates and not x.rule.own]
    return [k for k in others if _looks(placements[k], p) not in _checked]


def check_rules(
    placements: Sequence[Placement], numbers: Sequence[Numbers], p: Tensor, goal: Goal = "step"
) -> None:
    """Raise an error for a rule that is not supported, or contradicts its declarations.

    numbers: example scalars; before a measurement the last rule's are those for `reduce`.
    """
    for k in unchecked(placements, p):
        early = goal == "reduce" and k + 1 == len(placements)
        _check(placements[k], numbers[k], p, early=early)
        _checked.add(_looks(placements[k], p))


_reading_sizes: set[Any] = set()
"""Checked rules that ask for sizes, and may do something else for tensors of other shapes."""


def check_sizes(placements: Sequence[Placement], params: Sequence[Tensor]) -> None:
    """Raise RuleError for a rule that is not supported for the shape of one of these tensors."""
    if not _reading_sizes:
        return
    for placement in placements:
        kinds = {(p.dim(), p.dtype): p for p in params}
        looks = {kind: _looks(placement, p) for kind, p in kinds.items()}
        for p in params:
            own = looks[p.dim(), p.dtype]
            if own in _reading_sizes and (own, p.shape) not in _checked:
                with suppress(Unsuitable):
                    _check_size(placement, p)
                _checked.add((own, p.shape))


def _check_size(placement: Placement, p: Tensor) -> None:
    device = "cpu" if p.numel() <= SMALL else "meta"
    like = torch.zeros(p.shape, dtype=p.dtype, device=device)
    for one in variants(placement):
        body, _, _ = _alone(one, p)
        try:
            slots = init_slots_as(body.placements[0].rule, like, ())
        except Exception:  # of an init that reads values
            continue
        body.find(like, like, [slots])


def _check_writes(body: Body, tiny: Tensor, slots: Slots) -> None:
    """Raise RuleError if a rule without a graph writes into its arguments."""
    given = body.tensors(tiny, tiny, [slots], tuple(tiny.shape))
    numbers = torch.full((body.count,), 0.5, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad():
            body.made(None, given, numbers)
    except RuleError:
        raise
    except Exception:  # from a rule that does not support this shape, which the step tells
        return


def _looks(placement: Placement, p: Tensor) -> Any:
    return (key_of(placement), placement.rule.runs.batched, p.dim(), p.dtype)


def _check(placement: Placement, numbers: Numbers, p: Tensor, *, early: bool) -> None:
    """early: the numbers are those for `reduce`."""
    rule, who = placement.rule, f"the rule {placement.shown!r}"
    for x in flat_numbers([numbers]) if type(numbers) is Own else numbers:
        if not isinstance(x, (Real, Tensor)):
            raise TypeError(
                f"scalars of {who} returned {x!r} among its numbers; return Python numbers and "
                "0-dim tensors."
            )
    args = as_args(parts_of(numbers)[2])
    updates = () if early else rule.updates
    if not all(update is None or takes(update, None, (), None, *args) for update in updates):
        raise TypeError(
            f"update of {who} is called as update(u, slots, p, *scalars) with {len(args)} scalars, "
            "those that its `scalars` returns (a NamedTuple is one), but it takes other arguments."
        )
    if type(numbers) is Own:
        numbers = Own((), numbers.key, numbers.values)
    for one in variants(placement):
        with suppress(Unsuitable):  # it runs eagerly
            body, tiny, slots = _alone(one, p, numbers)
            try:
                if body.find(tiny, tiny, [slots]).graph.reads_sizes:
                    _reading_sizes.add(_looks(placement, p))
            except Unsuitable:
                _check_writes(body, tiny, slots)
                raise
            if rule.reduce is not None:
                given = rule.numbers_before(1.0, rule.carry or ())
                measures = Body(body.placements, body.missing, (form_of(given),), "reduce")
                measures.find(tiny, tiny, [slots])
        with suppress(Unsuitable):
            if rule.runs.batched:
                _check_batched(one, p, who)


def _check_batched(placement: Placement, p: Tensor, who: str) -> None:
    """Raise ValueError unless a rule treats the tensors of a batch independently."""
    view = placement.rule.storage.view
    seen = view is not None
    if view is not None and view.block is not None and p.dim() < 2:  # a vector is a column there
        return
    body, tiny, slots = _alone(placement, p, least=0)
    rule = placement.rule.stored_by(view=None)
    plain = Placement(rule._replace(runs=rule.runs._replace(batched=False)), placement.name)
    numbers = with_forms(iter([0.5] * body.count), body.forms)
    pairs = [tiny, 2 * tiny.flip(-1) + 0.5]
    several = [None if x is None else torch.stack([x, x]) for x in slots]
    advice = "; leave batched out: tensors then come one by one, with p."

    def run(u: Tensor, slots: Sequence[Any]) -> Any:
        """The results of update for a tensor, or a batch; empty if it does not support them."""
        try:
            return _run_update(plain.rule, numbers[0], u, slots)
        except AttributeError as error:
            if "'NoneType'" not in str(error):
                return None
            raise ValueError(
                f"{who} was passed batched=True, but its update reads p, which is None for a batch"
                f"{advice}"
            ) from error
        except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
            raise Unsuitable(str(error)) from error  # of these numbers, not of this shape
        except Exception:
            return None

    def alone(x: Tensor) -> Any:
        if not seen:
            return run(x, slots)
        found = run(x[None], [own if own is None else own[None] for own in slots])
        alike = isinstance(found, Tensor) and found.shape == (1, *x.shape)
        return found[0] if alike else found

    with torch.no_grad():
        one, both = [alone(x) for x in pairs], run(torch.stack(pairs), several)
    missing, vector = any(x is None for x in one), seen and p.dim() < 2
    if both is None and not vector:
        return
    if missing and not seen:
        raise ValueError(
            f"{who} was passed batched=True, but takes several tensors of {tiny.dim()} dimensions "
            f"and no single one: it takes them for one tensor{advice}"
        )
    if not missing and any(not isinstance(x, Tensor) or x.shape != tiny.shape for x in one):
        return  # the step raises the error
    if not missing and both is not None and _alike(both, one):
        return
    if vector:
        raise ValueError(
            f"{who} takes matrices, and as_matrix leaves vectors unchanged, but got a parameter of "
            f"shape {tuple(p.shape)}; {ANOTHER_RULE}."
        )
    if missing:
        return
    found = [x.what for x in graph_of(plain, p).nodes if ops.kind(x.op) == "reduce"]
    why = f" because of {found[0]}" if found else ""
    raise ValueError(
        f"{who} was passed batched=True, but treats the tensors of a batch as one{why}{advice}"
    )


def _alike(both: Tensor, one: Sequence[Tensor]) -> bool:
    """Whether the results for a batch are those for its tensors."""
    pairs = zip(both, one, strict=True)
    return all(torch.allclose(x, y, 1e-3, 1e-4, equal_nan=True) for x, y in pairs)


def _run_update(rule: Rule, numbers: Any, u: Tensor, slots: Sequence[Any]) -> Tensor:
    record = rule.storage.slots
    own = () if record is None else record(*slots)
    return rule.updates[0](u, own, None, *as_args(parts_of(numbers)[2]))[0]
