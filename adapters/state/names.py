"""The names of an optimizer's parameters, for patterns and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from functional_optim.checkpoint.errors import listed, near
from functional_optim.combinators.as_matrix import COMPILED

WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""The prefixes of torch's wrappers in the names of a model: torch.compile, DataParallel and
DistributedDataParallel, FullyShardedDataParallel, and checkpoint_wrapper."""


def named(group: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """A group's parameters with their paths for patterns: their names, or their indices."""
    params, names = group["params"], names_of(group) or []
    places = map(str, range(len(names), len(params)))  # for parameters that were appended later
    return list(zip([*names[: len(params)], *places], params, strict=True))


def check_count(group: Mapping[str, Any]) -> None:
    """Raise ValueError if there are more names than parameters: nobody knows which is whose."""
    params, names = group["params"], names_of(group) or []
    if len(params) < len(names):
        raise ValueError(
            f"a parameter group has fewer parameters ({len(params)}) than names ({len(names)}: "
            f"{listed(names)}), by which its recipe selects parameters; remove a parameter's name "
            "from group['param_names'] where you remove the parameter from group['params']."
        )


def check_distinct(group: Mapping[str, Any]) -> None:
    """Raise ValueError if two parameters have one name: a tree by names would have only one."""
    names = [name for name, _ in named(group)]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(
            f"several parameters of a group are called {listed(twice)}, but this recipe has a part "
            "that takes the group as one tree, by names; pass different names, such as those of "
            "one module that contains all, or the parameters without names."
        )


def names_of(group: Mapping[str, Any]) -> list[str] | None:
    """The names of a group's parameters in the model, whether it is compiled or not; or None."""
    names = group.get("param_names")
    return names and [name.replace(COMPILED, "") for name in names]


def place(group: Mapping[str, Any], k: int, i: int) -> str:
    """The i-th parameter of group k, for an error."""
    names = group.get("param_names")
    return f"'{names[i]}'" if names else f"{i} of group {k}"


def lacking(state: dict[str, Any], key: str) -> str:
    """A parameter of a loaded state that lacks a slot, and its slots, for an error."""
    for k, group in enumerate(state["param_groups"]):
        for i, p in enumerate(group["params"]):
            mine = state["state"].get(p)
            if mine is not None and key not in mine:
                has = sorted(map(str, mine))
                return f"parameter {place(group, k, i)} of the loaded state has {has}, no {key!r}"
    return f"the loaded parameter groups have no {key!r}"


def check_names(k: int, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ValueError if a group and a saved one have different parameter names.

    torch would match them by order, and assign each parameter the state of another one.
    """
    own, saved = list(mine.get("param_names") or ()), list(theirs.get("param_names") or ())
    strange = [repr(name) for name in saved if not isinstance(name, str)]
    if strange:
        raise ValueError(
            f"the 'param_names' of the saved group {k} must be strings, but they have "
            f"{listed(strange)}; pass what an optimizer's state_dict() returned."
        )
    whole = not saved and all(isinstance(name, str) for name in theirs["params"])  # by names
    if whole:
        saved = list(theirs["params"])
    if sorted(own) != sorted(saved):
        own, saved = list(map(_bare, own)), list(map(_bare, saved))
    if whole and sorted(saved) != sorted(own):  # of a whole model, of which this is a part
        return
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
        found = f"they are in another order: {saved[i]} was saved instead of {own[i]}"
    raise ValueError(
        f"the names of the parameters in group {k} are not those that were saved: {found}. If "
        "their order is right, delete 'param_names' from the saved groups; else fix names and "
        "'params' there. If a trainer loads, do so in a hook: "
        "opt.register_load_state_dict_pre_hook(fn)."
    )


def _bare(name: str) -> str:
    return ".".join([part for part in name.split(".") if part not in WRAPPERS])
