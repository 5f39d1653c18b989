"""A schedule among an object's hyperparameters: code, which no checkpoint has and no load loses."""

import copy
import pickle

import pytest
import torch
from helpers import assert_same, copy_of, through_file
from torch.distributed.checkpoint import state_dict as sd

import functional_optim as fo
from functional_optim import adapters
from functional_optim.adapters.fault_tolerant.schedulers import Schedules


def falling():
    return fo.schedules.linear(0.1, 0.0, 8)


def rate(step):
    return 0.1 / (1 + step)


def make(lr=None, betas=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    groups = [
        {"params": [("weight", model.weight)], "lr": lr or falling()},
        {"params": [("bias", model.bias)]},
    ]
    hyper = {"lr": 0.05, "betas": betas or (fo.schedules.linear(0.5, 0.9, 6), 0.99)}
    return model, adapters.Optimizer(groups, fo.adamw, compile=False, **hyper)


def go(model, opt, steps):
    x = torch.arange(12, dtype=torch.float64).reshape(4, 3)
    for _ in range(steps):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()


def by_position(model, opt, twin, other):
    twin.load_state_dict(through_file(opt.state_dict()))


def by_name(flat):
    def load(model, opt, twin, other):
        options = sd.StateDictOptions(flatten_optimizer_state_dict=flat)
        saved = through_file(sd.get_optimizer_state_dict(model, opt, options=options))
        sd.set_optimizer_state_dict(other, twin, saved, options=options)

    return load


@pytest.mark.parametrize(
    "load", [by_position, by_name(False), by_name(True)], ids=["object", "nested", "flat"]
)
def test_a_run_with_schedules_goes_on_bitwise_through_a_file(load):
    model, opt = make()
    go(model, opt, 3)
    other, twin = make()
    other.load_state_dict(model.state_dict())
    live = twin.param_groups[0]["lr"]
    load(model, opt, twin, other)
    assert twin.param_groups[0]["lr"] is live
    assert callable(twin.param_groups[1]["betas"][0])
    go(model, opt, 3)
    go(other, twin, 3)
    assert_same(copy_of(list(other.parameters())), copy_of(list(model.parameters())))


def test_none_stands_in_a_schedules_place_and_the_optimizer_keeps_it():
    _, opt = make()
    groups = opt.state_dict()["param_groups"]
    assert [group["lr"] for group in groups] == [None, 0.05]
    assert groups[0]["betas"] == (None, 0.99)
    assert callable(opt.param_groups[0]["lr"])


def test_a_schedule_stays_whatever_rate_was_saved():
    """A run is taken up with a schedule, where it had a number."""
    model, opt = make(lr=0.3)
    go(model, opt, 1)
    _, twin = make()
    live = twin.param_groups[0]["lr"]
    twin.load_state_dict(opt.state_dict())
    assert twin.param_groups[0]["lr"] is live


def test_a_number_has_no_schedule_to_take():
    """The other way round there is none: an error, and nothing is changed."""
    model, opt = make()
    go(model, opt, 1)
    other, twin = make(lr=0.3, betas=(0.9, 0.99))
    go(other, twin, 2)
    before = copy.deepcopy(twin.state_dict())
    with pytest.raises(ValueError, match=r"None was saved for lr, betas; it replaces"):
        twin.load_state_dict(opt.state_dict())
    assert_same(twin.state_dict()["state"], before["state"])
    assert twin.state_dict()["param_groups"] == before["param_groups"]


def test_a_module_among_the_hyperparameters_is_saved():
    """A learned optimizer's network is called, too, but it has parameters."""
    net = torch.nn.Linear(1, 1)
    opt = adapters.Optimizer([torch.ones(1)], lambda net: fo.sgd(0.1), compile=False, net=net)
    assert opt.state_dict()["param_groups"][0]["net"] is net


@pytest.mark.parametrize("form", [str, lambda dtype: dtype], ids=["name", "dtype"])
def test_a_dtype_is_saved_by_its_name(form):
    """torch gathers no dtypes; earlier checkpoints have them."""

    def make(dtype):
        return adapters.NorMuon([torch.ones(2, 2)], lr=0.1, ns_dtype=dtype)

    saved = make(torch.float64).state_dict()
    (group,) = saved["param_groups"]
    assert group["ns_dtype"] == "torch.float64"
    group["ns_dtype"] = form(torch.float64)
    opt = make(torch.float32)
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["ns_dtype"] is torch.float64


def test_a_hook_may_return_what_it_likes():
    _, opt = make()
    opt.register_state_dict_post_hook(lambda opt, saved: {"optimizer": saved})
    assert opt.state_dict().keys() == {"optimizer"}


def test_a_copy_has_the_schedule_and_a_pickle_needs_its_name():
    model, opt = make()
    go(model, opt, 1)
    twin = copy.deepcopy(opt)
    assert twin.param_groups[0]["lr"] is opt.param_groups[0]["lr"]
    again = pickle.loads(pickle.dumps(opt))
    assert [again.param_groups[0]["lr"](n) for n in range(9)] == [falling()(n) for n in range(9)]
    _, local = make(betas=(lambda step: 0.9, 0.99))
    with pytest.raises(
        pickle.PicklingError, match=r"optimizer's betas .*lambda> cannot be .*opt\.state_dict\(\)"
    ):
        pickle.dumps(local)
    _, named = make(lr=rate, betas=(0.9, 0.99))
    assert pickle.loads(pickle.dumps(named)).param_groups[0]["lr"] is rate


def test_a_peer_is_given_no_schedule_and_keeps_its_own():
    (_, first), (_, second) = make(), make()
    first.param_groups[1]["lr"] = 0.7
    live = second.param_groups[0]["lr"]
    saved = through_file(Schedules(lambda: first.param_groups).save())
    Schedules(lambda: second.param_groups).load(saved, groups=True)
    assert second.param_groups[0]["lr"] is live
    assert second.param_groups[1]["lr"] == 0.7
