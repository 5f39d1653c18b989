"""`state_dict` and `load_state_dict` of trees, dicts and devices that are out of the ordinary."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from helpers import assert_same, forgetting, run, through_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import functional_optim as fo
from functional_optim import adapters


def test_two_parameters_of_one_path_are_refused():
    params = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    state = fo.adam(0.1).init(params)
    with pytest.raises(ValueError, match=r"kept under 'state\.a\.b\.step'; rename a parameter"):
        fo.state_dict(state, params)
    saved = fo.state_dict(fo.adam(0.1).init({"a": {"b": torch.ones(2)}}), {"a": {"b": 0}})
    with pytest.raises(ValueError, match=r"kept under 'state\.a\.b\.step'; rename a parameter"):
        fo.load_state_dict(state, saved, params)


@pytest.mark.parametrize("params", [{}, [], {"a": None}], ids=str)
def test_a_model_without_parameters_keeps_its_count(params):
    tx = fo.adam(0.1)
    _, state = tx.update(params, tx.init(params), params)
    saved = through_file(fo.state_dict(state, params))
    assert saved == {"state.step": torch.tensor(1.0)}
    assert_same(fo.load_state_dict(tx.init(params), saved, params), state)


def test_numbers_that_are_nan_are_kept_and_do_not_differ():
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    state = fo.nadam(0.1).init(params)._replace(carry={"mu_product": torch.tensor(torch.nan)})
    saved = through_file(fo.state_dict(state, params))
    assert fo.load_state_dict(state, saved, params).carry["mu_product"].isnan()


def test_any_mapping_is_read():
    params = {"w": torch.ones(2)}
    state = fo.adam(0.1).init(params)
    saved = fo.state_dict(state, params)
    nested = {"w": {key.rsplit(".", 1)[1]: x for key, x in saved.items()}}
    for given in (MappingProxyType(saved), {"state": MappingProxyType(nested)}):
        assert_same(fo.load_state_dict(state, given, params), state)


@pytest.mark.parametrize("known", [3.0, None], ids=str)
def test_the_step_that_is_said_counts(known):
    """A partial load of a checkpoint without counts leaves those of the new state, which are 0."""
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    state = fo.sgd(0.1, momentum=0.9).init(params)
    saved = {**fo.state_dict(state, params), "state.a.step": known}
    assert fo.load_state_dict(state, saved, params, step=1000).step == 1000
    for bad in (-1, 0.5, torch.nan, "3", True):
        with pytest.raises(ValueError, match="step is"):
            fo.load_state_dict(state, saved, params, step=bad)
    with pytest.raises(ValueError, match=r"say with step=… how many steps are done\.|NoneType"):
        fo.load_state_dict(state, saved, params)


# ---------------------------------------------------------------- distributed checkpoints with gaps

PARTIAL = dcp.DefaultLoadPlanner(allow_partial_load=True)
alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninit")


def stepped(model, opt, steps=3):
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    return get_optimizer_state_dict(model, opt, options=flat)


@alone
def test_a_checkpoint_of_torchs_sgd_is_read_in_part_and_told_its_steps(tmp_path):
    model = torch.nn.Linear(2, 3)
    saved = stepped(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    dcp.save({"opt": saved}, checkpoint_id=tmp_path)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = fo.sgd(0.1, momentum=0.9).init(params)
    held = {"opt": fo.state_dict(state, params)}
    with pytest.raises(dcp.CheckpointException, match=r"state\.bias\.step"):
        dcp.load(held, checkpoint_id=tmp_path)
    dcp.load(held, checkpoint_id=tmp_path, planner=PARTIAL)
    loaded = fo.load_state_dict(state, held["opt"], params, step=3)
    assert loaded.step == 3
    assert_same(
        loaded.slots["momentum_buffer"],
        {name: saved[f"state.{name}.momentum_buffer"] for name in params},
    )


@alone
def test_a_frozen_leaf_has_nothing_in_an_objects_checkpoint(tmp_path):
    model = torch.nn.Linear(2, 3)
    tx = fo.chain(fo.freeze("bias"), fo.adamw(0.1))
    opt = adapters.Optimizer(model.named_parameters(), lambda: tx, compile=False)
    saved = stepped(model, opt)
    dcp.save({"opt": saved}, checkpoint_id=tmp_path)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    held = {"opt": fo.state_dict(tx.init(params), params)}
    dcp.load(held, checkpoint_id=tmp_path, planner=PARTIAL)
    loaded = fo.load_state_dict(tx.init(params), held["opt"], params)
    assert loaded.step == 3
    assert_same(loaded.slots["exp_avg"]["weight"], saved["state.weight.exp_avg"])
    assert "state.bias.step" not in saved


# ---------------------------------------------------------------- states on the meta device


def on_meta(tree):
    return fo.tree.map(lambda x: x.to("meta"), tree)


def test_a_state_on_the_meta_device_takes_the_values_where_they_are():
    params = {"w": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)}
    tx = fo.chain(fo.nadam(0.1), fo.params_ema(0.9))
    middle, state = run(tx, params, [params] * 2)
    loaded = fo.load_state_dict(tx.init(on_meta(params)), fo.state_dict(state, params), params)
    assert_same(forgetting(loaded), forgetting(state))
    wanted, found = (run(tx, middle, [params], s)[0] for s in (state, loaded))
    assert_same(found, wanted)


def test_what_is_on_the_meta_device_has_no_values():
    params = {"w": torch.ones(2)}
    tx = fo.adam(0.1)
    hollow = tx.init(on_meta(params))
    with pytest.raises(ValueError, match=r"state\.w\.step is on the meta device.*real parameters"):
        fo.state_dict(hollow, params)
    saved = fo.state_dict(tx.init(params), params)
    bad = {**saved, "state.w.exp_avg": saved["state.w.exp_avg"].to("meta")}
    with pytest.raises(ValueError, match=r"state\.w\.exp_avg is on the meta device"):
        fo.load_state_dict(tx.init(params), bad, params)
    bad.pop("state.w.exp_avg")
    with pytest.raises(ValueError, match=r"exp_avg is on the meta device.*none was saved"):
        fo.load_state_dict(hollow, bad, params, strict=False)
