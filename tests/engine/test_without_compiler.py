"""No C++ compiler, or one that builds nothing: eager steps, and one warning."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from compilers import forget, source

from functional_optim import kernels
from functional_optim.kernels import libraries, toolchain

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
        ({}, "(looked for g++, clang++, c++)"),
        ({"CXX": ""}, "(CXX is empty)"),
        full({"CXX": "/nowhere/clang++"}, "(looked for /nowhere/clang++)"),
    ],
)
def test_without_a_compiler_steps_are_eager_and_one_warning_says_what_to_do(
    tmp_path, environment, reason
):
    (tmp_path / "bin").mkdir()
    said = steps(tmp_path, PATH=str(tmp_path / "bin"), **environment)
    assert said.startswith(
        "RuntimeWarning functional_optim: steps without a kept kernel run eagerly"
    )
    assert f"there is no C++ compiler {reason}; install g++" in said
    assert said.count("\n") == 1


EMPTY = 'while [ "$1" != -o ]; do shift; done; : > "$2"'
NOISE = "printf 'error: \\377\\376 no'; exit 1"
NO_CC1 = "echo \"cc: error: cannot execute 'cc1plus': compilation terminated\"; exit 1"


def broken(folder: Path, does: str) -> str:
    """A compiler that does something else."""
    path = folder / "broken++"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.skipif(sys.platform == "win32", reason="the compiler that fails is a shell script")
@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (EMPTY, "(what it builds is no library)"),
        full(NOISE, "(error: \ufffd\ufffd no)."),
        full(NO_CC1, "(cc: error: cannot execute 'cc1plus': compilation terminated)."),
        full(":", "(what it builds is no library)"),
        full("exit 3", "(exit 3)"),
    ],
    ids=["an empty file", "no text", "gcc without g++", "nothing", "no reason"],
)
def test_a_compiler_that_builds_nothing_is_one_warning_too(tmp_path, does, reason):
    said = steps(tmp_path, CXX=(path := broken(tmp_path, does)))
    assert f"the C++ compiler {path} does not work here {reason}" in said
    assert said.count("\n") == 1


def test_the_warning_names_the_users_line(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\nfrom functional_optim import adapters\n"
        "w = torch.nn.Parameter(torch.ones(3))\nw.grad = torch.ones(3)\n"
        "adapters.AdamW([w]).step()\n"
    )
    told = {"CXX": "", "FUNCTIONAL_OPTIM_CACHE": "off"}
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **told}, capture_output=True, text=True
    )
    assert done.stderr.startswith(f"{script}:5: RuntimeWarning: functional_optim: steps without")


def told(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    """The one warning about two kernels that cannot be built."""
    forget(monkeypatch)
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "off")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", None)  # where it was found before
    with pytest.warns(RuntimeWarning) as heard:
        found = [libraries.library(source(n)) for n in (1, 2)]
    monkeypatch.undo()
    assert found == [None, None]
    (one,) = heard
    return str(one.message)


@pytest.mark.skipif(sys.platform == "win32", reason="the compiler that fails is a shell script")
def test_what_is_no_program_is_told_as_what_it_is(tmp_path, monkeypatch):
    path = broken(tmp_path, "")
    Path(path).write_text("#!/nowhere/sh\n")
    assert f"{path} does not work here ([Errno 2]" in told(monkeypatch, CXX=path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_is_told_as_what_it_is(tmp_path, monkeypatch):
    def full(path: Path, text: str) -> None:
        with Path("/dev/full").open("w") as out:
            out.write(text)

    monkeypatch.setattr(Path, "write_text", full)
    said = told(monkeypatch)
    assert "the compiler's files cannot be written ([Errno 28] No space left on device" in said
    assert "the environment variable TMPDIR" in said


def test_without_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [])
    assert "cannot be written ([Errno 2] No usable temporary" in told(monkeypatch)


def test_a_kernel_that_does_not_compile_is_told_as_what_it_is(monkeypatch):
    """The compiler works: it is tried with another text."""
    forget(monkeypatch)
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "off")
    wanted = source(1)
    wanted = wanted._replace(text="no C++;")
    with pytest.warns(RuntimeWarning, match="no kernel can be built here .*'no' does not name"):
        assert libraries.library(wanted) is None
    toolchain.require()
    with pytest.raises(RuntimeError, match="a strict step must be compiled, but no kernel can"):
        libraries.library(wanted, strict=True)


def test_what_needs_a_compiler_asks_for_one_that_works(monkeypatch, tmp_path):
    forget(monkeypatch)
    kernels.require_compiler(torch.device("cpu"))
    monkeypatch.setenv("CXX", broken(tmp_path, EMPTY))
    with pytest.raises(kernels.NoCompiler, match="what it builds is no library"):
        kernels.require_compiler(torch.device("cpu"))
    kernels.require_compiler(torch.device("meta"))
