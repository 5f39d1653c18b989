"""Lightning's callbacks and tuners that reach into an optimizer: finders, finetuning, averages."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, assert_same, pairs
from torch.optim import lr_scheduler as lrs
from voting import recipe

import functional_optim as fo
from functional_optim import adapters

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")

ROWS = {
    "AdamW": {"lr": 0.05, "weight_decay": 0.1},
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adafactor": {"lr": 0.05},
    "ASGD": {"lr": 0.05},
}
names = pytest.mark.parametrize("name", ROWS)
pair = pairs(ROWS)


def as_recipe(params):
    return adapters.Optimizer(params, recipe, lr=0.05, compile=False)


# ---------------------------------------------------------------- the tuner


@pytest.mark.parametrize("make", [*[pair(name) for name in ROWS], (as_recipe, as_recipe)])
def test_the_finder_of_learning_rates_leaves_no_trace(pl, make, tmp_path):
    from lightning.pytorch.tuner import Tuner

    class Tuned(pl.Net):
        lr = 0.05

        def configure_optimizers(self):
            opt = super().configure_optimizers()
            opt.param_groups[0]["lr"] = self.lr
            return opt

    found = []
    for kind in make:
        module = Tuned(lambda m, k=kind: k(m.parameters()))
        before = pl.values(module)
        trainer = pl.trainer(default_root_dir=tmp_path)
        finder = Tuner(trainer).lr_find(
            module, pl.loader(20), min_lr=1e-3, max_lr=0.5, num_training=16, update_attr=False
        )
        assert_same(pl.values(module), before)
        found.append((finder.results["lr"], finder.results["loss"], finder.suggestion()))
        module.lr = finder.suggestion()
        module.losses = []
        trainer.fit(module, pl.loader())
        found[-1] += (pl.found(module, trainer)[0],)
    assert len(set(found[1][1])) > 8
    assert_close(found[1], found[0], 1e-9)


def test_the_finder_finds_nothing_for_a_recipe_without_lr(pl, tmp_path):
    from lightning.pytorch.tuner import Tuner

    losses = []
    for highest in (0.1, 10.0):
        module = pl.Net(
            lambda m: adapters.Optimizer(m.parameters(), lambda: fo.sgd(0.01), compile=False)
        )
        tuner = Tuner(pl.trainer(default_root_dir=tmp_path))
        module.lr = 0.0
        given = {"max_lr": highest, "num_training": 8, "update_attr": False}
        losses.append(tuner.lr_find(module, pl.loader(20), **given).results["loss"])
    assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval:UserWarning")
def test_the_finder_of_batch_sizes_leaves_no_trace(pl, tmp_path):
    from lightning.pytorch.tuner import Tuner

    class Sized(pl.Net):
        batch_size = 2

        def train_dataloader(self):
            data = torch.utils.data.TensorDataset(pl.data())
            return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

    ends = []
    for kind in pair("AdamW"):
        module = Sized(lambda m, k=kind: k(m.parameters()))
        before = pl.values(module)
        trainer = pl.trainer(default_root_dir=tmp_path)
        size = Tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=2)
        assert size == module.batch_size == 4
        assert_same(pl.values(module), before)
        module.losses = []
        trainer.fit(module)
        ends.append(pl.found(module, trainer)[0])
    assert_close(ends[1], ends[0], 1e-10)


# ---------------------------------------------------------------- finetuning


def unfreezing(pl, epoch=1):
    """The first layer is frozen until an epoch; then it joins with a learning rate of its own."""
    from lightning.pytorch.callbacks import BaseFinetuning

    class Unfreezing(BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.layers[0])

        def finetune_function(self, module, current, optimizer):
            if current == epoch:
                self.unfreeze_and_add_param_group(module.layers[0], optimizer, lr=0.01)
            elif current > epoch:  # after a checkpoint, which brings the group, but freezes all
                self.make_trainable(module.layers[0])

    return Unfreezing()


def thawed(kind):
    return lambda m: kind([p for p in m.parameters() if p.requires_grad])


@names
def test_groups_that_finetuning_adds_are_stepped_as_with_torchs(pl, name):
    runs = [pl.run(thawed(kind), max_epochs=3, callbacks=[unfreezing(pl)]) for kind in pair(name)]
    pl.assert_agree(runs[1], runs[0])
    assert [group["params"] for group in runs[1][1]] == [[0, 1], [2, 3]]
    assert runs[1][1][1]["lr"] == 0.01


@pytest.mark.parametrize("kind", [*[pair(name)[1] for name in ROWS], as_recipe])
@pytest.mark.parametrize("half", [1, 2])
def test_finetuning_resumes_bitwise(pl, kind, half, tmp_path):
    """Before the new group is there, and with it."""

    def fitted(epochs, path=None):
        module = pl.Net(thawed(kind))
        trainer = pl.fit(module, None, epochs, path, callbacks=[unfreezing(pl)])
        return pl.found(module, trainer), trainer

    fitted(half)[1].save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fitted(3, tmp_path / "half.ckpt")
    end, _ = fitted(3)
    pl.assert_ended_alike(resumed, end)
    assert len(end[1]) == 2


def test_a_finetuning_checkpoint_of_torchs_goes_on_with_ours(pl, tmp_path):
    def fitted(kind, epochs, path=None):
        module = pl.Net(thawed(kind))
        trainer = pl.fit(module, None, epochs, path, callbacks=[unfreezing(pl)])
        return pl.found(module, trainer), trainer

    theirs, ours = pair("AdamW")
    fitted(theirs, 2)[1].save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fitted(ours, 3, tmp_path / "half.ckpt")
    pl.assert_ended_alike(resumed, fitted(theirs, 3)[0], 1e-10)


def test_named_parameters_are_unfrozen_by_name(pl, tmp_path):
    """Lightning's own callback adds a group without names, which no optimizer with names takes."""

    def configure(module):
        def by_name(lr):
            parts = {"decay": fo.adamw(lr, weight_decay=0.5), "plain": fo.adam(lr)}
            return fo.partition(parts, {"*.bias": "plain", "layers.*": "decay"})

        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        return adapters.Optimizer(named, by_name, compile=False, lr=0.05)

    class ByName(type(unfreezing(pl))):
        def finetune_function(self, module, current, optimizer):
            layer = module.layers[0]
            if current >= 1:
                self.make_trainable(layer)
            if current == 1:
                group = {"params": list(layer.named_parameters("layers.0")), "lr": 0.01}
                optimizer.add_param_group(group)

    def fitted(epochs, path=None):
        module = pl.Net(configure)
        trainer = pl.fit(module, None, epochs, path, callbacks=[ByName()])
        return pl.found(module, trainer), trainer

    end, _ = fitted(3)
    assert end[1][1]["param_names"] == ["layers.0.weight", "layers.0.bias"]
    for half in (1, 2):  # before the new group is there, and with it
        fitted(half)[1].save_checkpoint(tmp_path / "half.ckpt")
        pl.assert_ended_alike(fitted(3, tmp_path / "half.ckpt")[0], end)
    with pytest.raises(ValueError, match="without names to the optimizer; pass pairs of names"):
        pl.run(configure, max_epochs=2, callbacks=[unfreezing(pl)])


@names
def test_backbone_finetuning(pl, name):
    from lightning.pytorch.callbacks import BackboneFinetuning

    class WithBackbone(pl.Net):
        @property
        def backbone(self):
            return self.layers[0]

    def configure(kind):
        def made(module):
            opt = thawed(kind)(module)
            return [opt], [lrs.ExponentialLR(opt, 0.9)]

        return made

    runs = [
        pl.run(
            configure(kind),
            WithBackbone,
            max_epochs=4,
            callbacks=[BackboneFinetuning(2, lambda epoch: 1.5, backbone_initial_lr=1e-3)],
        )
        for kind in pair(name)
    ]
    pl.assert_agree(runs[1], runs[0])
    assert [len(group["params"]) for group in runs[1][1]] == [2, 2]
    assert runs[1][1][1]["lr"] > 1e-3


# ---------------------------------------------------------------- averages of the weights


def averaging(name, pl, **kwargs):
    from lightning.pytorch import callbacks

    return getattr(callbacks, name)(**kwargs)


AVERAGES = {
    "StochasticWeightAveraging": {"swa_lrs": 0.02, "swa_epoch_start": 2, "annealing_epochs": 2},
    "WeightAveraging": {},
    "EMAWeightAveraging": {"decay": 0.8, "update_starting_at_step": 2},
}


@pytest.mark.parametrize("average", AVERAGES)
@names
def test_averages_of_the_weights_are_those_with_torchs(pl, name, average):
    rates = []

    class Watched(pl.Net):
        def on_train_batch_start(self, *args):
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        def validation_step(self, batch, index):  # with the average in the model's place
            self.losses.append(self.loss(batch[0]).item())

    runs = []
    for kind in pair(name):
        module = Watched(lambda m, k=kind: k(m.parameters()))
        trainer = pl.trainer(4, callbacks=[averaging(average, pl, **AVERAGES[average])])
        trainer.fit(module, pl.loader(), pl.loader(2))
        runs.append(pl.found(module, trainer))
    pl.assert_agree(runs[1], runs[0])
    plain = pl.run(lambda m: pair(name)[1](m.parameters()), max_epochs=4)
    assert not torch.equal(plain[0][0][0], runs[1][0][0][0])
    assert (len(set(rates)) > 1) == (average == "StochasticWeightAveraging")


@pytest.mark.parametrize("average", AVERAGES)
def test_averages_resume_bitwise(pl, average, tmp_path):
    def fitted(epochs, path=None):
        module = pl.Net(lambda m: pair("AdamW")[1](m.parameters()))
        callbacks = [averaging(average, pl, **AVERAGES[average])]
        trainer = pl.trainer(4, callbacks=callbacks)
        module.on_train_epoch_end = lambda: (
            trainer.save_checkpoint(tmp_path / "half.ckpt")
            if path is None and trainer.current_epoch == epochs
            else None
        )
        trainer.fit(module, pl.loader(), ckpt_path=path)
        return pl.found(module, trainer)

    end = fitted(2)
    pl.assert_ended_alike(fitted(4, tmp_path / "half.ckpt"), end)


def test_the_recipes_average_is_the_callbacks(pl):
    """params_ema starts from the weights before the first step, the callback's from those after."""

    def averaged(lr):
        return fo.chain(fo.adamw(lr), fo.params_ema(0.8))

    def configure(module):
        return adapters.Optimizer(module.parameters(), averaged, lr=0.05, compile=False)

    (_, _, (kept,)), _ = pl.run(configure)
    mine = [kept[i]["params_ema"] for i in range(4)]
    module = pl.Net(lambda m: adapters.AdamW(m.parameters(), lr=0.05, compile=False))
    start = pl.values(module)
    weights = []
    module.on_train_batch_end = lambda *args: weights.append(pl.values(module))
    pl.fit(module, callbacks=[averaging("EMAWeightAveraging", pl, decay=0.8)])
    for first, theirs in ((start, mine), (weights[0], pl.values(module))):
        average = first
        for after in weights if first is start else weights[1:]:
            average = [a + 0.2 * (w - a) for a, w in zip(average, after, strict=True)]
        assert_close(theirs, average, 1e-12)


@pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called:UserWarning")
@pytest.mark.filterwarnings("ignore:.fit.ckpt_path=.last.. is set, but there is no:UserWarning")
def test_stopping_early_and_catching_an_exception(pl, tmp_path):
    from lightning.pytorch.callbacks import EarlyStopping, OnExceptionCheckpoint

    class Failing(pl.Net):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.log("loss", loss)
            if self.trainer.current_epoch == 1 and index == 2:
                raise ValueError("a bad batch")
            return loss

    caught = OnExceptionCheckpoint(tmp_path, "last")
    module = Failing(lambda m: as_recipe(m.parameters()))
    with pytest.raises(ValueError, match="a bad batch"):
        pl.fit(module, max_epochs=2, callbacks=[caught], enable_checkpointing=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    states = saved["optimizer_states"][0]["state"]
    assert states[0]["step"] == pl.BATCHES + 2
    assert_same(list(saved["state_dict"].values()), pl.values(module))
    stop = EarlyStopping("loss", patience=0, mode="max", check_on_train_epoch_end=True)

    class Logging(Failing):
        def training_step(self, batch, index):
            loss = pl.Net.training_step(self, batch, index)
            self.log("loss", loss, on_epoch=True)
            return loss

    other = Logging(lambda m: as_recipe(m.parameters()))
    trainer = pl.fit(other, max_epochs=9, callbacks=[stop])
    assert trainer.current_epoch < 9
