"""Arguments of a wrong kind end in a sentence: swapped, no pair, no whole number, no number."""

from __future__ import annotations

import numpy
import pytest
import torch
from helpers import as_parameters

import functional_optim as fo
from functional_optim.adapters import Optimizer

PARTS = {"slow": fo.sgd(0.1), "fast": fo.adam(0.1)}
LABELS = {"*.b": "slow", "*": "fast"}


PAIRS = [
    (fo.adam, "betas"),
    (fo.adamw, "betas"),
    (fo.adamax, "betas"),
    (fo.acprop, "betas"),
    (fo.adabelief, "betas"),
    (fo.adamaxw, "betas"),
    (fo.adopt, "betas"),
    (fo.laprop, "betas"),
    (fo.lion, "betas"),
    (fo.mars, "betas"),
    (fo.mars, "betas_1d"),
    (fo.optimistic_adam_v2, "betas"),
    (fo.simplified_ademamix, "betas"),
    (fo.yogi, "betas"),
    (fo.nadam, "betas"),
    (fo.radam, "betas"),
    (fo.sparse_adam, "betas"),
    (fo.rprop, "etas"),
    (fo.rprop, "step_sizes"),
    (fo.adafactor, "eps"),
]


@pytest.mark.parametrize("value", [0.9, (0.9,), (0.1, 0.2, 0.3), "ab", None], ids=str)
@pytest.mark.parametrize(("factory", "name"), PAIRS)
def test_what_is_no_pair_is_refused(factory, name, value):
    with pytest.raises(TypeError, match=rf"{name} must be a pair of numbers, e\.g\. \("):
        factory(**{name: value})


@pytest.mark.parametrize("value", [0.9, (0.1, 0.2), "abc", None], ids=str)
@pytest.mark.parametrize("factory", [fo.adan, fo.ademamix])
def test_what_is_not_three_numbers_is_refused(factory, value):
    with pytest.raises(TypeError, match=r"betas must be three numbers, e\.g\. \("):
        factory(betas=value)


# ---------------------------------------------------------------- what is no number

BAD = {
    "vector": (torch.ones(3), r"a Tensor of shape \(3,\)"),
    "None": (None, "None"),
    "string": ("0.1", "a str"),
}
every_bad = pytest.mark.parametrize("bad", BAD)


@every_bad
def test_a_schedule_that_returns_no_number_is_named(bad):
    value, words = BAD[bad]
    text = f"the schedule of lr returned {words}; it must return a number or a 0-dim tensor"
    tx, p = fo.adamw(lambda count: value), torch.ones(2)
    with pytest.raises(TypeError, match=text):
        tx.init(p)


@every_bad
@pytest.mark.parametrize("compile", [True, False])
def test_so_it_is_where_it_returns_none_later(bad, compile):
    value, words = BAD[bad]

    def schedule(count):
        return 0.1 if count < 1 else value

    text = f"the schedule of betas.1 returned {words}; it must"
    p, tx = torch.ones(2), fo.adamw(betas=(0.9, schedule))
    _, state = tx.update(p, tx.init(p), p)
    with pytest.raises(TypeError, match=text):
        tx.update(p, state, p)
    with pytest.raises(TypeError, match=text):
        fo.compile(tx, donate=False)(p, state, p)
    (mine,) = as_parameters({"": p})
    opt = Optimizer([mine], lambda: tx, compile=compile)
    mine.grad = torch.ones(2)
    opt.step()
    with pytest.raises(TypeError, match=text):
        opt.step()


# ---------------------------------------------------------------- what is no tensor


@pytest.mark.parametrize("donate", [True, False])
def test_a_numpy_array_is_no_gradient_and_no_parameter(donate):
    tx = fo.sgd(0.1)
    p, array = {"w": torch.ones(2)}, {"w": numpy.ones(2)}
    state = tx.init(p)
    for step in (tx.update, fo.compile(tx, donate=donate)):
        for _ in range(2):
            with pytest.raises(TypeError, match="the gradient of 'w' is a ndarray, not a tensor"):
                step(array, state, p)
            step({"w": torch.ones(2)}, state, p)
        with pytest.raises(TypeError, match="parameter 'w' is a ndarray, not a tensor"):
            step(p, state, array)
    with pytest.raises(TypeError, match="parameter 'w' is a ndarray, not a tensor"):
        tx.init(array)


# ---------------------------------------------------------------- two learning rates


@pytest.mark.parametrize(
    "parts",
    [
        lambda: (fo.partition(PARTS, LABELS),),
        lambda: (fo.masked(fo.sgd(0.1), "a"), fo.masked(fo.sgd(0.1), "b")),
        lambda: (fo.sgd(0.1), fo.scale_by_schedule(lambda count: 0.5)),
        lambda: (fo.sgd(0.1), fo.scale(0.5)),
        lambda: (fo.lookahead(fo.sgd(0.1)),),
    ],
)
def test_one_learning_rate_a_leaf_is_fine(parts):
    fo.chain(*parts())
