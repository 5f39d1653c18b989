"""ignite's engines and handlers over an optimizer: the same run as with torch's in its place."""

from __future__ import annotations

import pytest
import torch
from events import read_events
from helpers import assert_close, assert_same
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import (
    Checkpoint,
    ConcatScheduler,
    CosineAnnealingScheduler,
    DiskSaver,
    EMAHandler,
    FastaiLRFinder,
    LinearCyclicalScheduler,
    LRScheduler,
    ParamGroupScheduler,
    PiecewiseLinear,
    ReduceLROnPlateauScheduler,
    create_lr_scheduler_with_warmup,
)
from ignite.handlers.tensorboard_logger import OptimizerParamsHandler, TensorboardLogger
from loops import (
    EXACT,
    KEPT,
    batches,
    drop_in,
    every_kind,
    every_row,
    general,
    make_model,
    row,
    rows,
    stock,
    values,
)
from torch.optim import lr_scheduler as lrs

import functional_optim as fo
from functional_optim import adapters

BATCHES = 6


def data(dtype=torch.float64):
    return [(x, x.sum(1, keepdim=True).expand(-1, 3)) for x in batches(BATCHES, dtype)]


class Run:
    """A supervised trainer over a row's optimizer, its losses and learning rates."""

    def __init__(self, kind, case, dtype=torch.float64, **options):
        self.model = make_model(case, dtype)
        self.opt = kind(case, self.model.parameters())
        self.data = data(dtype)
        self.trainer = create_supervised_trainer(
            self.model, self.opt, torch.nn.functional.mse_loss, **options
        )
        self.losses, self.rates = [], []
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, self._watch)

    def _watch(self, engine):
        self.losses.append(engine.state.output)
        self.rates.append([group["lr"] for group in self.opt.param_groups])

    def go(self, max_epochs=1):
        self.trainer.run(self.data, max_epochs=max_epochs)
        return self

    def seen(self):
        return values(self.model), self.losses, self.rates


@every_kind
@every_row
def test_a_supervised_trainer_goes_where_it_goes_with_torchs(case, kind):
    theirs, ours = (Run(make, case, gradient_accumulation_steps=2).go() for make in (stock, kind))
    assert_close(ours.seen(), theirs.seen(), max(EXACT, case.rounding))


# ---------------------------------------------------------------- schedulers


def torchs(opt):
    return LRScheduler(lrs.StepLR(opt, 1, 0.5))


def cyclical(opt):
    return LinearCyclicalScheduler(opt, "lr", 0.001, 0.1, cycle_size=4)


def cosine(opt):
    return CosineAnnealingScheduler(opt, "lr", 0.1, 0.01, cycle_size=4)


def pieces(opt):
    return PiecewiseLinear(opt, "lr", [(0, 0.001), (3, 0.1), (5, 0.0)])


def after_a_warmup(opt):
    return create_lr_scheduler_with_warmup(
        lrs.ExponentialLR(opt, 0.5), warmup_start_value=0.0, warmup_end_value=0.1, warmup_duration=3
    )


def in_turn(opt):
    return ConcatScheduler([cyclical(opt), cosine(opt)], durations=[3])


def together(opt):
    return ParamGroupScheduler([cyclical(opt), decay(opt)])


def decay(opt):
    return PiecewiseLinear(opt, "weight_decay", [(0, 0.0), (5, 0.5)])


SCHEDULERS = [torchs, cyclical, cosine, pieces, after_a_warmup, in_turn, together, decay]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@rows("sgd-momentum", "adamw")
def test_schedulers_write_what_the_next_step_reads(case, scheduler):
    if scheduler in (together, decay):
        case = case._replace(hyper={**case.hyper, "weight_decay": 0.1})
    runs = [Run(make, case) for make in (stock, drop_in, general)]
    for run in runs:
        run.trainer.add_event_handler(Events.ITERATION_STARTED, scheduler(run.opt))
        run.go()
    for run in runs[1:]:
        assert_close(run.seen(), runs[0].seen(), EXACT)
    constant = Run(drop_in, case).go()
    assert not torch.allclose(values(constant.model)[0], values(runs[1].model)[0])


def test_a_plateau_turns_the_rate_down():
    ends = []
    for make in (stock, drop_in):
        run = Run(make, row("adamw"))
        plateau = ReduceLROnPlateauScheduler(
            run.opt, "loss", lambda engine: -1.0, factor=0.1, patience=1
        )
        run.trainer.state.metrics = {}
        run.trainer.add_event_handler(Events.ITERATION_COMPLETED, note_no_progress)
        run.trainer.add_event_handler(Events.ITERATION_COMPLETED, plateau)
        ends.append(run.go().seen())
        assert len({rate for (rate,) in run.rates}) > 2
    assert_close(ends[1], ends[0], EXACT)


def note_no_progress(engine):
    engine.state.metrics["loss"] = 1.0


def test_an_engine_with_two_optimizers_like_a_gan():
    def run(kind):
        nets = [make_model(row("adamw")) for _ in range(2)]
        pairs = zip(nets, ("adamw", "sgd-momentum"), strict=True)
        first, second = [kind(row(name), net.parameters()) for net, name in pairs]
        maker, judge = nets

        def step(engine, x):
            second.zero_grad()
            loss = (judge(x) - 1).square().mean() + judge(x[:, :3] @ mix + maker(x).detach() @ mix)
            loss.mean().backward()
            second.step()
            first.zero_grad()
            judge(maker(x) @ mix).square().mean().backward()
            first.step()

        mix = torch.ones(3, 4, dtype=torch.float64)
        engine = Engine(step)
        cosine = CosineAnnealingScheduler(first, "lr", 0.1, 0.01, BATCHES)
        engine.add_event_handler(Events.ITERATION_STARTED, cosine)
        falling = LRScheduler(lrs.ExponentialLR(second, 0.9))
        engine.add_event_handler(Events.ITERATION_COMPLETED, falling)
        engine.run(batches(BATCHES))
        rates = [opt.param_groups[0]["lr"] for opt in (first, second)]
        return [values(net) for net in nets], rates

    theirs, *ours = (run(kind) for kind in (stock, drop_in, general))
    for mine in ours:
        assert_close(mine, theirs, EXACT)


# ---------------------------------------------------------------- checkpoints and averages


@every_kind
@KEPT
def test_a_run_that_is_resumed_goes_on_bitwise(case, kind, tmp_path):
    def make():
        run = Run(kind, case)
        scheduler = LRScheduler(lrs.StepLR(run.opt, 1, 0.7))
        run.trainer.add_event_handler(Events.ITERATION_COMPLETED, scheduler)
        kept = {"model": run.model, "optimizer": run.opt, "scheduler": scheduler}
        return run, {**kept, "trainer": run.trainer}

    run, kept = make()
    saver = Checkpoint(kept, DiskSaver(str(tmp_path), require_empty=False), n_saved=1)
    run.trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), saver)
    run.go(max_epochs=2)
    again, others = make()
    checkpoint = torch.load(tmp_path / saver.last_checkpoint, weights_only=True)
    Checkpoint.load_objects(to_load=others, checkpoint=checkpoint)
    again.go(max_epochs=2)
    assert len(again.losses) == BATCHES
    assert_same(values(again.model), values(run.model))
    assert_same(again.opt.state_dict(), run.opt.state_dict())
    assert_same(again.rates, run.rates[BATCHES:])


@rows("adamw", "sgd-momentum")
def test_its_average_is_that_of_a_recipe(case):
    run = Run(drop_in, case)
    average = EMAHandler(run.model, momentum=0.1)
    average.attach(run.trainer, name="ema_momentum", event=Events.ITERATION_COMPLETED)
    run.go()

    def recipe(**hyper):
        return fo.chain(case.recipe(**hyper), fo.params_ema(0.9))

    model = make_model(case)
    opt = adapters.Optimizer(model.parameters(), recipe, compile=False, **case.hyper)
    create_supervised_trainer(model, opt, torch.nn.functional.mse_loss).run(run.data)
    mine = [opt.state[p]["params_ema"] for p in model.parameters()]
    assert_close(mine, values(average.ema_model), EXACT)


@every_kind
@rows("sgd", "adamw")
def test_the_rate_finder_finds_what_it_finds_with_torchs(case, kind):
    found, limits = [], {"start_lr": 1e-3, "end_lr": 100.0, "num_iter": 30}
    for make in (stock, kind):
        run = Run(make, case)
        finder, kept = FastaiLRFinder(), {"model": run.model, "optimizer": run.opt}
        before = values(run.model)
        with finder.attach(run.trainer, **limits, to_save=kept) as trainer:
            trainer.run(run.data)
        assert_same(values(run.model), before)
        found.append(finder.get_results())
        assert len(found[-1]["lr"]) > 10
    assert_close(found[1], found[0], 1e-6)


# ---------------------------------------------------------------- precision and logging


# ignite's scaler and its autocast are for "cuda"; it takes another scaler, but no other autocast
@pytest.mark.filterwarnings("ignore:CUDA is not available or torch_xla is imported:UserWarning")
@rows("sgd", "adamw")
def test_the_trainer_with_automatic_mixed_precision(case):
    ends = []
    for make in (stock, drop_in, general):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        run = Run(make, case, torch.float32, device="cpu", amp_mode="amp", scaler=scaler)
        ends.append(run.go().seen())
    assert_close(ends[1], ends[0], 1e-4)
    assert_close(ends[2], ends[1], 1e-6)


def test_learning_rate_and_a_measured_norm_are_logged(tmp_path):
    def recipe(lr):
        return fo.chain(fo.monitor({"grad_norm": fo.measures.global_norm}), fo.sgd(lr))

    def monitored(case, params):
        return adapters.Optimizer(params, recipe, lr=0.1, compile=False)

    run = Run(monitored, row("sgd"))
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED, cyclical(run.opt))
    norms = []

    def global_step(engine, event):
        return engine.state.iteration

    with TensorboardLogger(log_dir=str(tmp_path)) as logger:
        every_second = Events.ITERATION_COMPLETED(every=2)
        logger.attach(run.trainer, OptimizerParamsHandler(run.opt), event_name=every_second)

        @run.trainer.on(every_second)
        def log_norm(engine):
            norms.append(float(run.opt.state[run.model[0].weight]["grad_norm"]))
            logger.writer.add_scalar("grad_norm", norms[-1], engine.state.iteration)

        run.go()
    rates = [rate for (rate,) in run.rates]
    events = read_events(tmp_path)
    assert [step for step, _ in events["lr/group_0"]] == [2, 4, 6]
    assert_close([value for _, value in events["grad_norm"]], norms, 1e-6)
    assert len(set(norms)) == 3
    assert len(set(rates)) > 2
