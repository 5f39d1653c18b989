"""What holds for every population method."""

import functools
import itertools

import numpy as np
import optree
import pytest
import torch
from helpers import assert_close, assert_same, clone
from sampling import some
from search_cases import CASES, generation, loss_fn, make, params, run
from torch._dynamo.testing import CompileCounterWithBackend

import functional_optim as fo
from functional_optim import search

NAMES = pytest.mark.parametrize("name", CASES)
COMMON = {"step", "seed", "best", "best_fitness"}


def own(state):
    """The method's fields: what it has learned."""
    return {k: v for k, v in state._asdict().items() if k not in COMMON}


@NAMES
def test_nothing_is_touched_and_the_structure_stays(name):
    method, start = make(name), params()
    before = clone(start)
    torch_state = torch.random.get_rng_state()
    state = method.init(start, seed=3)
    for _ in range(3):
        kept = clone(state)
        candidates, after = method.ask(state)
        assert_same(candidates, method.ask(state)[0])
        copies = clone(candidates)
        fitness = search.evaluate(loss_fn, candidates)
        new = method.tell(candidates, fitness, after)
        assert_same((state, candidates), (kept, copies))
        assert optree.tree_structure(new) == optree.tree_structure(state)
        for x, y in zip(optree.tree_leaves(new), optree.tree_leaves(state), strict=True):
            assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
        for x, p in zip(optree.tree_leaves(candidates), optree.tree_leaves(start), strict=True):
            assert (x.shape, x.dtype) == ((method.population, *p.shape), p.dtype)
        assert int(new.step) == int(state.step) + 1
        state = new
    assert_same(start, before)
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    assert set(state._fields) >= COMMON


@NAMES
def test_it_finds_the_minimum(name):
    method, case = make(name), CASES[name]
    states = torch.vmap(lambda seed: method.init(params(), seed))(torch.arange(5))
    step = torch.vmap(functools.partial(generation, method))
    for _ in range(case.generations):
        states = step(states)
    assert states.best_fitness.median() < case.tolerance
    centers = torch.vmap(loss_fn)(torch.vmap(search.center)(states))
    assert centers.median() < 10 * case.tolerance


@NAMES
def test_searches_side_by_side_are_each_its_own(name):
    method, start = make(name), params(torch.float64)
    seeds = torch.tensor([0, 5, 2**40 + 7])
    states = torch.vmap(lambda seed: method.init(start, seed))(seeds)
    for _ in range(4):
        states = torch.vmap(functools.partial(generation, method))(states)
    centers = torch.vmap(search.center)(states)
    for i, seed in enumerate(seeds.tolist()):
        alone = run(method, method.init(start, seed), 4)
        assert_close(optree.tree_map(lambda x, i=i: x[i], states), alone, 1e-9)
        mine = optree.tree_map(lambda x, i=i: x[i], centers)
        assert_close(mine, search.center(alone), 1e-9)
    assert not torch.equal(states.best_fitness[0], states.best_fitness[1])


KEPT = ("openai_es", "cma_es", "sep_cma_es", "cem", "differential_evolution-best", "annealing")
"""One of each kind of method."""


@pytest.mark.parametrize(
    ("name", "backend"),
    some(itertools.product(CASES, ("eager", "aot_eager")), 0, [(x, "eager") for x in KEPT]),
)
def test_one_graph_holds_a_generation(name, backend, fresh_dynamo):
    method = make(name)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(functools.partial(generation, method), fullgraph=True, backend=counter)
    state = expected = method.init(params(torch.float64), seed=1)
    frames = None
    for _ in range(4):
        state, expected = compiled(state), generation(method, expected)
        frames = counter.frame_count if frames is None else frames
    assert_close(state, expected, 1e-9)
    assert counter.frame_count == frames


@NAMES
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_worst(name, bad):
    method = make(name)
    state = run(method, method.init(params(torch.float64)), 3)
    candidates, state = method.ask(state)
    fitness = search.evaluate(loss_fn, candidates)
    broken, huge = fitness.clone(), fitness.clone()
    broken[0], huge[0] = bad, 1e300
    new = method.tell(candidates, broken, state)
    assert all(torch.isfinite(x).all() for x in optree.tree_leaves(new))
    if method.population > 1 and CASES[name].ranks:
        assert_close(own(new), own(method.tell(candidates, huge, state)), 1e-12)


@pytest.mark.parametrize("name", [name for name in CASES if name != "one_plus_one"])
def test_a_generation_without_a_finite_loss_changes_nothing(name):
    method = make(name)
    state = run(method, method.init(params()), 3)
    candidates, state = method.ask(state)
    for bad in (float("nan"), float("inf")):
        new = method.tell(candidates, torch.full((method.population,), bad), state)
        assert_same((own(new), new.best), (own(state), state.best))
        assert int(new.step) == int(state.step) + 1
        again = method.ask(new)[0]
        assert not torch.equal(again["a"], candidates["a"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_child_without_a_finite_loss_is_a_failure(bad):
    """Else a deviation that always leaves the domain would never shrink."""
    method = make("one_plus_one")
    state = method.init(params())
    for _ in range(2):  # without a parent there is no failure
        state = method.tell(method.ask(state)[0], torch.tensor([bad]), state)
    assert state.sigma == 0.5
    state = run(method, state, 1)
    failed, worse = (
        method.tell(method.ask(state)[0], torch.tensor([loss]), state) for loss in (bad, 1e30)
    )
    assert_same(failed, worse)
    assert failed.sigma < state.sigma


@NAMES
def test_candidates_from_elsewhere_bring_no_graph(name):
    method = make(name)
    candidates, state = method.ask(method.init(params()))
    better = optree.tree_map(lambda x: x.requires_grad_() * 0.5, candidates)
    new = method.tell(better, search.evaluate(loss_fn, better), state)
    assert not any(x.requires_grad for x in optree.tree_leaves(new))


@NAMES
def test_it_recovers_from_a_start_without_finite_losses(name):
    def late(tree):
        return torch.where(tree["a"][0] < 1.0, loss_fn(tree), torch.nan)

    method = make(name)
    state = run(method, method.init(params()), 40, late)
    assert state.best_fitness < 8
    assert all(torch.isfinite(x).all() for x in optree.tree_leaves(search.center(state)))


@NAMES
def test_a_population_may_be_odd(name):
    method = make(name, odd=True)
    state = run(method, method.init(params()), 20)
    assert method.population == CASES[name].populations[1]
    assert state.best_fitness < 7


@NAMES
def test_a_tree_is_searched_as_one_vector(name):
    method, start = make(name), params()
    vector = torch.cat([x.reshape(-1) for x in optree.tree_leaves(start)])
    state = run(method, method.init(start))
    alone = run(method, method.init(vector), loss=lambda x: x.square().sum())
    found = torch.cat([x.reshape(-1) for x in optree.tree_leaves(search.center(state))])
    assert_close(found, search.center(alone), 1e-6)


@NAMES
def test_the_best_is_the_best_so_far(name):
    method = make(name)
    state = method.init(params(), seed=4)
    assert_same(search.best(state), params())
    seen, least = [], float("inf")
    for _ in range(12):
        candidates, state = method.ask(state)
        fitness = search.evaluate(loss_fn, candidates)
        state = method.tell(candidates, fitness, state)
        seen.append(float(fitness.min()))
        assert float(state.best_fitness) == min(seen) <= least
        least = float(state.best_fitness)
        assert float(loss_fn(search.best(state))) == least


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ranks])
def test_only_the_order_of_losses_counts(name):
    method = make(name)
    plain = run(method, method.init(params(torch.float64)))
    warped = run(
        method, method.init(params(torch.float64)), loss=lambda p: loss_fn(p).sqrt() * 7 - 1000
    )
    assert_close(search.center(plain), search.center(warped), 1e-12)


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith(("diff", "anneal", "one"))])
def test_the_order_of_candidates_does_not_count(name):
    method = make(name)
    state = run(method, method.init(params(torch.float64)), 2)
    candidates, state = method.ask(state)
    fitness = (search.evaluate(loss_fn, candidates) / 4).round()
    assert len(fitness.unique()) < method.population  # some are equal
    order = torch.randperm(method.population)
    new = method.tell(candidates, fitness, state)
    shuffled = optree.tree_map(lambda x: x[order], candidates)
    assert_close(own(method.tell(shuffled, fitness[order], state)), own(new), 1e-12)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("one_plus_one", "random_search")])
def test_half_precision_does_not_drift(name):
    """Where σ is below the parameters' resolution all candidates are the mean, and stay there."""
    method = make(name, sigma=0.005)  # cem takes 0.02: the nearest rounding is 12 σ away
    start = {"w": torch.full((4,), 100.0, dtype=torch.bfloat16)}
    state = method.init(start)
    for x in optree.tree_leaves({k: v for k, v in own(state).items() if k != "tx"}):
        assert x.dtype in (torch.float32, torch.float64, torch.int64)
    candidates, state = method.ask(state)
    assert_same(candidates, {"w": start["w"].expand(method.population, 4)})
    assert_same(search.center(run(method, state, 50)), start)


def test_steps_below_the_resolution_add_up():
    method = search.openai_es(16, 4.0, fo.sgd(2.0))
    start = torch.full((4,), 100.0, dtype=torch.bfloat16)  # neighbours are 0.5 away
    state = run(method, method.init(start), 1)
    assert 0 < (state.mean - 100).abs().max() < 0.2
    assert_same(search.center(state), start)
    assert (search.center(run(method, state, 100)) < 98).all()


@NAMES
def test_complex_parameters_are_pairs(name):
    method = make(name)
    start = {"z": torch.tensor([1 + 2j, -1j]), "w": torch.tensor([0.5])}

    def loss(tree):
        return tree["z"].abs().square().sum() + tree["w"].square().sum()

    state = run(method, method.init(start), 40, loss)
    assert search.center(state)["z"].dtype is torch.complex64
    assert state.best_fitness < 3


def test_hyperparameters_side_by_side():
    def best(sigma, seed):
        method = search.cma_es(8, sigma)
        return run(method, method.init(params(), seed), 10).best_fitness

    sigmas = torch.tensor([0.1, 0.5, 2.0])
    found = torch.vmap(best)(sigmas, torch.arange(3))
    alone = torch.stack([best(float(s), i) for i, s in enumerate(sigmas)])
    assert_close(found, alone, 1e-4)


def test_schedules_and_tensors_are_hyperparameters():
    lr = fo.schedules.linear(0.2, 0.01, 40)
    sigma = fo.schedules.linear(0.5, 0.05, 40)
    method = search.openai_es(16, sigma, fo.adam(lr))
    assert run(method, method.init(params()), 60).best_fitness < 0.1
    first, _ = method.ask(method.init(params()))
    tensor = search.openai_es(16, torch.tensor(0.5), fo.adam(lr))
    assert_close(first, tensor.ask(tensor.init(params()))[0], 1e-6)


def test_the_transformation_sees_the_tree():
    tx = fo.chain(fo.masked(fo.scale(0.0), "a"), fo.sgd(1.0))
    method = search.openai_es(8, 0.1, tx)
    center = search.center(run(method, method.init(params())))
    assert_same(center["a"], params()["a"])
    assert not torch.equal(center["c"][0], params()["c"][0])


@NAMES
def test_complex_losses_are_refused(name):
    method = make(name)
    candidates, state = method.ask(method.init(params()))
    losses = torch.ones(method.population, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"losses, which must be real, but got torch\.complex64"):
        method.tell(candidates, losses, state)


@pytest.mark.parametrize(
    ("make", "members"),
    [
        (lambda n: search.differential_evolution(n, 0.5), "members"),
        (lambda n: search.annealing(n, 0.5, 0.1), "walkers"),
    ],
    ids=["differential_evolution", "annealing"],
)
def test_a_state_of_another_population_is_refused(make, members):
    state = make(8).init(params())
    with pytest.raises(ValueError, match=f"a population of 6, but the state has 8 {members}; use"):
        make(6).ask(state)


@NAMES
def test_guesses_of_another_dtype_leave_that_of_the_state(name):
    method = make(name)
    candidates, state = method.ask(method.init(params()))
    guesses, losses = fo.tree.map(torch.Tensor.double, candidates), -torch.ones(method.population)
    assert_same(method.tell(guesses, losses, state), method.tell(candidates, losses, state))


def test_an_integer_of_numpy_is_an_integer():
    found = search.cem(np.int64(8), 0.5, elites=np.int64(2))
    expected = search.cem(8, 0.5, elites=2)
    assert_same(run(found, found.init(params())), run(expected, expected.init(params())))
    for wrong in (8.0, True):
        with pytest.raises(TypeError, match="an integer as its population"):
            search.cem(wrong, 0.5)


@pytest.mark.parametrize("make", [search.openai_es, search.pgpe])
def test_a_transformation_that_reads_the_loss_gets_the_mean_of_the_finite_ones(make):
    seen = []

    def scalars(t, *, value):
        seen.append(float(value))
        return ()

    reads = fo.leafwise(None, lambda u, slots, p: (u, slots), scalars, name="reads")
    method = make(4, 0.1, fo.chain(reads, fo.sgd(0.1)))
    candidates, state = method.ask(method.init(torch.ones(3)))
    method.tell(candidates, torch.tensor([1.0, torch.nan, 3.0, torch.inf]), state)
    assert set(seen) == {2.0}
