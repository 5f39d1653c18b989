"""States as flat dicts, under the keys that torch's own checkpoints have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from functional_optim import numeric, sharded, tree
from functional_optim.fitting import listed, misfit, near, not_a_number
from functional_optim.leafwise import State


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
        ValueError: if the parameters are missing or other ones, or two values have one key.
        TypeError: for a value that is neither a tensor nor a number nor a string.

    Example::

        >>> import torch, functional_optim as fo
        >>> params = {"w": torch.ones(2)}
        >>> sorted(fo.state_dict(fo.adamw().init(params), params))
        ['state.w.exp_avg', 'state.w.exp_avg_sq', 'state.w.step']
    """
    found: dict[str, Any] = {}

    def keep(entry: Entry) -> Any:
        for key, _ in entry.keys:
            if key in found:
                raise ValueError(
                    f"two values of this state would be kept under {key!r}; rename a parameter, or "
                    "a part of the chain."
                )
            found[key] = _as_saved(entry)
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
    dtypes, and its division among processes (DTensor).

    Args:
        state: says what is needed, such as `tx.init(params)`. It is not changed.
        saved: a dict of tensors and numbers.
        params: the parameters, as for `state_dict`.
        strict: if False, what is missing stays as it is in `state`, and what has no place there is
            left out. Values that do not fit are errors in any case.
        step: finished steps, for a checkpoint that counts none, as those of torch.optim.SGD and
            Muon.

    Returns:
        A new state. It shares no memory with `saved`. What is there to be read only,
        `fo.get(state, "lr")`, is as in `state` until the next step.

    Raises:
        ValueError: one for all that does not fit, with the keys: missing and unexpected ones, wrong
            shapes and kinds of numbers, parameters with different step counts.
        TypeError: if `saved` is no dict.

    Example::

        >>> import torch, functional_optim as fo
        >>> params = {"w": torch.ones(2)}
        >>> tx = fo.adamw(lr=0.1)
        >>> _, state = tx.update(params, tx.init(params), params)
        >>> again = fo.load_state_dict(tx.init(params), fo.state_dict(state, params), params)
        >>> again.step, again.slots["exp_avg"]["w"]
        (tensor(1), tensor([0.1000, 0.1000]))
    """
    known = _flat(saved)
    faults: dict[str, list[str]] = {"missing": [], "unexpected": [], "wrong": []}
    used: set[str] = set()

    def check(entry: Entry) -> Any:
        used.update(key for key, _ in entry.keys)
        there = [key for key, _ in entry.keys if key in known]
        if entry.number:
            given = step if entry.counts and not there else None
            faults["missing"] += [] if given is not None else _missing(entry, there)
            wrong = {key: not_a_number(known[key], whole=entry.counts) for key in there}
            if entry.value.dim():  # of several problems at once
                wrong = {key: misfit(known[key], _as_saved(entry)) for key in there}
            faults["wrong"] += [f"{key} {why}" for key, why in wrong.items() if why]
            if not any(wrong.values()):
                faults["wrong"] += _differences(_deciding(entry, known), known)
            return entry.value
        for key, _ in entry.keys:
            why = misfit(known[key], entry.value) if key in known else None
            faults["missing"] += [key] if key not in known else []
            faults["wrong"] += [f"{key} {why}"] if why else []
        return entry.value

    _walked(state, params, check)
    faults["unexpected"] = [key for key in known if key not in used]
    _raise(faults, known, strict)

    def take(entry: Entry) -> Any:
        keys = _deciding(entry, known)
        if keys:
            return _as_kept(known[keys[0]], entry.value)
        if entry.counts and step is not None:
            return torch.full_like(entry.value, step)
        return _as_kept(entry.value, entry.value)

    return _walked(state, params, take)


class Entry(NamedTuple):
    """One value of a state.

    keys: under which it is kept, and whether the parameter there has slots. number: a chain's step
    count or carried number, kept with each parameter. counts: is it the step count?
    """

    keys: list[tuple[str, bool]]
    value: Any
    number: bool = False
    counts: bool = False


def _walked(state: Any, params: Any, act: Callable[[Entry], Any]) -> Any:
    """The state again, with what `act` returns in the places of its values."""
    alone = _chains(state) == 1

    def walk(node: Any, place: tuple[str, ...]) -> Any:
        if node is None:
            return None
        if isinstance(node, State):
            return _walked_chain(node, params, () if alone else place, act)
        if optree.tree_is_leaf(node):
            if not isinstance(node, (Tensor, bool, int, float, str)):
                raise TypeError(
                    f"{'.'.join(place) or 'the state'} is a {type(node).__name__}; a state dict "
                    "holds tensors, numbers and strings only."
                )
            return act(Entry([(".".join(place) or "state", True)], node))
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
    """How many chains' states there are in a state."""
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
        rows = zip(paths or [""], columns[name], strict=True)
        new = [
            act(Entry([(key(path, *place, name), True)], x)) for path, x in rows if x is not None
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
    value = sharded.whole(entry.value).detach().cpu()
    kept = value.to(numeric.storage_dtype(), copy=True)
    return kept if torch.equal(kept.to(value.dtype), value) else value.to(torch.float64)


def _as_kept(found: Any, like: Any) -> Any:
    """A saved value, in new memory, as the state keeps it."""
    if not isinstance(like, Tensor):
        return found.item() if isinstance(found, Tensor) else found
    if not isinstance(found, Tensor):
        return torch.full_like(like, found)
    if found.numel() == 1 and not like.dim():
        found = found.reshape(())
    if not sharded.is_sharded(like):
        found = sharded.whole(found)
    found = sharded.placed_like(found.detach().to(like.device), like)
    return torch.empty_like(like).copy_(found)


def _deciding(entry: Entry, known: dict[str, Any]) -> list[str]:
    """The keys that say what a number is: those of parameters with slots, if there are such."""
    there = [(key, has) for key, has in entry.keys if key in known]
    return [key for key, has in there if has] or [key for key, _ in there]


def _missing(entry: Entry, there: list[str]) -> list[str]:
    """A chain's carried numbers may be missing where its link does not act, step counts may not."""
    needed = entry.counts or not there
    some = any(has for _, has in entry.keys)
    absent = [key for key, has in entry.keys if key not in there and (has or not some)]
    return absent if needed else []


def _differences(keys: list[str], known: dict[str, Any]) -> list[str]:
    """Parameters that are at other steps than most."""
    values = {key: _hashable(known[key]) for key in keys}
    if len(set(values.values())) < 2:
        return []
    (usual, _), *_ = Counter(values.values()).most_common(1)
    others = [f"{key} is {x}, but {usual} elsewhere" for key, x in values.items() if x != usual]
    return [f"{fault} (a chain has one for all its parameters)" for fault in others]


def _hashable(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.item() if x.numel() == 1 else tuple(x.reshape(-1).tolist())
    return float(x)


def _flat(saved: Any) -> dict[str, Any]:
    """Nested dicts as one, keys joined by dots; hyperparameters left out."""
    if not isinstance(saved, dict):
        raise TypeError(
            f"load_state_dict takes a dict that state_dict returned, but got a "
            f"{type(saved).__name__}."
        )
    numbered = saved.get("state")
    if isinstance(numbered, dict) and any(isinstance(name, int) for name in numbered):
        raise ValueError(
            "this is an optimizer's own state dict, which numbers its parameters; save what "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer) "
            "returns: it knows their names."
        )
    flat: dict[str, Any] = {}

    def add(above: str, inner: dict[Any, Any]) -> None:
        for name, x in inner.items():
            path = f"{above}.{name}" if above else str(name)
            if isinstance(x, dict):
                add(path, x)
            else:
                flat[path] = x

    add("", {name: x for name, x in saved.items() if name != "param_groups"})
    return {key: x for key, x in flat.items() if not key.startswith("param_groups.")}


def _raise(faults: dict[str, list[str]], known: dict[str, Any], strict: bool) -> None:
    missing, unexpected, wrong = faults.values()
    lines = [*wrong]
    if strict and missing:
        close = [near(key, unexpected) for key in missing]
        lines.append(f"missing: {listed(close)}")
    if strict and unexpected:
        lines.append(f"unexpected: {listed(unexpected)}")
    if not lines:
        return
    advice = "load the checkpoint of the same transformation and parameters"
    if missing and any(key.endswith(".step") for key in missing):
        advice += ", or say with step=… how many steps are done, if it counts none"
    if strict and (missing or unexpected):
        advice += ", or pass strict=False to take what is there"
    raise ValueError(
        "the saved state does not fit:\n  "
        + "\n  ".join([*lines[:12], *([f"… {len(lines) - 12} more"] if len(lines) > 12 else [])])
        + f"\n{advice[0].upper()}{advice[1:]}."
    )
