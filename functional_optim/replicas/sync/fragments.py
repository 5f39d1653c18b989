"""Parts of a tree that are synchronized in turn, and what a state keeps for each of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch import Tensor

from functional_optim import tree
from functional_optim.core.paths import Mask, chosen, masked_by

Fragments = int | list[Mask] | tuple[Mask, ...]
"""How many, or which leaves make up each: path patterns, predicates or trees of bools."""


class Division:
    """Which fragment each leaf belongs to.

    fragments: a number: the leaves, in the tree's order, are cut into so many runs of about the
        same size in bytes. Or masks: a leaf belongs to the first that selects it.

    Raises:
        ValueError: for less than one fragment; from `owners`, if a leaf is in none of them, or a
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
        """The number of its fragment for each leaf: a tree like the parameters."""
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
    """The fragment that a tree is of which was cut."""
    rows = tree.rows(params, owners, part)
    return next(owner for _, owner, x in rows if x is not None)


def map_owned(fn: Callable[..., Any], params: Any, owners: Any, state: Any, *rest: Any) -> Any:
    """`fn(owner, x, …)` for all tensors of a transformation's state.

    The owner of what the state keeps for a leaf (its slots) is the leaf's fragment, and None that
    of what all leaves share, such as counts.
    """

    def one(x: Any, *others: Any) -> Any:
        if not _like(params, x):
            return fn(None, x, *others)

        def own(_: Any, owner: int, *xs: Any) -> Any:
            return None if xs[0] is None else fn(owner, *xs)

        return tree.map(own, params, owners, x, *others)

    return tree.map_down_to(lambda x: _like(params, x), one, state, *rest)


def _like(params: Any, x: Any) -> bool:
    """Is a part of a state a tree like the parameters, with a tensor or nothing for each leaf?"""
    if isinstance(params, Tensor):
        return x is None or isinstance(x, Tensor)
    if params is None or type(x) is not type(params):
        return params is x
    if isinstance(params, dict):
        return params.keys() == x.keys() and all(_like(p, x[key]) for key, p in params.items())
    if isinstance(params, (list, tuple)):
        return len(params) == len(x) and all(map(_like, params, x))
    return tree.structure(params) == tree.structure(x)
