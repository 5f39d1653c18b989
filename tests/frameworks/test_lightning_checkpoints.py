"""Lightning's checkpoints, modes and precisions: resumed runs end as whole ones, bit for bit."""

import pytest
import torch
from helpers import assert_close, assert_same, pairs
from torch.optim import lr_scheduler as lrs
from voting import recipe

import functional_optim as fo
from functional_optim import adapters

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")


def whole(lr):
    """A recipe with a part that is not made of one-tensor rules."""
    return fo.flatten(recipe(lr))


def noisy(lr):
    """In the middle of a batch, where a checkpoint is written."""
    return fo.chain(fo.accumulate(fo.adam(lr), every=4), fo.add_noise(0.1, 0.5, seed=3))


def general(made):
    return lambda params: adapters.Optimizer(params, made, lr=0.05, compile=False)


def scheduled(kind):
    def configure(module):
        opt = kind(module.parameters())
        scheduler = lrs.OneCycleLR(opt, 0.1, total_steps=24, cycle_momentum=False)
        return [opt], [{"scheduler": scheduler, "interval": "step"}]

    return configure


KINDS = {
    "recipe": general(recipe),
    "flatten": general(whole),
    "accumulate": general(noisy),
    "kernels": lambda params: adapters.AdamW(params, lr=0.05, compile="strict"),
}


def unfreezing(pl, named=False):
    """The first layer is frozen for an epoch; then it joins with a learning rate of its own."""
    from lightning.pytorch.callbacks import BaseFinetuning

    class Unfreezing(BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.layers[0])

        def finetune_function(self, module, current, optimizer):
            layer = module.layers[0]
            if current == 1 and named:
                self.make_trainable(layer)
                group = {"params": list(layer.named_parameters("layers.0")), "lr": 0.01}
                optimizer.add_param_group(group)
            elif current == 1:
                self.unfreeze_and_add_param_group(layer, optimizer, lr=0.01)
            elif current > 1:  # after a checkpoint, which brings the group, but freezes all
                self.make_trainable(layer)

    return Unfreezing()


def thawed(kind):
    return lambda m: kind([p for p in m.parameters() if p.requires_grad])


def by_name(module):
    def parted(lr):
        parts = {"decay": fo.adamw(lr, weight_decay=0.5), "plain": fo.adam(lr)}
        return fo.partition(parts, {"*.bias": "plain", "layers.*": "decay"})

    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    return adapters.Optimizer(named, parted, compile=False, lr=0.05)


def lbfgs(params):
    return adapters.LBFGS(params, lr=0.5, max_iter=3, history_size=4)


def adamw(params):
    return adapters.AdamW(params, lr=0.05, weight_decay=0.1, compile=False)


def finetuned(pl, kind=adamw):
    return pl.Net(thawed(kind)), {"callbacks": [unfreezing(pl)]}


SCENES = {
    **{name: lambda pl, kind=kind: (pl.Net(scheduled(kind)), {}) for name, kind in KINDS.items()},
    "lbfgs": lambda pl: (pl.Net(thawed(lbfgs)), {}),
    "finetuning": finetuned,
    "finetuning, recipe": lambda pl: finetuned(pl, general(recipe)),
    "finetuning by names": lambda pl: (pl.Net(by_name), {"callbacks": [unfreezing(pl, True)]}),
}


HALVES = [(x, half) for x in SCENES for half in ((1, 2) if "finetuning" in x else (1,))]


@pytest.mark.parametrize(("scene", "half"), HALVES)
def test_resuming_between_two_epochs_is_bitwise(pl, scene, half, tmp_path):
    """With finetuning, before the new group is there, and with it."""

    def fitted(epochs, path=None):
        module, args = SCENES[scene](pl)
        trainer = pl.fit(module, None, epochs, path, **args)
        return trainer, pl.found(module, trainer)

    fitted(half)[0].save_checkpoint(tmp_path / "half.ckpt")
    _, end = fitted(3)
    pl.assert_ended_alike(fitted(3, tmp_path / "half.ckpt")[1], end)
    pl.assert_moved(end)


@pytest.mark.parametrize("name", [*KINDS, "SparseAdam"])
def test_checkpoints_are_read_without_running_code(pl, name, tmp_path):
    """torch.load(weights_only=True) takes tensors and plain values only; so does fit, here."""

    class Sparse(pl.Net):
        def on_before_optimizer_step(self, optimizer):
            for p in self.layers[0].parameters():
                p.grad = p.grad.to_sparse()

    if name == "SparseAdam":
        module = Sparse(lambda m: adapters.SparseAdam(m.layers[0].parameters()))
    else:
        module = pl.Net(scheduled(KINDS[name]))
    pl.fit(module).save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert len(saved["optimizer_states"]) == 1
    trainer = pl.trainer(2)
    trainer.fit(module, pl.loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert trainer.global_step == 2 * pl.BATCHES


@pytest.mark.parametrize("kind", [general(recipe), adamw])
def test_fabric_saves_and_loads_bitwise(pl, kind, tmp_path):
    import lightning

    fabric = lightning.Fabric(accelerator="cpu")

    def made():
        net = pl.Net(None).layers
        return fabric.setup(net, kind(net.parameters()))

    def train(model, opt, batches):
        for x in pl.data().split(pl.ROWS)[batches]:
            opt.zero_grad()
            fabric.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
            opt.step()
        return pl.values(model), opt.state_dict()["state"]

    model, opt = made()
    train(model, opt, slice(0, 3))
    fabric.save(tmp_path / "a.ckpt", {"model": model, "opt": opt, "step": 3})
    end = train(model, opt, slice(3, None))
    other, twin = made()
    rest = fabric.load(tmp_path / "a.ckpt", {"model": other, "opt": twin}, weights_only=True)
    assert rest == {"step": 3}
    assert_same(train(other, twin, slice(3, None)), end)


# ---------------------------------------------------------------- optimizers with two modes
def made(module):
    return adapters.ScheduleFreeAdamW(module.parameters(), lr=0.05, compile=False)


def fitted(pl, epochs, configure=made, path=None, **options):
    """A trained module, which notes the mode and its weights in each of its steps."""
    from functional_optim.adapters.lightning import SwitchModes

    class Watched(pl.Net):
        seen = ()

        def note(self, what):
            mode = getattr(self.trainer.optimizers[0], "training", None)
            self.seen = (*self.seen, (what, mode, pl.values(self)))

        def training_step(self, batch, index):
            self.note("train")
            return super().training_step(batch, index)

        def validation_step(self, batch, index):
            self.note("validate")

    module = Watched(configure)
    trainer = pl.trainer(epochs, **{"callbacks": [SwitchModes()], **options})
    trainer.fit(module, pl.loader(), pl.loader(1), ckpt_path=path)
    return module, trainer


def test_lightning_validates_the_averages_and_trains_on(pl):
    module, trainer = fitted(pl, 2)
    opt = trainer.optimizers[0]
    modes = {(what, training) for what, training, _ in module.seen}
    assert modes == {("train", True), ("validate", False)}
    assert not opt.training
    assert_same(pl.values(module), module.seen[-1][2])
    opt.train()
    assert not torch.equal(pl.values(module)[0], module.seen[-1][2][0])
    # the same without validations, but for the rounding of the way there and back
    plain = pl.Net(made)
    pl.fit(plain, max_epochs=2).optimizers[0].train()
    assert_close(pl.values(module), pl.values(plain), 1e-12)


def test_lightning_resumes_from_either_mode_bitwise(pl, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    from functional_optim.adapters.lightning import SwitchModes

    saving = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1, filename="{epoch}")
    args = {"callbacks": [SwitchModes(), saving], "enable_checkpointing": True}
    module, whole = fitted(pl, 3, **args)
    path = tmp_path / "epoch=1.ckpt"
    saved = torch.load(path, weights_only=True)
    assert saved["optimizer_states"][0]["param_groups"][0]["train_mode"] is False
    validated = [weights for what, _, weights in module.seen if what == "validate"]
    assert_same(list(saved["state_dict"].values()), validated[-2])  # those of the second epoch
    other, trainer = fitted(pl, 3, path=path)
    assert_same(pl.values(other), pl.values(module))
    assert_same(trainer.optimizers[0].state_dict(), whole.optimizers[0].state_dict())


def test_the_callback_leaves_other_optimizers_alone(pl):
    def adamw(module):
        return adapters.AdamW(module.parameters(), lr=0.05, compile=False)

    ends = [pl.values(fitted(pl, 1, adamw, **args)[0]) for args in ({}, {"callbacks": []})]
    assert_same(*ends)


# ---------------------------------------------------------------- precision plugins on the CPU
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

precisions = pytest.mark.parametrize("precision", PRECISIONS)


def of(kind, **more):
    return lambda m: kind(m.parameters(), **more)


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
@pytest.mark.parametrize("name", ROWS)
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
def test_a_mixed_trainer_clips_unscaled_gradients(pl, precision, how):
    args = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": how}
    theirs, ours = (run(pl, of(kind), precision, **args) for kind in pair("AdamW"))
    assert_close(ours[0][0], theirs[0][0], 1e-4)
    free = run(pl, of(pair("AdamW")[1]), precision)
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
    for kind in pair(name) if name in ROWS else [general(recipe)]:
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


@precisions
@pytest.mark.parametrize("kind", [pair("AdamW")[1], general(recipe)], ids=["AdamW", "recipe"])
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
