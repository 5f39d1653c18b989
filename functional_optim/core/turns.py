"""Turns: how a rule spreads over the steps what is due for all tensors now and then."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from functional_optim.core.rule import Placement

Acting = tuple[Sequence[Placement], Sequence[Hashable], Tensor]
"""The rules that act on a tensor, what tells each of them from others, and the tensor."""


def takes_turns(placements: Sequence[Placement]) -> bool:
    """Whether a rule chooses its variant for each turn."""
    return any(placement.rule.runs.turns for placement in placements)


def turns_of(leaves: Sequence[Acting]) -> list[tuple[int, ...]]:
    """The turn of each tensor for each of its rules; nothing for one whose rules have no turns.

    A rule gives its turns to all tensors on which it acts, the one with the most entries first,
    those of one size in their order. So each turn has one of the largest, one of the next, and so
    on.
    """
    acted_on: dict[Hashable, list[int]] = {}
    for i, (placements, keys, _) in enumerate(leaves):
        for placement, key in zip(placements, keys, strict=True):
            if placement.rule.runs.turns:
                acted_on.setdefault(key, []).append(i)
    ranks: list[dict[Hashable, int]] = [{} for _ in leaves]
    for key, members in acted_on.items():
        for rank, i in enumerate(sorted(members, key=lambda i: -leaves[i][2].numel())):
            ranks[i][key] = rank
    return [
        tuple(
            [
                mine[key] % placement.rule.runs.turns if placement.rule.runs.turns else 0
                for placement, key in zip(placements, keys, strict=True)
            ]
        )
        if mine
        else ()
        for (placements, keys, _), mine in zip(leaves, ranks, strict=True)
    ]
