"""Accelerate: prepared, accumulated, clipped, saved, resumed, all as with torch's optimizers."""

from __future__ import annotations

import accelerate
import pytest
import torch
from helpers import assert_close, assert_same
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

import functional_optim as fo
from functional_optim import adapters


@pytest.fixture
def accelerator():
    """Makes an Accelerator; each call forgets the one before, as a new process would."""

    def make(**options):
        forget()
        return accelerate.Accelerator(cpu=True, **options)

    return make


def forget():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def clip_norm(accelerator, model):
    assert accelerator.clip_grad_norm_(model.parameters(), 0.01) > 0.01


def clip_value(accelerator, model):
    accelerator.clip_grad_value_(model.parameters(), 1e-3)


def prepared(accelerator, kind, case, dtype=torch.float64, scheduler=True, **more):
    """A model, the optimizer and its scheduler as the Accelerator hands them back."""
    model = make_model(case, dtype)
    opt = kind(case, model.parameters(), **more)
    return accelerator.prepare(model, opt, lrs.StepLR(opt, 1, 0.7))


def train(accelerator, objects, data, clip=None):
    """The loop of Accelerate's manual; the learning rates and losses."""
    model, opt, scheduler = objects
    history = []
    for x in data:
        with accelerator.accumulate(model):
            loss = loss_of(model, x)
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                clip(accelerator, model)
            opt.step()
            scheduler.step()
            opt.zero_grad()
        history.append((loss.item(), scheduler.get_last_lr()))
    return history


@every_kind
@every_row
def test_a_prepared_loop_goes_where_torchs_goes(case, kind, accelerator):
    ends = []
    for make in (stock, kind):
        here = accelerator(gradient_accumulation_steps=2)
        objects = prepared(here, make, case)
        history = train(here, objects, batches(6), clip_norm)
        ends.append((values(objects[0]), history))
        assert len({rate for _, (rate,) in history}) == 4
    assert_close(ends[1], ends[0], max(EXACT, case.rounding))


@KEPT
def test_gradients_are_clipped_by_value(case, accelerator):
    ends = []
    for make in (stock, drop_in):
        here = accelerator()
        objects = prepared(here, make, case)
        train(here, objects, batches(4), clip_value)
        ends.append(values(objects[0]))
    assert_close(ends[1], ends[0], max(EXACT, case.rounding))


@every_kind
@every_row
def test_a_saved_run_goes_on_bitwise_in_fresh_objects(case, kind, accelerator, tmp_path):
    data = batches(8)
    here = accelerator(gradient_accumulation_steps=2)
    objects = prepared(here, kind, case)
    train(here, objects, data[:4])
    here.save_state(str(tmp_path))
    wanted = train(here, objects, data[4:]), values(objects[0])
    there = accelerator(gradient_accumulation_steps=2)
    others = prepared(there, kind, case)
    there.load_state(str(tmp_path))
    assert_same((train(there, others, data[4:]), values(others[0])), wanted)
    assert_same(others[1].state_dict(), objects[1].state_dict())


def test_two_models_and_a_registered_scheduler_are_saved_and_freed(accelerator, tmp_path):
    cases_of = row("adamw"), row("sgd-momentum")
    data = batches(8)

    def made():
        here = accelerator()
        models = [make_model(case) for case in cases_of]
        kinds = zip((drop_in, general), cases_of, models, strict=True)
        opts = [kind(case, model.named_parameters()) for kind, case, model in kinds]
        schedulers = [lrs.CosineAnnealingLR(opt, 8) for opt in opts]
        here.register_for_checkpointing(schedulers[1])
        *ready, schedulers[0] = here.prepare(*models, *opts, schedulers[0])
        return here, list(zip(ready[:2], ready[2:], schedulers, strict=True))

    def go(here, both, some):
        for x in some:
            for objects in both:
                train(here, objects, [x], clip_norm)
        return [(values(m), opt.state_dict()["state"], s.get_last_lr()) for m, opt, s in both]

    here, both = made()
    go(here, both, data[:4])
    here.save_state(str(tmp_path))
    wanted = go(here, both, data[4:])
    there, others = made()
    there.load_state(str(tmp_path))
    assert_same(go(there, others, data[4:]), wanted)
    assert there.free_memory(*others[0]) == [None] * 3


@rows("adamw", "sgd-momentum", "nadam")
def test_what_accelerate_saved_of_torchs_optimizer_is_loaded(case, accelerator, tmp_path):
    data = batches(8)
    here = accelerator()
    objects = prepared(here, stock, case)
    train(here, objects, data[:4])
    here.save_state(str(tmp_path))
    train(here, objects, data[4:])
    for kind in (drop_in, general):
        there = accelerator()
        others = prepared(there, kind, case)
        there.load_state(str(tmp_path))
        train(there, others, data[4:])
        # loading casts the numbers that NAdam carries to the parameters' dtype, in torch
        assert_close(values(others[0]), values(objects[0]), 1e-7 if case.name == "nadam" else EXACT)


# by hand, it is also stepped after the first micro-batch
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step..:UserWarning")
@pytest.mark.parametrize("step_with_optimizer", [True, False])
def test_a_scheduler_is_stepped_with_the_optimizer_or_by_hand(step_with_optimizer, accelerator):
    case = row("sgd")
    histories = []
    for make in (stock, drop_in):
        here = accelerator(
            gradient_accumulation_steps=2, step_scheduler_with_optimizer=step_with_optimizer
        )
        histories.append(train(here, prepared(here, make, case), batches(6)))
    assert_close(histories[1], histories[0], EXACT)
    seen = {rate for _, (rate,) in histories[1]}
    assert len(seen) == (4 if step_with_optimizer else 6)


@rows("sgd", "adamw", "adafactor", "muon")
def test_bfloat16_autocast_trains_float32_parameters(case, accelerator):
    ends = []
    for make in (stock, drop_in, general):
        here = accelerator(mixed_precision="bf16")
        objects = prepared(here, make, case, torch.float32)
        history = train(here, objects, batches(6, torch.float32))
        assert {p.dtype for p in objects[0].parameters()} == {torch.float32}
        assert {x.dtype for s in objects[1].state.values() for x in s.values()} <= {torch.float32}
        ends.append((values(objects[0]), history))
    assert_close(ends[1], ends[0], max(1e-5, case.rounding))
    assert_same(ends[2], ends[1])


@every_kind
def test_a_step_that_the_scaler_leaves_out_is_said_to_be_skipped(kind, accelerator):
    """On a CPU Accelerate's "fp16" casts nothing and makes no scaler, so this one is given."""
    case = row("adamw")
    ends = []
    for make in (stock, kind):
        here = accelerator()
        here.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        model, opt, scheduler = prepared(here, make, case)
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


def test_fp16_on_a_cpu_is_float32(accelerator):
    here = accelerator(mixed_precision="fp16")
    assert here.scaler is None
    model, *_ = prepared(here, drop_in, row("sgd"), torch.float32)
    assert model(batches(1, torch.float32)[0]).dtype is torch.float32


def test_accumulation_in_the_recipe_is_that_of_accelerate(accelerator):
    case = row("adamw")
    here = accelerator(gradient_accumulation_steps=2)
    theirs = prepared(here, drop_in, case)
    for x in batches(6):
        with here.accumulate(theirs[0]):
            here.backward(loss_of(theirs[0], x))
            theirs[1].step()
            theirs[1].zero_grad()
    there = accelerator()
    model = make_model(case)

    def recipe(**hyper):
        return fo.accumulate(fo.adamw(**hyper), every=2)

    opt = adapters.Optimizer(model.parameters(), recipe, compile=False, **case.hyper)
    model, opt = there.prepare(model, opt)
    for x in batches(6):
        there.backward(loss_of(model, x))
        opt.step()
        opt.zero_grad()
    assert_close(values(model), values(theirs[0]), EXACT)


def test_a_kernel_steps_a_prepared_optimizer(accelerator):
    case = row("adamw")
    ends = []
    for make in (stock, strict):
        here = accelerator()
        objects = prepared(here, make, case, torch.float32)
        train(here, objects, batches(4, torch.float32), clip_norm)
        ends.append(values(objects[0]))
    assert_close(ends[1], ends[0], 1e-5)


def strict(case, params):
    return case.drop_in(params, compile="strict", **case.hyper)
