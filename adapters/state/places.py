"""The places of parameters in a state that belongs to several of them.

Such a state goes by the names or indices of the parameters, and is kept with the first of them. An
optimizer remembers both, because other code may change `group["params"]` between two steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from functional_optim.adapters.base import OptimizerBase

Places = Mapping[Tensor, str]

KEPT = "_places"
"""The attribute of an optimizer with the places of parameters in each such state, by the parameter
with which the state is kept."""


def in_order(params: Iterable[Tensor]) -> Places:
    """Places that are indices."""
    return {p: str(i) for i, p in enumerate(params)}


def remember(optimizer: OptimizerBase, places: Places, before: Places) -> None:
    """Note that the state of these parameters is kept with the first of them.

    before: earlier places. Parameters that have left keep theirs.
    """
    own = vars(optimizer)
    known = {**own.get(KEPT, {}), next(iter(places)): {**places, **before}}
    own[KEPT] = known  # a new dict: `transaction` restores the old one


def check_places(optimizer: OptimizerBase, places: Places, advice: str = "") -> None:
    """Raise ValueError if a parameter would take the state of another one.

    places: those that the parameters have now. advice: added to the error.
    """
    for _, before in _earlier(optimizer, places):
        _check(places, before, advice)


def remembered(optimizer: OptimizerBase, places: Places) -> tuple[Tensor | None, Places]:
    """The parameter with which the state of these parameters is kept, and their earlier places."""
    if not places:
        return None, {}
    first = next(iter(places))
    found: tuple[Tensor | None, Places] = first, {}
    for home, before in _earlier(optimizer, places):
        if home is first or not optimizer.state.get(first):
            found = home, before
    return found


def _earlier(optimizer: OptimizerBase, places: Places) -> Iterator[tuple[Tensor, Places]]:
    """For each state of these parameters, the one with which it is kept, and the places in it."""
    others = {p for group in optimizer.param_groups for p in group["params"]}.difference(places)
    for home, before in vars(optimizer).get(KEPT, {}).items():
        mine = home in places or not (home in others or places.keys().isdisjoint(before))
        if mine and optimizer.state.get(home):
            yield home, before


def _check(places: Places, before: Places, advice: str) -> None:
    owners = {path: p for p, path in before.items()}
    for p, path in places.items():
        if owners.get(path, p) is p and before.get(p, path) == path:
            continue
        was = f"was {before[p]!r}" if p in before else "was another tensor"
        raise ValueError(
            f"parameter {path!r} {was} in an earlier step, but has a place in one state of all "
            "parameters of its group, so it would take the state of another parameter; undo the "
            f"change of group['params'], or clear the state with opt.state.clear(){advice}."
        )
