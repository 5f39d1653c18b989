"""What an update may not return: one sentence in every way of running it, and nothing moves."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import functional_optim as fo
from functional_optim.adapters import Optimizer


class Slots(NamedTuple):
    m: Any


def init(p: Tensor) -> Slots:
    return Slots(torch.zeros_like(p))


WRONG: dict[str, tuple[Any, Any, str]] = {
    "a tensor": (None, lambda u, s, p: -u, "returned a tensor; return a pair"),
    "a list": (None, lambda u, s, p: [-u, s], "returned a list; return a pair"),
    "a triple": (None, lambda u, s, p: (u, s, 1), "a tuple of 3: Tensor, tuple, int; return a"),
    "a number": (None, lambda u, s, p: (0.5, s), "a tuple of 2: float, tuple; return a pair"),
    "another shape": (
        None,
        lambda u, s, p: (-u.mean(), s),
        r"a tensor of shape \(\) for an update of shape \(3, 2\); return one of the same",
    ),
    "None for none": (None, lambda u, s, p: (-u, None), "slots None; return the slots as they"),
    "None": (init, lambda u, s, p: (-u, None), "slots None; return tensors for m"),
    "too few": (init, lambda u, s, p: (-u, ()), "slots a tuple of 0; return tensors for m"),
    "a slot": (init, lambda u, s, p: (-u, s.m), "slots a Tensor; return tensors for m"),
    "a lost slot": (init, lambda u, s, p: (-u, Slots(None)), "a tuple of 1: NoneType; return"),
    "a float": (init, lambda u, s, p: (-u, Slots(1.0)), "a tuple of 1: float; return tensors"),
    "a slot's shape": (init, lambda u, s, p: (-u, Slots(u.sum())), r"makes one of shape \(\)"),
}


@pytest.mark.parametrize("way", ["update", "compile", "object", "eager object"])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_update_is_told_before_anything_is_changed(name, way):
    first, update, words = WRONG[name]

    def recipe() -> Any:
        return fo.leafwise(first, update, name="mine")

    tx, w, g = recipe(), torch.ones(3, 2), torch.ones(3, 2)
    state, p = tx.init(w), torch.nn.Parameter(w)
    p.grad = g
    steps = {
        "update": lambda: tx.update(g, state, w),
        "compile": lambda: fo.compile(tx)(g, state, w),
        "object": lambda: Optimizer([("w", p)], recipe).step(),
        "eager object": lambda: Optimizer([("w", p)], recipe, compile=False).step(),
    }
    with pytest.raises((TypeError, ValueError), match=words) as told:
        steps[way]()
    assert "'mine'" in str(told.value) or "'m'" in str(told.value)
    assert w.eq(1).all()


WHOLE = {
    "a number": lambda p, u: -u.mean(),
    "rows": lambda p, u: -u.mean(-1, keepdim=True),
    "more": lambda p, u: -torch.stack([u, u]),
}


@pytest.mark.parametrize("way", ["compile", "torch", "new", "object", "eager object", "train step"])
@pytest.mark.parametrize("name", WHOLE)
def test_an_update_of_a_whole_tree_is_not_spread_over_a_parameter(name, way):
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return fo.tree.map(WHOLE[name], updates, updates), state

    tx = fo.GradientTransformation(lambda params: (), update)
    w = {"w": torch.ones(3, 2)}
    g = {"w": torch.arange(6.0).reshape(3, 2)}
    p = torch.nn.Parameter(w["w"])
    p.grad = g["w"]
    steps = {
        "compile": lambda: fo.compile(tx)(g, (), w),
        "torch": lambda: fo.compile(tx, backend="torch")(g, (), w),
        "new": lambda: fo.compile(tx, donate=False)(g, (), w),
        "object": lambda: Optimizer([("w", p)], lambda: tx).step(),
        "eager object": lambda: Optimizer([("w", p)], lambda: tx, compile=False).step(),
        "train step": lambda: fo.compile_train_step(lambda p: (p["w"] * g["w"]).sum(), tx)(w, ()),
    }
    with pytest.raises(
        ValueError, match=r"tensor of shape \(.*\) for a parameter of shape \(3, 2\)"
    ):
        steps[way]()
    assert w["w"].eq(1).all()


@pytest.mark.parametrize("wrong", [lambda u: -u.mT, lambda u: -u.mean(), lambda u: -u.flatten()])
def test_matrices_of_another_shape_are_not_joined(wrong):
    rule = fo.leafwise(None, lambda u, s, p: (wrong(u), s), runs=fo.Runs(batched=True), name="mine")
    w = torch.ones(3, 4, 2, 2)
    for tx in (fo.as_matrix(rule), fo.as_matrix(rule, kernel="batch")):
        for step in (tx.update, fo.compile(tx)):
            with pytest.raises(ValueError, match=r"returned a tensor of shape .* shape \("):
                step(torch.ones_like(w), tx.init(w), w)


def test_a_rule_of_batches_says_what_its_update_returned():
    tx = fo.leafwise(None, lambda u, s, p: (-u.mean(), s), runs=fo.Runs(batched=True), name="mine")
    w = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"'mine' returned a tensor of shape \(\)"):
        tx.update(w, tx.init(w), w)


def test_vectors_that_a_rule_of_batches_takes_for_a_matrix_are_refused():
    """Two biases of one length come as one tensor of two dimensions."""
    params = {"a": torch.zeros(3), "b": torch.zeros(3)}
    grads = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}
    for update, says in (
        (lambda u, s, p: (u / u.norm(), s), "treats the tensors of a batch as one"),
        (lambda u, s, p: (u @ u.mT @ u, s), "takes several tensors of 1 dimensions and no single"),
    ):
        tx = fo.leafwise(None, update, runs=fo.Runs(batched=True), name="mine")
        for step in (tx.update, fo.compile(tx)):
            with pytest.raises(ValueError, match=f"'mine' was passed batched=True, but {says}"):
                step(grads, tx.init(params), params)
    tx = fo.leafwise(None, lambda u, s, p: (-u, s), runs=fo.Runs(batched=True), name="mine")
    assert tx.update(grads, tx.init(params), params)[0]["b"].eq(-2.0).all()


def test_a_rule_that_was_run_alone_is_looked_at_again_in_batches():
    def update(u, slots, p):
        return u / u.norm(), slots

    w, runs = {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, fo.Runs(batched=True)
    alone = fo.leafwise(None, update, name="mine")
    assert alone.update(w, alone.init(w), w)[0]["b"].eq(0.5).all()
    batched = fo.leafwise(None, update, runs=runs, name="mine")
    with pytest.raises(ValueError, match="treats the tensors of a batch as one"):
        batched.update(w, batched.init(w), w)
