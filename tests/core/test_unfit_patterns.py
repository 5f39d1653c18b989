"""A pattern that fits no leaf is a misspelling more often than not: one warning, and no more."""

from __future__ import annotations

import warnings

import pytest
import torch

import functional_optim as fo
from functional_optim import adapters
from functional_optim.adapters import Optimizer
from functional_optim.kernels import callers


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    monkeypatch.setattr(callers, "_told", set())


def whole(tx):
    """The same, not made of one-tensor rules."""
    return fo.GradientTransformation(tx.init, tx.update)


RECIPES = {
    "whole trees": lambda: fo.masked(whole(fo.sgd(0.1)), "head.*"),
    "masked": lambda: fo.chain(fo.masked(fo.trace(0.9), "head.*"), fo.scale_by_lr(0.1)),
    "freeze": lambda: fo.chain(fo.freeze("head.*"), fo.sgd(0.1)),
    "selective": lambda: fo.selective_transform(fo.sgd(0.1), freeze_mask=["body.b", "head.*"]),
    "partition": lambda: fo.partition(
        {"one": fo.sgd(0.1), "two": fo.adam(0.1)}, {"head.*": "one", "*": "two"}
    ),
}


def tree():
    return {"body.b": torch.ones(2), "body.w": torch.ones(3)}


def stepped(tx, p, times=2):
    state = tx.init(p)
    for _ in range(times):
        _, state = tx.update(p, state, p)


@pytest.mark.parametrize("name", RECIPES)
def test_init_warns_once(name):
    with pytest.warns(UserWarning, match=r"'head\.\*' of the (mask|labels) fits no leaf") as seen:
        stepped(RECIPES[name](), tree())
    assert len(seen) == 1
    stepped(RECIPES[name](), tree())  # a warning is an error here


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("name", [x for x in RECIPES if x != "whole trees"])
def test_an_object_warns_once_when_it_is_built(name, compile):
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 1)})
    with pytest.warns(UserWarning, match=r"fits no leaf; there are 'body\.weight'") as seen:
        opt = Optimizer(model.named_parameters(), RECIPES[name], compile=compile)
    assert len([x for x in seen if "head" in str(x.message)]) == 1
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    opt.step()


def groups(model):
    return [
        {"params": [(n, p) for n, p in model.named_parameters() if n.endswith(kind)]}
        for kind in ("weight", "bias")
    ]


@pytest.mark.parametrize("make", [lambda tx: tx, lambda tx: fo.chain(tx, whole(fo.identity()))])
def test_a_pattern_that_fits_in_one_group_is_fine(make):
    model = torch.nn.Linear(2, 1)
    parts = {"one": fo.sgd(0.1), "two": fo.sgd(0.2)}
    opt = Optimizer(
        groups(model),
        lambda: make(fo.partition(parts, {"bias": "one", "weight": "two"})),
        compile=False,
    )
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    opt.load_state_dict(opt.state_dict())


def test_the_star_a_predicate_and_a_label_without_leaves_are_fine():
    parts = {"one": fo.sgd(0.1), "two": fo.sgd(0.2)}
    stepped(fo.partition(parts, {"body": "one", "*": "two"}), tree())
    stepped(fo.masked(fo.trace(0.9), lambda path, p: False), tree())
    stepped(fo.masked(fo.masked(whole(fo.sgd(0.1)), "body.b"), "body.w"), tree())


def test_a_traced_init_says_nothing(fresh_dynamo):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.compile(RECIPES["masked"]().init, backend="eager", fullgraph=True)(tree())
    assert not [x for x in seen if "fits no leaf" in str(x.message)]


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("make", ["AdamW", "Adan"])
def test_so_does_a_storage_that_packs_no_parameter(make, compile):
    """Of a class of torch's, and of one of ours."""

    def stored(tx):
        return fo.stored(tx, "int8", where="head.*")

    model = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 1)})
    with pytest.warns(UserWarning, match=r"'head\.\*' of the mask fits no leaf") as seen:
        getattr(adapters, make)(model.named_parameters(), stored=stored, compile=compile)
    assert len(seen) == 1
