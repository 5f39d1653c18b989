"""What all optimizer objects promise: closures and hooks, copies and checkpoints, whole changes."""

import copy
import functools
import inspect
import pickle
from contextlib import suppress

import optree
import processes
import pytest
import search_cases
import torch
from helpers import assert_same, through_file
from interrupted import flags, interrupt

import functional_optim as fo
from functional_optim import adapters
from functional_optim.adapters.state.transaction import transaction

pytestmark = pytest.mark.usefixtures("pythons_own_handler")

MAKERS = {
    "drop-in": lambda params: adapters.AdamW(params, lr=0.1, compile=False),
    "recipe": lambda params: adapters.Optimizer(params, fo.adamw, lr=0.1, compile=False),
    "lbfgs": lambda params: adapters.LBFGS(
        params, lr=0.1, max_iter=2, line_search_fn="strong_wolfe"
    ),
    "gradient-free": lambda params: adapters.GradientFree(
        params, fo.search.snes, population=4, sigma=0.5
    ),
    "stub": lambda params: adapters.OptimizerStub(params, lr=0.1, momentum=0.5),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)

NAMES = [name for name in sorted(adapters.__all__) if name[0].isupper()]
CLASSES = {
    name: functools.partial(getattr(adapters, name), compile=False)
    for name in NAMES
    if "compile" in inspect.signature(getattr(adapters, name)).parameters
    and name not in ("Optimizer", "AveragingOptimizer", "MuonAdamW", "SparseAdam")
}
OF_RESIDUALS = ("Dogleg", "GaussNewton", "LevenbergMarquardt")
ALL = {
    **MAKERS,
    **CLASSES,
    "lbfgs without a search": lambda params: adapters.LBFGS(params, lr=0.1, max_iter=4),
    "SSBFGS": lambda params: adapters.SSBFGS(params, max_iter=2),
    "SSBroyden": lambda params: adapters.SSBroyden(params, max_iter=2),
    "MuonAdamW": lambda params: adapters.MuonAdamW(
        [(f"{i}.up.weight", p) for i, p in enumerate(params)], compile=False
    ),
    "packed": lambda params: adapters.AdamW(params, compile=False, stored=in_int8),
    "no hyperparameters": lambda params: adapters.Optimizer(params, fo.identity),
    **{name: getattr(adapters, name) for name in OF_RESIDUALS},
    **{
        name: lambda params, name=name: free(params, search_cases.make(name))
        for name in search_cases.CASES
    },
    "method and tx": lambda params: free(
        params, fo.search.openai_es, population=6, sigma=0.1, tx=fo.adam, lr=0.1
    ),
    "spsa": lambda params: free(params, fo.estimators.spsa(samples=3), tx=fo.sgd, lr=0.1),
    "mezo": lambda params: free(params, fo.mezo, tx=fo.sgd, lr=0.1),
}


def free(params, method, **more):
    """With a seed that no float32 holds."""
    return adapters.GradientFree(params, method, seed=2**40 + 1, **more)


def in_int8(tx):
    return fo.stored(tx, "int8", block_size=16, min_size=0)


def matrix():
    return torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, -5.0]]))


def stepped(opt, steps=1, seen=None, fails_at=None):
    """Steps with a closure; seen: gets the mode that each call of it is in."""
    (w,) = opt.param_groups[0]["params"]
    seen = [] if seen is None else seen

    def closure():
        if len(seen) == fails_at:
            raise KeyboardInterrupt
        seen.append(torch.is_grad_enabled())
        opt.zero_grad()
        if type(opt).__name__ in OF_RESIDUALS:
            return w.flatten()
        loss = w.square().sum()
        if not isinstance(opt, adapters.GradientFree):
            loss.backward()
        return loss

    return [opt.step(closure) for _ in range(steps)]


def trained(make, steps):
    """An optimizer object that has made a few steps."""
    stepped(opt := make([matrix()]), steps)
    return opt


def everything(opt):
    """What a transaction restores, as a text that can be compared."""
    plain = {key: x for key, x in sorted(vars(opt).items()) if isinstance(x, (bool, int, str))}
    every = [opt.state_dict(), opt.defaults, sorted(vars(opt)), plain]
    return str(optree.tree_map(lambda x: x.tolist() if isinstance(x, torch.Tensor) else x, every))


def loaded(opt, make):
    """Another one, of what a file brings of this one."""
    (w,) = opt.param_groups[0]["params"]
    saved = through_file({"w": w.detach(), "opt": opt.state_dict()})
    other = make([torch.nn.Parameter(saved["w"])])
    other.load_state_dict(saved["opt"])
    return other


WAYS = {
    "copy": lambda opt, make: copy.deepcopy(opt),
    "pickle": lambda opt, make: pickle.loads(pickle.dumps(opt)),
    "checkpoint": loaded,
}


@pytest.mark.parametrize("begun", [2, 0])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ALL)
def test_it_goes_on_from_a_copy_a_pickle_and_a_checkpoint(name, way, begun):
    opt = trained(ALL[name], begun)
    twin = WAYS[way](opt, ALL[name])
    assert type(twin) is type(opt)
    assert twin.defaults == opt.defaults
    (w,), (other,) = opt.param_groups[0]["params"], twin.param_groups[0]["params"]
    left = w.detach().clone()
    losses = stepped(twin, 2)
    assert torch.equal(w.detach(), left)
    assert_same([x.detach() for x in losses], [x.detach() for x in stepped(opt, 2)])
    assert torch.equal(w.detach(), other.detach())
    assert_same(twin.state_dict()["state"], opt.state_dict()["state"])


def step_each(rank, opts):
    """Steps in another process, whose parameters are in shared memory."""
    for opt in opts:
        stepped(opt)
    return [opt.state_dict()["state"] for opt in opts]


def test_objects_that_have_stepped_go_on_in_a_spawned_process(tmp_path):
    names = "recipe", "lbfgs", "gradient-free", "NAdam", "SOAP", "MuonAdamW", "packed"
    opts = [trained(ALL[name], 2) for name in names]
    twins = [copy.deepcopy(opt) for opt in opts]
    (states,) = processes.collect(1, step_each, opts, folder=tmp_path)
    assert_same(states, step_each(0, twins))
    for opt, twin in zip(opts, twins, strict=True):
        assert torch.equal(opt.param_groups[0]["params"][0], twin.param_groups[0]["params"][0])


SHALLOW = {
    **MAKERS,
    "compiled": adapters.NAdam,
    **{name: ALL[name] for name in ("SAM", "SSBFGS", "MuonAdamW", "ScheduleFreeAdamW", "packed")},
}


@pytest.mark.parametrize("make", SHALLOW.values(), ids=SHALLOW)
def test_a_shallow_copy_goes_on_with_the_same_state_and_groups(make):
    opt, other = trained(make, 2), trained(make, 5)
    twin = copy.copy(opt)
    for one in (opt, twin, opt):
        stepped(one)
    assert twin.param_groups is opt.param_groups
    for one in (opt, twin):
        assert_same(one.state_dict()["state"], other.state_dict()["state"])
    assert torch.equal(opt.param_groups[0]["params"][0], other.param_groups[0]["params"][0])


@pytest.mark.parametrize("begun", [1, 0])
@pytest.mark.parametrize("name", ALL)
def test_a_closure_that_raises_leaves_all_as_it_was(name, begun):
    calls, whole = [], trained(ALL[name], begun)
    stepped(whole, 1, calls)
    opt = trained(ALL[name], begun)
    (w,) = opt.param_groups[0]["params"]
    before, saved = w.detach().clone(), copy.deepcopy(opt.state_dict())
    for at in sorted({0, len(calls) // 2, len(calls) - 1}):
        with pytest.raises(KeyboardInterrupt):
            stepped(opt, fails_at=at)
        assert torch.equal(w.detach(), before)
        assert_same(opt.state_dict()["state"], saved["state"])
    stepped(opt)
    assert torch.equal(w, whole.param_groups[0]["params"][0])
    assert_same(opt.state_dict()["state"], whole.state_dict()["state"])


@every_maker
def test_a_step_calls_its_closure_between_the_hooks_and_returns_its_loss(make):
    opt, seen = make([matrix()]), []
    opt.register_step_pre_hook(lambda *_: seen.append("pre"))
    opt.register_step_post_hook(lambda *_: seen.append("post"))
    free = isinstance(opt, adapters.GradientFree)
    with torch.no_grad(), torch.profiler.profile(acc_events=True) as profile:
        (found,) = stepped(opt, 1, seen)
    assert seen.pop(0) == "pre"
    assert seen.pop() == "post"
    assert set(seen) == {not free}
    assert len(seen) == 1 or free or isinstance(opt, torch.optim.LBFGS)
    assert free or found.item() == matrix().square().sum().item()
    kind = type(opt).__name__
    assert any(e.key == f"Optimizer.step#{kind}.step" for e in profile.key_averages())


@every_maker
def test_an_interrupted_load_is_complete_or_has_never_been(make):
    saved = copy.deepcopy(trained(make, 3).state_dict())
    saved["param_groups"][0]["lr"] = 0.25
    opt = trained(make, 1)
    before = everything(opt)
    opt.load_state_dict(saved)
    after = everything(opt)
    assert before != after
    at, reached, undone = 1, True, 0
    usual = flags()
    while reached:
        opt = trained(make, 1)
        raised, reached = interrupt(lambda: opt.load_state_dict(saved), at)  # noqa: B023
        assert raised == reached
        assert flags() == usual
        found = everything(opt)
        if raised and found == before:
            undone += 1
        else:
            assert found == after
        at += 37
    assert undone > 2


@pytest.mark.parametrize("name", ["drop-in", "recipe", "stub"])
def test_an_interrupted_group_is_complete_or_was_never_added(name):
    group = {"params": [torch.ones(3)], "lr": 0.5}
    at, reached, counts = 1, True, set()
    while reached:
        opt = trained(MAKERS[name], 1)
        before = everything(opt)
        _, reached = interrupt(lambda: opt.add_param_group(dict(group)), at)  # noqa: B023
        counts.add(len(opt.param_groups))
        if len(opt.param_groups) == 1:
            assert everything(opt) == before
        at += 29
    assert counts == {1, 2}


def test_all_that_a_failed_change_did_to_an_optimizer_is_undone():
    opt = trained(MAKERS["drop-in"], 1)
    before, groups, state = everything(opt), opt.param_groups, opt.state

    def change(value):
        opt.own = value
        opt.state, opt.param_groups = {}, []
        groups.append({"params": []})
        opt.defaults["lr"] = value
        opt.defaults["another"] = value
        del opt.compile
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transaction(opt, change, 1.0)
    assert opt.param_groups is groups
    assert opt.state is state
    assert everything(opt) == before
    assert not hasattr(opt, "own")


def test_a_failed_change_is_undone_if_an_interrupt_comes_too():
    def change(value):
        opt.own = value
        raise ValueError

    def failing():
        with suppress(ValueError):
            transaction(opt, change, 1.0)

    opt = trained(MAKERS["drop-in"], 1)
    at, reached = 1, True
    while reached:
        _, reached = interrupt(failing, at)
        assert not hasattr(opt, "own"), at
        at += 1


def test_a_load_that_torch_refuses_half_way_leaves_the_defaults():
    """torch's own __setstate__ adds an entry to them before it finds what is missing."""
    opt = trained(MAKERS["drop-in"], 1)
    saved = copy.deepcopy(opt.state_dict())
    for state in saved["state"].values():
        del state["step"]
    before = everything(opt)
    with pytest.raises(ValueError, match="step"):
        opt.load_state_dict(saved)
    assert everything(opt) == before


@pytest.mark.parametrize("name", ["SSBFGS", "SSBroyden", "LevenbergMarquardt", "Dogleg"])
@pytest.mark.parametrize("frozen", [0, 1])
def test_an_optimizer_of_all_parameters_at_once_says_that_they_are_others(name, frozen):
    params = [torch.nn.Parameter(torch.full((n,), 3.0)) for n in (2, 3)]
    opt = getattr(adapters, name)(params)

    def closure():
        residuals = torch.cat([p - 1 for p in params]).square()
        if not name.startswith("SS"):
            return residuals
        opt.zero_grad()
        residuals.sum().backward()
        return residuals.sum()

    opt.step(closure)
    params[frozen].requires_grad_(False)
    before = everything(opt)
    with pytest.raises(RuntimeError, match=rf"{name} has a state for other .*frozen, unfrozen or"):
        opt.step(closure)
    assert everything(opt) == before
    params[frozen].requires_grad_(True)
    opt.step(closure)
    opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(RuntimeError, match=rf"{name} has a state for other .*create a new"):
        opt.step(closure)


@pytest.mark.parametrize("kind", [float, lambda x: str(x)])
def test_a_matrix_of_a_checkpoint_that_is_none_is_refused(kind):
    opt = trained(ALL["SSBFGS"], 1)
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["inverse_hessian"] = kind(1.0)
    before = everything(opt)
    with pytest.raises(ValueError, match=r"inverse_hessian is a .*, but it needs a tensor"):
        opt.load_state_dict(saved)
    assert everything(opt) == before


def test_parameters_that_never_step_may_be_integers():
    """As those of a model whose base is quantised."""
    base = torch.nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)
    w = torch.nn.Parameter(torch.ones(2))
    opt = adapters.AdamW([base, w], lr=0.1)
    w.grad = torch.ones(2)
    opt.step()
    assert base.tolist() == [1, 1]
    assert w.max() < 1


def test_a_list_of_parameters_may_be_a_module():
    params = torch.nn.ParameterList([torch.ones(2)])
    assert adapters.AdamW(params).param_groups[0]["params"] == [*params]


def test_a_count_that_was_cast_to_half_precision_counts_on():
    """As in a checkpoint that was cast as a whole."""
    opt = trained(MAKERS["drop-in"], 1)
    saved = opt.state_dict()
    for mine in saved["state"].values():
        mine["step"] = torch.tensor(256.0, dtype=torch.bfloat16)  # which has no 257
    opt.load_state_dict(saved)
    opt.step()
    assert opt.numbers("step") == {"step": 257.0}
