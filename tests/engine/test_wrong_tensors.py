"""A wrong gradient, parameter or slot ends in a sentence: never in a signal, nor half a step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import run
from sampling import some

import functional_optim as fo
from functional_optim.adapters import Optimizer

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.parametrize("library", some(["watched", "bare"]))
def test_every_wrong_tensor_ends_in_the_pure_result_or_a_sentence(library):
    """In a process of its own, which may die; with the library beside the kernels, and without."""
    done = subprocess.run(
        [sys.executable, "wrong_tensors.py", library], cwd=SUPPORT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.splitlines() == [library]


def test_a_storage_that_is_gone_is_named():
    w = torch.nn.Parameter(torch.ones(3))
    w.grad = torch.ones(3)
    opt = Optimizer([("w", w)], fo.sgd, lr=0.1)
    w.grad.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"'w' needs a storage of 12 bytes, but .* to 0"):
        opt.step()


@pytest.mark.parametrize("which", ["parameter", "slot"])
def test_a_gradient_may_be_the_memory_that_is_written(which):
    """As of a loss of half the square, whose gradient is the parameter."""
    tx = fo.adam(0.1)
    pure, params = ({name: torch.arange(3.0) + i for i, name in enumerate("ab")} for _ in range(2))
    state, mine = tx.init(pure), tx.init(params)
    step = fo.compile(tx)
    for _ in range(3):
        source = (
            (pure, params)
            if which == "parameter"
            else (state.slots["exp_avg"], mine.slots["exp_avg"])
        )
        theirs, grads = ({"a": x["b"], "b": x["a"]} for x in source)
        pure, state = run(tx, pure, [theirs], state)
        params, mine = step(grads, mine, params)
        torch.testing.assert_close(params, pure)
        torch.testing.assert_close(mine.slots, state.slots)
