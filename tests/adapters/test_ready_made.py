"""Optimizer objects that `make lists` writes: their functions, groups and checkpoints."""

import ast
import inspect
import math
import pickle
from pathlib import Path

import pytest
import torch
from algorithm_pages import CLASSES
from helpers import as_parameters, assert_close, copy_of, make_grads, make_params, run, step_object

import functional_optim as fo
from functional_optim import adapters
from functional_optim.adapters import ready_made
from functional_optim.adapters.ready_made import ReadyMade

MADE = [name for name in CLASSES if issubclass(getattr(adapters, CLASSES[name]), ReadyMade)]

every = pytest.mark.parametrize("name", MADE)
without_loss = pytest.mark.parametrize("name", [n for n in MADE if not getattr(fo, n)().required])


DIMS = dict.fromkeys(("adamuon", "dion2", "normuon", "kl_shampoo", "kl_soap"), (2, 2))
DIMS |= dict.fromkeys(("apollo", "galore", "psgd_kron", "scion", "shampoo", "soap"), (0, 2))
"""Of the parameters that an algorithm takes, the least and the largest number of dimensions."""


def params_of(name):
    least, most = DIMS.get(name, (0, 4))
    return {key: p for key, p in make_params().items() if least <= p.dim() <= most}


def make(name, params, **hyper):
    return getattr(adapters, CLASSES[name])(params, compile=False, **hyper)


@without_loss
def test_it_steps_as_its_function(name):
    params = params_of(name)
    grads = make_grads(params, 4)
    mine = as_parameters(params)
    step_object(opt := make(name, list(zip(params, mine, strict=True))), grads)
    moved, state = run(getattr(fo, name)(), params, grads)
    assert_close(copy_of(mine), list(moved.values()), 1e-12)
    for key, tree in state.slots.items() if isinstance(state, fo.State) else ():
        assert_close([opt.state[p].get(key) for p in mine], list(tree.values()), 1e-12)
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.state_dict()["param_groups"][0].keys() >= opt.defaults.keys()


@every
def test_wrong_arguments_are_said_at_once(name):
    (w,) = as_parameters({"w": torch.ones(2)})
    with pytest.raises(TypeError, match="nonsense"):
        make(name, [w], nonsense=1)
    with pytest.raises(TypeError, match="nonsense"):
        make(name, [{"params": [w], "nonsense": 1}])
    with pytest.raises(ValueError, match="compile"):
        getattr(adapters, CLASSES[name])([w], compile="sometimes")


STUB = ast.parse(Path(ready_made.__file__).with_suffix(".pyi").read_text())


@pytest.mark.parametrize(
    ("home", "name"),
    [("one_rate", "Prodigy"), ("schedule_free", "ScheduleFreeSGD"), ("of_matrices", "SOAP")],
)
def test_pickles_of_an_old_version_find_their_classes(home, name):
    text = f"cfunctional_optim.adapters.{home}\n{name}\n.".encode()
    assert pickle.loads(text) is getattr(adapters, name)


PARENTS = {"ReadyMade", "OneRate", "ScheduleFree"}
STUBS = {x.name: x for x in STUB.body if isinstance(x, ast.ClassDef) and x.name not in PARENTS}


def test_the_stub_has_all_classes():
    assert STUBS.keys() == set(ready_made.CLASSES)


@pytest.mark.parametrize("name", STUBS)
def test_the_stub_says_what_a_class_takes(name):
    (init,) = [x for x in STUBS[name].body if isinstance(x, ast.FunctionDef)]
    given = init.args
    known = [*inspect.signature(getattr(adapters, name)).parameters.values()]
    assert [x.arg for x in (*given.args, *given.kwonlyargs)] == ["self", *[x.name for x in known]]
    defaults = [x for x in (*given.defaults, *given.kw_defaults) if x is not None]
    mine = [x.default for x in known if x.default is not inspect.Parameter.empty]
    assert [eval(ast.unparse(x), {"torch": torch, "math": math}) for x in defaults] == mine
    annotations = [ast.unparse(x.annotation) for x in (*given.args[1:], *given.kwonlyargs)]
    assert annotations == [x.annotation for x in known]


# ---------------------------------------------------------------- one learning rate for all groups
ONE_RATE = {"prodigy": adapters.Prodigy, "dadapt_adam": adapters.DAdaptAdam}
one_rate = pytest.mark.parametrize("name", ONE_RATE)


@one_rate
def test_two_learning_rates_raise_and_zero_does_not(name):
    mine = as_parameters(make_params())
    groups = [{"params": mine[:3], "lr": 0.5}, {"params": mine[3:], "lr": 0.25}]
    opt = ONE_RATE[name](groups, compile=False)
    before = copy_of(mine)
    with pytest.raises(RuntimeError, match=r"learning rates \[0.25, 0.5\]; give all of them"):
        step_object(opt, make_grads(make_params(), 1))
    assert_close(copy_of(mine), before, 0.0)
    opt.param_groups[1]["lr"] = 0.0
    step_object(opt, make_grads(make_params(), 2))
    assert_close(copy_of(mine[3:]), before[3:], 0.0)
    assert not torch.equal(mine[2], before[2])


@one_rate
def test_groups_with_other_decay_share_the_estimate(name):
    """As a trainer makes them: decay for some, none for others."""
    params = make_params()
    grads = make_grads(params, 6)
    names = list(params)
    tx = fo.partition({"a": getattr(fo, name)(d0=0.1, decouple=True), "b": fo.freeze()}, {"*": "a"})
    plain, state = run(tx, params, grads)
    mine = as_parameters(params)
    groups = [{"params": mine[:3]}, {"params": mine[3:]}]
    opt = ONE_RATE[name](groups, d0=0.1, decouple=True, compile=False)
    opt.param_groups[0]["weight_decay"] = 1e-9  # another rule, of equal effect
    step_object(opt, grads)
    found = {float(opt.state[p]["d"]) for p in mine}
    assert max(found) == pytest.approx(float(fo.get(state, "d")), rel=1e-6)
    assert max(found) == pytest.approx(min(found), rel=1e-9)
    assert max(found) > 0.1
    assert_close(copy_of(mine), [plain[key] for key in names], 1e-6)


@one_rate
def test_a_late_parameter_takes_over_the_estimate(name):
    mine = as_parameters(make_params())
    opt = ONE_RATE[name](mine, d0=0.1, compile=False)
    grads = [list(tree.values()) for tree in make_grads(make_params(), 5)]
    step_object(opt, [[None, *tree[1:]] for tree in grads[:4]])
    step_object(opt, grads[4:])
    assert float(opt.state[mine[0]]["d"]) == float(opt.state[mine[2]]["d"]) >= 0.1


@one_rate
def test_a_growth_without_a_bound_has_a_meta_gradient(name):
    params = make_params()
    lr = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    moved, _ = run(getattr(fo, name)(lr, d0=0.05), params, make_grads(params, 4))
    slope = torch.autograd.grad(sum(p.sum() for p in moved.values()), lr)[0]
    assert torch.isfinite(slope)
    assert slope != 0


@one_rate
def test_gradients_of_zero_count_for_nothing(name):
    w = torch.ones(3, dtype=torch.float64)
    tx = getattr(fo, name)(weight_decay=0.5, decouple=True)
    moved, state = run(tx, w, [torch.zeros_like(w)] * 3)
    assert torch.equal(moved, w)
    assert float(fo.get(state, "d")) == 1e-6
