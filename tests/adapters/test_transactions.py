"""What is loaded or added is there as a whole, or the optimizer is as it was."""

from __future__ import annotations

import copy

import optree
import pytest
import torch
from interrupted import flags, interrupt

import functional_optim as fo
from functional_optim import adapters
from functional_optim.adapters.state.transaction import transaction

pytestmark = pytest.mark.usefixtures("pythons_own_handler")


def trained(make, steps):
    """An optimizer object that has made a few steps."""
    w = torch.nn.Parameter(torch.ones(2, 2))
    opt = make([w])

    def closure():
        opt.zero_grad()
        loss = w.square().sum()
        if not isinstance(opt, adapters.GradientFree):
            loss.backward()
        return loss

    for _ in range(steps):
        opt.step(closure)
    return opt


def everything(opt):
    """What a transaction restores, as a text that can be compared."""
    plain = {key: x for key, x in sorted(vars(opt).items()) if isinstance(x, (bool, int, str))}
    every = [opt.state_dict(), opt.defaults, sorted(vars(opt)), plain]
    return str(optree.tree_map(lambda x: x.tolist() if isinstance(x, torch.Tensor) else x, every))


MAKERS = {
    "drop-in": lambda params: adapters.AdamW(params, lr=0.1, compile=False),
    "recipe": lambda params: adapters.Optimizer(params, fo.adamw, lr=0.1, compile=False),
    "lbfgs": lambda params: adapters.LBFGS(params, lr=0.1, max_iter=2),
    "gradient-free": lambda params: adapters.GradientFree(
        params, fo.search.snes, population=4, sigma=0.5
    ),
    "stub": lambda params: adapters.OptimizerStub(params, lr=0.1),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@every_maker
def test_an_interrupted_load_is_complete_or_has_never_been(make):
    saved = copy.deepcopy(trained(make, 3).state_dict())
    saved["param_groups"][0]["lr"] = 0.25
    opt = trained(make, 1)
    before = everything(opt)
    opt.load_state_dict(saved)
    after = everything(opt)
    assert before != after
    at, reached, undone = 1, True, 0
    usual = flags()
    while reached:
        opt = trained(make, 1)
        raised, reached = interrupt(lambda: opt.load_state_dict(saved), at)  # noqa: B023
        assert raised == reached
        assert flags() == usual
        found = everything(opt)
        if raised and found == before:
            undone += 1
        else:
            assert found == after
        at += 37
    assert undone > 2


@pytest.mark.parametrize("name", ["drop-in", "recipe", "stub"])
def test_an_interrupted_group_is_complete_or_was_never_added(name):
    group = {"params": [torch.ones(3)], "lr": 0.5}
    at, reached, counts = 1, True, set()
    while reached:
        opt = trained(MAKERS[name], 1)
        before = everything(opt)
        _, reached = interrupt(lambda: opt.add_param_group(dict(group)), at)  # noqa: B023
        counts.add(len(opt.param_groups))
        if len(opt.param_groups) == 1:
            assert everything(opt) == before
        at += 29
    assert counts == {1, 2}


def test_all_that_a_failed_change_did_to_an_optimizer_is_undone():
    opt = trained(MAKERS["drop-in"], 1)
    before, groups, state = everything(opt), opt.param_groups, opt.state

    def change(value):
        opt.own = value
        opt.state, opt.param_groups = {}, []
        groups.append({"params": []})
        opt.defaults["lr"] = value
        opt.defaults["another"] = value
        del opt.compile
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transaction(opt, change, 1.0)
    assert opt.param_groups is groups
    assert opt.state is state
    assert everything(opt) == before
    assert not hasattr(opt, "own")


def test_a_change_that_succeeds_stays_and_returns():
    opt = trained(MAKERS["drop-in"], 1)

    def change():
        opt.own = 1
        return "done"

    assert transaction(opt, change) == "done"
    assert opt.own == 1


def test_a_load_that_torch_refuses_half_way_leaves_the_defaults():
    """torch's own __setstate__ adds an entry to them before it finds what is missing."""
    opt = trained(MAKERS["drop-in"], 1)
    saved = copy.deepcopy(opt.state_dict())
    for state in saved["state"].values():
        del state["step"]
    before = everything(opt)
    with pytest.raises(ValueError, match="step"):
        opt.load_state_dict(saved)
    assert everything(opt) == before
