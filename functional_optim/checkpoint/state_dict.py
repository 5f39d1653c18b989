"""States as flat dicts with the keys of torch's checkpoints; and conversion between packed and
whole slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.checkpoint.conversion import converted
from functional_optim.checkpoint.errors import listed, misfit, near, not_a_number, refuse
from functional_optim.core import base, sharding
from functional_optim.core.base import GradientTransformation
from functional_optim.core.leafwise import Leafwise, made_of_rules
from functional_optim.core.lift import State

OF_OPTIMIZER = ".optimizer_step"
"""How the keys of an optimizer object's own count end, which equals `step` unless parameters have
had no gradients: a chain has one count."""


class Entry(NamedTuple):
    """One value of a state.

    keys: its keys, and whether the parameter of each has slots. value: the template of a saved one.
    number: whether it is a chain's step count or carried scalar, saved with each parameter. counts:
    whether it is the step count. p: the parameter of a slot.
    """

    keys: list[tuple[str, bool]]
    value: Any
    number: bool = False
    counts: bool = False
    p: Any = None

    def misfit(self, found: Any) -> str | None:
        """Why a saved value does not fit, as "is …, but …"; None if it does."""
        if not self.number:
            return misfit(found, self.value)
        if isinstance(self.value, Tensor) and self.value.dim():  # of several problems at once
            return misfit(found, torch.empty(self.value.shape, device="meta"))
        return not_a_number(found, whole=self.counts)


def without_value(x: Any) -> str | None:
    """Why a tensor has no value to be saved; None if it has one."""
    meta = isinstance(x, Tensor) and x.is_meta
    return "is on the meta device, which holds no values" if meta else None


def deciding(entry: Entry, known: dict[str, Any]) -> list[str]:
    """The keys that determine a scalar: those of parameters with slots, if there are any."""
    there = [(key, has) for key, has in entry.keys if key in known]
    return [key for key, has in there if has] or [key for key, _ in there]


def lacking(entry: Entry, there: list[str]) -> list[str]:
    """Carried scalars may be missing for leaves on which the rule does not act; step counts may
    not."""
    needed = entry.counts or not there
    some = any(has for _, has in entry.keys)
    absent = [key for key, has in entry.keys if key not in there and (has or not some)]
    return absent if needed else []


def differences(keys: list[str], known: dict[str, Any]) -> list[str]:
    """Parameters whose step count differs from most."""
    values = {key: _hashable(known[key]) for key in keys}
    if len(set(values.values())) < 2:
        return []
    (usual, _), *_ = Counter(values.values()).most_common(1)
    others = [f"{key} is {x}, but {usual} elsewhere" for key, x in values.items() if x != usual]
    return [f"{fault} (a chain has one for all its parameters)" for fault in others]


def _hashable(x: Any) -> Any:
    """A scalar, or several, such that NaN equals NaN."""
    values = x.reshape(-1).tolist() if isinstance(x, Tensor) else [float(x)]
    known = tuple(["nan" if value != value else value for value in values])
    return known[0] if len(known) == 1 else known


def flat(saved: Any) -> dict[str, Any]:
    """Nested dicts as one flat dict with keys joined by dots, without hyperparameters."""
    if not isinstance(saved, Mapping):
        raise TypeError(
            f"load_state_dict takes a dict that state_dict returned, but got a "
            f"{type(saved).__name__}."
        )
    numbered = saved.get("state")
    if isinstance(numbered, Mapping) and any(isinstance(name, int) for name in numbered):
        raise ValueError(
            "this is an optimizer's state dict, which numbers its parameters; save what "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer) "
            "returns: it has their names."
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


def refuse_differences(faults: dict[str, list[str]], strict: bool) -> None:
    """Raise one ValueError for all missing, unexpected or wrong values, if there are any."""
    missing, unexpected, wrong = faults.values()
    lines = [*wrong]
    if strict and missing:
        close = [near(key, unexpected) for key in missing]
        lines.append(f"missing: {listed(close)}")
    if strict and unexpected:
        lines.append(f"unexpected: {listed(unexpected)}")
    advice = "load the checkpoint of the same transformation and parameters"
    if any(key.endswith(".step") for key in missing):
        advice += ", or pass the number of finished steps as step=…, if it counts none"
    elif any(".step is " in fault for fault in wrong):
        advice += ", or pass the number of finished steps as step=…"
    if strict and (missing or unexpected):
        advice += ", or pass strict=False to load the values that are present"
    refuse("the saved state", lines, advice)


def state_dict(state: Any, params: Any = None) -> dict[str, Any]:
    """A state as a flat dict of tensors, to be saved.

    The keys are those of torch's flattened optimizer state dicts
    (`torch.distributed.checkpoint.state_dict`, `flatten_optimizer_state_dict`):
    `state.{path}.{slot}` for each parameter, with `step` and carried scalars (float32, as in torch)
    next to its slots. Values without a parameter have the name of their place in the state, such as
    `seed` of an `EstimatorState`. If a state contains several chains' states, the place of each is
    before the slot: `state.{path}.0.exp_avg`. Hyperparameters are not saved: the recipe has them.

    Args:
        state: of a transformation, an estimator or a search method, a `ReplicaState`, or any tree
            of them.
        params: the parameters to which it belongs. Not needed if there is no state of a
            transformation.

    Returns:
        A dict from keys to the tensors of the state, without copies (also DTensors), and new 0-dim
        CPU tensors for `step` and carried scalars. `torch.load(..., weights_only=True)` reads it.

    Raises:
        ValueError: if the parameters are missing or do not match, two values have one key, or the
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
    """A state with the structure of another one and the saved values.

    Reads the results of `state_dict`, of this or any chain with the same slots, and of
    `get_optimizer_state_dict` (nested or flat) for an `adapters` optimizer or one of torch.optim.
    Entries under `param_groups` are ignored. Values get the dtypes, devices and sharding (DTensor)
    of the state.

    Args:
        state: the template, such as `tx.init(params)`. It is not changed. It may be on the meta
            device: values then stay on the devices from which they were saved.
        saved: a dict, or another Mapping, of tensors and numbers.
        params: the parameters, as for `state_dict`.
        strict: if False, missing values keep those of `state`, and unexpected values are ignored.
            Values that do not fit always raise an error.
        step: finished steps, for a checkpoint without counts, as of torch.optim.SGD and Muon, or
            with different counts. Counts in `saved` are then ignored.

    Returns:
        A new state. It shares no memory with `saved`. Hyperparameters for reading, `fo.get(state,
        "lr")`, are those of `state` until the next step.

    Raises:
        ValueError: one error for all faults, with the keys: missing and unexpected ones, wrong
            shapes and kinds of numbers, parameters with different step counts. Also as `state_dict`
            for the state and the parameters, or if `step` is not a count.
        TypeError: if `saved` is not a Mapping.

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
    for key in [key for key in given if key.endswith(OF_OPTIMIZER)]:
        own = given.get(key.removesuffix(OF_OPTIMIZER) + ".step")
        if step is not None or (own is not None and _hashable(own) == _hashable(given[key])):
            del given[key]
    entries: list[Entry] = []

    def note(entry: Entry) -> Any:
        entries.append(entry)
        return entry.value

    _walked(state, params, note)
    needed = {x.keys[0][0]: (x.value, x.p) for x in entries if x.p is not None}
    known, strange = converted(given, needed)
    wrong = [f"{key} {why}" for key, why in strange.items()]
    faults: dict[str, list[str]] = {"missing": [], "unexpected": [], "wrong": wrong}
    used: set[str] = set()
    for entry in entries:
        keys = [key for key, _ in entry.keys]
        used.update(keys)
        if entry.counts and step is not None:
            continue
        there = [key for key in keys if key in known]
        absent = lacking(entry, there)
        faults["missing"] += absent
        if absent and not strict and (why := without_value(entry.value)):
            faults["wrong"] += [f"{key} {why}, and none was saved" for key in absent]
        unfit = {key: without_value(known[key]) or entry.misfit(known[key]) for key in there}
        faults["wrong"] += [f"{key} {why}" for key, why in unfit.items() if why]
        if entry.number and not any(unfit.values()):
            faults["wrong"] += differences(deciding(entry, known), known)
    faults["unexpected"] = [key for key in known if key not in used]
    refuse_differences(faults, strict)

    def take(entry: Entry) -> Any:
        if entry.counts and step is not None:
            return _as_kept(step, entry.value)
        keys = deciding(entry, known)
        return _as_kept(known[keys[0]] if keys else entry.value, entry.value)

    return _walked(state, params, take)


def _walked(state: Any, params: Any, act: Callable[[Entry], Any]) -> Any:
    """The state with the results of `act` instead of its values.

    Raises ValueError if two of them have one key.
    """
    leaves = optree.tree_leaves(state, is_leaf=lambda x: isinstance(x, State))
    alone = sum(isinstance(x, State) for x in leaves) == 1
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


def _walked_chain(
    state: State, params: Any, place: tuple[str, ...], act: Callable[[Entry], Any]
) -> State:
    if params is None:
        raise ValueError(
            "the state of a transformation is saved by parameter; pass the parameters, too: "
            "fo.state_dict(state, params), fo.load_state_dict(state, saved, params)."
        )

    def key(*names: str) -> str:
        return ".".join(["state", *[name for name in names if name]])

    own = [name for name, x in state.slots.items() if x is None or isinstance(x, Tensor)]
    paths = [path for path, _ in tree.items(params)]
    leaves = dict(tree.items(params))
    if own and paths != [""]:  # `flatten` passes all parameters as one vector
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
    """A value as it is saved: scalars as in torch.optim and the optimizer object."""
    if not entry.number:
        return entry.value.detach() if isinstance(entry.value, Tensor) else entry.value
    value = sharding.whole(entry.value).detach().cpu()
    kept = value.to(numeric.storage_dtype(), copy=True)
    return kept if torch.equal(kept.to(value.dtype), value) else value.to(torch.float64)


def _as_kept(found: Any, like: Any) -> Any:
    """A saved value, in new memory, as the state stores it."""
    if not isinstance(like, Tensor):
        return found.item() if isinstance(found, Tensor) else found
    if not isinstance(found, Tensor):
        found = torch.full(like.shape, found, dtype=like.dtype, device="cpu")
    device = like.device
    if like.is_meta:  # has only shape, dtype and sharding
        mesh = getattr(like, "device_mesh", None)
        device = found.device if mesh is None else torch.device(mesh.device_type)
    if found.numel() == 1 and not like.dim():
        found = found.reshape(())
    if not sharding.is_sharded(like):
        found = sharding.whole(found)
    found = sharding.placed_like(found.detach().to(device), like)
    return torch.empty_like(like, device=device).copy_(found)


ADVICE = "apply it to the states of its parts"


def decoded(tx: GradientTransformation, state: Any, params: Any) -> State:
    """The state that a transformation would have without `stored`: with whole slots.

    `fo.state_dict` turns it into a checkpoint with torch's keys. Use it with the same recipe
    without `stored`; `encoded` is the inverse.

    Args:
        tx: the transformation of the state, which consists of one-tensor rules.
        state: its state. It is not changed.
        params: the parameters, as in `init`.

    Raises:
        TypeError: if a part of tx does not consist of one-tensor rules.
        ValueError: if the state is not that of tx and the parameters.

    Example::

        >>> import torch, functional_optim as fo
        >>> params = {"hidden": torch.ones(64, 64)}
        >>> tx = fo.stored(fo.adamw(), "int8")
        >>> state = tx.init(params)
        >>> sorted(state.slots)[:3], sorted(fo.decoded(tx, state, params).slots)
        (['exp_avg', 'exp_avg.int8', 'exp_avg.scale'], ['exp_avg', 'exp_avg_sq'])
    """
    placements = made_of_rules("decoded", tx, ADVICE).placements
    whole = Leafwise(tuple([x._replace(rule=x.rule.without_codecs()) for x in placements]))
    return _as_in(whole, state, params)


def encoded(tx: GradientTransformation, state: Any, params: Any) -> State:
    """A state in the storage format of a transformation: slots packed by its `stored`.

    Rounding is to nearest. If the state is already packed, in any format of `stored`, slots in
    another format than tx's are decoded first.

    Args:
        tx: a transformation that consists of one-tensor rules, with or without `stored`.
        state: of the same rules. It is not changed.
        params: the parameters, as in `init`.

    Raises:
        TypeError: if a part of tx does not consist of one-tensor rules.
        ValueError: if the state is not one of these rules and parameters.

    Example::

        >>> import torch, functional_optim as fo
        >>> params = {"hidden": torch.ones(64, 64)}
        >>> state = fo.adamw().init(params)
        >>> small = fo.encoded(fo.stored(fo.adamw(), "int8"), state, params)
        >>> small.slots["exp_avg_sq.uint8"]["hidden"].shape
        torch.Size([16, 256])
    """
    return _as_in(made_of_rules("encoded", tx, ADVICE), state, params)


def _as_in(tx: Leafwise, state: Any, params: Any) -> State:
    if not isinstance(state, State):
        raise TypeError(f"a chain's state is needed, but got a {type(state).__name__}.")
    like = base.unrecorded(tx.init, params)
    new = load_state_dict(like, state_dict(state, params), params)
    return state._replace(slots=new.slots)
