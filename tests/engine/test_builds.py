"""How often the C++ compiler is called, and what becomes of what it builds, or does not end."""

import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from compilers import Compiler, answer, forget, gone, source
from helpers import assert_close, clone
from ways import by_function, by_update

import functional_optim as fo
from functional_optim.kernels import disk_cache, libraries, toolchain, watch

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the compiler is a shell script")


@pytest.fixture
def compiler(monkeypatch: Any, tmp_path: Any) -> Compiler:
    """That of this process, which has built nothing."""
    forget(monkeypatch)
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(tmp_path / "kernels"))
    found = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(found.path))
    return found


@pytest.mark.parametrize(
    "tx", [fo.chain(fo.clip_by_global_norm(0.1), fo.adamw(1e-2)), fo.adafactor(0.1)]
)
def test_the_kernels_of_a_recipe_are_built_once(tx, compiler, monkeypatch):
    shapes = {"a": (4, 3), "b": (5,), "c": (2, 2)}
    params = {name: torch.linspace(0.1, 1, math.prod(x)).reshape(x) for name, x in shapes.items()}
    grads = [{name: p**2 - 0.3 for name, p in params.items()}] * 2
    expected = by_update(tx, params, grads)
    for _ in range(2):
        found = by_function(tx, clone(params), grads, strict=True)
        assert_close(found, expected, 1e-6)
        assert compiler.kernels() == 2
        forget(monkeypatch)  # both are kept, each under its own name


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core")
def test_kernels_that_are_asked_for_together_are_built_at_once(compiler):
    Compiler(compiler.path.parent, "sleep 0.5")
    libraries.prefetch([source(1), source(2)])
    words = [line.split()[0] for line in compiler.log.read_text().splitlines()]
    assert words[:2] == ["begin", "begin"]
    assert [answer(libraries.library(source(n))) for n in (1, 2)] == [1, 2]
    assert compiler.kernels() == 2


def test_more_kernels_than_cores_are_built_once(compiler, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    wanted = [source(n) for n in range(5)]
    for _ in range(2):
        libraries.prefetch(wanted)
    assert [answer(libraries.library(x)) for x in wanted] == list(range(5))
    assert compiler.kernels() == 5


def test_what_another_process_is_building_is_left_to_it(compiler, monkeypatch):
    taken, other = source(1), source(2)
    with disk_cache.build_lock(toolchain.name_of(taken.text)):
        libraries.prefetch([taken, other])
        assert compiler.kernels() == 1
    assert answer(libraries.library(other)) == 2
    assert answer(libraries.library(taken)) == 1
    assert compiler.kernels() == 2


def test_a_build_of_a_few_seconds_is_told_while_it_lasts(compiler):
    Compiler(compiler.path.parent, "sleep 2.4")
    heard: list[tuple[str, str, list[str]]] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append((record.levelname, record.getMessage(), compiler.runs("end")))

    logger, listener = logging.getLogger("functional_optim"), Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        libraries.prefetch([source(1), source(2)])
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
    ((name, said, ended),) = heard
    assert name == "INFO"
    assert said.startswith(f"compiling 2 kernels, kept in {compiler.path.parent / 'kernels'}")
    assert ended == []


def test_a_compiler_that_does_not_answer_is_given_up(compiler, monkeypatch):
    records = []
    heard = logging.Handler()
    heard.emit = records.append
    monkeypatch.setattr(toolchain.log, "handlers", [heard])
    Compiler(compiler.path.parent, "sleep 60")
    monkeypatch.setattr(toolchain, "WAITED", ((0.1, logging.INFO), (0.2, logging.WARNING)))
    monkeypatch.setattr(toolchain, "LONGEST", 0.4)
    with pytest.warns(RuntimeWarning, match=r"compiler has not answered for 0 s"):
        assert libraries.library(source(1)) is None
    assert [x.levelname for x in records] == ["WARNING"]
    libraries.library(source(2))  # nobody waits for it again, and nothing more is said
    assert len(compiler.runs()) == 1


def test_a_kept_file_that_another_process_removes_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(disk_cache, "find", lambda name: tmp_path / "removed")
    assert disk_cache.read("name") is None


# ---------------------------------------------------------------- builds that do not end
BEGUN = """
import sys
sys.path.insert(0, {support!r})
from compilers import source
from functional_optim.kernels import libraries
libraries.prefetch([source(1), source(2)])
"""


@pytest.fixture
def slow(tmp_path: Path) -> Compiler:
    """A compiler that takes long."""
    (tmp_path / "scratch").mkdir()
    return Compiler(tmp_path, "sleep 300")


def start(compiler: Compiler) -> subprocess.Popen[str]:
    """A process that builds two kernels."""
    folder = compiler.path.parent
    told = {"CXX": str(compiler.path), "TMPDIR": str(folder / "scratch")}
    told |= {"FUNCTIONAL_OPTIM_CACHE": str(folder / "kernels")}
    code = BEGUN.format(support=str(Path(__file__).parents[1] / "support"))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **told},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_an_interrupted_process_ends_at_once_and_leaves_neither_folders_nor_compilers(slow):
    process = start(slow)
    groups = slow.wait(2)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert time.monotonic() - begun < 10
    assert said.strip().endswith("KeyboardInterrupt")
    assert not list((slow.path.parent / "scratch").iterdir())
    assert gone(groups)


def test_a_killed_process_is_in_nobodys_way(slow, monkeypatch):
    """Its lock goes with it. What it has left is the compilers', which end by themselves."""
    process = start(slow)
    groups = slow.wait(2)
    process.kill()
    process.communicate()
    forget(monkeypatch)
    monkeypatch.setenv("CXX", str(slow.path))
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(slow.path.parent / "kernels"))
    Compiler(slow.path.parent)
    begun = time.monotonic()
    libraries.prefetch([source(1), source(2)])
    assert time.monotonic() - begun < 20
    assert [answer(libraries.library(source(n))) for n in (1, 2)] == [1, 2]
    for group in groups:
        os.killpg(group, signal.SIGKILL)


@pytest.mark.usefixtures("pythons_own_handler")
@pytest.mark.parametrize("kept", [False, True])
def test_what_checks_objects_is_built_after_an_interrupt(compiler, monkeypatch, kept):
    """Without it all later steps would be slow. Also where the kernel itself is kept."""
    once = compiler.path.parent / "once"
    Compiler(compiler.path.parent, f"rm {once} 2>/dev/null && kill -INT $PPID && sleep 300")
    if kept:
        libraries.library(source(1))
        forget(monkeypatch)
    for path in (compiler.path.parent / "kernels").glob("*.watch"):
        path.unlink()
    monkeypatch.setattr(watch, "module", None)
    monkeypatch.setattr(watch, "tried", False)
    once.touch()
    with pytest.raises(KeyboardInterrupt):
        libraries.library(source(1))
    assert watch.module is None
    assert answer(libraries.library(source(1))) == 1
    assert watch.module is not None


# ---------------------------------------------------------------- processes and threads
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_during_a_build_of_another_thread_neither_hangs_nor_repeats_it(compiler):
    Compiler(compiler.path.parent, "sleep 0.3")
    thread = threading.Thread(target=libraries.library, args=(source(1),))
    thread.start()
    compiler.wait()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        found = [answer(libraries.library(source(n))) for n in (1, 2)]
        os._exit(found != [1, 2])
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    assert compiler.kernels() == 2


def test_two_threads_that_need_a_new_kernel_build_it_once(compiler):
    turn, found = threading.Barrier(2), []

    def rule(u, slots, p):
        return -0.375 * u, slots

    def work():
        tx, params = fo.leafwise(None, rule, name="rule"), {"w": torch.zeros(3)}
        turn.wait()
        got, _ = fo.compile(tx)({"w": torch.ones(3)}, tx.init(params), params)
        found.append(got["w"].tolist())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[-0.375] * 3] * 2
    assert compiler.kernels() == 1


SHARED = """
import os, torch, functional_optim as fo
threads = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(1)
params, grads, tx = {"w": torch.zeros(1 << 20)}, {"w": torch.ones(1 << 20)}, fo.sgd(0.5)
step, state = fo.compile(tx, strict=True), tx.init(params)
torch.set_num_threads(2)
before = threads()
params, _ = step(grads, state, params)
between = threads()
grads["w"].add(1)
print(between - before, threads() - between, params["w"].unique().tolist())
"""


@pytest.mark.parametrize("name", [x for x in toolchain.NAMES if shutil.which(x)])
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux lists threads there")
def test_kernels_and_torchs_operations_share_their_threads(name, monkeypatch):
    """Two pools of threads would wait for each other's cores."""
    monkeypatch.setenv("CXX", name)
    done = subprocess.run([sys.executable, "-c", SHARED], capture_output=True, text=True)
    assert done.stdout.strip() == "1 0 [-0.5]", done.stderr


def test_the_compiler_is_the_one_that_is_named_or_the_first_that_is_there(monkeypatch, tmp_path):
    def there(*names: str) -> None:
        for path in tmp_path.iterdir():
            path.unlink()
        for name in names:
            (tmp_path / name).touch(0o700)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    every = ("c++", "clang++", "g++")
    for names, chosen in ((every, "g++"), (every[:2], "clang++"), (every[:1], "c++")):
        there(*names)
        assert toolchain.command() == [str(tmp_path / chosen)]
    there("g++", "ccache")
    monkeypatch.setenv("CXX", "ccache g++ -m64")
    assert toolchain.command() == [str(tmp_path / "ccache"), "g++", "-m64"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "./g++")  # it is run in another folder
    assert Path(toolchain.command()[0]).is_absolute()
    monkeypatch.setenv("CXX", "clang++")
    assert toolchain.command() == []
