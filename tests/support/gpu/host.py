"""Triton kernels on the CPU's memory: a driver, for tests that look at kernels alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from functional_optim.engine import group
from functional_optim.engine.gpu import TritonExecutor
from functional_optim.engine.per_tensor import PerTensorExecutor
from functional_optim.kernels import drivers
from functional_optim.kernels.drivers import Launcher
from functional_optim.kernels.triton_primitives import KernelText
from gpu.interpreter import Interpreted


class Host:
    """A driver for the CPU. texts: the kernels that were loaded. launches: what was launched."""

    timed = False

    def __init__(self) -> None:
        self.texts: list[KernelText] = []
        self.launches: list[tuple[str, int]] = []

    def missing(self) -> str | None:
        return None

    def name(self, device: torch.device) -> str:
        return "host"

    def load(self, text: KernelText, device: torch.device) -> Launcher:
        self.texts.append(text)
        kernel = Interpreted(text)

        def launch(programs: int, arguments: Sequence[Any]) -> None:
            self.launches.append((text.name, programs))
            kernel(programs, arguments, lambda at: True)

        return launch

    def capturing(self) -> bool:
        return False

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64)

    def seconds(self, run: Callable[[], object], device: torch.device) -> float:
        raise NotImplementedError


@contextmanager
def on_host(driver: Any) -> Iterator[None]:
    """Inside, rules on the CPU go through the driver, and all others tensor by tensor."""
    executors = [TritonExecutor, PerTensorExecutor]
    with (
        mock.patch.dict(drivers.DRIVERS, {"cpu": driver}),
        mock.patch.object(group, "EXECUTORS", executors),
    ):
        yield
