"""Checkpoints that earlier versions wrote load, and training goes on where it went then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import assert_close
from reference.make_checkpoints import functional, functional_run, go, optimizers
from sampling import some

import functional_optim as fo

FOLDER = Path(__file__).parents[1] / "support" / "reference" / "checkpoints"
EAGER = [(name, False) for name in optimizers()]
COMPILED = [(name, True) for name in optimizers()]
KEPT = [(name, True) for name in ("Adafactor", "Adam", "Muon", "SGD", "recipe")]
"""Each way of keeping state: factors, slots like the parameter, a batch, one slot, a chain."""


@pytest.mark.parametrize(
    ("name", "compiled"),
    some(EAGER + COMPILED, len(EAGER), KEPT),
    ids=lambda x: {True: "compiled", False: "eager"}.get(x, x),
)
def test_an_optimizer_object_goes_on(name, compiled):
    old = torch.load(FOLDER / f"{name}.pt")
    named = [(path, torch.nn.Parameter(p.clone())) for path, p in old["params"].items()]
    opt = optimizers()[name](named)
    if not isinstance(opt, torch.optim.LBFGS):
        opt.compile = compiled
    opt.load_state_dict(old["state_dict"])
    go(opt, named, old["grads"])
    tolerance = 2e-2 if name == "Muon" else 1e-6  # its iteration is in bfloat16
    assert_close({path: p.detach() for path, p in named}, old["after"], tolerance)


def test_a_functional_state_goes_on():
    old = torch.load(FOLDER / "functional.pt")
    tx, params = functional(), old["params"]
    state = fo.load_state_dict(tx.init(params), old["state_dict"], params, step=3)
    params, _ = functional_run(tx, params, state, old["grads"])
    assert_close(params, old["after"], 1e-6)
