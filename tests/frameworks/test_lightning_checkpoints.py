"""Lightning's checkpoints: a run that is resumed ends as the uninterrupted one, bit for bit."""

from __future__ import annotations

import cases
import pytest
import torch
from helpers import assert_same, pairs
from torch.optim import lr_scheduler as lrs
from voting import recipe

import functional_optim as fo
from functional_optim import adapters

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")

pair = pairs({"AdamW": {"lr": 0.05, "weight_decay": 0.1}})
THEIRS, OURS = pair("AdamW")


def whole(lr):
    """A recipe with a part that is not made of one-tensor rules."""
    return fo.flatten(recipe(lr))


def noisy(lr):
    return fo.chain(fo.accumulate(fo.adam(lr), every=2), fo.add_noise(0.1, 0.5, seed=3))


def general(made):
    return lambda params: adapters.Optimizer(params, made, lr=0.05, compile=False)


def of_row(case, ours=True):
    if ours:
        return lambda params: case.drop_in(params, compile=False, **case.hyper)
    return lambda params: case.stock(params, **case.hyper)


def scheduled(kind):
    def configure(module):
        opt = kind(module.parameters())
        scheduler = lrs.OneCycleLR(opt, 0.1, total_steps=24, cycle_momentum=False)
        return [opt], [{"scheduler": scheduler, "interval": "step"}]

    return configure


# ---------------------------------------------------------------- in the middle of an epoch

KINDS = {
    "recipe": general(recipe),
    "flatten": general(whole),
    "accumulate": general(noisy),
    "kernels": lambda params: adapters.AdamW(params, lr=0.05, compile="strict"),
}
EVERY = [
    *[pytest.param(of_row(p.values[0]), p.values[0], id=p.id) for p in cases.with_torch()],
    *[pytest.param(kind, None, id=name) for name, kind in KINDS.items()],
]


@pytest.mark.parametrize(("kind", "case"), EVERY)
def test_resuming_in_the_middle_of_an_epoch_is_bitwise(pl, kind, case, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    bias = case is None or case.dim is None
    module, other = (pl.Net(scheduled(kind), bias=bias) for _ in range(2))
    every = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=4)
    args = {"callbacks": [every], "enable_checkpointing": True}
    end = pl.found(module, pl.fit(module, pl.Resumable(), 2, **args))
    trainer = pl.fit(other, pl.Resumable(), 2, tmp_path / "step=4.ckpt")
    assert trainer.global_step == 2 * pl.BATCHES
    assert len(other.losses) == 2 * pl.BATCHES - 4
    pl.assert_ended_alike(pl.found(other, trainer), end)


@pytest.mark.parametrize("ours_first", [False, True])
@pytest.mark.parametrize("case", cases.with_torch())
def test_a_checkpoint_of_torchs_trainer_goes_on_with_ours_and_back(pl, case, ours_first, tmp_path):
    def fitted(ours, epochs, path=None):
        module = pl.Net(scheduled(of_row(case, ours)), bias=case.dim is None)
        trainer = pl.fit(module, max_epochs=epochs, ckpt_path=path)
        return trainer, pl.found(module, trainer)

    fitted(ours_first, 1)[0].save_checkpoint(tmp_path / "half.ckpt")
    _, found = fitted(not ours_first, 2, tmp_path / "half.ckpt")
    _, end = fitted(ours_first, 2)
    # torch's own loading makes its carried numbers float64
    pl.assert_ended_alike(found, end, max(1e-10, case.rounding), check_dtype=False)


# ---------------------------------------------------------------- between two epochs


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


def two_by_hand(pl, kind=OURS):
    """Two optimizers in turn, with schedulers and clipping."""

    class Gan(pl.ByHand):
        def training_step(self, batch, index):
            for opt, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
                with opt.toggle_model():
                    loss = self.loss(batch[0])
                    self.losses.append(loss.item())
                    opt.zero_grad()
                    self.manual_backward(loss)
                    self.clip_gradients(opt, 0.05, "norm")
                    opt.step()
                scheduler.step()

    def configure(module):
        opts = [kind(module.layers[i].parameters()) for i in (0, 2)]
        cycle = lrs.OneCycleLR(opts[0], 0.1, total_steps=3 * pl.BATCHES)
        return opts, [cycle, lrs.CosineAnnealingLR(opts[1], 3 * pl.BATCHES)]

    return Gan(configure), {}


def lbfgs(params):
    return adapters.LBFGS(params, lr=0.5, max_iter=3, history_size=4)


def finetuned(pl, kind=OURS):
    return pl.Net(thawed(kind)), {"callbacks": [unfreezing(pl)]}


SCENES = {
    "lbfgs": lambda pl: (pl.Net(thawed(lbfgs)), {}),
    "two by hand": two_by_hand,
    "finetuning": finetuned,
    "finetuning, recipe": lambda pl: finetuned(pl, general(recipe)),
    "finetuning by names": lambda pl: (pl.Net(by_name), {"callbacks": [unfreezing(pl, True)]}),
}


def halfway(pl, make, folder, half=1, **first):
    """Runs of three epochs: one that a checkpoint after some epochs goes on with, and the whole."""

    def fitted(epochs, path=None, **more):
        module, args = make(pl, **more)
        trainer = pl.fit(module, None, epochs, path, **args)
        return trainer, pl.found(module, trainer)

    fitted(half, **first)[0].save_checkpoint(folder / "half.ckpt")
    return fitted(3, folder / "half.ckpt")[1], fitted(3, **first)[1]


@pytest.mark.parametrize("half", [1, 2])
@pytest.mark.parametrize("scene", SCENES)
def test_resuming_between_two_epochs_is_bitwise(pl, scene, half, tmp_path):
    """With finetuning, before the new group is there, and with it."""
    resumed, end = halfway(pl, SCENES[scene], tmp_path, half)
    pl.assert_ended_alike(resumed, end)
    pl.assert_moved(end)


@pytest.mark.parametrize("make", [two_by_hand, finetuned])
def test_a_scene_with_torchs_goes_on_with_ours(pl, make, tmp_path):
    pl.assert_ended_alike(*halfway(pl, make, tmp_path, 2, kind=THEIRS), 1e-10)


def test_a_group_without_names_is_refused_with_advice(pl):
    """Lightning's own callback adds one, which no optimizer with names takes."""
    with pytest.raises(ValueError, match="without names to the optimizer; pass pairs of names"):
        pl.run(by_name, max_epochs=2, callbacks=[unfreezing(pl)])


# ---------------------------------------------------------------- what is read


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


@pytest.mark.parametrize("kind", [general(recipe), OURS])
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
