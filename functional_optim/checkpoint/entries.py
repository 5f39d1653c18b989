"""The entries of a state, and how a saved dict differs from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.checkpoint.errors import listed, misfit, near, not_a_number
from functional_optim.checkpoint.errors import refuse as refuse_all


class Entry(NamedTuple):
    """One value of a state.

    keys: under which it is kept, and whether the parameter there has slots. value: what a saved one
    must be like. number: whether it is a chain's step count or carried number, kept with each
    parameter. counts: whether it is the step count. p: the parameter of a slot.
    """

    keys: list[tuple[str, bool]]
    value: Any
    number: bool = False
    counts: bool = False
    p: Any = None

    def misfit(self, found: Any) -> str | None:
        """Why a saved value cannot stand in this place, as "is …, but …"; None if it can."""
        if not self.number:
            return misfit(found, self.value)
        if isinstance(self.value, Tensor) and self.value.dim():  # of several problems at once
            return misfit(found, torch.empty(self.value.shape, device="meta"))
        return not_a_number(found, whole=self.counts)


def without_value(x: Any) -> str | None:
    """Why a tensor has no value to be kept; None if it has one."""
    meta = isinstance(x, Tensor) and x.is_meta
    return "is on the meta device, which holds no values" if meta else None


def deciding(entry: Entry, known: dict[str, Any]) -> list[str]:
    """The keys that say what a number is: those of parameters with slots, if there are such."""
    there = [(key, has) for key, has in entry.keys if key in known]
    return [key for key, has in there if has] or [key for key, _ in there]


def lacking(entry: Entry, there: list[str]) -> list[str]:
    """A chain's carried numbers may be missing where its rule does not act, step counts may not."""
    needed = entry.counts or not there
    some = any(has for _, has in entry.keys)
    absent = [key for key, has in entry.keys if key not in there and (has or not some)]
    return absent if needed else []


def differences(keys: list[str], known: dict[str, Any]) -> list[str]:
    """Parameters that are at other steps than most."""
    values = {key: _hashable(known[key]) for key in keys}
    if len(set(values.values())) < 2:
        return []
    (usual, _), *_ = Counter(values.values()).most_common(1)
    others = [f"{key} is {x}, but {usual} elsewhere" for key, x in values.items() if x != usual]
    return [f"{fault} (a chain has one for all its parameters)" for fault in others]


def _hashable(x: Any) -> Any:
    """A number, or several, such that NaN equals NaN."""
    values = x.reshape(-1).tolist() if isinstance(x, Tensor) else [float(x)]
    known = tuple(["nan" if value != value else value for value in values])
    return known[0] if len(known) == 1 else known


def flat(saved: Any) -> dict[str, Any]:
    """Nested dicts as one, keys joined by dots; hyperparameters left out."""
    if not isinstance(saved, Mapping):
        raise TypeError(
            f"load_state_dict takes a dict that state_dict returned, but got a "
            f"{type(saved).__name__}."
        )
    numbered = saved.get("state")
    if isinstance(numbered, Mapping) and any(isinstance(name, int) for name in numbered):
        raise ValueError(
            "this is an optimizer's own state dict, which numbers its parameters; save what "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer) "
            "returns: it knows their names."
        )
    found: dict[str, Any] = {}

    def add(above: str, inner: Mapping[Any, Any]) -> None:
        for name, x in inner.items():
            path = f"{above}.{name}" if above else str(name)
            if isinstance(x, Mapping):
                add(path, x)
            else:
                found[path] = x

    add("", {name: x for name, x in saved.items() if name != "param_groups"})
    return {key: x for key, x in found.items() if not key.startswith("param_groups.")}


def refuse(faults: dict[str, list[str]], strict: bool) -> None:
    """Raise one ValueError for all that is missing, unexpected or wrong, if anything is."""
    missing, unexpected, wrong = faults.values()
    lines = [*wrong]
    if strict and missing:
        close = [near(key, unexpected) for key in missing]
        lines.append(f"missing: {listed(close)}")
    if strict and unexpected:
        lines.append(f"unexpected: {listed(unexpected)}")
    advice = "load the checkpoint of the same transformation and parameters"
    if any(key.endswith(".step") for key in missing):
        advice += ", or say with step=… how many steps are done, if it counts none"
    elif any(".step is " in fault for fault in wrong):
        advice += ", or say with step=… how many steps are done"
    if strict and (missing or unexpected):
        advice += ", or pass strict=False to take what is there"
    refuse_all("the saved state", lines, advice)
