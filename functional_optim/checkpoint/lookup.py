"""Access to a state by name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.core import base, sharding
from functional_optim.core.lift import State


def get(state: Any, *names: str) -> Any:
    """A hyperparameter, a scalar or a slot of a state, by name.

    Args:
        state: of a chain, or of anything that contains such states.
        names: the name of a hyperparameter (`"lr"`: its value at the last step, or, before the
            first step, at the first), of a carried scalar, or of a slot (a tree like the
            parameters); and the path of a leaf, before or after a slot's name, for only that leaf's
            slot. If two parts of a chain use one name, prefix it: `"muon.lr"`, by the label in a
            `partition`, the name in a `named_chain`, or the index in a state that is a tuple, from
            `"0.lr"` on.

    Returns:
        A 0-dim tensor (float64 for a hyperparameter), a tuple of them for several such as `betas`,
        a tree for a slot, or one tensor of it.

    Raises:
        KeyError: for a name that the state does not have, or has more than once: it lists the known
            names.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(lr=0.1))
        >>> state = tx.init({"w": torch.ones(2)})
        >>> fo.get(state, "lr").item(), fo.get(state, "w", "exp_avg")
        (0.1, tensor([0., 0.]))
    """
    if isinstance(state, torch.optim.Optimizer):
        raise TypeError(
            f"get takes the state of a transformation, but got a {type(state).__name__}; an "
            "optimizer object has its slots in opt.state[p], and its hyperparameters in "
            "opt.param_groups."
        )
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"get takes names, but got {name!r}; pass strings, such as 'lr'.")
    found = entries_of(state)
    if len(names) == 1:
        return _one(found, names[0])
    if len(names) != 2:
        raise TypeError("get takes the name of a value, or that of a slot and the path of a leaf.")
    paths: list[str] = []
    for slot, path in (names, names[::-1]):
        if any(_fits(key, slot) for key in found):
            leaves = dict(tree.items(_one(found, slot)))
            if path in leaves:
                return leaves[path]
            paths += [repr(x) for x in leaves]
    raise KeyError(
        f"the state has no slot for {names[0]!r} and {names[1]!r}; it has {_listed(found)}"
        + (f", and the slot has leaves at {', '.join(paths)}." if paths else ".")
    )


def numbers(state: Any, *names: str) -> dict[str, float]:
    """All scalars of a state, read at once, for logging.

    These are the count of steps, hyperparameters, carried scalars, and slots with one scalar for
    each leaf, such as those of `monitor(per_tensor=True)`. An optimizer object has a method of this
    name. The state of an ensemble, made under torch.vmap, has vectors instead of scalars: use
    `get`.

    Args:
        state: of a chain, or of anything that contains such states.
        names: those to read, by name as in `get`. Default: all.

    Returns:
        Python floats by name; for a slot by name and path, as in `"cosine/layer.weight"`. Reading
        synchronizes once with each device that has such scalars.

    Raises:
        KeyError: for a name without a scalar: it lists the known names.

    Example::

        >>> import torch, functional_optim as fo
        >>> watch = {"cosine": fo.measures.cosine}
        >>> tx = fo.monitor(watch, around=fo.sgd(lr=0.5), per_tensor=True)
        >>> w = {"w": torch.zeros(2)}
        >>> u, state = tx.update({"w": torch.ones(2)}, tx.init(w), w)
        >>> fo.numbers(state)
        {'step': 1.0, 'lr': 0.5, 'cosine/w': 1.0}
    """
    other = not isinstance(state, (tuple, list, dict, Tensor))
    if other or isinstance(state, base.GradientTransformation):
        raise TypeError(
            f"numbers reads the state of a transformation, but got a {type(state).__name__}; of an "
            "optimizer object of functional_optim.adapters call the method, opt.numbers()."
        )
    return read(single(entries_of(state)), names)


def single(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars among the entries of a state, those of a slot by name and path."""
    found: dict[str, Any] = {}
    for key, entry in entries.items():
        leaves = list(tree.items(entry))
        if all(isinstance(x, Tensor) and x.dim() == 0 for _, x in leaves):
            found.update({f"{key}/{path}" if path else key: x for path, x in leaves})
    return found


def read(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """The values of scalars, under these names or all. Synchronizes once with each device.

    Raises:
        KeyError: for a name without a scalar.
    """
    chosen = list(found)
    if names:
        each = [[key for key in found if _fits(key.split("/", 1)[0], name)] for name in names]
        for name, mine in zip(names, each, strict=True):
            if not mine:
                known = dict.fromkeys([key.split("/", 1)[0] for key in found])
                raise KeyError(f"the state has no scalar called {name!r}; it has {_listed(known)}.")
        chosen = list(dict.fromkeys([key for mine in each for key in mine]))
    values = {key: found[key] for key in chosen}
    devices: dict[torch.device, list[str]] = {}
    for key, x in values.items():
        if isinstance(x, Tensor):
            devices.setdefault(x.device, []).append(key)
    for mine in devices.values():
        wide = [sharding.whole(values[key].detach()).to(torch.float64) for key in mine]
        values.update(zip(mine, torch.stack(wide).tolist(), strict=True))
    return {key: float(x) for key, x in values.items()}


def keys(state: Any, name: str) -> list[str]:
    """All values of a state under a name, by the keys that `get` lists."""
    return [key for key in entries_of(state) if _fits(key, name)]


def _one(found: dict[str, Any], name: str) -> Any:
    matches = [key for key in found if _fits(key, name)]
    exact = [key for key in matches if key == name]
    if exact or len(matches) == 1:
        return found[(exact or matches)[0]]
    each = [[key for key in found if _fits(key, f"{name}.{i}")] for i in range(len(found))]
    each = list(itertools.takewhile(len, each))
    if not matches and len(each) > 1 and all(len(keys) == 1 for keys in each):
        return tuple([found[key] for (key,) in each])
    several = matches or (each[0] if each else [])
    if several:
        raise KeyError(f"the state has several values called {name!r}: {', '.join(several)}.")
    raise KeyError(f"the state has no value called {name!r}; it has {_listed(found)}.")


def _fits(key: str, name: str) -> bool:
    """Whether a name is a key without some of the words before the last one."""
    words, wanted = key.split("."), name.split(".")
    if words[-len(wanted) :] == wanted:
        return True
    rest = iter(words)
    return len(wanted) > 1 and words[-1] == wanted[-1] and all(word in rest for word in wanted)


def entries_of(state: Any) -> dict[str, Any]:
    """All values of a state, by name; equal names of two parts are prefixed with their places.

    The hyperparameters of a wrapper, such as `with_schedule`, come before those of its parts.
    Snapshots of past states are left out.
    """
    if isinstance(state, State):
        return {"step": state.step, **state.hyper, **state.carry, **_whole(state.slots)}
    if isinstance(state, Tensor) or state is None:
        return {}
    fields = getattr(state, "_fields", None)
    if fields is not None:
        pairs = zip(fields, state, strict=True)
    elif isinstance(state, dict):
        pairs = state.items()
    elif isinstance(state, (tuple, list)):
        pairs = zip(map(str, range(len(state))), state, strict=True)
    else:
        return {}
    parts = [(str(name), value, entries_of(value)) for name, value in pairs if name != "past"]
    keys = [key for _, _, inner in parts for key in inner]
    found: dict[str, Any] = {}
    for name, value, inner in parts:
        if isinstance(value, Tensor):
            found[name] = value
        for key, x in inner.items():
            found[key if name == "hyper" or keys.count(key) == 1 else f"{name}.{key}"] = x
    return found


def _whole(slots: dict[str, Any]) -> dict[str, Any]:
    """The slots of a state, with leaves packed in bfloat16 next to those that are whole."""
    found = dict(slots)
    for key in [key for key in slots if f"{key}.bfloat16" in slots]:
        pair = slots[key], slots[f"{key}.bfloat16"]
        found[key] = optree.tree_map(lambda x, y: y if x is None else x, *pair, none_is_leaf=True)
    return found


def _listed(found: dict[str, Any]) -> str:
    return ", ".join(found) if found else "none"
