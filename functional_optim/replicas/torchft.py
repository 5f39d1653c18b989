"""torchft's Manager as a coordinator. torchft itself is not imported here."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from functional_optim.replicas.buckets import Wait
from functional_optim.replicas.coordinator import Coordinator, Decision, Load, Save

_NAME = "_functional_optim_coordinator"


def as_coordinator(group: Any) -> Coordinator:
    """A coordinator as it is, and a torchft Manager as one: for one Manager always the same.

    Raises:
        TypeError: for anything else.
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

    Its world-size mode, its timeouts, its `max_retries` and its kind of quorum hold as they were
    set. With `use_async_quorum=False` a replica heals in `start`, otherwise in `decide`.

    Args:
        manager: a `torchft.Manager`. What is registered here is registered with it.
        quantize: send 8-bit numbers. Needs Triton.
        bucket_bytes: as for `Coordinator`.

    Raises:
        RuntimeError: if quantize is asked for where torchft would silently send full numbers.
        ValueError: if the Manager has a coordinator already.

    See https://meta-pytorch.org/torchft/ for the Manager. This was run with torchft-nightly
    2026.10.26.
    """

    def __init__(
        self, manager: Any, *, quantize: bool = False, bucket_bytes: int = 25 * 2**20
    ) -> None:
        super().__init__(bucket_bytes=bucket_bytes)
        home = sys.modules[type(manager).__module__]
        if quantize and not getattr(home, "IS_TRITON_AVAILABLE", False):
            raise RuntimeError(
                "torchft quantizes reductions with Triton only, which is not installed here, and "
                "would send full numbers without a word; install triton, or leave out "
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
            load(values)
            self._healed = True
            self._must_heal = False

        self.manager.register_state_dict_fn(key, loaded, lambda: self.copied(save))

    def _start(self) -> None:
        self.manager.start_quorum()

    def _mean(self, vector: Tensor) -> Wait:
        work = self.manager.allreduce(vector, should_quantize=self.quantize)

        def wait() -> Tensor:
            work.wait()
            return vector

        return wait

    def _report(self, error: BaseException) -> None:
        self.manager.report_error(error)

    def _decide(self) -> Decision:
        committed = self.manager.should_commit()
        errored = self.manager.errored()
        reason = ""
        if not committed:
            why = None if errored is None else getattr(errored, "original_exception", errored)
            reason = (
                "too few replicas take part, or another rank of this one is against it"
                if why is None
                else f"{type(why).__name__}: {why}"
            )
        step, participants = self.manager.current_step(), self.manager.num_participants()
        return Decision(committed, self._healed, step, participants, reason)

    def _take_back(self) -> None:
        known = self.manager.state_dict()
        batches = known["batches_committed"] - self.manager.num_participants()
        self.manager.load_state_dict(
            {**known, "step": known["step"] - 1, "batches_committed": batches}
        )

    def _close(self) -> None:
        self.manager.shutdown()
