"""The example programs run, as their user would run them."""

import importlib
import importlib.util
import json
import re
import runpy
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


@pytest.fixture
def load(monkeypatch):
    """Imports a file of the examples, which has the name of a file of another folder, maybe."""
    own = {path.stem for path in EXAMPLES.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in own & sys.modules.keys()}
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # as an example sets it
    yield importlib.import_module
    for name in own & sys.modules.keys():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def ended(load, monkeypatch, capsys):
    """How a program ends here, where all that is slow has been imported, and its errors."""

    def run(*flags, program="train_gpt.py"):
        monkeypatch.setattr(sys, "argv", [program, *flags])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(EXAMPLES / program), run_name="__main__")
        return end.value.code, capsys.readouterr().err

    return run


def test_three_ways_of_training_agree(tmp_path):
    done = train("--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "agree to" in done.stdout + done.stderr
    assert (tmp_path / "losses.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "results.json").read_text())


@pytest.mark.parametrize(
    "flags", ["--steps -1", "--device nowhere", "--resume missing.pt", "--data ."]
)
def test_bad_flags_get_a_sentence(flags, tmp_path, ended):
    flags = [str(tmp_path) if flag == "." else flag for flag in flags.split()]
    code, said = ended("--out", str(tmp_path / "out"), *flags)
    assert code == 2
    assert "Traceback" not in said
    assert said.startswith("train_gpt: ")


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
def test_a_group_that_cannot_be_gets_a_sentence(without, flags, tmp_path, ended, monkeypatch):
    def found(name, *package, find=importlib.util.find_spec):
        return None if name == without else find(name, *package)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    code, said = ended("--out", str(tmp_path), *flags, program="fault_tolerant.py")
    assert code == 2
    assert said.startswith("fault_tolerant: ")
    assert "Traceback" not in said


def test_the_gradient_free_example_trains_and_draws(tmp_path, ended):
    done = train("--quick", "--out", str(tmp_path), program="gradient_free.py")
    assert done.returncode == 0, done.stderr
    assert "Best test accuracy" in done.stdout
    assert (tmp_path / "gradient_free.png").stat().st_size > 50_000
    says = "gradient_free: --generations must be at least 1, but is 0.\n"
    assert ended("--generations", "0", program="gradient_free.py") == (2, says)


def test_a_replica_may_join_late_but_not_miss_a_step(load):
    report = load("ft_report")

    def story(*steps):
        lines = {i: {"step": i, "committed": True, "digest": i, "time": i} for i in range(10)}
        return report.Story(([lines[i] for i in steps], [lines[6], lines[9]]), 7, 8)

    assert report.complaint(story(6, 7, 8, 9)) is None
    says = "the survivor has lost a step, or counted one twice."
    assert report.complaint(story(6, 7, 9)) == says
