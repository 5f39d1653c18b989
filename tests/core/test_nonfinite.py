"""Gradients that are not finite: the same result, NaN for NaN, from each way of stepping.

Python numbers take part in `fo.compile` and in optimizer objects, tensors in `update`.
"""

import math

import combined
import pytest
import torch
from cases import able
from helpers import as_parameters, clone, copy_of, make_grads, run
from links import LINKS
from sampling import some

import functional_optim as fo
from functional_optim.adapters import AdamW, Optimizer

MEASURING = [
    case for case in LINKS if any(x.rule.reduce for x in getattr(case.make(), "placements", ()))
]
"""The links whose numbers depend on gradients."""
READING = [fo.scale_by_polyak, lambda: fo.scale_by_polyak(variant="sps+")]
READING += [lambda: fo.reduce_on_plateau(0.5, patience=1)]
STEPS = 3
EXACT = 1e-12


def spoiled(params, bad, at=1):
    """Gradients of some steps, one of which has a bad entry in one tensor."""
    grads = make_grads(params, STEPS, seed=2)
    name = "matrix" if "matrix" in params else next(iter(params))
    grads[at][name].view(-1)[0] = bad
    return grads


def by_update(tx, params, grads, extra):
    params, state = run(tx, params, grads, **extra)
    return params, state.carry


def by_compile(tx, params, grads, extra):
    step, state = fo.compile(tx, donate=False), tx.init(params)
    for g in grads:
        params, state = step(g, state, params, **extra)
    return params, state.carry


def by_object(tx, params, grads, extra, *, compile):
    mine = as_parameters(params)
    opt = Optimizer(zip(params, mine, strict=True), lambda: tx, compile=compile)
    for g in grads:
        for p, x in zip(mine, g.values(), strict=True):
            p.grad = x.clone()
        opt.step(lambda: extra["value"] if extra else 0.0)
    known = opt.state[mine[0]]
    carry = {k: x.clone() for k, x in known.items() if x.dim() == 0 and k != "step"}
    return dict(zip(params, copy_of(mine), strict=True)), carry


def check(tx, params, bad, extra=None, tolerance=EXACT):
    extra = extra or {}
    grads = spoiled(params, bad)
    expected, carried = by_update(tx, clone(params), grads, extra)
    for compile in (True, False):
        found, own = by_object(tx, clone(params), grads, extra, compile=compile)
        assert_equal(found, expected, tolerance)
        assert_equal(own, {key: carried[key] for key in own if key in carried}, tolerance)
    found, own = by_compile(tx, clone(params), grads, extra)
    assert_equal(found, expected, tolerance)
    assert_equal(own, carried, tolerance)


def assert_equal(found, expected, tolerance):
    same = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    for key, x in expected.items():
        torch.testing.assert_close(found[key], x, **same, msg=lambda m, k=key: k + m)


@pytest.mark.filterwarnings("ignore:.* found NaN or infinite values in the matrix")
@pytest.mark.parametrize("bad", some([math.nan, math.inf, -math.inf]), ids=str)
@pytest.mark.parametrize("case", able(costly=True))
def test_every_recipe_takes_a_bad_gradient_alike(case, bad):
    check(case.tx(), case.filled(), bad, tolerance=case.rounding)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("case", MEASURING, ids=lambda case: case.name)
def test_every_link_that_measures_takes_a_bad_gradient_alike(case, bad):
    extra = {"value": 3.0} if case.extra else None
    check(case.recipe(), case.params(), bad, extra, case.rounding)


@pytest.mark.parametrize("bad", some([math.nan, math.inf]), ids=str)
@pytest.mark.parametrize("recipe", combined.LEAFWISE, ids=lambda recipe: recipe.__name__)
def test_every_combination_takes_a_bad_gradient_alike(recipe, bad):
    check(recipe(0.1), combined.named_params(), bad)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300], ids=str)
@pytest.mark.parametrize("link", READING)
def test_a_loss_that_is_not_finite_is_taken_alike(link, value):
    params = combined.named_params()
    check(fo.chain(fo.scale_by_lr(0.1), link()), params, 1.0, {"value": value})


def test_clipping_passes_on_a_nan():
    """As torch.nn.utils.clip_grad_norm_ does."""
    tx = fo.chain(fo.clip_by_global_norm(1.0), fo.sgd(0.1))
    params = {"a": torch.zeros(2), "b": torch.zeros(2)}
    grads = {"a": torch.tensor([3e3, 4e3]), "b": torch.tensor([math.nan, 0.0])}
    found, _ = fo.compile(tx, donate=False)(grads, tx.init(params), params)
    assert all(x.isnan().all() for x in found.values())


def test_a_number_beyond_float32_is_kept_as_infinite():
    """A carried number is float32; torch refuses to round a Python number to infinity."""
    tx = fo.chain(fo.monitor({"norm": fo.measures.global_norm}), fo.sgd(0.0))
    params = {"a": torch.zeros(2, dtype=torch.float64)}
    check(tx, params, 1e50)
    check(tx, params, 1e200)


@pytest.mark.parametrize(
    "recipe",
    [
        lambda end: fo.chain(fo.clip_by_global_norm(end), fo.sgd(0.1)),
        lambda end: fo.nadam(0.1, betas=(lambda n: 1 - end(n), 0.9)),
        lambda end: fo.radam(0.1, betas=(0.9, lambda n: 1 - end(n))),
        lambda end: fo.sparse_adam(0.1, betas=(0.9, lambda n: 1 - end(n))),
        lambda end: fo.asgd(0.1, alpha=lambda n: 400 * (1 - end(n))),
    ],
    ids=["clip_by_global_norm", "nadam", "radam", "sparse_adam", "asgd"],
)
def test_a_schedule_that_runs_into_a_zero_division_is_taken_alike(recipe):
    """It ends at 0, where the number it reaches is infinite or NaN."""
    check(recipe(fo.schedules.linear(1.0, 0.0, 2)), combined.named_params(), 1.0)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_beta_that_a_schedule_takes_over_1(compiled):
    """Its root was complex, of which an eager step took the real part."""
    tx = fo.adam(0.1, betas=(0.9, lambda n: 0.5 if n < 2 else 1.2))
    p = {"w": torch.ones(2)}
    state, step = tx.init(p), fo.compile(tx, donate=False) if compiled else tx.update
    for _ in range(2):
        _, state = step(p, state, p)
    with pytest.raises(ValueError, match=r"Invalid beta parameter at index 1: 1\.2"):
        step(p, state, p)


def test_a_beta_out_of_range_in_a_group_changes_no_other_group():
    """The first group had stepped when the second one failed."""
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    opt = AdamW([{"params": [p]} for p in params], lr=0.1)
    for p in params:
        p.grad = torch.ones(4)
    opt.step()
    before = [p.clone() for p in params]
    opt.param_groups[1]["betas"] = (0.9, 1.2)
    with pytest.raises(ValueError, match=r"Invalid beta parameter at index 1: 1\.2"):
        opt.step()
    assert all(map(torch.equal, params, before))
