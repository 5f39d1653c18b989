"""Files of tests that run in a process of their own (tests/support/own_process.py)."""

import os
import subprocess
import sys
from pathlib import Path

import own_process

FILES = {
    "conftest.py": "import own_process\npytest_configure = own_process.register\n",
    "pytest.ini": "[pytest]\nmarkers = own_process: a process of their own\n",
    "test_marked.py": """
import os, pytest
pytestmark = pytest.mark.own_process

def test_pid(): open("marked", "a").write(f"{os.getpid()}\\n")
def test_same(): test_pid()
def test_red(): assert {"a": 1} == {"a": 2}
def test_ends(): os._exit(3)
def test_after(): pass
""",
    "test_plain.py": """
import os
def test_pid(): open("plain", "a").write(f"{os.getpid()}\\n")
""",
}


def test_a_marked_file_shares_one_process_with_no_other(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment.pop(own_process.VARIABLE, None)
    environment["PYTHONPATH"] = str(Path(own_process.__file__).parent)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-k", "not after"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "2 failed, 3 passed, 1 deselected" in done.stdout
    marked, plain = ((tmp_path / name).read_text().split() for name in ("marked", "plain"))
    assert len({*marked}) == len(plain) == 1
    assert marked[0] != plain[0]
    # failures are shown as they were, and a process that ended is said to have ended
    assert "assert {'a': 1} == {'a': 2}" in done.stdout
    assert "FAILED test_marked.py::test_ends" in done.stdout
    assert "exit code 3" in done.stdout
