"""Loading of state dicts: checks, corrections of torch's casts, and conversion of packed slots."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.adapters.state.names import check_names, named, place
from functional_optim.adapters.state.places import KEPT, remember
from functional_optim.adapters.state.recipes import has_none, is_code, with_code
from functional_optim.adapters.state.storage import OWN
from functional_optim.adapters.state.templates import Templates
from functional_optim.adapters.state.transaction import transaction
from functional_optim.adapters.stepping.columns import Readings, owned
from functional_optim.adapters.stepping.shared_counts import STEPS, SharedCounts
from functional_optim.checkpoint.conversion import converted, is_packed, restore_precision
from functional_optim.checkpoint.errors import described, listed, misfit, not_a_number, refuse
from functional_optim.checkpoint.state_dict import Entry, without_value
from functional_optim.core import base, sharding
from functional_optim.core.cells import CELLS, WEIGHT_SLOTS
from functional_optim.core.first_slots import slots_like
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.paths import subtree
from functional_optim.core.storage import at_home

if TYPE_CHECKING:
    from functional_optim.adapters.base import OptimizerBase


TRAINING = "train_mode"
"""The key of a parameter group for the mode of its parameters."""


def load_checked(optimizer: OptimizerBase, load: Callable[[Any], None], state_dict: Any) -> None:
    """Load a state dict with torch's function, and check the dict and the result.

    Hooks of the user run first: their result is checked.

    Raises: ValueError, TypeError: naming the parameters that do not fit. The optimizer is then
    unchanged.
    """
    check_dict(state_dict)
    hooks: tuple[Any, ...] = (
        optimizer._optimizer_load_state_dict_pre_hooks,
        optimizer._optimizer_load_state_dict_post_hooks,
    )
    before = [dict(x) for x in hooks]
    try:
        transaction(optimizer, _load, optimizer, load, state_dict)
    except BaseException:
        for mine, old in zip(hooks, before, strict=True):  # a hook may have removed itself
            mine.clear()
            mine.update(old)
        raise


def _load(optimizer: OptimizerBase, load: Callable[[Any], None], state_dict: Any) -> None:
    groups = [dict(group) for group in optimizer.param_groups]
    given: dict[str, Any] = {}
    hooks = optimizer._optimizer_load_state_dict_pre_hooks

    def check(_: Any, final: dict[str, Any]) -> dict[str, Any]:
        optimizer._optimizer_load_state_dict_pre_hooks = hooks
        for hook in list(hooks.values()):  # a hook may remove itself
            changed = hook(optimizer, final)
            final = final if changed is None else changed
        check_form(optimizer, final)
        given.update(final)
        state = final["state"]
        own = {key: x for key, x in state.items() if isinstance(x, Mapping)}
        hold = _held if any(map(is_packed, set().union(*own.values()))) else dict
        return {**final, "state": {**state, **{key: hold(x) for key, x in own.items()}}}

    def release(_: Any) -> None:
        for p, mine in optimizer.state.items():
            if isinstance(mine, dict):  # others keep their own entries here, too
                mine.update({key: x.on(p) for key, x in mine.items() if isinstance(x, _Held)})

    optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict({0: check})
    handle = optimizer.register_load_state_dict_post_hook(release, prepend=True)
    try:
        with warnings.catch_warnings():  # torch's casts are corrected, or raise errors
            warnings.filterwarnings("ignore", "Casting complex values to real")
            load(state_dict)
    finally:
        optimizer._optimizer_load_state_dict_pre_hooks = hooks
        handle.remove()
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        if own.get("param_names"):
            group["param_names"] = own["param_names"]
        for name in OWN:  # wrappers that save their groups have them
            group.pop(name, None)
        for name, x in own.items():
            if name in OWN:
                group[name] = x
            elif name in group or is_code(x):
                group[name] = with_code(group.get(name), x)
    vars(optimizer).pop(KEPT, None)
    optimizer.check_loaded(given, [set(group) for group in groups])


class _Held:
    """Codes of a packed slot. torch would cast them to the dtype of the parameter, which takes four
    times their memory, for all parameters at once."""

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    def on(self, p: Any) -> Tensor:
        """The codes on the device of their parameter; without a copy if they are already there, as
        torch does for all tensors that need no cast."""
        return self.codes.to(getattr(p, "device", self.codes.device))


def _held(mine: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter, with codes that torch does not cast."""
    return {
        key: _Held(x) if isinstance(x, Tensor) and is_packed(key) else x for key, x in mine.items()
    }


def check_dict(state_dict: Any) -> None:
    """Raise TypeError unless it is a dict."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"load_state_dict takes what an optimizer's state_dict() returned, but got a "
            f"{type(state_dict).__name__}."
        )


def check_form(optimizer: OptimizerBase, given: Mapping[str, Any]) -> None:
    """Raise ValueError unless a state dict has this optimizer's groups and parameters."""
    for name in ("param_groups", "state"):
        if name not in given:
            has = listed([repr(key) for key in given]) or "nothing"
            flat = any(str(key).startswith(f"{name}.") for key in given)
            advice = (
                "it is flattened, so load it with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, without "
                "broadcast_from_rank0, which torch supports for nested dicts only"
                if flat
                else "pass what an optimizer's state_dict() returned"
            )
            raise ValueError(f"the loaded state dict has no {name!r} (it has {has}); {advice}.")
    state, saved = given["state"], given["param_groups"]
    whole = isinstance(saved, (list, tuple))
    if not whole or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple))
        for group in saved
    ):
        raise ValueError(
            "the 'param_groups' of the loaded state dict must be a list of dicts that have "
            "'params'; pass what an optimizer's state_dict() returned."
        )
    ids = [index for group in saved for index in group["params"]]
    if not isinstance(state, Mapping) or not all(
        isinstance(state.get(index, {}), Mapping) for index in ids
    ):
        raise ValueError(
            "the 'state' of the loaded state dict must be a dict with a dict for each parameter; "
            "pass what an optimizer's state_dict() returned."
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
    lost = [key for key in state.keys() - set(ids) if str(key).isdecimal()]
    if lost:
        raise ValueError(
            f"the loaded state has entries for {listed(sorted(map(repr, lost)))}, which no group "
            f"lists among its 'params' ({listed(map(repr, ids)) or 'nothing'}); the keys of "
            "'state' must be those in 'params' (JSON makes strings of numbers)."
        )
    faults: list[str] = []
    for k, (mine, theirs) in enumerate(zip(groups, saved, strict=True)):
        for i, (p, index) in enumerate(zip(mine["params"], theirs["params"], strict=True)):
            raw = state.get(index, {})
            for key, x in raw.items():
                fault = _no_tensor(x, p)
                if not fault and key == "step" and optimizer.counts_steps:
                    fault = not_a_number(x, whole=True)
                if fault:
                    faults.append(f"{key} of parameter {place(mine, k, i)} {fault}")
    _refuse(faults)


def _no_tensor(x: Any, p: Tensor) -> str | None:
    """Why a saved value cannot be loaded for p, as "is …"; None if it may."""
    if isinstance(x, Tensor):
        return None if p.is_meta else without_value(x)
    numpy = type(x).__name__ == "ndarray"
    return "is a numpy array, but it needs a tensor" if numpy else None


def check_loaded(
    optimizer: OptimizerBase, given: Mapping[str, Any], before: list[set[str]]
) -> None:
    """Check groups and state after a load, and undo torch's casts of values that are not like a
    parameter.

    before: the names of each group's hyperparameters before the load.

    Raises:
        ValueError: naming the parameters, and for each what it has and what it needs.
    """
    faults: list[str] = []
    chains: list[tuple[int, Leafwise]] = []
    templates = Templates()
    states = [x for x in given["state"].values() if isinstance(x, Mapping)]
    counted = optimizer.counts_steps and any("step" in mine for mine in states)
    one_mode = not hasattr(optimizer, "train") and TRAINING not in optimizer.defaults
    pairs = zip(optimizer.param_groups, given["param_groups"], strict=True)
    for k, (group, saved) in enumerate(pairs):
        if not saved.get(TRAINING, True) and one_mode:
            raise ValueError(
                "the loaded state was saved in evaluation mode, in which the parameters are "
                f"averages, and {type(optimizer).__name__} has no train(), which restores those of "
                "training; load it into adapters.AveragingOptimizer, or call train() before you "
                "save model and optimizer."
            )
        try:
            tx = optimizer.checked_transform(group, in_step=True)
        except KeyError as missing:
            names = listed([repr(name) for name in optimizer.defaults if name not in group])
            raise ValueError(
                f"the loaded parameter groups have no {names or missing}, which "
                f"{type(optimizer).__name__} needs; load a checkpoint of the same kind of "
                "optimizer."
            ) from None
        except TypeError as error:
            empty = listed([name for name, x in saved.items() if has_none(x)]) or "nothing"
            raise ValueError(
                f"the loaded hyperparameters of group {k} do not give a transformation: {error} "
                f"None was saved for {empty}; it replaces a schedule or another function, which is "
                "code and not saved. Pass one to this optimizer, or put a number into the loaded "
                "groups."
            ) from None
        if not isinstance(tx, Leafwise):
            faults += _check_whole(optimizer, k, tx, saved, given["state"])
            continue
        chains.append((k, tx))
        strange = saved.keys() - before[k] - {"params", "param_names"}
        other = strange and before[k] - saved.keys()
        for i, ((path, p), index) in enumerate(zip(named(group), saved["params"], strict=True)):
            found, part = optimizer.state.get(p), tx.on(path, p)
            if not found or part is None:
                continue
            raw = given["state"].get(index, {})
            new = _check_parameter(optimizer, path, p, found, raw, part, templates, bool(other))
            if counted and "step" not in found and not found.keys().isdisjoint(part.layout.keys):
                new.append("{} has slots, but no step, which other parameters have")
            faults += [fault.format(f"parameter {place(group, k, i)}") for fault in new]
    _refuse(faults)
    for k, tx in chains:
        away = any(rule.storage.home is not None for rule, _, _ in tx.rules)
        for path, p in named(optimizer.param_groups[k]) if away else ():
            _send_home(optimizer.state.get(p, {}), tx.on(path, p))
    counts = SharedCounts(optimizer, chains)
    counts.gather()
    base.unrecorded(counts.agree, Readings())
    counts.forget()


def _refuse(faults: list[str]) -> None:
    advice = "load a checkpoint of this model and of the same kind of optimizer"
    if any("a DTensor" in fault for fault in faults):
        advice = "save and load it through torch.distributed.checkpoint, which reshards it"
    refuse("the loaded state", faults, advice)


def _check_parameter(
    optimizer: OptimizerBase,
    path: str,
    p: Tensor,
    found: dict[str, Any],
    raw: Mapping[str, Any],
    tx: Leafwise,
    templates: Templates,
    other: bool,
) -> list[str]:
    """Faults in one parameter's state, with {} for its name; corrects torch's casts.

    raw: the state before them. other: whether the hyperparameters belong to another algorithm.
    """
    if isinstance(found.get(STEPS), dict):  # torch's {}, if a flat dict of 0.2.0 has no such key
        del found[STEPS]
    entries, needed, plain = templates.of(tx, p, path, found)
    if optimizer.counts_steps and plain and _is_exact(found, raw, needed):
        found.update({key: x.clone() for key, x in found.items() if key != "step"})
        found["step"] = _as_count(found["step"], optimizer.integer_steps)
        return []
    carried = tx.carried
    slots = {key: x for key, x in found.items() if key not in {*carried, "step", STEPS}}
    slots = {key: restore_precision(x, raw.get(key)) for key, x in slots.items()}
    new, wrong = converted(slots, {key: (x, p) for key, x in needed.items()})
    if wrong:
        return [f"{name} of {{}} {why}" for name, why in wrong.items()]
    for key in slots:
        del found[key]
    found.update(new)
    faults: list[str] = []
    expected = {*carried, *tx.layout.keys}
    unknown = found.keys() - expected - {"step", STEPS}
    other = other or any(str(key).split(".")[-1] in WEIGHT_SLOTS for key in unknown)
    here = {*carried, *needed}  # without slots that are None for this parameter
    if (here and here.isdisjoint(found)) or (other and unknown):
        keeps = f"{type(optimizer).__name__} keeps {sorted(expected)}"
        return [f"{{}} has the slots {sorted(map(str, found))}, but {keeps}"]
    if optimizer.counts_steps and "step" in found:
        found["step"] = _as_count(found["step"], optimizer.integer_steps)
    for key, entry, beside in entries:
        if key not in found or (found[key] is None and not entry.number):
            continue
        x = restore_precision(found[key], raw.get(key)) if entry.number else found[key]
        why = entry.misfit(x) or (None if entry.number else _misplaced(x, p, beside))
        if why:
            faults.append(f"{key} of {{}} {why}")
        else:
            found[key] = _as_kept(found[key], x, entry)
    return faults


def _is_exact(
    found: Mapping[str, Any], raw: Mapping[str, Any], needed: Mapping[str, Tensor]
) -> bool:
    """Whether a state has a step count and the needed slots, all as they were saved: the usual
    case, in which nothing is converted."""
    if len(found) != len(needed) + 1 or "step" not in found:
        return False
    for key, like in needed.items():
        x = found.get(key)
        if type(x) is not Tensor or x is not raw.get(key):
            return False
        if x.dtype is not like.dtype or x.shape != like.shape or x.layout is not like.layout:
            return False
    return True


def _send_home(found: dict[str, Any], tx: Leafwise | None) -> None:
    """Move the slots of one parameter into their memory."""
    for rule, keys, _ in tx.rules if tx else ():
        if rule.storage.home is not None:
            kept = at_home(rule, tuple([found.get(key) for key in keys]))
            found.update({key: x for key, x in zip(keys, kept, strict=True) if key in found})


def _misplaced(x: Any, p: Tensor, beside: bool) -> str | None:
    """Why a slot of the right shape cannot be used for p; None if it can."""
    if not isinstance(x, Tensor):
        return f"is a {described(x)}, but it needs a tensor"
    if (beside or sharding.is_sharded(x)) and x.dim() == p.dim() > 0:
        return sharding.misplaced(x, p)
    return None


def _as_kept(loaded: Any, exact: Any, entry: Entry) -> Any:
    """A loaded value in its stored dtype; exact: the value before torch's cast."""
    dtype = numeric.carry_dtype(entry.value) if entry.number else entry.value.dtype
    if getattr(loaded, "dtype", None) is dtype:
        return owned(loaded.reshape(())) if entry.number and loaded.dim() else loaded
    if not entry.number:
        return exact.to(dtype)
    return owned(numeric.stored(exact, getattr(exact, "device", None), dtype=dtype))


def _as_count(step: Any, integer: bool) -> Any:
    """A step count in the format of the optimizer."""
    if integer:
        return int(step)
    if isinstance(step, Tensor) and step.element_size() > 2:
        return step if step.dim() == 0 and step._base is not None else owned(step.reshape(()))
    return owned(numeric.stored(step if isinstance(step, Tensor) else float(step)))


def _check_whole(
    optimizer: OptimizerBase, k: int, tx: Any, saved: Mapping[str, Any], state: Mapping[Any, Any]
) -> list[str]:
    """Faults in the state of a group that is stepped as one tree."""
    group = optimizer.param_groups[k]
    for p, index in zip(group["params"], saved["params"], strict=True):
        found = optimizer.state.get(p)
        if found:
            raw = state.get(index, {})
            found.update({key: restore_precision(x, raw.get(key)) for key, x in found.items()})
    kept = optimizer.state.get(group["params"][0]) if group["params"] else None
    if not kept or not optimizer.keeps_trees:
        return []
    values = dict(named(group)) if group.get("param_names") else list(group["params"])
    with subtree():
        new = base.unrecorded(tx.init, tree.map(torch.Tensor.detach, values))
    like = dict(tree.items(new))
    remember(optimizer, {p: path for path, p in named(group)}, {})
    where = f"parameter {place(group, k, 0)}, with which the state of its group is kept,"
    if like and like.keys().isdisjoint(kept):
        return [f"{where} has {listed(sorted(map(str, kept)))}, but needs {listed(sorted(like))}"]
    why = {key: misfit(kept[key], like[key]) for key in like.keys() & kept.keys()}
    for key, fault in why.items():
        if not (fault or isinstance(kept[key], torch.Tensor)):
            kept[key] = like[key].new_tensor(kept[key])
    return [f"{key} of {where} {fault}" for key, fault in sorted(why.items()) if fault]


def decode_slots(optimizer: OptimizerBase, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict with decoded slots, in float32, under torch's keys.

    `opt.state_dict(decoded=True)` returns this. If other code calls `state_dict`, register it as a
    hook: `opt.register_state_dict_post_hook(adapters.decode_slots)`, for trainers, and for
    `get_optimizer_state_dict`, so that another number of processes can load the checkpoint. Loading
    packs the slots again. Register it with a `FaultTolerantOptimizer` itself: hooks of its inner
    optimizer also change the state that a peer receives, which is then rounded.

    Args:
        optimizer: the optimizer of the state.
        state_dict: the result of its `state_dict()`. It is not changed.

    Raises:
        ValueError: if it is packed and the transformation of its group does not consist of
            one-tensor rules, or if it does not fit.

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
    optimizer = getattr(optimizer, "optim", optimizer)  # the inner one
    state, faults = dict(state_dict["state"]), list[str]()
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    for k, (group, saved) in enumerate(groups):
        tx = optimizer.checked_transform(group, in_step=True)
        for i, ((path, p), index) in enumerate(zip(named(group), saved["params"], strict=True)):
            found = state.get(index)
            if not found:
                continue
            if not isinstance(tx, Leafwise):
                _check_unpacked(k, found)
                continue
            part = tx.on(path, p)
            if part is not None:
                state[index], strange = converted(found, _whole(part, path, p))
                where = place(group, k, i)
                faults += [f"{key} of parameter {where} {x}" for key, x in strange.items()]
    refuse("the state", faults, "pass what the optimizer's state_dict() returned")
    return {**state_dict, "state": state}


def _whole(tx: Leafwise, path: str, p: Tensor) -> dict[str, tuple[Any, Tensor]]:
    """The templates of a parameter's slots without packing."""
    found: dict[str, tuple[Any, Tensor]] = {}
    for rule, keys, _ in tx.rules:
        plain = rule.without_codecs()
        like = dict(zip(plain.keys, slots_like(plain, p, path), strict=True))
        for key, own in zip(keys, rule.keys, strict=True):
            if like.get(own) is not None:
                found[key] = (like[own], p)
    return found


def _check_unpacked(k: int, found: Mapping[str, Any]) -> None:
    packed = [key for key in found if not CELLS.keys().isdisjoint(str(key).split("."))]
    if packed:
        raise ValueError(
            f"group {k} has a transformation of trees, of which {packed[0]} is packed; only "
            "recipes made of one-tensor rules can be decoded. Save it packed."
        )
