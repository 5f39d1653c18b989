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
                found = optimizer.state.get(p, {})
                for key, x in state_dict["state"].get(index, {}).items():
                    if isinstance(found.get(key), Tensor):
                        found[key] = _uncast(found[key], x)
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
            saved_state = state_dict["state"].get(index, {})
            _check_slots(name, p, found, saved_state, part)
            _keep_numbers(found, saved_state, part)


def _check_slots(
    name: str, p: Tensor, found: dict[str, Any], saved: dict[str, Any], tx: Leafwise
) -> None:
    """Shapes are right; what has a dtype of its own keeps it, where torch casts to p's."""
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
            if loaded.dtype is not slot.dtype:
                found[key] = _uncast(loaded, saved.get(key)).to(slot.dtype)


def _keep_numbers(found: dict[str, Any], saved: dict[str, Any], tx: Leafwise) -> None:
    """Carried numbers as they were saved: torch casts them to the parameter's dtype."""
    for keys in tx.layout.carry:
        for key in keys:
            x, old = found.get(key), saved.get(key)
            if isinstance(x, Tensor) and x.dtype is not numeric.storage_dtype():
                found[key] = owned(numeric.stored(_uncast(x, old), x.device))


def _uncast(loaded: Tensor, saved: Any) -> Tensor:
    """A tensor as it was saved, unless a hook has put another value into the state."""
    if isinstance(saved, Tensor) and torch.equal(saved.to(loaded), loaded):
        return saved.to(loaded.device)
    return loaded
