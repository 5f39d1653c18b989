"""Measurements that a state carries."""

import math

import pytest
import torch
from helpers import assert_close, assert_same, run, step_object, through_file

import functional_optim as fo
from functional_optim import adapters
from functional_optim.measures import Measure

EVERY = {
    "norm": fo.measures.global_norm,
    "average": fo.measures.mean,
    "size": fo.measures.rms,
    "nans": fo.measures.nan_count,
    "l1": lambda x: x.abs().sum(),
    "spread": Measure(
        lambda x: (x.sum(), (x * x).sum(), torch.ones_like(x).sum()),
        lambda s, q, n: fo.numeric.sqrt(q / n - (s / n) ** 2),
    ),
}


def trees(count, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = {"a": (3, 4), "b": (), "c": (5,)}
    return [{k: torch.randn(s, dtype=dtype) for k, s in shapes.items()} for _ in range(count)]


def expected(tree):
    x = torch.cat([y.double().reshape(-1) for y in tree.values()])
    numbers = (x.norm(), x.mean(), x.square().mean().sqrt(), x.isnan().sum(), x.abs().sum())
    numbers += (x.std(correction=0),)
    return dict(zip(EVERY, map(float, numbers), strict=True))


def read(state):
    return {name: float(fo.get(state, name)) for name in EVERY}


def check(got, wanted, tolerance=1e-6):
    for name, value in wanted.items():
        assert math.isclose(got[name], value, rel_tol=tolerance, abs_tol=tolerance), name


def test_measurements_are_of_the_updates_at_their_place():
    params, *grads = trees(3)
    tx = fo.chain(fo.scale(2.0), fo.monitor(EVERY), fo.clip_by_global_norm(0.5))
    state = tx.init(params)
    assert set(read(state).values()) == {0.0}
    for g in grads:
        _, state = tx.update(g, state, params)
        check(read(state), expected({name: 2 * x for name, x in g.items()}))
    plain = run(fo.chain(fo.scale(2.0), fo.clip_by_global_norm(0.5)), params, grads)[0]
    assert_same(run(tx, params, grads)[0], plain)


@pytest.mark.parametrize("compile", [False, "strict"])
def test_an_object_measures_all_groups_together(compile):
    params, *grads = trees(3, torch.float32)
    mine = [torch.nn.Parameter(p) for p in params.values()]
    groups = [{"params": mine[:1]}, {"params": mine[1:]}]
    recipe = lambda lr: fo.chain(fo.monitor(EVERY), fo.scale_by_lr(lr))  # noqa: E731
    opt = adapters.Optimizer(groups, recipe, lr=0.1, compile=compile)
    for g in grads:
        step_object(opt, [g])
        for p in mine:
            check({name: float(opt.state[p][name]) for name in EVERY}, expected(g), 1e-5)


def test_two_monitors_of_one_name_need_names_of_their_own():
    norm = {"norm": fo.measures.global_norm}
    with pytest.raises(ValueError, match="named_chain"):
        fo.chain(fo.monitor(norm), fo.scale(2.0), fo.monitor(norm))
    before, after = ("before", fo.monitor(norm)), ("after", fo.monitor(norm))
    tx = fo.named_chain(before, ("double", fo.scale(2.0)), after)
    params, g = trees(2)
    _, state = tx.update(g, tx.init(params), params)
    assert_close(fo.get(state, "after.norm"), 2 * fo.get(state, "before.norm"), 1e-6)


# ---------------------------------------------------------------- around a transformation
CLIP = 3.0
MEASURES = {**fo.measures.diagnostics, "changed": fo.measures.changed}


def by_hand(g, u, p):
    """The numbers of `MEASURES`, from the vectors themselves."""
    g, u, p = (torch.view_as_real(x) if x.is_complex() else x for x in (g, u, p))
    g, u, p = (x.double().reshape(-1) for x in (g, u, p))
    return {
        **{"grad_norm": g.norm(), "update_norm": u.norm(), "param_norm": p.norm()},
        **{"update_ratio": u.norm() / p.norm(), "effective_lr": u.norm() / g.norm()},
        **{"cosine": -(g @ u) / (g.norm() * u.norm()), "changed": float((g != u).any())},
    }


def clipped(lr):
    return fo.chain(fo.clip_by_global_norm(CLIP), fo.adamw(lr))


def watched(lr, make=clipped, measures=MEASURES, **more):
    return fo.monitor(measures, around=make(lr), **more)


def in_turns(way, make, params, grads):
    """The gradients, updates and parameters of each step, and the numbers that are read."""
    ours, plain, state = make(0.1), clipped(0.1), None
    if way in ("eager", "strict"):
        mine = {name: torch.nn.Parameter(p.clone()) for name, p in params.items()}
        how = "strict" if way == "strict" else False
        opt = adapters.Optimizer(mine.items(), make, lr=0.1, compile=how)
    else:
        step, kept = fo.compile(ours, strict=True), ours.init(params)
    for g in grads:
        state = plain.init(params) if state is None else state
        u, state = plain.update(g, state, params)
        if way in ("eager", "strict"):
            for name, p in mine.items():
                p.grad = g[name].clone()
            opt.step()
            yield g, u, params, opt.numbers()
        elif way == "compile":
            _, kept = step(g, kept, {name: p.clone() for name, p in params.items()})
            yield g, u, params, fo.numbers(kept)
        else:
            _, kept = ours.update(g, kept, params)
            yield g, u, params, fo.numbers(kept)
        params = fo.apply_updates(params, u)


WAYS = pytest.mark.parametrize("way", ["update", "compile", "eager", "strict"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128])
@WAYS
def test_each_tensor_is_measured_before_and_after(way, dtype):
    params, *grads = trees(4, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    make = lambda lr: watched(lr, per_tensor=True)  # noqa: E731
    for g, u, p, found in in_turns(way, make, params, grads):
        for name in params:
            wanted = by_hand(g[name], u[name], p[name])
            check({key: found[f"{key}/{name}"] for key in wanted}, wanted, tolerance)


@WAYS
def test_the_whole_tree_is_measured_before_and_after(way):
    params, *grads = trees(4)
    for *seen, found in in_turns(way, watched, params, grads):
        g, u, p = (torch.cat([x.reshape(-1) for x in tree.values()]) for tree in seen)
        check(found, by_hand(g, u, p), 1e-6)  # carried in float32


def test_the_share_of_clipped_steps():
    """All steps count alike at first; later ones fade with 1 / steps."""
    share = fo.measures.averaged(fo.measures.changed, 3)
    clip = fo.clip_by_global_norm(1.0)
    wanted, w = 0.0, {"w": torch.zeros(1)}
    each = fo.monitor({"share": share}, around=clip, per_tensor=True)
    total = fo.monitor({"share": share}, around=clip)
    states = [tx.init(w) for tx in (each, total)]
    for t, size in enumerate((2.0, 0.5, 1.0, 3.0, 3.0, 0.1), 1):
        wanted += (float(size > 1.0) - wanted) / min(t, 3)
        g = {"w": torch.tensor([size])}
        states = [tx.update(g, s, w)[1] for tx, s in zip((each, total), states, strict=True)]
        found = [x for s in states for x in fo.numbers(s, "share").values()]
        assert found == pytest.approx([wanted, wanted], abs=1e-6)
    assert wanted == pytest.approx(0.4691, abs=1e-4)


def test_a_nan_stays_in_averages_only():
    both = {"now": fo.measures.grad_norm, "mean": fo.measures.averaged(fo.measures.grad_norm, 9)}
    tx, w = fo.monitor(both, around=fo.identity(), per_tensor=True), torch.ones(1)
    state = tx.init(w)
    for g in (math.nan, 2.0):
        _, state = tx.update(torch.tensor([g]), state, w)
    assert fo.get(state, "now") == 2.0
    assert fo.get(state, "mean").isnan()


def test_nothing_is_divided_by_zero():
    tx = fo.monitor(fo.measures.diagnostics, around=fo.sgd(0.1), per_tensor=True)
    total = fo.monitor(fo.measures.diagnostics, around=fo.sgd(0.1))
    w = {"w": torch.zeros(2), "none": torch.zeros(0)}
    for g in (torch.zeros(2), torch.ones(2)):
        for one in (tx, total):
            state = one.update({"w": g, "none": w["none"]}, one.init(w), w)[1]
            found = fo.numbers(state)
            assert all(map(math.isfinite, found.values()))
            assert found.get("update_ratio/w", found.get("update_ratio")) == 0.0
            size = found.get("cosine/w", found.get("cosine"))
            assert size == pytest.approx(float(g[0]))


def test_a_tensor_without_a_gradient_keeps_its_numbers():
    params, g, h = trees(3)
    tx = watched(0.1, per_tensor=True)
    _, state = tx.update(g, tx.init(params), params)
    before = fo.numbers(state, "cosine")
    after = fo.numbers(tx.update({**h, "a": None}, state, params)[1], "cosine")
    assert after["cosine/a"] == before["cosine/a"]
    assert after["cosine/c"] != before["cosine/c"]


def test_the_numbers_of_each_tensor_are_saved():
    params, *grads = trees(4)
    mine = [torch.nn.Parameter(p.clone()) for p in params.values()]
    share = {"share": fo.measures.clip_share}

    def make(lr):
        clip = fo.monitor(share, around=fo.clip_by_global_norm(CLIP), per_tensor=True)
        return fo.chain(clip, fo.adamw(lr))

    opt = adapters.Optimizer(mine, make, lr=0.1, compile=False)
    step_object(opt, grads[:2])
    other = adapters.Optimizer(mine, make, lr=0.1, compile=False)
    other.load_state_dict(through_file(opt.state_dict()))
    assert other.numbers() == opt.numbers()
    small = [{name: 1e-3 * x for name, x in grads[2].items()}]
    step_object(other, small)
    assert list(other.numbers("share").values()) == pytest.approx([2 / 3] * len(mine))


# ---------------------------------------------------------------- reading
def test_numbers_are_those_of_get():
    params, g = trees(2)
    tx = fo.chain(watched(fo.schedules.linear(0.1, 0.0, 4)), fo.snapshot("x", fo.measures.mean))
    state = tx.update(g, tx.init(params), params)[1]
    found = fo.numbers(state)
    assert {"step", "lr", "betas.0", "cosine", "x"} <= set(found)
    assert not any(name.startswith("exp_avg") for name in found)
    assert all(found[name] == float(fo.get(state, name)) for name in found)
    assert list(fo.numbers(state, "x", "lr")) == ["x", "lr"]
    with pytest.raises(KeyError, match="no scalar called 'exp_avg'; it has step"):
        fo.numbers(state, "exp_avg")


@pytest.mark.parametrize("names", [False, True])
def test_an_object_reads_the_numbers_of_all_groups(names):
    torch.manual_seed(0)
    halves = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]
    schedule = fo.schedules.linear(0.1, 0.0, 10)

    def make(lr):
        return fo.chain(fo.snapshot("n", fo.measures.global_norm), watched(lr, per_tensor=True))

    groups = [
        {"params": (x.named_parameters() if names else x.parameters()), "lr": lr}
        for x, lr in zip(halves, (0.5, schedule), strict=True)
    ]
    opt = adapters.Optimizer(groups, make, lr=0.1, compile=False)
    assert opt.numbers("lr") == {"lr/0": 0.5, "lr/1": pytest.approx(0.1)}
    for _ in range(2):
        halves[1](halves[0](torch.ones(1, 2))).sum().backward()
        opt.step()
    found = opt.numbers()
    assert found["step"] == 2.0
    assert (found["lr/0"], found["lr/1"]) == (0.5, pytest.approx(0.09))
    for k, half in enumerate(halves):
        for i, (name, p) in enumerate(half.named_parameters()):
            key = f"cosine/{k}.{name if names else i}"
            assert found[key] == float(opt.state[p]["cosine"])
    assert found["n"] == float(opt.state[halves[0].weight]["n"])
    assert not any(name.startswith("exp_avg") for name in found)


def test_groups_of_one_name_are_told_apart_by_index():
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    pairs = zip(params, (0.1, 0.2), strict=True)
    groups = [{"params": [p], "name": "same", "lr": lr} for p, lr in pairs]
    assert adapters.AdamW(groups).numbers("lr") == {"lr/0": 0.1, "lr/1": 0.2}


def test_nothing_to_measure_is_refused():
    with pytest.raises(ValueError, match="monitor got no measure"):
        fo.monitor({})
    tx = fo.leafwise(None, lambda u, slots, p: (u, slots), reduce=lambda u, slots, p: ())
    w = torch.ones(2)
    for step in (tx.update, fo.compile(tx)):
        with pytest.raises(TypeError, match="returned a tuple of nothing"):
            step(w, tx.init(w), w)


@pytest.mark.parametrize("per_tensor", [False, True])
def test_a_measure_takes_no_name_of_another_rule(per_tensor):
    names = ("lr", "exp_avg", "step", "size")
    watch = fo.monitor(dict.fromkeys(names, fo.measures.rms), per_tensor=per_tensor)
    w = 3 * torch.ones(2, dtype=torch.float64)
    for order in (fo.chain(watch, fo.adam(0.1)), fo.chain(fo.adam(0.1), watch)):
        _, state = order.update(w, order.init(w), w)
        assert fo.get(state, "lr") == 0.1
        first = w if order.placements[0].name == "monitor" else -0.1 * torch.ones_like(w)
        assert_close(fo.get(state, "exp_avg"), 0.1 * w, 1e-12)
        for name in ("monitor.lr", "monitor.exp_avg", "monitor.step", "size"):
            assert math.isclose(fo.get(state, name), first.abs().max(), rel_tol=1e-6)
        assert {"lr", "monitor.lr", "size"} <= {*fo.numbers(state)}


def test_a_measure_called_as_a_slot_is_does_not_change_the_checkpoint():
    w = torch.nn.Parameter(torch.ones(2))
    opt = adapters.Optimizer([w], fo.adam, lr=0.1)
    step_object(opt, [{"w": torch.ones(2)}])
    watch = {"exp_avg": fo.measures.rms}
    more = adapters.Optimizer([w], lambda lr: fo.chain(fo.monitor(watch), fo.adam(lr)), lr=0.1)
    more.load_state_dict(opt.state_dict())
    assert_same(more.state[w]["exp_avg"], opt.state[w]["exp_avg"])
