"""The scalars of one step: computed rule by rule, then cast for each kind of tensor."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base, modes
from functional_optim.core.codecs import rounding_key
from functional_optim.core.numbers import (
    Numbers,
    Own,
    StepNumber,
    flag_of,
    flat_numbers,
    form_of,
    kinds_of,
    parts_of,
    with_forms,
)
from functional_optim.core.rule import Goal, Placement, settled, variant_of
from functional_optim.core.storage import compute_dtype
from functional_optim.kernels.node import NumberSource

Key = tuple[str, int]
"""A measurement: the name of its rule, and its index among the rules of that name."""


def given(t: Any, **hyper: Any) -> tuple[Any, ...]:
    """`scalars` of a rule whose scalars are its hyperparameters, in their order."""
    return tuple(hyper.values())


class StepScalars:
    """The scalars of one step, computed rule by rule.

    A rule that measures needs the total before it can continue: the caller measures with
    `to_measure()` and passes the total to `advance`. The scalars of a rule behind a gate, or with
    several variants, are an `Own`; a tensor has its own turn among several (`in_turn`).

    t: the index of this step. together: that of shared rules, if it differs.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        t: Any,
        carry: Sequence[Numbers],
        extra: dict[str, Any],
        together: Any = None,
    ) -> None:
        self.placements = placements
        self.time = t
        self.together = t if together is None else together
        self.carry = carry
        self.extra = extra
        self.numbers: list[Numbers] = []
        self.carried: list[Numbers] = []

    def proceed(self) -> bool:
        """Continue to the next rule that measures; False if all scalars are known."""
        try:
            return self._proceed()
        except numeric.NotANumber as error:
            raise error.among(self.placements[len(self.numbers)].rule.each_hyper()) from None

    def _proceed(self) -> bool:
        for placement in self.placements[len(self.numbers) :]:
            rule = placement.rule
            _, fixed, _, plain = rule.reads
            if plain and not placement.gate:
                result: Any = ()
                if rule.scalars is not None:
                    t = self.together if rule.runs.shared else self.time
                    hyper = rule.given_at(t) if fixed is None else fixed
                    result = rule.scalars(t, **hyper)
                self.numbers.append(result if isinstance(result, tuple) else _refused(placement))
                self.carried.append(())
                continue
            measures = rule.reduce is not None
            meets = placement.reduce_groups and measures
            if placement.gate and not meets and self._pass_by(placement):
                continue
            if measures:
                return True
            self.advance()
        return False

    def to_measure(self) -> list[Numbers]:
        """The scalars so far, and those that the next rule's `reduce` needs."""
        i = len(self.numbers)
        placement = self.placements[i]
        given: Numbers = ()
        if placement.rule.before is not None:
            given = placement.rule.numbers_before(self.time_of(i), self.carry[i])
        return [*self.numbers, Own((self.opened(i),), (), given) if placement.gate else given]

    def advance(self, total: Numbers | None = None) -> None:
        """Compute the next rule's scalars, and its carry for the next step."""
        i = len(self.numbers)
        placement, mine = self.placements[i], self.carry[i]
        rule = placement.rule
        if placement.reduce_groups and placement.gate and self._pass_by(placement):
            return
        numbers, carried = self._worked_out(i, total)
        seed, chooses, which = rule.storage.seed, rule.runs.choose is not None, ()
        key = () if seed is None else (rounding_key(seed, self.time_of(i)),)
        if placement.gate or chooses:
            opened = self.opened(i) if placement.gate else 1.0
            if isinstance(opened, Tensor):
                pairs = zip(carried, mine, strict=True)
                carried = tuple([numeric.where(opened > 0, new, old) for new, old in pairs])
            which = (opened,)
            if chooses:
                found = rule.chosen(self.time_of(i), mine)
                each = [variant_of(rule, _known(x)) for x in found]
                if placement.gate:
                    each = [numeric.where(opened > 0, x, 0) for x in each]
                which = tuple(each)
        if which or key:
            numbers = Own(which, key, parts_of(numbers)[2])
        self.numbers.append(numbers)
        self.carried.append(tuple(carried))

    def _worked_out(self, i: int, total: Numbers | None) -> tuple[Numbers, Numbers]:
        """A rule's scalars and its carry, before gates and choices."""
        rule, mine = self.placements[i].rule, self.carry[i]
        if rule.scalars is None:
            return total or (), mine
        t = self.time_of(i)
        args = [t] if rule.carry is None else [t, *rule.carried(mine)]
        if rule.reduce is not None:
            args.append(total)
        try:
            extra = {name: self.extra[name] for name in rule.reads.extra if name in self.extra}
            result = rule.scalars(*args, **rule.given_at(t), **extra)
        except numeric.NotANumber as error:
            raise error.among(rule.each_hyper()) from None
        except (TypeError, ValueError, RuntimeError) as error:
            self._check_extra(i, error)
            raise
        numbers, carried = (result, ()) if rule.carry is None else result
        return numbers if isinstance(numbers, tuple) else _refused(self.placements[i]), carried

    def _check_extra(self, i: int, error: Exception) -> None:
        """Raise TypeError, after an error of a rule's scalars, for a missing extra argument that
        they need, and for a needed value that is not one number. A rule whose value is optional
        checks it itself."""
        rule, name = self.placements[i].rule, self.placements[i].name or "a rule"
        needed = base.extra_names(rule.scalars, required=True) if rule.scalars else ()
        missing = [x for x in needed if x in rule.reads.extra and x not in self.extra]
        if missing:
            takes = inspect.signature(rule.scalars).parameters.values() if rule.scalars else ()
            every = any(x.kind is x.VAR_KEYWORD for x in takes)
            known = [x.name for x in takes]
            unread = ", ".join([x for x, _ in rule.hyper if not (every or x in known)])
            if unread:
                raise TypeError(
                    f"scalars of {name} takes {missing[0]}, but hyper lists {unread}, which "
                    "scalars does not take; give both the same name. (An argument that is not in "
                    "hyper is an extra argument of update.)"
                ) from None
            raise TypeError(
                f"{name} needs the extra argument {missing[0]}: call update(grads, state, params, "
                f"{missing[0]}=...); an optimizer object passes the loss of step(closure) as value."
            ) from None
        value = self.extra["value"] if "value" in needed else 0.0
        if not (value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)):
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise TypeError(
                f"{name} needs one number as value, such as the loss, but got a "
                f"{type(value).__name__}{shape}."
            ) from error

    def is_shut(self) -> bool:
        """Whether the gate of the next rule is known to be closed; otherwise it may be open."""
        i = len(self.numbers)
        opened = self.opened(i) if self.placements[i].gate else 1.0
        return not (isinstance(opened, Tensor) or opened > 0)

    def _pass_by(self, placement: Placement) -> bool:
        """Skip a rule whose gate is known to be closed."""
        if not self.is_shut():
            return False
        i = len(self.numbers)
        self.numbers.append(Own((0.0,), (), ()))
        self.carried.append(self.carry[i])
        return True

    def opened(self, i: int) -> Any:
        """The scalar of the gates before a rule: above 0 if all are open."""
        which, _, values = parts_of(self.numbers[i - self.placements[i].gate])
        if not which:
            return _as_number(_known(values[0]))
        return _known(which[0] * values[0] if values else which[0])

    def time_of(self, i: int) -> Any:
        """A rule's step index: behind a gate, it counts only open steps."""
        placement = self.placements[i]
        if placement.gate:
            return numeric.maximum(self.carried[i - placement.gate][0], 1.0)
        return self.together if placement.rule.runs.shared else self.time


def _known(choice: Any) -> Any:
    """A variant's index, as a Python number if it is on the CPU and no step is traced."""
    if type(choice) is Tensor and choice.device.type == "cpu" and not modes.traced():
        return choice.item()
    return choice


def _as_number(x: Any) -> Any:
    """A gate's scalar, as a number if it is a bool."""
    flag = isinstance(x, bool) or (isinstance(x, Tensor) and x.dtype is torch.bool)
    return numeric.float64(x) if flag else x


def _refused(placement: Placement) -> NoReturn:
    raise TypeError(
        f"scalars of the rule {placement.shown!r} must return a tuple or a NamedTuple of numbers; "
        "with a carry, a pair of such a tuple and the new carry."
    )


class BoundScalars:
    """Rules and their scalars in a step, each in the variant that acts, for the executors.

    task: the part of a kernel's key: the goal, the number of rules before a measurement, the
    variants that act (of rules that have several or are behind a gate; None for one that differs
    from tensor to tensor), the locations of scalars, and their structure. The last three only if
    they differ between steps.

    Args:
        group: the tensors (`TensorGroup`).
        numbers: those of its first rules.
        goal: the purpose of the run.
    """

    def __init__(self, group: Any, numbers: list[Numbers], goal: Goal) -> None:
        chosen, placements = None, group.placements[: len(numbers)]
        if group.chooses:
            chosen, placements, numbers = settled(placements, numbers)
        self.placements = placements
        self.numbers = numbers
        self.goal: Goal = goal
        self.sources: tuple[NumberSource, ...] = ()
        if group.placed:
            self.sources = tuple([_source(x) for x in flat_numbers(numbers)])
        self.task: Any = (goal, len(placements) if goal == "reduce" else 0, chosen, self.sources)
        if group.varied:
            self.task = (*self.task, *map(form_of, numbers))
        self.skip: Tensor | None = None
        """Nonzero if the step is skipped, a value on the device; None: the step is made."""

    def on(self, device: torch.device) -> list[Any]:
        """The scalars for a kernel that takes some as launch arguments and reads others on a
        device: Python floats, and float64 tensors there."""
        found: list[Any] = []
        for x in flat_numbers(self.numbers):
            known = not isinstance(x, Tensor) or x.device.type == "cpu"
            wide = float(x) if known else x.detach().to(device, torch.float64, non_blocking=True)
            found.append(wide)
        return found


def _source(x: Any) -> NumberSource:
    """The location of a scalar of a step: those on the CPU are launch arguments."""
    return "tensor" if isinstance(x, Tensor) and x.device.type != "cpu" else "value"


class Caster:
    """Converts the scalars of a step to the arguments of a tensor's rule, once per dtype and
    device.

    Python numbers do not change, and 0-dim tensors are treated like them (`StepNumber`). A traced
    step and one inside torch.func gets them in the compute dtype, stacked and unbound:
    torch.compile then stores them once instead of inlining their computation into every loop.
    Bools are `StepFlag`s in all steps, except those that tell whether a rule acts.
    """

    def __init__(self, numbers: Sequence[Numbers]) -> None:
        self.floats: list[Numbers] | None = None
        if all(type(x) is float or type(x) is int for own in numbers for x in own):
            self.floats = [*numbers]
            return
        self.flat = flat_numbers(numbers)
        self.forms = list(map(form_of, numbers))
        self.kinds = kinds_of(self.forms)
        self.traced = modes.traced()
        self.cast: dict[tuple[torch.dtype, torch.device], list[Numbers]] = {}

    def __call__(self, p: Tensor) -> list[Numbers]:
        if self.floats is not None:
            return self.floats
        key = (compute_dtype(p), p.device)
        if key not in self.cast:
            dtype, device = key
            tensors = [x for x in self.flat if isinstance(x, Tensor)]
            wrong = [tuple(x.shape) for x in tensors if x.numel() != 1]
            if wrong:
                raise TypeError(
                    f"scalars of a rule returned a tensor of shape {wrong[0]}; return numbers and "
                    "0-dim tensors. Tensors like the parameter are slots."
                )
            ready = [numeric.float64(x).to(device) for x in tensors]
            if ready and self.traced:
                ready = torch.stack(ready).to(dtype).unbind()
            elif ready:
                ready = [x.as_subclass(StepNumber) for x in ready]
            supply = iter(ready)
            flat = [next(supply) if isinstance(x, Tensor) else x for x in self.flat]
            for i, kind in enumerate(self.kinds):
                if kind is bool:
                    flat[i] = flag_of(self.flat[i], device)
            self.cast[key] = with_forms(iter(flat), self.forms)
        return self.cast[key]
