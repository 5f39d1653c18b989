"""Arguments of `leafwise` as version 0.2 had them: they work, and the warning names the new way."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_close, assert_same

import functional_optim as fo
from functional_optim.core.leafwise import OLD


class Slots(NamedTuple):
    sum: torch.Tensor


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


class Count(NamedTuple):
    steps: int


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
NAMED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "choose": (CHOICE, {"choose": due}, {"runs": fo.Runs(due)}, r"runs=.*Runs\(choose="),
    "turns": (
        CHOICE,
        {"choose": in_turn, "turns": 2},
        {"runs": fo.Runs(in_turn, 2)},
        r"runs=.*Runs\(turns=",
    ),
    "shared": (COUNT, {"shared": True}, {"runs": fo.Runs(shared=True)}, r"runs=.*Runs\(shared="),
    "absent": (
        COUNT,
        {"shared": True, "absent": absent},
        {"runs": fo.Runs(shared=True, absent=absent)},
        r"runs=.*Runs\(absent=",
    ),
    "batched": ({}, {"batched": True}, {"runs": fo.Runs(batched=True)}, r"runs=.*Runs\(batched="),
    "dense_only": (
        {},
        {"dense_only": True},
        {"runs": fo.Runs(dense_only=True)},
        r"runs=.*Runs\(dense_only=",
    ),
    "reads_new_params": (
        {},
        {"reads_new_params": True},
        {"runs": fo.Runs(after="step")},
        r"Runs\(after='step'\)",
    ),
    "scales_step": (
        {},
        {"scales_step": True},
        {"runs": fo.Runs(after="lr")},
        r"Runs\(after='lr'\)",
    ),
    "codecs": (
        {},
        {"codecs": CODECS},
        {"storage": fo.Storage(CODECS)},
        r"storage=.*Storage\(codecs=",
    ),
    "nonnegative": (
        {},
        {"nonnegative": ("sum",)},
        {"storage": fo.Storage(nonnegative=("sum",))},
        r"storage=.*Storage\(nonnegative=",
    ),
    "weights": (
        {},
        {"weights": ("sum",)},
        {"storage": fo.Storage(weights=("sum",))},
        r"storage=.*Storage\(weights=",
    ),
    "elementwise": ({}, {"elementwise": True}, {}, "leave it out"),
}


@pytest.mark.parametrize("name", NAMED)
def test_an_argument_of_before_makes_the_same_rule(name):
    rest, old, new, says = NAMED[name]
    rule = {"init": init, "update": update, "name": "mine", **rest}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        before = fo.leafwise(**rule, **old)
    assert all(x.category is DeprecationWarning and x.filename == __file__ for x in told)
    texts = [str(x.message) for x in told]
    assert any(re.match(rf"leafwise\(\.\.\., {name}=.*{says}", text) for text in texts), texts
    after = fo.leafwise(**rule, **new)
    assert before.placements == after.placements


def test_every_argument_of_before_is_known():
    recorded = Path(__file__).parents[1] / "support" / "reference" / "names_0_2.json"
    arguments = set(json.loads(recorded.read_text())["functional_optim"]["leafwise"])
    today = set(inspect.signature(fo.leafwise).parameters)
    assert arguments - today - {"renamed"} == {*NAMED, "measure"} == set(OLD)


@pytest.mark.parametrize("absence", [{}, {"codecs": None}, {"turns": None}, {"scales_step": False}])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_defaults_of_before_are_those_of_today(absence):
    made = fo.leafwise(init, update, **absence, name="mine")
    assert made.placements == fo.leafwise(init, update, name="mine").placements


class Sums(NamedTuple):
    squares: Any
    largest: Any


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
    with pytest.raises(ValueError, match="has after='mean'; pass 'lr', 'step' or None"):
        fo.leafwise(None, doubled, runs=fo.Runs(after="mean"))
