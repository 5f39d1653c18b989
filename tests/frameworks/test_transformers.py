"""transformers' Trainer over a tiny model: the same run as with torch's optimizer in its place."""

from __future__ import annotations

import gc
import os
from inspect import signature

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported

import cases
import pytest
import torch
import transformers
from helpers import assert_close, assert_same
from loops import EXACT, drop_in, every_kind, general, row, rows, stock, values
from torch.optim import lr_scheduler as lrs

import functional_optim as fo
from functional_optim import adapters

ROWS = [p for p in cases.with_torch() if p.values[0].dim is None]  # a model has vectors, too
every_row = pytest.mark.parametrize("case", ROWS)
STEPS = 4
KEPT = rows("sgd", "sgd-momentum", "adamw", "adafactor", "nadam")


def make_model(dtype=torch.float64):
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


class Watch(transformers.TrainerCallback):
    """What a callback sees of the optimizer after each step."""

    def __init__(self):
        self.rates = []

    def on_step_end(self, args, state, control, *, optimizer, lr_scheduler, **kwargs):
        mine = [group["lr"] for group in optimizer.param_groups]
        assert lr_scheduler.get_last_lr() == mine
        self.rates.append(mine[0])


def make_trainer(folder, dtype=torch.float64, model=None, **options):
    """A Trainer; the options of its own go to it, all others to its arguments."""
    own = {
        name: options.pop(name)
        for name in ("optimizers", "optimizer_cls_and_kwargs", "eval_dataset")
        if name in options
    }
    usual = {"max_steps": STEPS, "save_strategy": "no", "weight_decay": 0.1, "max_grad_norm": 0.5}
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        **{**usual, **options},
    )
    model = make_model(dtype) if model is None else model
    data = make_data()
    return transformers.Trainer(model, args, train_dataset=data, callbacks=[Watch()], **own)


def made_by(kind, case):
    """The class and its arguments, as the Trainer wants them to make the optimizer itself."""
    if kind is stock:
        return case.stock, dict(case.hyper)
    if kind is drop_in:
        return case.drop_in, {**case.hyper, "compile": False}
    recipe = case.recipe if "weight_decay" in signature(case.recipe).parameters else bare(case)
    return adapters.Optimizer, {"recipe": recipe, "compile": False, **case.hyper}


def bare(case):
    """The recipe with an argument for the decay that the Trainer writes into every group."""
    return lambda weight_decay=0.0, **hyper: case.recipe(**hyper)


def run(folder, kind, case, resume=None, **options):
    trainer = make_trainer(folder, optimizer_cls_and_kwargs=made_by(kind, case), **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def seen(trainer):
    """Parameters, what the log says of each step, and the learning rates a callback saw."""
    (watch,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, Watch))
    names = ("loss", "grad_norm", "learning_rate", "step")
    log = [[entry[n] for n in names] for entry in trainer.state.log_history if "loss" in entry]
    return values(trainer.model), log, watch.rates


# ---------------------------------------------------------------- the same run


@every_row
def test_the_trainer_goes_where_it_goes_with_torchs(case, tmp_path):
    theirs, *ours = (run(tmp_path, make, case, max_steps=3) for make in (stock, drop_in, general))
    sizes = [len(group["params"]) for group in theirs.optimizer.param_groups]
    for trainer in ours:
        groups = trainer.optimizer.param_groups
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        assert [len(group["params"]) for group in groups] == sizes
        assert len(seen(trainer)[1]) == len(seen(trainer)[2]) == 3
        assert_close(seen(trainer), seen(theirs), max(EXACT, case.rounding))


@every_kind
def test_an_optimizer_and_a_scheduler_are_handed_in(kind, tmp_path):
    case = row("adamw")
    ends = []
    for make in (stock, kind):
        model = make_model()
        opt = make(case, model.parameters())
        pair = (opt, lrs.CosineAnnealingLR(opt, STEPS))
        trainer = make_trainer(tmp_path, model=model, optimizers=pair)
        trainer.train()
        ends.append(seen(trainer))
        assert len(set(ends[-1][2])) == STEPS
    assert_close(ends[1], ends[0], EXACT)


def test_clipping_and_decay_in_a_recipe_are_the_trainers(tmp_path):
    """One recipe in the place of max_grad_norm and of the groups; the Trainer makes a schedule."""
    case = row("adamw")
    theirs = run(tmp_path, stock, case)
    decayed = theirs.get_decay_parameter_names(theirs.model)

    def recipe(lr, betas, eps, weight_decay):
        decay = fo.adamw(lr, betas, eps, weight_decay)
        parts = {"decay": decay, "not": fo.adam(lr, betas, eps)}
        labels = {**dict.fromkeys(decayed, "decay"), "*": "not"}
        return fo.chain(fo.clip_by_global_norm(0.5, eps=1e-6), fo.partition(parts, labels))

    model = make_model()
    opt = adapters.Optimizer(model.named_parameters(), recipe, compile=False, **case.hyper)
    trainer = make_trainer(tmp_path, model=model, optimizers=(opt, None), max_grad_norm=0.0)
    trainer.train()
    assert_close(values(model), values(theirs.model), EXACT)
    assert seen(trainer)[2] == seen(theirs)[2]


NEEDS = {
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "warmup_stable_decay": {"num_decay_steps": 1},
    "reduce_lr_on_plateau": {"patience": 0, "threshold": 10.0},
}
SCHEDULES = [
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant"),
    *("constant_with_warmup", "inverse_sqrt", *NEEDS),
]


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_by_name(name, tmp_path):
    case = row("adamw")
    options = {"lr_scheduler_type": name, "lr_scheduler_kwargs": NEEDS.get(name, {})}
    options |= {"warmup_steps": 2 if "warmup" in name else 0, "max_steps": 5}
    if name == "reduce_lr_on_plateau":
        options |= {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
        options |= {"eval_dataset": make_data()[:2]}
    theirs, ours = (run(tmp_path, make, case, **options) for make in (stock, drop_in))
    assert_close(seen(ours), seen(theirs), EXACT)
    assert len(set(seen(ours)[2])) > (name != "constant")


# ---------------------------------------------------------------- checkpoints


@every_kind
@KEPT
def test_a_run_that_is_resumed_goes_on_bitwise(case, kind, tmp_path):
    whole = run(tmp_path, kind, case, save_strategy="steps", save_steps=2)
    middle = tmp_path / "checkpoint-2"
    state = torch.load(middle / "optimizer.pt", weights_only=True)
    assert len(state["param_groups"]) == 2
    resumed = run(tmp_path / "again", kind, case, resume=str(middle))
    assert_same(values(resumed.model), values(whole.model))
    assert_same(seen(resumed)[2], seen(whole)[2][2:])
    assert_same(resumed.optimizer.state_dict(), whole.optimizer.state_dict())


@every_kind
@rows("sgd-momentum", "adamw", "adafactor")
def test_a_checkpoint_of_torchs_optimizer_is_resumed_with_ours(case, kind, tmp_path):
    whole = run(tmp_path, stock, case, save_strategy="steps", save_steps=2)
    middle = str(tmp_path / "checkpoint-2")
    resumed = run(tmp_path / "again", kind, case, resume=middle)
    assert_close(values(resumed.model), values(whole.model), EXACT)
    # and back: a checkpoint of ours, with torch's optimizer
    other = run(tmp_path / "ours", drop_in, case, save_strategy="steps", save_steps=2)
    middle = str(tmp_path / "ours" / "checkpoint-2")
    back = run(tmp_path / "back", stock, case, resume=middle)
    assert_close(values(back.model), values(other.model), EXACT)


# ---------------------------------------------------------------- the rest


@every_kind
@rows("adamw")
def test_bfloat16_on_a_cpu(case, kind, tmp_path):
    single = {"dtype": torch.float32, "bf16": True}
    theirs, ours = (run(tmp_path, make, case, **single) for make in (stock, kind))
    assert {p.dtype for p in ours.model.parameters()} == {torch.float32}
    assert_close(values(ours.model), values(theirs.model), 1e-4)


def test_gradient_checkpointing_changes_nothing(tmp_path):
    case = row("adamw")
    runs = [run(tmp_path, drop_in, case, activation_checkpointing=on) for on in (False, True)]
    assert [trainer.model.is_activation_checkpointing for trainer in runs] == [False, True]
    assert_close(*map(seen, runs), EXACT)


@every_kind
def test_parameters_that_are_frozen_have_no_state(kind, tmp_path):
    """As adapters of models leave them."""
    ends = []
    for make in (stock, kind):
        model = make_model().requires_grad_(False)
        start = values(model)
        for name, p in model.named_parameters():
            p.requires_grad_("q_proj" in name or "norm" in name)
        own = made_by(make, row("adamw"))
        trainer = make_trainer(tmp_path, model=model, optimizer_cls_and_kwargs=own)
        trainer.train()
        moved = [not torch.equal(a, b) for a, b in zip(start, values(model), strict=True)]
        assert moved == [p.requires_grad for p in model.parameters()]
        assert len(trainer.optimizer.state) == sum(moved)
        ends.append(seen(trainer))
    assert_close(ends[1], ends[0], EXACT)


EVERY = [getattr(adapters, name) for name in adapters.__all__]
CLASSES = [x for x in EVERY if isinstance(x, type) and hasattr(x, "step")]


@pytest.mark.parametrize("cls", CLASSES)
def test_only_those_that_average_have_train_or_eval(cls):
    """The Trainer and Accelerate call them, for optimizers that average their parameters."""
    averages = issubclass(cls, adapters.AveragingOptimizer)
    assert hasattr(cls, "train") == hasattr(cls, "eval") == averages


def averaging(folder, resume=None, **options):
    made = adapters.ScheduleFreeAdamW, {"lr": 0.02, "compile": False}
    data = {"eval_dataset": make_data()[:4], "eval_strategy": "steps", "eval_steps": 2}
    saves = {"save_strategy": "steps", "lr_scheduler_type": "constant", **options}
    trainer = make_trainer(folder, optimizer_cls_and_kwargs=made, **data, **saves)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_the_trainer_evaluates_the_averages(tmp_path):
    """In a callback it can be seen where the parameters are."""
    trainer = averaging(tmp_path, save_steps=2)
    modes = trainer.optimizer.optimizer.training
    seen = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert not modes  # it ended with an evaluation
    assert len(seen) == 2
    assert trainer.evaluate()["eval_loss"] == seen[-1]
    trainer.optimizer.train()
    trainer.optimizer.optimizer.eval = lambda: None
    assert trainer.evaluate()["eval_loss"] != seen[-1]


@pytest.mark.parametrize("at", [1, 2])
def test_a_run_that_averages_is_resumed_bitwise_from_either_mode(at, tmp_path):
    """At step 1 the Trainer saves in training mode, at step 2 after an evaluation."""
    whole = averaging(tmp_path, save_steps=1)
    middle = tmp_path / f"checkpoint-{at}"
    saved = torch.load(middle / "optimizer.pt", weights_only=True)
    assert [group["train_mode"] for group in saved["param_groups"]] == [at == 1] * 2
    resumed = averaging(tmp_path / "again", str(middle), save_steps=1)
    assert_same(values(resumed.model), values(whole.model))
    assert_same(resumed.optimizer.state_dict(), whole.optimizer.state_dict())


def test_a_kernel_steps_the_trainers_model(tmp_path):
    case = row("adamw")
    made = case.drop_in, {**case.hyper, "compile": "strict"}
    ours = make_trainer(tmp_path, torch.float32, optimizer_cls_and_kwargs=made)
    ours.train()
    theirs = run(tmp_path, stock, case, dtype=torch.float32)
    assert_close(values(ours.model), values(theirs.model), 1e-4)
