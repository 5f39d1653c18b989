"""Namespaces in which torchft may run: it listens on all interfaces, so it gets its own."""

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

ALONE = ["unshare", "--map-root-user", "--net", "--uts", "--pid", "--fork", "--kill-child"]
"""In namespaces of its own, as an ordinary user too; and when this process ends, it ends."""


@functools.cache
def why_not() -> str:
    """Why the real torchft cannot run here; "" if it can."""
    if sys.platform != "linux":
        return "torchft runs on Linux only"
    if importlib.util.find_spec("torchft") is None:
        return "torchft is not installed; pip install functional_optim[torchft] brings it"
    try:
        done = subprocess.run([*ALONE, "true"], capture_output=True, text=True, timeout=60)
    except OSError as error:
        return f"torchft listens on all interfaces, and there is no unshare here: {error}"
    if done.returncode:
        refused = done.stderr.strip()
        return f"torchft listens on all interfaces, and namespaces are refused here: {refused}"
    return ""


def alone(program: str, *flags: str) -> list[str]:
    """A command that runs a program of Python in namespaces of its own, with loopback up."""
    return [*ALONE, sys.executable, str(Path(__file__)), program, *flags]


def prepare() -> None:
    """Bring loopback up (SIOCGIFFLAGS, SIOCSIFFLAGS), and take a host name that resolves."""
    import fcntl
    import socket
    import struct

    name = b"lo".ljust(16, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        answer = fcntl.ioctl(s, 0x8913, name + bytes(24))
        (flags,) = struct.unpack_from("H", answer, 16)
        fcntl.ioctl(s, 0x8914, name + struct.pack("H22x", flags | 1))
    socket.sethostname("localhost")


if __name__ == "__main__":
    import runpy

    prepare()
    program = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")
