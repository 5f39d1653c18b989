"""What was public in version 0.2.0 still works, under its name and with its arguments; warnings
name the new way to pass those of `leafwise`."""

import importlib
import inspect
import json
import re
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same

import functional_optim as fo
from functional_optim.core.leafwise import OLD

Slots = namedtuple("Slots", "sum")
Count = namedtuple("Count", "steps")
Sums = namedtuple("Sums", "squares largest")
RECORDED = Path(__file__).parents[1] / "support" / "reference" / "names_0_2.json"
NAMES: dict[str, dict[str, list[str]]] = json.loads(RECORDED.read_text())
"""The functions and classes of each module, and their arguments."""


def init(p: Any) -> Slots:
    return Slots(torch.zeros_like(p))


def update(u: Any, slots: Slots, p: Any) -> Any:
    total = slots.sum + u
    return 2 * total, Slots(total)


def doubled(u: Any, slots: Slots, p: Any) -> Any:
    return 4 * u, slots


class Halves:
    fields = ("half",)

    def encode(self, x: Any, key: Any = None) -> Any:
        return (x.to(torch.float16),)

    def decode(self, stored: Any, spec: Any) -> Any:
        return stored[0].to(spec.dtype)


def counted(t: Any, carry: Count) -> Any:
    return (), Count(carry.steps + 1)


def absent(slots: Slots) -> Slots:
    return Slots(slots.sum + 1)


def due(t: Any) -> Any:
    return t % 2 == 0


def in_turn(t: Any, *, turn: int) -> Any:
    return t % 2 == turn


CHOICE = {"update": (update, doubled)}
COUNT = {"scalars": counted, "carry": Count(0)}
CODECS = {"sum": Halves()}
NAMED: dict[str, tuple[Any, ...]] = {
    "choose": (due, fo.Runs(due), CHOICE),
    "turns": (2, fo.Runs(in_turn, 2), CHOICE, {"choose": in_turn}),
    "shared": (True, fo.Runs(shared=True), COUNT),
    "absent": (absent, fo.Runs(shared=True, absent=absent), COUNT, {"shared": True}),
    "batched": (True, fo.Runs(batched=True)),
    "dense_only": (True, fo.Runs(dense_only=True)),
    "reads_new_params": (True, fo.Runs(after="step")),
    "scales_step": (True, fo.Runs(after="lr")),
    "codecs": (CODECS, fo.Storage(CODECS)),
    "nonnegative": (("sum",), fo.Storage(nonnegative=("sum",))),
    "weights": (("sum",), fo.Storage(weights=("sum",))),
    "elementwise": (True, None),
}
"""By the argument: its value, the record that has it now, what the rule has besides, and other old
arguments that belong to it."""
SAYS = {"reads_new_params": r"Runs\(after='step'\)", "scales_step": r"Runs\(after='lr'\)"}
SAYS |= {"elementwise": "leave it out"}
"""The new way, where it is not the field of the same name."""


@pytest.mark.parametrize("name", NAMED)
def test_an_argument_of_before_makes_the_same_rule(name):
    value, record, rest, old = (*NAMED[name], {}, {})[:4]
    rule = {"init": init, "update": update, "name": "mine", **rest}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        before = fo.leafwise(**rule, **old, **{name: value})
    assert all(x.category is DeprecationWarning and x.filename == __file__ for x in told)
    texts = [str(x.message) for x in told]
    new = {} if record is None else {type(record).__name__.lower(): record}
    says = SAYS.get(name) or rf"{next(iter(new))}=.*{type(record).__name__}\({name}="
    assert any(re.match(rf"leafwise\(\.\.\., {name}=.*{says}", text) for text in texts), texts
    assert before.placements == fo.leafwise(**rule, **new).placements


def test_every_argument_of_before_is_known():
    arguments = set(NAMES["functional_optim"]["leafwise"])
    today = set(inspect.signature(fo.leafwise).parameters)
    assert arguments - today - {"renamed"} == {*NAMED, "measure"} == set(OLD)


@pytest.mark.parametrize("module", NAMES)
def test_names_and_arguments_are_still_there(module):
    now, missing = importlib.import_module(module), []
    for name, arguments in NAMES[module].items():
        thing = getattr(now, name, None)
        if thing is None:
            missing.append(name)
            continue
        own = inspect.signature(thing).parameters
        if not any(x.kind is x.VAR_KEYWORD for x in own.values()):
            missing += [f"{name}({x}=...)" for x in arguments if x not in own]
    assert missing == []


@pytest.mark.parametrize("absence", [{}, {"codecs": None}, {"turns": None}, {"scales_step": False}])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_defaults_of_before_are_those_of_today(absence):
    made = fo.leafwise(init, update, **absence, name="mine")
    assert made.placements == fo.leafwise(init, update, name="mine").placements


def measure(u: Any, slots: Any, p: Any, scale: Any) -> Sums:
    return Sums((u * u).sum(), u.abs().max())


def measured(u: Any, slots: Any, p: Any, scale: Any, m: Sums) -> Any:
    return scale * u / m.squares.sqrt() / m.largest, slots


def test_a_measure_is_what_update_computes():
    with pytest.warns(DeprecationWarning, match="compute these sums in update"):
        tx = fo.leafwise(None, measured, lambda t: (2.0,), measure=measure, name="mine")
    g, p = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.zeros(2)}
    updates, _ = tx.update(g, tx.init(p), p)
    assert_close(updates["w"], torch.tensor([0.3, 0.4]), 1e-6)
    moved, _ = fo.compile(tx, strict=True)(g, tx.init(p), {"w": torch.zeros(2)})
    assert_close(moved["w"], torch.tensor([0.3, 0.4]), 1e-6)
    for wrong in (lambda u, slots, p, scale: (u,), lambda u, slots, p, scale: u.sum()):
        with pytest.warns(DeprecationWarning, match="measure="):
            tx = fo.leafwise(None, measured, lambda t: (2.0,), measure=wrong, name="mine")
        with pytest.raises(TypeError, match=r"measure of a rule returned .* of 0-dim tensors"):
            tx.update(g, tx.init(p), p)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_measure_of_a_batch_is_refused():
    with pytest.raises(ValueError, match="takes batches of tensors, so it can have no measure"):
        fo.leafwise(None, measured, measure=measure, runs=fo.Runs(batched=True), name="mine")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_the_operations_deny_is_not_believed():
    """A rule that looks at rows was told to be element-wise: it sees whole tensors all the same."""
    tx = fo.leafwise(None, lambda u, slots, p: (u / u.norm(), slots), elementwise=True, name="mine")
    g, p = torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)
    assert_same(tx.update(g, tx.init(p), p)[0], torch.tensor([[0.6, 0.8]]))


def test_what_is_no_record_is_refused():
    for wrong in ({"runs": {"batched": True}}, {"storage": None}):
        with pytest.raises(TypeError, match=r"pass a functional_optim\.Runs and a functional_opti"):
            fo.leafwise(None, doubled, **wrong)
    with pytest.raises(ValueError, match="takes None, 'lr' or 'step' as after, but got 'mean'"):
        fo.leafwise(None, doubled, runs=fo.Runs(after="mean"))
