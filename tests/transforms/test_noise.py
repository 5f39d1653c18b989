"""Noise: counter-based, so the same wherever and whenever it is made."""

import math

import pytest
import torch
from gpu.drivers import Host, installed
from helpers import assert_close, assert_same, clone, run, through_file
from ways import by_eager_object, by_function, by_object, by_update

import functional_optim as fo
from functional_optim import adapters
from functional_optim.core import draws, randomness
from functional_optim.kernels import gpu_normals, normals

KNOWN = (
    (0x00000000, (0x00000000, 0x00000000), (0xFF1DAE59, 0x6CD10DF2)),
    (0xFFFFFFFF, (0xFFFFFFFF, 0xFFFFFFFF), (0x2C3F628B, 0xAB4FD7AD)),
    (0x13198A2E, (0x243F6A88, 0x85A308D3), (0xDD7CE038, 0xF62A4C12)),
)
"""Key, counter and result: the authors' own, https://github.com/DEShawResearch/random123,
tests/kat_vectors."""

KEYS = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC)
"""What Vigna's https://prng.di.unimi.it/splitmix64.c gives for the seed 0."""


@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN)
def test_philox_gives_the_authors_numbers(key, counter, expected):
    x, y = map(torch.tensor, counter)
    assert tuple(map(int, randomness.philox(torch.tensor(key), (x, y)))) == expected


def test_keys_are_those_of_splitmix():
    expected = torch.tensor([randomness.signed(x) for x in KEYS])
    seed = torch.tensor(0)
    assert torch.equal(randomness.derived(seed, torch.arange(4)), expected)
    assert [int(randomness.derived(seed, i)) for i in range(4)] == expected.tolist()
    assert int(randomness.derived(torch.tensor(1234567), 0)) == 6457827717110365317
    large = 2**63 + 5  # as the hash of a path may be
    same = randomness.derived(seed, torch.tensor(randomness.signed(large)))
    assert torch.equal(randomness.derived(seed, large), same)


def many_normals(key, n):
    return randomness.normal(torch.tensor(key), (n,), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("key", [0, -7, 2**62 + 12345, -(2**63)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_library_makes_the_same_normal_numbers(key, threads, monkeypatch):
    """Up to the rounding of logarithm, sine and cosine; an odd count leaves the last one out."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = many_normals(key, 100_001)
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(normals, "fill", lambda out, key: False)
    expected = many_normals(key, 100_001)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_many_normal_numbers_are_normal():
    n = 1 << 20
    x, _ = many_normals(3, n).double().sort()
    ranks = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    gap = (torch.special.ndtr(x) - ranks).abs().max()
    assert gap < 1.63 / n**0.5  # Kolmogorov and Smirnov's test, 1 %
    far = int((x.abs() > 4).sum())
    assert abs(far - 6.334e-5 * n) < 5 * (6.334e-5 * n) ** 0.5
    x = many_normals(3, n).double()
    for lag in (1, 2, 4096, n // 2):
        assert (x[lag:] * x[:-lag]).mean().abs() < 5 / (n - lag) ** 0.5
    assert (x * many_normals(4, n).double()).mean().abs() < 5 / n**0.5


def test_a_kernel_makes_the_same_bits(fresh_dynamo):
    """Inductor takes 32 bits for a product of indices, and C++ leaves an overflow open."""

    def draw(seed):
        key = randomness.derived(seed, seed + 7)
        return torch.stack(randomness.words(key, torch.arange(37)))

    seeds = torch.tensor([0, -1, 2**63 - 1, 12345])
    compiled = torch.compile(draw, fullgraph=True)
    for seed in seeds:
        assert torch.equal(compiled(seed), draw(seed))


SHAPES = [(3, 2), (), (0, 4), (5,), (2, 2, 2), (1,)]


@pytest.mark.parametrize("signs", [False, True])
def test_a_compiled_step_draws_the_same_for_all_leaves_at_once(signs, fresh_dynamo):
    dtypes = [torch.float32, torch.float64] * 3
    wanted = [
        draws.Wanted(f"leaf.{k}", shape, dtype, torch.device("cpu"))
        for k, (shape, dtype) in enumerate(zip(SHAPES, dtypes, strict=True))
    ]
    sizes = []

    def backend(graph, inputs):
        sizes.append(len(graph.graph.nodes))
        return graph

    for some in (wanted[:2], wanted):

        def draw(key, some=some):
            return draws.for_paths(key, some, signs=signs)

        torch._dynamo.reset()
        found = torch.compile(draw, fullgraph=True, backend=backend)(torch.tensor(7))
        for x, expected in zip(found, draw(torch.tensor(7)), strict=True):
            torch.testing.assert_close(x, expected)
    assert sizes[1] - sizes[0] < 4 * 40  # drawn one by one, each takes 120 more


def test_every_bit_of_key_and_counter_flips_half_of_the_bits():
    key, i = torch.tensor(randomness.signed(KEYS[0])), torch.arange(4096)

    def bits(key, i):
        words = torch.stack(randomness.words(key, i))
        return words.unsqueeze(-1) >> torch.arange(32) & 1

    start = bits(key, i)
    assert (start.double().mean(1) - 0.5).abs().max() < 5 * 0.5 / 64
    for n in range(64):
        bit = randomness.signed(1 << n)
        for flipped in (bits(key ^ bit, i), bits(key, i ^ bit)):
            assert ((start ^ flipped).double().mean(1) - 0.5).abs().max() < 5 * 0.5 / 64
            both = (start ^ flipped).double().mean()
            assert abs(both - 0.5) < 5 * 0.5 / 512


def test_the_hash_of_a_path_is_fnv():
    assert randomness.named("") == 0xCBF29CE484222325
    assert randomness.named("a") == 0xAF63DC4C8601EC8C
    assert randomness.named("foobar") == 0x85944171F73967E8


def noise(seed=0, steps=1, names=("a",), size=20_000, eta=1.0, gamma=0.0):
    """The noise of each step, as one tensor (steps, leaves, size)."""
    tx = fo.add_noise(eta, gamma, seed)
    zero = {name: torch.zeros(size, dtype=torch.float64) for name in names}
    state, found = tx.init(zero), []
    for _ in range(steps):
        u, state = tx.update(zero, state, zero)
        found.append(torch.stack([u[name] for name in names]))
    return torch.stack(found)


def test_the_noise_is_normal():
    z = noise(size=200_000)[0, 0]
    n = z.numel()
    moments = [z.mean(), z.square().mean() - 1, z.pow(3).mean(), z.pow(4).mean() - 3]
    for moment, deviation in zip(moments, [1, 2, 15, 96], strict=True):
        assert abs(moment) < 4 * math.sqrt(deviation / n)
    ordered = z.sort().values
    below = 0.5 * (1 + torch.erf(ordered / math.sqrt(2)))
    empirical = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert (below - empirical).abs().max() < 1.95 / math.sqrt(n)  # Kolmogorov, 0.1 %


def test_leaves_steps_seeds_and_entries_are_independent():
    n = 20_000
    rows = [*noise(3, 3, ("a", "b", "c")).reshape(9, n), *noise(4, 2).reshape(2, n)]
    rows.append(noise(3 + 2**32).reshape(n))  # the high word of the seed counts
    rows += [rows[0].roll(1), rows[0].roll(n // 2)]
    table = torch.corrcoef(torch.stack(rows))
    table.fill_diagonal_(0)
    assert table.abs().max() < 5 / math.sqrt(n)
    squares = torch.corrcoef(torch.stack(rows).square())
    assert (squares - torch.eye(len(rows), dtype=torch.float64)).abs().max() < 5 / math.sqrt(n)


def test_the_variance_decays():
    z = noise(steps=5, eta=0.3, gamma=0.55)
    expected = torch.tensor([0.3 / t**0.55 for t in range(1, 6)], dtype=torch.float64)
    assert_close(z.square().mean((1, 2)), expected, 0.05)
    plain = noise(steps=5)
    assert_close(z, plain * expected.sqrt().reshape(5, 1, 1), 1e-12)
    slow = fo.add_noise(lambda count: 0.3 / (1 + count), 0.0, 0)
    w = torch.zeros(4, dtype=torch.float64)
    u, state = slow.update(w, slow.init(w), w)
    u, state = slow.update(w, state, w)
    assert_close(u, noise(steps=2, names=("",), size=4)[1, 0] * math.sqrt(0.15), 1e-12)


def test_noise_depends_on_nothing_else_and_touches_no_generator():
    before = torch.get_rng_state()
    assert_same(noise(1, 2), noise(1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    one, two = noise(names=("b",)), noise(names=("a", "b", "c"))
    assert_same(one[:, 0], two[:, 1])  # other leaves do not matter
    odd = noise(size=7)[0, 0]
    assert odd.shape == (7,)
    assert len(set(odd.tolist())) == 7


def test_a_gradient_gets_noise_in_its_own_width():
    tx = fo.add_noise(1.0, 0.0, 0)
    g = {
        "half": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.ones(2, 500, dtype=torch.complex64),
        "sparse": torch.eye(3).to_sparse(),
        "none": None,
    }
    p = {**g, "sparse": torch.zeros(3, 3), "none": torch.zeros(2)}
    u, _ = tx.update(g, tx.init(p), p)
    assert u["half"].dtype == torch.float32
    assert u["none"] is None
    z = torch.view_as_real(u["complex"] - 1)
    assert_close(z.square().mean((0, 1)), torch.ones(2), 0.15)
    assert abs(torch.corrcoef(z.reshape(-1, 2).T)[0, 1]) < 0.15
    assert (u["sparse"] - torch.eye(3)).std() > 0.3
    empty = torch.zeros(0, 3)
    assert tx.update(empty, tx.init(empty), empty)[0].shape == (0, 3)


def test_an_ensemble_has_a_seed_for_each_member():
    w = torch.zeros(3, 2, dtype=torch.float64)
    seeds = torch.tensor([3, -1, 2**40])

    def two_steps(seed):
        tx = fo.add_noise(0.5, 0.5, seed)
        u, state = tx.update(w, tx.init(w), w)
        return u, tx.update(w, state, w)[0]

    together = torch.vmap(two_steps)(seeds)
    for i, seed in enumerate(seeds.tolist()):
        assert_close((together[0][i], together[1][i]), two_steps(seed), 1e-15)
    assert (together[0][0] - together[0][1]).abs().max() > 0.1


def test_master_weights_leave_the_noise_of_each_path_as_it_is():
    """All weights had the same, since the path was lost."""
    params = {name: torch.zeros(9, dtype=torch.bfloat16) for name in ("a", "b")}
    plain, wide = fo.noisy_sgd(seed=3), fo.master_weights(fo.noisy_sgd(seed=3))
    state = wide.init(params)
    assert_same(state.slots["noise_key"], plain.init(params).slots["noise_key"])
    found = []
    for grads in (params, {name: x.to_sparse() for name, x in params.items()}):
        updates, after = wide.update(grads, state, params)
        found.append(fo.full_weights(fo.apply_updates(params, updates), after))
    assert_same(*found)
    assert not torch.equal(found[0]["a"], found[0]["b"])


@pytest.mark.parametrize("first", [fo.clip_by_global_norm(1e9), fo.apply_if_finite])
def test_a_sparse_gradient_with_noise_may_be_measured_before(first):
    def recipe():
        noise = fo.noisy_sgd(seed=3)
        return first(noise, 3) if first is fo.apply_if_finite else fo.chain(first, noise)

    params = {"w": torch.zeros(4, 2)}
    grads = [{"w": torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2))}]
    expected = by_update(recipe(), clone(params), grads)[0]
    for way in (by_function, by_object, by_eager_object):
        assert_close(way(recipe(), clone(params), grads)[0], expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_has_the_noise_of_one_that_went_on(dtype):
    def recipe(lr):
        return fo.chain(fo.add_noise(0.5, 0.5, 2**53 + 1), fo.scale_by_lr(lr))

    def steps(opt, w, count):
        for _ in range(count):
            w.grad = torch.zeros_like(w)
            opt.step()

    w = torch.nn.Parameter(torch.zeros(5, dtype=dtype))
    opt = adapters.Optimizer([w], recipe, lr=0.1)
    steps(opt, w, 300)  # more than bfloat16 can count
    v = torch.nn.Parameter(w.detach().clone())
    other = adapters.Optimizer([v], recipe, lr=0.1)
    other.load_state_dict(through_file(opt.state_dict()))
    assert other.state[v] == opt.state[w]
    assert [x.dtype for x in other.state[v].values()] == [torch.float32, torch.int64]
    steps(opt, w, 3)
    steps(other, v, 3)
    assert_same(v.detach(), w.detach())
    expected, _ = run(recipe(0.1), [torch.zeros(5, dtype=dtype)], [[torch.zeros(5)]] * 303)
    assert_same(w.detach(), expected[0])


@pytest.mark.parametrize("key", [0, -7, 2**62 + 12345, -(2**63)])
def test_a_kernel_of_a_gpu_makes_the_same_normal_numbers(key):
    n, name = 5001, torch.tensor(key)
    with installed("cpu", Host()):
        found = torch.empty(2, n)
        assert gpu_normals.run(gpu_normals.NORMALS, found, name, n)
    expected = many_normals(key, 2 * n).reshape(2, n)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_paths_drawn_together_have_the_numbers_that_they_have_alone():
    params = {"a": torch.zeros(3), "b": {"c": torch.zeros(2, 40_000), "d": torch.zeros(1)}}
    key = draws.stream(torch.tensor(5), torch.tensor(7))
    together = draws.like(key, params)
    alone = fo.tree.map_with_path(lambda path, p: draws.leaf(key, path, p), params)
    assert all(map(torch.equal, fo.tree.leaves(together), fo.tree.leaves(alone)))
