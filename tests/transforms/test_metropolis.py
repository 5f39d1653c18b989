"""Local rules and sampling: links for those who bring their own step."""

import math

import pytest
import torch
from helpers import assert_close, assert_same, clone, through_file
from torch._dynamo.testing import CompileCounterWithBackend

import functional_optim as fo
from functional_optim import adapters


def test_a_delta_is_added_where_a_gradient_is_subtracted():
    w, delta = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, -2.0])}
    tx = fo.apply_delta()
    assert_same(tx.update(delta, tx.init(w), w)[0], delta)
    rate = fo.chain(fo.clip_by_global_norm(1.0), fo.apply_delta(lambda count: 0.5**count))
    state, seen = rate.init(w), []
    for _ in range(3):
        u, state = rate.update({"w": torch.tensor([3.0, 4.0])}, state, w)
        seen.append(u["w"])
    assert_close(torch.stack(seen), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.15, 0.2]]), 1e-6)


def walk(width):
    def propose(params, noise):
        return fo.tree.map(lambda p, z: p + width * z, params, noise)

    return propose


def run(tx, params, energy, steps, state=None):
    """Parameters, state, and the samples (steps, …) of one tensor."""
    state, samples = tx.init(params) if state is None else state, []
    for _ in range(steps):
        updates, state = tx.update(None, state, params, value=energy(params))
        params = fo.apply_updates(params, updates)
        samples.append(state.params)
    return params, state, torch.stack(samples) if isinstance(params, torch.Tensor) else None


def chains(propose, temperature, energy, x, count, steps):
    """Independent chains from x, side by side: samples (steps, count) and the last states."""
    seeds = torch.arange(count)
    start = torch.vmap(lambda seed: fo.metropolis(propose, temperature, seed).init(x))(seeds)
    tx = fo.metropolis(propose, temperature)

    def step(x, state):
        updates, state = tx.update(None, state, x, value=energy(x))
        return fo.apply_updates(x, updates), state

    xs, state, samples = x.expand(count), start, []
    for _ in range(steps):
        xs, state = torch.vmap(step)(xs, state)
        samples.append(state.params)
    return torch.stack(samples), state


def test_a_normal_distribution_is_sampled():
    """Independent chains, so the error of a mean over them is known."""
    n, t = 4000, 2.0
    x = torch.tensor(1.0, dtype=torch.float64)
    samples, state = chains(walk(2.0), t, lambda x: (x - 1) ** 2 / 2, x, n, 60)
    last = samples[-1]
    assert abs(last.mean() - 1) < 4 * math.sqrt(t / n)
    assert abs(last.var() - t) < 4 * t * math.sqrt(2 / n)
    below = 0.5 * (1 + torch.erf((last.sort().values - 1) / math.sqrt(2 * t)))
    assert (below - torch.arange(1, n + 1) / n).abs().max() < 1.95 / math.sqrt(n)  # 0.1 %
    # of |N(0, 2²)| jumps at this temperature about half are accepted
    rate = state.accepted.double().mean() / 59
    assert 0.5 < rate < 0.75


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_a_refused_proposal_is_taken_back_bit_for_bit(dtype):
    torch.manual_seed(0)
    params = {"w": torch.randn(5, dtype=dtype), "b": torch.randn(2, 2, dtype=dtype) * 1e-4}
    tx = fo.metropolis(walk(0.3), temperature=1.0, seed=1)
    state, kept, seen = tx.init(params), None, set()
    energies = [1.0, 0.5, 90.0, 0.4, math.nan, math.inf, 80.0, 0.1]
    for i, value in enumerate(energies):
        before = clone((state, params))
        updates, after = tx.update(None, state, params, value=value)
        assert_same((state, params), before)  # pure
        taken = i in (0, 1, 3, 7)
        kept = params if taken else kept
        assert_same(after.params, kept)
        assert after.value == (value if taken else state.value)
        seen.add(int(after.accepted))
        params, state = fo.apply_updates(params, updates), after
        if dtype is not torch.float64:  # the next one starts at what was kept, not at the refused
            narrow = fo.tree.map(lambda p: p.real if p.is_complex() else p, params)
            assert torch.isfinite(narrow["w"]).all()
            key = fo.metropolis(walk(0.3), 1.0, 1)
            again = key.update(None, before[0], before[1], value=value)[0]
            assert_same(fo.apply_updates(before[1], again), params)
    assert seen == {0, 1, 2, 3}
    assert int(state.step) == len(energies)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_proposal_leaves_alone_comes_back_in_the_bits(dtype):
    """One entry is moved at a time, and every move is refused."""

    def propose(x, z):
        return torch.where(z == z.max(), x + 100 * z, x)

    torch.manual_seed(0)
    x = start = torch.randn(50).to(dtype)
    tx = fo.metropolis(propose, temperature=0.0)
    state = tx.init(x)
    for i in range(40):
        updates, state = tx.update(None, state, x, value=0.0 if i == 0 else 1.0)
        x = fo.apply_updates(x, updates)
        assert (x != start).sum() == 1
    assert torch.equal(state.params, start)
    assert int(state.accepted) == 0


def test_annealing_finds_the_lowest_of_many_wells():
    def energy(x):  # Rastrigin in one dimension: a well at every integer
        return x**2 + 10 * (1 - torch.cos(2 * math.pi * x))

    x = torch.tensor(4.0, dtype=torch.float64)
    cooling = fo.schedules.exponential_decay(20.0, 1, 0.97)
    _, state = chains(walk(0.7), cooling, energy, x, 20, 300)
    assert state.params.abs().max() < 0.1
    _, greedy = chains(walk(0.1), 0.0, energy, x, 20, 100)
    assert greedy.params.min() > 3.5  # at temperature 0 it stays in its well


def test_a_temperature_of_infinity_refuses_nothing_finite():
    x = torch.zeros(1)
    _, state, _ = run(fo.metropolis(walk(1.0), math.inf), x, lambda x: (x**2).sum() * 100, 10)
    assert int(state.accepted) == 9


@pytest.mark.usefixtures("fresh_dynamo")
def test_it_is_one_graph_whatever_the_temperature():
    def step(x, state, temperature):
        tx = fo.metropolis(walk(0.5), temperature)
        updates, state = tx.update(None, state, x, value=(x * x).sum())
        return fo.apply_updates(x, updates), state

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    x = torch.ones(3, dtype=torch.float64)
    eager = traced = (x, fo.metropolis(walk(0.5)).init(x))
    frames = []
    for i in range(5):
        degrees = torch.tensor(1.0 / (1 + i), dtype=torch.float64)
        eager, traced = step(*eager, degrees), compiled(*traced, degrees)
        assert_close(traced, eager, 1e-9)
        frames.append(counter.frame_count)
    assert frames == [frames[0]] * 5


def recipe(temperature=0.05, width=0.3):
    return fo.metropolis(walk(width), temperature, seed=4)


def make_object(start, **hyper):
    w = torch.nn.Parameter(start.clone(), requires_grad=False)
    return w, adapters.Optimizer([("w", w)], recipe, **hyper)


def test_the_optimizer_object_samples_without_gradients_and_resumes():
    target = torch.tensor([1.0, -2.0])

    def steps(w, opt, count):
        for _ in range(count):
            opt.step(lambda: (w - target).square().sum())

    w, opt = make_object(torch.zeros(2))
    steps(w, opt, 150)
    other, resumed = make_object(w.detach())
    resumed.load_state_dict(through_file(opt.state_dict()))
    steps(w, opt, 150)
    steps(other, resumed, 150)
    assert torch.equal(w, other)
    state = opt.state[w]
    assert (state["params.w"] - target).norm() < 0.5
    assert state["step"] == 300
    assert 10 < int(state["accepted"]) < 250
    tx, x = recipe(), {"w": torch.zeros(2)}
    expected, _, _ = run(tx, x, lambda x: (x["w"] - target).square().sum(), 300)
    assert torch.equal(expected["w"], w)
    with pytest.raises(RuntimeError, match="reads the loss"):
        opt.step()


def test_a_scheduler_cools_the_object_and_frozen_leaves_stay():
    def cold(lr=1.0):
        return fo.chain(fo.freeze("fixed"), fo.metropolis(walk(0.5), lr))

    model = torch.nn.ParameterDict({"fixed": torch.ones(2), "free": torch.ones(2)})
    opt = adapters.Optimizer(model.named_parameters(), cold, lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)
    for _ in range(200):
        opt.step(lambda: model["free"].square().sum())
        scheduler.step()
    assert torch.equal(model["fixed"], torch.ones(2))
    state = opt.state[model["fixed"]]
    assert float(state[next(key for key in state if key.endswith("value"))]) < 0.05
