"""torchft's Manager as a coordinator. torchft itself is not imported here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from functional_optim.core.calls import check_flags
from functional_optim.replicas.coordinator import Coordinator, Decision, Load, Save, Wait, in_words

_NAME = "_functional_optim_coordinator"


def as_coordinator(group: Any) -> Coordinator:
    """Convert a torchft Manager to a coordinator, always the same for one Manager.

    A coordinator is returned unchanged.

    Raises:
        TypeError: for anything else.

    Example::

        >>> import functional_optim as fo
        >>> group = fo.replicas.as_coordinator(fo.replicas.Local())  # or a torchft.Manager
        >>> group.start()
        >>> group.decide().committed
        True
    """
    if isinstance(group, Coordinator):
        return group
    if not (hasattr(group, "start_quorum") and hasattr(group, "should_commit")):
        raise TypeError(
            f"a coordinator or a torchft Manager is needed, but got a {type(group).__name__}; pass "
            "e.g. fo.replicas.Local(), or torchft.Manager(...)."
        )
    return vars(group).get(_NAME) or TorchFT(group)


class TorchFT(Coordinator):
    """A torchft `Manager` as a coordinator.

    Its world-size mode, timeouts, `max_retries` and kind of quorum apply. With
    `use_async_quorum=False` a replica heals in `start`, otherwise in `decide`.

    Args:
        manager: a `torchft.Manager`. Registered parts are registered with it.
        quantize: send 8-bit numbers. Needs Triton.
        bucket_bytes: see `Coordinator`.

    Raises:
        RuntimeError: if torchft would ignore quantize silently. From `start`, `allreduce` or
            `decide`, if the Manager finds no quorum: the lighthouse is unavailable, or too few
            replicas joined. The step has then ended, and `start` tries again.
        ValueError: if the Manager has a coordinator already.

    See https://meta-pytorch.org/torchft/ for the Manager. Tested with torchft-nightly 2026.10.26.

    Example::

        >>> import torchft, functional_optim as fo  # doctest: +SKIP
        >>> manager = torchft.Manager(
        ...     pg=torchft.ProcessGroupGloo(),
        ...     load_state_dict=None,
        ...     state_dict=None,
        ...     min_replica_size=2,
        ... )  # doctest: +SKIP
        >>> group = fo.replicas.TorchFT(manager, quantize=True)  # doctest: +SKIP
        >>> replica = fo.replicas.Replica(group, fo.adamw(1e-3))  # doctest: +SKIP
    """

    def __init__(
        self, manager: Any, *, quantize: bool = False, bucket_bytes: int = 25 * 2**20
    ) -> None:
        super().__init__(bucket_bytes=bucket_bytes)
        check_flags({"quantize": "bool"}, {"quantize": quantize})
        home = sys.modules[type(manager).__module__]
        if quantize and not getattr(home, "IS_TRITON_AVAILABLE", False):
            raise RuntimeError(
                "torchft quantizes reductions with Triton only, which is not installed here, and "
                "would send full numbers silently; install triton, or leave out "
                "quantize=True."
            )
        if _NAME in vars(manager):
            raise ValueError(
                "this Manager has a coordinator already: everything that trains with a Manager "
                "shares one; use as_coordinator(manager)."
            )
        self.manager = manager
        self.quantize = quantize
        self.step = manager.current_step()
        self.heals_at_start = not getattr(manager, "_use_async_quorum", False)
        setattr(manager, _NAME, self)

    def register(self, key: str, load: Load, save: Save) -> None:
        """As every coordinator's, and with the Manager, under the same key."""
        super().register(key, load, save)

        def loaded(values: Any) -> None:
            self._must_heal = True
            load(values)
            self.step = self.manager.current_step()
            self._healed = True
            self._must_heal = False

        self.manager.register_state_dict_fn(key, loaded, lambda: self.copied(save))

    def _start(self) -> None:
        self.step = self.manager.current_step()  # a checkpoint may have been loaded in between
        failed = getattr(self.manager, "_quorum_future", None)
        if failed is not None and failed.done() and failed.exception() is not None:
            self.manager._quorum_future = None  # otherwise it would raise again
        with self._quorum():
            self.manager.start_quorum()

    @contextmanager
    def _quorum(self) -> Iterator[None]:
        """If torchft finds no quorum, raise an error and close the step, so that another can
        begin."""
        try:
            yield
        except Exception as error:
            failed = getattr(self.manager, "_quorum_future", None)
            if failed is None or not failed.done() or failed.exception() is not error:
                raise
            self._open = False
            raise RuntimeError(
                f"torchft has found no quorum ({type(error).__name__}: {error}); is the lighthouse "
                "there, and do enough replicas take steps? Manager(quorum_retries=…) and "
                "quorum_timeout say how long to try; start() begins another attempt."
            ) from error

    def _mean(self, vector: Tensor) -> Wait:
        with self._quorum():
            work = self.manager.allreduce(vector, should_quantize=self.quantize)

        def wait() -> Tensor:
            work.wait()
            return vector

        return wait

    def _report(self, error: BaseException) -> None:
        self.manager.report_error(error)

    def _decide(self) -> Decision:
        with self._quorum():
            committed = self.manager.should_commit()
        step, participants = self.manager.current_step(), self.manager.num_participants()
        reason = "" if committed else self._why(participants)
        return Decision(committed, self._healed, step, participants, reason)

    def _why(self, participants: int) -> str:
        errored = self.manager.errored()
        if errored is not None:
            return in_words(getattr(errored, "original_exception", errored))
        needed = getattr(self.manager, "_min_replica_size", 0)
        if participants < needed:
            return f"{participants} replicas take part, but min_replica_size={needed}"
        return "another rank of this replica is against it"

    def _take_back(self) -> None:
        known = self.manager.state_dict()
        batches = known["batches_committed"] - self.manager.num_participants()
        self.manager.load_state_dict(
            {**known, "step": known["step"] - 1, "batches_committed": batches}
        )

    def _close(self) -> None:
        self.manager.shutdown()
