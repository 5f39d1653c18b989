"""`strict`: where a step cannot be compiled it raises, and nothing has been written."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from helpers import assert_same, clone, copy_of, run

import functional_optim as fo
from functional_optim import adapters, kernels
from functional_optim.kernels import failures


@pytest.fixture
def no_kernels(monkeypatch):
    """As if this process had built none, and warned of nothing."""
    monkeypatch.setattr(kernels, "_built", {})
    monkeypatch.setattr(kernels, "_gave_way", set())
    monkeypatch.setattr(failures, "_told", set())
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "off")


def broken(*args, **options):
    raise OSError("g++ is on holiday")


def parameter():
    w = torch.nn.Parameter(torch.randn(5))
    w.grad = torch.randn(5)
    return w


REFUSED = pytest.raises(RuntimeError, match=r"a strict step must be compiled, but .*on holiday")


@pytest.mark.usefixtures("no_kernels")
def test_a_functional_step_that_cannot_be_compiled_raises(monkeypatch):
    monkeypatch.setattr(kernels.cpu, "trace", broken)
    tx, params = fo.adamw(), {"w": torch.randn(5)}
    state, before = tx.init(params), clone(params)
    known = clone(state)
    with REFUSED as error:
        fo.compile(tx, strict=True)({"w": torch.ones(5)}, state, params)
    assert isinstance(error.value.__cause__, OSError)
    assert_same((params, state), (before, known))


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    "make",
    [
        lambda ps: adapters.AdamW(ps, compile="strict"),
        lambda ps: adapters.Optimizer(ps, fo.adamw, compile="strict"),
    ],
)
def test_an_optimizer_that_cannot_be_compiled_raises_at_its_step(monkeypatch, make):
    monkeypatch.setattr(kernels.cpu, "trace", broken)
    w = parameter()
    before, opt = copy_of([w]), make([w])
    for _ in range(2):
        with REFUSED:
            opt.step()
    assert_same(copy_of([w]), before)
    assert not opt.state


@pytest.mark.usefixtures("no_kernels")
def test_nothing_is_written_if_the_second_kind_of_tensor_cannot_be_compiled(monkeypatch):
    real = kernels.cpu.trace

    def trace(body, signature):
        return broken() if signature.leaves[0][0] is torch.float64 else real(body, signature)

    monkeypatch.setattr(kernels.cpu, "trace", trace)
    params = {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.float64)}
    before, tx = clone(params), fo.sgd(0.1)
    with REFUSED:
        fo.compile(tx, strict=True)(clone(params), tx.init(params), params)
    assert_same(params, before)


@pytest.mark.usefixtures("no_kernels")
def test_a_callable_that_cannot_be_compiled_raises(monkeypatch):
    """Under rules that look at shapes, transposed tensors have Inductor's own callable."""
    monkeypatch.setattr(kernels, "trace", broken)
    with REFUSED:
        muon_step()


def muon_step():
    params = {"w": torch.eye(3).t()}
    tx = fo.muon()
    return fo.compile(tx, strict=True)(clone(params), tx.init(params), params)


def test_a_rule_that_looks_at_shapes_is_compiled_without_a_library():
    muon_step()


@pytest.mark.usefixtures("no_kernels")
def test_a_failure_that_was_passed_over_before_is_none_to_a_strict_step(monkeypatch):
    """Tried again: what was missing may be there by now."""
    tx, params = fo.sgd(0.1), {"w": torch.ones(3)}
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        patch.setattr(kernels.cpu, "trace", broken)
        patch.setattr(kernels, "trace", broken)
        patch.setattr(torch, "compile", lambda fn, **options: fn)
        fo.compile(tx)(clone(params), tx.init(params), clone(params))
        with REFUSED:
            fo.compile(tx, strict=True)(clone(params), tx.init(params), params)
    got = fo.compile(tx, strict=True)(clone(params), tx.init(params), clone(params))
    assert_same(got, run(tx, params, [params]))


@pytest.mark.usefixtures("no_kernels")
def test_a_device_without_direct_calls_is_tried_before_anything_is_written(monkeypatch):
    """torch.compile compiles at the first call: on other tensors, so that it may fail."""
    monkeypatch.setattr(torch, "compile", lambda fn, **options: broken)
    signature = kernels.Signature(
        ((torch.float32,) * 2,), None, (1, torch.float32), torch.device("meta"), 1
    )
    with REFUSED:
        kernels.build("nobody's", lambda leaves, numbers: (), signature, strict=True)
    with pytest.warns(RuntimeWarning, match="torch.compile failed, without which the steps run"):
        kernels.build("nobody's", lambda leaves, numbers: (), signature)


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: adapters.AdamW(ps, compile="strict"),
        lambda ps: adapters.Optimizer(ps, fo.adamw, compile="strict"),
    ],
)
def test_a_strict_optimizer_steps_and_stays_strict_in_its_copies(make):
    w = parameter()
    opt = make([w])
    opt.step()
    assert float(opt.state[w]["step"]) == 1.0
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert twin.compile == "strict"


@pytest.mark.parametrize("bad", ["fast", None, 2, "Strict"])
def test_another_word_for_compile_raises_at_once(bad):
    words = r'compile must be True, False, or "strict"'
    with pytest.raises(ValueError, match=words):
        adapters.AdamW([parameter()], compile=bad)
    with pytest.raises(ValueError, match=words):
        adapters.Optimizer([parameter()], fo.adamw, compile=bad)


SCRIPT = """
import torch, functional_optim.adapters as adapters
w = torch.nn.Parameter(torch.ones(5))
w.grad = torch.ones(5)
try:
    adapters.AdamW([w], compile="strict").step()
except RuntimeError as error:
    print(type(error).__name__, error)
print(w.tolist() == [1.0] * 5)
"""


def test_without_a_compiler_a_strict_step_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "PATH": str(tmp_path), "CXX": "", "FUNCTIONAL_OPTIM_CACHE": "off"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("RuntimeError functional_optim: a strict step must be compiled")
    assert done.stdout.endswith("True\n")
