"""The names of an optimizer's parameters: what patterns see, and what errors say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from functional_optim.fitting import listed, near

COMPILED, PARALLEL = "_orig_mod.", "module."
"""What torch.compile and data parallelism put into the names of a model that they wrap."""


def named(group: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """A group's parameters with the paths that patterns see: their names, else their places."""
    params = group["params"]
    return list(zip(names_of(group) or map(str, range(len(params))), params, strict=True))


def names_of(group: Mapping[str, Any]) -> list[str] | None:
    """The names of a group's parameters in the model, whether it is compiled or not; or None."""
    names = group.get("param_names")
    return names and [name.replace(COMPILED, "") for name in names]


def place(group: Mapping[str, Any], k: int, i: int) -> str:
    """The i-th parameter of group k, for an error."""
    names = group.get("param_names")
    return f"'{names[i]}'" if names else f"{i} of group {k}"


def check_names(k: int, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ValueError where a group and a saved one both name their parameters, and not alike.

    torch would go by their order, and give each parameter the state of another one.
    """
    own, saved = (list(map(_bare, group.get("param_names") or ())) for group in (mine, theirs))
    if not own or not saved or own == saved:
        return
    absent = [name for name in own if name not in saved]
    unused = [name for name in saved if name not in own]
    if absent or unused:
        what = [
            f"no state is saved for {listed([near(name, unused) for name in absent])}"
            if absent
            else "",
            f"nothing here is called {listed(unused)}" if unused else "",
        ]
        found = "; ".join(filter(None, what))
    else:
        i = next(i for i, (a, b) in enumerate(zip(own, saved, strict=True)) if a != b)
        found = f"they are in another order: {saved[i]} was saved in the place of {own[i]}"
    raise ValueError(
        f"the names of the parameters in group {k} are not those that were saved: {found}. Rename "
        "them in the loaded state dict, or delete its param_names to go by the order."
    )


def _bare(name: str) -> str:
    return name.replace(COMPILED, "").removeprefix(PARALLEL)
