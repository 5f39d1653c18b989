"""Lightning's precision plugins on the CPU: mixed and true half precision, with its scaler."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, pairs
from voting import recipe

import functional_optim as fo
from functional_optim import adapters

ROWS = {
    "AdamW": {"lr": 0.02, "weight_decay": 0.1},
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "RMSprop": {"lr": 0.01, "momentum": 0.5},
    "NAdam": {"lr": 0.02},
}
pair = pairs(ROWS)
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


def of(kind, **more):
    return lambda m: kind(m.parameters(), **more)


def as_recipe(params):
    return adapters.Optimizer(params, recipe, lr=0.02, compile=False)


def chosen(precision):
    """The trainer's argument. On a CPU it takes fp16 with a scaler as a plugin only."""
    from lightning.pytorch.plugins import MixedPrecision

    if precision == "16-mixed":
        return {"plugins": [MixedPrecision("16-mixed", device="cpu")]}
    return {"precision": precision}


def run(pl, make, precision, kind=None, **kwargs):
    given = {"dtype": torch.float32, "data": pl.loader(dtype=torch.float32)}
    return pl.run(make, kind or pl.Net, **given, **chosen(precision), **kwargs)


@precisions
@names
def test_a_plugin_trains_as_with_torchs(pl, name, precision):
    theirs, ours = (run(pl, of(kind), precision) for kind in pair(name))
    dtype = PRECISIONS[precision]
    assert ours[0][0][0].dtype is dtype
    assert_close(ours[0][0], theirs[0][0], COARSE[dtype] * (10 if precision == "16-mixed" else 1))
    keys = [[sorted(x) for x in each[0][2][0].values()] for each in (ours, theirs)]
    assert keys[0] == keys[1]
    assert ours[1] == theirs[1]
    pl.assert_moved(ours)


@pytest.mark.parametrize("how", ["norm", "value"])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@names
def test_a_mixed_trainer_clips_unscaled_gradients(pl, name, precision, how):
    args = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": how}
    theirs, ours = (run(pl, of(kind), precision, **args) for kind in pair(name))
    assert_close(ours[0][0], theirs[0][0], 1e-4)
    free = run(pl, of(pair(name)[1]), precision)
    assert not torch.allclose(ours[0][0][0], free[0][0][0], atol=1e-6)


@pytest.mark.parametrize("name", [*ROWS, "recipe"])
def test_the_scaler_skips_infinite_gradients_and_halves_its_scale(pl, name):
    class Overflowing(pl.Net):
        scales = ()

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            return loss * torch.inf if index == 2 else loss

        def on_train_batch_end(self, *args):
            scale = self.trainer.precision_plugin.scaler.get_scale()
            self.scales = (*self.scales, scale)

    ends = []
    for kind in pair(name) if name in ROWS else [as_recipe]:
        module = Overflowing(of(kind), dtype=torch.float32)
        trainer = pl.fit(module, pl.loader(dtype=torch.float32), **chosen("16-mixed"))
        start = module.scales[0]
        assert module.scales == (start, start, *[start / 2] * 4)
        assert all(torch.isfinite(p).all() for p in module.parameters())
        state = next(iter(trainer.optimizers[0].state.values()))
        assert state.get("step", pl.BATCHES - 1) == pl.BATCHES - 1
        assert trainer.global_step == pl.BATCHES
        ends.append(pl.values(module))
    assert_close(ends[-1], ends[0], 1e-4)


REFUSED = {
    "fused, which unscales in its step": (
        [of(x, lr=0.02, fused=True) for x in (torch.optim.AdamW, adapters.AdamW)],
        {"gradient_clip_val": 0.01},
        "does not allow for gradient clipping",
    ),
    # with a scaler Lightning calls the closure itself, and step without one
    "a recipe that reads the loss": (
        [lambda m: adapters.Optimizer(m.parameters(), fo.polyak_sgd, compile=False)],
        {},
        r"this recipe reads the loss.* A GradScaler steps",
    ),
    "lbfgs": (
        [of(x) for x in (torch.optim.LBFGS, adapters.LBFGS)],
        {},
        "AMP and the LBFGS optimizer are not compatible",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_scaled_is_refused_as_with_torchs(pl, what):
    kinds, args, says = REFUSED[what]
    for make in kinds:
        with pytest.raises(Exception, match=says):
            run(pl, make, "16-mixed", **args)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@precisions
@pytest.mark.parametrize("kind", [pair("AdamW")[1], as_recipe], ids=["AdamW", "recipe"])
def test_resuming_is_bitwise_in_every_precision(pl, kind, precision, tmp_path):
    def fitted(epochs, path=None):
        # Lightning loads weights into the module before it converts it
        module = pl.Net(of(kind), dtype=torch.float64 if precision == "64-true" else torch.float32)
        batches = pl.loader(dtype=torch.float32)
        trainer = pl.fit(module, batches, epochs, path, **chosen(precision))
        return trainer, pl.found(module, trainer)

    fitted(1)[0].save_checkpoint(tmp_path / "half.ckpt")
    pl.assert_ended_alike(fitted(2, tmp_path / "half.ckpt")[1], fitted(2)[1])
    if precision == "16-mixed":
        saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
        assert saved["MixedPrecision"]["scale"] > 1


@pytest.mark.parametrize("precision", ["bf16-true", "16-mixed"])
def test_compiled_kernels_train_in_half_precision(pl, precision):
    runs = [run(pl, of(adapters.AdamW, compile=how), precision) for how in (False, "strict")]
    assert_close(runs[1][0][0], runs[0][0][0], COARSE[PRECISIONS[precision]])
    pl.assert_moved(runs[1])
