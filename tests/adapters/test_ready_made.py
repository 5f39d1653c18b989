"""Optimizer objects that `make lists` writes: their functions, groups and checkpoints."""

from __future__ import annotations

import ast
import copy
import inspect
import io
import math
import pickle
from pathlib import Path

import pytest
import torch
from algorithm_pages import CLASSES
from helpers import (
    as_parameters,
    assert_close,
    assert_same,
    copy_of,
    make_grads,
    make_params,
    run,
    step_object,
)

import functional_optim as fo
from functional_optim import adapters
from functional_optim.adapters import ready_made
from functional_optim.adapters.ready_made import ReadyMade

MADE = [name for name in CLASSES if issubclass(getattr(adapters, CLASSES[name]), ReadyMade)]

every = pytest.mark.parametrize("name", MADE)
without_loss = pytest.mark.parametrize("name", [n for n in MADE if not getattr(fo, n)().required])


DIMS = dict.fromkeys(("adamuon", "dion2", "normuon", "kl_shampoo", "kl_soap"), (2, 2))
DIMS["soap"] = (0, 2)
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


@without_loss
def test_it_goes_on_from_a_checkpoint_a_copy_and_a_pickle(name):
    params = params_of(name)
    grads = make_grads(params, 5)
    through = as_parameters(params)
    step_object(make(name, through), grads)

    def go_on(how):
        mine = as_parameters(params)
        step_object(opt := make(name, mine), grads[:2])
        mine, opt = how(mine, opt)
        step_object(opt, grads[2:])
        return copy_of(mine)

    def loaded(mine, opt):
        file = io.BytesIO()
        torch.save(opt.state_dict(), file)
        file.seek(0)
        other = make(name, mine)
        other.load_state_dict(torch.load(file, weights_only=True))
        return mine, other

    for how in (
        loaded,
        lambda *both: copy.deepcopy(both),
        lambda *x: pickle.loads(pickle.dumps(x)),
    ):
        assert_same(go_on(how), copy_of(through))


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


PARENTS = {"ReadyMade", "OneRate"}
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
