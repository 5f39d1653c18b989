"""CMA-ES, full and diagonal, goes where pycma's goes, told of the same candidates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import functional_optim as fo

FILE = json.loads((Path(__file__).parents[1] / "support" / "reference" / "pycma.json").read_text())
FIELDS = ("mean", "sigma", "C", "pc", "ps")


def wide(x):
    return torch.tensor(x, dtype=torch.float64)


def full(row):
    """Our state where pycma starts: its C is not quite the unit matrix."""
    method = fo.search.cma_es(row["population"], row["sigma"])
    state = method.init(wide(row["kept"]["0"]["mean"]))
    C = wide(row["kept"]["0"]["C"])
    return method, state._replace(C=C, D=C.diagonal().sqrt())


def diagonal(row):
    method = fo.search.sep_cma_es(row["population"], row["sigma"])
    return method, method.init(wide(row["kept"]["0"]["mean"]))


def follows(row, method, state):
    for step, (candidates, fitness) in enumerate(row["told"], 1):
        state = method.tell(wide(candidates), wide(fitness), state)
        if str(step) in row["kept"]:
            for field in FIELDS:
                expected = wide(row["kept"][str(step)][field])
                found = getattr(state, field)
                assert (found - expected).norm() <= 1e-9 * expected.norm(), (step, field)


@pytest.mark.parametrize("name", FILE["rows"])
def test_the_state_is_pycmas(name):
    row = FILE["rows"][name]
    follows(row, *full(row))


@pytest.mark.parametrize("name", FILE["diagonal"])
def test_the_diagonal_is_pycmas(name):
    row = FILE["diagonal"][name]
    follows(row, *diagonal(row))


def test_the_stored_runs_hold_the_path_back():
    assert FILE["rows"]["small-start"]["stalls"] > 0
    assert FILE["diagonal"]["small-start"]["stalls"] > 0
