"""Processes that are killed with SIGKILL while they save, and what can be loaded then.

`python killed_runs.py FOLDER` prints one line of JSON for each trial. It forks its processes, so
torch is imported once for all of them, and starts no thread before it does.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import checkpoint
import checkpoints

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


class Careless:
    """What must fail: one file, written over the old one."""

    def save(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(content(step), folder / "last.pt")

    def load(self, folder: Path) -> int:
        path = folder / "last.pt"
        return is_whole(torch.load(path, weights_only=True)) if path.exists() else 0


WAYS = {way.__name__: way() for way in (Folders, Bare, OneFile, Careless)}


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


def at_each_event(way: str, root: Path) -> None:
    """Killed at each access to the disk of the third save in turn, until one save lives."""
    for event in range(1, 60):
        folder = root / f"{way}-{event}"

        def work(event: int = event, folder: Path = folder) -> None:
            arm = die_at(event, folder)
            for step in (1, 2):
                WAYS[way].save(folder, step)
            arm()
            WAYS[way].save(folder, 3)

        code = wait(fork(work))
        say(trial="event", way=way, at=event, code=code, loaded=loaded(way, folder))
        if code != -signal.SIGKILL:
            return


def at_random(way: str, root: Path, times: int) -> None:
    """Killed after some milliseconds; the child says which saves were finished."""
    generator = random.Random(0)
    for i in range(times):
        folder, done = root / f"{way}-random-{i}", root / f"{way}-random-{i}.done"

        def work(folder: Path = folder, done: Path = done) -> None:
            with done.open("ab", buffering=0) as log:
                for step in range(1, 10_000):
                    WAYS[way].save(folder, step)
                    log.write(b".")

        child = fork(work)
        while not (done.exists() and done.stat().st_size >= 2):
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        code = wait(child)
        finished = done.stat().st_size
        found = loaded(way, folder)
        say(trial="random", way=way, code=code, finished=finished, loaded=found)


def one_of_two(way: str, root: Path, victim: int) -> None:
    """Two processes save together, and one is killed at each access to the disk in turn."""
    for event in range(1, 40):
        folder = root / f"{way}-two-{victim}-{event}"
        meeting = root / f"{way}-two-{victim}-{event}.meeting"

        def work(rank: int, event: int = event, folder: Path = folder, at: Any = meeting) -> None:
            arm = die_at(event, folder) if rank == victim else lambda: None
            dist.init_process_group("gloo", init_method=f"file://{at}", rank=rank, world_size=2)
            WAYS[way].save(folder, 1)
            arm()
            WAYS[way].save(folder, 2)
            dist.destroy_process_group()

        ranks = [fork(lambda rank=rank: work(rank)) for rank in (0, 1)]
        code = wait(ranks[victim])
        if code == -signal.SIGKILL:
            os.kill(ranks[1 - victim], signal.SIGKILL)  # as a launcher does
        wait(ranks[1 - victim])
        found = loaded(way, folder)
        say(trial="two", way=way, victim=victim, at=event, code=code, loaded=found)
        if code != -signal.SIGKILL:
            return


def main(root: Path) -> None:
    torch.set_num_threads(1)
    for way in ("Folders", "Bare", "OneFile"):
        at_each_event(way, root)
        at_random(way, root, 6)
    at_random("Careless", root, 8)
    for victim in (0, 1):
        one_of_two("Folders", root, victim)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
