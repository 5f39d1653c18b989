"""Norms, micro-batches, gates and counts are those of all parameter groups, whoever has a gradient.

Also of parts that are stepped as whole trees.
"""

import math
import random

import pytest
import torch
from helpers import assert_close, clone, run
from sampling import some

import functional_optim as fo
from functional_optim.adapters import Optimizer

NAMES = ("a1", "b1", "a2", "b2")
GROUPS = (("a1", "b1"), ("a2", "b2"))
CLIP = fo.clip_by_global_norm(1.0)
WHOLE = fo.GradientTransformation(
    lambda params: (), lambda grads, state, params=None: (grads, state)
)


def silent(*parts):
    """A chain with a part that takes whole trees and changes nothing."""
    first, *others = parts
    return fo.chain(first, WHOLE, *others)


def batch(every=2, mean=True):
    return fo.accumulate(
        fo.chain(fo.clip_by_global_norm(0.5), fo.adamw(0.1, weight_decay=0.1)), every, mean=mean
    )


RULES = {
    "two": batch,
    "three": lambda: batch(3),
    "sum": lambda: batch(3, mean=False),
    "finite": lambda: fo.apply_if_finite(batch(), 2),
    "small": lambda: fo.skip_large_updates(fo.chain(fo.trace(0.9), fo.scale(-0.1)), 4.0),
    "scaled": lambda: fo.dynamic_loss_scale(fo.chain(fo.trace(0.9), fo.scale(-0.1)), 4.0),
    "mask": lambda: fo.conditionally_mask(fo.adam(0.1), lambda step: step % 3 == 1),
    "transform": lambda: fo.chain(
        fo.conditionally_transform(fo.scale(3.0), lambda step: step % 2 == 1), fo.scale(-0.1)
    ),
    "lookahead": lambda: fo.lookahead(fo.sgd(0.1), 3),
    "monitor": lambda: fo.chain(
        fo.monitor({"n": fo.measures.global_norm}), fo.zero_nans(), fo.sgd(0.1)
    ),
    "masked": lambda: fo.chain(
        fo.masked(fo.accumulate(fo.trace(0.9), 2), ["a1", "b1"]), fo.sgd(0.1)
    ),
}
TREES = {
    "tree": lambda: silent(CLIP, fo.adam(0.1)),
    "tree, twice": lambda: silent(CLIP, fo.trace(0.9), fo.clip_by_global_norm(0.3), fo.scale(-1.0)),
    "tree, flatten": lambda: fo.flatten(fo.chain(CLIP, fo.sgd(0.1))),
    "tree, two": lambda: fo.accumulate(silent(CLIP, fo.sgd(0.1)), 2),
    "tree, finite": lambda: fo.apply_if_finite(silent(CLIP, fo.adam(0.1)), 3),
    "tree, small": lambda: fo.skip_large_updates(silent(CLIP, fo.adam(0.1)), 9.0),
    "tree, gates": lambda: fo.apply_if_finite(fo.apply_if_finite(silent(CLIP, fo.adam(0.1)), 1), 2),
    "tree, cautious": lambda: fo.chain(
        fo.cautious(silent(CLIP, fo.scale_by_adam())), fo.scale_by_lr(0.1)
    ),
    "tree, lookahead": lambda: fo.lookahead(silent(CLIP, fo.sgd(0.1)), 2),
    "tree, schedule": lambda: fo.with_schedule(
        lambda lr: silent(CLIP, fo.sgd(lr)), lr=fo.schedules.linear(1.0, 0.5, 4)
    ),
    "tree, masked": lambda: fo.chain(
        fo.masked(fo.flatten(CLIP), "a*"), fo.clip_by_global_norm(3.0), fo.sgd(0.1)
    ),
    "tree, monitor": lambda: silent(
        fo.monitor({"norm": fo.measures.global_norm}), CLIP, fo.sgd(0.1)
    ),
}
RECIPES = {**RULES, **TREES}


def start():
    torch.manual_seed(0)
    return {name: torch.randn(3) for name in NAMES}


def rows_of(name, seed, count=12):
    """Gradients. For rules some are None, of which one at least is there in each step."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows = []
    for _ in range(count):
        kept = [x for x in NAMES if rng.random() < 0.6 or name in TREES] or [rng.choice(NAMES)]
        rows.append({x: torch.randn(3) if x in kept else None for x in NAMES})
    if name in ("tree, finite", "tree, small", "tree, gates"):
        rows[2]["b2"][1] = math.nan
    return rows


def by_update(tx, rows):
    return run(tx, start(), rows)


def by_compile(tx, rows):
    params, step = start(), fo.compile(tx)
    state = tx.init(params)
    for grads in rows:
        params, state = step(grads, state, params)
    return params, state


def an_optimizer(recipe, params, compile=False, groups=GROUPS):
    named = all(groups)  # torch takes no names for a group without parameters
    return Optimizer(
        [{"params": [(x, params[x]) if named else params[x] for x in group]} for group in groups],
        recipe,
        compile=compile,
    )


def give(params, grads):
    for name, p in params.items():
        p.grad = None if grads[name] is None else grads[name].clone()


def by_object(recipe, rows, compile=False, saved_at=(), traced=False, groups=GROUPS):
    params = {name: torch.nn.Parameter(p) for name, p in start().items()}
    opt = an_optimizer(recipe, params, compile, groups)
    for i, grads in enumerate(rows):
        if i in saved_at:
            saved = clone(opt.state_dict())
            opt = an_optimizer(recipe, params, compile, groups)
            opt.load_state_dict(saved)
        give(params, grads)
        if traced:
            torch.func.vmap(lambda x, opt=opt: (opt.step(), x)[1])(torch.zeros(1))
        else:
            opt.step()
    return {name: p.detach() for name, p in params.items()}, opt


@pytest.mark.parametrize("seed", some(range(3)))
@pytest.mark.parametrize("name", RECIPES)
def test_groups_step_as_one_tree(name, seed):
    rows = rows_of(name, seed)
    want, state = by_update(RECIPES[name](), rows)
    if name in RULES:  # torch compiles trees, and takes its time
        assert_close(by_compile(RECIPES[name](), rows)[0], want, 1e-5)
    for compile, saved_at in ((True, ()), (False, (6, 7))):
        got, opt = by_object(RECIPES[name], rows, compile, saved_at)
        assert_close(got, want, 1e-5)
        for key, value in state.carry.items() if isinstance(state, fo.State) else ():
            kept = [mine[key].item() for mine in opt.state.values() if key in mine]
            assert kept
            assert kept == pytest.approx([value.item()] * len(kept), rel=1e-5)


@pytest.mark.parametrize("name", ["", "two", "finite", "small", "gates", "lookahead"])
def test_a_group_without_gradients_keeps_step(name):
    recipe = TREES[f"tree, {name}" if name else "tree"]
    whole_group = ("a2", "b2") if name not in ("", "lookahead") else ()
    rows = rows_of("tree", 1, 6)
    for grads, gone in zip(rows, (["a2"], [], ["b1"], whole_group, [], ["a1"]), strict=True):
        grads.update(dict.fromkeys(gone))
    got, _ = by_object(recipe, rows, True, groups=(*GROUPS, ()))
    assert_close(got, by_update(recipe(), rows)[0], 1e-6)


@pytest.mark.parametrize("name", ["two", "finite", "mask", "lookahead", "monitor"])
def test_steps_that_are_traced_count_alike(name):
    rows = rows_of(name, 4, 9)
    want, _ = by_update(RECIPES[name](), rows)
    assert_close(by_object(RECIPES[name], rows, traced=True)[0], want, 1e-5)


@pytest.mark.parametrize("recipe", [fo.prodigy, fo.dadapt_adam])
def test_a_traced_step_leaves_parameters_without_gradients_in_phase(recipe):
    """Another step finds their scalars equal, to the last digit, and keeps their slots."""
    ends = []
    for traced in (False, True):
        params = {name: torch.nn.Parameter(p) for name, p in start().items()}
        opt = an_optimizer(lambda: recipe(1.0), params)
        for i, grads in enumerate(rows_of("two", 5, 6)):
            give(params, {**grads, "a1": torch.ones(3), **({"b2": None} if i == 3 else {})})
            if traced and i == 3:
                torch.func.vmap(lambda x, opt=opt: (opt.step(), x)[1])(torch.zeros(1))
            else:
                opt.step()
        ends.append([dict(opt.state[p]) for p in params.values()])
    assert_close(*[[mine["exp_avg"] for mine in end] for end in ends], 1e-9)
    assert len({mine["d"].item() for mine in ends[1]}) == 1


def test_groups_whose_numbers_become_equal_count_together_from_then_on():
    """As in a run that is resumed then, or plans each step anew."""
    ends = []
    for anew in (False, True):
        params = [torch.nn.Parameter(p) for p in start().values()]
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.0}]
        opt = Optimizer(groups, fo.prodigy, lr=1.0, compile=False)
        for i in range(9):
            opt.param_groups[1]["lr"] = 0.0 if i < 5 else 1.0
            for p in params:
                p.grad = p.detach() + 0.1
            if anew:
                vars(opt).pop("_plan", None)
            opt.step()
        ends.append([p.detach() for p in params])
        assert len({opt.state[p]["d"].item() for p in params}) == 1
    assert_close(*ends, 1e-12)


def test_a_group_that_is_added_takes_the_counts():
    rows = rows_of("two", 5)
    params = {name: torch.nn.Parameter(p) for name, p in start().items()}
    opt = an_optimizer(batch, params, groups=(GROUPS[0],))
    for i, grads in enumerate(rows):
        if i == 7:
            opt.add_param_group({"params": [(name, params[name]) for name in GROUPS[1]]})
        if i < 7:
            grads.update(dict.fromkeys(GROUPS[1]))
            grads["a1"] = torch.ones(3) if grads["b1"] is None else grads["a1"]
        give(params, grads)
        opt.step()
    got = {name: p.detach() for name, p in params.items()}
    assert_close(got, by_update(batch(), rows)[0], 1e-5)


LATE = {
    "accumulate": lambda tx: fo.accumulate(tx, 2),
    "apply_if_finite": lambda tx: fo.apply_if_finite(tx, 2),
    "dynamic_loss_scale": lambda tx: fo.dynamic_loss_scale(tx, init_scale=4.0),
}


@pytest.mark.parametrize("gate", LATE)
def test_a_group_that_is_added_has_the_gate_of_the_others_around_trees_too(gate):
    found = []
    for around in (lambda tx: tx, fo.flatten):
        w, v = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        opt = Optimizer([w], lambda around=around: LATE[gate](around(fo.sgd(1.0))), compile=False)
        for i in range(5):
            if i == 1:
                opt.add_param_group({"params": [v]})
            w.grad = torch.full((1,), 1.0 if i or gate == "accumulate" else math.nan)
            v.grad = torch.ones(1) if i else None
            opt.step()
        found.append((w.item(), v.item()))
    assert found[0] == found[1]


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("name", some(["monitored", "two", "finite", "mask"], 2))
def test_a_part_without_gradients_counts_with_other_processes(name):
    """Others may have some, so the gates of a tree that is a part go on in every step."""

    def recipe():
        if name == "monitored":
            watch = fo.monitor({"n": fo.measures.global_norm})
            return fo.chain(fo.sharded_over(batch()), watch)
        return fo.sharded_over(RECIPES[name]())

    rows = rows_of("two", 7, 12)
    for i in (3, 4, 8):
        rows[i] = dict.fromkeys(NAMES)
    want, state = by_update(recipe(), rows)
    assert_close(by_compile(recipe(), rows)[0], want, 1e-5)
    for compile in (True, False):
        got, opt = by_object(recipe, rows, compile)
        assert_close(got, want, 1e-5)
        mine = opt.state[opt.param_groups[0]["params"][0]]
        for key, value in state.carry.items():
            assert mine[key].item() == pytest.approx(value.item(), rel=1e-5)


# ---------------------------------------------------------------- parameters of one number each
def numbers(recipe, *groups, start=0.0, **options):
    """An optimizer with a parameter of one number in each group, and a function that steps it."""
    params = [torch.full((1,), start, requires_grad=True) for _ in groups]
    opt = Optimizer(
        [{"params": [p], **group} for p, group in zip(params, groups, strict=True)],
        recipe,
        **options,
    )

    def step(*grads):
        for p, g in zip(params, grads, strict=True):
            p.grad = None if g is None else torch.tensor([g])
        opt.step()
        return [p.item() for p in params]

    return opt, params, step


@pytest.mark.parametrize("compile", [True, False])
def test_groups_with_other_numbers_count_for_themselves(compile):
    def recipe(every):
        return fo.accumulate(fo.sgd(1.0), every)

    *_, step = numbers(recipe, {"every": 2}, {"every": 3}, compile=compile, every=2)
    seen = [tuple(step(1.0, 1.0)) for _ in range(6)]
    assert seen == [(0.0, 0.0), (-1.0, 0.0), (-1.0, -1.0), (-2.0, -1.0), (-2.0, -1.0), (-3.0, -2.0)]


@pytest.mark.parametrize("compile", [True, False])
def test_checkpoints_out_of_phase_are_brought_into_phase(compile):
    """As objects once wrote them: b has missed a micro-batch, and holds an old mean."""
    opt, (a, b), step = numbers(lambda: fo.accumulate(fo.sgd(1.0), 2), {}, {}, compile=compile)
    for _ in range(3):
        step(1.0, 1.0)
    saved = clone(opt.state_dict())
    for key, x in {"step": 2.0, "gate": 1.0, "mini_step": 0.0, "open_steps": 1.0}.items():
        saved["state"][1][key].fill_(x)
    saved["state"][1]["acc_grads"].fill_(77.0)
    opt.load_state_dict(saved)
    assert opt.state[b]["mini_step"].item() == opt.state[a]["mini_step"].item() == 1.0
    assert step(1.0, 1.0) == [-2.0, -1.5]
    assert opt.state[b]["step"].item() == 3.0
    assert opt.state[b]["open_steps"].item() == 2.0


def test_a_plateau_is_one_for_late_joiners():
    opt, (a, b), _ = numbers(
        lambda: fo.chain(fo.scale_by_lr(1.0), fo.reduce_on_plateau(0.5, patience=2)), {}, {}
    )
    for i in range(6):
        a.grad, b.grad = torch.ones(1), torch.ones(1) if i > 3 else None
        opt.step(lambda: torch.tensor(1.0))
    assert opt.state[b]["scale"].item() == opt.state[a]["scale"].item() == 0.25
    assert (a.item(), b.item()) == (-1 - 1 - 0.5 - 0.5 - 0.25 - 0.25, -0.5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_meta_gradients_go_through_a_batch_with_gaps():
    lr = torch.tensor(0.5, requires_grad=True)
    a, b = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    params = [a.clone(), b.clone()]
    opt = Optimizer(
        [{"params": params}],
        lambda lr, differentiable: fo.accumulate(fo.sgd(lr), 2),
        lr=lr,
        differentiable=True,
    )
    for y in (torch.ones(1), None, None, torch.ones(1)):
        params[0].grad, params[1].grad = torch.ones(1), y
        opt.step()
    (params[0] + params[1]).sum().backward()
    assert (params[0].item(), params[1].item()) == (-1.0, -0.25)
    assert lr.grad is not None
    assert lr.grad.item() == -2.5


def test_the_count_outlives_a_checkpoint_where_nobody_has_it():
    """a and b take turns, so the optimizer has made more steps than either."""

    def recipe():
        return fo.conditionally_mask(fo.sgd(1.0), lambda step: step >= 3)

    opt, _, step = numbers(recipe, {}, {})
    for i in range(3):
        step(*[1.0, None][:: -1 if i % 2 else 1])
    again, _, go_on = numbers(recipe, {}, {})
    again.load_state_dict(clone(opt.state_dict()))
    assert go_on(None, 1.0) == [0.0, -1.0]


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("around", ["sequence", "flatten", "masked"])
def test_trees_and_rules_measure_together(compile, around):
    def recipe(lr, whole=False):
        if not whole:
            return fo.chain(CLIP, fo.sgd(lr))
        if around == "flatten":
            return fo.flatten(fo.chain(CLIP, fo.sgd(lr)))
        if around == "masked":
            return fo.chain(fo.masked(fo.flatten(CLIP), "*"), fo.sgd(lr))
        return silent(CLIP, fo.sgd(lr))

    *_, step = numbers(recipe, {}, {"whole": True}, {"whole": True}, compile=compile, lr=1.0)
    before = [0.0] * 3
    for g in (1.0, 0.5, 1.0):
        after = step(2.0 * g, g, 2.0 * g)
        moved = [x - y for x, y in zip(before, after, strict=True)]
        norm = max(1.0, 3.0 * g)
        assert moved == pytest.approx([2 * g / norm, g / norm, 2 * g / norm], rel=1e-5)
        before = after


def test_gates_of_trees_and_rules_decide_alike():
    def recipe(whole=False):
        return fo.apply_if_finite((silent if whole else fo.chain)(CLIP, fo.sgd(1.0)), 2)

    *_, step = numbers(recipe, {}, {"whole": True})
    for grads in ((3.0, 4.0), (math.nan, 4.0), (3.0, math.inf)):  # the first of them moves
        assert step(*grads) == pytest.approx([-0.6, -0.8])


def test_a_gate_that_is_shut_in_one_group_keeps_it_out_of_the_sum():
    def recipe(first=0):
        return fo.conditionally_mask(silent(CLIP, fo.sgd(1.0)), lambda step: step >= first)

    *_, step = numbers(recipe, {}, {"first": 1})
    assert step(3.0, 4.0) == pytest.approx([-1.0, 0.0])
    assert step(3.0, 4.0) == pytest.approx([-1.6, -0.8])


def test_another_order_in_another_group_is_an_error():
    def recipe(swap=False):
        parts = [CLIP, fo.normalize()]
        return silent(*(parts[::-1] if swap else parts), fo.sgd(1.0))

    _, params, step = numbers(recipe, {}, {"swap": True}, start=1.0)
    with pytest.raises(ValueError, match="in different orders"):
        step(1.0, 1.0)
    assert [p.item() for p in params] == [1.0, 1.0]


def test_nothing_is_written_before_all_totals_are_known():
    def fails(grads, state, params=None):
        raise RuntimeError("no")

    def recipe(bad=False):
        end = fo.GradientTransformation(lambda params: fo.EmptyState(), fails)
        return silent(CLIP, fo.sgd(1.0), end if bad else fo.identity())

    opt, params, step = numbers(recipe, {}, {"bad": True}, start=1.0)
    with pytest.raises(RuntimeError, match="no"):
        step(1.0, 1.0)
    assert params[0].item() == 1.0
    assert not opt.state[params[0]]


@pytest.mark.parametrize(("groups", "runs"), [(1, 1), (2, 2)])
def test_one_group_alone_runs_once(groups, runs):
    calls = []

    def update(grads, state, params=None):
        calls.append(1)
        return grads, state

    counted = fo.GradientTransformation(lambda params: fo.EmptyState(), update)
    *_, step = numbers(lambda: fo.chain(counted, CLIP, fo.sgd(1.0)), *[{}] * groups)
    step(*[1.0] * groups)
    assert len(calls) == runs * groups


def test_a_closure_of_the_user_hides_nothing():
    """Rules inside a transformation that cannot be looked into measure over all groups, too."""
    inside = fo.chain(CLIP, fo.sgd(1.0))

    def update(grads, state, params=None):
        return inside.update(grads, state, params)

    *_, step = numbers(lambda: fo.GradientTransformation(inside.init, update), {}, {})
    assert step(3.0, 4.0) == pytest.approx([-0.6, -0.8])


def noisy():
    return fo.add_noise(1.0, 0.55, seed=3)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    "recipe",
    [noisy, fo.noisy_sgd, lambda: fo.keep_snapshots(noisy()), lambda: fo.flatten(noisy())],
)
def test_parameters_of_different_groups_get_independent_noise(recipe, named):
    def noise(*groups):
        params = {name: torch.zeros(64, requires_grad=True) for group in groups for name in group}
        for p in params.values():
            p.grad = torch.zeros(64)
        given = {name: (name, p) if named else p for name, p in params.items()}
        Optimizer([{"params": [given[x] for x in group]} for group in groups], recipe).step()
        return torch.stack([p.detach() for p in params.values()])

    found = noise("ab", "c")
    assert (torch.corrcoef(found) - torch.eye(3)).abs().max() < 0.5
    assert torch.equal(found[:2], noise("ab"))


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [(noisy, (3,)), (noisy, (1, 2)), (lambda: fo.keep_snapshots(noisy()), (1, 1, 1))],
)
def test_parameters_of_one_name_get_independent_noise(recipe, sizes):
    """As those of two modules, each with its own names."""
    params = [torch.zeros(64, requires_grad=True) for _ in range(3)]
    for p in params:
        p.grad = torch.zeros(64)
    left = iter(params)
    Optimizer([{"params": [("w", next(left)) for _ in range(n)]} for n in sizes], recipe).step()
    found = torch.stack([p.detach() for p in params])
    assert (torch.corrcoef(found) - torch.eye(3)).abs().max() < 0.5
