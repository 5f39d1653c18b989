"""A process that is killed while it saves leaves a checkpoint that loads, and is none of two."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_same
from torch import distributed as dist

SUPPORT = Path(__file__).parents[1] / "support"
KILLED = -signal.SIGKILL

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs fork"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninit"),
]


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    """What was loaded after each death."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            SUPPORT / "killed_runs.py",
            tmp_path_factory.mktemp("runs"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def checkpoints(monkeypatch):
    """examples/checkpoints.py"""
    monkeypatch.syspath_prepend(SUPPORT.parents[1] / "examples")
    return importlib.import_module("checkpoints")


def of(trials, **wanted):
    found = [t for t in trials if wanted.items() <= t.items()]
    assert found
    return found


@pytest.mark.parametrize("way", ["Folders", "Bare", "OneFile"])
def test_killed_at_each_access_to_the_disk(way, trials):
    """The third save is the one that dies: the second is there, or the third is complete."""
    *dead, alive = of(trials, trial="event", way=way)
    assert len(dead) >= 2
    assert {t["code"] for t in dead} == {KILLED}
    assert (alive["code"], alive["loaded"]) == (0, 3)
    steps = [t["loaded"] for t in dead]
    assert set(steps) <= {2, 3}
    assert steps == sorted(steps)
    assert steps[0] == 2


@pytest.mark.parametrize("way", ["Folders", "Bare", "OneFile"])
def test_killed_at_any_time(way, trials):
    for t in of(trials, trial="random", way=way):
        assert t["code"] == KILLED
        assert t["loaded"] in (t["finished"], t["finished"] + 1)


def test_writing_over_the_old_file_loses_it(trials):
    """Or the tests above would say nothing."""
    found = of(trials, trial="random", way="Careless")
    assert any(isinstance(t["loaded"], str) for t in found)


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_processes_is_killed(victim, trials):
    *dead, alive = of(trials, trial="two", victim=victim)
    assert dead
    assert {t["code"] for t in dead} == {KILLED}
    assert {t["loaded"] for t in dead} <= {1, 2}
    assert dead[0]["loaded"] == 1
    assert (alive["code"], alive["loaded"]) == (0, 2)


# ---------------------------------------------------------------- the example


def test_a_training_goes_on_where_its_newest_complete_checkpoint_is(
    tmp_path, monkeypatch, checkpoints
):
    wanted = checkpoints.train(tmp_path / "through")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "STEPS", 9)
        checkpoints.train(tmp_path / "killed")
    assert checkpoints.newest(tmp_path / "killed").name == "step-00000008"
    assert_same(checkpoints.train(tmp_path / "killed"), wanted)


def test_the_newest_stay_and_remains_do_not_count(tmp_path, checkpoints):
    (tmp_path / "step-00000009.part").mkdir(parents=True)
    (tmp_path / "step-00000008.old").mkdir()
    assert checkpoints.newest(tmp_path) is None
    for step in (1, 2, 10, 2):
        path = checkpoints.save(tmp_path, step, {"x": torch.tensor(step)})
        assert path.name == f"step-{step:08d}"
    names = [path.name for path in checkpoints.complete(tmp_path)]
    assert names == ["step-00000002", "step-00000010"]
