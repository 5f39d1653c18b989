"""A lighthouse and two replicas in a network of their own: a program, run by `test_torchft.py`.

It must be the first process of its own namespaces (`torchft_spaces.alone`): whatever it starts ends
with it, every port is free, and what binds to wildcard addresses is seen by nobody.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from torchft.coordination import LighthouseServer

ALONE = '"participants": 1,'


def lighthouse(port: str = "0") -> LighthouseServer:
    """One that notices a death in a second; its address goes where torchft looks for it."""
    made = LighthouseServer(
        bind=f"[::]:{port}",
        min_replicas=1,
        join_timeout_ms=1000,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=1000,
    )
    port = made.address().rsplit(":", 1)[1]
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://localhost:{port}"
    return made


def serve() -> None:
    """Be a lighthouse, at a port from the command line (0: any), until killed."""
    made = lighthouse(sys.argv[1])
    print(made.address().rsplit(":", 1)[1], flush=True)
    while True:
        time.sleep(60)


def spawn(flags: argparse.Namespace, name: str, *more: str) -> subprocess.Popen[bytes]:
    """A replica that has not begun: it waits for a line, makes its Manager, waits for another."""
    command = [sys.executable, str(Path(__file__).with_name("torchft_replica.py"))]
    command += ["--api", flags.api, "--quorum", flags.quorum, "--stop", str(flags.out / "stop")]
    with (flags.out / f"{name}.out").open("wb") as out, (flags.out / f"{name}.err").open("wb") as e:
        return subprocess.Popen([*command, *more], stdin=subprocess.PIPE, stdout=out, stderr=e)


def tell(replica: subprocess.Popen[bytes]) -> None:
    assert replica.stdin is not None
    replica.stdin.write(b"go\n")
    replica.stdin.flush()


def wait_until_alone(survivor: subprocess.Popen[bytes], path: Path) -> None:
    """Wait for three steps that the survivor takes without its peer."""
    before = path.read_text().count(ALONE)
    while path.read_text().count(ALONE) < before + 3:
        if survivor.poll() is not None:
            raise SystemExit(f"the survivor ended with {survivor.returncode}")
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--api", required=True)
    parser.add_argument("--quorum", required=True)
    parser.add_argument("--places", nargs="+", help="where the second replica dies, life by life")
    parser.add_argument("--out", type=Path, required=True)
    flags = parser.parse_args()
    server = lighthouse()
    survivor = spawn(flags, "survivor", "--rank", "0")
    lives = [("--dies", place) for place in flags.places] + [("--ends",)]
    waiting = spawn(flags, "life0", "--rank", "1", *lives[0])
    for i in range(len(lives)):
        mortal = waiting
        if i == 0:
            tell(mortal)
            tell(survivor)
            for name in ("survivor", "life0"):  # both are known before the first step
                while not (flags.out / f"{name}.out").read_bytes():
                    time.sleep(0.02)
            tell(survivor)
            tell(mortal)
        else:
            wait_until_alone(survivor, flags.out / "survivor.out")
            # both lines at once: a Manager that takes no step keeps its peers from a quorum
            tell(mortal)
            tell(mortal)
        if i + 1 < len(lives):
            waiting = spawn(flags, f"life{i + 1}", "--rank", "1", *lives[i + 1])
        expected = -signal.SIGKILL if i + 1 < len(lives) else 0
        if mortal.wait() != expected:
            raise SystemExit(f"life {i} ended with {mortal.returncode}, not {expected}")
    if survivor.wait() != 0:
        raise SystemExit(f"the survivor ended with {survivor.returncode}")
    server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
