"""Local SGD: local steps, and periodic averages of the parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.combinators.local_steps import Synced, check_alone, copied, no_steps
from functional_optim.core import base
from functional_optim.core.factory import factory


class LocalSGDState(NamedTuple):
    """The state of `local_sgd`.

    since: 0-dim int64 on the CPU, local steps since the last synchronization.
    inner: the state of the inner transformation, separate for each replica.
    anchor: the parameters at the last synchronization, bitwise equal on all replicas.
    past: `inner` at that time.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx, w = fo.local_sgd(fo.sgd(0.5), every=16), torch.zeros(1)
        >>> updates, state = tx.update(-torch.ones(1), tx.init(w), w)
        >>> w = fo.apply_updates(w, updates)
        >>> int(state.since), w - state.anchor  # what would be lost if the group refused
        (1, tensor([0.5000]))
    """

    since: Tensor
    inner: Any
    anchor: Any
    past: Any


@factory
def local_sgd(inner: base.GradientTransformation, every: int) -> Synced:
    """Every so many steps, replace the parameters by their mean over the group.

    Between synchronizations each replica makes local steps, with local gradients and a local inner
    state, without communication. Only parameters are averaged. Momenta and counts are local; a
    healed replica continues with those of the peer that healed it.

    A refused synchronization undoes the steps since the last one: parameters **and** inner state
    have their values of that time, bitwise. So every mean is over the same number of local steps,
    which bounds the divergence of replicas; the batches of those steps are skipped.

    Args:
        inner: the transformation of a local step. Its extra arguments are passed on.
        every: local steps from one synchronization to the next, ≥ 1.

    Returns:
        A `Synced`, for `replicas.Replica`. Its `update` is that of inner, and counts.

    State: a `LocalSGDState`. Memory: parameters and inner state once more.

    Raises:
        TypeError: if inner is not a transformation.
        ValueError: for `every` below 1; if inner has a `local_sgd` or `diloco` inside.

    Paper: Stich, "Local SGD Converges Fast and Communicates Little",
    https://arxiv.org/abs/1805.09767, Algorithm 1.

    If the network is fast enough to average gradients at every step, pass the inner transformation
    to `Replica` instead, which keeps all of the state equal.

    Example::

        >>> import torch, functional_optim as fo
        >>> group = fo.replicas.Scripted([True, False])
        >>> replica = fo.replicas.Replica(group, fo.local_sgd(fo.sgd(0.5), every=2))
        >>> now = replica.init(torch.zeros(1))
        >>> for _ in range(4):
        ...     now = replica.start(now)
        ...     now, decision = replica.step(-torch.ones(1), now)
        ...     print(now.params, None if decision is None else decision.committed)
        tensor([0.5000]) None
        tensor([1.]) True
        tensor([1.5000]) None
        tensor([1.]) False
    """
    check_alone("local_sgd", inner, "local_sgd(adam(), every=16)")
    numeric.check_count("local_sgd", 1, every=every)

    def init(params: Any) -> LocalSGDState:
        mine = inner.init(params)
        return LocalSGDState(no_steps(), mine, copied(params), copied(mine))

    def due(state: LocalSGDState) -> bool:
        return int(state.since) >= every

    def offer(state: LocalSGDState, params: Any) -> Any:
        return params

    def taken(mean: Any, state: LocalSGDState, params: Any) -> tuple[Any, LocalSGDState]:
        mine = state.inner
        return copied(mean), LocalSGDState(no_steps(), mine, copied(mean), copied(mine))

    def refused(mean: Any, state: LocalSGDState, params: Any) -> tuple[Any, LocalSGDState]:
        anchor, past = state.anchor, state.past
        return copied(anchor), LocalSGDState(no_steps(), copied(past), anchor, past)

    return Synced(inner, init, due, offer, due, taken, refused)
