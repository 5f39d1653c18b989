"""Loops around an optimizer that others have written: scalers, schedulers, averages, hooks."""

from __future__ import annotations

import copy
import pickle

import cases
import pytest
import torch
from helpers import assert_close, assert_same
from loops import EXACT, backward, batches, every_row, loss_of, make_model, values
from torch.optim import lr_scheduler, swa_utils

import functional_optim as fo
from functional_optim import adapters


def pair(case, **more):
    """Models with torch's class and with ours."""
    a, b = make_model(case), make_model(case)
    theirs = case.stock(a.parameters(), **case.hyper, **more)
    return (a, theirs), (b, case.drop_in(b.parameters(), compile=False, **case.hyper, **more))


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@every_row
def test_a_copy_of_model_and_optimizer_goes_on_bitwise(case, copied):
    _, (model, opt) = pair(case)
    data = batches(6)
    for x in data[:3]:
        backward(model, opt, x)
        opt.step()
    other, twin = copied((model, opt))
    for m, o in ((model, opt), (other, twin)):
        for x in data[3:]:
            backward(m, o, x)
            o.step()
    assert_same(values(other), values(model))


# ---------------------------------------------------------------- GradScaler


@every_row
def test_a_scaled_loop_equals_torchs_and_skips_infinite_gradients(case):
    kept = []
    for model, opt in pair(case):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        history = []
        for i, x in enumerate(batches(8)):
            opt.zero_grad()
            scaler.scale(loss_of(model, x)).backward()
            if i in (0, 4):  # the first time, before there is any state
                next(model.parameters()).grad.view(-1)[0] = torch.inf
            before, state = values(model), copy.deepcopy(opt.state_dict()["state"])
            scaler.step(opt)
            if i in (0, 4):
                assert_same(values(model), before)
                assert_same(opt.state_dict()["state"], state)
            else:
                assert not torch.equal(values(model)[0], before[0])
            scaler.update()
            history.append((values(model), scaler.get_scale()))
        kept.append(history)
    theirs, ours = kept
    assert [scale / 512 for _, scale in ours] == [1, 1, 2, 2, 1, 1, 2, 2]
    assert_close(ours, theirs, case.rounding * 100)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_a_scaler_steps_an_optimizer_that_is_called_fused(name):
    results = []
    for cls in (getattr(torch.optim, name), getattr(adapters, name)):
        model = make_model(cases.CASES[0], torch.float32)
        opt = cls(model.parameters(), lr=0.05, fused=True)
        if cls is getattr(adapters, name):
            opt.compile = False
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


@every_row
def test_gradients_are_clipped_between_unscaling_and_the_step(case):
    results = []
    for scaled in (True, False):
        _, (model, opt) = pair(case)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        for x in batches(4):
            opt.zero_grad()
            scaler.scale(loss_of(model, x)).backward()
            scaler.unscale_(opt)
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.01
            scaler.step(opt)
            scaler.update()
        results.append(values(model))
    assert_same(*results)  # by a power of 2, which rounds nothing


# ---------------------------------------------------------------- inside the backward pass


@every_row
def test_one_optimizer_a_parameter_inside_backward_equals_one_for_all(case):
    _, (model, opt) = pair(case)
    other = make_model(case)
    owners = {p: case.drop_in([p], compile=False, **case.hyper) for p in other.parameters()}

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


# torch's own package scripts its functional optimizers while it is imported
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@every_row
def test_torchs_own_helper_puts_it_there(case):
    from torch.distributed.optim import _apply_optimizer_in_backward

    _, (model, opt) = pair(case)
    other = make_model(case)
    _apply_optimizer_in_backward(case.drop_in, other.parameters(), {"compile": False, **case.hyper})
    for x in batches(3):
        backward(model, opt, x)
        opt.step()
        loss_of(other, x).backward()
    assert_same(values(other), values(model))


# ---------------------------------------------------------------- schedulers that turn other knobs

CYCLED = {"betas", "momentum"}


def one_cycle(opt):
    return lr_scheduler.OneCycleLR(
        opt, max_lr=0.1, total_steps=12, cycle_momentum=bool(CYCLED & opt.defaults.keys())
    )


def cyclic(opt):
    return lr_scheduler.CyclicLR(
        opt, 0.01, 0.1, step_size_up=3, cycle_momentum=bool(CYCLED & opt.defaults.keys())
    )


@pytest.mark.parametrize("make", [one_cycle, cyclic])
@every_row
def test_cycled_momenta_and_betas_count(case, make):
    if case.name in ("sgd", "sgd-maximize"):  # torch refuses to cycle a momentum of 0 in one class
        case = case._replace(hyper={**case.hyper, "momentum": 0.5})
    if case.hyper.get("dampening"):
        case = case._replace(hyper={**case.hyper, "nesterov": False})
    (a, theirs), (b, ours) = pair(case)
    first, second = make(theirs), make(ours)
    seen = set()
    for x in batches(10):
        for model, opt, scheduler in ((a, theirs, first), (b, ours, second)):
            backward(model, opt, x)
            opt.step()
            scheduler.step()
        group, wanted = ours.param_groups[0], theirs.param_groups[0]
        assert {**group, "params": 0} == {**wanted, "params": 0}
        assert_close(values(b), values(a), max(EXACT, case.rounding))
        seen.add((group["lr"], group.get("momentum"), group.get("betas")))
    assert len(seen) > 5
    if CYCLED & ours.defaults.keys():
        assert len({entry[1:] for entry in seen}) > 4


# ---------------------------------------------------------------- averages of the parameters


@every_row
def test_stochastic_weight_averaging_equals_torchs(case):
    results = []
    for model, opt in pair(case):
        average = swa_utils.AveragedModel(model)
        usual = lr_scheduler.StepLR(opt, 2, gamma=0.5)
        late = swa_utils.SWALR(opt, swa_lr=0.2, anneal_epochs=3)
        rates = []
        for i, x in enumerate(batches(9)):
            backward(model, opt, x)
            opt.step()
            if i < 3:
                usual.step()
            else:
                average.update_parameters(model)
                late.step()
            rates.append(opt.param_groups[0]["lr"])
        assert average.n_averaged == 6
        assert len(set(rates)) > 3
        results.append((values(average.module), values(model), rates))
        assert not torch.equal(results[-1][0][0], results[-1][1][0])
    assert_close(results[1], results[0], max(EXACT, case.rounding))


@every_row
def test_values_swapped_into_the_parameters_are_stepped_from(case):
    """An average takes the parameters' place for an evaluation, or for good."""
    results = []
    for model, opt in pair(case):
        average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
        for i, x in enumerate(batches(8)):
            backward(model, opt, x)
            opt.step()
            average.update_parameters(model)
            if i == 3:
                model.load_state_dict(average.module.state_dict())
        results.append((values(model), values(average.module)))
    assert_close(results[1], results[0], max(EXACT, case.rounding))


@pytest.mark.parametrize("decay", [0.5, 0.9])
def test_the_recipes_average_is_torchs_averaged_model(decay):
    def recipe(lr):
        return fo.chain(fo.adamw(lr), fo.params_ema(decay))

    model = make_model(cases.CASES[0])
    opt = adapters.Optimizer(model.parameters(), recipe, lr=0.05, compile=False)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(decay))
    average.update_parameters(model)  # the first call copies
    for x in batches(5):
        backward(model, opt, x)
        opt.step()
        average.update_parameters(model)
    mine = [opt.state[p]["params_ema"] for p in model.parameters()]
    assert_close(mine, values(average.module), EXACT)


# ---------------------------------------------------------------- parameters that change their form


@pytest.mark.parametrize("swap", [False, True], ids=["data", "swap_tensors"])
@every_row
def test_a_model_converted_mid_run_is_stepped_in_its_new_dtype(case, swap):
    """Its parameters keep their identity; the state follows when it is loaded again."""
    results = []
    before = torch.__future__.get_swap_module_params_on_conversion()
    try:
        torch.__future__.set_swap_module_params_on_conversion(swap)
        for model, opt in pair(case):
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
    with pytest.raises(ValueError, match=r"Invalid learning rate: -0\.1"):
        adapters.SGD([torch.nn.Parameter(torch.ones(3))], lr=-0.1)
