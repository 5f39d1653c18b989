"""Rules that measure: each tensor for itself, by `measure`, or all of them, by `reduce`."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_close, assert_same
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters


class Sums(NamedTuple):
    squares: Any
    size: Any


@fo.factory
def unit_rms(scale: Any = 1.0) -> Any:
    """Give each tensor's update a root mean square."""

    def update(u: Tensor, slots: Any, p: Tensor, scale: Any) -> Any:
        squares, size = (u * u).sum(), torch.ones_like(u).sum()
        return scale * u / (squares / size + 1e-12).sqrt(), slots

    numbers = lambda t, *, scale: (scale,)  # noqa: E731
    return fo.leafwise(None, update, numbers, hyper={"scale": scale}, name="unit_rms")


@pytest.mark.parametrize("way", ["update", "compiled"])
def test_a_tensor_is_measured_as_a_whole_and_alone(way):
    """Large tensors by several threads, small ones in one call, complex ones as pairs."""
    tx = fo.chain(unit_rms(), fo.scale_by_lr(1.0))
    grads = {
        "large": torch.full((300, 301), 7.0),
        "small": torch.tensor([3.0, 0.0, 0.0]),
        "complex": torch.full((5,), 3 + 4j, dtype=torch.complex64),
    }
    params = {name: torch.zeros_like(g) for name, g in grads.items()}
    if way == "compiled":
        params, _ = fo.compile(tx, strict=True)(grads, tx.init(params), params)
    else:
        params, _ = tx.update(grads, tx.init(params), params)
    assert_close(params["large"], torch.full((300, 301), -1.0), 1e-5)
    assert_close(params["small"], torch.tensor([-(3.0**0.5), 0.0, 0.0]), 1e-5)
    assert_close(params["complex"], -grads["complex"] / 12.5**0.5, 1e-5)


def test_ensembles_and_traces_measure_each_member():
    params, grads = torch.zeros(3, 4), torch.arange(12.0).reshape(3, 4)

    def one(scale: Any) -> Any:
        tx = fo.accumulate(fo.chain(fo.trace(0.9), unit_rms(scale)), 1)
        return tx.update(grads, tx.init(params), params)[0]

    scales = torch.tensor([0.1, 0.2])
    assert_close(torch.vmap(one)(scales), torch.stack([*map(one, scales)]), 1e-6)
    traced = torch.compile(one, backend="eager", fullgraph=True)
    assert_same(traced(scales[1]), one(scales[1]))


def test_gradients_go_through_a_measurement():
    def loss(scale: Tensor, g: Tensor) -> Tensor:
        tx = unit_rms(scale)
        return tx.update(g, tx.init(g), g)[0].square().sum()

    scale, g = torch.tensor(0.5, dtype=torch.float64), torch.linspace(0.1, 2, 105).double()
    slope, through = torch.func.grad(loss, argnums=(0, 1))(scale, g)
    assert_close(slope, torch.tensor(105.0, dtype=torch.float64), 1e-8)
    assert_close(through, torch.zeros_like(g), 1e-8)


def rescaled(u: Tensor, slots: Any, p: Tensor, x: Any) -> Any:
    return -u / x, slots


def test_a_measurement_that_is_no_single_number_is_refused():
    """A kernel would write all of its elements to where there is memory for one."""
    p = torch.ones(3)
    parameter = torch.nn.Parameter(p.clone())
    parameter.grad = p
    for wrong in (lambda u, slots, p: (u * u,), lambda u, slots, p: (u * u).sum()):
        tx = fo.leafwise(None, rescaled, reduce=wrong)
        opt = adapters.Optimizer([parameter], lambda tx=tx: tx)
        trees = (p, tx.init(p), p)
        for step, *given in ((tx.update, *trees), (fo.compile(tx), *trees), (opt.step,)):
            with pytest.raises(TypeError, match=r"reduce of a rule returned .* of 0-dim tensors"):
                step(*given)
    assert_same(parameter.detach(), p)


def test_what_is_no_sum_over_elements_is_measured_on_whole_tensors():
    tx = fo.leafwise(None, rescaled, reduce=lambda u, slots, p: (u.abs().max(),))
    params, grads = torch.zeros(9000), torch.full((9000,), 4.0)
    params, _ = fo.compile(tx, strict=True)(grads, tx.init(params), params)
    assert_close(params, torch.full((9000,), -1.0), 1e-6)
