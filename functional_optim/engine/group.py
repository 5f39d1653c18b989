"""Tensors that share rules and scalars, for the executors that step them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import Tensor

from functional_optim import kernels
from functional_optim.core.first_slots import explain
from functional_optim.core.ownership import Partitions
from functional_optim.core.recording import Kept, key_of
from functional_optim.core.rule import Placement
from functional_optim.core.scalars import BoundScalars
from functional_optim.core.storage import Slots
from functional_optim.core.traits import check_rules
from functional_optim.engine.divided import DividedExecutor
from functional_optim.engine.executor import Executor, How, Runner
from functional_optim.engine.gpu import TritonExecutor
from functional_optim.engine.joined import JoinedExecutor
from functional_optim.engine.native import NativeExecutor
from functional_optim.engine.per_tensor import PerTensorExecutor
from functional_optim.engine.products import ProductExecutor
from functional_optim.engine.shards import ShardExecutor
from functional_optim.kernels.keys import are_own, static_key

EXECUTORS: list[type[Executor]] = [
    *(ShardExecutor, DividedExecutor, NativeExecutor, TritonExecutor),
    *(ProductExecutor, JoinedExecutor, PerTensorExecutor),
]
"""In the order in which they are asked; the last one takes everything."""

Compile = bool | Literal["strict"]
"""What a user says of kernels."""


def how_to(compile: Compile) -> How:
    """How a group is run that a user wants compiled so.

    Raises:
        ValueError: for anything but True, False and "strict".
    """
    if compile == "strict":
        return "strict"
    if isinstance(compile, bool):
        return "compiled" if compile else "eager"
    raise ValueError(
        f'compile must be True, False, or "strict" (an error where True falls back with a '
        f"warning), but got {compile!r}."
    )


class TensorGroup:
    """Tensors that share rules and numbers, ready to be stepped in place again and again.

    Args:
        placements: the rules.
        params: their tensors; all different.
        slots: for each tensor, the slots of each rule.
        grads: gradients like those of the steps to come: in type, dtype, shape and strides.
        how: which executors may be used.
        counts: for each rule, its index among the rules of its name in the whole chain.
        turns: for each tensor, its turn for each rule; none where no rule has several.
        parts: for each tensor, of what it is a part; none where tensors are whole.
        replace: put new tensors into `slots` instead of writing into the old ones, so that autograd
            can go back through the step.
        kept: as in `Body`.
    """

    def __init__(
        self,
        placements: tuple[Placement, ...],
        params: list[Tensor],
        slots: list[list[Slots]],
        grads: list[Tensor],
        *,
        how: How,
        counts: tuple[int, ...],
        turns: Sequence[Sequence[int]] = (),
        parts: Sequence[Partitions] = (),
        replace: bool = False,
        kept: Kept | None = None,
    ) -> None:
        self.placements = placements
        self.kept = kept
        self.counts = counts
        self.how: How = how
        self.strict = how == "strict"
        self.varied = how != "apart" and any(not are_own((x.rule.scalars,)) for x in placements)
        self.chooses = any(x.gate > 0 or x.rule.runs.choose is not None for x in placements)
        self.params = params
        self.slots = slots
        self.turns = turns or [()] * len(params)
        self.parts = parts
        self.replace = replace
        self.executors = self._assigned(range(len(params)), grads, EXECUTORS)
        self.placed = any(p.device.type in kernels.DRIVERS for p in params)
        through = [x for x in self.executors if x.through_memory]
        self.written = [p for x in through for p in x.params if not p.is_inference()]
        self.ready: dict[Any, kernels.Together] = {}
        """What runs each task that there has been: the one thing that is kept of a step."""
        maybe = (ShardExecutor, DividedExecutor, PerTensorExecutor)
        self.divided = any(isinstance(x, maybe) for x in self.executors)
        """Whether gradients may have to be divided between processes as their parameters are."""

    def of(self, *given: Any, **more: Any) -> TensorGroup:
        """Another group that is run in the same way; the arguments are those of `TensorGroup`."""
        own: dict[str, Any] = {"how": self.how, "counts": self.counts, "kept": self.kept}
        return TensorGroup(*given, **{**own, **more})

    def _assigned(
        self, members: Iterable[int], grads: list[Tensor], classes: Sequence[type[Executor]]
    ) -> list[Executor]:
        """Executors for some tensors: each by the first class that accepts it, those that it finds
        alike together."""
        kinds: dict[Any, list[int]] = {}
        for i in members:
            given = (self.placements, grads[i], self.params[i], self.slots[i], self.how)
            pairs = ((made, made.accepts(*given)) for made in classes)
            kind = next((made, own) for made, own in pairs if own is not None)
            kinds.setdefault(kind, []).append(i)
        return [made(self, some, grads) for (made, _), some in kinds.items()]

    def take_numbers(self, placements: tuple[Placement, ...]) -> bool:
        """Take rules with other numbers; False, and nothing done, if their code differs."""
        if len(placements) != len(self.placements) or not all(
            _same_code(a, b) for a, b in zip(placements, self.placements, strict=True)
        ):
            return False
        self.placements = placements
        return True

    def _explain(self) -> None:
        """Raise ValueError if a step has failed because slots are those of another tensor."""
        rules = [x.rule for x in self.placements]
        for p, slots in zip(self.params, self.slots, strict=True):
            explain(rules, p, slots)

    def keeps_memory(self) -> bool:
        """Whether one of its executors keeps memory of the size of its tensors."""
        return any(x.keeps_memory() for x in self.executors)

    def wanted(self, grads: list[Tensor], tasks: Iterable[BoundScalars]) -> list[kernels.Source]:
        """The native libraries that will be asked for, as far as that is known."""
        new = [own for own in tasks if own.task not in self.ready]
        return [one for own in new for x in self.executors for one in x.wanted(grads, own)]

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> kernels.Together:
        """What runs a task; what one executor cannot compile goes to the next that accepts it."""
        found = self.ready.get(scalars.task)
        if found is not None:
            return found
        try:
            runners = self._runners(grads, scalars)
        except Exception:
            self._explain()
            raise
        self.ready[scalars.task] = kernels.Together(runners, self.written, self._explain)
        return self.ready[scalars.task]

    def _runners(self, grads: list[Tensor], scalars: BoundScalars) -> list[Runner]:
        if self.how != "apart":
            for p in {(p.dim(), p.dtype): p for p in self.params}.values():
                check_rules(scalars.placements, scalars.numbers, p, scalars.goal)
        kernels.prefetch(self.wanted(grads, [scalars]))
        executors: list[Executor] = []
        runners: list[Runner] = []
        waiting = [*self.executors]
        while waiting:
            executor = waiting.pop(0)
            runner = executor.prepare(grads, scalars)
            if runner is not None:
                executors.append(executor)
                runners.append(runner)
            else:
                waiting = [*self._instead_of(executor, grads), *waiting]
                self.ready.clear()  # the new ones have nothing ready for other tasks
        self.executors = executors
        return runners

    def _instead_of(self, executor: Executor, grads: list[Tensor]) -> list[Executor]:
        """Executors for the tensors of one that cannot do a task: several of its class, one for
        each number of dimensions, or else the next that accept them."""
        made, members = type(executor), executor.members
        dims: dict[Any, list[int]] = {}
        for i in members:
            dims.setdefault(self.params[i].dim(), []).append(i)
        if len(dims) > 1:
            return [made(self, some, grads) for some in dims.values()]
        found = self._assigned(members, grads, EXECUTORS[EXECUTORS.index(made) + 1 :])
        if executor.why and any(isinstance(x, PerTensorExecutor) for x in found):
            kernels.fallback(executor.why, "it runs", strict=self.strict)
        return found


def _same_code(a: Placement, b: Placement) -> bool:
    """Whether two rules differ in their numbers at most."""
    return (
        key_of(a) == key_of(b)
        and a.gate == b.gate
        and a.reduce_groups == b.reduce_groups
        and a.owners == b.owners
        and a.rule.runs.turns == b.rule.runs.turns
    )


def same_leaves(placements: tuple[Placement, ...], wheres: Sequence[Any] | None) -> bool:
    """Whether rules act on the leaves that these choices select, as far as their code says."""

    def key(where: Any) -> list[Any]:
        return [(x, own.patterns, static_key(own.predicate)) for own, x in where]

    return wheres is not None and [key(x.where) for x in placements] == list(map(key, wheres))
