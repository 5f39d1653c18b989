"""The protocol between a replica and its group; bucketed reductions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.core import sharding

Wait = Callable[[], Tensor]
"""Waits for a reduction, and returns its result."""


class Reduction:
    """An asynchronous reduction. `wait()` returns the averaged tree.

    Example::

        >>> import torch, functional_optim as fo
        >>> group = fo.replicas.Local()
        >>> group.start()
        >>> last = group.allreduce({"last.weight": torch.ones(2)})  # on its way meanwhile
        >>> first = group.allreduce({"first.weight": torch.zeros(2)})
        >>> {**first.wait(), **last.wait()}
        {'first.weight': tensor([0., 0.]), 'last.weight': tensor([1., 1.])}
    """

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish = finish

    def wait(self) -> Any:
        """The mean over the participants, a tree of new tensors like the input.

        Waiting twice returns the same tree.
        """
        made = self._finish()
        self._finish = lambda: made
        return made


def reduce_in_buckets(values: Any, mean: Callable[[Tensor], Wait], bucket_bytes: int) -> Reduction:
    """Average a tree: one call of `mean` for every vector of at most bucket_bytes.

    Tensors of one dtype and device are concatenated and cut into vectors; one tensor may span
    several. So each element is reduced exactly once, for tensors of any size.

    Args:
        values: pytree of floating-point or complex tensors (of a DTensor, this process's part).
        mean: starts the average of a vector over the participants; it may write into it.
        bucket_bytes: ≥ 1; a vector has at least one element.

    Raises:
        TypeError: for a leaf that is not a dense floating-point or complex tensor.
    """
    leaves = tree.leaves(values)
    for path, x in tree.items(values):
        if not (isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())):
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                f"allreduce averages floating-point and complex tensors, but {path!r} is a {kind}; "
                "leave it out of the tree."
            )
        if x.layout is not torch.strided:
            raise TypeError(
                f"allreduce averages dense tensors, but {path!r} is sparse; make it dense."
            )
    plain = [_local(x) for x in leaves]
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, x in enumerate(plain):
        kinds.setdefault((x.dtype, x.device), []).append(i)
    waiting: list[tuple[list[int], Tensor, list[Wait]]] = []
    for (dtype, _), places in kinds.items():
        joined = torch.cat([plain[i].reshape(-1) for i in places])
        pieces = joined.split(max(1, bucket_bytes // dtype.itemsize)) if joined.numel() else ()
        waiting.append((places, joined, [mean(piece) for piece in pieces]))

    def finish() -> Any:
        made = list(leaves)
        for places, joined, waits in waiting:
            whole = torch.cat([wait() for wait in waits]) if waits else joined
            parts = whole.split([plain[i].numel() for i in places])
            for i, part in zip(places, parts, strict=True):
                made[i] = _like(part.view(plain[i].shape), leaves[i])
        return tree.with_leaves(values, made)

    return Reduction(finish)


def _local(x: Tensor) -> Tensor:
    """The local shard of a tensor, as real numbers."""
    x = sharding.part(x.detach())
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _like(values: Tensor, leaf: Tensor) -> Tensor:
    """The average, in the form of the input tensor."""
    like = sharding.part(leaf)
    if like.is_complex():  # copied, as real neighbours may have put it at an odd place
        values = torch.view_as_complex(values.clone())
    if values.stride() != like.stride():
        values = torch.empty_like(like).copy_(values)
    return sharding.from_part(values, leaf) if sharding.is_sharded(leaf) else values


Load = Callable[[Any], None]
Save = Callable[[], Any]


class Decision(NamedTuple):
    """A group's decision on a step.

    committed: whether to take the step.
    healed: whether this replica's state was replaced by a peer's since the step began.
    step: number of committed steps, including this one.
    participants: number of replicas that contributed; a replica that is healing does not.
    reason: why the step was refused; "" if it was committed.

    Example::

        >>> import torch, functional_optim as fo
        >>> replica = fo.replicas.Replica(
        ...     fo.replicas.Scripted([True]), fo.sgd(0.5), nonfinite="refuse"
        ... )
        >>> now = replica.start(replica.init({"w": torch.ones(1)}))
        >>> now, decision = replica.step({"w": torch.tensor([torch.inf])}, now)
        >>> decision.committed, now.params
        (False, {'w': tensor([1.])})
    """

    committed: bool
    healed: bool
    step: int
    participants: int
    reason: str = ""


class Coordinator:
    """A replica's connection to its group: the base class of all implementations.

    A step is `start()`, any number of `allreduce(tree)`, then `decide()`. The vote precedes the
    update: if a peer's state arrives with it, an update computed earlier would belong to the
    replaced state.

    ::

        coordinator.register("weights", load, save)     # once: the state for peers
        coordinator.start()
        mean = coordinator.allreduce(grads).wait()
        decision = coordinator.decide()                 # may call load
        if decision.committed: ...                      # update the current state

    `Replica` (for pure transformations) and `adapters.FaultTolerantOptimizer` implement this loop.

    Args:
        bucket_bytes: size of the vectors that tensors are joined to for a reduction, ≥ 1. Default:
            25 MiB, as in torch's DistributedDataParallel.
        max_retries: number of consecutive refused steps that are accepted; the next one raises.
            None: unlimited.

    An implementation overrides `_start`, `_mean`, `_decide` and, if needed, `_take_back` and
    `_close`.

    Example::

        >>> import torch, functional_optim as fo
        >>> weights = {"w": torch.ones(2)}
        >>> def load(saved):
        ...     weights["w"].copy_(saved["w"])
        >>> with fo.replicas.Local() as group:
        ...     group.register("weights", load, lambda: weights)
        ...     for gradient in (0.5, torch.nan):
        ...         group.start()
        ...         mean = group.allreduce(torch.full((2,), gradient)).wait()
        ...         if not mean.isfinite().all():
        ...             group.report_error(ValueError("the gradient is not finite"))
        ...         decision = group.decide()
        ...         if decision.committed:
        ...             weights["w"] -= mean
        >>> weights["w"], group.step, decision.reason
        (tensor([0.5000, 0.5000]), 1, 'ValueError: the gradient is not finite')
    """

    heals_at_start = True
    """Whether a peer's state arrives in `start`, before this replica contributes."""

    def __init__(self, *, bucket_bytes: int = 25 * 2**20, max_retries: int | None = None) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be 1 or more, but is {bucket_bytes}.")
        if max_retries is not None and max_retries < 0:
            raise ValueError(f"max_retries must be None, or 0 or more, but is {max_retries}.")
        self.bucket_bytes = bucket_bytes
        self.max_retries = max_retries
        self.step = 0
        """Number of committed steps."""
        self.decision: Decision | None = None
        """The last decision."""
        self.error: BaseException | None = None
        """The error reported for the open step."""
        self._loads: dict[str, tuple[Load, Save]] = {}
        self._open = False
        self._closed = False
        self._healed = False
        self._must_heal = False
        self._refused = 0

    def register(self, key: str, load: Load, save: Save) -> None:
        """Register functions that save a part of this replica for a peer, and load a peer's.

        Args:
            key: its name, the same on all replicas.
            load: called with the result of `save` on a peer. Called from `start` or `decide`.
            save: returns a pytree of tensors and other picklable values. It may be called from
                another thread while a step is open, and its tensors are copied.

        Raises:
            ValueError: for a key that is already registered.
        """
        if key in self._loads:
            raise ValueError(
                f"{key!r} is registered with this coordinator already; give each part a key of "
                "its own."
            )
        self._loads[key] = (load, save)

    def saved(self) -> dict[str, Any]:
        """A copy of all registered parts, for a peer to heal."""
        return {key: self.copied(save) for key, (_, save) in self._loads.items()}

    @staticmethod
    def copied(save: Save) -> Any:
        """A copy of the result of a `save`."""

        def one(x: Any) -> Any:
            return x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x)

        return tree.map(one, save())

    def heal(self, saved: dict[str, Any]) -> None:
        """Replace all registered parts by those that a peer has saved.

        Raises:
            ValueError: if the two replicas have not registered the same keys. Nothing is loaded.
        """
        if saved.keys() != self._loads.keys():
            raise ValueError(
                f"a peer has saved {sorted(saved)}, but this replica has registered "
                f"{sorted(self._loads)}; register the same keys everywhere."
            )
        self._must_heal = True
        for key, (load, _) in self._loads.items():
            load(saved[key])
        self._healed = True
        self._must_heal = False

    def start(self) -> None:
        """Begin a step and form the quorum. If this heals immediately, parts are loaded here.

        Raises:
            RuntimeError: if a step is open, or the coordinator is closed.
        """
        self._check_usable()
        if self._open:
            raise RuntimeError(
                "a step is open already; call decide() before the next start() (an optimizer "
                "does so in step())."
            )
        self.error = None
        self._healed = False
        self._start()
        self._open = True

    def allreduce(self, values: Any) -> Reduction:
        """Begin to average a tree of tensors over the participants.

        Args:
            values: pytree of floating-point or complex tensors, the same shapes on all replicas.

        Returns:
            The reduction; `.wait()` returns the mean, as new tensors. Values of a replica that is
            healing are ignored. If an error was or is reported, the result is undefined, and the
            step will be refused.

        Raises:
            RuntimeError: if no step is open.
            TypeError: for other leaves.
        """
        self._check_open("allreduce()")
        return reduce_in_buckets(values, self._mean, self.bucket_bytes)

    def report_error(self, error: BaseException) -> None:
        """Report an error of this replica in this step.

        An open step will be refused. After the commit, the report means that this replica could not
        take the step: the step is taken back, and a peer must heal this replica before it
        participates in another.

        Raises:
            RuntimeError: if no step is open and none was committed.
        """
        if self._open:
            self.error = self.error or error
            self._report(error)
        elif self.decision is not None and self.decision.committed:
            self.decision = self.decision._replace(
                committed=False, step=self.step - 1, reason=in_words(error)
            )
            self.step -= 1
            self._must_heal = True
            self._take_back()
        else:
            raise RuntimeError(
                "there is no step to report an error of; call start() first."
            ) from error

    def decide(self) -> Decision:
        """Vote on the open step, and return the decision of the group. Healing ends here at the
        latest.

        Raises:
            RuntimeError: if no step is open; after more than max_retries refused ones in a row; if
                an update or a heal failed midway, and the next step is committed although no peer
                has healed this replica.
        """
        self._check_open("decide()")
        self._open = False
        decision = self._decide()._replace(healed=self._healed)
        self.step = decision.step
        self.decision = decision
        if self._must_heal and decision.committed:
            raise RuntimeError(
                "an update or a heal failed half-way on this replica, and no peer has healed it "
                "since; restart it from a checkpoint."
            )
        self._refused = 0 if decision.committed else self._refused + 1
        if self.max_retries is not None and self._refused > self.max_retries:
            raise RuntimeError(
                f"{self._refused} steps in a row were refused, more than max_retries="
                f"{self.max_retries}; the last one because: {decision.reason}."
            )
        return decision

    def close(self) -> None:
        """Leave the group. An open step is refused first. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        self._open = False
        self._close()

    @property
    def is_open(self) -> bool:
        """Whether a step is open."""
        return self._open

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("this coordinator is closed; make a new one.")

    def _check_open(self, what: str) -> None:
        self._check_usable()
        if not self._open:
            raise RuntimeError(
                f"{what} needs an open step; call start() first (an optimizer does so in "
                "zero_grad())."
            )

    def _refusal(self) -> str:
        """The reason of this replica's vote against the step; "" for a vote in favor."""
        return "" if self.error is None else in_words(self.error)

    def _start(self) -> None:
        raise NotImplementedError

    def _mean(self, vector: Tensor) -> Wait:
        raise NotImplementedError

    def _decide(self) -> Decision:
        raise NotImplementedError

    def _report(self, error: BaseException) -> None:
        """Called when an error of the open step is reported."""

    def _take_back(self) -> None:
        """Called when the last committed step is taken back."""

    def _close(self) -> None:
        """Leave the group."""


def in_words(error: BaseException) -> str:
    """The text of an error in a reason."""
    return f"{type(error).__name__}: {error}".removesuffix(".")
