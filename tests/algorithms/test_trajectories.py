"""Ten steps against torch.optim, torch's utilities, and the papers' loops."""

from functools import partial

import pytest
import test_authors
import test_optax
import torch
from cases import CASES, composed, with_naive, with_torch
from helpers import as_parameters, assert_close, copy_of, make_grads, run, step_object
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import functional_optim as fo
from functional_optim import adapters, schedules

STEPS = 10
RUNS = [
    pytest.param(*param.values, dtype, tolerance, id=f"{param.id}-{str(dtype)[6:]}")
    for dtype, tolerance, needs in (
        (torch.float64, 1e-10, ()),
        (torch.float32, 1e-5, ()),
        (torch.complex128, 1e-10, ("complex",)),
    )
    for param in with_torch(*needs)
]


def patchy(grads):
    """Gradients of which two come late, one is missing for two steps, and one only comes once."""
    absent = {"cube": lambda t: t < 2, "transposed": lambda t: t < 5}
    absent |= {"matrix": lambda t: t in (3, 4), "vector": lambda t: t != 6}
    return [
        [None if absent.get(name, lambda t: False)(t) else g for name, g in tree.items()]
        for t, tree in enumerate(grads)
    ]


@pytest.mark.parametrize(("case", "dtype", "tolerance"), RUNS)
def test_the_functional_loop_equals_torch(case, dtype, tolerance):
    params = case.filled(dtype)
    grads = make_grads(params, STEPS)
    theirs = as_parameters(params)
    step_object(case.stock(theirs, **case.hyper), grads)
    moved, _ = run(case.tx(), params, grads)
    assert_close(list(moved.values()), copy_of(theirs), tolerance)


@pytest.mark.parametrize("general", [True, False], ids=["general", "drop-in"])
@pytest.mark.parametrize(("case", "dtype", "tolerance"), RUNS)
def test_the_object_equals_torch_with_late_and_missing_gradients(case, general, dtype, tolerance):
    params = case.filled(dtype)
    grads = patchy(make_grads(params, STEPS))
    theirs, mine = as_parameters(params), as_parameters(params)
    a = case.stock(theirs, **case.hyper)
    make = partial(adapters.Optimizer, recipe=case.recipe) if general else case.drop_in
    b = make(mine, compile=False, **case.hyper)
    for g in grads:
        step_object(a, [g])
        step_object(b, [g])
        assert_close(copy_of(mine), copy_of(theirs), tolerance)


@pytest.mark.parametrize("case", with_naive())
def test_the_functional_loop_equals_the_paper(case):
    """Fifty steps; one tensor's gradients are zeros, and once all are huge."""
    params = case.params()
    grads = make_grads(params, 50)
    for g in grads:
        g["matrix" if case.dim == 2 else "scalar"] *= 0
    grads[7] = {name: 100 * g for name, g in grads[7].items()}
    moved, _ = run(case.tx(), params, grads)
    for name, p in params.items():
        theirs = case.naive(p.numpy(), [tree[name].numpy() for tree in grads], **case.hyper)
        assert_close(moved[name], torch.as_tensor(theirs), 1e-10)


def test_every_row_has_a_reference():
    """torch's class, a loop, or a row in `test_optax` or `test_authors`."""
    followed = {name.split("-")[0] for x in (test_authors, test_optax) for name in x.FOUND}
    followed |= {"sparse_adam"}  # with sparse gradients, in test_sparse
    for case in CASES:
        own = case.recipe.__module__.startswith(fo.__name__)
        assert case.stock or case.naive or case.recipe.__name__ in followed or not own, case.name


# ---------------------------------------------------------------- links
def test_params_ema_of_half_precision_averages_the_rounded_parameters():
    p, g = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1e-3], dtype=torch.bfloat16)
    moved, state = run(fo.chain(fo.sgd(1.0), fo.params_ema(0.0)), p, [g])
    assert moved == 1.0  # 0.999 is nearer to 1 than to the number below it
    assert state.slots["params_ema"] == 1.0


# ---------------------------------------------------------------- the whole recipe
def test_every_hyperparameter_takes_a_schedule():
    """momentum 0.5 and 0.9, decay 0.1 and 0.2 by turns, against two optimizers' hand-made steps."""
    turn = lambda a, b: lambda count: a + (b - a) * (count % 2)  # noqa: E731
    params = CASES[0].params()
    grads = make_grads(params, 4)
    theirs = as_parameters(params)
    opt = torch.optim.SGD(theirs, lr=0.1, momentum=0.5, weight_decay=0.1)
    for i, g in enumerate(grads):
        opt.param_groups[0].update(
            lr=turn(0.1, 0.3)(i), momentum=turn(0.5, 0.9)(i), weight_decay=turn(0.1, 0.2)(i)
        )
        step_object(opt, [g])
    tx = fo.sgd(turn(0.1, 0.3), turn(0.5, 0.9), weight_decay=turn(0.1, 0.2))
    assert_close(list(run(tx, params, grads)[0].values()), copy_of(theirs), 1e-12)


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "object"])
def test_the_composed_recipe_equals_torchs_parts(functional):
    """clip_grad_norm_, AdamW, LambdaLR and an averaged model, each from torch."""
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4, dtype=torch.float64), torch.nn.Linear(4, 2, dtype=torch.float64)
    )
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    grads = make_grads(params, STEPS)
    hyper = {"lr": 0.02, "max_norm": 0.5, "decay": 0.9}
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = LambdaLR(opt, schedules.warmup_cosine(0.002, 0.02, 3, 1000))
    for g in grads:
        for p, x in zip(model.parameters(), g.values(), strict=True):
            p.grad = x.clone()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        scheduler.step()
        average.update_parameters(model)
    if functional:
        moved, state = run(composed(**hyper), params, grads)
        ema = state.slots["params_ema"]
    else:
        mine = dict(zip(params, as_parameters(params), strict=True))
        step_object(b := adapters.Optimizer(mine.values(), composed, compile=False, **hyper), grads)
        moved = {name: p.detach() for name, p in mine.items()}
        ema = {name: b.state[p]["params_ema"] for name, p in mine.items()}
    # torch adds 1e-6 to the norm, of about 5, before dividing
    assert_close(moved, {n: p.detach() for n, p in model.named_parameters()}, 1e-6)
    assert_close(ema, {n: p.detach() for n, p in average.module.named_parameters()}, 1e-6)
