"""The base class of optimizer objects that step all parameter groups together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from functional_optim.adapters.base import OptimizerBase
from functional_optim.adapters.state.hyperparameters import PARAMS
from functional_optim.adapters.state.places import check_places, in_order, remember
from functional_optim.adapters.state.recipes import check_arguments, check_iterable
from functional_optim.checkpoint.errors import described, listed, refuse
from functional_optim.core import base, sharding
from functional_optim.core.numbers import tensor_of
from functional_optim.core.ravel import Ravel
from functional_optim.kernels.interrupts import held

T = TypeVar("T")


class JointGroup(dict[str, Any]):
    """A parameter group, with an error for a key that it lacks: an LR scheduler of torch reads
    `lr`. torch.compile does not trace steps with such groups."""

    def __missing__(self, key: str) -> Any:
        names = ", ".join([name for name in self if name not in PARAMS])
        advice = "; leave out the LR scheduler" if key == "lr" else ""
        raise KeyError(f"this optimizer has no hyperparameter {key}; it has {names}{advice}.")


class JointOptimizer(OptimizerBase):
    """An optimizer object of a transformation that needs all parameters at once.

    All groups have the same hyperparameters. Parameters that do not require gradients do not
    change. The state is stored with the first trainable parameter.

    recipe: the function that makes the transformation, of all hyperparameters except `lr`, which
    the object itself reads.
    sized: the name of the state's tensor with an element, or a row, for each trainable number, if
    there is one.
    """

    keeps_trees = False
    tries_points = True
    recipe: ClassVar[Callable[..., base.GradientTransformation]]
    sized: ClassVar[str | None] = None

    def _construct(self, arguments: dict[str, Any]) -> None:
        """Call torch's constructor. arguments: those of the subclass, by name."""
        hyper = {k: x for k, x in arguments.items() if k not in ("self", "params")}
        check_arguments(type(self).__name__, arguments["params"])
        check_iterable(type(self).__name__, arguments["params"])
        self.compile, self.stored, self.capturable = False, None, False
        super().__init__(arguments["params"], hyper)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.param_groups[-1] = JointGroup(self.param_groups[-1])

    def check_parameters(self, group: dict[str, Any]) -> None:
        super().check_parameters(group)
        check_undivided(type(self).__name__, group["params"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.param_groups[:] = map(JointGroup, self.param_groups)

    def transform(self, group: dict[str, Any]) -> base.GradientTransformation:
        """The transformation of a group's hyperparameters."""
        return type(self).recipe(**{x: group[x] for x in self.defaults if x != "lr"})

    def check_loaded(self, given: dict[str, Any], before: list[set[str]]) -> None:
        """Raise ValueError if the loaded state does not match, or is that of other trainable
        parameters."""
        super().check_loaded(given, before)
        moving = self._moving()
        kept = (self.state.get(moving[0]) or {}) if moving else {}
        found, size = kept.get(self.sized or ""), Ravel(moving).size if moving else 0
        other, frozen = [], []
        if kept and self.sized and found is None:
            other = [f"it has {listed(kept)}, but needs {self.sized}"]
        if found is not None and not (isinstance(found, Tensor) and found.dim()):
            other = [f"{self.sized} is a {described(found)}, but it needs a tensor for {size}"]
        elif found is not None and found.shape != (size,) * found.dim():
            frozen = [f"{self.sized} is for {len(found)} parameters, but {size} move"]
        refuse("the loaded state", other, f"load a checkpoint of {type(self).__name__}")
        refuse("the loaded state", frozen, "load a checkpoint with the same frozen parameters")

    def _moving(self) -> list[Tensor]:
        """The trainable parameters."""
        every = [p for group in self.param_groups for p in group["params"]]
        return [p for p in every if p.requires_grad]

    def _group(self) -> dict[str, Any]:
        """The hyperparameters, which all groups have in common."""
        who = f"{type(self).__name__} steps all groups together"
        return agreed(who, self.param_groups, self.defaults)

    def _known(self, tx: base.GradientTransformation, values: list[Tensor], first: Tensor) -> Any:
        """The state; missing entries come from `init`.

        Raises RuntimeError if it is that of other trainable parameters, and ValueError if it is of
        others in another order.
        """
        old = self.state.get(first) or {}
        fresh = tx.init(values)
        known = old.get(self.sized or "")
        other = known is not None and known.shape != getattr(fresh, self.sized or "").shape
        if other or (not old and any(self.state.values())):
            raise RuntimeError(
                f"{type(self).__name__} has a state for other parameters than those that now "
                "require gradients: parameters were frozen, unfrozen or added; create a new "
                "optimizer, or undo that."
            )
        if self.sized is not None:
            check_places(self, in_order(self._moving()))
        return type(fresh)(**{name: old.get(name, x) for name, x in fresh._asdict().items()})

    def _create_state(self) -> None:
        """Create the state, which is that of `init`."""
        moving = self._moving()
        check_moving(moving)
        tx = self.checked_transform(self._group(), in_step=True)
        state = self._known(tx, [p.detach() for p in moving], moving[0])
        self.state[moving[0]] = state._asdict()

    def _finish(
        self, moving: list[Tensor], new: list[Tensor], state: Any, kept: list[Any] | None = None
    ) -> None:
        """Write parameters and state, atomically.

        kept: the copies that `undone` would restore; they are dropped.
        """

        def finish() -> None:
            write(moving, new)
            self.state[moving[0]] = state._asdict()
            if self.sized is not None:
                remember(self, in_order(moving), {})
            if kept is not None:
                kept.clear()

        held(finish)


def agreed(who: str, groups: Sequence[dict[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """The first group, if all have the same values under these names.

    Raises:
        ValueError: otherwise; it begins with `who`.
    """
    first = groups[0]
    for name in names:
        values = [group[name] for group in groups]
        if not all(same(first[name], x) for x in values[1:]):
            raise ValueError(
                f"{who}, but they have different {name}: {values}; use one value for all."
            )
    return first


def same(a: Any, b: Any) -> bool:
    """Whether two hyperparameters are equal."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b or bool(torch.equal(tensor_of(a), tensor_of(b)))
    return a is b or a == b


def check_undivided(who: str, params: list[Tensor]) -> None:
    """Raise ValueError for flattened shards of parameters, whose inner products are not known."""
    if any(sharding.flat_parts(params)):
        raise ValueError(
            f"{who} needs inner products over the whole model, but with FullyShardedDataParallel "
            "each process has a part of it; use fully_shard or DistributedDataParallel."
        )


def check_moving(moving: Collection[Any]) -> None:
    """Raise RuntimeError if nothing can be stepped."""
    if not moving:
        raise RuntimeError("no parameter requires gradients; there is nothing to step.")


def checked_closure(who: str, closure: Any) -> Callable[[], Any]:
    """The closure of a step, which needs one that computes the loss and its gradients."""
    if not callable(closure):
        raise TypeError(
            f"{who} evaluates the loss several times, so step needs a closure: a function that "
            "clears the gradients, computes the loss, calls its backward, and returns it."
        )
    return closure


@contextmanager
def cleared(who: str, params: Sequence[Tensor], advice: str) -> Iterator[None]:
    """Raise RuntimeError if gradients are added to those from before, rather than cleared first.

    The smallest gradient is replaced by numbers so large that others added to them change little.

    advice: how to accumulate gradients over micro-batches.
    """
    known = [(p, p.grad) for p in params if p.grad is not None and p.numel()]
    dense = [(p, g) for p, g in known if g.layout is torch.strided]
    if not dense:
        yield
        return
    p, before = min(dense, key=lambda pair: pair[0].numel())
    mark = p.grad = _mark(before.detach())
    large = mark.clone()
    try:
        yield
        found = p.grad
        added = found is mark or (found is not None and found.requires_grad)  # by create_graph
        if added and _was_added(found.detach(), large, before.detach()):
            p.grad = before
            raise RuntimeError(
                f"{who} got a closure that does not clear the gradients, so those at several "
                "points would be added; call zero_grad() in the closure. To accumulate gradients "
                f"over micro-batches, {advice}."
            )
    except BaseException:
        if p.grad is mark:
            p.grad = before
        raise


def _mark(g: Tensor) -> Tensor:
    """Large numbers like a gradient, of the other sign: their sum with another one is finite."""
    if g.is_complex():
        return torch.complex(_mark(g.real), _mark(g.imag))
    large = torch.full_like(g, torch.finfo(g.dtype).max / 2)
    return torch.where(g > 0, -large, large)


def _was_added(x: Tensor, mark: Tensor, g: Tensor) -> bool:
    """Whether a tensor is rather a gradient like g added to a mark than one like g alone. In
    float16 a mark does not absorb it."""
    if x.is_complex():
        parts = (x.real, mark.real, g.real), (x.imag, mark.imag, g.imag)
        return all(_was_added(*part) for part in parts)
    wide = torch.promote_types(x.dtype, torch.float32)
    change = x.to(wide) - g.to(wide)
    return bool(((change - mark.to(wide)).abs() < change.abs()).all())


def write(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values into parameters."""
    for p, value in zip(params, values, strict=True):
        p.detach().copy_(value)


@contextmanager
def restored(params: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Write these values into parameters at the end, also after an error or an interrupt."""
    try:
        yield
        held(write, params, values)
    except BaseException:  # perhaps an interrupt that came before `held`
        held(write, params, values)
        raise


def undone(params: Sequence[Tensor], run: Callable[[list[tuple[Tensor, Tensor]]], T]) -> T:
    """Call a function that evaluates a closure at several points; restore the parameters if it
    raises an error.

    run: receives the parameters with copies of their values; it empties the list where a later
    error, such as an interrupt, must not undo the step.
    """
    before = [(p, p.detach().clone()) for p in params]
    try:
        return run(before)
    except BaseException:
        held(write, [p for p, _ in before], [value for _, value in before])
        raise
