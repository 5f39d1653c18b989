"""Steps inside of autocast and of inference mode, by lazily conjugated gradients, and late ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_close
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters
from functional_optim.adapters import Optimizer

MATRIX_RULES: dict[str, Callable[..., Any]] = {
    "soap": fo.soap,
    "kl_soap": fo.kl_soap,
    "kl_shampoo": fo.kl_shampoo,
    "shampoo": fo.shampoo,
    "psgd": fo.psgd_kron,
    "galore": lambda lr: fo.chain(fo.scale_by_galore(rank=2), fo.scale_by_lr(lr)),
    "apollo": lambda lr: fo.chain(fo.scale_by_apollo(rank=2), fo.scale_by_lr(lr)),
    "muon": fo.muon,
    "products": lambda lr: fo.leafwise(None, lambda u, slots, p: (-lr * u @ u.mT @ u, slots)),
}
WAYS = ("update", "compile", "object", "eager object")

each_way = pytest.mark.parametrize("way", WAYS)


def stepped(recipe: Any, way: str, start: Tensor, grads: list[Tensor]) -> Tensor:
    """A parameter after steps by these gradients."""
    if "object" in way:
        w = torch.nn.Parameter(start.clone())
        opt = Optimizer([("w", w)], recipe, compile=way == "object")
        for g in grads:
            w.grad = g
            opt.step()
        return w.detach()
    tx, p = recipe(), start.clone()
    step, state = fo.compile(tx), tx.init(p)
    for g in grads:
        if way == "compile":
            p, state = step(g, state, p)
        else:
            u, state = tx.update(g, state, p)
            p = fo.apply_updates(p, u)
    return p


def random(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(4)]


@each_way
@pytest.mark.parametrize("name", MATRIX_RULES)
def test_nothing_is_cast_inside_of_autocast(name, way):
    start, *grads = random(6, 4)
    plain = stepped(lambda: MATRIX_RULES[name](0.1), way, start, grads)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = stepped(lambda: MATRIX_RULES[name](0.1), way, start, grads)
    assert torch.equal(inside, plain)


@each_way
def test_what_measures_is_not_cast_inside_of_autocast(way):
    def reduce(u: Tensor, slots: Any, p: Tensor) -> Any:
        return ((u @ u.mT).trace(),)

    def recipe() -> Any:
        return fo.leafwise(None, lambda u, s, p, total: (-u / total, s), reduce=reduce)

    start, *grads = random(6, 4)
    plain = stepped(recipe, way, start, grads)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(stepped(recipe, way, start, grads), plain)


@each_way
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_steps_in_inference_mode_are_those_outside(name, way):
    recipe = {"adamw": lambda: fo.adamw(0.1), "muon": lambda: fo.muon(0.1)}[name]
    start, *grads = random(6, 4)
    plain = stepped(recipe, way, start, grads)
    with torch.inference_mode():
        assert torch.equal(stepped(recipe, way, start.clone(), grads), plain)


def test_a_step_of_normal_tensors_may_be_in_inference_mode():
    w, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    opt = adapters.AdamW([w], lr=0.1)
    stock = torch.optim.AdamW([other], lr=0.1)
    for p, one in ((w, opt), (other, stock)):
        p.grad = torch.ones(3)
        with torch.inference_mode():
            one.step()
            one.step()
    assert_close(w.detach(), other.detach(), 1e-6)


@each_way
@pytest.mark.parametrize("name", ["sgd", "adamw", "clip"])
def test_gradients_that_are_lazily_conjugated_or_negated(name, way):
    recipe = {
        "sgd": lambda: fo.sgd(0.1, momentum=0.9),
        "adamw": lambda: fo.adamw(0.1),
        "clip": lambda: fo.chain(fo.clip_by_global_norm(0.5), fo.sgd(0.1)),
    }[name]
    start, *grads = random(5, dtype=torch.complex64)
    lazy = [g.conj() for g in grads]
    assert all(g.is_conj() for g in lazy)
    plain = stepped(recipe, way, start, [g.resolve_conj() for g in lazy])
    assert torch.equal(stepped(recipe, way, start, lazy), plain)
    negated = [g.imag for g in lazy]
    assert all(g.is_neg() for g in negated)
    plain = stepped(recipe, way, start.real, [g.resolve_neg() for g in negated])
    assert torch.equal(stepped(recipe, way, start.real, negated), plain)


@pytest.mark.parametrize("compile", [True, False])
def test_a_count_that_float32_does_not_hold_is_saved_in_float64(compile):
    def made() -> tuple[Any, Any]:
        w = torch.nn.Parameter(torch.ones(3))
        w.grad = torch.ones(3)
        return w, adapters.AdamW([w], lr=0.1, compile=compile)

    w, opt = made()
    opt.step()
    saved = opt.state_dict()
    saved["state"][0]["step"] = torch.tensor(float(2**24 - 2))
    opt.load_state_dict(saved)
    counts = []
    for _ in range(5):
        opt.step()
        counts.append(opt.state[w]["step"].clone())
    assert [int(x) - 2**24 for x in counts] == [-1, 0, 1, 2, 3]
    assert [x.dtype for x in counts[1:]] == [torch.float64] * 4
    again, other = made()
    other.load_state_dict(opt.state_dict())
    other.step()
    assert int(other.state[again]["step"]) == 2**24 + 4
