"""Coordinators without peers: one that trains alone, and one that follows a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from functional_optim.core.calls import check_flags
from functional_optim.replicas.coordinator import Coordinator, Decision, Reduction, Wait


class Local(Coordinator):
    """A group of one: every step is committed unless an error is reported.

    Args:
        max_retries: see `Coordinator`.

    Example::

        >>> import functional_optim as fo
        >>> group = fo.replicas.Local()
        >>> group.start()
        >>> group.decide()
        Decision(committed=True, healed=False, step=1, participants=1, reason='')
    """

    def __init__(self, *, max_retries: int | None = None) -> None:
        super().__init__(max_retries=max_retries)

    def allreduce(self, values: Any) -> Reduction:
        """The mean over one replica: the values themselves."""
        self._check_open("allreduce()")
        return Reduction(lambda: values)

    def _start(self) -> None:
        pass

    def _decide(self) -> Decision:
        reason = self._refusal()
        return Decision(not reason, False, self.step + (not reason), 1, reason)


class Scripted(Coordinator):
    """A group with predefined decisions, for tests.

    Args:
        script: for each step True (commit), False (refuse), or a whole `Decision`. If a `Decision`
            has `healed`, this replica is healed with the result of `peer`.
        peer: returns the saved state of a healthy replica, e.g. the method `saved` of its
            coordinator.
        heals_at_start: heal in `start`, as torchft with `use_async_quorum=False`; by default in
            `decide`, as with an asynchronous quorum.
        max_retries: as for `Coordinator`.

    Raises:
        RuntimeError: from `start`, at the end of the script.
        ValueError: for a healed step without a peer.

    Example::

        >>> import functional_optim as fo
        >>> group = fo.replicas.Scripted([True, False])
        >>> for _ in range(2):
        ...     group.start()
        ...     print(group.decide().committed)
        True
        False
    """

    def __init__(
        self,
        script: Iterable[bool | Decision],
        peer: Callable[[], dict[str, Any]] | None = None,
        *,
        heals_at_start: bool = False,
        max_retries: int | None = None,
    ) -> None:
        super().__init__(max_retries=max_retries)
        check_flags({"heals_at_start": "bool"}, {"heals_at_start": heals_at_start})
        self.script = list(script)
        self.peer = peer
        self.heals_at_start = heals_at_start or peer is None
        self.next = 0
        if peer is None and any(isinstance(x, Decision) and x.healed for x in self.script):
            raise ValueError("a scripted step heals, but there is no peer to heal from; pass peer.")

    def _start(self) -> None:
        if self.next == len(self.script):
            raise RuntimeError(f"the script is over: it has {len(self.script)} steps.")
        if self.heals_at_start:
            self._heal_if_written()

    def _mean(self, vector: Tensor) -> Wait:
        return lambda: vector

    def _decide(self) -> Decision:
        if not self.heals_at_start:
            self._heal_if_written()
        written = self.script[self.next]
        self.next += 1
        if isinstance(written, Decision):
            return written
        reason = self._refusal() or ("" if written else "the script says so")
        return Decision(not reason, False, self.step + (not reason), 1, reason)

    def _heal_if_written(self) -> None:
        written = self.script[self.next]
        if isinstance(written, Decision) and written.healed and self.peer is not None:
            self.heal(self.peer())
