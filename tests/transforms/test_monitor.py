"""Measurements that a state carries."""

from __future__ import annotations

import io
import math

import pytest
import torch
from helpers import assert_close, assert_same, run

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
    numbers = (
        x.norm(),
        x.mean(),
        x.square().mean().sqrt(),
        x.isnan().sum(),
        x.abs().sum(),
        x.std(correction=0),
    )
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


def test_measurements_of_parameters():
    params, g = trees(2)
    tx = fo.monitor(EVERY, of="params")
    check(read(tx.update(g, tx.init(params), params)[1]), expected(params))


def test_a_nan_is_counted():
    params, g = trees(2)
    g["a"][0, 0] = g["c"][2] = math.nan
    tx = fo.snapshot("nans", fo.measures.nan_count)
    assert fo.get(tx.update(g, tx.init(params), params)[1], "nans") == 2


@pytest.mark.parametrize("compile", [False, "strict"])
def test_an_object_measures_all_groups_together_and_saves_the_numbers(compile):
    params, *grads = trees(3, torch.float32)
    mine = [torch.nn.Parameter(p) for p in params.values()]

    def recipe(lr):
        return fo.chain(fo.monitor(EVERY), fo.scale_by_lr(lr))

    opt = adapters.Optimizer(
        [{"params": mine[:1]}, {"params": mine[1:]}], recipe, lr=0.1, compile=compile
    )
    for g in grads:
        for p, x in zip(mine, g.values(), strict=True):
            p.grad = x.clone()
        opt.step()
        for p in mine:
            check({name: float(opt.state[p][name]) for name in EVERY}, expected(g), 1e-5)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other = adapters.Optimizer([{"params": mine[:1]}, {"params": mine[1:]}], recipe, lr=0.1)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_close([other.state[p] for p in mine], [opt.state[p] for p in mine], 0.0)


def test_a_masked_monitor_measures_its_leaves_only():
    params, g = trees(2)
    tx = fo.masked(fo.monitor(EVERY), ["a", "c"])
    wanted = expected({name: g[name] for name in ("a", "c")})
    check(read(tx.update(g, tx.init(params), params)[1]), wanted)


def test_two_monitors_of_one_name_need_names_of_their_own():
    norm = {"norm": fo.measures.global_norm}
    with pytest.raises(ValueError, match="named_chain"):
        fo.chain(fo.monitor(norm), fo.scale(2.0), fo.monitor(norm))
    tx = fo.named_chain(
        ("before", fo.monitor(norm)), ("double", fo.scale(2.0)), ("after", fo.monitor(norm))
    )
    params, g = trees(2)
    _, state = tx.update(g, tx.init(params), params)
    assert_close(fo.get(state, "after.norm"), 2 * fo.get(state, "before.norm"), 1e-6)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: fo.monitor({"a b": fo.measures.mean}), ValueError, "cannot be called 'a b'"),
        (lambda: fo.monitor({"_x": fo.measures.mean}), ValueError, "cannot be called '_x'"),
        (lambda: fo.monitor({"for": fo.measures.mean}), ValueError, "cannot be called 'for'"),
        (lambda: fo.monitor({"x": 3}), TypeError, "the measure 'x' is a int"),
        (lambda: fo.snapshot("x", fo.measures.mean, of="loss"), ValueError, "of='loss'"),
    ],
)
def test_bad_input_raises_at_once(make, error, match):
    with pytest.raises(error, match=match):
        make()
