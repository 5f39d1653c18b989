"""The elements of a parameter's state, to compare a loaded one with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.adapters.stepping.shared_counts import STEPS
from functional_optim.checkpoint.conversion import is_packed
from functional_optim.checkpoint.state_dict import Entry
from functional_optim.core import sharding
from functional_optim.core.first_slots import slots_like
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.rule import Rule
from functional_optim.core.storage import made_slots


class Template(NamedTuple):
    """The state of a parameter.

    entries: by key, each with whether it is divided like the parameter. slots: those that the
    parameter needs, without data. plain: whether slots, none of them packed, and a step count are
    all that the state of a parameter that is not sharded may have.
    """

    entries: list[tuple[str, Entry, bool]]
    slots: dict[str, Tensor]
    plain: bool


class Templates:
    """The templates of parameters. Parameters of one shape and dtype, with the same rules, have
    one, because a rule's slots on the meta device take a tenth of a millisecond."""

    def __init__(self) -> None:
        self.known: dict[Any, Template] = {}

    def of(self, tx: Leafwise, p: Tensor, path: str, found: Mapping[str, Any]) -> Template:
        """The template of a parameter.

        tx: the rules that act on it. found: its loaded state.
        """
        if sharding.is_sharded(p):
            return _template(tx, p, path, found)
        key = (tx, p.shape, p.dtype)
        own = self.known.get(key)
        if own is None:
            own = _template(tx, p, path, found)
            if not any(rule.draws or rule.storage.packs for rule, _, _ in tx.rules):  # by path
                self.known[key] = own
        return own


def _template(tx: Leafwise, p: Tensor, path: str, found: Mapping[str, Any]) -> Template:
    carried, slots = tx.carried, dict[str, Tensor]()
    numbers = {**carried, STEPS: 0}
    entries = [(key, Entry([(key, True)], x, number=True), False) for key, x in numbers.items()]
    for rule, keys, _ in tx.rules:
        divides = _divided(rule, [found.get(key, p) for key in keys], p, path)
        for key, x, divided in zip(keys, slots_like(rule, p, path), divides, strict=True):
            if x is not None:
                slots[key] = x
                entries.append((key, Entry([(key, True)], x), x.shape == p.shape and divided))
    packed = any(map(is_packed, slots))
    return Template(entries, slots, not (carried or packed or sharding.is_sharded(p)))


def _divided(rule: Rule, found: list[Any], p: Tensor, path: str) -> list[bool]:
    """Whether each slot of a rule is divided if p is and has its shape.

    A factor of a square matrix has the shape of the matrix, but every process has all of it.
    found: the loaded slots; if all are divided, this is not asked.
    """
    if not sharding.is_sharded(p) or all(map(sharding.is_sharded, found)):
        return [True] * len(rule.keys)
    part = torch.empty(sharding.part(p).shape, dtype=p.dtype, device="meta")
    made = made_slots(rule, sharding.from_part(part, p), path)
    divided = dict(zip(rule.storage.fields, map(sharding.is_sharded, made), strict=True))
    return [divided[key.partition(".")[0]] for key in rule.keys]
