"""New numbers in a parameter group: as if the recipe were called at every step, bit for bit."""

import contextlib
import copy
import ctypes
import functools
import inspect
import math
import pickle
from typing import NamedTuple

import cases
import made
import numpy as np
import optree
import pytest
import torch
from combined import conditional, named_params, partitioned, with_norms
from helpers import as_parameters, assert_close, assert_same, clone, make_params

import functional_optim as fo
from functional_optim import adapters, numeric
from functional_optim.core.leafwise import Leafwise

STEPS = 6


def stepped(opt, set_numbers, *, again, steps=STEPS):
    """Parameters and state after some steps. again: build everything anew at each step."""
    params = [p for group in opt.param_groups for p in group["params"]]
    torch.manual_seed(7)
    for step in range(steps):
        for p in params:
            p.grad = torch.randn_like(p)
        if again:
            vars(opt).pop("_plan", None)
        opt.step(lambda: 1.0)
        set_numbers(opt, step)
    return [p.detach() for p in params], [opt.state[p] for p in params]


def making(recipe, params=make_params, **hyper):
    """A function that makes an optimizer of new parameters."""
    return lambda: adapters.Optimizer(as_parameters(params()), recipe, compile=False, **hyper)


def check_steps(make, set_numbers, steps=STEPS):
    """Steps of one plan and of a new plan at each step are equal; returns the first optimizer."""
    opt = make()
    mine = stepped(opt, set_numbers, again=False, steps=steps)
    assert_same(*map(clone, (mine, stepped(make(), set_numbers, again=True, steps=steps))))
    return opt


def calls_in_later_steps(recipe, set_numbers, params=None, **hyper):
    """How often a recipe is called in ten steps, after some that have changed its numbers."""
    calls = []

    @functools.wraps(recipe)
    def counted(*args, **kwargs):
        calls.append(1)
        return recipe(*args, **kwargs)

    known = as_parameters(make_params()) if params is None else params
    opt = adapters.Optimizer(known, counted, compile=False, **hyper)
    stepped(opt, set_numbers, again=False, steps=3)
    calls.clear()
    stepped(opt, set_numbers, again=False, steps=10)
    return len(calls)


def new_lr(opt, step):
    for group in opt.param_groups:
        group["lr"] = 0.1 / (2 + step)


@pytest.mark.parametrize("case", cases.able("object", costly=True))
def test_every_number_of_every_recipe(case):
    knobs, make = case.knobs(float), making(case.recipe, case.params, **case.hyper)

    def one_after_the_other(opt, step):
        name = list(knobs)[step % len(knobs)]
        scale = 1 - 0.01 * (1 + step)
        opt.param_groups[0][name] = optree.tree_map(lambda x: x * scale, knobs[name])

    check_steps(make, one_after_the_other, steps=2 * len(knobs) + 2)

    def all_at_once(opt, step):
        scale = 1 - 0.01 * (1 + step)
        opt.param_groups[0].update(optree.tree_map(lambda x: x * scale, knobs))

    check_steps(make, all_at_once)


def numbers_of(tx):
    """A factory as a recipe of its numbers, and these."""
    call = tx.made
    given = inspect.signature(call.factory).bind(*call.args, **call.kwargs)
    given.apply_defaults()
    numbers = {name: x for name, x in given.arguments.items() if type(x) is float}

    def recipe(**changed):
        given.arguments.update(changed)
        return call.factory(*given.args, **given.kwargs)

    return recipe, numbers


ROWS = {x.values[0].recipe.__name__ for x in cases.able("object", costly=True) if not x.marks}
EXAMPLES = {
    name: numbers_of(tx)
    for name, tx in made.examples().items()
    if name not in ROWS and isinstance(tx, Leafwise) and set(tx.required) <= {"value"}
}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if EXAMPLES[name][1]])
def test_every_number_of_every_other_factory(name):
    recipe, numbers = EXAMPLES[name]
    make = making(recipe, lambda: {"a": torch.ones(3, 4), "b": torch.eye(2) + 0.1}, **numbers)

    def one_after_the_other(opt, step):
        key = list(numbers)[step % len(numbers)]
        opt.param_groups[0][key] = numbers[key] * (1 - 0.01 * (1 + step))

    check_steps(make, one_after_the_other, steps=2 * len(numbers) + 2)


@pytest.mark.parametrize("case", cases.able("object", costly=True))
def test_numbers_that_become_zero_and_come_back(case):
    names = {"lr", "weight_decay", "lr_decay", "factor"} & {*case.hyper}
    if not case.hyper.get("nesterov"):
        names |= {"momentum", "dampening"} & {*case.hyper}

    def switch(opt, step):
        for name in sorted(names):
            opt.param_groups[0][name] = case.hyper[name] * (0.0, 0.5, 0.25, 0.0)[step % 4]

    check_steps(making(case.recipe, case.filled, **case.hyper), switch, steps=9)


# their states begin with a number that is computed from lr
REBUILT = {"asgd", "rprop", "composed"}


@pytest.mark.parametrize("case", cases.able("object", costly=True))
def test_a_new_learning_rate_calls_no_recipe(case):
    calls = calls_in_later_steps(case.recipe, new_lr, as_parameters(case.params()), **case.hyper)
    assert (calls == 0) == (case.name not in REBUILT), calls


@pytest.mark.parametrize("recipe", [partitioned, with_norms, conditional])
def test_combined_recipes(recipe):
    def params():
        return [(name, torch.nn.Parameter(p)) for name, p in named_params().items()]

    check_steps(lambda: adapters.Optimizer(params(), recipe, lr=0.1, compile=False), new_lr)
    assert calls_in_later_steps(recipe, new_lr, params(), lr=0.1) < 5


def test_groups_and_tensors():
    """One group's number changes, one is a tensor that is written in place, a pair is a list."""

    def make():
        first, *rest = as_parameters(make_params())
        groups = [{"params": [first]}, {"params": rest, "lr": torch.tensor(0.1)}]
        return adapters.Adam(groups, lr=0.1, compile=False)

    def change(opt, step):
        opt.param_groups[0]["lr"] = 0.1 / (1 + step)
        opt.param_groups[1]["lr"].fill_(0.2 / (1 + step))
        opt.param_groups[1]["betas"] = [0.9 - 0.1 * (step == 2), 0.99]

    check_steps(make, change)


def test_numbers_that_become_something_else():
    def change(opt, step):
        kinds = (0.2, 0.1, 1, 2, torch.tensor(0.1), fo.schedules.linear(0.1, 0.0, 9), 0.3, True)
        opt.param_groups[0]["lr"] = kinds[step % 8]
        if step == 4:
            opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.1})

    def run(again):
        opt = making(fo.sgd, lr=0.1, momentum=0.5)()
        state = stepped(opt, change, again=again, steps=4)
        change(opt, 4)
        return clone((state, stepped(opt, change, again=again, steps=9)))

    assert_same(*map(run, (False, True)))


def reading(lr):
    return fo.sgd(min(numeric.at(lr, 1), 0.04))


def catching(lr):
    with contextlib.suppress(TypeError):
        lr = 0.04 if lr > 0.04 else lr
    return fo.sgd(lr)


def exact(lr):
    return fo.sgd(min(lr, 0.04) if type(lr) is float else lr)


def matching(lr):
    match lr:
        case float():
            return fo.sgd(min(lr, 0.04))
        case _:
            return fo.sgd(lr)


@functools.singledispatch
def for_class(lr):
    return lr


@for_class.register
def _(lr: float):
    return min(lr, 0.04)


def scaled(scalars):
    """A rule that returns its number as it is."""
    return fo.leafwise(None, lambda u, slots, p, a: (-a * u, slots), scalars)


class Bounded:
    """Recipes whose helpers are methods."""

    def clamp(self, lr):
        return min(lr, 0.04) if isinstance(lr, float) else lr

    @classmethod
    def through(cls, lr):
        return cls().clamp(lr)

    def __call__(self, lr):
        return fo.sgd(self.through(lr))

    def recipe(self, lr):
        return fo.sgd(self.clamp(lr))


bounded = Bounded()
remembered = functools.cache(bounded.clamp)

LOOKING = {
    "a method": bounded.recipe,
    "a method of a global": lambda lr: fo.sgd(bounded.clamp(lr)),
    "a class method": lambda lr: fo.sgd(Bounded.through(lr)),
    "a call of an object": lambda lr: bounded(lr),
    "a cached helper": lambda lr: fo.sgd(remembered(lr)),
    "limited": lambda lr: fo.sgd(min(lr, 0.04)),
    "branching": lambda lr: fo.sgd(lr, momentum=0.9) if lr > 0.04 else fo.adam(lr),
    "computing": lambda lr: fo.chain(fo.add_decayed_weights(0.1), fo.scale_by_lr(2 * lr)),
    "converting": lambda lr: fo.sgd(float(lr)),
    "reading": reading,
    "catching": catching,
    "exact": exact,
    "asking in a helper": lambda lr: exact(lr),
    "typed": lambda lr: fo.sgd(fo.schedules.linear(lr, 0.0, 100) if isinstance(lr, float) else lr),
    "clipped": lambda lr: fo.sgd(min(lr, 0.04) if isinstance(lr, float) else lr),
    "matching": matching,
    "dispatching": lambda lr: fo.sgd(for_class(lr)),
    "callable or not": lambda lr: fo.sgd(lr if callable(lr) else fo.schedules.linear(lr, 0.0, 100)),
    "late": lambda lr: fo.sgd(lambda count: lr if count < 4 else 0.5 * lr),
    "stored": lambda lr: fo.sgd(torch.tensor(lr)),
    "raw": lambda lr: scaled(lambda t: (lr,)),
    "raw product": lambda lr: scaled(lambda t: (lr * 2 if t > 4 else 0.1,)),
    "cached": functools.cache(lambda lr: fo.sgd(lr)),
    "from a dict": lambda lr: fo.sgd({0.1: 0.2}.get(lr, 0.3)),
}


@pytest.mark.parametrize("name", LOOKING)
def test_recipes_that_look_at_a_number(name):
    def change(opt, step):
        opt.param_groups[0]["lr"] = (0.02, 0.03, 0.01, 0.1, 0.2, 0.02)[step % 6]

    check_steps(making(LOOKING[name], lr=0.03), change, steps=12)


def test_an_equal_number_of_another_class_is_a_new_number():
    def recipe(lr):
        return fo.sgd(0.5 * lr if isinstance(lr, int) else lr)

    single = np.float32(0.1)  # which is equal to 0.1, but not the same number
    for numbers in ([1.0, 1, 1.0], [0.1, single, 0.1]):
        check_steps(
            making(recipe, lr=numbers[0]),
            lambda opt, step, numbers=numbers: opt.param_groups[0].update(lr=numbers[step % 3]),
        )


class Betas(NamedTuple):
    first: object
    second: object


def test_hyperparameters_keep_their_class():
    """A NamedTuple, such as a transformation, is not handed to the recipe as a plain tuple."""

    def recipe(betas, inner):
        return fo.chain(inner, fo.scale_by_adam(betas=(betas.first, betas.second)), fo.scale(-0.1))

    def make():
        betas = Betas(torch.tensor(0.9, dtype=torch.float64), 0.99)
        inner = fo.clip_by_global_norm(1.0)
        params = as_parameters(make_params())
        return adapters.Optimizer(params, recipe, betas=betas, inner=inner, compile=False)

    check_steps(make, lambda opt, k: opt.param_groups[0]["betas"].first.fill_(0.5 + 0.1 * k))


def test_a_recipe_with_some_arguments_given_calls_nothing():
    opt = making(functools.partial(fo.sgd, momentum=0.9), lr=0.1)()
    stepped(opt, new_lr, again=False)
    assert vars(opt)["_plan"].placeholders[0].known.keys() == {"lr"}


def test_a_number_that_cannot_be_replaced_does_not_hold_up_another():
    def recipe(lr, decay):
        return fo.sgd(lr, weight_decay=2 * decay)

    def change(opt, step):
        opt.param_groups[0]["lr"] = 0.1 / (2 + step)
        if step < 2:
            opt.param_groups[0]["decay"] = 0.1 / (2 + step)

    check_steps(making(recipe, lr=0.1, decay=0.1), change)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_read_their_own_groups(way):
    opt, again = (making(fo.adamw, lr=0.1)() for _ in range(2))
    stepped(opt, new_lr, again=False)
    other = way(opt)
    assert "_plan" not in vars(other)
    stepped(other, lambda opt, step: opt.param_groups[0].update(lr=9.0), again=False)
    assert opt.param_groups[0]["lr"] == 0.1 / (1 + STEPS)
    stepped(again, new_lr, again=True)
    runs = [stepped(x, new_lr, again=False) for x in (opt, again)]
    assert_same(*map(clone, runs))


def test_what_a_recipe_makes_in_a_step_remembers_no_call():
    """Recording costs as much as building; nobody copies the transformation of a step."""
    built = []

    def recipe(lr):
        built.append(fo.sgd(lr))
        return built[-1]

    opt = adapters.Optimizer(as_parameters(make_params()), recipe, lr=0.1, compile=False)
    assert all(tx.made is not None for tx in built)
    del built[:]
    stepped(opt, new_lr, again=False)
    assert built
    assert all(tx.made is None for tx in built)
    assert fo.sgd(0.1).made is not None


# ---------------------------------------------------------------- what stands for a number
def test_placeholders_refuse_everything_that_depends_on_the_number():
    uses = [
        lambda x: x + 1, lambda x: 1 - x, lambda x: 2.0 * x, lambda x: x**2, lambda x: -x, abs,
        lambda x: x > 0, lambda x: x == 0.5, lambda x: x != 0.5, bool, float, int, hash, str, repr,
        round, lambda x: f"{x:.2f}", lambda x: max(x, 0.1), lambda x: x in (0.1, 0.2),
        math.sqrt, math.isnan, lambda x: torch.ones(1) * x, lambda x: x.is_integer(),
        lambda x: x.real, lambda x: numeric.at(x, 1.0), copy.copy, copy.deepcopy,
        pickle.dumps, numeric.is_static,
    ]  # fmt: skip
    for use in uses:
        x = numeric.Placeholder(0.5)
        with pytest.raises(TypeError, match="may change at each step"):
            use(x)
        assert x.refused


def written_elsewhere(x, y):
    """Write y into x as a collective or another process does: torch counts no write."""
    version = x._version
    laid_out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu").copy_(y)
    ctypes.memmove(x.data_ptr(), laid_out.data_ptr(), x.numel() * x.element_size())
    assert x._version == version


@pytest.mark.parametrize("compile", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("name", ["adam", "nadam", "prodigy", "mechanize", "composed"])
def test_a_state_that_another_process_has_written(name, compile):
    """As by torch.distributed.broadcast: the step count and carried scalars count, too."""
    (case,) = [x for x in cases.CASES if x.name == name]
    every = [as_parameters(make_params()) for _ in range(2)]
    opts = [adapters.Optimizer(params, lambda: case.tx(), compile=compile) for params in every]
    stepped(opts[0], lambda *_: None, again=False, steps=4)
    stepped(opts[1], lambda *_: None, again=False, steps=7)
    for mine, theirs in zip(*map(list, every), strict=True):
        written_elsewhere(mine, theirs.detach())
        for key, x in opts[1].state[theirs].items():
            written_elsewhere(opts[0].state[mine][key], x)
    found = [clone(stepped(opt, lambda *_: None, again=False, steps=3)) for opt in opts]
    assert_same(*found)


def test_a_functional_state_that_another_process_has_written():
    tx, params = fo.nadam(), make_params()
    grads = fo.tree.map(torch.ones_like, params)
    states = []
    for step in (fo.compile(tx), tx.update):
        w, state = clone(params), tx.init(params)
        for k in range(4):
            if k == 2:
                fo.tree.map(written_elsewhere, w, params)
                written_elsewhere(state.step, torch.full_like(state.step, 100))
                mu = fo.get(state, "mu_product")
                written_elsewhere(mu, torch.full_like(mu, 0.5))
            found, state = step(grads, state, w)
            w = found if step is not tx.update else fo.apply_updates(w, found)
        states.append((w, state))
    assert_close(*states, 1e-15)


def test_a_recipe_may_come_from_code_that_has_no_module():
    """As a string that is executed in a new dict."""
    space = {"fo": fo}
    exec("def recipe(lr):\n    return fo.chain(fo.clip_by_global_norm(1.0), fo.sgd(lr))", space)
    w = torch.nn.Parameter(torch.zeros(1))
    opt = adapters.Optimizer([w], space["recipe"], lr=0.5, compile=False)
    for lr in (0.5, 0.25):
        opt.param_groups[0]["lr"] = lr
        w.grad = torch.ones(1)
        opt.step()
    assert w.item() == -0.75
