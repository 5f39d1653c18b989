"""What an interrupted training leaves behind, and how it is interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from errors import BadInput

PROGRAM = "functional_optim/examples/train_gpt.py"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Record:
    """What is known of one run.

    losses: at each step so far. step_seconds: what each took; the first counts the compiling.
    optimizer_seconds: the optimizer's part of each, if it can be measured. valid_weights and
    valid_average: the final losses on the validation text, None before the end of the run.
    """

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)
    valid_weights: float | None = None
    valid_average: float | None = None


@dataclass
class Checkpoint:
    """The complete state of a training run between two steps.

    arguments: what it was started with. records: by run, in the order in which they are made.
    current: the run in progress. state: that run's own state.
    """

    arguments: dict[str, Any]
    records: dict[str, Record]
    current: str | None = None
    state: dict[str, Any] | None = None

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        records = {name: vars(record) for name, record in self.records.items()}
        torch.save({"program": PROGRAM, **vars(self), "records": records}, part)
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a file that `save` wrote.

        Raises:
            BadInput: if there is no such file, or it is something else.
        """
        if not path.is_file():
            raise BadInput(f"--resume {path} is not a file; name a checkpoint of this program.")
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            assert content.pop("program") == PROGRAM
            content["records"] = {k: Record(**record) for k, record in content["records"].items()}
            return cls(**content)
        except Exception:  # whatever strange bytes make torch.load or the lines after it raise
            raise BadInput(f"--resume {path} is not a checkpoint of this program.") from None


class Interrupts:
    """Turns Ctrl-C and SIGTERM into KeyboardInterrupt, but not in the middle of a step.

    ::

        with Interrupts() as interrupts:
            while training:
                with interrupts.held():
                    step()
    """

    def __init__(self) -> None:
        self.holding = False
        self.asked = False

    def __enter__(self) -> Interrupts:
        self.before = {number: signal.signal(number, self.handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, *_: object) -> None:
        self.asked = True
        if not self.holding:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Put an interrupt off until the end of the block."""
        self.holding = True
        try:
            yield
        finally:
            self.holding = False
        if self.asked:
            raise KeyboardInterrupt

    def ignore(self) -> None:
        """From now on pay no attention: what follows is short and must be finished."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
