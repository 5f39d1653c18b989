"""Rules without flags: every way of running one steps it as `tx.update` does, or says why not.

The sets of tensors, the naive loop and the table are in `tests/support/undeclared.py`, which names
the modules of the rules.
"""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import undeclared
import undeclared_halves
from helpers import assert_same, clone
from undeclared import MODELS, ROWS, WAYS
from undeclared_refused import CONTRADICTED, REFUSED

import functional_optim as fo
from functional_optim.adapters import Optimizer


def test_the_table_has_the_rules_that_users_write():
    written = [row for row in ROWS.values() if len(row.parts) == 1]
    assert len(written) >= 45
    assert all(rule.known is None for row in written for rule in row.parts)


@pytest.mark.parametrize("name", ROWS)
def test_a_rule_without_flags_is_the_same_in_every_way(name):
    wrong = [x for x in undeclared.outcomes(ROWS[name]) if x.kind != "equal"]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("name", [x for x in ROWS if x in vars(undeclared_halves)])
def test_halves_and_whole_numbers_are_computed_in_kernels(name):
    for shape in ((7,), (6, 8)):
        tx, p = ROWS[name].build(), torch.randn(shape)
        fo.compile(tx, strict=True)(torch.randn(shape), tx.init(p), p)


class Begun:
    """A way to step a rule: what it holds, and its step."""

    def __init__(self, way, tx, model):
        self.params = {name: torch.nn.Parameter(p) for name, p in model.params().items()}
        self.grads, self.way, self.tx = model.grads()[0], way, tx
        if way.startswith("Optimizer"):
            self.opt = Optimizer(list(self.params.items()), lambda: tx, compile="," not in way)
        else:
            self.params = {name: p.detach() for name, p in self.params.items()}
            self.state = tx.init(self.params)

    def step(self):
        if self.way == "update":
            updates, self.state = self.tx.update(self.grads, self.state, self.params)
            self.params = fo.apply_updates(self.params, updates)
        elif self.way == "fo.compile":
            fo.compile(self.tx)(self.grads, self.state, self.params)
        else:
            for name, p in self.params.items():
                p.grad = self.grads[name]
            self.opt.step()

    def held(self):
        """Copies of all that a step could have changed."""
        params = {name: p.detach() for name, p in self.params.items()}
        if self.way.startswith("Optimizer"):
            slots = [
                dict(self.opt.state[p]) if p in self.opt.state else {} for p in self.params.values()
            ]
        else:
            slots = [self.state.slots, self.state.carry, self.state.step]
        return clone((params, self.grads, slots))


def use(way, refusal, model, kept):
    """Make a rule and step it. kept: gets what is stepped, with copies of what it held before."""
    begun = Begun(way, refusal.tx(), model)
    kept.append((begun, begun.held()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begun.step()


def refuses(way, refusal, model):
    """The first use raises a sentence that has all it must say, and changes nothing."""
    random = torch.get_rng_state()
    kept = []
    with pytest.raises(ValueError) as error:  # noqa: PT011 the sentence is looked at below
        use(way, refusal, model, kept)
    sentence = str(error.value)
    for part in (refusal.name, *refusal.says):
        found = re.search(part, sentence)
        assert found, f"{refusal.name}, by {way}: {part!r} is not in {sentence!r}"
    assert re.search(r"; \w+", sentence), f"{refusal.name}, by {way}: no advice in {sentence!r}"
    for begun, before in kept:
        assert_same(begun.held(), before)
    assert torch.equal(torch.get_rng_state(), random), f"{refusal.name}, by {way}: numbers drawn"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_rule_that_cannot_be_run_is_refused_before_anything_is_changed(name, way):
    for model in ("together", "scalar", "matrix", "bfloat16"):
        refuses(way, REFUSED[name], MODELS[model])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONTRADICTED)
def test_an_argument_that_the_operations_contradict_is_refused(name, way):
    for model in ("together", "matrix"):
        refuses(way, CONTRADICTED[name], MODELS[model])


def test_the_naive_loop_sees_a_rule_whose_tensors_are_joined():
    """The comparison itself: tensors that are joined are far from those of the naive loop."""
    row, model = ROWS["unit_norm"], MODELS["together"]
    params = model.params()
    for grads in model.grads():
        norm = torch.cat([g.flatten() for g in grads.values()]).norm()
        params = {name: p + grads[name] / norm for name, p in params.items()}
    apart, _ = undeclared.worst(undeclared.End(params, {}), undeclared.naive(row, model))
    assert apart > 0.1


def test_update_computes_with_numbers_as_precise_as_those_of_scalars():
    def near_one(t):
        return (1 - 1e-6 / t,)

    tx = fo.leafwise(None, lambda u, s, p, b: (1e6 * (1 - b) * u, s), near_one, name="rest")
    params = {"w": torch.zeros(4)}
    updates, _ = tx.update({"w": torch.ones(4)}, tx.init(params), params)
    assert updates["w"].tolist() == pytest.approx([1.0] * 4, rel=1e-6)


def test_large_ints_among_the_numbers_of_a_rule_are_exact():
    n = 2**62 + 12345
    tx = fo.leafwise(None, lambda u, s, p, n: (u * ((n ^ 5) & 255), s), lambda t: (n,), name="hash")
    p = torch.zeros(3)
    step = fo.compile(tx)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p, _ = step(torch.ones(3), tx.init(p), p)
    assert p.tolist() == [(n ^ 5) & 255] * 3
