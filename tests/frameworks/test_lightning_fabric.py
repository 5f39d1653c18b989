"""Lightning's Fabric: a loop of one's own, with what `fabric.setup` makes of our optimizers."""

from __future__ import annotations

import cases
import pytest
import torch
from helpers import assert_close, assert_same
from voting import recipe

import functional_optim as fo
from functional_optim import adapters


def as_recipe(params):
    return adapters.Optimizer(params, recipe, lr=0.05, compile=False)


@pytest.fixture
def fabric(pl):
    import lightning

    return lightning.Fabric(accelerator="cpu")


def train(pl, fabric, model, opt, batches=slice(None), clip=None):
    for x in pl.data().split(pl.ROWS)[batches]:
        opt.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        fabric.backward(loss)
        if clip:
            fabric.clip_gradients(model, opt, **clip)
        opt.step()


def everything(pl, model, opt):
    return pl.values(model), opt.state_dict()["state"]


@pytest.mark.parametrize("clip", [None, {"max_norm": 0.05}, {"clip_val": 0.02}])
@pytest.mark.parametrize("case", cases.with_torch())
def test_a_fabric_loop_goes_where_torchs_goes(pl, fabric, case, clip):
    ends = []
    for kind in (
        lambda params: case.stock(params, **case.hyper),
        lambda params: case.drop_in(params, compile=False, **case.hyper),
    ):
        net = pl.Net(None, bias=case.dim is None).layers
        model, opt = fabric.setup(net, kind(net.parameters()))
        train(pl, fabric, model, opt, clip=clip)
        ends.append(everything(pl, model, opt))
    assert_close(ends[1], ends[0], max(1e-10, case.rounding))


def test_fabrics_wrapper_stands_for_the_optimizer(pl, fabric):
    net = pl.Net(None).layers
    mine = as_recipe(net.parameters())
    _, opt = fabric.setup(net, mine)
    assert isinstance(opt, adapters.Optimizer)
    assert opt.optimizer is mine
    assert opt.param_groups is mine.param_groups
    assert opt.compile is False
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    train(pl, fabric, net, opt, slice(0, 2))
    scheduler.step()
    assert mine.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("kind", [as_recipe, lambda p: adapters.NAdam(p, lr=0.05, compile=False)])
def test_fabric_saves_and_loads_bitwise(pl, fabric, kind, tmp_path):
    def made():
        net = pl.Net(None).layers
        return fabric.setup(net, kind(net.parameters()))

    model, opt = made()
    train(pl, fabric, model, opt, slice(0, 3))
    fabric.save(tmp_path / "a.ckpt", {"model": model, "opt": opt, "step": 3})
    train(pl, fabric, model, opt, slice(3, None))
    other, twin = made()
    rest = fabric.load(tmp_path / "a.ckpt", {"model": other, "opt": twin}, weights_only=True)
    assert rest == {"step": 3}
    train(pl, fabric, other, twin, slice(3, None))
    assert_same(everything(pl, other, twin), everything(pl, model, opt))


def test_fabric_runs_closures(pl, fabric):
    """L-BFGS's many evaluations, and a recipe that reads the loss."""
    ends = []
    for kind in (
        lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe"),
        lambda p: adapters.LBFGS(p, line_search_fn="strong_wolfe"),
        lambda p: adapters.Optimizer(p, fo.polyak_sgd, compile=False),
    ):
        net = pl.Net(None).layers
        model, opt = fabric.setup(net, kind(net.parameters()))
        x, losses = pl.data(1), []

        def closure(model=model, opt=opt, x=x, losses=losses):
            opt.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            fabric.backward(loss)
            losses.append(loss.item())
            return loss

        first, last = opt.step(closure), opt.step(closure)
        assert last < first
        ends.append((losses, pl.values(model)))
    assert_close(ends[1], ends[0], 1e-10)
    assert [len(losses) for losses, _ in ends][1:] == [len(ends[0][0]), 2]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true", "64-true"])
def test_fabrics_precisions(pl, precision):
    import lightning

    ends = []
    for kind in (torch.optim.AdamW, lambda p, lr: adapters.AdamW(p, lr, compile=False)):
        fabric = lightning.Fabric(accelerator="cpu", precision=precision)
        net = pl.Net(None, dtype=torch.float32).layers
        model, opt = fabric.setup(net, kind(net.parameters(), lr=0.02))
        for x in pl.data(dtype=torch.float32).split(pl.ROWS):
            opt.zero_grad()
            fabric.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
            opt.step()
        ends.append(pl.values(model))
    assert_close(ends[1], ends[0], 2e-2 if "true" in precision and "64" not in precision else 1e-4)
