"""Lightning's Trainer over our optimizers: the same run as over torch's, or as a loop by hand."""

import copy
import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_close, assert_same, pairs
from sampling import some
from torch.optim import lr_scheduler as lrs
from voting import recipe

import functional_optim as fo
from functional_optim import adapters

ROWS = {
    "AdamW": {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1},
    "SGD": {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1},
}
pair = pairs(ROWS)


def of_all(kind):
    """`configure_optimizers` with one optimizer, of all parameters that are trained at first."""
    return lambda m: kind([p for p in m.parameters() if p.requires_grad])


def each(kind):
    """One for each of the two layers."""
    return lambda m: [kind(m.layers[i].parameters()) for i in (0, 2)]


def scheduled(kind, scheduler, **more):
    def configure(module):
        opt = kind(module.parameters())
        return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler(opt), **more}}

    return configure


def as_recipe(made=recipe, **hyper):
    return of_all(lambda p: adapters.Optimizer(p, made, **{"compile": False, **hyper}))


# ---------------------------------------------------------------- scenes, with torch's and ours
def trained(**args):
    return lambda pl, kind, folder: pl.run(of_all(kind), **args)


def accumulating_more_and_more(pl, kind, folder):
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    module = pl.Net(of_all(kind))
    growing = GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})
    trainer = pl.fit(module, max_epochs=3, callbacks=[growing])
    assert trainer.global_step == 6 + 3 + 2
    return pl.found(module, trainer)


def with_a_scheduler(make, **more):
    def run(pl, kind, folder):
        rates = []

        class Watched(pl.Net):
            def on_train_batch_end(self, *args):
                group = self.trainer.optimizers[0].param_groups[0]
                rates.append((group["lr"], group.get("momentum") or group["betas"][0]))

        found, groups = pl.run(scheduled(kind, make, **more), Watched, max_epochs=3)
        assert len({rate for rate, _ in rates}) >= 3
        return found, (groups, rates)

    return run


def with_a_plateau(pl, kind, folder):
    class Validated(pl.Net):
        def validation_step(self, batch, index):
            assert not torch.is_grad_enabled()
            self.log("val", self.loss(batch[0]))

    def plateau(opt):
        return lrs.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.9)

    module = Validated(scheduled(kind, plateau, monitor="val"))
    trainer = pl.trainer(3, val_check_interval=3)
    trainer.fit(module, pl.loader(), pl.loader(2))
    trainer.fit_loop.max_epochs = 6
    trainer.fit(module, pl.loader(), pl.loader(2))
    assert trainer.optimizers[0].param_groups[0]["lr"] < 0.05
    return pl.found(module, trainer)


def some_steps_are_none(pl, kind, folder):
    class Skipping(pl.Net):
        def training_step(self, batch, index):
            return None if index in (0, 3) else super().training_step(batch, index)

    run = pl.run(of_all(kind), Skipping)
    assert len(run[0][1]) == pl.BATCHES - 2
    return run


def hooked_by_the_module(pl, kind, folder):
    """With every hook of a module that is about its optimizer."""
    calls = []

    class Hooked(pl.Net):
        def on_before_optimizer_step(self, optimizer):
            calls.append("step")
            self.losses.append(torch.stack([p.grad.norm() for p in self.parameters()]).norm())

        def optimizer_zero_grad(self, epoch, index, optimizer):
            calls.append("zero")
            optimizer.zero_grad(set_to_none=False)

        def configure_gradient_clipping(self, optimizer, gradient_clip_val, **kwargs):
            self.clip_gradients(optimizer, 0.1, "value")

        def optimizer_step(self, epoch, index, optimizer, closure):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (index + 1)
            closure() if index == 2 else optimizer.step(closure=closure)

    found, groups = pl.run(of_all(kind), Hooked)
    assert len(calls) == 2 * pl.BATCHES - 1
    return found, (groups, calls)


def tuned(pl, kind, folder):
    """The finders of learning rates and batch sizes put back what they have changed."""
    from lightning.pytorch.tuner import Tuner

    class Sized(pl.Net):
        batch_size, lr = 2, 0.0

        def train_dataloader(self):
            data = torch.utils.data.TensorDataset(pl.data())
            return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

    module = Sized(of_all(kind))
    before = pl.values(module)
    tuner = Tuner(pl.trainer(default_root_dir=folder))
    limits = {"min_lr": 1e-3, "max_lr": 0.5, "num_training": 16, "update_attr": False}
    finder = tuner.lr_find(module, pl.loader(20), **limits)
    assert len(set(finder.results["loss"])) > 8
    assert tuner.scale_batch_size(module, max_trials=2, steps_per_trial=2) == 4
    assert_same(pl.values(module), before)
    trainer = pl.fit(module, module.train_dataloader())
    found, groups = pl.found(module, trainer)
    return found, (groups, finder.suggestion())


def watched_by_the_monitor(pl, kind, folder):
    """It writes learning rates, momenta and decays by the names of optimizers and groups."""
    from lightning.pytorch import loggers
    from lightning.pytorch.callbacks import LearningRateMonitor

    def configure(module):
        one, two = module.layers[0].parameters(), module.layers[2].parameters()
        opt = kind([{"params": one, "name": "first"}, {"params": two, "lr": 0.01}])
        scheduler = lrs.OneCycleLR(opt, [0.2, 0.1], total_steps=6)
        return [opt], [{"scheduler": scheduler, "interval": "step"}]

    log, module = loggers.CSVLogger(folder), pl.Net(configure)
    watch = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    trainer = pl.fit(module, logger=log, callbacks=[watch], log_every_n_steps=1)
    log.save()
    with Path(log.experiment.metrics_file_path).open() as file:
        table = list(csv.DictReader(file))
    assert len({str(row) for row in table}) == pl.BATCHES
    found, groups = pl.found(module, trainer)
    return found, (groups, table)


CALLBACKS = {
    "StochasticWeightAveraging": {"swa_lrs": 0.02, "swa_epoch_start": 2, "annealing_epochs": 2},
    "WeightAveraging": {},
    "EMAWeightAveraging": {"decay": 0.8, "update_starting_at_step": 2},
    "BackboneFinetuning": {
        **{"unfreeze_backbone_at_epoch": 2, "backbone_initial_lr": 1e-3},
        "lambda_func": lambda epoch: 1.5,
    },
}


def with_a_callback(name):
    def run(pl, kind, folder):
        from lightning.pytorch import callbacks

        class Validated(pl.Net):
            @property
            def backbone(self):
                return self.layers[0]

            def validation_step(self, batch, index):  # with an average in the model's place
                self.losses.append(self.loss(batch[0]).item())

        module = Validated(of_all(kind))
        trainer = pl.trainer(4, callbacks=[getattr(callbacks, name)(**CALLBACKS[name])])
        trainer.fit(module, pl.loader(), pl.loader(2))
        assert not torch.equal(pl.run(of_all(kind), max_epochs=4)[0][0][0], pl.values(module)[0])
        return pl.found(module, trainer)

    return run


def by_hand_like_a_gan(pl, kind, folder):
    """Two optimizers in turn, one of them more often, each with its own layer trained."""

    class Gan(pl.ByHand):
        def training_step(self, batch, index):
            first, second = self.optimizers()
            self.toggle_optimizer(first)
            self.step_of(first, 0, batch)
            self.untoggle_optimizer(first)
            if index % 3 == 2:
                with second.toggle_model():
                    self.step_of(second, 2, batch)

        def step_of(self, opt, layer, batch):
            trains = [p.requires_grad for p in self.parameters()]
            assert trains == [layer == 0] * 2 + [layer == 2] * 2
            loss = self.loss(batch[0])
            self.losses.append(loss.item())
            opt.zero_grad()
            self.manual_backward(loss)
            opt.step()

    return pl.run(each(kind), Gan, max_epochs=2)


def by_hand_with_closures(pl, kind, folder):
    """With clipping, accumulation and schedulers by hand, too."""

    class Closures(pl.ByHand):
        def configure_optimizers(self):
            opts = super().configure_optimizers()
            falling = lrs.ExponentialLR(opts[0], 0.7)
            return opts, [falling, lrs.ReduceLROnPlateau(opts[1], patience=0)]

        def training_step(self, batch, index):
            def closure():
                loss = self.loss(batch[0])
                self.losses.append(loss.item())
                self.manual_backward(loss / 2)
                if index % 2:
                    self.clip_gradients(first, 0.05, "norm")
                return loss

            first, second = self.optimizers()
            if index % 2 == 0:
                closure()
                return
            loss = first.step(closure=closure)
            second.step()
            for opt in (first, second):
                opt.zero_grad()
            for scheduler, more in zip(self.lr_schedulers(), ((), (loss.detach(),)), strict=True):
                scheduler.step(*more)

    run = pl.run(each(kind), Closures, max_epochs=2)
    assert run[1][0]["lr"] == pytest.approx(0.05 * 0.7**pl.BATCHES)
    assert run[1][1]["lr"] < 0.05
    return run


def fabric_loop(pl, kind, clip=None):
    """A loop of one's own, with what `fabric.setup` makes of the optimizer."""
    import lightning

    fabric = lightning.Fabric(accelerator="cpu")
    module = pl.Net(None)
    model, opt = fabric.setup(module.layers, kind(module.parameters()))

    def closure(x):
        opt.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        module.losses.append(loss.item())
        fabric.backward(loss)
        if clip:
            fabric.clip_gradients(model, opt, **clip)
        return loss

    for x in pl.data().split(pl.ROWS):
        opt.step(lambda x=x: closure(x))
    return pl.found(module, SimpleNamespace(optimizers=[opt]))


def with_fabric(**clip):
    return lambda pl, kind, folder: fabric_loop(pl, kind, clip)


SCENES = {
    "clipped by norm": trained(gradient_clip_val=0.05, gradient_clip_algorithm="norm"),
    "clipped by value, accumulated": trained(
        gradient_clip_val=0.05, gradient_clip_algorithm="value", accumulate_grad_batches=4
    ),
    "accumulated more and more": accumulating_more_and_more,
    "every epoch": with_a_scheduler(lambda opt: lrs.ExponentialLR(opt, 0.5)),
    "one cycle": with_a_scheduler(
        lambda opt: lrs.OneCycleLR(opt, 0.2, total_steps=18), interval="step", frequency=2
    ),
    "plateau": with_a_plateau,
    "none": some_steps_are_none,
    "hooks": hooked_by_the_module,
    "tuner": tuned,
    "monitor": watched_by_the_monitor,
    **{name: with_a_callback(name) for name in CALLBACKS},
    "gan": by_hand_like_a_gan,
    "closures": by_hand_with_closures,
    "fabric": with_fabric(),
    "fabric, clipped by norm": with_fabric(max_norm=0.05),
    "fabric, clipped by value": with_fabric(clip_val=0.02),
}


PAIRS = [(scene, name) for name in ROWS for scene in SCENES]
CYCLED = [(scene, "SGD") for scene in ("one cycle", "monitor")]
"""Scenes that change momentum, too, which has another name there."""


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.parametrize(("scene", "name"), some(PAIRS, len(SCENES), CYCLED))
def test_a_scene_with_ours_ends_as_with_torchs(pl, scene, name, tmp_path):
    runs = [SCENES[scene](pl, kind, tmp_path / str(i)) for i, kind in enumerate(pair(name))]
    theirs, ours = runs
    pl.assert_agree(ours, theirs)
    pl.assert_moved(ours)


@pytest.mark.parametrize("how", ["automatic", "by hand", "fabric"])
def test_lbfgs_evaluates_the_training_step_many_times(pl, how):
    class Closures(pl.ByHand):
        def training_step(self, batch, index):
            def closure():
                self.zero_grad()
                loss = self.loss(batch[0])
                self.losses.append(loss.item())
                self.manual_backward(loss)
                return loss

            self.optimizers().step(closure)

    runs = []
    for cls in (torch.optim.LBFGS, adapters.LBFGS):

        def kind(params, cls=cls):
            return cls(params, max_iter=4, line_search_fn="strong_wolfe")

        if how == "fabric":
            runs.append(fabric_loop(pl, kind))
        else:
            runs.append(pl.run(of_all(kind), Closures if how == "by hand" else pl.Net))
    pl.assert_agree(runs[1], runs[0])
    assert len(runs[1][0][1]) > 3 * pl.BATCHES


def test_a_compiled_module_trains_as_with_torchs(pl, fresh_dynamo):
    class Quiet(pl.Net):
        def training_step(self, batch, index):
            return self.loss(batch[0])  # in one graph

    ends = []
    for kind in pair("AdamW"):
        module = Quiet(of_all(kind))
        pl.fit(torch.compile(module, backend="aot_eager", fullgraph=True))
        ends.append(pl.values(module))
    assert_close(ends[1], ends[0], 1e-10)


# ---------------------------------------------------------------- recipes
def loop(pl, tx):
    """The functional loop over the same batches: parameters and state."""
    module = pl.Net(None)
    params = dict(module.named_parameters())
    state = tx.init({name: p.detach() for name, p in params.items()})
    for batch in pl.data().split(pl.ROWS):
        loss = module.loss(batch)
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        plain = {name: p.detach() for name, p in params.items()}
        extra = {"value": loss.detach()} if "value" in tx.extra else {}
        updates, state = tx.update(grads, state, plain, **extra)
        with torch.no_grad():
            for name, p in params.items():
                p.add_(updates[name])
    return pl.values(module), state


def plateau(lr):
    return fo.chain(fo.adamw(lr), fo.reduce_on_plateau(0.5, patience=1))


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("made", "hyper"),
    [(fo.polyak_sgd, {}), (plateau, {"lr": 0.1}), (recipe, {"lr": 0.05})],
    ids=["polyak", "plateau", "reads no loss"],
)
def test_a_recipe_goes_where_the_functional_loop_goes(pl, made, hyper, compile):
    """One that reads the loss gets the closure's."""
    (weights, losses, _), _ = pl.run(as_recipe(made, compile=compile, **hyper))
    params, state = loop(pl, made(**hyper))
    assert_close(weights, params, 1e-10)
    assert len(set(losses)) == pl.BATCHES
    if made is plateau:
        assert fo.get(state, "scale") < 1.0


@pytest.mark.parametrize("make", [of_all(pair("AdamW")[1]), as_recipe(lr=0.05)])
def test_lightnings_wrapper_stands_for_the_optimizer(pl, make):
    calls = []

    def configure(module):
        opt = make(module)
        opt.register_step_pre_hook(lambda *_: calls.append("pre"))
        opt.register_step_post_hook(lambda *_: calls.append("post"))
        return opt

    module = pl.Net(configure)
    trainer = pl.fit(module)
    assert calls == ["pre", "post"] * pl.BATCHES
    (opt,), wrapper = trainer.optimizers, module.optimizers()
    cls = type(opt)
    assert isinstance(wrapper, cls)
    assert type(wrapper).__name__ == f"Lightning{cls.__name__}"
    assert wrapper.optimizer is opt
    assert wrapper.state is opt.state
    assert repr(wrapper).splitlines()[1:] == repr(opt).splitlines()[1:]
    assert_same(wrapper.state_dict()["state"], opt.state_dict()["state"])
    assert wrapper.compile is opt.compile
    wrapper.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert len(opt.param_groups) == 2
    assert_same(copy.deepcopy(opt).state_dict()["state"], opt.state_dict()["state"])
    assert len(copy.deepcopy(wrapper).param_groups) == 2
    wrapper.load_state_dict(opt.state_dict())  # as with torch's, that stays with the wrapper
    assert wrapper.param_groups is not opt.param_groups


def test_fabrics_wrapper_stands_for_the_optimizer(pl):
    import lightning

    mine = as_recipe(lr=0.05)(net := pl.Net(None))
    _, opt = lightning.Fabric(accelerator="cpu").setup(net.layers, mine)
    assert isinstance(opt, adapters.Optimizer)
    assert opt.optimizer is mine
    assert opt.param_groups is mine.param_groups
    assert opt.compile is False
    scheduler = lrs.ExponentialLR(opt, 0.5)
    net.loss(pl.data()).backward()
    opt.step()
    scheduler.step()
    assert mine.param_groups[0]["lr"] == 0.025
