"""Names in a checkpoint: those of wrappers, of a part, and what a user renamed or reordered."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from helpers import assert_same
from test_bad_checkpoints import NAMES, Model, trained
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from functional_optim import adapters


def test_names_differ_by_a_wrapper_only():
    """A checkpoint of a compiled model, or of one in DistributedDataParallel."""
    opt, *_ = trained("Optimizer")
    for prefix in ("_orig_mod.", "module.", "module._orig_mod.", "_fsdp_wrapped_module."):
        saved = copy.deepcopy(opt.state_dict())
        saved["param_groups"][0]["param_names"] = [prefix + name for name in NAMES]
        opt.load_state_dict(saved)
        assert opt.param_groups[0]["param_names"] == list(NAMES)


def test_wrappers_are_ignored_inside_names_as_well():
    """A part that is wrapped alone: compiled, recomputed, in its own DDP or FSDP."""
    opt, *_ = trained("AdamW")
    for inside in ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"):
        saved = copy.deepcopy(opt.state_dict())
        inner = [name.replace(".", f".{inside}.") for name in NAMES]
        saved["param_groups"][0]["param_names"] = inner
        opt.load_state_dict(saved)
        saved["param_groups"][0]["param_names"] = inner[::-1]
        with pytest.raises(ValueError, match="another order"):
            opt.load_state_dict(saved)


def test_names_in_the_place_of_parameters_are_compared():
    """As get_optimizer_state_dict and FSDP.optim_state_dict write them."""
    opt, model, _ = trained("AdamW")
    saved = get_optimizer_state_dict(model, opt)
    saved["param_groups"][0].pop("param_names")
    opt.load_state_dict(saved)
    saved["param_groups"][0]["params"].reverse()
    with pytest.raises(ValueError, match=r"another order: head\.weight was saved in the place of"):
        opt.load_state_dict(saved)


def test_an_optimizer_of_a_part_is_loaded_by_the_names_in_the_whole():
    """Its own names are shorter. torch has found each parameter's state before it loads."""
    model = Model()
    unnamed = adapters.AdamW(model.body.parameters(), compile=False)
    named = adapters.AdamW(model.body.named_parameters(), compile=False)
    set_optimizer_state_dict(model, named, get_optimizer_state_dict(model, unnamed))
    assert named.param_groups[0]["param_names"] == ["weight", "bias"]


def by_order(opt: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The hook for a model whose parameters have new names."""
    groups = [
        {key: x for key, x in group.items() if key != "param_names"}
        for group in given["param_groups"]
    ]
    return {**given, "param_groups": groups}


def by_name(opt: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The hook for a model whose parameters are in another order."""
    saved, groups = given["param_groups"], []
    for mine, theirs in zip(opt.param_groups, saved, strict=True):
        places = dict(zip(theirs["param_names"], theirs["params"], strict=True))
        names = mine["param_names"]
        groups.append({**theirs, "params": [places[n] for n in names], "param_names": names})
    return {**given, "param_groups": groups}


def test_hooks_load_what_was_renamed_or_reordered():
    """As the documentation of torch's load_state_dict asks for where names are to count."""
    opt, *_ = trained("AdamW")
    good = copy.deepcopy(opt.state_dict())
    renamed = copy.deepcopy(good)
    renamed["param_groups"][0]["param_names"] = ["a", "b", "c"]
    reordered = copy.deepcopy(good)
    reordered["param_groups"][0]["param_names"].reverse()
    reordered["param_groups"][0]["params"].reverse()
    for bad, hook in ((renamed, by_order), (reordered, by_name)):
        opt.state.clear()
        with pytest.raises(ValueError, match=r"opt\.register_load_state_dict_pre_hook"):
            opt.load_state_dict(bad)
        handle = opt.register_load_state_dict_pre_hook(hook)
        opt.load_state_dict(bad)
        handle.remove()
        assert_same(opt.state_dict()["state"], good["state"])
        assert opt.state_dict()["param_groups"] == good["param_groups"]
