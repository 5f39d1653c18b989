"""The drop-in for torch.optim.LBFGS: state, checkpoints, copies, hooks and errors."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from helpers import as_parameters, assert_close, assert_same, copy_of
from lbfgs_runs import (
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
)

# ---------------------------------------------------------------- state


def saved(opt):
    """A state dict after a trip through a file that may hold nothing but data."""
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@SEARCHES
@pytest.mark.parametrize(("first", "second"), [(Torch, Ours), (Ours, Torch), (Ours, Ours)])
def test_checkpoints_go_both_ways(first, second, search):
    options = {"line_search_fn": search, "max_iter": 4, "history_size": 6}
    whole = Run(Torch, network, **options)
    whole.steps(6)
    begun = Run(first, network, **options)
    begun.steps(3)
    resumed = Run(second, network, **{**options, "lr": 0.1})
    resumed.opt.load_state_dict(saved(begun.opt))
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
    resumed.opt.load_state_dict(saved(begun.opt))
    resumed.opt.param_groups[0].update(fresh.opt.param_groups[0], params=resumed.params)
    for run in (fresh, resumed):
        run.steps(2)
    assert_same(resumed.losses, fresh.losses)


def test_resuming_parameters_of_two_precisions_is_bitwise():
    """torch's loading rounds the state to the first parameter's dtype."""
    whole, resumed = [Run(Ours, two_precisions, max_iter=4) for _ in range(2)]
    whole.steps(2)
    resumed.opt.load_state_dict(saved(whole.opt))
    for p, q in zip(resumed.params, whole.params, strict=True):
        p.data.copy_(q.data)
    assert_alike(resumed.opt.state_dict(), whole.opt.state_dict(), 0.0)
    for run in (whole, resumed):
        run.steps(2)
    assert_same(copy_of(resumed.params), copy_of(whole.params))


def test_a_hook_may_change_what_is_loaded():
    run, other = [Run(Ours, two_precisions) for _ in range(2)]
    run.steps(1)
    state = saved(run.opt)
    other.opt.register_load_state_dict_pre_hook(halved)
    other.opt.load_state_dict(state)
    found = other.opt.state_dict()["state"][0]["d"]
    assert_close(found.double(), run.opt.state_dict()["state"][0]["d"] / 2, 1e-6)


def halved(opt, state_dict):
    state = copy.deepcopy(state_dict)
    state["state"][0]["d"] /= 2
    return state


@pytest.mark.parametrize("size", [2, 5])
def test_a_history_longer_than_asked_for_is_cut(size):
    begun = Run(Torch, network, history_size=9, line_search_fn="strong_wolfe")
    begun.steps(1)
    assert len(begun.opt.state_dict()["state"][0]["ro"]) == 9
    resumed = Run(Ours, network, line_search_fn="strong_wolfe")
    resumed.opt.load_state_dict(saved(begun.opt))
    resumed.opt.param_groups[0]["history_size"] = size
    resumed.steps(1)
    state = resumed.opt.state_dict()["state"][0]
    assert [len(state[key]) for key in ("old_dirs", "old_stps", "ro", "al")] == [size] * 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_alone(copied):
    whole, run = (
        Run(Ours, network, line_search_fn="strong_wolfe"),
        Run(Ours, network, line_search_fn="strong_wolfe"),
    )
    whole.steps(4)
    run.steps(2)
    left, points = copy_of(run.params), len(run.points)
    named = [name for name in sorted(vars(run.opt)) if not name.startswith("_")]
    run.opt = copied(run.opt)
    assert [name for name in sorted(vars(run.opt)) if not name.startswith("_")] == named
    original, run.params = run.params, run.opt.param_groups[0]["params"]
    run.steps(2)
    assert len(run.points) > points
    assert_same(copy_of(run.params), copy_of(whole.params))
    assert_same(copy_of(original), left)


@SEARCHES
def test_an_edit_of_the_state_is_taken_up(search):
    plain, edited = [Run(Ours, network, line_search_fn=search, max_iter=3) for _ in range(2)]
    for run in (plain, edited):
        run.steps(2)
    edited.opt.state[edited.params[0]]["H_diag"].mul_(3)
    edited.opt.state[edited.params[0]]["prev_flat_grad"].mul_(1.5)
    for run in (plain, edited):
        run.steps(1)
    assert not torch.equal(plain.params[0], edited.params[0])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@SEARCHES
def test_a_closure_that_raises_leaves_all_as_it_was(search, error):
    whole = Run(Ours, network, line_search_fn=search)
    whole.steps(4)
    run = Run(Ours, network, line_search_fn=search)

    def failing(at):
        calls = iter(range(100))

        def closure():
            if next(calls) == at:
                raise error("stop")
            return run.closure()

        return closure

    for step in range(4):
        state = copy.deepcopy(run.opt.state_dict())
        params = copy_of(run.params)
        for at in (0, 1, 3):
            with pytest.raises(error, match="stop"):
                run.opt.step(failing(at))
            assert_same(copy_of(run.params), params)
            assert_alike(run.opt.state_dict(), state, 0.0)
        assert bool(run.opt.state) == bool(step)
        run.opt.step(run.closure)
    assert_same(copy_of(run.params), copy_of(whole.params))


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


def test_errors_are_torchs():
    a, b = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    for cls in (Torch, Ours):
        with pytest.raises(ValueError, match="Invalid learning rate: -1"):
            cls([a], lr=-1)
        with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
            cls([a], lr=torch.ones(2))
        with pytest.raises(ValueError, match="doesn't support per-parameter options"):
            cls([{"params": [a]}, {"params": [b]}])
        opt = cls([a], line_search_fn="armijo")

        def closure(opt=opt):
            opt.zero_grad()
            loss = (a**2).sum()
            loss.backward()
            return loss

        with pytest.raises(RuntimeError, match="only 'strong_wolfe' is supported"):
            opt.step(closure)
        with pytest.raises(TypeError):
            opt.step()


def test_numbers_out_of_range_are_refused_at_construction():
    p = torch.nn.Parameter(torch.ones(2))
    for name, bad in (("history_size", 0), ("history_size", 2.5), ("max_iter", -1)):
        with pytest.raises(ValueError, match=f"{name} must be an integer .*, but got {bad}"):
            Ours([p], **{name: bad})
    with pytest.raises(ValueError, match="max_eval must be an integer of at least 0"):
        Ours([p], max_eval=-1)


def test_nothing_to_optimize_is_said():
    for nothing in ([], [torch.nn.Parameter(torch.ones(0, 2))]):
        with pytest.raises(ValueError, match="nothing to optimize"):
            Ours([{"params": nothing}]).step(lambda: torch.ones(()))


def test_a_second_group_is_refused_later_too():
    a, b = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    opt = Ours([a])
    with pytest.raises(ValueError, match="doesn't support per-parameter options"):
        opt.add_param_group({"params": [b]})
    assert len(opt.param_groups) == 1


def test_hooks_run_once_and_gradients_are_on():
    run = Run(Ours, network)
    calls = []
    run.opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    run.opt.register_step_post_hook(lambda *_: calls.append("post"))
    modes = []

    def closure():
        modes.append(torch.is_grad_enabled())
        return run.closure()

    with torch.no_grad():
        first = run.opt.step(closure)
    assert calls == ["pre", "post"]
    assert len(modes) > 2
    assert all(modes)
    assert_same(first.detach(), run.losses[0])


def test_a_first_point_that_is_good_enough_costs_one_evaluation():
    theirs, ours = pair(network, 1, tolerance_grad=1e3)
    assert ours.opt.state_dict()["state"] == {0: {"func_evals": 1, "n_iter": 0}}
    assert_agree(ours, theirs)


def test_names_are_kept():
    named = torch.nn.Linear(2, 1).named_parameters()
    assert Ours(named).param_groups[0]["param_names"] == ["weight", "bias"]


def test_parameters_of_two_precisions():
    for search in (None, "strong_wolfe"):
        theirs, ours = pair(two_precisions, line_search_fn=search)
        assert_agree(ours, theirs)


def test_integer_parameters_are_refused():
    with pytest.raises(TypeError, match="int64"):
        Ours([torch.ones(2, dtype=torch.int64)])


def test_as_parameters_keeps_strides_for_the_run():
    """The helper of this suite and this class agree on a tree of odd shapes."""
    shapes = {"m": torch.randn(4, 3).t(), "e": torch.empty(0, 2), "s": torch.tensor(0.5)}
    params = as_parameters(shapes)
    opt = Ours(params, line_search_fn="strong_wolfe")

    def closure():
        opt.zero_grad()
        loss = sum((p**2).sum() for p in params)
        loss.backward()
        return loss

    opt.step(closure)
    assert all(p.detach().abs().sum() < 1e-5 for p in params)
