"""Averages of parameters in half precision: they move, and older ones are taken over."""

from typing import Any

import pytest
import torch
from torch import Tensor
from undeclared import WAYS

import functional_optim as fo
from functional_optim.adapters import ASGD, Optimizer

HALF = [torch.bfloat16, torch.float16]


def averaged(decay: float = 0.999) -> Any:
    return fo.chain(fo.scale_by_lr(1.0), fo.params_ema(decay))


def moved(tx: Any, dtype: torch.dtype, way: str, steps: int, still: int = 0) -> dict[str, Tensor]:
    """The slots of a parameter that is 1 for some steps, and 0 after all others."""
    zero, one = torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)
    grads = [{"w": g} for g in (*[zero] * still, one, *[zero] * (steps - still - 1))]
    _, slots = WAYS[way](tx, {"w": one.clone()}, grads)
    return {key: own["w"] for key, own in slots.items()}


@pytest.mark.parametrize("way", ["update", "fo.compile", "Optimizer"])
@pytest.mark.parametrize("dtype", HALF)
def test_an_average_and_a_mean_of_half_precision_move(dtype, way):
    """The mean is that after all steps but the first: of 1 once, and of 0 ever after."""
    wide = fo.chain(fo.master_weights(fo.scale_by_lr(1.0)), fo.params_ema(0.999))
    mean = fo.chain(fo.scale_by_lr(1.0), fo.polyak_average(0))
    tx = wide if dtype is torch.bfloat16 else averaged()
    rows = [(x, "params_ema", 0, 0.999**1000) for x in (tx, averaged())]
    for each, key, still, wanted in (*rows, (mean, "ax", 2, 1 / 999)):
        found = moved(each, dtype, way, 1000, still)[key]
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, torch.full((3,), wanted), rtol=1e-3, atol=0)


def test_before_averaging_starts_a_nan_is_forgotten_as_in_torch():
    def averages(make: Any, **how: Any) -> list[float]:
        w = torch.nn.Parameter(torch.zeros(2))
        opt = make([w], t0=3, **how)
        for k in range(6):
            w.grad = torch.full_like(w, torch.inf if k == 1 else 1.0)
            opt.step()
            if k == 1:
                w.data.fill_(-1.0)
        return opt.state[w]["ax"].tolist()

    expected = averages(torch.optim.ASGD)
    for compile in ("strict", False):
        assert averages(ASGD, compile=compile) == pytest.approx(expected, rel=1e-6)
    tx, w = fo.polyak_average(), torch.ones(2)
    _, state = tx.update(torch.full((2,), torch.nan), tx.init(w), w)
    assert tx.update(torch.ones(2), state, w)[1].slots["ax"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("dtype", HALF)
def test_an_average_that_was_saved_in_half_precision_is_converted(dtype):
    w, tx = torch.ones(3, dtype=dtype), averaged()
    saved = fo.state_dict(tx.init({"w": w}), {"w": w})
    saved["state.w.params_ema"] = torch.full((3,), 0.5, dtype=dtype)
    state = fo.load_state_dict(tx.init({"w": w}), saved, {"w": w})
    for _ in range(1000):
        _, state = tx.update({"w": torch.zeros(3, dtype=dtype)}, state, {"w": w})
    exact = torch.full((3,), 1 - 0.5 * 0.999**1000)
    torch.testing.assert_close(state.slots["params_ema"]["w"], exact, rtol=1e-3, atol=0)
    p = torch.nn.Parameter(w.clone())
    opt = Optimizer([p], averaged)
    p.grad = torch.zeros_like(p)
    opt.step()
    old = opt.state_dict()
    old["state"][0]["params_ema"] = torch.full((3,), 0.5, dtype=dtype)
    opt.load_state_dict(old)
    assert opt.state[p]["params_ema"].dtype is torch.float32
    for _ in range(1000):
        opt.step()
    torch.testing.assert_close(opt.state[p]["params_ema"], exact, rtol=1e-3, atol=0)


def test_a_checkpoint_of_torchs_asgd_in_bfloat16_loads():
    w, other = (torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    stock, opt = torch.optim.ASGD([w], t0=0), ASGD([other], t0=0)
    for p in (w, other):
        p.grad = torch.ones_like(p)
    stock.step()
    opt.load_state_dict(stock.state_dict())
    assert opt.state[other]["ax"].dtype is torch.float32
    opt.step()
    torch.optim.ASGD([w]).load_state_dict(opt.state_dict())
