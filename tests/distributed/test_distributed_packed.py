"""Slots of DTensors that are packed: each process packs its own part."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import assert_same
from ranks import needs_gloo, results
from ranks_packed import KINDS, MATRICES, model_of, optimizer, stored, tensors
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from functional_optim import adapters

pytestmark = [needs_gloo, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_stepped_as_plain_tensors(kind, both):
    first, second = results(both, f"packed-{kind}")
    for ends in (first, second):
        for way in ("object", "update"):
            assert_same(ends[way], ends["parts"])
        assert_same(ends["compiled"], ends["compiled parts"])
    start = tensors(0)["rows"]
    assert (first["object"]["rows"] - start[:20]).abs().min() > 0
    assert not second["object"]["one row"].numel()


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_two_processes_goes_on_bitwise_in_two(kind, both):
    for mine in results(both, f"packed-saved-{kind}"):
        assert_same(mine["resumed"], mine["through"])
        _, states = mine["through"]
        assert f"exp_avg.{kind}" in states["rows"]


def test_decoded_shards_are_packed_as_they_were_by_the_same_processes(both):
    """But for a code that was rounded by chance: it may lie between two of a new scale."""
    for mine in results(both, "packed-decoded"):
        for name, state in mine["before"].items():
            assert state.keys() == mine["after"][name].keys()
            for key, x in state.items():
                same = torch.isclose(x.float(), mine["after"][name][key].float(), atol=1)
                assert same.float().mean() > 0.99


def in_one_process(kind="int8"):
    """Parameters and an optimizer of them, whose state torch has made."""
    params = {name: torch.nn.Parameter(x) for name, x in tensors(0).items()}
    return params, model_of(params), optimizer(params, lambda: stored(kind))


def test_a_decoded_checkpoint_is_loaded_by_another_number_of_processes(both):
    found = results(both, "packed-decoded")[0]
    params, model, opt = in_one_process()
    handle = opt.register_state_dict_post_hook(adapters.decode_slots)
    held = {"opt": get_optimizer_state_dict(model, opt)}
    dcp.load(held, checkpoint_id=f"{found['folder']}/decoded")
    handle.remove()
    assert_same(held["opt"]["state"], found["decoded"]["state"])
    set_optimizer_state_dict(model, opt, held["opt"])
    again = opt.state_dict(decoded=True)["state"]
    for i, (name, p) in enumerate(params.items()):
        assert opt.state[p]["exp_avg.int8"].dim() == 2
        wanted = found["decoded"]["state"][name.replace(" ", "_")]["exp_avg"]
        assert (again[i]["exp_avg"] - wanted).norm() / wanted.norm() < 0.02


def test_slots_in_bfloat16_are_loaded_by_any_number_of_processes(both):
    found = results(both, "packed-saved-bfloat16")[0]
    _, model, opt = in_one_process("bfloat16")
    held = {"opt": get_optimizer_state_dict(model, opt)}
    dcp.load(held, checkpoint_id=found["path"])
    assert_same(held["opt"]["state"], found["saved"])
    assert "exp_avg.bfloat16" in found["saved"]["rows"]


def test_functional_states_are_packed_in_parts(both):
    for mine in results(both, "packed-functions"):
        assert_same(mine["loaded"], mine["state"])
        assert_same(mine["from plain"], mine["encoded"])
        assert mine["plain"]["state.rows.exp_avg"].shape == (40, 48)
        assert mine["state"]["state.rows.exp_avg.int8"].shape == (1, 1, 15, 64)


def test_parts_are_refused_by_another_number_of_processes(both):
    found = results(both, "packed-decoded")[0]
    _, model, opt = in_one_process()
    held = {"opt": get_optimizer_state_dict(model, opt)}
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(dcp.api.CheckpointException, match=r"(?i)size mismatch"):
        dcp.load(held, checkpoint_id=f"{found['folder']}/in-parts")
    wanted = r"'rows' is packed in int8, in 15 blocks of 64 in each of 2 parts, .*decoded=True"
    with pytest.raises(ValueError, match=wanted):
        set_optimizer_state_dict(model, opt, found["packed"])
    assert_same(opt.state_dict()["state"], before["state"])


def test_the_whole_tensor_tells_whether_it_is_packed(both):
    for packed in results(both, "packed-where"):
        assert packed == ["large.weight"]


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_are_computed_whole_beside_packed_parts(name, both):
    """Blocks and random numbers are others than those of one process."""
    for owned, parts, alone in results(both, f"packed-{name}"):
        assert_same(owned, parts)
        start = torch.randn(15, 25, generator=torch.Generator().manual_seed(0))
        assert 0 < (parts - alone).norm() < 0.05 * (alone - start).norm()
