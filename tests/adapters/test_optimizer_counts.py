"""Micro-batches, gates and every-k are counts of the optimizer, whoever has a gradient."""

from __future__ import annotations

import math
import random

import pytest
import torch
from helpers import assert_close, clone
from sampling import some

import functional_optim as fo
from functional_optim.adapters import Optimizer

NAMES = ("a", "b", "c", "d")
GROUPS = (("a", "b"), ("c", "d"))


def batch(every=2, mean=True):
    return fo.accumulate(
        fo.chain(fo.clip_by_global_norm(0.5), fo.adamw(0.1, weight_decay=0.1)), every, mean=mean
    )


RECIPES = {
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
    "masked": lambda: fo.chain(fo.masked(fo.accumulate(fo.trace(0.9), 2), ["a", "b"]), fo.sgd(0.1)),
}


def start():
    torch.manual_seed(0)
    return {name: torch.randn(3) for name in NAMES}


def patterns(seed, count=20):
    """Gradients, some of them None, of which one at least is there in each step."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows = []
    for _ in range(count):
        kept = [name for name in NAMES if rng.random() < 0.6] or [rng.choice(NAMES)]
        rows.append({name: torch.randn(3) if name in kept else None for name in NAMES})
    return rows


def by_update(tx, rows):
    params = start()
    state = tx.init(params)
    for grads in rows:
        updates, state = tx.update(grads, state, params)
        params = fo.apply_updates(params, updates)
    return params, state


def by_compile(tx, rows):
    params, step = start(), fo.compile(tx)
    state = tx.init(params)
    for grads in rows:
        params, state = step(grads, state, params)
    return params, state


def an_optimizer(recipe, params, compile=False, groups=GROUPS):
    return Optimizer(
        [{"params": [(name, params[name]) for name in group]} for group in groups],
        recipe,
        compile=compile,
    )


def by_object(recipe, rows, compile=False, saved_at=None, traced=False):
    params = {name: torch.nn.Parameter(p) for name, p in start().items()}
    opt = an_optimizer(recipe, params, compile)
    for i, grads in enumerate(rows):
        if i == saved_at:
            saved = clone(opt.state_dict())
            opt = an_optimizer(recipe, params, compile)
            opt.load_state_dict(saved)
        for name, p in params.items():
            p.grad = None if grads[name] is None else grads[name].clone()
        if traced:
            torch.func.vmap(lambda x, opt=opt: (opt.step(), x)[1])(torch.zeros(1))
        else:
            opt.step()
    return {name: p.detach() for name, p in params.items()}, opt


def naive(rows, every, mean=True):
    """A loop over p.grad: clip and step with what a batch has collected."""
    params = start()
    sums, moments, t = {}, dict.fromkeys(NAMES, (0.0, 0.0)), 0
    for i, grads in enumerate(rows):
        for name, g in grads.items():
            if g is not None:
                sums[name] = sums.get(name, 0.0) + g
        if (i + 1) % every:
            continue
        t += 1
        live = {x: s / every if mean else s for x, s in sums.items() if grads[x] is not None}
        norm = math.sqrt(sum(float((g**2).sum()) for g in live.values()))
        for name, g in live.items():
            g = g * min(1.0, 0.5 / norm)
            m, v = moments[name]
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            moments[name] = (m, v)
            root = (v / (1 - 0.999**t)).sqrt() + 1e-8
            params[name] = params[name] * (1 - 0.1 * 0.1) - 0.1 * (m / (1 - 0.9**t)) / root
        sums = {}
    return params


@pytest.mark.parametrize("seed", some(range(3)))
@pytest.mark.parametrize(
    ("name", "every", "mean"), [("two", 2, True), ("three", 3, True), ("sum", 3, False)]
)
def test_micro_batches_are_those_of_a_loop(name, every, mean, seed):
    rows = patterns(seed)
    assert_close(by_update(RECIPES[name](), rows)[0], naive(rows, every, mean), 1e-5)


@pytest.mark.parametrize("seed", some(range(3)))
@pytest.mark.parametrize("name", RECIPES)
def test_objects_step_as_the_pure_form(name, seed):
    rows = patterns(seed)
    want, state = by_update(RECIPES[name](), rows)
    assert_close(by_compile(RECIPES[name](), rows)[0], want, 1e-5)
    for compile in (True, False):
        got, opt = by_object(RECIPES[name], rows, compile)
        assert_close(got, want, 1e-5)
        for key, value in state.carry.items():
            kept = [mine[key].item() for mine in opt.state.values() if key in mine]
            assert kept
            assert kept == pytest.approx([value.item()] * len(kept), rel=1e-5)
    assert_close(by_object(RECIPES[name], rows, saved_at=7)[0], want, 1e-5)
    assert_close(by_object(RECIPES[name], rows, saved_at=12)[0], want, 1e-5)


@pytest.mark.parametrize("name", ["two", "finite", "mask", "lookahead", "monitor"])
def test_steps_that_are_traced_count_alike(name):
    rows = patterns(4, 9)
    want, _ = by_update(RECIPES[name](), rows)
    assert_close(by_object(RECIPES[name], rows, traced=True)[0], want, 1e-5)


def test_a_missed_first_micro_batch_leaves_parameters_in_phase():
    a, b = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    opt = Optimizer([a, b], lambda: fo.accumulate(fo.sgd(1.0), 2), compile=False)
    moved = []
    for i in range(4):
        a.grad, b.grad = torch.ones(1), None if i == 0 else torch.ones(1)
        opt.step()
        moved.append((a.item(), b.item()))
    assert moved == [(0.0, 0.0), (-1.0, -0.5), (-1.0, -0.5), (-2.0, -1.5)]


def test_a_group_that_is_added_takes_the_counts():
    rows = patterns(5)
    params = {name: torch.nn.Parameter(p) for name, p in start().items()}
    opt = an_optimizer(batch, params, groups=(GROUPS[0],))
    for i, grads in enumerate(rows):
        if i == 7:
            opt.add_param_group({"params": [(name, params[name]) for name in GROUPS[1]]})
        if i < 7:
            grads.update(c=None, d=None)
            grads["a"] = torch.ones(3) if grads["b"] is None else grads["a"]
        for name, p in params.items():
            p.grad = None if grads[name] is None else grads[name].clone()
        opt.step()
    got = {name: p.detach() for name, p in params.items()}
    assert_close(got, by_update(batch(), rows)[0], 1e-5)


@pytest.mark.parametrize("compile", [True, False])
def test_groups_with_other_numbers_count_for_themselves(compile):
    a, b = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    opt = Optimizer(
        [{"params": [a], "every": 2}, {"params": [b], "every": 3}],
        lambda every: fo.accumulate(fo.sgd(1.0), every),
        compile=compile,
        every=2,
    )
    seen = []
    for _ in range(6):
        a.grad, b.grad = torch.ones(1), torch.ones(1)
        opt.step()
        seen.append((a.item(), b.item()))
    assert seen == [(0.0, 0.0), (-1.0, 0.0), (-1.0, -1.0), (-2.0, -1.0), (-2.0, -1.0), (-3.0, -2.0)]


@pytest.mark.parametrize("compile", [True, False])
def test_checkpoints_out_of_phase_are_brought_into_phase(compile):
    """As objects once wrote them: b has missed a micro-batch, and holds an old mean."""
    a, b = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    opt = Optimizer([a, b], lambda: fo.accumulate(fo.sgd(1.0), 2), compile=compile)
    a.grad, b.grad = torch.ones(1), torch.ones(1)
    for _ in range(3):
        opt.step()
    saved = clone(opt.state_dict())
    for key, x in {"step": 2.0, "gate": 1.0, "mini_step": 0.0, "open_steps": 1.0}.items():
        saved["state"][1][key].fill_(x)
    saved["state"][1]["acc_grads"].fill_(77.0)
    opt.load_state_dict(saved)
    assert opt.state[b]["mini_step"].item() == opt.state[a]["mini_step"].item() == 1.0
    opt.step()
    assert (a.item(), b.item()) == (-2.0, -1.5)
    assert opt.state[b]["step"].item() == 3.0
    assert opt.state[b]["open_steps"].item() == 2.0


def test_a_plateau_is_one_for_late_joiners():
    a, b = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    opt = Optimizer(
        [a, b], lambda: fo.chain(fo.scale_by_lr(1.0), fo.reduce_on_plateau(0.5, patience=2))
    )
    for i in range(6):
        a.grad, b.grad = torch.ones(1), torch.ones(1) if i > 3 else None
        opt.step(lambda: torch.tensor(1.0))
    assert opt.state[b]["scale"].item() == opt.state[a]["scale"].item() == 0.25
    assert (a.item(), b.item()) == (-1 - 1 - 0.5 - 0.5 - 0.25 - 0.25, -0.5)


@pytest.mark.parametrize("how", ["update", "compile", "object"])
def test_what_a_batch_has_collected_is_never_in_the_next(how):
    """A leaf that misses the last micro-batch, and the first of the next batch."""
    gradients = [(1.0, 8.0), (1.0, None), (1.0, None), (1.0, 2.0)]
    rows = [
        {"a": torch.tensor([x]), "b": None if y is None else torch.tensor([y])}
        for x, y in gradients
    ]
    tx = fo.accumulate(fo.sgd(1.0), 2)
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    state, step = tx.init(params), fo.compile(tx)
    mine = {name: torch.nn.Parameter(p.clone()) for name, p in params.items()}
    opt = Optimizer(mine.values(), lambda: tx)
    for grads in rows:
        if how == "object":
            for name, p in mine.items():
                p.grad = grads[name]
            opt.step()
            params = {name: p.detach() for name, p in mine.items()}
        elif how == "compile":
            params, state = step(grads, state, params)
        else:
            updates, state = tx.update(grads, state, params)
            params = fo.apply_updates(params, updates)
    assert (params["a"].item(), params["b"].item()) == (-2.0, -1.0)


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
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]

    def recipe():
        return fo.conditionally_mask(fo.sgd(1.0), lambda step: step >= 3)

    opt = Optimizer(params, recipe)
    for i in range(4):
        if i == 3:
            saved = clone(opt.state_dict())
            opt = Optimizer(params, recipe)
            opt.load_state_dict(saved)
        params[i % 2].grad, params[1 - i % 2].grad = torch.ones(1), None
        opt.step()
    assert [p.item() for p in params] == [0.0, -1.0]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_step_of_an_object_counts_alike():
    rows = patterns(6, 6)
    params = {name: torch.nn.Parameter(p) for name, p in start().items()}
    opt = an_optimizer(batch, params)
    step = torch.compile(opt.step, fullgraph=True, backend="eager")
    for grads in rows:
        for name, p in params.items():
            p.grad = None if grads[name] is None else grads[name].clone()
        step()
    got = {name: p.detach() for name, p in params.items()}
    assert_close(got, by_update(batch(), rows)[0], 1e-5)


def test_a_rule_for_absent_tensors_needs_numbers_of_all():
    with pytest.raises(ValueError, match="shared=True"):
        fo.leafwise(
            None, lambda u, slots, p: (u, slots), runs=fo.Runs(absent=lambda slots: slots), name="x"
        )


@pytest.fixture
def a_process_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("a_process_group")
@pytest.mark.parametrize("name", some(["monitored", "two", "finite", "mask"], 2))
def test_a_part_without_gradients_counts_with_other_processes(name):
    """Others may have some, so the gates of a tree that is a part go on in every step."""

    def recipe():
        if name == "monitored":
            watch = fo.monitor({"n": fo.measures.global_norm})
            return fo.chain(fo.sharded_over(batch()), watch)
        return fo.sharded_over(RECIPES[name]())

    rows = patterns(7, 12)
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
