"""Fifty steps in float64 go where the authors' own packages go, or ports of their code.

`reference/make_authors.py` has written down where that is, with the versions of the packages. A row
here and one of the same name there are one comparison.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close, run
from reference import waves

import functional_optim as fo

FOUND = json.loads(
    (Path(__file__).parents[1] / "support" / "reference" / "authors.json").read_text()
)["rows"]
LR = 0.05
ADAM: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-3}
EXACT = 1e-12


ROWS: dict[str, fo.GradientTransformation] = {
    "adabelief": fo.adabelief(LR, **ADAM, weight_decay=0.1),
    "adabelief-plain": fo.adabelief(LR, **ADAM, weight_decay=0.1, rectify=False),
    "adan": fo.adan(LR, (0.9, 0.8, 0.95), 1e-3, 0.1),
    "ademamix": fo.ademamix(LR, (0.8, 0.95, 0.99), eps=1e-3),
    "adopt": fo.adopt(LR, **ADAM, weight_decay=0.1),
    "adopt-decoupled": fo.adopt(LR, **ADAM, weight_decay=0.1, decoupled_weight_decay=True),
    "lion": fo.lion(LR, (0.8, 0.95), 0.1),
    "madgrad": fo.madgrad(LR, 0.8, weight_decay=0.1, eps=1e-3),
    "yogi": fo.yogi(LR, **ADAM, weight_decay=0.1),
}


def tensors(tree: Any) -> dict[str, torch.Tensor]:
    leaves = {"b": tree["body"]["b"], "w": tree["body"]["w"], "head": tree["head"]}
    return {name: torch.as_tensor(x) for name, x in leaves.items()}


@pytest.mark.parametrize("name", ROWS)
def test_fifty_steps_are_those_of_the_authors(name):
    params, state, done = tensors(waves.params()), None, 0
    for upto in waves.KEPT:
        grads = [tensors(waves.grads(step)) for step in range(done + 1, upto + 1)]
        params, state = run(ROWS[name], params, grads, state)
        there = [torch.tensor(x, dtype=torch.float64) for x in FOUND[name][str(upto)]]
        assert_close(list(params.values()), there, EXACT)
        done = upto


def test_every_row_of_the_authors_has_one_here():
    assert set(ROWS) == set(FOUND)
