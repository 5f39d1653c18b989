"""Lightning's precision plugins on the CPU: mixed and true half precision, with its scaler."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, assert_same
from voting import recipe

import functional_optim as fo
from functional_optim import adapters

ROWS = {
    "AdamW": {"lr": 0.02, "weight_decay": 0.1},
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "RMSprop": {"lr": 0.01, "momentum": 0.5},
    "NAdam": {"lr": 0.02},
}
MIXED = {"bf16-mixed", "16-mixed"}
PRECISIONS = {
    "bf16-mixed": torch.float32,
    "16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "64-true": torch.float64,
    "32-true": torch.float32,
}
"""With the dtype of the weights."""
COARSE = {
    torch.bfloat16: 2.0**-6,
    torch.float16: 2.0**-7,
    torch.float32: 1e-5,
    torch.float64: 1e-10,
}
"""torch's steps in half precision round after each operation, ours once: how far they may part."""

names = pytest.mark.parametrize("name", ROWS)
precisions = pytest.mark.parametrize("precision", PRECISIONS)


def pair(name):
    return (
        lambda m: getattr(torch.optim, name)(m.parameters(), **ROWS[name]),
        lambda m: getattr(adapters, name)(m.parameters(), compile=False, **ROWS[name]),
    )


def as_recipe(module):
    return adapters.Optimizer(module.parameters(), recipe, lr=0.02, compile=False)


def chosen(precision):
    """The trainer's argument. On a CPU it takes fp16 with a scaler as a plugin only."""
    from lightning.pytorch.plugins import MixedPrecision

    if precision == "16-mixed":
        return {"plugins": [MixedPrecision("16-mixed", device="cpu")]}
    return {"precision": precision}


def run(pl, make, precision, kind=None, **kwargs):
    given = {"dtype": torch.float32, "data": pl.loader(dtype=torch.float32)}
    return pl.run(make, kind or pl.Net, **given, **chosen(precision), **kwargs)


def test_the_trainer_takes_bf16_for_fp16_on_a_cpu(pl):
    with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
        assert pl.trainer(precision="16-mixed").precision == "bf16-mixed"


@precisions
@names
def test_a_plugin_trains_as_with_torchs(pl, name, precision):
    theirs, ours = (run(pl, make, precision) for make in pair(name))
    dtype = PRECISIONS[precision]
    assert ours[0][0][0].dtype is dtype
    tolerance = COARSE[dtype] * (10 if precision == "16-mixed" else 1)
    for mine, its in zip(ours[0][0], theirs[0][0], strict=True):
        assert_close(mine, its, tolerance)
    assert [sorted(x) for x in ours[0][2][0].values()] == [
        sorted(x) for x in theirs[0][2][0].values()
    ]
    assert ours[1] == theirs[1]
    pl.assert_moved(ours)


@pytest.mark.parametrize("how", ["norm", "value"])
@pytest.mark.parametrize("precision", sorted(MIXED))
@names
def test_a_mixed_trainer_clips_unscaled_gradients(pl, name, precision, how):
    args = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": how}
    theirs, ours = (run(pl, make, precision, **args) for make in pair(name))
    assert_close(ours[0][0], theirs[0][0], 1e-4)
    free = run(pl, pair(name)[1], precision)
    assert not torch.allclose(ours[0][0][0], free[0][0][0], atol=1e-6)


class Scale:
    """Makes modules whose third loss is infinite, and that note the scaler's scale."""

    def __init__(self, pl):
        class Overflowing(pl.Net):
            def training_step(self, batch, index):
                loss = super().training_step(batch, index)
                return loss * torch.inf if index == 2 else loss

            def on_train_batch_end(self, *args):
                plugin = self.trainer.precision_plugin
                self.scales = [*getattr(self, "scales", []), plugin.scaler.get_scale()]

        self.kind = Overflowing


@pytest.mark.parametrize("make", [*[pair(name)[1] for name in ROWS], as_recipe])
def test_the_scaler_skips_infinite_gradients_and_halves_its_scale(pl, make):
    kind = Scale(pl).kind
    module = kind(make, dtype=torch.float32)
    trainer = pl.fit(module, pl.loader(dtype=torch.float32), **chosen("16-mixed"))
    start = module.scales[0]
    assert module.scales == [start] * 2 + [start / 2] * 4
    assert all(torch.isfinite(p).all() for p in module.parameters())
    (opt,) = trainer.optimizers
    state = next(iter(opt.state.values()))
    if "step" in state:
        assert state["step"] == pl.BATCHES - 1
    assert trainer.global_step == pl.BATCHES


def test_the_scaler_skips_where_torchs_does(pl):
    runs = [run(pl, make, "16-mixed", Scale(pl).kind) for make in pair("AdamW")]
    assert_close(runs[1][0][0], runs[0][0][0], 1e-4)


def test_a_fused_optimizer_does_not_let_the_trainer_clip(pl):
    """It unscales in its step, as torch's own does, and so Lightning refuses to clip before."""
    for kind, more in ((torch.optim.AdamW, {}), (adapters.AdamW, {"compile": False})):
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            run(
                pl,
                lambda m, kind=kind, more=more: kind(m.parameters(), lr=0.02, fused=True, **more),
                "16-mixed",
                gradient_clip_val=0.01,
            )


def test_a_recipe_that_reads_the_loss_cannot_be_scaled(pl):
    """With a scaler Lightning calls the closure itself, and step without one."""

    def configure(module):
        return adapters.Optimizer(module.parameters(), fo.polyak_sgd, compile=False)

    with pytest.raises(RuntimeError, match=r"this recipe reads the loss.* A GradScaler steps"):
        run(pl, configure, "16-mixed")
    pl.assert_moved(run(pl, configure, "bf16-mixed"))


def test_lbfgs_is_refused_by_the_scaler_as_torchs_is(pl):
    for kind in (torch.optim.LBFGS, adapters.LBFGS):
        with pytest.raises(Exception, match="AMP and the LBFGS optimizer are not compatible"):
            run(pl, lambda m, k=kind: k(m.parameters()), "16-mixed")


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@precisions
@pytest.mark.parametrize("make", [pair("AdamW")[1], as_recipe], ids=["AdamW", "recipe"])
def test_resuming_is_bitwise_in_every_precision(pl, make, precision, tmp_path):
    def fitted(epochs, path=None):
        # Lightning loads weights into the module before it converts it
        module = pl.Net(make, dtype=torch.float64 if precision == "64-true" else torch.float32)
        batches = pl.loader(dtype=torch.float32)
        return module, pl.fit(module, batches, epochs, path, **chosen(precision))

    fitted(1)[1].save_checkpoint(tmp_path / "half.ckpt")
    (module, trainer), end = fitted(2, tmp_path / "half.ckpt"), pl.found(*fitted(2))
    pl.assert_ended_alike(pl.found(module, trainer), end)
    if precision == "16-mixed":
        saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
        assert saved["MixedPrecision"]["scale"] > 1


def test_compiled_kernels_train_in_half_precision(pl):
    for precision in ("bf16-true", "16-mixed"):
        runs = []
        for compile in (False, "strict"):
            runs.append(
                run(pl, lambda m, c=compile: adapters.AdamW(m.parameters(), compile=c), precision)
            )
        assert_close(runs[1][0][0], runs[0][0][0], COARSE[runs[0][0][0][0].dtype])
        pl.assert_moved(runs[1])
    assert_same(runs[1][1], runs[0][1])


def test_fabrics_scaler(pl):
    import lightning
    from lightning.fabric.plugins import MixedPrecision

    ends = []
    for name in ("AdamW", "SGD"):
        for make in pair(name):
            plugin = MixedPrecision("16-mixed", device="cpu")
            fabric = lightning.Fabric(accelerator="cpu", plugins=[plugin])
            net = pl.Net(None, dtype=torch.float32)
            model, opt = fabric.setup(net.layers, make(net.layers))
            for x in pl.data(dtype=torch.float32).split(pl.ROWS):
                opt.zero_grad()
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                fabric.backward(loss)
                fabric.clip_gradients(model, opt, max_norm=0.05, error_if_nonfinite=False)
                opt.step()
            ends.append(pl.values(net))
    assert_close(ends[1], ends[0], 1e-4)
    assert_close(ends[3], ends[2], 1e-4)
