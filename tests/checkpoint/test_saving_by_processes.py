"""Distributed checkpoints: saved by two processes and loaded by one, and the other way round.

Models are divided by FSDP2. Every process sees the same data, so all end where one process ends.
"""

from __future__ import annotations

import processes
import pytest
import saving_runs as runs
import torch
from helpers import assert_close, assert_same
from torch import distributed as dist

EXACT = 1e-12
pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"),
    # of a process without a group, which is what this one is
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninit"),
]

ROWS = [f"{name}-{form}" for name, form in runs.rows()]
every_row = pytest.mark.parametrize("row", ROWS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def alone(folder):
    """Where one process ends, by row; its checkpoints lie in one/."""
    torch.set_num_threads(1)
    return {
        f"{name}-{form}": runs.write(name, form, f"{folder}/one/{name}-{form}", shard=False)
        for name, form in runs.rows()
    }


@pytest.fixture(scope="module")
def two(folder, alone):
    """What two processes found; their checkpoints lie in two/."""
    return processes.collect(
        2, runs.both_ways, f"{folder}/two", f"{folder}/one", folder=folder / "ranks"
    )


@every_row
def test_two_processes_resume_bitwise(row, two):
    for mine in two:
        assert_same(mine[row]["again"], mine[row]["wanted"])


@every_row
def test_what_two_saved_one_resumes(row, two, folder, alone):
    name, form = row.rsplit("-", 1)
    found = runs.read(name, form, f"{folder}/two/{row}", shard=False)
    assert_close(found, two[0][row]["wanted"], EXACT)
    assert_close(found, alone[row], EXACT)


@every_row
def test_what_one_saved_two_resume(row, two, alone):
    for mine in two:
        assert_close(mine[row]["of one"], alone[row], EXACT)


@pytest.mark.parametrize("name", runs.STOCK)
def test_a_sharded_checkpoint_of_torchs_is_ours_and_back(name, two, folder):
    for mine in two:
        found = mine[f"torch-{name}"]
        assert_close(found["ours"], found["wanted"], 1e-10)
        assert_close(found["theirs"], found["wanted"], 1e-10)
    end = runs.read(name, "flat", f"{folder}/two/torch-{name}", shard=False)
    assert_close(end, two[0][f"torch-{name}"]["wanted"], 1e-10)


@pytest.mark.parametrize("name", runs.RECIPES)
def test_the_functional_loop_goes_where_the_object_goes(name, alone):
    assert_close(alone[f"{name}-functional"], alone[f"{name}-nested"], EXACT)


def test_a_sharded_checkpoint_of_torchs_loads_into_a_functional_state(two):
    for mine in two:
        assert_close(mine["functional-of-torch"], mine["torch-AdamW"]["wanted"], 1e-10)


def test_a_divided_state_on_the_meta_device_is_filled(two):
    for mine in two:
        assert_same(*mine["functional-of-meta"])


def test_divided_state_beside_a_whole_parameter_is_refused_by_name(two):
    """And the other way round. The optimizer goes on."""
    for mine in two:
        for row, (kind, own) in zip(
            mine["refused"], [("plain tensor", "DTensor"), ("DTensor", "plain tensor")], strict=True
        ):
            assert f"exp_avg of parameter '0.weight' is a {kind} of shape (7, 4)" in row["said"]
            assert f"but the parameter is a {own}" in row["said"]
            assert "torch.distributed.checkpoint" in row["said"]
            assert_same(*row["ends"])


def test_an_asynchronous_save_has_the_state_of_its_call(two):
    for mine in two:
        assert_same(mine["async"]["again"], mine["async"]["wanted"])


def test_the_model_moves():
    """Or all of the above would be equal for no reason."""
    start = runs.whole(dict(runs.make_model(shard=False).named_parameters()))
    model = runs.make_model(shard=False)
    runs.train(model, runs.make_optimizer("composed", model), 0, runs.STEPS)
    moved = runs.whole(dict(model.named_parameters()))
    assert all(not torch.allclose(moved[name], start[name], rtol=1e-4) for name in start)
