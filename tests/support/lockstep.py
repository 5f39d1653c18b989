"""A group of replicas in threads that wait for one another, and the loop that they run.

Everything is added up in the order of the ranks, so that all get the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_optim.replicas import Coordinator, Decision

LIMIT = 60  # seconds in which everybody must come to a meeting


class Member(Coordinator):
    """One replica's connection. fresh: has it come without a state, and must it be healed?"""

    def __init__(self, group: Group, late: bool, bucket_bytes: int) -> None:
        super().__init__(bucket_bytes=bucket_bytes)
        self.group = group
        self.heals_at_start = not late
        self.fresh = False
        self.vectors: list[Tensor] = []

    def _start(self) -> None:
        self.vectors = []
        if self.heals_at_start:
            self.heal_if_fresh()

    def heal_if_fresh(self) -> None:
        self.group.meet()
        peer = next(m for m in self.group.members if not m.fresh)
        saved = peer.saved() if self.fresh else None
        self.group.meet()
        if saved is not None:
            self.heal(saved)
            self.step = peer.step
            self.fresh = False
        self.group.meet()

    def _mean(self, vector: Tensor) -> Callable[[], Tensor]:
        place = len(self.vectors)
        self.vectors.append(vector)

        def wait() -> Tensor:
            self.group.meet()
            given = [m.vectors[place] for m in self.group.members if not m.fresh]
            mean = sum(given[1:], given[0]) / len(given)
            self.group.meet()
            return mean

        return wait

    def _decide(self) -> Decision:
        self.group.meet()
        taking_part = sum(not m.fresh for m in self.group.members)
        bad = any(m.error is not None for m in self.group.members)
        self.group.meet()
        if not self.heals_at_start:
            self.heal_if_fresh()
        n = self.group.votes(self)
        taken = not bad and n not in self.group.refused
        step = self.step + taken
        return Decision(taken, False, step, taking_part, "" if taken else "refused")


class Group:
    """refused: which votes, counted from 0, are lost. late: do replicas heal in `decide`?"""

    def __init__(
        self, n: int, refused: Any = (), late: bool = False, bucket_bytes: int = 40
    ) -> None:
        self.barrier = threading.Barrier(n, timeout=LIMIT)
        self.members = [Member(self, late, bucket_bytes) for _ in range(n)]
        self.refused = set(refused)
        self.counts = dict.fromkeys(self.members, 0)

    def meet(self) -> None:
        self.barrier.wait()

    def votes(self, member: Member) -> int:
        """The number of its vote. All are in the same one."""
        self.counts[member] += 1
        return self.counts[member] - 1

    def run(self, work: Callable[[int, Member], Any]) -> list[Any]:
        """What `work(rank, member)` returns in a thread of each."""
        results: list[Any] = [None] * len(self.members)
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                torch.set_num_threads(1)
                results[rank] = work(rank, self.members[rank])
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(r,)) for r in range(len(self.members))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        if errors:
            raise errors[0]
        return results
