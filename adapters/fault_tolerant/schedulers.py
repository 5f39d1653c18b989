"""LR schedulers that follow an optimizer whose steps may be refused."""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from functional_optim.adapters.state.hyperparameters import PARAMS
from functional_optim.adapters.state.recipes import as_data, with_code
from functional_optim.replicas.coordinator import Coordinator

Call = Callable[[], Any]


class FollowingScheduler:
    """A scheduler that only advances with committed steps of an optimizer.

    Its class is a subclass of the scheduler's class, and it has the same attributes, in the same
    dict. A copied or pickled one is the plain scheduler. `__wrapped__` is the scheduler.
    """

    __slots__ = ("__wrapped__", "_schedules")

    def __init__(self, scheduler: Any) -> None:
        for name, x in (("__wrapped__", scheduler), ("__dict__", vars(scheduler))):
            object.__setattr__(self, name, x)
        self.link(None)

    __eq__, __hash__ = object.__eq__, object.__hash__

    @property
    def step(self) -> Callable[..., Any]:
        """Steps the scheduler, if a step was committed; always, after its optimizer was deleted."""
        return self._step

    @step.setter
    def step(self, value: Any) -> None:  # called if it counts
        vars(self)["step"] = value

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        schedules, call = self.schedules(), partial(self.__wrapped__.step, *args, **kwargs)
        return call() if schedules is None else schedules.call(self, call)

    def link(self, schedules: Schedules | None) -> None:
        """Follow an optimizer by a weak reference: it may reference its scheduler, e.g. in a
        hook."""
        ref = None if schedules is None else weakref.ref(schedules)
        object.__setattr__(self, "_schedules", ref)

    def schedules(self) -> Schedules | None:
        """The schedulers of the followed optimizer; None if it was deleted."""
        return None if self._schedules is None else self._schedules()

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __copy__(self) -> Any:
        return copy.copy(self.__wrapped__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _alone, (self.__wrapped__,)


class Schedules:
    """The schedulers of one optimizer, and their pending calls.

    A call of a scheduler's `step` counts if a step of the optimizer was committed since the last
    call that counted. A peer always receives the state at the beginning of a step: a call during an
    open step is repeated after a heal.

    Args:
        groups: returns the optimizer's parameter groups.
    """

    def __init__(self, groups: Callable[[], list[dict[str, Any]]]) -> None:
        self.groups = groups
        self.commits = 0
        self._seen: weakref.WeakKeyDictionary[FollowingScheduler, int]
        self._seen = weakref.WeakKeyDictionary()
        self.were_followed = False
        self._open = False
        self._inside = False
        self._warned = False
        self._lock = threading.Lock()
        self._before: dict[str, Any] | None = None
        self._calls: list[tuple[FollowingScheduler, Call]] = []

    def follow(self, scheduler: Any) -> Any:
        """The scheduler, wrapped so that it only advances with committed steps."""
        missing = [
            name
            for name in ("step", "state_dict", "load_state_dict")
            if not callable(getattr(scheduler, name, None))
        ]
        if missing:
            raise TypeError(
                f"a scheduler needs the methods step, state_dict and load_state_dict, but a "
                f"{type(scheduler).__name__} has no {' and no '.join(missing)}."
            )
        self.were_followed = True
        for one in self._seen:
            if scheduler is one or scheduler is one.__wrapped__:
                return one
        if not isinstance(scheduler, FollowingScheduler):
            kind = type(scheduler)
            made = type(kind.__name__, (FollowingScheduler, kind), {"__slots__": ()})
            scheduler = made(scheduler)
        before = scheduler.schedules()
        if before is not None:
            del before._seen[scheduler]
        scheduler.link(self)
        self._seen[scheduler] = self.commits
        return scheduler

    def begin(self) -> None:
        """A step of the group begins."""
        self.end()
        self._open = True

    def end(self) -> None:
        """The step is decided."""
        self._open = False
        self._before = None
        self._calls = []

    def call(self, scheduler: FollowingScheduler, call: Call) -> Any:
        """A scheduler's `step` is called: run it if it counts."""
        if self._inside:
            return call()
        if self._open:
            self._note(scheduler, call)
        return self._count(scheduler, call)

    def _note(self, scheduler: FollowingScheduler, call: Call) -> None:
        """A call comes while a step is open."""
        with self._lock:
            self._before = self._before or self._now()
        self._calls.append((scheduler, call))
        if not self._warned and self._seen[scheduler] < self.commits:
            self._warned = True
            warnings.warn(
                "a scheduler's step() was called between the optimizer's zero_grad() and its "
                "step(); a replica that is restarted and healed in this step does not make this "
                "call, and has another learning rate from then on. Call scheduler.step() before "
                "zero_grad().",
                stacklevel=4,
            )

    def _count(self, scheduler: FollowingScheduler, call: Call) -> Any:
        if self._seen[scheduler] == self.commits:
            return None
        self._inside = True
        try:
            result = call()
        finally:
            self._inside = False
        self._seen[scheduler] = self.commits  # a call that raised an error may be repeated
        return result

    def save(self) -> dict[str, Any]:
        """The data for a peer: the schedulers' states and the groups' values. Callable from any
        thread."""
        with self._lock:
            return self._before or self._now()

    def _now(self) -> dict[str, Any]:
        def live() -> dict[str, Any]:
            groups = [
                {key: as_data(x) for key, x in group.items() if key not in PARAMS}
                for group in self.groups()
            ]
            pairs = list(self._seen.items())
            known = [_saved(scheduler, seen < self.commits) for scheduler, seen in pairs]
            return {"groups": groups, "schedulers": known}

        return Coordinator.copied(live)

    def check(self, saved: dict[str, Any]) -> None:
        """Raise ValueError for the data of another program."""
        theirs = [x["class"] for x in saved["schedulers"]]
        mine = [type(scheduler.__wrapped__).__qualname__ for scheduler in self._seen]
        if mine != theirs:
            raise ValueError(
                f"a peer's schedulers are {theirs}, but this replica's are {mine}; make the same "
                "ones in the same order in all replicas, and keep references to them."
            )
        if len(saved["groups"]) != len(self.groups()):
            raise ValueError(
                f"a peer has {len(saved['groups'])} parameter groups, but this replica has "
                f"{len(self.groups())}; add the same ones in all replicas."
            )

    def load(self, saved: dict[str, Any], *, groups: bool) -> None:
        """Load the data of a peer, then repeat the calls since the step began.

        groups: also load the groups' values.
        """
        if groups:
            for group, values in zip(self.groups(), saved["groups"], strict=True):
                for key, value in values.items():
                    group[key] = _loaded(group.get(key), with_code(value, group.get(key)))
        for scheduler, theirs in zip(list(self._seen), saved["schedulers"], strict=True):
            scheduler.__wrapped__.load_state_dict(theirs["state"])
            self._seen[scheduler] = self.commits - theirs["due"]
        for scheduler, call in self._calls:
            self._count(scheduler, call)


def _saved(scheduler: FollowingScheduler, due: bool) -> dict[str, Any]:
    own = scheduler.__wrapped__
    return {"class": type(own).__qualname__, "state": own.state_dict(), "due": due}


def _loaded(mine: Any, value: Any) -> Any:
    """A peer's value, written into the existing tensor if there is one, since it may be
    referenced."""
    if isinstance(mine, Tensor) and isinstance(value, Tensor) and mine.shape == value.shape:
        return mine.detach().copy_(value) if mine.requires_grad else mine.copy_(value)
    return value


def _alone(scheduler: Any) -> Any:
    """A copy of a following scheduler: a scheduler that follows no optimizer yet."""
    return scheduler
