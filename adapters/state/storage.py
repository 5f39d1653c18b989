"""How an optimizer object stores its slots: the keyword `stored` of its class, or of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from functional_optim.combinators.stored import Kind, stored
from functional_optim.core.base import GradientTransformation

Stored: TypeAlias = Kind | Mapping[str, Kind] | Callable[[Any], GradientTransformation]
"""The second argument of `fo.stored`, or a function that stands for a call of it."""

KEY = "stored"
"""The keyword, and the entry of a group that has a storage of its own."""

OWN = (KEY, "views")
"""Entries of a group that say how its tensors are kept and seen: a load leaves them as they are."""


def storage_of(optimizer: Any, group: Mapping[str, Any]) -> Stored | None:
    """How the slots of a group are stored; None: as its transformation says."""
    return group[KEY] if KEY in group else vars(optimizer).get(KEY)


def with_storage(tx: GradientTransformation, given: Stored | None) -> GradientTransformation:
    """A transformation whose slots are stored as the keyword says.

    Raises:
        TypeError, ValueError: those of `stored`, and for a function that returns something else.
    """
    if given is None:
        return tx
    if not callable(given):
        return stored(tx, given)
    made = given(tx)
    if not isinstance(made, GradientTransformation):
        raise TypeError(
            f"the function {KEY}= returned a {type(made).__name__}; it must return the "
            "transformation that it gets, with other slots, as functools.partial(fo.stored, "
            "storage='int8') does."
        )
    return made
