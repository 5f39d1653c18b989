"""LR schedulers that follow an optimizer whose steps may be refused."""

from __future__ import annotations

import copyreg
import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from functional_optim.adapters.recipes import as_data, with_code
from functional_optim.replicas.coordinator import Coordinator

_newobj = copyreg.__newobj__  # pyright: ignore[reportAttributeAccessIssue]
_HOMES = ("torch.optim.lr_scheduler", "torch.optim.swa_utils")
_FOLLOWED: weakref.WeakKeyDictionary[Any, weakref.ref[Schedules]] = weakref.WeakKeyDictionary()
"""Kept outside of the schedulers, whose attributes are all in their state dict. Weak on both sides:
an optimizer may lead to its scheduler, e.g. by a hook, and would keep both alive from here."""


class Schedules:
    """The schedulers of one optimizer, and what each still has to do.

    A call of a scheduler's `step` counts if a step of the optimizer was committed since the last
    call that did. What a peer is given is always the state at the beginning of a step: a call made
    while a step is open is repeated after a heal.

    Args:
        groups: returns the optimizer's parameter groups.
    """

    def __init__(self, groups: Callable[[], list[dict[str, Any]]]) -> None:
        self.groups = groups
        self.commits = 0
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._open = False
        self._inside = False
        self._warned = False
        self._lock = threading.Lock()
        self._before: dict[str, Any] | None = None
        self._calls: list[tuple[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def follow(self, scheduler: Any) -> None:
        """Let a scheduler's steps count only with committed ones."""
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
        before = _followed(scheduler)
        if before is self:
            return
        if before is not None:
            del before._seen[scheduler]
        elif scheduler not in _FOLLOWED:
            scheduler.__class__ = _following(type(scheduler))
        _FOLLOWED[scheduler] = weakref.ref(self)
        self._seen[scheduler] = self.commits

    def begin(self) -> None:
        """A step of the group begins."""
        self._before = None
        self._calls = []
        self._open = True

    def end(self) -> None:
        """It is decided."""
        self._open = False
        self._before = None
        self._calls = []

    def call(
        self, scheduler: Any, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """A scheduler's `step` is called: run it if it counts."""
        if self._inside or getattr(scheduler, "_is_initial", False):
            return step(scheduler, *args, **kwargs)
        if self._open:
            self._note((scheduler, step, args, kwargs))
        return self._count(scheduler, step, args, kwargs)

    def _note(self, call: Any) -> None:
        """A call comes while a step is open."""
        with self._lock:
            self._before = self._before or self._now()
        self._calls.append(call)
        if not self._warned and self._seen[call[0]] < self.commits:
            self._warned = True
            warnings.warn(
                "a scheduler's step() was called between the optimizer's zero_grad() and its "
                "step(); a replica that is started anew and healed in this step does not do that, "
                "and has another learning rate from then on. Call scheduler.step() before "
                "zero_grad().",
                stacklevel=4,
            )

    def _count(
        self, scheduler: Any, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        if self._seen[scheduler] == self.commits:
            return None
        self._seen[scheduler] = self.commits
        self._inside = True
        try:
            return step(scheduler, *args, **kwargs)
        finally:
            self._inside = False

    def save(self) -> dict[str, Any]:
        """What a peer needs: the schedulers' states and the groups' values. From any thread."""
        with self._lock:
            return self._before or self._now()

    def _now(self) -> dict[str, Any]:
        def live() -> dict[str, Any]:
            return {
                "groups": [
                    {
                        key: as_data(x)
                        for key, x in group.items()
                        if key not in ("params", "param_names")
                    }
                    for group in self.groups()
                ],
                "schedulers": [
                    {
                        "class": type(scheduler).__qualname__,
                        "state": scheduler.state_dict(),
                        "due": seen < self.commits,
                    }
                    for scheduler, seen in list(self._seen.items())
                ],
            }

        return Coordinator.copied(live)

    def check(self, saved: dict[str, Any]) -> None:
        """Raise ValueError for what comes from another program."""
        theirs = [x["class"] for x in saved["schedulers"]]
        mine = [type(scheduler).__qualname__ for scheduler in self._seen]
        if mine != theirs:
            raise ValueError(
                f"a peer's schedulers are {theirs}, but this replica's are {mine}; make the same "
                "ones in the same order everywhere, and keep them alive."
            )
        if len(saved["groups"]) != len(self.groups()):
            raise ValueError(
                f"a peer has {len(saved['groups'])} parameter groups, but this replica has "
                f"{len(self.groups())}; add the same ones everywhere."
            )

    def load(self, saved: dict[str, Any], *, groups: bool) -> None:
        """Become what a peer has saved, then do what was done here since the step began.

        groups: load the groups' values too.
        """
        if groups:
            for group, values in zip(self.groups(), saved["groups"], strict=True):
                for key, value in values.items():
                    group[key] = _loaded(group.get(key), with_code(value, group.get(key)))
        for scheduler, theirs in zip(list(self._seen), saved["schedulers"], strict=True):
            scheduler.load_state_dict(theirs["state"])
            self._seen[scheduler] = self.commits - theirs["due"]
        for call in self._calls:
            self._count(*call)


def _loaded(mine: Any, value: Any) -> Any:
    """A peer's value; in the tensor that is here, where there is one, since others may hold it."""
    if isinstance(mine, Tensor) and isinstance(value, Tensor) and mine.shape == value.shape:
        return mine.detach().copy_(value) if mine.requires_grad else mine.copy_(value)
    return value


def reader() -> Any:
    """The torch scheduler, if it is one, that reads `param_groups` of an optimizer that calls this.

    All of torch's schedulers read them when they are made, and this is all that an optimizer sees
    of it.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "param_groups":  # of a wrapper
        frame = frame.f_back
    while frame is not None and frame.f_globals.get("__name__") in _HOMES:
        found = frame.f_locals.get("self")
        if isinstance(found, LRScheduler):
            return found
        frame = frame.f_back
    return None


def _followed(scheduler: Any) -> Schedules | None:
    """Those of the optimizer that a scheduler follows; None where that is gone or never was."""
    found = _FOLLOWED.get(scheduler)
    return None if found is None else found()


@functools.cache
def _following(cls: Any) -> type:
    """A class of schedulers, but for `step`. Its objects are pickled as those of the first."""

    @functools.wraps(cls.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        schedules = _followed(self)
        if schedules is None:
            return cls.step(self, *args, **kwargs)
        return schedules.call(self, cls.step, args, kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        make, args, *rest = cls.__reduce_ex__(self, protocol)
        if make is _newobj:  # pickle insists that this one makes objects of the class it sees
            make = cls.__new__
        return make, tuple(cls if x is following else x for x in args), *rest

    own = {
        "step": step,
        "__reduce_ex__": reduce,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    following = type(cls)(cls.__name__, (cls,), own)
    return following
