"""Lightning's manual optimization: several optimizers, toggling, closures, steps now and then."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, assert_same
from torch.optim import lr_scheduler as lrs
from voting import recipe

import functional_optim as fo
from functional_optim import adapters


def average(lr, decay=0.5):
    return fo.chain(fo.sgd(lr, momentum=0.9), fo.params_ema(decay))


KINDS = {
    "torch": (torch.optim.AdamW, torch.optim.SGD, {}),
    "ours": (adapters.AdamW, adapters.SGD, {"compile": False}),
}


def two(kind):
    """Two optimizers of different classes, each with a layer of its own."""
    first, second, more = KINDS[kind]
    return lambda m: [
        first(m.layers[0].parameters(), lr=0.05, **more),
        second(m.layers[2].parameters(), lr=0.1, momentum=0.9, **more),
    ]


def runs_of(pl, cls, **kwargs):
    """The same module with torch's optimizers and with ours."""
    runs = [pl.run(two(kind), cls, **kwargs) for kind in KINDS]
    pl.assert_agree(runs[1], runs[0])
    pl.assert_moved(runs[1])
    return runs[1]


def test_two_optimizers_in_turn_like_a_gan(pl):
    class Gan(pl.ByHand):
        def training_step(self, batch, index):
            frozen = []
            for opt, layer in zip(self.optimizers(), (0, 2), strict=True):
                self.toggle_optimizer(opt)
                frozen.append([p.requires_grad for p in self.parameters()])
                loss = self.loss(batch[0])
                self.losses.append(loss.item())
                opt.zero_grad()
                self.manual_backward(loss)
                assert all(p.grad is not None for p in self.layers[layer].parameters())
                opt.step()
                self.untoggle_optimizer(opt)
            assert frozen == [[True, True, False, False], [False, False, True, True]]
            assert all(p.requires_grad for p in self.parameters())

    runs_of(pl, Gan)


def test_one_steps_more_often_than_the_other(pl):
    class Frequencies(pl.ByHand):
        def training_step(self, batch, index):
            first, second = self.optimizers()
            with first.toggle_model():
                self.losses.append(self.loss(batch[0]).item())
                self.manual_backward(self.loss(batch[0]))
                first.step()
                first.zero_grad()
            if index % 3 == 2:
                with second.toggle_model(sync_grad=False):
                    self.manual_backward(self.loss(batch[0]))
                    second.step()
                    second.zero_grad()

    class Counted(Frequencies):
        def on_train_end(self):
            self.steps = self.trainer.global_step

    runs = runs_of(pl, Counted, max_epochs=2)
    state = runs[0][2][0]
    assert state[0]["step"] == 2 * pl.BATCHES


def test_closures_clipping_and_accumulation_by_hand(pl):
    class Closures(pl.ByHand):
        def training_step(self, batch, index):
            def closure():
                loss = self.loss(batch[0])
                self.losses.append(loss.item())
                self.manual_backward(loss / 2)
                if index % 2:
                    self.clip_gradients(self.optimizers()[0], 0.05, "norm")
                return loss

            first, second = self.optimizers()
            if index % 2 == 0:
                closure()
                return
            first.step(closure=closure)
            second.step()
            for opt in (first, second):
                opt.zero_grad()

    runs_of(pl, Closures)


def test_schedulers_by_hand(pl):
    class Scheduled(pl.ByHand):
        def configure_optimizers(self):
            opts = super().configure_optimizers()
            return opts, [
                lrs.ExponentialLR(opts[0], 0.7),
                lrs.ReduceLROnPlateau(opts[1], patience=0),
            ]

        def training_step(self, batch, index):
            opts, schedulers = self.optimizers(), self.lr_schedulers()
            loss = self.loss(batch[0])
            self.losses.append(loss.item())
            self.manual_backward(loss)
            for opt in opts:
                opt.step()
                opt.zero_grad()
            schedulers[0].step()
            schedulers[1].step(loss.detach())

    run = runs_of(pl, Scheduled)
    assert run[1][0]["lr"] == pytest.approx(0.05 * 0.7**pl.BATCHES)
    assert run[1][1]["lr"] < 0.1


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_two_optimizers_with_schedulers_and_clips_resume_bitwise(pl, tmp_path):
    class Gan(pl.ByHand):
        def configure_optimizers(self):
            opts = super().configure_optimizers()
            return opts, [
                lrs.OneCycleLR(opts[0], 0.1, total_steps=2 * pl.BATCHES),
                lrs.CosineAnnealingLR(opts[1], 2 * pl.BATCHES),
            ]

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

    def fitted(kind, epochs, path=None):
        module = Gan(two(kind))
        trainer = pl.fit(module, None, epochs, path)
        return pl.found(module, trainer), trainer

    ends = {kind: fitted(kind, 2)[0] for kind in KINDS}
    pl.assert_agree(ends["ours"], ends["torch"])
    for kind, tolerance in (("ours", 0.0), ("torch", 1e-10)):
        fitted(kind, 1)[1].save_checkpoint(tmp_path / "half.ckpt")
        resumed, _ = fitted("ours", 2, tmp_path / "half.ckpt")
        pl.assert_ended_alike(resumed, ends["ours"], tolerance)
    assert all(group["lr"] < 0.01 for group in ends["ours"][1])


def test_two_recipes_keep_to_themselves(pl):
    class Both(pl.ByHand):
        def training_step(self, batch, index):
            for opt in self.optimizers():
                with opt.toggle_model():
                    opt.zero_grad()
                    self.manual_backward(self.loss(batch[0]))
                    opt.step()

    def configure(module):
        return [
            adapters.Optimizer(module.layers[0].parameters(), recipe, lr=0.05, compile=False),
            adapters.Optimizer(module.layers[2].parameters(), average, lr=0.1, compile=False),
        ]

    module = Both(configure)
    opts = pl.fit(module).optimizers
    assert [sorted(next(iter(opt.state.values()))) for opt in opts] == [
        ["exp_avg", "exp_avg_sq", "params_ema", "step"],
        ["momentum_buffer", "params_ema", "step"],
    ]
    plain = pl.Net(None)
    by_hand = configure(plain)
    for batch in pl.data().split(pl.ROWS):
        for opt in by_hand:
            plain.zero_grad()
            plain.loss(batch).backward()
            opt.step()
    assert_same(pl.values(module), pl.values(plain))


def test_a_recipe_that_reads_the_loss_needs_a_closure(pl):
    class Reading(pl.ByHand):
        closed = True

        def training_step(self, batch, index):
            def closure():
                self.zero_grad()
                loss = self.loss(batch[0])
                self.losses.append(loss.item())
                self.manual_backward(loss)
                return loss

            if self.closed:
                self.optimizers().step(closure)
            else:
                closure()
                self.optimizers().step()

    class Without(Reading):
        closed = False

    def configure(module):
        return adapters.Optimizer(module.parameters(), fo.polyak_sgd, compile=False)

    (weights, _, _), _ = pl.run(configure, Reading)
    (automatic, _, _), _ = pl.run(configure)
    assert_same(weights, automatic)
    with pytest.raises(RuntimeError, match=r"this recipe reads the loss; call opt.step\(closure\)"):
        pl.run(configure, Without)


def test_lbfgs_by_hand(pl):
    class Closures(pl.ByHand):
        def training_step(self, batch, index):
            opt = self.optimizers()

            def closure():
                opt.zero_grad()
                loss = self.loss(batch[0])
                self.losses.append(loss.item())
                self.manual_backward(loss)
                return loss

            opt.step(closure)

    runs = [
        pl.run(lambda m, k=kind: k(m.parameters(), line_search_fn="strong_wolfe"), Closures)
        for kind in (torch.optim.LBFGS, adapters.LBFGS)
    ]
    pl.assert_agree(runs[1], runs[0])


def test_a_population_method_is_given_the_loss_alone(pl):
    class Searching(pl.ByHand):
        def training_step(self, batch, index):
            self.losses.append(float(self.optimizers().step(lambda: self.loss(batch[0]))))

    def configure(module):
        return adapters.GradientFree(module.parameters(), fo.search.snes, population=6, sigma=0.1)

    module = Searching(configure)
    pl.fit(module, max_epochs=3)
    plain = pl.Net(None)
    opt = configure(plain)
    for _ in range(3):
        for batch in pl.data().split(pl.ROWS):
            opt.step(lambda batch=batch: plain.loss(batch))
    assert_close(pl.values(module), pl.values(plain), 1e-12)
