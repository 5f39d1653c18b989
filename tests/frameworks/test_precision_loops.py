"""Plain loops in low precision, over micro-batches, and with gradients clipped or recomputed."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, assert_same
from loops import (
    EXACT,
    KEPT,
    backward,
    batches,
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
from torch.utils.checkpoint import checkpoint_sequential

import functional_optim as fo
from functional_optim import adapters

BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def make(kind, case, dtype=torch.float64, **more):
    model = make_model(case, dtype)
    return model, kind(case, model.parameters(), **more)


def cast_run(kind, case, dtype, steps=12, **more):
    """A loop under autocast (dtype None: without); the parameters, and the losses."""
    model, opt = make(kind, case, torch.float32, **more)
    losses = []
    x = batches(1, torch.float32)[0]
    for _ in range(steps):
        opt.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            y = model(x)
            loss = (y.float() - x.sum(1, keepdim=True)).square().mean()
        assert y.dtype is (dtype or torch.float32)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {s.dtype for own in opt.state.values() for s in own.values()} <= {torch.float32}
    return values(model), losses


# ---------------------------------------------------------------- autocast


@BOTH
@every_kind
@rows("sgd-momentum", "adamw", "adafactor", "nadam", "muon")
def test_a_cast_loop_learns_as_a_float32_one_does(case, kind, dtype):
    ends, losses = cast_run(kind, case, dtype)
    assert_close(losses, cast_run(kind, case, None)[1], 2e-2)
    assert losses[-1] < 0.97 * losses[0]
    # two runs of torch's own would part as much: a gradient rounds to the other side
    assert_close((ends, losses), cast_run(stock, case, dtype), 1e-2)


@BOTH
@every_kind
def test_where_a_step_rounds_nothing_a_cast_loop_is_torchs_bit_for_bit(kind, dtype):
    """A power of two as learning rate: one rounding a step, here as there."""
    mine = cast_run(kind, row("sgd"), dtype, lr=2.0**-4)
    assert_same(mine, cast_run(stock, row("sgd"), dtype, lr=2.0**-4))


@rows("adamw")
def test_kernels_step_under_autocast(case):
    """The step is no part of what is cast, even where it stands inside."""
    ends = []
    for inside in (False, True):
        model = make_model(case, torch.float32)
        opt = case.drop_in(model.parameters(), compile="strict", **case.hyper)
        for x in batches(3, torch.float32):
            with torch.autocast("cpu", torch.bfloat16):
                loss = backward(model, opt, x)
                if inside:
                    opt.step()
            if not inside:
                opt.step()
            assert loss.dtype is torch.float32
        ends.append(values(model))
    assert_same(*ends)


# ---------------------------------------------------------------- scalers


@every_kind
@rows("sgd-momentum", "adamw", "nadam", "adafactor")
def test_one_scaler_for_two_optimizers_leaves_out_the_one_with_the_inf(case, kind):
    ends = []
    for of in (stock, kind):
        pairs = [make(of, case), make(of, row("sgd-nesterov"))]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        history = []
        for i, x in enumerate(batches(6)):
            for _, opt in pairs:
                opt.zero_grad()
            loss = sum(loss_of(model, x) for model, _ in pairs)
            scaler.scale(loss).backward()
            if i in (1, 4):
                next(pairs[i // 4][0].parameters()).grad.view(-1)[0] = torch.nan
            before = [values(model)[0] for model, _ in pairs]
            for _, opt in pairs:
                scaler.step(opt)
            scaler.update()
            now = [values(model)[0] for model, _ in pairs]
            moved = [not torch.equal(a, b) for a, b in zip(now, before, strict=True)]
            history.append((moved, scaler.get_scale()))
        assert [all(moved) for moved, _ in history] == [i not in (1, 4) for i in range(6)]
        assert all(any(moved) for moved, _ in history)
        ends.append(([values(model) for model, _ in pairs], history))
    assert_close(ends[1], ends[0], max(EXACT, case.rounding))


def test_a_scaler_and_apply_if_finite_leave_out_one_step_each():
    """What the scaler sees never reaches the gate; what comes behind it, the gate holds back."""
    case = row("adamw")

    def gated(**hyper):
        return fo.apply_if_finite(case.recipe(**hyper), max_consecutive_errors=3)

    theirs, ours = make_model(case), make_model(case)
    opts = [
        stock(case, theirs.parameters()),
        adapters.Optimizer(ours.parameters(), lambda lr: gated(**{**case.hyper, "lr": lr}), lr=0.1),
    ]
    opts[1].compile = False
    opts[0].param_groups[0]["lr"] = 0.1
    for model, opt in zip((theirs, ours), opts, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        for i, x in enumerate(batches(6)):
            opt.zero_grad()
            scaler.scale(loss_of(model, x) * (torch.inf if i == 2 else 1.0)).backward()
            scaler.unscale_(opt)
            if i == 4:  # found too late for the scaler
                for p in model.parameters():
                    p.grad = None if opt is opts[0] else p.grad * torch.nan
            scaler.step(opt)
            scaler.update()
            scheduler.step()
        assert scaler.get_scale() == 2.0**7
    assert_close(values(ours), values(theirs), EXACT)
    kept = opts[1].state[next(ours.parameters())]
    found = [kept[key].item() for key in ("step", "open_steps", "total_notfinite")]
    assert found == [5.0, 4.0, 1.0]


@every_kind
@rows("sgd", "adamw")
def test_float16_with_a_scaler_that_accumulates(case, kind):
    """Unscaled and clipped once a batch of two; a batch with an inf in it is left out whole."""
    ends = []
    for of in (stock, kind):
        model, opt = make(of, case, torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for i, x in enumerate(batches(8, torch.float32)):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, x) / 2
            scaler.scale(loss).backward()
            if i == 2:
                next(model.parameters()).grad.view(-1)[0] = torch.inf
            if i % 2:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                before = values(model)
                scaler.step(opt)
                scaler.update()
                assert torch.equal(before[0], values(model)[0]) == (i == 3)
                opt.zero_grad()
        assert scaler.get_scale() == 2.0**9
        ends.append(values(model))
    assert_close(ends[1], ends[0], 1e-3)


# ---------------------------------------------------------------- accumulation


def accumulating(case, params, every):
    def recipe(**hyper):
        return fo.accumulate(case.recipe(**hyper), every=every)

    return adapters.Optimizer(params, recipe, compile=False, **case.hyper)


@every_row
def test_micro_batches_are_one_large_batch(case):
    """In the recipe, by hand with torch's optimizer, and as one large batch."""
    data = batches(3)
    whole, opt = make(general, case)
    for x in data:
        backward(whole, opt, x)
        opt.step()
    mine = make_model(case)
    opt = accumulating(case, mine.parameters(), 3)
    for x in data:
        for part in x.split(2):
            backward(mine, opt, part)
            opt.step()
    theirs, opt = make(stock, case)
    for x in data:
        opt.zero_grad()
        for part in x.split(2):
            (loss_of(theirs, part) / 3).backward()
        opt.step()
    # Rprop looks at signs, where a sum in another order may be 1e-17 for 0
    assert_close(values(mine), values(whole), max(EXACT, case.rounding))
    assert_close(values(mine), values(theirs), max(EXACT, case.rounding))


@pytest.mark.parametrize("scaled", [False, True])
def test_accumulation_in_a_recipe_goes_with_clipping_before_and_behind(scaled):
    """Behind `accumulate` a batch is clipped; a power of two as scale rounds nothing."""
    case = row("adamw")

    def recipe(**hyper):
        clipped = fo.chain(fo.clip_by_global_norm(0.05, eps=1e-6), fo.adamw(**hyper))
        return fo.accumulate(clipped, every=2)

    mine = make_model(case)
    opt = adapters.Optimizer(mine.parameters(), recipe, compile=False, **case.hyper)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    theirs, other = make(stock, case)
    for i, x in enumerate(batches(6)):
        opt.zero_grad()
        scaler.scale(loss_of(mine, x)).backward()
        scaler.step(opt)
        scaler.update()
        (loss_of(theirs, x) / 2).backward()
        if i % 2:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
            other.step()
            other.zero_grad()
    assert_close(values(mine), values(theirs), EXACT)


# ---------------------------------------------------------------- gradients on their way


@pytest.mark.parametrize("max_norm", [0.01, 100.0])
@rows("sgd-momentum", "adamw", "nadam")
def test_clipping_in_a_recipe_is_torchs(case, max_norm):
    """Over all parameter groups, whether it clips or not."""

    def recipe(**hyper):
        return fo.chain(fo.clip_by_global_norm(max_norm, eps=1e-6), case.recipe(**hyper))

    theirs, mine = make_model(case), make_model(case)
    opts = [
        case.stock(groups(theirs), **case.hyper),
        adapters.Optimizer(groups(mine), recipe, compile=False, **case.hyper),
    ]
    for x in batches(5):
        for model, opt in zip((theirs, mine), opts, strict=True):
            backward(model, opt, x)
            if model is theirs:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            opt.step()
    assert_close(values(mine), values(theirs), EXACT)


def groups(model):
    first, *rest = model.parameters()
    return [{"params": [first]}, {"params": rest, "lr": 0.01}]


@every_kind
@KEPT
def test_recomputed_activations_and_gradients_that_are_filled_with_zeros(case, kind):
    """`set_to_none=False` leaves zeros, which are gradients: decay and momentum go on."""
    ends = []
    for of in (stock, kind):
        model, opt = make(of, case)
        for i, x in enumerate(batches(6)):
            opt.zero_grad(set_to_none=False)
            if i != 3:
                run = checkpoint_sequential(model, 2, x, use_reentrant=False)
                (run - x.sum(1, keepdim=True)).square().mean().backward()
            opt.step()
        assert all(p.grad is not None for p in model.parameters())
        ends.append(values(model))
    assert_close(ends[1], ends[0], max(EXACT, case.rounding))


@every_kind
@rows("adamw", "sgd-momentum")
def test_a_parametrized_model_called_with_its_own_parameters(case, kind):
    """`functional_call` over the originals of a parametrization, which the optimizer steps."""
    ends = []
    for of in (stock, kind):
        model = make_model(case)
        torch.nn.utils.parametrizations.weight_norm(model[0])
        opt = of(case, model.parameters())
        for x in batches(5):
            opt.zero_grad()
            named = dict(model.named_parameters())
            loss_of(
                lambda x, p=named, m=model: torch.func.functional_call(m, p, (x,)), x
            ).backward()
            opt.step()
        ends.append(values(model))
    assert_close(ends[1], ends[0], EXACT)


def test_the_functional_loop_over_functional_call_is_the_objects():
    case = row("adamw")
    model, opt = make(general, case)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    tx = case.tx()
    state = tx.init(params)
    for x in batches(5):
        backward(model, opt, x)
        opt.step()
        grads = torch.func.grad(
            lambda params, x=x: loss_of(lambda x: torch.func.functional_call(model, params, x), x)
        )(params)
        updates, state = tx.update(grads, state, params)
        params = fo.apply_updates(params, updates)
    assert_close(list(params.values()), values(model), EXACT)
