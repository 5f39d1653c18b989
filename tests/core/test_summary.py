"""The table of rules, views and sizes is what init and update do."""

from __future__ import annotations

import optree
import pytest
import torch
from cases import able

import functional_optim as fo


def network(layers=3):
    params = {"wte.weight": torch.zeros(16, 4)}
    for i in range(layers):
        params[f"h.{i}.qkv.weight"] = torch.zeros(12, 4)
        params[f"h.{i}.qkv.bias"] = torch.zeros(12)
    return params


def test_layers_are_one_line_with_their_number():
    table = fo.summary(fo.muon_adamw(views={"*.qkv.weight": {"split": 3}}), network())
    lines = str(table).splitlines()
    assert lines[2].split()[:3] == ["h.*.qkv.weight", "×3", "(12,"]
    assert "3 × (4, 4)" in lines[2]
    assert "scale_by_muon → orthogonalize → add_decayed_weights → scale_by_lr" in lines[2]
    assert len(lines) == 5
    assert repr(table) == str(table)


def test_what_differs_is_not_one_line():
    params = network() | {"h.3.qkv.weight": torch.zeros(24, 4)}
    lines = str(fo.summary(fo.muon_adamw(), params)).splitlines()
    assert [line.split("  ")[0] for line in lines[1:-1]] == [
        "wte.weight",
        "h.*.qkv.weight ×3",
        "h.*.qkv.bias ×3",
        "h.3.qkv.weight",
    ]


@pytest.mark.parametrize("case", able())
def test_entries_and_bytes_are_those_of_the_state(case):
    params = case.params(torch.float32)
    tx = case.tx()
    table, state = fo.summary(tx, params), tx.init(params)
    kept = optree.tree_leaves(state)
    total = sum(row.bytes for row in table.rows) + table.shared
    assert total == sum(x.numel() * x.element_size() for x in kept)
    assert [row.path for row in table.rows] == list(params)
    for row in table.rows:
        slots = [slot[row.path] for slot in state.slots.values()]
        assert row.entries == sum(x.numel() for x in slots if x is not None)


def test_wrappers_and_frozen_leaves():
    params = {"a": torch.zeros(2), "b": torch.zeros(3)}
    whole = fo.flatten(fo.adam())
    rows = fo.summary(fo.chain(fo.freeze("b"), whole, fo.params_ema(0.9)), params).rows
    assert rows[0].rules[-1] == "params_ema"
    assert "flatten(scale_by_adam, scale_by_lr)" in rows[0].rules[0]
    frozen = fo.summary(fo.chain(fo.freeze("b"), fo.adam()), params)
    assert frozen.rows[1].rules == ()
    assert "frozen" in str(frozen)
    assert str(fo.summary(fo.adam(), torch.zeros(2))).splitlines()[1].startswith("(the tensor)")
    assert str(fo.summary(fo.adam(), {})) == "no parameters"


def test_matrices_of_several_sizes():
    params = {"qkv": torch.zeros(8, 3), "kernel": torch.zeros(4, 2, 3, 3)}
    views = {"qkv": {"split": (4, 2, 2)}}
    rows = fo.summary(fo.muon_adamw(views=views), params).rows
    assert [row.view for row in rows] == ["(4, 3) + 2 × (2, 3)", "(4, 18)"]


def test_what_is_no_transformation_is_said():
    with pytest.raises(TypeError, match="summary"):
        fo.summary(fo.adam, {"w": torch.zeros(2)})
