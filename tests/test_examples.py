"""The example programs run, as their user would run them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


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
