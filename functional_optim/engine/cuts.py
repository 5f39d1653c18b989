"""Chains that are cut in two: placeholders in each part for the rules of the other."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.rule import Placement, Rule
from functional_optim.core.storage import Storage


class Between(NamedTuple):
    """The slot of `PUT` and `TAKE`. update: the output of a part, like the parameter, but in the
    compute dtype."""

    update: Tensor


def _put(u: Tensor, slots: Between, p: Tensor) -> tuple[Tensor, Between]:
    return u, Between(u)


def _take(u: Tensor, slots: Between, p: Tensor, *numbers: Any) -> tuple[Tensor, Between]:
    return slots.update, slots


PUT = Placement(Rule((_put,), storage=Storage(slots=Between)))
"""Stores the update in a slot."""

TAKE = Placement(Rule((_take,), storage=Storage(slots=Between)))
"""Continues with the update in its slot, and ignores the scalars of the rule that it replaces."""

SKIP = Placement(Rule(()))
"""Does nothing, and ignores the scalars of the rule that it replaces."""
