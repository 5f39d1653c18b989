"""What Lightning hooks into an optimizer, its wrapper, short runs, validation in between."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import assert_close, assert_same
from voting import recipe

from functional_optim import adapters


def adamw(module):
    return adapters.AdamW(module.parameters(), lr=0.05, compile=False)


def stock(module):
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def test_every_hook_of_a_module_about_its_optimizer(pl):
    calls = []

    class Hooked(pl.Net):
        def on_before_optimizer_step(self, optimizer):
            norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
            calls.append(("before", type(optimizer).__name__, norm.item()))

        def optimizer_zero_grad(self, epoch, index, optimizer):
            calls.append(("zero", index))
            optimizer.zero_grad(set_to_none=False)

        def configure_gradient_clipping(self, optimizer, gradient_clip_val, **kwargs):
            assert gradient_clip_val is None
            self.clip_gradients(optimizer, 0.1, "value")

        def optimizer_step(self, epoch, index, optimizer, closure):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (index + 1)
            if index != 2:
                optimizer.step(closure=closure)
            else:
                closure()

    runs = []
    for make in (stock, adamw):
        calls.append("—")
        runs.append(pl.run(make, Hooked))
    pl.assert_agree(runs[1], runs[0])
    half = calls.index("—", 1)
    assert len(calls[1:half]) == 2 * pl.BATCHES - 1
    assert calls[1] == ("zero", 0)
    assert [c[:2] for c in calls[1:half]] == [c[:2] for c in calls[half + 1 :]]
    assert_close(
        [c[2:] for c in calls[1:half] if c[0] == "before"],
        [c[2:] for c in calls[half + 1 :] if c[0] == "before"],
        1e-10,
    )
    assert runs[1][0][2][0][0]["step"] == pl.BATCHES - 1


def test_the_optimizers_own_hooks_fire_once_a_step(pl):
    calls = []

    def configure(module):
        opt = adamw(module)
        opt.register_step_pre_hook(lambda *_: calls.append("pre"))
        opt.register_step_post_hook(lambda *_: calls.append("post"))
        return opt

    pl.run(configure)
    assert calls == ["pre", "post"] * pl.BATCHES


@pytest.mark.parametrize("as_recipe", [False, True], ids=["AdamW", "recipe"])
def test_lightnings_wrapper_stands_for_the_optimizer(pl, as_recipe):
    def configure(module):
        if as_recipe:
            return adapters.Optimizer(module.parameters(), recipe, lr=0.05, compile=False)
        return adamw(module)

    module = pl.Net(configure)
    trainer = pl.fit(module)
    (opt,), wrapper = trainer.optimizers, module.optimizers()
    cls = adapters.Optimizer if as_recipe else adapters.AdamW
    assert type(opt) is cls
    assert isinstance(wrapper, cls)
    assert type(wrapper).__name__ == f"Lightning{cls.__name__}"
    assert wrapper.optimizer is opt
    assert wrapper.state is opt.state
    assert repr(wrapper).splitlines()[1:] == repr(opt).splitlines()[1:]
    assert_same(wrapper.state_dict()["state"], opt.state_dict()["state"])
    assert wrapper.compile is opt.compile
    wrapper.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert len(opt.param_groups) == 2
    copied = copy.deepcopy(opt)
    assert_same(copied.state_dict()["state"], opt.state_dict()["state"])
    assert len(copy.deepcopy(wrapper).param_groups) == 2
    wrapper.load_state_dict(opt.state_dict())  # as with torch's, that stays with the wrapper
    assert wrapper.param_groups is not opt.param_groups


def test_a_copied_module_and_trainer_train_on(pl):
    module = pl.Net(adamw)
    pl.fit(module)
    other = copy.deepcopy(module)
    assert_same(pl.values(other), pl.values(module))
    pl.fit(module)
    pl.fit(other)
    assert_same(pl.values(other), pl.values(module))


@pytest.mark.parametrize(
    "args",
    [{"overfit_batches": 2, "max_epochs": 3}, {"fast_dev_run": 2}, {"limit_train_batches": 3}],
)
def test_short_runs(pl, args):
    runs = [pl.run(make, **args) for make in (stock, adamw)]
    pl.assert_agree(runs[1], runs[0])
    pl.assert_moved(runs[1])


def test_validation_between_batches_and_after(pl):
    class Checked(pl.Net):
        def validation_step(self, batch, index):
            assert not torch.is_grad_enabled()
            self.log("val", self.loss(batch[0]))

    logged = []
    runs = []
    for make in (stock, adamw):
        module = Checked(make)
        trainer = pl.trainer(2, val_check_interval=3)
        trainer.fit(module, pl.loader(), pl.loader(2))
        runs.append(pl.found(module, trainer))
        (after,) = trainer.validate(module, pl.loader(2), verbose=False)
        logged.append(after["val"])
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, pl.loader(), pl.loader(2))
        runs.append(pl.found(module, trainer))
    pl.assert_agree(runs[2], runs[0])
    pl.assert_agree(runs[3], runs[1])
    assert_close(logged[1], logged[0], 1e-10)
