"""What rules of others return is checked, in whatever a function of theirs is wrapped."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import functional_optim as fo
from functional_optim.core.rule import unchanged
from functional_optim.kernels.keys import are_own
from functional_optim.kernels.node import RuleError


class Slots(NamedTuple):
    m: Tensor


def init(p: Tensor) -> Slots:
    return Slots(torch.zeros_like(p))


def writes(u: Tensor, slots: Slots, p: Tensor) -> Any:
    m = slots.m.add_(u)
    return m, Slots(m)


class Holder:
    @staticmethod
    def update(u: Tensor, slots: Slots, p: Tensor) -> Any:
        return writes(u, slots, p)

    fixed = update  # what a class body passes to leafwise

    def method(self, u: Tensor, slots: Slots, p: Tensor) -> Any:
        return writes(u, slots, p)

    __call__ = method


class Made:
    def __new__(cls, u: Tensor, slots: Slots, p: Tensor) -> Any:
        return writes(u, slots, p)


@functools.wraps(unchanged)
def wrapped(u: Tensor, slots: Slots, p: Tensor) -> Any:
    return writes(u, slots, p)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).sum()


UPDATES = {
    "static": vars(Holder)["fixed"],
    "method": Holder().method,
    "object": Holder(),
    "class": Made,
    "wrapped": wrapped,
    "partial": functools.partial(writes),
    "no_grad": torch.no_grad()(writes),
}


@pytest.mark.parametrize("kind", UPDATES)
def test_a_rule_of_others_may_not_write(kind):
    tx, w = fo.leafwise(init, UPDATES[kind], name="mine"), torch.ones(2)
    with pytest.raises(RuleError, match="writes in place"):
        tx.update(w, tx.init(w), w)


@pytest.mark.parametrize("kind", [x for x in UPDATES if x not in ("partial", "no_grad")])
def test_what_a_rule_of_others_returns_is_checked(kind, monkeypatch):
    monkeypatch.setitem(globals(), "writes", lambda u, slots, p: [u, slots])
    tx, w = fo.leafwise(init, UPDATES[kind], name="mine"), torch.ones(2)
    with pytest.raises(TypeError, match="return a pair"):
        tx.update(w, tx.init(w), w)


MEASURES = {
    "module": Doubled(),
    "call of a module": Doubled().__call__,
    "modules": nn.Sequential(Doubled()),
    "function": lambda x: x.mul_(2).sum(),
}


@pytest.mark.parametrize("kind", MEASURES)
def test_a_measure_of_others_may_not_write(kind):
    tx = fo.chain(fo.monitor({"x": MEASURES[kind]}, per_tensor=True), fo.scale(-1))
    w = torch.ones(2)
    with pytest.raises(RuleError, match="writes in place"):
        tx.update(w, tx.init(w), w)


def test_functions_of_the_package_and_of_torch_are_its_own():
    def itself() -> Any:
        return itself

    rules = [x.rule for x in fo.chain(fo.soap(0.1), fo.keep_params_nonnegative()).placements]
    assert all(x.own for x in rules)
    assert are_own((torch.sin, torch.nn.functional.relu, Tensor.add, fo.leafwise, None))
    assert not are_own((itself,))
    assert not are_own((torch.jit.script(nn.ReLU()), torch.sin))


def test_scalars_may_close_over_a_hyperparameter():
    def recipe(lr: Any) -> Any:
        def scalars(t: Any) -> Any:
            return (fo.numeric.at(lr, t),)

        return fo.leafwise(None, lambda u, s, p, x: (-x * u, s), scalars, hyper={"lr": lr})

    w = torch.ones(2)
    assert torch.equal(recipe(0.5).update(w, recipe(0.5).init(w), w)[0], -0.5 * w)
