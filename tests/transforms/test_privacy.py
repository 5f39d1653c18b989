"""Gradients of single examples: clipped, summed, noised; and SGD with these."""

import math
import re

import pytest
import torch
from helpers import SHAPES, assert_close, assert_same, make_params

import functional_optim as fo

B = 7


def each(params, seed=1, scale=1.0):
    """B gradients for every leaf, of very different norms."""
    torch.manual_seed(seed)
    sizes = scale * torch.logspace(-2, 1, B, dtype=torch.float64)
    return {
        name: sizes.to(p.real.dtype).reshape(-1, *[1] * p.dim())
        * torch.randn(B, *p.shape, dtype=p.dtype)
        for name, p in params.items()
    }


def naive(grads, clip):
    """The sum of the paper's clipped gradients, without noise, over B."""
    total = {name: torch.zeros_like(g[0]) for name, g in grads.items()}
    for i in range(B):
        mine = {name: g[i] for name, g in grads.items()}
        norm = math.sqrt(sum(float(g.abs().square().sum()) for g in mine.values()))
        for name, g in mine.items():
            total[name] += g / max(1.0, norm / clip)
    return {name: g / B for name, g in total.items()}


def aggregated(params, grads, clip=1.0, noise=0.0, seed=0, steps=1):
    tx = fo.differentially_private_aggregate(clip, noise, seed)
    state = tx.init(params)
    for _ in range(steps):
        found, state = tx.update(grads, state, params)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("clip", [0.3, 1e9])
def test_clipped_sums_are_those_of_a_loop(dtype, clip):
    params = make_params(dtype)
    grads = each(params)
    assert_close(aggregated(params, grads, clip), naive(grads, clip), 1e-13)


@pytest.mark.parametrize("size", [1e3, 1e30, 1e200, math.inf, math.nan])
def test_the_influence_of_one_example_is_bounded(size):
    params = make_params()
    grads = each(params)
    other = {name: g.clone() for name, g in grads.items()}
    for g in other.values():
        g[3] = size
    a, b = (aggregated(params, x, clip=0.5, noise=2.0) for x in (grads, other))
    moved = fo.tree.global_norm(fo.tree.map(torch.sub, a, b))
    assert 0.01 < moved * B < 2 * 0.5  # its old gradient out, a new one in
    for g in other.values():
        g[3] = 0.0
    b = aggregated(params, other, clip=0.5, noise=2.0)
    assert fo.tree.global_norm(fo.tree.map(torch.sub, a, b)) * B <= 0.5 * (1 + 1e-12)


def test_the_noise_has_its_width_and_changes_from_step_to_step():
    w = torch.zeros(200, 250, dtype=torch.float64)
    zero = torch.zeros(4, 200, 250, dtype=torch.float64)
    first, second = (aggregated(w, zero, clip=0.5, noise=3.0, steps=n) for n in (1, 2))
    for z in (first, second):
        assert_close(z.std(), torch.tensor(0.5 * 3.0 / 4, dtype=torch.float64), 0.02)
        assert abs(z.mean()) < 4 * 0.375 / math.sqrt(w.numel())
    assert abs(torch.corrcoef(torch.stack([first.ravel(), second.ravel()]))[0, 1]) < 0.02
    assert_same(aggregated(w, zero, 0.5, 3.0), first)
    assert (aggregated(w, zero, 0.5, 3.0, seed=1) - first).abs().max() > 0.1


def test_numbers_may_be_schedules_and_tensors():
    params = make_params()
    grads = each(params)
    half = fo.differentially_private_aggregate(lambda count: 0.5 ** (1 + count), 1.0, 0)
    state = half.init(params)
    for step in (1, 2):
        found, state = half.update(grads, state, params)
        expected = aggregated(params, grads, torch.tensor(0.5**step), 1.0, steps=step)
        assert_close(found, expected, 1e-14)


def test_dtypes_and_missing_gradients():
    params = {**make_params(torch.bfloat16), "none": torch.zeros(2)}
    grads = {**each(make_params(torch.bfloat16)), "none": None}
    found = aggregated(params, grads, noise=1.0)
    assert found["none"] is None
    assert {g.dtype for g in found.values() if g is not None} == {torch.float32}
    assert aggregated({"a": torch.zeros(2)}, {"a": None}) == {"a": None}


def test_it_feeds_a_chain_in_one_graph_for_all_clips(fresh_dynamo):
    torch.manual_seed(0)
    params = {"w": torch.randn(3, dtype=torch.float64)}
    x, y = torch.randn(B, 3, dtype=torch.float64), torch.randn(B, dtype=torch.float64)

    def loss(params, x, y):
        return (x @ params["w"] - y).square()

    def step(params, state, clip):
        tx = fo.chain(fo.differentially_private_aggregate(clip, 0.5, 3), fo.adam(0.1))
        grads = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)
        updates, state = tx.update(grads, state, params)
        return fo.apply_updates(params, updates), state

    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph

    traced = torch.compile(step, backend=backend, fullgraph=True)
    tx = fo.chain(fo.differentially_private_aggregate(1.0, 0.5, 3), fo.adam(0.1))
    ours = theirs = (params, tx.init(params))
    for clip in torch.tensor([0.5, 0.7, 0.9], dtype=torch.float64):
        ours, theirs = traced(*ours, clip), step(*theirs, clip)
        assert_close(ours, theirs, 1e-12)
    assert len(compiles) == 1
    clips = torch.tensor([0.1, 1.0], dtype=torch.float64)
    together, _ = torch.vmap(lambda clip: step(params, tx.init(params), clip))(clips)
    for i, clip in enumerate(clips):
        alone, _ = step(params, tx.init(params), clip)
        assert_close(together["w"][i], alone["w"], 1e-13)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"vector": (5,)}, "a gradient of shape (5,) for 'vector' of shape (5,); it needs one"),
        ({"scalar": ()}, "a gradient of shape () for 'scalar'"),
        ({"scalar": (3,)}, "got 7 examples for 'cube' and 3 for 'scalar'"),
        ({name: (0, *shape) for name, shape in SHAPES.items()}, "a gradient of shape (0, 2, 3, 2)"),
    ],
)
def test_gradients_without_examples_in_front_are_refused(change, match):
    params = make_params()
    grads = {**each(params), **{name: torch.zeros(shape) for name, shape in change.items()}}
    with pytest.raises(ValueError, match=re.escape(match)):
        aggregated(params, grads)
    with pytest.raises(ValueError, match="update needs the parameters"):
        fo.differentially_private_aggregate(1.0, 1.0, 0).update(grads, None)


def test_dpsgd_clips_each_example_and_adds_noise_once():
    torch.manual_seed(0)
    w = {"a": torch.randn(3, dtype=torch.float64), "b": torch.randn(2, 2, dtype=torch.float64)}
    tx = fo.dpsgd(0.1, l2_norm_clip=1.5, noise_multiplier=0.0, momentum=0.9)
    state, expected = tx.init(w), w
    buffer = fo.tree.map(torch.zeros_like, w)
    for _ in range(3):
        each = {name: torch.randn(4, *p.shape, dtype=torch.float64) for name, p in w.items()}
        squares = [sum(float(g[i].square().sum()) for g in each.values()) for i in range(4)]
        norms = [math.sqrt(x) for x in squares]
        assert max(norms) > 1.5
        for name, g in each.items():
            clipped = sum(g[i] / max(1.0, norms[i] / 1.5) for i in range(4)) / 4
            buffer[name] = 0.9 * buffer[name] + clipped
            expected = expected | {name: expected[name] - 0.1 * buffer[name]}
        updates, state = tx.update(each, state, w)
        w = fo.apply_updates(w, updates)
    assert_close(w, expected, 1e-12)
    noisy = fo.dpsgd(1.0, l2_norm_clip=2.0, noise_multiplier=3.0, seed=1)
    x = torch.zeros(20000)
    u, _ = noisy.update(torch.zeros(5, 20000), noisy.init(x), x)
    assert float(u.std()) == pytest.approx(3.0 * 2.0 / 5, rel=0.03)
    again, _ = noisy.update(torch.zeros(5, 20000), noisy.init(x), x)
    assert_same(u, again)
