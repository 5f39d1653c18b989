"""What the user asks for, and whether that can be done here."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from checkpoint import Checkpoint
from errors import BadInput
from training import FULL, QUICK

OUT = Path("out")
"""Where the results go unless --out says otherwise."""

DEFAULTS = {"steps": None, "seed": 0, "device": "cpu", "data": None, "quick": False}
"""The flags that must stay the same when a run is resumed, and their defaults."""


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong flag gets one sentence instead of the usage too."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(message)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; what was left out and may come from a checkpoint is None."""
    parser = Parser(
        prog="train_gpt", description="Train a small GPT with one optimizer written three ways."
    )
    parser.add_argument("--steps", type=int, help=f"steps of each run (default {FULL.steps})")
    parser.add_argument("--device", help="cpu (the default), cuda or cuda:N")
    parser.add_argument("--data", metavar="DIR", help="train on the text files below this folder")
    parser.add_argument("--out", metavar="DIR", type=Path, default=OUT, help=f"default: {OUT}")
    parser.add_argument("--resume", metavar="FILE", type=Path, help="continue from a checkpoint")
    parser.add_argument(
        "--quick",
        action="store_true",
        default=None,
        help=f"a tiny model and {QUICK.steps} steps, which is too few to judge the validation loss",
    )
    parser.add_argument("--seed", type=int, help="of the weights and the batches (default 0)")
    flags = parser.parse_args(argv)
    if flags.steps is not None and flags.steps < 1:
        raise BadInput(f"--steps must be at least 1, but is {flags.steps}.")
    if flags.seed is not None and not 0 <= flags.seed < 2**32:
        raise BadInput(f"--seed must be at least 0 and below 2**32, but is {flags.seed}.")
    if flags.data is not None:
        flags.data = str(Path(flags.data).resolve())
    return flags


def settle(flags: argparse.Namespace, saved: Checkpoint | None) -> dict[str, Any]:
    """The arguments of this training: from the checkpoint, from the flags, or the defaults."""
    chosen: dict[str, Any] = {}
    for name, default in DEFAULTS.items():
        given = getattr(flags, name)
        if saved is None:
            chosen[name] = default if given is None else given
            continue
        chosen[name] = saved.arguments[name]
        if given not in (None, chosen[name]):
            raise BadInput(
                f"{flags.resume} was made with {name} = {chosen[name]}, but --{name} says {given}; "
                "leave the flag out to continue."
            )
    if chosen["steps"] is None:
        chosen["steps"] = (QUICK if chosen["quick"] else FULL).steps
    return chosen


def usable(name: str) -> torch.device:
    """The device of this name, if training can run and compile on it."""
    device = None if not re.fullmatch(r"cpu|cuda(:\d+)?", name) else torch.device(name)
    if device is None:
        raise BadInput(f"--device {name} is not known here; use cpu, cuda or cuda:N.")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise BadInput(f"--device {name} cannot be used: torch sees {count} CUDA devices here.")
        return device
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    missing = "" if shutil.which(compiler) else f"the C++ compiler {compiler}"
    missing = missing or ("" if header.exists() else f"Python's own C header {header}")
    if missing:
        raise BadInput(f"torch.compile needs {missing}, which this machine does not have.")
    return device


def writable(folder: Path) -> Path:
    """The folder, made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {folder} cannot be made: {error.strerror}.") from None
    if not os.access(folder, os.W_OK):
        raise BadInput(f"--out {folder} cannot be written to.")
    return folder
