"""The numbers of one step: worked out link by link, then cast for each kind of tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim import numeric, sharded
from functional_optim.rules import Link, Numbers, compute_dtype, init_slots, measure


class Progress:
    """The numbers of one step, worked out link by link.

    A link that measures needs the total before it can go on: whoever drives this object measures
    with `to_measure()` and hands the total to `advance`. The numbers of a link behind a gate begin
    with what the gate says.
    """

    def __init__(
        self, links: Sequence[Link], t: Any, carry: Sequence[Numbers], extra: dict[str, Any]
    ) -> None:
        self.links = links
        self.time = t
        self.carry = carry
        self.extra = extra
        self.numbers: list[Numbers] = []
        self.carried: list[Numbers] = []

    def proceed(self) -> bool:
        """Go on to the next link that measures; False if all numbers are known."""
        while len(self.numbers) < len(self.links):
            link = self.links[len(self.numbers)]
            if link.gate:
                if not (link.over and link.reduce) and self._pass_by(link):
                    continue
                if link.reduce is None:
                    self.advance()
                    continue
            if link.reduce is not None:
                return True
            if link.scalars is None:
                self.carried.append(self.carry[len(self.numbers)])
                self.numbers.append(())
            elif link.carry is None and not link.extra:
                self.numbers.append(link.scalars(self.time))
                self.carried.append(())
            else:
                self.advance()
        return False

    def to_measure(self) -> list[Numbers]:
        """The numbers so far, and those that the next link's reduce needs."""
        i = len(self.numbers)
        link, mine = self.links[i], self.carry[i]
        given: Numbers = ()
        if link.before is not None:
            t = self.time_of(i)
            args = [t] if link.carry is None else [t, type(link.carry)(*mine)]
            given = tuple(link.before(*args))
        return [*self.numbers, (self._open(i), *given) if link.gate else given]

    def advance(self, total: Numbers | None = None) -> None:
        """Work out the next link's numbers, and what it carries to the next step."""
        i = len(self.numbers)
        link, mine = self.links[i], self.carry[i]
        if link.over and link.gate and self._pass_by(link):
            return
        numbers: Numbers = total or ()
        carried: Numbers = mine
        if link.scalars is not None:
            args: list[Any] = [self.time_of(i)]
            if link.carry is not None:
                args.append(type(link.carry)(*mine))
            if link.reduce is not None:
                args.append(total)
            mentioned = {name: self.extra[name] for name in link.extra if name in self.extra}
            result = link.scalars(*args, **mentioned)
            numbers, carried = (result, ()) if link.carry is None else result
        if link.gate:
            opened = self._open(i)
            numbers = (opened, *numbers)
            if isinstance(opened, Tensor):
                pairs = zip(carried, mine, strict=True)
                carried = tuple([numeric.where(opened > 0, new, old) for new, old in pairs])
        self.numbers.append(tuple(numbers))
        self.carried.append(tuple(carried))

    def is_shut(self) -> bool:
        """Is the gate of the next link known to be shut? In other processes it may be open."""
        opened = self._open(len(self.numbers)) if self.links[len(self.numbers)].gate else 1.0
        return not (isinstance(opened, Tensor) or opened > 0)

    def _pass_by(self, link: Link) -> bool:
        """Leave out a link whose gate is known to be shut."""
        if not self.is_shut():
            return False
        i = len(self.numbers)
        self.numbers.append((self._open(i),))
        self.carried.append(self.carry[i])
        return True

    def _open(self, i: int) -> Any:
        """What the gates before a link say: above 0 if all are open."""
        at = i - self.links[i].gate
        first, *more = self.numbers[at]
        return first * more[0] if self.links[at].gate and more else first

    def time_of(self, i: int) -> Any:
        """A link's number of this step: behind a gate, open steps alone are counted."""
        gate = self.links[i].gate
        return numeric.maximum(self.carried[i - gate][0], 1.0) if gate else self.time


class Caster:
    """Turns the numbers of a step into what a tensor's rule reads, once per dtype and device.

    Python numbers stay as they are. 0-dim tensors are stacked and unbound: under torch.compile
    this makes Inductor store them once instead of inlining their computation into every loop.
    """

    def __init__(self, numbers: Sequence[Numbers]) -> None:
        self.numbers = numbers
        self.cast: dict[tuple[torch.dtype, torch.device], list[Numbers]] = {}

    def __call__(self, p: Tensor) -> list[Numbers]:
        key = (compute_dtype(p), p.device)
        if key not in self.cast:
            dtype, device = key
            tensors = [x for nums in self.numbers for x in nums if isinstance(x, Tensor)]
            ready: tuple[Tensor, ...] = ()
            if tensors:
                wide = torch.stack([numeric.float64(x).to(device) for x in tensors])
                ready = wide.to(dtype).unbind()
            supply = iter(ready)
            self.cast[key] = [
                tuple([next(supply) if isinstance(x, Tensor) else x for x in nums])
                for nums in self.numbers
            ]
        return self.cast[key]


def sum_parts(parts: Sequence[Sequence[Tensor]]) -> Numbers:
    """Sum what `reduce` measured on each tensor, entry by entry, in float64.

    Measurements of sharded tensors are themselves sharded (DTensors): what this process has of them
    is summed first, and then completed at once.
    """
    columns = list(zip(*parts, strict=True))
    plain = [[numeric.float64(x) for x in c if not sharded.is_sharded(x)] for c in columns]
    divided = [[x for x in c if sharded.is_sharded(x)] for c in columns]
    if any(divided):
        for own, more in zip(plain, sharded.completed_sums(divided), strict=True):
            own += more
    return tuple([torch.stack(own).sum() for own in plain])


def over_groups(link: Link, total: Numbers | None) -> Numbers:
    """A measurement, summed over the process groups of its link. total: None if nothing was there.

    In a process that has none of the leaves, or no gradient for them, zeros take part.
    """
    if total is None:
        total = (0.0,) * _width(link)
    return sharded.summed_over(total, link.over) if link.over else total


def _width(link: Link) -> int:
    """How many numbers a link measures, found by measuring."""
    given: Numbers = ()
    if link.before is not None:
        given = tuple(link.before(*([1.0] if link.carry is None else [1.0, link.carry])))
    p = torch.zeros((1, 1), device="cpu")
    alone = link._replace(gate=0, where=(), back=None)
    return len(measure([alone], p, p, [init_slots(alone, p)], [given]))
