"""The command: it chooses checks, makes them in processes that may die, and reports."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform as machine
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_check import accuracy, placed, problems, speed, steady, tensors
from gpu_check.platform import Platform, platform_of
from gpu_check.results import Check, Outcome, finite, made, page

FILE = "gpu_check.json"

PROGRAM = ["-m", "gpu_check"]
"""How Python starts the command."""

STDERR = 2
"""Where progress goes, so that the page can be sent elsewhere."""

CHILD = "--results"
"""The option of a child process: it runs checks and writes the results to this file, one per
line."""


def listed(quick: bool) -> list[Check]:
    """All checks, those that are most likely to tell something first."""
    sections = (steady, tensors, placed, accuracy, problems, speed)
    return [check for section in sections for check in section.checks(quick)]


def chosen(every: Sequence[Check], names: Sequence[str]) -> list[Check]:
    """The checks of these names, or whose names begin so; all if there are none.

    Raises:
        ValueError: for a name of none.
    """
    for name in names:
        if not any(_is_called(check, name) for check in every):
            sections = ", ".join(dict.fromkeys([check.section for check in every]))
            raise ValueError(f"there is no check called {name!r}; the sections are {sections}.")
    return [x for x in every if not names or any(_is_called(x, name) for name in names)]


def _is_called(check: Check, name: str) -> bool:
    return check.name == name or check.name.startswith(f"{name.rstrip('/')}/")


def make_all(
    checks: Sequence[Check], platform: Platform, tell: Callable[[Outcome], None]
) -> list[Outcome]:
    """Make checks in this process, up to one behind which the device answers no more."""
    outcomes: list[Outcome] = []
    for check in checks:
        outcomes.append(made(check, platform))
        tell(outcomes[-1])
        try:
            platform.synchronize()
        except Exception:
            break
    return outcomes


def make_apart(names: Sequence[str], options: Sequence[str]) -> list[Outcome]:
    """Make checks in another process, and in a new one what is left when that has died.

    After an illegal access a process can use its device no more, and it would take all checks
    behind it along.
    """
    outcomes: list[Outcome] = []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # the tests' table is on it
    with tempfile.TemporaryDirectory() as folder:
        file, errors = Path(folder) / "results", Path(folder) / "errors"
        while left := names[len(outcomes) :]:
            file.write_text("")
            own = [CHILD, str(file), "--only", *left]
            command = [sys.executable, *PROGRAM, *options, *own]
            with errors.open("w") as said:
                status = subprocess.run(command, stdout=STDERR, stderr=said, env=env).returncode
            found = [Outcome(**json.loads(line)) for line in file.read_text().splitlines()]
            outcomes += found
            if status != 0 or not found:
                told, trace = f"the process ended with status {status}", errors.read_text()[-4000:]
                name = left[len(found)] if len(found) < len(left) else left[-1]
                outcomes.append(Outcome(name, "failed", told=told, trace=trace))
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 1 if a check has failed."""
    parser = argparse.ArgumentParser(
        prog="make gpu",
        description="Check the optimizers on a GPU, and write a file of results to send back.",
    )
    parser.add_argument("--device", help="such as cuda:0, the default; cpu is a dry run")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="checks or sections")
    parser.add_argument("--quick", action="store_true", help="fewer recipes and shorter times")
    parser.add_argument("--output", default=FILE, metavar="FILE", help=f"(default: {FILE})")
    parser.add_argument(CHILD, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    try:
        platform = platform_of(given.device)
        checks = chosen(listed(given.quick), given.only)
    except ValueError as error:
        parser.error(str(error))
    if given.results is not None:
        with Path(given.results).open("a") as file:
            return _for_another(checks, platform, file)
    options = ["--device", str(platform.device), *["--quick"] * given.quick]
    outcomes = make_apart([x.name for x in checks], options)
    report = described(platform, outcomes, quick=given.quick)
    Path(given.output).write_text(json.dumps(report, indent=1, default=str) + "\n")
    _say(page(outcomes, _head(report)))
    _say(f"Everything is in {given.output}: please attach it to an issue of the project.")
    return int(any(x.status == "failed" for x in outcomes))


def _for_another(checks: Sequence[Check], platform: Platform, file: Any) -> int:
    def tell(outcome: Outcome) -> None:
        file.write(json.dumps(outcome.data(), default=str) + "\n")
        file.flush()
        _say(f"{outcome.name}: {outcome.status} {outcome.told}".rstrip())

    make_all(checks, platform, tell)
    return 0


def described(platform: Platform, outcomes: Sequence[Outcome], *, quick: bool) -> dict[str, Any]:
    """The file of results."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": {"kind": platform.device.type, **platform.described()},
        "versions": versions(),
        "quick": quick,
        "results": [finite(x.data()) for x in outcomes],
    }


def versions() -> dict[str, str]:
    """What the results depend on."""
    found = {"python": machine.python_version(), "torch": torch.__version__}
    for name in ("functional_optim", "triton", "pytorch-triton-rocm", "optree"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["system"] = machine.platform()
    found["driver"] = _driver()
    return found


def _driver() -> str:
    """The version of NVIDIA's driver, as its own program tells it."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().partition("\n")[0]


def _head(report: dict[str, Any]) -> list[str]:
    known = ", ".join([f"{key} {value}" for key, value in report["versions"].items()])
    return [f"{report['device']['name']} ({report['device']['kind']}), {report['date']}", known]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
