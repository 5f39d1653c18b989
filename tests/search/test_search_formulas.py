"""Each method against a loop over plain numbers, from its paper; and the weights of places."""

import importlib
import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from helpers import assert_close

import functional_optim as fo
from functional_optim import search
from functional_optim.search.cma import active_rates, decompose
from functional_optim.search.shaping import nes_utilities, weigh

D, N, SIGMA = 3, 6, 0.4
START = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def loss(x):
    return (torch.tensor([1.0, 3.0, 10.0], dtype=torch.float64) * x.square()).sum(-1)


def against(method, learn, start, generations=6):
    """`learn(numbers, x, order)` does what tell does, to a dict of tensors named as in the state.

    order: the candidates' indices, best first.
    """
    state = method.init(START, seed=1)
    numbers = {k: v.clone() for k, v in start.items()}
    for t in range(generations):
        x, state = method.ask(state)
        order = sorted(range(len(x)), key=lambda i: float(loss(x[i])))
        numbers = learn(numbers, x, order, t + 1)
        state = method.tell(x, loss(x), state)
        for name, expected in numbers.items():
            assert_close(getattr(state, name), expected, 1e-10)


def constant(value):
    return torch.full((D,), value, dtype=torch.float64)


def test_openai_es():
    def learn(now, x, order, t):
        g = torch.zeros(D, dtype=torch.float64)
        for place, i in enumerate(order):
            g += (place / (N - 1) - 0.5) * (x[i] - now["mean"]) / SIGMA / (N * SIGMA)
        return {"mean": now["mean"] - 0.3 * g}

    against(search.openai_es(N, SIGMA, fo.sgd(0.3)), learn, {"mean": START})


def test_antithetic_candidates_come_in_pairs():
    for n in (6, 7):
        method = search.openai_es(n, SIGMA, fo.sgd(0.3))
        x, _ = method.ask(method.init(START))
        k = n - n // 2
        assert_close(x[: n // 2] + x[k:], (2 * START).expand(n // 2, D), 1e-12)
        if n == 7:
            assert (x[3] - START).abs().min() > 1e-3


def test_pgpe():
    """By pairs, as the paper has it."""
    half = N // 2

    def learn(now, x, order, t):
        m, s = now["mean"], now["sigma"]
        rank = {i: place / (N - 1) - 0.5 for place, i in enumerate(order)}
        shift, spread = torch.zeros_like(m), torch.zeros_like(m)
        for i in range(half):
            e = x[i] - m
            shift += (rank[i] - rank[i + half]) / 2 * e / half
            spread += (rank[i] + rank[i + half]) / 2 * (e**2 - s**2) / s / half
        step = torch.minimum(torch.maximum(-0.5 * spread, -0.2 * s), 0.2 * s)
        return {"mean": m - 0.3 * shift, "sigma": s + step}

    method = search.pgpe(N, SIGMA, fo.sgd(0.3), lr_sigma=0.5)
    against(method, learn, {"mean": START, "sigma": constant(SIGMA)})


def test_snes():
    raw = [max(0.0, math.log(N / 2 + 1) - math.log(k + 1)) for k in range(N)]
    u = [x / sum(raw) - 1 / N for x in raw]
    rate = (3 + math.log(D)) / (5 * math.sqrt(D))

    def learn(now, x, order, t):
        m, s = now["mean"], now["sigma"]
        z = [(x[i] - m) / s for i in order]
        shift = sum(w * y for w, y in zip(u, z, strict=True))
        spread = sum(w * (y**2 - 1) for w, y in zip(u, z, strict=True))
        return {"mean": m + s * shift, "sigma": s * torch.exp(rate / 2 * spread)}

    against(search.snes(N, SIGMA), learn, {"mean": START, "sigma": constant(SIGMA)})


def test_cem():
    def learn(now, x, order, t):
        elite = x[order[:3]]
        mean, deviation = elite.mean(0), elite.std(0, correction=0)
        sigma = now["sigma"] + 0.6 * (deviation - now["sigma"])
        noise = 0.1 / t
        return {
            "mean": now["mean"] + 0.6 * (mean - now["mean"]),
            "sigma": (sigma**2 + noise**2).sqrt(),
        }

    method = search.cem(N, SIGMA, elites=3, smoothing=0.6, noise=lambda count: 0.1 / (1 + count))
    against(method, learn, {"mean": START, "sigma": constant(SIGMA)})


def test_candidates_without_a_finite_loss_are_no_elites():
    method = search.cem(N, SIGMA, elites=4, smoothing=1.0)
    x, state = method.ask(method.init(START))
    losses = torch.tensor([math.nan, 1.0, math.inf, 2.0, math.nan, math.nan])
    state = method.tell(x, losses, state)
    # the finite ones have a whole place each, the others share two
    assert_close(state.mean, x[[1, 3]].mean(0), 1e-12)
    assert_close(state.sigma, x[[1, 3]].std(0, correction=0), 1e-12)


def test_a_covariance_matrix_that_is_nearly_singular_still_gives_candidates():
    state = search.cma_es(N, SIGMA).init(START)
    broken = torch.tensor([1.0, 1e-20, -1e-16], dtype=torch.float64).diag()
    found = decompose(state, broken, active_rates(D, N))
    assert_close(found["D"].sort().values, torch.tensor([1e-7, 1e-7, 1.0]).double(), 1e-6)


def test_sep_cma_es_takes_candidates_from_far_away():
    """No deviation changes by more than a factor of e, up or down; a plain exponential ends at 0
    or infinity."""
    method = search.sep_cma_es(N, SIGMA)
    for far in ([0], [N - 1]):
        x, state = method.ask(method.init(START))
        x[far] = 1e6
        state = method.tell(x, torch.arange(float(N)), state)
        grown = 2.0 if far == [0] else -2.0
        assert_close(state.C, constant(math.exp(grown)), 1e-12)


def test_one_plus_one():
    method = search.one_plus_one(SIGMA, factor=2.0)
    state = method.init(START)
    parent, least, sigma = START, math.inf, SIGMA
    for t in range(40):
        x, state = method.ask(state)
        if t == 0:
            assert torch.equal(x[0], START)
        f = float(loss(x[0]))
        if f <= least:
            parent, least, sigma = x[0], f, sigma * (2 if t else 1)
        else:
            sigma *= 2**-0.25
        state = method.tell(x, loss(x), state)
        assert_close(state.parent, parent, 0.0)
        assert float(state.sigma) == pytest.approx(sigma, rel=1e-12)


@pytest.mark.parametrize("strategy", ["best/1/bin", "rand/1/bin"])
def test_differential_evolution(strategy):
    """Each trial is its parent, with some entries from one base and one difference of others."""
    n, F = 5, 0.6
    method = search.differential_evolution(n, SIGMA, F=F, CR=0.5, strategy=strategy)
    state, changed, seen = method.init(START, seed=2), [], set()
    first, _ = method.ask(state)
    assert torch.equal(first, state.members)
    assert torch.equal(first[0], START)
    for t in range(30):
        x, state = method.ask(state)
        old = state.members
        best = int(state.members_fitness.argmin())
        for i in range(n) if t else ():
            found = {
                (a, b, c): v
                for a in ([best] if strategy[0] == "b" else range(n))
                for b in range(n)
                for c in range(n)
                if len({i, b, c}) == 3 and (strategy[0] == "b" or len({i, a, b, c}) == 4)
                for v in [old[a] + F * (old[b] - old[c])]
                if all(x[i, j] == old[i, j] or (x[i, j] - v[j]).abs() < 1e-12 for j in range(D))
            }
            assert found
            seen |= set(found)
            again = any(((v - old[i]).abs() < 1e-12).any() for v in found.values())
            if not again and all(len(old[:, j].unique()) == n for j in range(D)):
                changed.append(int((x[i] != old[i]).sum()))
        state = method.tell(x, loss(x), state)
        better = loss(x) <= (loss(old) if t else math.inf)
        assert_close(state.members, torch.where(better.unsqueeze(1), x, old), 0.0)
    assert len(changed) > 40
    assert min(changed) >= 1
    assert 0.55 < sum(changed) / len(changed) / D < 0.78  # one for sure, others 1 in 2: 2/3
    assert len(seen) > (10 if strategy[0] == "b" else 20)


def test_annealing_accepts_as_metropolis_has_it():
    """On a slope, one step of many walks: the share that goes up by u is exp(−u / T)."""
    n, T = 20_000, 0.7
    method = search.annealing(n, 1.0, T)
    state = method.init(torch.zeros(1, dtype=torch.float64))
    x, state = method.ask(state)
    assert torch.equal(x, torch.zeros_like(x))
    state = method.tell(x, x[:, 0], state)
    x, state = method.ask(state)
    new = method.tell(x, x[:, 0], state)
    moved = new.walkers[:, 0] == x[:, 0]
    assert moved[x[:, 0] <= 0].all()
    up = x[x[:, 0] > 0, 0]
    expected = (-up / T).exp()
    assert abs(moved[x[:, 0] > 0].double().mean() - expected.mean()) < 0.02
    cold = search.annealing(n, 1.0, 0.0).tell(x, x[:, 0], state)
    assert (cold.walkers <= 0).all()


def test_weights_of_places():
    f = torch.tensor([3.0, math.nan, -7.0, 3.0, math.inf, 4.0])
    ranks = search.centered_ranks(f)
    assert_close(ranks, torch.tensor([-0.2, 0.4, -0.5, -0.2, 0.4, 0.1]), 1e-6)
    assert_close(search.centered_ranks(torch.full((4,), math.nan)), torch.zeros(4), 0.0)
    assert search.centered_ranks(torch.rand(1)).item() == 0
    w = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.0, -6.0])
    assert_close(weigh(f, w), torch.tensor([3.0, -3.0, 8.0, 3.0, -3.0, 1.0]), 1e-6)
    assert abs(sum(nes_utilities(11))) < 1e-12


# ---------------------------------------------------------------- CMA-ES goes where pycma's goes
FILE = json.loads((Path(__file__).parents[1] / "support" / "reference" / "pycma.json").read_text())
FIELDS = ("mean", "sigma", "C", "pc", "ps")


def wide(x):
    return torch.tensor(x, dtype=torch.float64)


def full(row):
    """Our state where pycma starts: its C is not quite the unit matrix."""
    method = fo.search.cma_es(row["population"], row["sigma"])
    state = method.init(wide(row["kept"]["0"]["mean"]))
    C = wide(row["kept"]["0"]["C"])
    return method, state._replace(C=C, D=C.diagonal().sqrt())


def diagonal(row):
    method = fo.search.sep_cma_es(row["population"], row["sigma"])
    return method, method.init(wide(row["kept"]["0"]["mean"]))


def follows(row, method, state):
    for step, (candidates, fitness) in enumerate(row["told"], 1):
        state = method.tell(wide(candidates), wide(fitness), state)
        if str(step) in row["kept"]:
            for field in FIELDS:
                expected = wide(row["kept"][str(step)][field])
                found = getattr(state, field)
                assert (found - expected).norm() <= 1e-9 * expected.norm(), (step, field)


@pytest.mark.parametrize("start", [full, diagonal], ids=["rows", "diagonal"])
def test_states_are_pycmas(start):
    for row in FILE["rows" if start is full else "diagonal"].values():
        follows(row, *start(row))


def test_the_stored_runs_hold_the_path_back():
    assert FILE["rows"]["small-start"]["stalls"] > 0
    assert FILE["diagonal"]["small-start"]["stalls"] > 0


# ---------------------------------------------------------------- losses after a budget
FOLDER = Path(__file__).parents[2] / "benchmarks"
BARS = {
    "cma_es": {"sphere": 1e-10, "rosenbrock": 6.0, "rastrigin": 20.0, "ellipsoid": 40.0},
    "sep_cma_es": {"sphere": 1e-12, "rosenbrock": 8.0, "rastrigin": 25.0, "ellipsoid": 1e-5},
    "cem": {"sphere": 1e-3, "rosenbrock": 25.0, "rastrigin": 15.0, "ellipsoid": 50.0},
    "differential_evolution": {
        "sphere": 1e-4,
        "rosenbrock": 9.0,
        "rastrigin": 25.0,
        "ellipsoid": 0.5,
    },
}
"""What medians over fifty starts in ten dimensions stay below after 2,000 evaluations.

Functions and starts are those of `benchmarks/search.py`, which compares with pycma and nevergrad.
"""


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("search")
    monkeypatch.setattr(module, "SEEDS", 50)
    return module


@pytest.mark.parametrize("name", BARS)
def test_losses_after_a_budget(bench, name):
    (row,) = [row for row in bench.rows() if row.name == name]
    found = bench.ours(row.method)
    for function, bar in BARS[name].items():
        assert statistics.median(found[function, 2000]) < bar, function


def test_equal_means_equal_within_the_sampling_error_of_medians(bench):
    verdict = bench.search_table.verdict
    mine = [10 ** (x / 5) for x in range(30)]
    assert verdict(mine, mine[::-1]) == "equal"
    assert verdict(mine, [1.1 * x for x in mine[::-1]]) == "equal"
    assert verdict(mine, [1e4 * x for x in mine[::-1]]) == "better"
    assert verdict([1e4 * x for x in mine], mine[::-1]) == "worse"
    assert verdict([1.1 * x for x in mine], mine) == "worse"  # start by start: no doubt
