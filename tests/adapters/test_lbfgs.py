"""The drop-in for torch.optim.LBFGS: torch's numbers, its state, and its errors."""

import copy
import inspect
import math

import pytest
import torch
from helpers import assert_close, assert_same, copy_of, through_file
from lbfgs_runs import (
    PROBLEMS,
    SEARCHES,
    Ours,
    Run,
    Torch,
    assert_agree,
    assert_alike,
    network,
    pair,
    quadratic,
    two_precisions,
    valley,
)
from sampling import some

OPTIONS = (
    {"max_eval": 1},
    {"max_eval": 4},
    {"max_iter": 1},
    {"max_iter": 60, "tolerance_grad": 1e-2},
    {"max_iter": 60, "tolerance_change": 1e-2},
    {"tolerance_grad": 1e3},
    {"lr": 0.05},
    {"lr": 7.0},
    {"lr": torch.tensor(0.5)},
    {"lr": torch.tensor([0.5], dtype=torch.float64)},
)


def far():
    """A start from which the zoom runs long, shifts its trials, or gives up."""
    params, f = valley(6)
    with torch.no_grad():
        for p in params:
            p.mul_(10)
    return params, f


def with_one_that_has_no_gradient():
    params, f = network()
    return [*params, torch.nn.Parameter(torch.ones(2, dtype=torch.float64))], f


LONG = {"max_iter": 40, "tolerance_change": 0.0, "steps": 3}
SCENES = {
    **{
        f"{name}, history of {size}": (problem, {"history_size": size})
        for name, problem in PROBLEMS.items()
        for size in (1, 3, 100)
    },
    **{
        f"{name}, {options}": (PROBLEMS[name], options)
        for name in ("network", "rosenbrock-10")
        for options in OPTIONS
    },
    **{
        f"far, {seed}": (far, {**LONG, "seed": seed, "max_eval": (30, 200)[seed % 2]})
        for seed in range(12)
    },
    **{
        f"{dtype} {problem.__name__}": (lambda d=dtype, p=problem: p(d), {"tolerance": 1e-5})
        for dtype in (torch.float32, torch.bfloat16)
        for problem in (quadratic, network)
    },
    "complex": (lambda: network(torch.complex128), {}),
    "two precisions": (two_precisions, {}),
    "no gradient": (with_one_that_has_no_gradient, {}),
    "a first point that is good enough": (network, {"tolerance_grad": 1e3, "steps": 1}),
}


PAIRS = [(scene, search) for scene in SCENES for search in (None, "strong_wolfe")]
ZOOMING = [x for x in PAIRS if x[1] or not x[0].startswith("far") or x[0] == "far, 0"]
"""Without the others that have no line search, which is what they are about."""


@pytest.mark.parametrize(("scene", "search"), some(PAIRS, 0, ZOOMING))
@pytest.mark.filterwarnings("ignore:.*lbfgs with max_eval=1")
def test_every_evaluation_is_torchs(scene, search):
    problem, options = SCENES[scene]
    options = dict(options)
    tolerance = options.pop("tolerance", 1e-10)
    theirs, ours = pair(problem, line_search_fn=search, **options)
    assert_agree(ours, theirs, tolerance)


@SEARCHES
def test_strides_do_not_matter(search):
    """torch's own takes contiguous parameters only."""

    def transposed():
        params, f = network()
        params[0] = torch.nn.Parameter(params[0].detach().t().contiguous().t())
        return params, f

    theirs, ours = [Run(*x, line_search_fn=search) for x in ((Torch, network), (Ours, transposed))]
    for run in (theirs, ours):
        run.steps(3)
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-10, atol=1e-12)


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


# ---------------------------------------------------------------- state
@SEARCHES
@pytest.mark.parametrize(("first", "second"), [(Torch, Ours), (Ours, Torch), (Ours, Ours)])
def test_checkpoints_go_both_ways(first, second, search):
    options = {"line_search_fn": search, "max_iter": 4, "history_size": 6}
    whole = Run(Torch, network, **options)
    whole.steps(6)
    begun = Run(first, network, **options)
    begun.steps(3)
    resumed = Run(second, network, **{**options, "lr": 0.1})
    resumed.opt.load_state_dict(through_file(begun.opt.state_dict()))
    for p, q in zip(resumed.params, begun.params, strict=True):
        p.data.copy_(q.data)
    resumed.steps(3)
    resumed.losses = begun.losses + resumed.losses
    resumed.points = begun.points + resumed.points
    assert_agree(resumed, whole)


def test_a_checkpoint_of_torchs_without_an_iteration_is_taken():
    """torch then saves None for what it does not know."""
    begun = Run(Torch, network, max_iter=0)
    begun.steps(1)
    assert begun.opt.state_dict()["state"][0]["H_diag"] is None
    fresh, resumed = [Run(Ours, network, line_search_fn="strong_wolfe") for _ in range(2)]
    resumed.opt.load_state_dict(through_file(begun.opt.state_dict()))
    resumed.opt.param_groups[0].update(fresh.opt.param_groups[0], params=resumed.params)
    for run in (fresh, resumed):
        run.steps(2)
    assert_same(resumed.losses, fresh.losses)


def test_resuming_parameters_of_two_precisions_is_bitwise():
    """torch's loading rounds the state to the first parameter's dtype."""
    whole, resumed = [Run(Ours, two_precisions, max_iter=4) for _ in range(2)]
    whole.steps(2)
    resumed.opt.load_state_dict(through_file(whole.opt.state_dict()))
    for p, q in zip(resumed.params, whole.params, strict=True):
        p.data.copy_(q.data)
    assert_alike(resumed.opt.state_dict(), whole.opt.state_dict(), 0.0)
    for run in (whole, resumed):
        run.steps(2)
    assert_same(copy_of(resumed.params), copy_of(whole.params))


@pytest.mark.parametrize("size", [2, 5])
def test_a_history_longer_than_asked_for_is_cut(size):
    begun = Run(Torch, network, history_size=9, line_search_fn="strong_wolfe")
    begun.steps(1)
    assert len(begun.opt.state_dict()["state"][0]["ro"]) == 9
    resumed = Run(Ours, network, line_search_fn="strong_wolfe")
    resumed.opt.load_state_dict(through_file(begun.opt.state_dict()))
    resumed.opt.param_groups[0]["history_size"] = size
    resumed.steps(1)
    state = resumed.opt.state_dict()["state"][0]
    assert [len(state[key]) for key in ("old_dirs", "old_stps", "ro", "al")] == [size] * 4


def test_a_load_that_fails_leaves_all_as_it_was():
    run, other = Run(Ours, network), Run(Ours, quadratic)
    run.steps(2)
    other.steps(1)
    state = copy.deepcopy(run.opt.state_dict())
    short, wrong = copy.deepcopy(state), copy.deepcopy(state)
    lost, thin = copy.deepcopy(state), copy.deepcopy(state)
    short["param_groups"][0]["params"] = [0]
    wrong["state"][0]["d"] = torch.ones(3)
    lost["state"][0]["ro"].pop()
    thin["state"][0]["old_stps"][1] = torch.ones(4)
    for bad, message in (
        (short, "size"),
        (wrong, "does not fit:\n  d has 3 elements"),
        (lost, "ro differ in length"),
        (thin, "does not fit:\n  old_stps has 4 elements"),
        ({}, "group"),
    ):
        with pytest.raises((ValueError, KeyError), match=message):
            run.opt.load_state_dict(bad)
        assert_alike(run.opt.state_dict(), state, 0.0)


# ---------------------------------------------------------------- the contract
def test_it_is_a_torch_lbfgs_of_the_same_signature():
    assert issubclass(Ours, Torch)
    assert inspect.signature(Ours) == inspect.signature(Torch)
    p = [torch.nn.Parameter(torch.ones(2))]
    assert Ours(p).defaults == Torch(p).defaults
    assert repr(Ours(p)) == repr(Torch(p))


def one():
    return torch.nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda cls: cls([one()], lr=-1), ValueError, "Invalid learning rate: -1"),
        (lambda cls: cls([one()], lr=torch.ones(2)), ValueError, "Tensor lr must be 1-element"),
        (
            lambda cls: cls([{"params": [one()]}, {"params": [one()]}]),
            ValueError,
            "doesn't support per-parameter options",
        ),
        (
            lambda cls: cls([p := one()], line_search_fn="armijo").step(lambda: with_gradient(p)),
            RuntimeError,
            "only 'strong_wolfe' is supported",
        ),
        (lambda cls: cls([one()]).step(), TypeError, "closure"),
    ],
)
def test_errors_are_torchs(make, error, says):
    for cls in (Torch, Ours):
        with pytest.raises(error, match=says):
            make(cls)


def with_gradient(p):
    p.grad = 2 * p.detach()
    return p.square().sum()
