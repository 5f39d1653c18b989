"""Kernels on disk: whose folder it is, what is loaded from it, many processes at once, and the
command that shows and prunes it."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
from compilers import answer, forget, source
from helpers import clone, run

import functional_optim as fo
from functional_optim import cache, kernels
from functional_optim.kernels import disk_cache, isa_levels, libraries, toolchain

pytestmark = pytest.mark.skipif(os.name != "posix", reason="about modes, owners and signals")


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A folder of this test's own, not yet made."""
    forget(monkeypatch)
    folder = tmp_path / "above" / "kernels"
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(folder))
    yield folder
    disk_cache._checked.cache_clear()


def library(number=1):
    """A library that must be right."""
    found = libraries.library(source(number), strict=True)
    assert found is not None
    assert answer(found) == number
    return found


def names(folder):
    """The names of the kernels in a folder."""
    return sorted(path.name for path in folder.glob("*") if path.suffix != ".watch")


# ---------------------------------------------------------------- what is kept, and loaded
def test_a_kernel_is_kept_once_and_found_by_the_next_process(here, monkeypatch):
    assert not library().found
    (name,) = names(here)
    forget(monkeypatch)
    found = library()
    assert found.found
    assert found.name == name
    assert kernels.is_kept(found)


@pytest.mark.parametrize("tx", [fo.adamw(0.1), fo.adafactor(0.1)], ids=["elements", "rows"])
def test_a_kernel_that_is_found_serves_other_shapes(here, monkeypatch, tx):
    def moved(shape):
        params = {"w": torch.linspace(0, 1, shape.numel()).reshape(shape)}
        grads, before = {"w": torch.ones(shape)}, clone(params)
        found, _ = fo.compile(tx, strict=True)(grads, tx.init(params), params)
        torch.testing.assert_close(found, run(tx, before, [grads])[0])

    moved(torch.Size([3, 5]))
    forget(monkeypatch)
    monkeypatch.setenv("CXX", "/nowhere/compiler")
    moved(torch.Size([70, 900]))
    assert len(names(here)) == 1


def test_the_folder_and_what_lies_in_it_are_the_users_own(here):
    before = os.umask(0)
    try:
        library()
    finally:
        os.umask(before)
    assert names(here)
    assert stat.S_IMODE(here.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in here.iterdir()} == {0o600}


def whole(name="a.so", content=b"code"):
    """A library of this content, kept whole."""
    disk_cache.keep(name, content)
    return disk_cache.find(name)


def rewritten(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


DAMAGE = {
    "truncated": rewritten(lambda x: x[:-1]),
    "empty": rewritten(lambda x: b""),
    "altered": rewritten(lambda x: b"y" + x[1:]),
    "longer": rewritten(lambda x: x + b"y"),
    "short": rewritten(lambda x: x[:20]),
    # it may have been put there while the folder was open to all
    "writable by others": lambda path: path.chmod(0o666),
    # one that needs what this system lacks has a good checksum, too
    "no library": lambda path: whole(path.name, b"no library"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_built_again(here, monkeypatch, damage):
    library()
    (name,) = names(here)
    DAMAGE[damage](here / name)
    assert (disk_cache.find(name) is None) == (damage != "no library")
    for found in (False, True):
        forget(monkeypatch)
        assert library().found == found
    assert names(here) == [name]


KILLED = """
import os, signal
from pathlib import Path
from functional_optim.kernels import disk_cache as store
Path.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
with store.build_lock("a.so"):
    store.keep("a.so", b"code")
"""


def test_a_killed_writer_leaves_nothing_to_load_and_no_lock(here, tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert len(names(here)) == 2  # the lock's file, and what was written
    assert disk_cache.find("a.so") is None
    begun = time.monotonic()
    with disk_cache.build_lock("a.so"):
        assert time.monotonic() - begun < 5
    (left,) = here.glob("new-*")
    assert whole("b.so")
    assert left.exists()  # another process may be writing it
    os.utime(left, (0, 0))
    assert whole("c.so")
    assert names(here) == ["b.so", "c.so"]


def test_off_keeps_nothing(here, monkeypatch):
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "OFF")
    assert disk_cache.folder() is None
    assert whole() is None
    assert not here.exists()


def test_nothing_is_left_open_or_lying_about(here, monkeypatch, tmp_path):
    library(1)  # what is opened once stays
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    before = sorted(map(os.path.realpath, Path("/proc/self/fd").iterdir()))
    library(2)
    assert sorted(map(os.path.realpath, Path("/proc/self/fd").iterdir())) == before
    assert not list((tmp_path / "scratch").iterdir())
    assert all(name.endswith(".so") for name in names(here))


# ---------------------------------------------------------------- names
def test_a_name_says_what_a_kernel_depends_on_and_nothing_else(monkeypatch, tmp_path):
    text = source(1).text
    before = toolchain.name_of(text)
    own, _, by = before.partition("-")
    other = tmp_path / "g++"
    other.touch(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9.9")
        patch.setattr(sys.implementation, "cache_tag", "cpython-399")
        assert toolchain.name_of(text) == before
    assert toolchain.name_of(text + " ") != before
    with monkeypatch.context() as patch:
        more = isa_levels.features() | {"sse9"}
        patch.setattr(isa_levels, "features", lambda: more)
        assert toolchain.name_of(text).partition("-")[0] != own
    monkeypatch.setenv("CXX", str(other))
    found, _, compiler = toolchain.name_of(text).partition("-")
    assert (found, compiler != by) == (own, True)
    other.write_text("a later version")
    assert toolchain.name_of(text).partition("-")[2] not in (compiler, by)


def test_a_kernel_of_another_compiler_is_not_taken_where_there_is_one(here, monkeypatch, tmp_path):
    library()
    (other := tmp_path / "g++").write_text(f'#!/bin/sh\nexec {toolchain.command()[0]} "$@"\n')
    other.chmod(0o700)
    for compiler, found in ((other, False), ("/nowhere/g++", True)):
        forget(monkeypatch)
        monkeypatch.setenv("CXX", str(compiler))
        assert library().found == found
    assert len(names(here)) == 2


# ---------------------------------------------------------------- the folder
def test_without_a_choice_it_is_in_the_users_cache(here, monkeypatch, tmp_path):
    monkeypatch.delenv("FUNCTIONAL_OPTIM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "yet"))
    assert disk_cache.folder() == tmp_path / "not" / "yet" / "functional_optim"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert disk_cache.folder() == tmp_path / "home" / ".cache" / "functional_optim"
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "~/kernels")
    assert disk_cache.folder() == tmp_path / "home" / "kernels"


def opened(mode, level=0):
    def prepare(here, monkeypatch):
        here.mkdir(parents=True)
        [here, here.parent][level].chmod(mode)

    return prepare


def raising(error):
    def fail(*args, **options):
        raise error

    return fail


def homeless(here, patch):
    patch.delenv("FUNCTIONAL_OPTIM_CACHE")
    patch.setattr(Path, "expanduser", raising(RuntimeError("Could not determine home directory.")))


def of_somebody_else(here, monkeypatch):
    here.mkdir(parents=True)
    if os.getuid() == 0:
        os.chown(here, 65534, 65534)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 65534)


REFUSED = {
    "homeless": (homeless, "Could not determine home directory"),
    "behind a file": (lambda here, _: here.parent.write_text("a file"), "it cannot be used"),
    "of a group": (opened(0o770), "others can write to it"),
    "of others": (opened(0o702), "others can write to it"),
    "below others": (opened(0o777, 1), "everybody can write to "),
    "of somebody else": (of_somebody_else, "it belongs to somebody else"),
    "full": (
        lambda _, patch: patch.setattr(tempfile, "mkstemp", raising(OSError("no space left"))),
        "writing failed (no space left)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_is_refused_is_told_once_and_kernels_are_built(here, monkeypatch, name):
    prepare, words = REFUSED[name]
    prepare(here, monkeypatch)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert not any(kernels.is_kept(library(number)) for number in (1, 2))
    assert [words in str(w.message) for w in heard] == [True]
    assert not here.is_dir() or names(here) == []


def test_only_owners_can_move_what_lies_in_a_sticky_folder(here):
    here.mkdir(parents=True)
    here.parent.chmod(0o1777)  # as /tmp
    assert disk_cache.folder() == here


def test_a_link_is_as_good_as_what_it_points_to(here, tmp_path):
    here.parent.mkdir()
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    here.symlink_to(target)
    assert disk_cache.folder() == here
    target.chmod(0o777)
    disk_cache._checked.cache_clear()
    with pytest.warns(RuntimeWarning, match="others can write to it"):
        assert disk_cache.folder() is None


def test_a_relative_folder_stays_where_it_was(here, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "mine")
    assert whole() == tmp_path / "mine" / "a.so"
    monkeypatch.chdir("/")
    assert disk_cache.find("a.so") == tmp_path / "mine" / "a.so"


# ---------------------------------------------------------------- processes
SCRIPT = """
import json, sys, warnings
import torch, functional_optim as fo

def rule(u, slots, p):
    return -0.125 * u, slots

with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    tx, params = fo.leafwise(None, rule, name="rule"), {"w": torch.zeros(4)}
    step = fo.compile(tx, strict=True)
    step({"w": torch.ones(4)}, tx.init(params), params)
from functional_optim.engine.native import LOADED
(kernel,) = LOADED
print(json.dumps({
    "w": params["w"].tolist(),
    "found": kernel.found,
    "compiler": [m for m in ("torch._inductor", "torch._dynamo") if m in sys.modules],
    "heard": [str(w.message) for w in heard if issubclass(w.category, RuntimeWarning)],
}))
"""


FORKS = """
import io, os, sys, functional_optim
children = []
for _ in range(4):
    if not (child := os.fork()):
        sys.stdout = io.StringIO()
        exec(sys.argv[1], {"__name__": "__main__"})
        os.write(1, sys.stdout.getvalue().encode())  # at once: others write, too
        os._exit(0)
    children.append(child)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def start(folder, *arguments, code=SCRIPT, compiler=True):
    env = {**os.environ, "FUNCTIONAL_OPTIM_CACHE": str(folder)}
    if not compiler:
        env.pop("CXX", None)
        env["PATH"] = "/nowhere"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def said(process):
    out, _ = process.communicate()
    assert process.returncode == 0
    return json.loads(out)


@pytest.fixture(scope="module")
def filled():
    """A folder that another process has filled, readable by everybody."""
    top = Path(tempfile.mkdtemp(prefix="kernels-"))
    top.chmod(0o755)
    first = said(start(top / "kernels"))
    assert first["w"] == [-0.125] * 4
    assert not first["found"]
    yield top / "kernels"
    shutil.rmtree(top)


@pytest.mark.parametrize("read_only", [False, True])
def test_the_second_process_needs_no_compiler(filled, read_only):
    """The folder may be read-only, as in an image that an administrator has filled."""
    for path in filled.iterdir():
        path.chmod(0o444 if read_only else 0o600)
        os.utime(path, (0, 0) if read_only else None)
    filled.chmod(0o555 if read_only else 0o700)
    try:
        got = said(start(filled, compiler=False))
    finally:
        filled.chmod(0o700)
    assert got == {"w": [-0.125] * 4, "found": True, "compiler": [], "heard": []}


def test_what_is_missing_beside_a_kept_kernel_is_built(filled, tmp_path):
    """As for another version of Python, whose first step finds the kernel of the first one."""
    here = tmp_path / "kernels"
    shutil.copytree(filled, here, copy_function=shutil.copyfile)
    (beside,) = here.glob("*.watch")
    beside.unlink()
    assert said(start(here))["found"]
    assert beside.exists()
    beside.unlink()
    got = said(start(here, compiler=False))
    assert got["found"]
    assert got["heard"] == []


def test_of_processes_that_start_at_once_one_compiles(tmp_path):
    """They are forked where all is imported, so that none is ahead."""
    many = start(tmp_path / "kernels", SCRIPT, code=FORKS)
    out, _ = many.communicate()
    assert many.returncode == 0
    results = [json.loads(line) for line in out.splitlines()]
    assert [got["w"] for got in results] == [[-0.125] * 4] * 4
    assert [got["heard"] for got in results] == [[]] * 4
    assert sorted(got["found"] for got in results) == [False, True, True, True]
    assert [Path(name).suffix for name in names(tmp_path / "kernels")] == [".so"]


# ---------------------------------------------------------------- the folder stays small
DAY = 86400.0
MEBIBYTE = 2**20


@pytest.fixture
def shelf(monkeypatch, tmp_path):
    """A folder of three kernels, used 100, 10 and 0 days ago, and of a file that is not ours."""
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(tmp_path))
    disk_cache._checked.cache_clear()
    tmp_path.chmod(0o700)
    for digit, days in (("a", 100), ("b", 10), ("c", 0)):
        path = tmp_path / f"{40 * digit}-0123abcd.so"
        path.write_bytes(bytes(MEBIBYTE))
        used = time.time() - days * DAY
        os.utime(path, (used, used))
    (tmp_path / "notes.txt").write_text("of somebody else")
    os.utime(tmp_path / "notes.txt", (0, 0))
    yield tmp_path
    disk_cache._checked.cache_clear()


def left(folder):
    return "".join(sorted(path.name[0] for path in folder.iterdir()))


def test_what_is_kept_next_removes_what_was_not_used_for_long(shelf):
    disk_cache.keep(40 * "d", b"a kernel")
    assert left(shelf) == "bcdn"


def test_above_the_limit_the_least_recently_used_goes_first(shelf, monkeypatch):
    monkeypatch.setattr(disk_cache.prune, "__defaults__", (1.5 * MEBIBYTE, 1000 * DAY))
    disk_cache.keep(40 * "d", b"a kernel")
    assert left(shelf) == "cdn"


def test_a_use_is_noted(shelf):
    name = 40 * "d"
    disk_cache.keep(name, b"a kernel")
    os.utime(shelf / name, (0, 0))
    assert disk_cache.find(name) is not None
    assert (shelf / name).stat().st_mtime > time.time() - DAY


def test_the_command_lists_and_prints_the_folder(shelf, capsys):
    assert cache.main([]) == 0
    first, *files = capsys.readouterr().out.splitlines()
    assert first == f"{shelf} holds 3 kernels of 3.0 MiB."
    found = [(line.split()[0][0], line.split()[-3]) for line in files]
    assert found == [("c", "0"), ("b", "10"), ("a", "100")]
    assert cache.main(["--folder"]) == 0
    assert capsys.readouterr().out == f"{shelf}\n"


@pytest.mark.parametrize(
    ("flags", "stays"),
    [
        (["--prune"], "bcn"),
        (["--prune", "--days", "5"], "cn"),
        (["--prune", "--days", "1000"], "abcn"),
        (["--prune", "--megabytes", "1"], "cn"),
        (["--clear"], "n"),
    ],
)
def test_the_command_prunes(shelf, capsys, flags, stays):
    assert cache.main(flags) == 0
    assert left(shelf) == stays
    gone = 4 - len(stays)
    assert capsys.readouterr().out.startswith(f"Removed {gone} kernel{'s' * (gone != 1)} of")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--folder", "--clear"], "--folder prints a path, no more; leave it out"),
        (["--days", "3"], "--days and --megabytes say what --prune removes; add --prune."),
        (["--prune", "--days", "-1"], "--days must be at least 0, but is -1."),
        (["--prune", "--megabytes", "nan"], "--megabytes must be at least 0, but is nan."),
    ],
)
def test_flags_that_cannot_be_used_remove_nothing(shelf, capsys, flags, said):
    with pytest.raises(SystemExit):
        cache.main(flags)
    assert said in capsys.readouterr().err
    assert left(shelf) == "abcn"


def test_without_a_folder_it_says_so(shelf, capsys, monkeypatch):
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "off")
    assert cache.main([]) == 1
    assert "No kernels are cached" in capsys.readouterr().out
