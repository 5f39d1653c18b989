"""What the group service of a `Simulation` keeps: its members, a step and its outcome, a log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.replicas.coordinator import Decision
from functional_optim.replicas.simulation.scheduler import Task


class Event(NamedTuple):
    """One line of a simulation's log.

    time: in virtual seconds.
    rank, life: whose; a life is how many times this replica was restarted. None: of the group.
    what: in words.
    decision: where it is one.
    """

    time: float
    rank: int | None
    life: int | None
    what: str
    decision: Decision | None = None

    def __str__(self) -> str:
        again = f" (life {self.life})" if self.life else ""
        who = "the group" if self.rank is None else f"replica {self.rank}{again}"
        said = self.decision
        how = f": {'committed' if said.committed else said.reason}" if said else ""
        return f"{self.time:.4f} s, {who}: {self.what}{how}"


class Commit(NamedTuple):
    """A step that the group has committed.

    step: how many are committed with it.
    participants: the ranks whose values were averaged.
    members: the ranks that took the step: these, and those that were healed.
    """

    step: int
    participants: tuple[int, ...]
    members: tuple[int, ...]


class SimulatedMember:
    """One life of a replica, as the service knows it.

    step: how many steps it counted as committed when it last began one.
    held: the step whose whole state it has; -1 after an update that failed half-way.
    left: has it finished? It stays as a peer to heal from.
    """

    def __init__(self, rank: int, life: int) -> None:
        self.rank = rank
        self.life = life
        self.task: Task
        self.saved: Callable[[], dict[str, Any]]
        self.step = 0
        self.held = 0
        self.alive = True
        self.left = False
        self.cut_until = 0.0
        self.slow_until = 0.0
        self.each = 0.0
        self.late = 0.0
        self.inbox: dict[Any, Any] = {}
        self.awaits: Any = None


class SimulatedRound:
    """One step of a quorum, from its formation to its outcome.

    step: how many steps are committed before it.
    participants: the members whose values are averaged.
    source: who heals the others, and `saved`: what with, one copy for each.
    given: how many reductions each member has contributed to.
    sums: the parts of those that are not complete.
    votes: by member, what it has against the step; "" for a yes.
    heard: when something was last heard of a member.
    """

    def __init__(
        self,
        step: int,
        members: list[SimulatedMember],
        participants: list[SimulatedMember],
        source: SimulatedMember,
        now: float,
    ) -> None:
        self.step = step
        self.members = members
        self.participants = participants
        self.source = source
        self.saved: dict[SimulatedMember, dict[str, Any]] = {}
        self.given = dict.fromkeys(members, 0)
        self.sums: dict[int, dict[SimulatedMember, Tensor]] = {}
        self.votes: dict[SimulatedMember, str] = {}
        self.heard = now
        self.over = False
        self.committed = False
        self.reason = ""
