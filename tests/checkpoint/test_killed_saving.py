"""A process that is killed while it saves leaves a checkpoint that loads, and is none of two.

Run as a program with a folder, the file prints one line of JSON for each trial: what can be loaded
of a process that was killed with SIGKILL. It forks its processes, so torch is imported once for all
of them, and starts no thread before it does.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import checkpoint
import checkpoints

KILLED = -signal.SIGKILL
SIZE = 50_000
LIMIT = 30  # seconds for one trial


def content(step: int) -> dict[str, Any]:
    """What is saved at a step: every number in it says which."""
    many = torch.full((SIZE,), float(step), dtype=torch.float64)
    return {"opt": {"state.w.step": torch.tensor(float(step)), "state.w.exp_avg": many}}


def is_whole(found: dict[str, Any]) -> int:
    """The step at which something was saved; raises if it is of two."""
    opt = found["opt"]
    step = int(opt["state.w.step"])
    assert bool((opt["state.w.exp_avg"] == step).all()), "of several steps"
    return step


class Folders:
    """torch.distributed.checkpoint with a folder for each step, as examples/checkpoints.py."""

    def save(self, folder: Path, step: int) -> None:
        checkpoints.save(folder, step, content(step))

    def load(self, folder: Path) -> int:
        path = checkpoints.newest(folder)
        return 0 if path is None else read(path)


class Bare:
    """The same without a rename: complete is what has torch's .metadata, which comes last."""

    def save(self, folder: Path, step: int) -> None:
        dcp.save(content(step), checkpoint_id=folder / f"step-{step:08d}")

    def load(self, folder: Path) -> int:
        complete = sorted(path.parent for path in folder.glob("step-*/.metadata"))
        return read(complete[-1]) if complete else 0


class OneFile:
    """One file, written beside the old one and renamed, as examples/checkpoint.py."""

    def save(self, folder: Path, step: int) -> None:
        checkpoint.Checkpoint({}, {}, "run", content(step)).save(folder / "last.pt")

    def load(self, folder: Path) -> int:
        path = folder / "last.pt"
        if not path.exists():
            return 0
        state = checkpoint.Checkpoint.load(path).state
        assert state is not None
        return is_whole(state)


WAYS = {way.__name__: way() for way in (Folders, Bare, OneFile)}


def read(path: Path) -> int:
    found = content(0)
    dcp.load(found, checkpoint_id=path)
    return is_whole(found)


# ---------------------------------------------------------------- processes
def fork(work: Callable[[], None]) -> int:
    """Run something in a child; its id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def wait(child: int, limit: float = LIMIT) -> int:
    """A child's exit code, negative for a signal; killed if it takes too long."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


def die_at(event: int, folder: Path) -> Callable[[], None]:
    """Arm this process: at so manieth access to a file of the folder it kills itself."""
    seen = {"armed": False, "count": 0}

    def watch(name: str, args: tuple[Any, ...]) -> None:
        touches = name in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
        if not (seen["armed"] and touches and str(folder) in str(args[0])):
            return
        seen["count"] += 1
        if seen["count"] == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return lambda: seen.update(armed=True)


def loaded(way: str, folder: Path) -> int | str:
    """What a new process can load: the step, or what is wrong."""
    result = folder.with_suffix(".json")

    def work() -> None:
        try:
            found: Any = WAYS[way].load(folder)
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        result.write_text(json.dumps(found))

    wait(fork(work))
    return json.loads(result.read_text()) if result.exists() else "no answer"


def say(**facts: Any) -> None:
    sys.stdout.write(f"{json.dumps(facts)}\n")
    sys.stdout.flush()


# ---------------------------------------------------------------- trials
def at_each_event(way: str, root: Path, victim: int | None = None) -> None:
    """Killed at each access to the disk of the third save in turn, until one save lives.

    victim: which of two processes that save together is killed; None for a process alone.
    """
    both, mine = victim is not None, victim or 0
    for event in range(1, 60):
        folder = root / f"{way}-{victim}-{event}"
        meeting = f"file://{folder}.meeting"

        def work(rank: int, event: int = event, folder: Path = folder, at: str = meeting) -> None:
            arm = die_at(event, folder) if rank == mine else lambda: None
            if both:
                dist.init_process_group("gloo", init_method=at, rank=rank, world_size=2)
            for step in (1, 2):
                WAYS[way].save(folder, step)
            arm()
            WAYS[way].save(folder, 3)
            if both:
                dist.destroy_process_group()

        ranks = [fork(lambda rank=rank: work(rank)) for rank in range(1 + both)]
        code = wait(ranks.pop(mine))
        for other in ranks:
            if code == KILLED:
                os.kill(other, signal.SIGKILL)  # as a launcher does
            wait(other)
        say(way=way, victim=victim, at=event, code=code, loaded=loaded(way, folder))
        if code != KILLED:
            return


def main(root: Path) -> None:
    torch.set_num_threads(1)
    for way in WAYS:
        at_each_event(way, root)
    for victim in (0, 1):
        at_each_event("Folders", root, victim)


# ---------------------------------------------------------------- the test of it
pytestmark = [
    pytest.mark.skipif(
        sys.platform == "win32" or not (dist.is_available() and dist.is_gloo_available()),
        reason="needs fork and gloo",
    ),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninit"),
]


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    """What was loaded after each death."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, tmp_path_factory.mktemp("runs")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("way", "victim"),
    [("Folders", None), ("Bare", None), ("OneFile", None), ("Folders", 0), ("Folders", 1)],
)
def test_killed_at_each_access_to_the_disk(way, victim, trials):
    """The third save is the one that dies: the second is there, or the third is complete."""
    *dead, alive = (t for t in trials if (t["way"], t["victim"]) == (way, victim))
    assert len(dead) >= 2
    assert {t["code"] for t in dead} == {KILLED}
    assert (alive["code"], alive["loaded"]) == (0, 3)
    steps = [t["loaded"] for t in dead]
    assert set(steps) <= {2, 3}
    assert steps[0] == 2
    assert steps == sorted(steps) or victim is not None


# ---------------------------------------------------------------- the example
def test_a_training_goes_on_where_its_newest_complete_checkpoint_is(tmp_path, monkeypatch):
    wanted = checkpoints.train(tmp_path / "through")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "STEPS", 9)
        checkpoints.train(tmp_path / "killed")
    assert checkpoints.newest(tmp_path / "killed").name == "step-00000008"
    assert_same(checkpoints.train(tmp_path / "killed"), wanted)


def test_the_newest_stay_and_remains_do_not_count(tmp_path):
    (tmp_path / "step-00000009.part").mkdir(parents=True)
    (tmp_path / "step-00000008.old").mkdir()
    assert checkpoints.newest(tmp_path) is None
    for step in (1, 2, 10, 2):
        path = checkpoints.save(tmp_path, step, {"x": torch.tensor(step)})
        assert path.name == f"step-{step:08d}"
    names = [path.name for path in checkpoints.complete(tmp_path)]
    assert names == ["step-00000002", "step-00000010"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
