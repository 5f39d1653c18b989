"""Checkpoints with gaps, and states on the meta device."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    assert_same,
    forgetting,
    run,
)
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
)

import functional_optim as fo
from functional_optim import adapters

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
