"""Under Lightning: torch's LR schedulers, the monitor of learning rates, clipping, accumulation."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from helpers import assert_close, pairs
from torch.optim import lr_scheduler as lrs

import functional_optim as fo
from functional_optim import adapters

KINDS = {
    "AdamW": {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1},
    "SGD": {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1},
}
kinds = pytest.mark.parametrize("name", KINDS)
pair = pairs(KINDS)


def chained(opt):
    return lrs.ChainedScheduler(
        [lrs.LinearLR(opt, 0.1, total_iters=3), lrs.ExponentialLR(opt, 0.9)]
    )


def warm(opt):
    parts = [lrs.LinearLR(opt, 0.1, total_iters=3), lrs.CosineAnnealingLR(opt, 8)]
    return lrs.SequentialLR(opt, parts, [3])


SCHEDULERS = {
    "step": ("step", lambda opt: lrs.StepLR(opt, 2, 0.5)),
    "epoch": ("epoch", lambda opt: lrs.ExponentialLR(opt, 0.5)),
    "every second step": ("step", lambda opt: lrs.ExponentialLR(opt, 0.5)),
    "one cycle": ("step", lambda opt: lrs.OneCycleLR(opt, 0.2, total_steps=18)),
    "cyclic": ("step", lambda opt: lrs.CyclicLR(opt, 0.01, 0.1, 4)),
    "warm restarts": ("step", lambda opt: lrs.CosineAnnealingWarmRestarts(opt, 4)),
    "chained": ("step", chained),
    "warmup, then cosine": ("step", warm),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@kinds
def test_schedulers_turn_the_knobs_as_with_torchs(pl, name, scheduler):
    interval, make = SCHEDULERS[scheduler]
    frequency = 2 if scheduler.startswith("every second") else 1
    rates = []

    class Watched(pl.Net):
        def on_train_batch_end(self, *args):
            group = self.trainer.optimizers[0].param_groups[0]
            rates.append((group["lr"], group.get("momentum") or group["betas"][0]))

    def configure(kind):
        def made(module):
            opt = kind(module.parameters())
            entry = {"scheduler": make(opt), "interval": interval, "frequency": frequency}
            return {"optimizer": opt, "lr_scheduler": entry}

        return made

    runs = [pl.run(configure(kind), Watched, max_epochs=3) for kind in pair(name)]
    pl.assert_agree(runs[1], runs[0])
    pl.assert_moved(runs[1])
    half = len(rates) // 2
    assert rates[:half] == rates[half:]
    assert len({rate for rate, _ in rates}) >= 3
    assert (len({m for _, m in rates}) > 3) == (scheduler in ("one cycle", "cyclic"))


def plateau(kind, monitor="train"):
    def configure(module):
        opt = kind(module.parameters())
        scheduler = lrs.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.9)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler, "monitor": monitor}}

    return configure


@kinds
@pytest.mark.parametrize("monitor", ["train", "val"])
def test_reduce_on_plateau_follows_what_is_logged(pl, name, monitor):
    class Logging(pl.Net):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.log("train", loss, on_epoch=True)
            return loss

        def validation_step(self, batch, index):
            self.log("val", self.loss(batch[0]))

    runs = []
    for kind in pair(name):
        module = Logging(plateau(kind, monitor))
        trainer = pl.trainer(4)
        trainer.fit(module, pl.loader(), pl.loader(2))
        runs.append(pl.found(module, trainer))
    pl.assert_agree(runs[1], runs[0])
    assert runs[1][1][0]["lr"] < 0.05


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty:UserWarning")
def test_stopping_early_and_a_plateau_resume_as_with_torchs(pl, tmp_path):
    """Lightning saves before the plateau's step of that epoch: neither run is the uninterrupted."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    class Validated(pl.Net):
        def validation_step(self, batch, index):
            self.log("val", self.loss(batch[0]))

    def fitted(kind, folder, path=None):
        best = {"monitor": "val", "save_top_k": 2, "save_on_train_epoch_end": True}
        kept = [
            EarlyStopping("val", patience=2, min_delta=0.3),
            ModelCheckpoint(folder, filename="{epoch}", **best),
        ]
        module = Validated(plateau(kind, "val"))
        trainer = pl.trainer(12, callbacks=kept, enable_checkpointing=True)
        trainer.fit(module, pl.loader(), pl.loader(2), ckpt_path=path)
        assert 2 < trainer.current_epoch < 12
        return pl.found(module, trainer), sorted(p.name for p in folder.iterdir())

    runs = []
    for i, kind in enumerate(pair("AdamW")):
        whole, files = fitted(kind, tmp_path / str(i))
        resumed, _ = fitted(kind, tmp_path / str(i), tmp_path / str(i) / files[0])
        runs.append((whole, resumed, files))
        assert len(files) == 2
    for mine, theirs in zip(runs[1][:2], runs[0][:2], strict=True):
        pl.assert_agree(mine, theirs)
    assert runs[0][2] == runs[1][2]


def test_a_recipes_own_hyperparameters_are_scheduled(pl):
    """LambdaLR turns `lr`; OneCycleLR finds `betas` among the defaults of the recipe."""

    def recipe(lr, betas=(0.9, 0.999)):
        return fo.chain(fo.clip_by_global_norm(1e3), fo.adamw(lr, betas=betas))

    def configure(kind):
        def made(module):
            opt = kind(module.parameters())
            scheduler = lrs.OneCycleLR(opt, 0.2, total_steps=6)
            return [opt], [{"scheduler": scheduler, "interval": "step"}]

        return made

    theirs = pl.run(configure(lambda params: torch.optim.AdamW(params, lr=0.1)))
    ours = pl.run(
        configure(lambda params: adapters.Optimizer(params, recipe, compile=False, lr=0.1))
    )
    assert_close(ours[0], theirs[0], 1e-10)
    assert ours[1][0]["betas"] == theirs[1][0]["betas"] != (0.9, 0.999)


# ---------------------------------------------------------------- the monitor


def monitored(pl, configure, kind, folder, logger="CSVLogger", **kwargs):
    from lightning.pytorch import loggers
    from lightning.pytorch.callbacks import LearningRateMonitor

    log = getattr(loggers, logger)(folder)
    watch = LearningRateMonitor(log_momentum=True, log_weight_decay=True, **kwargs)
    module = kind(configure)
    trainer = pl.fit(module, logger=log, callbacks=[watch], log_every_n_steps=1)
    return trainer, watch


@kinds
def test_the_monitor_writes_what_it_writes_for_torchs(pl, name, tmp_path):
    def configure(kind):
        def made(module):
            one, two = module.layers[0].parameters(), module.layers[2].parameters()
            groups = [{"params": one, "name": "first"}, {"params": two, "lr": 0.01}]
            opt = kind(groups)
            scheduler = lrs.OneCycleLR(opt, [0.2, 0.1], total_steps=6)
            return [opt], [{"scheduler": scheduler, "interval": "step"}]

        return made

    tables = []
    for i, kind in enumerate(pair(name)):
        trainer, _ = monitored(pl, configure(kind), pl.Net, tmp_path / str(i))
        trainer.logger.save()
        with Path(trainer.logger.experiment.metrics_file_path).open() as file:
            tables.append(list(csv.DictReader(file)))
    assert tables[0] == tables[1]
    assert len(tables[1]) == pl.BATCHES
    columns = set(tables[1][0])
    assert {
        f"lr-{name}/first",
        f"lr-{name}/pg2-momentum",
        f"lr-{name}/first-weight_decay",
    } < columns
    assert len({row[f"lr-{name}/pg2-momentum"] for row in tables[1]}) > 3


def test_the_monitor_calls_a_recipe_by_the_class_or_by_the_schedulers_name(pl, tmp_path):
    def recipe(lr, betas=(0.9, 0.999), weight_decay=0.1):
        return fo.adamw(lr, betas=betas, weight_decay=weight_decay)

    def configure(module):
        opt = adapters.Optimizer(module.parameters(), recipe, lr=0.1, compile=False)
        return [opt], [{"scheduler": lrs.StepLR(opt, 1), "interval": "step", "name": "clipped"}]

    def plain(module):
        return adapters.Optimizer(module.parameters(), recipe, lr=0.1, compile=False)

    _, watch = monitored(pl, configure, pl.Net, tmp_path)
    assert len(watch.lrs["clipped"]) == pl.BATCHES
    assert watch.last_momentum_values == {"clipped-momentum": 0.9}
    assert watch.last_weight_decay_values == {"clipped-weight_decay": 0.1}
    _, watch = monitored(pl, plain, pl.Net, tmp_path)
    assert set(watch.lrs) == {"lr-Optimizer"}


def test_the_monitor_needs_the_names_among_the_recipes_hyperparameters(pl, tmp_path):
    """As with torch's Rprop, which has no weight decay."""

    def configure(module):
        return adapters.Optimizer(module.parameters(), fo.rprop, lr=0.1, compile=False)

    def theirs(module):
        return torch.optim.Rprop(module.parameters(), lr=0.1)

    for made in (configure, theirs):
        with (
            pytest.warns(RuntimeWarning, match="some optimizers do not have momentum"),
            pytest.raises(KeyError, match="weight_decay"),
        ):
            monitored(pl, made, pl.Net, tmp_path)


def test_tensorboard_has_the_same_names(pl, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (_, ours) = pair("AdamW")
    trainer, _ = monitored(
        pl,
        lambda m: ours(m.parameters()),
        pl.Net,
        tmp_path,
        logger="TensorBoardLogger",
        logging_interval="step",
    )
    trainer.logger.experiment.flush()
    events = EventAccumulator(trainer.logger.log_dir)
    events.Reload()
    names = {"lr-AdamW", "lr-AdamW-momentum", "lr-AdamW-weight_decay"}
    assert names <= set(events.Tags()["scalars"])
    assert [round(e.value, 6) for e in events.Scalars("lr-AdamW")] == [0.05] * pl.BATCHES


# ---------------------------------------------------------------- clipping and accumulation

CLIPPING = [
    {"gradient_clip_val": 0.05, "gradient_clip_algorithm": how} for how in ("norm", "value")
]


@pytest.mark.parametrize("args", CLIPPING, ids=["norm", "value"])
@pytest.mark.parametrize("every", [1, 2, 4])
@kinds
def test_the_trainer_clips_and_accumulates_as_with_torchs(pl, name, every, args):
    runs = [
        pl.run(lambda m, k=kind: k(m.parameters()), accumulate_grad_batches=every, **args)
        for kind in pair(name)
    ]
    pl.assert_agree(runs[1], runs[0])
    free = pl.run(lambda m: pair(name)[1](m.parameters()), accumulate_grad_batches=every)
    assert not torch.equal(free[0][0][0], runs[1][0][0][0])


def test_a_schedule_of_accumulation(pl):
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    steps = []
    runs = []
    for kind in pair("AdamW"):
        growing = GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})
        module = pl.Net(lambda m, k=kind: k(m.parameters()))
        trainer = pl.fit(module, max_epochs=3, callbacks=[growing])
        steps.append(trainer.global_step)
        runs.append(pl.found(module, trainer))
    assert steps == [6 + 3 + 2] * 2
    pl.assert_agree(runs[1], runs[0])


def test_the_norm_that_is_logged_before_the_step_is_torchs(pl):
    from lightning.pytorch.utilities import grad_norm

    norms = []

    class Tracking(pl.Net):
        def on_before_optimizer_step(self, optimizer):
            norms.append(grad_norm(self.layers, norm_type=2))

    for kind in pair("SGD"):
        pl.run(lambda m, k=kind: k(m.parameters()), Tracking)
    half = len(norms) // 2
    assert half == pl.BATCHES
    assert_close(norms[half:], norms[:half], 1e-10)
