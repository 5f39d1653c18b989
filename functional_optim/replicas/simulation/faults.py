"""Faults of a `Simulation` as values, which can be printed and replayed."""

from __future__ import annotations

import operator
import random
from typing import Literal, NamedTuple, TypeAlias, get_args

Point: TypeAlias = Literal[
    "before start",
    "in start",
    "after start",
    "in allreduce",
    "after allreduce",
    "in decide",
    "after decide",
]
"""When a fault occurs. "in": the group has received the call (e.g. the vote), and the replica waits
for the answer. "after": the call is about to return."""

POINTS: tuple[Point, ...] = get_args(Point)


class Kill(NamedTuple):
    """A replica is killed, and may restart without its state.

    rank: of the replica.
    step: the fault occurs once the replica has committed this many steps. It occurs once.
    point: where in that step.
    restart: seconds after which its worker restarts from scratch; None: never.
    unless_last: do not kill the only replica with the last committed step, which would be lost.

    Example::

        >>> import functional_optim as fo
        >>> fo.replicas.Kill(rank=0, step=2, point="in decide", restart=1.5)
        Kill(rank=0, step=2, point='in decide', restart=1.5, unless_last=False)
    """

    rank: int
    step: int = 0
    point: Point = "before start"
    restart: float | None = None
    unless_last: bool = False


class Delay(NamedTuple):
    """One call of a replica takes longer. `rank`, `step` and `point` as for `Kill`.

    seconds: the delay. Beyond the group's timeout, the step is refused.

    Example::

        >>> import functional_optim as fo
        >>> fo.replicas.Delay(rank=0, step=2, point="after start", seconds=0.5)
        Delay(rank=0, step=2, point='after start', seconds=0.5)
    """

    rank: int
    step: int = 0
    point: Point = "before start"
    seconds: float = 0.5


class CutOff(NamedTuple):
    """A partition of the network: a replica is disconnected for some time.

    Messages from and to it arrive when it is connected again. `rank`, `step` and `point` as for
    `Kill`.

    seconds: the duration.

    Example::

        >>> import functional_optim as fo
        >>> fo.replicas.CutOff(rank=0, step=2, point="in allreduce", seconds=3.0)
        CutOff(rank=0, step=2, point='in allreduce', seconds=3.0)
    """

    rank: int
    step: int = 0
    point: Point = "before start"
    seconds: float = 3.0


class Slow(NamedTuple):
    """All calls of a replica take longer for some time. `rank`, `step` and `point` as for `Kill`.

    seconds: the duration.
    each: the delay of every message to and from it.

    Example::

        >>> import functional_optim as fo
        >>> fo.replicas.Slow(rank=0, step=2, point="before start", seconds=3.0, each=0.2)
        Slow(rank=0, step=2, point='before start', seconds=3.0, each=0.2)
    """

    rank: int
    step: int = 0
    point: Point = "before start"
    seconds: float = 3.0
    each: float = 0.1


Fault: TypeAlias = Kill | Delay | CutOff | Slow


def check_faults(faults: list[Fault], replicas: int) -> None:
    """Raise an error for an invalid fault of that many replicas."""
    for fault in faults:
        if not isinstance(fault, Fault):
            raise TypeError(
                f"a fault is a Kill, Delay, CutOff or Slow, but got a {type(fault).__name__}."
            )
        if not 0 <= fault.rank < replicas:
            raise ValueError(f"{fault} strikes no replica: there are ranks 0 to {replicas - 1}.")
        if fault.point not in POINTS:
            raise ValueError(f"{fault} strikes nowhere: a point is one of {', '.join(POINTS)}.")
        durations = {"restart", "seconds", "each"} & set(fault._fields)
        for name in sorted(durations):
            if (getattr(fault, name) or 0) < 0:
                raise ValueError(f"{fault} goes back in time: {name} must be 0 or more.")


def random_faults(
    seed: int,
    replicas: int = 3,
    until: int = 8,
    *,
    most: int = 4,
    longest: float = 5.0,
    restarts: float = 0.75,
    keep_history: bool = True,
) -> list[Fault]:
    """A schedule of faults; the same for the same arguments.

    Args:
        seed: of the random numbers.
        replicas: their number.
        until: faults occur while fewer steps than this are committed.
        most: the largest number of faults; the number is uniform from 0 to this.
        longest: seconds. Durations are log-uniform from a thousandth of it to it, so that some are
            within a group's timeouts and some are beyond.
        restarts: the probability that a killed replica restarts.
        keep_history: never kill the only replica with the last committed step.

    Example::

        >>> import functional_optim as fo
        >>> for fault in fo.replicas.random_faults(seed=5, replicas=2, until=4, most=2):
        ...     print(fault)
        Delay(rank=1, step=0, point='after decide', seconds=0.2005)
        Kill(rank=0, step=1, point='before start', restart=0.0124, unless_last=True)
    """
    rng = random.Random(operator.index(seed))

    def seconds() -> float:
        return round(longest * 1000 ** -rng.random(), 4)

    faults: list[Fault] = []
    for _ in range(rng.randint(0, most)):
        kind = rng.choice((Kill, Kill, Delay, CutOff, Slow))
        where = rng.randrange(replicas), rng.randrange(until), rng.choice(POINTS)
        if kind is Kill:
            restart = seconds() if rng.random() < restarts else None
            faults.append(Kill(*where, restart, keep_history))
        elif kind is Slow:
            faults.append(Slow(*where, seconds(), seconds()))
        else:
            faults.append(kind(*where, seconds()))
    return faults
