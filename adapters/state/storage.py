"""The storage of slots in optimizer objects: the keyword `stored` of a class, or of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from functional_optim.combinators.stored import Kind, stored
from functional_optim.core.base import GradientTransformation, check_returned

Stored: TypeAlias = Kind | Mapping[str, Kind] | Callable[[Any], GradientTransformation]
"""The second argument of `fo.stored`, or a function that calls it."""

KEY = "stored"
"""The keyword, and the key of a group with a separate storage format."""

OWN = (KEY, "views")
"""Keys of a group for storage and views of its tensors: a load does not change them."""


def storage_of(optimizer: Any, group: Mapping[str, Any]) -> Stored | None:
    """The storage format of the slots of a group; None: that of its transformation."""
    return group[KEY] if KEY in group else vars(optimizer).get(KEY)


def with_storage(tx: GradientTransformation, given: Stored | None) -> GradientTransformation:
    """A transformation with the storage format of the keyword.

    Raises: TypeError, ValueError: those of `stored`, and for a function that does not return a
    transformation.
    """
    if given is None:
        return tx
    if not callable(given):
        return stored(tx, given)
    made = given(tx)
    advice = "with other slots, as functools.partial(fo.stored, storage='int8') does"
    check_returned(f"the function {KEY}=", made, f"the transformation that it receives, {advice}")
    return made
