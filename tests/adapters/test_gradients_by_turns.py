"""Gradients that are missing by turns: a step takes the plan of an earlier one that is like it, and
does what a new plan would do."""

import copy
import gc
import random
import weakref

import pytest
import torch
from helpers import assert_close, assert_same, clone
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import functional_optim as fo
from functional_optim import adapters
from functional_optim.adapters.stepping.plan import OptimizerPlan
from functional_optim.engine.plan import PARKED

SHAPES = [(3, 4), (5,), (), (2, 3), (4, 3)]
STEPS = 40


def composed(lr, **more):
    clip = fo.clip_by_global_norm(1.0)
    return fo.chain(clip, fo.adamw(lr, **more), fo.params_ema(0.9))


def parted(lr):
    rules = {"slow": fo.adamw(lr), "fast": fo.sgd(lr, momentum=0.9)}
    return fo.partition(rules, {"p0": "slow", "*": "fast"})


RECIPES = {
    "adamw": fo.adamw,
    "sgd": lambda lr: fo.sgd(lr, momentum=0.9, nesterov=True),
    "composed": composed,
    "parted": parted,
    "gated": lambda lr: fo.accumulate(composed(lr), 3),
    "estimating": lambda lr: fo.prodigy(lr),
    "measured": lambda lr: fo.monitor(fo.measures.diagnostics, around=fo.nadam(lr)),
    "each measured": lambda lr: fo.monitor(
        fo.measures.diagnostics, around=fo.adamw(lr), per_tensor=True
    ),
    "packed": lambda lr: fo.stored(fo.adamw(lr), "int8", where="*", seed=3),
    "matrices": lambda lr: fo.muon_adamw(lr),
}


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def named(seed=0):
    return {f"p{i}": x for i, x in enumerate(tensors(seed))}


def optimizer(recipe, **hyper):
    params = {name: torch.nn.Parameter(x) for name, x in named().items()}
    return adapters.Optimizer(params.items(), recipe, lr=1e-2, **hyper), [*params.values()]


def turns(step, chance):
    """Which parameters have a gradient: one half, by turns, and in the first steps the first one,
    too; now and then any."""
    if chance.random() < 0.1:
        return [chance.random() < 0.5 for _ in SHAPES]
    always = step < STEPS // 2
    return [(i == 0 and always) or i % 2 == step % 2 for i in range(len(SHAPES))]


def give(params, step, live):
    for p, g, one in zip(params, tensors(100 + step), live, strict=True):
        p.grad = g if one else None


def change(opt, params, chance):
    """Something that somebody does to an optimizer between two steps, or nothing."""
    what, p = chance.randrange(24), chance.choice(params)
    mine = opt.state.get(p, {})
    if what == 0:
        opt.param_groups[0]["lr"] = 1e-3 * (1 + chance.random())
    elif what == 1:
        opt.state.pop(p, None)
    elif what == 2:
        opt.load_state_dict(clone(opt.state_dict()))
    elif what == 3 and "step" in mine:
        mine["step"].add_(2.0)
    elif what == 4 and "exp_avg" in mine:
        mine["exp_avg"] = torch.ones_like(p)
    elif what == 5:
        p.data = p.data.clone()
    elif what == 6 and p.grad is not None:
        p.grad.fill_(float("nan"))


@pytest.mark.parametrize("name", RECIPES)
def test_an_object_steps_as_with_a_new_plan_each_time(name):
    ends = []
    for anew in (True, False):
        chance = random.Random(3)
        opt, params = optimizer(RECIPES[name])
        for step in range(STEPS):
            give(params, step, turns(step, chance))
            change(opt, params, chance)
            if anew:
                vars(opt).pop("_plan", None)
            opt.step()
        ends.append(clone(([p.detach() for p in params], [opt.state[p] for p in params])))
    assert_same(*ends)


@pytest.mark.parametrize("name", RECIPES)
def test_a_compiled_step_is_that_of_a_new_one_each_time(name):
    tx, ends = RECIPES[name](1e-2), []
    for anew in (True, False):
        chance, params = random.Random(5), named()
        state, step = tx.init(params), fo.compile(tx)
        for k in range(STEPS):
            live = turns(k, chance)
            pairs = zip(named(100 + k).items(), live, strict=True)
            grads = {key: g if one else None for (key, g), one in pairs}
            if chance.random() < 0.1:
                params, state = clone((params, state))
            step = fo.compile(tx) if anew else step
            params, state = step(grads, state, params)
        ends.append((params, state))
    assert_same(*ends)


TURNS = {
    "a trunk and heads": [(0, 1, 2), (0, 1, 3), (0, 4)],
    "two of three": [(0, 1), (0, 2), (1, 2)],
    "neighbours": [(0, 1), (1, 2), (2, 3), (3, 0)],
    "nested": [(0,), (0, 1), (0, 1, 2)],
}


@pytest.mark.parametrize("every", TURNS.values(), ids=TURNS)
def test_no_plan_is_made_once_all_turns_were_seen(every):
    calls = []

    def label(path, p):
        calls.append(path)
        return "slow" if p.dim() else "fast"

    def recipe(lr):
        return fo.partition({"slow": fo.adamw(lr), "fast": fo.sgd(lr)}, label)

    tx = recipe(1e-2)
    opt, params = optimizer(recipe)
    tree, state, step = named(), tx.init(named()), fo.compile(tx)
    for k in range(32):
        if k == 24:
            calls.clear()
        live = [i in every[k % len(every)] for i in range(len(SHAPES))]
        give(params, k, live)
        opt.step()
        grads = dict(zip(tree, [p.grad for p in params], strict=True))
        tree, state = step(grads, state, tree)
    assert not calls


def test_a_count_that_is_none_is_refused_in_its_turn():
    opt, params = optimizer(fo.adamw)
    for k in range(6):
        give(params, k, [i % 2 == k % 2 for i in range(len(SHAPES))])
        if k == 4:
            params[1].grad, before = params[1].detach().clone(), params[1].detach().clone()
            opt.state[params[1]]["step"].fill_(-1.0)
            opt.state[params[3]]["step"].fill_(-1.0)
        if k == 5:
            with pytest.raises(ValueError, match="'step' in the state of parameter 'p1' is -1"):
                opt.step()
            assert_same(params[1].detach(), before)
            continue
        if k != 4:
            opt.step()


def test_a_copy_counts_the_steps_of_both():
    """It shares groups and state."""
    ends = []
    for anew in (True, False):
        opt, params = optimizer(lambda lr: fo.lookahead(fo.sgd(lr), 3))
        give(params, 0, [True] * len(SHAPES))
        opt.step()
        both = opt, copy.copy(opt)
        for k in range(12):
            give(params, k, [i % 2 == k % 2 for i in range(len(SHAPES))])
            if anew:
                for own in both:
                    vars(own).pop("_plan", None)
            both[k % 2].step()
        ends.append([p.detach() for p in params])
    assert_same(*ends)


def test_a_shared_number_in_two_dtypes_becomes_one():
    """If it stayed rounded for some, these would seem to be out of phase at each new plan."""
    opt, params = optimizer(RECIPES["estimating"])
    for k in range(3):
        give(params, k, [True] * len(SHAPES))
        opt.step()
    for p in params[:2]:
        opt.state[p]["d"] = opt.state[p]["d"].float()[None].clone()[0]
    give(params, 3, [i > 0 for i in range(len(SHAPES))])
    opt.step()
    assert {opt.state[p]["d"].dtype for p in params} == {torch.float64}


def test_plans_of_another_threads_trees_do_not_stay_beside_those_of_these():
    tx = fo.sgd(1e-2)
    step, tree = fo.compile(tx), {"a": torch.ones(2), "b": torch.ones(2)}
    own, others = (tree, tx.init(tree)), (clone(tree), tx.init(tree))
    turns = [{"a": torch.ones(2), "b": None}, {"a": None, "b": torch.ones(2)}]
    for grads in turns:
        step(grads, own[1], own[0])
    plans, valid = step.plans, step.plans[1].gradients

    def found(*given):
        plans[1].gradients = valid
        step(turns[1], others[1], others[0])  # as another thread might, at this moment
        return valid(*given)

    plans[1].gradients = found
    step(turns[0], own[1], own[0])
    assert step.plans == plans[::-1]


def test_steps_without_a_gradient_keep_their_plan():
    opt, params = optimizer(RECIPES["gated"])
    plans = []
    for k in range(8):
        give(params, k, [k % 2 == 0] * len(SHAPES))
        opt.step()
        plans.append(vars(opt)["_plan"])
    assert plans[4:6] == plans[6:]


def test_few_plans_are_kept():
    opt, params = optimizer(fo.adamw)
    chance = random.Random(0)
    for k in range(60):
        give(params, k, [chance.random() < 0.5 for _ in SHAPES])
        opt.step()
    gc.collect()
    assert sum(type(x) is OptimizerPlan for x in gc.get_objects()) <= 1 + PARKED


def first_by(one, other):
    """The first parameter by one recipe."""
    return fo.partition({"one": one, "other": other}, {"0": "one", "*": "other"})


MIXES = {
    "shards": (fo.sgd, "both"),
    "a matrix last": (lambda lr: first_by(fo.sgd(lr), fo.muon(lr)), "both"),
    "a matrix first": (lambda lr: first_by(fo.muon(lr), fo.sgd(lr)), "both"),
    "other rules": (lambda lr: first_by(fo.sgd(lr), fo.adamw(lr)), "both"),
    "a plain one first": (fo.sgd, "last"),
    "a plain one last": (fo.sgd, "first"),
}


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("name", MIXES)
def test_shards_that_are_gradients_of_each_other_are_read_before_the_step(name, compile, mesh):
    """Also by other executors, and where it is so only in the second step."""
    recipe, divided = MIXES[name]
    ends = []
    for on in (False, True):
        parts = [on and divided in ("both", where) for where in ("first", "last")]

        def put(i, x, parts=parts):
            return distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None) if parts[i] else x

        start = torch.arange(2 * 60 * 30.0).reshape(2, 60, 30).cos()
        params = [torch.nn.Parameter(put(i, x.clone())) for i, x in enumerate(start)]
        opt = adapters.Optimizer(params, recipe, lr=0.1, compile=compile)
        for step in range(4):
            for i, p in enumerate(params):
                other = params[1 - i].detach()
                near = getattr(other, "_local_tensor", other)
                far = DTensor.from_local(near, mesh, [Shard(0)]) if parts[i] else near
                p.grad = torch.ones_like(p) if step == 0 else far
            opt.step()
        ends.append([getattr(p, "_local_tensor", p).detach() for p in params])
    assert_close(*ends, 1e-5)


def test_entries_of_a_state_that_are_no_parameters_count_no_steps():
    ends = []
    for more in ({}, {"scheduler": {"step": 1000}, "epoch": 3}):
        opt, params = optimizer(RECIPES["estimating"])
        opt.state.update(more)
        for k in range(8):
            give(params, k, [i % 2 == k % 2 for i in range(len(SHAPES))])
            opt.step()
        ends.append([p.detach() for p in params])
    assert_same(*ends)


def test_a_replaced_state_is_freed():
    opt, params = optimizer(fo.adamw)
    for k in range(4):
        give(params, k, [i % 2 == k % 2 for i in range(len(SHAPES))])
        opt.step()
    old = [weakref.ref(opt.state[p]["exp_avg"]) for p in params]
    opt.load_state_dict(opt.state_dict())
    opt.state.update({p: clone(opt.state[p]) for p in params})
    opt.step()
    gc.collect()
    assert not any(x() is not None for x in old)


def in_turns(opt, params, turns):
    """Steps in which the first parameter has a gradient, and the others have one by turns."""
    for k in range(turns):
        for i, p in enumerate(params):
            p.grad = torch.ones_like(p) if k == 0 or i in (0, 1 + k % 2) else None
        opt.step()


def kept_memory(opt):
    return sum(x.keeps_memory() for x in (vars(opt)["_plan"], *vars(opt)["_plan"].others))


@pytest.mark.parametrize("large", [False, True])
def test_an_earlier_plan_that_stores_the_elements_of_large_tensors_is_not_kept(large):
    """lamb's kernel stores the update of a tensor until its norm is known."""
    shape = (600, 600) if large else (6, 6)
    params = [torch.nn.Parameter(torch.ones(shape)) for _ in range(3)]
    opt = adapters.Optimizer(params, fo.lamb, lr=1e-2)
    in_turns(opt, params, 8)
    assert len(vars(opt)["_plan"].others) == (0 if large else 1)
    assert kept_memory(opt) == large


def test_an_earlier_plan_with_matrices_of_shards_is_not_kept(mesh):
    whole = [torch.ones(4, 4) for _ in range(3)]
    params = [torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for x in whole]
    opt = adapters.Optimizer(params, fo.muon, lr=1e-2)
    in_turns(opt, params, 8)
    assert kept_memory(opt) == 1
    assert not vars(opt)["_plan"].others


def in_twos(lr):
    return fo.accumulate(fo.adam(lr), every=2)


def test_groups_with_different_rates_share_a_gate_in_a_graph(fresh_dynamo):
    def run(compiled):
        params = {k: torch.nn.Parameter(torch.ones(n)) for k, n in (("a", 2), ("b", 3))}
        groups = [{"params": [params["a"]]}, {"params": [params["b"]], "lr": 0.05}]
        opt = adapters.Optimizer(groups, in_twos, lr=0.1, compile=False)
        step = torch.compile(opt.step, backend="eager", fullgraph=True) if compiled else opt.step
        for missed in ("", "b", "", ""):
            for name, p in params.items():
                p.grad = None if name == missed else torch.ones_like(p)
            step()
        return params, opt.state_dict()["state"]

    assert_close(run(True), run(False), 1e-6)
