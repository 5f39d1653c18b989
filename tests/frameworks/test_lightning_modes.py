"""Optimizers with two modes under Lightning, which must switch them."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, assert_same

from functional_optim import adapters


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


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
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
