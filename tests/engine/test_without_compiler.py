"""No C++ compiler, or one that builds nothing: eager steps, and one warning."""

from __future__ import annotations

import errno
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor import config
from torch._inductor.cpp_builder import cpp_compiler_search
from torch._inductor.exc import InductorError

from functional_optim.kernels import compiler

STEPS = """
import sys, warnings
import torch
import functional_optim as fo
from functional_optim.adapters import AdamW, Optimizer

fused = fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(1e-2), fo.params_ema(0.9))
whole = fo.chain(fo.flatten(fo.clip_by_global_norm(1.0)), fo.add_noise(1.0, 0.5, seed=1))
recipes = {"fused": fused, "rows": fo.adafactor(1e-2), "matrices": fo.muon(1e-2), "whole": whole}
params = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(4, 4)}
grads = {name: torch.full_like(p, 0.5) for name, p in params.items()}

def trained(step, tx):
    p, state = {k: x.clone() for k, x in params.items()}, tx.init(params)
    for _ in range(2):
        p, state = step(grads, state, p)
    return p

def pure(tx):
    def step(grads, state, p):
        updates, state = tx.update(grads, state, p)
        return fo.apply_updates(p, updates), state
    return step

def same(a, b):
    assert all([torch.allclose(a[k], b[k]) for k in a])

with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    for tx in recipes.values():
        same(trained(fo.compile(tx), tx), trained(pure(tx), tx))
    for make in (AdamW, lambda ps, lr: Optimizer(ps, fo.adamw, lr=lr)):
        p = torch.nn.Parameter(torch.ones(3))
        q = torch.nn.Parameter(torch.ones(3))
        p.grad, q.grad = torch.ones(3), torch.ones(3)
        make([p], lr=0.1).step()
        torch.optim.AdamW([q], lr=0.1).step()
        assert torch.allclose(p, q)
    train = fo.compile_train_step(lambda p: (p["a"] ** 2).sum() + p["b"].sum(), fused)
    p, state, loss = train(params, fused.init(params))
    assert loss.item() == 506.0 + 16.0
    rates = fo.find_lr(lambda p: (p["a"] ** 2).sum(), fo.sgd, params, [()], values=[0.1, 0.2])
for w in heard:
    if "functional_optim" in str(w.message):
        print(w.category.__name__, w.message)
"""


full = functools.partial(pytest.param, marks=pytest.mark.full)


def steps(tmp_path: Path, **environment: str) -> str:
    """What a process prints that steps in many ways; on stderr it says nothing."""
    base = {name: x for name, x in os.environ.items() if name != "CXX"}
    done = subprocess.run(
        [sys.executable, "-c", STEPS],
        cwd=tmp_path,
        env={**base, "FUNCTIONAL_OPTIM_CACHE": str(tmp_path / "kernels"), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({}, "(g++ was looked for)"),
        ({"CXX": ""}, "(CXX is empty)"),
        full({"CXX": "/nowhere/clang++"}, "(/nowhere/clang++ was looked for)"),
    ],
)
def test_without_a_compiler_steps_are_eager_and_one_warning_says_what_to_do(
    tmp_path, environment, reason
):
    (tmp_path / "bin").mkdir()
    said = steps(tmp_path, PATH=str(tmp_path / "bin"), **environment)
    assert said.startswith("RuntimeWarning functional_optim: steps run eagerly, and take longer")
    assert f"there is no C++ compiler {reason}; install g++" in said
    assert said.count("\n") == 1


OMP = "echo \"x.h:2:10: fatal error: 'omp.h' file not found\"; exit 1"
EMPTY = 'while [ "$1" != -o ]; do shift; done; : > "$2"'
NOISE = "printf 'error: \\377\\376 no'; exit 1"
NO_CC1 = "echo \"cc: error: cannot execute 'cc1plus': compilation terminated\"; exit 1"


@pytest.mark.skipif(sys.platform == "win32", reason="the compiler that fails is a shell script")
@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (OMP, "(x.h:2:10: fatal error: 'omp.h' file not found); clang needs OpenMP's header"),
        (EMPTY, "(error: what it builds is no library: "),
        full(NOISE, "(error: \ufffd\ufffd no)."),
        full(NO_CC1, "(cc: error: cannot execute 'cc1plus': compilation terminated)."),
        full(":", "(error: what it builds is no library: "),
    ],
    ids=["clang without OpenMP", "an empty file", "no text", "gcc without g++", "nothing"],
)
def test_a_compiler_that_builds_nothing_is_one_warning_too(tmp_path, does, reason):
    folder = tmp_path / "bin"
    folder.mkdir()
    compiler = folder / "clang++"
    compiler.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "clang version 14"; exit 0; fi\n{does}\n'
    )
    compiler.chmod(0o700)
    said = steps(tmp_path, CXX=str(compiler))
    assert f"the C++ compiler does not work here {reason}" in said
    assert said.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="the program is a shell script")
def test_a_program_that_is_no_compiler_is_told(tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    monkeypatch.setattr(compiler, "_trouble", [])
    with config.patch({"cpp.cxx": (str(program),)}):
        cpp_compiler_search.cache_clear()
        try:
            with pytest.raises(compiler.NoCompiler, match=r"program is not a C\+\+ compiler"):
                compiler.require()
        finally:
            cpp_compiler_search.cache_clear()


def test_a_full_disk_is_told_as_what_it_is(monkeypatch):
    """Inductor wraps the error of the operating system."""
    monkeypatch.setattr(compiler, "_trouble", [])
    full = InductorError(OSError(errno.ENOSPC, "No space left on device"), None)
    found = compiler.explained(full)
    assert isinstance(found, compiler.NoCompiler)
    assert str(found).startswith("the compiler's files cannot be written ([Errno 28] No space left")
    assert "TMPDIR and TORCHINDUCTOR_CACHE_DIR" in str(found)
    with pytest.raises(compiler.NoCompiler, match="No space left"):
        compiler.require()


def test_an_error_that_is_not_the_compilers_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(compiler, "_trouble", [])
    error = RuntimeError("the interface has moved")
    assert compiler.explained(error) is error
    compiler.require()
