"""Two replicas train one model with torchft; one is killed, the other goes on, it comes back.

    python examples/fault_tolerant.py

takes half a minute on two CPU cores and leaves a picture and the numbers in `out`. Each replica is
a process that averages its gradients with the other's and votes on every step. Replica 1 is ended
with SIGKILL in the midst of it, started again with other weights, and healed by replica 0: from
then on both are equal again, bitwise.

torchft is for Linux on x86-64: `pip install torchft-nightly==2026.10.26`. While it runs it listens
on all network interfaces; in a shell of `unshare --user --map-root-user --net`, after
`ip link set lo up`, nobody else sees it. The program ends with 1 if the replicas part, with 2 if it
cannot start, with 130 if it was interrupted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import ft_report
from errors import BadInput
from flags import OUT, Parser, writable
from rich.console import Console

STEPS = 300
ALONE = 20
"""Replica 1 comes back when its peer has taken so many steps without it."""


class Replica:
    """A process of `ft_replica.py`, and a thread that reads what it says."""

    def __init__(self, rank: int, seed: int, lighthouse: str, log: Path, said: queue.Queue) -> None:
        program = Path(__file__).with_name("ft_replica.py")
        command = [sys.executable, str(program), "--rank", str(rank), "--seed", str(seed)]
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse},
            )
        self.rank = rank
        self.said = said
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        """Hand on each line; None at the end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.put((self.rank, json.loads(line)))
        self.said.put((self.rank, None))

    def tell(self, order: str | int) -> None:
        """Either "begin" or the step to stop at."""
        assert self.process.stdin is not None
        print(order, file=self.process.stdin, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    try:
        parser = Parser(prog="fault_tolerant", description=(__doc__ or "").partition("\n")[0])
        parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
        parser.add_argument("--seed", type=int, default=0, help="of weights and text (default 0)")
        parser.add_argument("--out", metavar="DIR", type=Path, default=OUT, help=f"default: {OUT}")
        flags = parser.parse_args(argv)
        if flags.steps < 30:
            raise BadInput(f"--steps must be at least 30, but is {flags.steps}.")
        check_torchft()
        return work(flags.steps, flags.seed, writable(flags.out))
    except BadInput as problem:
        return say(2, str(problem))
    except KeyboardInterrupt:
        return say(130, "stopped.")


def check_torchft() -> None:
    """Can torchft run here?"""
    if importlib.util.find_spec("torchft") is None:
        raise BadInput(
            "this example needs torchft, which is not installed (it is for Linux on x86-64): "
            "pip install torchft-nightly==2026.10.26"
        )
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        raise BadInput(
            f"torchft reaches this machine by its name, {name}, which no address is known of; add "
            f"127.0.0.1 {name} to /etc/hosts."
        ) from None


def work(steps: int, seed: int, out: Path) -> int:
    """Train until both replicas have taken `steps` steps and more, and report."""
    from torchft.coordination import LighthouseServer

    console = Console()
    with (out / "lighthouse.log").open("wb") as log:  # it writes past sys.stderr
        own = os.dup(2)
        os.dup2(log.fileno(), 2)
        lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=1,
            join_timeout_ms=1000,
            quorum_tick_ms=50,
            heartbeat_timeout_ms=1000,
        )
        try:
            with ft_report.Display(console, steps) as display:
                port = lighthouse.address().rsplit(":", 1)[1]
                story = direct(steps, seed, out, f"http://localhost:{port}", display)
        finally:
            lighthouse.shutdown()
            os.dup2(own, 2)
            os.close(own)
    return conclude(story, out)


def direct(
    steps: int, seed: int, out: Path, lighthouse: str, display: ft_report.Display
) -> ft_report.Story:
    """Start two replicas, kill one, start it again, and let both end."""
    said: queue.Queue = queue.Queue()
    logs = [out / f"replica{rank}.log" for rank in (0, 1)]
    for log in logs:
        log.unlink(missing_ok=True)
    live = [Replica(rank, seed, lighthouse, logs[rank], said) for rank in (0, 1)]
    story = ft_report.Story()
    waiting: list[Replica] = []
    alone, last = 0, None
    try:
        while any(replica.process.poll() is None for replica in live) or not said.empty():
            rank, line = said.get(timeout=120)
            if line is None:
                dead = live[rank].process
                if dead.wait() != 0 and (rank == 0 or story.killed_at is None or story.back_at):
                    raise BadInput(f"replica {rank} has failed; {logs[rank]} says why.")
                continue
            if "ready" in line:
                waiting.append(live[rank])
                if len(waiting) == 2 or story.killed_at is not None:  # the first two begin together
                    for replica in waiting:
                        replica.tell("begin")
                    waiting.clear()
                continue
            story.lines[rank].append(line)
            display.step(rank, line)
            if rank == 1 and story.killed_at is not None and story.back_at is None:
                if line["healed"]:
                    story.back_at = line["time"]
                    display.say(f"Replica 1 is back, and healed in step {line['step']}.")
            elif rank == 1 and story.killed_at is None and line["step"] >= steps // 3:
                time.sleep(0.01)  # so that it is likely to be inside the next step
                live[1].process.kill()
                story.killed_at = time.time()
                display.say(f"Replica 1 is killed (SIGKILL) at step {line['step']}.")
                display.status(1, "dead")
            if rank == 0 and line["participants"] == 1 and story.killed_at is not None:
                alone += line["committed"]
                if alone == ALONE:
                    live[1] = Replica(1, seed + 1, lighthouse, logs[1], said)
                    display.say("Replica 1 is started again, with other weights.")
                    display.status(1, "starting …")
            if last is None and story.back_at is not None:
                healed = story.lives()[1]
                if len(healed) >= steps // 3 and line["step"] >= steps:
                    last = line["step"] + 5  # both replicas are within a step of one another
                    display.ends_at(last)
                    for replica in live:
                        replica.tell(last)
    finally:
        for replica in live:
            replica.process.kill()
            replica.process.wait()
    return story


def conclude(story: ft_report.Story, out: Path) -> int:
    """Draw the picture, write the numbers, and judge."""
    ft_report.plot(story, out / "fault_tolerant.png")
    (out / "fault_tolerant.json").write_text(json.dumps(vars(story), indent=1))
    print(f"The picture is {out / 'fault_tolerant.png'}, all steps: {out / 'fault_tolerant.json'}.")
    problem = ft_report.complaint(story)
    if problem is not None:
        return say(1, problem)
    print(ft_report.praise(story))
    return 0


def say(code: int, sentence: str) -> int:
    """Print a sentence as an error; returns the exit code."""
    print(f"fault_tolerant: {sentence}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
