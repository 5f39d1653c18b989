"""DiLoCo: local steps, and an outer optimizer on the mean of their displacements."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.combinators.local_steps import Synced, check_alone, copied, no_steps
from functional_optim.core import base
from functional_optim.core.factory import factory
from functional_optim.core.paths import Mask, chosen, masked_by, subtree

Fragments = int | list[Mask] | tuple[Mask, ...]
"""Their number, or the leaves of each: path patterns, predicates or trees of bools."""


class Division:
    """The fragment of each leaf.

    fragments: a number: the leaves, in the tree's order, are split into this many parts of about
    the same size in bytes. Or masks: a leaf belongs to the first that selects it.

    Raises:
        ValueError: for less than one fragment; from `owners`, if a leaf is in no fragment, or a
            fragment has no leaf.
    """

    def __init__(self, fragments: Fragments) -> None:
        number = isinstance(fragments, int) and not isinstance(fragments, bool)
        if not (number or isinstance(fragments, (list, tuple))):
            raise TypeError(
                "fragments must be a number, or a list with a mask for each of them (such as "
                f"['blocks.0', 'blocks.1', '*']), but is a {type(fragments).__name__}."
            )
        self.masks = () if isinstance(fragments, int) else tuple(map(masked_by, fragments))
        self.count = fragments if isinstance(fragments, int) else len(fragments)
        if self.count < 1:
            raise ValueError(f"there must be 1 fragment or more, but fragments is {fragments!r}.")

    def owners(self, params: Any) -> Any:
        """The index of the fragment of each leaf: a tree like the parameters."""
        leaves, paths = tree.columns(params, tree.paths(params))
        found = self._chosen(leaves, paths) if self.masks else self._evenly(leaves)
        for k in range(self.count):
            if k not in found:
                raise ValueError(
                    f"fragment {k} has no leaf: there are {self.count} fragments and these leaves: "
                    f"{tree.summary(params)}; choose fewer, or other masks."
                )
        number = dict(zip(paths, found, strict=True))
        return tree.map_with_path(lambda path, _: number[path], params)

    def _chosen(self, leaves: list[Tensor], paths: list[str]) -> list[int]:
        found = []
        for path, x in zip(paths, leaves, strict=True):
            mine = [k for k, mask in enumerate(self.masks) if chosen((mask,), path, x)]
            if not mine:
                raise ValueError(
                    f"the leaf {path!r} is in no fragment; add a mask that selects it, such as '*' "
                    "at the end for all others."
                )
            found.append(mine[0])
        return found

    def _evenly(self, leaves: list[Tensor]) -> list[int]:
        n, most = self.count, len(leaves)
        until = [0, *accumulate([x.numel() * x.element_size() for x in leaves])]
        if most < n:
            return []
        ends = [0]
        for k in range(1, n):
            ideal = until[-1] * k / n
            possible = range(ends[-1] + 1, most - (n - k) + 1)
            ends.append(min(possible, key=lambda i, ideal=ideal: abs(until[i] - ideal)))
        return [
            k
            for k, (a, b) in enumerate(zip(ends, [*ends[1:], most], strict=True))
            for _ in range(b - a)
        ]


def cut(owners: Any, k: int, params: Any, values: Any) -> Any:
    """A tree like the parameters, without the leaves of other fragments."""
    return tree.map(lambda _, owner, x: x if owner == k else None, params, owners, values)


def owner_of(part: Any, params: Any, owners: Any) -> int:
    """The fragment of a cut tree."""
    rows = tree.rows(params, owners, part)
    return next(owner for _, owner, x in rows if x is not None)


def map_owned(fn: Callable[..., Any], params: Any, owners: Any, state: Any, *rest: Any) -> Any:
    """`fn(owner, x, …)` for all tensors of a transformation's state.

    The owner of the slots of a leaf is the leaf's fragment; of shared values, such as counts, it is
    None.
    """

    def one(x: Any, *others: Any) -> Any:
        if not _like(params, x):
            return fn(None, x, *others)

        def own(_: Any, owner: int, *xs: Any) -> Any:
            return None if xs[0] is None else fn(owner, *xs)

        return tree.map(own, params, owners, x, *others)

    return tree.map_down_to(lambda x: _like(params, x), one, state, *rest)


def _like(params: Any, x: Any) -> bool:
    """Whether a part of a state is a tree like the parameters, with a tensor or None for each
    leaf."""
    if isinstance(params, Tensor):
        return x is None or isinstance(x, Tensor)
    if params is None or type(x) is not type(params):
        return params is x
    if isinstance(params, dict):
        return params.keys() == x.keys() and all(_like(p, x[key]) for key, p in params.items())
    if isinstance(params, (list, tuple)):
        return len(params) == len(x) and all(map(_like, params, x))
    return tree.structure(params) == tree.structure(x)


class DiLoCoState(NamedTuple):
    """The state of `diloco`.

    since: 0-dim int64 on the CPU, local steps since a fragment was last synchronized.
    turn: 0-dim int64 on the CPU, the next fragment, from 0.
    inner: the state of the inner transformation, separate for each replica.
    anchor: each fragment's parameters after the outer transformation at its last synchronization,
    bitwise equal on all replicas.
    past: `inner` at that time: all of it if there is one fragment, otherwise the slots of each
    fragment's leaves, and None for shared values.
    outer: for each fragment the state of the outer transformation, the same on all replicas.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.diloco(fo.adamw(1e-3), fo.sgd(0.7, momentum=0.9), every=500, fragments=2)
        >>> state = tx.init({"a": torch.zeros(2), "b": torch.zeros(3)})
        >>> int(state.turn), state.outer[1].slots["momentum_buffer"]
        (0, {'a': None, 'b': tensor([0., 0., 0.])})
    """

    since: Tensor
    turn: Tensor
    inner: Any
    anchor: Any
    past: Any
    outer: tuple[Any, ...]


@factory
def diloco(
    inner: base.GradientTransformation,
    outer: base.GradientTransformation,
    every: int,
    fragments: Fragments = 1,
    delay: int = 0,
    alpha: float = 0.0,
) -> Synced:
    """Every so many steps, let an outer transformation step along the mean of the replicas'
    displacements.

    Between synchronizations each replica makes local steps, with local gradients and a local inner
    state. The displacement of its parameters θ from the anchor φ is the outer transformation's
    gradient::

        Δ = mean(φ − θ)              over the group, offered `delay` steps before it is used
        φ ← φ + outer(Δ, φ)
        θ ← φ + alpha · (θ − φ)

    With several fragments, one is synchronized every `every / fragments` steps, which spreads the
    traffic; each has a separate outer state.

    A refused synchronization undoes the steps of its fragment since the fragment's last one: its
    parameters are the anchor again, and the inner slots of its leaves have their values of that
    time, bitwise (with one fragment all of the inner state, including counts; with several, shared
    values are not reset). The outer state does not change, and the same fragment is synchronized
    next.

    Args:
        inner: the transformation of a local step; the papers use AdamW. Extra arguments are passed
            on.
        outer: any transformation without extra arguments; the papers use
            `fo.sgd(0.7, momentum=0.9, nesterov=True)`.
        every: local steps from one synchronization of a fragment to its next, ≥ 1 and a multiple of
            the number of fragments. The first paper's main runs use 500.
        fragments: a number: the leaves, in the tree's order, are split into this many parts of
            about the same size in bytes. Or a list with a mask for each fragment: a path pattern,
            patterns of which one must match, a function of path and leaf, or a tree of bools (see
            `partition`); a leaf belongs to the first that selects it. Default: one fragment.
        delay: τ, local steps between offer and use, to overlap the reduction with computation; 0 ≤
            delay < every / fragments. Default: none.
        alpha: the weight of the local parameters, in [0, 1]. Default: 0.

    Returns:
        A `Synced`, for `replicas.Replica`. Its `update` is that of inner, and counts. To trace
        `offer` with several fragments, pass the fragment: `offer(state, params, fragment=1)`.

    State: a `DiLoCoState`. Memory: parameters and inner state once more, and the outer state.

    Raises:
        TypeError: if inner or outer is not a transformation, or fragments has another type.
        ValueError: for hyperparameters out of range; if inner or outer has a `local_sgd` or
            `diloco` inside, or outer needs extra arguments; from init, if a leaf is in no fragment,
            or a fragment has no leaf.

    Papers: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    https://arxiv.org/abs/2311.08105, Algorithm 1; and "Streaming DiLoCo with overlapping
    communication", https://arxiv.org/abs/2501.18512, Algorithm 2.

    With several fragments or a delay, replicas must agree on turns before they offer: the group has
    to heal in `start` (of a torchft Manager: `use_async_quorum=False`).

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.diloco(fo.sgd(0.5), fo.sgd(0.5, momentum=0.9), every=2)
        >>> replica = fo.replicas.Replica(fo.replicas.Local(), tx)
        >>> now = replica.init(torch.zeros(1))
        >>> for _ in range(4):
        ...     now = replica.start(now)
        ...     now, decision = replica.step(-torch.ones(1), now)
        ...     print(now.params, now.state.anchor)
        tensor([0.5000]) tensor([0.])
        tensor([0.5000]) tensor([0.5000])
        tensor([1.]) tensor([0.5000])
        tensor([1.4500]) tensor([1.4500])
    """
    check_alone("diloco", inner, "diloco(adamw(), sgd(0.7), every=100)")
    check_alone("diloco", outer, "diloco(adamw(), sgd(0.7), every=100)")
    numeric.check_count("diloco", 1, every=every)
    division = Division(fragments)
    n = division.count
    _check(outer, every, n, delay, alpha)
    turns = every // n

    def init(params: Any) -> DiLoCoState:
        owners = division.owners(params)
        mine = inner.init(params)
        past = _for_each(lambda owner, x: x.clone(), params, owners, mine)
        anchor = copied(params)  # a compiled step writes into params
        with subtree():
            begun = tuple([outer.init(cut(owners, k, params, anchor)) for k in range(n)])
        return DiLoCoState(no_steps(), no_steps(), mine, anchor, past, begun)

    def _for_each(fn: Any, params: Any, owners: Any, state: Any, *rest: Any) -> Any:
        if n == 1:
            return tree.map(lambda *xs: fn(0, *xs), state, *rest)
        return map_owned(fn, params, owners, state, *rest)

    def offers(state: DiLoCoState) -> bool:
        return int(state.since) >= turns - delay

    def offer(state: DiLoCoState, params: Any, fragment: int | None = None) -> Any:
        owners = division.owners(params)
        k = fragment
        if k is None:
            k = 0 if n == 1 else int(state.turn)
        way = tree.map(torch.sub, state.anchor, params)
        return cut(owners, k, params, way)

    def settles(state: DiLoCoState) -> bool:
        return int(state.since) >= turns

    def taken(mean: Any, state: DiLoCoState, params: Any) -> tuple[Any, DiLoCoState]:
        owners = division.owners(params)
        k = owner_of(mean, params, owners)
        anchor = cut(owners, k, params, state.anchor)
        updates, stepped = outer.update(mean, state.outer[k], anchor)
        there = base.apply_updates(anchor, updates)

        def mixed(p: Tensor, old: Tensor, new: Any) -> tuple[Tensor, Tensor]:
            if new is None:
                return p, old
            return (torch.lerp(new, p, alpha) if alpha else new.clone()), new

        mine, anchors = tree.map_unzip(2, mixed, params, state.anchor, there)

        def kept(owner: int | None, x: Tensor, old: Any) -> Any:
            return x.clone() if owner == k else old

        past = _for_each(kept, params, owners, state.inner, state.past)
        begun = tuple([stepped if i == k else x for i, x in enumerate(state.outer)])
        turn = (state.turn + 1) % n
        return mine, DiLoCoState(no_steps(), turn, state.inner, anchors, past, begun)

    def refused(mean: Any, state: DiLoCoState, params: Any) -> tuple[Any, DiLoCoState]:
        owners = division.owners(params)
        k = owner_of(mean, params, owners)

        def back(_: Any, owner: int, x: Tensor, old: Tensor) -> Tensor:
            return old.clone() if owner == k else x

        def slot_back(owner: int | None, x: Tensor, old: Any) -> Tensor:
            return old.clone() if owner == k else x

        mine = tree.map(back, params, owners, params, state.anchor)
        kept = _for_each(slot_back, params, owners, state.inner, state.past)
        return mine, base.replaced(state, since=no_steps(), inner=kept)

    return Synced(inner, init, offers, offer, settles, taken, refused, n > 1 or delay > 0)


def _check(
    outer: base.GradientTransformation, every: int, fragments: int, delay: Any, alpha: Any
) -> None:
    if every % fragments:
        raise ValueError(
            f"diloco synchronizes one of {fragments} fragments every every / {fragments} steps, so "
            f"every must be a multiple of {fragments}, but is {every}."
        )
    if isinstance(delay, bool) or not (isinstance(delay, int) and 0 <= delay < every // fragments):
        raise ValueError(
            f"diloco needs a delay of whole steps from 0 to {every // fragments - 1}, less than "
            f"every / fragments, so that one offer is settled before the next; but got {delay!r}."
        )
    if not (isinstance(alpha, (int, float)) and 0.0 <= alpha <= 1.0):
        raise ValueError(
            "diloco mixes local and global parameters with an alpha from 0 (all global) to 1 (all "
            f"local), but got {alpha!r}."
        )
    needed = outer.required
    if needed:
        raise ValueError(
            f"the outer transformation of diloco needs {', '.join(needed)} in update, which nobody "
            "has at a synchronization; choose one without extra arguments."
        )
