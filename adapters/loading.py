"""What a loaded state dict must be, and what torch's loading does to it that ours must not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.adapters.numbers import owned
from functional_optim.adapters.plan import named
from functional_optim.leafwise import Leafwise
from functional_optim.rules import init_slots

if TYPE_CHECKING:
    from functional_optim.adapters.optimizer import Runs


def check_loaded(optimizer: Runs, state_dict: dict[str, Any]) -> None:
    """Check groups and state after a load, and undo torch's casts of what is not like a parameter.

    Raises:
        ValueError: naming the parameter, and what it has against what it needs.
    """
    kind = type(optimizer).__name__
    saved_groups = state_dict["param_groups"]
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        try:
            tx = optimizer.checked_transform(group, in_step=True)
        except KeyError as missing:
            raise ValueError(
                f"the loaded parameter groups have no {missing}, which {kind} needs; load a "
                "checkpoint of the same kind of optimizer."
            ) from None
        if not isinstance(tx, Leafwise):
            for p, index in zip(group["params"], saved["params"], strict=True):
                _keep_all(optimizer.state.get(p, {}), state_dict["state"].get(index, {}))
            continue
        names = group.get("param_names") or [f"{i} of its group" for i in saved["params"]]
        rows = zip(names, named(group), saved["params"], strict=False)
        for name, (path, p), index in rows:
            found = optimizer.state.get(p)
            part = tx.on(path, p)
            if not found or part is None:
                continue
            layout = part.layout
            expected = {key for keys in (*layout.slots, *layout.carry) for key in keys}
            if expected and expected.isdisjoint(found):
                raise ValueError(
                    f"the loaded state of parameter {name} has the slots {sorted(found)}, but "
                    f"{kind} keeps {sorted(expected)}; load a checkpoint of the same kind of "
                    "optimizer."
                )
            _check_shapes(name, p, found, part)
            _keep_numbers(found, state_dict["state"].get(index, {}), part)


def _check_shapes(name: str, p: Tensor, found: dict[str, Any], tx: Leafwise) -> None:
    like = torch.empty(p.shape, dtype=p.dtype, device="meta")
    for link, keys in zip(tx.links, tx.layout.slots, strict=True):
        for key, slot in zip(keys, init_slots(link, like), strict=True):
            loaded = found.get(key)
            if slot is None or loaded is None:
                continue
            if not isinstance(loaded, Tensor) or loaded.shape != slot.shape:
                shape = tuple(loaded.shape) if isinstance(loaded, Tensor) else repr(loaded)
                raise ValueError(
                    f"the loaded {key} of parameter {name} has shape {shape}, but the parameter "
                    f"needs {tuple(slot.shape)}; load a checkpoint of this model."
                )


def _keep_all(found: dict[str, Any], saved: dict[str, Any]) -> None:
    """The state of a transformation of whole trees as it was saved."""
    for key, x in found.items():
        old = saved.get(key)
        if isinstance(old, Tensor) and isinstance(x, Tensor) and old.dtype is not x.dtype:
            found[key] = old.to(x.device) if torch.equal(old.to(x), x) else x


def _keep_numbers(found: dict[str, Any], saved: dict[str, Any], tx: Leafwise) -> None:
    """Carried numbers as they were saved: torch casts them to the parameter's dtype."""
    for keys in tx.layout.carry:
        for key in keys:
            x, old = found.get(key), saved.get(key)
            if isinstance(x, Tensor) and x.dtype is not numeric.storage_dtype():
                unhooked = isinstance(old, Tensor) and torch.equal(old.to(x), x)
                found[key] = owned(numeric.stored(old if unhooked else x, x.device))
