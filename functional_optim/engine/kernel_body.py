"""What a kernel does to tensors: the rules, run on them in place or measured on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from functional_optim import kernels
from functional_optim.core import base
from functional_optim.core.execution import Leaf, measure, measured_by_last, run_all_stored
from functional_optim.core.rule import Form, Numbers, Placement, with_forms
from functional_optim.core.storage import compute_dtype, with_holes
from functional_optim.engine.executor import Goal, write, write_slots

Task = Goal | Literal["measure", "advance"]
"""What a kernel does: an executor's goal; what the last rule measures on each tensor for itself; or
the same and, in place, the new slots of the rules before it."""


class KernelBody:
    """What a kernel does to a leaf: the rules, run on it in place or measured on it.

    holes: for each rule, which of its slots are missing. forms: how its numbers are put together.
    measured: the forms of what rules have measured on the tensor, by their indices; these numbers
    come before all others. Rules that are not among them measure inside of the kernel.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        holes: list[tuple[bool, ...]],
        forms: tuple[Form, ...],
        task: Task,
        measured: dict[int, Form] | None = None,
    ) -> None:
        self.placements = placements
        self.holes = holes
        self.forms = forms
        self.task: Task = task
        self.measured = measured or {}

    @property
    def writes(self) -> bool:
        """Whether it writes into tensors, and measures nothing."""
        return self.task in ("step", "stage")

    @property
    def count(self) -> int:
        """How many numbers it reads."""
        forms = (*self.measured.values(), *self.forms)
        return sum([form.total for form in forms])

    def key_at(self, k: int) -> int | None:
        """Where the k-th rule's key of the step is among the numbers; None if it has none."""
        if k >= len(self.forms) or not self.forms[k].keyed:
            return None
        before = (*self.measured.values(), *self.forms[:k])
        return sum([form.total for form in before]) + self.forms[k].selected

    def key(self) -> Any:
        """Stands for the rule in this process."""
        code = tuple(
            [(kernels.static_key(self._code(x)), *self._place(x)) for x in self.placements]
        )
        globals_read = kernels.fingerprint(self.functions())
        return (code, globals_read, *self._numbers(), tuple(self.holes))

    def functions(self) -> tuple[Any, ...]:
        """All that the rule depends on."""
        code = [(*self._code(placement), *self._place(placement)) for placement in self.placements]
        return (code, *self._numbers(), self.holes)

    def _code(self, placement: Placement) -> tuple[Any, ...]:
        rule = placement.rule
        packed = (rule.init, rule.codecs) if rule.codecs else None
        reduce = rule.reduce if self.task == "reduce" else None
        return (rule.updates, rule.slots, packed, rule.measure, reduce)

    def _place(self, placement: Placement) -> tuple[Any, ...]:
        rule = placement.rule
        return (rule.reads_new_params, rule.weight_codec, placement.gate, placement.lookback)

    def _numbers(self) -> tuple[Any, ...]:
        return self.task, self.forms, tuple(self.measured.items())

    def probe(self, p: Tensor) -> Numbers:
        """What it measures, from a leaf like p of one element."""
        if self.writes:
            return ()
        leaf = torch.zeros(1, dtype=compute_dtype(p))
        given = [leaf, leaf, *[leaf for own in self.holes for gap in own if not gap]]
        with torch.no_grad():
            (leaf,) = self._leaves([given], torch.ones(self.count, dtype=leaf.dtype))
            return self._found(leaf)

    def stacks(self) -> bool:
        """Does it gain from several leaves in one call?"""
        return self.task == "step" and any(placement.rule.batched for placement in self.placements)

    def one(self, leaves: list[list[Tensor]], vector: Tensor) -> tuple[Tensor, ...]:
        """The body of a kernel for one leaf."""
        (leaf,) = self._leaves(leaves, vector)
        if self.task == "advance":
            found, new = measured_by_last(self.placements, leaf)
            write_slots(leaf.slots[:-1], new[:-1])
            return tuple(found)
        if not self.writes:
            return tuple(self._found(leaf))
        self._step([leaf])
        return ()

    def many(self, leaves: list[list[Tensor]], vector: Tensor) -> tuple[Tensor, ...]:
        """The body of a kernel for several leaves: sums over all of them."""
        given = self._leaves(leaves, vector)
        if not self.writes:
            sums = list(map(self._found, given))
            return tuple([torch.stack(column).sum() for column in zip(*sums, strict=True)])
        self._step(given)
        return ()

    def _found(self, leaf: Leaf) -> Numbers:
        if self.task in ("measure", "advance"):
            return measured_by_last(self.placements, leaf)[0]
        return measure(self.placements, leaf)

    def _leaves(self, leaves: list[list[Tensor]], vector: Tensor) -> list[Leaf]:
        flat = iter(vector.unbind())
        known = dict(zip(self.measured, with_forms(flat, [*self.measured.values()]), strict=True))
        numbers = with_forms(flat, self.forms)
        measured = [known.get(i) for i in range(len(self.placements))]
        found = []
        for g, p, *rest in leaves:
            found.append(Leaf(g, p, with_holes(rest, self.holes), numbers, measured))
        return found

    def _step(self, leaves: list[Leaf]) -> None:
        results = run_all_stored(self.placements, leaves)
        for (_, p, slots, *_), (u, new) in zip(leaves, results, strict=True):
            if self.task == "stage":
                write_slots(slots[-1:], new[-1:])
            else:
                write(p, base.add(p, u), slots, new)
