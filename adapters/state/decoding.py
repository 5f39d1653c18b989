"""Packed slots in a state dict, decoded under torch's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from functional_optim.adapters.state.names import named, place
from functional_optim.checkpoint.conversion import converted
from functional_optim.checkpoint.errors import refuse
from functional_optim.core.cells import CELLS
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.storage import slots_like

if TYPE_CHECKING:
    from functional_optim.adapters.base import OptimizerBase


def decode_slots(optimizer: OptimizerBase, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict with each packed slot whole, in float32, under torch's own key.

    `opt.state_dict(decoded=True)` returns this. As a hook it serves whatever calls `state_dict` by
    itself: `opt.register_state_dict_post_hook(adapters.decode_slots)` for trainers, and for
    `get_optimizer_state_dict`, so that a checkpoint can be loaded by other numbers of processes.
    Loading packs the slots again.

    Args:
        optimizer: whose state it is.
        state_dict: what its `state_dict()` returned. It is not changed.

    Raises:
        ValueError: if it is packed, and of a group whose transformation works on whole trees, or
            if it does not fit.

    Example::

        >>> import torch, functional_optim as fo
        >>> from functional_optim import adapters
        >>> p = torch.nn.Parameter(torch.ones(64, 64))
        >>> opt = adapters.Optimizer([("hidden", p)], lambda: fo.stored(fo.lion(), "int8"))
        >>> p.grad = torch.ones(64, 64)
        >>> opt.step()
        >>> hook = opt.register_state_dict_post_hook(adapters.decode_slots)
        >>> list(opt.state[p]), list(opt.state_dict()["state"][0])
        (['step', 'exp_avg.int8', 'exp_avg.scale'], ['step', 'exp_avg'])
    """
    state, faults = dict(state_dict["state"]), list[str]()
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    for k, (group, saved) in enumerate(groups):
        tx = optimizer.checked_transform(group, in_step=True)
        for i, ((path, p), index) in enumerate(zip(named(group), saved["params"], strict=True)):
            found = state.get(index)
            if not found:
                continue
            if not isinstance(tx, Leafwise):
                _check_whole(k, found)
                continue
            part = tx.on(path, p)
            if part is not None:
                state[index], strange = converted(found, _whole(part, path, p))
                where = place(group, k, i)
                faults += [f"{key} of parameter {where} {x}" for key, x in strange.items()]
    refuse("the state", faults, "pass what the optimizer's own state_dict() returned")
    return {**state_dict, "state": state}


def _whole(tx: Leafwise, path: str, p: Tensor) -> dict[str, tuple[Any, Tensor]]:
    """What a parameter's slots are like where none is packed."""
    found: dict[str, tuple[Any, Tensor]] = {}
    for placement, keys in zip(tx.placements, tx.layout.slots, strict=True):
        rule = placement.rule.without_codecs()
        like = dict(zip(rule.keys, slots_like(rule, p, path), strict=True))
        for key, own in zip(keys, placement.rule.keys, strict=True):
            if like.get(own) is not None:
                found[key] = (like[own], p)
    return found


def _check_whole(k: int, found: Mapping[str, Any]) -> None:
    packed = [key for key in found if not CELLS.keys().isdisjoint(str(key).split("."))]
    if packed:
        raise ValueError(
            f"group {k} has a transformation of whole trees, of which {packed[0]} is packed; only "
            "recipes made of one-tensor rules can be decoded. Save it as it is."
        )
