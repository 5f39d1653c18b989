"""Optimizers in threads of one process."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from compilers import Compiler, forget
from helpers import assert_same, copy_of

import functional_optim as fo
from functional_optim import adapters

STEPS = 200


@pytest.fixture(autouse=True)
def two_threads(seed_and_thread):
    """So that each step is shared by several threads."""
    torch.set_num_threads(2)


def train(seed, turn=None):
    """Steps over large tensors, with gradients that depend on where they have come to."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(300, 200), (100,), (70_000,)]
    params = [torch.nn.Parameter(torch.randn(s, generator=random)) for s in shapes]
    opt = adapters.AdamW(params, lr=0.01 * (seed + 1), weight_decay=0.1)
    pull = torch.randn((), generator=random)
    for i in range(STEPS):
        for p in params:
            p.grad = p.detach() * pull + 0.1 * i
        if turn is not None and i % 20 == 0:
            turn.wait()
        opt.step()
    return copy_of(params), [dict(opt.state[p]) for p in params]


def both(work):
    """Call it with 0 and 1 in two threads; what each returned."""
    results, errors = {}, []

    def call(i):
        try:
            results[i] = work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return [results[i] for i in (0, 1)]


def test_two_optimizers_step_at_once_as_each_would_alone():
    alone = [train(seed) for seed in (0, 1)]
    turn = threading.Barrier(2)
    assert_same(both(lambda seed: train(seed, turn)), alone)


@pytest.mark.skipif(sys.platform == "win32", reason="the compiler is a shell script")
def test_two_threads_that_need_a_new_kernel_build_it_once(monkeypatch, tmp_path):
    turn, compiler = threading.Barrier(2), Compiler(tmp_path)
    forget(monkeypatch)
    monkeypatch.setenv("CXX", str(compiler.path))
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "off")

    def rule(u, slots, p):
        return -0.375 * u, slots

    def work(i):
        tx, params = fo.leafwise(None, rule, name="rule"), {"w": torch.zeros(3)}
        turn.wait()
        got, _ = fo.compile(tx)({"w": torch.ones(3)}, tx.init(params), params)
        return got["w"].tolist()

    assert both(work) == [[-0.375] * 3] * 2
    assert compiler.kernels() == 1
