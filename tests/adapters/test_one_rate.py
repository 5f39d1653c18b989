"""Prodigy and D-Adapted Adam over several parameter groups."""

from __future__ import annotations

import inspect

import pytest
import torch
from helpers import as_parameters, assert_close, copy_of, make_grads, make_params, run, step_object

import functional_optim as fo
from functional_optim import adapters

KINDS = {"prodigy": adapters.Prodigy, "dadapt_adam": adapters.DAdaptAdam}
kinds = pytest.mark.parametrize("name", KINDS)


@kinds
def test_two_learning_rates_raise_and_zero_does_not(name):
    mine = as_parameters(make_params())
    groups = [{"params": mine[:3], "lr": 0.5}, {"params": mine[3:], "lr": 0.25}]
    opt = KINDS[name](groups, compile=False)
    before = copy_of(mine)
    with pytest.raises(RuntimeError, match=r"learning rates \[0.25, 0.5\]; give all of them"):
        step_object(opt, make_grads(make_params(), 1))
    assert_close(copy_of(mine), before, 0.0)
    opt.param_groups[1]["lr"] = 0.0
    step_object(opt, make_grads(make_params(), 2))
    assert_close(copy_of(mine[3:]), before[3:], 0.0)
    assert not torch.equal(mine[2], before[2])


@kinds
def test_groups_with_other_decay_share_the_estimate(name):
    """As a trainer makes them: decay for some, none for others."""
    params = make_params()
    grads = make_grads(params, 6)
    names = list(params)
    tx = fo.partition({"a": getattr(fo, name)(d0=0.1, decouple=True), "b": fo.freeze()}, {"*": "a"})
    plain, state = run(tx, params, grads)
    mine = as_parameters(params)
    groups = [{"params": mine[:3]}, {"params": mine[3:]}]
    opt = KINDS[name](groups, d0=0.1, decouple=True, compile=False)
    opt.param_groups[0]["weight_decay"] = 1e-9  # another rule, of equal effect
    step_object(opt, grads)
    found = {float(opt.state[p]["d"]) for p in mine}
    assert max(found) == pytest.approx(float(fo.get(state, "d")), rel=1e-6)
    assert max(found) == pytest.approx(min(found), rel=1e-9)
    assert max(found) > 0.1
    assert_close(copy_of(mine), [plain[key] for key in names], 1e-6)


@kinds
def test_a_late_parameter_takes_over_the_estimate(name):
    mine = as_parameters(make_params())
    opt = KINDS[name](mine, d0=0.1, compile=False)
    grads = [list(tree.values()) for tree in make_grads(make_params(), 5)]
    step_object(opt, [[None, *tree[1:]] for tree in grads[:4]])
    step_object(opt, grads[4:])
    assert float(opt.state[mine[0]]["d"]) == float(opt.state[mine[2]]["d"]) >= 0.1


@kinds
def test_an_object_has_the_arguments_and_defaults_of_its_function(name):
    theirs = inspect.signature(getattr(fo, name)).parameters
    mine = inspect.signature(KINDS[name]).parameters
    assert list(mine) == ["params", *theirs, "compile", "stored"]
    assert all(mine[key].default == x.default for key, x in theirs.items())


@kinds
def test_a_growth_without_a_bound_has_a_meta_gradient(name):
    params = make_params()
    lr = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    moved, _ = run(getattr(fo, name)(lr, d0=0.05), params, make_grads(params, 4))
    slope = torch.autograd.grad(sum(p.sum() for p in moved.values()), lr)[0]
    assert torch.isfinite(slope)
    assert slope != 0


@kinds
def test_gradients_of_zero_count_for_nothing(name):
    w = torch.ones(3, dtype=torch.float64)
    tx = getattr(fo, name)(weight_decay=0.5, decouple=True)
    moved, state = run(tx, w, [torch.zeros_like(w)] * 3)
    assert torch.equal(moved, w)
    assert float(fo.get(state, "d")) == 1e-6


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: fo.prodigy(d0=0.0), "d0 above 0"),
        (lambda: fo.prodigy(growth_rate=0.9), "growth_rate of 1 or more"),
        (lambda: fo.prodigy(d_coef=0.0), "d_coef above 0"),
        (lambda: fo.prodigy(beta3=1.0), "beta3 in"),
        (lambda: fo.dadapt_adam(d0=-1.0), "d0 above 0"),
        (lambda: fo.dadapt_adam(weight_decay=-1.0), "Invalid weight_decay"),
    ],
)
def test_numbers_out_of_range_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("name", KINDS)
def test_betas_of_the_wrong_length_are_refused(name):
    with pytest.raises(TypeError, match="pair of numbers"):
        getattr(fo, name)(betas=(0.9,))
