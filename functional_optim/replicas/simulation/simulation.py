"""A group of replicas in one process, with faults: ordinary blocking code on virtual time."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple

from functional_optim.core.calls import check_choice, check_flags
from functional_optim.replicas.coordinator import Decision
from functional_optim.replicas.simulation.connection import Simulated
from functional_optim.replicas.simulation.faults import (
    CutOff,
    Delay,
    Fault,
    Kill,
    Point,
    check_faults,
)
from functional_optim.replicas.simulation.group_server import Commit, Event, Group, SimulatedMember
from functional_optim.replicas.simulation.scheduler import Baton

RULES = ("min_replicas", "heals_at_start", "init_sync", "timeout", "join_timeout", "latency")
"""The settings of a simulation that its group service needs."""


class SimulationResult(NamedTuple):
    """The result of a simulation.

    returned: by rank, the return value of the worker in its last life; without dead replicas.
    log: all events, in the order of virtual time.
    commits: the committed steps, in order.
    lost: the events of committed steps whose last holder was killed; empty if none is lost.
    time: of the end, in virtual seconds.

    Example::

        >>> import functional_optim as fo
        >>> def worker(group):
        ...     group.start()
        ...     group.decide()
        >>> dies = fo.replicas.Kill(rank=1)
        >>> for event in fo.replicas.Simulation(replicas=2, faults=[dies]).run(worker).log:
        ...     print(event)
        0.0000 s, replica 0: began
        0.0000 s, replica 1: began
        0.0000 s, replica 1: killed before start
        0.0260 s, replica 0: started step 1
        0.0352 s, the group: committed step 1 of replicas 0
        0.0428 s, replica 0: decided: committed
        0.0428 s, replica 0: finished
    """

    returned: dict[int, Any]
    log: list[Event]
    commits: list[Commit]
    lost: list[Event]
    time: float

    def decisions(self, rank: int, life: int | None = None) -> list[Decision]:
        """The decisions that a replica received, in one of its lives or in all.

        Example::

            >>> import functional_optim as fo
            >>> def worker(group):
            ...     group.start()
            ...     group.report_error(ValueError("no data"))
            ...     group.decide()
            >>> result = fo.replicas.Simulation(replicas=1).run(worker)
            >>> [decision.reason for decision in result.decisions(rank=0)]
            ['replica 0: ValueError: no data']
        """
        return [
            event.decision
            for event in self.log
            if event.rank == rank and life in (None, event.life) and event.what == "decided"
            if event.decision is not None
        ]


@dataclass(eq=False, repr=False)
class Simulation:
    """Replicas that train together in one process, with faults.

    A worker is ordinary blocking code. Each replica runs it in a separate thread, but only one
    thread runs at a time, and another gets its turn only inside a call of a coordinator. Time is
    virtual. The seed and the faults determine the run, bitwise. Averages are computed, and are
    bitwise equal for all participants.

    **The group.** A quorum forms when all living replicas have asked to start, or `join_timeout`
    after the first. It continues from the last committed step: a replica that is behind is healed
    with the saved state of one that has this step; if none of these can be reached, the others
    wait. Before the first commit, all are made equal to the lowest rank. A reduction fails, and the
    step is refused, if a member dies or sends no message for `timeout`. A replica whose worker has
    returned remains as a peer to heal from until all workers have returned, like a process that
    serves its last checkpoint (passed to `Replica.finish`).

    **The vote is all or nothing.** A step is committed if every member of the quorum has voted for
    it, and refused for all of them otherwise. A replica that is cut off while the vote is counted
    waits until it is back, and then receives the outcome. torchft votes in each replica group
    separately: if one group misses the answer, it may refuse a step that the others have committed,
    and is healed afterwards; and a quorum continues from the highest step in it, regardless of what
    disconnected replicas have committed. Here no committed step is lost, so that tests can assert
    this, unless all replicas that have it die; `SimulationResult.lost` lists such steps.

    Args:
        replicas: their number, ≥ 1.
        seed: of the latencies of messages.
        faults: `Kill`, `Delay`, `CutOff` and `Slow`, or `random_faults(seed)`. Each occurs once.
        min_replicas: the number of replicas that a quorum needs, including finished ones.
        heals_at_start: deliver a peer's state in `start`, as torchft with `use_async_quorum=False`:
            a healed replica participates. By default in `decide`: a healed replica is not part of
            the mean. After `start`, a worker has to check whether it was healed to the end of
            training.
        init_sync: make all replicas equal before the first commit. Default: True, as torchft.
        timeout: seconds without a message until an open step is refused.
        join_timeout: seconds that a quorum waits for the others.
        latency: mean seconds of a message; each takes a random factor of 0.5 to 1.5 of it.
        limit: virtual seconds after which the run is aborted.
        errors: "raise" ends the run with an exception of a worker; "crash" treats it as the death
            of its replica. max_retries, bucket_bytes: see `Coordinator`.

    Raises:
        ValueError: for hyperparameters out of range; for a fault of an unknown replica or point.
        TypeError: for other objects as faults.

    Example::

        >>> import torch, functional_optim as fo
        >>> def worker(coordinator):
        ...     replica = fo.replicas.Replica(coordinator, fo.sgd(0.5))
        ...     now = replica.init(torch.tensor([8.0 + coordinator.rank]))
        ...     while coordinator.step < 3:
        ...         now = replica.start(now)
        ...         now, decision = replica.step(now.params, now)
        ...     return now.params
        >>> dies = fo.replicas.Kill(rank=1, step=1, point="in allreduce", restart=0.5)
        >>> result = fo.replicas.Simulation(replicas=2, faults=[dies]).run(worker)
        >>> result.returned
        {0: tensor([1.]), 1: tensor([1.])}
        >>> [commit.participants for commit in result.commits]
        [(0,), (0,), (0,)]
        >>> [decision.reason for decision in result.decisions(rank=0)]
        ['', 'replica 1 died', '', '']
    """

    replicas: int = 3
    _: KW_ONLY
    seed: int = 0
    faults: Iterable[Fault] = ()
    min_replicas: int = 1
    heals_at_start: bool = False
    init_sync: bool = True
    timeout: float = 1.0
    join_timeout: float = 0.1
    latency: float = 0.01
    limit: float = 1e6
    errors: Literal["raise", "crash"] = "raise"
    max_retries: int | None = None
    bucket_bytes: int = 25 * 2**20

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.replicas:
            raise ValueError(
                f"a quorum of min_replicas={self.min_replicas} cannot form out of {self.replicas} "
                "replicas; 1 ≤ min_replicas ≤ replicas."
            )
        for name in ("timeout", "join_timeout", "latency"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 s, but is {getattr(self, name)}.")
        check_choice("Simulation", ("raise", "crash"), errors=self.errors)
        check_flags(Simulation.__annotations__, vars(self))
        self.faults = list(self.faults)
        check_faults(self.faults, self.replicas)

    def run(self, worker: Callable[[Simulated], Any]) -> SimulationResult:
        """Run a worker for each replica, to its end or its death.

        Args:
            worker: takes its replica's coordinator. Called again for every life.

        Raises:
            RuntimeError: if a worker has raised, with its rank; for a deadlock, with what each
                replica waits for.
            TimeoutError: at the limit of virtual time.
        """
        return _Run(self, worker).result()


class _Run:
    """One run of a simulation."""

    def __init__(self, plan: Simulation, worker: Callable[[Simulated], Any]) -> None:
        self.plan = plan
        self.worker = worker
        self.pending = list(plan.faults)
        self.returned: dict[int, Any] = {}
        self.baton = Baton(plan.limit)
        rules = {name: getattr(plan, name) for name in RULES}
        rng = random.Random(operator.index(plan.seed))
        self.group = Group(self.baton, rng, self.strike, **rules)

    def result(self) -> SimulationResult:
        for rank in range(self.plan.replicas):
            self.begin(rank, 0, 0.0)
        self.baton.run()
        group = self.group
        returned = {rank: self.returned[rank] for rank in sorted(self.returned)}
        return SimulationResult(returned, group.log, group.commits, group.lost, self.baton.now)

    def begin(self, rank: int, life: int, time: float) -> None:
        """Start a life of a replica at that time."""
        plan, group = self.plan, self.group
        options = {"max_retries": plan.max_retries, "bucket_bytes": plan.bucket_bytes}
        coordinator = Simulated(group, self.baton, rank, life, **options)
        me = coordinator._me

        def live() -> None:
            group.members[rank] = me
            group.note(me, "restarted" if life else "began")
            try:
                value = self.worker(coordinator)
            except Exception as error:
                if not me.alive or self.baton.over:
                    return
                if self.plan.errors == "raise":
                    raise RuntimeError(
                        f"the worker of replica {rank} (life {life}) failed at "
                        f"{self.baton.now:.4g} s: {type(error).__name__}: {error}"
                    ) from error
                group.note(me, f"crashed: {type(error).__name__}: {error}")
                group.died(me)
                return
            if me.alive and not self.baton.over:
                self.returned[rank] = value
                group.note(me, "finished")
                coordinator.close()

        me.task = self.baton.spawn(f"replica {rank} (life {life})", live, time)

    def strike(self, m: SimulatedMember, point: Point) -> None:
        """Apply the faults that are due at the point of a replica."""
        now = self.baton.now
        for fault in [f for f in self.pending if (f.rank, f.point) == (m.rank, point)]:
            if not m.alive or m.step < fault.step:
                continue
            self.pending.remove(fault)
            if isinstance(fault, Kill):
                self.kill(m, fault)
            elif isinstance(fault, Delay):
                self.group.note(m, f"delayed {point} by {fault.seconds:g} s")
                m.late += fault.seconds
            elif isinstance(fault, CutOff):
                self.group.note(m, f"cut off {point} for {fault.seconds:g} s")
                m.cut_until = max(m.cut_until, now + fault.seconds)
                self.baton.at(m.cut_until, self.group.form)
            else:
                self.group.note(m, f"slow {point} for {fault.seconds:g} s")
                m.slow_until, m.each = now + fault.seconds, fault.each

    def kill(self, m: SimulatedMember, fault: Kill) -> None:
        group = self.group
        if fault.unless_last and group.step and group.holders() == [m]:
            group.note(m, f"spared {fault.point}: nobody else has step {group.step}")
            return
        group.note(m, f"killed {fault.point}")
        m.task.doomed = True
        self.baton.at(self.baton.now, lambda: m.task)
        if fault.restart is not None:
            self.begin(m.rank, m.life + 1, self.baton.now + fault.restart)
        group.died(m)
