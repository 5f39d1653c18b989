"""Builds that nobody waits for, that are interrupted, or whose process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from compilers import Compiler, answer, forget, gone, source

from functional_optim.kernels import libraries

pytestmark = pytest.mark.skipif(os.name != "posix", reason="about signals and process groups")

BEGUN = """
import sys
sys.path.insert(0, {support!r})
from compilers import source
from functional_optim.kernels import libraries
libraries.prefetch([source(1), source(2)], wait={wait})
sys.stdin.read()
"""


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    """One that takes long."""
    (tmp_path / "scratch").mkdir()
    return Compiler(tmp_path, "sleep 300")


def start(compiler: Compiler, *, wait: bool) -> subprocess.Popen[str]:
    """A process that builds two kernels, or begins to."""
    folder = compiler.path.parent
    told = {
        "CXX": str(compiler.path),
        "TMPDIR": str(folder / "scratch"),
        "FUNCTIONAL_OPTIM_CACHE": str(folder / "kernels"),
    }
    code = BEGUN.format(support=str(Path(__file__).parents[1] / "support"), wait=wait)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **told},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def left(compiler: Compiler) -> list[str]:
    """What lies in the folder for what is temporary."""
    return [path.name for path in (compiler.path.parent / "scratch").iterdir()]


def test_a_process_that_ends_leaves_neither_folders_nor_compilers(compiler):
    process = start(compiler, wait=False)
    groups = compiler.wait(2)
    _, said = process.communicate()
    assert (process.returncode, said) == (0, "")
    assert left(compiler) == []
    assert gone(groups)


def test_an_interrupted_build_ends_at_once_and_leaves_nothing(compiler):
    process = start(compiler, wait=True)
    groups = compiler.wait(2)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert time.monotonic() - begun < 10
    assert said.strip().endswith("KeyboardInterrupt")
    assert left(compiler) == []
    assert gone(groups)


def test_a_killed_process_is_in_nobodys_way(compiler, monkeypatch):
    """Its lock goes with it. What it has left is the compilers', which end by themselves."""
    process = start(compiler, wait=True)
    groups = compiler.wait(2)
    process.kill()
    process.communicate()
    forget(monkeypatch)
    monkeypatch.setenv("CXX", str(compiler.path))
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(compiler.path.parent / "kernels"))
    Compiler(compiler.path.parent)
    begun = time.monotonic()
    libraries.prefetch([source(1), source(2)])
    assert time.monotonic() - begun < 20
    assert [answer(libraries.library(source(n))) for n in (1, 2)] == [1, 2]
    for group in groups:
        os.killpg(group, signal.SIGKILL)


def test_what_was_begun_before_is_waited_for(tmp_path: Any, monkeypatch: Any):
    forget(monkeypatch)
    compiler = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler.path))
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(tmp_path / "kernels"))
    libraries.prefetch([source(1)], wait=False)
    libraries.prefetch([source(1)], wait=False)
    compiler.wait()
    assert answer(libraries.library(source(1))) == 1
    assert compiler.kernels() == 1
