"""SGD with noise: the noise apart, the steps are SGD's."""

import math

import pytest
import torch
from helpers import (
    assert_close,
    assert_same,
    make_grads,
    make_params,
    run,
)

import functional_optim as fo


def test_noisy_sgd_is_sgd_on_noisy_gradients():
    params = make_params()
    grads = make_grads(params, 5)
    noise, zeros = fo.add_noise(0.3, 0.55, seed=7), fo.tree.map(torch.zeros_like, params)
    state, expected = noise.init(params), params
    buffer = zeros
    for g in grads:
        drawn, state = noise.update(zeros, state, params)
        buffer = fo.tree.map(lambda b, g, z: 0.9 * b + g + z, buffer, g, drawn)
        expected = fo.tree.map(lambda p, b: p - 0.1 * b, expected, buffer)
    moved, _ = run(fo.noisy_sgd(0.1, eta=0.3, seed=7, momentum=0.9), params, grads)
    assert_close(moved, expected, 1e-12)
    quiet, _ = run(fo.noisy_sgd(0.1, eta=0.0, maximize=True), params, grads)
    assert_close(quiet, run(fo.sgd(0.1, maximize=True), params, grads)[0], 1e-12)


def test_the_noise_of_noisy_sgd_decays():
    w = torch.zeros(20000, dtype=torch.float64)
    tx = fo.noisy_sgd(1.0, eta=0.5, gamma=2.0)
    state = tx.init(w)
    for step in range(1, 4):
        u, state = tx.update(torch.zeros_like(w), state, w)
        assert float(u.std()) == pytest.approx(math.sqrt(0.5) / step, rel=0.03)


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
