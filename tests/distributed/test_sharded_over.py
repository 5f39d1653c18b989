"""Trees that are one process's part of a larger one, meshes of two dimensions, and faults."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, assert_same
from ranks import WORLD, needs_gloo, results
from ranks_models import alone as model_alone
from ranks_parts import (
    COMPOSED,
    OWNERS,
    RUNS,
    SCENES,
    SHAPES,
    lbfgs_alone,
    run,
    tensors,
    undivided_alone,
)

import functional_optim as fo

pytestmark = needs_gloo


@pytest.mark.parametrize(("name", "how", "owners"), RUNS, ids=lambda x: str(x))
def test_parts_step_as_the_whole(name, how, owners, both):
    """Also where a process has no leaves, no gradient in a step, or a NaN of its own."""
    whole = run(name, how, SCENES[name].recipe, SHAPES)
    ends = results(both, f"part-{name}-{how}-{owners}")
    for rank, end in enumerate(ends):
        assert_close(end, {n: whole[n] for n in end}, 1e-10)
        assert end.keys() == {n for n, owner in OWNERS[owners].items() if owner == rank}


def test_a_gradient_flows_through_the_sum(both):
    """To what each process has, from the sum of all losses."""
    names = ("a", "c")
    whole = {name: tensors(0)[name].requires_grad_() for name in names}
    tx = fo.clip_by_global_norm(1.0)
    sum(u.sum() for u in tx.update(whole, tx.init(whole), whole)[0].values()).backward()
    for name, mine in zip(names, results(both, "part-gradient"), strict=True):
        assert_close(mine, whole[name].grad, 1e-10)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("way", ["ddp", "fsdp2", "tp"])
def test_lbfgs_goes_where_one_process_goes(way, search, both):
    for mine in results(both, f"lbfgs-{way}-{search}"):
        assert_close(mine, lbfgs_alone(search), 1e-8)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_norms_over_several_meshes_add_up(shape, both):
    end, _ = model_alone(COMPOSED)
    for mine, placements in results(both, f"mesh-{shape}"):
        assert_close(mine, end, 1e-10)
        assert len(set(placements)) > 1


def test_fsdp1_that_divides_nothing_needs_nothing(both):
    for ends in results(both, "undivided"):
        for end in ends:
            assert_close(end, undivided_alone(), 1e-10)


FAULTS = {
    "another mesh": ("the gradient of parameter 'second' is a DTensor of shape (4,) on", "(4,)"),
    "plain slot": ("the slot 'exp_avg' of parameter 'second' is a plain tensor of", "(2,)"),
    "short slot": ("the slot 'exp_avg' of parameter 'second' is a DTensor of", "(3,)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_the_parameter_and_changes_nothing(fault, both):
    for before, after, said, counts in results(both, fault):
        assert_same(after, before)
        assert counts == [1.0, 1.0]
        for words in FAULTS[fault]:
            assert words in said


def test_a_plain_gradient_of_a_shard_is_named(both):
    for mine in results(both, "faulty update"):
        assert "the gradient of parameter 'w' is a plain tensor of shape (4,)" in mine["said"]
        assert "distribute_tensor" in mine["said"]


@pytest.mark.parametrize("way", ["fsdp1", "fsdp1-flat"])
def test_what_fsdp1_has_flattened_is_not_taken_for_the_model(way, both):
    name = {"fsdp1": "_fsdp_wrapped_module.0.", "fsdp1-flat": "_flat_param"}[way]
    for mine in results(both, "refusals"):
        said = mine[way]
        for key in ("clip", "functional"):
            assert "clip_by_global_norm measures the whole model" in said[key]
            assert "fo.sharded_over" in said[key]
            assert name in said[key]
        assert "scale_by_adafactor looks at whole tensors" in said["adafactor"]
        assert "fully_shard" in said["muon"]
        assert "inner products over the whole model" in said["lbfgs"]


def test_marks_are_refused_where_they_would_count_twice(both):
    for mine in results(both, "refusals"):
        assert "leave sharded_over out" in mine["fsdp2"]["marked"]


def test_a_process_outside_of_the_group_says_so(both):
    first, second = results(both, "refusals")
    assert "outside" not in first
    assert "not in the process group" in second["outside"]


def test_without_a_process_group_it_says_what_to_call():
    tx = fo.sharded_over(fo.clip_by_global_norm(1.0))
    w = torch.ones(2)
    with pytest.raises(RuntimeError, match="init_process_group first"):
        tx.update(w, tx.init(w), w)


@pytest.mark.parametrize("inner", [fo.add_noise(0.1, 0.5, seed=0), fo.flatten(fo.adam())])
def test_what_measures_by_itself_is_refused(inner):
    with pytest.raises(TypeError, match="made of one-tensor rules"):
        fo.sharded_over(inner)
    with pytest.raises(TypeError, match="made of one-tensor rules"):
        fo.sharded_over(fo.chain(fo.adam(), inner))


def test_there_are_as_many_processes_as_the_table_says(both):
    assert len(both) == WORLD
