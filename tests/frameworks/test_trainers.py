"""Accelerate, ignite, Lightning and transformers: the same run as with torch's optimizer.

Each of them has a function that trains a row's optimizer, saves in the middle, and may go on from
there.
"""

import gc
import os
import tempfile
from inspect import signature
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported

import accelerate
import pytest
import torch
import transformers
from helpers import assert_close, assert_same
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import (
    Checkpoint,
    DiskSaver,
    FastaiLRFinder,
    LinearCyclicalScheduler,
    LRScheduler,
    ParamGroupScheduler,
    PiecewiseLinear,
)
from loops import (
    EXACT,
    KEPT,
    batches,
    drop_in,
    every_kind,
    every_row,
    general,
    loss_of,
    make_model,
    row,
    rows,
    stock,
    values,
)
from torch.optim import lr_scheduler as lrs

from functional_optim import adapters


class Seen(NamedTuple):
    """Parameters in the end, losses and learning rates of all steps, and what is saved."""

    params: list[torch.Tensor]
    history: list[Any]
    state: dict[str, Any]


# ---------------------------------------------------------------- Accelerate
def accelerator(**options):
    """An Accelerator that forgets the one before, as a new process would."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, **options)


def prepared(here, kind, case, dtype=torch.float64):
    model = make_model(case, dtype)
    opt = kind(case, model.parameters())
    return here.prepare(model, opt, lrs.StepLR(opt, 1, 0.7))


def accelerated(kind, case, folder=None, resume=None, clip="norm"):
    here = accelerator(gradient_accumulation_steps=2)
    model, opt, scheduler = prepared(here, kind, case)
    if resume:
        here.load_state(str(resume))
    history = []
    for i, x in enumerate(batches(8)[4 if resume else 0 :]):
        if i == 4 and folder:
            here.save_state(str(folder))
        with here.accumulate(model):
            loss = loss_of(model, x)
            here.backward(loss)
            if here.sync_gradients and clip == "norm":
                assert here.clip_grad_norm_(model.parameters(), 0.01) > 0.01
            elif here.sync_gradients:
                here.clip_grad_value_(model.parameters(), 1e-3)
            opt.step()
            scheduler.step()
            opt.zero_grad()
        history.append((loss.item(), scheduler.get_last_lr()))
    assert resume or len({rate for _, (rate,) in history}) == 5
    return Seen(values(model), history, opt.state_dict())


# ---------------------------------------------------------------- ignite
class Engine:
    """A supervised trainer over a row's optimizer, its losses and learning rates."""

    def __init__(self, kind, case, **options):
        self.model = make_model(case)
        self.opt = kind(case, self.model.parameters())
        self.data = [(x, x.sum(1, keepdim=True).expand(-1, 3)) for x in batches(6)]
        self.trainer = create_supervised_trainer(
            self.model, self.opt, torch.nn.functional.mse_loss, **options
        )
        self.history = []
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, self._watch)

    def _watch(self, engine):
        rates = [group["lr"] for group in self.opt.param_groups]
        self.history.append((engine.state.output, rates))

    def seen(self, epochs=1):
        self.trainer.run(self.data, max_epochs=epochs)
        return Seen(values(self.model), self.history, self.opt.state_dict())


def supervised(kind, case, folder=None, resume=None):
    run = Engine(kind, case, gradient_accumulation_steps=2)
    scheduler = LRScheduler(lrs.StepLR(run.opt, 1, 0.7))
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED, scheduler)
    kept = {"model": run.model, "optimizer": run.opt, "scheduler": scheduler}
    kept |= {"trainer": run.trainer}
    if folder:
        saver = Checkpoint(kept, DiskSaver(str(folder), require_empty=False), n_saved=1)
        run.trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), saver)
    if resume:
        (path,) = resume.glob("*.pt")
        Checkpoint.load_objects(to_load=kept, checkpoint=torch.load(path, weights_only=True))
    return run.seen(2)


# ---------------------------------------------------------------- Lightning
def scheduled(kind, case, module):
    opt = kind(case, module.parameters())
    scheduler = lrs.OneCycleLR(opt, 0.1, total_steps=12, cycle_momentum=False)
    return [opt], [{"scheduler": scheduler, "interval": "step"}]


def lightened(kind, case, folder=None, resume=None):
    """It saves in the middle of the second of three epochs."""
    import lightning_runs as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    module = pl.Net(lambda module: scheduled(kind, case, module), bias=case.dim is None)
    args = {"gradient_clip_val": 0.05, "ckpt_path": resume and resume / "step=6.ckpt"}
    if folder:
        saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=6)
        args |= {"callbacks": [saver], "enable_checkpointing": True}
    trainer = pl.fit(module, pl.Resumable(4), 3, **args)
    (params, losses, (state,)), groups = pl.found(module, trainer)
    return Seen(params, losses, {"state": state, "param_groups": groups})


# ---------------------------------------------------------------- transformers
def make_llama(dtype=torch.float64):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=16)
    return transformers.LlamaForCausalLM(config).to(dtype)


def make_data():
    ids = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.fixture(scope="module", autouse=True)
def thawed():
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def quick_collections(thawed):
    """Each run of a Trainer collects garbage: what is here now need not be looked at."""
    gc.freeze()


def make_trainer(folder, model=None, **options):
    """A Trainer; the options of its own go to it, all others to its arguments."""
    names = ("optimizers", "optimizer_cls_and_kwargs", "eval_dataset")
    own = {name: options.pop(name) for name in names if name in options}
    usual = {"max_steps": 4, "save_strategy": "no", "weight_decay": 0.1, "max_grad_norm": 0.5}
    usual |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "log_level": "error"}
    options = {**usual, **quiet, "output_dir": str(folder or tempfile.gettempdir()), **options}
    args = transformers.TrainingArguments(logging_steps=1, **options)
    model = make_llama() if model is None else model
    return transformers.Trainer(model, args, train_dataset=make_data(), **own)


def made_by(kind, case):
    """The class and its arguments, as the Trainer wants them to make the optimizer itself."""
    if kind is stock:
        return case.stock, dict(case.hyper)
    if kind is drop_in:
        return case.drop_in, {**case.hyper, "compile": False}
    recipe = case.recipe
    if "weight_decay" not in signature(recipe).parameters:  # which it writes into every group
        recipe = lambda weight_decay=0.0, **hyper: case.recipe(**hyper)  # noqa: E731
    return adapters.Optimizer, {"recipe": recipe, "compile": False, **case.hyper}


def seen_by(trainer, resume=None):
    trainer.train(resume_from_checkpoint=resume)
    names = ("loss", "grad_norm", "learning_rate", "step")
    log = [[entry[n] for n in names] for entry in trainer.state.log_history if "loss" in entry]
    return Seen(values(trainer.model), log, trainer.optimizer.state_dict())


def trained(kind, case, folder=None, resume=None, **options):
    if folder:
        options |= {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(folder, optimizer_cls_and_kwargs=made_by(kind, case), **options)
    seen = seen_by(trainer, str(resume / "checkpoint-2") if resume else None)
    groups = trainer.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    return seen if resume is None else seen._replace(history=seen.history[2:])


# ---------------------------------------------------------------- all of them
ALL = {
    "accelerate": accelerated,
    "accelerate, by value": lambda *args, **more: accelerated(*args, **more, clip="value"),
    "ignite": supervised,
    "lightning": lightened,
    "transformers": trained,
}
pytestmark = [
    pytest.mark.usefixtures("pl"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]
every_trainer = pytest.mark.parametrize("run", ALL.values(), ids=ALL)


def with_trainers(rows):
    """A parameter of rows, and one of the trainers: the Trainer's model has vectors."""
    pairs = [
        pytest.param(*one.values, run, id=f"{one.id}-{name}", marks=one.marks)
        for one in rows.args[1]
        for name, run in ALL.items()
        if run is not trained or one.values[0].dim is None
    ]
    return pytest.mark.parametrize(("case", "run"), pairs)


@with_trainers(every_row)
def test_a_trainer_goes_where_it_goes_with_torchs(case, run):
    theirs = run(stock, case)
    for kind in (drop_in, general):
        assert_close(run(kind, case)[:2], theirs[:2], max(EXACT, case.rounding))


@every_kind
@with_trainers(KEPT)
def test_a_run_that_is_resumed_goes_on_bitwise(case, kind, run, tmp_path):
    whole = run(kind, case, tmp_path)
    resumed = run(kind, case, resume=tmp_path)
    assert_same((resumed.params, resumed.state), (whole.params, whole.state))
    late = len(resumed.history)
    assert late == len(whole.history) // 2
    assert_same(resumed.history, whole.history[late:])


@every_trainer
@pytest.mark.parametrize("kinds", [(stock, drop_in), (stock, general), (drop_in, stock)])
@rows("nadam")
def test_a_checkpoint_of_torchs_optimizer_goes_on_with_ours_and_back(case, kinds, run, tmp_path):
    first, second = kinds
    whole = run(first, case, tmp_path)
    resumed = run(second, case, resume=tmp_path)
    # loading casts the numbers that NAdam carries to the parameters' dtype, in torch
    assert_close(resumed.params, whole.params, 1e-7)


# ---------------------------------------------------------------- Accelerate alone
@rows("sgd", "adamw", "adafactor", "muon")
def test_bfloat16_autocast_trains_float32_parameters(case):
    ends = []
    for make in (stock, drop_in, general):
        here = accelerator(mixed_precision="bf16")
        model, opt, _ = prepared(here, make, case, torch.float32)
        for x in batches(6, torch.float32):
            here.backward(loss_of(model, x))
            opt.step()
            opt.zero_grad()
        kept = [*model.parameters(), *[x for s in opt.state.values() for x in s.values()]]
        assert {x.dtype for x in kept} == {torch.float32}
        ends.append(values(model))
    assert_close(ends[1], ends[0], max(1e-5, case.rounding))
    assert_same(ends[2], ends[1])


@every_kind
def test_a_step_that_the_scaler_leaves_out_is_said_to_be_skipped(kind):
    """On a CPU Accelerate's "fp16" casts nothing and makes no scaler, so this one is given."""
    ends = []
    for make in (stock, kind):
        here = accelerator()
        here.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        model, opt, scheduler = prepared(here, make, row("adamw"))
        skipped, rates = [], []
        for i, x in enumerate(batches(5)):
            here.backward(loss_of(model, x))
            if i in (0, 3):
                next(model.parameters()).grad.view(-1)[0] = torch.inf
            opt.step()
            scheduler.step()
            opt.zero_grad()
            skipped.append(here.optimizer_step_was_skipped)
            rates.append(scheduler.get_last_lr()[0])
        assert skipped == [True, False, False, True, False]
        assert len(set(rates)) == 4
        ends.append((values(model), rates))
    assert_close(ends[1], ends[0], EXACT)


# ---------------------------------------------------------------- ignite alone
@rows("sgd-momentum", "adamw")
def test_ignites_schedulers_write_what_the_next_step_reads(case):
    case = case._replace(hyper={**case.hyper, "weight_decay": 0.1})
    runs = []
    for make in (stock, drop_in, general):
        run = Engine(make, case)
        rate = LinearCyclicalScheduler(run.opt, "lr", 0.001, 0.1, cycle_size=4)
        decay = PiecewiseLinear(run.opt, "weight_decay", [(0, 0.0), (5, 0.5)])
        scheduler = ParamGroupScheduler([rate, decay])
        run.trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)
        runs.append(run.seen())
    assert_close([run[:2] for run in runs[1:]], [runs[0][:2]] * 2, EXACT)
    assert not torch.allclose(Engine(drop_in, case).seen().params[0], runs[1].params[0])


@every_kind
@rows("sgd", "adamw")
def test_ignites_rate_finder_finds_what_it_finds_with_torchs(case, kind):
    found, limits = [], {"start_lr": 1e-3, "end_lr": 100.0, "num_iter": 30}
    for make in (stock, kind):
        run = Engine(make, case)
        finder, kept = FastaiLRFinder(), {"model": run.model, "optimizer": run.opt}
        before = values(run.model)
        with finder.attach(run.trainer, **limits, to_save=kept) as trainer:
            trainer.run(run.data)
        assert_same(values(run.model), before)
        found.append(finder.get_results())
        assert len(found[-1]["lr"]) > 10
    assert_close(found[1], found[0], 1e-6)


# ---------------------------------------------------------------- transformers alone
@every_kind
def test_an_optimizer_and_a_scheduler_are_handed_to_the_trainer(kind, tmp_path):
    ends = []
    for make in (stock, kind):
        model = make_llama()
        opt = make(row("adamw"), model.parameters())
        both = (opt, lrs.CosineAnnealingLR(opt, 4))
        ends.append(seen_by(make_trainer(tmp_path, model, optimizers=both))[:2])
    assert_close(ends[1], ends[0], EXACT)


def test_the_trainers_schedule_that_reads_evaluations():
    """Its others are functions of the step, such as the linear one of the tests above."""
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "max_steps": 5}
    options |= {"lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0}}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    options |= {"eval_dataset": make_data()[:2]}
    theirs, ours = (trained(make, row("adamw"), **options) for make in (stock, drop_in))
    assert_close(ours[:2], theirs[:2], EXACT)
    assert len({rate for *_, rate, _ in ours.history}) > 1


@every_kind
@pytest.mark.parametrize("compile", [False, "strict"])
def test_bfloat16_and_frozen_parameters(kind, compile, tmp_path):
    """As adapters of models leave them."""
    ends = []
    for make in (stock, kind):
        model = make_llama(torch.float32)
        for name, p in model.named_parameters():
            p.requires_grad_("q_proj" in name or "norm" in name)
        cls, options = made_by(make, row("adamw"))
        options |= {} if make is stock else {"compile": compile}
        trainer = make_trainer(tmp_path, model, optimizer_cls_and_kwargs=(cls, options), bf16=True)
        ends.append(seen_by(trainer).params)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert len(trainer.optimizer.state) == sum(p.requires_grad for p in model.parameters())
    assert_close(ends[1], ends[0], 1e-4)


EVERY = [getattr(adapters, name) for name in adapters.__all__]
CLASSES = [x for x in EVERY if isinstance(x, type) and hasattr(x, "step")]


@pytest.mark.parametrize("cls", CLASSES)
def test_only_those_that_average_have_train_or_eval(cls):
    """The Trainer and Accelerate call them, for optimizers that average their parameters."""
    averages = issubclass(cls, adapters.AveragingOptimizer)
    assert hasattr(cls, "train") == hasattr(cls, "eval") == averages


def averaging(folder, **options):
    made = adapters.ScheduleFreeAdamW, {"lr": 0.02, "compile": False}
    data = {"eval_dataset": make_data()[:4], "eval_strategy": "steps", "eval_steps": 2}
    saves = {"save_strategy": "steps", "lr_scheduler_type": "constant", **options}
    return make_trainer(folder, optimizer_cls_and_kwargs=made, **data, **saves)


def test_the_trainer_evaluates_the_averages(tmp_path):
    trainer = averaging(tmp_path, save_steps=2)
    trainer.train()
    assert not trainer.optimizer.optimizer.training  # it ended with an evaluation
    seen = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(seen) == 2
    assert trainer.evaluate()["eval_loss"] == seen[-1]
    trainer.optimizer.train()
    trainer.optimizer.optimizer.eval = lambda: None
    assert trainer.evaluate()["eval_loss"] != seen[-1]


@pytest.mark.parametrize("at", [1, 2])
def test_a_run_that_averages_is_resumed_bitwise_from_either_mode(at, tmp_path):
    """At step 1 the Trainer saves in training mode, at step 2 after an evaluation."""
    whole = seen_by(averaging(tmp_path, save_steps=1))
    middle = tmp_path / f"checkpoint-{at}"
    saved = torch.load(middle / "optimizer.pt", weights_only=True)
    assert [group["train_mode"] for group in saved["param_groups"]] == [at == 1] * 2
    resumed = seen_by(averaging(tmp_path / "again", save_steps=1), str(middle))
    assert_same((resumed.params, resumed.state), (whole.params, whole.state))
