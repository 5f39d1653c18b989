"""The optimizer's own count of steps, which gates read, if no parameter had a gradient in each."""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import assert_same, step_object, through_file
from torch.distributed.checkpoint import state_dict as sd

import functional_optim as fo
from functional_optim import adapters

ONES = [torch.ones(1)] * 2


def every_third():
    return fo.conditionally_mask(fo.sgd(1.0), lambda count: count % 3 == 0)


def made():
    model = torch.nn.ParameterDict({name: torch.zeros(1) for name in "ab"})
    return model, adapters.Optimizer(model.named_parameters(), every_third)


def take_turns(opt, steps):
    step_object(opt, [[None, torch.ones(1)][:: -1 if k % 2 else 1] for k in steps])


def resumed(way, model, opt, folder):
    """A new model and its optimizer with the saved state."""
    other, new = made()
    other.load_state_dict(model.state_dict())
    if way == "object":
        new.load_state_dict(through_file(opt.state_dict()))
        return other, new
    options = sd.StateDictOptions(flatten_optimizer_state_dict=way == "flat")
    saved = sd.get_optimizer_state_dict(model, opt, options=options)
    if way == "files":
        held = sd.get_optimizer_state_dict(other, new, options=options)
        dcp.save({"opt": saved}, checkpoint_id=folder, no_dist=True)
        dcp.load({"opt": held}, checkpoint_id=folder, no_dist=True)
        saved = held
    sd.set_optimizer_state_dict(other, new, saved, options=options)
    return other, new


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", ["object", "nested", "flat", "files"])
def test_a_resumed_run_steps_when_the_first_one_does(way, tmp_path):
    first = made()
    take_turns(first[1], range(4))
    second = resumed(way, *first, tmp_path)
    for _, opt in (first, second):
        take_turns(opt, range(4, 9))
        assert opt.numbers("step") == {"step": 9.0}
    assert_same(*[[p.detach() for p in model.parameters()] for model, _ in (first, second)])


def test_a_count_that_is_that_of_a_parameter_is_in_no_state():
    _, opt = made()
    step_object(opt, [ONES])
    new = made()[1]
    new.load_state_dict(opt.state_dict())
    for one in (opt, new):
        assert all("optimizer_step" not in state for state in one.state.values())


def test_a_chain_takes_the_count_only_if_it_is_that_of_all_parameters():
    model, opt = made()
    params = {name: p.detach().clone() for name, p in model.items()}
    state = every_third().init(params)
    take_turns(opt, range(4))
    flat = sd.StateDictOptions(flatten_optimizer_state_dict=True)
    saved = sd.get_optimizer_state_dict(model, opt, options=flat)
    with pytest.raises(ValueError, match="optimizer_step"):
        fo.load_state_dict(state, saved, params)
    assert fo.load_state_dict(state, saved, params, step=4).step == 4
    model, opt = made()
    step_object(opt, [ONES])
    saved = sd.get_optimizer_state_dict(model, opt, options=flat)
    assert fo.load_state_dict(state, saved, params).step == 1


def test_a_flat_dict_of_a_version_without_the_count_loads():
    model, opt = made()
    step_object(opt, [ONES] * 4)
    flat = sd.StateDictOptions(flatten_optimizer_state_dict=True)
    saved = sd.get_optimizer_state_dict(model, opt, options=flat)
    older = {key: x for key, x in saved.items() if not key.endswith(".optimizer_step")}
    assert len(older) < len(saved)
    other, new = made()
    other.load_state_dict(model.state_dict())
    sd.set_optimizer_state_dict(other, new, older, options=flat)
    for each in (opt, new):
        step_object(each, [ONES] * 3)
    assert_same(list(other.parameters()), list(model.parameters()))
    assert_same(new.state_dict()["state"], opt.state_dict()["state"])


def test_noise_of_a_version_that_counted_its_own_steps_is_refused_by_the_step():
    """Pickle loads it as it was."""
    w = torch.nn.Parameter(torch.zeros(2))
    opt = adapters.NoisySGD([w], lr=0.1, eta=1.0, gamma=20.0)
    old = {"0.step": torch.tensor(6), "0.seed": torch.tensor(3), "1.step": torch.tensor(6)}
    opt.state[w] = dict(old)
    opt = copy.deepcopy(opt)
    (w,) = opt.param_groups[0]["params"]
    w.grad = torch.zeros(2)
    with pytest.raises(RuntimeError, match=r"of parameter '0' has '0\.seed'.*add_noise"):
        opt.step()
    assert opt.state[w] == old
    opt.state[w] = {"step": 6}  # as the error says
    opt.step()
    assert opt.state[w]["step"] == 7
    assert 0 < w.abs().max() < 1e-6


class Seeded(NamedTuple):
    seed: torch.Tensor


def test_two_rules_of_a_user_may_have_a_seed():
    def update(u, slots, p):
        return u, Seeded(slots.seed + 1)

    rules = [fo.leafwise(lambda p: Seeded(torch.zeros_like(p)), update, name=name) for name in "xy"]
    w = torch.nn.Parameter(torch.ones(2))
    opt = adapters.Optimizer([w], lambda: fo.chain(*rules, fo.sgd(0.1)), compile=False)
    for _ in range(2):
        w.grad = torch.ones(2)
        opt.step()
    assert {"x.seed", "y.seed"} <= opt.state[w].keys()


def test_a_load_asks_for_the_slots_of_a_shape_once():
    """Slots on the meta device are slow to make: parameters of one shape share those of a load."""
    made = []

    def init(p):
        made.append(p.is_meta)
        return Sum(torch.zeros_like(p))

    rule = fo.leafwise(init, lambda u, slots, p: (u, Sum(slots.total + u)), name="summed")
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(20)]
    opt = adapters.Optimizer(params, lambda: fo.chain(rule, fo.scale(-0.1)), compile=False)
    for p in params:
        p.grad = torch.ones(3)
    opt.step()
    saved = opt.state_dict()
    made.clear()
    opt.load_state_dict(saved)
    assert made == [True]
    assert all(
        opt.state[p]["total"] is not saved["state"][i]["total"] for i, p in enumerate(params)
    )


@pytest.mark.parametrize("recipe", [fo.adamw, fo.nadam], ids=["count", "carried"])
def test_a_load_copies_numbers_that_are_saved_as_vectors(recipe):
    """Steps wrote the step count, and a carried scalar, into a loaded tensor of shape (1,)."""
    w = torch.nn.Parameter(torch.ones(2))
    opt = adapters.Optimizer([w], recipe, lr=0.1, compile=False)
    step_object(opt, [[torch.ones(2)]])
    saved = opt.state_dict()
    state = {
        key: x if x.dim() else torch.tensor([x.item()]) for key, x in saved["state"][0].items()
    }
    before = {key: x.clone() for key, x in state.items()}
    opt.load_state_dict({**saved, "state": {0: state}})
    step_object(opt, [[torch.ones(2)]])
    assert_same(state, before)
    assert opt.state[w]["step"].item() == 2


class Sum(NamedTuple):
    total: torch.Tensor
