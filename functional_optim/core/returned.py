"""Checks of what a rule's functions return, and of what they write to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functional_optim.core.rule import Placement, Rule
from functional_optim.kernels.node import RuleError

if TYPE_CHECKING:
    from functional_optim.core.execution import Leaf


def check_results(rule: Rule, found: Any, slots: Sequence[Any], p: Tensor) -> None:
    """Raise TypeError unless an update has returned a tensor like p, and slots like these."""
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Tensor):
        raise _no_pair(rule, found)
    if torch.compiler.is_compiling():
        return
    u, record = found
    if not _are_slots(record, slots):
        raise _no_slots(rule, record)
    _check_kind(rule, "a tensor", u, p)
    for x, old in zip(record, slots, strict=True):
        if old is not None:
            _check_kind(rule, "a slot", x, old)


def _no_pair(rule: Rule, found: Any) -> TypeError:
    """The error for an update that did not return a pair."""
    what = "a tensor" if isinstance(found, Tensor) else f"a {type(found).__name__}"
    if isinstance(found, tuple):
        what = f"a tuple of {len(found)}: {', '.join(type(x).__name__ for x in found)}"
    return TypeError(
        f"update of the rule {rule.name!r} returned {what}; return a pair, the update as a tensor "
        "and the new slots: (u, slots)."
    )


def _are_slots(record: Any, slots: Sequence[Any]) -> bool:
    """Whether an update has returned valid slots."""
    if not isinstance(record, tuple) or len(record) != len(slots):
        return False
    pairs = zip(record, slots, strict=True)
    return all(old is None or isinstance(x, Tensor) for x, old in pairs)


def _no_slots(rule: Rule, record: Any) -> TypeError:
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


def _check_kind(rule: Rule, what: str, x: Tensor, like: Tensor) -> None:
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


def watched(run: Any, placements: Sequence[Placement], leaves: Sequence[Leaf]) -> Any:
    """What rules return; RuleError if one has written into tensors that it was given."""
    before = _versions(leaves)
    found = run(placements, leaves)
    if before != _versions(leaves):
        _check_written(run, placements, leaves)
    return found


def _versions(leaves: Sequence[Leaf]) -> list[int]:
    """How often each tensor of a step was written to; empty where torch does not count that."""
    if torch.compiler.is_compiling():
        return []
    try:
        return [x._version for leaf in leaves for x in _tensors_of(leaf)]
    except RuntimeError:  # of inference mode
        return []


def _tensors_of(leaf: Leaf) -> list[Tensor]:
    return [leaf.g, leaf.p, *[x for own in leaf.slots for x in own if x is not None]]


def _check_written(run: Any, placements: Sequence[Placement], leaves: Sequence[Leaf]) -> None:
    """Raise RuleError if a rule writes into copies of tensors: into these, another thread may have
    written."""
    for k, placement in enumerate(placements):
        copies = [
            leaf._replace(
                g=leaf.g.clone(),
                p=leaf.p.clone(),
                slots=[tuple([x if x is None else x.clone() for x in own]) for own in leaf.slots],
            )
            for leaf in leaves
        ]
        before = _versions(copies)
        with torch.no_grad():
            run(placements[: k + 1], copies)
        if before != _versions(copies):
            raise RuleError.of_write(repr(placement.shown))


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
