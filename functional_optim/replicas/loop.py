"""A replica that trains a pure transformation in a group: vote first, then update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.combinators.local_steps import Synced, check_alone
from functional_optim.core import base
from functional_optim.core.calls import check_choice, check_flags
from functional_optim.engine.compile import compile
from functional_optim.engine.graph_step import first_places, written
from functional_optim.kernels.interrupts import held
from functional_optim.replicas.coordinator import Decision
from functional_optim.replicas.torchft import as_coordinator


class ReplicaState(NamedTuple):
    """The complete state of a replica: one tree, healed as a whole.

    params: the parameters.
    state: that of the transformation; it has the step counts, so schedules heal too.
    extra: everything else that training depends on, any pytree: a seed, a position in the data,
    batch-norm statistics.

    Example::

        >>> import torch, functional_optim as fo
        >>> replica = fo.replicas.Replica(fo.replicas.Local(), fo.sgd(0.5))
        >>> now = replica.init(torch.ones(1), extra={"batch": 0})
        >>> for _ in range(3):
        ...     now = replica.start(now)  # a peer's tree, with its place in the data, after a heal
        ...     now, decision = replica.step(now.params, now)
        ...     now = now._replace(extra={"batch": now.extra["batch"] + 1})
        >>> now.params, now.extra
        (tensor([0.1250]), {'batch': 3})
    """

    params: Any
    state: Any
    extra: Any = None


class Replica:
    """A replica in a group that trains together, in which any member may fail.

    ::

        replica = Replica(coordinator, tx)
        tree = replica.init(params, extra={"seed": 0})
        while tree.state.step < 1000:
            tree = replica.start(tree)
            grads = torch.func.grad(loss)(tree.params, batch)
            tree, decision = replica.step(grads, tree)

    Gradients are averaged over the participants; then the group votes; then, if the step is
    committed, the update is computed from the state after the vote, which may be a healed one. An
    update computed before the vote could belong to a state that the vote replaces. A refused step
    returns the state unchanged, bitwise.

    Args:
        coordinator: a `Coordinator`, or a torchft Manager.
        tx: a transformation; or `local_sgd(…)` or `diloco(…)`, which average less often.
        nonfinite: "commit" takes steps with infinite or NaN gradients like others (tx may have a
            gate such as `apply_if_finite`); "refuse" votes against them, which reads one flag from
            the device per step. With `local_sgd` and `diloco` it checks the averaged values.
        compile: update in place with compiled kernels, as `fo.compile(tx)`. It then returns the
            trees that were passed.
        key: the key of the tree in the coordinator. Two `Replica` objects of one coordinator need
            two keys.

    Raises:
        TypeError: if coordinator or tx has another type.
        ValueError: for an unknown `nonfinite`; for a `local_sgd` or `diloco` inside another
            transformation, or one that this group cannot heal in time.

    Example::

        >>> import torch, functional_optim as fo
        >>> replica = fo.replicas.Replica(fo.replicas.Scripted([True, False]), fo.sgd(0.5))
        >>> now = replica.init(torch.ones(1))
        >>> for _ in range(2):
        ...     now = replica.start(now)
        ...     now, decision = replica.step(torch.ones(1), now)
        ...     print(now.params, decision.committed)
        tensor([0.5000]) True
        tensor([0.5000]) False
    """

    def __init__(
        self,
        coordinator: Any,
        tx: base.GradientTransformation,
        *,
        nonfinite: Literal["commit", "refuse"] = "commit",
        compile: bool = False,
        key: str = "replica",
    ) -> None:
        if not isinstance(tx, Synced):
            check_alone("Replica", tx, "Replica(coordinator, adam())")
        check_choice("Replica", ("commit", "refuse"), nonfinite=nonfinite)
        check_flags({"compile": "bool"}, {"compile": compile})
        self.coordinator = as_coordinator(coordinator)
        if isinstance(tx, Synced) and tx.heals_first and not self.coordinator.heals_at_start:
            raise ValueError(
                "diloco with several fragments or a delay needs a group that heals a replica "
                "before it offers anything, in start(), but this one may heal in decide(); make "
                "the torchft Manager with use_async_quorum=False."
            )
        self.tx = tx
        self.nonfinite = nonfinite
        self._extra = tx.extra
        self._in_place = compile
        self._apply = _stepper(tx, compile)
        self._tree: ReplicaState | None = None
        self._came = False
        """Whether a peer's tree has arrived that was not returned yet."""
        self._begun = False
        self._pending: Any = None
        self.coordinator.register(key, self._load, lambda: self._tree)

    def init(self, params: Any, extra: Any = None) -> ReplicaState:
        """The initial tree. Replicas may start from different ones."""
        with torch.no_grad():
            self._tree = ReplicaState(params, self.tx.init(params), extra)
        return self._tree

    def start(self, now: ReplicaState) -> ReplicaState:
        """Begin a step. Returns the tree to compute gradients from: a peer's, if one has arrived.

        Raises:
            RuntimeError: if a step is open. To abandon it, e.g. if its batch could not be read,
                call `coordinator.report_error(error)` and `coordinator.decide()`.
        """
        self._give(now)
        if not isinstance(self.tx, Synced):
            self.coordinator.start()
        self._begun = True
        return self._now()

    def step(
        self, grads: Any, now: ReplicaState, **extra: Any
    ) -> tuple[ReplicaState, Decision | None]:
        """Average the gradients, vote, and then update.

        Args:
            grads: this replica's gradients, like the parameters. None, for a parameter without one,
                must be in the same places on all replicas.
            now: the tree that `start` returned.
            extra: extra arguments of tx's update: numbers and tensors, averaged like the gradients.

        Returns:
            The tree after the step, and the decision of the group; None for a local step of
            `local_sgd` or `diloco`.

        Raises:
            RuntimeError: without a `start`; and see `Coordinator.decide`. If the update raises, its
                step is taken back, and a peer has to heal this replica.
            ValueError, TypeError: for gradients that do not match the parameters, and for an
                unknown extra argument of tx. The step is then still open.
        """
        if not self._begun:
            raise RuntimeError("call tree = replica.start(tree) before replica.step(grads, tree).")
        base.check_grads(now.params, grads)  # an error of the program costs no step
        base.check_extra(extra, self._extra)
        if isinstance(self.tx, Synced):
            return self._local_step(self.tx, grads, now, extra)
        group = self.coordinator
        like = base.default_device(tree.leaves(grads))
        mean, means = group.allreduce((grads, _as_tensors(extra, like))).wait()
        self._check_finite(mean)
        self._give(now)
        decision = group.decide()
        now, self._begun = self._now(), False
        if not decision.committed:
            return now, decision
        return self._replaced(decision, self._updated, mean, now, means), decision

    def finish(self, now: ReplicaState) -> None:
        """Leave the group at the end of training. An open step is refused.

        Args:
            now: the last tree. In a `Simulation`, peers that are behind are still healed with it,
                including its `extra`, which may be newer than the result of `step`.
        """
        self._give(now)
        self.coordinator.close()

    def _local_step(
        self, tx: Synced, grads: Any, now: ReplicaState, extra: dict[str, Any]
    ) -> tuple[ReplicaState, Decision | None]:
        """A local step, and a part of a synchronization if it is due."""
        group = self.coordinator
        self._begun = False
        self._give(now)
        self._tree = now = self._updated(grads, self._now(), extra)
        if not group.is_open:  # it was abandoned
            self._pending = None
        pending = self._pending
        if pending is None and tx.offers(now.state):
            group.start()
            now = self._now()
            pending = self._pending = group.allreduce(tx.offer(now.state, now.params))
        if pending is None or not tx.settles(now.state):
            return now, None
        mean, self._pending = pending.wait(), None
        self._check_finite(mean)
        decision = group.decide()
        settle = self._settled, tx, mean, self._now(), decision.committed
        return self._replaced(decision, *settle), decision

    def _replaced(
        self, decision: Decision, make: Callable[..., ReplicaState], *args: Any
    ) -> ReplicaState:
        """Store and return the tree of a function; if it raises, a committed step is taken back."""
        self._tree = None  # while it is written to, it cannot heal others
        try:
            self._tree = make(*args)
        except BaseException as error:
            if decision.committed:
                self.coordinator.report_error(error)
            raise
        return self._tree

    @torch.no_grad()
    def _settled(self, tx: Synced, mean: Any, now: ReplicaState, committed: bool) -> ReplicaState:
        params, state = tx.settle(mean, now.state, now.params, committed)
        if self._in_place:
            firsts = first_places(now.params, now.state)
            params, state = held(written, now.params, now.state, params, state, firsts)
        return ReplicaState(params, state, now.extra)

    def _updated(self, grads: Any, now: ReplicaState, extra: dict[str, Any]) -> ReplicaState:
        params, state = self._apply(grads, now.state, now.params, **extra)
        return ReplicaState(params, state, now.extra)

    def _check_finite(self, mean: Any) -> None:
        """Vote against means that are not finite, with `nonfinite="refuse"`."""
        if self.nonfinite == "commit" or self.coordinator.error is not None:
            return
        named = list(tree.items(mean))
        found = tree.first_not_finite([g for _, g in named])
        if found is not None:
            self.coordinator.report_error(
                ValueError(f"the mean of {named[found][0]!r} has an infinite or NaN element")
            )

    def _give(self, now: ReplicaState) -> None:
        """Store the caller's tree, unless a peer's has arrived that the caller does not have."""
        if not self._came:
            self._tree = now

    def _now(self) -> Any:
        """This replica's tree, which is returned to the caller."""
        self._came = False
        return self._tree

    def _load(self, saved: ReplicaState) -> None:
        if self._tree is None:
            raise RuntimeError("a peer's state came before this replica's start().")
        tree.check_same(
            tuple(self._tree), tuple(saved), "this replica", "its peer", "run the same program"
        )
        saved = ReplicaState(*tree.map(_where, tuple(self._tree), tuple(saved)))
        if isinstance(self.tx, Synced):  # the local step count is not healed
            since = self._tree.state.since
            saved = saved._replace(state=saved.state._replace(since=since))
        self._tree = saved
        self._came = True


def _stepper(tx: base.GradientTransformation, compiled: bool) -> Any:
    if compiled:
        return compile(tx)

    def step(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params, **extra)
        return base.apply_updates(params, updates), state

    return torch.no_grad()(step)


def _where(mine: Any, theirs: Any) -> Any:
    """A peer's state on the device of ours: it may have been sent through the CPU."""
    both = isinstance(mine, Tensor) and isinstance(theirs, Tensor)
    return theirs.to(mine.device) if both else theirs


def _as_tensors(extra: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Extra arguments for a reduction: numbers become tensors on the device of the gradients."""
    for name, x in extra.items():
        if not isinstance(x, (bool, int, float, Tensor)):
            raise TypeError(
                f"step averages its extra arguments over the group, so {name} must be a number or "
                f"a tensor, but is a {type(x).__name__}."
            )
    return {
        name: x.detach()
        if isinstance(x, Tensor)
        else torch.tensor(x, dtype=torch.float64, device=device)
        for name, x in extra.items()
    }
