"""Optimizers with two modes under Lightning and Accelerate, which must switch them."""

from __future__ import annotations

import accelerate
import pytest
import torch
from helpers import assert_close, assert_same

from functional_optim import adapters


def made(module):
    return adapters.ScheduleFreeAdamW(module.parameters(), lr=0.05, compile=False)


def switching():
    """The callback; with it Lightning is imported, and torch's compiler."""
    from functional_optim.adapters.lightning import SwitchModes

    return SwitchModes()


def net(pl):
    """A module that notes the mode and its weights in each of its steps."""

    class Watched(pl.Net):
        def __init__(self):
            super().__init__(made)
            self.seen = []

        def note(self, what):
            opt = self.trainer.optimizers[0]
            self.seen.append((what, opt.training, pl.values(self)))

        def training_step(self, batch, index):
            self.note("train")
            return super().training_step(batch, index)

        def validation_step(self, batch, index):
            self.note("validate")

    return Watched()


def fitted(pl, epochs, path=None, **options):
    module = net(pl)
    trainer = pl.trainer(epochs, callbacks=[switching()], **options)
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
    before = pl.values(module)
    assert not torch.equal(before[0], module.seen[-1][2][0])
    # the same without validations, but for the rounding of the way there and back
    plain = pl.Net(made)
    end = pl.fit(plain, max_epochs=2)
    end.optimizers[0].train()
    assert_close(before, pl.values(plain), 1e-12)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_lightning_resumes_from_either_mode_bitwise(pl, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1, filename="{epoch}")
    whole = pl.trainer(
        3, callbacks=[switching(), saving], enable_checkpointing=True, default_root_dir=tmp_path
    )
    module = net(pl)
    whole.fit(module, pl.loader(), pl.loader(1))
    path = tmp_path / "epoch=1.ckpt"
    saved = torch.load(path, weights_only=True)
    assert saved["optimizer_states"][0]["param_groups"][0]["train_mode"] is False
    validated = [weights for what, _, weights in module.seen if what == "validate"]
    assert_same(list(saved["state_dict"].values()), validated[-2])  # those of the second epoch
    other, trainer = fitted(pl, 3, path)
    assert_same(pl.values(other), pl.values(module))
    assert_same(trainer.optimizers[0].state_dict(), whole.optimizers[0].state_dict())


def test_the_callback_leaves_other_optimizers_alone(pl):
    plain = pl.Net(lambda m: adapters.AdamW(m.parameters(), lr=0.05, compile=False))
    pl.fit(plain, callbacks=[switching()])
    other = pl.Net(lambda m: adapters.AdamW(m.parameters(), lr=0.05, compile=False))
    pl.fit(other)
    assert_same(pl.values(plain), pl.values(other))


def test_accelerate_passes_the_modes_on_and_saves_them(tmp_path):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    here = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    model, opt = here.prepare(model, made(model))

    def step():
        opt.zero_grad()
        here.backward(model(torch.ones(2, 3, dtype=torch.float64)).square().mean())
        opt.step()

    opt.train()
    for _ in range(3):
        step()
    training = model.weight.detach().clone()
    opt.eval()
    average = model.weight.detach().clone()
    assert not torch.equal(average, training)
    here.save_state(str(tmp_path))
    opt.train()
    step()
    end = model.weight.detach().clone()
    here.load_state(str(tmp_path))
    assert_same(model.weight.detach(), average)
    with pytest.raises(RuntimeError, match="evaluation mode"):
        step()
    opt.train()
    step()
    assert_same(model.weight.detach(), end)
