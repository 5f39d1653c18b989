"""What a loaded state dict must be, and what torch's loading does to it that ours must not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functional_optim import numeric, sharded, tree
from functional_optim.adapters.names import check_names, named, place
from functional_optim.adapters.numbers import owned
from functional_optim.adapters.recipes import has_none, is_code, with_code
from functional_optim.fitting import described, in_lines, listed, misfit, not_a_number
from functional_optim.leafwise import Leafwise
from functional_optim.rules import init_slots

if TYPE_CHECKING:
    from functional_optim.adapters.optimizer import Runs


def load_checked(optimizer: Runs, load: Callable[[Any], None], state_dict: Any) -> None:
    """Load a state dict with torch's own function, and check what it was and what came of it.

    Hooks of the user come first: what they return is checked.

    Raises:
        ValueError, TypeError: naming the parameters that do not fit. The optimizer is as it was.
    """
    check_dict(state_dict)
    before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    groups = [dict(group) for group in optimizer.param_groups]
    keys = [set(group) for group in groups]
    given: dict[str, Any] = {}

    def check(_: Any, final: dict[str, Any]) -> None:
        check_form(optimizer, final)
        given.update(final)

    handle = optimizer.register_load_state_dict_pre_hook(check)
    try:
        with warnings.catch_warnings():  # what torch casts first is put right, or refused
            warnings.filterwarnings("ignore", "Casting complex values to real")
            load(state_dict)
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            if own.get("param_names"):
                group["param_names"] = own["param_names"]
            for name, x in own.items():
                if name in group or is_code(x):
                    group[name] = with_code(group.get(name), x)
        optimizer.check_loaded(given, keys)
    except BaseException:
        optimizer.__dict__.update(before)
        raise
    finally:
        handle.remove()


def check_dict(state_dict: Any) -> None:
    """Raise TypeError for what is no dict at all."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"load_state_dict takes what an optimizer's state_dict() returned, but got a "
            f"{type(state_dict).__name__}."
        )


def check_form(optimizer: Runs, given: Mapping[str, Any]) -> None:
    """Raise ValueError unless a state dict has this optimizer's groups and parameters."""
    for name in ("param_groups", "state"):
        if name not in given:
            has = listed([repr(key) for key in given]) or "nothing"
            flat = any(str(key).startswith(f"{name}.") for key in given)
            advice = (
                "it is flattened, so load it with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
                if flat
                else "pass what an optimizer's state_dict() returned"
            )
            raise ValueError(f"the loaded state dict has no {name!r} (it has {has}); {advice}.")
    state, saved = given["state"], given["param_groups"]
    if not isinstance(state, Mapping) or not all(isinstance(x, Mapping) for x in state.values()):
        raise ValueError(
            "the 'state' of the loaded state dict must be a dict with a dict for each parameter; "
            "pass what an optimizer's state_dict() returned."
        )
    whole = isinstance(saved, (list, tuple))
    if not whole or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple))
        for group in saved
    ):
        raise ValueError(
            "the 'param_groups' of the loaded state dict must be a list of dicts that have "
            "'params'; pass what an optimizer's state_dict() returned."
        )
    groups = optimizer.param_groups
    if len(groups) != len(saved):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(saved)}, but the "
            f"optimizer has {len(groups)}; build the same groups."
        )
    for k, (mine, theirs) in enumerate(zip(groups, saved, strict=True)):
        check_names(k, mine, theirs)
        if len(mine["params"]) != len(theirs["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of "
                f"optimizer's group: group {k} has {len(theirs['params'])} parameters, but the "
                f"optimizer's has {len(mine['params'])}; load a checkpoint of this model."
            )
    if optimizer.counts_steps:
        _refuse(
            [
                f"step of parameter {place(mine, k, i)} {why}"
                for k, (mine, theirs) in enumerate(zip(groups, saved, strict=True))
                for i, index in enumerate(theirs["params"])
                if "step" in (raw := state.get(index, {}))
                and (why := not_a_number(raw["step"], whole=True))
            ]
        )


def check_loaded(optimizer: Runs, given: Mapping[str, Any], before: list[set[str]]) -> None:
    """Check groups and state after a load, and undo torch's casts of what is not like a parameter.

    before: the names of each group's hyperparameters before the load.

    Raises:
        ValueError: naming the parameters, and what each has against what it needs.
    """
    faults: list[str] = []
    for k, (group, saved) in enumerate(
        zip(optimizer.param_groups, given["param_groups"], strict=True)
    ):
        try:
            tx = optimizer.checked_transform(group, in_step=True)
        except KeyError as missing:
            raise ValueError(
                f"the loaded parameter groups have no {missing}, which "
                f"{type(optimizer).__name__} needs; load a checkpoint of the same kind of "
                "optimizer."
            ) from None
        except TypeError as error:
            empty = listed([name for name, x in saved.items() if has_none(x)]) or "nothing"
            raise ValueError(
                f"the loaded hyperparameters of group {k} make no transformation: {error} None was "
                f"saved for {empty}; it "
                "stands where a schedule or another function was, which is code and not saved. "
                "Pass one to this optimizer, or put a number into the loaded groups."
            ) from None
        if not isinstance(tx, Leafwise):
            faults += _check_whole(optimizer, k, tx, saved, given["state"])
            continue
        strange = saved.keys() - before[k] - {"params", "param_names"}
        other = strange and before[k] - saved.keys()
        for i, ((path, p), index) in enumerate(zip(named(group), saved["params"], strict=True)):
            found, part = optimizer.state.get(p), tx.on(path, p)
            if not found or part is None:
                continue
            raw = given["state"].get(index, {})
            new = _check_parameter(optimizer, p, found, raw, part, bool(other))
            faults += [fault.format(f"parameter {place(group, k, i)}") for fault in new]
    _refuse(faults)


def _refuse(faults: list[str]) -> None:
    if faults:
        divided = any("a DTensor" in fault for fault in faults)
        advice = (
            "Save and load it through torch.distributed.checkpoint, which divides it anew."
            if divided
            else "Load a checkpoint of this model and of the same kind of optimizer."
        )
        raise ValueError(f"the loaded state does not fit:{in_lines(faults)}\n{advice}")


def _check_parameter(
    optimizer: Runs,
    p: Tensor,
    found: dict[str, Any],
    raw: Mapping[str, Any],
    tx: Leafwise,
    other: bool,
) -> list[str]:
    """Faults in one parameter's state, {} for its name; puts right what torch has cast.

    other: are the hyperparameters those of another algorithm?
    """
    numbers = [key for keys in tx.layout.carry for key in keys]
    expected = {*numbers, *tx.layout.keys}
    unknown = found.keys() - expected - {"step"}
    if (expected and expected.isdisjoint(found)) or (other and unknown):
        keeps = f"{type(optimizer).__name__} keeps {sorted(expected)}"
        return [f"{{}} has the slots {sorted(map(str, found))}, but {keeps}"]
    faults: list[str] = []
    if optimizer.counts_steps and "step" in found:
        found["step"] = _as_count(found["step"], optimizer.integer_steps)
    for key in numbers:
        x = unrounded(found.get(key), raw.get(key))
        why = not_a_number(x, whole=False) if key in found else None
        if why:
            faults.append(f"{key} of {{}} {why}")
        elif key in found and getattr(found[key], "dtype", None) is not numeric.storage_dtype():
            found[key] = owned(numeric.stored(x, getattr(x, "device", None)))
    like = torch.empty(p.shape, dtype=p.dtype, device="meta")
    for link, keys in zip(tx.links, tx.layout.slots, strict=True):
        for key, slot in zip(keys, init_slots(link, like), strict=True):
            x = unrounded(found.get(key), raw.get(key))
            if slot is None or x is None:
                continue
            why = misfit(x, slot)
            if why is None and not isinstance(x, Tensor):
                why = f"is a {described(x)}, but it needs a tensor"
            if why is None and (link.flat or sharded.is_sharded(x)) and x.dim() == p.dim() > 0:
                why = sharded.misplaced(x, p)
            if why:
                faults.append(f"{key} of {{}} {why}")
            elif found[key].dtype is not slot.dtype:
                found[key] = x.to(slot.dtype)
    return [fault if "{}" in fault else fault + " of {}" for fault in faults]


def _as_count(step: Any, integer: bool) -> Any:
    """A step count as the optimizer keeps it."""
    if integer:
        return int(step)
    return step if isinstance(step, Tensor) else owned(numeric.stored(float(step)))


def _check_whole(
    optimizer: Runs, k: int, tx: Any, saved: Mapping[str, Any], state: Mapping[Any, Any]
) -> list[str]:
    """Faults in the state of a group that is stepped as one tree."""
    group = optimizer.param_groups[k]
    for p, index in zip(group["params"], saved["params"], strict=True):
        found = optimizer.state.get(p)
        if found:
            raw = state.get(index, {})
            found.update({key: unrounded(x, raw.get(key)) for key, x in found.items()})
    kept = optimizer.state.get(group["params"][0]) if group["params"] else None
    if not kept or not optimizer.keeps_trees:
        return []
    values = dict(named(group)) if group.get("param_names") else list(group["params"])
    with torch.no_grad():
        like = dict(tree.items(tx.init(tree.map(torch.Tensor.detach, values))))
    where = f"parameter {place(group, k, 0)}, with which the state of its group is kept,"
    if like and like.keys().isdisjoint(kept):
        return [f"{where} has {listed(sorted(map(str, kept)))}, but needs {listed(sorted(like))}"]
    why = {key: misfit(kept[key], like[key]) for key in like.keys() & kept.keys()}
    return [f"{key} of {where} {fault}" for key, fault in sorted(why.items()) if fault]


def unrounded(loaded: Any, saved: Any) -> Any:
    """What was saved, wherever loading has done no more to it than cast it.

    torch's loading casts all state to the dtype of its parameter. What a hook has changed beside
    that stays as it is. Dicts, lists and tuples are gone through.
    """
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        if loaded.dtype is saved.dtype or loaded.shape != saved.shape:
            return loaded
        return saved.to(loaded.device, copy=True) if _equal(saved, loaded) else loaded
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        return {key: unrounded(x, saved.get(key)) for key, x in loaded.items()}
    sequences = isinstance(loaded, (list, tuple)) and isinstance(saved, (list, tuple))
    if sequences and len(loaded) == len(saved):
        return type(loaded)([unrounded(x, y) for x, y in zip(loaded, saved, strict=True)])
    return loaded


def _equal(saved: Tensor, loaded: Tensor) -> bool:
    """Is one the other, cast? Parts that this process has of a divided tensor, NaN included."""
    a, b = (sharded.part(x.detach()) for x in (saved, loaded))
    if a.is_complex() and not b.is_complex():
        a = a.real
    return torch.equal(a.to(b).nan_to_num(), b.nan_to_num())
