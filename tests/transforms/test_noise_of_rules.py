"""The noise of `add_noise`: its generator, and the same numbers however a step runs."""

import pytest
import torch
from gpu.drivers import Host, installed
from helpers import assert_same

import functional_optim as fo
from functional_optim import adapters
from functional_optim.core import randomness
from functional_optim.kernels import gpu_normals, normals

CPU = torch.device("cpu")

KEYS = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC)
"""What Vigna's https://prng.di.unimi.it/splitmix64.c gives for the seed 0."""


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
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            found.append(drawn(keys, 100_003, dtype))
        finally:
            torch.set_num_threads(before)
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])
    for n in (1, 15, 16, 17, 32, 33, 4097):
        assert_same(drawn(keys, n, dtype), found[0][:n])
    monkeypatch.setattr(normals, "fill_noise", lambda out, keys: False)
    near = {"rtol": 0, "atol": 2e-6 if dtype is torch.float32 else 1e-14}
    torch.testing.assert_close(drawn(keys, 100_003, dtype), found[0], **near)


def test_the_noise_is_normal_far_into_its_tails():
    n = 1 << 22
    x = drawn(keys_of(KEYS[0], KEYS[3]), n).double()
    other = drawn(keys_of(KEYS[0], KEYS[3] + 2), n).double()
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


def params_like(dtype):
    shapes = {"a": (100, 77), "b": (3,), "c": (), "d": (0, 3), "e": (40_000,)}
    return {name: torch.full(shape, 0.5, dtype=dtype) for name, shape in shapes.items()}


def stepped(tx, params, step):
    params, state = fo.tree.map(torch.clone, params), tx.init(params)
    for _ in range(3):
        params, state = step(fo.tree.map(torch.ones_like, params), state, params)
    return params, state


def pure(tx):
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return fo.apply_updates(params, updates), state

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_every_way_to_step_adds_the_same_noise(dtype):
    params = params_like(dtype)
    tx = fo.noisy_sgd(0.1, eta=1.0, seed=2**40 + 3, momentum=0.9)
    expected, _ = stepped(tx, params, pure(tx))
    assert_same(stepped(tx, params, fo.compile(tx, strict=True))[0], expected)
    for how in (True, False):
        mine = {name: torch.nn.Parameter(p.clone()) for name, p in params.items()}
        options = {"eta": 1.0, "seed": 2**40 + 3, "momentum": 0.9, "compile": how}
        opt = adapters.NoisySGD(mine.items(), 0.1, **options)
        for _ in range(3):
            for p in mine.values():
                p.grad = torch.ones_like(p)
            opt.step()
        assert_same({name: p.detach() for name, p in mine.items()}, expected)


def rows(u, slots, p):
    return u / u.norm(dim=-1, keepdim=True), slots


@pytest.mark.parametrize(
    "after",
    [fo.leafwise(None, rows), fo.stored(fo.adam(0.1), "int8", min_size=0, where=lambda *x: True)],
)
def test_kernels_of_several_axes_or_blocks_make_the_same_noise(after):
    params = {"w": torch.full((37, 300), 0.5)}
    tx = fo.chain(fo.add_noise(1.0, 0.0, 3), after, fo.scale(-1.0))
    expected, _ = stepped(tx, params, pure(tx))
    found, _ = stepped(tx, params, fo.compile(tx, strict=True))
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


def test_a_sparse_gradient_gets_noise_in_all_rows():
    w = torch.nn.Parameter(torch.zeros(50, 3))
    w.grad = torch.eye(50, 3).to_sparse(1)
    opt = adapters.NoisySGD([w], lr=1.0, eta=1.0)
    opt.step()
    assert (w != 0).all()
    tx, params = fo.noisy_sgd(1.0, eta=1.0), [torch.zeros(50, 3)]
    assert_same(tx.update([w.grad], tx.init(params), params)[0][0], w.detach())


@pytest.mark.parametrize("n", [1, 16, 31, 5001])
def test_a_kernel_of_a_gpu_makes_the_same_noise(n):
    keys = keys_of(KEYS[1], KEYS[2])
    with installed("cpu", Host()):
        found = torch.empty(n)
        assert gpu_normals.run(gpu_normals.NOISE, found, keys, n)
    torch.testing.assert_close(found, drawn(keys, n), rtol=0, atol=2e-6)
