"""`strict`: where a step cannot be compiled it raises, and nothing has been written."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from compilers import forget
from helpers import assert_same, clone, copy_of, run

import functional_optim as fo
from functional_optim import adapters, kernels


@pytest.fixture
def no_compiler(monkeypatch):
    """Nothing is kept, and nothing can be compiled."""
    forget(monkeypatch)
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "off")
    monkeypatch.setenv("CXX", "/nowhere/g++")


def parameter():
    w = torch.nn.Parameter(torch.randn(5))
    w.grad = torch.randn(5)
    return w


REFUSED = pytest.raises(
    RuntimeError, match=r"a strict step must be compiled, but there is no C\+\+ compiler"
)


@pytest.mark.usefixtures("no_compiler")
def test_a_functional_step_that_cannot_be_compiled_raises():
    tx, params = fo.adamw(), {"w": torch.randn(5)}
    state, before = tx.init(params), clone(params)
    known = clone(state)
    with REFUSED as error:
        fo.compile(tx, strict=True)({"w": torch.ones(5)}, state, params)
    assert isinstance(error.value.__cause__, kernels.NoCompiler)
    assert_same((params, state), (before, known))


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    "make",
    [
        lambda ps: adapters.AdamW(ps, compile="strict"),
        lambda ps: adapters.Optimizer(ps, fo.adamw, compile="strict"),
    ],
)
def test_an_optimizer_that_cannot_be_compiled_raises_at_its_step(make):
    w = parameter()
    before, opt = copy_of([w]), make([w])
    for _ in range(2):
        with REFUSED:
            opt.step()
    assert_same(copy_of([w]), before)
    assert not opt.state


@pytest.mark.usefixtures("no_compiler")
def test_nothing_is_written_if_the_second_kind_of_tensor_cannot_be_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(tmp_path))
    tx, step = fo.sgd(0.1), fo.compile(fo.sgd(0.1), strict=True)
    with monkeypatch.context() as patch:
        patch.delenv("CXX")
        single = {"a": torch.ones(3)}
        step({"a": torch.ones(3)}, tx.init(single), single)
    params = {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.float64)}
    before = clone(params)
    with REFUSED:
        step(clone(params), tx.init(params), params)
    assert_same(params, before)


@pytest.mark.usefixtures("no_compiler")
def test_a_matrix_optimizer_that_cannot_be_compiled_raises():
    with REFUSED:
        muon_step()


def muon_step():
    params = {"w": torch.eye(3)}
    tx = fo.muon()
    return fo.compile(tx, strict=True)(clone(params), tx.init(params), params)


def test_a_matrix_optimizer_is_compiled():
    muon_step()


@pytest.mark.usefixtures("no_compiler")
def test_a_failure_that_was_passed_over_before_is_none_to_a_strict_step(monkeypatch):
    """Tried again: what was missing may be there by now."""
    tx, params = fo.sgd(0.1), {"w": torch.ones(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        fo.compile(tx)(clone(params), tx.init(params), clone(params))
    with REFUSED:
        fo.compile(tx, strict=True)(clone(params), tx.init(params), params)
    monkeypatch.delenv("CXX")
    got = fo.compile(tx, strict=True)(clone(params), tx.init(params), clone(params))
    assert_same(got, run(tx, params, [params]))


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
