"""Where the figures come from: the machine and the versions."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import sys
from datetime import date
from importlib import metadata
from pathlib import Path

import torch

LIBRARIES = (
    "functional_optim",
    "torch",
    "optree",
    "numpy",
    "jax",
    "optax",
    "torchopt",
    "heavyball",
)


def processor() -> str:
    """The processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory() -> str:
    """The size of the main memory."""
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{size / 2**30:.0f} GiB"


def device() -> str:
    """The CUDA device's name, if there is one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def versions() -> str:
    """Of Python and all libraries that take part."""
    found = [f"Python {platform.python_version()}"]
    for name in LIBRARIES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def describe() -> dict[str, str]:
    """All of it, by what it is."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return {
        "Date": date.today().isoformat(),
        "Processor": f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "Vector width": torch.backends.cpu.get_cpu_capability(),
        "Memory": memory(),
        "CUDA device": device(),
        "System": f"{platform.system()} {platform.release()}",
        "Versions": versions(),
        "Load at the start": f"{load:.1f}",
    }


def status(field: str) -> float | None:
    """Megabytes that Linux tells of this process; None elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(x.split()[1]) for x in lines if x.startswith(f"{field}:")) / 2**10
    except (OSError, StopIteration):
        return None


def peak() -> float:
    """Megabytes that this process had at most, since it began to run this program.

    The kernel's `ru_maxrss` would begin with what the parent had when it started the process.
    """
    found = status("VmHWM")
    if found is None:
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return found


def resident() -> float:
    """Megabytes that this process has now; where nothing tells them, those that it had at most.

    What has been freed is given back first, and the peak begins again, where the system can.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    found = status("VmRSS")
    return peak() if found is None else found
