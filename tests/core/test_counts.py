"""Counts that a chain carries stay exact where float32 ends, and checkpoints in float32 load."""

import copy

import pytest
import torch
from helpers import as_parameters, through_file
from sampling import some

import functional_optim as fo
from functional_optim.adapters import Optimizer

END = 2.0**24
"""From here on float32 skips whole numbers: END + 1 is END."""


def scheduled():
    """A schedule behind a gate that is always open: its count decides the step."""
    return fo.conditionally_mask(fo.sgd(lambda count: count - END + 10), lambda step: True)


RECIPES = {
    "conditionally_mask": (scheduled, "open_steps"),
    "apply_if_finite": (lambda: fo.apply_if_finite(fo.sgd(0.1), 3), "open_steps"),
    "skip_large_updates": (lambda: fo.skip_large_updates(fo.sgd(0.1), 1e3), "open_steps"),
    "dynamic_loss_scale": (lambda: fo.dynamic_loss_scale(fo.sgd(0.1)), "open_steps"),
    "accumulate": (lambda: fo.accumulate(fo.sgd(0.1), 1), "open_steps"),
    "waiting": (lambda: fo.accumulate(fo.sgd(0.1), 2**26), "mini_step"),
    "reduce_on_plateau": (
        lambda: fo.chain(fo.scale_by_lr(0.1), fo.reduce_on_plateau(patience=2**26)),
        "plateau_count",
    ),
}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def params():
    return {"a": torch.zeros(2), "b": torch.zeros(3)}


def narrow(state, key):
    """A state as it was kept before counts were float64, far on."""
    carry = {name: x.to(torch.float32) for name, x in state.carry.items()}
    return state._replace(carry={**carry, key: torch.tensor(END)})


def given(tx):
    return {"value": 1.0} if "value" in tx.extra else {}


@every_recipe
@pytest.mark.parametrize("donate", [None, True, False])
def test_a_pure_and_a_compiled_step_count_on_and_a_state_dict_keeps_the_count(name, donate):
    make, key = RECIPES[name]
    tx, p = make(), params()
    state = narrow(tx.update(p, tx.init(p), p, **given(tx))[1], key)  # a plateau has a best value
    step = tx.update if donate is None else fo.compile(tx, donate=donate)
    for _ in range(3):
        found, state = step(params(), state, p, **given(tx))
        p = p if donate is None else found
    assert state.carry[key].item() == END + 3
    saved = through_file(fo.state_dict(state, p))
    assert fo.load_state_dict(tx.init(p), saved, p).carry[key].item() == END + 3


def loaded(opt, key):
    """A checkpoint from before counts were float64."""
    saved = copy.deepcopy(opt.state_dict())
    for mine in saved["state"].values():
        for name, x in mine.items():
            if x.dim() == 0:
                mine[name] = x.to(torch.float32)
        mine[key] = torch.tensor(END)
    opt.load_state_dict(through_file(saved))


def stepped(opt, mine, times=1):
    for _ in range(times):
        for p in mine:
            p.grad = torch.zeros_like(p)
        opt.step(lambda: 1.0)


@every_recipe
@pytest.mark.parametrize("compile", [True, False])
def test_an_object_counts_on(name, compile):
    make, key = RECIPES[name]
    mine = as_parameters(params())
    opt = Optimizer(mine, make, compile=compile)
    stepped(opt, mine)
    loaded(opt, key)
    stepped(opt, mine, 3)
    again = Optimizer(mine, make, compile=compile)
    again.load_state_dict(through_file(opt.state_dict()))
    stepped(again, mine, 2)
    assert {again.state[p][key].item() for p in mine} == {END + 5}


TRACED = ("conditionally_mask", "dynamic_loss_scale", "waiting")


@pytest.mark.parametrize(
    "name", some(sorted(RECIPES.keys() - {"reduce_on_plateau"}), 0, TRACED)
)  # it needs a closure
def test_a_traced_object_counts_on(name, fresh_dynamo):
    make, key = RECIPES[name]
    mine = as_parameters(params())
    opt = Optimizer(mine, make)
    stepped(opt, mine)
    loaded(opt, key)
    for p in mine:
        p.grad = torch.zeros_like(p)
    step = torch.compile(opt.step, backend="eager")
    step()
    step()
    assert {opt.state[p][key].item() for p in mine} == {END + 2}


def test_a_schedule_behind_a_gate_goes_on():
    tx, p = scheduled(), {"a": torch.zeros(1)}
    state = narrow(tx.init(p), "open_steps")
    found = []
    for _ in range(3):
        u, state = tx.update({"a": torch.ones(1)}, state, p)
        found.append(-u["a"].item())
    assert found == [10.0, 11.0, 12.0]
