"""The drop-in for torch.optim.LBFGS: torch's numbers, evaluation by evaluation."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers import assert_close, assert_same, copy_of
from lbfgs_runs import (
    PROBLEMS,
    SEARCHES,
    Ours,
    Run,
    Torch,
    assert_agree,
    network,
    pair,
    quadratic,
    valley,
)


@SEARCHES
@pytest.mark.parametrize("history_size", [1, 3, 100])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_every_evaluation_is_torchs(problem, history_size, search):
    theirs, ours = pair(problem, history_size=history_size, line_search_fn=search)
    assert len(theirs.losses) > 8
    assert_agree(ours, theirs)


OPTIONS = (
    {"max_eval": 1},
    {"max_eval": 4},
    {"max_iter": 1},
    {"max_iter": 60, "tolerance_grad": 1e-2},
    {"max_iter": 60, "tolerance_change": 1e-2},
    {"lr": 0.05},
    {"lr": 7.0},
    {"lr": torch.tensor(0.5)},
    {"lr": torch.tensor([0.5], dtype=torch.float64)},
)


@SEARCHES
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_argument_is_torchs(options, search):
    for seed in range(3):
        for problem in (network, PROBLEMS["rosenbrock-10"]):
            theirs, ours = pair(problem, seed=seed, line_search_fn=search, **options)
            assert_agree(ours, theirs)


@SEARCHES
@pytest.mark.parametrize("seed", range(12))
def test_long_searches_from_far_away_are_torchs(seed, search):
    """Starts from which the zoom runs long, shifts its trials, or gives up."""

    def far():
        params, f = valley(6)
        with torch.no_grad():
            for p in params:
                p.mul_(10)
        return params, f

    options = {"line_search_fn": search, "max_iter": 40, "tolerance_change": 0.0}
    theirs, ours = pair(far, 3, seed, **options, max_eval=(30, 200)[seed % 2])
    assert_agree(ours, theirs)


@SEARCHES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("problem", [quadratic, network], ids=lambda p: p.__name__)
def test_other_dtypes_are_torchs(problem, dtype, search):
    theirs, ours = pair(lambda: problem(dtype), line_search_fn=search)
    assert_agree(ours, theirs, 1e-10 if dtype is torch.complex128 else 1e-5)


BAD = {
    "nan": lambda p: (p[0] - p[0].log()).sum(),  # NaN left of zero
    "inf": lambda p: (p[0] ** 2).exp().sum(),  # overflows
    "cliff": lambda p: torch.where(p[0].abs() < 3, p[0] ** 2, math.inf * p[0].abs()).sum(),
    "hole": lambda p: torch.where(p[0].abs() < 1.5, p[0] ** 2 - p[0], p[0] * math.nan).sum(),
    "down": lambda p: -(p[0] ** 3).sum(),  # no minimum
}


@SEARCHES
@pytest.mark.parametrize("lr", [1.0, 100.0, 2000.0])
@pytest.mark.parametrize("f", BAD.values(), ids=BAD)
def test_nan_and_inf_are_met_as_torch_meets_them(f, lr, search):
    def problem():
        return [torch.nn.Parameter(torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64))], f

    theirs, ours = [Run(c, problem, lr=lr, line_search_fn=search) for c in (Torch, Ours)]
    try:
        theirs.steps(3)
    except IndexError:  # torch's own fails on NaN where the slope is flat: ours stays where it was
        ours.steps(1)
        assert all(loss.isnan() for loss in ours.losses[len(theirs.losses) - 1 :])
        assert_same(copy_of(ours.params), ours.points[len(theirs.losses) - 2])
        return
    ours.steps(3)
    assert_agree(ours, theirs)


def test_lr_zero_goes_nowhere():
    """With a search, torch's own divides by zero."""
    for search in (None, "strong_wolfe"):
        run = Run(Ours, quadratic, lr=0.0, line_search_fn=search)
        run.steps(2)
        assert_same(copy_of(run.params), run.points[0])


# ---------------------------------------------------------------- parameters and gradients


@SEARCHES
def test_strides_do_not_matter(search):
    x = torch.randn(9, 4, dtype=torch.float64)
    start = torch.randn(4, 3, dtype=torch.float64)

    def problem(p):
        return lambda: (
            [torch.nn.Parameter(p)],
            lambda q: ((x @ q[0].contiguous()).tanh() - 0.3).square().sum(),
        )

    plain = Run(Torch, problem(start.clone()), line_search_fn=search)
    transposed = Run(Ours, problem(start.t().contiguous().t()), line_search_fn=search)
    assert not transposed.params[0].is_contiguous()
    plain.steps(3)
    transposed.steps(3)
    torch.testing.assert_close(transposed.losses, plain.losses, rtol=1e-10, atol=1e-12)


@SEARCHES
def test_parameters_without_gradient_stay(search):
    def problem():
        params, f = network()
        return [*params, torch.nn.Parameter(torch.ones(2, dtype=torch.float64))], f

    theirs, ours = pair(problem, line_search_fn=search)
    assert_agree(ours, theirs)
    assert_same(ours.params[-1].detach(), torch.ones(2, dtype=torch.float64))


def test_sparse_gradients_are_taken():
    rows = torch.tensor([0, 2])

    def run(cls, sparse):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
        opt = cls([p], line_search_fn="strong_wolfe")

        def closure():
            opt.zero_grad()
            e = torch.nn.functional.embedding(rows, p, sparse=sparse)
            loss = (e.cos() + e**2).sum()
            loss.backward()
            assert p.grad.is_sparse == sparse
            return loss

        opt.step(closure)
        return p.detach()

    assert_close(run(Ours, True), run(Torch, False), 1e-12)


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)], ids=["float", "tensor"])
def test_schedulers_drive_lr(lr):
    runs = []
    for cls in (Torch, Ours):
        run = Run(cls, network, lr=copy.deepcopy(lr), max_iter=3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(run.opt, 0.5)
        for _ in range(4):
            run.steps(1)
            scheduler.step()
        assert float(run.opt.param_groups[0]["lr"]) == 0.5**5
        runs.append(run)
    assert_agree(runs[1], runs[0])


@SEARCHES
@pytest.mark.parametrize("problem", [quadratic, network], ids=lambda p: p.__name__)
def test_a_closure_may_project_the_parameters(problem, search):
    """As neural style transfer does: what torch keeps of the projection is kept."""
    runs, projected = [], 0
    for cls in (Torch, Ours):
        run = Run(cls, problem, lr=0.3, max_iter=8, line_search_fn=search)

        def closure(run=run):
            nonlocal projected
            with torch.no_grad():
                for p in run.params:
                    projected += int((p.abs() > 0.5).sum())
                    p.clamp_(-0.5, 0.5)
            return run.closure()

        for _ in range(3):
            run.opt.step(closure)
        runs.append(run)
    assert projected > 50
    assert_agree(runs[1], runs[0])


@SEARCHES
@pytest.mark.parametrize("at", [0, 3])
def test_a_closure_that_changes_settings_changes_the_next_step(at, search):
    runs = []
    for cls in (Torch, Ours):
        run = Run(cls, network, max_iter=8, line_search_fn=search)
        calls = iter(range(1000))

        def closure(run=run, calls=calls):
            if next(calls) == at:
                run.opt.param_groups[0].update(lr=0.1, max_iter=4)
            return run.closure()

        for _ in range(2):
            run.opt.step(closure)
        runs.append(run)
    assert_agree(runs[1], runs[0])
