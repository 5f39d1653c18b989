"""Arguments of a wrong kind end in a sentence: swapped, no pair, no whole number, no number."""

from __future__ import annotations

import re

import numpy
import pytest
import torch
from helpers import as_parameters

import functional_optim as fo
from functional_optim.adapters import Optimizer

PARTS = {"slow": fo.sgd(0.1), "fast": fo.adam(0.1)}
LABELS = {"*.b": "slow", "*": "fast"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda tx: fo.masked("*w", tx), "masked(adam(1e-3), '*.w')"),
        (lambda tx: fo.partition(LABELS, PARTS), "the transformations first and the labels second"),
        (lambda tx: fo.partition(lambda path, p: "slow", PARTS), "the transformations first"),
        (lambda tx: fo.freeze(tx), "freeze takes the leaves that shall not move"),
        (lambda tx: fo.selective_transform("*w", freeze_mask=tx), "takes the transformation first"),
        (lambda tx: fo.accumulate(2, tx), "accumulate takes a transformation, but got a int"),
        (lambda tx: fo.lookahead(6, tx), "lookahead takes a transformation, but got a int"),
    ],
)
def test_swapped_arguments_are_told_their_order(call, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        call(fo.adam(0.1))


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


@pytest.mark.parametrize("value", [2.5, 2.0, True, 0, -1, "2"], ids=repr)
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda n: fo.accumulate(fo.sgd(0.1), every=n), "every"),
        (lambda n: fo.lookahead(fo.sgd(0.1), sync_period=n), "sync_period"),
        (lambda n: fo.keep_snapshots(fo.sgd(0.1), last=n), "last"),
        (lambda n: fo.rollback(snapshots(), steps=n), "steps"),
    ],
)
def test_what_is_no_count_is_refused(call, name, value):
    with pytest.raises(ValueError, match=rf"a whole number of 1 or more for {name}, but got"):
        call(value)


def test_a_fraction_of_errors_is_refused():
    with pytest.raises(ValueError, match="more for max_consecutive_errors, but got 1"):
        fo.apply_if_finite(fo.sgd(0.1), 1.5)  # pyright: ignore[reportArgumentType]


def snapshots():
    return fo.keep_snapshots(fo.sgd(0.1)).init(torch.ones(1))


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


def test_a_vector_as_a_hyperparameter_is_named():
    with pytest.raises(TypeError, match=r"the hyperparameter factor is a Tensor of shape \(3,\)"):
        fo.scale(torch.ones(3)).init(torch.ones(2))


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


@pytest.mark.parametrize("make", [fo.spsa, fo.mezo, fo.es_gradient, fo.forward_gradient])
@pytest.mark.parametrize("empty", [{}, [], {"w": None}], ids=str)
def test_an_estimator_refuses_a_tree_without_parameters(make, empty):
    with pytest.raises(ValueError, match="got a tree without parameters"):
        make().init(empty)


# ---------------------------------------------------------------- two learning rates


def whole(grads, state, params=None):
    return grads, state


@pytest.mark.parametrize(
    "parts",
    [
        lambda: (fo.adam(0.1), fo.scale_by_lr(0.1)),
        lambda: (fo.sgd(0.1), fo.add_decayed_weights(0.1), fo.sgd(0.1)),
        lambda: (fo.masked(fo.adam(0.1), "w"), fo.scale_by_lr(0.1)),
        lambda: (fo.partition(PARTS, {"*": "slow"}), fo.scale_by_lr(0.1)),
        lambda: (fo.adam(0.1), fo.GradientTransformation(lambda p: (), whole), fo.sgd(0.1)),
    ],
)
def test_two_learning_rates_on_one_leaf_are_refused(parts):
    with pytest.raises(ValueError, match=r"it would go uphill\. Leave one out: adam\(lr\)"):
        fo.chain(*parts())


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
