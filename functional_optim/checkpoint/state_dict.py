"""States as flat dicts, under the keys that torch's own checkpoints have; and the state of a recipe
without `stored`, and back.
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


class Entry(NamedTuple):
    """One value of a state.

    keys: under which it is kept, and whether the parameter there has slots. value: what a saved one
    must be like. number: whether it is a chain's step count or carried scalar, kept with each
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
    """A chain's carried scalars may be missing where its rule does not act, step counts may not."""
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


def refuse_differences(faults: dict[str, list[str]], strict: bool) -> None:
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
    refuse("the saved state", lines, advice)


def state_dict(state: Any, params: Any = None) -> dict[str, Any]:
    """A state as a flat dict of tensors, to be saved.

    The keys are those of torch's flattened optimizer state dicts
    (`torch.distributed.checkpoint.state_dict`, `flatten_optimizer_state_dict`):
    `state.{path}.{slot}` for each parameter, with `step` and carried scalars (float32, as torch
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
        tensors for `step` and carried scalars. `torch.load(..., weights_only=True)` reads it.

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
    refuse_differences(faults, strict)

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


ADVICE = "apply it to the states of its parts"


def decoded(tx: GradientTransformation, state: Any, params: Any) -> State:
    """The state that a transformation would have without `stored`: each slot whole.

    `fo.state_dict` makes of it a checkpoint under torch's own keys. It goes on in the same recipe
    without `stored`; `encoded` is the way back.

    Args:
        tx: the transformation of the state, made of one-tensor rules.
        state: its state. It is not changed.
        params: the parameters, as in `init`.

    Raises:
        TypeError: if a part of tx is not made of one-tensor rules.
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
    """A state as a transformation keeps it: slots packed in the way of its `stored`.

    Rounding is to the nearest. Of a state that is packed already, in any way that `stored` knows,
    slots that are not in tx's form are decoded first.

    Args:
        tx: a transformation made of one-tensor rules, with `stored` or without.
        state: of the same rules. It is not changed.
        params: the parameters, as in `init`.

    Raises:
        TypeError: if a part of tx is not made of one-tensor rules.
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
