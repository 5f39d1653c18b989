"""`compile`: a transformation as a step that updates parameters and state in place."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from functional_optim import base, kernels, numeric, tree
from functional_optim.combine import extra_names
from functional_optim.commits import CommitIf, as_flag
from functional_optim.engine import Cohort, How, Turn, advance, agenda_of
from functional_optim.layout import Layout
from functional_optim.leafwise import (
    Leafwise,
    State,
    check_state,
    check_trees,
    everywhere,
)
from functional_optim.looks import Looks
from functional_optim.rules import Numbers, present
from functional_optim.synced import Synced, advanced


def compile(
    tx: base.GradientTransformation, *, donate: bool = True, strict: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Compile a transformation into a step: `params, state = step(grads, state, params, **extra)`.

    One kernel is compiled for the recipe and serves every size of tensor, every model and every
    value of the hyperparameters: compiling `adamw(lr=1e-3)` and then `adamw(lr=1e-4)` costs one
    compilation. A transformation that is not made of one-tensor rules alone is compiled whole, with
    torch.compile.

    Args:
        tx: a transformation.
        donate: write the results into the tensors of `params` and `state`, which are then the ones
            returned (about five times faster than making new ones). False leaves both untouched.
        strict: raise a RuntimeError where the step cannot be compiled, before anything is written.
            False (the default) falls back to what works, at last to the plain rules, with a warning
            that says why. Sparse gradients and tensors of odd layouts run eagerly either way.

    Returns:
        The step. Gradients are never changed. A `None` gradient leaves its parameter as it is.
        Traced by make_fx, or inside a transform of torch.func, it runs as plain operations.

    Raises:
        TypeError: if tx is not a transformation; from the step, for an unknown extra argument.
        ValueError: from the step, if grads, state and params do not fit together, or two parameters
            share memory.
        RuntimeError: from the step, if `strict` and it cannot be compiled.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.sgd(lr=0.5)
        >>> step = fo.compile(tx)
        >>> params = {"w": torch.ones(2)}
        >>> params, state = step({"w": torch.ones(2)}, tx.init(params), params)
        >>> params
        {'w': tensor([0.5000, 0.5000])}
    """
    if not isinstance(tx, base.GradientTransformation):
        raise TypeError(
            f"compile takes a transformation, but got a {type(tx).__name__}; call the factory "
            "first, e.g. compile(adamw(lr=1e-3))."
        )
    if isinstance(tx, CommitIf):
        step = compile(tx.inner, donate=donate, strict=strict)
        return _committed(tx, step, donate and isinstance(tx.inner, Leafwise))
    if isinstance(tx, Synced):
        return _counted(compile(tx.inner, donate=donate, strict=strict))
    return FusedStep(tx, donate, strict) if isinstance(tx, Leafwise) else _whole(tx)


def _committed(
    tx: CommitIf, step: Callable[..., tuple[Any, Any]], donate: bool
) -> Callable[..., tuple[Any, Any]]:
    """A step that is not run where it is refused."""

    def committed(
        grads: Any, state: Any, params: Any, *, commit: Any, **extra: Any
    ) -> tuple[Any, Any]:
        if isinstance(commit, Tensor) and (kernels.bypass() or torch.compiler.is_compiling()):
            return by_operations(tx, donate, grads, state, params, {**extra, "commit": commit})
        return step(grads, state, params, **extra) if as_flag(commit) else (params, state)

    return committed


def _counted(step: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """A local step, and what there is to note of it."""

    def counted(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        params, inner = step(grads, state.inner, params, **extra)
        return params, advanced(state, inner)

    return counted


def by_operations(
    tx: base.GradientTransformation,
    donate: bool,
    grads: Any,
    state: Any,
    params: Any,
    extra: dict[str, Any],
) -> tuple[Any, Any]:
    """The step where a tracer or a transform of torch.func must see it."""
    updates, new_state = tx.update(grads, state, params, **extra)
    new_params = base.apply_updates(params, updates)
    if not donate:
        return new_params, new_state
    with torch.no_grad():
        tree.map(Tensor.copy_, (params, state), (new_params, new_state))
    return params, state


class FusedStep:
    """The compiled step of a chain of one-tensor rules."""

    def __init__(self, tx: Leafwise, donate: bool, strict: bool) -> None:
        self.tx = tx
        self.donate = donate
        self.how: How = "strict" if strict else "compiled"
        self.extra = extra_names(tx)
        self.seen: Seen | None = None

    def __call__(self, grads: Any, state: State, params: Any, **extra: Any) -> tuple[Any, State]:
        if kernels.bypass():
            return by_operations(self.tx, self.donate, grads, state, params, extra)
        return base.unrecorded(self._by_kernels, grads, state, params, extra)

    def _by_kernels(
        self, grads: Any, state: State, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, State]:
        if extra:
            base.check_extra(extra, self.extra)
        if not self.donate:
            params, state = tree.map(torch.clone, params), tree.map(torch.clone, state)
        seen = self.seen
        given = None if seen is None else seen.gradients(grads, state, params)
        if seen is None or given is None:
            seen = self.seen = Seen(self.tx, grads, state, params, self.how)
            given = seen.given
        t = seen.time(state.step)
        carry = seen.carry(state.carry) if state.carry else {}
        if seen.teams:
            turns = [team.turn(given, t, carry, extra) for team in seen.teams]
            advance(turns, seen.agenda)
            if carry or seen.changing:
                for team, turn in zip(seen.teams, turns, strict=True):
                    carry.update(team.carried(turn))
                    for key, i, value in team.changing:
                        state.hyper[key].fill_(numeric.at(value, turn.time_of(i)))
        seen.finish(state.step, t)
        if state.carry:
            for key, value in carry.items():
                state.carry[key].fill_(value)
        return params, state


class Team:
    """Leaves on which the same links act.

    places: among the gradients; every: are they all? changing: the hyperparameters that may have
    another value in every step, with the place of their link.
    """

    def __init__(self, layout: Layout, cohort: Cohort, places: list[int]) -> None:
        self.layout = layout
        self.cohort = cohort
        self.places = places
        self.every = False
        self.idle: list[Numbers] = [()] * len(layout.carry)
        self.changing: list[tuple[str, int, numeric.Hyper]] = []

    def hyper(self) -> list[tuple[str, int, numeric.Hyper]]:
        """The keys of the hyperparameters, the places of their links, and the values."""
        return [
            (key, i, value)
            for i, (link, own) in enumerate(zip(self.cohort.links, self.layout.hyper, strict=True))
            for key, (_, value) in zip(own, link.hyper, strict=True)
        ]

    def turn(
        self, grads: list[Tensor], t: Any, carry: dict[str, Any], extra: dict[str, Any]
    ) -> Turn:
        """Its part in a step."""
        mine = grads if self.every else [grads[i] for i in self.places]
        own = self.idle
        if carry:
            own = [tuple([carry[key] for key in keys]) for keys in self.layout.carry]
        return Turn(self.cohort, mine, t, own, extra)

    def carried(self, turn: Turn) -> dict[str, Any]:
        """The carried numbers after a turn."""
        named = zip(self.layout.carry, turn.carried, strict=True)
        return {key: x for keys, own in named for key, x in zip(keys, own, strict=True)}


class Seen:
    """The tensors of the last step, ready for the next one if it gets the same.

    Raises, when it is made, if the trees do not fit together.
    """

    def __init__(self, tx: Leafwise, grads: Any, state: Any, params: Any, how: How) -> None:
        check_state(tx.links, tx.layout, state)
        base.check_params(params)
        check_trees(tx.links, tx.layout, params, grads, state)
        self.keys = tx.layout.keys
        self.structure = tree.structure(params)
        given, *columns = self._columns(grads, state, params)
        self.tensors = tuple(chain(*columns))
        self.given = [g for g in given if g is not None]
        _check_apart([p for p, g in zip(columns[0], given, strict=True) if g is not None])
        memory = [x for x in self.tensors if isinstance(x, Tensor)]
        self.looks = Looks(given, memory, self.tensors)
        self.how: How = how if self.looks.layouts is None else "apart"
        self.teams = self._teams(tx, params, given, columns)
        self.agenda = agenda_of([(tx.links, tx.layout.counts)]) if tx.meets else ()
        self.here = state.step.device.type == "cpu"
        for team in self.teams:  # of another recipe, perhaps, the last time
            known = [row for row in team.hyper() if row[0] in state.hyper]
            team.changing = [row for row in known if not numeric.is_static(row[2])]
            for key, _, value in known:
                if numeric.is_static(value):
                    state.hyper[key].fill_(value)
        self.changing = any(team.changing for team in self.teams)
        self.step: Tensor | None = None
        self.version = 0
        self.done = 0.0

    def _teams(
        self, tx: Leafwise, params: Any, given: list[Any], columns: list[list[Any]]
    ) -> list[Team]:
        """Leaves on which the same links act, together."""
        members: dict[Leafwise, list[int]] = {}
        for i, (path, p) in enumerate(tree.items(params)):
            part = tx.on(path, p)
            if part is not None and given[i] is not None:
                members.setdefault(part, []).append(i)
        place = {i: k for k, i in enumerate([i for i, g in enumerate(given) if g is not None])}
        columns_of = dict(zip(self.keys, columns[1:], strict=True))
        teams = []
        for part, some in members.items():
            rows = [
                [tuple([columns_of[key][i] for key in own]) for own in part.layout.slots]
                for i in some
            ]
            mine = [columns[0][i] for i in some]
            counts = part.layout.counts
            grads = [given[i] for i in some]
            cohort = Cohort(part.links, mine, rows, grads, how=self.how, counts=counts)
            slots = [x for row in rows for x in present(row)]
            for slot in slots:
                if slot.grad_fn is not None:  # of a recorded init; what comes now is not recorded
                    slot.detach_()
            if self.how != "apart":
                cohort.written += slots
            teams.append(Team(part.layout, cohort, [place[i] for i in some]))
        if len(teams) == 1 and len(teams[0].places) == len(place):
            teams[0].every = True
        if tx.meets:  # all numbers go on, those of links that act on nothing here too
            counts = tx.layout.counts
            cohort = Cohort(
                everywhere(tx.links, tx.layout), [], [], [], how=self.how, counts=counts
            )
            teams.append(Team(tx.layout, cohort, []))
        return teams

    def gradients(self, grads: Any, state: Any, params: Any) -> list[Tensor] | None:
        """The gradients, if the tensors are the same and the gradients like those."""
        try:
            given, *columns = self._columns(grads, state, params)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        tensors = list(chain(*columns))
        found = self.looks.look("given_gradients", given, tensors)
        if found is not NotImplemented:
            return found
        same = len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors))
        return self.looks.fit(given) if same else None

    def _columns(self, grads: Any, state: Any, params: Any) -> list[list[Any]]:
        slots = [state.slots[key] for key in self.keys]
        return tree.places(self.structure, grads, params, *slots)

    def time(self, step: Tensor) -> Any:
        """The number of this step; the count is not read where nobody else has written to it."""
        if not self.here:
            return (step + 1).to(torch.float64)
        if step is not self.step or step._version != self.version:
            self.done = float(step.item())
        return self.done + 1

    def carry(self, stored: dict[str, Tensor]) -> dict[str, Any]:
        """The carried numbers."""
        return {key: x.item() if self.here else numeric.float64(x) for key, x in stored.items()}

    def finish(self, step: Tensor, t: Any) -> None:
        """Write the count."""
        if isinstance(t, Tensor):  # on another device, where no count is read
            step.copy_(t)
            return
        step.fill_(t)
        self.step, self.version, self.done = step, step._version, t


def _whole(tx: base.GradientTransformation) -> Callable[..., tuple[Any, Any]]:
    def step(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params, **extra)
        return base.apply_updates(params, updates), state

    return torch.no_grad()(torch.compile(step, fullgraph=True))


def _check_apart(params: list[Tensor]) -> None:
    seen: set[int] = set()
    for p in params:
        if not p.numel() or not p.data_ptr():  # 0: of a device whose tensors have no memory
            continue
        if p.data_ptr() in seen:
            raise ValueError(
                f"two parameters of shape {tuple(p.shape)} share their memory, so a step in place "
                "would move it twice; pass tied weights once."
            )
        seen.add(p.data_ptr())
