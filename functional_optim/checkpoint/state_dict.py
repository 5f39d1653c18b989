"""States as flat dicts, under the keys that torch's own checkpoints have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.checkpoint.conversion import converted
from functional_optim.checkpoint.entries import (
    Entry,
    deciding,
    differences,
    flat,
    lacking,
    refuse,
    without_value,
)
from functional_optim.checkpoint.errors import not_a_number
from functional_optim.core import sharding
from functional_optim.core.lift import State


def state_dict(state: Any, params: Any = None) -> dict[str, Any]:
    """A state as a flat dict of tensors, to be saved.

    The keys are those of torch's flattened optimizer state dicts
    (`torch.distributed.checkpoint.state_dict`, `flatten_optimizer_state_dict`):
    `state.{path}.{slot}` for each parameter, with `step` and carried numbers (float32, as torch
    keeps them) beside its slots. What no parameter has is called by its place in the state, such as
    `seed` of an `EstimatorState`. Where a state holds several chains' states, the place of each
    stands before the slot: `state.{path}.0.exp_avg`. Hyperparameters are not kept: the recipe
    has them.

    Args:
        state: of a transformation, an estimator or a search method, a `ReplicaState`, or any tree
            of them.
        params: the parameters to which it belongs. Not needed where no transformation's state is.

    Returns:
        A dict from keys to the state's own tensors (DTensors are kept as such), and new 0-dim CPU
        tensors for `step` and carried numbers. `torch.load(..., weights_only=True)` reads it.

    Raises:
        ValueError: if the parameters are missing or other ones, two values have one key, or the
            state is on the meta device.
        TypeError: for a value that is neither a tensor nor a number nor a string.

    Example::

        >>> import torch, functional_optim as fo
        >>> params = {"w": torch.ones(2)}
        >>> sorted(fo.state_dict(fo.adamw().init(params), params))
        ['state.w.exp_avg', 'state.w.exp_avg_sq', 'state.w.step']
    """
    if isinstance(params, State) and not isinstance(state, State):
        raise TypeError("state_dict takes the state first: call state_dict(state, params).")
    if isinstance(state, torch.optim.Optimizer):
        raise TypeError(
            f"state_dict takes the state of a transformation, but got a {type(state).__name__}; "
            "call the method of the object, opt.state_dict()."
        )
    found: dict[str, Any] = {}

    def keep(entry: Entry) -> Any:
        why = without_value(entry.value)
        if why:
            raise ValueError(f"{entry.keys[0][0]} {why}; save the state of real parameters.")
        found.update({key: _as_saved(entry) for key, _ in entry.keys})
        return entry.value

    _walked(state, params, keep)
    return found


def load_state_dict(
    state: Any,
    saved: Any,
    params: Any = None,
    *,
    strict: bool = True,
    step: int | None = None,
) -> Any:
    """A state like another one, with the values that were saved.

    Reads what `state_dict` wrote, here or in any chain that keeps the same slots, and what
    `get_optimizer_state_dict` (nested or flat) says of an `adapters` optimizer or one of
    torch.optim. Entries under `param_groups` are not read. Values take the state's own
    dtypes, its devices, and its division among processes (DTensor).

    Args:
        state: says what is needed, such as `tx.init(params)`. It is not changed. One on the meta
            device has no memory: values then stay on the devices that they were saved from.
        saved: a dict, or another Mapping, of tensors and numbers.
        params: the parameters, as for `state_dict`.
        strict: if False, what is missing stays as it is in `state`, and what has no place there is
            left out. Values that do not fit are errors in any case.
        step: finished steps, for a checkpoint that counts none, as those of torch.optim.SGD and
            Muon, or not all alike. Counts in `saved` are then not read.

    Returns:
        A new state. It shares no memory with `saved`. What is there to be read only,
        `fo.get(state, "lr")`, is as in `state` until the next step.

    Raises:
        ValueError: one for all that does not fit, with the keys: missing and unexpected ones, wrong
            shapes and kinds of numbers, parameters with different step counts. And as
            `state_dict` for the state and the parameters, or if `step` is no count.
        TypeError: if `saved` is no Mapping.

    Example::

        >>> import torch, functional_optim as fo
        >>> params = {"w": torch.ones(2)}
        >>> tx = fo.adamw(lr=0.1)
        >>> _, state = tx.update(params, tx.init(params), params)
        >>> again = fo.load_state_dict(tx.init(params), fo.state_dict(state, params), params)
        >>> again.step, again.slots["exp_avg"]["w"]
        (tensor(1), tensor([0.1000, 0.1000]))
    """
    given = flat(saved)
    if step is not None and (why := not_a_number(step, whole=True)):
        raise ValueError(f"step {why}.")
    needed: dict[str, tuple[Any, Tensor]] = {}

    def need(entry: Entry) -> Any:
        if entry.p is not None:
            needed[entry.keys[0][0]] = (entry.value, entry.p)
        return entry.value

    _walked(state, params, need)
    known, strange = converted(given, needed)
    wrong = [f"{key} {why}" for key, why in strange.items()]
    faults: dict[str, list[str]] = {"missing": [], "unexpected": [], "wrong": wrong}
    used: set[str] = set()

    def check(entry: Entry) -> Any:
        keys = [key for key, _ in entry.keys]
        used.update(keys)
        if entry.counts and step is not None:
            return entry.value
        there = [key for key in keys if key in known]
        absent = lacking(entry, there)
        faults["missing"] += absent
        if absent and not strict and (why := without_value(entry.value)):
            faults["wrong"] += [f"{key} {why}, and none was saved" for key in absent]
        wrong = {key: without_value(known[key]) or entry.misfit(known[key]) for key in there}
        faults["wrong"] += [f"{key} {why}" for key, why in wrong.items() if why]
        if entry.number and not any(wrong.values()):
            faults["wrong"] += differences(deciding(entry, known), known)
        return entry.value

    _walked(state, params, check)
    faults["unexpected"] = [key for key in known if key not in used]
    refuse(faults, strict)

    def take(entry: Entry) -> Any:
        if entry.counts and step is not None:
            return _as_kept(step, entry.value)
        keys = deciding(entry, known)
        return _as_kept(known[keys[0]] if keys else entry.value, entry.value)

    return _walked(state, params, take)


def _walked(state: Any, params: Any, act: Callable[[Entry], Any]) -> Any:
    """The state again, with what `act` returns in the places of its values.

    Raises ValueError where two of them have one key.
    """
    alone = _chains(state) == 1
    seen: set[str] = set()

    def act_once(entry: Entry) -> Any:
        for key, _ in entry.keys:
            if key in seen:
                raise ValueError(
                    f"two values of this state would be kept under {key!r}; rename a parameter, or "
                    "a part of the chain."
                )
            seen.add(key)
        return act(entry)

    def walk(node: Any, place: tuple[str, ...]) -> Any:
        if node is None:
            return None
        if isinstance(node, State):
            return _walked_chain(node, params, () if alone else place, act_once)
        if optree.tree_is_leaf(node):
            if not isinstance(node, (Tensor, bool, int, float, str)):
                raise TypeError(
                    f"{'.'.join(place) or 'the state'} is a {type(node).__name__}; a state dict "
                    "holds tensors, numbers and strings only."
                )
            return act_once(Entry([(".".join(place) or "state", True)], node))
        children, metadata, entries, join = optree.tree_flatten_one_level(node)
        fields = getattr(node, "_fields", None)
        return join(
            metadata,
            [
                child if fields and name == "hyper" else walk(child, (*place, str(name)))
                for name, child in zip(fields or entries, children, strict=True)
            ],
        )

    return walk(state, ())


def _chains(state: Any) -> int:
    """The number of chains' states in a state."""
    return sum(
        isinstance(x, State)
        for x in optree.tree_leaves(state, is_leaf=lambda x: isinstance(x, State))
    )


def _walked_chain(
    state: State, params: Any, place: tuple[str, ...], act: Callable[[Entry], Any]
) -> State:
    if params is None:
        raise ValueError(
            "the state of a transformation is kept by parameter; pass the parameters, too: "
            "fo.state_dict(state, params), fo.load_state_dict(state, saved, params)."
        )

    def key(*names: str) -> str:
        return ".".join(["state", *[name for name in names if name]])

    own = [name for name, x in state.slots.items() if isinstance(x, Tensor)]
    paths = [path for path, _ in tree.items(params)]
    leaves = dict(tree.items(params))
    if own and paths != [""]:  # `flatten` shows a chain all parameters as one vector
        paths = []
    for name, column in state.slots.items():
        if name not in own:
            tree.check_same(
                params,
                column,
                "params",
                f"the slot {name!r} of the state",
                "pass the parameters to which the state belongs",
                shapes=False,
            )
    columns = {
        name: [x] if name in own else tree.places(tree.structure(params), x)[0]
        for name, x in state.slots.items()
    }
    slotted = [any(x[i] is not None for x in columns.values()) for i in range(len(paths))]

    def number(name: str, value: Tensor) -> Any:
        rows = zip(paths, slotted, strict=True)
        keys = [(key(path, *place, name), has) for path, has in rows]
        return act(Entry(keys or [(key(*place, name), True)], value, True, name == "step"))

    def slot(name: str, column: Any) -> Any:
        rows = zip([""] if name in own else paths, columns[name], strict=True)
        new = [
            act(Entry([(key(path, *place, name), True)], x, p=leaves.get(path)))
            for path, x in rows
            if x is not None
        ]
        return tree.with_leaves(column, new)

    return State(
        number("step", state.step),
        {name: number(name, value) for name, value in state.carry.items()},
        {name: slot(name, column) for name, column in state.slots.items()},
        dict(state.hyper),
    )


def _as_saved(entry: Entry) -> Any:
    """A value as it is saved: numbers as torch.optim and the optimizer object keep them."""
    if not entry.number:
        return entry.value.detach() if isinstance(entry.value, Tensor) else entry.value
    value = sharding.whole(entry.value).detach().cpu()
    kept = value.to(numeric.storage_dtype(), copy=True)
    return kept if torch.equal(kept.to(value.dtype), value) else value.to(torch.float64)


def _as_kept(found: Any, like: Any) -> Any:
    """A saved value, in new memory, as the state keeps it."""
    if not isinstance(like, Tensor):
        return found.item() if isinstance(found, Tensor) else found
    if not isinstance(found, Tensor):
        found = torch.full(like.shape, found, dtype=like.dtype)
    device = like.device
    if like.is_meta:  # says no more than shape, dtype and division
        mesh = getattr(like, "device_mesh", None)
        device = found.device if mesh is None else torch.device(mesh.device_type)
    if found.numel() == 1 and not like.dim():
        found = found.reshape(())
    if not sharding.is_sharded(like):
        found = sharding.whole(found)
    found = sharding.placed_like(found.detach().to(device), like)
    return torch.empty_like(like, device=device).copy_(found)
