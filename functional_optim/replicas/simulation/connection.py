"""The coordinator of a replica in a `Simulation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from functional_optim.replicas.coordinator import Coordinator, Decision, Wait
from functional_optim.replicas.simulation.faults import Point
from functional_optim.replicas.simulation.group_server import Group, SimulatedMember, SimulatedRound
from functional_optim.replicas.simulation.scheduler import Baton, Killed


class Simulated(Coordinator):
    """The argument of a worker of a `Simulation`: its replica's connection to the group.

    Attributes:
        rank: index of this replica, from 0.
        life: number of its restarts.

    Example::

        >>> import functional_optim as fo
        >>> def worker(group):
        ...     group.start()
        ...     return group.rank, group.restarted, group.decide().committed
        >>> fo.replicas.Simulation(replicas=2).run(worker).returned
        {0: (0, False, True), 1: (1, False, True)}
    """

    def __init__(self, group: Group, baton: Baton, rank: int, life: int, **options: Any) -> None:
        super().__init__(**options)
        self.rank = rank
        self.life = life
        self._group = group
        self._baton = baton
        self._me = SimulatedMember(rank, life)
        self._me.saved = self.saved
        self._round: SimulatedRound | None = None
        self._reductions = 0

    @property
    def restarted(self) -> bool:
        """Whether this replica was killed before."""
        return self.life > 0

    @property
    def time(self) -> float:
        """The virtual time, in seconds."""
        return self._baton.now

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass, e.g. the time of a gradient computation.

        Raises:
            ValueError: for a negative time.
        """
        if not seconds >= 0:
            raise ValueError(f"sleep(seconds) needs 0 s or more, but got {seconds}.")
        key = object()
        self._baton.at(self._baton.now + seconds, lambda: self._me.receive(key, None))
        self._receive(key, lambda: f"{seconds:g} s to pass")

    def _start(self) -> None:
        self._me.step = self.step
        self._pass("before start")
        key = object()
        self._group.send(self._me, lambda: self._group.join(self._me, key))
        r = self._round = self._receive(key, self._group.why_no_quorum)
        if r is None:
            raise RuntimeError(
                "no replica has a whole state to go on from: an update failed half-way on all of "
                "them; restart from a checkpoint."
            )
        self._reductions = 0
        self._group.note(self._me, f"started step {r.step + 1}")
        if self._group.heals_at_start:
            self._take(r)
        self._pass("after start")

    def _mean(self, vector: Tensor) -> Wait:
        r = self._in_round()
        k, self._reductions = self._reductions, self._reductions + 1
        if self.error is not None:
            return lambda: vector
        self._group.send(self._me, lambda: self._group.give(self._me, r, k, vector))

        def wait() -> Tensor:
            mean = self._receive((r, k), lambda: f"a reduction of step {r.step + 1}")
            if mean is None:
                self._fail(ConnectionError(r.reason))
            self._pass("after allreduce")
            return vector if mean is None else mean

        return wait

    def _report(self, error: BaseException) -> None:
        r, reason = self._in_round(), self._refusal()
        if not r.over:
            self._group.send(self._me, lambda: self._group.object(self._me, r, reason))

    def _decide(self) -> Decision:
        r = self._in_round()
        if not self._group.heals_at_start:
            self._take(r)
        reason = self._refusal()
        self._group.send(self._me, lambda: self._group.vote(self._me, r, reason))
        self._receive(r, lambda: f"the outcome of step {r.step + 1}")
        step = r.step + 1 if r.committed else self.step
        decision = Decision(r.committed, self._healed, step, len(r.participants), r.reason)
        self._group.note(self._me, "decided", decision)
        self._pass("after decide")
        return decision

    def _take_back(self) -> None:
        self._group.note(self._me, "took the step back", self.decision)
        self._group.take_back(self._me)

    def _close(self) -> None:
        self._group.leave(self._me)

    def _take(self, r: SimulatedRound) -> None:
        """Heal this replica, if it has to be in this round."""
        saved = r.saved.pop(self._me, None)
        if saved is None:
            return
        why = self._group.no_heal(self._me, r)
        if why:
            self._fail(ConnectionError(why))
            return
        self.heal(saved)
        self.step = self._me.held = r.step
        self._group.note(self._me, f"healed to step {r.step} by replica {r.source.rank}")

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error
        self._report(error)

    def _in_round(self) -> SimulatedRound:
        if self._round is None:
            raise RuntimeError("no step is open; call start() first.")
        return self._round

    def _receive(self, key: Any, what: Callable[[], str]) -> Any:
        me = self._me
        self._check_alive()
        if key not in me.inbox:
            me.awaits = key
            self._baton.wait(me.task, what)
            me.awaits = None
        return me.inbox.pop(key)

    def _pass(self, point: Point) -> None:
        self._check_alive()
        self._group.strike(self._me, point)
        self._check_alive()
        if self._me.late:
            late, self._me.late = self._me.late, 0.0
            self.sleep(late)

    def _check_alive(self) -> None:
        if self._baton.over or not self._me.alive:
            raise Killed
