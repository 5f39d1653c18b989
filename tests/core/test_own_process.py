"""Files of tests that run in a process of their own (tests/support/own_process.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import own_process

CONFTEST = "import own_process\n\ndef pytest_configure(config): own_process.register(config)\n"
OPTIONS = "[pytest]\nmarkers = own_process: a process of their own\n"
MARKED = """
import os, pytest
pytestmark = pytest.mark.own_process

def test_pid(): open("marked", "a").write(f"{os.getpid()}\\n")
def test_same(): test_pid()
def test_red(): assert {"a": 1} == {"a": 2}
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
@pytest.fixture
def broken(): raise ValueError("no fixture")
def test_broken(broken): pass
"""
ENDS = """
import os, pytest
pytestmark = pytest.mark.own_process

def test_before(): pass
def test_ends(): os._exit(3)
def test_after(): pass
"""
PLAIN = """
import os, pytest

@pytest.fixture(scope="module", autouse=True)
def around():
    yield
    open("torn_down", "a").write("x")

def test_pid(): open("plain", "a").write(f"{os.getpid()}\\n")
"""


def ran(folder: Path, *options: str) -> tuple[int, str]:
    for part, name, text in (
        ("", "conftest.py", CONFTEST),
        ("", "pytest.ini", OPTIONS),
        ("a", "test_plain_first.py", PLAIN),
        ("b", "test_marked.py", MARKED),
        ("b", "test_ends.py", ENDS),
        ("c", "test_plain_last.py", PLAIN),
    ):
        (folder / part).mkdir(exist_ok=True)
        (folder / part / name).write_text(text)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment.pop(own_process.VARIABLE, None)
    environment["PYTHONPATH"] = str(Path(own_process.__file__).parent)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_a_marked_file_shares_one_process_with_no_other(tmp_path):
    code, printed = ran(tmp_path)
    assert code == 1
    assert "3 failed, 5 passed, 1 skipped, 1 error" in printed
    assert "PASSED b/test_marked.py::test_same" in printed
    assert "PASSED b/test_ends.py::test_before" in printed
    marked, plain = ((tmp_path / name).read_text().split() for name in ("marked", "plain"))
    assert len(set(marked)) == 1
    assert len(set(plain)) == 1
    assert set(marked).isdisjoint(plain)
    assert (tmp_path / "torn_down").read_text() == "xx"
    # failures are shown as they were, and a process that ended is said to have ended
    assert "assert {'a': 1} == {'a': 2}" in printed
    assert "ValueError: no fixture" in printed
    assert "FAILED b/test_ends.py::test_ends" in printed
    assert "exit code 3" in printed


def test_only_the_chosen_tests_run(tmp_path):
    code, printed = ran(tmp_path, "-k", "test_same or test_before")
    assert (code, "2 passed" in printed) == (0, True)
