"""Loops around an optimizer that others have written: scalers, casts, hooks."""

import copy
import itertools

import pytest
import torch
from helpers import assert_close, assert_same
from loops import (
    EXACT,
    KEPT,
    backward,
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint_sequential

import functional_optim as fo
from functional_optim import adapters


def make(kind, case, dtype=torch.float64, **more):
    model = make_model(case, dtype)
    return model, kind(case, model.parameters(), **more)


def poison(model, value=torch.inf):
    next(model.parameters()).grad.view(-1)[0] = value


# ---------------------------------------------------------------- the same loops as with torch's
def scaled(kind, case):
    """With infinite gradients at the first step, before there is any state, and later."""
    model, opt = make(kind, case)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    history = []
    for i, x in enumerate(batches(8)):
        opt.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        if i in (0, 4):
            poison(model)
        before, state = values(model), copy.deepcopy(opt.state_dict()["state"])
        scaler.step(opt)
        assert torch.equal(values(model)[0], before[0]) == (i in (0, 4))
        if i in (0, 4):
            assert_same((values(model), opt.state_dict()["state"]), (before, state))
        scaler.update()
        history.append((values(model), scaler.get_scale()))
    assert [scale / 512 for _, scale in history] == [1, 1, 2, 2, 1, 1, 2, 2]
    return history


def unscaled_and_clipped(kind, case):
    """By a power of two, which rounds nothing."""
    ends = []
    for enabled in (True, False):
        model, opt = make(kind, case)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=enabled)
        for x in batches(4):
            opt.zero_grad()
            scaler.scale(loss_of(model, x)).backward()
            scaler.unscale_(opt)
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.01
            scaler.step(opt)
            scaler.update()
        ends.append(values(model))
    assert_same(*ends)
    return ends[0]


def two_of_one_scaler(kind, case):
    """In two steps one of the two has a NaN, and is left out."""
    pairs = [make(kind, case), make(kind, row("sgd-nesterov"))]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    history = []
    for i, x in enumerate(batches(6)):
        for _, opt in pairs:
            opt.zero_grad()
        scaler.scale(sum(loss_of(model, x) for model, _ in pairs)).backward()
        if i in (1, 4):
            poison(pairs[i // 4][0], torch.nan)
        before = [values(model)[0] for model, _ in pairs]
        for _, opt in pairs:
            scaler.step(opt)
        scaler.update()
        now = [values(model)[0] for model, _ in pairs]
        moved = [not torch.equal(a, b) for a, b in zip(now, before, strict=True)]
        history.append((moved, scaler.get_scale()))
    assert [moved for moved, _ in history if not all(moved)] == [[False, True], [True, False]]
    return [values(model) for model, _ in pairs], history


def recomputed(kind, case):
    """`set_to_none=False` leaves zeros, which are gradients: decay and momentum go on."""
    model, opt = make(kind, case)
    for i, x in enumerate(batches(6)):
        opt.zero_grad(set_to_none=False)
        if i != 3:
            y = checkpoint_sequential(model, 2, x, use_reentrant=False)
            (y - x.sum(1, keepdim=True)).square().mean().backward()
        opt.step()
    assert all(p.grad is not None for p in model.parameters())
    return values(model)


LOOPS = {
    "scaled": scaled,
    "unscaled and clipped": unscaled_and_clipped,
    "two of one scaler": two_of_one_scaler,
    "recomputed": recomputed,
}


@pytest.mark.parametrize("loop", LOOPS)
@every_row
def test_a_loop_ends_as_with_torchs(case, loop):
    theirs = LOOPS[loop](stock, case)
    for kind in (drop_in, general):
        assert_close(LOOPS[loop](kind, case), theirs, max(EXACT, case.rounding))


@pytest.mark.parametrize("swap", [False, True], ids=["data", "swap_tensors"])
@every_row
def test_a_model_converted_mid_run_is_stepped_in_its_new_dtype(case, swap):
    """Its parameters keep their identity; the state follows when it is loaded again."""
    results = []
    before = torch.__future__.get_swap_module_params_on_conversion()
    try:
        torch.__future__.set_swap_module_params_on_conversion(swap)
        for kind in (stock, drop_in):
            model, opt = make(kind, case)
            known = list(model.parameters())
            for x in batches(3):
                backward(model, opt, x)
                opt.step()
            opt.zero_grad()
            model.to(torch.float32)
            opt.load_state_dict(opt.state_dict())
            assert all(a is b for a, b in zip(model.parameters(), known, strict=True))
            assert all(a is b for a, b in zip(opt.param_groups[0]["params"], known, strict=True))
            for x in batches(4, torch.float32):
                backward(model, opt, x)
                opt.step()
            results.append(values(model))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert all(x.dtype is torch.float32 for x in results[1])
    assert_close(results[1], results[0], max(1e-4, case.rounding))


@pytest.mark.parametrize("compile", [False, True])
def test_a_rate_that_a_scheduler_rounds_below_zero_ends_no_training(compile):
    """torch checks numbers at construction only, and its LinearLR comes to -2e-19 in the end."""

    def trained(kind, **options):
        p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        opt = kind([p], lr=0.1, **options)
        scheduler = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 0.0, 10)
        for _ in range(12):
            p.grad = p.detach().clone()
            opt.step()
            scheduler.step()
        assert opt.param_groups[0]["lr"] < 0
        again = kind([p], lr=0.1, **options)
        again.load_state_dict(opt.state_dict())
        again.step()
        return p.detach()

    ours = trained(adapters.SGD, compile=compile)
    torch.testing.assert_close(ours, trained(torch.optim.SGD), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_a_scaler_steps_an_optimizer_that_is_called_fused(name):
    results = []
    for module, more in ((torch.optim, {}), (adapters, {"compile": False})):
        model = make_model(row("sgd"), torch.float32)
        opt = getattr(module, name)(model.parameters(), lr=0.05, fused=True, **more)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for i, x in enumerate(batches(5, torch.float32)):
            opt.zero_grad()
            scaler.scale(loss_of(model, x)).backward()
            if i == 2:
                next(model.parameters()).grad.fill_(torch.nan)
            scaler.step(opt)
            scaler.update()
        results.append((values(model), scaler.get_scale()))
    assert_close(results[1], results[0], 1e-5)


class Watched(TorchDispatchMode):
    """Sees operations, as torch's counters of them do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def watched(opt):
    with Watched():
        opt.step()


def compiled(opt):
    torch.compile(lambda: opt.step(), backend="eager")()


def differentiated(opt):
    opt.defaults["differentiable"] = True
    opt.step()


def no_longer_fused(opt):
    """A checkpoint of a run without `fused` has replaced the groups."""
    opt.param_groups[0]["fused"] = None
    opt.step()


def test_a_scale_is_not_used_again_after_a_step_that_raises():
    """The scaler deletes it after a step that returns, and multiplies one that it finds."""
    w, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    opt = adapters.SGD([w, other], lr=0.25, fused=True, compile=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(w.sum()).backward()
    other.grad = torch.zeros(2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        scaler.step(opt)
    other.grad = None
    scaler.step(opt)
    assert (w == 0.75).all()


def test_a_scale_is_not_used_again_after_a_step_that_is_interrupted(monkeypatch):
    """Whether the scaler repeats the step, or takes one with other gradients."""
    for name, again in itertools.product(("valid_plan", "unscale"), (True, False)):
        w = torch.nn.Parameter(torch.ones(2))
        opt = adapters.SGD([w], lr=0.25, fused=True, compile=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(w.sum()).backward()
        with monkeypatch.context() as patch:
            patch.setattr(adapters.base, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                scaler.step(opt)
        if not again:
            scaler.update()
            opt.zero_grad()
            scaler.scale(w.sum()).backward()
        scaler.step(opt)
        assert (w == 0.75).all()


def interrupted(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", [watched, compiled, differentiated, no_longer_fused])
def test_a_step_that_a_scaler_leaves_all_to_unscales_and_skips(step):
    w = torch.ones(2)
    opt = adapters.SGD([w], lr=0.25, fused=True)
    for factor, infinite in ((1.0, False), (torch.inf, True), (2.0, False)):
        w.grad = torch.full((2,), 64.0 * factor)
        opt.grad_scale, opt.found_inf = torch.tensor(64.0), torch.tensor(float(infinite))
        step(opt)
        del opt.grad_scale, opt.found_inf
    assert w.tolist() == [0.25, 0.25]


# ---------------------------------------------------------------- copies, and steps in between
@every_row
def test_one_optimizer_a_parameter_inside_backward_equals_one_for_all(case):
    model, opt = make(drop_in, case)
    other = make_model(case)
    owners = {p: drop_in(case, [p]) for p in other.parameters()}

    def step(p):
        owners[p].step()
        owners[p].zero_grad()

    for p in other.parameters():
        p.register_post_accumulate_grad_hook(step)
    for x in batches(5):
        backward(model, opt, x)
        opt.step()
        loss_of(other, x).backward()
        assert all(p.grad is None for p in other.parameters())
        assert_same(values(other), values(model))
    states = [owner.state.get(p) for p, owner in owners.items()]
    assert_same(states, [opt.state.get(p) for p in model.parameters()])


# ---------------------------------------------------------------- autocast
BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def cast_run(kind, case, dtype, **more):
    """A loop under autocast (dtype None: without); the parameters, and the losses."""
    model, opt = make(kind, case, torch.float32, **more)
    losses = []
    x = batches(1, torch.float32)[0]
    for _ in range(12):
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


@BOTH
@every_kind
@KEPT
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


@pytest.mark.parametrize("max_norm", [0.01, 100.0])
@rows("sgd-momentum", "adamw", "nadam")
def test_clipping_in_a_recipe_is_torchs(case, max_norm):
    """Over all parameter groups, whether it clips or not."""

    def recipe(**hyper):
        return fo.chain(fo.clip_by_global_norm(max_norm, eps=1e-6), case.recipe(**hyper))

    def groups(model):
        first, *rest = model.parameters()
        return [{"params": [first]}, {"params": rest, "lr": 0.01}]

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
