"""A lighthouse and two replicas in a network of their own: a program, run by `test_torchft.py`.

It must be the first process of its own namespaces (`torchft_spaces.alone`): whatever it starts ends
with it, every port is free, and what binds to wildcard addresses is seen by nobody.

It forks the others, so that torch is imported once. The lighthouse is one of them, because its
threads would not be in a fork.
"""

import argparse
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
from torchft.coordination import LighthouseServer

ALONE = '"participants": 1,'


def lighthouse(port: str = "0") -> LighthouseServer:
    """One that notices a death in a second; its address goes where torchft looks for it."""
    waits = {"join_timeout_ms": 1000, "quorum_tick_ms": 50, "heartbeat_timeout_ms": 1000}
    made = LighthouseServer(bind=f"[::]:{port}", min_replicas=1, **waits)
    port = made.address().rsplit(":", 1)[1]
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://localhost:{port}"
    return made


def serve() -> None:
    """Be a lighthouse, at a port from the command line (0: any), until killed."""
    made = lighthouse(sys.argv[1])
    print(made.address().rsplit(":", 1)[1], flush=True)
    while True:
        time.sleep(60)


class Program(ForkProcess):
    """A fork of this process, in which a function is called as the main function of a program.

    What it writes goes to files of its name. It ends, at the latest, with this process.
    """

    def __init__(self, main: Callable[[], object], folder: Path, name: str, *flags: str) -> None:
        assert len([*Path("/proc/self/task").iterdir()]) == 1, "a fork has one of the threads"
        super().__init__(name=name, daemon=True)
        self.main, self.flags = main, flags
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        self.out.touch()
        self.reads, self.told = os.pipe()
        self.start()
        os.close(self.reads)

    def run(self) -> None:
        os.close(self.told)
        os.dup2(self.reads, 0)
        for number, path in ((1, self.out), (2, self.err)):
            with path.open("wb") as file:
                os.dup2(file.fileno(), number)
        sys.stdin, sys.argv = os.fdopen(0), [self.name, *self.flags]
        self.main()

    def tell(self) -> None:
        """Write the line that it waits for."""
        os.write(self.told, b"go\n")

    def wait_for(self, done: Callable[[str], bool]) -> None:
        """Wait until what it has written is enough; an error if it ends before."""
        while not done(self.out.read_text()):
            if self.exitcode is not None:
                raise SystemExit(f"{self.name} ended with {self.exitcode}")
            time.sleep(0.02)

    def must_end(self, expected: int) -> None:
        self.join()
        os.close(self.told)
        if self.exitcode != expected:
            raise SystemExit(f"{self.name} ended with {self.exitcode}, not {expected}")


def begin(folder: Path) -> Program:
    """A lighthouse as a process; its address goes where torchft looks for it."""
    made = Program(serve, folder, "lighthouse", "0")
    made.wait_for(lambda text: text.endswith("\n"))
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://localhost:{int(made.out.read_text())}"
    return made


def spawn(flags: argparse.Namespace, name: str, *more: str) -> Program:
    """A replica that has not begun: it waits for a line, makes its Manager, waits for another."""
    replica = importlib.import_module("torchft_replica")  # a lighthouse alone does without
    usual = ("--api", flags.api, "--quorum", flags.quorum, "--stop", str(flags.out / "stop"))
    return Program(replica.main, flags.out, name, *usual, *more)


def wait_until_alone(survivor: Program) -> None:
    """Wait for three steps that the survivor takes without its peer."""
    before = survivor.out.read_text().count(ALONE)
    survivor.wait_for(lambda text: text.count(ALONE) >= before + 3)


def import_early(api: str) -> None:
    """Have what every replica would import, also in its first step."""
    importlib.import_module("torchft_replica")
    if api == "functional":
        torch.func.grad(torch.sum)(torch.ones(2))
    else:
        importlib.import_module("functional_optim.adapters")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--api", required=True)
    parser.add_argument("--quorum", required=True)
    parser.add_argument("--places", nargs="+", help="where the second replica dies, life by life")
    parser.add_argument("--out", type=Path, required=True)
    flags = parser.parse_args()
    server = begin(flags.out)
    import_early(flags.api)
    survivor = spawn(flags, "survivor", "--rank", "0")
    lives = [("--dies", place) for place in flags.places] + [("--ends",)]
    waiting = spawn(flags, "life0", "--rank", "1", *lives[0])
    for i in range(len(lives)):
        mortal = waiting
        if i == 0:
            mortal.tell()
            survivor.tell()
            for one in (survivor, mortal):  # both are known before the first step
                one.wait_for(bool)
            survivor.tell()
            mortal.tell()
        else:
            wait_until_alone(survivor)
            # both lines at once: a Manager that takes no step keeps its peers from a quorum
            mortal.tell()
            mortal.tell()
        if i + 1 < len(lives):
            waiting = spawn(flags, f"life{i + 1}", "--rank", "1", *lives[i + 1])
        mortal.must_end(-signal.SIGKILL if i + 1 < len(lives) else 0)
    survivor.must_end(0)
    server.kill()
    server.must_end(-signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
