"""Every combinator in every way to run a recipe, alone and inside others."""

import math

import combined
import pytest
import torch
from combined import LEAFWISE, named_params, whole
from helpers import assert_close, assert_same, clone, make_grads, run
from sampling import some

import functional_optim as fo
from functional_optim import kernels
from functional_optim.adapters import Optimizer
from functional_optim.core.leafwise import Leafwise

KERNELS = (combined.with_norms, combined.deep, combined.guarded, combined.conditional)
KERNELS += (combined.looking_ahead,)
SMOOTH = tuple(r for r in LEAFWISE if r not in (combined.deep, combined.growing))
"""Without Muon's bfloat16, and without dividing by the roots of sums that are still zero."""


def gradients(params, steps, *, bad=True):
    """Some uneven, and some with a NaN in one leaf."""
    found = make_grads(params, steps, seed=5)
    for g in found[1::5] if bad else ():
        g["body.b"][2] = math.nan
    return found


TAKING_NAN = (combined.finite, combined.growing, combined.guarded)


def case(recipe, steps=8, dtype=torch.float64):
    params = named_params(dtype)
    return params, gradients(params, steps, bad=recipe in TAKING_NAN)


def each(recipes):
    return pytest.mark.parametrize("recipe", recipes, ids=lambda recipe: recipe.__name__)


def rounding(recipe, other=1e-12):
    """Muon's iteration is in bfloat16."""
    return 5e-2 if recipe is combined.deep else other


# ---------------------------------------------------------------- compiled
@pytest.mark.parametrize("donate", some([True, False]))
@each(KERNELS)
def test_compiled_is_eager(recipe, donate):
    params, grads = case(recipe, 20)
    tx = recipe(0.05)
    moved, state = run(tx, params, grads)
    step = fo.compile(tx, donate=donate, strict=True)
    kept, mine = clone(params), tx.init(params)
    given = params if not donate else clone(params)
    for g in grads:
        given, mine = step(g, mine, given)
    assert_close((given, mine), (moved, state), rounding(recipe, 1e-6))  # carried in float32
    assert_same(params, kept)


# ---------------------------------------------------------------- vmap and derivatives
@pytest.mark.usefixtures("doubles")
@each(SMOOTH)
def test_the_meta_gradient_is_the_finite_difference(recipe):
    """Gates that shut out a NaN let no NaN into the derivative."""
    params, grads = case(recipe, 6)

    def loss(lr):
        moved, _ = run(recipe(lr), params, grads)
        return sum((p * p).sum() for p in moved.values())

    lr = torch.tensor(0.05)
    slope = torch.func.grad(loss)(lr)
    h = 1e-6
    assert_close(slope, (loss(lr + h) - loss(lr - h)) / (2 * h), 1e-5)
    assert abs(slope) > 1e-3


# ---------------------------------------------------------------- the optimizer object
def make(recipe, params, *, groups=1, compile=False, lr=0.05):
    """An optimizer over named parameters, and these."""
    mine = {name: torch.nn.Parameter(p.clone()) for name, p in params.items()}
    rows = list(mine.items())
    cut = [{"params": rows[i::groups]} for i in range(groups)]
    return Optimizer(cut, recipe, compile=compile, lr=lr), mine


def step(opt, mine, grads):
    for g in grads:
        for name, p in mine.items():
            p.grad = None if g[name] is None else g[name].clone()
        opt.step()


def test_a_norm_before_a_partition_spans_all_that_moves_and_one_in_a_part_that_part():
    def recipe(lr):
        one = fo.chain(fo.clip_by_global_norm(1.0), fo.scale_by_lr(lr))
        two = fo.chain(fo.clip_by_global_norm(10.0), fo.scale_by_lr(lr))
        parts = fo.partition({"one": one, "two": two}, {"a*": "one", "*": "two"})
        return fo.chain(fo.freeze("c"), fo.clip_by_global_norm(6.5), parts)

    params = {name: torch.zeros(()) for name in ("a1", "a2", "b", "c")}
    grads = {"a1": 3.0, "a2": 4.0, "b": 12.0, "c": 1e6}
    grads = {name: torch.tensor(g) for name, g in grads.items()}
    # 13 → 6.5 halves all: a is then (1.5, 2), of norm 2.5 → 1; b is 6
    want = {"a1": -0.6, "a2": -0.8, "b": -6.0, "c": 0.0}
    want = {name: torch.tensor(x) for name, x in want.items()}
    assert_close(run(recipe(1.0), params, [grads])[0], want, 1e-6)
    for groups in (1, 2, 4):
        opt, mine = make(recipe, params, groups=groups, lr=1.0)
        step(opt, mine, [grads])
        assert_close({name: p.detach() for name, p in mine.items()}, want, 1e-6)


@each(LEAFWISE)
def test_parameters_without_gradients_are_left_alone(recipe):
    params, grads = case(recipe, 5)
    for g in grads:
        g["body.w"] = None
    opt, mine = make(recipe, params)
    step(opt, mine, grads)
    assert not opt.state.get(mine["body.w"])
    ended = {name: p.detach() for name, p in mine.items()}
    for form in (run(recipe(0.05), params, grads)[0], ended):
        assert_same(form["body.w"], params["body.w"])
        others = [name for name in params if not torch.equal(form[name], params[name])]
        assert others


@each([combined.with_norms, combined.guarded])
def test_a_scheduler_builds_no_kernel(recipe):
    params, grads = case(recipe, 12)
    opt, mine = make(recipe, params, compile="strict")
    eager, others = make(recipe, params)
    known = None
    for g in grads:
        for one, tensors in ((opt, mine), (eager, others)):
            step(one, tensors, [g])
            one.param_groups[0]["lr"] *= 0.9
        if g is grads[5]:
            known = kernels.count()
    assert kernels.count() == known
    assert_close([p.detach() for p in mine.values()], [p.detach() for p in others.values()], 1e-6)


# ---------------------------------------------------------------- what stands inside
def thawing(lr, frozen=True):
    return fo.chain(fo.freeze("body" if frozen else ()), fo.adam(lr))


def test_a_flag_of_a_group_thaws_what_was_frozen():
    params, grads = case(thawing, 3)
    opt, mine = make(thawing, params)
    step(opt, mine, grads[:2])
    assert_same(mine["body.w"].detach(), params["body.w"])
    assert mine["body.w"] not in opt.state
    opt.param_groups[0]["frozen"] = False
    step(opt, mine, grads[2:])
    assert not torch.equal(mine["body.w"], params["body.w"])
    assert opt.state[mine["head"]]["step"] == 3


def scaled_by(grads, state, params=None, *, factor):
    return fo.tree.map(lambda g: factor * g, grads), state


takes_factor = fo.GradientTransformation(lambda params: fo.EmptyState(), scaled_by)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: fo.masked(tx, "body"),
        lambda tx: fo.partition({"a": tx, "b": tx}, {"body": "a", "*": "b"}),
        lambda tx: fo.conditionally_mask(tx, lambda step: step < 9),
        lambda tx: fo.accumulate(tx, 1),
        lambda tx: fo.chain(fo.freeze("head"), tx),
    ],
)
def test_extra_arguments_reach_what_stands_inside(wrap):
    params, (g,) = case(wrap, 1)
    tx = fo.chain(whole, wrap(takes_factor), fo.scale_by_lr(1.0))
    updates, _ = tx.update(g, tx.init(params), params, factor=3.0)
    assert_close(updates["body.w"], -3 * g["body.w"].sign(), 1e-12)
    with pytest.raises(TypeError, match="facto, which no part of this transformation takes"):
        tx.update(g, tx.init(params), params, facto=3.0)
    with pytest.raises(TypeError, match="needs factor"):
        make(lambda lr: wrap(takes_factor), params)


def test_frozen_leaves_are_out_of_whole_trees_too():
    seen = []

    def update(grads, state, params=None):
        seen.append((grads, params))
        return grads, state

    spy = fo.GradientTransformation(lambda params: fo.tree.map(torch.clone, params), update)
    params, (g,) = case(spy, 1)
    for tx in (fo.chain(fo.freeze("body"), spy), fo.chain(spy, fo.freeze("body"))):
        state = tx.init(params)
        updates, _ = tx.update(g, state, params)
        assert [x["body.w"] for x in seen.pop()] == [None, None]
        assert updates["body.w"] is None
        assert updates["head"] is not None
        kept = next(part for part in state if isinstance(part, dict))
        assert kept["body.w"] is None
    g["body.w"].fill_(math.nan)
    gated = fo.apply_if_finite(fo.chain(fo.freeze("body"), spy), 3)
    updates, _ = gated.update(g, gated.init(params), params)
    assert torch.equal(updates["head"], g["head"])


def test_a_branch_without_leaves_is_none():
    params, (g,) = case(combined.masked, 1)
    tx = fo.partition({"a": fo.scale_by_lbfgs(), "b": fo.sgd(1.0)}, {"*": "b"})
    updates, _ = tx.update(g, tx.init(params), params)
    assert_same(updates, {name: -x for name, x in g.items()})


def test_no_gradient_at_all_counts_a_step_and_carries_nothing_on():
    """Alike whether compiled or not."""
    params = named_params()
    for recipe in (combined.accumulated, combined.selective):
        tx = recipe(0.1)
        assert isinstance(tx, Leafwise)
        state, none = tx.init(params), dict.fromkeys(params)
        updates, after = tx.update(none, state, params)
        assert updates == none
        assert_same(after.carry, state.carry)
        assert after.step == 1
        assert_same(fo.compile(tx)(none, tx.init(params), clone(params)), (params, after))


def test_parts_of_a_partition_may_have_slots_of_one_name_and_other_shapes():
    params = {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}
    tx = fo.partition({"adam": fo.adam(0.1), "norm": fo.novograd(0.1)}, {"a": "adam", "*": "norm"})
    state = tx.init(params)
    assert [x.dim() for x in state.slots["exp_avg_sq"].values()] == [2, 0]
    updates, state = tx.update(params, state, params)
    assert_close(updates["a"], torch.full((2, 3), -0.1), 1e-6)
    wrong = {**state.slots, "exp_avg_sq": {"a": torch.ones(3, 2), "b": torch.ones(())}}
    with pytest.raises(ValueError, match=r"differ at 'a': \(2, 3\) against \(3, 2\)"):
        tx.update(params, state._replace(slots=wrong), params)


# ---------------------------------------------------------------- functions of all parameters
def pulled(p):
    return (p["w"].square().sum(0) - p["b"] - 2).square().sum() + p["w"].square().sum()


def value_and_grad(p):
    grads, value = torch.func.grad_and_value(pulled)(p)
    return value, grads


EXTRA = {"value_and_grad": lambda p: value_and_grad, "value_fn": lambda p: pulled}
EXTRA |= {"grad_fn": lambda p: EXTRA["grad"], "value": pulled, "grad": torch.func.grad(pulled)}
SEARCHED = fo.chain(fo.sgd(1.0), fo.scale_by_backtracking_linesearch())
OF_FUNCTIONS = {
    "lbfgs": (fo.lbfgs, ("value", "value_and_grad")),
    "ssbfgs": (fo.ssbfgs, ("value", "value_and_grad")),
    "sam": (lambda: fo.sam(fo.sgd(0.1)), ("grad_fn",)),
    "backtracking": (lambda: SEARCHED, ("value", "grad", "value_fn")),
}
AROUND = {
    "freeze": lambda tx: fo.chain(fo.freeze("b"), tx),
    "selective": lambda tx: fo.selective_transform(tx, freeze_mask="b"),
    "partition": lambda tx: fo.partition({"on": tx, "off": fo.freeze()}, {"w": "on", "b": "off"}),
    "masked": lambda tx: fo.chain(fo.masked(tx, "w"), fo.freeze("b")),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_functions_of_all_parameters_become_those_of_some(name, around):
    make, names = OF_FUNCTIONS[name]
    whole = {"w": torch.ones(3, 2).double(), "b": torch.zeros(2).double()}
    tx, own = AROUND[around](make()), make()
    p, alone = whole, {"w": whole["w"]}
    state, mine = tx.init(p), own.init(alone)

    def some(fn):  # with the b of the other run
        return lambda p: fn({**p, "b": whole["b"]})

    def grads_only(fn):
        return lambda p: {"w": some(fn)(p)["w"]}

    def both(p):
        value, grads = some(value_and_grad)(p)
        return value, {"w": grads["w"]}

    known = {
        "value_and_grad": both, "value_fn": some(pulled), "grad_fn": grads_only(EXTRA["grad"]),
    }  # fmt: skip
    for _ in range(3):
        grads = EXTRA["grad"](p)
        updates, state = tx.update(grads, state, p, **{k: EXTRA[k](p) for k in names})
        part = {"w": grads["w"]}
        of_part = {**known, "value": pulled(p), "grad": part}
        theirs, mine = own.update(part, mine, alone, **{k: of_part[k] for k in names})
        p, alone = fo.apply_updates(p, updates), fo.apply_updates(alone, theirs)
        assert torch.equal(p["w"], alone["w"])
        assert torch.equal(p["b"], whole["b"])
    assert float(pulled(p)) < 0.6 * float(pulled(whole))


@pytest.mark.parametrize("wrong", [3, lambda p: 3.0])
@pytest.mark.parametrize("make", [fo.lbfgs, fo.ssbfgs])
def test_what_is_no_function_of_value_and_gradients_is_told(make, wrong):
    p = {"w": torch.ones(3, 2).double(), "b": torch.zeros(2).double()}
    value, grads = value_and_grad(p)
    tx = fo.chain(fo.freeze("b"), make())
    with pytest.raises(TypeError, match=r"value_and_grad (must be a func|returned a float; ret)"):
        tx.update(grads, tx.init(p), p, value=value, value_and_grad=wrong)


@pytest.mark.parametrize("around", [*AROUND.values(), fo.flatten, lambda tx: tx])
@pytest.mark.parametrize("make", [fo.lbfgs, fo.ssbfgs, fo.ssbroyden])
def test_gradients_before_the_value_are_told(make, around):
    p = {"w": torch.ones(3, 2).double(), "b": torch.zeros(2).double()}
    value, grads = value_and_grad(p)
    tx, reverse = around(make()), torch.func.grad_and_value(pulled)
    state, words = tx.init(p), "the value has type dict, .*grad_and_value has them in reverse"
    with pytest.raises(TypeError, match=words):
        tx.update(grads, state, p, value=value, value_and_grad=reverse)
    with pytest.raises(TypeError, match=words):
        tx.update(grads, state, p, value=grads, value_and_grad=value_and_grad)
    for wrong in (value, [grads["w"], grads["b"]]):
        with pytest.raises(ValueError, match="params and grads have different structures"):
            tx.update(wrong, state, p, value=value, value_and_grad=value_and_grad)
        with pytest.raises(ValueError, match="params and grads have different structures"):
            tx.update(grads, state, p, value=value, value_and_grad=lambda p, g=wrong: (value, g))


TREES = {
    "with_schedule": lambda tx: fo.with_schedule(lambda c: tx, c=1),
    "gate": lambda tx: fo.apply_if_finite(fo.chain(tx, fo.flatten(fo.identity())), 3),
    "partition": lambda tx: fo.masked(fo.with_schedule(lambda c: tx, c=1), "*"),
    "nested": lambda tx: fo.chain(fo.scale(1.0), fo.with_schedule(lambda c: tx, c=1)),
}
PAIR = {"a": torch.full((2,), 3.0), "b": torch.full((2,), 4.0)}


@pytest.mark.parametrize("inside", TREES)
def test_a_chain_ignores_leaves_that_a_part_of_it_freezes_inside(inside):
    frozen = TREES[inside](fo.chain(fo.freeze("b"), fo.sgd(1.0)))
    tx = fo.chain(fo.chain(fo.clip_by_global_norm(1.0), frozen), fo.flatten(fo.identity()))
    updates, _ = tx.update(PAIR, tx.init(PAIR), PAIR)
    assert_close(updates, {"a": torch.full((2,), -(0.5**0.5)), "b": None}, 1e-6)
    assert [part.spared[1:] for part in tx.parts[1:]] == [(), ()]


@pytest.mark.parametrize("inside", TREES)
def test_what_a_tree_freezes_inside_a_chain_of_trees_stays(inside):
    half = fo.GradientTransformation(
        lambda p: fo.EmptyState(), lambda g, s, p=None: (fo.tree.map(lambda x: 0.5 * x, g), s)
    )
    frozen = TREES[inside](fo.chain(fo.freeze("b"), fo.sgd(1.0)))
    for tx in (fo.chain(frozen, half), fo.chain(half, frozen)):
        updates, _ = tx.update(PAIR, tx.init(PAIR), PAIR)
        assert_close(updates, {"a": -0.5 * PAIR["a"], "b": None}, 1e-6)


def test_a_vector_freezes_none_of_the_leaves_around_it():
    frozen = fo.freeze(lambda path, p: path == "b")
    tx = fo.chain(fo.flatten(fo.chain(frozen, fo.sgd(1.0))), fo.scale(2.0))
    assert_close(tx.update(PAIR, tx.init(PAIR), PAIR)[0]["b"], -2 * PAIR["b"], 1e-6)


def inside(tx):
    return fo.chain(TREES["with_schedule"](tx), fo.scale(0.5))


ROUNDED = fo.chain(fo.flatten(fo.trace(0.5)), fo.master_weights(fo.scale(1.0)))
SGD = fo.sgd(0.1)
REFUSED = {
    "rates": (lambda: fo.chain(fo.flatten(fo.sgd(0.1)), fo.scale_by_lr(1.0)), "two learning rates"),
    "rates of trees": (lambda: fo.chain(fo.sam(SGD), fo.keep_snapshots(SGD)), "two learning rates"),
    "master_weights": (lambda: inside(fo.master_weights(SGD)), "comes after master_weights"),
    "params_ema": (lambda: inside(fo.params_ema(0.5)), "follows params_ema, which reads"),
    "cautious": (lambda: fo.cautious(ROUNDED), "changes updates that master_weights has rounded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_chain_refuses_is_seen_inside_of_trees(name):
    make, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        make()


def test_parts_of_other_leaves_and_other_names_are_not_refused():
    scheduled = TREES["with_schedule"]
    parts = {"x": fo.chain(fo.master_weights(fo.sgd(0.1)), fo.params_ema(0.5)), "y": fo.adam(0.1)}
    labels = {"b": "x", "*": "y"}
    for x, y in ((parts["x"], fo.flatten(parts["y"])), (scheduled(parts["x"]), parts["y"])):
        tx = fo.chain(fo.freeze("c"), fo.partition({"x": x, "y": y}, labels))
        params = {"a": torch.ones(2), "b": torch.ones(2).bfloat16(), "c": torch.ones(2)}
        updates, _ = tx.update(params, tx.init(params), params)
        assert updates["c"] is None
        assert_close(updates["a"], torch.full((2,), -0.1), 1e-6)
    tx = fo.named_chain(("x", fo.flatten(fo.sgd(0.5))), ("y", fo.flatten(fo.sgd(0.5))))
    assert_close(tx.update(PAIR, tx.init(PAIR), PAIR)[0]["a"], 0.25 * PAIR["a"], 1e-6)


@pytest.mark.parametrize("inside", ["with_schedule", "gate"])
def test_a_gate_around_trees_stays_shut_without_gradients(inside):
    tx = fo.accumulate(TREES[inside](fo.adam(1.0, betas=(0.5, 0.9))), 2)
    state = tx.init(PAIR)
    g, none = fo.tree.map(torch.ones_like, PAIR), dict.fromkeys(PAIR)
    for given in (g, g, none, none, g, g):
        updates, state = tx.update(given, state, PAIR)
    assert_close(updates, fo.tree.map(lambda x: -torch.ones_like(x), PAIR), 1e-6)


@pytest.mark.parametrize(
    "around", [fo.cautious, lambda tx: fo.apply_if_finite(tx, 3), lambda tx: fo.accumulate(tx, 1)]
)
def test_an_update_without_a_gradient_is_told_by_its_leaf(around):
    def update(grads, state, params=None):
        return fo.tree.map(lambda p: -0.1 * p, params), state

    tx = around(fo.GradientTransformation(lambda params: fo.EmptyState(), update))
    with pytest.raises(ValueError, match=r"inside: 2 leaves: a \(2,\), b \(2,\)\nPass zeros"):
        tx.update({"a": torch.ones(2), "b": None}, tx.init(PAIR), PAIR)


def test_a_slot_that_a_leaf_lacks_is_not_its_missing_gradient():
    own = fo.leafwise(None, lambda u, slots, p: (u, slots), name="own")
    tx = fo.accumulate(fo.chain(fo.masked(fo.trace(0.9), "a"), own, fo.scale_by_lr(0.5)), 1)
    updates, _ = tx.update({"a": PAIR["a"], "b": None}, tx.init(PAIR), PAIR)
    assert_close(updates, {"a": -0.5 * PAIR["a"], "b": None}, 1e-6)
