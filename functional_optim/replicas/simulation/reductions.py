"""What the group service of a `Simulation` keeps: its members, a step and its outcome, a log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class SimulatedMember:
    """One life of a replica, as the service knows it.

    step: how many steps it counted as committed when it last began one.
    held: the step whose whole state it has; -1 after an update that failed half-way.
    left: has it finished? It stays as a peer to heal from.
    """

    rank: int
    life: int
    task: Task = field(init=False)
    saved: Callable[[], dict[str, Any]] = field(init=False)
    step: int = 0
    held: int = 0
    alive: bool = True
    left: bool = False
    cut_until: float = 0.0
    slow_until: float = 0.0
    each: float = 0.0
    late: float = 0.0
    inbox: dict[Any, Any] = field(default_factory=dict)
    awaits: Any = None


@dataclass(eq=False)
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

    step: int
    members: list[SimulatedMember]
    participants: list[SimulatedMember]
    source: SimulatedMember
    heard: float
    saved: dict[SimulatedMember, dict[str, Any]] = field(default_factory=dict)
    sums: dict[int, dict[SimulatedMember, Tensor]] = field(default_factory=dict)
    votes: dict[SimulatedMember, str] = field(default_factory=dict)
    over: bool = False
    committed: bool = False
    reason: str = ""

    def __post_init__(self) -> None:
        self.given = dict.fromkeys(self.members, 0)
