"""The folder of kernels stays small, and a command shows and prunes it."""

from __future__ import annotations

import os
import time

import pytest

from functional_optim import cache
from functional_optim.kernels import disk_cache

DAY = 86400.0
MEBIBYTE = 2**20


@pytest.fixture
def here(monkeypatch, tmp_path):
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


def test_what_is_kept_next_removes_what_was_not_used_for_long(here):
    disk_cache.keep(40 * "d", b"a kernel")
    assert left(here) == "bcdn"


def test_above_the_limit_the_least_recently_used_goes_first(here, monkeypatch):
    monkeypatch.setattr(disk_cache.prune, "__defaults__", (1.5 * MEBIBYTE, 1000 * DAY))
    disk_cache.keep(40 * "d", b"a kernel")
    assert left(here) == "cdn"


def test_a_use_is_noted(here):
    name = 40 * "d"
    disk_cache.keep(name, b"a kernel")
    os.utime(here / name, (0, 0))
    assert disk_cache.find(name) is not None
    assert (here / name).stat().st_mtime > time.time() - DAY


def test_the_command_lists(here, capsys):
    assert cache.main([]) == 0
    first, *files = capsys.readouterr().out.splitlines()
    assert first == f"{here} holds 3 kernels of 3.0 MiB."
    assert [(line.split()[0][0], line.split()[-3]) for line in files] == [
        ("c", "0"),
        ("b", "10"),
        ("a", "100"),
    ]


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
def test_the_command_prunes(here, capsys, flags, stays):
    assert cache.main(flags) == 0
    assert left(here) == stays
    gone = 4 - len(stays)
    assert capsys.readouterr().out.startswith(f"Removed {gone} kernel{'s' * (gone != 1)} of")


def test_the_command_prints_the_folder(here, capsys):
    assert cache.main(["--folder"]) == 0
    assert capsys.readouterr().out == f"{here}\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--folder", "--clear"], "--folder prints a path, no more; leave it out"),
        (["--days", "3"], "--days and --megabytes say what --prune removes; add --prune."),
        (["--prune", "--days", "-1"], "--days must be at least 0, but is -1."),
        (["--prune", "--megabytes", "nan"], "--megabytes must be at least 0, but is nan."),
    ],
)
def test_flags_that_cannot_be_used_remove_nothing(here, capsys, flags, said):
    with pytest.raises(SystemExit):
        cache.main(flags)
    assert said in capsys.readouterr().err
    assert left(here) == "abcn"


def test_without_a_folder_it_says_so(here, capsys, monkeypatch):
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "off")
    assert cache.main([]) == 1
    assert "No kernels are kept" in capsys.readouterr().out
