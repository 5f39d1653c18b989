"""What a parameter group may hold: the recipe's hyperparameters, and what others write there."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import as_parameters
from torch.optim import lr_scheduler, swa_utils

import functional_optim as fo
from functional_optim import adapters
from functional_optim.adapters.state.recipes import OTHERS


def only_lr(lr):
    return fo.adamw(lr)


def anything(lr, **others):
    return fo.adamw(lr, **others)


def params():
    return as_parameters({"a": torch.ones(2), "b": torch.ones(2)})


def stepped(opt, known):
    for p in known:
        p.grad = torch.ones_like(p)
    opt.step()
    return [p.detach().clone() for p in known]


@pytest.mark.parametrize("compile", [True, False])
def test_a_group_with_a_hyperparameter_that_the_recipe_does_not_take_is_refused(compile):
    a, b = params()
    groups = [{"params": [a], "weight_decay": 0.5}, {"params": [b], "weight_decay": 0.0}]
    words = r"has weight_decay, which the recipe does not take \(it takes: lr\).*param_groups"
    with pytest.raises(TypeError, match=words):
        adapters.Optimizer(groups, only_lr, lr=0.1, compile=compile)
    opt = adapters.Optimizer([a], only_lr, lr=0.1, compile=compile)
    with pytest.raises(TypeError, match=words):
        opt.add_param_group(groups[1])
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize("key", sorted(OTHERS - {"params", "param_names", "stored"}))
def test_what_schedulers_and_frameworks_write_is_let_pass(key):
    adapters.Optimizer([{"params": params(), key: 0.5}], only_lr, lr=0.1)


def test_all_that_torchs_schedulers_write_may_be_given_again():
    opt = adapters.Optimizer(params(), fo.sgd, lr=0.1, momentum=0.9)
    lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=4)
    lr_scheduler.CyclicLR(opt, 0.1, 0.2)
    swa_utils.SWALR(opt, swa_lr=0.05)
    adapters.Optimizer([dict(group) for group in opt.param_groups], fo.sgd, lr=0.1)


def test_an_entry_assigned_afterwards_stays():
    known = params()
    opt = adapters.Optimizer(known, only_lr, lr=0.1)
    opt.param_groups[0]["mine"] = "x"
    stepped(opt, known)
    other = adapters.Optimizer(params(), only_lr, lr=0.1)
    other.load_state_dict(opt.state_dict())
    assert other.param_groups[0]["mine"] == "x"
    assert copy.deepcopy(opt).param_groups[0]["mine"] == "x"


def test_a_recipe_that_takes_anything_gets_what_the_group_has():
    a, b = known = params()
    groups = [{"params": [a], "weight_decay": 0.5}, {"params": [b]}]
    found = stepped(adapters.Optimizer(groups, anything, lr=0.1), known)
    expected = []
    for decay, p in zip((0.5, 0.01), params(), strict=True):
        opt = adapters.Optimizer([p], fo.adamw, lr=0.1, weight_decay=decay)
        expected += stepped(opt, [p])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_drop_ins_ignore_other_keys_as_torch_does():
    for optimizer in (adapters.SGD, torch.optim.SGD):
        optimizer([{"params": params(), "mine": 3}], lr=0.1)


def test_gradient_free_refuses_them_too():
    with pytest.raises(TypeError, match=r"has sigam, which the recipe does not take.*sigma"):
        adapters.GradientFree(
            [{"params": params(), "sigam": 0.5}], fo.search.snes, population=4, sigma=0.5
        )
    opt = adapters.GradientFree([{"params": params(), "name": "all"}], fo.mezo, tx=fo.sgd, lr=0.1)
    assert opt.param_groups[0]["name"] == "all"
