"""The optimizer state dicts of torch.distributed.checkpoint: by name, nested and flat."""

from __future__ import annotations

import copy

import cases
import pytest
import torch
from helpers import assert_close, assert_same, make_grads, step_object
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from functional_optim import adapters

either_form = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
every_row = pytest.mark.parametrize("case", cases.with_torch(costly=True))


def make_model(case):
    """A module of the row's parameters."""
    return torch.nn.ParameterDict(
        {name: torch.nn.Parameter(p) for name, p in case.filled().items()}
    )


def groups(model):
    """Two, with learning rates of their own."""
    first, *rest = model.values()
    return [{"params": [first], "lr": 0.07}, {"params": rest}] if rest else [{"params": [first]}]


def ours(case, model):
    return case.drop_in(groups(model), compile=False, **case.hyper)


def theirs(case, model):
    return case.stock(groups(model), **case.hyper)


def general(case, model):
    return adapters.Optimizer(groups(model), case.recipe, compile=False, **case.hyper)


def go_on(model, opt, grads):
    """Step through gradients, which come in the order of the groups."""
    step_object(opt, grads)
    return {name: p.detach().clone() for name, p in model.items()}


def resumed(case, first, second, flat):
    """A run through a checkpoint that one optimizer writes and another reads; both optimizers."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = make_model(case)
    grads = make_grads(dict(model), 6)
    opt = first(case, model)
    go_on(model, opt, grads[:3])
    saved = copy.deepcopy(get_optimizer_state_dict(model, opt, options=options))
    other = copy.deepcopy(model)
    twin = second(case, other)
    for group in twin.param_groups:
        group["lr"] = 0.9  # the checkpoint's rate counts
    set_optimizer_state_dict(other, twin, saved, options=options)
    return go_on(other, twin, grads[3:]), go_on(model, opt, grads[3:]), twin, opt


def states(opt):
    """In the order of the parameters; torch leaves an empty dict for one without state."""
    params = [p for group in opt.param_groups for p in group["params"]]
    return [opt.state.get(p) or None for p in params]


@either_form
@pytest.mark.parametrize("case", cases.able("object", "rest", costly=True))
def test_a_run_goes_on_bitwise(case, flat):
    for make in (general, ours) if case.stock else (general,):
        moved, wanted, twin, opt = resumed(case, make, make, flat)
        assert_same(moved, wanted)
        assert_same(states(twin), states(opt))


@either_form
@pytest.mark.parametrize("to_us", [True, False], ids=["torch-to-ours", "ours-to-torch"])
@every_row
def test_a_checkpoint_crosses_between_torch_and_us(case, to_us, flat):
    moved, wanted, *_ = resumed(case, *((theirs, ours) if to_us else (ours, theirs)), flat)
    assert_close(moved, wanted, 1e-10)


@either_form
@every_row
def test_the_keys_are_torchs(case, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    forms = []
    for make in (ours, theirs):
        model = make_model(case)
        opt = make(case, model)
        go_on(model, opt, make_grads(dict(model), 2))
        forms.append(get_optimizer_state_dict(model, opt, options=options))
    if flat:
        assert forms[0].keys() == forms[1].keys()
    else:
        assert forms[0]["param_groups"] == forms[1]["param_groups"]
        keys = [{name: set(s) for name, s in form["state"].items()} for form in forms]
        assert keys[0] == keys[1]


@every_row
def test_asking_a_new_optimizer_for_its_state_moves_nothing(case):
    """torch makes the state with a step of learning rate 0 on gradients of 0."""
    model = make_model(case)
    opt = ours(case, model)
    rates = [group["lr"] for group in opt.param_groups]
    before = {name: p.detach().clone() for name, p in model.items()}
    get_optimizer_state_dict(model, opt)
    assert_same({name: p.detach() for name, p in model.items()}, before)
    assert [group["lr"] for group in opt.param_groups] == rates
    assert all(p.grad is None for p in model.values())
