"""Sharded parameters (DTensor): two processes go where one goes.

Shards are stepped eagerly, so kernels are compiled for one row only, beside them.
"""

from __future__ import annotations

import cases
import pytest
from helpers import assert_close, assert_same
from ranks import WORLD, needs_gloo, results
from ranks_tensors import (
    COMPOSED,
    KEPT,
    SHARDED,
    STEPS,
    THIN,
    alone,
    model_and_data,
    model_optimizer,
    named,
    step_adafactor,
    step_model,
    tensors,
    thin_tensors,
)
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.distributed.tensor import Replicate, Shard

pytestmark = needs_gloo

EXACT = 1e-12


def each(some):
    return pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in some])


@each(cases.CASES)
def test_two_processes_step_as_one(case, both):
    for mine in results(both, case.name):
        assert_close(mine["found"], alone(case), EXACT)


def test_a_kernel_beside_shards_measures_with_them(both):
    for mine in results(both, "compiled"):
        assert_close(mine["found"], alone(COMPOSED), EXACT)


@each(cases.CASES)
def test_slots_are_divided_as_their_parameters(case, both):
    _, states = alone(case)
    numbers = {"step", *case.tx().init(case.params()).carry}
    of_matrices = any(x.rule.runs.batched for x in case.tx().placements)
    for mine in results(both, case.name):
        for name, kinds in mine["placements"].items():
            shape, placement = SHARDED[name]
            for key, kind in kinds.items():
                own = states[name][key].shape
                momentum = own == shape and len(own) == 2 and key.startswith(("exp_avg", "momen"))
                if placement is None or key in numbers:
                    assert kind == "plain"
                elif of_matrices and not momentum:
                    assert "Partial" not in kind  # a factor, of which a process may have all
                elif own == ():  # a number of the tensor is the same everywhere
                    assert kind in ("plain", str((Replicate(),)))
                elif own == shape:
                    assert kind == str((placement,))
                else:  # a factor is divided where it can be, and no sum is left undone
                    gone = (
                        isinstance(placement, Shard) and own[placement.dim] < shape[placement.dim]
                    )
                    assert kind == str((Replicate() if gone else placement,))


@each(KEPT)
def test_a_checkpoint_on_disk_changes_nothing(case, both):
    for mine in results(both, f"saved-{case.name}"):
        assert_same(mine["resumed"], mine["through"])


@pytest.mark.parametrize("name", THIN)
def test_adafactor_steps_what_can_hardly_be_divided(name, both):
    p, state = step_adafactor(*thin_tensors(THIN[name][0]))
    for mine in results(both, "thin"):
        assert_close(mine[name], (p.detach(), state, p.detach()), EXACT)


def test_the_norm_of_the_clipping_recipe_is_more_than_a_shards():
    """Or the row "clip_by_global_norm" would say nothing about whose norm it is."""
    (case,) = named("clip_by_global_norm")
    for i in range(STEPS):
        grads = tensors(case, i + 1)
        assert sum(g.square().sum() for g in grads.values()).sqrt() > 2 * case.hyper["max_norm"]
        shard = grads["rows"].chunk(WORLD)[1]
        assert shard.square().sum() < 0.9 * grads["rows"].square().sum()


def test_a_fully_sharded_model_trains_as_a_whole_one(both):
    model, data = model_and_data()
    step_model(model, model_optimizer(model), data)
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    for mine in results(both, "fully_shard"):
        assert_close(mine["end"], wanted, EXACT)


def test_a_fully_sharded_checkpoint_goes_on_in_one_process(both):
    saved, *_ = results(both, "fully_shard")
    model, data = model_and_data()
    model.load_state_dict(saved["middle"])
    opt = model_optimizer(model)
    set_optimizer_state_dict(model, opt, saved["saved"])
    step_model(model, opt, data[STEPS:])
    assert_close({n: p.detach() for n, p in model.named_parameters()}, saved["end"], EXACT)
