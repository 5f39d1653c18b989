"""Noise: counter-based, so the same wherever, however and whenever it is made."""

import math

import numpy as np
import pytest
import torch
from gpu.drivers import Host, installed
from helpers import (
    assert_close,
    assert_same,
    clone,
    make_grads,
    make_params,
    run,
    step_object,
    through_file,
)
from ways import by_eager_object, by_function, by_object, by_update

import functional_optim as fo
from functional_optim import adapters
from functional_optim.core import draws, randomness
from functional_optim.kernels import gpu_normals, normals

CPU = torch.device("cpu")
KNOWN = (
    (0x00000000, (0x00000000, 0x00000000), (0xFF1DAE59, 0x6CD10DF2)),
    (0xFFFFFFFF, (0xFFFFFFFF, 0xFFFFFFFF), (0x2C3F628B, 0xAB4FD7AD)),
    (0x13198A2E, (0x243F6A88, 0x85A308D3), (0xDD7CE038, 0xF62A4C12)),
)
"""Key, counter and result: the authors' own, https://github.com/DEShawResearch/random123,
tests/kat_vectors."""

KEYS = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC)
"""What Vigna's https://prng.di.unimi.it/splitmix64.c gives for the seed 0."""
SEEDS = (0, -7, 2**62 + 12345, -(2**63))


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
    return randomness.normal(torch.as_tensor(key), (n,), torch.float32, CPU)


def by_threads(counts, draw):
    """What is drawn with each number of threads."""
    found = []
    for count in counts:
        torch.set_num_threads(count)
        found.append(draw())
    return found


@pytest.mark.parametrize("key", SEEDS)
def test_a_library_makes_the_same_normal_numbers(key, monkeypatch):
    """Up to the rounding of logarithm, sine and cosine; an odd count leaves the last one out."""
    found = by_threads((1, 2), lambda: many_normals(key, 100_001))
    monkeypatch.setattr(normals, "fill", lambda out, key: False)
    expected = many_normals(key, 100_001)
    torch.testing.assert_close(found, [expected] * 2, rtol=0, atol=2e-6)


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
    kinds = enumerate(zip(SHAPES, [torch.float32, torch.float64] * 3, strict=True))
    wanted = [draws.Wanted(f"leaf.{k}", shape, dtype, CPU) for k, (shape, dtype) in kinds]
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


@pytest.mark.filterwarnings("always")  # an error of a warning in a backward pass would be lost
def test_a_run_with_noise_is_differentiated_without_a_warning(recwarn):
    def total(w):
        return w["w"].square().sum()

    def trained(eta):
        tx, w = fo.chain(fo.add_noise(eta, 0.55, 0), fo.sgd(0.1)), {"w": torch.ones(2).double()}
        return total(run(tx, w, [torch.func.grad(total)] * 2)[0])

    eta = torch.tensor(0.1, dtype=torch.float64)
    found = torch.func.grad(trained)(eta)
    assert not [x for x in recwarn if "autograd kernel was not registered" in str(x.message)]
    assert_close(found, (trained(eta + 1e-5) - trained(eta - 1e-5)) / 2e-5, 1e-8)


def test_a_gradient_gets_noise_in_its_own_width():
    tx = fo.add_noise(1.0, 0.0, 0)
    g = {
        "half": torch.ones(3, dtype=torch.bfloat16),
        "none": None,
        "sparse": torch.eye(3).to_sparse(),
    }
    g |= {"complex": torch.ones(2, 500, dtype=torch.complex64)}
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


NOISY = fo.noisy_sgd(seed=3)


@pytest.mark.parametrize(
    "tx", [NOISY, fo.chain(fo.clip_by_global_norm(1e9), NOISY), fo.apply_if_finite(NOISY, 3)]
)
def test_a_sparse_gradient_gets_noise_in_all_rows_and_may_be_measured_before(tx):
    params = {"w": torch.zeros(4, 2)}
    grads = [{"w": torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2))}]
    expected = by_update(tx, clone(params), grads)[0]
    assert (expected["w"] != 0).all()
    for way in (by_function, by_object, by_eager_object):
        assert_close(way(tx, clone(params), grads)[0], expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_has_the_noise_of_one_that_went_on(dtype):
    def recipe(lr):
        return fo.chain(fo.add_noise(0.5, 0.5, 2**53 + 1), fo.scale_by_lr(lr))

    zeros = [torch.zeros(5, dtype=dtype)]
    w = torch.nn.Parameter(torch.zeros(5, dtype=dtype))
    opt = adapters.Optimizer([w], recipe, lr=0.1)
    step_object(opt, [zeros] * 300)  # more than bfloat16 can count
    v = torch.nn.Parameter(w.detach().clone())
    other = adapters.Optimizer([v], recipe, lr=0.1)
    other.load_state_dict(through_file(opt.state_dict()))
    assert other.state[v] == opt.state[w]
    assert [x.dtype for x in other.state[v].values()] == [torch.float32, torch.int64]
    for each in (opt, other):
        step_object(each, [zeros] * 3)
    assert_same(v.detach(), w.detach())
    expected, _ = run(recipe(0.1), zeros, [[torch.zeros(5)]] * 303)
    assert_same(w.detach(), expected[0])


def test_paths_drawn_together_have_the_numbers_that_they_have_alone():
    params = {"a": torch.zeros(3), "b": {"c": torch.zeros(2, 40_000), "d": torch.zeros(1)}}
    key = draws.stream(torch.tensor(5), torch.tensor(7))
    together = draws.like(key, params)
    alone = fo.tree.map_with_path(lambda path, p: draws.leaf(key, path, p), params)
    assert all(map(torch.equal, fo.tree.leaves(together), fo.tree.leaves(alone)))


def keys_of(first, second):
    return torch.tensor([randomness.signed(first), randomness.signed(second)])


def drawn(keys, n, dtype=torch.float32):
    return randomness.noise(keys, (n,), dtype, CPU)


def test_the_words_are_those_of_splitmix_if_the_second_key_is_zero():
    for k, expected in enumerate(KEYS):
        keys = keys_of((k + 1) * randomness.GOLDEN % 2**64, 0)
        assert int(randomness._mixed(keys, torch.tensor(0))) == randomness.signed(expected)
    i, keys = torch.arange(9), keys_of(KEYS[0], KEYS[1])
    z = [(KEYS[0] + k * (KEYS[1] | 1)) % 2**64 for k in range(9)]
    z = [(x ^ x >> 30) * randomness.FIRST % 2**64 for x in z]
    z = [(x ^ x >> 27 ^ KEYS[1]) * randomness.SECOND % 2**64 for x in z]
    assert randomness._mixed(keys, i).tolist() == [randomness.signed(x ^ x >> 31) for x in z]


def test_every_bit_of_the_keys_and_of_the_counter_flips_half_of_the_bits():
    keys, i = keys_of(KEYS[0], KEYS[1]), torch.arange(4096) * 2**20 + 12345

    def bits(keys, i):
        return randomness._mixed(keys, i).unsqueeze(-1) >> torch.arange(64) & 1

    start = bits(keys, i)
    assert (start.double().mean(0) - 0.5).abs().max() < 5 * 0.5 / 64
    for n in range(64):
        bit = randomness.signed(1 << n)
        others = [bits(keys ^ torch.tensor([bit, 0]), i)]
        if n != 0:  # the first bit of the second key is once overridden: the step is odd
            others.append(bits(keys ^ torch.tensor([0, bit]), i))
        if n < 58:
            others.append(bits(keys, i ^ bit))
        for flipped in others:
            assert ((start ^ flipped).double().mean() - 0.5).abs() < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_library_makes_the_noise_that_torch_makes(dtype, monkeypatch):
    """Up to rounding; for any number of threads, and of elements."""
    keys = keys_of(KEYS[2], -7)
    found, *others = by_threads((1, 2, 3), lambda: drawn(keys, 100_003, dtype))
    assert_same(others, [found] * 2)
    for n in (1, 15, 16, 17, 32, 33, 4097):
        assert_same(drawn(keys, n, dtype), found[:n])
    monkeypatch.setattr(normals, "fill_noise", lambda out, keys: False)
    near = {"rtol": 0, "atol": 2e-6 if dtype is torch.float32 else 1e-14}
    torch.testing.assert_close(drawn(keys, 100_003, dtype), found, **near)


NORMAL = {
    "normals": (1 << 20, lambda k, n: many_normals(3 + k, n)),
    "noise": (1 << 21, lambda k, n: drawn(keys_of(KEYS[0], KEYS[3] + 2 * k), n)),
    "a step": (200_000, lambda k, n: noise(seed=k, size=n)[0, 0]),
}
"""How many numbers there are, and how they are made by the first and the second key."""


@pytest.mark.parametrize("name", NORMAL)
def test_numbers_are_normal_far_into_their_tails(name):
    n, made = NORMAL[name]
    x, other = (made(k, n).double() for k in (0, 1))
    for moment, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(x.pow(moment).mean() - mean) < 4 * (variance / n) ** 0.5
    ordered, _ = x.sort()
    ranks = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    assert (torch.special.ndtr(ordered) - ranks).abs().max() < 1.63 / n**0.5  # 1 %
    for far in (3.0, 4.0, 4.5):
        expected = 2 * n * float(torch.special.ndtr(torch.tensor(-far, dtype=torch.float64)))
        assert abs(int((x.abs() > far).sum()) - expected) < 5 * expected**0.5
    for z in (x, (x.square() - 1) / 2**0.5):  # 1 to 32: neighbours, and both of a pair
        for lag in (*range(1, 33), 512, 4096, n // 2):
            assert (z[lag:] * z[:-lag]).mean().abs() < 5 / (n - lag) ** 0.5, lag
    assert (x * other).mean().abs() < 5 / n**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_every_way_to_step_adds_the_same_noise(dtype):
    shapes = {"a": (100, 77), "b": (3,), "c": (), "d": (0, 3), "e": (40_000,)}
    params = {name: torch.full(shape, 0.5, dtype=dtype) for name, shape in shapes.items()}
    ones = fo.tree.map(torch.ones_like, params)
    hyper = {"eta": 1.0, "seed": 2**40 + 3, "momentum": 0.9}
    tx = fo.noisy_sgd(0.1, **hyper)
    expected, _ = by_update(tx, params, [ones] * 3)
    assert_same(by_function(tx, clone(params), [ones] * 3, strict=True)[0], expected)
    for how in (True, False):
        mine = {name: torch.nn.Parameter(p.clone()) for name, p in params.items()}
        opt = adapters.NoisySGD(mine.items(), 0.1, **hyper, compile=how)
        step_object(opt, [ones] * 3)
        assert_same({name: p.detach() for name, p in mine.items()}, expected)


def rows(u, slots, p):
    return u / u.norm(dim=-1, keepdim=True), slots


@pytest.mark.parametrize(
    "after",
    [fo.leafwise(None, rows), fo.stored(fo.adam(0.1), "int8", min_size=0, where=lambda *x: True)],
)
def test_kernels_of_several_axes_or_blocks_make_the_same_noise(after):
    params, grads = {"w": torch.full((37, 300), 0.5)}, [{"w": torch.ones(37, 300)}] * 3
    tx = fo.chain(fo.add_noise(1.0, 0.0, 3), after, fo.scale(-1.0))
    expected, _ = by_update(tx, params, grads)
    found, _ = by_function(tx, clone(params), grads, strict=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert (found["w"] - 0.5).abs().max() > 0.1


def test_no_step_repeats_the_noise_of_another_however_many_there_were():
    tx, w = fo.add_noise(1.0, 0.0, 3), torch.zeros(64)
    compiled = fo.compile(fo.chain(tx, fo.scale(1.0)), strict=True)
    state, seen = tx.init(w), []
    for t in (0, 1, 2**24 - 1, 2**24, 2**24 + 1, 2**25, 2**48 + 1):
        at = state._replace(step=torch.tensor(t))
        u, _ = tx.update(w, at, w)
        moved, _ = compiled(w, at._replace(step=torch.tensor(t)), w.clone())
        assert_same(moved, u)
        seen.append(u)
    table = torch.corrcoef(torch.stack(seen)).fill_diagonal_(0)
    assert table.abs().max() < 0.6


@pytest.mark.parametrize(
    ("kernel", "keys", "shape", "made"),
    [
        *[(gpu_normals.NORMALS, torch.tensor(key), (2, 5001), many_normals) for key in SEEDS],
        *[(gpu_normals.NOISE, keys_of(*KEYS[1:3]), (n,), drawn) for n in (1, 16, 31, 5001)],
    ],
)
def test_a_kernel_of_a_gpu_makes_the_same_numbers(kernel, keys, shape, made):
    with installed("cpu", Host()):
        found = torch.empty(shape)
        assert gpu_normals.run(kernel, found, keys, shape[-1])
    expected = made(keys, found.numel()).reshape(shape)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


# ---------------------------------------------------------------- noisy SGD
@pytest.mark.parametrize(("gamma", "given"), [(0.55, {}), (2.0, {"gamma": 2.0})])
def test_noisy_sgd_is_sgd_on_noisy_gradients(gamma, given):
    params = make_params()
    grads = make_grads(params, 5)
    drawing, zeros = fo.add_noise(0.3, gamma, seed=7), fo.tree.map(torch.zeros_like, params)
    state, expected, buffer = drawing.init(params), params, zeros
    for g in grads:
        z, state = drawing.update(zeros, state, params)
        buffer = fo.tree.map(lambda b, g, z: 0.9 * b + g + z, buffer, g, z)
        expected = fo.tree.map(lambda p, b: p - 0.1 * b, expected, buffer)
    moved, _ = run(fo.noisy_sgd(0.1, eta=0.3, seed=7, momentum=0.9, **given), params, grads)
    assert_close(moved, expected, 1e-12)
    quiet, _ = run(fo.noisy_sgd(0.1, eta=0.0, maximize=True), params, grads)
    assert_close(quiet, run(fo.sgd(0.1, maximize=True), params, grads)[0], 1e-12)


# ---------------------------------------------------------------- seeds
@pytest.mark.parametrize(
    "make",
    [
        lambda seed: fo.add_noise(0.3, 0.5, seed),
        lambda seed: fo.stored(fo.adam(), "int8", min_size=1, seed=seed),
        lambda seed: fo.master_weights(fo.adam(), "stochastic", seed=seed),
        lambda seed: fo.apollo(rank=1, seed=seed),
    ],
)
def test_seeds_of_numpy_are_integers(make):
    params = {"w": torch.ones(4, 6, dtype=torch.bfloat16)}
    grads = make_grads(params, 3)
    for seed in (5, -(2**63)):
        expected = run(make(seed), params, grads)
        assert_same(run(make(np.int64(seed)), params, grads), expected)
        assert_same(run(make(np.array(seed)), params, grads), expected)


def test_the_other_seeds_take_integers_of_numpy():
    faults = fo.replicas.random_faults
    assert faults(np.int64(5), replicas=2, until=4) == faults(5, replicas=2, until=4) != ()
    p = torch.nn.Parameter(torch.ones(3))
    opt = adapters.GradientFree([p], fo.search.snes(4, 0.1), seed=np.int32(3))
    assert type(opt.param_groups[0]["seed"]) is int  # as torch.load reads it
    assert fo.replicas.Simulation(2, seed=np.int64(1)).run(lambda s: 1).returned
