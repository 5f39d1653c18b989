"""The example programs run, as their user would run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torchft_spaces

EXAMPLES = Path(__file__).parents[2] / "examples"
FAULT = EXAMPLES / "fault_tolerant.py"


def train(*flags: str, program: str = "train_gpt.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / program), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def test_three_ways_of_training_agree(tmp_path):
    done = train("--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "agree to" in done.stdout + done.stderr
    assert (tmp_path / "losses.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "results.json").read_text())


@pytest.mark.parametrize(
    "flags",
    [["--steps", "-1"], ["--device", "nowhere"], ["--resume", "missing.pt"], ["--data", "."]],
)
def test_bad_flags_get_a_sentence(flags, tmp_path):
    flags = [str(tmp_path) if flag == "." else flag for flag in flags]
    done = train("--out", str(tmp_path / "out"), *flags)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()


@pytest.mark.skipif(bool(torchft_spaces.why_not()), reason=torchft_spaces.why_not())
def test_a_killed_replica_comes_back_as_the_other_one_is(tmp_path):
    command = torchft_spaces.alone(str(FAULT), "--steps", "30", "--out", str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    logs = [path.read_text()[-2000:] for path in tmp_path.glob("*.log")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    shared, equal = re.search(r"(\d+) of (\d+) shared steps bit-equal", done.stdout).groups()
    assert shared == equal
    assert int(shared) >= 20
    assert (tmp_path / "fault_tolerant.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "fault_tolerant.json").read_text())["back_at"]


@pytest.mark.parametrize(
    ("without", "flags"), [("", ["--steps", "3"]), ("", ["--pace", "3"]), ("torchft", [])]
)
def test_a_group_that_cannot_be_gets_a_sentence(without, flags, tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); hidden = sys.argv.pop(1)\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name: None if name == hidden else find(name)\n"
        "import fault_tolerant; sys.exit(fault_tolerant.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, str(EXAMPLES), without, "--out", str(tmp_path), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("fault_tolerant: ")
    assert "Traceback" not in done.stderr


def test_the_gradient_free_example_trains_and_draws(tmp_path):
    done = train("--quick", "--out", str(tmp_path), program="gradient_free.py")
    assert done.returncode == 0, done.stderr
    assert "Best test accuracy" in done.stdout
    assert (tmp_path / "gradient_free.png").stat().st_size > 50_000
    done = train("--generations", "0", program="gradient_free.py")
    assert (done.returncode, done.stderr) == (
        2,
        "gradient_free: --generations must be at least 1, but is 0.\n",
    )


def test_a_replica_may_join_late_but_not_miss_a_step():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import ft_report as r\n"
        "def line(i): return {'step': i, 'committed': True, 'digest': i, 'time': i}\n"
        "def story(*steps): return r.Story(([*map(line, steps)], [line(6), line(9)]), 7, 8)\n"
        "print(r.complaint(story(6, 7, 8, 9)), r.complaint(story(6, 7, 9)), sep='\\n')"
    )
    command = [sys.executable, "-c", code, str(EXAMPLES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines() == [
        "None",
        "the survivor has lost a step, or counted one twice.",
    ]
