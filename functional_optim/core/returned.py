"""Checks of the return values of a rule's functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functional_optim.core.rule import Rule


def no_pair(rule: Rule, found: Any) -> TypeError:
    """The error for an update that did not return a pair."""
    what = "a tensor" if isinstance(found, Tensor) else f"a {type(found).__name__}"
    if isinstance(found, tuple):
        what = f"a tuple of {len(found)}: {', '.join(type(x).__name__ for x in found)}"
    return TypeError(
        f"update of the rule {rule.name!r} returned {what}; return a pair, the update as a tensor "
        "and the new slots: (u, slots)."
    )


def are_slots(record: Any, slots: tuple[Any, ...]) -> bool:
    """Whether an update has returned valid slots."""
    if not isinstance(record, tuple) or len(record) != len(slots):
        return False
    pairs = zip(record, slots, strict=True)
    return all(old is None or isinstance(x, Tensor) for x, old in pairs)


def no_slots(rule: Rule, record: Any) -> TypeError:
    """The error for an update whose second result is not the slots of its rule."""
    what = "None" if record is None else f"a {type(record).__name__}"
    if isinstance(record, tuple):
        kinds = ", ".join([type(x).__name__ for x in record])
        what = f"a tuple of {len(record)}{': ' * bool(record)}{kinds}"
    names = ", ".join(rule.storage.fields)
    own = f"tensors for {names}" if names else "the slots as they came, since it has no init"
    return TypeError(
        f"update of the rule {rule.name!r} returned as slots {what}; return {own}: (u, slots)."
    )


def check_kind(rule: Rule, what: str, x: Tensor, like: Tensor) -> None:
    """Raise TypeError for a result that cannot be stored as the tensor is whose place it takes."""
    if x.layout is not like.layout:
        kind, wanted = f"of the layout {x.layout}", f"of {like.layout}, e.g. by to_dense()"
    elif x.is_complex() and not like.is_complex():
        kind, wanted = f"of {x.dtype}", f"of {like.dtype}, e.g. by x.real"
    elif x.device != like.device and x.dim():
        kind, wanted = f"on {x.device}", f"on {like.device}"
    else:
        return
    raise TypeError(
        f"update of the rule {rule.name!r} returned {what} {kind}; return one {wanted}."
    )


def checked_sums(what: str, found: Any) -> Any:
    """Check the result of `reduce` or `measure` of a rule.

    Raises:
        TypeError: unless it is a tuple of single numbers: a kernel has memory for these only.
    """
    single = isinstance(found, tuple) and [isinstance(x, Tensor) and not x.dim() for x in found]
    if single and all(single):
        return found
    shown = f"a {type(found).__name__}"
    if isinstance(found, tuple):
        each = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in found]
        shown = f"a tuple of {', '.join(map(str, each)) or 'nothing'}"
    raise TypeError(
        f"{what} of a rule returned {shown}; it must return a tuple or a NamedTuple of 0-dim "
        "tensors, e.g. ((u * u).sum(),)."
    )
