"""The steps of optimizers that share a coordinator: begin, vote, and update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.adapters.fault_tolerant.schedulers import Schedules
from functional_optim.adapters.state.transaction import transaction
from functional_optim.checkpoint.conversion import restore_precision
from functional_optim.core.memory import check_apart
from functional_optim.engine.guards import version_of
from functional_optim.kernels.interrupts import held
from functional_optim.replicas.coordinator import Coordinator, Decision

_NAME = "_functional_optim_rounds"


class Member:
    """The mutable data of one optimizer in the steps of a group.

    All wrappers of the optimizer share it. Lightning calls `zero_grad` on a copy of the optimizer
    object, whose attributes are not shared.
    """

    def __init__(
        self, optim: torch.optim.Optimizer, average_gradients: bool, heal: str, nonfinite: str
    ) -> None:
        self.optim = optim
        self.average_gradients = average_gradients
        self.heal = heal
        self.nonfinite = nonfinite
        self.schedules = Schedules(lambda: optim.param_groups)
        self.rounds: Rounds | None = None
        self.round: Round | None = None
        self.decision: Decision | None = None
        self.has_stepped = False
        self.evaluates = False
        """Is a closure running?"""
        self.initializes = False
        """Did distributed checkpoint's empty step come, and not yet its zero_grad?"""
        self.found_inf: Tensor | None = None
        """What a GradScaler found in the gradients, if it leaves the vote on it to this step."""
        self._zeroed: dict[int, tuple[int, Any]] = {}

    def parameters(self) -> list[Tensor]:
        return [p for group in self.optim.param_groups for p in group["params"]]

    def _sizes(self) -> list[int]:
        """The number of parameters in each group."""
        return [len(group["params"]) for group in self.optim.param_groups]

    def remember_zeroed(self) -> None:
        """Record the gradients after zero_grad."""
        self._zeroed = self._marks()

    def has_gradients(self) -> bool:
        """Whether gradients were computed since zero_grad."""
        return any(self._zeroed.get(p) != mark for p, mark in self._marks().items())

    def _marks(self) -> dict[int, tuple[int, Any]]:
        """By parameter, so that groups may be added and removed in between."""
        grads = {id(p): p.grad for p in self.parameters() if p.grad is not None}
        return {p: (id(g), version_of(g)) for p, g in grads.items()}

    def saved(self) -> dict[str, Any]:
        """The data for a peer: the schedulers and the groups' values; also parameters and state,
        unless heal is "schedules"."""
        schedule = self.schedules.save()
        if self.heal == "schedules":
            return {"schedule": schedule}
        return {
            "params": [p.detach() for p in self.parameters()],
            "sizes": self._sizes(),
            "state": self.optim.state_dict()["state"],
            "schedule": schedule,
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Load the data of a peer, or raise ValueError before anything is changed."""
        schedule = saved["schedule"]
        self.schedules.check(schedule)
        if (self.heal == "everything") != ("params" in saved):
            raise ValueError(
                f"this replica's optimizer was made with heal=\"{self.heal}\", but its peer's with "
                "another; pass the same to all replicas."
            )
        if self.heal == "schedules":
            self.schedules.load(schedule, groups=True)
            return
        params = self.parameters()
        mine = [(tuple(p.shape), p.dtype) for p in params]
        theirs = [(tuple(p.shape), p.dtype) for p in saved["params"]]
        if mine != theirs:
            raise ValueError(
                f"a peer's parameters do not fit this replica's: {_difference(mine, theirs)}; "
                "build the same model in all replicas."
            )
        sizes = saved.get("sizes", self._sizes())  # of a peer with version 0.2
        if sizes != self._sizes():
            raise ValueError(
                f"the parameter groups of a peer have {sizes} parameters, but those of this "
                f"replica {self._sizes()}; add the same groups in all replicas."
            )

        def put() -> None:
            _load_state(self.optim, saved["state"], schedule["groups"])
            with torch.no_grad():
                for p, value in zip(params, saved["params"], strict=True):
                    p.copy_(value)
            self.schedules.load(schedule, groups=False)

        held(transaction, self.optim, put)


class Round:
    """One step of the group.

    decision: None while it is open.
    owing: the members that have not taken this step yet, in the order of zero_grad.
    again: those that have computed gradients, and zeroed them again instead of a step.
    empty: those without gradients at the vote.
    late: those with gradients that a backward pass has added to averaged ones.
    """

    def __init__(self) -> None:
        self.decision: Decision | None = None
        self.owing: list[Member] = []
        self.again: list[Member] = []
        self.empty: list[Member] = []
        self.late: set[Member] = set()
        self._hooks: list[Any] = []

    def watch(self) -> None:
        """Find those that are `late`. Until all have taken the step, their parameters have a
        hook."""
        for member in self.owing if len(self.owing) > 1 else ():
            self._hooks += [
                p.register_post_accumulate_grad_hook(lambda _, member=member: self._add(member))
                for p in member.parameters()
                if member.average_gradients and p.requires_grad and p.is_leaf
            ]

    def _add(self, member: Member) -> None:
        if member in self.owing:
            self.late.add(member)

    def leave(self, member: Member) -> None:
        """A member has taken this step, or does not take it."""
        self.owing.remove(member)
        member.round = None
        if not self.owing:
            for hook in self._hooks:
                hook.remove()

    def release(self) -> None:
        """Release those that have not taken it."""
        for member in self.owing:
            member.round = None
        self.owing = []


class Rounds:
    """All steps of a coordinator's optimizers, one after the other."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.members: list[Member] = []
        self.current: Round | None = None
        self.waiting: list[Member] = []
        """Members that have called zero_grad while others still have to take the previous step."""

    def join(self, member: Member) -> None:
        """A member's zero_grad: it joins the open step, or begins a new one."""
        mine, joining = member.round, [member]
        if mine is not None and mine.decision is None and not self.coordinator.is_open:
            self._abandon(mine)  # the coordinator was closed in between, or decided manually
        elif mine is not None and mine.decision is None:
            if not member.has_gradients():
                return
            if member not in mine.again:
                mine.again.append(member)
            if len(mine.again) < len(mine.owing):
                return
            joining = mine.again
            self._close_skipped(mine)
        elif mine is not None:
            mine.leave(member)
        self.waiting += [one for one in joining if one not in self.waiting]
        self.begin()

    def begin(self) -> None:
        """Begin a step for waiting members, after all have taken the last step.

        The data sent to a peer in the background must not change in the meantime.
        """
        now = self.current
        if now is not None and now.decision is not None:
            skipped = [one for one in now.again if one in now.empty and one in now.owing]
            skipped = [one for one in skipped if not one.has_gradients()]  # zeroed for the next one
            if now.decision.committed and len(skipped) < len(now.owing):
                return
            for member in skipped:
                now.leave(member)
            self.waiting += skipped
            now = self.current = None
        if now is None:
            for member in self.members:
                member.schedules.begin()
            try:
                self.coordinator.start()
            except BaseException:
                self._end()
                raise
            now = self.current = Round()
        for member in self.waiting:
            member.round = now
            now.owing.append(member)
        self.waiting = []

    def vote(self, now: Round) -> Decision:
        """Decide on the open step, for all members whose step it is."""
        group = self.coordinator
        now.empty = [member for member in now.owing if not member.has_gradients()]
        try:
            found = average(group, now.owing)
        except BaseException:
            if not group.is_open:  # there is no quorum, so there is no vote
                self._abandon(now)
            raise
        for member in now.empty:
            member.remember_zeroed()  # a mean from other replicas is no later gradient
        if found:
            group.report_error(ValueError("a GradScaler has found an infinite or NaN gradient"))
        scaled = any(member.found_inf is not None for member in now.owing)
        for member in now.owing:
            if member.nonfinite == "refuse" or (scaled and member.average_gradients):
                error = nonfinite_gradient(member.parameters())
                if error is not None and group.error is None:
                    group.report_error(error)
        decision = self._decide(now)
        if decision.committed:
            now.watch()
        return decision

    def _decide(self, now: Round) -> Decision:
        try:
            now.decision = self.coordinator.decide()
        except BaseException:
            self._abandon(now)
            raise
        self._end()
        return now.decision

    def _abandon(self, now: Round) -> None:
        """End a step without a decision."""
        self.current = None
        now.release()
        self._end()

    def _end(self) -> None:
        for member in self.members:
            member.schedules.end()

    def why_none(self, member: Member) -> str:
        """The error if a member has no step to take."""
        if member in self.waiting and self.current is None:
            return (
                "no step has begun, since the coordinator could not start one; call zero_grad() "
                "again, which tries again."
            )
        if member in self.waiting:
            return (
                "the last step of this group has not ended: another optimizer that shares it has "
                "not taken it; call its step(), or its zero_grad(), before this step()."
            )
        if member.has_stepped:
            return (
                "step() was called twice for the same gradients; call zero_grad() before the next "
                "forward pass."
            )
        return (
            "step() was called before zero_grad(), which begins a step of the group; call "
            "opt.zero_grad() before each forward pass."
        )

    def _close_skipped(self, now: Round) -> None:
        self.coordinator.report_error(
            RuntimeError("gradients were computed, and zeroed without a step() of the optimizer")
        )
        self._decide(now)
        now.release()


def rounds_of(coordinator: Coordinator) -> Rounds:
    """The steps of a coordinator: the same object for all of its optimizers."""
    known = vars(coordinator).get(_NAME)
    if known is None:
        known = Rounds(coordinator)
        setattr(coordinator, _NAME, known)
    return known


@torch.no_grad()
def average(group: Coordinator, members: list[Member]) -> bool:
    """Replace gradients by their means over the group. A gradient that no replica has stays
    None.

    Returns whether a GradScaler of the group has found an infinite gradient, which may have been
    clipped since.
    """
    theirs = [
        [p for p in member.parameters() if p.requires_grad or p.grad is not None]
        for member in members
        if member.average_gradients
    ]
    params = [p for mine in theirs for p in mine]
    if not params:
        return False
    for p in params:
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise TypeError(
                "average_gradients=True averages dense gradients only, but one of shape "
                f"{tuple(p.shape)} is sparse; make it dense, or average gradients yourself with "
                "coordinator.allreduce."
            )
    grads = [torch.zeros_like(p, dtype=p.grad_dtype) if p.grad is None else p.grad for p in params]
    there = [float(p.grad is not None) for p in params]
    there += [float(any(member.found_inf for member in members))]
    flags = torch.tensor(there, device=params[0].device)
    means, shares = group.allreduce((grads, flags)).wait()
    *shares, found = shares.tolist()
    alone = _are_apart([*params, *grads])
    for p, mean, share in zip(params, means, shares, strict=True):
        if not share > 0:  # only a replica that does not contribute has one
            p.grad = None
        elif p.grad is None or not alone:
            p.grad = mean.detach()
        else:
            p.grad.copy_(mean)
    return found > 0


def _are_apart(tensors: list[Tensor]) -> bool:
    """Whether each tensor may be written in place, and this changes no other one."""
    try:
        check_apart(tensors, str)
    except ValueError:
        return False
    return True


def nonfinite_gradient(params: list[Tensor]) -> Exception | None:
    """The error for gradients with infinite or NaN elements; None without such elements."""
    given = [(i, p.grad) for i, p in enumerate(params) if p.grad is not None]
    found = tree.first_not_finite([g for _, g in given])
    if found is None:
        return None
    i, g = given[found]
    return ValueError(
        f"the gradient of parameter {i}, of shape {tuple(g.shape)}, has an infinite or NaN element"
    )


def _difference(mine: list[Any], theirs: list[Any]) -> str:
    if len(mine) != len(theirs):
        return f"it has {len(theirs)} of them, and this one has {len(mine)}"
    i = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
    (a, b), (c, d) = mine[i], theirs[i]
    return f"its parameter {i} is a {d} of shape {c}, and this one's is a {b} of shape {a}"


def _load_state(optim: torch.optim.Optimizer, state: Any, groups: list[dict[str, Any]]) -> None:
    packed = optim.state_dict()["param_groups"]
    optim.load_state_dict(
        {
            "state": state,
            "param_groups": [
                {**values, "params": mine["params"]}
                for mine, values in zip(packed, groups, strict=True)
            ],
        }
    )
    if optim._optimizer_load_state_dict_pre_hooks:  # they determine the state
        return
    ids = [i for mine in packed for i in mine["params"]]
    params = [p for group in optim.param_groups for p in group["params"]]
    for i, p in zip(ids, params, strict=True):
        if i in state:
            optim.state[p].update(restore_precision(optim.state[p], state[i]))
