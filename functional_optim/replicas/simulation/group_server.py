"""The group service of a `Simulation`: quorums, reductions, votes, and the step of each replica."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.replicas.coordinator import Decision
from functional_optim.replicas.simulation.faults import Point
from functional_optim.replicas.simulation.scheduler import Baton, Task


class Event(NamedTuple):
    """One line of a simulation's log.

    time: in virtual seconds.
    rank, life: of the replica; life is the number of its restarts. None: of the group.
    what: the event as text.
    decision: for an event that is one.
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

    step: number of committed steps, including it.
    participants: the ranks whose values were averaged.
    members: the ranks that took the step: these, and those that were healed.
    """

    step: int
    participants: tuple[int, ...]
    members: tuple[int, ...]


@dataclass(eq=False)
class SimulatedMember:
    """One life of a replica in the service.

    step: its number of committed steps when it last began one.
    held: the step whose complete state it has; -1 after an update that failed midway.
    left: whether it has finished. It remains as a peer to heal from.
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

    def receive(self, key: Any, value: Any) -> Task | None:
        """Take a message; the task that continues, if it waits for it."""
        self.inbox[key] = value
        return self.task if self.awaits == key else None


@dataclass(eq=False)
class SimulatedRound:
    """One step of a quorum, from its formation to its outcome.

    step: number of committed steps before it.
    participants: the members whose values are averaged.
    source: the replica that heals the others, and `saved`: its state, one copy for each.
    given: number of reductions that each member has contributed to.
    sums: the parts of incomplete reductions.
    votes: by member, its reason against the step; "" for a yes.
    heard: the time of the last message of a member.
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


@dataclass(eq=False)
class Group:
    """The service. Its methods run when a message arrives, and answer by messages."""

    baton: Baton
    rng: random.Random
    strike: Callable[[SimulatedMember, Point], None]
    min_replicas: int
    heals_at_start: bool
    init_sync: bool
    timeout: float
    join_timeout: float
    latency: float

    def __post_init__(self) -> None:
        self.step = 0
        self.commits: list[Commit] = []
        self.lost: list[Event] = []
        self.log: list[Event] = []
        self.members: dict[int, SimulatedMember] = {}
        self._waiting: dict[SimulatedMember, Any] = {}
        self._round: SimulatedRound | None = None
        self._begun = False
        self._deadline: float | None = None

    # ---------------------------------------------------------------- messages

    def note(
        self, member: SimulatedMember | None, what: str, decision: Decision | None = None
    ) -> Event:
        """Write a line of the log."""
        rank, life = (None, None) if member is None else (member.rank, member.life)
        event = Event(self.baton.now, rank, life, what, decision)
        self.log.append(event)
        return event

    def send(
        self, m: SimulatedMember, arrive: Callable[[], Task | None], late: float = 0.0
    ) -> None:
        """A message between a replica and the service. arrive: returns the task that continues."""

        def arrived() -> Task | None:
            if not m.alive:
                return None
            if m.cut_until > self.baton.now:
                self.baton.at(m.cut_until, arrived)
                return None
            return arrive()

        self.baton.at(self.baton.now + self._travel(m) + late, arrived)

    def _reply(self, m: SimulatedMember, key: Any, value: Any) -> None:
        """A message from the service to a replica."""
        self.send(m, lambda: m.receive(key, value), m.late)
        m.late = 0.0

    def _travel(self, m: SimulatedMember) -> float:
        slow = m.each if m.slow_until > self.baton.now else 0.0
        return self.latency * (0.5 + self.rng.random()) + slow

    # ---------------------------------------------------------------- members

    def died(self, m: SimulatedMember) -> None:
        """A replica was killed; its connections break immediately."""
        m.alive = False
        self._gone(m, "died")

    def leave(self, m: SimulatedMember) -> None:
        """A replica has finished; peers can still heal from it."""
        if m.alive and not m.left:
            m.left = True
            self._gone(m, "left")

    def take_back(self, m: SimulatedMember) -> None:
        """A member could not take a committed step."""
        m.held = -1
        self._check_history()
        self.form()

    def _gone(self, m: SimulatedMember, how: str) -> None:
        self._waiting.pop(m, None)
        r = self._round
        if r is not None and m in r.given and m not in r.votes:
            self._conclude(r, f"replica {m.rank} {how}")
        self._check_history()
        self.form()

    def holders(self) -> list[SimulatedMember]:
        """The replicas with the last committed step."""
        return [m for m in self.members.values() if m.alive and m.held == self.step]

    def _check_history(self) -> None:
        if self.step and not self.holders():
            held = max([m.held for m in self.members.values() if m.alive], default=0)
            old, self.step = self.step, max(held, 0)
            self.lost.append(self.note(None, f"lost: the steps after {self.step}, up to {old}"))

    # ---------------------------------------------------------------- quorums

    def join(self, m: SimulatedMember, key: Any) -> None:
        """A replica asks to start a step. Before the first of the group, its count of committed
        steps is taken, as it may be that of a checkpoint."""
        if not self._begun:
            m.held = m.step
            self.step = max(self.step, m.step)
        self._waiting[m] = key
        self.strike(m, "in start")
        self.form()

    def why_no_quorum(self) -> str:
        """The text of what a replica that has asked to start waits for."""
        return (
            f"a quorum ({len(self._waiting)} of min_replicas={self.min_replicas} have asked, "
            f"{len(self.holders())} hold the last committed step, {self.step})"
        )

    def form(self) -> None:
        """Begin a round, if all living replicas have asked for it, or the time to wait is over."""
        if self._round is not None or not self._waiting:
            self._deadline = None
            return
        if self._deadline is None:
            self._deadline = self.baton.now + self.join_timeout
            self.baton.at(self._deadline, self.form)
        everybody = [self.members[rank] for rank in sorted(self.members)]
        there = [m for m in everybody if m in self._waiting and self._reaches(m)]
        busy = [m for m in everybody if m.alive and not m.left and m not in there]
        if not there or (busy and self.baton.now < self._deadline):
            return
        left = [m for m in everybody if m.alive and m.left]
        source = next(
            (m for m in (*there, *left) if m.held == self.step and self._reaches(m)), None
        )
        if len(there) + len(left) < self.min_replicas:
            return
        if source is not None:
            self._begin(there, source)
        elif all(m.held < 0 for m in everybody if m.alive):
            for m in there:
                self._reply(m, self._waiting.pop(m), None)

    def _begin(self, there: list[SimulatedMember], source: SimulatedMember) -> None:
        together = self.init_sync and self.step == 0
        heal = [m for m in there if m is not source and (together or m.held != self.step)]
        participants = [m for m in there if self.heals_at_start or m not in heal]
        r = self._round = SimulatedRound(self.step, there, participants, source, self.baton.now)
        r.saved = {m: _saved(source) for m in heal}
        self._begun = True
        self._deadline = None
        self._watch(r)
        for m in there:
            self._reply(m, self._waiting.pop(m), r)

    def _reaches(self, m: SimulatedMember) -> bool:
        return m.alive and m.cut_until <= self.baton.now

    def no_heal(self, m: SimulatedMember, r: SimulatedRound) -> str:
        """Why the replica that heals in a round cannot be healed now; "" if it can."""
        if r.over:
            return r.reason
        if not self._reaches(m):
            return f"replica {m.rank} is cut off, and cannot heal"
        if not self._reaches(r.source):
            return f"replica {m.rank} cannot reach the peer that it was to be healed by"
        return ""

    # ---------------------------------------------------------------- reductions and votes

    def give(self, m: SimulatedMember, r: SimulatedRound, k: int, vector: Tensor) -> None:
        """A contribution to the k-th reduction of a round."""
        if not r.over:
            r.heard = self.baton.now
            r.given[m] += 1
            r.sums.setdefault(k, {})[m] = vector
        self.strike(m, "in allreduce")
        if r.over:
            self._reply(m, (r, k), None)
            return
        given = r.sums[k]
        if len(given) < len(r.members):
            return
        looks = {(given[m].numel(), given[m].dtype): m.rank for m in reversed(r.members)}
        if len(looks) > 1:
            shown = [f"replica {rank} {n} of {dtype}" for (n, dtype), rank in looks.items()]
            self._conclude(r, f"the tensors to average differ: {', '.join(shown[::-1])}")
            return
        del r.sums[k]
        mean = _mean([given[m] for m in r.participants], given[m])
        for other in r.members:
            self._reply(other, (r, k), mean)

    def object(self, m: SimulatedMember, r: SimulatedRound, reason: str) -> None:
        """A replica has reported an error of an open step."""
        self._conclude(r, f"replica {m.rank}: {reason}")

    def vote(self, m: SimulatedMember, r: SimulatedRound, reason: str) -> None:
        """A replica's vote: yes, if it has no reason against the step."""
        if not r.over:
            r.heard = self.baton.now
            r.votes[m] = reason
        self.strike(m, "in decide")
        if r.over:
            self._reply(m, r, None)
        elif reason:
            self._conclude(r, f"replica {m.rank}: {reason}")
        elif len(r.votes) == len(r.members):
            self._conclude(r, self._objection(r))

    def _objection(self, r: SimulatedRound) -> str:
        """Why a round is refused although all have voted for it; "" if it is not."""
        if not r.participants:
            return "no replica took part, all were healing"
        if not any(m.alive for m in r.members):
            return "no replica lives to take it"
        return ""

    def _conclude(self, r: SimulatedRound, reason: str) -> None:
        if r.over:
            return
        r.over, r.committed, r.reason = True, not reason, reason
        self._round = None
        if r.committed:
            self.step = r.step + 1
            ranks = tuple([m.rank for m in r.participants])
            commit = Commit(self.step, ranks, tuple([m.rank for m in r.members]))
            self.commits.append(commit)
            self.note(None, f"committed step {self.step} of replicas {_names(r.participants)}")
            for m in r.members:
                m.held = self.step
        else:
            self.note(None, f"refused step {r.step + 1}: {reason}")
        for k, given in r.sums.items():
            for m in given:
                self._reply(m, (r, k), None)
        for m in r.votes:
            self._reply(m, r, None)
        self.form()

    def _watch(self, r: SimulatedRound) -> None:
        """Refuse a round without messages for the timeout."""
        due = r.heard + self.timeout

        def check() -> None:
            if not r.over and r.heard + self.timeout > due:
                self._watch(r)
            elif not r.over:
                far = {m: (m in r.votes, r.given[m]) for m in r.members}
                least = min(far.values())
                silent = [m for m in r.members if far[m] == least]
                self._conclude(r, f"nothing heard of {_names(silent)} for {self.timeout:g} s")

        self.baton.at(due, check)


def _saved(m: SimulatedMember) -> dict[str, Any]:
    try:
        return m.saved()
    except Exception as error:
        raise RuntimeError(
            f"replica {m.rank} (life {m.life}) could not be saved for a peer: "
            f"{type(error).__name__}: {error}"
        ) from error


def _mean(parts: list[Tensor], like: Tensor) -> Tensor:
    """Summed in the order of ranks, half types in float32: bitwise equal for all replicas."""
    if not parts:
        return torch.zeros_like(like)
    total = parts[0].float() if like.dtype.itemsize < 4 else parts[0]
    for part in parts[1:]:
        total = total + part
    return (total / len(parts)).to(like.dtype)


def _names(members: Iterable[SimulatedMember]) -> str:
    return ", ".join([str(m.rank) for m in members])
