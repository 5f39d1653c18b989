"""Recorded rules: the same results as the rules themselves, or no tape."""

from typing import Any, NamedTuple

import pytest
import torch

import functional_optim as fo
from functional_optim import tapes
from functional_optim.adapters import Optimizer
from functional_optim.tapes import Tape, Unsuitable

FOREIGN = torch.ones(tapes.PROBE)
CPU = torch.device("cpu")
FLOATS = [torch.float32] * 3


def steps(recipe, monkeypatch, *, taped, dtype=torch.float32):
    """Parameters and state after five eager steps over small and large tensors, and the tapes."""
    if not taped:

        def refuse(*args):
            raise Unsuitable("a test")

        monkeypatch.setattr("functional_optim.bundles.Tape", refuse)
    torch.manual_seed(0)
    params = [torch.randn(n, dtype=dtype) for n in (3, 5, 70_000, 140_001)]
    opt = Optimizer(params, recipe, compile=False)
    for _ in range(5):
        for p in params:
            p.grad = torch.randn_like(p)
        opt.step()
    monkeypatch.undo()
    slots = [x for p in params for x in opt.state[p].values()]
    return [*params, *slots], opt._plan.teams[0].cohort.bundles


RECIPES = {
    "adamw": lambda: fo.adamw(1e-2),
    "amsgrad": lambda: fo.adam(1e-2, amsgrad=True),
    "nadam": lambda: fo.nadam(),
    "rmsprop": lambda: fo.rmsprop(centered=True, momentum=0.9),
    "sgd": lambda: fo.sgd(0.1, momentum=0.9, nesterov=True),
    "adadelta": lambda: fo.adadelta(),
    "averaged": lambda: fo.chain(fo.clip_by_global_norm(1.0), fo.adam(), fo.params_ema(0.9)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_a_tape_does_what_the_rule_does_to_the_last_bit(name, dtype, monkeypatch):
    plain, bundles = steps(RECIPES[name], monkeypatch, taped=False, dtype=dtype)
    assert all(bundle.tapes == {None: None} for bundle in bundles)
    taped, bundles = steps(RECIPES[name], monkeypatch, taped=True, dtype=dtype)
    assert all(isinstance(bundle.tapes[None], Tape) for bundle in bundles)
    for x, y in zip(taped, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_results_are_written_where_the_old_values_were():
    tape = Tape(lambda v, n: [v[1] + n[0] * v[0], v[2] * n[1] + v[0]], FLOATS, 2, CPU)
    assert "out=x1" in tape.source
    assert "out=x2" in tape.source
    assert len(tape.scratch) == 1
    g, p, m = torch.ones(4), torch.zeros(4), torch.full((4,), 2.0)
    tape([g, p, m], [0.5, 3.0])
    assert g.tolist() == [1.0] * 4
    assert p.tolist() == [0.5] * 4
    assert m.tolist() == [7.0] * 4


def test_an_old_value_that_is_read_later_is_not_overwritten_early():
    tape = Tape(lambda v, n: [v[1] - v[2], v[2] + v[0]], FLOATS, 0, CPU)
    vectors = [torch.ones(3), torch.full((3,), 5.0), torch.full((3,), 2.0)]
    tape(vectors, [])
    assert [x[0].item() for x in vectors] == [1.0, 3.0, 3.0]

    tape = Tape(lambda v, n: [v[0] + 1, v[1] + v[2]], FLOATS, 0, CPU)
    vectors = [torch.ones(3), torch.full((3,), 5.0), torch.full((3,), 2.0)]
    tape(vectors, [])
    assert [x[0].item() for x in vectors] == [1.0, 2.0, 7.0]


UNSUITABLE: dict[str, Any] = {
    "arithmetic on numbers": lambda v, n: [v[1] * (1 - n[0]), v[2]],
    "a choice by numbers": lambda v, n: [v[1] + (v[0] if n[0] > 0.5 else v[2]), v[2]],
    "an exchange": lambda v, n: [v[2], v[1]],
    "a view": lambda v, n: [v[1].flip(0)[: len(v[1])] + v[0], v[2]],
    "a sum": lambda v, n: [v[1] + v[0].sum(), v[2]],
    "a foreign tensor": lambda v, n: [v[1] + FOREIGN, v[2]],
    "chance": lambda v, n: [v[1] + torch.rand_like(v[0]), v[2]],
    "in place": lambda v, n: [v[1].add_(v[0]), v[2]],
}


@pytest.mark.parametrize("name", UNSUITABLE)
def test_what_cannot_be_repeated_is_refused(name, monkeypatch):
    monkeypatch.setattr(tapes, "_numbers", lambda count, seed: [[0.3, 0.8, 0.4][seed - 1]] * count)
    with pytest.raises(Unsuitable):
        Tape(UNSUITABLE[name], FLOATS, 1, CPU)


class Slots(NamedTuple):
    seen: torch.Tensor


def choosy(lr: float = 0.25):
    """A rule that computes with its number, so that no tape can be made of it."""
    return fo.leafwise(
        lambda p: Slots(torch.zeros_like(p)),
        lambda u, slots, p, lr: (-(lr + 0.25) * u, Slots(slots.seen + u)),
        lambda t: (lr,),
    )


def test_a_rule_that_is_refused_still_steps():
    p = torch.zeros(3)
    p.grad = torch.ones(3)
    opt = Optimizer([p], choosy, compile=False)
    opt.step()
    opt.step()
    assert opt._plan.teams[0].cohort.bundles[0].tapes == {None: None}
    assert p.tolist() == [-1.0] * 3
    assert opt.state[p]["seen"].tolist() == [2.0] * 3
